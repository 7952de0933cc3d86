"""An interrupted and resumed run gives the same bits as an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.checkpoint import latest
from syncline.errors import IncompatibleError, SpecError
from syncline.events import read_log
from syncline.training.loop import Outcome, train
from syncline.training.run_folder import RunFolder
from syncline.training.settings import Settings
from syncline.world import World, current_world
from tests.training.tiny import Tiny

pytestmark = pytest.mark.xdist_group("resume")  # they share a fixture that takes long

HOW = Settings(epochs=3, scaling="sqrt", warmup=1.5, decay="cosine", collective="ring", checkpoint_every=3)


def run(workload: Tiny, ranks: int, settings: Settings, **options: Any) -> list[Outcome]:
    return list(sl.simulate(lambda world: train(workload, settings, world=world, **options), ranks=ranks).results)


def crash_at(step: int) -> Callable[[int], None]:
    def watch(number: int) -> None:
        if number == step:
            raise RuntimeError("pulled the plug")

    return watch


def assert_same(first: Tiny, second: Tiny, ranks: int) -> None:
    for rank in range(ranks):
        one, other = first.weights(rank), second.weights(rank)
        for name in one:
            assert torch.equal(one[name], other[name]), f"{name} of rank {rank}"


@pytest.fixture(scope="module")
def whole() -> dict[int, tuple[Tiny, list[Outcome]]]:
    """Uninterrupted runs, by the number of ranks."""
    done = {}
    for ranks in (1, 2, 3):
        workload = Tiny()
        done[ranks] = workload, run(workload, ranks, HOW)
    return done


@pytest.mark.parametrize(
    ("ranks", "step"),
    [
        (2, 2),  # before any checkpoint
        (2, 4),  # in mid-epoch, after the one of step 3
        (2, 7),  # in the last step of an epoch of 7
        (2, 8),  # in the first of the next
        (2, 16),  # the checkpoint of step 15 is the first of the third epoch
        (2, 21),  # in the last step of all
        (1, 14),  # an epoch of 13
        (3, 6),  # an epoch of 5, and the checkpoint of step 3
        (3, 11),  # rank 2 has no data in steps 5 and 10
    ],
)
def test_a_crash(tmp_path: Path, whole: dict[int, tuple[Tiny, list[Outcome]]], ranks: int, step: int) -> None:
    reference, outcomes = whole[ranks]
    with pytest.raises(RuntimeError, match="pulled the plug"):
        run(Tiny(watcher=crash_at(step)), ranks, HOW, folder=tmp_path)
    resumed = Tiny()
    found = run(resumed, ranks, HOW, folder=tmp_path, resume=True)
    assert_same(resumed, reference, ranks)
    assert found[0].test == outcomes[0].test
    assert found[0].validation == outcomes[0].validation
    assert (found[0].steps, found[0].samples) == (outcomes[0].steps, outcomes[0].samples)
    started_at = [line["value"] for line in read_log(tmp_path) if line["key"] == "sl_resumed"]
    assert started_at == ([latest_before(step)] if step > 3 else [])


def latest_before(step: int) -> int:
    """The newest checkpoint of a run that crashed in this step."""
    return 3 * ((step - 1) // 3)


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_is_asked_to_stop(tmp_path: Path, whole: dict[int, tuple[Tiny, list[Outcome]]], who: int) -> None:
    """All stop after the same step with a checkpoint and no test; the resumed run equals an uninterrupted one."""
    reference, outcomes = whole[2]

    def asked(world: World) -> Outcome:
        return train(Tiny(), HOW, world=world, folder=tmp_path, stop=lambda: world.rank == who)

    stopped = sl.simulate(asked, ranks=2).results
    assert stopped[0] == stopped[1]
    assert (stopped[0].stopped_by, stopped[0].test, stopped[0].steps) == ("signal", None, 1)
    assert latest(RunFolder(tmp_path).checkpoints) == 1
    assert read_log(tmp_path)[-1]["metadata"]["status"] == "aborted"
    resumed = Tiny()
    found = run(resumed, 2, HOW, folder=tmp_path, resume=True)
    assert_same(resumed, reference, 2)
    assert found[0].test == outcomes[0].test
    assert [line["key"] for line in read_log(tmp_path)].count("run_start") == 2


def test_a_stop_between_epochs(tmp_path: Path, whole: dict[int, tuple[Tiny, list[Outcome]]]) -> None:
    """The run is stopped after the second epoch of 7 steps; the resumed run trains the third."""
    workload = Tiny()

    def asked(world: World) -> Outcome:
        return train(workload, HOW, world=world, folder=tmp_path, stop=lambda: workload.losses[world.rank] >= 14)

    stopped = sl.simulate(asked, ranks=2).results
    assert (stopped[0].stopped_by, stopped[0].steps, stopped[0].epochs) == ("signal", 14, 2)
    resumed = Tiny()
    run(resumed, 2, HOW, folder=tmp_path, resume=True)
    assert resumed.losses == {0: 7, 1: 7}
    assert_same(resumed, whole[2][0], 2)


def test_a_finished_run_is_not_continued(tmp_path: Path) -> None:
    first = run(Tiny(), 2, HOW, folder=tmp_path)
    again = Tiny()
    second = run(again, 2, HOW, folder=tmp_path, resume=True)
    assert again.losses == {}, "no step was taken"
    assert (second[0].test, second[0].steps, second[0].seconds) == (first[0].test, first[0].steps, first[0].seconds)


def test_a_reached_target_is_not_trained_again(tmp_path: Path) -> None:
    how = Settings(epochs=200, target=0.7)
    first = run(Tiny(), 2, how, folder=tmp_path)
    again = Tiny()
    second = run(again, 2, how, folder=tmp_path, resume=True)
    assert (again.losses, second[0].stopped_by) == ({}, "target")
    assert second[0].time_to_target == first[0].time_to_target
    further = run(Tiny(), 2, Settings(epochs=200, target=0.95), folder=tmp_path, resume=True)
    assert further[0].steps > first[0].steps
    assert further[0].time_to_target is not None
    assert first[0].time_to_target is not None
    assert further[0].time_to_target > first[0].time_to_target, "it is the new target's"


def test_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Within an epoch from 2 ranks to 3: every sample is used once, and steps have more samples."""
    with pytest.raises(RuntimeError, match="pulled the plug"):
        run(Tiny(watcher=crash_at(5)), 2, HOW, folder=tmp_path)
    found = run(Tiny(), 3, HOW, folder=tmp_path, resume=True)
    # 3 steps of 8, then ⌈26 / 12⌉ for the rest of the epoch, then two epochs of 5.
    assert (found[0].steps, found[0].samples, found[0].epochs) == (3 + 3 + 10, 150, 3)


