"""Choosing by prediction, then by measurement; the same on every rank, and for good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.costs import Auto, Calibration, calibrate, predict
from syncline.costs.auto import TRIAL_STAGES, AlgorithmTrial
from syncline.costs.calibration import cache_file, load_calibration, store_calibration
from syncline.transports import Link, Network

FOUND = Calibration(1e-5, 1e9, 1e-6, 1e-10, 0.1, 0.2, 1e-6, 1e10, 4)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_CACHE", str(tmp_path))


def reduced(world: sl.World, numel: int, calls: int) -> list[str]:
    """What auto took in each of so many calls, by what it has chosen after them."""
    taken = []
    for _ in range(calls):
        total = sl.allreduce(torch.full((numel,), float(world.rank + 1)), op="sum", algorithm="auto")
        assert float(total[0]) == world.size * (world.size + 1) / 2
        choice = world.everyone.auto.chosen(total)
        taken.append("" if choice is None else choice.algorithm)
    return taken


@pytest.mark.parametrize(("size", "numel"), [(1, 10), (2, 100_000), (3, 10), (4, 100_000), (8, 10)])
def test_it_settles_on_the_fastest_and_stays(size: int, numel: int) -> None:
    network = Network(latency=50e-6, bandwidth=1e8, per_message=10e-6, combine=1e-10)
    results = sl.simulate(lambda world: reduced(world, numel, 12), size, network=network).results
    assert all(result == results[0] for result in results), "the ranks chose differently"
    taken = results[0]
    first = next(number for number, name in enumerate(taken) if name)
    assert len(set(taken[first:])) == 1, "it changed its mind"
    assert first < 10
    if size > 1:
        told = {name: predict(name, size, 4 * numel, network).seconds for name in sl.simulate(_names, 1).results[0]}
        assert told[taken[-1]] <= 1.05 * min(told.values())


def _names(world: sl.World) -> list[str]:
    from syncline.collectives import names

    return names("allreduce")


def test_measuring_corrects_a_wrong_model() -> None:
    """The model is told that bandwidth is everything; on the wire it is the number of messages."""
    wrong = Network(latency=1e-7, bandwidth=1e7)
    right = Network(latency=1e-4, bandwidth=1e12, per_message=1e-3)

    def run(world: sl.World) -> tuple[str, str]:
        auto = world.everyone.auto
        auto.known_network = wrong
        reduced(world, 30_000, 240)
        (choice,) = auto.choices.values()
        return min(choice.predicted, key=lambda name: choice.predicted[name]), choice.algorithm

    predicted, chosen = sl.simulate(run, 4, network=right).results[0]
    assert chosen != predicted
    assert predict(chosen, 4, 120_000, right).seconds < predict(predicted, 4, 120_000, right).seconds / 2


@pytest.mark.parametrize(
    ("options", "settled"),
    [
        ({}, True),
        ({"network": Network(jitter=0.5)}, False),
        ({"faults": [sl.faults.Delay(1e-3, source=0, to=1)]}, False),
        ({"chaos": True}, True),
    ],
    ids=["exact", "jitter", "faults", "chaos"],
)
def test_a_few_calls_decide_only_where_times_do_not_vary(options: dict[str, Any], settled: bool) -> None:
    taken = sl.simulate(lambda world: reduced(world, 10, 12), 3, **options).results[0]
    assert bool(taken[-1]) == settled


def test_why_is_recorded() -> None:
    def run(world: sl.World) -> list[Any]:
        seen: list[Any] = []

        class Sink:
            def write(self, event: Any) -> None:
                seen.append(event)

            def close(self) -> None:
                return

        world.events.sinks = (Sink(),)
        reduced(world, 1000, 240)
        return [event for event in seen if event.key == "sl_collective"]

    (event,) = sl.simulate(run, 4).results[1]
    assert event.value in event.metadata["measured"]
    assert event.metadata["reason"] == "measured"
    assert set(event.metadata["predicted"]) >= set(event.metadata["measured"])


def test_sizes_have_choices_of_their_own() -> None:
    def run(world: sl.World) -> dict[str, str]:
        reduced(world, 4, 12)
        reduced(world, 200_000, 12)
        return {key: choice.algorithm for key, choice in world.everyone.auto.choices.items()}

    chosen = sl.simulate(run, 4, network=Network(latency=1e-4, bandwidth=1e9, per_message=5e-5)).results[0]
    assert len(chosen) == 2
    assert len(set(chosen.values())) == 2


def test_a_trial_drops_slow_ones_and_prefers_native() -> None:
    trial = AlgorithmTrial(["native", "ring", "tree"], {})
    pace = {"native": 1.01e-3, "ring": 1.0e-3, "tree": 9.0e-3}
    called = []
    winner = None
    while winner is None:
        name = trial.next()
        called.append(name)
        if trial.record(pace[name]):
            winner = trial.finish_stage(lambda times: times)
    assert winner == "native"
    assert called.count("tree") == TRIAL_STAGES[0][0] + 1
    assert called.count("ring") == TRIAL_STAGES[-1][0] + 1


def test_a_trial_that_would_take_minutes_is_cut_short() -> None:
    trial = AlgorithmTrial(["native", "ring"], {})
    calls = 0
    winner = None
    while winner is None:
        calls += 1
        if trial.record({"native": 9.0, "ring": 8.0}[trial.next()]):
            winner = trial.finish_stage(lambda times: times)
    assert winner == "ring"
    assert calls == 2 * (TRIAL_STAGES[1][0] + 1)


def test_choices_of_an_earlier_run_are_adopted() -> None:
    def run(world: sl.World, adopted: dict[str, str]) -> dict[str, str]:
        world.everyone.auto.adopt(adopted)
        reduced(world, 1000, 1 if adopted else 12)
        return {key: choice.algorithm for key, choice in world.everyone.auto.choices.items()}

    first = sl.simulate(lambda world: run(world, {}), 4).results[0]
    other = dict.fromkeys(first, "naive")
    assert sl.simulate(lambda world: run(world, other), 4).results[3] == other
    with pytest.raises(sl.errors.SpecError):
        sl.simulate(lambda world: run(world, dict.fromkeys(first, "rign")), 4)


def test_simulations_are_independent_of_each_other() -> None:
    """A team on a network of unequal links is calibrated, and that is not kept for the next simulation."""

    def run(world: sl.World) -> None:
        team = world.group([0, 1, 2])
        if team.member:
            sl.allreduce(torch.ones(1000), op="mean", algorithm="auto", group=team)

    network = Network(links={(0, 1): Link(latency=1e-3, bandwidth=1e7)})
    times = [sl.simulate(run, 4, network=network).time for _ in range(2)]
    assert times[0] == times[1]
    assert not cache_file().exists()


@pytest.mark.parametrize(
    ("network", "size"),
    [
        (Network(latency=30e-6, bandwidth=1e8, per_message=5e-6, combine=2e-10), 3),
        (Network(latency=1e-3, bandwidth=1e9), 2),
    ],
)
def test_calibration_finds_the_network_that_is_there(network: Network, size: int) -> None:
    found = sl.simulate(lambda world: calibrate(world.everyone.channel), size, network=network).results
    assert all(result == found[0] for result in found), "rank 0's word is everybody's"
    assert found[0].latency == pytest.approx(network.latency, rel=0.05)
    assert found[0].bandwidth == pytest.approx(network.bandwidth, rel=0.05)
    assert found[0].per_message == pytest.approx(network.per_message, rel=0.1, abs=2e-8)


def test_calibration_tells_hosts_from_the_network_between_them() -> None:
    network = Network(
        latency=1e-4, bandwidth=1e8, ranks_per_host=2, inside=Link(latency=1e-6, bandwidth=1e10), combine=1e-10
    )
    found = sl.simulate(lambda world: calibrate(world.everyone.channel), 4, network=network).results[0]
    assert found.ranks_per_host == 2
    assert found.network().link(0, 1).bandwidth == pytest.approx(1e10, rel=0.1)
    assert found.network().link(1, 2).bandwidth == pytest.approx(1e8, rel=0.05)
    assert found.network().link(0, 1).latency < found.network().link(1, 2).latency / 10


def test_a_calibration_is_remembered(caplog: pytest.LogCaptureFixture) -> None:
    assert load_calibration("here") is None
    store_calibration("here", FOUND)
    store_calibration("there", Calibration(0.0, 1e9, 0.0, 0.0, 0.0, 0.0))
    assert load_calibration("here") == FOUND
    cache_file().write_text("{ not json")
    assert load_calibration("here") is None
    assert "cannot be read" in caplog.text
    cache_file().write_text(json.dumps({"here": [1, 2]}))
    assert load_calibration("here") is None


def test_what_is_remembered_is_used_and_fresh_measures_anew() -> None:
    def run(world: sl.World) -> tuple[Calibration, Calibration]:
        auto = Auto(world.everyone.channel, "a cluster")
        if world.rank == 0:
            store_calibration("a cluster", FOUND)
        return auto.calibration(), auto.calibration(fresh=True)

    known, fresh = sl.simulate(run, 2).results[1]
    assert known == FOUND
    assert fresh != FOUND
    assert load_calibration("a cluster") == fresh
