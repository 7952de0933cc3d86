"""Many named operations at once: drawn by a seed, submitted in another order on every rank, by several tasks."""

from __future__ import annotations

import os
import random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import syncline as sl
import syncline.compat.horovod.torch as hvd
from syncline import faults

THREADS = 3
KINDS = ("sum", "average", "max", "grouped", "allgather", "broadcast", "alltoall", "reducescatter")


def own(rank: int, number: int, rows: int) -> Tensor:
    """What a rank brings to an operation."""
    return torch.arange(rows * 2, dtype=torch.float64).view(rows, 2) + 100.0 * rank + number


def submit(kind: str, number: int, rank: int, size: int, name: str) -> int:
    """Ask for one operation; its handle."""
    rows = number % 5 + 1
    x = own(rank, number, rows)
    if kind == "sum":
        return hvd.allreduce_async(x, name=name, op=hvd.Sum)
    if kind == "average":
        return hvd.allreduce_async_(x, name=name)
    if kind == "max":
        return hvd.allreduce_async(x.long(), name=name, op=hvd.Max)
    if kind == "grouped":
        return hvd.grouped_allreduce_async([x, x + 1], name=name, op=hvd.Sum)
    if kind == "allgather":
        return hvd.allgather_async(own(rank, number, rows + rank), name=name)
    if kind == "broadcast":
        return hvd.broadcast_async(x, root_rank=number % size, name=name)
    if kind == "alltoall":
        return hvd.alltoall_async(own(rank, number, size), name=name)
    return hvd.reducescatter_async(own(rank, number, rows + size), name=name, op=hvd.Sum)


def expected(kind: str, number: int, rank: int, size: int) -> Any:
    """What comes of it on a rank, worked out without any exchange."""
    rows = number % 5 + 1
    everybody = torch.stack([own(other, number, rows) for other in range(size)])
    if kind == "sum":
        return everybody.sum(0)
    if kind == "average":
        return everybody.sum(0) * (1 / size)
    if kind == "max":
        return everybody.long().amax(0)
    if kind == "grouped":
        return everybody.sum(0), (everybody + 1).sum(0)
    if kind == "allgather":
        return torch.cat([own(other, number, rows + other) for other in range(size)])
    if kind == "broadcast":
        return everybody[number % size]
    if kind == "alltoall":
        return torch.stack([own(other, number, size)[rank] for other in range(size)])
    whole = torch.stack([own(other, number, rows + size) for other in range(size)]).sum(0)
    share, extra = divmod(len(whole), size)
    start = rank * share + min(rank, extra)
    return whole[start : start + share + (rank < extra)]


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.allclose(found, wanted)


def storm(world: sl.World, seed: int, count: int, rounds: int, missing: tuple[int, int] | None = None) -> int:
    """Submit `count` operations from three tasks in this rank's own order, `rounds` times; how many were right.

    `missing` is a rank and the number of an operation that it never submits in the last round: the others are told so.
    """
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    kinds = random.Random(seed).choices(KINDS, k=count)
    right = [0] * THREADS
    lazy, lost = missing or (-1, -1)

    def work(thread: int, mine: list[int], order: random.Random, last: bool) -> None:
        handles = {}
        for number in mine:
            if last and (rank, number) == missing:
                continue
            handles[number] = submit(kinds[number], number, rank, size, f"op{number}")
            if order.random() < 0.1:
                world.runtime.sleep(order.random() * 1e-3)
        order.shuffle(mine)
        for number in mine:
            if last and number == lost:
                right[thread] += rank == lazy or _told_of(handles[number], lazy, f"op{number}")
                continue
            found = hvd.synchronize(handles[number])
            if kinds[number] == "alltoall":
                found = found[0]  # beside it is what came from each rank
            assert same(found, expected(kinds[number], number, rank, size)), (kinds[number], number, rank, found)
            right[thread] += 1

    own_order = random.Random(seed * 1000 + rank)
    for turn in range(rounds):
        numbers = list(range(count))
        own_order.shuffle(numbers)
        tasks = [
            world.runtime.spawn(
                work, thread, numbers[thread::THREADS], random.Random(own_order.random()), turn == rounds - 1
            )
            for thread in range(THREADS)
        ]
        for task in tasks:
            assert task.join(5000), "a thread has not ended"
    world.barrier()  # who leaves earlier is named for that
    hvd.shutdown()
    return sum(right)


def _told_of(handle: int, lazy: int, name: str) -> bool:
    """Whether waiting for an operation ends in an error that names it and the rank that never submitted it."""
    try:
        hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        return f"not submitted by rank {lazy}" in str(error) and f"'{name}'" in str(error)
    return False


def check_storm(seed: int, count: int = 200, rounds: int = 2) -> None:
    """A storm on four simulated ranks, with delays and slow ranks, in whatever order; in every third one is missing."""
    draw = random.Random(seed)
    missing = (draw.randrange(4), draw.randrange(count)) if seed % 3 == 0 else None
    drawn: list[faults.Fault] = [faults.Delay(draw.random() * 0.01)] if draw.random() < 0.5 else []
    drawn += [faults.Slow(draw.randrange(4), draw.uniform(2, 20))] if draw.random() < 0.5 else []

    def fn(world: sl.World) -> int:
        return storm(world, seed, count, rounds, missing)

    with mock.patch.dict(os.environ, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="100"):
        found = sl.simulate(fn, ranks=4, seed=seed, chaos=True, faults=drawn, timeout=5000.0)
    assert found.results == (count * rounds,) * 4
