"""Operations are matched by name, whatever the order and the thread; what goes wrong is told on every rank."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import syncline as sl
import syncline.compat.horovod.torch as hvd
from syncline import faults
from syncline.testing import Pool
from tests.compat.horovod.storms import check_storm, storm
from tests.hunting import hunted, seeds
from tests.strategies.cases import on_gloo


@pytest.mark.hunt
def test_storms_in_any_order_on_the_simulator() -> None:
    hunted(check_storm, seeds(4, 500))


def two_storms(world: sl.World, seed: int) -> int:
    return storm(world, seed, count=200, rounds=2)


@pytest.mark.xdist_group("gloo")
def test_a_storm_on_real_processes(gloo: Pool) -> None:
    assert gloo.run(on_gloo, 4, two_storms, 1) == [400] * 4


@pytest.mark.xdist_group("zeromq")
def test_a_storm_on_zeromq(zeromq: Pool) -> None:
    assert zeromq.run(on_gloo, 3, two_storms, 3) == [400] * 3


def test_a_rank_that_never_submits_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """First in a warning, then in the error of those who wait; and told to the late one when it comes."""
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "2")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "10")
    told: dict[int, str] = {}

    def fn(world: sl.World) -> float:
        hvd.init()
        x = torch.ones(2)
        hvd.allreduce(x, name="fine")
        if world.rank != 2:
            with pytest.raises(hvd.HorovodInternalError) as caught:
                hvd.allreduce(x, name="lost")
            told[world.rank] = str(caught.value)
            hvd.allreduce(x, name="after")
        else:
            hvd.allreduce(x, name="after")
            with pytest.raises(hvd.HorovodInternalError) as caught:
                hvd.allreduce(x, name="lost")
            told[2] = str(caught.value)
        return hvd.allreduce(x, name="fine", op=hvd.Sum)[0].item()

    with caplog.at_level(logging.WARNING, logger="syncline"):
        assert sl.simulate(fn, ranks=3).results == (3.0, 3.0, 3.0)
    assert "allreduce.lost (rank 2 missing)" in caplog.text
    for text in told.values():
        assert "'lost'" in text
        assert "not submitted by rank 2" in text


def test_a_name_in_flight_is_refused_and_free_again_afterwards() -> None:
    def fn(world: sl.World) -> str:
        hvd.init()
        first = hvd.allreduce_async(torch.ones(1), name="x")
        with pytest.raises(ValueError, match="Duplicate") as caught:
            hvd.allreduce_async(torch.ones(1), name="x")
        hvd.synchronize(first)
        hvd.allreduce(torch.ones(1), name="x")
        hvd.broadcast(torch.ones(1), 0, name="x")  # a name belongs to one kind of operation
        return str(caught.value)

    assert all("Duplicate tensor name x" in text for text in sl.simulate(fn, ranks=2).results)


def test_unnamed_operations_are_matched_in_order() -> None:
    def fn(world: sl.World) -> list[float]:
        hvd.init()
        handles = [hvd.allreduce_async(torch.tensor([10.0 * i + world.rank]), op=hvd.Sum) for i in range(5)]
        return [hvd.synchronize(handle).item() for handle in reversed(handles)]

    assert sl.simulate(fn, ranks=2).results == ([81.0, 61.0, 41.0, 21.0, 1.0],) * 2


def test_after_a_mismatch_the_others_go_on() -> None:
    def fn(world: sl.World) -> float:
        hvd.init()
        good = hvd.allreduce_async(torch.ones(1), name="good", op=hvd.Sum)
        with pytest.raises(hvd.HorovodInternalError, match=r"\[1\] on rank 0, \[2\] on rank 1"):
            hvd.allreduce(torch.ones(world.rank + 1), name="bad")
        hvd.allreduce(torch.ones(3), name="bad")
        return hvd.synchronize(good).item()  # type: ignore[no-any-return]

    assert sl.simulate(fn, ranks=2).results == (2.0, 2.0)


def test_many_small_sums_travel_as_one() -> None:
    """After the first time forty sums take a message to the coordinator, one back, and one reduction."""

    def fn(world: sl.World, rounds: int) -> None:
        hvd.init()
        for _ in range(rounds):
            handles = [hvd.allreduce_async_(torch.ones(3), name=f"t{i}") for i in range(40)]
            for handle in handles:
                hvd.synchronize(handle)

    def messages(rounds: int) -> int:
        return len(sl.simulate(lambda world: fn(world, rounds), ranks=2).messages)

    assert messages(8) - messages(7) <= 6


def test_without_fusion_each_is_reduced_alone_to_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(world: sl.World) -> list[float]:
        hvd.init()
        handles = [hvd.allreduce_async(torch.tensor([i / 3 + world.rank]), name=f"t{i}") for i in range(7)]
        return [hvd.synchronize(handle).item() for handle in handles]

    fused = sl.simulate(fn, ranks=3).results
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "0")
    for found, wanted in zip(sl.simulate(fn, ranks=3).results, fused, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_who_is_lost_is_named_and_nobody_hangs() -> None:
    def fn(world: sl.World) -> str:
        hvd.init()
        hvd.allreduce(torch.ones(1), name="fine")
        if world.rank == 1:
            world.runtime.sleep(100.0)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="never")
        return str(caught.value)

    found = sl.simulate(fn, ranks=3, faults=[faults.Kill(1, at=50.0)], timeout=60.0, return_exceptions=True)
    for rank in (0, 2):
        assert isinstance(found.results[rank], str), found.results[rank]
        assert "rank 1" in found.results[rank]


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_shutdown_ends_what_waits_for_that_rank(leaver: int) -> None:
    """The coordinator's too."""
    told = f"Horovod has been shut down on rank {leaver}"

    def fn(world: sl.World) -> str:
        hvd.init()
        hvd.allreduce(torch.ones(1), name="fine")
        if world.rank == leaver:
            hvd.shutdown()
            return told
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="never")
        return str(caught.value)

    assert all(told in text for text in sl.simulate(fn, ranks=3).results)


