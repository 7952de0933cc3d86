"""`syncline bench step`: compares training steps with DistributedDataParallel. Each rank runs this module.

All contenders are in the same processes, with the same weights and batches. In each turn every contender takes one
step, in random order, and ratios are taken within a turn, so that a disturbance of the machine affects all. There is a
barrier before each step, and its time is the longest over the ranks. A repeat is a block of turns. After the last one
the parameters are compared: Syncline's between the ranks, and Syncline's without a codec with those of DDP.

With codecs there is one more contender, computation only: all ranks step at the same time without communication.

Memory is measured in separate processes for each contender, as their peak, with glibc's mmap threshold fixed at 128 KB.
By default glibc raises the threshold, and the peak then depends on the fragmentation of the heap by some percent.

The overlap is the share of the reductions that lay inside backward, of what could have. First the reduction of each
bucket is measured alone. The ready time of a bucket then tells what could lie inside backward if the network reduced
one bucket after the other::

    backward      ├──────────────────────────────┤ end
    ready              0              1          2            the last bucket is ready at the end: it cannot
    ideal              ├─ 0 ─┤        ├──── 1 ───┼───┤        could: all of 0, most of 1
    measured           ├── 0 ──┤      ├───── 1 ──┼──────┤     did:   all of 0, less of 1
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from syncline.bench.measuring import Summary, describe_place, over_ranks, quiet_machine, ratios, summarize
from syncline.bench.step_contenders import (
    BENCH_MODELS,
    COMPUTE_ONLY,
    DDPS,
    HOROVOD,
    ML_COMM,
    NO_CODEC,
    SYNCLINE,
    BenchModel,
    StepContender,
    ranks_agree,
    usage_per_step,
)
from syncline.collectives.channel import barrier
from syncline.events import ChromeTrace, RunEvent
from syncline.launch.lab import parse_lab
from syncline.launch.link_rate import FRAME_BYTES, FRAME_PAYLOAD_BYTES, parse_rate
from syncline.strategies import Run, strategy_run
from syncline.transports.base import LANE_TAGS
from syncline.world import World, init

__all__ = ["StepPlan", "codec_steps_table", "describe_link", "measure", "measure_link", "step_table"]


WARM_UP_STEPS = 6
"""Steps that do not count: connections, bucket order, kernels and the allocator settle."""


@dataclass(frozen=True)
class StepPlan:
    """The options of the benchmark."""

    out: str
    models: list[str] = field(default_factory=lambda: list(BENCH_MODELS))
    against: list[str] = field(default_factory=lambda: ["ddp"])
    """Ratios are relative to the first."""
    codecs: list[str] = field(default_factory=list)
    """Each is a contender; if empty, Syncline without a codec is the only one."""
    repeats: int = 5
    turns: int = 20
    strategy: str = "allreduce"
    collective: str = "auto"
    bucket_bytes: int | None = None
    check_finite: bool = False
    broadcast_buffers: bool = False
    trace: bool = False
    only: str = ""
    """Measure the memory of this contender only."""

    @property
    def ours(self) -> list[str]:
        """Names of Syncline's contenders."""
        return self.codecs or [SYNCLINE]

    @property
    def contenders(self) -> list[str]:
        """Names of all contenders."""
        return [*self.ours, *self.against, *([COMPUTE_ONLY] if self.codecs else [])]

    def contender(self, name: str, model: nn.Module) -> StepContender:
        """Build a contender with the options of the plan."""
        options = {
            "strategy": self.strategy,
            "algorithm": self.collective,
            "bucket_bytes": self.bucket_bytes,
            "check_finite": self.check_finite,
        }
        return StepContender(name, model, options, self.broadcast_buffers)


def measure(plan: StepPlan) -> None:
    """Run the benchmark on this rank; rank 0 writes the results to `plan.out`."""
    lab = os.environ.get("SYNCLINE_LAB", "")
    with init(transport="torch_dist") as world, quiet_machine(), ExitStack() as stack:
        if not DDPS.isdisjoint([plan.only] if plan.only else plan.against):
            from syncline.bench.baselines import process_group

            stack.enter_context(process_group(world))
        link = None if plan.only else measure_link(world, lab)
        if plan.only:
            results = [_memory(world, plan, name) for name in plan.models]
        else:
            results = [_StepComparison(world, plan, name).run() for name in plan.models]
        if world.rank == 0:
            about = {"kind": "step", "ranks": world.size, "hosts": list(world.hosts), "lab": lab, "link": link}
            Path(plan.out).write_text(json.dumps({**about, "plan": asdict(plan), "results": results}, indent=1))


