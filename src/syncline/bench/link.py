"""Whether a large message really gets the lab's rate: an echo among the ranks, before they measure anything else."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from syncline.launch.lab import parse_lab
from syncline.launch.link_rate import FRAME_BYTES, FRAME_PAYLOAD_BYTES, parse_rate
from syncline.transports.base import LANE_TAGS
from syncline.world import World

__all__ = ["check_link", "told_link"]

PUSH, KILL_TIMEOUT_S = LANE_TAGS + 1, LANE_TAGS + 2
SAMPLES = 3
SECONDS = 0.3
"""What a sample takes at the lab's rate: many times what the links' buckets give away at once."""
OPEN_BYTES = 16 << 20
MOST_BYTES = 40 << 20
OFF = 0.1
"""HostPrograms of the rate from which on the table warns."""


def check_link(world: World, lab: str) -> dict[str, Any] | None:
    """Bits a second from rank 0 to the first rank on another host, packet headers counted in.

    Every rank calls it; rank 0 is told. None where all share one host.
    """
    other = next((rank for rank, host in enumerate(world.hosts) if host != world.hosts[0]), None)
    if other is None or not lab:
        return None
    shape = parse_rate(parse_lab(lab)[1])
    nbytes = OPEN_BYTES if shape is None else min(MOST_BYTES, int(SECONDS * shape.rate / 8))
    message, answer = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    now, transport = world.runtime.now, world.transport
    seen = []
    for _ in range(1 + SAMPLES):
        world.barrier()
        start = now()
        if world.rank == 0:
            back = transport.recv(answer, other, KILL_TIMEOUT_S)
            transport.send(message, other, PUSH).wait()
            back.wait()
        elif world.rank == other:
            transport.recv(message, 0, PUSH).wait()
            transport.send(answer, 0, KILL_TIMEOUT_S).wait()
        seen.append(now() - start)
    if world.rank:
        return None
    seconds = statistics.median(seen[1:])  # the first one opens the connection
    return {
        "bytes": nbytes,
        "to_rank": other,
        "bits_a_second": 8 * nbytes * FRAME_BYTES / FRAME_PAYLOAD_BYTES / seconds,
        "rate": None if shape is None else shape.rate,
    }


def told_link(link: dict[str, Any] | None) -> str:
    """The echo as a line; nothing where there was none.

    >>> told_link({"bytes": 3_750_000, "to_rank": 1, "bits_a_second": 98.4e6, "rate": 100e6})
    'echo: 3.8 MB from rank 0 to rank 1 at 98.4 Mbit/s, packet headers included: 0.98 of the rate'
    """
    if link is None:
        return ""
    line = (
        f"echo: {link['bytes'] / 1e6:.1f} MB from rank 0 to rank {link['to_rank']} at "
        f"{link['bits_a_second'] / 1e6:.1f} Mbit/s, packet headers included"
    )
    if link["rate"] is None:
        return f"{line}; the links have no limit"
    share = link["bits_a_second"] / link["rate"]
    doubt = "" if abs(share - 1) <= OFF else " (more than a tenth off: do not trust what follows)"
    return f"{line}: {share:.2f} of the rate{doubt}"