def test_it_can_be_initialized_again() -> None:
    def fn(world: sl.World) -> list[float]:
        found = []
        for _ in range(3):
            assert not hvd.is_initialized()
            hvd.init()
            hvd.init()
            found.append(hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item())
            hvd.shutdown()
            hvd.shutdown()
        return found

    assert sl.simulate(fn, ranks=2).results == ([2.0] * 3,) * 2


def again(world: sl.World) -> list[Any]:
    """Twice on real processes, with farewells in between."""
    found = []
    for turn in range(2):
        hvd.init()
        found.append(hvd.allreduce(torch.full((2,), float(world.rank)), name="x", op=hvd.Sum).tolist())
        last = hvd.add_process_set([0, world.size - 1])
        if last.included():
            found.append(hvd.allgather(torch.tensor([turn]), process_set=last).tolist())
        hvd.remove_process_set(last)
        hvd.shutdown()
    return found


@pytest.mark.xdist_group("gloo")
def test_init_and_shutdown_twice_on_real_processes(gloo: Pool) -> None:
    first, middle, _ = gloo.run(on_gloo, 3, again)
    assert middle == [[3.0, 3.0]] * 2
    assert first == [[3.0, 3.0], [0, 0], [3.0, 3.0], [1, 1]]


def test_mixed_dtypes_and_devices_of_names_keep_apart() -> None:
    def fn(world: sl.World) -> list[str]:
        hvd.init()
        kinds = (torch.float32, torch.float64, torch.int64, torch.bfloat16)
        handles = [hvd.allreduce_async(torch.ones(2, dtype=kind), name=str(kind), op=hvd.Sum) for kind in kinds]
        return [str(hvd.synchronize(handle).dtype) for handle in handles]

    wanted = ["torch.float32", "torch.float64", "torch.int64", "torch.bfloat16"]
    assert sl.simulate(fn, ranks=2).results == (wanted, wanted)


def test_unnamed_operations_meet_again_after_a_join() -> None:
    def fn(world: sl.World) -> float:
        hvd.init()
        for _ in range(world.rank + 1):
            hvd.allreduce(torch.ones(1))
        hvd.join()
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert sl.simulate(fn, ranks=3).results == (3.0, 3.0, 3.0)
