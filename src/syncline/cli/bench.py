"""Measure what this network does, and which way of agreeing suits it.

examples:
  syncline bench collectives -n 4                              every schedule, auto and gloo's own, side by side
  syncline bench collectives -n 4 --sizes 1MB:64MB --mpi       larger tensors only; MPI's own too
  syncline bench collectives --lab 4@100mbit --sizes 1MB       on four emulated hosts at 100 Mbit/s
  syncline bench network -n 2                                  latency, bandwidth, and the transports' echoes
  syncline bench network --engine mpi                          the same for MPI

Medians with 95 % intervals of the median; ratios are paired within rounds. A table goes to the terminal, and the
samples with a picture to runs/bench-… (or --out).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

from syncline.bench import collectives, network
from syncline.bench.report import plot, table
from syncline.bench.sizes import parse_sizes
from syncline.collectives import build
from syncline.errors import IncompatibleError, SpecError, UnsupportedError
from syncline.launch.hosts import parse_hosts
from syncline.launch.in_lab import run_in_lab
from syncline.launch.lab import parse_lab
from syncline.launch.machine import warn_if_crowded
from syncline.launch.mpi import mpi_command
from syncline.launch.start import Job, run_here, run_on_hosts
from syncline.launch.variables import threads_each

__all__ = ["HELP", "configure", "run"]

HELP = "measure collectives and the network"


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
    for command in (first, second):
        command.add_argument("-n", type=int, dest="ranks", help="ranks; default 4 for collectives, 2 for network")
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
    else:
        print(table(document))
        try:
            pictures = plot(document, folder / "collectives")
            print("\nwritten: " + ", ".join(map(str, [result, *pictures])))
        except UnsupportedError as error:
            print(f"\nwritten: {result}; {error}")
    return 0


def _plan(arguments: argparse.Namespace, result: Path) -> tuple[str, dict[str, object]]:
    out = str(result.absolute())
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
    ranks = arguments.ranks or (2 if arguments.what == "network" else 4)
    warn_if_crowded(ranks)
    if _by_mpi(arguments):
        environ = {**os.environ, **threads_each(ranks), "PYTHONUNBUFFERED": "1"}
        return subprocess.call(mpi_command(target, ranks, (), environ), env=environ)
    return run_here(Job(target=target), ranks)


def _by_mpi(arguments: argparse.Namespace) -> bool:
    return bool(arguments.mpi if arguments.what == "collectives" else arguments.engine == "mpi")
