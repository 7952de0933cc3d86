"""`syncline bench pipeline`: what it predicts, measures and refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from syncline.bench.pipeline_prediction import PipelineCosts, predict_pipeline
from syncline.cli import bench_pipeline
from syncline.cli.main import build_parser, main
from syncline.cli.placement import Placement
from syncline.parallel.boundary import HEADER_BYTES
from syncline.parallel.partition import LayerCost, ModelProfile, StagePartition
from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.schedules import build_schedule
from syncline.transports import Network
from tests.bench.test_bench import bench

SMALL = ("--width", "32", "--layers", "4", "--batch", "48")


def simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """The document of a simulated run, and what was printed."""
    command = ["bench", "pipeline", *SMALL, "--rounds", "1", "--turns", "2", *arguments]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    document: dict[str, Any] = json.loads((tmp_path / "out" / "pipeline.json").read_text())
    return document, capsys.readouterr().out


def test_simulated_schedules_take_what_was_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = ["1f1b", "gpipe", "zero_bubble", "interleaved", "zbv"]
    network = "network(latency=1e-6, bandwidth=1e10)"
    options = ("--schedule", ";".join(specs), "--simulate", network, "--microbatches", "4")
    document, printed = simulated(tmp_path, capsys, "-n", "2", *options)
    rows = {row["contender"]: row for row in document["results"]}
    assert [*rows] == [*specs, "one process", "data parallel"]
    for name in specs:
        own, row = rows[name]["pipeline"], rows[name]
        predicted = own["predicted"]
        assert own["peak_activations"] == predicted["peak_activations"]
        assert row["time"]["median"] == pytest.approx(predicted["step_s"], rel=0.05)
        assert own["bubble"]["median"] == pytest.approx(predicted["bubble"], abs=0.05)
        assert {action[1] for action in own["actions"]} == {action[1] for action in predicted["actions"]}
        cuts = {"interleaved": 3, "zbv": 2}.get(name, 1)  # between stages of different ranks
        message = HEADER_BYTES + 12 * 32 * 4  # 12 samples of 32 numbers
        assert sum(row["sent_bytes"]) == 2 * cuts * 4 * message + HEADER_BYTES + 4, "the last message has the loss"
    for name in ("one process", "data parallel"):
        assert rows[name]["time"]["median"] == pytest.approx(rows[name]["predicted_s"], rel=0.05)
    assert rows["gpipe"]["pipeline"]["peak_activations"] == [4, 4]
    assert re.search(r"data parallel ÷ \w+: [\d.]+ measured, [\d.]+ predicted", printed)
    assert max(row["difference"] for row in rows.values()) < 1e-5
    assert "as predicted, for each worker" in printed
    assert "those of one process" in printed
    picture = (tmp_path / "out" / "pipeline.svg").read_text()
    assert picture.count("predicted: ") == picture.count("measured: ")
    assert all(f"{name}, measured: " in picture for name in specs)


@pytest.mark.parametrize("options", [("--replicas", "3-1", "--stages", "layer2"), ("--replicas", "2"), ()])
def test_replicas(options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The workers of a stage, given or chosen; the last case has one worker for each of four stages."""
    document, _ = simulated(tmp_path, capsys, "-n", "4", *options, "--microbatches", "4", "--simulate", "1gbit")
    row = document["results"][0]
    own = row["pipeline"]
    assert own["replicas"] == {"3-1": [3, 1], "2": [2, 2]}.get(options[1] if options else "", [1, 1, 1, 1])
    assert own["peak_activations"] == own["predicted"]["peak_activations"]
    assert row["time"]["median"] == pytest.approx(own["predicted"]["step_s"], rel=0.25)
    assert row["difference"] < 1e-5
    parallel = next(row for row in document["results"] if row["contender"] == "data parallel")
    assert parallel["time"]["median"] == pytest.approx(parallel["predicted_s"], rel=0.15)


def test_pipedream_and_the_partition_of_pipedream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--schedule", "pipedream", "--stages", "auto", "--simulate", "1gbit")
    document, printed = simulated(tmp_path, capsys, "-n", "2", *options)
    own = document["results"][0]["pipeline"]
    assert own["peak_activations"] == own["predicted"]["peak_activations"]
    assert sum(own["replicas"]) == 2
    assert document["results"][0]["difference"] is None, "it updates the weights after each micro-batch"
    assert "pipedream" in printed


@pytest.mark.xdist_group("launch")
def test_real_steps_beside_torch(tmp_path: Path) -> None:
    printed = bench(tmp_path, "pipeline", *SMALL, "--against", "torch", "--rounds", "2", "--turns", "3")
    document = json.loads((tmp_path / "out" / "pipeline.json").read_text())
    rows = {row["contender"]: row for row in document["results"]}
    assert [*rows] == ["1f1b", "one process", "data parallel", "torch 1F1B"]
    assert {len(row["seconds"]) for row in rows.values()} == {6}
    assert rows["torch 1F1B"]["to_torch"]["median"] == 1
    own = rows["1f1b"]["pipeline"]
    assert own["peak_activations"] == own["predicted"]["peak_activations"] == [2, 1]
    assert own["predicted"]["step_s"] > 0
    assert max(row["difference"] for row in rows.values()) < 1e-5, "torch too trains as one process does"
    starts = {rank: min(start for each, _, start, _ in own["actions"] if each == rank) for rank in (0, 1)}
    assert 0 <= starts[0] < starts[1], "the clocks of both ranks agree"
    for words in ("÷ torch 1F1B", "profiled", "network: latency"):
        assert words in printed


