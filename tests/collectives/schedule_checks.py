"""Checks of collectives with every schedule on a real or simulated transport."""

from __future__ import annotations

import torch

from syncline.collectives import BufferPool, Channel, build, names
from syncline.collectives.channel import allreduce, broadcast, move_pieces, reduce, reduce_scatter
from syncline.collectives.executor import chunk_edges
from syncline.transports import Op, Transport


def sizes_for(ranks: int, large: int = 5003) -> list[int]:
    """Numbers of elements at which a schedule may fail: 0, 1, near the number of ranks, primes, large."""
    return sorted({0, 1, max(0, ranks - 1), ranks, ranks + 1, 13, 101, large})


def values_of(rank: int, numel: int) -> torch.Tensor:
    """Integers as floats, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randint(-50, 50, (numel,), generator=generator).to(torch.float32)


def reduce_by_every_schedule(transport: Transport, hosts: tuple[int, ...] = (), large: int = 5003) -> int:
    """Check allreduce, reduce and reduce-scatter with every schedule; return the number of checks."""
    channel = Channel(transport, hosts, BufferPool(transport.runtime))
    size, checked = transport.size, 0
    for numel in sizes_for(size, large):
        everyone = torch.stack([values_of(rank, numel) for rank in range(size)])
        for op, wanted in _reductions(everyone).items():
            for name in names("allreduce"):
                mine = values_of(transport.rank, numel)
                allreduce(channel, mine, op, build("allreduce", name), lanes=1 + numel % 3)
                assert torch.equal(mine, wanted), f"allreduce by {name}: {op} of {numel} among {size}"
                checked += 1
        for name in names("reduce"):
            mine = values_of(transport.rank, numel)
            reduce(channel, mine, "sum", size - 1, build("reduce", name))
            if transport.rank == size - 1:
                assert torch.equal(mine, everyone.sum(0)), f"reduce by {name}: {numel} among {size}"
            checked += 1
        for name in names("reduce_scatter"):
            mine, edges = values_of(transport.rank, numel), chunk_edges(numel, size)
            reduce_scatter(channel, mine, edges, "sum", build("reduce_scatter", name))
            part = slice(edges[transport.rank], edges[transport.rank + 1])
            assert torch.equal(mine[part], everyone.sum(0)[part]), f"reduce_scatter by {name}: {numel} among {size}"
            checked += 1
    return checked


def move_by_every_schedule(transport: Transport) -> int:
    """Check broadcast, allgather, gather, scatter and all-to-all with every schedule; return the number of checks."""
    channel = Channel(transport, (), BufferPool(transport.runtime))
    rank, size, checked = transport.rank, transport.size, 0
    root = size // 2
    for numel in sizes_for(size):
        for name in names("broadcast"):
            mine = values_of(rank, numel)
            broadcast(channel, mine, root, build("broadcast", name))
            assert torch.equal(mine, values_of(root, numel)), f"broadcast by {name}: {numel} among {size}"
            checked += 1
        for operation in ("allgather", "gather", "scatter"):
            for name in names(operation):
                _move_one_each(channel, operation, name, root, numel)
                checked += 1
        for name in names("alltoall"):
            parts = {rank * size + to: values_of(rank * size + to, numel + to) for to in range(size) if to != rank}
            parts |= {source * size + rank: torch.zeros(numel + rank) for source in range(size) if source != rank}
            move_pieces(channel, "alltoall", parts, name)
            for source in range(size):
                if source != rank:
                    wanted = values_of(source * size + rank, numel + rank)
                    assert torch.equal(parts[source * size + rank], wanted), f"alltoall by {name} among {size}"
            checked += 1
    return checked


def _move_one_each(channel: Channel, operation: str, name: str, root: int, numel: int) -> None:
    """Check one collective with chunks of different sizes: chunk i has numel + i elements."""
    rank, size = channel.rank, channel.size
    right = {chunk: values_of(chunk, numel + chunk) for chunk in range(size)}
    blank = {chunk: torch.zeros(numel + chunk) for chunk in range(size)}
    if operation == "scatter":
        parts = dict(right) if rank == root else {rank: blank[rank]}
        move_pieces(channel, "scatter", parts, name, root)
        wanted = [rank]
    else:
        parts = {**blank, rank: right[rank]}
        move_pieces(channel, "allgather" if operation == "allgather" else "gather", parts, name, root)
        wanted = list(range(size)) if operation == "allgather" or rank == root else [rank]
    for chunk in wanted:
        assert torch.equal(parts[chunk], right[chunk]), f"{operation} by {name}: chunk {chunk} among {size}"


def _reductions(everyone: torch.Tensor) -> dict[Op, torch.Tensor]:
    return {"sum": everyone.sum(0), "max": everyone.amax(0), "min": everyone.amin(0)}
