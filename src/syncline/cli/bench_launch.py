"""Starting the ranks of a bench: here, in the lab, on hosts, or by mpiexec."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Mapping

from syncline.launch.hosts import parse_hosts
from syncline.launch.in_lab import run_in_lab
from syncline.launch.lab import parse_lab
from syncline.launch.machine import warn_if_crowded
from syncline.launch.mpi import mpi_command
from syncline.launch.start import Job, run_here, run_on_hosts
from syncline.launch.variables import threads_each

__all__ = ["add_places", "by_mpi", "launch"]


def add_places(parser: argparse.ArgumentParser, lab: str = "on so many emulated hosts at that rate") -> None:
    """The options that say where ranks run."""
    parser.add_argument("-n", type=int, dest="ranks", help="ranks; default 4 for collectives, else 2")
    parser.add_argument("--lab", metavar="4@100mbit", help=lab)
    parser.add_argument("--hosts", metavar="a:2,b:2", help="on these hosts, over ssh; the first has --out too")


def launch(arguments: argparse.Namespace, module: str, plan: Mapping[str, object], lab: str | None) -> int:
    """Run a bench's module on every rank; the exit code."""
    target = ("-m", f"syncline.bench.{module}", json.dumps(plan))
    if lab:
        hosts, rate = parse_lab(lab)
        return run_in_lab(Job(target=target), hosts, rate, arguments.ranks)
    if arguments.hosts:
        return run_on_hosts(Job(target=target), parse_hosts(arguments.hosts, arguments.ranks))
    ranks = arguments.ranks or (4 if arguments.what == "collectives" else 2)
    warn_if_crowded(ranks)
    if by_mpi(arguments):
        environ = {**os.environ, **threads_each(ranks), "PYTHONUNBUFFERED": "1"}
        return subprocess.call(mpi_command(target, ranks, (), environ), env=environ)
    return run_here(Job(target=target), ranks)


def by_mpi(arguments: argparse.Namespace) -> bool:
    """Whether mpiexec starts the ranks."""
    if arguments.what == "collectives":
        return bool(arguments.mpi)
    return bool(arguments.what == "network" and arguments.engine == "mpi")
