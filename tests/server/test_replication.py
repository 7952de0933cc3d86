"""The chain of a shard: which server has which record, who replies when, and what happens when one is lost."""

from __future__ import annotations

import os
import signal
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.control import MemoryStore
from syncline.runtime import RealRuntime
from syncline.server import network_of, open_space, protocol, replication, serve, server_network
from syncline.server.chain_log import ChainEntry, ChainLog
from syncline.server.opening import groups_of
from syncline.server.protocol import RequestHeader
from syncline.server.replication import ReplicaChain, ReplicaRecord
from syncline.server.request_handler import OutgoingReply, RequestHandler
from syncline.transports import SingleTransport, Transport
from syncline.transports.faults import Kill
from tests.hunting import hunted, seeds
from tests.launch.runs import Runs, wait_for
from tests.server.handler_client import NUMEL, body_of, describe, reason_of, values_of
from tests.server.hunts.replica_cases import check_replaced, check_same_replies
from tests.server.test_opening import done

SERVERS = (5, 6, 7)
NOTHING = torch.empty(0, dtype=torch.uint8)


class Chain:
    """Three servers of one shard without a transport. The test delivers their messages one by one."""

    def __init__(self) -> None:
        self.wire: deque[tuple[int, int, ReplicaRecord]] = deque()
        self.servers = {
            me: ReplicaChain(0, SERVERS, me, RequestHandler(lambda space: 0), self._sender(me), self._on_level)
            for me in SERVERS
        }
        self.level: list[tuple[int, int]] = []
        """New servers that the last server may add, each with the number of the server that it replaces."""
        self.replies: list[OutgoingReply] = []
        self.acks = 0
        """Acknowledgements between the servers."""
        self.description = describe(servers=SERVERS, numel=3 * NUMEL, replicas=3)
        self._number = 0
        hello = torch.frombuffer(bytearray(self.description.to_json()), dtype=torch.uint8)
        self.ask(5, RequestHeader(protocol.HELLO), hello)
        self.deliver()
        assert self.replies.pop().header.status == protocol.OK

    def _sender(self, source: int) -> Any:
        return lambda to, record: self.wire.append((source, to, record))

    def _on_level(self, member: int, server: int) -> None:
        self.level.append((member, server))

    def start(self, member: int, source: int) -> None:
        """Start a new server in the place of server 0, which asks another server for its state."""
        handler = RequestHandler(lambda space: 0)
        new = ReplicaChain(0, SERVERS, member, handler, self._sender(member), self._on_level)
        for lost in set(SERVERS) - set(self.servers):
            new.lose(lost, left=False)
        self.servers[member] = new
        new.ask_to_join(source, 0)

    def add(self) -> None:
        """Let all servers know of the new one, as the chain log tells them."""
        member, _ = self.level.pop()
        for chain in self.servers.values():
            self.replies += chain.append(member)

    def ask(self, server: int, request: RequestHeader, body: torch.Tensor, number: int | None = None) -> None:
        """Send a request of worker 0 to a server, under the next number or again."""
        self._number += number is None
        request = request._replace(space=self.description.space_id, number=number or self._number, length=body.numel())
        self.replies += self.servers[server].request(0, request, body.clone())

    def push(self, server: int, number: int | None = None, reply_from: int | None = None) -> None:
        """Send a push to a server, which replies, or another one that the push names."""
        named = 0 if reply_from is None else 1 + reply_from
        request = RequestHeader(protocol.PUSH, count=NUMEL, reply_from=named)
        self.ask(server, request, body_of(torch.ones(NUMEL)), number)

    def pull(self, server: int, **fields: Any) -> None:
        self.ask(server, RequestHeader(protocol.PULL, count=NUMEL, **fields), NOTHING)

    def deliver(self, messages: int = 1000) -> None:
        """Deliver the next messages between the servers. Those from and to lost ones vanish."""
        while self.wire and messages:
            source, to, record = self.wire.popleft()
            if source in self.servers and to in self.servers:
                chain, messages = self.servers[to], messages - 1
                self.acks += record.header.kind == protocol.ACKED
                self.replies += self._handle(chain, source, record)

    @staticmethod
    def _handle(chain: ReplicaChain, source: int, record: ReplicaRecord) -> list[OutgoingReply]:
        kind, member, number = record.header.kind, record.header.member, record.header.number
        if kind == protocol.ACKED:
            return chain.acknowledge(source, number)
        if kind == protocol.RECEIVED:
            return chain.pieces_received(source, member, number)
        if kind == protocol.JOIN:
            chain.admit(source, member, number)
            return []
        return chain.receive_piece(source, record) if kind == protocol.SNAPSHOT else chain.receive(source, record)

    def lose(self, member: int) -> None:
        """End a server or a client. The others notice in the order of the chain."""
        self.servers.pop(member, None)
        for chain in self.servers.values():
            self.replies += chain.lose(member, left=False)

    def weights(self) -> list[float]:
        """The first weight on each server."""
        return [chain.handler.shards[self.description.space_id].weights[0].item() for chain in self.servers.values()]


