"""Write an example workload: one file of plain functions, with comments that say what to change.

examples:
  syncline new workload.py
  syncline new workload.py --force                              replace an existing file

It works without changes: `syncline train workload.py -n 2` trains it, `syncline race workload.py -n 2` compares
synchronisation strategies on it.
"""

from __future__ import annotations

import argparse
import shlex
from importlib.resources import files
from pathlib import Path

from syncline.errors import IncompatibleError, SpecError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("path", metavar="workload.py", help="the file to write")
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and print the next commands."""
    text, path = arguments.path, Path(arguments.path)
    if path.suffix != ".py":
        raise SpecError(f"{text}: a workload's file is Python, so its name ends in .py: syncline new {text}.py")
    template = files("syncline").joinpath("workloads").joinpath("template.py").read_bytes()
    try:
        with path.open("wb" if arguments.force else "xb") as file:
            file.write(template)
    except FileExistsError:
        raise IncompatibleError(f"{text} exists: name another file, or replace it with --force") from None
    except FileNotFoundError:
        raise SpecError(f"{text}: there is no folder {path.parent}; create it first") from None
    except OSError as error:
        raise SpecError(f"{text} cannot be written ({error.strerror}); name another file") from None
    quoted = shlex.quote(text)
    print(f"wrote {text}; it works without changes: syncline train {quoted} -n 2")
    print(f"edit it, then compare synchronisation strategies: syncline race {quoted} -n 2")
    return 0
