"""What it costs that Horovod's operations are matched by name: what each rank runs for `syncline bench negotiation`.

A step sums so many tensors, by `hvd.allreduce_async_` with a name each and `hvd.synchronize`; beside it the same
tensors are copied into one buffer, summed by the engine and copied back, with nothing to negotiate. The two take turns;
the ranks meet before each. The difference is the price of names: asking for each, the way to the coordinator and back,
waking who runs them and who waits. Negotiation is the part of it between the last rank's last request and the first
byte that is moved: all ranks are on one host, so that their clocks are one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import syncline.compat.horovod.torch as hvd
from syncline.bench.calm import calm
from syncline.bench.stats import Summary, summarize
from syncline.collectives import build
from syncline.collectives.run import allreduce, meet
from syncline.compat.horovod.context import context
from syncline.world import World, init

__all__ = ["NegotiationPlan", "describe", "measure"]

WARM_UP = 10


@dataclass(frozen=True)
class NegotiationPlan:
    """What to measure."""

    out: str
    tensors: int = 100
    numel: int = 1000
    turns: int = 200


def measure(plan: NegotiationPlan) -> None:
    """Run the plan on this rank; rank 0 writes what came of it."""
    with init(transport="torch_dist") as world, calm():
        hvd.init()
        signals, team = world.group(), world.group()
        tensors = [torch.ones(plan.numel) for _ in range(plan.tensors)]
        names = [f"gradient.{number}" for number in range(plan.tensors)]
        buffer = torch.empty(plan.tensors, plan.numel)
        rows = list(buffer)
        native = team.transport.native
        assert native.available, "gloo has an all-reduce of its own"
        watch = _Watch(world.runtime.now)
        context().timeline = watch

        def named() -> None:
            watch.begin()
            handles = [hvd.allreduce_async_(t, name=name) for t, name in zip(tensors, names, strict=True)]
            watch.requested()
            for handle in handles:
                hvd.synchronize(handle)

        def bare() -> None:
            torch._foreach_copy_(rows, tensors)
            native.allreduce(buffer, "sum").wait()
            buffer.mul_(1 / world.size)
            torch._foreach_copy_(tensors, rows)

        times = _take_turns(world, signals.channel, {"named": named, "bare": bare}, plan.turns)
        times |= {name: own[WARM_UP:] for name, own in watch.times.items()}
        table = torch.tensor(list(times.values()), dtype=torch.float64)
        allreduce(signals.channel, table, "max", build("allreduce", "recursive_doubling"))
        named_times, bare_times, _, requested, ran = table.tolist()
        difference = [a - b for a, b in zip(named_times, bare_times, strict=True)]
        negotiation = [b - a for a, b in zip(requested, ran, strict=True)]
        result = {
            "kind": "negotiation",
            "ranks": world.size,
            "plan": asdict(plan),
            "seconds": dict(zip(times, table.tolist(), strict=True)),
            "time": {name: asdict(summarize(row)) for name, row in zip(times, table.tolist(), strict=True)},
            "cost": asdict(summarize(difference)),
            "negotiation": asdict(summarize(negotiation)),
        }
        if world.rank == 0:
            Path(plan.out).write_text(json.dumps(result, indent=1))
        hvd.shutdown()


class _Watch:
    """When this rank began to request, had requested for all, and began to run the first: told as a timeline is."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._start = 0.0
        self.times: dict[str, list[float]] = {"asking": [], "requested": [], "ran": []}

    def begin(self) -> None:
        self._start = self._now()

    def requested(self) -> None:
        self.times["asking"].append(self._now() - self._start)
        self.times["requested"].append(self._now())

    def negotiating(self, name: str, kind: str, start: float, stop: float) -> None:
        if len(self.times["ran"]) < len(self.times["requested"]):
            self.times["ran"].append(stop)

    def running(self, name: str, kind: str, activity: str, start: float, stop: float) -> None:
        """The rest is not looked at."""

    def cycle(self, at: float) -> None:
        """Nor are cycles."""

    def close(self) -> None:
        """There is no file."""


def _take_turns(world: World, channel: Any, ways: dict[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM_UP + turns):
        for name in sorted(ways, reverse=turn % 2 == 1):
            meet(channel)
            start = world.runtime.now()
            ways[name]()
            times[name].append(world.runtime.now() - start)
    return {name: own[WARM_UP:] for name, own in times.items()}


def describe(document: dict[str, Any]) -> str:
    """For the terminal."""
    plan, time = document["plan"], document["time"]
    told = {name: f"{Summary(**time[name]).scaled(1e3)} ms" for name in ("named", "bare", "asking")}
    return "\n".join(
        [
            f"{plan['tensors']} tensors of {plan['numel']} numbers, {document['ranks']} ranks, {plan['turns']} turns; "
            "the slowest rank's time, medians with 95 % intervals",
            f"  by name           {told['named']}   of it, asking for them: {told['asking']}",
            f"  as one, unnamed   {told['bare']}",
            f"  what names cost   {Summary(**document['cost']).scaled(1e3)} ms a step; of it, negotiation: "
            f"{Summary(**document['negotiation']).scaled(1e3)} ms",
        ]
    )


if __name__ == "__main__":
    measure(NegotiationPlan(**json.loads(sys.argv[1])))