def test_a_push_is_acknowledged_when_all_replicas_have_it() -> None:
    chain = Chain()
    chain.push(5)
    for _ in range(4):  # to the second, to the third, and back
        assert not chain.replies
        chain.deliver(1)
    assert [reply.header.number for reply in chain.replies] == [2]
    assert chain.weights() == [1.0, 1.0, 1.0]


def test_a_read_contains_only_what_all_replicas_have() -> None:
    chain = Chain()
    chain.push(5)
    chain.pull(5)
    chain.deliver(3)
    assert not chain.replies
    chain.deliver()
    assert values_of(chain.replies[-1])[0] == 1.0


@pytest.mark.parametrize("delivered", range(5))
def test_the_next_server_continues_when_the_head_is_lost(delivered: int) -> None:
    """The client repeats what was not acknowledged; wherever the head was lost, it counts once."""
    chain = Chain()
    chain.push(5)
    chain.deliver(delivered)
    chain.replies.clear()
    chain.lose(5)
    chain.push(6, number=2)
    chain.deliver()
    assert [reply.header.number for reply in chain.replies] == [2]
    assert chain.weights() == [1.0, 1.0]


@pytest.mark.parametrize("lost", [6, 7])
@pytest.mark.parametrize("delivered", range(4))
def test_the_chain_gets_shorter_when_a_replica_is_lost(lost: int, delivered: int) -> None:
    chain = Chain()
    chain.push(5)
    chain.push(5)
    chain.deliver(delivered)
    chain.lose(lost)
    chain.deliver()
    assert [reply.header.number for reply in chain.replies] == [2, 3]
    assert chain.weights() == [2.0, 2.0]
    chain.lose(next(each for each in chain.servers if each != 5))
    chain.push(5)
    assert [reply.header.number for reply in chain.replies] == [2, 3, 4]


def test_a_repeated_request_waits_for_the_record_of_the_first() -> None:
    """The new head has the push, but its replica has not: the kept reply must wait too."""
    chain = Chain()
    chain.push(5)
    chain.deliver(1)
    chain.lose(5)
    chain.push(6, number=2)
    assert not chain.replies
    chain.deliver()
    assert len(chain.replies) == 1
    assert chain.weights() == [1.0, 1.0]


def test_a_client_may_notice_the_loss_of_the_head_first() -> None:
    chain = Chain()
    del chain.servers[5]
    chain.push(6)
    chain.deliver()
    assert not chain.replies
    chain.lose(5)
    chain.deliver()
    assert [reply.header.number for reply in chain.replies] == [2]
    for number in range(3, 4 + protocol.REPLY_SLOTS):  # the third server knows that the second lives
        chain.push(7, number)
    assert "wait for the loss" in reason_of(chain.replies[-1])


def test_all_replicas_learn_of_a_lost_client_once() -> None:
    for head_notices in (True, False):
        chain = Chain()
        noticing = (5, 6, 7) if head_notices else (6, 7)
        for server in noticing:
            chain.servers[server].lose(0, left=False)
        chain.lose(5)
        chain.deliver()
        for server in (6, 7):
            clocks = chain.servers[server].handler.shards[chain.description.space_id].clocks
            assert (clocks.live, clocks.trains(0)) == (1, False)


def test_a_record_out_of_order_is_refused() -> None:
    chain = Chain()
    chain.push(5)
    source, to, record = chain.wire.popleft()
    late = ReplicaRecord(record.header._replace(number=9), record.request, record.body)
    with pytest.raises(sl.errors.ProtocolError, match="record 9 of shard 0 from member 5, where record 2"):
        chain.servers[to].receive(source, late)
    with pytest.raises(sl.errors.ProtocolError, match="from member 7"):
        chain.servers[to].receive(7, record)


