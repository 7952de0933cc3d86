"""The parser of every command: its errors are one sentence each, with what was given and what to write."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from syncline.specs import nearest

__all__ = ["REFUSED", "CommandParser"]

REFUSED = 2
"""The exit code for a wrong command line, as in argparse."""


class CommandParser(argparse.ArgumentParser):
    """argparse without its usage dump.

    `hints` maps options that users of other tools may try to what to write here; the hint under "" is for all others.

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
        self.set_defaults(parser=self)  # the innermost command's parser is set last

    def error(self, message: str) -> NoReturn:
        """End with exit code 2, after one sentence and an example."""
        told = message.removeprefix("argument ").replace("the following arguments are required:", "missing:")
        self.refuse(f"{told.replace('expected one argument', 'its value is missing')}; {self._example()}")

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
    """
    >>> _whole_number("12")
    12
    """
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    """
    >>> _number("0.5")
    0.5
    """
    try:
        return float(text)
    except ValueError:
        try:
            hint = f"; write {float(text.removesuffix('%')) / 100:g}" if text.endswith("%") else ""
        except ValueError:
            hint = ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a number{hint}") from None
