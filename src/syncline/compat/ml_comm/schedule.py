"""Which steps are pipelined: `ksteps` and `max_steps` of Cray's plugin, as a strategy, and its run.

```text
ksteps ≥ max_steps        every step is synchronous
0 ≤ ksteps < max_steps    synchronous for ksteps steps, then pipelined
ksteps < 0                pipelined, and the last |ksteps| steps are synchronous
```

A pipelined step applies the mean gradients of the step before it. Its own gradients are reduced::

    in backward     if each of the synchronous steps before had one backward pass
    in step()       otherwise: several passes may come before a step, and a pass may reach the parameters of another
                    optimizer, as in a GAN, where only the gradients that step() finds count
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from syncline.errors import IncompatibleError, SpecError
from syncline.reduction import ReductionPass
from syncline.strategies.allreduce import AllReduce, AllReduceRun
from syncline.strategies.base import StrategyRun

__all__ = ["PipelinedAllReduce", "plan_steps"]

OBSERVED_STEPS = 2
"""The fewest synchronous steps that show how many passes a step has. In a GAN the first step may look like one pass."""


@dataclass(frozen=True, repr=False)
class PipelinedAllReduce(AllReduce):
    """`AllReduce` for scripts that have no run to pause: backward passes do not count, but steps do."""

    def run_type(self) -> type[StrategyRun]:
        return _PipelinedRun


class _PipelinedRun(AllReduceRun):
    strategy: PipelinedAllReduce

    def setup(self) -> None:
        self._pausing = ExitStack()
        self._paused = False
        """Whether gradients are reduced in step()."""
        self._rounds_before = 0
        """The number of reductions before the current step."""
        # Before the hooks of `AllReduceRun`, which check that there are new gradients.
        self.hooks.append(self.optimizer.register_step_pre_hook(self._reduce_at_step))
        super().setup()
        self.hooks.append(self.optimizer.register_step_post_hook(self._prepare_next))
        self._pause_if_stale()

    def detach(self) -> None:
        self._pausing.close()
        super().detach()

    def stale(self) -> bool:
        return self.strategy.is_stale(self.stats.steps, self.total_steps)

    def _reduce_at_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._paused:
            self.reduce_gradients()

    def _prepare_next(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._rounds_before = self._rounds
        self._pause_if_stale()

    def _finish(self, reduction: ReductionPass) -> None:
        if not self._paused and self._rounds > self._rounds_before and self.stale():
            raise IncompatibleError(
                f"step {self.stats.steps} of {self.strategy!r} has a second backward pass, and each of the steps of "
                "its warm-up had one: its gradients are on their way already. Take warmup=0 for steps with different "
                "numbers of passes, or warmup=1.0"
            )
        super()._finish(reduction)

    def _pause_if_stale(self) -> None:
        steps = self.stats.steps
        one_pass_each = steps >= OBSERVED_STEPS and self._rounds == steps
        pause = self.stale() and (self._paused or not one_pass_each)
        if pause and not self._paused:
            self._pausing.enter_context(self.no_sync())
        elif self._paused and not pause:
            self._pausing.close()
        self._paused = pause


def plan_steps(ksteps: int, max_steps: int) -> AllReduce:
    """The strategy of `ksteps` and `max_steps`.

    >>> [plan_steps(ksteps, 100) for ksteps in (100, 20, 0)]
    [allreduce, allreduce(delay=1, warmup=20), allreduce(delay=1)]
    >>> plan_steps(-45, 100)
    allreduce(delay=1, cooldown=45, steps=100)
    """
    if max_steps < 1:
        raise SpecError(f"max_steps={max_steps}: the number of steps, at least 1")
    if abs(ksteps) >= max_steps:
        return AllReduce()
    if ksteps < 0:
        return PipelinedAllReduce(delay=1, cooldown=-ksteps, steps=max_steps)
    return PipelinedAllReduce(delay=1, warmup=ksteps)
