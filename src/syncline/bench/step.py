"""Training steps side by side with DistributedDataParallel: what each rank runs for `syncline bench step`.

All contenders live in the same processes with the same weights and batches. They take turns step by step, in an order
that each turn draws, and a ratio is taken within a turn, so that what disturbs the machine disturbs all. The ranks
meet before a step; a step's time is the longest over the ranks. A repeat is a block of turns; after the last one the
parameters are compared: of ours over the ranks, and of ours without a codec with DistributedDataParallel's.

With codecs there is one contender more, the compute alone: the ranks step at the same time and exchange nothing.

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
from torch import nn

from syncline.bench.calm import calm
from syncline.bench.contenders import ALONE, DDPS, DENSE, HOROVOD, OURS, Contender, agree, used
from syncline.bench.link import check_link
from syncline.bench.overlap import Overlap
from syncline.bench.stats import ratios, summarize
from syncline.bench.subjects import SUBJECTS, Subject
from syncline.collectives import build
from syncline.collectives.run import allreduce, meet
from syncline.events import ChromeTrace
from syncline.world import World, init

__all__ = ["StepPlan", "measure"]

WARM_UP = 6
"""Steps before the first that counts: connections, buckets in the order of use, kernels, the allocator."""


@dataclass(frozen=True)
class StepPlan:
    """What to measure."""

    out: str
    models: list[str] = field(default_factory=lambda: list(SUBJECTS))
    against: list[str] = field(default_factory=lambda: ["ddp"])
    """Ratios are to the first."""
    codecs: list[str] = field(default_factory=list)
    """Each is a contender of ours; empty: ours without a codec is the only one."""
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

    @property
    def ours(self) -> list[str]:
        """Names of our contenders."""
        return self.codecs or [OURS]

    @property
    def contenders(self) -> list[str]:
        """Names of all."""
        return [*self.ours, *self.against, *([ALONE] if self.codecs else [])]

    def contender(self, name: str, model: nn.Module) -> Contender:
        """One of them, with the options of the plan."""
        options = {
            "strategy": self.strategy,
            "collective": self.collective,
            "bucket_bytes": self.bucket_bytes,
            "check_finite": self.check_finite,
        }
        return Contender(name, model, options, self.broadcast_buffers)


def measure(plan: StepPlan) -> None:
    """Run the plan on this rank; rank 0 writes what came of it."""
    lab = os.environ.get("SYNCLINE_LAB", "")
    with init(transport="torch_dist") as world, calm(), ExitStack() as stack:
        if not DDPS.isdisjoint([plan.only] if plan.only else plan.against):
            from syncline.bench.baselines import process_group

            stack.enter_context(process_group(world))
        link = None if plan.only else check_link(world, lab)
        if plan.only:
            results = [_memory(world, plan, name) for name in plan.models]
        else:
            results = [_Race(world, plan, name).run() for name in plan.models]
        if world.rank == 0:
            about = {"kind": "step", "ranks": world.size, "lab": lab, "link": link, "plan": asdict(plan)}
            Path(plan.out).write_text(json.dumps({**about, "results": results}, indent=1))


class _Race:
    """All contenders of one model, and their times."""

    def __init__(self, world: World, plan: StepPlan, name: str) -> None:
        self.world, self.plan, self.name = world, plan, name
        self.subject = SUBJECTS[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            first = self.subject.model()
        self.contenders = {kind: plan.contender(kind, copy.deepcopy(first)) for kind in plan.contenders}
        self.signals = world.group()
        self.draw = torch.Generator().manual_seed(world.rank)
        self.times: dict[str, list[float]] = {kind: [] for kind in self.contenders}

    def run(self) -> dict[str, Any]:
        """The row of this model."""
        for number in range(WARM_UP):
            self.turn(number)
        for own in self.times.values():
            own.clear()
        before = {kind: self.contenders[kind].so_far() for kind in self.plan.ours}
        for number in range(self.plan.repeats * self.plan.turns):
            self.turn(number)
            if (number + 1) % self.plan.turns == 0 and self.world.rank == 0:
                told = f"{self.name}: repeat {(number + 1) // self.plan.turns} of {self.plan.repeats}"
                print(told, file=sys.stderr, flush=True)
        after = {kind: self.contenders[kind].so_far() for kind in self.plan.ours}
        row = _row(self.name, self.subject, self.plan, {kind: self._longest(own) for kind, own in self.times.items()})
        steps = self.plan.repeats * self.plan.turns
        row["used"] = {kind: used(self.signals.channel, before[kind], after[kind], steps) for kind in self.plan.ours}
        row["overlap"] = self._overlap()
        row["ranks_agree"] = {
            kind: agree(self.signals.channel, list(self.contenders[kind].inner.parameters())) for kind in self.plan.ours
        }
        row["same_bits"] = self._as_theirs()
        first = self.contenders[self.plan.ours[0]].run
        row["config"] = None if first is None else first.config
        for contender in self.contenders.values():
            contender.close()
        self.signals.close()
        return row

    def turn(self, number: int, overlap: Overlap | None = None) -> None:
        """A step of every contender; with an overlap it watches that of ours."""
        batch = self.subject.batch(self.draw)
        now = self.world.runtime.now
        for kind in sorted(self.contenders, key=lambda kind: random.Random(f"{number} {kind}").random()):
            meet(self.signals.channel)
            start = now()
            with overlap.watching(self.world) if overlap is not None and kind == OURS else nullcontext():
                self.contenders[kind].step(batch)
            self.times[kind].append(now() - start)

    def _overlap(self) -> dict[str, Any] | None:
        """Some turns more that are watched, apart from the timed ones: watching costs a little.

        Only without codecs: with them, what is exposed tells more than the share of a few kilobytes.
        """
        overlap = None if self.plan.codecs else Overlap()
        if overlap is None and not self.plan.trace:
            return None
        with ExitStack() as stack:
            if self.plan.trace:
                path = Path(self.plan.out).parent / f"trace-{self.name}-rank{self.world.rank}.json"
                trace = ChromeTrace(path, self.world.rank)
                self.world.events.add(trace)
                stack.callback(trace.close)
                stack.callback(self.world.events.remove, trace)
            ours = self.contenders[self.plan.ours[0]].run
            if overlap is not None and ours is not None:
                overlap.measure_alone(self.world, ours)
            for number in range(self.plan.turns):
                self.turn(number, overlap)
        return None if overlap is None else overlap.summary()

    def _as_theirs(self) -> bool | None:
        """Whether ours without a codec ended with the bits of the baselines; None where there are none to compare."""
        dense = next((kind for kind in (OURS, DENSE) if kind in self.contenders), None)
        theirs = [kind for kind in ("ddp", HOROVOD) if kind in self.contenders]
        if dense is None or not theirs:
            return None
        own = list(self.contenders[dense].inner.parameters())
        others = [self.contenders[kind].inner.parameters() for kind in theirs]
        return all(torch.equal(one, two) for other in others for one, two in zip(own, other, strict=True))

    def _longest(self, seconds: list[float]) -> list[float]:
        table = torch.tensor(seconds, dtype=torch.float64)
        allreduce(self.signals.channel, table, "max", build("allreduce", "recursive_doubling"))
        return [float(value) for value in table]


def _row(name: str, subject: Subject, plan: StepPlan, times: dict[str, list[float]]) -> dict[str, Any]:
    ours, theirs = times[plan.ours[0]], times[plan.against[0]]
    blocks = [slice(start, start + plan.turns) for start in range(0, len(ours), plan.turns)]
    row = {
        "model": name,
        "about": subject.about,
        "seconds": times,
        "time": {kind: asdict(summarize(own)) for kind, own in times.items()},
        "ratio": asdict(ratios(ours, theirs)),
        "repeats": [ratios(ours[block], theirs[block]).median for block in blocks],
        "faster": {kind: asdict(ratios(theirs, own)) for kind, own in times.items()},
    }
    if ALONE in times:
        row["of_alone"] = {kind: asdict(ratios(own, times[ALONE])) for kind, own in times.items()}
    return row


def _memory(world: World, plan: StepPlan, name: str) -> dict[str, Any]:
    """The peak of this process while one contender trains; the largest over the ranks."""
    subject = SUBJECTS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        contender = plan.contender(plan.only, subject.model())
    draw = torch.Generator().manual_seed(world.rank)
    for _ in range(WARM_UP + plan.turns):
        contender.step(subject.batch(draw))
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0], dtype=torch.float64)
    allreduce(world.everyone.channel, peak, "max", build("allreduce", "recursive_doubling"))
    contender.close()
    return {"model": name, "contender": plan.only, "peak_bytes": int(peak)}


if __name__ == "__main__":
    measure(StepPlan(**json.loads(sys.argv[1])))
