"""`syncline bench step`: its options, the labs it goes through, the memory of the contenders."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.cli.placement import Placement, add_placement_options
from syncline.errors import SpecError
from syncline.launch.lab import parse_lab
from syncline.launch.start import Job
from syncline.specs import nearest
from syncline.training.run_folder import make_writable

if TYPE_CHECKING:
    from syncline.bench.step import StepPlan

__all__ = ["configure", "run", "step_labs"]

MEMORY_RUNS = 3
"""The default, if there is one codec and one place."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", default="ddp", help="baselines, of ddp,ddp-fp16,hvd,ml_comm; default ddp")
    parser.add_argument(
        "--codec", action="append", default=[], help="codecs to compare, by ';' or repeated; none: without a codec"
    )
    parser.add_argument("--models", help="of mlp, resnet, transformer; default all, with --codec mlp")
    parser.add_argument("--rounds", type=int, default=5, help="repeats; default 5")
    parser.add_argument("--turns", type=int, default=20, help="steps of each contender in a repeat; default 20")
    parser.add_argument("--strategy", default="allreduce", help="the synchronisation strategy; default allreduce")
    parser.add_argument("--collective", default="auto", help="which all-reduce; default auto")
    parser.add_argument("--bucket-bytes", type=int, help="bytes of a bucket; default as distribute()")
    parser.add_argument("--check-finite", action="store_true", help="check for NaN and Inf in every step")
    parser.add_argument("--ddp-buffers", action="store_true", help="let DDP broadcast buffers, its default")
    parser.add_argument("--trace", action="store_true", help="a Chrome trace of some steps of every rank")
    parser.add_argument(
        "--memory-runs", type=int, help="runs for the peak memory, 0: none; default 3, with several codecs or labs 0"
    )
    add_placement_options(
        parser,
        *("-n", "--lab", "--hosts"),
        help={"-n": "number of ranks; default 2", "--lab": "hosts@rate of an emulated cluster; or 2,4,8, with --rate"},
    )
    parser.add_argument("--rate", metavar="100mbit,1gbit", help="of the labs' links, each with every number of hosts")


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the benchmark in each place, then print one table of all that succeeded; return the exit code."""
    from syncline.bench.step import codec_steps_table, step_table

    labs = step_labs(arguments.lab, arguments.rate)
    result = folder / "step.json"
    plan = _plan(arguments, result)
    runs = arguments.memory_runs
    if runs is None:
        runs = MEMORY_RUNS if len(labs) == 1 and len(plan.codecs) < 2 else 0
    make_writable(folder)
    documents: list[dict[str, Any]] = []
    code = 0
    for lab in labs:
        own = result if len(labs) == 1 else folder / f"step-{lab}.json"
        code = _launch(arguments, {**asdict(plan), "out": str(own.absolute())}, lab)
        if code:
            break
        document = json.loads(own.read_text())
        document["memory"] = _memory(arguments, plan, folder, lab, runs)
        own.write_text(json.dumps(document, indent=1))
        documents.append(document)
    if len(labs) > 1:
        result.write_text(json.dumps({"kind": "steps", "runs": documents}, indent=1))
    if documents:
        table = codec_steps_table(documents) if plan.codecs else "\n\n".join(map(step_table, documents))
        print(f"{table}\n\nwritten: {result}")
    return code


def _launch(arguments: argparse.Namespace, plan: Mapping[str, object], lab: str | None) -> int:
    """Run the plan on the ranks, in this lab if there is one; return the exit code."""
    place = Placement.read(argparse.Namespace(**{**vars(arguments), "lab": lab}), default_ranks=2)
    return place.run(Job(target=("-m", "syncline.bench.step", json.dumps(plan))))


def step_labs(lab: str | None, rate: str | None) -> Sequence[str | None]:
    """Every number of hosts with every rate; a single None without a lab.

    >>> step_labs("2,4", "100mbit,1gbit")
    ['2@100mbit', '2@1gbit', '4@100mbit', '4@1gbit']
    >>> step_labs("2@1gbit,4@open", None)
    ['2@1gbit', '4@open']
    """
    if lab is None:
        if rate is not None:
            raise SpecError(f"--rate {rate} is the rate of a lab's links: give --lab 2,4 too")
        return [None]
    hosts, rates = _listed(lab), _listed(rate or "")
    if rates:
        if "@" in lab:
            raise SpecError(f"--lab {lab} has a rate already; write --lab 2,4 with --rate {rate}")
        hosts = [f"{count}@{each}" for count in hosts for each in rates]
    elif not all("@" in each for each in hosts):
        raise SpecError(f"--lab {lab} has no rate: write --lab 2@100mbit, or --lab 2,4 --rate 100mbit,1gbit")
    if not hosts:
        raise SpecError(f"--lab {lab!r} names no hosts: write --lab 2@100mbit, or --lab 2,4 --rate 100mbit,1gbit")
    for each in hosts:
        if parse_lab(each)[0] < 2:
            raise SpecError(f"--lab {each}: a benchmark of communication needs at least two hosts")
    return list(dict.fromkeys(hosts))


def _listed(text: str, separator: str = ",") -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


def _plan(arguments: argparse.Namespace, result: Path) -> StepPlan:
    from syncline.bench.step import StepPlan
    from syncline.bench.step_contenders import BASELINES, BENCH_MODELS, NO_CODEC, SYNCLINE, contender_algorithm
    from syncline.codecs import build_codec
    from syncline.reduction import check_collective
    from syncline.strategies import build_strategy

    codecs = _codecs(arguments.codec)
    models = _listed(arguments.models if arguments.models is not None else "mlp" if codecs else ",".join(BENCH_MODELS))
    against = list(dict.fromkeys(_listed(arguments.against)))
    for what, names, known in (("model", models, list(BENCH_MODELS)), ("baseline", against, list(BASELINES))):
        if not names:
            raise SpecError(f"no {what} is named; there are {', '.join(known)}")
        for name in names:
            if name not in known:
                raise SpecError(f"unknown {what} {name!r}; {nearest(name, known)}")
    if arguments.turns < 1:
        raise SpecError(f"--turns {arguments.turns}: at least one step of each contender in a repeat")
    if arguments.bucket_bytes is not None and arguments.bucket_bytes < 1:
        raise SpecError(f"--bucket-bytes {arguments.bucket_bytes}: at least 1")
    if arguments.memory_runs is not None and arguments.memory_runs < 0:
        raise SpecError(f"--memory-runs {arguments.memory_runs}: at least 0, which measures no memory")
    build_strategy(arguments.strategy)
    for spec in codecs or [SYNCLINE]:
        check_collective(
            contender_algorithm(arguments.collective, dense=spec == NO_CODEC),
            None if spec == SYNCLINE else build_codec(spec),
        )
    return StepPlan(
        out=str(result.absolute()),
        models=models,
        against=against,
        codecs=codecs,
        repeats=arguments.rounds,
        turns=arguments.turns,
        strategy=arguments.strategy,
        collective=arguments.collective,
        bucket_bytes=arguments.bucket_bytes,
        check_finite=arguments.check_finite,
        broadcast_buffers=arguments.ddp_buffers,
        trace=arguments.trace,
    )


def _codecs(texts: Sequence[str]) -> list[str]:
    """The specs of the codecs. Wrong ones are refused here, not on every rank."""
    from syncline.bench.step_contenders import NO_CODEC
    from syncline.codecs import build_codec

    specs = []
    for text in (spec for each in texts for spec in _listed(each, ";")):
        codec = build_codec(text)
        specs.append(NO_CODEC if codec is None else repr(codec))
    if texts and not specs:
        raise SpecError(f"--codec {' '.join(texts)!r} names none: write --codec 'topk(0.01)|quantize(4)'")
    return list(dict.fromkeys(specs))


def _memory(
    arguments: argparse.Namespace, plan: StepPlan, folder: Path, lab: str | None, runs: int
) -> list[dict[str, object]]:
    """Peak memory of the first contender of Syncline and of the others, each in separate processes."""
    found: list[dict[str, object]] = []
    for model in plan.models if runs > 0 else []:
        print(f"{model}: memory", file=sys.stderr, flush=True)
        for _ in range(runs):
            for kind in (plan.ours[0], plan.against[0]):
                out = folder / "memory.json"
                # Without fragmentation of the heap: see bench/step.py.
                os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
                alone = {"models": [model], "only": kind, "out": str(out.absolute()), "trace": False}
                if _launch(arguments, {**asdict(plan), **alone}, lab) == 0:
                    found += json.loads(out.read_text())["results"]
    return found
