"""Behaviour that was read in the sources of Horovod 0.28.1, function by function; docs/horovod.md has the table."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
import syncline.compat.horovod.torch as hvd
from syncline.compat.horovod import engine
from syncline.compat.horovod.context import ProcessSet
from syncline.compat.horovod.execution import execute
from tests.compat.horovod.training import loss_of
from tests.strategies.cases import backward, flat, mlp


def on_ranks(ranks: int, what: Callable[[sl.World], Any], **options: Any) -> tuple[Any, ...]:
    def begin(world: sl.World) -> Any:
        hvd.init()
        return what(world)

    return sl.simulate(begin, ranks=ranks, **options).results


def linear(value: float = 1.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def distributed(model: nn.Module, rate: float = 0.0, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


# Signatures.

DEFAULTS: dict[str, dict[str, Any]] = {
    "reducescatter": {"op": hvd.Average},
    "reducescatter_async": {"op": hvd.Average},
    "grouped_reducescatter": {"op": hvd.Average},
    "grouped_reducescatter_async": {"op": hvd.Average},
    "allreduce": {"average": None, "op": None, "prescale_factor": 1.0, "process_set": hvd.global_process_set},
    "broadcast_optimizer_state": {"model": None},
    "join": {"device": -1},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_horovods(name: str) -> None:
    found = inspect.signature(getattr(hvd, name)).parameters
    assert {key: found[key].default for key in DEFAULTS[name]} == DEFAULTS[name]


# Gradients of gradients.


def _gathered(x: Tensor) -> Tensor:
    return hvd.allgather(x).square().sum()


def _exchanged(x: Tensor) -> Tensor:
    found = hvd.alltoall(x.repeat(2))
    assert isinstance(found, Tensor)
    return found.square().sum()


SECOND: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "allreduce": (lambda x: hvd.allreduce(x, op=hvd.Sum).square().sum(), 8.0),
    "grouped_allreduce": (lambda x: hvd.grouped_allreduce([x], op=hvd.Sum)[0].square().sum(), 8.0),
    "allgather": (_gathered, 1.0),
    "grouped_allgather": (lambda x: hvd.grouped_allgather([x])[0].square().sum(), 1.0),
    "broadcast": (lambda x: hvd.broadcast(x, 0).square().sum(), 1.0),
    "alltoall": (_exchanged, 4.0),
    "reducescatter": (lambda x: hvd.reducescatter(x.repeat(2)).square().sum(), 4.0),
    "grouped_reducescatter": (lambda x: hvd.grouped_reducescatter([x.repeat(2)])[0].square().sum(), 4.0),
}
"""A function of every rank's x, and what its gradient changes by with rank 0's x, with Horovod's gradients."""


