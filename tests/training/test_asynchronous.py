"""Asynchronous runs on the simulator: steps, evaluations, lost workers, checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.errors import DivergedError, PeerLostError, SpecError
from syncline.events import read_log
from syncline.training.control_state import RoundCounter
from syncline.training.loop import train
from syncline.training.run_state import Outcome
from syncline.training.settings import Settings
from syncline.training.stragglers import Slow, parse_slow
from syncline.transports.faults import Kill
from syncline.world import Simulation, World, current_world
from tests.hunting import seeds
from tests.training.asynchronous_strategy import Common, PlainAsynchronous
from tests.training.tiny import Tiny

PACE = 0.01


def simulate(
    settings: Settings,
    ranks: int,
    *,
    workload: Tiny | None = None,
    latency: float = 0.0,
    faults: Any = (),
    seed: int = 0,
    timeout: float = 300.0,
    **options: Any,
) -> tuple[Simulation, Common]:
    common = Common(ranks)
    strategy = PlainAsynchronous(common, latency, share=1 / ranks)
    chosen = workload or Tiny()
    options = {"seconds_a_sample": PACE, **options}

    def work(world: World) -> Outcome:
        return train(chosen, settings, world=world, strategy=strategy, **options)

    return sl.simulate(work, ranks=ranks, faults=faults, seed=seed, timeout=timeout), common


def events(folder: Path, key: str) -> list[dict[str, Any]]:
    return [line for line in read_log(folder) if line["key"] == key]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", seeds(1, every=3))
def test_each_worker_takes_its_own_steps(ranks: int, seed: int) -> None:
    """50 samples in rounds of 4·k: in the last round of an epoch, one of three ranks or two of four have no data."""
    found, common = simulate(Settings(epochs=3), ranks, seed=seed, latency=1e-3)
    rounds = 3 * math.ceil(50 / (4 * ranks))
    for outcome in found.results:
        assert (outcome.steps, outcome.epochs, outcome.stopped_by) == (rounds, 3, "epochs")
        assert outcome.samples == 150
        assert outcome.test is not None
        assert outcome.test == found.results[0].test
        assert outcome.validation == found.results[0].validation
    assert common.finished == set(range(ranks))
    assert RoundCounter(50, 4 * ranks, ranks).rounds(common.steps) == rounds * ranks


@pytest.mark.parametrize("steps", [1, 6, 7, 10])
def test_a_run_ends_after_the_steps_of_each_worker(steps: int) -> None:
    found, common = simulate(Settings(steps=steps), 2)
    assert common.steps == [steps, steps]
    assert {outcome.stopped_by for outcome in found.results} == {"epochs" if steps == 7 else "steps"}


def test_sample_counts_follow_from_steps() -> None:
    """Rounds of 8 of 50 samples: seven per epoch. The last one has two samples, one for each of two workers."""
    tally = RoundCounter(50, 8, 2)
    assert tally.samples([7, 7]) == 50
    assert tally.samples([7, 0]) == 25
    assert tally.samples([6, 1]) == 24 + 4
    three = RoundCounter(50, 12, 3)  # two in the last round: nothing for rank 2
    assert three.samples([5, 5, 4]) == 50
    assert three.rounds([5, 5, 4]) == 15
    assert three.rounds([6, 6, 5]) == 18


def test_the_log_is_that_of_a_run(tmp_path: Path) -> None:
    simulate(Settings(epochs=2, evaluate_every=3, seed=3), 2, folder=tmp_path, latency=1e-4)
    lines = read_log(tmp_path)
    story = [line["key"] for line in lines if line["key"] in ("run_start", "epoch_start", "epoch_stop", "run_stop")]
    assert story == ["run_start", *["epoch_start", "epoch_stop"] * 2, "run_stop"]
    assert [line["metadata"]["step"] for line in events(tmp_path, "epoch_stop")] == [7, 14]
    stamps = [line["seconds"] for line in lines]
    assert stamps == sorted(stamps)
    found = events(tmp_path, "sl_evaluation")
    steps = [line["metadata"]["step"] for line in found]
    assert steps == sorted(set(steps))
    assert [step // 3 for step in steps[:-1]] == [1, 2, 3, 4], "one for each multiple, none of them early"
    assert steps[-1] == 14
    assert found[-1]["value"]["samples"] == 100
    assert found[-1]["value"]["epochs"] == 2
    for line in found:
        assert 0 < line["value"]["elapsed"] <= line["seconds"] - events(tmp_path, "run_start")[0]["seconds"] + 1e-9
        assert line["value"]["trained"] <= line["value"]["elapsed"]
    assert lines[-1]["metadata"] == {"status": "success", "stopped_by": "epochs", "step": 14}
    assert events(tmp_path, "sl_steps")[0]["value"] == [14, 14]
    assert events(tmp_path, "sl_loose")[0]["value"] is True
    assert json.loads((tmp_path / "config.json").read_text())["loose"] is True
    told = events(tmp_path, "sl_phases")[0]["value"]
    whole = told.pop("elapsed")
    assert sum(told.values()) == pytest.approx(whole, rel=0.02), "the phases are all of the time"
    assert told["evaluation"] < 0.5 * whole


def test_staleness_is_counted(tmp_path: Path) -> None:
    simulate(Settings(epochs=2), 3, folder=tmp_path)
    *during, last = events(tmp_path, "sl_staleness_histogram")
    assert last["metadata"]["workers"] == 3
    assert sum(last["value"].values()) == 5 * 2 + 5 * 2 + 4 * 2, "every read of every worker"
    assert set(last["value"]) - {"0"}, "some were stale"
    assert all(line["metadata"]["workers"] == 1 for line in during)
    assert "sl_staleness_histogram" not in {line["key"] for line in lines_of_allreduce(tmp_path / "other")}, (
        "where nobody counts there is none"
    )


def lines_of_allreduce(folder: Path) -> list[dict[str, Any]]:
    sl.simulate(lambda world: train(Tiny(), Settings(epochs=1), world=world, folder=folder), ranks=2)
    return read_log(folder)


@pytest.mark.parametrize("seed", seeds(1, every=4))
def test_a_straggler_delays_no_other_worker(seed: int) -> None:
    """One worker is three times as slow for a while: the others end at the same time as without it."""
    alone, _ = simulate(Settings(epochs=4), 3, seed=seed)
    slow = [Slow(2, 3.0)]
    found, common = simulate(Settings(epochs=4), 3, seed=seed, slow=slow)
    first, _, third = found.results
    assert first.seconds == pytest.approx(alone.results[0].seconds)
    assert third.seconds == pytest.approx(3 * alone.results[2].seconds)
    assert common.steps == [20, 20, 16]
    passing, _ = simulate(Settings(epochs=4), 3, seed=seed, slow=[Slow(2, 3.0, start=0.1, stop=0.3)])
    late = passing.results[2].seconds - alone.results[2].seconds
    assert 0.1 < late < 0.2, "0.2 s at a third of the speed, to a layer"


def test_slowness_and_faults_of_the_simulator_multiply() -> None:
    network = sl.Network(slow={1: 2.0})
    strategy = PlainAsynchronous(Common(2))
    options: dict[str, Any] = {"seconds_a_sample": PACE, "slow": [Slow(1, 3.0)], "strategy": strategy}
    found = sl.simulate(lambda w: train(Tiny(), Settings(epochs=1), world=w, **options), ranks=2, network=network)
    assert found.results[1].seconds == pytest.approx(6 * found.results[0].seconds)


@pytest.mark.parametrize("seed", seeds(1, every=4))
@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_worker_is_not_waited_for(tmp_path: Path, seed: int, victim: int) -> None:
    found, common = simulate(
        Settings(epochs=4), 3, seed=seed, faults=[Kill(victim, at=0.25)], folder=tmp_path, latency=1e-4
    )
    assert found.killed == (victim,)
    assert found.results[victim] is None
    living = [found.results[rank] for rank in range(3) if rank != victim]
    assert {outcome.stopped_by for outcome in living} == {"epochs"}
    assert all(outcome.test is not None and outcome.steps == 20 for outcome in living)
    assert common.steps[victim] < 16
    assert str(victim) in events(tmp_path, "sl_lost")[0]["value"]
    assert read_log(tmp_path)[-1]["metadata"]["status"] == "success"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000020"], "of those that are left"


@pytest.mark.parametrize("seed", seeds(1, every=3))
def test_the_others_end_without_rank_0(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 had the evaluator: another worker evaluates instead, and detects the target."""
    found, common = simulate(Settings(epochs=4), 3, seed=seed, faults=[Kill(0, at=0.25)])
    assert common.steps[1:] == [20, 16]
    assert [outcome.stopped_by for outcome in found.results[1:]] == ["epochs", "epochs"]
    assert found.results[1].test is not None
    assert found.results[1].test == found.results[2].test
    assert "the evaluator is lost (it was killed" in caplog.text
    settings = Settings(epochs=500, target=0.9, evaluate_every=2)
    aimed, _ = simulate(settings, 3, seed=seed, faults=[Kill(0, at=0.25), Kill(1, at=0.5)])
    assert aimed.results[2].stopped_by == "target"