COSTS = PipelineCosts(
    ModelProfile(
        layers=tuple(
            LayerCost(name=f"l{k}", forward_s=1.0, backward_s=2.0, activation_bytes=8, parameter_bytes=100)
            for k in range(4)
        ),
        batch_size=2,
    ),
    input_s=(0.0, 1.0, 1.0, 1.0),
    accumulate_s=0.0,
    update_s=4.0,
)
FAST = Network(latency=0.0, bandwidth=1e15)


def test_a_step_is_the_pipeline_and_the_update() -> None:
    """Two stages of two layers: (4 + 1) · (2 + 4) seconds, and two of the optimizer for half of the weights."""
    partition = StagePartition(("l2",), (1, 1))
    found = predict_pipeline(COSTS, PipelinePlacement(build_schedule("1f1b"), (1, 1)), partition, 4, FAST)
    assert (found.step_s, found.pipeline_s) == pytest.approx((32.0, 30.0))
    assert found.peak_activations == (2, 1)
    assert found.bubble == pytest.approx(1 / 5)
    split = predict_pipeline(COSTS, PipelinePlacement(build_schedule("zero_bubble"), (1, 1)), partition, 4, FAST)
    assert [(each.input_s, each.weight_s) for each in split.stages] == [(0.0, 4.0), (2.0, 2.0)]
    assert split.step_s < found.step_s


def test_replicas_reduce_their_weights_after_the_pipeline() -> None:
    """Stage 0 has two workers, which reduce 200 bytes at 100 bytes per second: 2 · 200 / 2 / 100 s."""
    partition, placement = StagePartition(("l2",), (2, 2)), PipelinePlacement(build_schedule("1f1b"), (2, 2))
    quick = predict_pipeline(COSTS, placement, partition, 4, FAST)
    costly = predict_pipeline(COSTS, placement, partition, 4, Network(latency=0.0, bandwidth=100.0))
    assert quick.step_s == pytest.approx(32.0)
    assert costly.step_s > quick.step_s + 2.0
    assert len(quick.peak_activations) == len(quick.update_s) == 4
    assert {each.rank for each in quick.actions} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--schedule", "gpip"], "did you mean 'gpipe'"),
        (["--schedule", ";"], "names none"),
        (["--batch", "100"], "take a multiple of 8"),
        (["-n", "3", "--batch", "512"], "take a multiple of 3"),
        (["-n", "1"], "at least 2 ranks"),
        (["--layers", "0"], "--layers 0"),
        (["--layers", "2", "-n", "4"], "at most 3 stages"),
        (["--microbatches", "0"], "--microbatches 0"),
        (["--turns", "0"], "--turns 0"),
        (["--model", "mpl"], "did you mean 'mlp'"),
        (["--stages", "3"], "change -n"),
        (["--stages", "layer9"], "layer9"),
        (["--stages", "layer0"], "stage 0 would be empty"),
        (["--schedule", "interleaved(chunks=2)", "--stages", "3"], "a multiple of 2"),
        (["--schedule", "zbv", "--stages", "auto"], "cannot use"),
        (["--replicas", "two"], "3-1 for two stages"),
        (["-n", "4", "--replicas", "3-2", "--stages", "2"], "change -n"),
        (["--replicas", "2", "--stages", "auto"], "leave --replicas out"),
        (
            ["-n", "4", "--schedule", "zero_bubble", "--replicas", "3-1", "--stages", "2", "--batch", "480"],
            "zero_bubble",
        ),
        (["--against", "ddp"], "the only baseline is torch"),
        (["--against", "torch", "--simulate", "1gbit"], "leave --simulate out"),
        (["-n", "4", "--against", "torch", "--replicas", "2"], "one for each worker"),
        (["-n", "4", "--against", "torch", "--microbatches", "2"], "--microbatches 4"),
        (["--simulate", "fast"], "network(latency="),
        (["--simulate", "1gbit", "--lab", "2@1gbit"], "exclude each other"),
        (["--lab", "2@fast"], "fast"),
    ],
)
def test_bad_input_is_a_sentence(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pipeline", *arguments]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told


def test_the_examples_of_the_help_are_accepted() -> None:
    lines = [line.split("  ") for line in str(bench_pipeline.__doc__).splitlines() if "syncline bench pipeline" in line]
    commands = [shlex.split(line[1])[2:] for line in lines if line[0] == ""]
    assert len(commands) == 7
    for words in commands:
        arguments = build_parser("bench").parse_args(["bench", *words])
        bench_pipeline.read_plan(arguments, Path("out")).check(Placement.read(arguments, default_ranks=2).ranks)


def test_options_of_other_tools_have_hints(capsys: pytest.CaptureFixture[str]) -> None:
    for option, instead in (("--chunks", "--microbatches"), ("--pp", "--stages"), ("--hidden-size", "--width")):
        with pytest.raises(SystemExit):
            main(["bench", "pipeline", option, "8"])
        assert f"write {instead}" in capsys.readouterr().err
