"""AD-PSGD: each worker, at its own pace, averages with one random neighbour at a time and takes its step.

    worker i    snapshot ── forward ── backward ── step: x_i ← x_i + the optimizer's change of the snapshot ── …
                └── (x_i, x_j) ← their mean, with one random neighbour j ──┘
    and         (x_k, x_i) ← their mean, whenever a worker k asks: in a task for each peer

The gradient is that of the snapshot. The step is added to the current weights, which may have changed since. No worker
waits for another's step: a slow worker answers as fast as the others.

```text
active i                                   passive j, in a task for each peer
locks its weights ── AVERAGE, x_i ───────► locks its weights: d = (x_i − x_j) / 2,  x_j += d
x_i −= d          ◄───────────── OK, d ─── unlocks
unlocks
```

x_j gains what x_i loses, so the sum never changes. A worker that locks its own weights and waits could wait in a circle
with others. So workers are ordered, even ranks before odd ones, and each asks only those after it. On a graph whose
edges all join even and odd ranks, half of the workers are active and half passive. A worker that dies during an average
takes its own weights along, before or after the change.

In an elastic job workers have their numbers in the job as ranks here. A newcomer takes the state of one worker before
the others count it among them::

    newcomer 4   READ ──► worker 0 ── state ──► x_4 = x_0 ── JOINED in the log ── averages with all

Lian, Zhang, Zhang, Liu: Asynchronous decentralized parallel stochastic gradient descent (2018).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.control import poll
from syncline.errors import IncompatibleError, PeerLostError, ProtocolError, SynclineError, WorldError
from syncline.reduction import Stats
from syncline.runtime import Task
from syncline.server import server_network
from syncline.strategies.asynchronous import AsynchronousRun
from syncline.strategies.base import check_gradients, trained
from syncline.strategies.gossip.graphs import GRAPHS, Graph, build_graph
from syncline.strategies.local_weights import load_optimizer_state, optimizer_state, refuse_inside_agreed
from syncline.strategies.parameter_server import loaded_clocks, saved_clocks
from syncline.transports import Handle, Transport
from syncline.wire import WireHeader
from syncline.world import World
from syncline.world.hooks import ModuleHook

if TYPE_CHECKING:
    from syncline.strategies.gossip import Gossip

__all__ = ["PairMessage", "PairwisePeers", "PairwiseRun", "comes_before", "mean_of"]

logger = logging.getLogger("syncline")

HEADER = WireHeader(b"SLGP", version=1, fields="B2xQQ", padding=4)
"""Kind, 2 spare bytes, number, bytes of the row. The padding aligns the row."""
HEADER_BYTES = HEADER.nbytes

AVERAGE, READ, DONE, STATE, OK, REFUSED, JOINED = range(1, 8)
"""Kinds of messages. STATE has a worker's state at a moment when none trains; its number tells which moment."""
REQUEST_TAG = 1
REPLY_TAGS = {AVERAGE: 2, READ: 3}
"""Two tags, because two tasks may send different requests to one worker at once."""
NEWCOMER_TAG = 4
"""The tag of READ and JOINED from a process that the receiver may not know yet."""
FINAL = 0
"""The number of the last STATE."""

TORCH_TRANSPORT = "torch.distributed"
CHECK_ENDED_EVERY_S = 0.5
"""Seconds between two checks whether the job has ended, while a newcomer waits for the weights of a worker."""


