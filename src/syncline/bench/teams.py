"""`syncline bench teams`: trains two models at once, each with its own team. Each rank runs this module.

Each model trains in its own task. A turn is a step of the first model, of the second model, and of both at once. If the
network is the bottleneck, both together may take the sum of the two; otherwise the time of the slower one. Computation
is replaced by a pause, as on a separate device, because two models on the same cores could only add up.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.bench.measuring import Summary, describe_place, over_ranks, quiet_machine, ratios, summarize
from syncline.collectives.channel import barrier
from syncline.training.distribute import distribute
from syncline.world import World, init

__all__ = ["TeamsPlan", "describe", "measure"]


@dataclass(frozen=True)
class TeamsPlan:
    """The options of the benchmark: megabytes of gradients and milliseconds of computation of the two models."""

    out: str
    megabytes: tuple[float, float] = (4.0, 2.0)
    pauses: tuple[float, float] = (30.0, 20.0)
    turns: int = 25
    collective: str = "auto"


class _PausingModel:
    """A model that pauses instead of computing."""

    def __init__(self, world: World, megabytes: float, pause: float, collective: str) -> None:
        numel = max(1, int(megabytes * 1e6 / 4 / 8))
        self.model = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(8)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run = distribute(self.model, self.optimizer, algorithm=collective, bucket_bytes=1 << 20)
        self.world = world
        self.pause = pause / 1e3

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.world.compute(self.pause)
        total = sum((parameter.sum() for parameter in self.model), torch.zeros(()))
        total.backward()
        self.optimizer.step()


def measure(plan: TeamsPlan) -> None:
    """Run the benchmark on this rank; rank 0 writes the results to `plan.out`."""
    with init(transport="torch_dist") as world, quiet_machine():
        first, second = (
            _PausingModel(world, size, pause, plan.collective)
            for size, pause in zip(plan.megabytes, plan.pauses, strict=True)
        )
        signals = world.group()

        def both() -> None:
            other = world.runtime.spawn(second.step, name="second model")
            first.step()
            other.join(world.transport.timeout)

        steps: dict[str, Callable[[], None]] = {"first": first.step, "second": second.step, "both": both}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(plan.turns + 3):
            for name, step in steps.items():
                barrier(signals.channel)
                start = world.runtime.now()
                step()
                if turn >= 3:  # the first turns open connections
                    times[name].append(world.runtime.now() - start)
        seconds = dict(zip(steps, over_ranks(signals.channel, list(times.values()), "max"), strict=True))
        pairs = list(zip(seconds["first"], seconds["second"], strict=True))
        result = {
            "kind": "teams",
            "ranks": world.size,
            "hosts": list(world.hosts),
            "lab": os.environ.get("SYNCLINE_LAB", ""),
            "plan": asdict(plan),
            "seconds": seconds,
            "time": {name: asdict(summarize(row)) for name, row in seconds.items()},
            "to_sum": asdict(ratios(seconds["both"], [sum(pair) for pair in pairs])),
            "to_slower": asdict(ratios(seconds["both"], [max(pair) for pair in pairs])),
        }
        if world.rank == 0:
            Path(plan.out).write_text(json.dumps(result, indent=1))
        for model in (first, second):
            model.run.close()


def describe(document: dict[str, Any]) -> str:
    """The results as text."""
    plan = document["plan"]
    lines = [f"two models, each with its own team, {document['ranks']} ranks, {describe_place(document)}"]
    for number, name in enumerate(("first", "second")):
        lines.append(
            f"  {name:7} {_ms(document['time'][name])}   {plan['megabytes'][number]:g} MB of gradients, "
            f"{plan['pauses'][number]:g} ms of computation"
        )
    lines += [
        f"  both    {_ms(document['time']['both'])}",
        f"  both ÷ sum of the two: {Summary(**document['to_sum'])}",
        f"  both ÷ the slower:     {Summary(**document['to_slower'])}",
    ]
    return "\n".join(lines)


def _ms(time: dict[str, Any]) -> str:
    return f"{Summary(**time).scaled(1e3)} ms"


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    measure(TeamsPlan(**{**options, **{name: tuple(options[name]) for name in ("megabytes", "pauses")}}))
