"""The public names: those listed are those defined, and each shows how it is used."""

from __future__ import annotations

import ast
import contextvars
import doctest
import importlib
import inspect
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest

import syncline

SHOWN_ELSEWHERE = {"recv": "send"}
"""Functions whose example is another's, since one makes no sense without the other."""

NAMESPACES = ("checkpoint", "codecs", "errors", "optim", "server", "solvers", "strategies")
MOVED = {
    old: (home, new or old)
    for home, names in syncline._MOVED.items()
    for old, _, new in (each.partition("=") for each in names.split())
}
"""Names that were at the top before, with the module and the name that they have now."""
NAMES = sorted(
    {name for name in syncline.__all__ if name not in NAMESPACES}
    | {f"{home}.{new}" for home, new in MOVED.values() if home in NAMESPACES}
)
"""What users import: the names at the top, and those of the sub-namespaces."""


def public(name: str) -> object:
    return attrgetter(name)(syncline)


CALLABLES = [
    name for name in NAMES if callable(public(name)) and name not in SHOWN_ELSEWHERE and not name.endswith("Error")
]


def names_bound_by(source: str) -> set[str]:
    """The names that the statements of a module bind, submodules that Python adds by itself not among them."""
    found: set[str] = set()
    body = ast.parse(source).body
    checked = next(each for each in body if isinstance(each, ast.If))  # what type checkers read
    for statement in [*body, *checked.body]:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found.add(statement.name)
        else:
            found |= {
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
    return found


def examples_of(name: str) -> list[doctest.DocTest]:
    """The examples in the docstring of a public name and of its public methods."""
    found = doctest.DocTestFinder(exclude_empty=True).find(
        public(name), f"syncline.{name}", module=inspect.getmodule(public(name))
    )
    return [test for test in found if test.examples]


def test_all_is_what_is_defined() -> None:
    """`__all__` holds each public name that syncline/__init__.py binds, once and in order."""
    source = Path(inspect.getfile(syncline)).read_text(encoding="utf-8")
    public = {name for name in names_bound_by(source) if not name.startswith("_")}
    assert public == set(syncline.__all__)
    assert len(syncline.__all__) == len(set(syncline.__all__))  # ruff keeps them sorted


def test_names_come_from_where_type_checkers_read_them() -> None:
    """A name that is imported when it is first used is the one that the imports for type checkers name."""
    tree = ast.parse(Path(inspect.getfile(syncline)).read_text(encoding="utf-8"))
    imports = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and "syncline." in str(each.module)]
    assert imports
    for each in imports:
        module = importlib.import_module(str(each.module))
        for alias in each.names:
            assert getattr(syncline, alias.name) is getattr(module, alias.name), alias.name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = syncline.nothing


def test_the_command_shows_its_help_without_torch() -> None:
    code = "import sys; from syncline.cli.main import main; main([]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_nothing_else_is_in_the_namespace() -> None:
    """A public attribute that is not listed is a submodule of the package, and nothing else."""
    extra = {name: value for name, value in vars(syncline).items() if not name.startswith("_")}
    for name in syncline.__all__:
        del extra[name]
    assert {
        name
        for name, value in extra.items()
        if not (isinstance(value, ModuleType) and value.__name__ == f"syncline.{name}")
    } == set()


def test_the_top_shows_at_most_forty_names() -> None:
    assert dir(syncline) == sorted(syncline.__all__)
    assert len(dir(syncline)) <= 40
    assert set(NAMESPACES) <= set(dir(syncline))


@pytest.mark.parametrize("name", MOVED)
def test_a_name_that_has_moved_warns(name: str) -> None:
    home, new = MOVED[name]
    with pytest.warns(DeprecationWarning, match=rf"sl\.{name} is now sl\.({home}\.)?{new};"):
        found = getattr(syncline, name)
    assert found is getattr(importlib.import_module(f"syncline.{home}"), new)


@pytest.mark.parametrize("name", NAMES)
def test_docstring(name: str) -> None:
    """Each public name has a docstring of its own that starts with a sentence."""
    text = public(name).__doc__
    assert text is not None
    assert text.strip().split("\n\n")[0].endswith((".", ":"))
    assert not text.startswith(f"{name.rpartition('.')[2]}("), "the docstring that dataclasses write"


@pytest.mark.parametrize("name", CALLABLES)
def test_example(name: str) -> None:
    """Each public function and class has an example, and it runs."""
    tests = examples_of(name)
    assert tests, f"no >>> example in syncline.{name}"
    for test in tests:
        outcome = contextvars.copy_context().run(doctest.DocTestRunner(verbose=False).run, test)
        assert outcome.attempted > 0
        assert outcome.failed == 0


@pytest.mark.parametrize(("name", "other"), SHOWN_ELSEWHERE.items())
def test_example_elsewhere(name: str, other: str) -> None:
    """Where one example serves two, it uses both."""
    source = "".join(example.source for test in examples_of(other) for example in test.examples)
    assert f"sl.{name}(" in source
    assert f"sl.{other}(" in source
