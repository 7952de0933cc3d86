"""All schedules, run for real: on one rank, on the simulator, on gloo."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives import BufferPool, Channel, build, names
from syncline.collectives.channel import allreduce
from syncline.testing import Pool
from syncline.transports import Network, SingleTransport
from syncline.world import World, simulate
from tests.collectives.schedule_checks import move_by_every_schedule, reduce_by_every_schedule
from tests.hunting import HUNTING, seeds


def test_single() -> None:
    assert reduce_by_every_schedule(SingleTransport())
    assert move_by_every_schedule(SingleTransport())


# Odd and even, a power of two and one beyond, composite: the schedules themselves are proven for every size elsewhere.
SIZES = range(1, 18) if HUNTING else (1, 2, 3, 4, 6, 9)
GLOO_SIZES = range(1, 10) if HUNTING else (1, 2, 3, 5, 8)


@pytest.mark.parametrize("size", SIZES)
def test_simulated(size: int) -> None:
    def everything(world: World) -> int:
        hosts = tuple(rank * 3 // world.size for rank in range(world.size))
        return reduce_by_every_schedule(world.transport, hosts, large=1009) + move_by_every_schedule(world.transport)

    assert min(simulate(everything, size, seed=size).results) > 100


@pytest.mark.parametrize("seed", seeds(4, every=10))
def test_simulated_in_any_order_without_buffering(seed: int) -> None:
    """No schedule counts on a send to end before its receive is posted, nor on one order of events."""
    run = simulate(
        lambda world: reduce_by_every_schedule(world.transport, large=53),
        2 + seed % 6,
        network=Network(eager=0, jitter=1.0),
        seed=seed,
        chaos=True,
    )
    assert min(run.results) > 100


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("size", GLOO_SIZES)
def test_gloo(gloo: Pool, size: int) -> None:
    assert min(gloo.run(reduce_by_every_schedule, size)) > 100
    assert min(gloo.run(move_by_every_schedule, size)) > 40


def bits_of_a_float_sum(world: World) -> dict[str, bytes]:
    torch.manual_seed(world.rank)
    x = torch.randn(1013)
    channel = Channel(world.transport, (), BufferPool(world.runtime))
    found = {}
    for name in names("allreduce"):
        mine = x.clone()
        allreduce(channel, mine, "sum", build("allreduce", name))
        found[name] = mine.numpy().tobytes()
    return found


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_every_rank_ends_with_the_same_bits_whatever_the_order(size: int) -> None:
    first = simulate(bits_of_a_float_sum, size, seed=0).results
    assert all(rank == first[0] for rank in first)
    again = simulate(bits_of_a_float_sum, size, seed=1, chaos=True).results
    assert again == first
