"""Ranks that do not ask for the same: every one of them is told what differs, and on which ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import syncline as sl
import syncline.compat.horovod.torch as hvd
from syncline.testing import Pool
from tests.strategies.cases import on_gloo

Call = Callable[[bool, str], object]
"""What a rank asks for: odd where it differs, under a name."""


def size(odd: bool) -> int:
    return 4 if odd else 2


MISMATCHES: dict[str, tuple[Call, str]] = {
    "allreduce, shape": (
        lambda odd, name: hvd.allreduce(torch.ones(size(odd)), name=name),
        "shape: [2] on {even}, [4] on {odd}",
    ),
    "allreduce, dimensions": (
        lambda odd, name: hvd.allreduce(torch.ones(2, 1) if odd else torch.ones(2), name=name),
        "dimensions: 1 on {even}, 2 on {odd}",
    ),
    "allreduce, dtype": (
        lambda odd, name: hvd.allreduce(torch.ones(2, dtype=torch.int32 if odd else torch.float32), name=name),
        "dtype: float32 on {even}, int32 on {odd}",
    ),
    "allreduce, op": (
        lambda odd, name: hvd.allreduce(torch.ones(2), name=name, op=hvd.Max if odd else hvd.Sum),
        "op: sum on {even}, max on {odd}",
    ),
    "allreduce_, prescale": (
        lambda odd, name: hvd.allreduce_(torch.ones(2), name=name, prescale_factor=0.5 if odd else 1.0),
        "prescale_factor: 1.0 on {even}, 0.5 on {odd}",
    ),
    "allreduce_, postscale": (
        lambda odd, name: hvd.allreduce_(torch.ones(2), name=name, postscale_factor=0.5 if odd else 1.0),
        "postscale_factor: 1.0 on {even}, 0.5 on {odd}",
    ),
    "grouped_allreduce, number": (
        lambda odd, name: hvd.grouped_allreduce([torch.ones(2)] * (3 if odd else 2), name=name),
        "number of tensors: 2 on {even}, 3 on {odd}",
    ),
    "grouped_allreduce_, shape": (
        lambda odd, name: hvd.grouped_allreduce_([torch.ones(1), torch.ones(size(odd))], name=name),
        "shape: [1], [2] on {even}, [1], [4] on {odd}",
    ),
    "allgather, shape": (
        lambda odd, name: hvd.allgather(torch.ones(2, size(odd)), name=name),
        "shape beyond the first dimension: [2] on {even}, [4] on {odd}",
    ),
    "allgather, dtype": (
        lambda odd, name: hvd.allgather(torch.ones(2, dtype=torch.bool if odd else torch.uint8), name=name),
        "dtype: uint8 on {even}, bool on {odd}",
    ),
    "allgather, dimensions": (
        lambda odd, name: hvd.allgather(torch.ones(()) if odd else torch.ones(1), name=name),
        "dimensions: 1 on {even}, 0 on {odd}",
    ),
    "grouped_allgather, number": (
        lambda odd, name: hvd.grouped_allgather([torch.ones(2)] * (1 if odd else 2), name=name),
        "number of tensors: 2 on {even}, 1 on {odd}",
    ),
    "broadcast, root": (
        lambda odd, name: hvd.broadcast(torch.ones(2), 1 if odd else 0, name=name),
        "root rank: 0 on {even}, 1 on {odd}",
    ),
    "broadcast_, shape": (
        lambda odd, name: hvd.broadcast_(torch.ones(size(odd)), 0, name=name),
        "shape: [2] on {even}, [4] on {odd}",
    ),
    "broadcast, dtype": (
        lambda odd, name: hvd.broadcast(torch.ones(2, dtype=torch.int8 if odd else torch.int16), 0, name=name),
        "dtype: int16 on {even}, int8 on {odd}",
    ),
    "alltoall, shape": (
        lambda odd, name: hvd.alltoall(torch.ones(12, size(odd)), name=name),
        "shape beyond the first dimension: [2] on {even}, [4] on {odd}",
    ),
    "alltoall, dtype": (
        lambda odd, name: hvd.alltoall(torch.ones(12, dtype=torch.float16 if odd else torch.bfloat16), name=name),
        "dtype: bfloat16 on {even}, float16 on {odd}",
    ),
    "reducescatter, shape": (
        lambda odd, name: hvd.reducescatter(torch.ones(size(odd)), name=name),
        "shape: [2] on {even}, [4] on {odd}",
    ),
    "reducescatter, op": (
        lambda odd, name: hvd.reducescatter(torch.ones(2), name=name, op=hvd.Sum if odd else hvd.Average),
        "op: average on {even}, sum on {odd}",
    ),
    "reducescatter, prescale": (
        lambda odd, name: hvd.reducescatter(torch.ones(2), name=name, prescale_factor=3.0 if odd else 1.0),
        "prescale_factor: 1.0 on {even}, 3.0 on {odd}",
    ),
    "grouped_reducescatter, number": (
        lambda odd, name: hvd.grouped_reducescatter([torch.ones(2)] * (3 if odd else 1), name=name),
        "number of tensors: 1 on {even}, 3 on {odd}",
    ),
}


def told(what: str, ranks: Sequence[int], strange: int) -> str:
    """The words of a mismatch on one rank of many."""
    even = [rank for rank in ranks if rank != strange]
    return what.format(odd=f"rank {strange}", even=f"rank{'s' * (len(even) > 1)} {', '.join(map(str, even))}")


def all_mismatches(world: sl.World) -> None:
    """Each raises everywhere, at the first time and after the name was used well; then the name works again."""
    hvd.init()
    strange = world.size - 1
    odd = world.rank == strange
    for label, (call, what) in MISMATCHES.items():
        name = label.replace(", ", ".")
        for before in ("new", "known"):
            with pytest.raises(hvd.HorovodInternalError) as caught:
                call(odd, name)
            words = str(caught.value)
            assert told(what, range(world.size), strange) in words, f"{label}, {before}: {words}"
            assert f"'{name}'" in words, words
            call(False, name)
        call(False, name)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == world.size
    hvd.shutdown()


@pytest.mark.parametrize("ranks", [2, 3])
def test_simulated(ranks: int) -> None:
    sl.simulate(all_mismatches, ranks=ranks)


@pytest.mark.xdist_group("gloo")
def test_on_real_processes(gloo: Pool) -> None:
    gloo.run(on_gloo, 3, all_mismatches)


def test_every_handle_is_told() -> None:
    """One that fails takes no other with it, though they were asked for together."""

    def case(world: sl.World) -> None:
        hvd.init()
        good = hvd.allreduce_async(torch.ones(2), name="good", op=hvd.Sum)
        bad = hvd.allreduce_async(torch.ones(2 + world.rank), name="bad")
        more = hvd.allgather_async(torch.ones(1 + world.rank), name="more")
        with pytest.raises(hvd.HorovodInternalError, match=r"'bad': .*shape: \[2\] on rank 0, \[3\] on rank 1"):
            hvd.synchronize(bad)
        assert hvd.synchronize(good).tolist() == [2.0, 2.0]
        assert hvd.synchronize(more).tolist() == [1.0] * 3
        assert hvd.synchronize(bad) is None  # its failure was told once
        hvd.shutdown()

    sl.simulate(case, ranks=2)


def test_several_that_differ_in_several_ways() -> None:
    """Every group of ranks that agrees is named."""

    def case(world: sl.World) -> str:
        hvd.init()
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1 + world.rank % 3), name="w")
        return str(caught.value)

    for words in sl.simulate(case, ranks=4).results:
        assert "shape: [1] on ranks 0, 3, [2] on rank 1, [3] on rank 2" in words


def test_ranks_of_a_set_by_their_own_names() -> None:
    """In a set, ranks are named as the user knows them."""

    def case(world: sl.World) -> str:
        hvd.init()
        apart = hvd.add_process_set([1, 3])
        if not apart.included():
            return ""
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(world.rank), name="w", process_set=apart)
        return str(caught.value)

    results = sl.simulate(case, ranks=4).results
    for rank in (1, 3):
        assert "shape: [1] on rank 1, [3] on rank 3" in results[rank]


def test_a_root_of_a_set_by_its_own_name() -> None:
    def case(world: sl.World) -> str:
        hvd.init()
        apart = hvd.add_process_set([1, 3])
        if not apart.included():
            return ""
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.broadcast(torch.ones(1), world.rank, name="w", process_set=apart)
        return str(caught.value)

    results = sl.simulate(case, ranks=4).results
    for rank in (1, 3):
        assert "root rank: 1 on rank 1, 3 on rank 3" in results[rank]


def test_who_has_not_asked_in_a_set() -> None:
    """Who waits in vain is told whom for, and so is who comes too late."""

    def case(world: sl.World) -> str:
        hvd.init()
        apart = hvd.add_process_set([1, 3])
        if not apart.included():
            return ""
        if world.rank == 3:
            world.compute(100.0)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(2), name="w", process_set=apart)
        return str(caught.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "30")  # by the simulator's clock
        patch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
        results = sl.simulate(case, ranks=4).results
    for rank in (1, 3):
        assert "'w'" in results[rank]
        assert "not submitted by rank 3" in results[rank]


@pytest.mark.parametrize("kind", ["min", "allgather", "broadcast", "alltoall", "reducescatter", "barrier"])
def test_what_cannot_be_done_without_those_who_have_joined(kind: str) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "min": lambda: hvd.allreduce(torch.ones(3), op=hvd.Min),
        "allgather": lambda: hvd.allgather(torch.ones(3)),
        "broadcast": lambda: hvd.broadcast(torch.ones(3), 1),
        "alltoall": lambda: hvd.alltoall(torch.ones(3)),
        "reducescatter": lambda: hvd.reducescatter(torch.ones(3)),
        "barrier": hvd.barrier,
    }

    def case(world: sl.World) -> str:
        hvd.init()
        words = ""
        if world.rank:
            with pytest.raises(hvd.HorovodInternalError) as caught:
                calls[kind]()
            words = str(caught.value)
        hvd.join()
        assert hvd.allreduce(torch.ones(1), name="after", op=hvd.Sum).item() == 3
        hvd.shutdown()
        return words

    for words in sl.simulate(case, ranks=3).results[1:]:
        assert "is not possible after ranks [0] have joined" in words
        assert kind in words
