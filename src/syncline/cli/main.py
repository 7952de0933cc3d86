"""The door of the command `syncline`: finds the command's file and turns errors into sentences."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from syncline.errors import SynclineError

__all__ = ["main"]

COMMANDS = ("run", "train", "race", "report", "lint", "watch", "new", "lab", "bench", "env")
"""Each is a module of this package with `HELP`, `configure(parser)` and `run(arguments) -> exit code`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    logging.basicConfig(format="syncline: %(message)s", level=logging.WARNING)
    parser = argparse.ArgumentParser(
        prog="syncline",
        description="Train neural networks on many workers, and measure honestly how they agree.",
        epilog="syncline COMMAND --help tells more of a command, with examples.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"syncline.cli.{name}")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.configure(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except SynclineError as error:
        print(f"syncline {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads any more: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains when it flushes at exit
        return 141


if __name__ == "__main__":
    sys.exit(main())
