"""Gates: which experts a token goes to, with which weights, and the loss that balances the experts.

Noisy top-k gating, with W_g and W_noise that start at zero:

    σ = softplus(x W_noise) + 1e-2          H = x W_g + ε σ, ε ~ N(0, 1)          in training; otherwise H = x W_g
    G = softmax over the k largest of H, 0 for the others
    importance_i = Σ_x G(x)_i               load_i = Σ_x Φ((x W_g − threshold_i) / σ_i)
    loss = 1e-2 (CV²(importance) + CV²(load))

threshold_i is the k-th largest of the *other* values of H, so load_i is the expected number of tokens that choose
expert i, if only the noise of i was drawn again. CV² is the variance divided by the squared mean. The constant 1e-2 in
σ is not in the paper; it is from the authors' code (tensor2tensor), and keeps σ away from zero.

Shazeer et al.: Outrageously large neural networks: the sparsely-gated mixture-of-experts layer, 2017.

The switch gate sends a token to one expert:

    P = softmax(x W)          G = P at the largest          loss = 1e-2 · E Σ_i f_i p_i

f_i is the fraction of the tokens that choose expert i, p_i the mean of P_i.

Fedus, Zoph and Shazeer: Switch transformers, 2021.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from syncline.errors import SpecError

__all__ = ["ExpertGate", "NoisyTopK", "Routing", "SwitchGate", "expected_load", "squared_variation", "top_weights"]

MIN_NOISE = 1e-2
"""The smallest standard deviation of the noise."""
VARIATION_EPSILON = 1e-10
"""Added to the squared mean, so that the variation of zeros is zero."""


class Routing(NamedTuple):
    """What a gate decides for T tokens."""

    experts: Tensor
    """The numbers of the chosen experts, (T, k), the largest weight first."""
    weights: Tensor
    """The weights of their outputs, (T, k). Gradients of the gate flow through them."""
    sums: Tensor
    """What the balance loss needs, (n, E): sums over tokens. Row 0 is the importance of each expert."""


class ExpertGate(nn.Module, ABC):
    """The contract of gates. A gate sees tokens, (T, features), in float32 or float64.

    The sums of several workers are added before `balance_loss`, so it depends on nothing else.
    """

    def __init__(self, features: int, count: int, top: int) -> None:
        super().__init__()
        for name, value in (("features", features), ("count", count), ("top", top)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"{name}={value!r}: a gate has a whole number of {name}, at least 1")
        if top > count:
            raise SpecError(f"top={top}: a token cannot go to {top} of {count} experts; use top={count} or less")
        self.features, self.count, self.top = features, count, top

    @abstractmethod
    def forward(self, x: Tensor) -> Routing:
        """Choose the experts of each token."""

    @abstractmethod
    def balance_loss(self, sums: Tensor) -> Tensor:
        """The loss of these sums, a scalar."""

    def extra_repr(self) -> str:
        return f"{self.features}, count={self.count}, top={self.top}"


def top_weights(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The numbers of the `top` largest logits of each token, and the softmax over them.

    >>> top_weights(torch.tensor([[0.0, 1.0, 1.0 + math.log(3)]]), 2)
    (tensor([[2, 1]]), tensor([[0.7500, 0.2500]]))
    """
    values, experts = logits.topk(top, dim=-1)
    return experts, values.softmax(-1)


def expected_load(clean: Tensor, noisy: Tensor, std: Tensor, top: int) -> Tensor:
    """Σ_x Φ((clean_i − threshold_i)/std_i) for each expert; the threshold is the k-th largest of the other `noisy`.

    With k = E there is no threshold: every token goes to every expert.

    >>> clean, noisy = torch.zeros(1, 3), torch.tensor([[0.0, 1.0, -1.0]])
    >>> expected_load(clean, noisy, torch.ones(1, 3), top=1)        # Φ(0 − 1), Φ(0 − 0), Φ(0 − 1)
    tensor([0.1587, 0.5000, 0.1587])
    """
    count = clean.shape[-1]
    if top == count:
        return torch.full_like(clean.sum(0), len(clean))
    values = noisy.topk(top + 1, dim=-1).values
    outside, inside = values[:, top : top + 1], values[:, top - 1 : top]
    threshold = torch.where(noisy >= inside, outside, inside)
    chances: Tensor = torch.special.ndtr((clean - threshold) / std)
    return chances.sum(0)


