"""Measure what this network does, and which way of agreeing suits it.

examples:
  syncline bench collectives -n 4                              every schedule, auto and gloo's own, side by side
  syncline bench collectives -n 4 --sizes 1MB:64MB --mpi       larger tensors only; MPI's own too
  syncline bench collectives --lab 4@100mbit --sizes 1MB       on four emulated hosts at 100 Mbit/s
  syncline bench network -n 2                                  latency, bandwidth, and the transports' echoes
  syncline bench network --engine mpi                          the same for MPI
  syncline bench step -n 2 --against ddp                       training steps beside DistributedDataParallel
  syncline bench step --lab 2@1gbit --models mlp --trace       on slow links, with a trace of every rank
  syncline bench teams --lab 2@100mbit --compute 0,0           two models at once where the network is the limit

Medians with 95 % intervals of the median; ratios are paired within rounds. A table goes to the terminal, and the
samples with a picture to runs/bench-… (or --out).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from syncline.bench import collectives, network, step, teams
from syncline.bench.report import plot, table
from syncline.bench.sizes import parse_sizes
from syncline.bench.step_report import step_table
from syncline.bench.subjects import SUBJECTS
from syncline.collectives import build
from syncline.errors import IncompatibleError, SpecError, UnsupportedError
from syncline.launch.hosts import parse_hosts
from syncline.launch.in_lab import run_in_lab
from syncline.launch.lab import parse_lab
from syncline.launch.machine import warn_if_crowded
from syncline.launch.mpi import mpi_command
from syncline.launch.start import Job, run_here, run_on_hosts
from syncline.launch.variables import threads_each
from syncline.specs import nearest
from syncline.strategies import build_strategy

__all__ = ["HELP", "configure", "run"]

HELP = "measure collectives, the network and training steps"


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what this command takes."""
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    first = what.add_parser("collectives", help="every all-reduce side by side", allow_abbrev=False)
    first.add_argument("--sizes", default="4KB:64MB", help="4KB:64MB (in steps of four), or 1MB,3MB; default 4KB:64MB")
    first.add_argument("--algorithms", default="", help="schedules, separated by ';'; default: all")
    first.add_argument("--rounds", type=int, default=25, help="turns of each contender; default 25")
    first.add_argument("--budget", type=float, default=30.0, help="seconds for each size, about; default 30")
    first.add_argument("--mpi", action="store_true", help="start by mpiexec and measure MPI's own all-reduce too")
    second = what.add_parser("network", help="latency, bandwidth, echoes", allow_abbrev=False)
    second.add_argument("--engine", choices=("torch_dist", "zeromq", "mpi"), default="torch_dist", help="whose network")
    second.add_argument("--fresh", action="store_true", help="measure even if this network is known")
    second.add_argument("--no-echo", dest="echo", action="store_false", help="only the model's numbers")
    second.add_argument("--rounds", type=int, default=15, help="turns of each echo; default 15")
    third = what.add_parser("step", help="training steps beside others'", allow_abbrev=False)
    third.add_argument("--against", choices=("ddp",), default="ddp", help="whose steps to compare with; default ddp")
    third.add_argument("--models", default=",".join(SUBJECTS), help=f"of {', '.join(SUBJECTS)}; default all")
    third.add_argument("--rounds", type=int, default=5, help="repeats; default 5")
    third.add_argument("--turns", type=int, default=20, help="steps of each contender in a repeat; default 20")
    third.add_argument("--strategy", default="allreduce", help="how the workers agree; default allreduce")
    third.add_argument("--collective", default="auto", help="which all-reduce; default auto")
    third.add_argument("--bucket-bytes", type=int, help="bytes of a bucket; default as distribute()")
    third.add_argument("--check-finite", action="store_true", help="look for NaN and Inf in every step")
    third.add_argument("--ddp-buffers", action="store_true", help="let DDP broadcast buffers, as is its default")
    third.add_argument("--trace", action="store_true", help="a Chrome trace of some steps of every rank")
    third.add_argument("--memory-runs", type=int, default=3, help="runs for the peak memory, 0: none; default 3")
    fourth = what.add_parser("teams", help="two models at once on their own teams", allow_abbrev=False)
    fourth.add_argument("--megabytes", default="4,2", help="gradients of the two models; default 4,2")
    fourth.add_argument("--compute", default="30,20", help="milliseconds that each computes; default 30,20")
    fourth.add_argument("--collective", default="auto", help="which all-reduce; default auto")
    fourth.add_argument("--rounds", type=int, default=25, help="turns of each; default 25")
    for command in (first, second, third, fourth):
        command.add_argument("-n", type=int, dest="ranks", help="ranks; default 4 for collectives, else 2")
        command.add_argument("--lab", metavar="4@100mbit", help="on so many emulated hosts at that rate")
        command.add_argument("--hosts", metavar="a:2,b:2", help="on these hosts, over ssh; the first has --out too")
        command.add_argument("--out", type=Path, help="folder for the samples and the picture")


