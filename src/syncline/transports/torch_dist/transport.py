"""The transport on torch.distributed: messages, native collectives, `connect`.

gloo's own messages have no length: a long one aborts the receiver's process, and a short one is not noticed. So a
message is sent as a header and a body, unless both sides know the length (`exact`). The tag that gloo sees is
kind · MAX_TAG + tag or number::

    kind         tag or number
    EXACT   0    tag            the body alone
    HEADER  1    tag            36 bytes: sender, tag, length, number
    BODY    2    number         paired with its header by the number
    ABORT   3    0              a receive that times out at once, to break all waits

A rank cannot send to itself through gloo; such messages go through a mailbox. A tag with a receive from *any* rank is
read into the same mailbox, by one task per peer: a message to oneself wakes that receive too. Unlike gloo's own receive
from any rank, these waits end when a peer is lost or the channel is closed.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch._C._distributed_c10d as _c10d  # what torch.distributed re-exports untyped
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from syncline.environment import Environment, Rendezvous
from syncline.errors import IncompatibleError, PeerLostError, ProtocolError, SynclineError, WorldError
from syncline.runtime import Queue, RealRuntime, Runtime, Task
from syncline.transports.base import (
    MAX_TAG,
    Handle,
    NativeCollectives,
    Op,
    TensorChannels,
    Transport,
    format_bytes,
)
from syncline.transports.key_value_store import (
    ELASTIC_WORLD,
    BoundedStore,
    KeyValueStore,
    find_rendezvous,
    first_line,
    listening_address,
    next_world_name,
    no_launcher_store,
    open_bounded_store,
    open_store,
    program_name,
)
from syncline.transports.link_probe import elastic_address, probe_links
from syncline.transports.liveness import LEFT_WORLD, Liveness, LivenessMonitor, LossReason
from syncline.transports.messages import (
    HEADER_BYTES,
    MAX_UNRECEIVED_BYTES,
    CompletedHandle,
    Mailbox,
    MailboxHandle,
    MessageHeader,
    PostedReceive,
    WarningLog,
    channel_closed,
    describe_recv,
    peer_lost_error,
)
from syncline.transports.single import SingleTransport
from syncline.transports.torch_dist.nccl_channels import NcclChannels, open_nccl_channels
from syncline.transports.torch_dist.process_groups import ProcessGroupFactory

__all__ = ["TorchCollectives", "TorchConnector", "TorchTransport", "WorkHandle", "connect"]

logger = logging.getLogger("syncline")

FOREVER = timedelta(days=3650)
"""A timeout that is never reached: torch has no infinite one."""
CHECK_BROKEN_EVERY_S = 0.25
"""In an elastic job: interval in seconds at which a collective that waits checks whether its wait was broken."""


class _InterruptibleWait:
    """A wait for a message of gloo that its caller can give up."""

    def __init__(self, work: Any, limit: timedelta, runtime: Runtime) -> None:
        self.work, self.limit = work, limit
        self.over = runtime.event()
        self.error: RuntimeError | None = None

    def give_up(self) -> None:
        """Let the caller continue with an error. The task that waits ends when gloo does."""
        self.error = RuntimeError("the connection broke in the middle of a message")
        self.over.set()


class _WaitingTask:
    """A task that waits for messages of gloo, one after the other. It is in `idle` while it has none."""

    def __init__(self, runtime: Runtime, idle: list[_WaitingTask]) -> None:
        self._idle = idle
        self._waits: Queue[_InterruptibleWait] = runtime.queue(1)
        runtime.spawn(self._serve, name="wait for gloo")

    def start(self, wait: _InterruptibleWait) -> None:
        self._waits.put(wait)

    def _serve(self) -> None:
        while True:
            self._complete(self._waits.get())  # an idle task keeps no message alive

    def _complete(self, wait: _InterruptibleWait) -> None:
        error: RuntimeError | None = None
        try:
            wait.work.wait(wait.limit)
        except RuntimeError as found:
            error = found
        if not wait.over.is_set():
            wait.error = error
        self._idle.append(self)
        wait.over.set()


class WorkHandle:
    """An operation of the engine in progress. It keeps its buffer alive.

    gloo ends a wait when a connection breaks, but not the wait for a message of which a part has arrived: that lasts
    until its timeout. So in an elastic job another task waits for messages, and waits for collectives are short ones.
    The caller continues when the liveness task finds that a member is lost, or has given up the channel::

        worker 0   allreduce, waits ── liveness task breaks the wait ── PeerLostError ── next team
        worker 1   allreduce, killed after half a message
    """

    def __init__(
        self,
        transport: TorchTransport,
        work: Any,
        buffer: Tensor,
        peer: int | None,
        pending: str | Callable[[], str],
        copy_to: Tensor | None = None,
        keep_alive: bool = False,
        lossy: bool = False,
    ) -> None:
        """`pending` describes the operation in messages, or returns that text: most operations need none."""
        self.work = work
        self.source = -1 if peer is None else peer
        self.nbytes = buffer.numel() * buffer.element_size()
        self._transport = transport
        self._buffer = buffer
        self._peer = peer
        self._pending = pending
        self._copy_to = copy_to
        self._done = False
        self._keep_alive = keep_alive
        self._lossy = lossy
        self._broken = False
        """Whether the liveness task has broken the wait."""
        self._interruptible: _InterruptibleWait | None = None

    def __del__(self) -> None:
        if self._keep_alive and not self._done:
            self._keep_alive = False
            self._transport.detached_sends.append(self)  # the engine cancels an operation without a reference

    def notify(self, fn: Callable[[], None]) -> None:
        """Let the engine's thread call `fn` when the operation has succeeded or failed."""
        self.work.get_future().add_done_callback(lambda _: fn())

    def wait(self, timeout: float | None = None) -> None:
        if self._done:
            return
        transport = self._transport
        timeout = transport.timeout if timeout is None else timeout
        start = transport.runtime.now()
        no_deadline = timeout == math.inf
        interruptible = transport.liveness.elastic and not no_deadline and not self._buffer.is_cuda
        end_wait = transport.waiting(self._pending, self._peer, no_deadline, self._break_wait)
        try:
            try:
                if not interruptible:
                    self.work.wait(FOREVER if no_deadline else timedelta(seconds=timeout))
                elif self._peer is None:
                    self._wait_for_collective(start + timeout)
                else:
                    self._wait_for_message(timeout)
            finally:
                end_wait()
        except RuntimeError as error:
            if self._lossy:
                self._done = True
                return
            if transport.has_ended:
                text = f"this rank has closed the channel while it waited for {self._describe()}"
                raise WorldError(text) from error
            seconds = transport.runtime.now() - start
            raise transport.failure(self._peer, self._describe(), seconds, error, no_deadline) from error
        if self._copy_to is not None:
            self._copy_to.copy_(self._buffer)
        self._done = True

    def _describe(self) -> str:
        return self._pending if isinstance(self._pending, str) else self._pending()

    def _wait_for_collective(self, until: float) -> None:
        """Wait for short times: a collective has no other effect if one of them ends."""
        now = self._transport.runtime.now
        while True:
            try:
                self.work.wait(timedelta(seconds=max(0.001, min(CHECK_BROKEN_EVERY_S, until - now()))))
                return
            except RuntimeError:
                if self._broken or self.work.is_completed() or now() >= until:
                    raise

    def _wait_for_message(self, timeout: float) -> None:
        """Let another task wait: a wait of gloo for a message that ends by its timeout breaks all connections."""
        transport = self._transport
        wait = _InterruptibleWait(self.work, timedelta(seconds=timeout), transport.runtime)
        self._interruptible = wait
        if self._broken:
            wait.give_up()
        else:
            idle = transport.factory.idle_waiting_tasks
            try:
                task = idle.pop()
            except IndexError:  # another task may have taken the last one
                task = _WaitingTask(transport.runtime, idle)
            task.start(wait)
        wait.over.wait()
        if wait.error is not None:
            raise wait.error

    def _break_wait(self) -> None:
        """End the wait of another task. gloo may not notice that a connection is broken."""
        self._transport.break_waits()
        self._broken = True
        if self._interruptible is not None:
            self._interruptible.give_up()


