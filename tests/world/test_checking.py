"""Ranks that call different collectives without `check=True`: named in their first calls, on every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import syncline as sl
from syncline.testing import Pool
from syncline.testing.collectives import world_on
from syncline.transports import Handle, Transport
from syncline.world.functional import DESCRIPTION_TAG
from syncline.world.group import FIRST_CHECKED_CALLS, MAX_CHECKED_KINDS
from tests.world.test_functional import differ

HOWS = ("shape", "same bytes", "dtype", "reduction", "algorithm", "root", "operation")


def call_differently(how: str, world: sl.World) -> Any:
    if how == "same bytes":
        return sl.allreduce(torch.zeros(2, 3) if world.rank == 1 else torch.zeros(6), op="mean")
    return differ(how, world)


class Plain(Transport):
    """A simulated transport that cannot compare calls by itself, as no real engine can; counts the comparisons."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.size, inner.runtime, inner.timeout, inner.members)
        self.inner = inner
        self.compared = 0

    def _send(self, data: torch.Tensor, to: int, tag: int, exact: bool, lossy: bool) -> Handle:
        self.compared += tag == DESCRIPTION_TAG
        return self.inner.send(data, to, tag, exact=exact, lossy=lossy)

    def _recv(self, data: torch.Tensor, source: int | None, tag: int, exact: bool) -> Handle:
        return self.inner.recv(data, source, tag, exact=exact)

    def _split(self, members: tuple[int, ...]) -> Transport | None:
        raise NotImplementedError

    def failure(self, peer: int | None, pending: str, seconds: float, cause: BaseException | None) -> Exception:
        return self.inner.failure(peer, pending, seconds, cause)


@pytest.mark.parametrize("plain", [False, True], ids=["simulator", "messages"])
@pytest.mark.parametrize("how", HOWS)
def test_a_first_call_that_differs_is_named_without_check(how: str, plain: bool) -> None:
    """The same number of bytes with another operation, dtype or shape gave wrong numbers without an error."""

    def work(world: sl.World) -> Any:
        sl.barrier()
        return call_differently(how, world_on(Plain(world.transport)) if plain else world)

    run = sl.simulate(work, 3, return_exceptions=True)
    told = [error for error in run.results if isinstance(error, sl.errors.IncompatibleError)]
    assert len(told) == 3 if plain else told, run.results  # a simulated root may be through before the others come
    for error in told:
        assert "disagree" in str(error)
        assert "rank 1" in str(error)


def test_calls_are_compared_at_first_and_when_they_are_new() -> None:
    """After that they cost nothing, whatever their number; so do shapes that never repeat."""

    def work(world: sl.World) -> tuple[int, ...]:
        transport = Plain(world.transport)
        world_on(transport)
        counts = []
        for calls in ([4] * FIRST_CHECKED_CALLS, [4] * 100, [5] * 100, range(6, 6 + 2 * MAX_CHECKED_KINDS)):
            before = transport.compared
            for length in calls:
                sl.allreduce(torch.ones(length), op="mean", algorithm="ring")
            counts.append(transport.compared - before)
        return tuple(counts)

    assert sl.simulate(work, 2).results[1] == (FIRST_CHECKED_CALLS, 0, 1, MAX_CHECKED_KINDS - 2)


def test_the_simulator_compares_every_call() -> None:
    def work(world: sl.World) -> None:
        for step in range(200):
            sl.allreduce(torch.ones(2), op="max" if step == 150 and world.rank == 1 else "sum")

    with pytest.raises(sl.errors.IncompatibleError, match=r"#151: rank 0: .*sum.*; rank 1: .*max"):
        sl.simulate(work, 2)


def surprise(channel: Transport) -> str:
    """After many calls that were the same, rank 1 calls one that it has never called, and rank 0 one that it knows."""
    own = channel.split(range(channel.size))
    assert own is not None
    world = world_on(own)
    for _ in range(FIRST_CHECKED_CALLS + 5):
        sl.allreduce(torch.ones(2000), op="sum")
    try:
        sl.allreduce(torch.ones(2000 if world.rank == 0 else 30), op="sum")
    except sl.errors.IncompatibleError as error:
        return str(error)
    finally:
        own.close()
    return "nothing"


@pytest.mark.xdist_group("gloo")
def test_gloo_names_a_difference_instead_of_aborting(gloo: Pool) -> None:
    """gloo itself aborts the process that gets a longer message than it waits for."""
    for text in gloo.run(surprise, 2):
        assert "the ranks are in different operations" in text
        assert "float32[2000]" in text
        assert "float32[30]" in text
        assert "check=True" in text


def differ_on_an_engine(channel: Transport) -> list[str]:
    own = channel.split(range(channel.size))
    assert own is not None
    told = []
    for how in HOWS:
        world = world_on(own)
        try:
            call_differently(how, world)
        except sl.errors.IncompatibleError as error:
            told.append(str(error))
    own.close()
    return told


@pytest.mark.xdist_group("gloo")
def test_gloo_names_every_difference_of_a_first_call(gloo: Pool) -> None:
    for told in gloo.run(differ_on_an_engine, 3):
        assert len(told) == len(HOWS)
        assert all("ranks 0, 2: #1 " in text and "rank 1: #1 " in text for text in told)


@pytest.mark.xdist_group("zeromq")
def test_zeromq_names_a_difference_soon(zeromq: Pool) -> None:
    for text in zeromq.run(surprise, 2):
        assert "the ranks are in different operations" in text or "disagree" in text
        assert "float32[30]" in text
