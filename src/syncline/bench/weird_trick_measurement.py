"""Measures what the predicted time of one weird trick needs beside the bytes on the network.

The workers train some steps with the divided head, in which each message has a few bytes instead of the activities.
They note when the messages of an exchange are started, and when it is waited for. The seconds between are those of the
layers on a worker's units, of copies, of autograd, of Python and of other processes on the same cores::

    forward    │ 0 │ start │ 1 │ start │ 2 │ wait │ 3 │ …      backward likewise
                 convolutions            sums, dense layer

All workers wait for the slowest one, so its seconds count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from syncline.bench.measuring import over_ranks
from syncline.collectives.channel import barrier
from syncline.parallel.divided_head import HeadDivision
from syncline.parallel.division import take_share
from syncline.parallel.team import LayerTeam, PendingSwap
from syncline.world import Group

__all__ = ["HeadSeconds", "measure_head"]

WARM_UP_STEPS, STEPS = 5, 31
WARM_UP_SWAPS, SWAPS = 5, 41


@dataclass(frozen=True)
class HeadSeconds:
    """What a step of a divided model takes beside the bytes on the network, in seconds of the slowest worker."""

    forward_s: tuple[float, ...]
    """Until the messages of each exchange are started and until each wait, from what was before; after the last."""
    backward_s: tuple[float, ...]
    """As for forward. The last one is that of the layers before the head."""
    delivery_s: float
    """From the start of an exchange of a few bytes until its wait ends."""

    def is_complete(self, entries: int) -> bool:
        """Whether backward has the exchanges of forward, which counts examples `entries` times in addition.

        It has fewer if the input of the head needs no gradient.
        """
        return len(self.forward_s) - len(self.backward_s) == 2 * entries


def measure_head(
    model: nn.Module,
    divisions: Sequence[HeadDivision],
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Any, Any], Tensor],
    group: Group,
) -> HeadSeconds:
    """Measure. All workers of the group call it, with batches of one size. The model stays divided."""
    team = _TinyMessagesTeam(group)
    for division in divisions:
        take_share(division.module, division.share(team.rank, team.size))
        division.attach(team)
    x, y = batch
    forward, backward = [], []
    for _ in range(WARM_UP_STEPS + STEPS):
        barrier(group.channel)
        team.begin()
        loss = loss_fn(model(x), y)
        forward.append(team.seconds())
        team.begin()
        torch.autograd.backward(loss)
        backward.append(team.seconds())
        model.zero_grad()
    forward_s, backward_s = (_typical(group, steps[WARM_UP_STEPS:]) for steps in (forward, backward))
    return HeadSeconds(forward_s, backward_s, _measure_delivery(group))


def _typical(group: Group, steps: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The median over the steps of each part, in which the slowest worker counts."""
    slowest = over_ranks(group.channel, steps, "max")
    return tuple(statistics.median(part) for part in zip(*slowest, strict=True))


def _measure_delivery(group: Group) -> float:
    """Seconds until messages of a few bytes between all workers have arrived."""
    team, now = LayerTeam(group), group.world.runtime.now
    others = [(team.rank + distance) % team.size for distance in range(1, team.size)]
    message = torch.zeros(1, dtype=torch.int64)
    buffers = [(rank, torch.zeros(1, dtype=torch.int64)) for rank in reversed(others)]
    seconds = []
    for _ in range(WARM_UP_SWAPS + SWAPS):
        pending = team.start_swap([(rank, message) for rank in others], buffers)
        start = now()
        pending.wait()
        seconds.append(now() - start)
    found: float = over_ranks(group.channel, [statistics.median(seconds[WARM_UP_SWAPS:])], "max")[0]
    return found


class _TinyMessagesTeam(LayerTeam):
    """A team whose exchanges send one number to each worker, and receive zeros."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._times: list[tuple[float, float]] = []
        """For each part of a pass, when it has ended, and when the next one begins."""

    def begin(self) -> None:
        """A pass of the model begins now."""
        self._times.clear()
        self.end_part(self.now())

    def seconds(self) -> list[float]:
        """The seconds of each part since `begin`."""
        self.end_part(self.now())
        return [end - begin for (_, begin), (end, _) in pairwise(self._times)]

    def end_part(self, end: float) -> None:
        """A part has ended at `end`, and the next one begins now."""
        self._times.append((end, self.now()))

    def now(self) -> float:
        """The time of the world."""
        return self.group.world.runtime.now()

    def start_swap(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int = 0
    ) -> PendingSwap:
        """Copy what the messages need, and send one number each."""
        for _, tensor in sends:
            tensor.contiguous()
        for _, buffer in receives:
            buffer.zero_()  # computing with any bits may be slower
        pending = super().start_swap(_one_number(sends), _one_number(receives), tag)
        self.end_part(self.now())
        return _TimedSwap(self, pending)


def _one_number(messages: Sequence[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Messages of one number; those that have one anyway stay as they are."""
    return [(rank, tensor if tensor.numel() == 1 else tensor.new_zeros(1)) for rank, tensor in messages]


class _TimedSwap(PendingSwap):
    """A swap whose wait ends a part of a pass."""

    def __init__(self, team: _TinyMessagesTeam, pending: PendingSwap) -> None:
        super().__init__(team, [], [])
        self._timed, self._pending = team, pending

    def wait(self) -> None:
        start = self._timed.now()
        self._pending.wait()
        self._timed.end_part(start)
