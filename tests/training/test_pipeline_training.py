"""`syncline train --pipeline`: the training loop with a model in stages, on simulated ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.events import read_log
from syncline.parallel.partition import StagePartition
from syncline.training.loop import Outcome, train
from syncline.training.settings import Settings
from syncline.workloads import VGG, TransformerLM
from syncline.world import World, current_world
from tests.training.tiny import Tiny


class Chain(Tiny):
    """Six layers without dropout and batch norm."""

    name = "chain"

    def model(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)]
            made = nn.Sequential(*layers, nn.Linear(8, 2)).double()
        self.models.setdefault(current_world().rank, made)
        return made

    def output_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets)

    def make_splits(self) -> Any:
        splits = super().make_splits()
        for split in vars(splits).values():
            split.tensors = (split.tensors[0].double(), split.tensors[1])
        return splits


def run(workload: Chain, ranks: int, settings: Settings, **options: Any) -> list[Outcome]:
    return list(sl.simulate(lambda world: train(workload, settings, world=world, **options), ranks=ranks).results)


def close(found: Chain, expected: Chain, ranks: int) -> None:
    """All ranks have the same weights as rank 0 of the other run."""
    for rank in range(ranks):
        for name, value in expected.weights(0).items():
            torch.testing.assert_close(found.weights(rank)[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("ranks", "stages", "schedule", "replicas"),
    [(4, "2", "1f1b(microbatches=2)", 2), (2, None, "zbv", 1), (4, "2,3,4", "gpipe", 1), (4, "1", "1f1b", 4)],
)
def test_it_trains_as_without_a_pipeline(ranks: int, stages: str | None, schedule: str, replicas: int) -> None:
    """50 samples in steps of 4 for each pipeline; the last one is short."""
    plain, split = Chain(), Chain()
    options: dict[str, Any] = {"epochs": 2, "scaling": "linear", "warmup": 1, "decay": "cosine"}
    expected = run(plain, replicas, Settings(**options))[0]
    outcomes = run(split, ranks, Settings(pipeline=schedule, stages=stages, **options))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert (outcomes[0].steps, outcomes[0].samples) == (expected.steps, expected.samples)
    assert (outcomes[0].test, outcomes[0].validation) == (expected.test, expected.validation)
    close(split, plain, ranks)


def test_stages_with_different_numbers_of_workers_leave_out_a_short_batch(tmp_path: Path) -> None:
    """Two workers have the first stage, so a step has eight samples, and 48 of 50 are trained in an epoch."""
    StagePartition(("3",), (2, 1)).write(tmp_path / "plan.json")
    workload = Chain()
    settings = Settings(steps=12, pipeline="1f1b(microbatches=2)", stages=str(tmp_path / "plan.json"))
    (found, *_) = run(workload, 3, settings)
    assert (found.steps, found.samples, found.epochs) == (12, 96, 2)
    settings = Settings(pipeline="1f1b", stages=str(tmp_path / "plan.json"), batch=40)
    with pytest.raises(IncompatibleError, match="whole batches, of 80 here"):
        run(Chain(), 3, settings)


def test_the_folder_says_how_the_model_was_split(tmp_path: Path) -> None:
    settings = Settings(epochs=1, pipeline="1f1b(microbatches=2)", stages="2,4", strategy="local(period=2)")
    run(Chain(), 6, settings, folder=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["pipeline"], config["stages"], config["samples_a_step"]) == ("1f1b(microbatches=2)", "2,4", 8)
    found = config["run"]["pipeline"]
    assert (found["cuts"], found["replicas"], found["micro_batches"]) == (["2", "4"], [2, 2, 2], 2)
    lines = {line["key"]: line["value"] for line in read_log(tmp_path)}
    assert lines["sl_pipeline"]["cuts"] == ["2", "4"]
    assert lines["sl_strategy"] == "local(period=2)"
    assert lines["global_batch_size"] == 8
    assert lines["sl_comm_bytes_wire"] > 0
    assert math.isfinite(lines["train_loss"])


@pytest.mark.parametrize(("ranks", "stages"), [(2, None), (4, "4"), (4, "2"), (1, None), (2, "plain")])
def test_it_resumes_with_another_number_of_stages(ranks: int, stages: str | None, tmp_path: Path) -> None:
    """Two epochs, of which the second has other stages or none: the same weights as in one run."""
    whole, first, second = Chain(), Chain(), Chain()
    plan = Settings(epochs=2, pipeline="1f1b(microbatches=2)", batch=10)
    run(whole, 2, plan)
    run(first, 2, Settings(epochs=1, pipeline="1f1b(microbatches=2)", batch=10), folder=tmp_path)
    batch = 5 if stages in ("2", "plain") else 10
    if stages == "plain":
        settings = Settings(epochs=2, batch=batch)
    else:
        settings = Settings(epochs=2, pipeline="1f1b(microbatches=2)", stages=stages, batch=batch)
    (found, *_) = run(second, ranks, settings, folder=tmp_path, resume=True)
    assert (found.steps, found.samples) == (10, 100)
    close(second, whole, ranks)


def test_it_continues_a_run_without_a_pipeline(tmp_path: Path) -> None:
    whole, first, second = Chain(), Chain(), Chain()
    run(whole, 1, Settings(epochs=2, batch=10))
    run(first, 2, Settings(epochs=1, batch=5), folder=tmp_path)
    run(second, 3, Settings(epochs=2, batch=10, pipeline="gpipe(microbatches=2)"), folder=tmp_path, resume=True)
    close(second, whole, 3)


@pytest.mark.parametrize("every", [1, 4])
def test_pipedream_logs_the_loss_of_the_step_before(every: int, tmp_path: Path) -> None:
    """No loss is there after the first step. That is no divergence."""
    settings = Settings(epochs=1, pipeline="pipedream(microbatches=2)", evaluate_every=every)
    (found, *_) = run(Chain(), 3, settings, folder=tmp_path)
    lines = read_log(tmp_path)
    losses = [line["value"] for line in lines if line["key"] == "train_loss"]
    assert all(math.isfinite(loss) for loss in losses)
    assert found.steps == 13
    sent = {line["key"]: line["value"] for line in lines}["sl_comm_bytes_wire"]
    assert sent > 50 * 8 * 8, "there are no replicas: these are the activations of 50 samples"


def test_small_batches_do_not_keep_many_stages_from_stopping() -> None:
    """A step has two samples, fewer than workers; all four still stop after step 3, or when they are asked to."""
    settings = Settings(steps=3, epochs=1, batch=2, pipeline="gpipe")
    assert {outcome.steps for outcome in run(Chain(), 4, settings)} == {3}
    stopped = run(Chain(), 4, Settings(epochs=1, batch=2, pipeline="gpipe"), stop=lambda: True)
    assert {(outcome.stopped_by, outcome.steps) for outcome in stopped} == {("signal", 1)}


@pytest.mark.parametrize(
    ("settings", "options", "kind", "words"),
    [
        ({"stages": "2"}, {}, SpecError, "there is no pipeline to divide; add --pipeline"),
        ({"pipeline": "1f1b", "global_batch": 8}, {}, IncompatibleError, "write batch instead"),
        ({"pipeline": "1f1b", "diagnose": 8, "codec": "topk(0.1)"}, {}, IncompatibleError, "only a part of the model"),
        ({"pipeline": "1f1b"}, {"seconds_a_sample": 0.1}, IncompatibleError, "leave it out"),
        ({"pipeline": "1f1b", "strategy": "ssp"}, {}, IncompatibleError, "at its own pace"),
        ({"pipeline": "1f1b", "stages": "3"}, {}, SpecError, "must be a multiple of"),
        ({"pipeline": "1f1b", "stages": "33,"}, {}, SpecError, "did you mean '3'"),
        ({"pipeline": "gpip"}, {}, SpecError, "did you mean"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], options: dict[str, Any], kind: type[Exception], words: str) -> None:
    def attempt(world: World) -> str:
        with pytest.raises(kind) as caught:
            train(Chain(), Settings(epochs=1, **settings), world=world, **options)
        return str(caught.value)

    for message in sl.simulate(attempt, 2).results:
        assert words in message


def test_a_workload_without_the_loss_of_an_output_is_refused() -> None:
    def attempt(world: World) -> None:
        train(Tiny(), Settings(epochs=1, pipeline="gpipe"), world=world)

    with pytest.raises(IncompatibleError, match=r"define it, or train without a pipeline"):
        sl.simulate(attempt, 1)


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (lambda: VGG(width=1, dense=16), "zbv(microbatches=4)"),
        (lambda: TransformerLM(layers=2, width=8, heads=2, bytes=100_000, length=16), "1f1b(microbatches=4)"),
    ],
)
def test_vgg_and_the_transformer_train_as_without_a_pipeline(make: Any, schedule: str) -> None:
    """The last layer of the transformer is the embedding too."""

    def outcomes(pipeline: str | None, ranks: int) -> tuple[Outcome, ...]:
        settings = Settings(steps=3, epochs=1, batch=8, pipeline=pipeline)
        return sl.simulate(lambda world: train(make(), settings, world=world), ranks=ranks).results

    (alone,) = outcomes(None, 1)
    for found in outcomes(schedule, 2):
        assert (found.steps, found.samples) == (3, 24)
        assert found.test == pytest.approx(alone.test, rel=1e-4)
