"""Planted mistakes: each changes one place of the library, and the tests named with it must notice.

`tests/planted/FAMILY.toml` lists the mistakes of a family of tests. Every run checks that each mistake can still be
planted; `SYNCLINE_HUNT=1 pytest tests/test_planted.py -k FAMILY` plants them, one after the other, in a copy of the
sources and runs the named tests, which must fail. That must still hold after a test is removed or shortened.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hunting import only_hunting

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FAILED_TESTS = 1
"""pytest's exit code where tests have failed; others mean that it could not run them."""


@dataclass(frozen=True)
class Mistake:
    """A change of one place of the library that some tests must notice."""

    name: str
    """The mistake in a few words."""
    file: str
    """The file to change, below `src/syncline`."""
    right: str
    """A text that occurs once in that file."""
    wrong: str
    """The text that replaces it."""
    tests: tuple[str, ...]
    """The test files or tests of which at least one must fail."""

    def plant(self, sources: Path) -> None:
        """Make the mistake in a copy of `src`."""
        path = sources / "syncline" / self.file
        path.write_text(path.read_text().replace(self.right, self.wrong))


def read_mistakes(path: Path) -> list[Mistake]:
    """The mistakes of one family."""
    found = tomllib.loads(path.read_text())["mistake"]
    return [Mistake(**{**each, "tests": tuple(each["tests"])}) for each in found]


MISTAKES = [
    pytest.param(mistake, id=f"{path.stem}: {mistake.name}")
    for path in sorted((ROOT / "tests/planted").glob("*.toml"))
    for mistake in read_mistakes(path)
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistake_can_be_planted(mistake: Mistake) -> None:
    text = (ROOT / "src/syncline" / mistake.file).read_text()
    assert text.count(mistake.right) == 1, f"not once in {mistake.file}: {mistake.right!r}"
    assert mistake.right != mistake.wrong
    for test in mistake.tests:
        path, *names = test.split("::")
        assert (ROOT / path).exists(), test
        assert not names or f"def {names[-1].partition('[')[0]}(" in (ROOT / path).read_text(), test


@only_hunting
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_tests_notice_the_mistake(mistake: Mistake, tmp_path: Path) -> None:
    sources = tmp_path / "src"
    shutil.copytree(ROOT / "src", sources)
    mistake.plant(sources)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mistake.tests]
    environ = {name: value for name, value in os.environ.items() if name != "SYNCLINE_HUNT"}
    environ |= {"PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900)
    assert ran.returncode == FAILED_TESTS, f"no test has failed\n{ran.stdout}\n{ran.stderr}"