@pytest.mark.parametrize("name", SECOND)
def test_gradients_can_be_differentiated(name: str) -> None:
    call, wanted = SECOND[name]

    def case(world: sl.World) -> float:
        x = torch.tensor([1.0 + world.rank], requires_grad=True)
        (first,) = torch.autograd.grad(call(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return float(second)

    assert on_ranks(2, case)[0] == wanted


# What operations return.


def test_alltoall_async_always_gives_the_received_splits() -> None:
    def case(world: sl.World) -> tuple[list[float], list[int]]:
        rows, received = hvd.synchronize(hvd.alltoall_async(torch.full((2,), float(world.rank))))
        return rows.tolist(), received.tolist()

    assert on_ranks(2, case) == (([0.0, 1.0], [1, 1]),) * 2


def test_alltoall_takes_splits_that_leave_rows_behind() -> None:
    def case(world: sl.World) -> tuple[list[float], list[float]]:
        own = torch.arange(4.0).requires_grad_()
        rows, received = hvd.alltoall(own, [1, 2])
        assert received.tolist() == [1 + world.rank] * 2
        backward(rows.sum())
        assert own.grad is not None
        return rows.tolist(), own.grad.tolist()

    first, second = on_ranks(2, case)
    assert first == ([0.0, 0.0], [1.0, 1.0, 1.0, 0.0])
    assert second == ([1.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 0.0])


def test_alltoall_takes_empty_splits_as_equal_parts() -> None:
    def case(world: sl.World) -> Any:
        rows, received = hvd.alltoall(torch.arange(2.0), [])
        return rows.tolist(), received.tolist(), received.dtype

    assert on_ranks(2, case) == (([0.0, 0.0], [1, 1], torch.int32), ([1.0, 1.0], [1, 1], torch.int32))


def test_received_splits_are_of_the_dtype_of_splits() -> None:
    def case(world: sl.World) -> Any:
        return hvd.alltoall(torch.arange(2.0), torch.tensor([1, 1], dtype=torch.int64))[1].dtype

    assert on_ranks(2, case) == (torch.int64,) * 2


def test_splits_of_two_dimensions_are_refused() -> None:
    def case(world: sl.World) -> None:
        with pytest.raises(ValueError, match="1D splits"):
            hvd.alltoall(torch.arange(4.0), torch.ones(2, 2, dtype=torch.int32))

    on_ranks(2, case)


def test_groups_come_back_as_horovods_types() -> None:
    def case(world: sl.World) -> list[type]:
        x = [torch.ones(2), torch.ones(2)]
        return [
            type(hvd.grouped_allreduce(x)),
            type(hvd.grouped_allreduce_(x)),
            type(hvd.grouped_allgather(x)),
            type(hvd.grouped_reducescatter(x)),
            type(hvd.synchronize(hvd.grouped_allreduce_async(x))),
            type(hvd.synchronize(hvd.grouped_allgather_async(x))),
            type(hvd.synchronize(hvd.grouped_reducescatter_async(x))),
        ]

    assert on_ranks(2, case) == ([list, tuple, tuple, list, tuple, tuple, tuple],) * 2


def test_handles_are_true() -> None:
    """Scripts ask `if handle:`."""
    assert all(on_ranks(2, lambda world: hvd.allreduce_async(torch.ones(1))))


def test_synchronize_of_a_cleared_handle_gives_none() -> None:
    def case(world: sl.World) -> Any:
        handle = hvd.allreduce_async(torch.ones(1))
        hvd.synchronize(handle)
        return hvd.synchronize(handle)

    assert on_ranks(2, case) == (None, None)


def test_in_place_on_memory_that_overlaps_is_refused() -> None:
    def case(world: sl.World) -> None:
        for call in (hvd.allreduce_, lambda x: hvd.broadcast_(x, 0)):
            with pytest.raises(ValueError, match="overlap"):
                call(torch.ones(1).expand(3))

    on_ranks(2, case)


def test_a_group_may_have_the_name_of_a_single_operation() -> None:
    def case(world: sl.World) -> Any:
        alone = hvd.allreduce_async(torch.ones(1), name="x", op=hvd.Sum)
        grouped = hvd.grouped_allreduce_async([torch.ones(1)], name="x", op=hvd.Sum)
        return hvd.synchronize(alone).item(), hvd.synchronize(grouped)[0].item()

    assert on_ranks(2, case) == ((2.0, 2.0),) * 2


# Errors.


def test_a_device_that_cannot_be_reached_is_refused() -> None:
    def case(world: sl.World) -> None:
        with pytest.raises(ValueError, match="meta"):
            hvd.allreduce(torch.ones(1, device="meta"), name="x")
        hvd.allreduce(torch.ones(1), name="x")

    on_ranks(2, case)


def test_a_duplicate_name_is_a_value_error() -> None:
    """Elastic jobs go on after a HorovodInternalError: the script's own fault must not be one."""

    def case(world: sl.World) -> None:
        first = hvd.allreduce_async(torch.ones(1), name="x")
        with pytest.raises(ValueError, match="same name as another tensor that is currently being processed") as caught:
            hvd.allreduce_async(torch.ones(1), name="x")
        assert not isinstance(caught.value, hvd.HorovodInternalError)
        hvd.synchronize(first)

    on_ranks(2, case)


@pytest.mark.parametrize("op", [hvd.Adasum, hvd.Min, hvd.Max, hvd.Product])
def test_reducescatter_with_other_ops_fails_as_there(op: int) -> None:
    def case(world: sl.World) -> None:
        for call in (hvd.reducescatter, hvd.reducescatter_async):
            with pytest.raises(hvd.HorovodInternalError, match="only supports AVERAGE and SUM"):
                call(torch.ones(2), op=op)

    on_ranks(2, case)


def test_adasum_that_is_not_available_is_not_implemented() -> None:
    def case(world: sl.World) -> None:
        with pytest.raises(NotImplementedError, match="power of two"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        pair = hvd.add_process_set([0, 1])
        with pytest.raises(NotImplementedError, match="global process set"):
            distributed(mlp(), op=hvd.Adasum, process_set=pair)
        with pytest.raises(NotImplementedError, match="power of two"):
            distributed(mlp(), op=hvd.Adasum)

    on_ranks(3, case)


def test_an_operation_before_init_is_an_internal_error() -> None:
    def case(world: sl.World) -> None:
        for call in (lambda: hvd.allreduce(torch.ones(1)), hvd.barrier, hvd.join):
            with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
                call()
        with pytest.raises(ValueError, match="has not been initialized") as caught:
            hvd.rank()
        assert not isinstance(caught.value, hvd.HorovodInternalError)
        assert not hvd.mpi_enabled()
        assert not hvd.gloo_enabled()
        assert not hvd.remove_process_set(ProcessSet([0]))

    sl.simulate(case, ranks=2)


def test_mpi_threads_without_mpi_is_a_value_error() -> None:
    def case(world: sl.World) -> None:
        with pytest.raises(ValueError, match="MPI is not enabled"):
            hvd.mpi_threads_supported()

    on_ranks(2, case)


def test_an_interrupt_is_a_runtime_error() -> None:
    assert issubclass(hvd.HostsUpdatedInterrupt, RuntimeError)


def test_average_and_num_groups_warn_in_horovods_words() -> None:
    def case(world: sl.World) -> None:
        hvd.init()
        with pytest.warns(DeprecationWarning, match="Parameter `average` has been replaced with `op`"):
            hvd.allreduce(torch.ones(1), average=False)
        with pytest.warns(DeprecationWarning, match="Parameter `num_groups` has been replaced by `groups`"):
            distributed(mlp(), num_groups=2, groups=3)  # both: groups counts
        with pytest.raises(ValueError, match="op parameter supersedes average"):
            hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)

    sl.simulate(case, ranks=1)


# Process sets.


def test_a_process_set_knows_itself_before_it_is_added() -> None:
    def case(world: sl.World) -> Any:
        apart = ProcessSet(ranks_or_comm=[1])
        before = apart.size(), apart.rank(), apart.included(), apart.mpi_comm
        hvd.add_process_set(apart)
        hvd.remove_process_set(apart)
        return before, apart.ranks, apart.included(), apart.size()

    assert on_ranks(2, case) == (
        ((None, None, False, None), [1], False, None),
        ((None, None, True, None), [1], True, None),
    )


def test_a_set_of_an_earlier_init_is_not_taken_for_another() -> None:
    def case(world: sl.World) -> None:
        old = hvd.add_process_set([0, 1])
        hvd.shutdown()
        hvd.init()
        new = hvd.add_process_set([1, 2])
        assert new.process_set_id == old.process_set_id
        with pytest.raises(ValueError, match="not usable"):
            hvd.allreduce(torch.ones(1), process_set=old)

    on_ranks(3, case)


def test_an_empty_comm_means_all_ranks() -> None:
    def case(world: sl.World) -> int:
        hvd.init(comm=[])
        return hvd.size()

    assert sl.simulate(case, ranks=2).results == (2, 2)


# DistributedOptimizer.


def test_step_after_synchronize_warns_in_horovods_words() -> None:
    def case(world: sl.World) -> None:
        model = linear()
        optimizer = distributed(model)
        backward(model.weight.sum())
        optimizer.synchronize()
        with pytest.warns(UserWarning, match=r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\) con"):
            optimizer.step()

    on_ranks(1, case)


def test_parameters_without_names_are_named_as_there() -> None:
    def case(world: sl.World, op: int) -> list[str]:
        first, second = nn.Linear(2, 1), nn.Linear(1, 1, bias=False)
        groups = [{"params": list(first.parameters())}, {"params": list(second.parameters())}]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), op=op)
        assert optimizer._parameter_names[second.weight] == "allreduce.noname.1.0"
        return sorted(optimizer._parameter_names.values())

    wanted = ["allreduce.noname.0.0", "allreduce.noname.0.1", "allreduce.noname.1.0"]
    for op in (hvd.Average, hvd.Adasum):
        assert on_ranks(2, partial(case, op=op)) == (wanted, wanted)


