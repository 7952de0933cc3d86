"""Every transport against the one contract."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.testing import Pool, TransportContract
from syncline.testing.transports import Case, withdraw_a_receive
from syncline.transports import Network, SingleTransport, Transport
from syncline.world import World, simulate
from tests.hunting import seeds

ON_PROCESSES = (1, 2, 3, 6)
"""Sizes on real processes; the simulator has every one up to nine."""


class TestSingle(TransportContract):
    sizes = range(1, 2)

    def run(self, case: Case, size: int) -> None:
        case(SingleTransport())


class TestSimulated(TransportContract):
    def run(self, case: Case, size: int) -> None:
        simulate(lambda world: case(world.transport), size, seed=size)


class TestSimulatedRendezvous(TransportContract):
    """Sends that end only when their receive is there, in any order that is possible."""

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


def test_the_contract_can_fail() -> None:
    class Deaf(Transport):
        """Passes everything on but drops what is sent with tag 4."""

        def __init__(self, inner: Transport) -> None:
            super().__init__(inner.rank, inner.size, inner.runtime)
            self._send = inner._send  # type: ignore[method-assign]
            self._recv = inner._recv  # type: ignore[method-assign]
            self._split = inner._split  # type: ignore[method-assign]
            self.failure = inner.failure  # type: ignore[method-assign]

        def send(self, buffer: Any, to: int, tag: int = 0, **options: Any) -> Any:
            return super().send(buffer, to, tag + (tag == 4), **options)

        def _send(self, *args: Any) -> Any: ...
        def _recv(self, *args: Any) -> Any: ...
        def _split(self, *args: Any) -> Any: ...
        def failure(self, *args: Any) -> Any: ...

    from syncline.errors import DeadlockError
    from syncline.testing.transports import keep_order_and_tags

    def deaf(world: World) -> None:
        keep_order_and_tags(Deaf(world.transport))

    with pytest.raises(DeadlockError, match=r"rank 0 \(main\) waits .* from rank 2 \(tag 4"):
        simulate(deaf, 3)
