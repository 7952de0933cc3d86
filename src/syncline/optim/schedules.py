"""Learning rates: scaling with the number of workers, and warm-up and decay as torch schedulers, called once a step.

Each scheduler multiplies the initial rate of a parameter group by a factor that depends only on the step:

    warmup              start ╱‾‾‾‾‾‾‾      linearly from a fraction of the rate to the rate
    step_decay          ‾‾‾‾‾|____|___      × factor at each of the given steps
    exponential_decay   ‾‾\\__________      × factor in every `steps` steps, smoothly
    cosine_decay        ‾‾‾‾\\_             half a cosine from the rate to a fraction of it

Combine them with torch's `SequentialLR` (one after the other) or `ChainedScheduler` (the factors multiply). torch's own
schedulers update the last rate and accumulate rounding errors. These compute the factor from the step, and their state
consists of numbers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from syncline.environment import detect
from syncline.errors import SpecError, WorldError
from syncline.lr_scaling import scale_factor
from syncline.optim.base import count, fraction, positive
from syncline.world import current_world

__all__ = ["cosine_decay", "exponential_decay", "scale_lr", "scale_of", "step_decay", "warmup"]


def scale_lr(rate: float, rule: str = "linear", workers: int | None = None) -> float:
    """The learning rate for p workers, where `rate` is that of one worker.

    | rule | rate | when |
    |---|---|---|
    | `"linear"` | η·p | SGD, with `warmup` if p is large (Goyal et al. 2017) |
    | `"sqrt"` | η·√p | adaptive optimizers; SGD if linear diverges (Krizhevsky 2014) |
    | `"none"` | η | the global batch did not grow |

    `workers` is by default the size of the current world: call this after `sl.init()`. Without a world it is 1; if a
    launcher has started several workers, an error is raised. It is the factor by which the global batch grows. If the
    global batch stays the same, do not scale the rate.

    >>> scale_lr(0.1, workers=8), scale_lr(0.1, "sqrt", workers=4)
    (0.8, 0.2)
    >>> scale_lr(0.1)                                        # no world: one worker
    0.1
    >>> import syncline as sl
    >>> sl.simulate(lambda world: scale_lr(0.5), ranks=4).results
    (2.0, 2.0, 2.0, 2.0)
    """
    return positive("rate", rate) * scale_of(rule, workers)


def scale_of(rule: str, workers: int | None = None) -> float:
    """The factor of the learning rate by a rule.

    >>> scale_of("sqrt", 9)
    3.0
    """
    return scale_factor(rule, _current_size() if workers is None else count("workers", workers))


def _current_size() -> int:
    try:
        return current_world().size
    except WorldError:  # a script without sl.init() has one worker
        if detect().size > 1:  # a launcher has started several
            raise
        return 1


class _FactorOfStep(LRScheduler):
    """rate(t) = base · factor(t). If other code changes the rate too: rate(t−1) · factor(t) / factor(t−1)."""

    @abstractmethod
    def factor(self, step: int) -> float:
        """The factor of the base rate in this step. Steps count from 0."""

    def get_lr(self) -> list[float | Tensor]:
        groups = self.optimizer.param_groups
        if self.last_epoch == 0:
            return [group["lr"] * self.factor(0) for group in groups]
        if self._is_initial:  # constructed for a resumed run: the optimizer's state has the rate of this step
            return [group["lr"] for group in groups]
        return [self._next(base, group) for base, group in zip(self.base_lrs, groups, strict=True)]

    def _next(self, base: float | Tensor, group: dict[str, Any]) -> float | Tensor:
        before, now = self.factor(self.last_epoch - 1), self.factor(self.last_epoch)
        if before == 0 or group["lr"] == base * before:  # no other code has changed it: avoid a rounding error
            return base * now
        rate: float | Tensor = group["lr"] * (now / before)
        return rate

    def _get_closed_form_lr(self) -> list[float | Tensor]:
        """`SequentialLR` calls it when this scheduler starts."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]


