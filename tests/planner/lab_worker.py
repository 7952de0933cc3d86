"""One worker of the lab runs of `tests.planner.lab_runs`: times training steps of several plans, in turn.

Each plan has its own model, which stays from its first repeat to its last one. In every repeat each plan takes a block
of steps. A block of synchronous steps ends when the slowest worker has taken them; of asynchronous ones, the mean over
the workers counts.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import syncline as sl
from syncline.bench.measuring import over_ranks, quiet_machine
from syncline.planner.profile import MAKE_OPTIMIZER
from syncline.specs import parse
from syncline.strategies import build_strategy
from syncline.workloads import Workload, build
from syncline.workloads.base import batches

MIN_BLOCK_STEPS = 5
WARM_UP_STEPS = 4


@dataclass(frozen=True)
class LabPlan:
    """What a worker trains with: a strategy and a codec as in `sl.distribute`, or "pipeline(microbatches=8)"."""

    strategy: str = "allreduce"
    codec: str | None = None
    cuts: tuple[str, ...] = ()
    """Of a pipeline: the modules with which stages 1, 2, … begin."""

    @property
    def is_pipeline(self) -> bool:
        return parse(self.strategy)[0].name == "pipeline"

    @property
    def period(self) -> int:
        """Steps of which only the last one exchanges anything."""
        return 1 if self.is_pipeline else int(getattr(build_strategy(self.strategy), "period", 1))

    @property
    def asynchronous(self) -> bool:
        return not self.is_pipeline and build_strategy(self.strategy).asynchronous


class Contender:
    """A model that is trained by a plan."""

    def __init__(self, workload: Workload, plan: LabPlan, batch: int, optimizer: str, world: sl.World) -> None:
        self.plan, self.workload = plan, workload
        model = workload.model(0)
        rate = workload.defaults.learning_rate / 100  # weights stay finite, whatever the strategy
        made = MAKE_OPTIMIZER[optimizer]([each for each in model.parameters() if each.requires_grad], rate)
        self.model, self.optimizer = model, made
        self.run: Any
        self.seconds: list[float] = []
        self.steps = 0
        if plan.is_pipeline:
            self.batch: tuple[Tensor, Tensor] = next(batches(workload.splits().train, batch * world.size))
            options = parse(plan.strategy)[0].kwargs
            self.run = sl.pipeline(model, made, workload.output_loss, stages=list(plan.cuts), **options)
            return
        self.batch = next(batches(workload.splits().train, batch))
        # Trials of algorithms take minutes on a slow network; the planner predicts the engine's own.
        native = plan.codec is None or plan.codec.startswith("powersgd")
        self.run = sl.distribute(
            model, made, strategy=plan.strategy, codec=plan.codec, algorithm="native" if native else "auto"
        )

    def take(self, steps: int) -> float:
        """Take some steps; the seconds on this worker."""
        begin = time.perf_counter()
        for _ in range(steps):
            if self.plan.is_pipeline:
                self.run.step(*self.batch)
                continue
            self.optimizer.zero_grad()
            self.workload.loss(self.model, self.batch).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return time.perf_counter() - begin


def main(options: dict[str, Any]) -> None:
    """Measure the plans; rank 0 writes the seconds of a step in each repeat."""
    with sl.init() as world, quiet_machine():
        signals = world.group()
        workload = build(options["workload"])
        plans = [LabPlan(**each) for each in options["plans"]]
        contenders = [Contender(workload, plan, options["batch"], options["optimizer"], world) for plan in plans]

        def block(each: Contender, steps: int) -> float:
            """Seconds of a step."""
            sl.barrier(group=signals)
            own = each.take(steps)
            sl.barrier(group=signals)
            slowest = float(over_ranks(signals.channel, [own], "max")[0])
            total = float(sl.allreduce(torch.tensor([own], dtype=torch.float64), op="sum", group=signals))
            return (total / world.size if each.plan.asynchronous else slowest) / steps

        for each in contenders:
            block(each, max(WARM_UP_STEPS, each.plan.period))  # connections, the order of buckets, kernels
            step_s = block(each, max(2, each.plan.period))
            steps = max(MIN_BLOCK_STEPS, options["seconds"] / step_s)
            each.steps = max(1, round(steps / each.plan.period)) * each.plan.period
        for _ in range(options["repeats"]):
            for each in contenders:
                each.seconds.append(block(each, each.steps))
        rows = []
        for each in contenders:
            stats = each.run.stats
            count = max(1, stats.steps)
            used = {"codec_s": stats.codec_seconds / count, "exposed_s": stats.exposed_seconds / count}
            rows.append({"plan": asdict(each.plan), "steps": each.steps, "step_s": each.seconds, "used": used})
        if world.rank == 0:
            Path(options["out"]).write_text(json.dumps(rows, indent=1))
        for each in contenders:
            each.run.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
