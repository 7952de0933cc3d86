"""`DistributedOptimizer`: backward, synchronize, step and zero_grad in all orders that scripts have."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import syncline as sl
from syncline.compat.horovod.context import Sum, init, shutdown
from syncline.compat.horovod.ops import join
from syncline.compat.horovod.optimizer import DistributedOptimizer
from syncline.testing import Pool
from tests.compat.horovod.training import assert_same, batch, expected, gradients, loss_of, wrapped
from tests.strategies.cases import backward, flat, mlp, on_gloo


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=rate)


def one_step(model: nn.Module, rank: int) -> Tensor:
    return loss_of(model, 0, rank)


def test_a_pass_too_many_is_refused() -> None:
    def case(world: sl.World) -> None:
        init()
        model = mlp()
        optimizer = wrapped(model, sgd(model), backward_passes_per_step=2)
        for _ in range(2):
            backward(loss_of(model, 0, world.rank))
        with pytest.raises(AssertionError, match=r"4\.(weight|bias).*backward_passes_per_step=2"):
            backward(loss_of(model, 0, world.rank))
        optimizer.step()
        backward(loss_of(model, 0, world.rank))  # a new step

    sl.simulate(case, ranks=2)


@pytest.mark.parametrize("passes", [1, 2])
def test_zero_grad_between_backward_and_step_is_refused(passes: int) -> None:
    def case(world: sl.World) -> None:
        init()
        model = mlp()
        optimizer = wrapped(model, sgd(model), backward_passes_per_step=passes)
        optimizer.zero_grad()
        backward(loss_of(model, 0, world.rank))
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward\(\)"):
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.zero_grad()
        backward(loss_of(model, 0, world.rank))
        optimizer.step()
        optimizer.zero_grad()

    sl.simulate(case, ranks=2)


def test_clipping_between_synchronize_and_step() -> None:
    def case(world: sl.World) -> Tensor:
        init()
        model = mlp()
        optimizer = wrapped(model, sgd(model, rate=1.0))
        backward(loss_of(model, 0, world.rank))
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        return flat(model)

    model = mlp()
    for rank in range(3):
        backward(loss_of(model, 0, rank) / 3)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    sgd(model, rate=1.0).step()
    for found in sl.simulate(case, ranks=3).results:
        torch.testing.assert_close(found, flat(model))


@pytest.mark.xdist_group("gloo")
def test_step_after_synchronize_warns_and_reduces_no_second_time(gloo: Pool) -> None:
    for found, said in gloo.run(on_gloo, 2, _step_after_synchronize):  # processes: what warns is the whole process
        assert_same(found, expected(2, mlp, one_step, total=True))
        assert len(said) == 2
        assert all("skip_synchronize" in text for text in said)


def _step_after_synchronize(world: sl.World) -> tuple[dict[str, Any], list[str]]:
    init()
    model = mlp()
    optimizer = wrapped(model, sgd(model, rate=0.0), op=Sum)  # where a second sum would show
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            backward(loss_of(model, 0, world.rank))
            optimizer.synchronize()
            optimizer.step()
    shutdown()
    return gradients(model), [str(each.message) for each in caught]


def test_synchronize_twice_sums_once() -> None:
    def case(world: sl.World) -> dict[str, Any]:
        init()
        model = mlp()
        optimizer = wrapped(model, sgd(model, rate=0.0), op=Sum)
        backward(loss_of(model, 0, world.rank))
        optimizer.synchronize()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        return gradients(model)

    for found in sl.simulate(case, ranks=2).results:
        assert_same(found, expected(2, mlp, one_step, total=True))


def test_a_scaler_sees_the_mean() -> None:
    def case(world: sl.World) -> Tensor:
        init()
        model = mlp()
        optimizer = wrapped(model, sgd(model))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            backward(scaler.scale(loss_of(model, step, world.rank)))
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return flat(model)

    model = mlp()
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            backward(loss_of(model, step, rank) / 2)
        optimizer.step()
    for found in sl.simulate(case, ranks=2).results:
        torch.testing.assert_close(found, flat(model))


@pytest.mark.parametrize("kind", ["sgd", "lbfgs"])
def test_step_with_a_closure(kind: str) -> None:
    def case(world: sl.World) -> tuple[Tensor, float]:
        init()
        model = mlp()
        plain: Any = sgd(model)
        if kind == "lbfgs":
            plain = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
        optimizer = wrapped(model, plain)
        whole = batch(0, 0, rows=12)
        mine = whole[world.rank :: world.size]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(mine) - 1).square().mean()
            backward(loss)
            return loss

        for _ in range(3):
            loss = optimizer.step(closure)
        return flat(model), float(loss.detach())

    [(alone, last)] = sl.simulate(case, ranks=1).results
    together = sl.simulate(case, ranks=3).results
    for found, loss in together:
        assert torch.equal(found, together[0][0])
        assert loss == together[0][1]
        assert float((found - alone).norm() / alone.norm()) < 1e-3
        assert loss == pytest.approx(last, rel=1e-3)


class Gan:
    """Two models with an optimizer each, as scripts have them."""

    def __init__(self, distributed: bool, judge_passes: int) -> None:
        self.maker, self.judge = mlp(0), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.judge.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
        self.make_step: Any = torch.optim.Adam(self.maker.parameters(), lr=0.01)
        self.judge_step: Any = torch.optim.Adam(self.judge.parameters(), lr=0.01)
        if distributed:
            self.make_step = DistributedOptimizer(self.make_step, self.maker.named_parameters())
            self.judge_step = DistributedOptimizer(
                self.judge_step, self.judge.named_parameters(), backward_passes_per_step=judge_passes
            )

    def fakes(self, step: int, rank: int) -> Tensor:
        found: Tensor = self.maker(batch(step, rank))
        return found

    def real(self, step: int, rank: int) -> Tensor:
        found: Tensor = self.judge(batch(step + 50, rank)[:, :3]).square().mean()
        return found

    def state(self) -> Tensor:
        return torch.cat([flat(self.maker), flat(self.judge)])


def judged(gan: Gan, step: int, ranks: list[int], separate: bool) -> None:
    for rank in ranks:
        fake = gan.fakes(step, rank)
        losses = [gan.real(step, rank), (gan.judge(fake.detach()) - 1).square().mean()]
        for loss in losses if separate else [losses[0] + losses[1]]:
            backward(loss / len(ranks))


def gan_loop(gan: Gan, ranks: list[int], separate: bool, zero: str) -> Tensor:
    for step in range(4):
        (gan.judge_step if zero == "optimizer" else gan.judge).zero_grad()
        judged(gan, step, ranks, separate)
        gan.judge_step.step()
        gan.make_step.zero_grad()
        for rank in ranks:
            backward(gan.judge(gan.fakes(step, rank)).square().mean() / len(ranks))
        gan.make_step.step()
    return gan.state()


@pytest.mark.parametrize("zero", ["optimizer", "model"])
@pytest.mark.parametrize("separate", [False, True])
def test_a_gan_with_two_optimizers(separate: bool, zero: str) -> None:
    def case(world: sl.World) -> Tensor:
        init()
        return gan_loop(Gan(True, 2 if separate else 1), [world.rank], separate, zero)

    wanted = gan_loop(Gan(False, 1), [0, 1, 2], separate, zero)
    results = sl.simulate(case, ranks=3).results
    for found in results:
        assert torch.equal(found, results[0])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_gan_that_steps_at_the_end() -> None:
    def loop(gan: Gan, ranks: list[int]) -> Tensor:
        for step in range(3):
            gan.make_step.zero_grad()
            for rank in ranks:
                backward(gan.judge(gan.fakes(step, rank)).square().mean() / len(ranks))
            gan.judge_step.zero_grad()  # drops what came through the judge: that pass was the maker's
            judged(gan, step, ranks, separate=False)
            gan.make_step.step()
            gan.judge_step.step()
        return gan.state()

    def case(world: sl.World) -> Tensor:
        init()
        return loop(Gan(True, 1), [world.rank])

    wanted = loop(Gan(False, 1), [0, 1])
    for found in sl.simulate(case, ranks=2).results:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_two_optimizers_with_different_gradient_orders() -> None:
    def loss(models: tuple[nn.Module, nn.Module], rank: int) -> Tensor:
        first, second = models if rank % 2 == 0 else models[::-1]
        x: Tensor = first(batch(0, rank)).sum()
        y: Tensor = second(batch(0, rank)).square().sum()
        return x + y if rank % 2 == 0 else y * 1.0 + x

    def case(world: sl.World) -> list[dict[str, Any]]:
        init()
        models = mlp(0), mlp(1)
        optimizers = [wrapped(model, sgd(model, rate=0.0), backward_passes_per_step=2) for model in models]
        for _ in range(2):
            backward(loss(models, world.rank))
        for optimizer in optimizers:
            optimizer.step()
        backward(loss(models, world.rank))
        for optimizer in optimizers:  # half of the passes: each step reduces, and the first leaves the other's alone
            optimizer.step()
        return [gradients(model) for model in models]

    def alone(rank: int) -> Tensor:
        models = mlp(0), mlp(1)
        for _ in range(2):
            backward(loss(models, rank))
        return torch.cat([p.grad.reshape(-1) for m in models for p in m.parameters() if p.grad is not None])

    mean = torch.stack([alone(rank) for rank in range(2)]).mean(dim=0)
    later = mean + mean / 2  # what was reduced stays, and the mean of it is itself
    for found in sl.simulate(case, ranks=2).results:
        row = torch.cat([gradient.reshape(-1) for each in found for gradient in each.values()])
        torch.testing.assert_close(row, later, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, passes: int) -> None:
    def loss(model: Any, rank: int) -> Tensor:
        x = batch(0, rank).requires_grad_()
        hidden: Tensor = checkpoint(model[:3], x, use_reentrant=reentrant)
        if reentrant and passes > 1:  # its inner passes look like passes of their own, unless an outer one is open
            outer: Tensor = model[3:](hidden).square().mean()
            return outer
        result: Tensor = checkpoint(model[3:], hidden, use_reentrant=reentrant).square().mean()
        return result

    def case(world: sl.World) -> list[dict[str, Any]]:
        init()
        model = mlp()
        optimizer = wrapped(model, sgd(model, rate=0.0), backward_passes_per_step=passes)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(passes):
                backward(loss(model, world.rank))
            found.append(gradients(model))
            optimizer.step()
        return found

    wanted = expected(2, mlp, lambda model, rank: passes * loss(model, rank))
    for steps in sl.simulate(case, ranks=2).results:
        for found in steps:
            assert_same(found, wanted)


def test_the_last_optimizer_of_a_model_is_the_one_that_reduces() -> None:
    def case(world: sl.World) -> dict[str, Any]:
        init()
        model = mlp()
        wrapped(model, sgd(model, rate=0.0), op=Sum)
        optimizer = wrapped(model, sgd(model, rate=0.0), op=Sum)
        backward(loss_of(model, 0, world.rank))
        optimizer.step()
        return gradients(model)

    for found in sl.simulate(case, ranks=2).results:
        assert_same(found, expected(2, mlp, one_step, total=True))


def test_a_closure_goes_on_beside_a_rank_that_has_joined() -> None:
    """Its loss is that of the gradients: the sum over those with data, divided by all."""

    def case(world: sl.World) -> float:
        init()
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.tensor([[4.0]])).sum()
            backward(loss)
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(1 if world.rank == 1 else 3)]
        join()
        return losses[-1]

    assert sl.simulate(case, ranks=2).results == (2.0, 4.0)
