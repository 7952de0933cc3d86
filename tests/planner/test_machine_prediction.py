"""`syncline plan profile.json --machine machine.json`: plans by what was measured, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from syncline.bench.machine import MachinePlan
from syncline.cli.main import main
from syncline.cli.placement import Placement
from syncline.errors import SpecError
from syncline.launch.programs import Host
from syncline.launch.start import Job
from syncline.planner.limits import codec_sentence
from syncline.planner.machine_prediction import MachinePredictor
from syncline.planner.plans import TrainingPlan
from syncline.planner.run_prediction import predict_run
from tests.planner.machines import ONEBIT, exchanges_of, machine_of, profile_of

MACHINE = machine_of(
    4, cores=2, lab=True, compute_contention=2.0, copy_contention=2.0, codecs=(ONEBIT,), memory_bytes=4e9
)
SHAPES = [(300, 400)] * 4


def test_plan_is_predicted_from_profile_and_machine() -> None:
    predictor = MachinePredictor(profile_of(SHAPES), MACHINE)
    step = predictor.predict(TrainingPlan(data=4, micro_batch=8, optimizer="momentum"))
    run = predict_run(profile_of(SHAPES), MACHINE, reads_data=True)
    assert step.seconds == pytest.approx(run.seconds)
    assert step.parts["input"] == pytest.approx(2 * 8 / 4000.0)
    assert step.memory.weights == step.memory.optimizer == 4 * 4 * 120_000
    accumulated = predictor.predict(TrainingPlan(data=4, micro_batch=8, micro_batches=3, optimizer="momentum"))
    assert accumulated.seconds - step.seconds == pytest.approx(2 * (step.parts["compute"] + step.parts["input"]))
    adam = predictor.predict(TrainingPlan(data=4, micro_batch=8, optimizer="adam"))
    assert adam.parts["optimizer"] == pytest.approx(step.parts["optimizer"] * 28 / 20)


def test_replicated_pipeline_reduces_its_stages() -> None:
    predictor = MachinePredictor(profile_of(SHAPES), MACHINE)
    found = predictor.predict(TrainingPlan(pipeline=2, data=2, micro_batch=8, micro_batches=4, optimizer="momentum"))
    reduced = predict_run(profile_of([(600, 400)]), MACHINE, workers=2).parts["reduction"]
    assert found.parts["reduction"] == pytest.approx(reduced, rel=0.02)
    assert found.parts["bubble"] > 0


def test_faster_network_shortens_the_exchange() -> None:
    predictor = MachinePredictor(profile_of(SHAPES), MACHINE)
    plan = TrainingPlan(data=4, micro_batch=8, optimizer="momentum")
    cluster = predictor.cluster
    levels = tuple(replace(level, bandwidth=4 * level.bandwidth) for level in cluster.levels)
    faster = predictor.on(replace(cluster, levels=levels)).predict(plan)
    assert faster.parts["reduction"] < 0.5 * predictor.predict(plan).parts["reduction"]
    with pytest.raises(SpecError, match="weights in shards"):
        predictor.predict(replace(plan, strategy="fsdp"))


@pytest.mark.parametrize(("dense_s", "verdict"), [(0.5, "pays"), (0.02, "does not pay")])
def test_the_sentence_about_a_codec_agrees_with_the_steps(dense_s: float, verdict: str) -> None:
    """An exchange without a codec works beside the network too: Python and copies."""
    dense = exchanges_of("allreduce", "", [dense_s, dense_s, dense_s])
    machine = replace(MACHINE, exchanges=(*dense, *exchanges_of("allreduce", "onebit", [0.2, 0.2, 0.2])))
    predictor = MachinePredictor(profile_of(SHAPES), machine)
    plan = TrainingPlan(data=4, micro_batch=8, optimizer="momentum")
    without, encoded = (predictor.predict(replace(plan, codec=codec)).seconds for codec in (None, "onebit"))
    assert (encoded < without) == (verdict == "pays")
    sentence = codec_sentence(predictor, predictor.predict(plan), "onebit")
    assert f"onebit {verdict} here" in sentence
    assert ("saves" in sentence.rpartition("communication")[2]) == (verdict == "pays")


def test_command_ranks_plans_and_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, machine = str(tmp_path / "profile.json"), str(tmp_path / "machine.json")
    profile_of(SHAPES).write(profile)
    rows = exchanges_of("allreduce", "onebit", [0.01, 0.011, 0.02])
    replace(MACHINE, exchanges=rows).write(machine)
    assert main(["plan", profile, "--machine", machine, "--batch", "32", "--codec", "onebit"]) == 0
    told = capsys.readouterr().out
    assert "allreduce on 4, micro-batch 8, onebit" in told
    assert "pipeline(4, microbatches=" in told
    assert "the speed of codecs is estimated" not in told
    for words, refusal in (
        ([profile], "one of them"),
        ([profile, "--machine", machine, "--cluster", "1 hosts x 4 a100"], "one of them"),
        (["--model", "vgg(16)", "--machine", machine], "--machine needs a profile"),
        ([profile, "--machine", machine, "--batch", "32", "--codec", "ternary"], "ternary was not measured"),
    ):
        assert main(["plan", *words]) == 2
        assert refusal in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--measure", "here"], Placement(2)),
        (["--measure", "here", "-n", "4"], Placement(4)),
        (["--hosts", "a:2,b:2"], Placement(4, (Host("a", 2), Host("b", 2)))),
        (["--lab", "4@100mbit"], Placement(4, lab=(4, "100mbit"))),
    ],
)
def test_measuring_first_gives_the_plans_of_the_measurement(
    words: list[str],
    place: Placement,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The bench is started where the options say, with the codecs that are asked for; its file is read and removed."""
    profile = str(tmp_path / "profile.json")
    profile_of(SHAPES).write(profile)
    written: list[Path] = []

    def run(placement: Placement, job: Job, **_: object) -> int:
        assert placement == place
        module, name, options = job.target
        assert (module, name) == ("-m", "syncline.bench.machine")
        plan = MachinePlan(**json.loads(options))
        assert list(plan.codecs) == ["onebit"]
        written.append(Path(plan.out))
        assert (tmp_path in written[0].parents) == bool(placement.hosts), "a folder that all hosts see"
        replace(MACHINE, exchanges=exchanges_of("allreduce", "onebit", [0.01, 0.011, 0.02])).write(plan.out)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Placement, "run", run)
    assert main(["plan", profile, *words, "--batch", "32", "--codec", "onebit"]) == 0
    assert "allreduce on 4, micro-batch 8, onebit" in capsys.readouterr().out
    assert not written[0].exists()
    monkeypatch.setattr(Placement, "run", lambda *_, **__: 3)
    assert main(["plan", profile, *words, "--batch", "32", "--codec", "onebit"]) == 2
    assert "ended with exit code 3" in capsys.readouterr().err
