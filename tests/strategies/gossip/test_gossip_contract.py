"""Every kind of gossip keeps the contract of strategies."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from syncline.strategies import Run, Strategy
from syncline.strategies.gossip import Gossip, PairwiseRun
from syncline.testing import StrategyContract


class TestRing(StrategyContract):
    ranks = 4

    def make(self) -> Strategy:
        return Gossip()


class TestBeside(StrategyContract):
    ranks = 4

    def make(self) -> Strategy:
        return Gossip("torus", form="beside")


class TestBesideWithAPeriod(StrategyContract):
    def make(self) -> Strategy:
        return Gossip("exponential", form="beside", period=3)


class TestMatrix(StrategyContract):
    def make(self) -> Strategy:
        return Gossip(((0.8, 0.2, 0.0), (0.2, 0.5, 0.3), (0.0, 0.3, 0.7)), period=2)


class TestCompressed(StrategyContract):
    ranks = 4
    options: ClassVar[dict[str, Any]] = {"codec": "topk(0.2)"}

    def make(self) -> Strategy:
        return Gossip()


class TestCompressedBeside(StrategyContract):
    ranks = 4
    options: ClassVar[dict[str, Any]] = {"codec": "quantize(4)", "seed": 3}
    as_one = False  # each worker's random bits are its own

    def make(self) -> Strategy:
        return Gossip(form="beside", period=2)


class TestPairwise(StrategyContract):
    as_one = False  # who is ahead and who behind average
    exact_resume = False

    def make(self) -> Strategy:
        return Gossip(pairwise=True)

    def total(self, run: Run) -> Tensor:
        """The weights, and what was done to the snapshot of them since."""
        assert isinstance(run, PairwiseRun)
        assert run.peers is not None
        model = torch.cat([parameter.detach().reshape(-1) for parameter in run.model.parameters()])
        return run.peers.weights + (model - run.snapshot)
