"""The door of the command `syncline`: finds the command's file and turns errors into sentences."""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import sys
from collections.abc import Iterable, Sequence

from syncline.errors import SynclineError

__all__ = ["main"]

COMMANDS = ("run", "horovodrun", "train", "race", "report", "lint", "watch", "new", "lab", "bench", "env")
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
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        known = commands.choices[arguments.command]._option_string_actions
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown[0], known)}")
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


def _hint(name: str, known: Iterable[str]) -> str:
    """The option that may have been meant.

    >>> _hint("--strategi", ["--strategy", "--codec"])
    "; did you mean '--strategy'?"
    """
    close = difflib.get_close_matches(name.partition("=")[0], list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


if __name__ == "__main__":
    sys.exit(main())
