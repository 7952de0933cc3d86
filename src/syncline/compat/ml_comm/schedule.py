"""Which steps are pipelined: `ksteps` and `max_steps` of Cray's plugin, as a strategy, and its run.

```text
ksteps ≥ max_steps        every step is synchronous
0 ≤ ksteps < max_steps    synchronous for ksteps steps, then pipelined
ksteps < 0                pipelined, and the last |ksteps| steps are synchronous
```

A pipelined step applies the mean gradients of the step before it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from syncline.errors import SpecError
from syncline.strategies.allreduce import AllReduce, AllReduceRun
from syncline.strategies.base import StrategyRun

__all__ = ["PipelinedAllReduce", "plan_steps"]


@dataclass(frozen=True, repr=False)
class PipelinedAllReduce(AllReduce):
    """`AllReduce` for scripts without a run: the gradients of a pipelined step are those that `step()` finds.

    Several backward passes may come before a step, and a pass may reach the parameters of another optimizer, as in a
    GAN: neither counts as a step.
    """

    def run_type(self) -> type[StrategyRun]:
        return _PipelinedRun


class _PipelinedRun(AllReduceRun):
    strategy: PipelinedAllReduce

    def setup(self) -> None:
        self._pausing = ExitStack()
        self._paused = False
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
        self._pause_if_stale()

    def _pause_if_stale(self) -> None:
        """Reduce in backward only if the next step is synchronous: pipelined ones overlap with the next step."""
        stale = self.stale()
        if stale and not self._paused:
            self._pausing.enter_context(self.no_sync())
        elif self._paused and not stale:
            self._pausing.close()
        self._paused = stale


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
