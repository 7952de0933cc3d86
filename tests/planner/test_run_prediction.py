"""Predictions of measured models on measured machines: formulas against the simulator, and shared processors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from syncline.costs import predict
from syncline.errors import SpecError
from syncline.planner.exchange_costs import ExchangeCosts, ExchangeWork
from syncline.planner.plans import pipeline_s
from syncline.planner.profile import TrainingProfile
from syncline.planner.run_prediction import predict_run
from syncline.planner.shared_cores import simulate_step_s
from tests.planner.machines import BANDWIDTH, ONEBIT, exchanges_of, machine_of, profile_of

LARGE = (400, 500)
"""The shape of a gradient that is reduced in some 0.1 s."""
COMPUTE_S = 0.033
"""Forward, backward and update of a profile with one layer."""


@pytest.mark.parametrize("strategy", ["allreduce", "local(period=4)"])
def test_formula_equals_the_simulated_step(strategy: str) -> None:
    network = machine_of().network.network()
    found = predict_run(profile_of([LARGE]), machine_of(call_s=1e-9), strategy=strategy).seconds
    simulated = simulate_step_s(strategy, [200_000], 4, network, COMPUTE_S)
    assert found == pytest.approx(simulated, rel=0.02)


def test_bucket_that_is_ready_early_is_hidden_as_far_as_measured() -> None:
    """The later layer has a bucket of its own, which is reduced while the earlier one computes its backward."""
    shapes = [(10,), (600, 500)]
    ring = predict("ring", 4, 4 * 300_000, machine_of().network.network()).seconds
    profile = profile_of(shapes, backward_s=10 * ring)
    machines = {share: machine_of(call_s=1e-9, together_s=0.06 - 0.02 * share) for share in (1.0, 0.5)}
    exposed = {share: predict_run(profile, machine).parts["reduction"] for share, machine in machines.items()}
    assert exposed[1.0] == pytest.approx(0.0, abs=2e-3)
    assert exposed[0.5] == pytest.approx(ring / 2, rel=0.05)


def test_local_exchanges_once_in_a_period() -> None:
    profile, machine = profile_of([LARGE]), machine_of()
    whole = predict_run(profile, machine, strategy="local(period=1)").parts
    found = predict_run(profile, machine, strategy="local(period=16)").parts
    assert found["reduction"] == pytest.approx(whole["reduction"] / 16)
    assert found["compute"] == whole["compute"]


def test_ranks_of_a_lab_share_its_cores() -> None:
    profile = profile_of([LARGE])
    machine = machine_of(4, cores=2, lab=True, compute_contention=2.2, copy_contention=2.0)
    parts = predict_run(profile, machine).parts
    assert parts["compute"] == pytest.approx(0.03 * 2.2)
    assert parts["optimizer"] == pytest.approx(0.003 * 2.0)
    eight = predict_run(profile, machine, workers=8).parts
    assert eight["compute"] == pytest.approx(0.03 * 4.4)
    hosts = predict_run(profile, replace(machine, lab=""), workers=8).parts
    assert hosts["compute"] == pytest.approx(0.03 * 2.2), "hosts of their own do not share"


@pytest.mark.parametrize(
    "strategy", ["ssp(slack=3)", "downpour", "easgd(sync=False, period=4)", "gossip(pairwise=True)"]
)
def test_asynchronous_strategies_are_simulated(strategy: str) -> None:
    """With a fast network the cores are the limit; with a slow one the bytes are."""
    profile = profile_of([(100, 100)])
    lab = machine_of(4, cores=2, lab=True, compute_contention=2.0, copy_contention=2.0)
    quick = replace(lab.network, latency=1e-7, per_message=1e-7, bandwidth=1e12)
    busy = predict_run(profile, replace(lab, network=quick), strategy=strategy).seconds
    assert busy == pytest.approx(2 * COMPUTE_S, rel=0.06)
    slow = predict_run(profile_of([(1000, 1000)]), lab, strategy=strategy).seconds
    assert slow > busy + 4e6 / BANDWIDTH / 10


def test_ssp_waits_for_the_bytes_of_its_servers() -> None:
    """Each worker sends three quarters of its gradients, and of the others' weights."""
    found = predict_run(profile_of([LARGE]), machine_of(), strategy="ssp(slack=3)").seconds
    assert found == pytest.approx(COMPUTE_S + 2 * 0.75 * 4 * 200_000 / BANDWIDTH, rel=0.15)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipeline_equals_its_formula_on_cores_of_its_own(schedule: str) -> None:
    profile = profile_of([(10,)] * 4)
    network = replace(machine_of().network, latency=0.0, per_message=0.0, bandwidth=1e15)
    machine = machine_of(network=network)
    strategy = f"pipeline(microbatches=8, schedule='{schedule}')"
    found = predict_run(profile, machine, strategy=strategy, batch=16)
    each = (0.01, 0.02, 0.0)
    assert found.seconds == pytest.approx(pipeline_s(schedule, 4, 8, *each) + 0.003 / 4)
    assert found.cuts == ("layer1", "layer2", "layer3")
    shared = predict_run(profile, replace(machine, cores=1, lab="4@100mbit"), strategy=strategy, batch=16)
    assert shared.parts["compute"] + shared.parts["bubble"] == pytest.approx(4 * 8 * 0.03 / 4), "one core does all"


