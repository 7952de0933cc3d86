"""LAMB: Adam's step, its length set for each layer by the norm of the layer's weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from syncline.errors import SpecError
from syncline.optim.base import LayerwiseOptimizer, fraction, norms, positive

__all__ = ["LAMB"]


class LAMB(LayerwiseOptimizer):
    """Adam whose step is as long, in each layer, as the layer's weights times the rate.

        m ← β₁·m + (1 − β₁)·g,   v ← β₂·v + (1 − β₂)·g²
        r = m̂ / (√v̂ + eps) + decay · w                   m̂, v̂: corrected for their start at zero, as in Adam
        w ← w − lr · ‖w‖ / ‖r‖ · r                       the ratio is 1 if ‖w‖ or ‖r‖ is 0

    `exclude` selects the parameters that take plain Adam without decay: `"vectors"` (biases and norms: fewer than two
    dimensions), `"none"` or `"all"`. Each option may differ between parameter groups.

    You et al., *Large batch optimization for deep learning: training BERT in 76 minutes*, 2019.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.constant_(layer.weight, 3.0)
    >>> optimizer = LAMB(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()                                     # r = (1, 1): 3 − 0.1 · ‖(3, 3)‖ / ‖(1, 1)‖ · 1
    >>> print(layer.weight.data)
    tensor([[2.7000, 2.7000]])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        exclude: str = "vectors",
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "exclude": exclude}
        )

    def check_options(self, options: dict[str, Any]) -> None:
        if not isinstance(options["betas"], (tuple, list)) or len(options["betas"]) != 2:
            raise SpecError(f"betas must be two numbers, such as (0.9, 0.999), not {options['betas']!r}")
        for beta in options["betas"]:
            fraction("each of betas", beta, below_one=True)
        positive("eps", options["eps"])

    def moves(
        self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any], adapted: bool
    ) -> list[Tensor]:
        moves = self._adams(parameters, gradients, group)
        if adapted:
            _fit(parameters, moves, group["weight_decay"])
        return moves

    def _adams(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """m̂ / (√v̂ + eps) for each parameter, in new tensors."""
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)  # a tensor on the host, as torch's Adam has it
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        means: list[Tensor] = [state["exp_avg"] for state in states]
        squares: list[Tensor] = [state["exp_avg_sq"] for state in states]
        first, second = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second)
        for state in states:
            state["step"] += 1
        taken = [int(state["step"]) for state in states]  # they differ if a parameter was unused for some steps
        moves: list[Tensor] = list(torch._foreach_div(means, [1 - first**step for step in taken]))
        scales: list[Tensor] = list(torch._foreach_div(squares, [1 - second**step for step in taken]))
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, group["eps"])
        torch._foreach_div_(moves, scales)
        return moves


def _fit(parameters: list[Tensor], moves: list[Tensor], decay: float) -> None:
    """Add the decay to each move, and give it the length of the parameter."""
    torch._foreach_add_(moves, parameters, alpha=decay)
    weights, lengths = norms(parameters), norms(moves)
    ratio = torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)
    torch._foreach_mul_(moves, list(ratio.unbind()))
