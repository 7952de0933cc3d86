"""Runs that lose workers, on the simulator: the others write checkpoints, from which the run is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import syncline as sl
from syncline.checkpoint import latest
from syncline.events import read_log
from syncline.training.loop import Outcome, train
from syncline.training.settings import Settings
from syncline.transports.faults import Kill
from syncline.world import Simulation
from tests.strategies.served_cases import servers
from tests.training.tiny import Tiny

PACE = 0.01
WORKERS = 3
SERVED = [
    "bsp",
    "ssp(slack=3)",
    "downpour(push=2, lr=0.01)",
    "easgd(sync=False, period=2)",
    "gossip(pairwise=True)",
    "master(sync=False)",
]
LOSE_RANK_0 = ("ssp(slack=3)", "easgd(sync=False, period=2)", "gossip(pairwise=True)", "hogwild")
LAST_ONLY: dict[str, Any] = {"given": {"epochs": 1, "checkpoint_every": None}}


def simulate(strategy: str, folder: Path, ranks: int = WORKERS, faults: Any = (), **options: Any) -> Simulation:
    """Train with a separate server, which outlives the workers; hogwild uses the memory of one host."""
    settings = Settings(strategy=strategy, **{"epochs": 4, "checkpoint_every": 4, **options.pop("given", {})})

    def work(world: sl.World) -> Outcome:
        return train(Tiny(), settings, world=world, folder=folder, seconds_a_sample=PACE, **options)

    shared = strategy == "hogwild"
    network = sl.Network(ranks_per_host=ranks, inside=sl.Link(latency=1e-6, bandwidth=1e10)) if shared else sl.Network()
    return sl.simulate(work, ranks, network, faults, extra=[] if shared else servers(ranks, 1))


def steps_saved(folder: Path) -> list[int]:
    return [line["metadata"]["step"] for line in read_log(folder) if line["key"] == "sl_checkpoint"]


@pytest.mark.parametrize("strategy", [*SERVED, "hogwild"])
def test_survivors_write_checkpoints(tmp_path: Path, strategy: str) -> None:
    """They write every checkpoint, and the run resumes from the last one with all workers."""
    victim = 0 if strategy in LOSE_RANK_0 else 2
    found = simulate(strategy, tmp_path, faults=[Kill(victim, at=0.25)])
    assert found.killed == (victim,)
    living = [outcome for outcome in found.results if outcome is not None]
    assert [outcome.steps for outcome in living] == [20, 20]
    assert latest(tmp_path / "checkpoints") == 20
    newest = tmp_path / "checkpoints" / "step-00000020"
    parts = sorted(path.name for path in newest.glob("rank-*"))
    assert parts == [f"rank-{rank:05}" for rank in range(WORKERS) if rank != victim]
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (told["status"], list(told["lost"]), told["checkpoint"]) == ("success", [str(victim)], str(newest))
    if victim:
        assert steps_saved(tmp_path) == [4, 8, 12, 16, 20]
    again = simulate(strategy, tmp_path, resume=True, given={"epochs": 5})
    assert [outcome.steps for outcome in again.results] == [25] * WORKERS
    assert latest(tmp_path / "checkpoints") == 25
    assert all(outcome.test is not None for outcome in again.results)


def test_resume_after_workers_were_lost(tmp_path: Path) -> None:
    simulate("ssp(slack=3)", tmp_path, faults=[Kill(1, at=0.25)])
    again = simulate("ssp(slack=3)", tmp_path, ranks=2, resume=True, given={"epochs": 5})
    assert all(outcome.epochs == 5 for outcome in again.results)
    assert all(outcome.test is not None for outcome in again.results)


def test_a_worker_without_data_in_a_round_holds_up_no_checkpoint(tmp_path: Path) -> None:
    """Rank 2 has no data in the last round of an epoch, so it is a step behind, and a step of bsp waits for it."""
    found = simulate("bsp", tmp_path, given={"epochs": 2})
    assert found.time < 10.0, "nobody has waited for the timeout"
    assert steps_saved(tmp_path) == [4, 8, 10]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    """The time at which the last checkpoint of a run starts, and its duration."""
    folder = tmp_path_factory.mktemp("whole")
    simulate("hogwild", folder, **LAST_ONLY)
    (saved,) = (line for line in read_log(folder) if line["key"] == "sl_checkpoint")
    return saved["seconds"] - saved["metadata"]["seconds"], saved["metadata"]["seconds"]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_loss_while_the_last_one_is_saved(
    tmp_path: Path, window: tuple[float, float], victim: int, part: float
) -> None:
    """At any moment of it: the others start again, and the checkpoint is complete."""
    begun, seconds = window
    found = simulate("hogwild", tmp_path, faults=[Kill(victim, at=begun + part * seconds)], **LAST_ONLY)
    assert found.killed == (victim,)
    assert latest(tmp_path / "checkpoints") == 5
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert [name for name in left if name.startswith("step-")] == left, "nothing is left of what was broken off"
    assert sum(outcome is not None for outcome in found.results) == 2
