"""The teams of an elastic job on ZeroMQ: channels that any member ends for all, on sockets that persist."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from syncline.environment import Environment, Rendezvous
from syncline.errors import PeerLostError, SynclineError, WorldError
from syncline.testing.processes import TEST_TIMEOUT_S
from syncline.transports.base import Transport
from syncline.transports.zeromq import ZmqConnector
from syncline.transports.zeromq.connection import PART_BYTES
from tests.transports.zeromq_worlds import TIMEOUT, serve_a_store, until

pytestmark = pytest.mark.xdist_group("zeromq")


class Job:
    """The members of an elastic job, all in this process."""

    def __init__(self, members: int) -> None:
        self.store = serve_a_store()
        self.members = [self.join(member) for member in range(members)]

    def join(self, member: int) -> ZmqConnector:
        place = Rendezvous("127.0.0.1", self.store.port, hosted=True)
        return ZmqConnector(Environment(source="a test", rendezvous=place), TIMEOUT, member)

    def connect(self, generation: int, *members: int) -> list[Transport]:
        return [self.members[member].connect(members, generation) for member in members]

    def report_dead(self, member: int) -> None:
        """As the launcher does."""
        self.store.set(f"syncline/dead/{member}", json.dumps({"reason": "it was killed by signal 9"}))
        self.store.add("syncline/dead", 1)


@pytest.fixture
def job() -> Iterator[Job]:
    found = Job(3)
    yield found
    for member in found.members:
        member.close()


def failing(wait: Callable[[], object], runtime: Any) -> Callable[[], PeerLostError]:
    """Wait in a task. Returns a function that returns the error of the wait."""
    found: list[PeerLostError] = []

    def attempt() -> None:
        with pytest.raises(PeerLostError) as caught:
            wait()
        found.append(caught.value)

    task = runtime.spawn(attempt)

    def result() -> PeerLostError:
        assert task.join(TEST_TIMEOUT_S)
        return found[0]

    return result


def talk(one: Transport, other: Transport) -> None:
    """A small and a large message."""
    for length in (10, 2 * PART_BYTES + 1):
        sent, got = torch.randint(0, 256, (length,), dtype=torch.uint8), torch.zeros(length, dtype=torch.uint8)
        receipt = other.recv(got, one.rank, 7)
        one.send(sent, other.rank, 7).wait()
        receipt.wait()
        assert torch.equal(sent, got)


def test_one_member_ends_the_waits_of_all_on_its_channel(job: Job) -> None:
    """Receives, sends, and a receive whose message arrives in parts; also what is called later."""
    first, second, third = job.connect(1, 0, 1, 2)
    channels = [transport.split(range(3)) for transport in (first, second, third)]
    one, two, three = (channel for channel in channels if channel is not None)
    runtime, big = first.runtime, torch.zeros(64 * PART_BYTES, dtype=torch.uint8)
    arriving = two.recv(big.clone(), 2, 4)
    sending = [three.send(big, 1, 4), three.send(big, 0, 5)]
    waits = [
        failing(two.recv(torch.zeros(1), 0, 5).wait, runtime),
        failing(three.recv(torch.zeros(1), None, 5).wait, runtime),
    ]
    one.abort()
    assert all("the channel was given up" in str(wait()) for wait in waits)
    for handle in (arriving, *sending):
        with suppress(PeerLostError):  # it may be complete, or discarded
            handle.wait()
    with pytest.raises(PeerLostError, match="given up"):
        two.recv(torch.zeros(1), 0, 6).wait()
    with pytest.raises(PeerLostError, match="given up"):
        two.send(torch.zeros(1), 2, 6)
    talk(first, second)  # other channels of the team continue


def test_a_member_that_is_late_finds_the_channel_ended(job: Job) -> None:
    first = job.members[0].connect((0, 1), 1)
    first.abort()
    second = job.members[1].connect((0, 1), 1)
    with pytest.raises(PeerLostError, match="given up"):
        second.recv(torch.zeros(1), 0, 5).wait()


def test_a_failed_wait_ends_the_channel_of_all(job: Job) -> None:
    """Rank 1 waits for rank 0, which waits for the lost rank 2: both waits end."""
    first, second, _ = job.connect(1, 0, 1, 2)
    waits = [
        failing(first.recv(torch.zeros(1), 2, 5).wait, first.runtime),
        failing(second.recv(torch.zeros(1), 0, 5).wait, first.runtime),
    ]
    job.report_dead(2)
    assert waits[0]().peer == 2
    waits[1]()
    assert job.members[0].lost() == {2: "it was killed by signal 9"}


def test_the_next_team_uses_the_same_connections(job: Job) -> None:
    first, second, third = job.connect(1, 0, 1, 2)
    talk(first, second)
    talk(first, third)
    before = {member: job.members[0].node.connection(member) for member in (1, 2)}
    first.abort()
    first, second = job.connect(2, 0, 1)
    assert job.members[0].node.connection(1) is before[1]
    talk(second, first)


def test_late_messages_of_an_earlier_team_and_of_a_lost_member_are_dropped(job: Job) -> None:
    _, second, third = job.connect(1, 0, 1, 2)
    first, buffer = job.members[0].connect((0, 1), 2), torch.zeros(1)
    receipt: Any = first.recv(buffer, None, 5)
    second.send(torch.full((1,), 2.0), 0, 5)  # of the earlier team
    third.send(torch.full((1,), 3.0), 0, 5)  # of a member that is not in the team
    job.report_dead(2)
    until(lambda: 2 not in job.members[0].node.peers, "the sockets of the lost member are released")
    with suppress(SynclineError):  # it may not know yet that it is lost
        job.members[2].connect((0, 1, 2), 2).send(torch.full((1,), 4.0), 0, 5)
    second = job.members[1].connect((0, 1), 2)
    second.send(torch.full((1,), 5.0), 0, 5)
    receipt.wait()
    assert (receipt.source, float(buffer)) == (1, 5.0)
    talk(first, second)


def test_channels_of_teams_have_numbers_of_their_own(job: Job) -> None:
    """Teams, those prepared in advance, and their splits."""
    numbers = set()
    for team in (1, 2, 17, (1 << 32) + 1, (1 << 32) + 17):
        channel = job.members[0].connect((0, 1), team)
        numbers |= {each.channel_number for each in (channel, channel.split([0, 1]), channel.split([0, 1]))}  # type: ignore[union-attr]
    assert len(numbers) == 15
    assert max(numbers) < 1 << 32


def test_a_newcomer_joins_and_a_lost_member_leaves_no_sockets(job: Job) -> None:
    job.connect(1, 0, 1, 2)
    job.members[1].close()
    node = job.members[0].node
    until(lambda: 1 not in node.peers, "its sockets are released")
    job.members[1] = job.join(3)
    place = {0: 0, 2: 2, 3: 1}
    team = [job.members[place[member]].connect((0, 2, 3), 2) for member in (0, 2, 3)]
    talk(team[0], team[2])
    talk(team[2], team[1])


def test_a_broken_connection_is_evidence_for_the_next_team(job: Job) -> None:
    first, _, third = job.connect(1, 0, 1, 2)
    talk(third, first)
    job.members[2].node.peers[0].connection.send_control(200)  # no kind of the protocol
    with pytest.raises(SynclineError):
        first.recv(torch.zeros(1), 2, 5).wait()
    assert list(job.members[0].unreachable()) == [2]


def test_a_launcher_without_a_store_is_refused() -> None:
    with pytest.raises(WorldError, match=r"needs the store of `syncline run --elastic`, and torchrun serves none"):
        ZmqConnector(Environment(source="torchrun", rendezvous=Rendezvous("127.0.0.1", 1)), TIMEOUT, 0)
