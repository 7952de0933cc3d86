"""Formulas, the player and the simulator tell the same times."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives import BufferPool, Channel, build, names
from syncline.collectives.channel import allreduce
from syncline.costs import closed_form, play
from syncline.costs.prediction import FORMULAS
from syncline.transports import Link, Network
from syncline.world import World, simulate
from tests.pairwise import parametrize_pairwise

NETWORKS = {
    "slow Ethernet": Network(latency=50e-6, bandwidth=12.5e6, combine=1e-10),
    "fast": Network(latency=2e-6, bandwidth=12.5e9, combine=2e-11),
    "combining is dear": Network(latency=10e-6, bandwidth=1e9, combine=3e-9),
    "no latency": Network(latency=0.0, bandwidth=1e9),
    "messages are dear": Network(latency=10e-6, bandwidth=1e9, per_message=30e-6, combine=1e-10),
}


def simulated_time(name: str, size: int, nbytes: int, network: Network, seed: int = 0, lanes: int = 1) -> float:
    def once(world: World) -> None:
        hosts = tuple(network.host(rank) for rank in range(world.size))
        channel = Channel(world.transport, hosts, BufferPool(world.runtime))
        allreduce(channel, torch.zeros(nbytes, dtype=torch.uint8), "sum", build("allreduce", name), lanes=lanes)

    return simulate(once, size, network=network, seed=seed).time


@parametrize_pairwise(name=list(FORMULAS), size=[1, 2, 3, 4, 6, 8, 16], case=list(NETWORKS))
def test_formula_player_and_simulator_agree(name: str, size: int, case: str) -> None:
    nbytes, network = 48_000, NETWORKS[case]
    formula = closed_form(name, size, nbytes, network)
    if formula is None:
        assert name in ("tree", "recursive_doubling", "halving_doubling")
        assert size in (3, 6)
        return
    played = play(build("allreduce", name), size, nbytes, network).time
    assert played == pytest.approx(formula, rel=0.01)
    assert simulated_time(name, size, nbytes, network) == pytest.approx(formula, rel=0.01)


UNEQUAL = {
    "hosts": Network(latency=40e-6, bandwidth=1e8, ranks_per_host=4, inside=Link(latency=1e-6, bandwidth=1e10)),
    "one slow rank": Network(latency=10e-6, bandwidth=1e9, combine=1e-9, slow={1: 5.0}),
    "one slow link": Network(latency=10e-6, bandwidth=1e9, links={(0, 1): Link(latency=1e-3, bandwidth=1e7)}),
}


ALL = {**NETWORKS, **UNEQUAL}


def check_played(name: str, size: int, nbytes: int, case: str, lanes: int, tolerance: float) -> None:
    """Messages that meet at a port at one instant go in the order the seed draws: some seed is slower, some faster."""
    network = ALL[case]
    hosts = tuple(network.host(rank) for rank in range(size))
    played = play(build("allreduce", name), size, nbytes, network, hosts=hosts, lanes=lanes).time
    times: list[float] = []
    for seed in range(6):
        times.append(simulated_time(name, size, nbytes, network, seed, lanes))
        if min(times) * (1 - tolerance) <= played <= max(times) * (1 + tolerance):
            return
    raise AssertionError(f"the player tells {played}, and the simulator {times}")


@parametrize_pairwise(name=names("allreduce"), size=[2, 5, 8, 11], case=list(ALL))
def test_the_player_is_the_simulator(name: str, size: int, case: str) -> None:
    """Also where no formula is exact."""
    check_played(name, size, 30_011, case, lanes=1, tolerance=0.01)


@parametrize_pairwise(name=names("allreduce"), case=list(ALL), shape=[(2, 2, 30_011), (8, 3, 30_011), (5, 2, 400_000)])
def test_the_player_knows_lanes_and_large_messages(name: str, case: str, shape: tuple[int, int, int]) -> None:
    size, lanes, nbytes = shape
    check_played(name, size, nbytes, case, lanes, tolerance=0.02)


def test_hierarchical_wins_where_hosts_are_far_apart() -> None:
    network = UNEQUAL["hosts"]
    hosts = tuple(rank // 4 for rank in range(16))
    times = {
        name: play(build("allreduce", name), 16, 1_000_000, network, hosts=hosts).time
        for name in ("ring", "hierarchical")
    }
    assert times["hierarchical"] < times["ring"]


def test_a_formula_only_where_it_is_exact() -> None:
    assert closed_form("tree", 6, 100, Network()) is None
    assert closed_form("double_tree", 8, 100, Network()) is None
    assert closed_form("ring", 8, 100, UNEQUAL["hosts"]) is None
