"""docs/ddp.md says what is so: every row of its tables is run beside DistributedDataParallel."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.testing import Pool
from syncline.testing.collectives import world_on
from syncline.transports import Transport
from tests.launching import ROOT
from tests.reduction.ddp import autograd, parameters, training
from tests.reduction.ddp.sides import CASES, Case, Side
from tests.strategies.cases import process_group

PAGE = (ROOT / "docs" / "ddp.md").read_text()
TOPICS = (training, parameters, autograd)
"""The modules that fill `CASES`."""
AT_ONCE = 24
"""Cases in one round trip to the pool."""


@contextmanager
def closing(side: Side) -> Iterator[None]:
    """Let go of the teams, on every rank alike."""
    try:
        yield
    finally:
        for run in side.runs:
            run.close()


def outcome(world: sl.World, each: Case, ours: bool) -> tuple[Any, str]:
    """What a case gave, and what it raised."""
    side = Side(world, ours)
    try:
        with closing(side), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return copy.deepcopy(each.run(side)), ""  # before close(), which leaves the mean of the buffers
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Result:
    """A case on one rank."""

    verdict: str
    ours: str
    """What was raised here, if anything."""
    theirs: str
    our_values: str
    their_values: str


def compare(transport: Transport, folder: str, titles: list[str]) -> list[Result]:
    """Run cases both ways; how they compare, on this rank."""
    world = world_on(transport)  # left open: the channel is the pool's
    results = []
    with process_group(transport, folder):
        for title in titles:
            each = CASES[title]
            theirs, their_error = (None, "") if each.hangs else outcome(world, each, ours=False)
            ours, our_error = outcome(world, each, ours=True)
            verdict = _errors(our_error, their_error, each.hangs) or _values(leaves(ours), leaves(theirs))
            results.append(Result(verdict, our_error, their_error, _text(ours), _text(theirs)))
    return results


def _errors(ours: str, theirs: str, hangs: bool) -> str:
    if hangs:
        return "refused here, DDP hangs" if ours else "DDP hangs"
    names = {(True, True): "refused by both", (True, False): "refused here", (False, True): "refused by DDP"}
    return names.get((bool(ours), bool(theirs)), "")


def leaves(value: Any) -> list[Any]:
    """The tensors and plain values in it."""
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in leaves(each)]
    return [value]


def _text(value: Any) -> str:
    return repr([leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves(value)])


def _values(ours: list[Any], theirs: list[Any]) -> str:
    if len(ours) != len(theirs):
        return "differs"
    found = {_leaf(one, other) for one, other in zip(ours, theirs, strict=True)}
    return next(word for word in ("differs", "close", "equal bits") if word in found)


def _leaf(one: Any, other: Any) -> str:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return "equal bits" if one is other or one == other else "differs"
    if one.dtype != other.dtype or one.shape != other.shape:
        return "differs"
    if torch.equal(one, other):
        return "equal bits"
    return "close" if torch.allclose(one, other, rtol=1e-5, atol=1e-7) else "differs"


@dataclass(frozen=True)
class Row:
    theirs: str
    ours: str
    verdict: str


def rows() -> dict[str, Row]:
    """The rows of all tables of four columns, by their first."""
    section = PAGE.split("\n## Behaviour by behaviour\n")[1]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    found = [row for row in cells if len(row) == 4]
    assert len(found) == len({row[0] for row in found}), "a row stands twice"
    return {row[0].replace("`", ""): Row(*row[1:]) for row in found}


def problems(title: str, row: Row, results: list[Result]) -> list[str]:
    """Where a row says something else than the runs."""
    words = ("refused", "hangs", "differs", "close", "equal bits")
    verdict = min((result.verdict for result in results), key=lambda word: [each in word for each in words].index(True))
    found = [] if verdict == row.verdict else [f"is {verdict!r}, the page says {row.verdict!r}"]
    for cell, errors in ((row.theirs, [r.theirs for r in results]), (row.ours, [r.ours for r in results])):
        for error in filter(None, errors):
            quoted = re.findall(r'"([^"]+)"', cell)
            if not quoted or not all(words in error for words in quoted):
                found.append(f"raises {error[:400]!r}, the page says {cell!r}")
    alike = len({result.our_values for result in results}) == 1
    if alike != CASES[title].alike and not any(result.ours for result in results):
        found.append(f"our ranks are {'alike' if alike else 'apart'}")
    if "the ranks differ" in row.theirs and len({result.their_values for result in results}) == 1:
        found.append("its ranks do not differ")
    return [f"{title}: {problem}" for problem in found]


def test_every_row_has_its_case() -> None:
    assert sorted(set(CASES) - set(rows())) == [], "cases without a row"
    assert sorted(set(rows()) - set(CASES)) == [], "rows without a case"


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_is_so(gloo: Pool, tmp_path: Path, ranks: int) -> None:
    table = rows()
    titles = [title for title, case in CASES.items() if case.ranks == ranks and title in table]
    wrong: list[str] = []
    for number, first in enumerate(range(0, len(titles), AT_ONCE)):
        folder = tmp_path / str(number)
        folder.mkdir()
        some = titles[first : first + AT_ONCE]
        by_rank: list[list[Result]] = gloo.run(compare, ranks, str(folder), some)
        for title, results in zip(some, zip(*by_rank, strict=True), strict=True):
            wrong += problems(title, table[title], list(results))
    assert not wrong, "\n".join(wrong)
