"""`syncline bench negotiation`: measures the cost of matching Horovod's operations by name. Each rank runs this module.

A step sums many tensors with a named `hvd.allreduce_async_` for each, and `hvd.synchronize`. For comparison, the same
tensors are copied into one buffer, reduced by the engine and copied back, without negotiation. The two take turns, with
a barrier before each. The difference is the cost of names: the requests, the way to the coordinator and back, and
waking the tasks. Negotiation is the part between the last request of the last rank and the first byte that is sent. All
ranks must be on one host, because their clocks are compared.
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
from syncline.bench.measuring import Summary, over_ranks, quiet_machine, summarize
from syncline.collectives.channel import Channel, barrier
from syncline.compat.horovod.context import context
from syncline.world import World, init

__all__ = ["NegotiationPlan", "describe", "measure"]

WARM_UP_TURNS = 10


@dataclass(frozen=True)
class NegotiationPlan:
    """The options of the benchmark."""

    out: str
    tensors: int = 100
    numel: int = 1000
    turns: int = 200


def measure(plan: NegotiationPlan) -> None:
    """Run the benchmark on this rank; rank 0 writes the results to `plan.out`."""
    with init(transport="torch_dist") as world, quiet_machine():
        hvd.init()
        signals, team = world.group(), world.group()
        tensors = [torch.ones(plan.numel) for _ in range(plan.tensors)]
        names = [f"gradient.{number}" for number in range(plan.tensors)]
        buffer = torch.empty(plan.tensors, plan.numel)
        rows = list(buffer)
        native = team.transport.native
        assert native.available, "gloo has a native all-reduce"
        watch = _RequestTimes(world.runtime.now)
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
        times |= {name: own[WARM_UP_TURNS:] for name, own in watch.times.items()}
        seconds = dict(zip(times, over_ranks(signals.channel, list(times.values()), "max"), strict=True))
        difference = [a - b for a, b in zip(seconds["named"], seconds["bare"], strict=True)]
        negotiation = [b - a for a, b in zip(seconds["asked"], seconds["ran"], strict=True)]
        result = {
            "kind": "negotiation",
            "ranks": world.size,
            "plan": asdict(plan),
            "seconds": seconds,
            "time": {name: asdict(summarize(row)) for name, row in seconds.items()},
            "cost": asdict(summarize(difference)),
            "negotiation": asdict(summarize(negotiation)),
        }
        if world.rank == 0:
            Path(plan.out).write_text(json.dumps(result, indent=1))
        hvd.shutdown()


class _RequestTimes:
    """A timeline that records when this rank started and ended its requests, and ran the first one."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._start = 0.0
        self.times: dict[str, list[float]] = {"asking": [], "asked": [], "ran": []}

    def begin(self) -> None:
        self._start = self._now()

    def requested(self) -> None:
        self.times["asking"].append(self._now() - self._start)
        self.times["asked"].append(self._now())

    def negotiating(self, name: str, kind: str, start: float, stop: float) -> None:
        if len(self.times["ran"]) < len(self.times["asked"]):
            self.times["ran"].append(stop)

    def running(self, name: str, kind: str, activity: str, start: float, stop: float) -> None:
        """Not recorded."""

    def cycle(self, at: float) -> None:
        """Not recorded."""

    def close(self) -> None:
        """There is no file."""


def _take_turns(
    world: World, channel: Channel, ways: dict[str, Callable[[], None]], turns: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM_UP_TURNS + turns):
        for name in sorted(ways, reverse=turn % 2 == 1):
            barrier(channel)
            start = world.runtime.now()
            ways[name]()
            times[name].append(world.runtime.now() - start)
    return {name: own[WARM_UP_TURNS:] for name, own in times.items()}


def describe(document: dict[str, Any]) -> str:
    """The results as text."""
    plan, time = document["plan"], document["time"]
    texts = {name: f"{Summary(**time[name]).scaled(1e3)} ms" for name in ("named", "bare", "asking")}
    return "\n".join(
        [
            f"{plan['tensors']} tensors of {plan['numel']} elements, {document['ranks']} ranks, {plan['turns']} turns; "
            "the slowest rank's time, medians with 95 % intervals",
            f"  by name           {texts['named']}   of it, requests: {texts['asking']}",
            f"  as one buffer     {texts['bare']}",
            f"  cost of names     {Summary(**document['cost']).scaled(1e3)} ms per step; of it, negotiation: "
            f"{Summary(**document['negotiation']).scaled(1e3)} ms",
        ]
    )


if __name__ == "__main__":
    measure(NegotiationPlan(**json.loads(sys.argv[1])))
