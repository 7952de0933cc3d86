"""Small things to save, for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import syncline as sl


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.randn(8, 3)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Solo:
    """What `distribute` returns, for one worker."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: sl.World) -> None:
        self.model, self.optimizer, self.world = model, optimizer, world
        self.remembered = 0
        self.inside = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def model_part(self) -> None:
        return None

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        assert not self.inside
        return {"shared": {"remembered": self.remembered}, "local": {"list": [torch.tensor(self.remembered), None]}}

    def load_state_dict(self, state: Any) -> None:
        self.remembered = state["shared"]["remembered"]
        assert int(state["local"]["list"][0]) == self.remembered


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
