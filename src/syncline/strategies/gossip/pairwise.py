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

Lian, Zhang, Zhang, Liu: Asynchronous decentralized parallel stochastic gradient descent (2018).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError, PeerLostError, ProtocolError, SynclineError
from syncline.reduction import Stats
from syncline.runtime import Task
from syncline.server import server_network
from syncline.strategies.asynchronous import AsynchronousRun
from syncline.strategies.base import check_gradients, trained
from syncline.strategies.gossip.graphs import build_graph
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

AVERAGE, READ, DONE, FINAL, OK, REFUSED = range(1, 7)
"""Kinds of messages."""
REQUEST_TAG = 1
REPLY_TAGS = {AVERAGE: 2, READ: 3}
"""Two tags, because two tasks may send different requests to one worker at once."""

TORCH_TRANSPORT = "torch.distributed"


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
        if not AVERAGE <= kind <= REFUSED or length != data.numel() - HEADER_BYTES:
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

    def __init__(self, channel: Transport, state: Tensor, numel: int, stats: Stats) -> None:
        self.state, self.weights = state, state[:numel]
        self.changes = 0
        """How often an average has changed the weights."""
        self.requests = 0
        self.lost: dict[int, str] = {}
        """Lost peers, and the reason."""
        self.channel = channel
        self._stats = stats
        self._runtime = channel.runtime
        self.lock = self._runtime.lock()
        self._reading = self._runtime.lock()
        self._counting = self._runtime.lock()
        self._done: set[int] = set()
        self._finals: dict[int, Tensor] = {}
        self._news = self._runtime.event()
        self._tasks: list[Task] = [
            self._runtime.spawn(self._serve, peer, name=f"partner-{peer}") for peer in self.others()
        ]

    def others(self) -> list[int]:
        """All other workers that are not known to be lost."""
        return [peer for peer in range(self.channel.size) if peer != self.channel.rank and peer not in self.lost]

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

    def read_final(self, progress: Callable[[], object]) -> dict[int, Tensor]:
        """The state of every worker after all have stopped, the same on all workers. No requests follow.

        The others are waited for as long as `progress` changes.
        """
        self._send_all(DONE, None)
        self._await("to end", self._done, progress)
        with self.lock:
            last = self.state.clone()
        self._send_all(FINAL, last)
        self._await("for the last weights of", self._finals, progress)
        return dict(sorted({**self._finals, self.channel.rank: last}.items()))

    def close(self) -> None:
        """Stop all requests and replies."""
        if not all(task.done() for task in self._tasks):  # this worker leaves before all have sent their final state
            self.channel.abort()
        self.channel.close()

    def request(self, peer: int, kind: int, row: Tensor | None) -> _PendingReply:
        """Send a request of that kind."""
        with self._counting:  # a task that reads and one that averages send requests at once
            self.requests += 1
            number = self.requests
        reply = message_buffer(self.weights if kind == AVERAGE else self.state)
        receiving = self.channel.recv(reply, peer, REPLY_TAGS[kind])
        message = PairMessage.write(kind, number, row)
        sending = self.channel.send(message, peer, REQUEST_TAG)
        if row is not None:
            self._stats.sent(row.nbytes, row.nbytes)
        return _PendingReply(peer, number, receiving, sending, reply, message)

    def _send_all(self, kind: int, row: Tensor | None) -> None:
        message = PairMessage.write(kind, 0, row)
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
            logger.warning("rank %d goes on without rank %d: %s", self.channel.rank, self.channel.members[peer], why)
        self._news.set()

    # Requests from others.

    def _serve(self, peer: int) -> None:
        buffer = message_buffer(self.state)
        try:
            while peer not in self._finals:
                handle = self.channel.recv(buffer, peer, REQUEST_TAG)
                handle.wait(math.inf)
                try:
                    self._handle(PairMessage.read(buffer[: handle.nbytes], peer))
                except ProtocolError as error:
                    logger.warning("rank %d refuses a message: %s", self.channel.rank, error)
        except SynclineError as error:  # the peer is lost, or this worker has closed the channel
            if isinstance(error, PeerLostError):
                self.forget(peer, str(error))

    def _handle(self, message: PairMessage) -> None:
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
            self._reply(message, OK, state)
        elif message.kind == FINAL:
            self._finals[peer] = message.row(dtype, self.state.numel()).clone()
            self._news.set()
        elif message.kind == DONE:
            self._done.add(peer)
            self._news.set()

    def _reply(self, request: PairMessage, kind: int, row: Tensor | None) -> None:
        data = PairMessage.write(kind, request.number, row)
        self.channel.send(data, request.peer, REPLY_TAGS[request.kind]).wait()


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

    def setup(self) -> None:
        super().setup()
        codec = self.communicator.codec
        if codec is not None:
            raise IncompatibleError(
                f"gossip(pairwise=True) averages two workers' weights as they are, and {codec!r} would lose parts "
                "that nobody keeps: leave the codec out, or take gossip without pairwise, which sends differences"
            )
        model, optimizer, world = self.model, self.optimizer, self.world
        self.graph = build_graph(self.strategy.graph, self.communicator.size)
        self._names = trained(model)
        self.draws = 0
        """The number of random neighbours so far."""
        self._averaging: Task | None = None
        self._changes_at_snapshot = 0
        self._saved_weights = torch.empty(0, dtype=torch.float32)
        self.snapshot = _flat(list(self._names.values()))
        self._rounds_weights = any(each.dtype != self.snapshot.dtype for each in self._names.values())
        """Whether the model's dtype is less precise than the one in which weights are averaged."""
        buffers = _flat(self._averaged_buffers(model)).to(self.snapshot.dtype)
        state = torch.cat([self.snapshot, buffers, _bytes_of(self._other_buffers(model)).to(buffers.dtype)])
        self.peers: PairwisePeers | None = None
        if self.communicator.size > 1:
            self.peers = PairwisePeers(_channel(world), state, self.snapshot.numel(), self.stats)
        self._now = torch.empty_like(self.snapshot)
        self.open_channel(self._load_weights)
        self.hooks += [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            model.register_forward_pre_hook(ModuleHook(self._forward)),
        ]

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
        self.stats.steps += 1
        self.absorb()
        self._channel.report_steps(self.stats.steps)

    def _begin_average(self) -> None:
        if self.peers is not None and (self.stats.steps + 1) % self.strategy.period == 0:
            peer = self._draw(self.peers)
            if peer is not None:
                self.stats.next_round()
                self._averaging = self.world.runtime.spawn(self._average_with, self.peers, peer, name="average")

    def _average_with(self, peers: PairwisePeers, peer: int) -> None:
        now = self.world.runtime.now
        began = now()
        distance = peers.average(peer)
        self.stats.reduced(began, now(), f"an average with rank {peer}")
        if distance is not None:  # of two random workers: 2·p/(p−1) times the squared distance from the mean
            size = self.communicator.size
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
        rank, alive = self.communicator.rank, peers.others()
        neighbours = {peer: weight for peer, weight in self.graph.neighbours(rank).items() if comes_before(rank, peer)}
        if not neighbours:
            return None
        left = {peer: weight for peer, weight in neighbours.items() if peer in alive}
        left = left or {peer: 1.0 for peer in alive if comes_before(rank, peer)}
        if not left:
            return None
        self.draws += 1
        generator = random.Random(f"{self.strategy.seed}/{rank}/{self.draws}")
        return generator.choices(list(left), list(left.values()))[0]

    def absorb(self) -> None:
        """Add the change of the snapshot to the weights, and take another snapshot."""
        peers = self.peers
        if peers is None:
            return
        weights, parameters = peers.weights, list(self._names.values())
        with torch.no_grad(), peers.lock:
            _read(parameters, self._now)
            changed = peers.changes - self._changes_at_snapshot
            if changed or self._rounds_weights:
                weights.add_(self._now.sub_(self.snapshot))
                torch._foreach_copy_([each.detach() for each in parameters], _views(weights, parameters))
            else:
                weights.copy_(self._now)
            _read(parameters, self.snapshot)
            self._changes_at_snapshot = peers.changes
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
        super().show_agreed()

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
        weights = [row[: peers.weights.numel()].double() for row in rows]
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
        self._channel.finish()
        if self.peers is not None:
            self._write(self.model, list(self.peers.read_final(self._channel.steps).values()))

    def detach(self) -> None:
        super().detach()
        if self.peers is not None:
            self.peers.close()

    # State.

    def shared_state(self) -> dict[str, Any]:
        """All workers copy their weights between two barriers, where no worker averages."""
        self._end_average()
        self.absorb()
        self.wait_for_all("save their weights")
        if self.peers is not None:
            self._saved_weights = self.peers.weights.clone()
        clocks = saved_clocks(self, self._channel.steps(), self.stats.steps)
        self.wait_for_all("go on from a checkpoint")
        return {"clocks": clocks, "workers": self.communicator.size}

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
    """A channel that a lost member does not break, as gloo's would."""
    base = server_network(world).transport if world.transport.name == TORCH_TRANSPORT else world.transport
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
