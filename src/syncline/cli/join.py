"""Add one more worker to a running elastic job, from another shell or another host, while it trains.

examples:
  syncline join runs/20261118-101500-3fa2       starts the job's script once more, here

FOLDER is the folder of a job of `syncline run --elastic MIN:MAX`. The worker gets the job's command, working folder and
variables. Its output and its exit code are those of this command. Ctrl-C ends it, and the job goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from syncline.launch.joining import join_job

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the job")


def run(arguments: argparse.Namespace) -> int:
    """Start the worker and return its exit code."""
    return join_job(arguments.folder)
