"""`syncline bench stragglers`: what it refuses, which workers it slows, and a small comparison on the simulator."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from syncline.bench.stragglers import SCENARIOS, SLOW_STEPS, StragglersPlan, measure, table
from syncline.errors import SpecError

SMALL: dict[str, Any] = {
    "workload": "regression(features=4, samples=128)",
    "entries": ("bsp", "ssp(slack=3)"),
    "workers": 2,
    "seeds": 1,
    "learning_rate": 0.05,
    "target": 0.5,
    "epochs": 20,
    "simulate": True,
}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"scenarios": ("lastign",)}, "unknown scenario 'lastign'; did you mean 'lasting'"),
        ({"entries": ("bps",)}, "did you mean 'bsp'"),
        ({"workers": 1}, "-n 1"),
        ({"seeds": 0}, "--seeds 0"),
        ({"factor": 1.0}, "--factor 1"),
        ({"step": math.nan}, "--step nan"),
    ],
)
def test_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        StragglersPlan(out="", **{**SMALL, **wrong}).check()
    assert words in str(caught.value)


def test_which_workers_a_scenario_slows() -> None:
    plan = StragglersPlan(out="", workers=3, step=0.5)
    assert SCENARIOS["equal"](plan) == []
    (slow,) = SCENARIOS["lasting"](plan)
    assert (slow.rank, slow.factor, slow.start, slow.stop) == (2, 4.0, 0.0, math.inf)
    wandering = SCENARIOS["wandering"](plan)
    assert [slow.rank for slow in wandering[:4]] == [0, 1, 2, 0]
    assert [slow.start for slow in wandering[1:]] == [slow.stop for slow in wandering[:-1]], "always one, never two"
    assert wandering[0].stop == SLOW_STEPS * plan.step


def test_a_small_comparison(tmp_path: Path) -> None:
    """Times are virtual: a lasting straggler holds all of bsp's steps up, and the same seed gives the same times."""
    said: list[str] = []
    plan = StragglersPlan(out=str(tmp_path / "a.json"), scenarios=("equal", "lasting"), **SMALL)
    found = measure(plan, said.append)["seconds"]
    assert set(found) == {"equal", "lasting"}
    for rows in found.values():
        assert set(rows) == {"bsp", "ssp(slack=3)"}
        for ways in rows.values():
            (seconds,) = ways["simulated"]
            assert 0 < seconds < math.inf
    (equal,), (lasting,) = found["equal"]["bsp"]["simulated"], found["lasting"]["bsp"]["simulated"]
    assert lasting > 2 * equal, "every step waits for the one that is four times slower"
    assert len(said) == 4
    assert said[0].startswith("equal, ")
    document = json.loads(Path(plan.out).read_text())
    assert document["seconds"] == found
    told = table(document)
    assert "2 workers, 40 ms a step, slow ones 4 times; 1 seeds; × is relative to bsp" in told
    assert [line for line in told.splitlines() if line.startswith(("equal", "lasting"))] == ["equal", "lasting"]
    (tmp_path / "again").mkdir()
    again = StragglersPlan(out=str(tmp_path / "again" / "a.json"), scenarios=("equal",), **SMALL)
    assert measure(again, said.append)["seconds"]["equal"] == found["equal"]


def test_a_target_that_is_not_reached(tmp_path: Path) -> None:
    how = {**SMALL, "target": 1e-9, "epochs": 1, "entries": ("bsp",)}
    plan = StragglersPlan(out=str(tmp_path / "a.json"), scenarios=("equal",), **how)
    document = measure(plan, lambda text: None)
    assert document["seconds"]["equal"]["bsp"]["simulated"] == [math.inf]
    assert "not reached" in table(document)
