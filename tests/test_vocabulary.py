"""The words of the source: unique class names, plain names, constants with units, tests of public behaviour."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("vocabulary")  # one worker reads and parses the files

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "syncline"
FILES = sorted(SOURCE.rglob("*.py"))
PROSE = [*FILES, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

CLASSES = frozenset(
    [
        "Desk",
        "Courier",
        "Line",
        "Flight",
        "Told",
        "Parked",
        "Space",
        "Gathering",
        "Outgoing",
        "Coded",
        "Coding",
        "Ways",
        "UsualControl",
        "Draw",
        "OwnRun",
        "ServedRun",
        "Basis",
        "Notes",
        "Crank",
        "Ears",
        "Hub",
        "Exchange",
        "Gradients",
        "Roll",
        "WorkerRoll",
        "PartsRun",
        "Watch",
    ]
)
"""Class names that say nothing to a reader from this field."""
MODULES = frozenset(
    [
        "own",
        "served",
        "loose",
        "basis",
        "reading",
        "store",
        "guest",
        "calm",
        "letters",
        "apart",
        "ahead",
        "holes",
        "ways",
        "pays",
        "line",
        "flights",
        "meeting",
        "company",
        "crew",
        "door",
        "sweeper",
        "desk",
        "courier",
        "gathering",
        "outgoing",
        "knobs",
        "words",
        "field",
        "arena",
        "entrant",
        "crank",
        "waiting_room",
        "catalog",
        "parts_run",
    ]
)
"""Module names that do not say what is inside."""
FUNCTIONS = frozenset(
    [
        *("take_off", "land", "mourn", "hear", "meet", "met", "see_to_state", "weigh", "empty_round", "work_for"),
        *("more", "take_over", "surroundings", "terminable", "deal", "deal_again"),
    ]
)
"""Function and method names that do not say what is done."""
PHRASES = (
    *("of agreeing", "of one's own", "engines that exist", "talk seldom", "Mend it", "mend it"),
    *("is told of", "are told of", "look again", "who does not answer"),
    *("dealt again", "dealt to", "are dealt", "deals them", "deals with", "nobody stays", "comes near it"),
    *("reduced apart", "takes the same way", "go the same ways", "what nobody", "who computes what"),
)
"""Phrases that a reader has to read twice."""
VAGUE = re.compile(
    r"(^|_)(MOST|LEAST|LONGEST|SHORTEST|ROOM|PATIENCE|LOOKS?|EASE|GLANCE|AWHILE|LEAVING|LAST_WORDS|AT_ONCE)($|_)"
    r"|^(GRACE|LATE|FAR|CLEARLY|RHYTHM|HELD|KEPT|SHOWN|AHEAD|LARGE|SMALL)$"
)
"""Words of constants that say neither what is bounded nor in which unit."""
SUFFIXES = {"Second": ("_S", "_SECONDS"), "Byte": ("_BYTES",), "Millisecond": ("_MS",)}
"""How the name of a constant ends whose description begins with a unit."""


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(read(path))


@cache
def definitions() -> list[tuple[ast.ClassDef | ast.FunctionDef, Path]]:
    """The classes and functions of the package, and their files."""
    return [
        (node, path.relative_to(SOURCE))
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    ]


def classes() -> list[tuple[str, Path]]:
    return [(node.name, path) for node, path in definitions() if isinstance(node, ast.ClassDef)]


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in classes():
        if not name.startswith("_"):
            places[name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_class_has_a_name_that_says_nothing() -> None:
    assert [(name, str(path)) for name, path in classes() if name.lstrip("_") in CLASSES] == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [str(path.relative_to(SOURCE)) for path in FILES if path.stem in MODULES] == []


def test_no_function_has_a_name_that_says_nothing() -> None:
    found = [
        (node.name, str(path))
        for node, path in definitions()
        if isinstance(node, ast.FunctionDef) and node.name.lstrip("_") in FUNCTIONS
    ]
    assert found == []


def constants() -> Iterator[tuple[str, str, str]]:
    """The constants of each module: name, description, file."""
    for path in FILES:
        body = parse(path).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(target, ast.Name) and target.id.isupper() and not isinstance(node.value, ast.Call):  # type: ignore[attr-defined]
                text = after.value if isinstance(after, ast.Expr) else None
                described = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
                yield target.id, described, str(path.relative_to(SOURCE))


def test_constants_say_what_they_bound() -> None:
    assert [(name, path) for name, _, path in constants() if VAGUE.search(name)] == []


def test_constants_name_their_unit() -> None:
    wrong = [
        (name, path)
        for name, described, path in constants()
        for unit, ends in SUFFIXES.items()
        if described.startswith(unit) and not name.endswith(ends)
    ]
    assert wrong == []


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_text_has_a_phrase_that_is_read_twice(phrase: str) -> None:
    assert [str(path.relative_to(ROOT)) for path in PROSE if phrase in read(path)] == []


OTHERS_PRIVATE = (
    "_replace",
    "_repr_html_",
    "_actions",
    "_SubParsersAction",
    "_forward_hooks",
    "_parameter_names",
    "_id",
)
"""Names of Python, Jupyter, argparse, torch, Horovod and pytest that begin with an underscore."""


def private_uses(path: Path) -> Iterator[str]:
    """Where a test reaches for a private attribute of another object, or imports a private name of the package."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            base = node.value
            if isinstance(base, ast.Name) and base.id in ("self", "cls"):
                continue
            root = base
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ("torch", "sys", "os", "runpy"):
                continue
            if node.attr in OTHERS_PRIVATE:
                continue
            yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("syncline"):
            yield from (
                f"{path.relative_to(ROOT)}:{node.lineno} {n.name}"
                for n in node.names
                if n.name.startswith("_") and n.name != "__main__"
            )


def test_tests_use_no_private_attributes() -> None:
    assert [use for path in sorted((ROOT / "tests").rglob("*.py")) for use in private_uses(path)] == []
