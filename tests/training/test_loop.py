"""The training loop on simulated ranks: counts, files, ends."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.errors import DivergedError, IncompatibleError, SpecError
from syncline.events import read_log
from syncline.training.loop import Outcome, train
from syncline.training.settings import Settings
from syncline.workloads import build
from syncline.world import World
from tests.training.tiny import Tiny


def run(workload: Tiny, ranks: int, settings: Settings, **options: Any) -> list[Outcome]:
    return list(sl.simulate(lambda world: train(workload, settings, world=world, **options), ranks=ranks).results)


def logged(folder: Path, key: str) -> list[Any]:
    return [line["value"] for line in read_log(folder) if line["key"] == key]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("collective", ["ring", "auto"])
def test_every_rank_has_the_same_outcome(ranks: int, collective: str) -> None:
    """50 samples in steps of 4·k: with three ranks, one has no data in the last step of an epoch."""
    workload = Tiny()
    outcomes = run(workload, ranks, Settings(epochs=3, collective=collective, warmup=1, decay="cosine"))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    (found,) = set(outcomes)
    assert found.steps == 3 * math.ceil(50 / (4 * ranks))
    assert (found.samples, found.epochs, found.stopped_by) == (150, 3, "epochs")
    assert found.test is not None
    assert 0.5 < found.test <= 1
    learned = [name for name, _ in workload.models[0].named_parameters()]
    for rank in range(1, ranks):
        for name in learned:
            assert torch.equal(workload.weights(0)[name], workload.weights(rank)[name]), f"{name} of rank {rank}"


def test_a_global_batch_does_not_depend_on_workers() -> None:
    """Micro-batches of four on one to three workers: the same steps, and the same loss."""
    settings = Settings(epochs=1, global_batch=50, batch=4, collective="ring")
    found = [
        sl.simulate(lambda world: train(build("regression"), settings, world=world), ranks=ranks).results[0]
        for ranks in (1, 2, 3)
    ]
    assert found[0].steps == math.ceil(found[0].samples / 50)
    for other in found[1:]:
        assert (other.steps, other.samples) == (found[0].steps, found[0].samples)
        assert other.test == pytest.approx(found[0].test, rel=1e-3)


def test_the_log_has_the_events_of_a_run(tmp_path: Path) -> None:
    run(Tiny(), 2, Settings(epochs=2, batch=5, scaling="linear", seed=3), folder=tmp_path / "run")
    lines = read_log(tmp_path / "run")
    keys = [line["key"] for line in lines]
    story = [key for key in keys if key.endswith(("_start", "_stop"))]
    epoch = ["epoch_start", "epoch_stop", "eval_start", "eval_stop"]
    assert story == ["run_start", *epoch, *epoch, "run_stop"]
    kinds = {line["key"]: line["event_type"] for line in lines}
    assert (kinds["run_start"], kinds["run_stop"], kinds["seed"]) == ("INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME")
    once = {line["key"]: line["value"] for line in lines}
    assert once["seed"] == 3
    assert once["global_batch_size"] == 10
    assert once["opt_base_learning_rate"] == pytest.approx(0.2)
    assert (once["sl_strategy"], once["sl_codec"], once["sl_workload"]) == ("allreduce", None, "tiny")
    assert once["train_samples"] == 50
    assert once["sl_comm_bytes_wire"] > 0
    assert 0 <= once["sl_test_accuracy"] <= 1
    assert {"sl_comm_bytes_logical", "sl_comm_seconds", "sl_comm_exposed_seconds", "sl_data_wait_seconds"} < set(keys)
    assert len(logged(tmp_path / "run", "eval_accuracy")) == len(logged(tmp_path / "run", "train_loss")) == 2
    assert lines[-1]["metadata"] == {"status": "success", "stopped_by": "epochs", "step": 10}
    assert [line["metadata"]["step"] for line in lines if line["key"] == "epoch_stop"] == [5, 10]
    assert "sl_time_to_target_seconds" not in keys, "there was no target"


def test_config_and_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_KEY", "do not tell")
    run(Tiny(), 2, Settings(epochs=1, collective="auto"), folder=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["workload"], config["workers"], config["batch"], config["samples_a_step"]) == ("tiny", 2, 4, 8)
    assert config["learning_rate"] == 0.1
    assert config["run"]["strategy"] == "allreduce"
    assert config["run"]["collectives_chosen"], "auto has chosen by the end"
    system = json.loads((tmp_path / "system.json").read_text())
    assert system["world"]["size"] == 2
    assert system["world"]["launcher"] == "sl.simulate"
    assert system["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert "do not tell" not in (tmp_path / "system.json").read_text()


SUMMARY: dict[str, Any] = {
    "status": "success",
    "stopped_by": "epochs",
    "error": None,
    "lost": {},
    "workload": "tiny",
    "workers": 2,
    "seed": 3,
    "strategy": "allreduce",
    "codec": None,
    "collective": "ring",
    "metric": "accuracy",
    "target": 0.999,
    "target_reached": False,
    "time_to_target_seconds": None,
    "epochs": 2,
    "steps": 14,
    "samples": 100,
}


def test_a_summary_for_scripts(tmp_path: Path) -> None:
    settings = Settings(epochs=2, seed=3, target=0.999, collective="ring")
    (found, _) = run(Tiny(), 2, settings, folder=tmp_path, seconds_a_sample=0.01)
    told = json.loads((tmp_path / "summary.json").read_text())
    assert {key: told[key] for key in SUMMARY} == SUMMARY
    assert (told["test"], told["validation"]) == (found.test, found.validation)
    assert told["training_seconds"] == found.seconds > 0
    assert told["elapsed_seconds"] == found.elapsed > found.seconds
    assert told["bytes_logical"] == told["bytes_wire"] == logged(tmp_path, "sl_comm_bytes_wire")[0]
    assert Path(told["folder"]) == tmp_path
    assert Path(told["log"]) == tmp_path / "log.jsonl"
    assert Path(told["checkpoint"]) == tmp_path / "checkpoints" / "step-00000014"
    stopped = run(Tiny(), 2, Settings(epochs=9, seed=3), folder=tmp_path, resume=True, stop=lambda: True)
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (told["status"], told["stopped_by"], told["test"]) == ("aborted", "signal", None)
    assert told["steps"] == stopped[0].steps


def test_no_files_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(Tiny(), 2, Settings(epochs=1))
    assert list(tmp_path.iterdir()) == []


def test_it_stops_at_the_target(tmp_path: Path) -> None:
    (found, _) = run(Tiny(), 2, Settings(epochs=200, target=0.9), folder=tmp_path)
    assert found.stopped_by == "target"
    assert found.validation is not None
    assert found.validation >= 0.9
    assert found.epochs < 200
    assert found.time_to_target is not None
    assert 0 < found.seconds <= found.time_to_target <= found.elapsed
    assert logged(tmp_path, "sl_time_to_target_seconds") == [found.time_to_target]
    accuracies = logged(tmp_path, "eval_accuracy")
    assert accuracies[-1] == found.validation
    assert all(accuracy < 0.9 for accuracy in accuracies[:-1])


@pytest.mark.parametrize("steps", [1, 6, 7, 10])
def test_it_stops_after_the_given_steps(steps: int) -> None:
    """Within an epoch, at its end (7 of 7), and in the next one. There are as many epochs as the steps need."""
    (found, _) = run(Tiny(), 2, Settings(steps=steps))
    assert (found.steps, found.stopped_by) == (steps, "epochs" if steps == 7 else "steps")
    assert found.epochs == steps // 7
    assert found.samples == (50 if steps >= 7 else 0) + 8 * (steps % 7)
    assert found.test is not None


def test_another_seed_gives_another_result() -> None:
    first, again, other = Tiny(), Tiny(), Tiny()
    run(first, 2, Settings(epochs=1))
    run(again, 2, Settings(epochs=1))
    run(other, 2, Settings(epochs=1, seed=1))
    assert same(first.weights(), again.weights())
    assert not same(first.weights(), other.weights())


def test_traces_of_all_ranks(tmp_path: Path) -> None:
    run(Tiny(), 2, Settings(epochs=1), folder=tmp_path, trace=True)
    for rank in range(2):
        lines = json.loads((tmp_path / f"trace-rank{rank}.json").read_text())
        threads = {line["tid"]: line["args"]["name"] for line in lines if line["name"] == "thread_name"}
        lanes: dict[str, set[str]] = {}
        for line in lines:
            if line["ph"] == "X":
                lanes.setdefault(threads[line["tid"]].split()[0], set()).add(line["name"])
        assert {"forward", "backward", "update", "evaluation"} <= lanes["compute"]
        assert "next batch" in lanes["data"]
        assert any(name.startswith("bucket 0") for name in lanes["communication"])
        assert {line["pid"] for line in lines} == {rank}
        assert sum(line["name"] == "forward" for line in lines) == 7
        assert min(line["ts"] for line in lines if "ts" in line) >= -1e3, "after the shared zero"


def test_tensorboard_files(tmp_path: Path) -> None:
    run(Tiny(), 2, Settings(epochs=1), folder=tmp_path, tensorboard=True)
    (written,) = (tmp_path / "tensorboard").iterdir()
    assert written.stat().st_size > 100


def test_a_failure_is_in_the_log(tmp_path: Path) -> None:
    def fail(number: int) -> None:
        if number == 4:
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        run(Tiny(watcher=fail), 1, Settings(), folder=tmp_path)
    last = read_log(tmp_path)[-1]
    assert last["key"] == "run_stop"
    assert last["metadata"] == {"status": "aborted", "error": "ValueError: no more"}
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (told["status"], told["error"], told["stopped_by"]) == ("aborted", "ValueError: no more", None)
    assert (told["steps"], told["checkpoint"]) == (3, None)


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    run(Tiny(), 2, Settings(epochs=1), folder=tmp_path)
    before = (tmp_path / "log.jsonl").read_bytes()
    with pytest.raises(IncompatibleError, match="holds a run already: continue it with --resume auto"):
        run(Tiny(), 2, Settings(epochs=1), folder=tmp_path)
    assert (tmp_path / "log.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch": 0}, "batch 0: at least 1"),
        ({"epochs": 0}, "epochs 0: at least 1"),
        ({"steps": -1}, "steps -1: at least 1"),
        ({"checkpoint_every": -5}, "checkpoint-every -5: at least 0"),
        ({"warmup": -1.0}, "warmup -1.0: a number of epochs"),
        ({"warmup": float("nan")}, "warmup nan"),
        ({"decay": "cosinus"}, "unknown decay 'cosinus'; did you mean 'cosine'"),
        ({"scaling": "liner"}, "unknown rule 'liner' .* did you mean 'linear'"),
        ({"learning_rate": -0.1}, "-0.1"),
        ({"seed": -1}, "seed -1"),
        ({"target": 1.5}, "target 1.5 cannot be: tiny is judged by accuracy"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Settings(**settings).resolved(Tiny(), 1)


def test_warm_up_begins_at_the_rate_of_one_worker(tmp_path: Path) -> None:
    """Four workers with linear scaling: the first of 4 steps has a quarter of the rate; without scaling, a tenth."""
    seen: dict[str, list[float]] = {}
    for scaling in ("linear", "none"):
        workload = Tiny(samples=16)
        rates = seen.setdefault(scaling, [])

        def note(world: World, workload: Tiny = workload, scaling: str = scaling, rates: list[float] = rates) -> None:
            optimizer = workload.optimizer(workload.model(), Settings(scaling=scaling).resolved(workload, 4).rate(4))
            settings = Settings(scaling=scaling, warmup=4).resolved(workload, 4)
            scheduler = settings.schedule(optimizer, 4, epoch_steps=1, total_steps=8)
            assert scheduler is not None
            for _ in range(6):
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                scheduler.step()

        sl.simulate(note, ranks=1)
    assert seen["linear"] == pytest.approx([0.1, 0.175, 0.25, 0.325, 0.4, 0.4])
    assert seen["none"] == pytest.approx([0.01, 0.0325, 0.055, 0.0775, 0.1, 0.1])


def test_evaluate_every_steps(tmp_path: Path) -> None:
    """13 steps per epoch on one worker: the interval spans epochs, and the last step is evaluated too."""
    run(Tiny(), 1, Settings(epochs=2, evaluate_every=5), folder=tmp_path)
    lines = [line for line in read_log(tmp_path) if line["key"] == "sl_evaluation"]
    assert [line["metadata"]["step"] for line in lines] == [5, 10, 15, 20, 25, 26]
    assert [line["metadata"]["epoch_num"] for line in lines] == [1, 1, 2, 2, 2, 2]
    assert [round(line["value"]["epochs"], 2) for line in lines] == [0.4, 0.8, 1.16, 1.56, 1.96, 2.0]
    for ranks in (2, 3):  # where some have nothing in an epoch's last step
        found = run(Tiny(), ranks, Settings(epochs=3, evaluate_every=2))
        assert all(outcome == found[0] for outcome in found)


def test_evaluations_after_the_target(tmp_path: Path) -> None:
    settings = Settings(epochs=9, evaluate_every=2, target=0.6, evaluations_after=3)
    (outcome,) = run(Tiny(), 1, settings, folder=tmp_path)
    assert outcome.stopped_by == "target"
    values = [line["value"] for line in read_log(tmp_path) if line["key"] == "sl_evaluation"]
    hit = next(number for number, value in enumerate(values) if value["metric"] >= 0.6)
    assert len(values) == hit + 1 + 3
    assert outcome.time_to_target == values[hit]["elapsed"]


def test_training_mode_after_an_evaluation_within_an_epoch() -> None:
    workload = Tiny()
    modes: list[bool] = []
    workload.watcher = lambda _: modes.append(workload.models[0].training)
    run(workload, 1, Settings(epochs=1, evaluate_every=3))
    assert modes == [True] * 13


def test_momentum_is_passed_to_the_optimizer(tmp_path: Path) -> None:
    run(Tiny(), 1, Settings(epochs=1, momentum=0.25), folder=tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["optimizer"]["momentum"] == 0.25
    with pytest.raises(SpecError, match="AdamW has no such setting"):
        run_one("stdlib(model='rnn')", Settings(steps=1, momentum=0.5))
    with pytest.raises(SpecError, match="below 1"):
        run(Tiny(), 1, Settings(momentum=1.0))


def run_one(workload: str, settings: Settings) -> Outcome:
    found = sl.simulate(lambda world: train(build(workload), settings, world=world), ranks=1).results[0]
    assert isinstance(found, Outcome)
    return found


def test_computing_takes_virtual_time_and_hides_communication(tmp_path: Path) -> None:
    """The slow rank computes, the other one waits for it."""
    network = sl.Network(latency=1e-5, bandwidth=1e7, slow={1: 3.0})
    settings = Settings(epochs=4, batch=5, collective="ring")
    options: dict[str, Any] = {"folder": tmp_path, "seconds_a_sample": 0.1, "stop": lambda: False}
    sl.simulate(lambda world: train(Tiny(), settings, world=world, **options), ranks=2, network=network)
    lines = read_log(tmp_path)
    found = next(line["value"] for line in lines if line["key"] == "sl_phases")
    assert found["compute"] == pytest.approx(100 * 0.1, rel=0.1), "of rank 0: half of 4 epochs of 50"
    assert found["exposed"] > found["compute"], "it waits for the slow one"
    told = [line["value"] for line in lines if line["key"] == "sl_ranks"]
    assert told
    for value in told:
        fast, slow = value["compute"]
        assert slow == pytest.approx(3 * fast, rel=0.01)


def test_the_prediction_is_in_config_json(tmp_path: Path) -> None:
    run(Tiny(), 2, Settings(epochs=1, collective="ring"), folder=tmp_path, predict=True)
    found = json.loads((tmp_path / "config.json").read_text())["predicted"]
    assert found["communication"] > 0
    assert found["codec"] == 0


def test_a_nan_loss_ends_the_run() -> None:
    """Also if the strategy does not check the gradients."""

    class Broken(Tiny):
        def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return super().loss(model, batch) + (math.inf if model.training else 0.0)

    with pytest.raises(DivergedError, match="the loss of rank 0 is inf after 13 steps"):
        run(Broken(), 1, Settings(epochs=2))
    (outcome,) = run(Broken(), 1, Settings(epochs=2, check_finite=False))
    assert outcome.epochs == 2


def test_a_run_that_diverges_at_once_has_a_log(tmp_path: Path) -> None:
    """Also after the steps that compile the kernels of a codec, which have no log."""

    class Broken(Tiny):
        def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return super().loss(model, batch) * math.nan

    settings = Settings(epochs=1, codec="quantize(4)")
    with sl.init() as world, pytest.raises(DivergedError):
        train(Broken(), settings, world=world, folder=tmp_path, rehearsed=True)
    stop = [line for line in read_log(tmp_path) if line["key"] == "run_stop"]
    assert stop[0]["metadata"]["status"] == "aborted"
