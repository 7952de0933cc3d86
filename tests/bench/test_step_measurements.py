"""What limits a run, from its log: the same sentences in the report and on the live page."""

from __future__ import annotations

from pathlib import Path

import pytest

import syncline as sl
from syncline.bench.live.run import RunFeed
from syncline.bench.runlog import read_run
from syncline.bench.step_measurements import measure_step, rank_computation
from syncline.planner.measured_limits import measured_limits
from syncline.training.loop import train
from syncline.training.settings import Settings
from syncline.training.stragglers import Slow
from syncline.transports import Network
from syncline.workloads import build

WORKLOAD = "logistic(features=2000, samples=256)"
FAST, SLOW = Network(latency=1e-6, bandwidth=1e9), Network(latency=1e-4, bandwidth=1e6)


@pytest.mark.parametrize(
    ("strategy", "network", "slow", "words"),
    [
        ("allreduce", FAST, (Slow(1, 3.0),), "a straggler limits it: all wait for rank 1, 2.96 times as slow"),
        ("allreduce", SLOW, (), "communication limits it, most of it the exchange of gradients over the network"),
        ("ssp(slack=1)", SLOW, (), "the parameter servers limit it (3 servers)"),
        ("allreduce", FAST, (), "the computation itself limits it"),
    ],
)
def test_a_planted_limit_is_named(
    tmp_path: Path, strategy: str, network: Network, slow: tuple[Slow, ...], words: str
) -> None:
    settings = Settings(strategy=strategy, epochs=3, batch=16, learning_rate=0.01)
    folder = tmp_path / "run"
    sl.simulate(
        lambda world: train(
            build(WORKLOAD), settings, world=world, folder=folder, seconds_a_sample=1e-3, slow=slow, stop=lambda: False
        ),
        ranks=3,
        network=network,
    )
    run = read_run(folder)
    last = run.evaluations[-1]
    assert last.communication is not None
    assert last.update == pytest.approx(0, abs=1e-9)  # computing takes no virtual time, except for the pace
    spent = {"phases": last.phases, "communication": last.communication, "update": last.update}
    ranks = rank_computation(line["value"] for line in run.lines("sl_ranks"))
    measured = measure_step(run.config, spent, last.step, ranks)
    assert measured is not None
    assert measured.workers == 3
    assert measured.samples == 16
    sentence = measured_limits(measured)[0].sentence
    assert words in sentence
    feed = RunFeed(folder)
    feed.refresh()
    assert feed.limits()[0] == sentence


def test_configurations_of_pipelines_and_of_other_versions() -> None:
    phases = {"compute": 8.0, "exposed": 3.0, "codec": 0.0, "data": 0.0, "evaluation": 9.0}
    shape = {"schedule": "1f1b(microbatches=8)", "micro_batches": 8, "replicas": [1, 1, 1, 1]}
    config = {"workers": 4, "samples_a_step": 64, "run": {"strategy": "allreduce", "pipeline": shape}}
    measured = measure_step(config, {"phases": phases}, 100)
    assert measured is not None
    assert measured.pipeline is not None
    assert measured.samples == 64
    assert measured.seconds == pytest.approx(0.11)
    assert "with 8 micro-batches for 4 stages" in measured_limits(measured)[0].sentence
    plain = measure_step({}, {"phases": phases}, 100)
    assert plain is not None
    assert (plain.communication_s, plain.update_s, plain.optimizer) == (None, None, "")
    assert measure_step({}, {"phases": "?"}, 100) is None
    assert measure_step({}, {"phases": phases}, 0) is None
    for optimizer, name in (
        ({"class": "SGD", "momentum": 0.9}, "momentum"),
        ({"class": "SGD", "momentum": 0}, "sgd"),
        ({"class": "AdamW"}, "adam"),
    ):
        found = measure_step({"optimizer": optimizer}, {"phases": phases}, 1)
        assert found is not None
        assert found.optimizer == name
    odd = measure_step({"run": 3, "optimizer": 4, "workers": "many"}, {"phases": {"compute": "nan"}}, 1, [float("nan")])
    assert odd is not None
    assert measured_limits(odd) == ()
