"""LARS: a rate for each layer, from the norms of its weights and of their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from syncline.errors import SpecError
from syncline.optim.base import LayerwiseOptimizer, fraction, norms, positive

__all__ = ["LARS"]


class LARS(LayerwiseOptimizer):
    """SGD with momentum whose rate is adapted to each layer, for batches of thousands.

        local = trust · ‖w‖ / (‖g‖ + decay · ‖w‖)        1 if ‖w‖ or ‖g‖ is 0
        v ← momentum · v + local · (g + decay · w)
        w ← w − lr · v                                   nesterov: w − lr · (local · (g + decay · w) + momentum · v)

    `exclude` selects the parameters that take plain SGD with momentum and no decay: `"vectors"` (biases, norms: fewer
    than two dimensions), `"none"` or `"all"`. Each option may differ between parameter groups. The rate is
    applied outside v, as in torch's SGD, so that a warm-up needs no momentum correction. With a constant rate it equals
    the paper's formula.

    A step moves a layer by about lr · trust of its own norm, so `lr` is far larger than SGD's.

    You, Gitman and Ginsburg, *Large batch training of convolutional networks*, 2017.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.constant_(layer.weight, 3.0)
    >>> optimizer = LARS(layer.parameters(), lr=1.0, momentum=0.0, trust=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()                                     # 3 − 1 · 0.1 · ‖(3, 3)‖ / ‖(1, 1)‖ · 1
    >>> print(layer.weight.data)
    tensor([[2.7000, 2.7000]])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        nesterov: bool = False,
        exclude: str = "vectors",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "nesterov": bool(nesterov),
            "exclude": exclude,
        }
        super().__init__(params, defaults)

    def check_options(self, options: dict[str, Any]) -> None:
        fraction("momentum", options["momentum"], below_one=True)
        positive("trust", options["trust"])
        if options["nesterov"] and not options["momentum"]:
            raise SpecError("nesterov=True looks ahead along the momentum, and momentum is 0: give momentum=0.9")

    def moves(
        self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any], adapted: bool
    ) -> list[Tensor]:
        updates = _adapted(parameters, gradients, group) if adapted else [each.clone() for each in gradients]
        if not group["momentum"]:
            return updates
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers: list[Tensor] = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, updates)
        if not group["nesterov"]:
            return buffers
        torch._foreach_add_(updates, buffers, alpha=group["momentum"])
        return updates


def _adapted(parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """local · (g + decay · w) for each parameter, in new tensors."""
    decay = group["weight_decay"]
    weights, slopes = norms(parameters), norms(gradients)
    local = group["trust"] * weights / (slopes + decay * weights)
    local = torch.where((weights > 0) & (slopes > 0), local, 1.0)
    updates: list[Tensor] = list(torch._foreach_add(gradients, parameters, alpha=decay))
    torch._foreach_mul_(updates, list(local.unbind()))
    return updates