def warmup(optimizer: Optimizer, steps: int, start: float | str = "linear", workers: int | None = None) -> LRScheduler:
    """From a fraction of the rate to the rate, linearly over the first `steps` steps.

    `start` is that fraction, or the rule by which `scale_lr` raised the rate: then the warm-up begins at the rate of
    one worker, 1/p of it for `"linear"` and 1/√p for `"sqrt"`. `workers` is the size of the current world unless
    told. With one worker nothing was raised and there is nothing to warm up.

        rate(t) = rate · (start + (1 − start) · t / steps)        up to t = steps

    Goyal et al., *Accurate, large minibatch SGD*, 2017: five epochs of it.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.8)      # 0.1 for each of 8
    >>> scheduler = warmup(optimizer, steps=7, workers=8)
    >>> rates = []
    >>> for _ in range(8):
    ...     rates += scheduler.get_last_lr()
    ...     optimizer.step()
    ...     scheduler.step()
    >>> [round(rate, 3) for rate in rates]
    [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    """
    begin = 1 / scale_of(start, workers) if isinstance(start, str) else fraction("start", start)
    if begin == 0:
        raise SpecError(
            "start must be above 0, or the first step changes nothing; give 1e-3, or 'linear' for 1/workers"
        )
    return _Warmup(optimizer, count("steps", steps), begin)


def step_decay(optimizer: Optimizer, at: int | Sequence[int], factor: float = 0.1) -> LRScheduler:
    """The rate times `factor` at each of the steps `at`, or every `at` steps.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> scheduler = step_decay(optimizer, at=[2, 3], factor=0.5)
    >>> rates = []
    >>> for _ in range(5):
    ...     rates += scheduler.get_last_lr()
    ...     optimizer.step()
    ...     scheduler.step()
    >>> rates
    [1.0, 1.0, 0.5, 0.25, 0.25]
    """
    if isinstance(at, int):
        return _StepDecay(optimizer, count("at", at), [], positive("factor", factor))
    steps = [count("each step of at", step) for step in at]
    if not steps or steps != sorted(set(steps)):
        raise SpecError(f"at must name one or more steps, each once and in order, not {list(at)!r}")
    return _StepDecay(optimizer, 0, steps, positive("factor", factor))


def exponential_decay(optimizer: Optimizer, steps: int, factor: float = 0.1) -> LRScheduler:
    """The rate falls smoothly by `factor` within every `steps` steps: rate(t) = rate · factor^(t / steps).

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> scheduler = exponential_decay(optimizer, steps=2, factor=0.25)
    >>> rates = []
    >>> for _ in range(4):
    ...     rates += scheduler.get_last_lr()
    ...     optimizer.step()
    ...     scheduler.step()
    >>> rates
    [1.0, 0.5, 0.25, 0.125]
    """
    return _ExponentialDecay(optimizer, count("steps", steps), positive("factor", factor))


def cosine_decay(optimizer: Optimizer, steps: int, end: float = 0.0) -> LRScheduler:
    """Half a cosine from the rate to the fraction `end` of it over `steps` steps; then it stays there.

        rate(t) = rate · (end + (1 − end) · (1 + cos(π·t / steps)) / 2)

    Loshchilov and Hutter, *SGDR*, 2017, without restarts.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> scheduler = cosine_decay(optimizer, steps=4)
    >>> rates = []
    >>> for _ in range(6):
    ...     rates += scheduler.get_last_lr()
    ...     optimizer.step()
    ...     scheduler.step()
    >>> [round(rate, 3) for rate in rates]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    return _CosineDecay(optimizer, count("steps", steps), fraction("end", end))


class _Warmup(_FactorOfStep):
    def __init__(self, optimizer: Optimizer, steps: int, start: float) -> None:
        self.steps, self.start = steps, start
        super().__init__(optimizer)

    def factor(self, step: int) -> float:
        if step >= self.steps:
            return 1.0  # and not something that rounds to it
        return self.start + (1 - self.start) * step / self.steps


class _StepDecay(_FactorOfStep):
    def __init__(self, optimizer: Optimizer, every: int, at: list[int], fall: float) -> None:
        self.every, self.at, self.fall = every, at, fall
        super().__init__(optimizer)

    def factor(self, step: int) -> float:
        falls = step // self.every if self.every else bisect_right(self.at, step)
        return float(self.fall**falls)


class _ExponentialDecay(_FactorOfStep):
    def __init__(self, optimizer: Optimizer, steps: int, fall: float) -> None:
        self.steps, self.fall = steps, fall
        super().__init__(optimizer)

    def factor(self, step: int) -> float:
        return float(self.fall ** (step / self.steps))


class _CosineDecay(_FactorOfStep):
    def __init__(self, optimizer: Optimizer, steps: int, end: float) -> None:
        self.steps, self.end = steps, end
        super().__init__(optimizer)

    def factor(self, step: int) -> float:
        if step >= self.steps:
            return self.end
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * step / self.steps)) / 2
