"""What computing takes by decree: on the simulator, where it takes no time by itself, and for stragglers on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from syncline.training.stragglers import Slow
from syncline.transports.faults import slowness
from syncline.world import World

__all__ = ["FORWARD", "Pace"]

FORWARD = 1 / 3
"""Backward computes two products for each one of forward."""


class Pace:
    """Charges a rank for its samples, backward layer by layer, so that reductions overlap the rest.

    ```text
    forward ├───────┤ backward ├─ layer 3 ─┤├── layer 2 ──┤├ layer 1 ┤      in proportion to their parameters
                                           └ its gradient is ready
    ```

    On the simulator the virtual clock is charged, on real workers they sleep. A worker that `slow` names takes its
    factor times as long, between so many seconds after this was made.
    """

    def __init__(self, world: World, model: nn.Module, seconds_a_sample: float, slow: Sequence[Slow] = ()) -> None:
        self._world = world
        self.seconds_a_sample = seconds_a_sample
        self._slow = tuple(slow)
        self._began = world.runtime.now()
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
        self._compute(FORWARD * samples)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _layer(self, share: float) -> Callable[[Tensor], None]:
        def charge(gradient: Tensor) -> None:
            self._compute((1 - FORWARD) * share * self._samples)

        return charge

    def _compute(self, samples: float) -> None:
        factor = slowness(self._slow, self._world.rank, self._world.runtime.now() - self._began)
        self._world.compute(factor * self.seconds_a_sample * samples)