def test_the_settings_of_an_optimizer_can_be_read() -> None:
    def case(world: sl.World) -> None:
        optimizer = distributed(linear(), op=hvd.Sum, sparse_as_dense=True)
        assert (optimizer.op, optimizer.gradient_predivide_factor) == (hvd.Sum, 1.0)
        assert (optimizer.sparse_as_dense, optimizer.process_set) == (True, hvd.global_process_set)
        optimizer.backward_passes_per_step = 2
        assert optimizer.backward_passes_per_step == 2

    on_ranks(2, case)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True)
        nn.init.ones_(self.table.weight)

    def loss(self, rank: int) -> Tensor:
        found: Tensor = self.table(torch.tensor([rank, rank, 5])).square().sum()
        return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_sparse_as_dense_goes_with_sparse_optimizers(ranks: int) -> None:
    def case(world: sl.World, as_dense: bool) -> Tensor:
        model = Words()
        plain = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), sparse_as_dense=as_dense)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model.loss(world.rank))
            optimizer.step()
        assert model.table.weight.grad is not None
        assert model.table.weight.grad.is_sparse
        return flat(model)

    dense = on_ranks(ranks, lambda world: case(world, True))
    sparse = on_ranks(ranks, lambda world: case(world, False))
    for found, wanted in zip(dense, sparse, strict=True):
        torch.testing.assert_close(found, wanted)