def test_refused_requests_have_numbers_at_the_replicas_too() -> None:
    chain = Chain()
    request = RequestHeader(protocol.PUSH, space=chain.description.space_id, number=2)
    reason = protocol.bytes_tensor(b"too long")
    chain.replies += chain.servers[5].request(0, request, reason, protocol.REJECTED)
    chain.deliver()
    assert "too long" in reason_of(chain.replies.pop())
    chain.lose(5)
    chain.replies += chain.servers[6].request(0, request, torch.empty(0, dtype=torch.uint8))
    chain.deliver()
    assert "too long" in reason_of(chain.replies.pop())


# Requests that name the last server: it replies.


def numbers(chain: Chain) -> list[int]:
    return [reply.header.number for reply in chain.replies]


def test_the_last_server_replies_when_all_have_the_push() -> None:
    chain = Chain()
    chain.push(5, reply_from=7)
    for _ in range(2):  # to the second, and to the third
        assert not chain.replies
        chain.deliver(1)
    assert numbers(chain) == [2]
    assert chain.weights() == [1.0, 1.0, 1.0]
    chain.deliver()
    assert numbers(chain) == [2]


def test_the_last_server_acknowledges_many_records_at_once() -> None:
    chain = Chain()
    acks = chain.acks
    for _ in range(replication.ACK_EVERY_RECORDS):
        chain.push(5, reply_from=7)
        chain.deliver()
    assert chain.acks == acks + 2  # to the second, and to the head
    chain.push(5, reply_from=7)
    chain.push(5)  # its reply waits for the acknowledgement
    chain.deliver()
    assert numbers(chain) == list(range(2, 4 + replication.ACK_EVERY_RECORDS))
    assert chain.acks == acks + 4


@pytest.mark.parametrize("delivered", range(3))
@pytest.mark.parametrize("lost", SERVERS)
def test_a_push_counts_once_whatever_server_is_lost(lost: int, delivered: int) -> None:
    """The client repeats it if the head or the server that it has named is lost, and names the last one that lives."""
    chain = Chain()
    chain.push(5, reply_from=7)
    chain.deliver()
    chain.push(5, reply_from=7)
    chain.deliver(delivered)
    chain.lose(lost)
    chain.deliver()
    if lost != 6:
        chain.push(min(chain.servers), number=3, reply_from=max(chain.servers))
        chain.deliver()
    assert set(numbers(chain)) == {2, 3}
    assert chain.weights() == [2.0, 2.0]
    chain.push(min(chain.servers), reply_from=max(chain.servers))
    chain.deliver()
    assert chain.replies[-1].header.number == 4
    assert chain.weights() == [3.0, 3.0]


def test_a_reply_of_the_head_waits_for_no_later_acknowledgement() -> None:
    """The last server replies to the push, which also releases a read to which the head replies."""
    chain = Chain()
    hello = RequestHeader(protocol.HELLO, space=chain.description.space_id, number=1)
    description = torch.frombuffer(bytearray(chain.description.to_json()), dtype=torch.uint8)
    chain.replies += chain.servers[5].request(1, hello._replace(length=description.numel()), description)
    chain.pull(5, min_clock=1)
    chain.push(5, reply_from=7)
    chain.deliver()
    chain.replies.clear()
    ends_step = RequestHeader(protocol.PUSH, flags=protocol.TICK, clock=0, reply_from=8, space=hello.space)
    chain.ask(5, ends_step, NOTHING)
    chain.replies += chain.servers[5].request(1, ends_step._replace(number=2), NOTHING)
    chain.deliver()
    assert sorted((reply.member, reply.header.number) for reply in chain.replies) == [(0, 2), (0, 4), (1, 2)]


