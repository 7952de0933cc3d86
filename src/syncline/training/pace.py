"""What computing takes on the simulator, where it takes no time by itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from syncline.world import World

__all__ = ["Pace"]

FORWARD = 1 / 3
"""Backward computes two products for each one of forward."""


class Pace:
    """Charges a rank's virtual clock for its samples, backward layer by layer, so that reductions overlap the rest.

    ```text
    forward ├───────┤ backward ├─ layer 3 ─┤├── layer 2 ──┤├ layer 1 ┤      in proportion to their parameters
                                           └ its gradient is ready
    ```
    """

    def __init__(self, world: World, model: nn.Module, seconds_a_sample: float) -> None:
        self._world = world
        self._a_sample = seconds_a_sample
        self._samples = 0
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        total = sum(parameter.numel() for parameter in trained)
        self._hooks = [
            parameter.register_hook(self._layer(parameter.numel() / total))  # type: ignore[no-untyped-call]
            for parameter in trained
        ]

    def forward(self, samples: int) -> None:
        """So many samples go through the model."""
        self._samples = samples
        self._world.compute(FORWARD * self._a_sample * samples)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _layer(self, share: float) -> Callable[[Tensor], None]:
        def charge(gradient: Tensor) -> None:
            self._world.compute((1 - FORWARD) * share * self._a_sample * self._samples)

        return charge