def test_sparse_as_dense_where_a_rank_lacks_the_gradient() -> None:
    def case(world: sl.World) -> Tensor:
        model = Words()
        plain = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), sparse_as_dense=True)
        if world.rank == 0:
            backward(model.loss(0))
        optimizer.step()
        return flat(model)

    first, second = on_ranks(2, case)
    assert torch.equal(first, second)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.fp16()])
def test_fp16_rounds_only_what_travels(ranks: int, compression: Any) -> None:
    def case(world: sl.World) -> float:
        model = linear()
        distributed(model, compression=compression)
        backward((0.1 * model.weight).sum())
        assert model.weight.grad is not None
        return float(model.weight.grad)

    wanted = torch.tensor(0.1) if ranks == 1 else torch.tensor(0.1).half()
    assert on_ranks(ranks, case) == (float(wanted),) * ranks


def test_backward_with_create_graph_is_refused() -> None:
    def case(world: sl.World) -> None:
        model = linear()
        distributed(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of the cycle that this makes
            with pytest.raises(AssertionError, match="create_graph"):
                torch.autograd.backward(model.weight.square().sum(), create_graph=True)
        model.weight.grad = None

    on_ranks(2, case)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_group_that_is_added_later_is_refused(op: int) -> None:
    def case(world: sl.World) -> None:
        optimizer = distributed(linear(), op=op)
        with pytest.raises(ValueError, match="add_param_group"):
            optimizer.add_param_group({"params": list(linear().parameters())})

    on_ranks(2, case)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_parameter_unfrozen_later_stays_equal_on_all_ranks(op: int) -> None:
    def case(world: sl.World) -> Tensor:
        model = mlp()
        model[0].bias.requires_grad_(False)
        optimizer = distributed(model, rate=0.1, op=op)
        for step in range(3):
            optimizer.zero_grad()
            backward(loss_of(model, step, world.rank))
            optimizer.step()
            model[0].bias.requires_grad_(True)
        return flat(model)

    first, second = on_ranks(2, case)
    assert torch.equal(first, second)


# State.


def test_a_scheduler_of_the_plain_optimizer_reaches_every_rank() -> None:
    """broadcast_optimizer_state and load_state_dict leave the groups where schedulers look for them."""

    def case(world: sl.World) -> float:
        model = linear()
        plain = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, 0, model)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        scheduler.step()
        return float(optimizer.param_groups[0]["lr"])

    assert on_ranks(2, case) == (0.5, 0.5)


