"""The queue of reductions under way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import syncline as sl
from syncline.collectives.compressed import Reduction
from syncline.collectives.compressed.requests import AllGatherRequest
from syncline.reduction import Communicator
from syncline.reduction.queue import CompressedReduction, PlainReduction, ReductionQueue


class Recorded:
    """A reduction of some steps, which records when it takes them."""

    def __init__(self, name: str, steps: int, log: list[str]) -> None:
        self.done = False
        self._name, self._steps, self._log = name, steps, log

    def launch(self, in_comm_task: bool = False) -> None:
        self._log.append(f"{self._name} launch{' in task' * in_comm_task}")

    def advance(self, in_comm_task: bool = False) -> None:
        self._steps -= 1
        self.done = self._steps == 0
        self._log.append(f"{self._name} advance{' in task' * in_comm_task}")

    def settle(self) -> None:
        self._log.append(f"{self._name} settle")


class InlineGroup:
    """Runs calls of the comm task at once, and counts them."""

    def __init__(self) -> None:
        self.calls = 0

    def call(self, what: str, work: Callable[[], None], async_: bool) -> Any:
        self.calls += 1
        work()
        return SimpleNamespace(wait=lambda: None)


def queue(overlap: bool, group: InlineGroup | None = None) -> ReductionQueue:
    communicator = SimpleNamespace(group=group or InlineGroup(), overlap_encoding=overlap)
    return ReductionQueue(cast("Communicator", communicator))


def test_reductions_take_turns_until_all_are_done() -> None:
    log: list[str] = []
    pending = queue(overlap=False)
    for name, steps in (("a", 2), ("b", 1)):
        pending.add(Recorded(name, steps, log))
    pending.close()
    pending.wait()
    assert log == ["a launch", "b launch", "a advance", "b advance", "a advance"]


def test_the_comm_task_launches_before_it_finishes() -> None:
    log: list[str] = []
    pending = queue(overlap=True)
    for name in "ab":
        pending.add(Recorded(name, 1, log))
    pending.close()
    pending.wait()
    assert log == ["a launch in task", "b launch in task", "a advance in task", "b advance in task"]


def test_an_interrupted_queue_settles_every_reduction() -> None:
    log: list[str] = []
    pending = queue(overlap=False)
    for name in "ab":
        pending.add(Recorded(name, 1, log))
    pending.settle()
    assert log == ["a launch", "b launch", "a settle", "b settle"]


def test_an_empty_queue_is_done() -> None:
    group = InlineGroup()
    pending = queue(overlap=True, group=group)
    pending.close()
    pending.wait()
    assert group.calls == 0, "the comm task has nothing to do"


def test_a_plain_reduction_is_prepared_and_summed() -> None:
    def case(world: sl.World) -> float:
        row = torch.zeros(2)

        def prepare() -> None:
            row.fill_(1.0)

        reduction = PlainReduction(Communicator(world, "ring"), row, "a row", prepare)
        reduction.launch()
        reduction.advance()
        assert reduction.done
        return float(row[0])

    assert sl.simulate(case, ranks=2).results == (2.0, 2.0)


@pytest.mark.parametrize("together", [False, True])
def test_a_compressed_reduction_answers_its_requests(together: bool) -> None:
    def work(rank: int) -> Reduction[list[list[int]]]:
        request = AllGatherRequest(torch.tensor([rank], dtype=torch.uint8))
        if together:
            first, second = yield request, request
            assert torch.equal(first, second)
        else:
            first = yield request
        return first.tolist()  # type: ignore[no-any-return]

    def case(world: sl.World) -> tuple[Any, int, int]:
        communicator = Communicator(world, "auto")
        reduction = CompressedReduction(communicator, work(world.rank), "a bucket", logical_bytes=100)
        reduction.launch()
        while not reduction.done:
            reduction.advance()
        reduction.advance()  # nothing happens any more
        return reduction.result, communicator.stats.bytes_logical, communicator.stats.bytes_wire

    expected = ([[0], [1], [2]], 100, 2 if together else 1)
    assert sl.simulate(case, ranks=3).results == (expected,) * 3
