"""Convex problems with a known optimum, so that the distance of a strategy from it is exact.

Data is drawn from the seed and rounded to 1/256. So sums in float64 are exact, and every machine has the same bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

from syncline.errors import DivergedError
from syncline.workloads.base import (
    Batch,
    Defaults,
    Pairs,
    Splits,
    Workload,
    check_number,
    check_whole,
    on_device_of,
    seeded,
)

__all__ = ["Convex", "LogisticRegression", "Regression"]

STEPS_PER_UNIT = 256
"""Data is rounded to multiples of 1/256."""


class Convex(Workload):
    """A linear model without bias. The metric is the gap: the *training* objective minus its minimum."""

    metric = "gap"
    higher_is_better = False
    metric_range = (0.0, float("inf"))

    def __init__(self, features: int, samples: int, condition: float, seed: int, **others: Any) -> None:
        self.features = check_whole(self.name, "features", features, 1, 4096)
        self.samples = check_whole(self.name, "samples", samples, 16, 1 << 20)
        self.condition = check_number(self.name, "condition", condition, 1, 1e4)
        self.seed = check_whole(self.name, "seed", seed, 0, (1 << 63) - 1)
        super().__init__(features=features, samples=samples, condition=condition, seed=seed, **others)

    @abstractmethod
    def objective(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """The objective over any samples, in any precision."""

    @abstractmethod
    def solve(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The weights at the optimum, in float64."""

    @abstractmethod
    def answers(self, scores: Tensor, generator: torch.Generator) -> Tensor:
        """The targets of inputs with these `scores` under the true weights."""

    @cached_property
    def optimum(self) -> tuple[Tensor, float]:
        """The optimal weights (float64) and their objective."""
        inputs, targets = self._train64()
        weights = self.solve(inputs, targets)
        return weights, float(self.objective(weights, inputs, targets))

    def model(self, seed: int = 0) -> nn.Module:
        """One linear layer."""
        with seeded(seed):
            return nn.Linear(self.features, 1, bias=False)

    def make_splits(self) -> Splits:
        """`samples` for training, a quarter as many each for validation and test."""
        generator = torch.Generator().manual_seed(self.seed)
        quarter = self.samples // 4
        total = self.samples + 2 * quarter
        # The Hessian's condition number is about `condition`.
        spread = torch.logspace(0, -0.5, self.features, base=self.condition, dtype=torch.float64)
        inputs = _rounded(torch.randn(total, self.features, generator=generator, dtype=torch.float64) * spread)
        truth = _rounded(torch.randn(self.features, 1, generator=generator, dtype=torch.float64))
        targets = self.answers(inputs @ truth, generator)
        cuts = (0, self.samples, self.samples + quarter, total)
        made = [slice(start, end) for start, end in pairwise(cuts)]
        return Splits(*(Pairs(inputs[part].float(), targets[part].float()) for part in made))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The objective over a batch."""
        inputs, targets = on_device_of(model, batch)
        return self._of_outputs(model(inputs), targets) + self._penalty(_weights(model))

    def evaluate(self, model: nn.Module, dataset: Dataset[Batch], batch: int = 512) -> dict[str, float]:
        """The objective over the dataset, and the gap on the training split; both in float64."""
        found = super().evaluate(model, dataset, batch)
        with torch.no_grad():
            value = self.objective(_weights(model).detach().double().cpu(), *self._train64())
        return {**found, "gap": float(value) - self.optimum[1]}

    def measures(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The objective over a batch in float64."""
        inputs, targets = on_device_of(model, batch)
        return {"loss": self.objective(_weights(model).detach().double(), inputs.double(), targets.double())}

    def describe(self) -> dict[str, Any]:
        """Adds the minimum of the objective, to nine digits: the rest depends on the number of threads."""
        return {**super().describe(), "optimum": float(f"{self.optimum[1]:.9g}")}

    def _train64(self) -> tuple[Tensor, Tensor]:
        train = cast(Pairs, self.splits().train)
        return train.inputs.double(), train.targets.double()

    @abstractmethod
    def _of_outputs(self, outputs: Tensor, targets: Tensor) -> Tensor: ...

    def _penalty(self, weights: Tensor) -> Tensor | float:
        return 0.0