# A rank that leaves.


def test_a_shutdown_ends_the_others_wait_for_gradients() -> None:
    def case(world: sl.World) -> tuple[float, str]:
        model = mlp()
        optimizer = distributed(model)
        for step in range(3):
            if (step, world.rank) == (1, 1):
                hvd.shutdown()
                return 0.0, ""
            began = world.runtime.now()
            try:
                optimizer.zero_grad()
                backward(loss_of(model, step, world.rank))
                optimizer.step()
            except hvd.HorovodInternalError as error:
                assert step == 1
                return world.runtime.now() - began, str(error)
        raise AssertionError("it went on")

    for rank, (seconds, words) in enumerate(on_ranks(3, case)):
        assert seconds < 5.0
        assert rank == 1 or "shut down on rank 1" in words


@pytest.mark.parametrize("optimizers", [0, 1])
def test_a_shutdown_ends_the_others_join(optimizers: int) -> None:
    def case(world: sl.World) -> float:
        model = mlp()
        held = [distributed(model) for _ in range(optimizers)]
        if world.rank == 1:
            world.compute(0.5)
            hvd.shutdown()
            return 0.0
        with pytest.raises(hvd.HorovodInternalError, match="shut down on rank 1"):
            hvd.join()
        return world.runtime.now() + len(held)

    assert max(on_ranks(3, case)) < 5.0


def test_a_shutdown_after_the_last_step_breaks_nothing() -> None:
    def case(world: sl.World) -> Tensor:
        model = mlp()
        optimizer = distributed(model, rate=0.1)
        for step in range(3):
            optimizer.zero_grad()
            backward(loss_of(model, step, world.rank))
            optimizer.step()
            world.compute(0.1 * world.rank)
        if world.rank == 1:
            hvd.shutdown()
        world.compute(10.0)
        return flat(model)

    results = on_ranks(3, case)
    assert all(torch.equal(found, results[0]) for found in results)