def run(arguments: argparse.Namespace) -> int:
    """Measure; the exit code."""
    if arguments.rounds < 1 or (arguments.ranks is not None and arguments.ranks < 2):
        raise SpecError(f"at least two ranks and one round (-n {arguments.ranks}, --rounds {arguments.rounds})")
    folder = arguments.out or Path("runs") / f"bench-{arguments.what}-{time.strftime('%Y%m%d-%H%M%S')}"
    result = folder / f"{arguments.what}.json"
    ways = {"MPI": _by_mpi(arguments), "--lab": bool(arguments.lab), "--hosts": bool(arguments.hosts)}
    if sum(ways.values()) > 1:
        named = " and ".join(way for way, taken in ways.items() if taken)
        raise IncompatibleError(f"{named} cannot be used together; leave one out")
    module, plan = _plan(arguments, result)
    folder.mkdir(parents=True, exist_ok=True)
    code = _launch(arguments, (f"syncline.bench.{module}", json.dumps(plan)))
    if code:
        return code
    document = json.loads(result.read_text())
    if arguments.what == "network":
        print(network.describe(document))
    elif arguments.what == "teams":
        print(f"{teams.describe(document)}\n\nwritten: {result}")
    elif arguments.what == "step":
        document["memory"] = _memory(arguments, plan, folder)
        result.write_text(json.dumps(document, indent=1))
        print(f"{step_table(document)}\n\nwritten: {result}")
    else:
        print(table(document))
        try:
            pictures = plot(document, folder / "collectives")
            print("\nwritten: " + ", ".join(map(str, [result, *pictures])))
        except UnsupportedError as error:
            print(f"\nwritten: {result}; {error}")
    return 0


def _memory(arguments: argparse.Namespace, plan: dict[str, object], folder: Path) -> list[dict[str, object]]:
    """Peak memory of each contender, in processes of its own."""
    found: list[dict[str, object]] = []
    models = plan["models"]
    assert isinstance(models, list)
    for model in models if arguments.memory_runs > 0 else []:
        print(f"{model}: memory", file=sys.stderr, flush=True)
        for _ in range(arguments.memory_runs):
            for kind in ("syncline", arguments.against):
                out = folder / "memory.json"
                # The peak of what was in use, not of the allocator's holes: see bench/step.py.
                os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
                alone = {**plan, "models": [model], "only": kind, "out": str(out.absolute()), "trace": False}
                if _launch(arguments, ("syncline.bench.step", json.dumps(alone))) == 0:
                    found += json.loads(out.read_text())["results"]
    return found


def _pair(option: str, text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise SpecError(f"{option} {text}: two numbers, as in 4,2") from None
    if not (first >= 0 and second >= 0):
        raise SpecError(f"{option} {text}: neither may be negative")
    return first, second


def _step_plan(arguments: argparse.Namespace, out: str) -> dict[str, object]:
    models = [name.strip() for name in arguments.models.split(",") if name.strip()]
    for name in models:
        if name not in SUBJECTS:
            raise SpecError(f"unknown model {name!r}; {nearest(name, list(SUBJECTS))}")
    if arguments.turns < 1:
        raise SpecError(f"--turns {arguments.turns}: at least one step of each contender in a repeat")
    build_strategy(arguments.strategy)
    if arguments.collective not in ("auto", "native"):
        build("allreduce", arguments.collective)
    return asdict(
        step.StepPlan(
            out=out,
            models=models,
            against=arguments.against,
            repeats=arguments.rounds,
            turns=arguments.turns,
            strategy=arguments.strategy,
            collective=arguments.collective,
            bucket_bytes=arguments.bucket_bytes,
            check_finite=arguments.check_finite,
            broadcast_buffers=arguments.ddp_buffers,
            trace=arguments.trace,
        )
    )


def _plan(arguments: argparse.Namespace, result: Path) -> tuple[str, dict[str, object]]:
    out = str(result.absolute())
    if arguments.what == "step":
        return "step", _step_plan(arguments, out)
    if arguments.what == "teams":
        sizes, pauses = _pair("--megabytes", arguments.megabytes), _pair("--compute", arguments.compute)
        collective, turns = arguments.collective, arguments.rounds
        return "teams", asdict(teams.TeamsPlan(out, sizes, pauses, turns=turns, collective=collective))
    if arguments.what == "network":
        plan = network.NetworkPlan(
            out=out, engine=arguments.engine, fresh=arguments.fresh, echo=arguments.echo, rounds=arguments.rounds
        )
        return "network", asdict(plan)
    algorithms = [name.strip() for name in arguments.algorithms.split(";") if name.strip()]
    for name in algorithms:
        build("allreduce", name)  # refused here, not on every rank
    return "collectives", asdict(
        collectives.Plan(
            sizes=parse_sizes(arguments.sizes),
            out=out,
            rounds=arguments.rounds,
            budget=arguments.budget,
            algorithms=algorithms,
            mpi=arguments.mpi,
        )
    )


def _launch(arguments: argparse.Namespace, module: tuple[str, str]) -> int:
    target = ("-m", *module)
    if arguments.lab:
        hosts, rate = parse_lab(arguments.lab)
        return run_in_lab(Job(target=target), hosts, rate, arguments.ranks)
    if arguments.hosts:
        return run_on_hosts(Job(target=target), parse_hosts(arguments.hosts, arguments.ranks))
    ranks = arguments.ranks or (4 if arguments.what == "collectives" else 2)
    warn_if_crowded(ranks)
    if _by_mpi(arguments):
        environ = {**os.environ, **threads_each(ranks), "PYTHONUNBUFFERED": "1"}
        return subprocess.call(mpi_command(target, ranks, (), environ), env=environ)
    return run_here(Job(target=target), ranks)


def _by_mpi(arguments: argparse.Namespace) -> bool:
    if arguments.what in ("step", "teams"):
        return False
    return bool(arguments.mpi if arguments.what == "collectives" else arguments.engine == "mpi")
