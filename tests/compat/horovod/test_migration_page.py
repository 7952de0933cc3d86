"""docs/horovod.md says what is so: its diff, its table of names, its variables."""

from __future__ import annotations

import difflib
import re

import syncline.compat.horovod.torch as hvd
from syncline.cli import horovodrun
from syncline.compat.horovod.settings import SET_BY_LAUNCHER, SUPPORTED, without_effect
from tests.launching import ROOT

PAGE = (ROOT / "docs" / "horovod.md").read_text()
SCRIPTS = ("examples/horovod_mnist.py", "examples/distribute_mnist.py")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(text: str) -> set[str]:
    """All that stands in backticks in the first column of a section's table."""
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`([^`]+)`", " ".join(rows)))


def test_the_diff_is_that_of_the_examples() -> None:
    before, after = ((ROOT / script).read_text().splitlines() for script in SCRIPTS)
    told = "\n".join(difflib.unified_diff(before, after, *SCRIPTS, lineterm="", n=1))
    assert PAGE.split("```diff\n")[2].split("\n```")[0] == told, f"put this into docs/horovod.md:\n{told}"


def test_every_name_is_in_the_table_and_no_other() -> None:
    assert first_column(section("All names")) == set(hvd.__all__)


def test_what_elastic_has_is_named() -> None:
    for name in hvd.elastic.__all__:
        assert f"`elastic.{name}`" in section("All names")


def test_every_function_is_compared_with_horovods() -> None:
    """Its gradient, errors, dtypes, and whether it is as there: no cell is empty."""
    text = section("Function by function")
    table = text[text.index("| name | gradient |") :]
    assert first_column(table) == {*hvd.__all__, *(f"elastic.{name}" for name in hvd.elastic.__all__)}
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert all(len(row) == 5 and all(cell.strip() for cell in row) for row in rows)


def test_variables_do_what_the_table_says() -> None:
    told = first_column(section("Variables"))
    assert told >= SUPPORTED
    idle = told - SUPPORTED - SET_BY_LAUNCHER
    assert "HOROVOD_AUTOTUNE" in idle
    assert set(without_effect(dict.fromkeys(idle, "1"))) == idle


def test_the_page_of_the_command_names_what_is_refused() -> None:
    page = (ROOT / "docs" / "commands" / "horovodrun.md").read_text()
    for flag in horovodrun.REFUSED:
        assert f"`{flag}`" in page