def test_an_evaluator_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's variable announces an evaluator process that does not exist."""
    monkeypatch.setattr("syncline.training.asynchronous.AsynchronousPolicy.has_evaluator_process", True)
    with pytest.raises(PeerLostError, match=r"waited 5 s for the evaluator process"):
        simulate(Settings(epochs=1), 2, timeout=5.0)


def test_a_silent_evaluator_is_replaced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its process starts and then freezes: after the timeout a worker tests the final weights."""
    monkeypatch.setattr("syncline.training.asynchronous.AsynchronousPolicy.has_evaluator_process", True)
    monkeypatch.setattr("syncline.training.asynchronous.AsynchronousPolicy.prepare", lambda self: None)
    found, _ = simulate(Settings(epochs=1), 2, timeout=5.0)
    assert all(outcome.test is not None for outcome in found.results)
    assert 5.0 < found.time < 10.0
    assert "rank 0 evaluates" in caplog.text


@pytest.mark.parametrize("when", [0.0, 0.2, 99.0])
def test_an_evaluator_that_was_killed_is_replaced(monkeypatch: pytest.MonkeyPatch, when: float) -> None:
    """Before the first step, in the middle, or after the last step: no worker waits for it."""

    def told(name: str, timeout: float) -> Callable[[], str | None]:
        now = current_world().runtime.now
        return lambda: "it was killed" if now() >= min(when, 1.5) else None

    monkeypatch.setattr("syncline.training.asynchronous.AsynchronousPolicy.has_evaluator_process", True)
    monkeypatch.setattr("syncline.training.asynchronous.watch_program", told)
    if when:  # its process was ready
        monkeypatch.setattr("syncline.training.asynchronous.AsynchronousPolicy.prepare", lambda self: None)
    found, _ = simulate(Settings(epochs=4), 2)
    assert all(outcome.test is not None and outcome.stopped_by == "epochs" for outcome in found.results)
    assert found.time < 5.0
    if when < 1.0:
        settings = Settings(epochs=500, target=0.9, evaluate_every=2)
        aimed, _ = simulate(settings, 2)
        assert {outcome.stopped_by for outcome in aimed.results} == {"target"}


@pytest.mark.parametrize("seed", seeds(1, every=3))
def test_the_target_stops_all(tmp_path: Path, seed: int) -> None:
    settings = Settings(epochs=500, target=0.9, evaluate_every=2, evaluations_after=2)
    found, common = simulate(settings, 3, seed=seed, folder=tmp_path, slow=[Slow(1, 4.0)])
    values = [line["value"] for line in events(tmp_path, "sl_evaluation")]
    hit = next(number for number, value in enumerate(values) if value["metric"] >= 0.9)
    assert len(values) == hit + 1 + 2, "two follow the hit, and nothing after those"
    for outcome in found.results:
        assert outcome.stopped_by == "target"
        assert outcome.time_to_target == values[hit]["elapsed"]
        assert outcome.test is not None
    assert events(tmp_path, "sl_time_to_target_seconds")[0]["value"] == values[hit]["elapsed"]
    assert max(common.steps) < 500 * 5


def test_evaluations_take_no_time_from_workers() -> None:
    """Evaluating twenty samples after every step takes longer than a step, and does not delay the workers."""
    often, _ = simulate(Settings(epochs=3, evaluate_every=1), 2)
    rarely, _ = simulate(Settings(epochs=3, evaluate_every=1000), 2)
    assert often.results[0].seconds == pytest.approx(rarely.results[0].seconds)


def test_a_stop_request_stops_all_workers(tmp_path: Path) -> None:
    calls = iter(range(10**6))
    found, common = simulate(Settings(epochs=100), 3, folder=tmp_path, stop=lambda: next(calls) > 20)
    assert {outcome.stopped_by for outcome in found.results} == {"signal"}
    assert {outcome.test for outcome in found.results} == {None}
    assert max(common.steps) < 20
    assert read_log(tmp_path)[-1]["metadata"]["status"] == "aborted"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("seed", seeds(1, every=3))
def test_a_stopped_run_resumes(tmp_path: Path, seed: int) -> None:
    """Each worker continues from its own position, also a straggler: each sample is read exactly once."""
    slow = [Slow(1, 3.0)]
    calls = iter(range(10**6))
    simulate(Settings(epochs=4), 2, seed=seed, folder=tmp_path, slow=slow, stop=lambda: next(calls) > 15)
    (saved,) = (tmp_path / "checkpoints").iterdir()
    workload = Tiny()
    found, common = simulate(
        Settings(epochs=4), 2, seed=seed, folder=tmp_path, slow=slow, resume=True, workload=workload
    )
    assert [outcome.steps for outcome in found.results] == [28, 28]
    assert common.steps == [28, 28]
    before = [28 - workload.losses[rank] for rank in range(2)]
    assert before[0] > before[1] > 0, "they were stopped at different steps"
    assert events(tmp_path, "sl_resumed")[0]["value"] == before[0]
    assert found.results[0].samples == 200
    assert saved.name == f"step-{before[0]:08}"


@pytest.mark.parametrize("ranks", [1, 3])
def test_resume_on_another_number_of_workers_uses_one_position(tmp_path: Path, ranks: int) -> None:
    """All continue from rank 0's position, because the straggler has another share of the samples now."""
    calls = iter(range(10**6))
    simulate(Settings(epochs=4), 2, folder=tmp_path, slow=[Slow(1, 3.0)], stop=lambda: next(calls) > 15)
    workload = Tiny()
    found, _ = simulate(Settings(epochs=4), ranks, folder=tmp_path, resume=True, workload=workload)
    begun = events(tmp_path, "sl_resumed")[0]["value"]
    assert {outcome.steps for outcome in found.results} == {found.results[0].steps}
    left = found.results[0].steps - begun
    assert all(left - workload.losses[rank] in (0, 1, 2) for rank in range(ranks)), "but for rounds without data"