def squared_variation(x: Tensor) -> Tensor:
    """The squared coefficient of variation: the variance, divided by the number of values, over the squared mean.

    >>> squared_variation(torch.tensor([1.0, 3.0]))
    tensor(0.2500)
    """
    return x.var(correction=0) / (x.mean().square() + VARIATION_EPSILON)


class NoisyTopK(ExpertGate):
    """Noisy top-k gating. `noisy=False` has no noise in training either, and the load is the number of tokens.

    >>> gate = NoisyTopK(4, count=3, top=2)
    >>> routing = gate(torch.randn(5, 4))
    >>> routing.experts.shape, bool(torch.allclose(routing.weights.sum(1), torch.ones(5)))
    (torch.Size([5, 2]), True)
    """

    def __init__(self, features: int, count: int, top: int = 2, loss_weight: float = 1e-2, noisy: bool = True) -> None:
        super().__init__(features, count, top)
        self.loss_weight, self.noisy = loss_weight, noisy
        self.weight = nn.Parameter(torch.empty(features, count))
        if noisy:
            self.noise = nn.Parameter(torch.empty(features, count))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set W_g and W_noise to zero: at first the experts have equal load."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def forward(self, x: Tensor) -> Routing:
        clean = x @ self.weight.to(x.dtype)
        if self.noisy and self.training:
            std = f.softplus(x @ self.noise.to(x.dtype)) + MIN_NOISE
            noisy = clean + torch.randn_like(clean) * std
            experts, weights = top_weights(noisy, self.top)
            load = expected_load(clean, noisy, std, self.top)
        else:
            experts, weights = top_weights(clean, self.top)
            load = count_choices(experts, self.count, x.dtype)
        importance = torch.zeros_like(clean).scatter(1, experts, weights).sum(0)
        return Routing(experts, weights, torch.stack([importance, load]))

    def balance_loss(self, sums: Tensor) -> Tensor:
        return self.loss_weight * (squared_variation(sums[0]) + squared_variation(sums[1]))


class SwitchGate(ExpertGate):
    """Each token goes to the expert with the largest probability, which multiplies the output.

    The weights start as in the paper: a truncated normal distribution with σ = √(0.1/features).

    >>> gate = SwitchGate(4, count=3)
    >>> gate(torch.randn(5, 4)).experts.shape
    torch.Size([5, 1])
    """

    def __init__(self, features: int, count: int, top: int = 1, loss_weight: float = 1e-2) -> None:
        super().__init__(features, count, top)
        if top != 1:
            raise SpecError(f"top={top}: the switch gate sends a token to one expert; use top=1, or gate='noisy'")
        self.loss_weight = loss_weight
        self.weight = nn.Parameter(torch.empty(features, count))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        std = math.sqrt(0.1 / self.features)
        nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)

    def forward(self, x: Tensor) -> Routing:
        probabilities = (x @ self.weight.to(x.dtype)).softmax(-1)
        weights, experts = probabilities.max(-1, keepdim=True)
        chosen = count_choices(experts, self.count, x.dtype)
        return Routing(experts, weights, torch.stack([probabilities.sum(0), chosen]))

    def balance_loss(self, sums: Tensor) -> Tensor:
        tokens = sums[1].sum().clamp(min=1)
        return self.loss_weight * self.count * (sums[0] * sums[1]).sum() / tokens.square()


def count_choices(experts: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The number of choices of each expert."""
    return torch.bincount(experts.reshape(-1), minlength=count).to(dtype)
