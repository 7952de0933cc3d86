"""What `syncline bench elastic` measures: the options, and the settings of each strategy's runs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from syncline.errors import IncompatibleError, SpecError
from syncline.specs import nearest

__all__ = ["ElasticPlan", "RunSchedule", "is_contender", "slug_of", "strategy_of"]

CONTENDER_NAMES = ("torchft",)
KILL_MARGIN_S = 4.0
"""No kill in the last seconds of a run: the survivors need this time to complete a step before the end."""


@dataclass(frozen=True, kw_only=True)
class ElasticPlan:
    """The options of the bench."""

    strategies: tuple[str, ...] = ("allreduce",)
    against: tuple[str, ...] = ()
    """Contenders of other libraries, such as "torchft", in the same rounds."""
    workers: int = 4
    seconds: float = 600.0
    """Measured seconds of a run with losses, from the first step of the last worker."""
    undisturbed: float | None = None
    """Seconds of the run without losses; None: as long as the other; 0: there is none."""
    kill_every: float = 15.0
    kill: Literal["workers", "servers", "both"] = "workers"
    lost: Literal["kill", "freeze"] = "kill"
    lost_after: str | None = None
    servers: int = 0
    replicas: int = 1
    transport: str | None = None
    workload: str = "digits"
    batch: int | None = None
    learning_rate: float | None = None
    rounds: int = 1
    seed: int = 0

    def check(self) -> None:
        """Refuse impossible options."""
        from syncline.strategies import build_strategy
        from syncline.workloads import build

        if not self.strategies:
            raise SpecError("no strategy is named: --strategy 'allreduce;diloco'")
        for spec in self.strategies:
            build_strategy(spec)
        for spec in self.against:
            if not is_contender(spec):
                raise SpecError(f"--against {spec}: unknown contender; {nearest(spec, CONTENDER_NAMES)}")
            if self.servers:
                raise IncompatibleError(f"--against {spec} with --servers {self.servers}: {spec} has no servers")
        build(self.workload)
        if self.workers < 2:
            raise SpecError(f"-n {self.workers}: at least 2 workers, so that one survives")
        if not 0 < self.seconds < math.inf:
            raise SpecError(f"--seconds {self.seconds:g}: a finite time above 0")
        if not 0 < self.kill_every < math.inf:
            raise SpecError(f"--kill-every {self.kill_every:g}: seconds above 0")
        if not self.kill_times:
            raise SpecError(
                f"--seconds {self.seconds:g} --kill-every {self.kill_every:g}: no kill falls into the run, because "
                f"none is made in its last {KILL_MARGIN_S:g} seconds"
            )
        if self.undisturbed is not None and not 0 <= self.undisturbed < math.inf:
            raise SpecError(f"--undisturbed {self.undisturbed:g}: seconds, or 0 for none")
        if self.rounds < 1:
            raise SpecError(f"--rounds {self.rounds}: at least 1")
        if self.batch is not None and self.batch < 1:
            raise SpecError(f"--batch {self.batch}: at least one sample")
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise SpecError(f"--learning-rate {self.learning_rate:g}: a finite rate above 0")
        if self.kill != "workers" and not self.servers:
            raise IncompatibleError(f"--kill {self.kill}: there are no servers; add --servers 2 --replicas 2")
        if self.kill != "workers" and self.replicas < 2:
            raise IncompatibleError(
                f"--kill {self.kill} with --replicas {self.replicas}: a lost server would end the job; add --replicas 2"
            )
        if self.against:
            from syncline.bench.elastic.torchft_worker import CONTENDERS

            for spec in self.against:
                CONTENDERS.build(spec)

    @property
    def kill_times(self) -> list[float]:
        """When processes are killed, in seconds of a run.

        >>> ElasticPlan(seconds=60, kill_every=15).kill_times
        [15.0, 30.0, 45.0]
        """
        count = int((self.seconds - KILL_MARGIN_S) / self.kill_every)
        return [float(self.kill_every * number) for number in range(1, count + 1)]

    def schedule(self) -> list[RunSchedule]:
        """The runs in order. Runs with and without losses take turns, and every second round begins without."""
        plain = self.seconds if self.undisturbed is None else self.undisturbed
        found = []
        for turn in range(self.rounds):
            for spec in (*self.strategies, *self.against):
                pair = [RunSchedule(spec, turn, self.seconds, tuple(self.kill_times))]
                pair += [RunSchedule(spec, turn, plain)] if plain else []
                found += pair if turn % 2 == 0 else pair[::-1]
        return found


@dataclass(frozen=True)
class RunSchedule:
    """One run of a strategy."""

    strategy: str
    """The spec of a strategy, or of a contender."""
    turn: int
    seconds: float
    kill_times: tuple[float, ...] = ()

    @property
    def disturbed(self) -> bool:
        return bool(self.kill_times)

    @property
    def name(self) -> str:
        """The name of its folder.

        >>> RunSchedule("ssp(slack=3)", 0, 60.0).name
        'ssp-slack-3-undisturbed-1'
        """
        return f"{slug_of(self.strategy)}-{'losses' if self.disturbed else 'undisturbed'}-{self.turn + 1}"


def is_contender(spec: str) -> bool:
    """Whether a spec names a contender.

    >>> is_contender("torchft(heartbeat_timeout=1)"), is_contender("allreduce")
    (True, False)
    """
    return spec.partition("(")[0].strip() in CONTENDER_NAMES


def strategy_of(spec: str) -> str:
    """The strategy whose learning rate a run has, and whose steps it counts: contenders train as `allreduce` does.

    >>> strategy_of("torchft"), strategy_of("ssp(slack=3)")
    ('allreduce', 'ssp(slack=3)')
    """
    return "allreduce" if is_contender(spec) else spec


def slug_of(spec: str) -> str:
    """A spec as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", spec).strip("-")
