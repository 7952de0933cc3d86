"""Gradients that come late, from some ranks only, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from tests.reduction.ddp.autograd import Fails, WithNone
from tests.reduction.ddp.parameters import Heads
from tests.reduction.ddp.sides import after_gradient, applied, gradients, net
from tests.strategies.cases import backward

ONE_HOST = sl.Network(latency=1e-5, bandwidth=1e9, ranks_per_host=2, inside=sl.Link(latency=1e-6, bandwidth=1e10))


def attach(model: nn.Module, **options: Any) -> tuple[sl.Run, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    algorithm = "auto" if "codec" in options else "ring"
    return sl.distribute(model, optimizer, **{"algorithm": algorithm, **options}), optimizer


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def seeded(make: Any, *arguments: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(*arguments)


def assert_same(found: dict[str, Any], wanted: dict[str, Any], rough: bool = False) -> None:
    for name, gradient in found.items():
        other = wanted[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and not rough:
            torch.testing.assert_close(gradient.to_dense(), other.to_dense(), msg=name)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1}, {"codec": "quantize(8)"}], ids=str)
@pytest.mark.parametrize("strategy", ["allreduce", "allreduce(delay=1)"])
def test_a_function_that_returns_none_leaves_no_gradient(strategy: str, options: dict[str, Any]) -> None:
    def case(world: sl.World) -> dict[str, Any]:
        model = seeded(WithNone, True)
        _, optimizer = attach(model, strategy=strategy, **options)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model(batch(world.rank)).square().mean())
        return gradients(model)

    alone = seeded(WithNone, True)
    for rank in range(2):
        backward(alone(batch(rank)).square().mean() / 2)
    for found in sl.simulate(case, ranks=2).results:
        assert found["weight"] is None
        assert_same(found, gradients(alone), rough="codec" in options)


class Experts(nn.Module):
    """A body, and experts of two kinds of which a batch uses one each: dense ones, and embeddings of sparse rows."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = Heads()
        self.words = nn.ModuleList([nn.Embedding(6, 2, sparse=True) for _ in range(2)])

    def forward(self, x: Tensor, expert: int) -> Tensor:
        found: Tensor = self.heads(x, expert) * self.words[expert % 2](torch.tensor([1, 3])).sum(dim=0)
        return found


def used(rank: int, step: int) -> int:
    """The expert of a rank's batch: at first the same one everywhere, then others."""
    return 0 if step == 0 else (step + rank) % 3


def wanted_gradients(ranks: int, step: int, model: Any) -> dict[str, Any]:
    """The mean in which a rank without a parameter counts with zeros; added to what the model has."""
    for rank in range(ranks):
        backward(model(batch(rank, step), used(rank, step)).square().mean() / ranks)
    return gradients(model)


@pytest.mark.parametrize("added", [False, True], ids=["zeroed", "added"])
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1}, {"check_finite": True}], ids=str)
def test_a_parameter_some_ranks_use_gets_the_mean(options: dict[str, Any], added: bool) -> None:
    def case(world: sl.World) -> list[dict[str, Any]]:
        model = seeded(Experts)
        attach(model, find_unused_parameters=True, **options)
        found = []
        for step in range(4):
            if not added:
                model.zero_grad()
            backward(model(batch(world.rank, step), used(world.rank, step)).square().mean())
            found.append(gradients(model))
        return found

    alone = seeded(Experts)
    wanted = []
    for step in range(4):
        if not added:
            alone.zero_grad()
        wanted.append(wanted_gradients(3, step, alone))
    for found in sl.simulate(case, ranks=3).results:
        for mine, other in zip(found, wanted, strict=True):
            assert_same(mine, other)


@pytest.mark.parametrize("options", [{"codec": "topk(0.5)"}, {"strategy": "allreduce(delay=1)"}], ids=str)
def test_partly_used_parameters_with_codec_and_delay(options: dict[str, Any]) -> None:
    def case(world: sl.World) -> list[Any]:
        model = seeded(Heads)
        _, optimizer = attach(model, find_unused_parameters=True, **options)
        found = []
        for step in range(5):
            optimizer.zero_grad()
            backward(model(batch(world.rank, step), used(world.rank, step)).square().mean())
            found.append({name: each is not None for name, each in gradients(model).items()})
            optimizer.step()
        return [*found, gradients(model), model.state_dict()]

    first, *others = sl.simulate(case, ranks=3).results
    delay = 1 if "strategy" in options else 0
    for step in range(delay, 5):
        experts = {used(rank, step - delay) for rank in range(3)}
        assert {name for name, there in first[step].items() if there} == {
            name for name in first[step] if "body" in name or int(name.split(".")[1]) in experts
        }
    for other in others:
        assert str(other) == str(first)


def test_find_unused_parameters_with_uneven_data() -> None:
    def case(world: sl.World) -> list[float]:
        model = seeded(Heads)
        run, optimizer = attach(model, find_unused_parameters=True)
        for x in run.shard([batch(world.rank, step) for step in range(2 + world.rank)], split=False):
            optimizer.zero_grad()
            backward(model(x, world.rank).square().mean())
            optimizer.step()
        return [float(each.detach().sum()) for each in model.parameters()]

    first, second = sl.simulate(case, ranks=2).results
    assert first == second


def test_without_the_option_the_refusal_names_it() -> None:
    def case(world: sl.World) -> None:
        model = Heads()
        attach(model)
        backward(model(batch(world.rank), world.rank).sum())

    with pytest.raises(
        sl.errors.IncompatibleError, match=r"on ranks \[0\] but not on ranks \[1\].*find_unused_parameters=True"
    ):
        sl.simulate(case, ranks=2)


