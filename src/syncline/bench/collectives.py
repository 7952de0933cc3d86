"""Every all-reduce side by side: what each rank runs for `syncline bench collectives`.

All contenders share one run. In every round each has its turn, in an order that the round's number draws, so that what
disturbs the machine disturbs them alike; ratios are taken within a round. The ranks meet before and after a turn, and
its time is the shortest over the ranks: from when the last has begun until the last has ended. Small tensors are
reduced several times a turn.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline.bench.calm import calm
from syncline.bench.sizes import written
from syncline.bench.stats import ratios, summarize
from syncline.collectives import NATIVE, build, names
from syncline.collectives.run import allreduce, meet
from syncline.costs import AUTO, Calibration, calibrate, predict_on
from syncline.errors import WorldError
from syncline.world import World, init

__all__ = ["Plan", "measure"]

Contender = Callable[[Tensor], None]

SHORTEST_TURN = 0.004
MOST_CALLS = 20
MOST_SETTLING = 400
"""Calls after which auto must have made up its mind."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    sizes: list[int]
    out: str
    rounds: int = 15
    budget: float = 30.0
    """Seconds for each size, about."""
    algorithms: list[str] = field(default_factory=list)
    """Schedules; all when empty."""
    mpi: bool = False


def measure(plan: Plan) -> None:
    """Run the plan on this rank; rank 0 writes what came of it to `plan.out`."""
    with init(transport="torch_dist") as world, calm():
        bench = _Bench(world, plan)
        results: list[dict[str, Any]] = []
        for size in plan.sizes:
            results += bench.size(size)
            if world.rank == 0:  # after each size: what is measured is not lost when the next one is broken off
                Path(plan.out).write_text(json.dumps({**bench.about(), "results": results}, indent=1))


class _Bench:
    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.signals = world.group()
        self.baseline = "gloo"
        self.skipped: dict[str, str] = {}
        self.calibration: Calibration = calibrate(world.everyone.channel)
        self.contenders = self._contenders()

    def about(self) -> dict[str, Any]:
        """Where and what, for the document."""
        return {
            "kind": "collectives",
            "ranks": self.world.size,
            "hosts": list(self.world.hosts),
            "lab": os.environ.get("SYNCLINE_LAB", ""),
            "baseline": self.baseline,
            "network": asdict(self.calibration),
            "skipped": self.skipped,
            "auto": {key: asdict(choice) for key, choice in self.world.everyone.auto.choices.items()},
        }

    def _contenders(self) -> dict[str, Contender]:
        channel = self.world.everyone.channel
        native = channel.transport.native
        assert native.available, "torch.distributed has collectives of its own"

        def by(name: str) -> Contender:
            schedule = build("allreduce", name)
            return lambda tensor: allreduce(channel, tensor, "sum", schedule)

        found: dict[str, Contender] = {"gloo": lambda tensor: native.allreduce(tensor, "sum").wait()}
        found |= {AUTO: lambda tensor: self.world.everyone.auto.allreduce(tensor, "sum")}
        found |= {name: by(name) for name in self.plan.algorithms or names("allreduce")}
        if self.plan.mpi:
            found["mpi"] = self._mpi()
        return found

    def _mpi(self) -> Contender:
        from syncline.environment import detect
        from syncline.transports.mpi import connect

        native = connect(detect(), self.world.transport.timeout).native
        assert native.available, "MPI has collectives of its own"
        return lambda tensor: native.allreduce(tensor, "sum").wait()

    def size(self, nbytes: int) -> list[dict[str, Any]]:
        """Measure all contenders at one size."""
        tensor = torch.zeros(nbytes // 4)
        say = self._say if self.world.rank == 0 else _silent
        predicted = {name: self._predict(name, nbytes) for name in self.contenders}
        running = {}
        for name, contender in self.contenders.items():
            guess = predicted[name][0] or 0.0
            if guess > self.plan.budget / 3:
                self.skipped[f"{name} at {written(nbytes)}"] = f"one call would take {guess:.1f} s"
            else:
                running[name] = contender
        if self.baseline not in running:  # nothing to compare with
            return []
        warm = self._warm_up(running, tensor, say)
        calls = min(MOST_CALLS, max(1, int(SHORTEST_TURN / min(warm.values()))))  # the same for all: meetings count
        a_round = calls * sum(warm.values())
        rounds = self._agreed(max(5, min(self.plan.rounds, self.plan.budget / a_round)))
        times = self._rounds(running, calls, rounds, tensor, lambda done: say(f"{written(nbytes)}: {done}/{rounds}"))
        return [self._row(name, nbytes, times[name], times[self.baseline], predicted[name]) for name in running]

    def _warm_up(self, running: dict[str, Contender], tensor: Tensor, say: Callable[[str], None]) -> dict[str, float]:
        warm = {}
        for name, contender in running.items():
            say(f"{written(tensor.numel() * 4)}: warming up {name}")
            for _ in range(2):
                contender(tensor)
            if name == AUTO:
                self._settle(contender, tensor)
            warm[name] = self._shortest([self._turn(contender, tensor, 1)])[0]
        return warm

    def _settle(self, contender: Contender, tensor: Tensor) -> None:
        """Let auto make up its mind: what is measured is its choice."""
        auto = self.world.everyone.auto
        for _ in range(MOST_SETTLING):
            if auto.chosen(tensor) is not None:
                return
            contender(tensor)
        raise WorldError(f"auto has not chosen within {MOST_SETTLING} calls")

    def _rounds(
        self,
        running: dict[str, Contender],
        calls: int,
        rounds: int,
        tensor: Tensor,
        say: Callable[[int], None],
    ) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in running}
        for number in range(rounds):
            order = list(running)
            random.Random(number).shuffle(order)
            for name in order:
                times[name].append(self._turn(running[name], tensor, calls))
            say(number + 1)
        return {name: self._shortest(own) for name, own in times.items()}

    def _turn(self, contender: Contender, tensor: Tensor, calls: int) -> float:
        now = self.world.runtime.now
        meet(self.signals.channel)
        start = now()
        for _ in range(calls):
            contender(tensor)
        meet(self.signals.channel)
        return (now() - start) / calls

    def _shortest(self, seconds: list[float]) -> list[float]:
        table = torch.tensor(seconds, dtype=torch.float64)
        allreduce(self.signals.channel, table, "min", build("allreduce", "recursive_doubling"))
        return [float(value) for value in table]

    def _agreed(self, rounds: float) -> int:
        return int(self._shortest([float(int(rounds))])[0])

    def _predict(self, name: str, nbytes: int) -> tuple[float | None, str]:
        if name in (AUTO, "mpi"):
            return None, ""
        channel, network = self.world.everyone.channel, self.calibration.network()
        told = predict_on(channel, NATIVE if name == "gloo" else name, nbytes, network)
        return told.seconds, told.by

    def _row(
        self, name: str, nbytes: int, times: list[float], baseline: list[float], predicted: tuple[float | None, str]
    ) -> dict[str, Any]:
        seconds, by = predicted
        return {
            "contender": name,
            "bytes": nbytes,
            "seconds": times,
            "time": asdict(summarize(times)),
            "ratio": asdict(ratios(times, baseline)),
            "predicted": seconds,
            "predicted_by": by,
        }

    def _say(self, text: str) -> None:
        end = "" if sys.stderr.isatty() else "\n"
        start = "\r\033[K" if sys.stderr.isatty() else ""
        if sys.stderr.isatty() or "warming" not in text:
            print(f"{start}{text}", end=end, file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    return


if __name__ == "__main__":
    measure(Plan(**json.loads(sys.argv[1])))
