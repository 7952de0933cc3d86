"""horovodrun's words: its hosts, its commands, and what it tells workers."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from syncline.errors import SpecError, UnsupportedError
from syncline.launch.hosts import HERE, Host, parse_hosts
from syncline.launch.programs import Program

__all__ = ["Command", "parse_command", "place_ranks", "read_hostfile", "tell_horovods"]

PYTHON = re.compile(r"python(?:3(?:\.(\d+))?)?")
OPTIONS = {
    "-u": "",  # workers are unbuffered anyway
    "-q": "",
    "-B": "PYTHONDONTWRITEBYTECODE=1",
    "-O": "PYTHONOPTIMIZE=1",
    "-OO": "PYTHONOPTIMIZE=2",
    "-P": "PYTHONSAFEPATH=1",
    "-s": "PYTHONNOUSERSITE=1",
    "-v": "PYTHONVERBOSE=1",
    "-W": "PYTHONWARNINGS",
    "-X dev": "PYTHONDEVMODE=1",
    "-X faulthandler": "PYTHONFAULTHANDLER=1",
    "-X utf8": "PYTHONUTF8=1",
}
"""Python's options, and the variables that ask for the same: the worker's Python is started by us."""


@dataclass(frozen=True)
class Command:
    """What to run, as `syncline run` is given it, and the variables that stand for Python's options."""

    target: tuple[str, ...]
    variables: dict[str, str]


def parse_command(words: Sequence[str]) -> Command:
    """A command that begins with `python` or is a Python script.

    >>> parse_command(["python3", "-u", "-m", "package.train", "--epochs", "3"])
    Command(target=('-m', 'package.train', '--epochs', '3'), variables={})
    """
    if not words:
        raise SpecError("no command is named: syncline horovodrun -np 4 python train.py")
    first, rest = words[0], list(words[1:])
    found = PYTHON.fullmatch(os.path.basename(first))
    if found is None:
        return Command((_script(first), *rest), {})
    _check_python(first, found[1])
    variables: dict[str, str] = {}
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        _take_option(rest, variables)
    if not rest or rest == ["-m"]:
        raise SpecError(f"{' '.join(words)} names no script and no module: syncline horovodrun -np 4 python train.py")
    if rest[0] != "-m":
        _check_script(rest[0])
    return Command(tuple(rest), variables)


def _check_python(word: str, minor: str | None) -> None:
    """Refuse another Python than this one: workers need the syncline that is installed here."""
    here = os.path.dirname(os.path.abspath(sys.executable))
    elsewhere = "/" in word and os.path.dirname(os.path.abspath(word)) != here
    if elsewhere or (minor is not None and int(minor) != sys.version_info.minor):
        raise UnsupportedError(f"{word}: workers run on this Python, {sys.executable}; write python in its place")


def _take_option(rest: list[str], variables: dict[str, str]) -> None:
    option = rest.pop(0)
    for with_value in ("-W", "-X"):
        if option.startswith(with_value):
            value = option[2:] or (rest.pop(0) if rest else "")
            option = f"-X {value}" if with_value == "-X" else with_value
            break
    else:
        value = ""
    if option == "-c":
        raise UnsupportedError("python -c: only scripts and modules can be run; put the code into a file")
    if option not in OPTIONS:
        known = ", ".join(OPTIONS)
        raise UnsupportedError(f"python {option}: this option cannot be passed on; those that can: {known}")
    name, _, fixed = OPTIONS[option].partition("=")
    if name:
        variables[name] = fixed or value


def _script(word: str) -> str:
    """A Python script by its path, or by its name on PATH as `pip` puts one there."""
    path = word if os.path.exists(word) else shutil.which(word)
    if path is None:
        raise SpecError(f"there is no command {word!r} in {os.getcwd()} or on PATH; write python train.py")
    if not path.endswith(".py") and not _begins_with_python(path):
        raise UnsupportedError(f"{word!r} is no Python script: what can be run is python train.py or python -m module")
    _check_script(path)
    return path


def _check_script(path: str) -> None:
    if not os.path.exists(path):
        raise SpecError(f"there is no script {path!r} in {os.getcwd()}; for a module use python -m")
    if not os.access(path, os.R_OK):
        raise SpecError(f"the script {path!r} cannot be read: its mode is {os.stat(path).st_mode & 0o777:o}")


def _begins_with_python(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            first = file.readline(512)
    except OSError:
        return False
    return first.startswith(b"#!") and b"python" in first


def read_hostfile(path: str) -> str:
    """A file of lines like `a slots=2`, as `a:2,b:2`; empty lines and what follows a # do not count."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"the hostfile {path!r} cannot be read: {error}") from error
    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        found = re.fullmatch(r"(\S+)\s+slots\s*=\s*(\d+)", text)
        if found is not None:
            hosts.append(f"{found[1]}:{found[2]}")
        elif text:
            raise SpecError(f"the hostfile {path!r}, line {number}: {text!r}; each line is as: a slots=2")
    if not hosts:
        raise SpecError(f"the hostfile {path!r} names no host; each line is as: a slots=2")
    return ",".join(hosts)


def place_ranks(text: str, ranks: int | None) -> tuple[Host, ...]:
    """The hosts of `a:2,b:2` that `ranks` ranks fill, the first ones first; all of their slots where that is None.

    >>> place_ranks("127.0.0.1:4", 2)
    (Host(name='localhost', slots=2),)
    >>> place_ranks("a:2,b:2,c:2", 3)
    (Host(name='a', slots=2), Host(name='b', slots=1))
    """
    slots: dict[str, int] = {}
    for host in parse_hosts(text):
        name = HERE if host.name in _own_names() else host.name
        slots[name] = slots.get(name, 0) + host.slots
    total = sum(slots.values())
    left = total if ranks is None else ranks
    if left > total:
        raise SpecError(f"-np {ranks} but {text} has {total} slot{'s' * (total > 1)}; give more as a:{ranks}")
    placed = []
    for name, count in slots.items():
        if left > 0:
            placed.append(Host(name, min(count, left)))
            left -= count
    return tuple(placed)


def _own_names() -> set[str]:
    name = socket.gethostname()
    return {HERE, "127.0.0.1", name, name.partition(".")[0]}


def tell_horovods(places: Sequence[Sequence[Program]]) -> list[list[Program]]:
    """The ranks of each place, told who they are in Horovod's words too.

    The cross rank counts the places that have a rank with the same local rank.

    >>> from syncline.launch.programs import Place, lay_out
    >>> told = tell_horovods(lay_out([Place(name="a", slots=2), Place(name="b", slots=1)], ["train.py"], {}))
    >>> [program.variables["HOROVOD_CROSS_RANK"] for place in told for program in place]
    ['0', '0', '1']
    >>> [program.variables["HOROVOD_CROSS_SIZE"] for place in told for program in place]
    ['2', '1', '2']
    """
    sizes = [len(place) for place in places]
    told = []
    for number, place in enumerate(places):
        here = []
        for local, program in enumerate(place):
            variables = {
                "HOROVOD_RANK": str(program.rank),
                "HOROVOD_SIZE": str(sum(sizes)),
                "HOROVOD_LOCAL_RANK": str(local),
                "HOROVOD_LOCAL_SIZE": str(len(place)),
                "HOROVOD_CROSS_RANK": str(sum(size > local for size in sizes[:number])),
                "HOROVOD_CROSS_SIZE": str(sum(size > local for size in sizes)),
            }
            here.append(replace(program, variables={**program.variables, **variables}))
        told.append(here)
    return told