REFUSED: dict[str, Callable[[bool], object]] = {
    "dtype": lambda odd: hvd.allreduce(torch.ones(2, dtype=torch.complex64 if odd else torch.float32), name="x"),
    "layout": lambda odd: hvd.allgather(torch.eye(2).to_sparse() if odd else torch.eye(2), name="x"),
    "splits": lambda odd: hvd.alltoall(torch.ones(4), [9, 9, 9] if odd else [1, 1, 1], name="x"),
    "unnamed": lambda odd: hvd.allreduce(torch.ones(2, dtype=torch.complex64 if odd else torch.float32)),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_call_that_one_rank_refuses_fails_on_the_others(how: str) -> None:
    """At once, and with what it refused; and then all goes on, under the same name."""
    call = REFUSED[how]

    def case(world: sl.World) -> str:
        for turn in range(2):
            if turn and world.rank == 2:
                world.compute(1.0)  # comes late: it is told too
            began = world.runtime.now()
            with pytest.raises(ValueError if world.rank == 1 else hvd.HorovodInternalError) as caught:
                call(world.rank == 1)
            assert world.runtime.now() - began < 1.0
            call(False)
        return str(caught.value)

    results = on_ranks(3, case)
    assert all("rank 1 refused it: " + results[1] in results[rank] for rank in (0, 2)), results


def test_a_call_that_every_rank_refuses_leaves_nothing_behind() -> None:
    def case(world: sl.World) -> float:
        for _ in range(3):
            with pytest.raises(ValueError, match="not supported"):
                hvd.allreduce(torch.ones(1, dtype=torch.complex64), name="x")
        return hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item()

    assert on_ranks(3, case) == (3.0,) * 3


def test_a_rank_that_breaks_within_an_operation_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after it does not wait for that rank."""

    def breaking(team: Any, group: Any, *rest: Any) -> Any:
        results = execute(team, group, *rest)
        if team.world.rank == 1 and group.plans[0].request.label == "x":
            raise MemoryError("no room for the result")
        return results

    monkeypatch.setattr(engine, "execute", breaking)

    def case(world: sl.World) -> tuple[float, str]:
        if world.rank == 1:
            with pytest.raises(hvd.HorovodInternalError, match="no room"):
                hvd.allreduce(torch.ones(3), name="x")
        else:
            hvd.allreduce(torch.ones(3), name="x")
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="y")
        return world.runtime.now(), str(caught.value)

    for seconds, words in on_ranks(3, case):
        assert seconds < 10.0
        assert "no room" in words


@pytest.mark.parametrize("raising", [0, 1, 2])
def test_everybody_ends_soon_after_a_rank_has_raised(raising: int) -> None:
    """Those too who wait for a rank that has found the loss before them and has ended."""

    def case(world: sl.World) -> tuple[float, str]:
        model = mlp()
        optimizer = distributed(model)
        for step in range(3):
            if (step, world.rank) == (1, raising):
                return 0.0, str(1 / 0)
            optimizer.zero_grad()
            try:
                backward(loss_of(model, step, world.rank))
                hvd.allreduce(torch.ones(100), name="x")
            except hvd.HorovodInternalError as error:
                return world.runtime.now(), str(error)
            optimizer.step()
        raise AssertionError("it went on")

    for seed in range(2):
        results = on_ranks(3, case, seed=seed, chaos=True, return_exceptions=True)
        assert isinstance(results[raising], ZeroDivisionError)
        for seconds, words in results[:raising] + results[raising + 1 :]:
            assert seconds < 20.0
            assert f"rank {raising}" in words


def test_an_optimizer_that_a_rank_does_not_make_is_told_of_soon() -> None:
    def case(world: sl.World) -> float:
        if world.rank == 1:
            hvd.shutdown()
            return 0.0
        with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
            distributed(mlp())
        return world.runtime.now()

    assert max(on_ranks(3, case)) < 5.0


def test_elastic_goes_on_soon_after_one_rank_alone_has_failed() -> None:
    def case(world: sl.World) -> tuple[float, int]:
        model = mlp()
        optimizer = distributed(model, rate=0.1)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
        calls: list[int] = []

        @hvd.elastic.run
        def train(state: Any) -> None:
            calls.append(state.step)
            for step in range(state.step, 4):
                optimizer.zero_grad()
                backward(loss_of(model, step, world.rank))
                optimizer.step()
                state.step += 1
                if state.step == 2:
                    state.commit()
                if state.step == 3 and len(calls) == 1 and world.rank == 1:
                    raise hvd.HorovodInternalError("on one rank alone")

        train(state=state)  # type: ignore[call-arg]  # Horovod's takes it by name, too
        assert calls == [0, 2]
        return world.runtime.now(), state.step

    for seconds, step in on_ranks(3, case):
        assert seconds < 10.0
        assert step == 4


def test_elastic_handles_a_failure_while_the_state_is_sent() -> None:
    def case(world: sl.World) -> list[str]:
        said: list[str] = []

        class Mine(hvd.elastic.State):
            def sync(self) -> None:
                said.append("sync")
                if len(said) == 1:
                    raise hvd.HorovodInternalError("at first")

            def restore(self) -> None:
                said.append("restore")

        @hvd.elastic.run
        def train(state: Mine) -> list[str]:
            return said

        return train(Mine(bcast_object=hvd.broadcast_object, get_rank=hvd.rank))

    assert on_ranks(2, case) == (["sync", "restore", "sync"],) * 2
