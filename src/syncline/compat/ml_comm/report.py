"""What `verbosity` and `perf_freq` ask for: lines of rank 0, and the staleness of each step in the run log."""

from __future__ import annotations

from syncline.compat.ml_comm.config import TeamConfig
from syncline.strategies.allreduce import AllReduce
from syncline.transports.base import format_bytes
from syncline.world import World

__all__ = ["StepReport"]

CONFIGURATION, PERFORMANCE = 1, 2
"""The verbosity from which the configuration is printed, and also the performance."""


class StepReport:
    """Counts the steps of a team or of an optimizer."""

    def __init__(self, world: World, name: str, config: TeamConfig, plan: AllReduce) -> None:
        self.steps = 0
        self._world, self._name, self._config, self._plan = world, name, config, plan
        self._bytes = self._waited_s = 0.0
        self._stale = 0
        if config.verbosity >= CONFIGURATION:
            self._say(f"{world.size} rank{'s' * (world.size > 1)}, {self._describe()}")

    def _describe(self) -> str:
        plan, total = self._plan, self._config.max_steps
        if not plan.delay:
            return "every step is synchronous"
        if plan.cooldown:
            return f"pipelined for {total - plan.cooldown} steps, then synchronous for {plan.cooldown}"
        return f"synchronous for {plan.warmup} steps, then pipelined"

    def note_step(self, nbytes: float, waited_s: float) -> None:
        """Count a step: the bytes that this rank sent, and the seconds that it waited for other ranks."""
        stale = self._plan.is_stale(self.steps)
        self._world.events.point("sl_staleness", int(stale), step=self.steps, of=self._name)
        self.steps += 1
        self._bytes += nbytes
        self._waited_s += waited_s
        self._stale += stale
        every = self._config.perf_freq
        if self._config.verbosity >= PERFORMANCE and every > 0 and self.steps % every == 0:
            size = format_bytes(round(self._bytes / every))
            self._say(
                f"step {self.steps}: {size} and {1e3 * self._waited_s / every:.3g} ms of waiting per step, "
                f"{self._stale} of the last {every} pipelined"
            )
            self._bytes = self._waited_s = 0.0
            self._stale = 0

    def _say(self, text: str) -> None:
        if self._world.rank == 0:
            print(f"ml_comm: {self._name}: {text}", flush=True)
