"""A user's file, imported: which parts it defines, at which line it fails, and random numbers that a seed decides.

The file is a program that the user names, so it is run. What runs is what was hashed: its bytes are read once.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from syncline.errors import SpecError, SynclineError
from syncline.specs import nearest

__all__ = ["CONSTANTS", "PARTS", "Part", "ScriptFile", "load_script", "randomness"]

SHORT = 300
"""Characters of a foreign error's message that fit into a sentence."""


class Part(NamedTuple):
    """A function of the protocol. `str()` is how it is called.

    >>> print(Part("loss", ("model", "batch")))
    loss(model, batch)
    """

    name: str
    arguments: tuple[str, ...] = ()
    required: bool = True

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"


PARTS = (
    Part("model"),
    Part("data"),
    Part("loss", ("model", "batch")),
    Part("metric", ("model", "batch"), required=False),
    Part("optimizer", ("model", "learning_rate"), required=False),
)
CONSTANTS = ("METRIC", "HIGHER_IS_BETTER", "METRIC_RANGE", "TARGET", "BATCH", "EPOCHS", "LEARNING_RATE")
USUAL = (("LR", "LEARNING_RATE"), ("BATCH_SIZE", "BATCH"), ("NUM_EPOCHS", "EPOCHS"))
"""What others call our constants, where the spelling is too far away to be found."""


@dataclass(frozen=True)
class ScriptFile:
    """A script that has been imported."""

    shown: str
    """Its path as the user wrote it, for messages."""
    path: str
    """Absolute, for other processes."""
    sha256: str
    module: ModuleType

    def get(self, name: str) -> Any:
        """What the script calls `name`, or None."""
        return getattr(self.module, name, None)

    def names(self) -> list[str]:
        """The functions and classes that the script itself defines."""
        own = self.module.__name__
        found = vars(self.module).items()
        return [name for name, it in found if callable(it) and getattr(it, "__module__", "") == own and name[0] != "_"]

    def unread(self) -> list[str]:
        """Phrases about names that look like parts of the protocol and are not."""
        taken = {part.name for part in PARTS} | set(CONSTANTS)
        constants = [name for name in vars(self.module) if name.isupper()]
        phrases = []
        for name in [*self.names(), *constants]:
            close = difflib.get_close_matches(name, taken - set(vars(self.module)), n=1, cutoff=0.8)
            meant = dict(USUAL).get(name) or (close[0] if close else None)
            if name not in taken and meant is not None and not hasattr(self.module, meant):
                phrases.append(f"{name} is not read; did you mean {meant}?")
        return phrases

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Turn what the user's code raises inside into a sentence with the line of theirs that it came from."""
        try:
            yield
        except SynclineError:
            raise
        except (Exception, SystemExit) as error:
            raise SpecError(f"{_place(self.shown, self.path, error)}: {what} raised {_told(error)}") from error


def load_script(path: str | Path) -> ScriptFile:
    """Import the file and see that it has the functions of the protocol, each to be called as we call it."""
    shown, place = str(path), Path(os.path.abspath(path))
    source = _read(shown, place)
    folder = str(place.parent)
    if folder not in sys.path:  # as `python script.py` would have it; imports inside functions need it later, too
        sys.path.insert(0, folder)
    name = f"syncline_script_{re.sub(r'[^0-9A-Za-z]', '_', place.stem)}_{hashlib.sha256(bytes(place)).hexdigest()[:8]}"
    loader = _Loader(name, str(place), source)
    try:
        loader.get_code(name)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = shown if line is None else f"{shown}, line {line}"
        why = getattr(error, "msg", None) or str(error)
        raise SpecError(f"{where}: not Python ({why}); mend it there, or name another file") from None
    _refuse_training_script(shown, source)
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while they are made
    try:
        with randomness(0):
            loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise SpecError(_failed_import(shown, str(place), error)) from error
    script = ScriptFile(shown, str(place), hashlib.sha256(source).hexdigest(), module)
    _check_parts(script)
    return script


