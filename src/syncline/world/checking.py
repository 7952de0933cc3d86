"""`check=True`: before a collective, compare what every rank is about to do."""

from __future__ import annotations

import torch

from syncline.collectives import NATIVE
from syncline.collectives.run import exchange
from syncline.errors import IncompatibleError
from syncline.world.team import Team

__all__ = ["agree"]

WIDTH = 256


def agree(team: Team, description: str) -> None:
    """Raise on every rank alike when one of them describes its call differently."""
    number = team.next_call()
    if not team.world.check or team.size == 1:
        return
    channel = team.channel
    table = torch.zeros(channel.size, WIDTH, dtype=torch.uint8)
    mine = f"#{number} {description}".encode()[:WIDTH].ljust(WIDTH, b"\0")
    table[channel.rank] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    native = channel.transport.native
    if native is not None:
        native.allgather(table, table[channel.rank].clone()).wait()
    else:
        exchange(channel, "allgather", dict(enumerate(table)), NATIVE)
    if bool((table == table[0]).all()):
        return
    calls: dict[str, list[int]] = {}
    for rank, row in zip(team.ranks, table, strict=True):
        calls.setdefault(bytes(row.tolist()).rstrip(b"\0").decode(errors="replace"), []).append(rank)
    told = "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {call}" for call, who in calls.items())
    raise IncompatibleError(f"the ranks disagree about their next collective: {told}")
