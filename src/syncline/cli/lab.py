"""Run any command once on each host of a small cluster that is emulated on this machine.

examples:
  syncline lab 4 100mbit -- python train.py
  syncline lab 2 1gbit -- sh -c 'echo $RANK of $WORLD_SIZE at $MASTER_ADDR'

Each host is a network namespace with a link of that rate and no latency of its own. The command finds RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT as a worker of `syncline run` does. When one fails all are ended.
"""

from __future__ import annotations

import argparse

from syncline.errors import SpecError
from syncline.launch.start import Job

__all__ = ["HELP", "configure", "run"]

HELP = "run a command on each host of an emulated cluster"


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what this command takes."""
    parser.add_argument("hosts", type=int, metavar="N", help="how many hosts")
    parser.add_argument("rate", metavar="RATE", help="the rate of each link: 100mbit, 1gbit")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- command…", help="what each host runs")


def run(arguments: argparse.Namespace) -> int:
    """Run it; the exit code."""
    from syncline.launch.in_lab import run_in_lab
    from syncline.launch.lab import parse_lab

    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words:
        raise SpecError(f"no command is named: syncline lab {arguments.hosts} {arguments.rate} -- python train.py")
    hosts, rate = parse_lab(f"{arguments.hosts}@{arguments.rate}")
    return run_in_lab(Job(target=("--exec", *words), plain_rank=None), hosts, rate)
