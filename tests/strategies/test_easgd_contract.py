"""Elastic averaging keeps the contract of strategies."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from syncline.strategies import Run, Strategy
from syncline.strategies.easgd import EASGD
from syncline.testing import StrategyContract
from tests.strategies.cases import flat


class Elastic(StrategyContract):
    """Tied to a centre: what is conserved is the sum of all weights, the centre's too."""

    strategy: ClassVar[EASGD]
    as_one = False  # the centre comes behind

    def make(self) -> Strategy:
        return self.strategy

    def total(self, run: Run) -> Tensor:
        return flat(run.model) + self.agreed(run) / run.world.size


class TestEasgd(Elastic):
    strategy = EASGD(period=4)


class TestEasgdWithACodec(Elastic):
    strategy = EASGD(period=3)
    options: ClassVar[dict[str, Any]] = {"codec": "quantize(8)"}
    conserves = False  # to the codec's loss


class TestMomentum(Elastic):
    strategy = EASGD(period=4, momentum=0.9)
    optimizers = ("sgd", "adam")  # momentum on top of momentum is refused
    conserves = False  # it goes on by its speed


class TestTree(Elastic):
    strategy = EASGD(period=2, centres=2, root_every=2)

    def total(self, run: Run) -> Tensor:
        values: list[Tensor] = run.centre.values  # type: ignore[attr-defined]
        groups: list[list[int]] = run.centre.groups  # type: ignore[attr-defined]
        group = next(each for each in groups if run.world.rank in each)
        return super().total(run) + torch.cat([value.reshape(-1) for value in values]) / len(group)


class TestServed(Elastic):
    strategy = EASGD(period=4, sync=False)
    exact_resume = False  # who comes first differs


class TestServedMomentum(TestServed):
    strategy = EASGD(period=4, sync=False, momentum=0.9)
    optimizers = ("sgd", "adam")
    conserves = False


class TestServedTree(TestServed):
    strategy = EASGD(period=3, sync=False, centres=2)
    conserves = False  # what groups hold lies at the servers: the hunts look there