class _StepComparison:
    """All contenders of one model, and their times."""

    def __init__(self, world: World, plan: StepPlan, name: str) -> None:
        self.world, self.plan, self.name = world, plan, name
        self.bench_model = BENCH_MODELS[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            first = self.bench_model.model()
        self.contenders = {kind: plan.contender(kind, copy.deepcopy(first)) for kind in plan.contenders}
        self.signals = world.group()
        self.draw = torch.Generator().manual_seed(world.rank)
        self.times: dict[str, list[float]] = {kind: [] for kind in self.contenders}

    def run(self) -> dict[str, Any]:
        """Measure this model; return its row."""
        for number in range(WARM_UP_STEPS):
            self.turn(number)
        for own in self.times.values():
            own.clear()
        before = {kind: self.contenders[kind].usage() for kind in self.plan.ours}
        for number in range(self.plan.repeats * self.plan.turns):
            self.turn(number)
            if (number + 1) % self.plan.turns == 0 and self.world.rank == 0:
                text = f"{self.name}: repeat {(number + 1) // self.plan.turns} of {self.plan.repeats}"
                print(text, file=sys.stderr, flush=True)
        after = {kind: self.contenders[kind].usage() for kind in self.plan.ours}
        times = {kind: over_ranks(self.signals.channel, own, "max") for kind, own in self.times.items()}
        row = _row(self.name, self.bench_model, self.plan, times)
        steps, channel = self.plan.repeats * self.plan.turns, self.signals.channel
        row["used"] = {kind: usage_per_step(channel, before[kind], after[kind], steps) for kind in self.plan.ours}
        row["overlap"] = self._overlap()
        row["ranks_agree"] = {
            kind: ranks_agree(channel, list(self.contenders[kind].inner.parameters())) for kind in self.plan.ours
        }
        row["same_bits"] = self._same_as_baselines()
        first = self.contenders[self.plan.ours[0]].run
        row["config"] = None if first is None else first.config
        for contender in self.contenders.values():
            contender.close()
        self.signals.close()
        return row

    def turn(self, number: int, overlap: OverlapMeter | None = None) -> None:
        """One step of every contender; `overlap` records the step of Syncline."""
        batch = self.bench_model.batch(self.draw)
        now = self.world.runtime.now
        for kind in sorted(self.contenders, key=lambda kind: random.Random(f"{number} {kind}").random()):
            barrier(self.signals.channel)
            start = now()
            with overlap.record(self.world) if overlap is not None and kind == SYNCLINE else nullcontext():
                self.contenders[kind].step(batch)
            self.times[kind].append(now() - start)

    def _overlap(self) -> dict[str, Any] | None:
        """Additional turns that record events, which takes a little time.

        Only without codecs: with them, the exposed time says more than the overlap of a few kilobytes.
        """
        overlap = None if self.plan.codecs else OverlapMeter()
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

    def _same_as_baselines(self) -> bool | None:
        """True if Syncline without a codec has the bits of the baselines; None if there is none to compare."""
        dense = next((kind for kind in (SYNCLINE, NO_CODEC) if kind in self.contenders), None)
        theirs = [kind for kind in ("ddp", HOROVOD, ML_COMM) if kind in self.contenders]
        if dense is None or not theirs:
            return None
        own = list(self.contenders[dense].inner.parameters())
        others = [self.contenders[kind].inner.parameters() for kind in theirs]
        return all(torch.equal(one, two) for other in others for one, two in zip(own, other, strict=True))


def _row(name: str, bench_model: BenchModel, plan: StepPlan, times: dict[str, list[float]]) -> dict[str, Any]:
    ours, theirs = times[plan.ours[0]], times[plan.against[0]]
    blocks = [slice(start, start + plan.turns) for start in range(0, len(ours), plan.turns)]
    row = {
        "model": name,
        "about": bench_model.about,
        "seconds": times,
        "time": {kind: asdict(summarize(own)) for kind, own in times.items()},
        "ratio": asdict(ratios(ours, theirs)),
        "repeats": [ratios(ours[block], theirs[block]).median for block in blocks],
        "faster": {kind: asdict(ratios(theirs, own)) for kind, own in times.items()},
    }
    if COMPUTE_ONLY in times:
        row["of_alone"] = {kind: asdict(ratios(own, times[COMPUTE_ONLY])) for kind, own in times.items()}
    return row


def _memory(world: World, plan: StepPlan, name: str) -> dict[str, Any]:
    """The peak memory of this process while one contender trains; the maximum over the ranks."""
    bench_model = BENCH_MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        contender = plan.contender(plan.only, bench_model.model())
    draw = torch.Generator().manual_seed(world.rank)
    for _ in range(WARM_UP_STEPS + plan.turns):
        contender.step(bench_model.batch(draw))
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (peak,) = over_ranks(world.everyone.channel, [kilobytes], "max")
    contender.close()
    return {"model": name, "contender": plan.only, "peak_bytes": 1024 * int(peak)}


Spans = Mapping[str, tuple[float, float]]
ALONE_ROUNDS = 10


class OverlapMeter:
    """Measures the overlap of steps from the events of the reductions."""

    def __init__(self) -> None:
        self.alone: dict[str, float] = {}
        """Seconds of each bucket's reduction without computation."""
        self.steps: list[tuple[float, float]] = []
        """For each step: seconds of reduction that could lie inside backward, and those that did."""

    def measure_alone(self, world: World, run: Run) -> None:
        """Reduce without computing. A collective call."""
        seconds_by_bucket: dict[str, list[float]] = {}
        for _ in range(ALONE_ROUNDS):
            with _spans(world) as sink:
                strategy_run(run).join_idle()
            until = float("-inf")
            for what, (start, stop) in sorted(sink.reductions.items(), key=lambda item: item[1]):
                seconds_by_bucket.setdefault(what, []).append(max(0.0, stop - max(start, until)))
                until = max(until, stop)
        self.alone = {what: statistics.median(seconds) for what, seconds in seconds_by_bucket.items()}

    @contextmanager
    def record(self, world: World) -> Iterator[None]:
        """Record one step."""
        with _spans(world) as sink:
            yield
        if sink.end is not None and sink.reductions:
            self.steps.append(overlap_seconds(sink.reductions, self.alone, sink.end))

    def summary(self) -> dict[str, Any]:
        """Medians over the steps, and the share over all steps."""
        could = sum(step[0] for step in self.steps)
        did = sum(step[1] for step in self.steps)
        if not self.steps or could <= 0:
            return {"steps": len(self.steps), "share": None}
        return {
            "steps": len(self.steps),
            "alone_seconds": sum(self.alone.values()),
            "could_seconds": summarize([step[0] for step in self.steps]).median,
            "did_seconds": summarize([step[1] for step in self.steps]).median,
            "share": did / could,
        }


def overlap_seconds(reductions: Spans, alone: Mapping[str, float], end: float) -> tuple[float, float]:
    """Seconds of reduction that could lie before `end`, and those that did.

    >>> overlap_seconds({"a": (1.0, 2.5), "b": (3.0, 7.0)}, {"a": 1.0, "b": 2.0}, end=4.0)
    (2.0, 1.5)
    """
    could = did = 0.0
    free = float("-inf")
    for what, (start, stop) in sorted(reductions.items(), key=lambda item: item[1]):
        seconds = alone.get(what, stop - start)
        begin = max(start, free)
        free = begin + seconds
        could += max(0.0, min(free, end) - min(begin, end))
        over = (min(stop, end) - min(start, end)) / (stop - start) if stop > start else float(stop <= end)
        did += seconds * over
    return could, min(did, could)


class _SpanSink:
    """A sink that stores the spans of one step."""

    def __init__(self) -> None:
        self.reductions: dict[str, tuple[float, float]] = {}
        self.end: float | None = None
        """When backward ended and the rank began to wait."""

    def write(self, event: RunEvent) -> None:
        if event.kind == "INTERVAL_END":
            if event.key == "sl_comm_seconds":
                self.reductions[str(event.metadata.get("what"))] = (event.seconds - event.value, event.seconds)
            elif event.key == "sl_comm_exposed_seconds":
                self.end = event.seconds - event.value

    def close(self) -> None:
        return


@contextmanager
def _spans(world: World) -> Iterator[_SpanSink]:
    sink = _SpanSink()
    world.events.add(sink)
    try:
        yield sink
    finally:
        world.events.remove(sink)


MESSAGE_TAG, ANSWER_TAG = LANE_TAGS + 1, LANE_TAGS + 2
LINK_SAMPLES = 3
LINK_SAMPLE_S = 0.3
"""Duration of a sample at the lab's rate, much longer than the burst of the link's token bucket."""
UNLIMITED_LINK_BYTES = 16 << 20
"""Bytes of a sample if the links have no limit."""
MAX_LINK_BYTES = 40 << 20
MAX_RATE_ERROR = 0.1
"""The table warns if the measured rate differs by a larger share."""


def measure_link(world: World, lab: str) -> dict[str, Any] | None:
    """Measure bits per second from rank 0 to the first rank on another host, with packet headers.

    A collective call; the result is on rank 0. None if all ranks are on one host.
    """
    other = next((rank for rank, host in enumerate(world.hosts) if host != world.hosts[0]), None)
    if other is None or not lab:
        return None
    shape = parse_rate(parse_lab(lab)[1])
    nbytes = UNLIMITED_LINK_BYTES if shape is None else min(MAX_LINK_BYTES, int(LINK_SAMPLE_S * shape.rate / 8))
    message, answer = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    now, transport = world.runtime.now, world.transport
    times = []
    for _ in range(1 + LINK_SAMPLES):
        world.barrier()
        start = now()
        if world.rank == 0:
            back = transport.recv(answer, other, ANSWER_TAG)
            transport.send(message, other, MESSAGE_TAG).wait()
            back.wait()
        elif world.rank == other:
            transport.recv(message, 0, MESSAGE_TAG).wait()
            transport.send(answer, 0, ANSWER_TAG).wait()
        times.append(now() - start)
    if world.rank:
        return None
    seconds = statistics.median(times[1:])  # the first one opens the connection
    return {
        "bytes": nbytes,
        "to_rank": other,
        "bits_a_second": 8 * nbytes * FRAME_BYTES / FRAME_PAYLOAD_BYTES / seconds,
        "rate": None if shape is None else shape.rate,
    }


def describe_link(link: dict[str, Any] | None) -> str:
    """The measured link as a line; empty if there was none.

    >>> describe_link({"bytes": 3_750_000, "to_rank": 1, "bits_a_second": 98.4e6, "rate": 100e6})
    'echo: 3.8 MB from rank 0 to rank 1 at 98.4 Mbit/s, packet headers included: 0.98 of the rate'
    """
    if link is None:
        return ""
    line = (
        f"echo: {link['bytes'] / 1e6:.1f} MB from rank 0 to rank {link['to_rank']} at "
        f"{link['bits_a_second'] / 1e6:.1f} Mbit/s, packet headers included"
    )
    if link["rate"] is None:
        return f"{line}; the links have no limit"
    share = link["bits_a_second"] / link["rate"]
    warning = "" if abs(share - 1) <= MAX_RATE_ERROR else " (it differs by more than 10 %: do not trust these results)"
    return f"{line}: {share:.2f} of the rate{warning}"


def step_table(document: dict[str, Any]) -> str:
    """A table of step times, paired ratios with intervals, overlap and memory of every model."""
    plan, (against, *others) = document["plan"], document["plan"]["against"]
    lines = [
        f"training steps on {document['ranks']} ranks, {describe_place(document)}: syncline ({plan['strategy']}, "
        f"{plan['collective']}) compared with {against}",
        f"{plan['repeats']} repeats of {plan['turns']} turns, paired; medians with 95 % intervals",
        *_echo(document),
        "",
    ]
    for row in document["results"]:
        ours, theirs = Summary(**row["time"]["syncline"]), Summary(**row["time"][against])
        repeats = ", ".join(f"{value:.3f}" for value in row["repeats"])
        more = "".join(f"   {name} {_ms(Summary(**row['time'][name]))}" for name in others)
        lines += [
            f"{row['model']}: {row['about']}",
            f"  step   syncline {_ms(ours)}   {against} {_ms(theirs)}{more}",
            f"  ratio  {Summary(**row['ratio']).text('.3f')}   by repeat: {repeats}",
            f"  {_overlap(row['overlap'])}",
            *_memory_lines(document, row["model"]),
            f"  parameters afterwards: {_bits(row)}",
            "",
        ]
    medians = [row["ratio"]["median"] for row in document["results"]]
    lines.append(f"mean of the ratios: {sum(medians) / len(medians):.3f}")
    return "\n".join(lines)


def codec_steps_table(documents: Sequence[dict[str, Any]]) -> str:
    """A table of every contender in every place: step time, speed-up over the baseline, bytes on the wire."""
    plan = documents[0]["plan"]
    against = plan["against"][0]
    width = max(len(name) for row in documents[0]["results"] for name in row["time"])
    lines = [
        f"training steps with codecs ({plan['strategy']}, {plan['collective']}), compared with "
        f"{', '.join(plan['against'])}",
        f"{plan['repeats']} repeats of {plan['turns']} turns, paired; medians with 95 % intervals; wire, codec and "
        "exposed are per step, the maximum over the ranks",
        f"{COMPUTE_ONLY}: the same step without communication, all ranks at once",
    ]
    for document in documents:
        for row in document["results"]:
            lines += ["", f"{document['ranks']} ranks, {describe_place(document)}; {row['model']}: {row['about']}"]
            lines += _echo(document)
            lines.append(
                f"  {'contender':{width}} {'step ms':>24} {against + ' ÷ it':>24} {'÷ ' + COMPUTE_ONLY:>24} "
                f"{'wire KB':>9} {'codec ms':>9} {'exposed ms':>11}  bits"
            )
            order = sorted(row["time"], key=lambda name: float(row["time"][name]["median"]))
            lines += [_codec_line(row, name, width) for name in order]
            lines += _memory_lines(document, row["model"])
    return "\n".join(lines)


def _codec_line(row: dict[str, Any], name: str, width: int) -> str:
    step, faster, slower = (Summary(**row[what][name]) for what in ("time", "faster", "of_alone"))
    cells = "".join(f" {summary.text('.4g'):>24}" for summary in (step.scaled(1e3), faster, slower))
    line = f"  {name:{width}}{cells}"
    used = row["used"].get(name)
    if used is None:
        return line
    bits = "agree" if row["ranks_agree"][name] else "DIFFER between the ranks"
    as_ddp = ", as ddp's" if name == NO_CODEC and row["same_bits"] else ""
    return (
        f"{line} {used['bytes_wire'] / 1e3:9.1f} {1e3 * used['codec_seconds']:9.2f} "
        f"{1e3 * used['exposed_seconds']:11.2f}  {bits}{as_ddp}"
    )


def _echo(document: dict[str, Any]) -> list[str]:
    link = describe_link(document.get("link"))
    return [link] if link else []


def _bits(row: dict[str, Any]) -> str:
    if not all(row["ranks_agree"].values()):
        return "DIFFER between the ranks"
    if row["same_bits"] is None:
        return "the same bits on all ranks"
    return (
        "the same bits"
        if row["same_bits"]
        else "the same bits on all ranks; they differ from the baseline's in rounding"
    )


def _ms(summary: Summary) -> str:
    return f"{summary.scaled(1e3)} ms"


def _overlap(overlap: dict[str, Any]) -> str:
    if overlap["share"] is None:
        return "overlap not possible inside backward: there is one bucket, which is ready at the end"
    return (
        f"overlap {100 * overlap['share']:.0f} % of the reduction time that could lie inside backward does "
        f"({1e3 * overlap['did_seconds']:.2f} of {1e3 * overlap['could_seconds']:.2f} ms)"
    )


def _memory_lines(document: dict[str, Any], model: str) -> list[str]:
    """The peak memory, over several runs, because it depends on the allocator and the threads."""
    peaks: dict[str, list[int]] = {}
    for row in document.get("memory", []):
        if row["model"] == model:
            peaks.setdefault(row["contender"], []).append(row["peak_bytes"])
    if not peaks:
        return []
    texts = ", ".join(
        f"{kind} {_mb(own[len(own) // 2])} ({_mb(own[0])} – {_mb(own[-1])})"
        for kind, own in ((kind, sorted(own)) for kind, own in peaks.items())
    )
    return [f"  peak memory of a process, median (range) of {len(next(iter(peaks.values())))} runs: {texts}"]


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


if __name__ == "__main__":
    measure(StepPlan(**json.loads(sys.argv[1])))
