"""A resumed run with parameter servers gives the same bits as an uninterrupted one, on the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.events import read_log
from syncline.training.loop import Outcome, train
from syncline.training.settings import Settings
from tests.training.tiny import Tiny

PACE = 1e-3


def run(workload: Tiny, settings: Settings, **options: Any) -> list[Outcome]:
    def each(world: sl.World) -> Outcome:
        return train(workload, settings, world=world, seconds_a_sample=PACE, **options)

    return list(sl.simulate(each, ranks=2).results)


def crash(number: int) -> None:
    if number == 11:
        raise RuntimeError("pulled the plug")


def assert_same(first: Tiny, second: Tiny) -> None:
    for rank in range(2):
        one, other = first.weights(rank), second.weights(rank)
        assert one
        for name in one:
            assert torch.equal(one[name], other[name]), f"{name} of rank {rank}"


@pytest.mark.parametrize("strategy", ["bsp", "bsp(rule='adam(0.01)')", "ssp(slack=0)"])
def test_with_more_steps(tmp_path: Path, strategy: str) -> None:
    """The first run ends after its 5 steps, within an epoch of 7."""
    whole, begun, resumed = Tiny(), Tiny(), Tiny()
    outcome = run(whole, Settings(strategy=strategy, epochs=3, steps=17))
    first = run(begun, Settings(strategy=strategy, epochs=3, steps=5), folder=tmp_path)
    second = run(resumed, Settings(strategy=strategy, epochs=3, steps=17), folder=tmp_path, resume=True)
    assert [one.steps for one in first] == [5, 5]
    assert resumed.losses == {0: 12, 1: 12}, "the steps of the first run are not taken again"
    assert_same(resumed, whole)
    assert [(one.steps, one.test) for one in second] == [(one.steps, one.test) for one in outcome]
    assert [line["value"] for line in read_log(tmp_path) if line["key"] == "sl_resumed"] == [5]


def test_after_a_crash(tmp_path: Path) -> None:
    """In step 11, after the checkpoint of step 9."""
    how = Settings(strategy="bsp", epochs=3, checkpoint_every=3)
    whole, resumed = Tiny(), Tiny()
    run(whole, how, folder=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="pulled the plug"):
        run(Tiny(watcher=crash), how, folder=tmp_path / "cut")
    run(resumed, how, folder=tmp_path / "cut", resume=True)
    assert [line["value"] for line in read_log(tmp_path / "cut") if line["key"] == "sl_resumed"] == [9]
    assert_same(resumed, whole)
