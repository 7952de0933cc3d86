"""Models with regions that work on strips, attached by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import syncline as sl
from syncline.parallel.spatial_layers import spatial_divisions
from syncline.parallel.team import LayerTeam
from syncline.world import World


def divide(
    model: nn.Module, world: World, regions: Sequence[str] = ("",), axis: str = "height"
) -> tuple[nn.Module, LayerTeam]:
    """A copy of a model whose regions work on strips, and the team."""
    copied, team = copy.deepcopy(model), LayerTeam(world.group())
    for division in spatial_divisions(copied, regions, axis, world.size):
        division.attach(team)
    return copied, team


Result = dict[str, Tensor]


def compute(model: nn.Module, x: Tensor, steps: int = 1, optimizer: Any = None) -> Result:
    """The output, the gradients of the input and of the first step, and all tensors after some steps."""
    x = x.clone().requires_grad_(x.is_floating_point())
    found: Result = {}
    optimizer = optimizer or torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(()))], lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        output = model(x)
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape).cos()
        torch.autograd.backward((output * weights + 0.1 * output.square()).sum() / len(output))
        if step == 0:
            found["output"] = output.detach().clone()
            found |= {
                f"d {name}": each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
            }
            assert x.grad is not None
            found["d input"] = x.grad.clone()
        optimizer.step()
    return found | {name: each.detach().clone() for name, each in model.state_dict().items()}


def compare(found: Result, expected: Result, tolerance: float = 1e-10) -> None:
    """All results are the same, up to rounding."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is Tensor
        assert torch.allclose(found[name], value, rtol=tolerance, atol=tolerance), (name, found[name], value)


def check_equal(
    model: nn.Module,
    x: Tensor,
    workers: int,
    regions: Sequence[str] = ("",),
    axis: str = "height",
    steps: int = 1,
    tolerance: float = 1e-10,
) -> list[LayerTeam]:
    """A divided model computes and trains as the whole one does. Returns the teams of all workers."""
    expected = compute(copy.deepcopy(model), x, steps)

    def work(world: World) -> tuple[Result, LayerTeam]:
        divided, team = divide(model, world, regions, axis)
        return compute(divided, x, steps), team

    results = sl.simulate(work, workers).results
    for found, _ in results:
        compare(found, expected, tolerance)
    return [team for _, team in results]


def images(*shape: int, seed: int = 0) -> Tensor:
    """Values of the normal distribution."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seeded(make: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    """A model with float64 weights of its own random stream."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().double()
