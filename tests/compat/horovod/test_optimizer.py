"""`DistributedOptimizer`: the weights of `sl.distribute`, and what Horovod's scripts expect beside them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.compat.horovod.compression import Compression, Compressor
from syncline.compat.horovod.context import Adasum, Average, Max, ProcessSet, Sum, init, shutdown
from syncline.compat.horovod.errors import NotInitializedError
from syncline.compat.horovod.ops import join
from syncline.compat.horovod.optimizer import DistributedOptimizer
from syncline.errors import IncompatibleError
from syncline.testing import Pool
from tests.compat.horovod.training import (
    assert_same,
    batch,
    by_distribute,
    by_horovod,
    expected,
    gradients,
    loss_of,
    wrapped,
)
from tests.strategies.cases import backward, flat, mlp, on_gloo
from tests.strategies.test_allreduce import Words, branches


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=rate)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_bits_of_distribute(kind: str, ranks: int) -> None:
    ours = sl.simulate(lambda world: by_distribute(world, kind), ranks=ranks).results
    theirs = sl.simulate(lambda world: by_horovod(world, kind), ranks=ranks).results
    assert all(torch.equal(found, ours[0]) for found in theirs)


@pytest.mark.parametrize("spec", ["cast('fp16')", "topk(0.1)|quantize(4)"])
def test_the_bits_of_distribute_with_a_codec(spec: str) -> None:
    [ours, *_] = sl.simulate(lambda world: by_distribute(world, "sgd", spec), ranks=3).results
    told: list[Any] = [spec, Compression.codec(spec)] + [Compression.fp16] * (spec == "cast('fp16')")
    for compression in told:
        theirs = sl.simulate(partial(by_horovod, kind="sgd", compression=compression), ranks=3).results
        assert all(torch.equal(found, ours) for found in theirs)


@pytest.mark.xdist_group("gloo")
def test_the_bits_of_distribute_on_gloo(gloo: Pool) -> None:
    ours = gloo.run(on_gloo, 3, by_distribute)
    theirs = gloo.run(on_gloo, 3, _by_horovod_and_away)
    assert all(torch.equal(found, ours[0]) for found in theirs)


def _by_horovod_and_away(world: sl.World) -> Tensor:
    result = by_horovod(world)
    shutdown()
    return result


@pytest.mark.parametrize("ranks", [3])
@pytest.mark.parametrize(("op", "factor"), [(Average, 1.0), (Average, 4.0), (Sum, 1.0)])
@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
def test_means_and_sums(ranks: int, op: Any, factor: float, compression: Any) -> None:
    def case(world: sl.World) -> dict[str, Any]:
        init()
        model = mlp()
        wrapped(model, sgd(model), op=op, gradient_predivide_factor=factor, compression=compression)
        backward(loss_of(model, 0, world.rank))
        return gradients(model)

    wanted = expected(ranks, mlp, lambda model, rank: loss_of(model, 0, rank), total=op == Sum)
    for found in sl.simulate(case, ranks=ranks).results:
        for name, gradient in found.items():
            loose = 3e-3 if compression is Compression.fp16 else 1e-6
            torch.testing.assert_close(gradient, wanted[name], rtol=loose, atol=loose)


def test_passes_add_up_before_one_reduction() -> None:
    def case(world: sl.World) -> tuple[dict[str, Any], dict[str, Any], Any]:
        init()
        model = mlp()
        optimizer = wrapped(model, sgd(model, rate=0.0), backward_passes_per_step=3)
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            for step in range(3):
                backward(loss_of(model, step, world.rank))
            found.append(gradients(model))
            optimizer.step()
        optimizer.zero_grad()
        backward(loss_of(model, 0, world.rank))  # fewer than were told: the step reduces them
        optimizer.step()
        return found[0], found[1], gradients(model)

    def three(model: nn.Module, rank: int) -> Tensor:
        return torch.stack([loss_of(model, step, rank) for step in range(3)]).sum()

    for first, second, last in sl.simulate(case, ranks=3).results:
        assert_same(first, expected(3, mlp, three))
        assert_same(second, expected(3, mlp, three))
        assert_same(last, expected(3, mlp, lambda model, rank: loss_of(model, 0, rank)))


def test_passes_may_be_told_later() -> None:
    def case(world: sl.World) -> dict[str, Any]:
        init()
        model = mlp()
        optimizer = wrapped(model, sgd(model))
        optimizer.set_backward_passes_per_step(2)
        assert optimizer.backward_passes_per_step == 2
        for _ in range(2):
            backward(loss_of(model, 0, world.rank))
        optimizer.step()
        return gradients(model)

    wanted = expected(2, mlp, lambda model, rank: 2 * loss_of(model, 0, rank))
    for found in sl.simulate(case, ranks=2).results:
        assert_same(found, wanted)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gradient_that_a_rank_lacks_counts_as_zero(ranks: int) -> None:
    heads = [[0, 0, 1], [0, 1, 0], [1, 1, 1]]  # of each step, by rank

    def loss(step: int) -> Any:
        return lambda model, rank: model(batch(step, rank)[:, :4], heads[step][rank]).square().mean()

    def case(world: sl.World) -> list[dict[str, Any]]:
        init()
        model = branches()
        optimizer = wrapped(model, sgd(model, rate=0.0))
        found = []
        for step in range(3):
            optimizer.zero_grad()
            backward(loss(step)(model, world.rank))
            found.append(gradients(model))
            optimizer.step()
        return found

    for steps in sl.simulate(case, ranks=ranks).results:
        for step, found in enumerate(steps):
            assert_same(found, expected(ranks, branches, loss(step)))


def test_a_rank_without_any_backward_takes_part_in_step() -> None:
    def case(world: sl.World) -> dict[str, Any]:
        init()
        model = mlp()
        optimizer = wrapped(model, sgd(model, rate=0.0))
        for _ in range(2):
            optimizer.zero_grad()
            if world.rank != 1:
                backward(loss_of(model, 0, world.rank))
            optimizer.step()
        return gradients(model)

    wanted = expected(3, mlp, lambda model, rank: None if rank == 1 else loss_of(model, 0, rank))
    for found in sl.simulate(case, ranks=3).results:
        assert_same(found, wanted)


def test_gradients_set_by_hand_are_reduced_in_step() -> None:
    def case(world: sl.World) -> Tensor:
        init()
        model = mlp()
        optimizer = wrapped(model, sgd(model, rate=1.0))
        before = flat(model)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(world.rank))
        optimizer.step()
        return before - flat(model)

    for found in sl.simulate(case, ranks=3).results:
        torch.testing.assert_close(found, torch.ones_like(found))


def test_frozen_and_unused_parameters_keep_none() -> None:
    def case(world: sl.World) -> tuple[dict[str, Any], bool]:
        init()
        model = branches()
        model.trunk.bias.requires_grad_(False)
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5))
        unused: Any = model.heads[1]
        before = unused.weight.detach().clone()
        for step in range(3):
            optimizer.zero_grad()
            backward(model(batch(step, world.rank)[:, :4], 0).square().mean())
            optimizer.step()
        return gradients(model), torch.equal(before, unused.weight)

    for found, untouched in sl.simulate(case, ranks=2).results:
        assert found["trunk.bias"] is None
        assert found["heads.1.weight"] is None
        assert found["heads.0.weight"] is not None
        assert untouched


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense: bool) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        found: Tensor = model(torch.tensor([rank, rank + 1, 7])).square().mean()
        return found

    def case(world: sl.World) -> tuple[list[dict[str, Any]], bool]:
        init()
        model = Words(sparse=True)
        optimizer = wrapped(model, sgd(model, rate=0.0), sparse_as_dense=as_dense)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            backward(loss(model, world.rank))
            optimizer.step()
            found.append(gradients(model))
        assert model.words.weight.grad is not None
        return found, model.words.weight.grad.is_sparse

    for steps, sparse in sl.simulate(case, ranks=3).results:
        assert sparse  # again, where it was reduced as a dense one
        for found in steps:
            assert_same(found, expected(3, lambda: Words(sparse=False), loss))


def test_the_order_of_names_may_differ() -> None:
    def case(world: sl.World) -> Tensor:
        init()
        model = mlp()
        named = list(model.named_parameters())
        optimizer = DistributedOptimizer(sgd(model), named[::-1] if world.rank == 1 else named)
        for step in range(3):
            optimizer.zero_grad()
            backward(loss_of(model, step, world.rank))
            optimizer.step()
        return flat(model)

    results = sl.simulate(case, ranks=3).results
    assert all(torch.equal(found, results[0]) for found in results)
    assert not torch.equal(results[0], flat(mlp()))


@pytest.mark.parametrize(("how", "said"), [("shape", "2.bias"), ("name", "extra"), ("dtype", "float64")])
def test_parameters_that_differ_are_named_on_every_rank(how: str, said: str) -> None:
    def case(world: sl.World) -> None:
        init()
        model: nn.Module = mlp()
        if world.rank == 1:
            if how == "shape":
                model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 9))
            elif how == "name":
                model.extra = nn.Linear(1, 1)
            else:
                model = model.double()
        wrapped(model, sgd(model))

    for found in sl.simulate(case, ranks=3, return_exceptions=True).results:
        assert isinstance(found, IncompatibleError)
        assert said in str(found)
        assert "rank 1" in str(found)


def test_a_process_set_reduces_among_its_members() -> None:
    def case(world: sl.World) -> dict[str, Any]:
        pair = ProcessSet([1, 2])
        init(process_sets=[pair])
        model = mlp()
        optimizer = wrapped(model, sgd(model, rate=0.0), process_set=pair)
        for _ in range(2):
            optimizer.zero_grad()
            backward(loss_of(model, 0, world.rank))
            optimizer.step()
        return gradients(model)

    results = sl.simulate(case, ranks=3).results
    wanted = expected(2, mlp, lambda model, rank: loss_of(model, 0, rank + 1))
    assert_same(results[1], wanted)
    assert_same(results[2], wanted)
    assert_same(results[0], expected(1, mlp, lambda model, rank: loss_of(model, 0, 0)))


@pytest.mark.parametrize("optimizers", [1, 2])
def test_ranks_that_join_count_with_zeros(optimizers: int) -> None:
    def case(world: sl.World) -> tuple[list[Any], int]:
        init()
        models = [mlp(), mlp(1)][:optimizers]
        mine = [wrapped(model, sgd(model, rate=0.0)) for model in models]
        found = []
        for step in range(1 + world.rank):
            for model, optimizer in zip(models, mine, strict=True):
                optimizer.zero_grad()
                backward(loss_of(model, step, world.rank))
                optimizer.step()
            found.append([gradients(model) for model in models])
        return found, join()

    results = sl.simulate(case, ranks=3).results
    assert [last for _, last in results] == [2, 2, 2]
    for steps, _ in results:
        for step, found in enumerate(steps):
            for number, each in enumerate(found):
                wanted = expected(
                    3,
                    lambda number=number: mlp(number),
                    lambda model, rank, step=step: loss_of(model, step, rank) if rank >= step else None,
                )
                assert_same(each, wanted)


def test_it_is_the_optimizer_with_its_state() -> None:
    def case(world: sl.World) -> None:
        init()
        model = mlp()
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        before = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        backward(loss_of(model, 0, 0))
        plain.step()
        optimizer = wrapped(model, plain)
        assert isinstance(optimizer, torch.optim.Adam)
        assert optimizer.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
        assert optimizer.state_dict()["state"]
        after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        optimizer.step()
        before.step()
        after.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5 * 0.1)
        copied = copy.deepcopy(optimizer)
        copied.zero_grad()
        copied.step()
        optimizer.load_state_dict(optimizer.state_dict())

    sl.simulate(case, ranks=2)


def test_two_groups_and_no_names() -> None:
    def case(world: sl.World) -> Tensor:
        init()
        model = mlp()
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.1},
            {"params": list(model[2:].parameters()), "lr": 0.01},
        ]
        optimizer = DistributedOptimizer(torch.optim.SGD(groups, lr=1.0))
        backward(loss_of(model, 0, world.rank))
        optimizer.step()
        return flat(model)

    model = mlp()
    for rank in range(2):
        backward(loss_of(model, 0, rank) / 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.sub_((0.1 if name.startswith("0.") else 0.01) * parameter.grad)
    for found in sl.simulate(case, ranks=2).results:
        torch.testing.assert_close(found, flat(model))


def test_names_of_a_larger_model_are_left_out() -> None:
    def case(world: sl.World) -> Any:
        init()
        model = mlp()
        optimizer = DistributedOptimizer(torch.optim.SGD(model[4].parameters(), lr=0.1), model.named_parameters())
        backward(loss_of(model, 0, world.rank))
        optimizer.step()
        return gradients(model)

    results = sl.simulate(case, ranks=2).results
    assert torch.equal(results[0]["4.weight"], results[1]["4.weight"])
    assert not torch.equal(results[0]["0.weight"], results[1]["0.weight"])  # nobody was asked to reduce it


class Halved(Compressor):
    pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"op": Max}, "Average, Sum or Adasum"),
        ({"op": Sum, "gradient_predivide_factor": 2.0}, "op=Average"),
        ({"gradient_predivide_factor": -1.0}, "above zero"),
        ({"num_groups": -1}, "not negative"),
        ({"groups": -2}, "not negative"),
        ({"groups": [1]}, "lists of tensors"),
        ({"backward_passes_per_step": 0}, "must be > 0"),
        ({"compression": Halved}, "Compression.fp16"),
        ({"named_parameters": [torch.ones(1)]}, "pairs"),
        ({"named_parameters": [("a", torch.ones(1)), ("a", torch.ones(1))]}, "more than once"),
        ({"named_parameters": [("a", torch.ones(1))]}, "have no name"),
        ({"strategy": "local(period=4)", "op": Sum}, "op=Average"),
        ({"op": Adasum, "compression": "quantize(4)"}, "Adasum"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    def case(world: sl.World) -> None:
        init()
        model = mlp()
        DistributedOptimizer(sgd(model), **options)

    for found in sl.simulate(case, ranks=2, return_exceptions=True).results:
        assert isinstance(found, IncompatibleError)
        assert said in str(found)


def test_groups_change_nothing() -> None:
    def case(world: sl.World, how: str) -> Tensor:
        init()
        model = mlp()
        lists = [list(model[0].parameters()), list(model[2].parameters())]
        groups: Any = {"lists": {"groups": lists}, "number": {"groups": 2}, "no": {}}[how]
        optimizer = wrapped(model, sgd(model), **groups)
        backward(loss_of(model, 0, world.rank))
        optimizer.step()
        return flat(model)

    plain = sl.simulate(partial(case, how="no"), ranks=2).results[0]
    for how in ("lists", "number"):
        [found, _] = sl.simulate(partial(case, how=how), ranks=2).results
        assert torch.equal(found, plain)


def test_before_init_and_after_shutdown() -> None:
    def case(world: sl.World) -> Tensor:
        model = mlp()
        with pytest.raises(NotInitializedError):
            wrapped(model, sgd(model))
        init()
        optimizer = wrapped(model, sgd(model))
        shutdown()
        with pytest.raises(NotInitializedError):
            optimizer.step()
        init()  # as an elastic job does: the optimizer finds its way into the new one
        optimizer.zero_grad()
        backward(loss_of(model, 0, world.rank))
        optimizer.step()
        return flat(model)

    first, second = sl.simulate(case, ranks=2).results
    assert torch.equal(first, second)
    assert not torch.equal(first, flat(mlp()))
