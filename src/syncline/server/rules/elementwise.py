"""The elementwise rules: add, assign, sgd, momentum, adagrad and adam."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.errors import ProtocolError, SpecError
from syncline.server.rules.base import UpdateRule

__all__ = ["Adagrad", "Adam", "Add", "Assign", "Momentum", "Sgd"]


@dataclass(frozen=True, repr=False)
class Add(UpdateRule):
    """w ← w + Δ; a push with a rate adds rate · Δ.

    >>> weights = torch.ones(2)
    >>> Add().apply(weights, torch.tensor([1.0, 2.0]), {}, None)
    >>> weights
    tensor([2., 3.])
    """

    name: ClassVar[str] = "add"

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        weights.add_(update, alpha=1.0 if rate is None else rate)


@dataclass(frozen=True, repr=False)
class Assign(UpdateRule):
    """w ← Δ: the latest push replaces the weights.

    >>> weights = torch.ones(2)
    >>> Assign().apply(weights, torch.tensor([1.0, 2.0]), {}, None)
    >>> weights
    tensor([1., 2.])
    """

    name: ClassVar[str] = "assign"

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        if rate is not None:
            raise ProtocolError(f"a push to {self!r} has the rate {rate}, which means nothing there: leave it out")
        weights.copy_(update)


@dataclass(frozen=True, repr=False)
class Sgd(UpdateRule):
    """w ← w − lr · g

    >>> weights = torch.zeros(2)
    >>> Sgd(lr=0.5).apply(weights, torch.tensor([1.0, 2.0]), {}, None)
    >>> weights
    tensor([-0.5000, -1.0000])
    """

    lr: float = 0.01

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        self.check("lr")

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        weights.add_(update, alpha=-(self.lr if rate is None else rate))


@dataclass(frozen=True, repr=False)
class Momentum(UpdateRule):
    """Gradient descent with a velocity.

        v ← mu · v + g        w ← w − lr · v        nesterov: w − lr · (g + mu · v)

    The learning rate is not part of v, as in torch's SGD. The velocity of an element decays only with pushes to that
    element.

    >>> rule, weights = Momentum(lr=1.0, mu=0.5), torch.zeros(1)
    >>> state = rule.state(1)
    >>> for _ in range(2):
    ...     rule.apply(weights, torch.ones(1), state, None)
    >>> weights                                                # −1, then −1.5 more
    tensor([-2.5000])
    """

    lr: float = 0.01
    mu: float = 0.9
    nesterov: bool = False

    name: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        self.check("lr")
        self.check("mu", below=1.0)
        if not isinstance(self.nesterov, bool):
            raise SpecError(f"momentum's nesterov is True or False, not {self.nesterov!r}")

    def state(self, numel: int) -> dict[str, Tensor]:
        return {"velocity": torch.zeros(numel, dtype=torch.float32)}

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        lr = self.lr if rate is None else rate
        velocity = state["velocity"].mul_(self.mu).add_(update)
        step = update.add_(velocity, alpha=self.mu) if self.nesterov else velocity
        weights.add_(step, alpha=-lr)


@dataclass(frozen=True, repr=False)
class Adagrad(UpdateRule):
    """A learning rate for each weight, which falls with its updates.

        s ← s + g²        w ← w − lr · g / (√s + eps)

    Each server needs only its own weights, so that the rates adapt without communication between servers. Duchi,
    Hazan and Singer, *Adaptive subgradient methods*, 2011; at a server: Dean et al., *Large scale distributed deep
    networks*, 2012.

    >>> rule, weights = Adagrad(lr=1.0), torch.zeros(1)
    >>> state = rule.state(1)
    >>> for gradient in (3.0, 4.0):
    ...     rule.apply(weights, torch.tensor([gradient]), state, None)
    ...     print(weights)                                     # 3/√9, then 4/√25 more
    tensor([-1.])
    tensor([-1.8000])
    """

    lr: float = 0.01
    eps: float = 1e-10

    name: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        self.check("lr")
        self.check("eps")

    def state(self, numel: int) -> dict[str, Tensor]:
        return {"squares": torch.zeros(numel, dtype=torch.float32)}

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        lr = self.lr if rate is None else rate
        squares = state["squares"].addcmul_(update, update)
        weights.addcdiv_(update, squares.sqrt().add_(self.eps), value=-lr)


@dataclass(frozen=True, repr=False)
class Adam(UpdateRule):
    """Adam: steps from running means of the gradient and of its square.

        t ← t + 1        m ← b1 · m + (1 − b1) · g        v ← b2 · v + (1 − b2) · g²
        w ← w − lr · m/(1 − b1ᵗ) / (√(v/(1 − b2ᵗ)) + eps)

    t counts the pushes of each weight. Kingma and Ba, *Adam*, 2014.

    >>> rule, weights = Adam(lr=0.1), torch.zeros(2)
    >>> state = rule.state(2)
    >>> for _ in range(5):                                     # the first weight alone
    ...     rule.apply(weights[:1], torch.ones(1), {name: each[:1] for name, each in state.items()}, None)
    >>> rule.apply(weights, torch.ones(2), state, None)
    >>> weights                                                # six steps, and a first one of full length
    tensor([-0.6000, -0.1000])
    """

    lr: float = 0.001
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    name: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        self.check("lr")
        self.check("b1", below=1.0)
        self.check("b2", below=1.0)
        self.check("eps")

    def state(self, numel: int) -> dict[str, Tensor]:
        return {
            "mean": torch.zeros(numel, dtype=torch.float32),
            "square": torch.zeros(numel, dtype=torch.float32),
            "steps": torch.zeros(numel, dtype=torch.float32),
        }

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        lr = self.lr if rate is None else rate
        if not update.numel():
            return
        mean = state["mean"].mul_(self.b1).add_(update, alpha=1 - self.b1)
        square = state["square"].mul_(self.b2).addcmul_(update, update, value=1 - self.b2)
        for_mean, for_square = _corrections(state["steps"].add_(1), (self.b1, self.b2))
        below = torch.div(square, for_square, out=update).sqrt_().add_(self.eps)
        weights.addcdiv_(mean / for_mean, below, value=-lr)


def _corrections(steps: Tensor, betas: tuple[float, float]) -> list[Tensor]:
    """1 − βᵗ for each weight's t. If only few values of t occur, each is computed once; usually all are the same."""
    least, most = (int(each) for each in torch.aminmax(steps))
    if most == least:
        return [_correction(steps[:1], beta) for beta in betas]
    if 4 * (most - least) > steps.numel():
        return [_correction(steps, beta) for beta in betas]
    different, which = torch.arange(least, most + 1), (steps - least).int()
    return [_correction(different, beta).index_select(0, which) for beta in betas]


def _correction(steps: Tensor, beta: float) -> Tensor:
    """1 − βᵗ in float64: powers in float32 would lose the leading digits, four of them for 1 − 0.999."""
    if beta == 0.0:
        return torch.ones(steps.numel(), dtype=torch.float32)
    return torch.expm1(steps.double() * math.log(beta)).neg_().float()
