"""Synchronous training: the same as one worker with the whole batch, whatever the model looks like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import syncline as sl
from syncline.strategies import strategy_run
from syncline.testing import Pool
from tests.strategies.cases import OPTIMIZERS, backward, flat, mlp, on_gloo, train

NETWORK = sl.Network(latency=1e-5, bandwidth=1e9)


def distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize(("optimizer", "ranks"), [*((name, 2) for name in OPTIMIZERS), ("momentum", 3), ("adam", 4)])
def test_k_workers_equal_one_with_k_times_the_batch(optimizer: str, ranks: int) -> None:
    alone = sl.simulate(lambda world: train(world, optimizer, 20), ranks=1).results[0]
    together = sl.simulate(lambda world: train(world, optimizer, 20), ranks=ranks).results
    assert all(torch.equal(together[0], other) for other in together)
    assert distance(together[0], alone) < 1e-5


@pytest.mark.parametrize("algorithm", ["auto", "native", "sharded", "halving_doubling", "tree"])
def test_every_collective_trains_alike(algorithm: str) -> None:
    alone = sl.simulate(lambda world: train(world, steps=10), ranks=1).results[0]
    case = sl.simulate(lambda world: train(world, steps=10, algorithm=algorithm), ranks=3, network=NETWORK)
    assert all(torch.equal(case.results[0], other) for other in case.results)
    assert distance(case.results[0], alone) < 1e-5


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("algorithm", ["auto", "native", "ring"])
def test_on_gloo(gloo: Pool, algorithm: str) -> None:
    alone = sl.simulate(train, ranks=1).results[0]
    results = gloo.run(on_gloo, 3, _train_by, algorithm)
    assert all(torch.equal(results[0], other) for other in results)
    assert distance(results[0], alone) < 1e-5


def _train_by(world: sl.World, algorithm: str) -> Tensor:
    return train(world, algorithm=algorithm)


def run_of(model: nn.Module, rate: float = 0.1, **options: Any) -> tuple[sl.Run, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return sl.distribute(model, optimizer, **{"algorithm": "ring", **options}), optimizer


def gradients(model: nn.Module) -> dict[str, Any]:
    return {
        name: None if parameter.grad is None else parameter.grad.to_dense().clone()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("codec", [None, "quantize(4)"])
def test_a_world_of_one_sends_nothing(codec: str | None) -> None:
    def case(world: sl.World) -> int:
        model = mlp()
        run, optimizer = run_of(model, codec=codec, check_finite=True, algorithm="auto")
        backward(model(torch.ones(2, 6)).sum())
        optimizer.step()
        run.close()
        return run.stats.bytes_wire

    assert sl.simulate(case, ranks=1).results == (0,)


def test_small_buckets_leave_while_backward_goes_on() -> None:
    def case(world: sl.World) -> list[str]:
        model = mlp()
        run, _ = run_of(model, bucket_bytes=1)
        sent: list[str] = []
        start = strategy_run(run).communicator.launch_sum

        def noted(flat: Tensor, what: str, in_comm_task: bool = False) -> Any:
            sent.append(what)
            return start(flat, what, in_comm_task)

        strategy_run(run).communicator.launch_sum = noted  # type: ignore[method-assign]
        seen_at_input: list[int] = []
        x = torch.ones(2, 6, requires_grad=True)
        x.register_hook(  # type: ignore[no-untyped-call]
            lambda _: seen_at_input.append(len(sent))
        )
        for _ in range(2):
            backward(model(x).sum())
        assert seen_at_input[0] >= 4  # all but the first layer's have left when backward reaches the input
        return sent

    results = sl.simulate(case, ranks=2).results
    assert results[0] == results[1]
    assert len(results[0]) == 14  # six parameters, each a bucket, and the control numbers; two steps


def test_accumulation_adds_up_and_reduces_once() -> None:
    def case(world: sl.World) -> tuple[Any, int]:
        model = mlp()
        run, _ = run_of(model)
        draw = torch.Generator().manual_seed(world.rank)
        batches = [torch.randn(4, 6, generator=draw) for _ in range(3)]
        for x in batches[:-1]:
            with run.no_sync():
                backward(model(x).square().mean())
        sent = run.stats.bytes_logical
        assert sent == 0
        backward(model(batches[-1]).square().mean())
        return gradients(model), run.stats.bytes_logical

    def expected() -> dict[str, Tensor]:
        model = mlp()
        for rank in range(2):
            draw = torch.Generator().manual_seed(rank)
            for _ in range(3):
                backward(model(torch.randn(4, 6, generator=draw)).square().mean() / 2)
        return gradients(model)

    wanted = expected()
    for found, sent in sl.simulate(case, ranks=2).results:
        assert sent > 0
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name])


class Branches(nn.Module):
    """A trunk, and two heads of which one may stay unused; a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.trunk.weight

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        result: Tensor = self.heads[head](self.tied(self.trunk(x)))
        return result