@dataclass(frozen=True)
class PairMessage:
    """A received message. The row lies in the receive buffer.

    >>> PairMessage.read(PairMessage.write(AVERAGE, 7, torch.ones(2)), peer=1).row(torch.float32)
    tensor([1., 1.])
    """

    kind: int
    number: int
    body: Tensor
    peer: int

    @staticmethod
    def write(kind: int, number: int, row: Tensor | None = None) -> Tensor:
        """The bytes of a message."""
        data = message_buffer(row)
        header = HEADER.pack(kind, number, data.numel() - HEADER_BYTES)
        data[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        if row is not None:
            data[HEADER_BYTES:].view(row.dtype).copy_(row)
        return data

    @staticmethod
    def read(data: Tensor, peer: int) -> PairMessage:
        """Parse bytes from `peer`; invalid ones raise a `ProtocolError`."""

        def refuse(why: str) -> ProtocolError:
            return ProtocolError(f"rank {peer} sent a message that is refused: {why}", peer=peer)

        kind, number, length = HEADER.read(data[:HEADER_BYTES].numpy().tobytes(), refuse)
        if not AVERAGE <= kind <= JOINED or length != data.numel() - HEADER_BYTES:
            raise refuse(f"kind {kind}, with {data.numel() - HEADER_BYTES} B instead of {length} B after its header")
        return PairMessage(kind, number, data[HEADER_BYTES:], peer)

    def row(self, dtype: torch.dtype, numel: int | None = None) -> Tensor:
        """Its numbers. Another count than `numel` is refused."""
        expected = self.body.numel() if numel is None else numel * dtype.itemsize
        if self.body.numel() != expected or self.body.numel() % dtype.itemsize:
            raise ProtocolError(
                f"rank {self.peer} sent a row of {self.body.numel()} B instead of {expected} B: it trains another "
                "model",
                peer=self.peer,
            )
        return self.body.view(dtype)


def message_buffer(row: Tensor | None) -> Tensor:
    """A buffer for a message with such a row."""
    return torch.empty(HEADER_BYTES + (0 if row is None else row.nbytes), dtype=torch.uint8)


def comes_before(one: int, other: int) -> bool:
    """Whether a worker may ask another for an average.

    >>> [rank for rank in range(4) if comes_before(2, rank)]
    [1, 3]
    """
    return (one % 2, one) < (other % 2, other)


class PairwisePeers:
    """This worker's weights, and the requests to and from the other workers.

    `state` holds the weights, `weights`, and behind them what is not averaged, such as buffers. Code that changes it
    holds `lock`.
    """

    def __init__(
        self, channel: Transport, state: Tensor, numel: int, stats: Stats, members: Iterable[int] | None = None
    ) -> None:
        """`members` are the present workers of an elastic job, which others may join; else all ranks of the channel."""
        self.state, self.weights = state, state[:numel]
        self.changes = 0
        """How often an average has changed the weights."""
        self.requests = 0
        self.lost: dict[int, str] = {}
        """Lost peers, and the reason."""
        self.leaving = False
        """Whether all have the last weights, so that others may leave."""
        self.on_joined: Callable[[], None] = lambda: None
        """Called when a newcomer says that it takes part."""
        self.channel = channel
        self._stats = stats
        self._runtime = channel.runtime
        self.lock = self._runtime.lock()
        self._reading = self._runtime.lock()
        self._counting = self._runtime.lock()
        self._done: set[int] = set()
        self._states: dict[int, dict[int, Tensor]] = {FINAL: {}}
        """By number and sender: the states of others at a moment when none trains."""
        self._news = self._runtime.event()
        self.closed = False
        """Whether all requests and replies have been stopped."""
        self._tasks: dict[int, Task] = {}
        """By worker: the task that replies to it."""
        if members is not None:
            self._tasks[channel.rank] = self._runtime.spawn(self._serve_newcomers, name="newcomers")
        self.add(range(channel.size) if members is None else members)

    def add(self, members: Iterable[int]) -> None:
        """Reply to these workers too from now on. Several tasks may call it."""
        with self._counting:
            for peer in members:
                if peer != self.channel.rank and peer not in self._tasks and not self.closed:
                    self._tasks[peer] = self._runtime.spawn(self._serve, peer, name=f"partner-{peer}")

    def others(self) -> list[int]:
        """All other workers that are not known to be lost."""
        return [peer for peer in sorted(self._tasks) if peer != self.channel.rank and peer not in self.lost]

    def name_of(self, peer: int) -> int:
        """The number of a worker for messages. One that has joined later keeps its own."""
        return self.channel.members[peer] if peer < len(self.channel.members) else peer

    # Requests to others.

    def average(self, peer: int) -> float | None:
        """Average the weights with a peer's; returns their distance. None: the peer is lost and not asked again."""
        with self.lock:
            try:
                reply = self.request(peer, AVERAGE, self.weights).wait()
                moved = reply.row(self.weights.dtype, self.weights.numel())
            except PeerLostError as error:
                self.forget(peer, str(error))
                return None
            except WorldError:
                if self.closed:  # this worker was declared lost meanwhile
                    return None
                raise
            self.weights.sub_(moved)
            self.changes += 1
            return 2.0 * float(torch.linalg.vector_norm(moved))

    def read_all(self) -> dict[int, Tensor]:
        """The current state of every worker that is not lost, by rank. Consistent only while no worker trains."""
        with self._reading:
            pending: dict[int, _PendingReply] = {}
            for peer in self.others():
                try:
                    pending[peer] = self.request(peer, READ, None)
                except PeerLostError as error:
                    self.forget(peer, str(error))
            with self.lock:
                states = {self.channel.rank: self.state.clone()}
            for peer, reply in pending.items():
                try:
                    states[peer] = reply.wait().row(self.state.dtype, self.state.numel())
                except PeerLostError as error:
                    self.forget(peer, str(error))
        return dict(sorted(states.items()))

    def read_state(self, peer: int) -> Tensor:
        """In a newcomer that is not among the workers yet: the current state of one of them."""
        return self.request(peer, READ, None, NEWCOMER_TAG).wait().row(self.state.dtype, self.state.numel())

    def announce(self) -> None:
        """In a newcomer: tell the others that it takes part, so that they reply to it at once."""
        for peer in self.others():
            with suppress(PeerLostError):
                self.channel.send(PairMessage.write(JOINED, 0), peer, NEWCOMER_TAG)

    def exchange_states(self, number: int, alive: Callable[[], Iterable[int]], what: str) -> dict[int, Tensor]:
        """The state of every worker that is alive, by rank. All call it with the same number while none trains.

        A worker that is lost meanwhile may have sent its state to some of the others.
        """
        channel, now = self.channel, self._runtime.now
        with self.lock:
            own = self.state.clone()
        with self._counting:
            for earlier in [each for each in self._states if FINAL < each < number]:
                del self._states[earlier]
        message, sent = PairMessage.write(STATE, number, own), {channel.rank}
        since, count = now(), 0
        for _ in poll(self._runtime):
            living = list(alive())
            for peer in [each for each in living if each not in sent]:
                sent.add(peer)
                with suppress(PeerLostError):  # `alive` soon says so, or this worker cannot reach it
                    channel.send(message, peer, REQUEST_TAG)
                    self._stats.sent(own.nbytes, own.nbytes)
            with self._counting:
                found = {**self._states.get(number, {}), channel.rank: own}
            missing = [peer for peer in living if peer not in found]
            if not missing:
                return dict(sorted(found.items()))
            if why := channel.gone_reason(channel.rank):
                raise PeerLostError(f"worker {channel.rank} was declared lost ({why})", peer=channel.rank, pending=what)
            if len(found) != count:
                since, count = now(), len(found)
            if now() - since > channel.timeout:
                raise PeerLostError(
                    f"worker {channel.rank} has waited {channel.timeout:g} s for the weights of workers {missing} to "
                    f"{what}: can the two reach each other?",
                    peer=missing[0],
                    pending=what,
                    seconds=channel.timeout,
                )
        raise AssertionError("it polls for ever")

    def read_final(self, progress: Callable[[], object]) -> dict[int, Tensor]:
        """The state of every worker after all have stopped, the same on all workers. No requests follow.

        The others are waited for as long as `progress` changes.
        """
        self._send_all(DONE, None)
        self._await("to end", self._done, progress)
        with self.lock:
            last = self.state.clone()
        self._send_all(STATE, last)
        self._await("for the last weights of", self._states[FINAL], progress)
        return dict(sorted({**self._states[FINAL], self.channel.rank: last}.items()))

    def close(self) -> None:
        """Stop all requests and replies. A second call does nothing."""
        with self._counting:
            if self.closed:
                return
            self.closed = True
            tasks = list(self._tasks.values())
        if not all(task.done() for task in tasks):  # this worker leaves before all have sent their final state
            self.channel.abort()
        self.channel.close()

    def request(self, peer: int, kind: int, row: Tensor | None, tag: int = REQUEST_TAG) -> _PendingReply:
        """Send a request of that kind."""
        with self._counting:  # a task that reads and one that averages send requests at once
            self.requests += 1
            number = self.requests
        reply = message_buffer(self.weights if kind == AVERAGE else self.state)
        receiving = self.channel.recv(reply, peer, REPLY_TAGS[kind])
        message = PairMessage.write(kind, number, row)
        sending = self.channel.send(message, peer, tag)
        if row is not None:
            self._stats.sent(row.nbytes, row.nbytes)
        return _PendingReply(peer, number, receiving, sending, reply, message)

    def _send_all(self, kind: int, row: Tensor | None) -> None:
        message = PairMessage.write(kind, FINAL, row)
        for peer in [peer for peer in self.lost if self.channel.members[peer] not in self.channel.lost()]:
            with suppress(SynclineError):  # a peer that was given up but is alive must not wait for this worker
                self.channel.send(message, peer, REQUEST_TAG)
        for peer in self.others():
            try:
                self.channel.send(message, peer, REQUEST_TAG).wait()
                if row is not None:
                    with self.lock:
                        self._stats.sent(row.nbytes, row.nbytes)
            except PeerLostError as error:
                self.forget(peer, str(error))

    def _await(self, what: str, arrived: set[int] | dict[int, Tensor], progress: Callable[[], object]) -> None:
        timeout, latest = self.channel.timeout, progress()
        while True:
            self._news.clear()
            missing = [peer for peer in self.others() if peer not in arrived]
            if not missing:
                return
            ranks = ", ".join(str(self.channel.members[peer]) for peer in missing)
            if self._news.wait(timeout, f"ranks {ranks} {what}", hang=True):
                continue
            before, latest = latest, progress()
            if latest == before:
                raise PeerLostError(
                    f"rank {self.channel.members[self.channel.rank]} has waited {timeout:g} s for ranks {ranks} "
                    f"{what}, and no worker took a step meanwhile",
                    peer=self.channel.members[missing[0]],
                    pending=f"ranks {ranks} {what}",
                    seconds=timeout,
                )

    def forget(self, peer: int, why: str) -> None:
        """Continue without a peer."""
        if peer not in self.lost:
            self.lost[peer] = why
            level = logging.DEBUG if self.leaving else logging.WARNING
            logger.log(level, "rank %d goes on without rank %d: %s", self.channel.rank, self.name_of(peer), why)
        self._news.set()

    # Requests from others.

    def _serve(self, peer: int) -> None:
        buffer = message_buffer(self.state)
        try:
            while peer not in self._states[FINAL]:
                handle = self.channel.recv(buffer, peer, REQUEST_TAG)
                handle.wait(math.inf)
                try:
                    self._handle(PairMessage.read(buffer[: handle.nbytes], peer))
                except ProtocolError as error:
                    logger.warning("rank %d refuses a message: %s", self.channel.rank, error)
        except SynclineError as error:  # the peer is lost, or this worker has closed the channel
            if isinstance(error, PeerLostError):
                self.forget(peer, str(error))

    def _serve_newcomers(self) -> None:
        """Reply to processes that may not be among the workers yet."""
        buffer = message_buffer(None)
        with suppress(SynclineError):  # this worker has closed the channel
            while True:
                handle = self.channel.recv(buffer, None, NEWCOMER_TAG)
                handle.wait(math.inf)
                try:
                    message = PairMessage.read(buffer[: handle.nbytes], handle.source)
                    if message.kind == READ:
                        self._handle(message, waits=False)
                    elif message.kind == JOINED:
                        self.on_joined()
                except (ProtocolError, PeerLostError) as error:
                    logger.info("rank %d does not answer a newcomer: %s", self.channel.rank, error)

    def _handle(self, message: PairMessage, waits: bool = True) -> None:
        """Process a message. Without `waits` another one can be processed while a reply is on its way."""
        peer, dtype = message.peer, self.state.dtype
        if message.kind == AVERAGE:
            theirs = message.row(dtype, self.weights.numel())
            if peer in self.lost:  # it was given up, and its weights may be old
                self._reply(message, REFUSED, None)
                return
            with self.lock:
                moved = theirs.sub_(self.weights).mul_(0.5)
                self.weights.add_(moved)
                self.changes += 1
                self.channel.timing.reduced(moved.nbytes)
                self._stats.sent(moved.nbytes, moved.nbytes)
            self._reply(message, OK, moved)
        elif message.kind == READ:
            with self.lock:
                state = self.state.clone()
                self._stats.sent(state.nbytes, state.nbytes)
            self._reply(message, OK, state, waits)
        elif message.kind == STATE:
            row = message.row(dtype, self.state.numel()).clone()
            with self._counting:
                self._states.setdefault(message.number, {})[peer] = row
            self._news.set()
        elif message.kind == DONE:
            self._done.add(peer)
            self._news.set()

    def _reply(self, request: PairMessage, kind: int, row: Tensor | None, waits: bool = True) -> None:
        data = PairMessage.write(kind, request.number, row)
        sending = self.channel.send(data, request.peer, REPLY_TAGS[request.kind])
        if waits:
            sending.wait()


class _PendingReply:
    """A request whose reply has not arrived. It keeps the buffers alive."""

    def __init__(
        self, peer: int, number: int, receiving: Handle, sending: Handle, reply: Tensor, request: Tensor
    ) -> None:
        self._peer, self._number = peer, number
        self._receiving, self._sending = receiving, sending
        self._reply, self._request = reply, request

    def wait(self) -> PairMessage:
        self._receiving.wait()
        self._sending.wait()
        reply = PairMessage.read(self._reply[: self._receiving.nbytes], self._peer)
        if reply.kind != OK or reply.number != self._number:
            raise PeerLostError(
                f"rank {self._peer} does not answer any more (kind {reply.kind}, number {reply.number} instead of "
                f"{self._number})",
                peer=self._peer,
                pending="an average of two",
            )
        return reply


class PairwiseRun(AsynchronousRun):
    """One worker. Its real weights are `peers.weights`; the model holds a snapshot of them."""

    strategy: Gossip
    copies_weights = True
    peers: PairwisePeers | None = None
    """None in a world of one, unless others may join."""

    def setup(self) -> None:
        super().setup()
        codec = self.communicator.codec
        if codec is not None:
            raise IncompatibleError(
                f"gossip(pairwise=True) averages two workers' weights as they are, and {codec!r} would lose parts "
                "that nobody keeps: leave the codec out, or take gossip without pairwise, which sends differences"
            )
        model, optimizer, world = self.model, self.optimizer, self.world
        self.graph = build_graph(self.strategy.graph, self.initial_workers)
        self._team_graph: tuple[tuple[int, ...], Graph] = ((), self.graph)
        """In an elastic job: the present workers, and their graph."""
        self._names = trained(model)
        self.draws = 0
        """The number of random neighbours so far."""
        self._averaging: Task | None = None
        self._changes_at_snapshot = 0
        self._steps_absorbed = self._steps_mixed = 0
        """The steps of this worker that are in its weights, and those that were when it averaged last."""
        self._saved_weights = torch.empty(0, dtype=torch.float32)
        self.snapshot = _flat(list(self._names.values()))
        self._rounds_weights = any(each.dtype != self.snapshot.dtype for each in self._names.values())
        """Whether the model's dtype is less precise than the one in which weights are averaged."""
        buffers = _flat(self._averaged_buffers(model)).to(self.snapshot.dtype)
        state = torch.cat([self.snapshot, buffers, _bytes_of(self._other_buffers(model)).to(buffers.dtype)])
        self._now = torch.empty_like(self.snapshot)
        if self.admits_newcomers:
            self._meet_peers(state)
        else:
            if self.communicator.size > 1:
                self.peers = PairwisePeers(_channel(world), state, self.snapshot.numel(), self.stats)
            self.open_channel(self._load_weights)
        self.hooks += [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            model.register_forward_pre_hook(ModuleHook(self._forward)),
        ]

    def _meet_peers(self, state: Tensor) -> None:
        """In an elastic job: open the channels of all workers, also of those that join later."""
        network = server_network(self.world).transport
        self.open_channel(self._load_weights, network)
        self.raise_if_job_has_ended()
        membership = self.membership
        assert membership is not None, "newcomers are admitted"
        channel = network.split_by_key(f"gossip {self._channel.number}")
        self.peers = PairwisePeers(channel, state, self.snapshot.numel(), self.stats, membership.present())
        self.peers.on_joined = membership.refresh
        membership.on_read = self._follow_membership
        self._channel.on_refresh = self.refresh_membership
        self._channel.report_steps(0)  # from now on the membership log is read in the background

    @property
    def config(self) -> dict[str, Any]:
        return {**super().config, "spectral_gap": self.graph.gap}

    @property
    def first_exchange(self) -> int | None:
        return self.strategy.period

    # Steps.

    def _forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Begin the average, which runs during forward and backward."""
        if self._averaging is None and module.training and torch.is_grad_enabled() and not self.inside_agreed:
            self._begin_average()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.settings.check_finite:
            check_gradients(self)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._averaging is None:  # the model was not called as a whole
            self._begin_average()
        self._end_average()
        self._raise_if_lost()
        self.stats.steps += 1
        self.absorb()
        self._channel.report_steps(self.stats.steps)

    def _begin_average(self) -> None:
        if self.peers is not None and (self.stats.steps + 1) % self.strategy.period == 0:
            peer = self._draw(self.peers)
            if peer is not None:
                self._averaging = self.world.runtime.spawn(self._average_with, self.peers, peer, name="average")

    def _average_with(self, peers: PairwisePeers, peer: int) -> None:
        self.stats.next_round()
        now = self.world.runtime.now
        began = now()
        distance = peers.average(peer)
        self.stats.reduced(began, now(), f"an average with rank {peer}")
        if distance is not None:  # of two random workers: 2·p/(p−1) times the squared distance from the mean
            size = self.communicator.size if self.membership is None else 1 + len(peers.others())
            self.stats.consensus = distance * math.sqrt((size - 1) / (2 * size))

    def _end_average(self) -> None:
        """Wait for the average in progress, if there is one."""
        task, self._averaging = self._averaging, None
        if task is None:
            return
        now = self.world.runtime.now
        began, timeout = now(), 2 * self.world.transport.timeout
        if not task.join(timeout):
            raise PeerLostError(
                f"rank {self.world.rank} has waited {timeout:g} s for an average with a neighbour",
                pending="an average of two",
                seconds=timeout,
            )
        self.stats.waited(began, now())

    def _draw(self, peers: PairwisePeers) -> int | None:
        """A random neighbour that this worker may ask; if all of them are lost, any worker."""
        rank, alive = peers.channel.rank, peers.others()
        drawn = self.graph.neighbours(rank) if self.membership is None else self._present_neighbours(rank, alive)
        neighbours = {peer: weight for peer, weight in drawn.items() if comes_before(rank, peer)}
        if not neighbours:
            return None
        left = {peer: weight for peer, weight in neighbours.items() if peer in alive}
        left = left or {peer: 1.0 for peer in alive if comes_before(rank, peer)}
        if not left:
            return None
        self.draws += 1
        generator = random.Random(f"{self.strategy.seed}/{rank}/{self.draws}")
        return generator.choices(list(left), list(left.values()))[0]

    def _present_neighbours(self, rank: int, others: Sequence[int]) -> dict[int, float]:
        """In an elastic job: the neighbours in the graph of the present workers, in the order of their numbers."""
        team = tuple(sorted([*others, rank]))
        if self._team_graph[0] != team:
            self._team_graph = team, build_graph(self.strategy.graph, len(team))
        neighbours = self._team_graph[1].neighbours(team.index(rank))
        return {team[place]: weight for place, weight in neighbours.items()}

    def absorb(self) -> None:
        """Add the change of the snapshot to the weights, and take another snapshot."""
        peers = self.peers
        if peers is None:
            return
        weights, parameters = peers.weights, list(self._names.values())
        with torch.no_grad(), peers.lock:
            _read(parameters, self._now)
            changed = peers.changes - self._changes_at_snapshot
            if changed:
                self._steps_mixed = self._steps_absorbed
            if changed or self._rounds_weights:
                weights.add_(self._now.sub_(self.snapshot))
                torch._foreach_copy_([each.detach() for each in parameters], _views(weights, parameters))
            else:
                weights.copy_(self._now)
            _read(parameters, self.snapshot)
            self._changes_at_snapshot = peers.changes
            self._steps_absorbed = self.stats.steps
            self._publish_buffers(peers)
        self.stats.read_at(changed)

    # The agreed model.

    @contextmanager
    def agreed(self) -> Iterator[None]:
        if not self.inside_agreed:
            self.watch.apply_load()
            self._end_average()
        with super().agreed():
            yield

    def show_agreed(self) -> None:
        if self.peers is not None:
            with self.peers.lock:
                self._publish_buffers(self.peers)
        if self.membership is None:
            super().show_agreed()
        elif not self.joining:
            self.wait_for_all("enter agreed()")
            self._write_mean_of_all("read the weights")

    def _write_mean_of_all(self, what: str) -> None:
        """In an elastic job: fill the model with the mean of all workers, the same on all. None trains meanwhile.

        A worker that is lost counts only if all others have its state.
        """
        peers, membership = self.peers, self.membership
        assert peers is not None
        assert membership is not None
        states = peers.exchange_states(membership.number, membership.alive, what)
        counted = membership.agree(what, states)
        if not counted or not states.keys() >= set(counted):
            raise PeerLostError(
                f"worker {membership.member} has the weights of workers {sorted(states)}, and the others take the "
                f"mean of {counted}: they count this worker as lost",
                peer=membership.member,
                pending=what,
            )
        rows = [states[each] for each in counted]
        self._write(self.model, rows)
        self._note_consensus(rows, peers.weights.numel())

    def _publish_buffers(self, peers: PairwisePeers) -> None:
        """Copy this worker's buffers into the state that others read. The caller holds `peers.lock`."""
        _read(self._averaged_buffers(self.model), peers.state[peers.weights.numel() :])
        others = _bytes_of(self._other_buffers(self.model))
        peers.state[peers.state.numel() - others.numel() :] = others

    def _load_weights(self, model: nn.Module) -> None:
        """Fill a model with the mean of the current weights of all workers that are not lost."""
        peers = self.peers
        if peers is None:
            own = self.model.state_dict(keep_vars=True)
            with torch.no_grad():
                for name, tensor in model.state_dict(keep_vars=True).items():
                    tensor.detach().copy_(own[name].detach())
            return
        rows = list(peers.read_all().values())
        self._write(model, rows)
        self._note_consensus(rows, peers.weights.numel())

    def _note_consensus(self, rows: Sequence[Tensor], numel: int) -> None:
        weights = [row[:numel].double() for row in rows]
        mean = reduce(torch.add, weights) / len(weights)
        self.stats.consensus = math.sqrt(sum(float((row - mean).square().sum()) for row in weights) / len(weights))

    def _write(self, model: nn.Module, rows: Sequence[Tensor]) -> None:
        """Fill a model with the mean of all rows. Buffers that have no mean are those of the lowest rank."""
        tensors = [*trained(model).values(), *self._averaged_buffers(model)]
        with torch.no_grad():
            torch._foreach_copy_([tensor.detach() for tensor in tensors], _views(mean_of(rows), tensors))
            at = sum(tensor.numel() for tensor in tensors)
            for buffer in self._other_buffers(model):
                after = at + buffer.numel() * buffer.dtype.itemsize
                buffer.copy_(rows[0][at:after].to(torch.uint8).view(buffer.dtype).view(buffer.shape))
                at = after

    def _averaged_buffers(self, model: nn.Module) -> list[Tensor]:
        return [buffer for buffer in model.buffers() if self._is_averaged(buffer)]

    def _other_buffers(self, model: nn.Module) -> list[Tensor]:
        """Buffers that have no mean, such as counters, and those that the row would round."""
        return [buffer for buffer in model.buffers() if not self._is_averaged(buffer)]

    def _is_averaged(self, buffer: Tensor) -> bool:
        dtype = self.snapshot.dtype
        return buffer.is_floating_point() and torch.promote_types(buffer.dtype, dtype) == dtype

    def finish(self) -> None:
        self._end_average()
        self.absorb()
        if self.membership is not None:
            super().finish()
            return
        self._channel.finish()
        if self.peers is not None and not self._leaves:
            rows = list(self.peers.read_final(self._channel.steps).values())
            self.raise_if_declared_lost()  # then the rows of the others may be missing
            self._write(self.model, rows)

    def read_final(self) -> None:
        self._write_mean_of_all("leave with the same model")
        if self.peers is not None:
            self.peers.leaving = True

    def detach(self) -> None:
        super().detach()
        if self.peers is not None:
            self.peers.close()

    # Elastic jobs.

    @property
    def admits_newcomers(self) -> bool:  # type: ignore[override]
        """A graph by its name can be made for any number of workers."""
        named = self.strategy.graph in GRAPHS
        return self.world.elastic is not None and named and not server_network(self.world).dedicated

    @property
    def elastic_refusal(self) -> str:
        if self.admits_newcomers:
            return ""
        return (
            f"{self.strategy!r} survives the loss of a worker, but no worker can join: take a graph by its name "
            f"({', '.join(GRAPHS)}) and no servers, or leave --restart out"
        )

    def _follow_membership(self) -> None:
        """Reply to workers that have joined, and ask lost ones no more. Several tasks may call it."""
        peers, membership = self.peers, self.membership
        if peers is None or membership is None:
            return
        lost = membership.lost()
        if membership.member in lost:
            peers.close()  # the others continue without this worker
            return
        peers.add(each for each in self._channel.members if each not in lost)
        for peer in peers.others():
            if peer in lost:
                peers.forget(peer, lost[peer])

    def _raise_if_lost(self) -> None:
        """Raise if this worker was declared lost. In an elastic job it asks the store only then."""
        if self.membership is None:
            self.raise_if_declared_lost()
        elif self.peers is not None and self.peers.closed:
            self.membership.alive()

    @property
    def counted_steps(self) -> int:
        """In an elastic job: the steps that others have a part of, if there are others."""
        if self.membership is None or self.peers is None:
            return super().counted_steps
        return self._steps_mixed if self.peers.others() else self._steps_absorbed

    def flush_steps(self) -> None:
        """Average once more if this worker may ask another one. Else its latest steps may be lost with it."""
        self._end_average()
        if self.peers is not None and self._steps_mixed < self._steps_absorbed:
            peer = self._draw(self.peers)
            if peer is not None:
                self._average_with(self.peers, peer)

    @property
    def saves_at_end(self) -> bool:
        """Only if all workers stop in the same epoch: one that waits in `agreed()` needs the weights of all others."""
        return super().saves_at_end and bool(self._claims)

    def note_last_steps(self) -> None:
        """The weights of all workers are in the checkpoint, and so are all steps."""
        self._end_average()
        self.absorb()
        for epochs in self._claims.values():
            if epochs.current is not None:
                epochs.current.trained(self.stats.steps)

    def prepare_to_join(self) -> None:
        """Take the weights and the buffers of one worker. Only then may others average with this one."""
        peers, membership = self.peers, self.membership
        assert peers is not None
        assert membership is not None
        runtime, timeout_s = self.world.runtime, peers.channel.timeout
        since = runtime.now()
        for _ in poll(runtime):
            self.raise_if_job_has_ended()
            source = next((each for each in membership.present() if each in peers.others()), None)
            if source is None:  # those that this worker has lost are soon lost for all
                if runtime.now() - since > timeout_s:
                    raise PeerLostError(
                        f"worker {membership.member} has reached none of the workers {membership.present()} in "
                        f"{timeout_s:g} s, and needs the weights of one",
                        pending="the weights of another worker",
                        seconds=timeout_s,
                    )
                continue
            reading = runtime.spawn(self._read_from, peers, source, name="weights of another")
            while not reading.join(CHECK_ENDED_EVERY_S):
                self.raise_if_job_has_ended()
            if source not in peers.lost:
                return

    def _read_from(self, peers: PairwisePeers, source: int) -> None:
        try:
            state = peers.read_state(source)
        except PeerLostError as error:
            peers.forget(source, str(error))
            return
        with peers.lock:
            peers.state.copy_(state)

    def enter_training(self) -> None:
        """Train from the weights that `prepare_to_join` has taken, which may have been averaged since."""
        peers = self.peers
        assert peers is not None
        with torch.no_grad(), peers.lock:
            self._write(self.model, [peers.state])
            _read(list(self._names.values()), self.snapshot)
            self._changes_at_snapshot = peers.changes
        self.stats.steps = max(self._channel.steps())
        self._steps_absorbed = self._steps_mixed = self.stats.steps
        self._channel.report_steps(self.stats.steps)
        peers.announce()

    # State.

    def shared_state(self) -> dict[str, Any]:
        """All workers copy their weights between two barriers, where no worker averages."""
        self._end_average()
        self.absorb()
        self.wait_for_all("save their weights")
        if self.peers is not None:
            self._saved_weights = self.peers.weights.clone()
        clocks = saved_clocks(self, self._channel.steps, self.stats.steps)
        self.wait_for_all("go on from a checkpoint")
        return {"clocks": clocks, "workers": len(clocks)}

    def local_state(self) -> dict[str, Any]:
        refuse_inside_agreed(self)
        tensors: Mapping[str, Tensor] = self._names
        if self.peers is not None:
            views = _views(self._saved_weights, list(self._names.values()))
            tensors = dict(zip(self._names, views, strict=True))
        return {
            "weights": {name: each.detach().clone() for name, each in tensors.items()},
            "optimizer": optimizer_state(self.optimizer, self._names),
            "drawn": self.draws,
        }

    def restart(self) -> None:
        self._end_average()
        self._start_from_model()

    def resume_steps(self) -> None:
        self._channel.report_steps(self.stats.steps)

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        self._end_average()
        self._same_size = int(state["workers"]) == self.communicator.size
        self._channel.report_steps(loaded_clocks(self, state["clocks"])[self.communicator.rank])

    def load_local_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        if states:
            own = states[0]
            load_optimizer_state(self.optimizer, self._names, own["optimizer"])
            self.draws = int(own["drawn"])
            if self._same_size:
                for name, value in own["weights"].items():
                    self._names[name].detach().copy_(value)
        self._start_from_model()

    def _start_from_model(self) -> None:
        """Copy the weights from the model. Workers wait for each other, so that none averages with missing weights."""
        peers = self.peers
        if peers is not None:
            self.wait_for_all("load their weights")
            with peers.lock:
                _read(list(self._names.values()), peers.weights)
                self.snapshot.copy_(peers.weights)
                self._changes_at_snapshot = peers.changes
            self.wait_for_all("begin with their weights")


def mean_of(rows: Sequence[Tensor]) -> Tensor:
    """The mean of rows, summed in their order, so that it is the same on all workers.

    >>> mean_of([torch.ones(2), torch.zeros(2)])
    tensor([0.5000, 0.5000])
    """
    total = torch.zeros(rows[0].numel(), dtype=torch.float64)
    for row in rows:
        total.add_(row)
    return total.div_(len(rows)).to(rows[0].dtype)


def _channel(world: World) -> Transport:
    """A channel that a lost member does not break, as gloo's and that of an elastic job's team would."""
    breaks = world.elastic is not None or world.transport.name == TORCH_TRANSPORT
    base = server_network(world).transport if breaks else world.transport
    channel = base.split(range(world.size))
    assert channel is not None, "every worker is a member"
    return channel


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one flat tensor, of a dtype that holds them all."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    if dtype.is_complex:
        raise IncompatibleError("gossip averages real numbers, and a parameter is complex: view it as real numbers")
    return torch.cat([torch.empty(0, dtype=dtype), *(each.detach().reshape(-1).to("cpu", dtype) for each in tensors)])


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one flat tensor of bytes."""
    rows = [each.detach().reshape(-1).cpu().contiguous().view(torch.uint8) for each in tensors]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *rows])


def _views(row: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    sizes = [tensor.numel() for tensor in tensors]
    parts = torch.split_with_sizes(row[: sum(sizes)], sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _read(tensors: Sequence[Tensor], row: Tensor) -> None:
    """Copy tensors into a flat one."""
    if tensors:
        torch._foreach_copy_(_views(row, tensors), [tensor.detach() for tensor in tensors])
