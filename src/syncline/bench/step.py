"""Training steps side by side with DistributedDataParallel: what each rank runs for `syncline bench step`.

Both contenders live in the same processes with the same weights and batches. They take turns step by step, in an order
that each turn draws, and a ratio is taken within a turn, so that what disturbs the machine disturbs both. The ranks
meet before a step; a step's time is the longest over the ranks. A repeat is a block of turns; after the last one the
parameters of both are compared.

Memory is another matter: each contender has processes of its own, and what counts is their peak, with an allocator
that gives large tensors back at once (glibc's mmap threshold held at 128 KB). Left to itself it raises the threshold as
it goes, and the peak then tells of its holes, some percent either way, rather than of what was in use.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from syncline.bench.calm import calm
from syncline.bench.overlap import Overlap
from syncline.bench.stats import ratios, summarize
from syncline.bench.subjects import SUBJECTS, Subject
from syncline.collectives import build
from syncline.collectives.run import allreduce, meet
from syncline.events import ChromeTrace
from syncline.training.distribute import distribute
from syncline.world import World, init

__all__ = ["StepPlan", "measure"]

WARM_UP = 6
"""Steps before the first that counts: connections, buckets in the order of use, the allocator."""


@dataclass(frozen=True)
class StepPlan:
    """What to measure."""

    out: str
    models: list[str] = field(default_factory=lambda: list(SUBJECTS))
    against: str = "ddp"
    repeats: int = 5
    turns: int = 20
    strategy: str = "allreduce"
    collective: str = "auto"
    bucket_bytes: int | None = None
    check_finite: bool = False
    broadcast_buffers: bool = False
    trace: bool = False
    only: str = ""
    """One contender alone, for its memory."""


def measure(plan: StepPlan) -> None:
    """Run the plan on this rank; rank 0 writes what came of it."""
    with init(transport="torch_dist") as world, calm(), ExitStack() as stack:
        if plan.only != "syncline" and plan.against == "ddp":
            from syncline.bench.baselines import process_group

            stack.enter_context(process_group(world))
        work = _memory if plan.only else _compare
        results = [work(world, plan, name) for name in plan.models]
        if world.rank == 0:
            about = {
                "kind": "step",
                "ranks": world.size,
                "lab": os.environ.get("SYNCLINE_LAB", ""),
                "plan": asdict(plan),
            }
            Path(plan.out).write_text(json.dumps({**about, "results": results}, indent=1))


class _Contender:
    """A model and its optimizer in training."""

    def __init__(self, plan: StepPlan, kind: str, model: nn.Module) -> None:
        self.inner = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.run = None
        self.model = model
        if kind == "syncline":
            self.run = distribute(
                model,
                self.optimizer,
                strategy=plan.strategy,
                collective=plan.collective,
                bucket_bytes=plan.bucket_bytes,
                check_finite=plan.check_finite,
            )
        elif kind == "ddp":
            from syncline.bench.baselines import ddp

            self.model = ddp(model, plan.broadcast_buffers)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def close(self) -> None:
        if self.run is not None:
            self.run.close()


def _compare(world: World, plan: StepPlan, name: str) -> dict[str, Any]:
    subject = SUBJECTS[name]
    kinds = ["syncline", plan.against]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = subject.model()
    contenders = {kind: _Contender(plan, kind, copy.deepcopy(first)) for kind in kinds}
    signals = world.team()
    draw = torch.Generator().manual_seed(world.rank)
    overlap = Overlap()
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    say = _say if world.rank == 0 else _silent

    def turn(number: int, watched: bool) -> None:
        batch = subject.batch(draw)
        for kind in sorted(kinds, key=lambda kind: random.Random(f"{number} {kind}").random()):
            meet(signals.channel)
            start = world.runtime.now()
            with overlap.watching(world) if watched and kind == "syncline" else nullcontext():
                contenders[kind].step(batch)
            times[kind].append(world.runtime.now() - start)

    for number in range(WARM_UP):
        turn(number, watched=False)
    for kind in kinds:
        times[kind].clear()
    for number in range(plan.repeats * plan.turns):
        turn(number, watched=False)
        if (number + 1) % plan.turns == 0:
            say(f"{name}: repeat {(number + 1) // plan.turns} of {plan.repeats}")
    row = _row(name, subject, plan, {kind: _longest(signals, own) for kind, own in times.items()})
    trace = (
        ChromeTrace(Path(plan.out).parent / f"trace-{name}-rank{world.rank}.json", world.rank) if plan.trace else None
    )
    if trace is not None:
        world.events.add(trace)
    ours = contenders["syncline"].run
    assert ours is not None, "ours has a run"
    overlap.measure_alone(world, ours)
    for number in range(plan.turns):  # apart from the timed ones: watching costs a little
        turn(number, watched=True)
    if trace is not None:
        world.events.remove(trace)
        trace.close()
    row["overlap"] = overlap.summary()
    row["same_bits"] = _same(contenders[kinds[0]].inner, contenders[kinds[1]].inner)
    row["config"] = ours.config
    for contender in contenders.values():
        contender.close()
    signals.close()
    return row


def _row(name: str, subject: Subject, plan: StepPlan, times: dict[str, list[float]]) -> dict[str, Any]:
    ours, theirs = times["syncline"], times[plan.against]
    blocks = [slice(start, start + plan.turns) for start in range(0, len(ours), plan.turns)]
    return {
        "model": name,
        "about": subject.about,
        "seconds": times,
        "time": {kind: asdict(summarize(own)) for kind, own in times.items()},
        "ratio": asdict(ratios(ours, theirs)),
        "repeats": [ratios(ours[block], theirs[block]).median for block in blocks],
    }


def _memory(world: World, plan: StepPlan, name: str) -> dict[str, Any]:
    """The peak of this process while one contender trains; the largest over the ranks."""
    subject = SUBJECTS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        contender = _Contender(plan, plan.only, subject.model())
    draw = torch.Generator().manual_seed(world.rank)
    for _ in range(WARM_UP + plan.turns):
        contender.step(subject.batch(draw))
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0], dtype=torch.float64)
    allreduce(world.everyone.channel, peak, "max", build("allreduce", "recursive_doubling"))
    contender.close()
    return {"model": name, "contender": plan.only, "peak_bytes": int(peak)}


def _longest(signals: Any, seconds: list[float]) -> list[float]:
    table = torch.tensor(seconds, dtype=torch.float64)
    allreduce(signals.channel, table, "max", build("allreduce", "recursive_doubling"))
    return [float(value) for value in table]


def _same(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    return


if __name__ == "__main__":
    measure(StepPlan(**json.loads(sys.argv[1])))