def test_workers_wait_for_checkpoints_after_a_resume(tmp_path: Path) -> None:
    """The straggler was stopped behind the others: it does not wait for workers beyond a checkpoint."""
    slow, calls = [Slow(1, 3.0)], iter(range(10**6))
    how = Settings(epochs=4, checkpoint_every=2)
    simulate(Settings(epochs=4), 2, folder=tmp_path, slow=slow, stop=lambda: next(calls) > 15)
    found, _ = simulate(how, 2, folder=tmp_path, slow=slow, resume=True)
    assert found.time < 20.0, "nobody has waited for the timeout"
    begun = events(tmp_path, "sl_resumed")[0]["value"]
    told = [line["metadata"]["step"] for line in events(tmp_path, "sl_checkpoint")]
    assert told == [begun, *range(begun + 2 - begun % 2, 28 + 1, 2)]


@pytest.mark.parametrize("seed", seeds(1, every=3))
def test_workers_wait_for_checkpoints(tmp_path: Path, seed: int) -> None:
    """After every fifth step of each worker: the fast workers wait there, and nowhere else."""
    settings = Settings(epochs=2, checkpoint_every=5)
    simulate(settings, 3, seed=seed, folder=tmp_path, slow=[Slow(2, 3.0)], latency=1e-4)
    told = events(tmp_path, "sl_checkpoint")
    assert [line["metadata"]["step"] for line in told] == [5, 10]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000005", "step-00000010"]