OPS: dict[Op, Any] = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
REDUCIBLE = frozenset(
    getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
)
MAX_CACHED_DESCRIPTIONS = 1000


class TorchCollectives(NativeCollectives):
    """all_reduce and the other collectives of one process group."""

    available = True

    def __init__(self, transport: TorchTransport) -> None:
        self._transport = transport
        self._descriptions: dict[tuple[str, torch.dtype, torch.Size], str] = {}

    def reduces(self, dtype: torch.dtype, op: Op) -> bool:
        return dtype in REDUCIBLE

    def allreduce(self, tensor: Tensor, op: Op) -> Handle:
        options = _c10d.AllreduceOptions()
        options.reduceOp = OPS[op]
        return self._start("allreduce", tensor, lambda group: group.allreduce([tensor], options))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Op) -> Handle:
        options = _c10d.ReduceScatterOptions()
        options.reduceOp = OPS[op]
        return self._start("reduce_scatter", tensor, lambda group: group._reduce_scatter_base(output, tensor, options))

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        options = _c10d.BroadcastOptions()
        options.rootRank = root
        return self._start("broadcast", tensor, lambda group: group.broadcast([tensor], options))

    def allgather(self, output: Tensor, tensor: Tensor) -> Handle:
        options, flat = _c10d.AllgatherOptions(), output.view(-1)
        return self._start("allgather", tensor, lambda group: group._allgather_base(flat, tensor.view(-1), options))

    def alltoall(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        options, into, out_of = _c10d.AllToAllOptions(), list(output_splits), list(input_splits)
        return self._start("alltoall", tensor, lambda group: group.alltoall_base(output, tensor, into, out_of, options))

    def barrier(self) -> Handle:
        return self.allreduce(torch.zeros(1, dtype=torch.uint8), "sum")

    def _start(self, name: str, tensor: Tensor, launch: Callable[[Any], Any]) -> Handle:
        transport = self._transport
        key = (name, tensor.dtype, tensor.shape)
        pending = self._descriptions.get(key) or self._describe(key)
        transport.monitor.enter(pending)
        try:
            groups = transport.groups
            work = launch(groups.of(tensor) if tensor.is_cuda else groups.cpu)
        except RuntimeError as error:
            if "invalid" in str(error).lower():  # the arguments are wrong; no peer is lost
                raise IncompatibleError(f"the engine refuses the {pending}: {error}{_hint(str(error))}") from error
            raise transport.failure(None, pending, 0.0, error) from error
        return WorkHandle(transport, work, tensor, None, pending)

    def _describe(self, key: tuple[str, torch.dtype, torch.Size]) -> str:
        """A description of the operation. It is stored, because training repeats a few of them."""
        name, dtype, shape = key
        sizes = "" if name == "alltoall" else list(shape)  # its sizes may differ between ranks
        words = f"{name} of {str(dtype).removeprefix('torch.')}{sizes} among {self._transport.size} ranks"
        if len(self._descriptions) < MAX_CACHED_DESCRIPTIONS:
            self._descriptions[key] = words
        return words


def _hint(error: str) -> str:
    """A hint for an NCCL error whose own message is unclear.

    >>> _hint("NCCL error: invalid usage")[:44]
    '; NCCL needs a GPU of its own for each rank:'
    >>> _hint("invalid tensor")
    ''
    """
    if "NCCL" not in error or "invalid usage" not in error:
        return ""
    return (
        "; NCCL needs a GPU of its own for each rank: start no more workers on a host than it has GPUs, or take a "
        "schedule such as algorithm='ring', which sends through the CPU, or hide the GPUs with CUDA_VISIBLE_DEVICES="
    )


MAX_DETACHED_SENDS = 64
"""Limit of unfinished sends whose handle the caller has discarded. Above it, the next send waits for the oldest."""
MAX_DETACHED_BYTES = 64 << 20
"""The same limit in bytes."""
READER_JOIN_TIMEOUT_S = 5.0

EXACT, HEADER, BODY, ABORT = 0 * MAX_TAG, 1 * MAX_TAG, 2 * MAX_TAG, 3 * MAX_TAG


class TorchTransport(Transport):
    """One rank on one process group."""

    name = "torch.distributed"

    def __init__(
        self, factory: ProcessGroupFactory, members: tuple[int, ...], global_rank: int, channel: str = "0"
    ) -> None:
        super().__init__(members.index(global_rank), len(members), factory.liveness.runtime, factory.timeout, members)
        self.factory = factory
        self.liveness = factory.liveness
        self.channel = channel
        pending = f"ranks {list(members)} to make a channel"
        self.monitor = LivenessMonitor(self.liveness, channel)
        self.monitor.enter(pending)
        end_wait = self.liveness.waiting(pending, channel, members)
        try:
            factory.await_members(channel, members, global_rank)
            self.groups = factory.groups(channel, members, self.rank)
        except WorldError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self.failure(None, pending, 0.0, error) from error
        finally:
            end_wait()
        self.native = TorchCollectives(self)
        self._numbers = count()
        self._splits = count(1)
        self._channel_sets = count(1)
        self._tensor_channels: list[NcclChannels] = []
        """Those that are open."""
        self._mailbox = Mailbox(self.runtime)
        self._readers: dict[int, dict[int, Task]] = {}
        self._ended_peers: set[tuple[int, int]] = set()
        self._lock = self.runtime.lock()
        self._refusals = WarningLog(logger, self.runtime.now)
        self._closed = False
        self._aborted = False
        self._unbounded_waits = 0
        """The number of waits without a deadline. Closing has to break them."""
        self.detached_sends: deque[WorkHandle] = deque()
        """Unfinished sends whose handle the caller has discarded. gloo would cancel them with the handle."""

    # Sending.

    def _send(self, data: Tensor, to: int, tag: int, exact: bool, lossy: bool) -> Handle:
        if to == self.rank:
            self._mailbox.deliver(data.cpu().clone(), self.rank, tag)
            return CompletedHandle(data.numel())
        data = data.cpu()  # the same tensor where it is on the CPU already
        if exact:
            return self.post_send(data, to, EXACT + tag, lossy)
        number = next(self._numbers) % MAX_TAG
        header = MessageHeader(self.rank, tag, data.numel(), number).pack()
        first = self.post_send(torch.frombuffer(bytearray(header), dtype=torch.uint8), to, HEADER + tag, lossy)
        return _FramedSend(first, self.post_send(data, to, BODY + number, lossy)) if data.numel() else first

    def post_send(self, data: Tensor, to: int, engine_tag: int, lossy: bool = False) -> Handle:
        """Give bytes to the engine. The loss of a lossy message is ignored."""
        large = data.numel() > MAX_DETACHED_BYTES // MAX_DETACHED_SENDS  # a few small ones cannot exceed the limit
        while len(self.detached_sends) > MAX_DETACHED_SENDS or (
            large and sum(handle.nbytes for handle in self.detached_sends) > MAX_DETACHED_BYTES
        ):
            self.detached_sends.popleft().wait()  # Usually finished; gloo reports completion only to wait().
        try:
            work = self.groups.cpu.send([data], to, engine_tag)
        except RuntimeError as error:
            if lossy:
                return CompletedHandle(data.numel())
            raise self.failure(to, self._describe_send(to, data), 0.0, error) from error
        pending = partial(self._describe_send, to, data)
        return WorkHandle(self, work, data, to, pending, keep_alive=True, lossy=lossy)

    def _describe_send(self, to: int, data: Tensor) -> str:
        return f"rank {self.members[to]} to take {format_bytes(data.numel())}"

    # Receiving.

    def _recv(self, data: Tensor, source: int | None, tag: int, exact: bool) -> Handle:
        if source == self.rank or (source is None and self.size == 1):
            return MailboxHandle(self, self._mailbox, self._mailbox.post(data, source, tag, exact))
        if source is not None and exact:
            return self.post_recv(data, source, EXACT + tag)
        if source is None or tag in self._readers:
            self._start_readers(tag)
            posted = self._mailbox.post(data, source, tag, exact)
            for silent in [
                other for known, other in list(self._ended_peers) if known == tag and source in (None, other)
            ]:
                self._end_peer(tag, silent, None)
            return MailboxHandle(self, self._mailbox, posted)
        return _FramedRecv(self, data, source, tag)

    def post_recv(self, data: Tensor, source: int, engine_tag: int, pending: str = "") -> WorkHandle:
        """Receive bytes from the engine; `pending` describes the receive in messages."""
        describe = partial(describe_recv, self, source, engine_tag % MAX_TAG, data.numel())
        target = torch.empty_like(data, device="cpu") if data.is_cuda else data
        try:
            work = self.groups.cpu.recv([target], source, engine_tag)
        except RuntimeError as error:
            raise self.failure(source, pending or describe(), 0.0, error) from error
        return WorkHandle(self, work, target, source, pending or describe, copy_to=data if data.is_cuda else None)

    def _start_readers(self, tag: int) -> None:
        with self._lock:
            if tag not in self._readers:
                self._readers[tag] = {
                    peer: self.runtime.spawn(self._read_loop, tag, peer, name=f"any-source-{tag}-{peer}")
                    for peer in range(self.size)
                    if peer != self.rank
                }

    def _read_loop(self, tag: int, peer: int) -> None:
        """Read the messages from `peer` with `tag` into the mailbox, until the channel closes or the peer is lost."""
        while not self._closed:
            try:
                header_bytes = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                handle = self.post_recv(header_bytes, peer, HEADER + tag)
                handle.work.wait(FOREVER)  # no message may come, and a timeout would break all connections
                header = MessageHeader.read(header_bytes.numpy().tobytes(), peer=peer)
                self._mailbox.wait_for_space(header.length, peer, tag)  # meanwhile the sender waits
                self._mailbox.deliver(self.read_body(header_bytes, peer, None), peer, tag)
            except ProtocolError as error:
                self._refusals.warn(f"rank {self.members[self.rank]}: {error}")  # there may be no waiting caller
                self._break_receives(tag, peer, True, error)
            except (SynclineError, RuntimeError) as error:
                if not self._closed:
                    self._end_peer(tag, peer, error)
                return

    def _end_peer(self, tag: int, peer: int, cause: Exception | None) -> None:
        """End the receives that wait for a lost peer, and those from any rank if all peers are lost."""
        self._ended_peers.add((tag, peer))
        alone = all((tag, other) in self._ended_peers for other in self._readers.get(tag, {}))
        if self._mailbox.has_receive(lambda posted: _waits_for(posted, tag, peer, alone)):
            pending = f"a message from {'anyone' if alone else f'rank {self.members[peer]}'} (tag {tag})"
            cause = cause or ConnectionError("the connection is closed")
            self._break_receives(tag, peer, alone, self.failure(peer, pending, 0.0, cause))

    def _break_receives(self, tag: int, peer: int, any_source: bool, error: Exception) -> None:
        self._mailbox.fail(lambda posted: error if _waits_for(posted, tag, peer, any_source) else None)

    def read_body(self, header_bytes: Tensor, source: int, out: Tensor | None, timeout: float | None = None) -> Tensor:
        """Receive the body of a header, into `out` if it fits.

        A body that is too long is received, so that its sender does not hang, and then refused. A body longer than
        `MAX_UNRECEIVED_BYTES` is refused at once.
        """
        header = MessageHeader.read(header_bytes.numpy().tobytes(), peer=source)
        limit = header.length if out is None else out.numel()  # the reader has waited for the space
        refusal = ProtocolError(
            f"rank {source} sent {format_bytes(header.length)} (tag {header.tag}) where at most "
            f"{format_bytes(limit)} were expected",
            peer=source,
        )
        if header.length > max(limit, MAX_UNRECEIVED_BYTES):
            raise refusal
        fits = out is not None and header.length <= limit
        data = out[: header.length] if out is not None and fits else torch.empty(header.length, dtype=torch.uint8)
        if header.length:
            pending = describe_recv(self, source, header.tag, header.length)
            self.post_recv(data, source, BODY + header.number, pending).wait(timeout)
        if header.length > limit:
            raise refusal
        return data

    # The rest of the contract.

    def _split(self, members: tuple[int, ...]) -> Transport | None:
        number = next(self._splits)
        if self.rank not in members:
            return None
        chosen = tuple(self.members[rank] for rank in members)
        # The ranks are part of the name: two halves that split at the same time must not share a channel.
        name = f"{self.channel}.{number}.{zlib.crc32(repr(chosen).encode()):08x}"
        return TorchTransport(self.factory, chosen, self.members[self.rank], name)

    def tensor_channels(self, pairs: Iterable[tuple[int, int]], device: torch.device) -> TensorChannels:
        name = f"{self.channel}.{next(self._channel_sets)}"
        channels = open_nccl_channels(self, name, sorted(set(pairs)), device)
        self._tensor_channels = [each for each in self._tensor_channels if not each.closed]
        if channels is None:
            return TensorChannels()
        self._tensor_channels.append(channels)
        return channels

    @property
    def has_ended(self) -> bool:
        """Whether this rank has closed or aborted the channel."""
        return self._closed or self._aborted

    def waiting(
        self,
        pending: str | Callable[[], str],
        peer: int | None,
        no_deadline: bool,
        break_off: Callable[[], None] | None = None,
    ) -> Callable[[], object]:
        """Record that this rank waits, unless the wait has no deadline. Call the returned function at its end."""
        if not no_deadline:
            whom = None if peer is None else self.members[peer]
            return self.liveness.waiting(pending, self.channel, self.members, whom, break_off or self.break_waits)
        with self._lock:
            self._unbounded_waits += 1
        return self._end_unbounded_wait

    def _end_unbounded_wait(self) -> None:
        with self._lock:
            self._unbounded_waits -= 1

    def control_store(self) -> KeyValueStore:
        return self.factory.control_store

    def lost(self) -> dict[int, str]:
        return self.liveness.lost()

    def gone_reason(self, rank: int) -> str:
        return super().gone_reason(rank) or (LEFT_WORLD if self.liveness.has_left(self.members[rank]) else "")

    def failure(
        self, peer: int | None, pending: str, seconds: float, cause: BaseException | None, no_deadline: bool = False
    ) -> Exception:
        if self.liveness.elastic:  # the members form a team, which decides which members are lost
            return self._broken(peer, pending, seconds, cause)
        text = str(cause).lower()
        timed_out = "timed out" in text or "timeout" in text
        loss = self.liveness.blame(
            self.channel,
            self.members,
            None if peer is None else self.members[peer],
            broken=cause is not None and not timed_out,
            no_deadline=no_deadline,
        )
        if loss.mismatch:
            return IncompatibleError(f"rank {self.members[self.rank]} waited for {pending}: {loss.reason}")
        who = "a peer" if loss.rank is None else f"rank {loss.rank}"
        if loss.rank == self.members[self.rank]:
            loss, who = LossReason(loss.rank, "they have declared this rank lost"), "the others"
        return peer_lost_error(f"rank {self.members[self.rank]}", loss.rank, who, pending, seconds, loss.reason)

    def _broken(self, peer: int | None, pending: str, seconds: float, cause: BaseException | None) -> PeerLostError:
        """The error of an elastic job: it names a member that is known to be lost, without a search for the cause."""
        lost = self.liveness.lost()
        suspects = self.members if peer is None else (self.members[peer],)
        rank = next((member for member in suspects if member in lost), None if peer is None else self.members[peer])
        reason = lost.get(-1 if rank is None else rank) or (first_line(cause) if cause is not None else "no answer")
        who = "a peer" if rank is None else f"rank {rank}"
        return peer_lost_error(f"rank {self.members[self.rank]}", rank, who, pending, seconds, reason)

    def abort(self) -> None:
        """Break every wait on this channel, here and at the peers, as gloo does when one wait times out."""
        self._aborted = True
        if not self._closed:
            self.liveness.give_up(self.channel)
        self._mailbox.fail(channel_closed)
        self.break_waits()
        for each in self._tensor_channels:
            each.abort()

    def break_waits(self) -> None:
        """Break the connections of this channel. gloo then ends the waits of this rank and of its peers."""
        # gloo cannot cancel a wait, but a receive that times out breaks all connections of the group.
        for peer in range(self.size):
            if peer != self.rank and self.groups.cpu is not None:
                with suppress(RuntimeError):
                    self.groups.cpu.recv([torch.empty(1, dtype=torch.float32)], peer, ABORT).wait(
                        timedelta(milliseconds=1)
                    )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for each in self._tensor_channels:
            each.close()
        self._mailbox.close(channel_closed)
        if self._readers or self._unbounded_waits:
            self.abort()
            for readers in self._readers.values():
                for task in readers.values():
                    task.join(READER_JOIN_TIMEOUT_S)
        self.liveness.forget(self.channel)
        if self.channel == "0":
            self.liveness.leave()  # first: closing breaks the others' waits, and they search for the lost rank
        self.factory.release(self.groups)
        if self.channel == "0":
            self.factory.close()


class _FramedSend:
    """A header and its body that are being sent."""

    def __init__(self, header: Handle, body: Handle) -> None:
        self._parts = (header, body)
        self.source = -1
        self.nbytes = body.nbytes

    def wait(self, timeout: float | None = None) -> None:
        for part in self._parts:
            part.wait(timeout)


class _FramedRecv:
    """A receive whose header states the length."""

    def __init__(self, transport: TorchTransport, data: Tensor, source: int, tag: int) -> None:
        self._transport = transport
        self._data = data
        self._header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        pending = describe_recv(transport, source, tag, data.numel())
        self._handle = transport.post_recv(self._header, source, HEADER + tag, pending)
        self._done = False
        self.source = source
        self.nbytes = 0

    def wait(self, timeout: float | None = None) -> None:
        if self._done:
            return
        self._handle.wait(timeout)
        self._done = True
        body_timeout = None if timeout == math.inf else timeout  # a body follows its header at once
        self.nbytes = self._transport.read_body(self._header, self.source, self._data, body_timeout).numel()


def _waits_for(posted: PostedReceive, tag: int, peer: int, any_source: bool) -> bool:
    """Whether a receive waits for this peer, or for any rank if `any_source` is set."""
    return posted.tag == tag and (posted.wanted == peer or (any_source and posted.wanted is None))


class TorchConnector:
    """Makes the channels of the teams of an elastic job. `syncline run` serves its store."""

    def __init__(self, environment: Environment, timeout: float, member: int) -> None:
        self.member, self.timeout = member, timeout
        rendezvous = find_rendezvous(environment)
        if not rendezvous.hosted:
            raise WorldError(no_launcher_store(environment))
        store = open_store(environment, rendezvous, timeout)
        address = elastic_address(rendezvous)
        self.factory, bounded = _make_factory(rendezvous, store, timeout, ELASTIC_WORLD, address, environment, member)
        self.runtime = self.factory.liveness.runtime
        self.store: KeyValueStore = bounded.prefixed("syncline")

    def lost(self) -> dict[int, str]:
        return self.factory.liveness.read_lost()

    def unreachable(self) -> dict[int, str]:
        links = self.factory.liveness.links
        return {} if links is None else dict(links.unreachable)

    def connect(self, members: tuple[int, ...], number: int) -> Transport:
        self.factory.liveness.follow(members)
        if len(members) == 1:
            return SingleTransport(self.runtime, self.timeout)
        return TorchTransport(self.factory, members, self.member, f"team{number}")

    def follow(self, members: Iterable[int]) -> None:
        self.factory.liveness.follow(members)

    def add_roles(self, transport: Transport) -> Transport:
        return transport

    def close(self) -> None:
        self.factory.close()


def _make_factory(
    rendezvous: Rendezvous,
    store: TCPStore,
    timeout: float,
    name: str,
    address: str,
    environment: Environment,
    member: int | None = None,
) -> tuple[ProcessGroupFactory, BoundedStore]:
    """The factory of a world's channels, with heartbeats. `member`: the number of this process in an elastic job."""
    runtime = RealRuntime()
    bounded_store = open_bounded_store(rendezvous, store, runtime, timeout)
    records = bounded_store.prefixed(name)
    liveness = Liveness(
        records,
        bounded_store,
        rank=environment.rank if member is None else member,
        size=environment.size,
        runtime=runtime,
        host_rank=None if rendezvous.hosted else 0,
        program=program_name(),
        elastic=member is not None,
        links=None if member is None else probe_links(records, member, address, runtime),
    )
    control_store = bounded_store.prefixed(f"{name}/control")
    factory = ProcessGroupFactory(PrefixStore(name, store), liveness, timeout, address, control_store)
    return factory, bounded_store


def connect(environment: Environment, timeout: float) -> TorchTransport:
    """Join the world that the launcher describes. Every rank calls it; it returns when all have joined."""
    rendezvous = find_rendezvous(environment)
    store = open_store(environment, rendezvous, timeout)
    name = next_world_name(store, environment.rank)
    prefix = PrefixStore(name, store)
    prefix.set(f"here/{environment.rank}", "1")
    address = listening_address(rendezvous.address, environment.on_one_host)
    factory, _ = _make_factory(rendezvous, store, timeout, name, address, environment)
    liveness = factory.liveness
    try:
        return TorchTransport(factory, tuple(range(environment.size)), environment.rank)
    except WorldError:
        factory.close()
        raise
    except PeerLostError as error:
        ended = liveness.dead.get(-1 if error.peer is None else error.peer)
        factory.close()
        if ended is not None:
            raise WorldError(
                f"rank {environment.rank} of {environment.size} ({environment.source}) cannot join: rank {error.peer} "
                f"has ended before all had joined: {ended}"
            ) from error
        raise WorldError(_describe_missing(prefix, environment, rendezvous, timeout, error)) from error


def _describe_missing(
    store: Store, environment: Environment, rendezvous: Rendezvous, timeout: float, error: Exception
) -> str:
    try:
        missing = [rank for rank in range(environment.size) if not store.check([f"here/{rank}"])]
    except RuntimeError:
        missing = []
    who = first_line(error)
    if missing:
        who = f"ranks {missing} did not join (if a wrapper script starts them, set MASTER_ADDR and MASTER_PORT)"
    return (
        f"rank {environment.rank} of {environment.size} ({environment.source}) could not join at "
        f"{rendezvous.address}:{rendezvous.port} within {timeout:.3g} s: {who}"
    )