def _refuse_training_script(shown: str, source: bytes) -> None:
    """Refuse a script that trains when it is run, before importing it runs it.

    Such a script has statements that do something, or imports Syncline, and defines no function of the protocol.
    """
    body = ast.parse(source).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    defined = {getattr(node, "name", "") for node in body}
    defined |= {alias.asname or alias.name for node in imports for alias in node.names}
    functions = [part for part in PARTS if part.required]
    if "*" in defined or any(part.name in defined for part in functions):
        return
    named = [alias.name for node in imports for alias in node.names] + [getattr(node, "module", "") for node in imports]
    ours = any(name.partition(".")[0] == "syncline" for name in named if name)
    acts = (ast.For, ast.While, ast.With)
    if ours or any(isinstance(node, acts) for node in body):
        needed = ", ".join(str(part) for part in functions)
        raise SpecError(
            f"{shown} is a script that trains, not a workload: syncline run -n 2 {shown} runs it on 2 workers. A "
            f"workload's file defines {needed}; syncline new workload.py writes one"
        )


@contextmanager
def randomness(seed: int) -> Iterator[None]:
    """The generators of torch (on the CPU), NumPy and `random` start from `seed` inside, and are as they were after.

    >>> with randomness(3):
    ...     first = torch.rand(1)
    >>> with randomness(3):
    ...     torch.equal(torch.rand(1), first)
    True
    """
    numpy, python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(numpy)
        random.setstate(python)


class _Loader(SourceFileLoader):
    """Runs bytes that are read already, and leaves no `__pycache__`: a stale one would not be what was hashed."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self.source = source

    def get_data(self, path: str) -> bytes:
        return self.source

    def path_stats(self, path: str) -> Any:
        raise OSError("not kept as bytecode")


def _read(shown: str, place: Path) -> bytes:
    if place.suffix != ".py":
        beside = place.with_name(f"{place.name}.py")
        hint = f": write {shown}.py" if beside.is_file() else ", as syncline new workload.py writes one"
        raise SpecError(f"{shown} is no workload: a script's name ends in .py{hint}")
    try:
        return place.read_bytes()
    except FileNotFoundError:
        others = [other.name for other in place.parent.glob("*.py")] if place.parent.is_dir() else []
        close = difflib.get_close_matches(place.name, others, n=1)
        hint = f"syncline new {shown} writes one to begin with"
        if close:
            hint = f"did you mean {os.path.join(os.path.dirname(shown), close[0])}?"
        raise SpecError(f"there is no file {shown}; {hint}") from None
    except OSError as error:
        raise SpecError(f"{shown} cannot be read ({error.strerror}); name a Python file that can") from None


def _failed_import(shown: str, path: str, error: BaseException) -> str:
    hint = f"python {shown} shows all of it"
    if isinstance(error, SystemExit):
        hint = "put what the script runs under if __name__ == '__main__'"
    elif isinstance(error, ModuleNotFoundError):
        hint = "install it, or put it beside the script"
    return f"{_place(shown, path, error)}: importing it raised {_told(error)}; {hint}"


def _place(shown: str, path: str, error: BaseException) -> str:
    """The file, and the deepest line of it that the error came through."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return shown if line is None else f"{shown}, line {line}"


def _told(error: BaseException) -> str:
    """An error in one line."""
    words = " ".join(str(error).split())
    words = words if len(words) <= SHORT else f"{words[:SHORT]}…"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _check_parts(script: ScriptFile) -> None:
    missing = [part for part in PARTS if part.required and script.get(part.name) is None]
    if missing:
        needed = ", ".join(str(part) for part in PARTS if part.required)
        there = [name for name in script.names() if name not in {part.name for part in PARTS}]
        near = "".join(f"; for {part.name}: {nearest(part.name, there)}" for part in missing if there)
        raise SpecError(
            f"{script.shown} has no {' and no '.join(map(str, missing))}: a workload's script defines {needed}{near}; "
            "syncline new workload.py writes an example"
        )
    for part in PARTS:
        given = script.get(part.name)
        if given is not None:
            _check_signature(script.shown, part, given)


def _check_signature(shown: str, part: Part, given: Callable[..., Any]) -> None:
    if not callable(given):
        raise SpecError(f"{shown}: {part.name} is {given!r}, not a function; write def {part}:")
    try:
        signature = inspect.signature(given)
    except (ValueError, TypeError):  # some that are written in C have none
        return
    try:
        signature.bind(*part.arguments)
    except TypeError as error:
        raise SpecError(
            f"{shown}: {part.name}{signature} cannot be called as {part} ({error}); write def {part}:"
        ) from None
