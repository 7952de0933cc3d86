"""Local SGD whose period shrinks with the loss: long at first, when it saves most, and short later, for accuracy.

τ' = ⌈τ₀ · √(F / F₀)⌉ after every interval, with F the mean loss of all workers in it. If that is not below τ, it is
⌈τ/2⌉. The least is 1::

    loss       2     1    .5   .125  .125  .125
    period     16    12    8     4     2     1

If the learning rate η has changed, the root is √(η₀·F / (η·F₀)).

Wang and Joshi, Adaptive communication strategies to achieve the best error-runtime trade-off in local-update SGD
(2019).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from syncline.errors import SpecError
from syncline.strategies.base import Preset, Strategy, StrategyRun, check_counts, check_number
from syncline.strategies.local import STATE_MODES, Local, LocalRun
from syncline.world import allreduce

__all__ = ["AdaComm", "next_period"]

logger = logging.getLogger("syncline")

DEFAULT_INTERVAL_STEPS = 100


@dataclass(frozen=True, repr=False)
class AdaComm(Strategy):
    """Local SGD with a period that begins at `start` and follows the loss down to `least`.

    The period changes every `interval` steps (100 by default), or every `seconds` by rank 0's clock, each at the next
    round. `state` is as in `Local`. `syncline train` reports the loss; your own script calls `run.note_loss(loss)`
    after backward.

    >>> AdaComm(start=32, interval=200)
    adacomm(start=32, interval=200)
    """

    start: int = 16
    interval: int | None = None
    seconds: float | None = None
    least: int = 1
    state: Literal["keep", "average", "reset"] = "keep"

    name: ClassVar[str] = "adacomm"
    presets: ClassVar[tuple[Preset, ...]] = (Preset(spec="adacomm(start=32)"),)

    def __post_init__(self) -> None:
        check_counts(self, start=1, least=1)
        if self.interval is not None:
            check_counts(self, interval=1)
        if self.least > self.start:
            raise SpecError(f"{self!r}: the period begins at {self.start} and falls: least is at most that")
        if self.seconds is not None:
            check_number(self, "seconds", "a number of seconds above 0", lambda seconds: 0 < seconds < math.inf)
            if self.interval is not None:
                raise SpecError(f"{self!r}: an interval is told in steps or in seconds; leave one of them out")
        if self.state not in STATE_MODES:
            raise SpecError(f"adacomm(state={self.state!r}): one of {', '.join(STATE_MODES)}")

    def run_type(self) -> type[StrategyRun]:
        return _AdaCommRun


def next_period(start: int, period: int, loss: float, slower: float = 1.0, before: float = 1.0) -> int:
    """The period after an interval: `loss` is F / F₀, `slower` is η₀ / η now, and `before` what it was an interval ago.

    A smaller rate allows a longer period, so the previous period is converted to the current rate. A plateau halves it.

    >>> period, found = 16, []
    >>> for loss in (2.0, 1.0, 0.5, 0.125, 0.125, 0.125, 0.125):
    ...     period = next_period(16, period, loss / 2.0) if found else 16
    ...     found.append(period)
    >>> found
    [16, 12, 8, 4, 2, 1, 1]
    >>> next_period(16, 4, 0.25), next_period(16, 4, 0.25, slower=4.0)      # the rate fell to a quarter: 8 / 2
    (2, 4)
    """
    wanted = math.ceil(start * math.sqrt(slower * loss) - 1e-9)
    had = period * math.sqrt(slower / before)
    chosen = wanted if wanted < had else math.ceil(had / 2)
    return max(1, min(start, chosen))


class _AdaCommRun(LocalRun):
    strategy: AdaComm

    @property
    def rule(self) -> Local:
        return Local(period=self.strategy.start, state=self.strategy.state)

    def setup(self) -> None:
        super().setup()
        self._steps = 0
        """Steps in this interval, counted in whole rounds, so that it is the same on every worker."""
        self._began = self.world.runtime.now()
        self._sum: Tensor = torch.zeros((), dtype=torch.float64)
        self._count = 0
        """The number of losses in this interval on this worker."""
        self._first: float | None = None
        """F₀: the loss of the first round."""
        self._top = 0.0
        """η₀: the largest rate so far, because a warm-up must not shorten the period."""
        self._slower = 1.0
        self._warned = False

    @property
    def wants_loss(self) -> bool:
        return self.communicator.size > 1

    def note_loss(self, loss: float | Tensor) -> None:
        if isinstance(loss, Tensor):
            loss = loss.detach().double()
            self._sum = self._sum.to(loss.device)  # summed on its device: reading it would wait for the device
        self._sum = self._sum + loss
        self._count += 1

    def after_sync(self) -> None:
        self._steps += self.period
        if (self._first is not None or self._warned) and not self._due():
            return
        loss, rate = self._mean_loss()
        if loss is None and self._first is not None:
            return  # a round without steps, after the end of the data: the interval continues
        if loss is None or not math.isfinite(loss):
            self._warn()
        elif self._first is None:
            self._first, self._top = loss, rate
        else:
            self._top = max(self._top, rate)
            slower = self._top / rate if rate > 0.0 else self._slower
            ratio = loss / self._first if self._first > 0.0 else 1.0
            period = next_period(self.strategy.start, self.period, max(0.0, ratio), slower, self._slower)
            self.period, self._slower = max(self.strategy.least, period), slower
        self._begin_interval()

    def _due(self) -> bool:
        if self.strategy.seconds is None:
            return self._steps >= (self.strategy.interval or DEFAULT_INTERVAL_STEPS)
        due = self.world.runtime.now() - self._began >= self.strategy.seconds
        shared = bool(self.communicator.from_root(torch.tensor([due], dtype=torch.uint8)).item())
        return bool(self.communicator.first_of_peers(shared))

    def _mean_loss(self) -> tuple[float | None, float]:
        """The mean loss of this interval and the mean rate over the workers. The loss is None if no worker has one."""
        rate = next((float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group), 0.0)
        own = torch.tensor([float(self._sum), float(self._count), rate, 1.0], dtype=torch.float64)
        # The last number counts the workers in the sum: the present team of an elastic job may be another one.
        total, count, rates, workers = allreduce(own, op="sum", group=self.communicator.group).tolist()
        self.stats.sent(own.nbytes, own.nbytes)
        return total / count if count else None, rates / workers

    def _begin_interval(self) -> None:
        self._steps, self._began = 0, self.world.runtime.now()
        self._sum, self._count = torch.zeros((), dtype=torch.float64), 0

    def _warn(self) -> None:
        if not self._warned and self.communicator.rank == 0:
            logger.warning(
                "%r got no loss, or none that is finite, and keeps its period of %d: call run.note_loss(loss) "
                "after backward",
                self.strategy,
                self.period,
            )
        self._warned = True

    # State.

    def forget_steps(self) -> None:
        super().forget_steps()
        self._begin_interval()

    def shared_state(self) -> dict[str, Any]:
        interval = {
            "steps": self._steps,
            "seconds": self.world.runtime.now() - self._began,
            "first": self._first,
            "top": self._top,
            "slower": self._slower,
            "warned": self._warned,
        }
        return super().shared_state() | {"interval": interval}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        super().load_shared_state(state)
        if "interval" in state:
            interval = state["interval"]
            self._steps, self._began = int(interval["steps"]), self.world.runtime.now() - float(interval["seconds"])
            self._first = None if interval["first"] is None else float(interval["first"])
            self._top, self._slower = float(interval["top"]), float(interval["slower"])
            self._warned = bool(interval.get("warned", False))  # decides whether a round compares losses

    def own_state(self) -> dict[str, Any]:
        return {"sum": float(self._sum), "count": self._count}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._sum = torch.tensor(float(state["sum"]), dtype=torch.float64)
        self._count = int(state["count"])
