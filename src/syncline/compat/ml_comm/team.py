"""A team: an independent channel of all ranks that averages lists of arrays, at once or a step later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.compat.ml_comm.arrays import Layout, ScriptArray, import_arrays, join_arrays, split_buffers
from syncline.compat.ml_comm.config import TeamConfig, agree_on
from syncline.compat.ml_comm.report import StepReport
from syncline.compat.ml_comm.schedule import plan_steps
from syncline.errors import IncompatibleError
from syncline.world import Pending, World, allreduce

__all__ = ["PluginTeam"]


class PluginTeam:
    """One team of `init(threads, teams, max_elements)`. Every rank is a member of every team.

    ```text
    call             0     1     2     3     …          config_team(team, 0, ksteps=2, max_steps=10)
    gradients        g0    g1    g2    g3
    returned means   g0    g1    0     g2               the first pipelined call has no earlier mean: zeros
    ```
    """

    def __init__(self, world: World, number: int, max_elements: int) -> None:
        self.world, self.number, self.max_elements = world, number, max_elements
        self.group = world.group()
        self._waiting: tuple[list[Pending[Tensor]], Layout] | None = None
        """The means of the latest pipelined call, and the layout of its list."""
        self._use(TeamConfig())

    def configure(self, config: TeamConfig) -> None:
        """Set the arguments, and count steps from 0 again. Every rank calls it; rank 0's values count."""
        plan_steps(config.ksteps, config.max_steps)  # a value that is refused is refused before anything is sent
        self._drop_waiting()
        self._use(agree_on(config, f"config_team({self.number}, …)", self.group))

    def _use(self, config: TeamConfig) -> None:
        self._plan = plan_steps(config.ksteps, config.max_steps)
        self._report = StepReport(self.world, f"team {self.number}", config, self._plan)

    def gradients(self, values: Sequence[Any]) -> list[Any]:
        """The means over the ranks, as new arrays: of these values, or in a pipelined call of those before."""
        arrays, layout = import_arrays(values, "gradients")
        count = sum(array.tensor.numel() for array in arrays if array is not None)
        if count > self.max_elements:
            raise IncompatibleError(
                f"gradients got {count} elements, and init(threads_per_team, teams, max_elements) was called with "
                f"max_elements={self.max_elements}: give it at least {count}"
            )
        stale = self._plan.is_stale(self._report.steps)
        if not stale:
            self._drop_waiting()
        elif self._waiting is not None and self._waiting[1] != layout:
            raise IncompatibleError(
                f"team {self.number} is pipelined, so this call would return the means of the list before it, which "
                "had other arrays: use average() for other values, or another team"
            )
        buffers = join_arrays(arrays)
        now = self.world.runtime.now
        start = now()
        pending = [allreduce(buffer, op="mean", group=self.group, async_=stale) for buffer in buffers]
        means = self._take_earlier(pending, layout) if stale else pending
        self._report.note_step(sum(buffer.numel() * buffer.element_size() for buffer in buffers), now() - start)
        if means is None:
            return [None if array is None else array.convert(torch.zeros_like(array.tensor)) for array in arrays]
        return _convert(arrays, means)

    def _take_earlier(self, pending: list[Pending[Tensor]], layout: Layout) -> list[Tensor] | None:
        """Keep the means of this call, and wait for those of the call before; None if there are none."""
        earlier, self._waiting = self._waiting, (pending, layout)
        return None if earlier is None else [each.wait() for each in earlier[0]]

    def _drop_waiting(self) -> None:
        """Wait for the means that no step applies: synchronous steps begin."""
        earlier, self._waiting = self._waiting, None
        for each in () if earlier is None else earlier[0]:
            each.wait()

    def close(self) -> None:
        """Close the channel. Every rank calls it."""
        self._drop_waiting()
        self.group.close()


def _convert(arrays: Sequence[ScriptArray | None], means: Sequence[Tensor]) -> list[Any]:
    parts = split_buffers(arrays, means)
    return [
        None if array is None or part is None else array.convert(part)
        for array, part in zip(arrays, parts, strict=True)
    ]
