"""Teams of the plugin: which means a call returns, and that teams do not mix."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import syncline as sl
import syncline.compat.ml_comm as mc
from syncline.errors import IncompatibleError
from syncline.events import RunLog, read_log
from syncline.testing import hunt
from tests.hunting import seeds

STEPS = 20
STALENESS = {
    STEPS: [0] * STEPS,
    STEPS // 5: [0] * 4 + [1] * 16,
    1: [0] + [1] * 19,
    0: [1] * STEPS,
    int(-0.45 * STEPS): [1] * 11 + [0] * 9,
    -STEPS: [0] * STEPS,
}
"""The staleness of each step, by `ksteps`."""


def returned(staleness: list[int]) -> list[float]:
    """The mean that each call returns, where the mean of call t is t + 1."""
    return [
        step + 1.0 if not stale else float(step if step > 0 and staleness[step - 1] else 0)
        for step, stale in enumerate(staleness)
    ]


def read_staleness(folder: Path, of: str) -> list[int]:
    """The staleness of each step in a run log."""
    lines = [line for line in read_log(folder) if line["key"] == "sl_staleness" and line["metadata"]["of"] == of]
    assert [line["metadata"]["step"] for line in lines] == list(range(len(lines)))
    return [line["value"] for line in lines]


@pytest.mark.parametrize("ksteps", STALENESS)
def test_ksteps(ksteps: int, tmp_path: Path) -> None:
    def case(world: sl.World) -> list[float]:
        log = RunLog(tmp_path / str(world.rank))
        world.events.add(log)
        mc.init(1, 1, 10)
        mc.config_team(0, 0, ksteps=ksteps, max_steps=STEPS, verbosity=0, perf_freq=100)
        share = 2.0 * world.rank / (world.size - 1)  # 1 on average
        means = [float(mc.gradients([np.array([(step + 1) * share])], 0)[0][0]) for step in range(STEPS)]
        log.close()
        return means

    for rank, found in enumerate(sl.simulate(case, ranks=4).results):
        assert found == pytest.approx(returned(STALENESS[ksteps]))
        assert read_staleness(tmp_path / str(rank), "team 0") == STALENESS[ksteps]


def test_rank_0_decides(caplog: pytest.LogCaptureFixture) -> None:
    def case(world: sl.World) -> list[float]:
        mc.init(1, 1, 10)
        mc.config_team(0, 0, 2 if world.rank == 0 else 9, 10, 0, 0)
        return [float(mc.gradients([np.array([step + 1.0])], 0)[0][0]) for step in range(5)]

    with caplog.at_level(logging.WARNING, "syncline"):
        assert sl.simulate(case, ranks=2).results == ([1, 2, 0, 3, 4], [1, 2, 0, 3, 4])
    assert "rank 1: config_team(0, …) has ksteps=9 here; rank 0's 2 is used" in caplog.text


def test_a_pipelined_team_refuses_other_arrays() -> None:
    def case(world: sl.World) -> None:
        mc.init(1, 2, 10)
        mc.config_team(0, 0, 0, 10, 0, 0)
        mc.gradients([np.ones(2)], 0)
        with pytest.raises(IncompatibleError, match=r"team 0 is pipelined.*average\(\)"):
            mc.gradients([np.ones(3)], 0)
        assert mc.gradients([np.ones(3)], 1)[0].tolist() == [1, 1, 1]
        mc.config_team(0, 0, 10, 10, 0, 0)  # counts anew
        assert mc.gradients([np.ones(3)], 0)[0].tolist() == [1, 1, 1]

    sl.simulate(case, ranks=2)


def test_verbosity_prints_on_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    def case(world: sl.World) -> None:
        mc.init(1, 3, 10)
        for team, verbosity in enumerate((0, 1, 2)):
            mc.config_team(team, 0, 3, 8, verbosity, 2)
            for _ in range(4):
                mc.gradients([np.ones(2)], team)

    sl.simulate(case, ranks=3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"ml_comm: team {team}: 3 ranks, synchronous for 3 steps, then pipelined" for team in (1, 2)]
    assert [line.partition("of waiting")[2] for line in lines[2:]] == [
        f" per step, {stale} of the last 2 pipelined" for stale in (0, 1)
    ]
    assert lines[3].startswith("ml_comm: team 2: step 4: 16 B and ")


def interleaved(world: sl.World) -> None:
    """The shape of a GAN: two teams with other steps and other arrays, and other calls between them."""
    mc.init(1, 2, 100)
    mc.config_team(0, 0, 3, 12, 0, 0)
    mc.config_team(1, 0, -2, 12, 0, 0)
    for step in range(12):
        first = mc.gradients([np.full(3, step + 1.0 + world.rank), np.full(1, -1.0)], 0)
        second = mc.gradients([np.full(7, 100.0 * (step + 1) + world.rank)], 1)
        loss = np.array([world.rank + 1000.0])
        mc.average(loss)
        assert loss[0] == 1000.5
        late: Any = step if step < 3 else step - 1
        assert first[0].tolist() == [0 if step == 3 else late + 1.5] * 3
        assert first[1].tolist() == [0 if step == 3 else -1]
        expected = 0 if step == 0 else 100 * (step + (step >= 10)) + 0.5
        assert second[0].tolist() == [expected] * 7
    mc.finalize()


@pytest.mark.hunt
def test_two_teams_do_not_mix() -> None:
    hunt(interleaved, ranks=2, seeds=seeds(3, 200))
