"""The simulator's network, and the transport of each virtual rank on it."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, PeerLostError, WorldError
from syncline.runtime import Runtime, SimulatedRuntime, Simulator
from syncline.transports.base import (
    DEFAULT_TIMEOUT_S,
    BufferedBytes,
    BytesHandle,
    Handle,
    Monitor,
    RemoteMemory,
    Timing,
    Transport,
    Window,
    check_span,
    event_timeout,
    format_bytes,
    group_ranks_by_text,
)
from syncline.transports.faults import Delay, Drop, Duplicate, Fault, Freeze, Kill, Partition, ranks_of, slowness
from syncline.transports.key_value_store import KeyValueStore
from syncline.transports.memory_store import MemoryStore
from syncline.transports.messages import Mailbox, MailboxHandle, PostedReceive, channel_closed, tag_name
from syncline.transports.network import Network

__all__ = [
    "Message",
    "SimulatedConnector",
    "SimulatedNetwork",
    "SimulatedTransport",
    "VirtualTiming",
    "cut_off_rank",
    "freeze_rank",
    "job_channel",
    "kill_rank",
]

JOB_CHANNEL = ("job",)
"""The key of the channel of all processes: the ranks of the world and the extra ones."""
MAX_KEPT_CALLS = 1024
"""Number of collectives of a channel whose calls are stored. A rank further behind is not compared."""
STORE_LATENCY_S = 1e-4
"""Virtual seconds that a call to the job's store takes."""
LOST_AFTER_S = 10.0
"""Virtual seconds without a heartbeat after which the launcher of an elastic job counts a worker as lost."""
RETRY_AFTER_S = 0.05
"""Seconds after which a lossy message is sent again, if the network drops messages."""


class Message(NamedTuple):
    """A message that arrived; times in virtual seconds."""

    source: int
    to: int
    tag: int
    nbytes: int
    sent: float
    arrived: float


@dataclass(eq=False, slots=True)
class _MessageInFlight:
    tag: int
    nbytes: int
    sent: float
    head: float
    on_arrival: Callable[[], None]


class _DirectedLink:
    """The connection from one rank to another, with its messages in the order of sending."""

    __slots__ = ("alpha", "beta", "last_head", "network", "receiving", "source", "to", "transit")

    def __init__(self, network: SimulatedNetwork, source: int, to: int) -> None:
        self.network, self.source, self.to = network, source, to
        link = network.model.link(source, to)
        self.alpha, self.beta = link.latency, 1.0 / link.bandwidth
        self.last_head = 0.0
        self.transit: deque[_MessageInFlight] = deque()
        self.receiving: deque[_MessageInFlight] = deque()

    def arrive(self) -> None:
        """The first byte has reached the receiver's port.

        Handles the earliest message sent, because in chaos mode the entries fire in any order.
        """
        network, to = self.network, self.to
        message = self.transit.popleft()
        free = network.in_free[to]
        start = message.head if message.head > free else free
        held = network.model.per_message + message.nbytes * self.beta
        if network.uneven:
            held *= network.slowness(to)
        message.head = network.in_free[to] = start + held
        self.receiving.append(message)
        network.simulator.schedule_at(message.head, self.on_arrival)

    def on_arrival(self) -> None:
        """The last byte has arrived."""
        network = self.network
        message, now = self.receiving.popleft(), network.simulator.now
        assert now >= message.head, "a message was about to be seen before its virtual arrival"
        if self.to not in network.gone:
            network.messages.append(Message(self.source, self.to, message.tag, message.nbytes, message.sent, now))
            message.on_arrival()


