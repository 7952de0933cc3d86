"""The functions of Cray's plugin: on NumPy arrays, tensors and other values, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import syncline as sl
import syncline.compat.ml_comm as mc
from syncline.errors import IncompatibleError, PeerLostError, SpecError, UnsupportedError, WorldError


class GraphTensor:
    """A tensor of a TensorFlow graph: it has no values."""


class EagerTensor:
    """An eager tensor of TensorFlow 2."""

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)

    def numpy(self) -> Any:
        return self._values


for fake in (GraphTensor, EagerTensor):
    fake.__module__ = "tensorflow.python.framework.ops"


def on_ranks(case: Callable[[sl.World], Any], ranks: int = 2, **options: Any) -> tuple[Any, ...]:
    return sl.simulate(case, ranks=ranks, **options).results


def test_broadcast_fills_arrays_and_returns_them() -> None:
    def case(world: sl.World) -> None:
        rank = float(mc.get_rank())
        array, strided = np.full((2, 3), rank, dtype=np.float32), np.full((4, 4), rank)[::-2, 1::2]
        tensor, half = torch.full((3,), rank), torch.full((2,), rank, dtype=torch.bfloat16)
        read_only = np.full(2, rank)
        read_only.flags.writeable = False
        model = torch.nn.Linear(2, 1)
        views = [parameter.data.numpy() for parameter in model.parameters()]
        values = [array, strided, None, tensor, half, read_only, np.float32(rank), rank, EagerTensor([rank]), *views]
        found = mc.broadcast(values, 1)
        assert found[0] is array
        assert found[1] is strided
        assert found[2] is None
        assert found[3] is tensor
        assert (array == 1).all()
        assert (strided == 1).all()
        assert tensor.tolist() == [1, 1, 1]
        assert half.tolist() == [1, 1]
        assert read_only.tolist() == [rank, rank]  # it cannot be changed
        assert found[5].tolist() == [1, 1]
        assert (found[6], found[6].dtype, found[7]) == (1, np.float32, 1)
        assert isinstance(found[8], np.ndarray)
        assert found[8].tolist() == [1]
        same = sl.allgather(model.weight.detach())
        assert torch.equal(same[0], same[1])

    on_ranks(case)


def test_average_is_in_place() -> None:
    def case(world: sl.World) -> None:
        packed = np.array([world.rank, 10.0 * world.rank], dtype=np.float32)
        assert mc.average(packed) is packed
        assert packed.tolist() == [1, 10]
        tensor = torch.tensor([float(world.rank)], requires_grad=True)
        mc.average(tensor)
        assert tensor.item() == 1
        assert mc.average(float(world.rank)) == 1
        with pytest.raises(IncompatibleError, match="mean of"):
            mc.average(np.array([1]))

    on_ranks(case, ranks=3)


def test_gradients_are_new_arrays_of_the_same_kind() -> None:
    def case(world: sl.World) -> None:
        mc.init(2, 1, 100, "tensorflow")
        array, tensor = np.full(2, float(world.rank)), torch.full((3,), float(world.rank), dtype=torch.float16)
        means = mc.gradients([array, None, tensor, EagerTensor(np.float32(world.rank))], 0)
        assert array.tolist() == [world.rank] * 2
        assert means[0].tolist() == [0.5, 0.5]
        assert means[1] is None
        assert means[2].dtype == torch.float16
        assert means[2].tolist() == [0.5] * 3
        assert means[3] == 0.5
        [shares] = mc.gradients([np.ones((2, 2))], 0)  # a sum of another shape
        assert (shares * mc.get_n_ranks() == 2).all()
        assert mc.gradients([None], 0) == [None]

    on_ranks(case)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: mc.gradients([np.ones(60), None, np.ones(41)], 0), IncompatibleError, r"101 .*max_elements=100.*101"),
        (lambda: mc.gradients(torch.ones(2), 0), IncompatibleError, "takes a list of arrays"),  # type: ignore[arg-type]
        (lambda: mc.gradients([np.ones(1)], 2), IncompatibleError, "team 2 does not exist.*0 to 1"),
        (lambda: mc.config_team(0, 0, 10, 0, 2, 200), SpecError, "max_steps=0"),
        (lambda: mc.init(1, 0, 100), SpecError, "teams=0"),
        (lambda: mc.init(1, 1, 0), SpecError, "max_elements=0"),
        (lambda: mc.broadcast([GraphTensor()], 0), UnsupportedError, "GraphTensor of a TensorFlow graph"),
        (lambda: mc.average("loss"), IncompatibleError, "not str"),
    ],
)
def test_refused(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    def case(world: sl.World) -> None:
        mc.init(1, 2, 100)
        with pytest.raises(kind, match=words):
            call()

    on_ranks(case)


def test_teams_are_needed_and_elastic_jobs_are_refused() -> None:
    def without_teams(world: sl.World) -> None:
        with pytest.raises(WorldError, match="call init"):
            mc.gradients([np.ones(1)], 0)

    def elastic(world: sl.World) -> None:
        with pytest.raises(UnsupportedError, match="leave --elastic out"):
            mc.init_mpi()

    on_ranks(without_teams)
    on_ranks(elastic, elastic=(1, 2))


def test_finalize_twice_and_calls_after_it() -> None:
    def case(world: sl.World) -> None:
        mc.init_mpi()
        mc.init_mpi()
        mc.init(1, 1, 10)
        mc.barrier()
        mc.finalize()
        mc.finalize()
        with pytest.raises(WorldError, match="was finalized"):
            mc.get_rank()
        assert sl.allreduce(torch.ones(1), op="sum").item() == 2  # the script's own world stays
        mc.init_mpi()
        assert mc.average(float(world.rank)) == 0.5

    on_ranks(case)
    mc.init_mpi()  # a world of its own, which finalize closes
    mc.init(1, 1, 10)
    mc.config_team(0, 0, 0, 10, 0, 0)
    assert [float(mc.gradients([np.full(1, value)], 0)[0][0]) for value in (1.0, 2.0)] == [0, 1]
    assert mc.check_buffers_match([np.ones(1)]) == 0
    mc.finalize()
    mc.finalize()
    with pytest.raises(WorldError, match="there is no world"):
        sl.barrier()
    with pytest.raises(WorldError, match="was finalized"):
        mc.get_rank()
    mc.init_mpi()
    mc.finalize()


@pytest.mark.parametrize(
    ("buffers", "words"),
    [
        (lambda rank: [np.zeros(3), torch.ones(2)], "all ranks have the same buffers"),
        (lambda rank: [np.zeros(3), torch.ones(2) + (rank == 2)], "buffer 1 of 2 on rank 2 differs"),
        (lambda rank: [np.zeros(3).reshape(3, 1) if rank == 1 else np.zeros(3)], "buffer 0 of 1 on rank 1 differs"),
        (lambda rank: [np.zeros(3)] * (1 + (rank == 1)), "rank 0 has 1 buffers, and rank 1 has 2"),
        (lambda rank: [np.full(1, rank)] * (1 + (rank == 2)), "rank 1 differs from rank 0"),
    ],
)
def test_check_buffers_match(
    buffers: Callable[[int], list[Any]], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = on_ranks(lambda world: mc.check_buffers_match(buffers(world.rank), 1), ranks=3)
    assert answers == ((0, 0, 0) if "same" in words else (1, 1, 1))
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("callers", [(0,), (0, 2), (1,)])
def test_ranks_that_do_not_check_are_named(callers: tuple[int, ...]) -> None:
    def case(world: sl.World) -> None:
        mc.check_buffers_match([np.ones(2)])
        if world.rank in callers:
            mc.check_buffers_match([np.ones(2)])
        else:
            world.compute(100.0)

    results = on_ranks(case, ranks=4, timeout=30.0, return_exceptions=True)
    missing = [rank for rank in range(4) if rank not in callers]
    for caller in callers:
        error = results[caller]
        assert isinstance(error, PeerLostError)
        assert f"check_buffers_match: ranks {', '.join(map(str, missing))} did not call it within 30 s" in str(error)
        assert error.peer == missing[0]
