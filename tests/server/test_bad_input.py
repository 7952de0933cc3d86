"""Whatever a member sends: it is told why not, the server goes on, and nothing is changed."""

from __future__ import annotations

from typing import Any

import syncline as sl
from syncline.server import Server, network_of
from syncline.transports import SimulatedTransport, Transport
from tests.launching import launch, torch_variables
from tests.server.rogue_cases import REASONS, work


def test_on_the_simulator() -> None:
    sides: list[SimulatedTransport] = []

    def served(transport: Transport) -> None:
        assert isinstance(transport, SimulatedTransport)
        sides.append(transport)
        Server(network_of(transport, workers=2, servers=1)).start().join()

    for seed in range(3):
        run = sl.simulate(work, 2, extra=[served], seed=seed)
        assert len(run.results[1]) == len(REASONS)
        mailbox: Any = sides[-1].mailbox
        assert mailbox.arrived == [], "refused messages stay queued"
        assert mailbox.waiting_bytes == 0


def test_co_located_on_the_simulator_in_any_order() -> None:
    for seed in range(3):
        sl.simulate(work, 2, seed=seed, chaos=True)


SCRIPT = """
import syncline as sl
from tests.server.rogue_cases import work
with sl.init(transport="zeromq") as world:
    print(len(work(world)))
"""


def test_over_zeromq() -> None:
    ended = launch(SCRIPT, torch_variables(2))
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    assert [each.out.split() for each in ended] == [["0"], [str(len(REASONS))]]
