"""Faults that a simulation injects.

Times are virtual seconds from the start. In chaos mode they only define an order. Drops and duplicates affect only
messages sent as lossy: real engines deliver all others or break.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from syncline.errors import SpecError

__all__ = ["Delay", "Drop", "Duplicate", "Fault", "Freeze", "Join", "Kill", "Partition", "Slow"]


@dataclass(frozen=True)
class Kill:
    """The process of `rank` ends at `at` without a goodbye message.

    >>> Kill(2, at=0.5)
    Kill(rank=2, at=0.5)
    """

    rank: int
    at: float = 0.0

    def __post_init__(self) -> None:
        _check_time(self.at)


@dataclass(frozen=True)
class Join:
    """A worker joins an elastic job at `at`: `sl.simulate(…, elastic=(2, 8), faults=[Join(at=0.5)])`.

    >>> Join(at=0.5)
    Join(at=0.5)
    """

    at: float = 0.0

    def __post_init__(self) -> None:
        _check_time(self.at)


@dataclass(frozen=True)
class Freeze:
    """The process of `rank` is stopped at `at`, as by SIGSTOP, and continues after `seconds`.

    The launcher of an elastic job counts it as lost if no heartbeat has come for 10 s.

    >>> Freeze(1, at=0.5, seconds=12.0)
    Freeze(rank=1, at=0.5, seconds=12.0)
    """

    rank: int
    at: float = 0.0
    seconds: float = 1.0

    def __post_init__(self) -> None:
        _check_time(self.at)
        _check_time(self.seconds)


@dataclass(frozen=True)
class Slow:
    """From `start` to `stop`, `rank` takes `factor` times as long to compute, combine, send and receive.

    >>> Slow(1, 4.0, stop=2.0).stop
    2.0
    """

    rank: int
    factor: float
    start: float = 0.0
    stop: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise SpecError(f"a slowdown is a finite factor above 0 (factor: {self.factor})")


@dataclass(frozen=True)
class Delay:
    """With `probability`, a message from `source` to `to` (None: any) is `seconds` late.

    >>> Delay(0.01, to=3).source is None
    True
    """

    seconds: float
    source: int | None = None
    to: int | None = None
    probability: float = 1.0

    def __post_init__(self) -> None:
        _check_time(self.seconds)
        _check_probability(self.probability)


@dataclass(frozen=True)
class Partition:
    """From `start` to `stop` no message passes between `group` and `others`. They are delivered afterwards.

    `others` None means all other ranks. The launcher of an elastic job and its store are then on their side: it counts
    the group as lost if no heartbeat has come for 10 s.

    >>> Partition((0, 1), stop=1.0).separates(0, 2, 0.5)
    True
    >>> Partition((0,), others=(1,)).separates(2, 0, 0.5)      # one link
    False
    """

    group: tuple[int, ...]
    start: float = 0.0
    stop: float = math.inf
    others: tuple[int, ...] | None = None

    def separates(self, source: int, to: int, now: float) -> bool:
        """Whether a message between the two is held at `now`."""
        return self.start <= now < self.stop and (self._between(source, to) or self._between(to, source))

    def _between(self, one: int, other: int) -> bool:
        return one in self.group and (other not in self.group if self.others is None else other in self.others)


@dataclass(frozen=True)
class Drop:
    """A message sent as lossy is lost with `probability`.

    >>> Drop(0.1).probability
    0.1
    """

    probability: float

    def __post_init__(self) -> None:
        _check_probability(self.probability)


@dataclass(frozen=True)
class Duplicate:
    """A message sent as lossy arrives twice with `probability`.

    >>> Duplicate(0.1).probability
    0.1
    """

    probability: float

    def __post_init__(self) -> None:
        _check_probability(self.probability)


Fault = Kill | Freeze | Join | Slow | Delay | Partition | Drop | Duplicate


def ranks_of(fault: Fault) -> tuple[int, ...]:
    """The ranks that a fault names."""
    if isinstance(fault, Kill | Freeze | Slow):
        return (fault.rank,)
    if isinstance(fault, Partition):
        return (*fault.group, *(fault.others or ()))
    if isinstance(fault, Delay):
        return tuple(rank for rank in (fault.source, fault.to) if rank is not None)
    return ()


def _check_time(seconds: float) -> None:
    if not 0 <= seconds < math.inf:
        raise SpecError(f"a time is finite and not negative (seconds: {seconds})")


def _check_probability(probability: float) -> None:
    if not 0.0 <= probability <= 1.0:
        raise SpecError(f"a probability lies between 0 and 1 (probability: {probability})")


def slowness(faults: Iterable[Fault], rank: int, now: float) -> float:
    """The factor by which the faults slow `rank` down at `now`."""
    factor = 1.0
    for fault in faults:
        if isinstance(fault, Slow) and fault.rank == rank and fault.start <= now < fault.stop:
            factor *= fault.factor
    return factor
