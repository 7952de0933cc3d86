"""Run any command once on each host of a small cluster that is emulated on this machine. Needs root.

examples:
  syncline lab 4 100mbit -- python train.py
  syncline lab 2 1gbit -- sh -c 'echo $RANK of $WORLD_SIZE at $MASTER_ADDR'

Each host is a network namespace with a link of that rate and no additional latency. The command has RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT like a worker of `syncline run`. When one command fails, all are ended.
"""

from __future__ import annotations

import argparse
import shlex
import shutil

from syncline.errors import SpecError
from syncline.launch.start import Job

__all__ = ["configure", "run"]

HINTS = {"-n": "the number of hosts comes first: syncline lab 4 100mbit -- command"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("hosts", type=_hosts, metavar="N", help="number of hosts")
    parser.add_argument("rate", metavar="RATE", help="the rate of each link: 100mbit, 1gbit")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- command…", help="the command of each host")


def run(arguments: argparse.Namespace) -> int:
    """Run the command on every host and return the exit code."""
    from syncline.launch.lab import parse_lab
    from syncline.launch.start import run_in_lab

    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words:
        raise SpecError(f"no command is named: syncline lab {arguments.hosts} {arguments.rate} -- python train.py")
    hosts, rate = parse_lab(f"{arguments.hosts}@{arguments.rate}")
    if words[0].endswith(".py") and shutil.which(words[0]) is None:
        form = f"syncline run --lab {hosts}@{arguments.rate} {shlex.join(words)}"
        raise SpecError(f"{words[0]} is a script, not a command: write {form}")
    return run_in_lab(Job(target=("--exec", *words), plain_rank=None), hosts, rate)


def _hosts(text: str) -> int:
    hosts, at, rate = text.partition("@")
    if at:
        raise argparse.ArgumentTypeError(f"{text!r}: write hosts and rate apart, {hosts} {rate}")
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
