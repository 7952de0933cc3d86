"""Every transport against the one contract."""

from __future__ import annotations

import pytest

from syncline.errors import DeadlockError
from syncline.testing import Pool, TransportContract
from syncline.testing.transports import Case, keep_order_and_tags, withdraw_a_receive
from syncline.transports import Network, SingleTransport
from syncline.world import World, simulate
from tests.hunting import HUNTING, seeds

ON_PROCESSES = (1, 2, 3, 6)
"""Sizes on real processes, and of orders drawn at random. In one order the simulator has every size up to nine."""


class TestSingle(TransportContract):
    sizes = range(1, 2)

    def run(self, case: Case, size: int) -> None:
        case(SingleTransport())


class TestSimulated(TransportContract):
    def run(self, case: Case, size: int) -> None:
        simulate(lambda world: case(world.transport), size, seed=size)


class TestSimulatedRendezvous(TransportContract):
    """Sends that end only when their receive is there, in any order that is possible."""

    sizes = range(1, 10) if HUNTING else ON_PROCESSES

    def run(self, case: Case, size: int) -> None:
        for seed in seeds(2, 5):
            simulate(lambda world: case(world.transport), size, network=Network(eager=0), seed=seed, chaos=True)


@pytest.mark.xdist_group("gloo")
class TestGloo(TransportContract):
    sizes = ON_PROCESSES

    @pytest.fixture(autouse=True)
    def _pool(self, gloo: Pool) -> None:
        self.pool = gloo

    def run(self, case: Case, size: int) -> None:
        self.pool.run(case, size)


@pytest.mark.xdist_group("zeromq")
class TestZeroMQ(TransportContract):
    sizes = ON_PROCESSES

    @pytest.fixture(autouse=True)
    def _pool(self, zeromq: Pool) -> None:
        self.pool = zeromq

    def run(self, case: Case, size: int) -> None:
        self.pool.run(case, size)

    def test_a_receive_that_was_given_up_takes_no_message(self) -> None:
        self.pool.run(withdraw_a_receive, 2)


def test_a_receive_that_was_given_up_takes_no_message() -> None:
    """Not in the contract: on gloo a timeout ends the channel."""
    withdraw_a_receive(SingleTransport())
    simulate(lambda world: withdraw_a_receive(world.transport), 1)


def test_the_contract_finds_a_message_with_a_wrong_tag() -> None:
    def send_tag_4_as_5(world: World) -> None:
        transport = world.transport
        send = transport.send
        transport.send = lambda buffer, to, tag=0, **options: send(buffer, to, tag + (tag == 4), **options)  # type: ignore[method-assign]
        keep_order_and_tags(transport)

    with pytest.raises(DeadlockError, match=r"rank 0 \(main\) waits .* from rank 2 \(tag 4"):
        simulate(send_tag_4_as_5, 3)
