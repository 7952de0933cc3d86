"""Compares the ranks' next collective before it runs: the first ones of each kind, or all with `check=True`.

rank 0    ◄── description ── rank 1, rank 2, …        under tags of their own: a rank that does not compare, and
          ── verdict ──────► rank 1, rank 2, …        enters its collective, cannot receive them by mistake
"""

from __future__ import annotations

import torch

from syncline.errors import IncompatibleError, PeerLostError
from syncline.transports import Transport
from syncline.transports.base import COMPARISON_TAGS, group_ranks_by_text
from syncline.world.group import Group

__all__ = ["agree"]

WIDTH = 256
"""Size of a description in bytes."""
DESCRIPTION, VERDICT = COMPARISON_TAGS, COMPARISON_TAGS + 1


def agree(group: Group, description: str) -> None:
    """Raise on every rank alike when one of them describes its call differently."""
    number = group.next_call()
    if group.size == 1:
        return
    if not group.world.check and (
        group.transport.monitor.compare_call(number, description) or not group.is_new(description)
    ):
        return
    told = f"#{number} {description}"
    group.transport.monitor.enter(f"the comparison of {told}")
    try:
        differ = _lead(group, told) if group.rank == 0 else _follow(group.transport, told)
    except PeerLostError as error:
        words = f"{error}; it was to compare {told}"
        raise PeerLostError(words, peer=error.peer, pending=told, seconds=error.seconds) from error
    if differ:
        raise IncompatibleError(f"the ranks disagree about their next collective: {differ}")


def _lead(group: Group, told: str) -> str:
    """Receive the other ranks' descriptions, and send them the difference."""
    transport = group.transport
    table = torch.zeros(transport.size, WIDTH, dtype=torch.uint8)
    table[0] = _row(told)
    handles = [transport.recv(table[rank], rank, DESCRIPTION, exact=True) for rank in range(1, transport.size)]
    for handle in handles:
        handle.wait()
    calls = {rank: _text(row) for rank, row in zip(group.ranks, table, strict=True)}
    differ = group_ranks_by_text(calls) if len(set(calls.values())) > 1 else ""
    words = torch.frombuffer(bytearray(differ.encode()), dtype=torch.uint8) if differ else None
    length = torch.tensor([0 if words is None else words.numel()])
    for buffer in (length,) if words is None else (length, words):
        sent = [transport.send(buffer, rank, VERDICT, exact=True) for rank in range(1, transport.size)]
        for handle in sent:
            handle.wait()
    return differ


def _follow(transport: Transport, told: str) -> str:
    """Send this rank's description, and receive the difference."""
    length = torch.zeros(1, dtype=torch.int64)
    heard = transport.recv(length, 0, VERDICT, exact=True)
    transport.send(_row(told), 0, DESCRIPTION, exact=True).wait()
    heard.wait()
    if not length.item():
        return ""
    words = torch.empty(int(length), dtype=torch.uint8)
    transport.recv(words, 0, VERDICT, exact=True).wait()
    return bytes(words.tolist()).decode(errors="replace")


def _row(told: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(told.encode()[:WIDTH].ljust(WIDTH, b"\0")), dtype=torch.uint8)


def _text(row: torch.Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
