"""`syncline bench collectives`: compares all all-reduce schedules. Each rank runs this module.

All contenders run in the same processes. In each round every contender has one turn, in random order, and ratios are
taken within a round, so that a disturbance of the machine affects all of them. There is a barrier before and after a
turn. The time of a turn is the shortest over the ranks: from the last start to the last end. Small tensors are reduced
several times per turn.
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

from syncline.bench.measuring import (
    Summary,
    describe_place,
    format_size,
    new_figure,
    over_ranks,
    quiet_machine,
    ratios,
    save_figure,
    summarize,
)
from syncline.collectives import NATIVE, build, names
from syncline.collectives.channel import allreduce, barrier
from syncline.costs import AUTO, Calibration, calibrate, predict_on
from syncline.errors import WorldError
from syncline.world import World, init

__all__ = ["CollectivesPlan", "measure", "plot", "table"]

Contender = Callable[[Tensor], None]

MIN_TURN_S = 0.004
MAX_CALLS = 20
"""Reductions per turn."""
MAX_AUTO_CALLS = 400
"""Calls after which `auto` must have chosen a schedule."""


@dataclass(frozen=True)
class CollectivesPlan:
    """The options of the benchmark."""

    sizes: list[int]
    out: str
    rounds: int = 15
    budget: float = 30.0
    """Approximate seconds for each size."""
    algorithms: list[str] = field(default_factory=list)
    """Schedules; all if empty."""
    mpi: bool = False


def measure(plan: CollectivesPlan) -> None:
    """Run the benchmark on this rank; rank 0 writes the results to `plan.out`."""
    with init(transport="torch_dist") as world, quiet_machine():
        bench = _Bench(world, plan)
        results: list[dict[str, Any]] = []
        for size in plan.sizes:
            results += bench.size(size)
            if world.rank == 0:  # after each size, so that an interruption loses only one
                Path(plan.out).write_text(json.dumps({**bench.about(), "results": results}, indent=1))


class _Bench:
    def __init__(self, world: World, plan: CollectivesPlan) -> None:
        self.world = world
        self.plan = plan
        self.signals = world.group()
        self.baseline = "gloo"
        self.skipped: dict[str, str] = {}
        self.calibration: Calibration = calibrate(world.everyone.channel)
        self.contenders = self._contenders()

    def about(self) -> dict[str, Any]:
        """The setup, for the document."""
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
        assert native.available, "torch.distributed has native collectives"

        def by(name: str) -> Contender:
            schedule = build("allreduce", name)
            return lambda tensor: allreduce(channel, tensor, "sum", schedule)

        contenders: dict[str, Contender] = {"gloo": lambda tensor: native.allreduce(tensor, "sum").wait()}
        contenders |= {AUTO: lambda tensor: self.world.everyone.auto.allreduce(tensor, "sum")}
        contenders |= {name: by(name) for name in self.plan.algorithms or names("allreduce")}
        if self.plan.mpi:
            contenders["mpi"] = self._mpi()
        return contenders

    def _mpi(self) -> Contender:
        from syncline.environment import detect
        from syncline.transports.mpi import connect

        native = connect(detect(), self.world.transport.timeout).native
        assert native.available, "MPI has native collectives"
        return lambda tensor: native.allreduce(tensor, "sum").wait()

    def size(self, nbytes: int) -> list[dict[str, Any]]:
        """Measure all contenders at one size."""
        tensor = torch.zeros(nbytes // 4)
        predicted = {name: self._predict(name, nbytes) for name in self.contenders}
        running = {}
        for name, contender in self.contenders.items():
            guess = predicted[name][0] or 0.0
            if guess > self.plan.budget / 3:
                self.skipped[f"{name} at {format_size(nbytes)}"] = f"one call takes {guess:.1f} s by the model"
            else:
                running[name] = contender
        if self.baseline not in running:  # nothing to compare with
            return []
        warm = self._warm_up(running, tensor)
        # The same number for all contenders, because the barriers take time.
        calls = min(MAX_CALLS, max(1, int(MIN_TURN_S / min(warm.values()))))
        a_round = calls * sum(warm.values())
        rounds = int(self._minimum([max(5, min(self.plan.rounds, int(self.plan.budget / a_round)))])[0])
        times = self._rounds(running, calls, rounds, tensor)
        return [self._row(name, nbytes, times[name], times[self.baseline], predicted[name]) for name in running]

    def _warm_up(self, running: dict[str, Contender], tensor: Tensor) -> dict[str, float]:
        warm = {}
        for name, contender in running.items():
            self._say(f"{format_size(tensor.numel() * 4)}: warming up {name}")
            for _ in range(2):
                contender(tensor)
            if name == AUTO:
                self._wait_for_auto(contender, tensor)
            warm[name] = self._minimum([self._turn(contender, tensor, 1)])[0]
        return warm

    def _wait_for_auto(self, contender: Contender, tensor: Tensor) -> None:
        """Call `auto` until it has chosen a schedule, which is then measured."""
        auto = self.world.everyone.auto
        for _ in range(MAX_AUTO_CALLS):
            if auto.chosen(tensor) is not None:
                return
            contender(tensor)
        raise WorldError(f"auto has not chosen within {MAX_AUTO_CALLS} calls")

    def _rounds(self, running: dict[str, Contender], calls: int, rounds: int, tensor: Tensor) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in running}
        for number in range(rounds):
            order = list(running)
            random.Random(number).shuffle(order)
            for name in order:
                times[name].append(self._turn(running[name], tensor, calls))
            self._say(f"{format_size(tensor.numel() * 4)}: {number + 1}/{rounds}")
        return {name: self._minimum(own) for name, own in times.items()}

    def _turn(self, contender: Contender, tensor: Tensor, calls: int) -> float:
        now = self.world.runtime.now
        barrier(self.signals.channel)
        start = now()
        for _ in range(calls):
            contender(tensor)
        barrier(self.signals.channel)
        return (now() - start) / calls

    def _minimum(self, seconds: list[float]) -> list[float]:
        return over_ranks(self.signals.channel, seconds, "min")

    def _predict(self, name: str, nbytes: int) -> tuple[float | None, str]:
        if name in (AUTO, "mpi"):
            return None, ""
        channel, network = self.world.everyone.channel, self.calibration.network()
        prediction = predict_on(channel, NATIVE if name == "gloo" else name, nbytes, network)
        return prediction.seconds, prediction.by

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
        """Show the progress, on a terminal in one line that is replaced."""
        if self.world.rank == 0 and sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif self.world.rank == 0 and "warming" not in text:
            print(text, file=sys.stderr, flush=True)


THICK_LINES = ("gloo", "auto", "mpi")


def table(document: dict[str, Any]) -> str:
    """A table of medians with intervals, paired ratios to the native all-reduce, and predictions."""
    network = document["network"]
    lines = [
        f"all-reduce of float32 on {document['ranks']} ranks, {_place(document)}",
        f"network: latency {1e6 * network['latency']:.0f} µs, {network['bandwidth'] / 1e6:.4g} MB/s "
        f"(± {100 * network['bandwidth_spread']:.0f} %), {1e6 * network['per_message']:.1f} µs per message, "
        f"combining {1e9 * network['combine']:.2g} ns per byte",
        "",
        f"{'size':>7} {'algorithm':20} {'median ms':>10} {'95 % interval':>22} "
        f"{'÷ ' + document['baseline']:>8} {'95 % interval':>16} {'predicted':>10} {'measured ÷ predicted':>21}",
    ]
    for size in dict.fromkeys(row["bytes"] for row in document["results"]):
        rows = [row for row in document["results"] if row["bytes"] == size]
        fastest = min(row["time"]["median"] for row in rows)
        lines += [_line(row, fastest) for row in sorted(rows, key=lambda row: float(row["time"]["median"]))]
        lines.append("")
    lines += [f"left out: {what}: {why}" for what, why in document["skipped"].items()]
    lines += [
        f"auto chose {choice['algorithm']} for {key}, {choice['reason']}" for key, choice in document["auto"].items()
    ]
    return "\n".join(lines)


def _place(document: dict[str, Any]) -> str:
    return describe_place(document) + (" (the lab adds no latency)" if document["lab"] else "")


def _line(row: dict[str, Any], fastest: float) -> str:
    time, ratio = Summary(**row["time"]), Summary(**row["ratio"])
    predicted = row["predicted"]
    prediction = f"{1e3 * predicted:10.3f} {time.median / predicted:21.2f}" if predicted else f"{'':10} {'':21}"
    mark = "*" if time.median == fastest else " "
    return (
        f"{format_size(row['bytes']):>7} {row['contender']:19}{mark} {1e3 * time.median:10.3f} "
        f"{time.scaled(1e3).interval('.4g'):>22} {ratio.median:8.2f} {ratio.interval('.4g'):>16} {prediction}".rstrip()
    )


def plot(document: dict[str, Any], stem: Path) -> list[Path]:
    """Plot times with predictions, and ratios with intervals, as SVG and PNG; nothing without results."""
    if not document["results"]:
        return []
    figure = new_figure(13, 5.2)
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(dict.fromkeys(row["contender"] for row in document["results"])):
        rows = [row for row in document["results"] if row["contender"] == name]
        style = {"color": f"C{number}", "linewidth": 2.4 if name in THICK_LINES else 1.2}
        sizes = [row["bytes"] for row in rows]
        left.plot(sizes, [1e3 * row["time"]["median"] for row in rows], marker="o", markersize=3.5, label=name, **style)
        if rows[0]["predicted"]:
            predicted = [1e3 * row["predicted"] for row in rows]
            left.plot(sizes, predicted, linestyle=":", color=f"C{number}", linewidth=1)
        medians = [row["ratio"]["median"] for row in rows]
        spread = [
            [row["ratio"]["median"] - (row["ratio"]["low"] or row["ratio"]["median"]) for row in rows],
            [(row["ratio"]["high"] or row["ratio"]["median"]) - row["ratio"]["median"] for row in rows],
        ]
        right.errorbar(sizes, medians, yerr=spread, marker="o", markersize=3.5, capsize=2, **style)
    left.set(xlabel="size", ylabel="milliseconds (dotted: predicted)", yscale="log")
    right.set(xlabel="size", ylabel=f"time ÷ {document['baseline']}, paired, 95 % interval", xscale="log", yscale="log")
    right.axhline(1, color="0.4", linewidth=0.8)
    sizes = sorted({row["bytes"] for row in document["results"]})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [format_size(size) for size in sizes], fontsize=8)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}" if axes is right else "")
        axes.tick_params(axis="y", which="minor", labelsize=7)
        axes.grid(True, which="major", color="0.9")
    left.legend(fontsize=8)
    figure.suptitle(f"all-reduce on {document['ranks']} ranks, {_place(document)}", fontsize=11)
    return save_figure(figure, stem)


if __name__ == "__main__":
    measure(CollectivesPlan(**json.loads(sys.argv[1])))
