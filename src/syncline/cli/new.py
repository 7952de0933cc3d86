"""Write a workload of your own to begin with: one file of plain functions, with comments that say what to change.

examples:
  syncline new workload.py
  syncline new workload.py --force                              over a file that is there

It works as it stands: `syncline train workload.py -n 2` trains it, `syncline race workload.py -n 2` compares
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
    """Say what this command takes."""
    parser.add_argument("path", metavar="workload.py", help="the file to write")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")


def run(arguments: argparse.Namespace) -> int:
    """Write it, and say what comes next."""
    text, path = arguments.path, Path(arguments.path)
    if path.suffix != ".py":
        raise SpecError(f"{text}: a workload's file is Python, so its name ends in .py: syncline new {text}.py")
    template = files("syncline.workloads").joinpath("template.py").read_bytes()
    try:
        with path.open("wb" if arguments.force else "xb") as file:
            file.write(template)
    except FileExistsError:
        raise IncompatibleError(f"{text} is there already: name another file, or write over it with --force") from None
    except FileNotFoundError:
        raise SpecError(f"{text}: there is no folder {path.parent}; make it first") from None
    except OSError as error:
        raise SpecError(f"{text} cannot be written ({error.strerror}); name another file") from None
    named = shlex.quote(text)
    print(f"wrote {text}; it works as it stands: syncline train {named} -n 2")
    print(f"change what it says, then compare synchronisation strategies: syncline race {named} -n 2")
    return 0
