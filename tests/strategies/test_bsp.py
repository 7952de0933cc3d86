"""Synchronous training at servers is synchronous training: the same bits as one process that adds up in order."""

from __future__ import annotations

import pytest
import torch

import syncline as sl
from syncline.errors import SpecError
from tests.hunting import seeds
from tests.pairwise import parametrize_pairwise
from tests.strategies.served_cases import apart, results, together

STEPS = 8


@parametrize_pairwise(
    optimizer=["sgd", "momentum", "adam"],
    nodes=[(2, 0), (2, 1), (3, 2), (4, 3), (4, 0)],
    strategy=["bsp", "ssp(slack=0)"],
)
def test_it_has_the_bits_of_one_process(optimizer: str, nodes: tuple[int, int], strategy: str) -> None:
    workers, dedicated = nodes
    wanted = together(optimizer, workers, STEPS)
    found = results(apart(optimizer, strategy, STEPS), workers, dedicated)
    assert all(torch.equal(wanted, each) for each in found)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_it_equals_allreduce_to_rounding(optimizer: str) -> None:
    reduced = sl.simulate(apart(optimizer, "allreduce", STEPS), ranks=4).results[0]
    torch.testing.assert_close(results(apart(optimizer, "bsp", STEPS), 4)[0], reduced, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", seeds(3, every=10))
def test_no_order_of_events_changes_its_bits(seed: int) -> None:
    wanted = together("momentum", 3, STEPS)
    found = results(apart("momentum", "bsp", STEPS), 3, dedicated=2, seed=seed, chaos=True)
    assert all(torch.equal(wanted, each) for each in found)


def test_a_step_takes_as_long_as_the_slowest_workers() -> None:
    def pace(rank: int, step: int) -> float:
        return 5.0 if rank == step % 2 else 1.0

    fast = sl.Network(latency=1e-9, bandwidth=1e12)
    took = sl.simulate(apart("sgd", "bsp", 6, pace), 2, network=fast).time
    assert took == pytest.approx(30.0, rel=1e-3)


def test_a_server_applies_another_rule() -> None:
    """Adagrad at the server; the optimizer's rate goes with each push, unless the rule says its own."""
    told = results(apart("sgd", "bsp(rule='adagrad')", STEPS), 2)[0]
    same = results(apart("momentum", "bsp(rule='adagrad(lr=0.1)')", STEPS), 2)[0]  # both optimizers have 0.1
    other = results(apart("sgd", "bsp(rule='adagrad(lr=0.05)')", STEPS), 2)[0]
    assert torch.equal(told, same)
    assert not torch.equal(told, other)


@pytest.mark.parametrize("spec", ["bsp(rule=3)", "bsp(rule='nonsense')", "bsp(filters='nonsense')", "bsp(factors=1)"])
def test_unreadable_rules_and_filters_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        sl.strategies.build_strategy(spec)
