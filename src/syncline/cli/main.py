"""The command `syncline`: finds the module of a command, parses its options, and prints errors as sentences."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from syncline import __version__
from syncline.errors import SynclineError
from syncline.specs import nearest

__all__ = ["REFUSED", "CommandParser", "main"]

REFUSED = 2
"""The exit code for a wrong command line, as in argparse."""


class CommandParser(argparse.ArgumentParser):
    """An argparse parser whose errors are one sentence, without a usage text.

    `hints` maps options of other tools to what to write instead; the hint under "" is for all other options.

    >>> parser = CommandParser(prog="syncline run", hints={"--np": "write -n"})
    >>> _ = parser.add_argument("-n", type=int)
    >>> parser.parse_args(["-n", "2"]).n
    2
    """

    def __init__(self, *args: Any, hints: Mapping[str, str] | None = None, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)
        self._hints = hints or {}
        self.register("type", int, _whole_number)
        self.register("type", float, _number)
        self.set_defaults(parser=self)  # the parser of the innermost command is set last

    def error(self, message: str) -> NoReturn:
        """End with exit code 2, after one sentence and an example."""
        sentence = message.removeprefix("argument ").replace("the following arguments are required:", "missing:")
        self.refuse(f"{sentence.replace('expected one argument', 'its value is missing')}; {self._example()}")

    def refuse(self, sentence: str) -> NoReturn:
        """End with exit code 2."""
        self.exit(REFUSED, f"{self.prog}: {sentence}\n")

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Refuse an unknown option or argument."""
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {name!r}")
        close = difflib.get_close_matches(name, self._option_string_actions, n=1)
        hint = self._hints.get(name) or (f"did you mean {close[0]}?" if close else self._hints.get(""))
        if hint is None:
            self.error(f"unknown option {name}")
        self.refuse(f"unknown option {name}; {hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(each) for each in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            self.refuse(f"unknown command {value!r}; {self._hints.get(value) or nearest(value, known)}")
        raise argparse.ArgumentError(action, f"{value!r} is not an allowed value; {nearest(str(value), known)}")

    def _example(self) -> str:
        lines = [line.strip() for line in (self.description or "").splitlines()]
        first = next((line.split("   ")[0] for line in lines if line.startswith(f"{self.prog} ")), None)
        return f"{self.prog} --help shows all options" if first is None else f"for example: {first}"


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        try:
            hint = f"; write {float(text.removesuffix('%')) / 100:g}" if text.endswith("%") else ""
        except ValueError:
            hint = ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a number{hint}") from None


COMMANDS = {
    "run": "run a script on many workers",
    "status": "show the workers of an elastic job, and what happened",
    "join": "add one more worker to a running elastic job",
    "horovodrun": "run a script with horovodrun's options",
    "train": "train a workload on many workers",
    "race": "compare strategies: which one reaches a target accuracy first",
    "profile": "measure the layers of a model: times, FLOPs, memory",
    "report": "write the report of a race again",
    "lint": "check the logs of a race or a run for twelve reporting mistakes",
    "watch": "watch a race or a training in the browser",
    "new": "write a template of a workload",
    "plan": "predict steps, memory and limits of training plans, before anything runs",
    "lab": "run a command on each host of an emulated cluster",
    "bench": "measure collectives, codecs, the network, servers and training steps",
    "env": "print what a bug report needs: versions, machine, launcher, network",
}
"""Each command is a module of this package with `configure(parser)` and `run(arguments) -> exit code`."""
STARTING = ("run", "train", "race", "bench")
"""The commands that start workers; `horovodrun` has the options of Horovod's."""
OVERVIEW = f"""\
syncline {__version__}: train neural networks on many workers, and measure which synchronisation strategy suits them

  syncline run -n 4 script.py       run a training script on 4 workers
  syncline train digits -n 4        train a workload that comes with Syncline
  syncline race digits -n 4         compare strategies: which one reaches the target accuracy first

commands: {", ".join(COMMANDS)}
syncline --help describes them; syncline COMMAND --help shows a command's options, with examples"""
HINTS = {
    **dict.fromkeys(("help", "?"), "write syncline --help, or syncline COMMAND --help"),
    "version": "write syncline --version",
    **dict.fromkeys(("launch", "start", "exec", "torchrun", "mpiexec", "mpirun", "srun"), "did you mean 'run'?"),
    **dict.fromkeys(("fit", "learn"), "did you mean 'train'?"),
    **dict.fromkeys(("compare", "tune"), "did you mean 'race'?"),
    **dict.fromkeys(("benchmark", "measure"), "did you mean 'bench'?"),
    **dict.fromkeys(("init", "create", "template"), "did you mean 'new'?"),
    **dict.fromkeys(("info", "doctor"), "did you mean 'env'?"),
    **dict.fromkeys(("profiler", "flops", "memory"), "did you mean 'profile'?"),
}
"""Commands that users of other tools may try, and what to write instead."""

FILE_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Errors of a file that are printed with its name: no permission, or a full disk."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    logging.basicConfig(format="syncline: %(message)s", level=logging.WARNING)
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(OVERVIEW)
        return REFUSED
    try:
        return _run(words)
    except KeyboardInterrupt:
        return 130


def _run(words: Sequence[str]) -> int:
    """Import the chosen command and run it."""
    parser = build_parser(words[0])
    _check_first(parser, words[0])
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        arguments.parser.refuse_unknown(unknown)
    if getattr(arguments, "verbose", False):
        logging.getLogger("syncline").setLevel(logging.INFO)
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains when it flushes at exit
        return 141
    except SynclineError as error:
        print(f"syncline {arguments.command}: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        if error.errno not in FILE_ERRORS or error.filename is None:
            raise
        print(f"syncline {arguments.command}: {error.filename}: {error.strerror}", file=sys.stderr)
        return REFUSED


def build_parser(chosen: str) -> CommandParser:
    """The parser of all commands. Only the module of the chosen command is imported, for its options."""
    parser = CommandParser(
        prog="syncline",
        description="Train neural networks on many workers, and measure which synchronisation strategy suits them.",
        epilog="syncline COMMAND --help shows a command's options, with examples.",
        hints=HINTS,
    )
    parser.add_argument("-V", "--version", action="version", version=f"syncline {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=line)
            continue
        module = importlib.import_module(f"syncline.cli.{name}")
        hints = getattr(module, "HINTS", {})
        command = commands.add_parser(name, help=line, description=module.__doc__, hints=hints)
        module.configure(command)
        if name in STARTING:
            command.add_argument("--verbose", action="store_true", help="print how the workers are started")
        command.set_defaults(run=module.run)
    return parser


def _check_first(parser: CommandParser, word: str) -> None:
    """Refuse a script or an option where the command is missing."""
    if word.endswith(".py") and word not in COMMANDS:
        parser.refuse(f"{word} is not a command: syncline run -n 4 {word} runs a script on 4 workers")
    if word.startswith("-") and word not in ("-h", "--help", "-V", "--version"):
        parser.refuse(f"{word}: options come after the command, as in syncline run -n 4 script.py")


if __name__ == "__main__":
    sys.exit(main())
