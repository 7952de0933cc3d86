"""Networks by one-sided asynchronous SGD: every worker at its own pace leaves its state where another finds it.

    worker i   forward ─ backward ─ step: w' ─ looks into its own buffers ─ w ← w' − pull·(w − w̄) ─ puts w ─ …
                                                 ▲ written by others, whatever this worker does

What the optimizer did, w − w', stands for εΔ: a remote state w_k counts iff ‖w' − w_k‖² < ‖w − w_k‖². `pull` is the
optimizer's learning rate, as in the paper, where nothing else is said. *The* model is the mean of the workers' weights.
Keuper, Pfreundt: Asynchronous Parallel Stochastic Gradient Descent (2015).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError, SpecError
from syncline.reduction import Communicator
from syncline.strategies.base import Preset, RunSettings, Strategy, StrategyRun
from syncline.strategies.onesided.run import OneSidedRun

__all__ = ["OneSided"]


@dataclass(frozen=True, repr=False)
class OneSided(Strategy):
    """Receive buffers that others write through one-sided memory: on MPI, on the simulator, or alone.

    After every `every` steps a worker puts its state, or a random contiguous `part` of it, into one of the `buffers` of
    a random other worker. `pull` says how far a step goes towards the mean with the states that it accepts.

    >>> OneSided(part=0.25, pull=0.5)
    onesided(part=0.25, pull=0.5)
    """

    buffers: int = 4
    part: float = 1.0
    every: int = 1
    pull: float | None = None
    seed: int = 0

    name: ClassVar[str] = "onesided"
    presets: ClassVar[tuple[Preset, ...]] = (Preset(spec="onesided(pull=0.5)", engine="mpi"),)

    def __post_init__(self) -> None:
        for key, least in (("buffers", 1), ("every", 1), ("seed", 0)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SpecError(f"onesided({key}={value!r}): a whole number, at least {least}")
        for key in ("part", "pull"):
            value = getattr(self, key)
            if key == "pull" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise SpecError(f"onesided({key}={value!r}): a number above 0, at most 1")

    @property
    def asynchronous(self) -> bool:
        return True

    def attach(
        self, model: nn.Module, optimizer: Optimizer, exchange: Communicator, settings: RunSettings
    ) -> StrategyRun:
        if exchange.codec is not None:
            raise IncompatibleError(
                f"onesided puts states into memory as they are, and nobody is there to decode {exchange.codec!r}: "
                "leave the codec out, and send less with part=0.25 or every=4"
            )
        return OneSidedRun(self, model, optimizer, exchange, settings)

    def draw(self, rank: int, number: int, workers: int, numel: int) -> tuple[int, int, int]:
        """To whom a worker's message of that number goes, from which element on, and how many.

        >>> OneSided(part=0.5).draw(rank=1, number=1, workers=2, numel=8)
        (0, 3, 4)
        """
        chance = random.Random(f"{self.seed}/{rank}/{number}")
        to = (rank + chance.randrange(1, workers)) % workers
        count = max(1, round(self.part * numel))
        return to, chance.randrange(numel - count + 1), count
