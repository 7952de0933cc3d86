"""The first faults: workers that are killed, slow, or read nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import syncline as sl
from syncline.server import Server, network_of, open_space, protocol
from syncline.server.shard import MAX_STEPS_AHEAD
from syncline.transports import SimulatedTransport, Transport
from syncline.transports.faults import Kill, Partition
from tests.launch.runs import Runs
from tests.server.test_opening import done, run

LARGE = 100_000


class Watched:
    """A dedicated server that can be looked at."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.server: Any = None
        self.transport: Any = None

    def __call__(self, transport: Transport) -> None:
        assert isinstance(transport, SimulatedTransport)
        self.transport = transport
        self.server = Server(network_of(transport, self._workers, 1)).start()
        self.server.join()


def test_no_read_waits_for_a_killed_workers_clock() -> None:
    for synchronous in (False, True):

        def work(world: sl.World, synchronous: bool = synchronous) -> list[float]:
            client = open_space(world, "s", 4, synchronous=synchronous)
            for _ in range(20):
                world.compute(1.0)
                found = done(client.push_pull(None, torch.ones(4), tick=True, min_clock=client.clock + 1))
            found_live = [found[0].item(), client.status.live]
            world.compute(1.0)
            client.close()
            return found_live

        results = run(work, 3, 1, faults=[Kill(1, at=7.5)])
        assert results[1] is None
        assert results[0] == results[2] == [2 * 20 + 7.0, 2.0]


SCRIPT = """
import signal, torch, syncline as sl
from syncline.server import open_space
with sl.init() as world:
    client = open_space(world, "s", 50_000)
    for step in range(30):
        if world.rank == 1 and step == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        client.push_pull(None, torch.ones(50_000), tick=True, min_clock=client.clock).wait()
    while min(client.steps()[other] for other in (0, 2)) < 30:
        time.sleep(0.01)
    say("sum", client.get()[[0, -1]].tolist(), "live", client.status.live)
    client.finish_training()
    client.close()
"""


def test_kill_9_of_one_of_three_and_the_others_finish(runs: Runs) -> None:
    run_ = runs.run("run", "-n", "3", "--servers", "1", "--on-failure", "continue", runs.script(SCRIPT))
    assert run_.out.count("sum [70.0, 70.0]") == 2, run_.describe()
    runs.assert_nothing_left()


def test_what_a_server_keeps_of_one_client_is_bounded() -> None:
    """A worker that never reads a reply is refused, and neither handler nor mailbox grows."""
    watched = Watched(2)

    def work(world: sl.World) -> None:
        client = open_space(world, "s", LARGE)
        if world.rank == 1:
            transport, member = client.network.transport, client.description.servers[0]
            for number in range(2, 400):
                request = protocol.RequestHeader(
                    protocol.PULL, space=client.description.space_id, number=number, count=LARGE, length=0
                )
                header = torch.frombuffer(bytearray(request.pack()), dtype=torch.uint8)
                transport.send(header, member, protocol.REQUEST_TAG)
                world.compute(1.0)
            session = watched.server.handler.sessions[client.description.space_id, 1]
            assert len(session.replies) == protocol.REPLY_SLOTS
            assert not session.deferred
        else:
            for _ in range(30):
                client.push(None, torch.ones(LARGE)).wait()
                world.compute(10.0)
            assert client.get()[0] == 30

    sl.simulate(work, 2, extra=[watched])
    kept = watched.server.handler.sessions
    assert sum(len(each.replies) for each in kept.values()) <= 2 * protocol.REPLY_SLOTS
    assert watched.transport.mailbox.waiting_bytes == 0


def test_a_client_stays_within_its_in_flight_limit() -> None:
    watched = Watched(1)

    def work(world: sl.World) -> int:
        client = open_space(world, "s", 64, piece=4)
        most = 0
        for _ in range(30):
            client.push_pull(None, torch.ones(64))  # 16 pieces each, and nobody waits
            session = watched.server.handler.sessions[client.description.space_id, 0]
            most = max(most, len(client.sender.connections[0].pending), len(session.replies) + len(session.deferred))
        client.close()
        return most

    assert sl.simulate(work, 1, extra=[watched]).results[0] <= protocol.MAX_INFLIGHT_REQUESTS + 1


def test_a_worker_too_far_ahead_of_the_open_step_is_refused() -> None:
    def work(world: sl.World) -> str:
        client = open_space(world, "s", 4, synchronous=True)
        said = ""
        try:
            for _ in range(MAX_STEPS_AHEAD + 10 if world.rank == 0 else 0):
                client.push(None, torch.ones(4), tick=True).wait()
        except sl.errors.ProtocolError as error:
            said = str(error)
        world.barrier()
        client.close()
        return said

    assert "and step 0 is open" in run(work, 2, 1)[0]


def test_one_slow_worker_blocks_no_others_requests() -> None:
    """Worker 1's large body is delayed after its header: the others are served meanwhile."""
    moments: dict[int, list[float]] = {}

    def work(world: sl.World) -> Tensor:
        client = open_space(world, "s", LARGE)
        world.compute(1.0)
        moments[world.rank] = []
        for _ in range(5):
            client.push(None, torch.ones(LARGE)).wait()
            moments[world.rank].append(world.runtime.now())
        found = client.get()
        client.close()
        return found

    run(work, 3, 1, faults=[Partition((1,), start=1.00002, stop=50.0)], timeout=1000.0)
    assert min(moments[1]) >= 50.0
    assert max(moments[0] + moments[2]) < 2.0
