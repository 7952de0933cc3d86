"""Models that tests divide by hand, and train on simulated workers and alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import syncline as sl
from syncline.model_parts import DimensionSlice
from syncline.parallel.division import LayerDivision, take_share
from syncline.parallel.team import LayerTeam
from syncline.parallel.tensor_layers.plan import TensorPlan, plan_divisions
from syncline.world import World

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
Plan = TensorPlan | Mapping[str, Any]
Loss = Callable[[nn.Module, Tensor], Tensor]


@dataclass
class Divided:
    """A model that is divided over the workers of a world."""

    model: nn.Module
    team: LayerTeam
    divisions: list[LayerDivision]
    slices: dict[str, DimensionSlice]

    def detach(self) -> None:
        """Make the modules what they were. Their tensors stay this worker's share."""
        for division in reversed(self.divisions):
            division.detach()


@dataclass
class Trained:
    """What a worker has after some steps."""

    losses: list[float]
    gradients: dict[str, Tensor]
    """After the first step."""
    state: dict[str, Tensor]
    slices: dict[str, DimensionSlice]


def divide(world: World, model: nn.Module, plan: Plan) -> Divided:
    """Give this worker its share of a model."""
    divisions = plan_divisions(model, plan, world.size)
    shares = [division.share(world.rank, world.size) for division in divisions]
    team = LayerTeam(world.group())
    slices: dict[str, DimensionSlice] = {}
    for division, share in zip(divisions, shares, strict=True):
        take_share(division.module, share)
        division.attach(team)
        slices |= {f"{division.name}.{name}" if division.name else name: cut for name, cut in share.slices.items()}
    return Divided(model, team, divisions, slices)


def backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)


def train(model: nn.Module, loss: Loss, batches: Sequence[Tensor], optimizer: str) -> Trained:
    """Train some steps."""
    own = OPTIMIZERS[optimizer](model.parameters())
    found = Trained([], {}, {}, {})
    for batch in batches:
        own.zero_grad()
        value = loss(model, batch)
        backward(value)
        if not found.losses:
            found.gradients = {
                name: each.grad.to_dense().clone() for name, each in model.named_parameters() if each.grad is not None
            }
        own.step()
        found.losses.append(value.item())
    found.state = {name: each.detach().clone() for name, each in model.state_dict().items()}
    return found


def join(parts: Sequence[dict[str, Tensor]], cuts: Sequence[dict[str, DimensionSlice]]) -> dict[str, Tensor]:
    """The tensors of all workers put together. Tensors that are not divided are equal to the bit."""
    whole: dict[str, Tensor] = {}
    for name, first in parts[0].items():
        if name not in cuts[0]:
            assert all(torch.equal(part[name], first) for part in parts), name
            whole[name] = first
            continue
        shape = list(first.shape)
        shape[cuts[0][name].dimension] = cuts[0][name].size
        whole[name] = first.new_full(shape, float("nan"))
        for part, cut in zip(parts, cuts, strict=True):
            cut[name].put(part[name], whole[name])
    return whole


def check_training(
    make: Callable[[], nn.Module],
    plan: Plan,
    loss: Loss,
    batches: Sequence[Tensor],
    workers: int,
    optimizer: str = "sgd",
    tolerance: float = 1e-10,
) -> None:
    """Compare a divided model with the whole one: losses, gradients, weights after all steps."""
    alone = train(make(), loss, batches, optimizer)

    def work(world: World) -> Trained:
        divided = divide(world, make(), plan)
        found = train(divided.model, loss, batches, optimizer)
        found.slices = divided.slices
        return found

    results = sl.simulate(work, workers).results
    cuts = [result.slices for result in results]
    for result in results:
        assert result.losses == results[0].losses
        assert_close(torch.tensor(result.losses), torch.tensor(alone.losses), tolerance)
    for found, expected in (
        (join([result.gradients for result in results], cuts), alone.gradients),
        (join([result.state for result in results], cuts), alone.state),
    ):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(found[name], value, tolerance, name)


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-10, name: str = "") -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Callable[[], nn.Module]:
    """A function that makes the same model each time, in float64."""

    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make().double()

    return made


def numbers(count: int, *shape: int, seed: int = 1) -> list[Tensor]:
    """Some batches in float64."""
    draw = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, *shape, generator=draw, dtype=torch.float64))