def test_the_head_handles_what_the_last_server_has_replied_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short request is behind a long one. No acknowledgement follows it."""
    monkeypatch.setattr(protocol, "MAX_INLINE_BYTES", 4)
    chain = Chain()
    chain.push(5)
    chain.ask(5, RequestHeader(protocol.PUSH, count=1, reply_from=8), body_of(torch.ones(1)))
    chain.deliver()
    assert sorted(numbers(chain)) == [2, 3]
    assert chain.weights() == [2.0, 2.0, 2.0]


def test_a_new_head_does_not_count_early_requests_that_have_replies() -> None:
    """The last server replies to some requests that the client has sent again to a server that is not yet the head."""
    chain = Chain()
    del chain.servers[5]
    for number in range(2, 2 + 2 * protocol.REPLY_SLOTS):
        acked = max(0, number - protocol.REPLY_SLOTS)
        chain.ask(6, RequestHeader(protocol.PULL, count=1, acked=acked), NOTHING, number)
    assert not chain.replies


# New servers.


@pytest.mark.parametrize("delivered", range(12))
def test_a_new_server_has_all_that_was_acknowledged(delivered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go on while it receives the state. Then all the first servers are lost."""
    monkeypatch.setattr(replication, "SNAPSHOT_PIECE_BYTES", 1000)
    chain = Chain()
    chain.push(5)
    chain.deliver()
    chain.lose(5)
    chain.start(8, source=7)
    chain.deliver(delivered)
    chain.push(6)
    chain.deliver(delivered)
    chain.push(6)
    chain.deliver()
    assert [reply.header.number for reply in chain.replies] == [2, 3, 4]
    assert chain.level == [(8, 0)]
    chain.add()
    chain.push(6)
    chain.deliver()
    chain.lose(7)
    chain.lose(6)
    chain.push(8, number=5)
    chain.push(8, number=2)  # its reply was kept before the new server came
    chain.push(8)
    assert [reply.header.number for reply in chain.replies] == [2, 3, 4, 5, 5, 2, 6]
    assert chain.weights() == [5.0]


def test_replies_wait_for_a_new_server_when_it_has_the_state() -> None:
    chain = Chain()
    chain.start(8, source=7)
    chain.deliver()
    chain.push(5)
    for _ in range(6):  # to the second, the third, the new one, and back
        assert not chain.replies
        chain.deliver(1)
    assert [reply.header.number for reply in chain.replies] == [2]


