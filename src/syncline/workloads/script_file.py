"""The import of a user's script: its functions, the lines of its errors, and seeded random numbers.

The user names the file, so it is executed. Its bytes are read once, so the hash is that of the executed code.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import os
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

from syncline.errors import SpecError, SynclineError
from syncline.specs import nearest
from syncline.workloads.base import seeded

__all__ = ["CONSTANTS", "FUNCTIONS", "ScriptFile", "ScriptFunction", "load_script"]

MAX_MESSAGE_CHARS = 300
"""Characters of another error's message in ours."""


class ScriptFunction(NamedTuple):
    """A function that a script defines. `str()` is its call.

    >>> print(ScriptFunction("loss", ("model", "batch")))
    loss(model, batch)
    """

    name: str
    arguments: tuple[str, ...] = ()
    required: bool = True

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"


FUNCTIONS = (
    ScriptFunction("model"),
    ScriptFunction("data"),
    ScriptFunction("loss", ("model", "batch")),
    ScriptFunction("metric", ("model", "batch"), required=False),
    ScriptFunction("output_loss", ("outputs", "targets"), required=False),
    ScriptFunction("optimizer", ("model", "learning_rate"), required=False),
)
CONSTANTS = ("METRIC", "HIGHER_IS_BETTER", "METRIC_RANGE", "TARGET", "BATCH", "EPOCHS", "LEARNING_RATE")
SIMILAR_NAMES = (("LR", "LEARNING_RATE"), ("BATCH_SIZE", "BATCH"), ("NUM_EPOCHS", "EPOCHS"))
"""Other names of our constants that a spelling check does not find."""


@dataclass(frozen=True)
class ScriptFile:
    """An imported script."""

    shown: str
    """The path as the user wrote it, for messages."""
    path: str
    """The absolute path, for other processes."""
    sha256: str
    module: ModuleType

    def get(self, name: str) -> Any:
        """The script's value of `name`, or None."""
        return getattr(self.module, name, None)

    def names(self) -> list[str]:
        """The functions and classes that the script itself defines."""
        own = self.module.__name__
        found = vars(self.module).items()
        return [name for name, it in found if callable(it) and getattr(it, "__module__", "") == own and name[0] != "_"]

    def unused_names(self) -> list[str]:
        """Warnings about names that are similar to ours and are not used."""
        taken = {part.name for part in FUNCTIONS} | set(CONSTANTS)
        constants = [name for name in vars(self.module) if name.isupper()]
        phrases = []
        for name in [*self.names(), *constants]:
            close = difflib.get_close_matches(name, taken - set(vars(self.module)), n=1, cutoff=0.8)
            meant = dict(SIMILAR_NAMES).get(name) or (close[0] if close else None)
            if name not in taken and meant is not None and not hasattr(self.module, meant):
                phrases.append(f"{name} is not used; did you mean {meant}?")
        return phrases

    @contextmanager
    def errors_at(self, what: str) -> Iterator[None]:
        """Raise errors of the user's code as a `SpecError` with the line of the script."""
        try:
            yield
        except SynclineError:
            raise
        except (Exception, SystemExit) as error:
            raise SpecError(f"{_place(self.shown, self.path, error)}: {what} raised {_one_line(error)}") from error


def load_script(path: str | Path) -> ScriptFile:
    """Import the file, and check that it has all functions, with our arguments."""
    shown, place = str(path), Path(os.path.abspath(path))
    source = _read(shown, place)
    folder = str(place.parent)
    if folder not in sys.path:  # as for `python script.py`; imports inside functions need it later too
        sys.path.insert(0, folder)
    name = f"syncline_script_{re.sub(r'[^0-9A-Za-z]', '_', place.stem)}_{hashlib.sha256(bytes(place)).hexdigest()[:8]}"
    loader = _Loader(name, str(place), source)
    try:
        loader.get_code(name)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = shown if line is None else f"{shown}, line {line}"
        why = getattr(error, "msg", None) or str(error)
        raise SpecError(f"{where}: not Python ({why}); fix it, or name another file") from None
    _refuse_training_script(shown, source)
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses need their module while they are defined
    try:
        with seeded(0):
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
    """Refuse a training script before its import would run it.

    Such a script has loops at the top level or imports Syncline, and defines none of our functions.
    """
    body = ast.parse(source).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    defined = {getattr(node, "name", "") for node in body}
    defined |= {alias.asname or alias.name for node in imports for alias in node.names}
    functions = [part for part in FUNCTIONS if part.required]
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


class _Loader(SourceFileLoader):
    """Executes bytes that were read before, without `__pycache__`, which may differ from the hashed bytes."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self.source = source

    def get_data(self, path: str) -> bytes:
        return self.source

    def path_stats(self, path: str) -> Any:
        raise OSError("no bytecode")


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
    return f"{_place(shown, path, error)}: importing it raised {_one_line(error)}; {hint}"


def _place(shown: str, path: str, error: BaseException) -> str:
    """The file, and the deepest line of it in the traceback."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return shown if line is None else f"{shown}, line {line}"


def _one_line(error: BaseException) -> str:
    """An error in one line."""
    words = " ".join(str(error).split())
    words = words if len(words) <= MAX_MESSAGE_CHARS else f"{words[:MAX_MESSAGE_CHARS]}…"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _check_parts(script: ScriptFile) -> None:
    missing = [part for part in FUNCTIONS if part.required and script.get(part.name) is None]
    if missing:
        needed = ", ".join(str(part) for part in FUNCTIONS if part.required)
        there = [name for name in script.names() if name not in {part.name for part in FUNCTIONS}]
        near = "".join(f"; for {part.name}: {nearest(part.name, there)}" for part in missing if there)
        raise SpecError(
            f"{script.shown} has no {' and no '.join(map(str, missing))}: a workload's script defines {needed}{near}; "
            "syncline new workload.py writes an example"
        )
    for part in FUNCTIONS:
        given = script.get(part.name)
        if given is not None:
            _check_signature(script.shown, part, given)


def _check_signature(shown: str, part: ScriptFunction, given: Callable[..., Any]) -> None:
    if not callable(given):
        raise SpecError(f"{shown}: {part.name} is {given!r}, not a function; write def {part}:")
    try:
        signature = inspect.signature(given)
    except (ValueError, TypeError):  # some C functions have no signature
        return
    try:
        signature.bind(*part.arguments)
    except TypeError as error:
        raise SpecError(
            f"{shown}: {part.name}{signature} cannot be called as {part} ({error}); write def {part}:"
        ) from None