class SimulatedNetwork:
    """The state of the simulated network: ports, messages in flight, and the ranks that have ended."""

    def __init__(
        self, simulator: Simulator, size: int, model: Network, faults: Sequence[Fault] = (), elastic: bool = False
    ) -> None:
        """`elastic`: a launcher watches the ranks, and counts those without heartbeats as lost."""
        self.simulator = simulator
        self.size = size
        self.model = model
        self.faults = tuple(faults)
        self.uneven = bool(model.slow or self.faults)
        """Whether some ranks may be slower than others."""
        self.runtimes = [SimulatedRuntime(simulator, rank) for rank in range(size)]
        self.messages: list[Message] = []
        self.lost: int | None = None
        """The rank that the first timeout has named. All later ones name the same."""
        self.gone: dict[int, float] = {}
        self.declared: dict[int, float] = {}
        """The ranks that the launcher counts as lost although they have not ended, and since when."""
        self._elastic = elastic
        self.blames: dict[int, int] = {}
        """By rank: the lost rank in its latest error."""
        self._causes: dict[int, int] = {}
        """By rank that ended because another was lost: that other rank."""
        self.killed: set[int] = set()
        self.ended_well: set[int] = set()
        self._broken: set[int] = set()
        self._out_free = [0.0] * size
        self.in_free = [0.0] * size
        """By rank: when its port is free to receive."""
        self._links: dict[tuple[int, int], _DirectedLink] = {}
        self._mailboxes: dict[tuple[int, int], Mailbox] = {}
        self._transports: list[SimulatedTransport] = []
        self._splits: dict[tuple[object, ...], int] = {}
        self.roots = {0, self.channel(JOB_CHANNEL)}
        """Channels that exist from the start: a rank may close one and use it again."""
        self._windows: dict[tuple[object, ...], list[Tensor]] = {}
        self._calls: dict[tuple[int, int], dict[int, str]] = {}
        self.control_values: dict[str, bytes] = {}
        """The values of the job's store."""
        self.broken_channels: set[int] = set()
        """Channels of teams that a member has aborted."""
        self.unmatched: dict[int, dict[_SimulatedSend, None]] = {}
        """By channel: the sends that wait for their receive, in order."""
        self._schedule_faults()

    def slowness(self, rank: int) -> float:
        """The factor by which a rank is slower than the others now."""
        factor = self.model.slow.get(rank, 1.0) if self.model.slow else 1.0
        return factor * slowness(self.faults, rank, self.simulator.now) if self.faults else factor

    # Messages.

    def launch(
        self, source: int, to: int, tag: int, nbytes: int, on_arrival: Callable[[], None], lossy: bool = False
    ) -> float:
        """Send a message and call `on_arrival` when it arrives. Returns when the sender's port is free again."""
        simulator = self.simulator
        link = self._links.get((source, to))
        if link is None:
            link = self._links[source, to] = _DirectedLink(self, source, to)
        now, free = simulator.now, self._out_free[source]
        start = now if now > free else free
        held = self.model.per_message + nbytes * link.beta
        if self.uneven:
            held *= self.slowness(source)
        left = self._out_free[source] = start + held
        copies = self._copies() if lossy else 1
        for _ in range(copies):
            latency = link.alpha * (1.0 + self.model.jitter * simulator.random.random())
            if self.faults:
                latency += self._lateness(source, to)
            head = start + latency
            if link.last_head > head:
                head = link.last_head
            if self.faults:
                head = max(head, self._held_until(source, to))
                if head == math.inf:
                    break
            link.last_head = head
            link.transit.append(_MessageInFlight(tag, nbytes, now, head, on_arrival))
            simulator.schedule_at(head, link.arrive)
        return left

    def _copies(self) -> int:
        copies = 1
        for fault in self.faults:
            if isinstance(fault, Drop) and self.simulator.random.random() < fault.probability:
                self.simulator.faulted = True
                copies = 0
            elif isinstance(fault, Duplicate) and self.simulator.random.random() < fault.probability:
                copies = min(copies * 2, 2)
        return copies

    def _lateness(self, source: int, to: int) -> float:
        late = 0.0
        for fault in self.faults:
            if (
                isinstance(fault, Delay)
                and fault.source in (None, source)
                and fault.to in (None, to)
                and self.simulator.random.random() < fault.probability
            ):
                late += fault.seconds
        return late

    def _held_until(self, source: int, to: int) -> float:
        until = 0.0
        for fault in self.faults:
            if isinstance(fault, Partition) and fault.separates(source, to, self.simulator.now):
                self.simulator.faulted = True
                until = max(until, fault.stop)
        return until

    # Losses.

    def _schedule_faults(self) -> None:
        for fault in self.faults:
            if any(not 0 <= rank < self.size for rank in ranks_of(fault)):
                raise WorldError(f"{fault} strikes a rank outside the world of {self.size}")
            if isinstance(fault, Kill):
                self.simulator.schedule(fault.at, self.kill_callback(fault.rank))
            elif isinstance(fault, Freeze):
                self.simulator.schedule(fault.at, partial(self.freeze, fault.rank, fault.seconds))
            elif isinstance(fault, Partition) and fault.others is None:
                for rank in fault.group:
                    silent = partial(self._miss_heartbeats, rank, fault.stop - fault.start)
                    self.simulator.schedule(fault.start, silent)

    def freeze(self, rank: int, seconds: float) -> None:
        """Stop the tasks of a rank for so long."""
        self.simulator.freeze(rank)
        self.simulator.schedule(seconds, partial(self.simulator.thaw, rank))
        self._miss_heartbeats(rank, seconds)

    def cut_off(self, rank: int, seconds: float) -> None:
        """Hold all messages of a rank, and its calls to the store, for so long from now on."""
        now = self.simulator.now
        self.faults = (*self.faults, Partition((rank,), start=now, stop=now + seconds))
        self._miss_heartbeats(rank, seconds)

    def _miss_heartbeats(self, rank: int, seconds: float) -> None:
        """No heartbeat of a rank reaches the launcher for so long. In chaos mode the seed draws whether it is lost."""
        if not self._elastic:
            return
        lost = self.simulator.schedule(LOST_AFTER_S, partial(self._declare_lost, rank))
        if seconds < math.inf:
            self.simulator.schedule(seconds, partial(self.simulator.cancel, lost))

    def _declare_lost(self, rank: int) -> None:
        """The launcher counts a rank as lost: the others end their waits for it, and it may still run."""
        if rank not in self.gone:
            self.simulator.faulted = True
            self.declared[rank] = self.simulator.now
            self._break_links(rank)
            for transport in self._transports:
                transport.declared_lost(rank)

    def call_store(self, rank: int) -> None:
        """A call to the job's store takes its time. A rank that is cut off waits until it is reachable again."""
        self.runtimes[rank].sleep(STORE_LATENCY_S)
        for fault in self.faults:
            if isinstance(fault, Partition) and fault.others is None and rank in fault.group:
                while fault.start <= self.simulator.now < fault.stop:
                    if fault.stop == math.inf:
                        raise RuntimeError(f"rank {rank} is cut off from the store")
                    self.runtimes[rank].sleep_until(fault.stop)

    def kill_callback(self, rank: int) -> Callable[[], None]:
        """A function that ends all tasks of a rank."""

        def strike() -> None:
            tasks = [task for task in self.simulator.tasks if task.rank == rank and not task.done()]
            if tasks:
                self.killed.add(rank)
                self.simulator.interrupt(tasks)
                self.leave(rank)

        return strike

    def leave(self, rank: int, because_of: int | None = None, *, failed: bool = True) -> None:
        """End a rank, perhaps because another is lost. Its links break after its messages have arrived."""
        if rank in self.gone:
            return
        if not failed:
            self.ended_well.add(rank)
        if because_of is not None:
            self._causes[rank] = because_of
        self.simulator.faulted = True
        self.gone[rank] = self.simulator.now
        self._break_when_quiet(rank)

    def _break_when_quiet(self, rank: int) -> None:
        arrivals = [
            message.head
            for link in self._links.values()
            if link.source == rank
            for message in (*link.transit, *link.receiving)
        ]
        if arrivals:  # check again when the last one is due
            self.simulator.schedule_at(
                max([*arrivals, self.simulator.now + 1e-9]), lambda: self._break_when_quiet(rank)
            )
            return
        self._break_links(rank)

    def _break_links(self, rank: int) -> None:
        self._broken.add(rank)
        for transport in self._transports:
            transport.peer_broke(rank)

    def broken(self, rank: int) -> bool:
        """Whether the peers can know that this rank is gone."""
        return rank in self._broken

    def end_of(self, rank: int) -> str:
        """How a rank has ended."""
        if rank not in self.gone:
            return f"no heartbeat for {LOST_AFTER_S:.3g} s at t={self.declared[rank]:.6g} s"
        how = "was killed" if rank in self.killed else "ended with an exception"
        how = "ended" if rank in self.ended_well else how
        return f"it {how} at t={self.gone[rank]:.6g} s"

    def cause_of(self, rank: int) -> int:
        """The rank to name in an error about a rank that has ended: the one that it has lost, or itself."""
        return self._causes.get(rank, rank) if rank in self.gone else self.blames.get(rank, rank)

    def name_lost(self, peer: int | None) -> int | None:
        """The lost rank that all errors name: the first one."""
        if self.lost is None and peer is not None:
            self.lost = peer
        return self.lost if self.lost is not None else peer

    # Transports, splits and windows. Every rank that asks with the same key gets the same object.

    def register(self, transport: SimulatedTransport) -> None:
        """Report losses to a transport from now on."""
        self._transports.append(transport)

    def mailbox(self, channel: int, rank: int) -> Mailbox:
        """The incoming messages of one rank on one channel."""
        mailbox = self._mailboxes.get((channel, rank))
        if mailbox is None:
            mailbox = self._mailboxes[channel, rank] = Mailbox(self.runtimes[rank])
        return mailbox

    def channel(self, key: tuple[object, ...]) -> int:
        """The number of the channel that all members ask for by the same key."""
        return self._splits.setdefault(key, len(self._splits) + 1)

    def calls_of(self, channel: int, number: int, size: int) -> dict[int, str]:
        """By rank: the `number`-th collective on a channel, for the ranks that have called it."""
        calls = self._calls.get((channel, number))
        if calls is None or len(calls) == size:  # a new world on the same channel counts from the start
            calls = self._calls[channel, number] = {}
        self._calls.pop((channel, number - MAX_KEPT_CALLS), None)
        return calls

    def break_channel(self, channel: int, error: Exception) -> None:
        """End every receive on a channel with an error."""
        for (number, _), mailbox in list(self._mailboxes.items()):
            if number == channel:
                mailbox.fail(lambda _: error)

    def break_team_channel(self, channel: int, error: Exception) -> None:
        """End every wait on a team's channel, now and later: a member forms another team."""
        self.broken_channels.add(channel)
        self.break_channel(channel, error)
        for send in list(self.unmatched.get(channel, ())):
            send.matched()

    def memory(self, key: tuple[object, ...], size: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """The memory of a window, one tensor per member."""
        memory = self._windows.setdefault(key, [torch.zeros(numel, dtype=dtype) for _ in range(size)])
        if memory[0].numel() != numel or memory[0].dtype != dtype:
            raise WorldError(
                f"ranks ask for different windows: {memory[0].numel()} × {memory[0].dtype} and {numel} × {dtype}"
            )
        return memory


def job_channel(network: SimulatedNetwork, member: int, timeout: float = DEFAULT_TIMEOUT_S) -> SimulatedTransport:
    """The channel on which one process reaches all others, ranks of the world or not."""
    return SimulatedTransport(network, tuple(range(network.size)), member, network.channel(JOB_CHANNEL), timeout)


class SimulatedTransport(Transport):
    """One virtual rank on one channel of a simulated network."""

    name = "simulated"

    def __init__(
        self,
        network: SimulatedNetwork,
        members: tuple[int, ...],
        global_rank: int,
        channel: int = 0,
        timeout: float = DEFAULT_TIMEOUT_S,
        team: bool = False,
    ) -> None:
        super().__init__(members.index(global_rank), len(members), network.runtimes[global_rank], timeout, members)
        self._team = team
        """Whether the channel belongs to a team of an elastic job, so that any member can end it for all."""
        self.network = network
        self.global_rank = global_rank
        self._channel = channel
        self._made = 0
        self.mailbox = network.mailbox(channel, global_rank)
        self.timing = VirtualTiming(network, members, global_rank)
        self.monitor = _CallComparison(self)
        self.retry_after_s = RETRY_AFTER_S if any(isinstance(fault, Drop) for fault in network.faults) else None
        network.register(self)

    @property
    def channel(self) -> int:
        """The number of this channel in the network."""
        return self._channel

    @property
    def memory(self) -> RemoteMemory:
        return _SimulatedMemory(self)

    def next_split(self) -> int:
        """Count the splits and memories that the members make together."""
        self._made += 1
        return self._made

    def _send(self, data: Tensor, to: int, tag: int, exact: bool, lossy: bool) -> Handle:
        network, receiver, nbytes = self.network, self.members[to], data.numel()
        ended = self._channel in network.broken_channels or self.global_rank in network.declared
        if network.broken(receiver) or ended:
            raise self.failure(to, f"a message to rank {receiver} ({tag_name(tag)}, {format_bytes(nbytes)})", 0.0, None)
        handle = _SimulatedSend(self, to, nbytes, wait_for_match=not lossy and nbytes > network.model.eager)
        on_arrival = partial(
            network.mailbox(self._channel, receiver).deliver, data.clone(), self.rank, tag, handle.matched
        )
        if handle.waits_for_match:
            network.unmatched.setdefault(self._channel, {})[handle] = None
        if receiver == self.global_rank:
            on_arrival()
        else:
            handle.left = network.launch(self.global_rank, receiver, tag, nbytes, on_arrival, lossy)
        return handle

    def _recv(self, data: Tensor, source: int | None, tag: int, exact: bool) -> Handle:
        return self._post(PostedReceive(data, source, tag, exact))

    def recv_bytes(self, max_bytes: int, source: int, tag: int = 0, *, via: int | None = None) -> BytesHandle:
        self._check(source, "source", tag)
        posted = PostedReceive(torch.empty(max_bytes, dtype=torch.uint8), source, tag, False, via=via)
        return BufferedBytes(posted.data, self._post(posted), partial(self.mailbox.cancel, posted))

    def _post(self, posted: PostedReceive) -> Handle:
        if self._channel in self.network.broken_channels or self.global_rank in self.network.declared:
            raise self.failure(posted.wanted, f"a message ({tag_name(posted.tag)})", 0.0, None)
        self.mailbox.add(posted)
        for rank in (posted.wanted, posted.via):
            if rank is not None and self.network.broken(self.members[rank]):
                self.peer_broke(self.members[rank])
        return MailboxHandle(self, self.mailbox, posted)

    def peer_broke(self, global_rank: int) -> None:
        """End the receives and the sends that wait for a rank that has ended."""
        if global_rank not in self.members:
            return
        peer = self.members.index(global_rank)
        for send in list(self.network.unmatched.get(self._channel, ())):
            send.peer_broke(self, peer)
        self.mailbox.fail(
            lambda posted: (
                self.failure(peer, f"a message ({tag_name(posted.tag)})", 0.0, None) if posted.needs(peer) else None
            )
        )

    def declared_lost(self, global_rank: int) -> None:
        """The launcher counts a rank as lost. If it is this one, its waits end: the others have dropped it."""
        if global_rank == self.global_rank:
            self.mailbox.fail(
                lambda posted: self.failure(posted.wanted, f"a message ({tag_name(posted.tag)})", 0.0, None)
            )

    def failure(self, peer: int | None, pending: str, seconds: float, cause: BaseException | None) -> Exception:
        rank = None if peer is None else self.members[peer]
        if self.global_rank in self.network.declared:
            return PeerLostError(
                f"rank {self.global_rank} waits for {pending}, and the others have declared this rank lost: "
                f"{self.network.end_of(self.global_rank)}",
                peer=rank,
                pending=pending,
                seconds=seconds,
            )
        named: int | None
        if rank is not None and (rank in self.network.gone or rank in self.network.blames):
            named = self.network.cause_of(rank)
        elif seconds >= self.timeout:
            named = self.network.name_lost(rank)
        else:  # a short wait: no rank counts as lost
            named = rank if self.network.lost is None else self.network.lost
        if named is not None and named in self.network.gone:
            self.network.blames[self.global_rank] = named
        since = {**self.network.declared, **self.network.gone}.get(-1 if named is None else named)
        gone = f" (gone since t={since:.6g} s)" if since is not None else f" after {seconds:.3g} s"
        whom = "anyone" if named is None else f"rank {named}"
        return PeerLostError(
            f"rank {self.global_rank} lost {whom}{gone} while waiting for {pending}",
            peer=named,
            pending=pending,
            seconds=seconds,
        )

    def control_store(self) -> MemoryStore:
        return MemoryStore(self.network.control_values, lambda: self.network.call_store(self.global_rank))

    def lost(self) -> dict[int, str]:
        return {rank: self.network.end_of(rank) for rank in self.members if self.network.broken(rank)}

    @property
    def ended(self) -> bool:
        """Whether a member has ended this channel of a team."""
        return self._channel in self.network.broken_channels

    def abort(self) -> None:
        self.mailbox.fail(channel_closed)
        if self._team and not self.ended:
            self.network.break_team_channel(self._channel, self.failure(None, "a message", 0.0, None))

    def close(self) -> None:
        if self._channel in self.network.roots:
            self.abort()  # the same rank may call init again on this channel
        else:
            self.mailbox.close(channel_closed)

    def _split(self, members: tuple[int, ...]) -> Transport | None:
        number = self.next_split()
        if self.rank not in members:
            return None
        channel = self.network.channel((self._channel, number, members))
        chosen = tuple(self.members[rank] for rank in members)
        return SimulatedTransport(self.network, chosen, self.global_rank, channel, self.timeout, self._team)

    def split_by_key(self, key: str) -> Transport:
        """The ranks that join later are members of the channel of all processes from the start."""
        channel = self.network.channel((self._channel, key))
        return SimulatedTransport(self.network, self.members, self.global_rank, channel, self.timeout)


class SimulatedConnector:
    """Makes the channels of the teams of a simulated elastic job."""

    def __init__(
        self,
        network: SimulatedNetwork,
        member: int,
        timeout: float = DEFAULT_TIMEOUT_S,
        roles: tuple[str, ...] = (),
    ) -> None:
        """`roles` are those of the processes that are not workers."""
        self.network, self.member, self.timeout, self.roles = network, member, timeout, roles
        self.runtime: Runtime = network.runtimes[member]
        self.store: KeyValueStore = MemoryStore(network.control_values, lambda: network.call_store(member))

    def lost(self) -> dict[int, str]:
        network = self.network
        return {rank: network.end_of(rank) for rank in {**network.declared, **network.gone} if network.broken(rank)}

    def unreachable(self) -> dict[int, str]:
        now, faults = self.network.simulator.now, self.network.faults
        limit = min(LOST_AFTER_S, self.timeout)  # a cut is found after this time
        cuts = [fault for fault in faults if isinstance(fault, Partition) and now - fault.start >= limit]
        return {
            rank: "no message passes between the two"
            for rank in range(self.network.size)
            if any(cut.separates(self.member, rank, now) for cut in cuts)
        }

    def connect(self, members: tuple[int, ...], number: int) -> Transport:
        channel = self.network.channel(("team", number, members))
        transport = SimulatedTransport(self.network, members, self.member, channel, self.timeout, team=True)
        return self.add_roles(transport)

    def follow(self, members: Iterable[int]) -> None:
        """Does nothing: all losses are known."""

    def add_roles(self, transport: Transport) -> Transport:
        """Make the channel of all processes known on the channel of a team."""
        transport.add_roles(job_channel(self.network, self.member, self.timeout), self.roles)
        return transport

    def close(self) -> None:
        """Does nothing: the network ends with the simulation."""


class VirtualTiming(Timing):
    """The virtual clock of one rank on one channel, and the costs of its messages."""

    virtual = True

    def __init__(self, network: SimulatedNetwork, members: tuple[int, ...], global_rank: int) -> None:
        self._network, self._rank = network, global_rank
        equal = not (network.model.links or network.model.slow or network.model.inside)
        if equal or members == tuple(range(len(members))):
            self.network = network.model
        # In chaos mode times mean nothing, and a prediction decides as well as a measurement.
        self.exact = not (network.model.jitter or network.faults)

    def slowdown(self) -> float:
        return self._network.slowness(self._rank)

    def reduced(self, nbytes: int) -> None:
        seconds = nbytes * self._network.model.combine
        if seconds:
            self._network.runtimes[self._rank].sleep(seconds * self._network.slowness(self._rank))

    def no_user_code(self) -> AbstractContextManager[None]:
        return self._network.simulator.no_user_code


class _CallComparison(Monitor):
    """Compares the ranks' calls in memory."""

    def __init__(self, transport: SimulatedTransport) -> None:
        self._transport = transport

    def compare_call(self, number: int, call: str) -> bool:
        transport, network = self._transport, self._transport.network
        calls = network.calls_of(transport.channel, number, transport.size)
        calls[transport.global_rank] = call
        if any(other != call for other in calls.values()):
            text = group_ranks_by_text(calls)
            error = IncompatibleError(f"the ranks disagree about their collective #{number}: {text}")
            network.break_channel(transport.channel, error)
            raise error
        return True


class _SimulatedMemory(RemoteMemory):
    """Windows and shared memory of simulated ranks."""

    def __init__(self, transport: SimulatedTransport) -> None:
        super().__init__(transport)
        self._simulated = transport

    def window(self, numel: int, dtype: torch.dtype) -> Window:
        transport = self._simulated
        key = (transport.channel, transport.next_split())
        return _SimulatedWindow(transport, transport.network.memory(key, transport.size, numel, dtype))

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        transport = self._simulated
        return transport.network.memory((transport.channel, transport.next_split(), "shared"), 1, numel, dtype)[0]


def kill_rank(transport: Transport) -> None:
    """End the process of this rank without a message, from now on. In chaos mode the seed draws the moment.

    `Kill` knows only virtual times. They mean little in chaos mode: it would strike before anything has begun.
    """
    network, rank = _simulated(transport, "kill its process")
    network.simulator.schedule(0.0, network.kill_callback(rank))


def freeze_rank(transport: Transport, seconds: float) -> None:
    """Stop the process of this rank for so long, from now on; see `kill_rank`, and `Freeze`."""
    network, rank = _simulated(transport, "send its process SIGSTOP, and SIGCONT later")
    network.simulator.schedule(0.0, partial(network.freeze, rank, seconds))


def cut_off_rank(transport: Transport, seconds: float) -> None:
    """Hold all messages of this rank for so long, from now on; see `kill_rank`, and `Partition`."""
    network, rank = _simulated(transport, "drop its packets")
    network.simulator.schedule(0.0, partial(network.cut_off, rank, seconds))


def _simulated(transport: Transport, instead: str) -> tuple[SimulatedNetwork, int]:
    if not isinstance(transport, SimulatedTransport):
        raise IncompatibleError(f"a rank of {transport.name} is not simulated: {instead}")
    return transport.network, transport.global_rank


class _SimulatedSend:
    """Done when the port is free and, above the network's eager limit, the receive is posted."""

    __slots__ = ("_event", "_lost", "_to", "_transport", "left", "nbytes", "source")

    def __init__(self, transport: SimulatedTransport, to: int, nbytes: int, wait_for_match: bool = True) -> None:
        self._transport = transport
        self._to = to
        self.source = -1
        self.nbytes = nbytes
        self.left = 0.0
        self._event = transport.runtime.event() if wait_for_match else None
        self._lost = False

    @property
    def waits_for_match(self) -> bool:
        """Whether it waits until the receive is posted."""
        return self._event is not None

    def matched(self) -> None:
        """The receive is posted; or the channel of a team ends, or the receiver."""
        if self._event is not None:
            self._transport.network.unmatched.get(self._transport.channel, {}).pop(self, None)
            self._event.set()

    def peer_broke(self, transport: SimulatedTransport, peer: int) -> None:
        """A rank has ended. It breaks this send if it is one of this transport to that rank."""
        if transport is self._transport and peer == self._to:
            self._lost = True
            self.matched()

    def wait(self, timeout: float | None = None) -> None:
        transport = self._transport
        if self.left > transport.network.simulator.now:
            transport.network.runtimes[transport.global_rank].sleep_until(self.left)
        if self._event is not None and not self._event.is_set():
            limit = transport.timeout if timeout is None else timeout
            pending = f"rank {transport.members[self._to]} to receive {format_bytes(self.nbytes)}"
            if not self._event.wait(event_timeout(limit), pending, hang=timeout is None):
                raise transport.failure(self._to, pending, limit, None)
            if transport.ended:
                raise transport.failure(self._to, pending, 0.0, None)
        if self._lost:
            pending = f"rank {transport.members[self._to]} to receive {format_bytes(self.nbytes)}"
            raise transport.failure(self._to, pending, 0.0, None)


class _SimulatedWindow:
    """A window. Puts and accumulates take effect when they arrive."""

    def __init__(self, transport: SimulatedTransport, memory: list[Tensor]) -> None:
        self._transport = transport
        self._memory = memory
        self.local = memory[transport.rank]
        self._pending: dict[int, int] = defaultdict(int)
        self._quiet = transport.runtime.event()

    def put(self, values: Tensor, to: int, offset: int = 0) -> None:
        self._write(values, to, offset, add=False)

    def accumulate(self, values: Tensor, to: int, offset: int = 0) -> None:
        self._write(values, to, offset, add=True)

    def _write(self, values: Tensor, to: int, offset: int, add: bool) -> None:
        target = self._memory[to]
        check_span(target, values, offset)
        copy, span = values.detach().reshape(-1).clone(), target[offset : offset + values.numel()]
        self._pending[to] += 1

        def on_arrival() -> None:
            span.add_(copy) if add else span.copy_(copy)
            self._pending[to] -= 1
            self._quiet.set()

        self._launch(to, copy.numel() * copy.element_size(), on_arrival)

    def _launch(self, to: int, nbytes: int, on_arrival: Callable[[], None]) -> None:
        transport = self._transport
        source, target = transport.global_rank, transport.members[to]
        if source == target:
            on_arrival()
        else:
            transport.network.launch(source, target, 0, nbytes, on_arrival)

    def get(self, into: Tensor, source: int, offset: int = 0) -> Handle:
        check_span(self._memory[source], into, offset)
        transport = self._transport
        span = self._memory[source][offset : offset + into.numel()]
        nbytes = into.numel() * into.element_size()
        handle = _SimulatedSend(transport, source, nbytes)
        me, target = transport.global_rank, transport.members[source]

        def asked() -> None:  # the target's memory is read when the request arrives
            copy = span.clone()

            def answered() -> None:
                into.view(-1).copy_(copy)
                handle.matched()

            if target == me:
                answered()
            else:
                transport.network.launch(target, me, 0, nbytes, answered)

        self._launch(source, 0, asked)
        return handle

    def flush(self, to: int | None = None) -> None:
        transport = self._transport
        while self._pending[to] if to is not None else any(self._pending.values()):
            self._quiet.clear()
            whom = "its peers" if to is None else f"rank {transport.members[to]}"
            if not self._quiet.wait(transport.timeout, f"{whom} to hold what was put", hang=True):
                raise transport.failure(to, "a flush", transport.timeout, None)

    def close(self) -> None:
        return