@pytest.mark.parametrize("seed", seeds(1, every=6))
@pytest.mark.parametrize("at", [0.2, 0.35, 0.5])
def test_a_worker_killed_before_a_checkpoint_delays_none(tmp_path: Path, seed: int, at: float) -> None:
    settings = Settings(epochs=4, checkpoint_every=4)
    faults = [Kill(2, at=at)]
    found, _ = simulate(settings, 3, seed=seed, folder=tmp_path, faults=faults, slow=[Slow(2, 3.0)], latency=1e-4)
    assert found.killed == (2,)
    assert [outcome.steps for outcome in found.results[:2]] == [20, 20]


@pytest.mark.parametrize("seed", seeds(1, every=6))
def test_a_worker_stopped_before_a_checkpoint_delays_none(tmp_path: Path, seed: int) -> None:
    """The straggler is asked to stop while the others wait for it."""
    calls = iter(range(10**6))
    simulate(
        Settings(epochs=9, checkpoint_every=4),
        3,
        seed=seed,
        folder=tmp_path,
        slow=[Slow(seed % 3, 4.0)],
        latency=1e-4,
        stop=lambda: next(calls) > 6 + seed,
    )
    assert read_log(tmp_path)[-1]["metadata"]["stopped_by"] == "signal"
    assert (tmp_path / "checkpoints").exists()