def test_from_another_folder(tmp_path: Path, whole: dict[int, tuple[Tiny, list[Outcome]]]) -> None:
    """From the run's folder, its checkpoints, or one checkpoint; only the new folder is written to."""
    with pytest.raises(RuntimeError, match="pulled the plug"):
        run(Tiny(watcher=crash_at(8)), 2, HOW, folder=tmp_path / "a")
    before = sorted((tmp_path / "a").rglob("*"))
    (newest,) = (tmp_path / "a" / "checkpoints").glob("step-00000006*")
    for number, source in enumerate((tmp_path / "a", newest.parent, newest)):
        resumed = Tiny()
        run(resumed, 2, HOW, folder=tmp_path / f"b{number}", resume=source)
        assert_same(resumed, whole[2][0], 2)
    assert sorted((tmp_path / "a").rglob("*")) == before


def test_a_resumed_run_has_its_own_trace(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="pulled the plug"):
        run(Tiny(watcher=crash_at(5)), 2, HOW, folder=tmp_path, trace=True)
    run(Tiny(), 2, HOW, folder=tmp_path, trace=True, resume=True)
    assert {path.name for path in tmp_path.glob("trace-*")} == {
        f"trace-rank{rank}{rest}.json" for rank in range(2) for rest in ("", "-from-step-3")
    }


def test_checkpoint_every_0_saves_nothing(tmp_path: Path) -> None:
    run(Tiny(), 2, Settings(epochs=1, checkpoint_every=0), folder=tmp_path)
    assert not RunFolder(tmp_path).checkpoints.exists()


def test_nothing_to_resume(tmp_path: Path) -> None:
    assert run(Tiny(), 2, Settings(epochs=1), folder=tmp_path / "new", resume=True)[0].epochs == 1, "it begins"
    with pytest.raises(IncompatibleError, match=r"there is no checkpoint in .*nowhere"):
        run(Tiny(), 2, HOW, folder=tmp_path / "b", resume=tmp_path / "nowhere")
    with pytest.raises(SpecError, match="give folder="):
        run(Tiny(), 2, HOW, resume=True)


def test_train_uses_the_current_world() -> None:
    def one(world: World) -> bool:
        train(Tiny(), Settings(epochs=1))
        return current_world() is world

    assert sl.simulate(one, ranks=2).results == (True, True)
