"""Artificial compute time: on the simulator, where computing takes no time, and for slow workers in experiments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields

from torch import Tensor, nn

from syncline.errors import IncompatibleError, SpecError
from syncline.specs import nearest
from syncline.transports.faults import Slow, slowness
from syncline.world import World

__all__ = ["FORWARD_SHARE", "ComputePacer", "Slow", "check_slow", "parse_slow"]

FORWARD_SHARE = 1 / 3
"""The share of forward in the compute time: backward computes two products for each one of forward."""
EXAMPLE = "rank=2,factor=4,start=1,stop=3"


def parse_slow(text: str) -> Slow:
    """Parse `--slow`: rank, factor, and the seconds after the first step at which it starts and stops.

    >>> parse_slow("rank=2,factor=4,start=1,stop=3")
    Slow(rank=2, factor=4.0, start=1.0, stop=3.0)
    >>> parse_slow("rank=0,factor=2").stop
    inf
    """
    known = [field.name for field in fields(Slow)]
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise SpecError(f"{part.strip()!r} in {text!r} is not key=value; write for example {EXAMPLE}")
        if name not in known:
            raise SpecError(f"{part.strip()!r} in {text!r}: {nearest(name, known)}; write for example {EXAMPLE}")
        if name in found:
            raise SpecError(f"{name} is there twice in {text!r}; write for example {EXAMPLE}")
        try:
            found[name] = float(value)
        except ValueError:
            raise SpecError(f"{name}={value!r} in {text!r} is no number; write for example {EXAMPLE}") from None
    missing = [name for name in ("rank", "factor") if name not in found]
    if missing:
        raise SpecError(f"{text!r} does not say {' and '.join(missing)}; write for example {EXAMPLE}")
    if not found["rank"].is_integer():
        raise SpecError(f"rank={found['rank']:g} in {text!r} is no whole number")
    return Slow(int(found.pop("rank")), **found)


def check_slow(slow: Sequence[Slow], workers: int, seconds_a_sample: float | None, pipeline: str | None = None) -> None:
    """Refuse a slowness that has no effect."""
    if pipeline is not None and seconds_a_sample is not None:
        raise IncompatibleError(
            f"{seconds_a_sample} seconds a sample (--pace) are the time of the whole model, and each worker of a "
            "pipeline computes a part of it: leave it out"
        )
    if seconds_a_sample is not None and not 0 <= seconds_a_sample < math.inf:
        raise SpecError(f"{seconds_a_sample} seconds a sample: a number from 0 on")
    if slow and not seconds_a_sample:
        raise SpecError(
            f"{slow[0]} multiplies the seconds that a sample takes, and those are not given: add --pace, in Python "
            "seconds_a_sample=, for example 0.001"
        )
    for one in slow:
        if not 0 <= one.rank < workers:
            raise SpecError(f"{one} names no worker: there are {workers}, from 0 to {workers - 1}")
        if not one.start < one.stop:
            raise SpecError(f"stop must be after start, and stop={one.stop:g} is not after start={one.start:g}")


class ComputePacer:
    """Makes computing take a given time per sample; backward is charged layer by layer, so that reductions overlap it.

    ```text
    forward ├───────┤ backward ├─ layer 3 ─┤├── layer 2 ──┤├ layer 1 ┤      in proportion to their parameters
                                           └ its gradient is ready
    ```

    The virtual clock of the simulator advances; real workers sleep. A worker in `slow` takes its factor times as long,
    between the given seconds after this object was made.
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
        """Charge the forward pass of `samples` samples."""
        self._samples = samples
        self._compute(FORWARD_SHARE * samples)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _layer(self, share: float) -> Callable[[Tensor], None]:
        def charge(gradient: Tensor) -> None:
            self._compute((1 - FORWARD_SHARE) * share * self._samples)

        return charge

    def _compute(self, samples: float) -> None:
        factor = slowness(self._slow, self._world.rank, self._world.runtime.now() - self._began)
        self._world.compute(factor * self.seconds_a_sample * samples)