def test_a_nan_loss_ends_the_run() -> None:
    class Broken(Tiny):
        def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return super().loss(model, batch) + (math.inf if model.training else 0.0)

    with pytest.raises(DivergedError, match=r"the loss of rank . is inf after"):
        simulate(Settings(epochs=20), 2, workload=Broken())


def test_an_error_of_the_evaluator_ends_the_run() -> None:
    class Blind(Tiny):
        def measures(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
            raise ValueError("cannot see")

    with pytest.raises(ValueError, match="cannot see"):
        simulate(Settings(epochs=20), 2, workload=Blind())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank=2", "does not say factor"),
        ("rank=2,factor=four", "factor='four' .* is no number"),
        ("rank=2,faktor=4", "did you mean 'factor'"),
        ("rank=2,rank=3,factor=4", "rank is there twice"),
        ("rank=1.5,factor=4", "no whole number"),
        ("rank=1,factor=-4", "above 0"),
        ("2", "write for example rank=2,factor=4"),
    ],
)
def test_invalid_slowness_is_refused(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_slow(text)


@pytest.mark.parametrize(
    ("slow", "pace", "words"),
    [
        ([Slow(1, 2.0)], None, "multiplies the seconds that a sample takes"),
        ([Slow(2, 2.0)], 0.1, "names no worker: there are 2, from 0 to 1"),
        ([Slow(1, 2.0, start=2.0, stop=1.0)], 0.1, "stop must be after start"),
        ([], -1.0, "-1.0 seconds a sample"),
    ],
)
def test_slowness_without_effect_is_refused(slow: list[Slow], pace: float | None, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        simulate(Settings(epochs=1), 2, slow=slow, seconds_a_sample=pace)