@pytest.mark.parametrize("lost", [7, 8])
@pytest.mark.parametrize("delivered", range(9))
def test_serving_continues_if_one_of_them_is_lost_meanwhile(
    lost: int, delivered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if replies wait, because more records than fit were kept for the new server."""
    monkeypatch.setattr(replication, "SNAPSHOT_PIECE_BYTES", 1000)
    monkeypatch.setattr(replication, "MAX_BACKLOG_BYTES", 0)
    chain = Chain()
    chain.start(8, source=7)
    chain.push(5)
    chain.push(5)
    chain.deliver(delivered)
    chain.lose(lost)
    chain.deliver()
    assert [reply.header.number for reply in chain.replies] == [2, 3]
    if lost == 7:
        chain.servers[8].ask_to_join(6, 0)
        chain.deliver()
        chain.level = chain.level[-1:]
        chain.add()
        assert chain.weights() == [2.0, 2.0, 2.0]


def test_the_last_server_adds_one_new_server_at_a_time() -> None:
    chain = Chain()
    chain.start(8, source=6)  # not the last one
    chain.deliver()
    assert not chain.level
    chain.servers[8].ask_to_join(7, 0)
    chain.start(9, source=7)
    chain.deliver()
    assert chain.level == [(8, 0)]
    chain.add()
    chain.servers[9].append(8)
    chain.servers[9].ask_to_join(8, 1)
    chain.deliver()
    assert chain.level == [(9, 1)]


def test_a_server_that_was_declared_lost_is_not_accepted() -> None:
    """It adds nobody to the chain and declares nobody lost, and its records count for nothing."""
    values: dict[str, bytes] = {}
    logs = [ChainLog(lambda: MemoryStore(values), RealRuntime(), SERVERS, 2) for _ in range(2)]
    logs[0].lose(6, by=5)
    logs[1].append(shard=0, member=8, server=0, by=6)
    logs[1].lose(5, by=6)
    logs[1].append(shard=0, member=9, server=1, by=5)
    for log in logs:
        assert log.read() == [ChainEntry(6), ChainEntry(9, 0)]
        assert log.chain_of(0) == ((5, 0), (6, 1), (9, 1))
    chain = Chain()
    chain.push(5)
    source, to, record = chain.wire.popleft()
    chain.servers[to].lose(source, left=False)
    chain.servers[to].receive(source, record)
    assert not chain.wire


# On the simulator.


def replicated(workers: int, servers: int, replicas: int) -> list[Any]:
    def run(transport: Transport) -> None:
        serve(network_of(transport, workers, servers, replicas=replicas))

    return [run] * servers


def count_ones(world: sl.World) -> list[float]:
    with open_space(world, "s", 9, replicas=2) as client:
        for _ in range(20):
            world.compute(0.01)
            client.push(None, torch.ones(9), tick=True).wait()
        world.barrier()
        found = done(client.pull(min_clock=20)).tolist()
        world.barrier()
        return found


@pytest.mark.parametrize("lost", [2, 3, 4])
def test_a_lost_server_loses_nothing(lost: int) -> None:
    run = sl.simulate(count_ones, 2, extra=replicated(2, 3, 2), faults=[Kill(lost, at=0.1)])
    assert run.killed == (lost,)
    assert run.results == ([40.0] * 9,) * 2


@pytest.mark.parametrize("numel", [6, 60_000])
def test_all_requests_under_way_go_to_the_next_server(numel: int) -> None:
    """A read waits at the server for earlier pushes, for which the client does not wait."""

    def work(world: sl.World) -> list[float]:
        client = open_space(world, "s", numel, replicas=2)
        world.compute(1.0 - world.runtime.now())
        pushes = [client.push(None, torch.ones(numel)) for _ in range(5)]
        found = done(client.pull())
        for push in pushes:
            push.wait()
        client.close()
        return [found.min().item(), found.max().item()]

    for lost in (1, 2):
        faults = [Kill(lost, at=1.0005)]
        run = sl.simulate(work, 1, extra=replicated(1, 2, 2), faults=faults, network=sl.Network(latency=1e-3))
        assert run.killed == (lost,)
        assert run.results == ([5.0, 5.0],)


def test_the_loss_of_all_replicas_names_the_last() -> None:
    with pytest.raises(sl.errors.PeerLostError, match="lost rank 3"):
        sl.simulate(count_ones, 2, extra=replicated(2, 3, 2), faults=[Kill(2, at=0.1), Kill(3, at=0.15)])


def test_replicas_need_enough_dedicated_servers() -> None:
    for replicas in (0, 3):
        with pytest.raises(sl.errors.WorldError, match=f"replicas={replicas} with 2 dedicated servers"):
            sl.simulate(partial(server_network, replicas=replicas), 2, extra=replicated(2, 2, 1))
    with pytest.raises(sl.errors.WorldError, match="replicas=2 with 0 dedicated servers"):
        network_of(SingleTransport(), workers=1, replicas=2)


def test_workers_and_servers_must_agree_about_replicas() -> None:
    with pytest.raises(sl.errors.ProtocolError, match="replicas=2, and this server has 1"):
        sl.simulate(count_ones, 1, extra=replicated(1, 2, 1))

    def twice(world: sl.World) -> None:
        server_network(world)
        open_space(world, "s", 4, replicas=2)

    with pytest.raises(sl.errors.WorldError, match="each shard of this network lives on 1"):
        sl.simulate(twice, 1, extra=replicated(1, 2, 2))


def test_sub_masters_have_no_replicas() -> None:
    network = network_of(SingleTransport(), workers=1)
    network = type(network)(network.transport, (0, 1), (2, 3, 4), me=0, dedicated=True, replicas=2)
    with pytest.raises(sl.errors.IncompatibleError, match="a sub-master cannot be replicated"):
        groups_of(network, 1)
    with pytest.raises(sl.errors.ProtocolError, match="a sub-master has no replicas"):
        describe(replicas=2, parent=describe().to_json().decode()).check()


@pytest.mark.hunt
def test_a_client_reads_the_same_bits_whatever_server_is_killed() -> None:
    killed = hunted(check_same_replies, seeds(15))
    assert sum(map(bool, killed)) >= len(killed) // 2


@pytest.mark.hunt
def test_a_client_reads_the_same_bits_whatever_server_is_replaced() -> None:
    killed = hunted(check_replaced, seeds(12))
    assert sum(map(len, killed)) >= len(killed)


# Real processes.

HANDLERS = """
import os, signal
from syncline.server import handler

@handler("kill_server_0")
def kill_server_0(weights, values, state):
    if os.environ["SYNCLINE_ROLE"] == "server" and os.environ["SYNCLINE_SERVER"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""
COUNT = """
import torch, syncline as sl
from syncline.server import open_space
NUMEL = 100_000
with sl.init() as world:
    client, called, under_way = open_space(world, "s", NUMEL), [], []
    for step in range(40):
        if world.rank == 1 and step == 10:
            client.push((0, 1), torch.zeros(1), handler="kill_server_0")
        if len(under_way) == 4:
            assert under_way.pop(0).wait().min() > step - 4
        read = client.push_pull(None, torch.ones(NUMEL), tick=True, min_clock=client.clock - 4, callback=called.append)
        under_way.append(read)
    for read in under_way:
        read.wait()
    while len(called) < 40:
        time.sleep(0.01)
    client.finish_training()
    world.barrier()
    values = client.get()
    say("values", values.min().item(), values.max().item(), "steps", *client.steps())
    client.close()
"""


def test_kill_9_of_a_replicated_server_loses_nothing(runs: Runs) -> None:
    """Several tasks of a client wait for replies of the lost server: callbacks, and the script itself."""
    (runs.folder / "my_handlers.py").write_text(HANDLERS)
    options = ("-n", "2", "--servers", "2", "--replicas", "2", "--handlers", "my_handlers")
    ended = runs.run("run", *options, runs.script(COUNT))
    assert ended.code == 0, ended.describe()
    assert ended.out.count("values 80.0 80.0 steps 40 40") == 2, ended.describe()
    assert "server 0 was killed by signal 9 (SIGKILL); its replicas continue" in ended.err
    runs.assert_nothing_left()


TRAIN = """
import torch, syncline as sl
torch.manual_seed(0)
with sl.init() as world:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run = sl.distribute(model, optimizer, strategy="ssp(slack=2)")
    steps = left = 0
    while left < 100:
        x = torch.randn(16, 4)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        steps += 1
        left += (here / "killed").exists()
        if steps == 20:
            post(f"started{rank}")
    run.finish()
    assert loss < 0.1, loss
    say("trained")
"""


def test_a_training_continues_after_kill_9_of_a_server(runs: Runs) -> None:
    training = runs.start("run", "-n", "2", "--servers", "2", "--replicas", "2", runs.script(TRAIN))
    for rank in range(2):
        runs.read(f"started{rank}")
    os.kill(training.programs()[0], signal.SIGKILL)
    runs.post("killed")
    ended = training.finish()
    assert ended.code == 0, ended.describe()
    assert ended.out.count("trained") == 2, ended.describe()
    runs.assert_nothing_left()


COUNT_ACKNOWLEDGED = """
import torch, syncline as sl
from syncline.server import open_space
with sl.init() as world:
    spaces = [
        open_space(world, "large", 20_000, rules=("adagrad(1.0)", "add"), bounds=(0, 1000)),
        open_space(world, "small", 2_000, rules=("adagrad(1.0)", "add"), bounds=(0, 1000)),
    ]
    pushed, left = 0, 100
    while left:
        for push in [space.push(None, torch.ones(space.numel)) for space in spaces]:
            push.wait()
        pushed += 1
        left -= (here / "killed").exists()
        if pushed == 20:
            post(f"started{rank}")
    total = sl.allreduce(torch.tensor([float(pushed)]), "sum")
    say("lost or doubled:", sum((space.get()[1000:] != total).sum().item() for space in spaces))
    for space in spaces:
        space.close()
"""


def test_a_killed_server_is_replaced_and_the_other_one_is_killed(runs: Runs) -> None:
    """All that was acknowledged is there, though both of the first servers of each shard were killed."""
    options = ("-n", "2", "--servers", "2", "--replicas", "2", "--restart", "1")
    counting = runs.start("run", *options, runs.script(COUNT_ACKNOWLEDGED))
    for rank in range(2):
        runs.read(f"started{rank}")
    first, second = counting.programs()[:2]
    for number, server in enumerate((first, second)):
        os.kill(server, signal.SIGKILL)
        wait_for(lambda: f"the place of server {number}" in counting.all_err, counting.describe())  # noqa: B023
    runs.post("killed")
    ended = counting.finish()
    assert ended.code == 0, ended.describe()
    assert ended.out.count("lost or doubled: 0") == 2, ended.describe()
    assert "its replicas continue, and it is started again in 1 s (restart 1 of 1)" in ended.err
    runs.assert_nothing_left()
