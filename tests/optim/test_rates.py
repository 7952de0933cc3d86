"""The rules for the learning rate: what each gives, whose size it takes, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

import syncline as sl
from syncline.errors import SpecError
from syncline.optim import scale_lr


@pytest.mark.parametrize(
    ("rule", "workers", "expected"),
    [
        ("linear", 1, 0.1),
        ("linear", 8, 0.8),
        ("sqrt", 16, 0.4),
        ("sqrt", 2, 0.1 * math.sqrt(2)),
        ("none", 64, 0.1),
    ],
)
def test_the_rules(rule: str, workers: int, expected: float) -> None:
    """η·p, η·√p and η."""
    assert scale_lr(0.1, rule, workers) == expected


def test_linear_is_the_default() -> None:
    assert scale_lr(0.25, workers=4) == 1.0


def test_without_a_world_there_is_one_worker() -> None:
    assert scale_lr(0.1) == 0.1


def test_the_current_world_says_how_many() -> None:
    """Each simulated rank finds its own world."""
    assert sl.simulate(lambda world: scale_lr(0.5, "linear"), ranks=8).results == (4.0,) * 8
    assert sl.simulate(lambda world: scale_lr(0.5, "sqrt"), ranks=4).results == (1.0,) * 4


def test_a_world_that_was_closed_counts_no_more() -> None:
    with sl.init():
        assert scale_lr(0.1) == 0.1
    assert scale_lr(0.1) == 0.1


def test_told_workers_go_before_the_world() -> None:
    assert sl.simulate(lambda world: scale_lr(0.5, workers=3), ranks=2).results == (1.5, 1.5)


def test_an_unknown_rule_shows_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"unknown rule 'liner'.*did you mean 'linear'"):
        scale_lr(0.1, "liner", 2)


@pytest.mark.parametrize("rate", [0, -0.1, math.nan, math.inf, -math.inf, True, "0.1", None])
def test_a_rate_that_is_none(rate: Any) -> None:
    with pytest.raises(SpecError, match="rate must be a finite number above 0, not"):
        scale_lr(rate, "linear", 2)


@pytest.mark.parametrize("workers", [0, -1, 2.0, True, "2"])
def test_workers_that_are_no_count(workers: Any) -> None:
    with pytest.raises(SpecError, match="workers must be a whole number, 1 or more, not"):
        scale_lr(0.1, "linear", workers)


def test_before_init_several_workers_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(sl.errors.WorldError, match=r"call sl\.init\(\) first"):
        scale_lr(0.1)
    assert scale_lr(0.1, workers=2) == 0.2