def seeded(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def mean_of(make: Any, ranks: int, loss: Any) -> dict[str, Any]:
    """The mean of the gradients, taken in one process."""
    model = make()
    for rank in range(ranks):
        backward(loss(model, rank) / ranks)
    return gradients(model)


def branches() -> Branches:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Branches()


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert (gradient is None) == (wanted[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted[name], msg=f"{name}: {gradient} is not {wanted[name]}")


def test_unused_and_shared_parameters() -> None:
    def case(world: sl.World) -> list[dict[str, Any]]:
        model = branches()
        _, optimizer = run_of(model, rate=0.0)
        found = []
        for head in (0, 0, 1, 0):  # the second head comes when its place was given up, and stays away again
            optimizer.zero_grad()
            backward(model(seeded(world.rank, 3, 4), head).square().mean())
            found.append(gradients(model))
        return found

    results = sl.simulate(case, ranks=2).results
    for found in results:
        for head, step in zip((0, 0, 1, 0), found, strict=True):
            wanted = mean_of(
                branches, 2, lambda model, rank, head=head: model(seeded(rank, 3, 4), head).square().mean()
            )
            assert_same(step, wanted)


def test_gradients_of_before_stay_where_nothing_new_came() -> None:
    def case(world: sl.World) -> tuple[dict[str, Any], dict[str, Any]]:
        model = branches()
        run_of(model, rate=0.0)
        backward(model(seeded(world.rank, 3, 4), 0).square().mean())
        backward(model(seeded(world.rank, 3, 4), 1).square().mean())
        first = gradients(model)
        backward(model(seeded(world.rank, 3, 4), 0).square().mean())
        return first, gradients(model)

    def loss(heads: tuple[int, ...]) -> Any:
        return lambda model, rank: sum(model(seeded(rank, 3, 4), head).square().mean() for head in heads)

    for first, second in sl.simulate(case, ranks=3).results:
        assert_same(first, mean_of(branches, 3, loss((0, 1))))
        assert_same(second, mean_of(branches, 3, loss((0, 1, 0))))


def test_frozen_parameters_that_thaw() -> None:
    def case(world: sl.World) -> list[Any]:
        model = mlp()
        model[0].requires_grad_(False)
        _, optimizer = run_of(model, rate=0.0)
        found = []
        for step in range(4):
            model[0].requires_grad_(step >= 2)
            optimizer.zero_grad()
            backward(model(seeded(world.rank, 4, 6)).square().mean())
            found.append(gradients(model))
        return found

    wanted = mean_of(mlp, 2, lambda model, rank: model(seeded(rank, 4, 6)).square().mean())
    for found in sl.simulate(case, ranks=2).results:
        assert found[1]["0.weight"] is None
        assert_same(found[2], wanted)
        assert_same(found[3], wanted)
        assert_same(
            {k: v for k, v in found[1].items() if k[0] != "0"}, {k: v for k, v in wanted.items() if k[0] != "0"}
        )


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(20, 4, sparse=sparse)
            self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.words(x))
        return result


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sparse_gradients(ranks: int) -> None:
    def case(world: sl.World, sparse: bool) -> tuple[Tensor, int]:
        model = Words(sparse)
        run, optimizer = run_of(model, rate=0.5)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randint(0, 20, (5,), generator=torch.Generator().manual_seed(10 * step + world.rank))
            backward(model(x).square().mean())
            assert model.words.weight.grad is not None
            assert model.words.weight.grad.is_sparse == sparse
            optimizer.step()
        return flat(model), run.stats.bytes_logical

    sparse = sl.simulate(lambda world: case(world, True), ranks=ranks).results
    dense = sl.simulate(lambda world: case(world, False), ranks=ranks).results
    assert all(torch.equal(sparse[0][0], other[0]) for other in sparse)
    torch.testing.assert_close(sparse[0][0], dense[0][0])


def test_dtypes_may_behash_places() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            draw = torch.Generator().manual_seed(0)
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
                value = torch.randn(5, generator=draw).to(dtype)
                self.register_parameter(f"of_{str(dtype).split(chr(46))[1]}", nn.Parameter(value))

        def forward(self, x: float) -> Tensor:
            return sum(((p * x).abs().double().sum() for p in self.parameters()), torch.zeros((), dtype=torch.double))

    def case(world: sl.World) -> dict[str, Any]:
        model = Mixed()
        run_of(model, algorithm="naive")
        for _ in range(2):
            model.zero_grad()
            backward(model(float(world.rank + 1)))
        return gradients(model)

    wanted = mean_of(Mixed, 2, lambda model, rank: model(float(rank + 1)))
    for found in sl.simulate(case, ranks=2).results:
        assert_same(found, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["middle", "all"])
def test_activation_checkpointing(reentrant: bool, where: str) -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        if where == "all":
            return checkpoint(model, x, use_reentrant=reentrant)  # type: ignore[no-any-return]
        x = checkpoint(model[:3], x, use_reentrant=reentrant)
        result: Tensor = model[3:](x)
        return result

    def case(world: sl.World) -> list[dict[str, Any]]:
        model = mlp()
        _, optimizer = run_of(model, rate=0.0)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            backward(forward(model, seeded(world.rank, 4, 6)).square().mean())
            found.append(gradients(model))
        return found

    wanted = mean_of(mlp, 2, lambda model, rank: model(seeded(rank, 4, 6)).square().mean())
    for found in sl.simulate(case, ranks=2).results:
        for step in found:
            assert_same(step, wanted)


def test_lbfgs_takes_the_same_steps_everywhere() -> None:
    def case(world: sl.World) -> Tensor:
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")
        sl.distribute(model, optimizer, algorithm="ring")
        whole = seeded(7, 12, 6)
        x = whole[world.rank :: world.size]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(x) - 1).square().mean()
            backward(loss)
            return loss

        for _ in range(3):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        return flat(model)

    alone = sl.simulate(case, ranks=1).results[0]
    together = sl.simulate(case, ranks=3).results
    assert all(torch.equal(together[0], other) for other in together)
    assert distance(together[0], alone) < 1e-3


