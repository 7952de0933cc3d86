"""One zero for the clocks of all ranks, so that their traces can be laid above each other."""

from __future__ import annotations

import torch

from syncline.world import World, broadcast, recv, send

__all__ = ["shared_zero"]

ROUNDS = 5
"""Questions of each rank; the one that was answered soonest counts."""


def shared_zero(world: World) -> tuple[float, float]:
    """The reading of this rank's clock that is rank 0's zero, and how many seconds it may be off.

    Each rank in turn asks rank 0 for the time. The answer was given between asking and hearing it, so half the round
    trip is the most it can be off. Every rank calls it.

    >>> import syncline as sl
    >>> zeros = sl.simulate(lambda world: shared_zero(world)[0], ranks=3).results
    >>> max(zeros) - min(zeros) < 1e-3
    True
    """
    offset, error = 0.0, 0.0
    for rank in range(1, world.size):
        if world.rank == 0:
            _answer(world, rank)
        elif world.rank == rank:
            offset, error = _ask(world)
    zero = broadcast(torch.tensor([world.runtime.now()], dtype=torch.float64), group=world.everyone)
    return float(zero[0]) - offset, error


def _ask(world: World) -> tuple[float, float]:
    best, offset = float("inf"), 0.0
    word = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        asked = world.runtime.now()
        send(word, to=0, group=world.everyone)
        recv(word, source=0, group=world.everyone)
        heard = world.runtime.now()
        if heard - asked < best:
            best, offset = heard - asked, float(word[0]) - (asked + heard) / 2
    return offset, best / 2


def _answer(world: World, rank: int) -> None:
    word = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        recv(word, source=rank, group=world.everyone)
        word[0] = world.runtime.now()
        send(word, to=rank, group=world.everyone)