class Regression(Convex):
    """Least squares: f(w) = ½ mean (xᵀw − y)², solved in closed form.

    >>> Regression(features=8).spec
    'regression(features=8)'
    """

    name = "regression"

    def __init__(
        self, features: int = 32, samples: int = 4096, condition: float = 10.0, noise: float = 0.1, seed: int = 0
    ) -> None:
        self.noise = check_number(self.name, "noise", noise, 0, 100)
        super().__init__(features, samples, condition, seed, noise=noise)

    @property
    def defaults(self) -> Defaults:
        """SGD without momentum, so that its theory applies."""
        return Defaults(batch=32, epochs=10, learning_rate=0.04, target=1e-3)

    def answers(self, scores: Tensor, generator: torch.Generator) -> Tensor:
        """With Gaussian noise."""
        noise = torch.randn(scores.shape, generator=generator, dtype=scores.dtype)
        return scores + _rounded(self.noise * noise)

    def objective(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """½ mean (xᵀw − y)²."""
        return self._of_outputs(inputs @ weights.T, targets)

    def solve(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """By QR; by the pseudo-inverse if there are more features than samples."""
        driver = "gels" if len(inputs) > self.features else "gelsd"
        return cast(Tensor, torch.linalg.lstsq(inputs, targets, driver=driver).solution).T

    def _of_outputs(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs - targets).square().mean()


class LogisticRegression(Convex):
    """Logistic regression: f(w) = mean log(1 + exp(−y xᵀw)) + ½ λ‖w‖² for y = ±1, solved by L-BFGS in float64.

    >>> LogisticRegression(l2=0.01).spec
    'logistic(l2=0.01)'
    """

    name = "logistic"

    def __init__(
        self, features: int = 32, samples: int = 4096, condition: float = 10.0, l2: float = 1e-3, seed: int = 0
    ) -> None:
        self.l2 = check_number(self.name, "l2", l2, 1e-8, 100)
        super().__init__(features, samples, condition, seed, l2=l2)

    @property
    def defaults(self) -> Defaults:
        """SGD without momentum."""
        return Defaults(batch=32, epochs=10, learning_rate=0.2, target=1e-3)

    def answers(self, scores: Tensor, generator: torch.Generator) -> Tensor:
        """0 or 1, drawn with the probability of the logistic function."""
        return (torch.rand(scores.shape, generator=generator, dtype=scores.dtype) < scores.sigmoid()).double()

    def objective(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Targets are 0 and 1, for y = −1 and +1."""
        return self._of_outputs(inputs @ weights.T, targets) + self._penalty(weights)

    def gradient(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient of the objective: mean x(σ(xᵀw) − y) + λw."""
        return ((inputs @ weights.T).sigmoid() - targets).T @ inputs / len(inputs) + self.l2 * weights

    def solve(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """By L-BFGS, with gradients by formula, because a caller may have disabled autograd."""
        weights = torch.zeros(1, self.features, dtype=torch.float64)
        solver = torch.optim.LBFGS(
            [weights], max_iter=1000, tolerance_grad=1e-11, tolerance_change=0.0, line_search_fn="strong_wolfe"
        )

        def value() -> float:
            weights.grad = self.gradient(weights, inputs, targets)
            return float(self.objective(weights, inputs, targets))

        solver.step(value)  # type: ignore[no-untyped-call]
        left = float(self.gradient(weights, inputs, targets).norm())
        if not left < 1e-8:
            raise DivergedError(f"{self}: L-BFGS stops with a gradient of norm {left:.1e}, not below 1e-8; raise l2")
        weights.grad = None
        return weights

    def _of_outputs(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets)

    def _penalty(self, weights: Tensor) -> Tensor:
        return 0.5 * self.l2 * weights.square().sum()


def _rounded(values: Tensor) -> Tensor:
    return (values * STEPS_PER_UNIT).round() / STEPS_PER_UNIT


def _weights(model: nn.Module) -> Tensor:
    """The only matrix of the model, also if the model is wrapped."""
    (weights,) = model.parameters()
    return weights