def test_two_models_on_their_own_teams() -> None:
    def case(world: sl.World) -> tuple[Tensor, Tensor]:
        maker, judge = mlp(0), nn.Sequential(nn.Linear(3, 1))
        with torch.no_grad():
            for parameter in judge.parameters():
                parameter.fill_(0.1)
        make_run, make_step = run_of(maker, bucket_bytes=1)
        judge_run, judge_step = run_of(judge)
        assert strategy_run(make_run).communicator.group is not strategy_run(judge_run).communicator.group
        for step in range(4):
            x = seeded(10 * step + world.rank, 4, 6)
            judge_step.zero_grad()
            backward(judge(maker(x).detach()).square().mean())
            judge_step.step()
            make_step.zero_grad()
            with judge_run.no_sync():  # its gradients are not wanted here
                backward(judge(maker(x)).mean())
            make_step.step()
        return flat(maker), flat(judge)

    results = sl.simulate(case, ranks=3).results
    for made, judged in results:
        assert torch.equal(made, results[0][0])
        assert torch.equal(judged, results[0][1])


def test_a_backward_that_broke_off_leaves_nothing_behind() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            raise ValueError("on purpose")

    def case(world: sl.World) -> dict[str, Any]:
        model = mlp()
        run_of(model)
        x = seeded(world.rank, 4, 6)
        with pytest.raises(ValueError, match="on purpose"):
            backward(model[4](Broken.apply(model[:4](x))).square().mean())  # type: ignore[no-untyped-call]
        model.zero_grad()
        backward(model(x).square().mean())
        return gradients(model)

    wanted = mean_of(mlp, 2, lambda model, rank: model(seeded(rank, 4, 6)).square().mean())
    for found in sl.simulate(case, ranks=2).results:
        assert_same(found, wanted)


def test_after_close_gradients_are_local() -> None:
    def case(world: sl.World) -> float:
        model = nn.Linear(1, 1, bias=False)
        run, _ = run_of(model)
        run.close()
        backward(model(torch.tensor([[float(world.rank)]])).sum())
        assert model.weight.grad is not None
        return float(model.weight.grad)

    assert sl.simulate(case, ranks=2).results == (0.0, 1.0)


def test_agreed_averages_batch_norm_and_gives_it_back() -> None:
    def case(world: sl.World) -> tuple[float, float, int]:
        model = nn.BatchNorm1d(1, momentum=1.0)
        run, _ = run_of(model)
        model(torch.tensor([[1.0], [3.0]]) * (world.rank + 1))
        assert model.running_mean is not None
        assert model.num_batches_tracked is not None
        with run.agreed():
            agreed = float(model.running_mean)
            with run.agreed():  # within one another it is the same
                assert float(model.running_mean) == agreed
        return agreed, float(model.running_mean), int(model.num_batches_tracked)

    assert sl.simulate(case, ranks=3).results == ((4.0, 2.0, 1), (4.0, 4.0, 1), (4.0, 6.0, 1))