def test_an_error_in_backward_leaves_the_next_pass_whole() -> None:
    def case(world: sl.World) -> dict[str, Any]:
        model = seeded(Heads)
        attach(model)
        failing = model.body.register_forward_hook(lambda module, inputs, output: applied(Fails, output))
        with pytest.raises(ValueError, match="middle"):
            backward(model(batch(world.rank), 0).square().mean())
        failing.remove()
        model.zero_grad()
        backward(model(batch(world.rank), 1).square().mean())  # begins with parameters that the first had not reached
        return gradients(model)

    alone = seeded(Heads)
    for rank in range(2):
        backward(alone(batch(rank), 1).square().mean() / 2)
    for found in sl.simulate(case, ranks=2).results:
        assert_same(found, gradients(alone))


def test_hooks_registered_later_see_this_ranks_gradient() -> None:
    def case(world: sl.World) -> None:
        model = seeded(net)
        attach(model, bucket_bytes=1)
        for _ in range(3):
            seen: dict[Tensor, Tensor] = {}

            def look(parameter: Any, seen: dict[Tensor, Tensor] = seen) -> None:
                seen[parameter] = parameter.grad.clone()

            handles = [after_gradient(each, look) for each in model.parameters()]
            local = torch.autograd.grad(model(batch(world.rank)).square().mean(), list(model.parameters()))
            model.zero_grad()
            backward(model(batch(world.rank)).square().mean())
            for handle in handles:
                handle.remove()
            for parameter, own in zip(model.parameters(), local, strict=True):
                assert torch.equal(seen[parameter], own)

    sl.simulate(case, ranks=2)


@pytest.mark.parametrize("part", [0, 2])
@pytest.mark.parametrize("strategy", ["allreduce", "local(period=1)", "easgd(period=1)", "hogwild"])
def test_a_model_converted_after_distribute_is_refused(strategy: str, part: int) -> None:
    def case(world: sl.World) -> None:
        model: Any = net()
        _, optimizer = attach(model, strategy=strategy)
        if strategy == "hogwild":
            model.double()
        else:
            model[part].double()
        first, last = (layer.weight.dtype for layer in (model[0], model[2]))
        backward(model[2](model[0](batch(world.rank).to(first)).to(last)).square().mean())
        optimizer.step()

    with pytest.raises(sl.errors.IncompatibleError, match=r"convert the model first .*call distribute"):
        sl.simulate(case, ranks=2, network=ONE_HOST)


def test_a_step_inside_backward_is_refused() -> None:
    def case(world: sl.World) -> None:
        model: Any = net()
        _, optimizer = attach(model)
        after_gradient(model[0].weight, lambda parameter: optimizer.step())
        backward(model(batch(world.rank)).sum())

    with pytest.raises(sl.errors.IncompatibleError, match="steps while backward runs"):
        sl.simulate(case, ranks=2)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(("strategy", "before"), [("allreduce", True), ("allreduce", False), ("local(period=2)", True)])
def test_torchs_optimizer_in_backward_is_refused(strategy: str, before: bool) -> None:
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    def case(world: sl.World) -> None:
        model = net()
        if before:
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        attach(model, strategy=strategy)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        backward(model(batch(world.rank)).sum())

    with pytest.raises(sl.errors.IncompatibleError, match="in backward"):
        sl.simulate(case, ranks=2)


@pytest.mark.parametrize("strategy", ["allreduce", "local(period=2)", "bsp"])
def test_a_replaced_parameter_is_refused(strategy: str) -> None:
    def case(world: sl.World) -> None:
        model: Any = net()
        run, _ = attach(model, strategy=strategy)
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        with run.agreed():
            pass

    with pytest.raises(sl.errors.IncompatibleError, match=r"0\.weight was replaced in the model"):
        sl.simulate(case, ranks=2)


@pytest.mark.parametrize("strategy", ["allreduce", "local(period=2, after=3)"])
@pytest.mark.parametrize("part", [0, slice(None)])
def test_a_swapped_tensor_is_refused(strategy: str, part: Any) -> None:
    def case(world: sl.World) -> None:
        model: Any = net()
        _, optimizer = attach(model, strategy=strategy)
        for parameter in model[part].parameters():
            other = nn.Parameter(parameter.detach().clone())
            torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
        backward(model(batch(world.rank)).sum())
        optimizer.step()

    with pytest.raises(sl.errors.IncompatibleError, match=r"exchanged for another .* no longer averaged"):
        sl.simulate(case, ranks=2)


def test_elements_in_one_place_are_refused() -> None:
    def case(world: sl.World) -> None:
        model = net()
        model.register_buffer("mask", torch.ones(2, 1).expand(2, 3))
        attach(model)

    with pytest.raises(sl.errors.IncompatibleError, match=r"elements of mask lie in one place"):
        sl.simulate(case, ranks=2)


@pytest.mark.parametrize("told", [True, False])
def test_first_steps_of_local_count_zeros_for_the_unused(told: bool) -> None:
    def case(world: sl.World) -> list[float]:
        model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        _, optimizer = attach(model, strategy="local(period=2, after=2)", find_unused_parameters=told)
        before = [float(parameter.detach()) for parameter in model.parameters()]
        backward(model[world.rank](torch.ones(1, 1)).sum())
        optimizer.step()
        after = [float(parameter.detach()) for parameter in model.parameters()]
        return [new - old for new, old in zip(after, before, strict=True)]

    for moved in sl.simulate(case, ranks=2).results:
        assert moved == pytest.approx([-0.05, -0.05])