def test_work_beside_the_network_follows_from_three_exchanges() -> None:
    machine = machine_of(codecs=(ONEBIT,))
    costs = ExchangeCosts(machine, 4)
    call_s, tensor_s, byte_s = 0.004, 0.0002, 1e-8
    small = 4 * 128 * 128
    network = [
        costs.network_s("onebit", [shape] * count)
        for shape, count in (((128, 128), 1), ((32, 32), 16), ((1024, 1024), 1))
    ]
    work = [
        call_s + tensors * tensor_s + nbytes * byte_s for tensors, nbytes in ((1, small), (16, small), (1, 64 * small))
    ]
    rows = exchanges_of("allreduce", "onebit", [one + two for one, two in zip(network, work, strict=True)])
    found = ExchangeCosts(replace(machine, exchanges=rows), 4).work("allreduce", "onebit")
    assert (found.call_s, found.tensor_s, found.byte_s) == pytest.approx((call_s, tensor_s, byte_s))
    profile = profile_of([(300, 300)] * 2)
    parts = predict_run(profile, replace(machine, exchanges=rows), codec="onebit").parts
    assert parts["codec"] == pytest.approx(found.seconds(2, 4 * 180_000))


def test_powersgd_sends_two_factors() -> None:
    costs = ExchangeCosts(machine_of(), 4)
    seconds = costs.network_s("powersgd(2)", [(500, 300), (500,)])
    expected = costs.allreduce_s(4 * (2 * 500 + 500)) + costs.allreduce_s(4 * 2 * 300)
    assert seconds == pytest.approx(expected)


def test_codec_without_exchanges_counts_by_its_rates() -> None:
    assert ExchangeCosts(machine_of(codecs=(ONEBIT,)), 4).work("allreduce", "onebit") == ExchangeWork(byte_s=2e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "onebit"}, "onebit was not measured on this machine"),
        ({"strategy": "pipeline(microbatches=7)"}, "7 micro-batches do not divide a batch of 32"),
        ({"strategy": "pipeline(2)"}, "write pipeline"),
        ({"strategy": "pipeline(schedule='pipedream')"}, "only schedules that empty the pipeline"),
        ({"strategy": "ssp", "workers": 1000}, "simulated for up to 64 workers"),
        ({"batch": 0}, "both must be at least 1"),
    ],
)
def test_what_cannot_be_predicted_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        predict_run(profile_of([(100, 100)] * 4), machine_of(), **options)  # type: ignore[arg-type]


def test_shapes_are_in_the_file_of_a_profile(tmp_path: Path) -> None:
    profile = profile_of([(3, 4)])
    profile.write(tmp_path / "profile.json")
    assert TrainingProfile.read(tmp_path / "profile.json").memory.parameters == profile.memory.parameters


def test_profile_of_copies_knows_what_processors_cost_each_other() -> None:
    machine = machine_of(4, cores=2, lab=True, compute_contention=3.0, copy_contention=3.0)
    profile = replace(profile_of([LARGE]), copies=2)
    parts = predict_run(profile, machine).parts
    assert parts["compute"] == pytest.approx(2 * 0.03), "two workers take turns on each processor"
    assert parts["optimizer"] == pytest.approx(2 * 0.003)
    crowded = predict_run(replace(profile, copies=4), machine).parts
    assert crowded["compute"] == pytest.approx(0.03), "as many copies as workers"
    alone = predict_run(replace(profile, copies=1), machine).parts
    assert alone["compute"] == pytest.approx(3 * 0.03), "what was measured of the machine counts"


def test_messages_to_one_stage_take_turns() -> None:
    """The middle stage gets activations from one side and gradients from the other, by one port."""
    network = replace(machine_of().network, latency=0.0, per_message=0.0, bandwidth=1e6)
    layers = profile_of([(10,)] * 3)
    wide = replace(layers.layers, layers=tuple(replace(each, activation_bytes=1e5) for each in layers.layers.layers))
    profile = replace(layers, layers=wide)
    step = predict_run(profile, machine_of(3, network=network), strategy="pipeline(microbatches=8)", batch=8)
    # 8 activations and 8 gradients of 3 samples each arrive at the middle stage.
    assert step.seconds > 16 * 1e5 * 3 / 8 / 1e6
