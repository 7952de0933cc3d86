"""Point-to-point messages over a process group.

gloo's own messages have no length: a long one aborts the receiver's process, a short one passes unseen. So a
message goes as a header and a body, unless both sides know the length (`exact`)::

    tag space   exact   ┌ 0 │ tag    ┐      the body alone
                header  ┌ 1 │ tag    ┐      36 bytes: who, tag, length, number
                body    ┌ 2 │ number ┐      paired with its header by the number

A rank cannot reach itself through gloo; such messages go through a mailbox. A tag that somebody receives from
*anyone* is read into the same mailbox, by a task for each peer: a message to oneself wakes that receive too, and
unlike gloo's own receive from anyone these waits end when a peer is gone or the channel is closed.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, PeerLostError, ProtocolError, SynclineError, WorldError
from syncline.runtime import Task
from syncline.transports.base import MAX_TAG, Handle, Transport, format_bytes
from syncline.transports.frames import HEADER_BYTES, Header
from syncline.transports.limited_log import LimitedLog
from syncline.transports.liveness import LEFT_WORLD, LivenessMonitor, Verdict
from syncline.transports.mailbox import LIMIT, Mailbox, Posted
from syncline.transports.memory import Completed, MailboxHandle, describe_recv, no_more
from syncline.transports.torch_dist.engine import Engine
from syncline.transports.torch_dist.native import NativeTorch
from syncline.transports.torch_dist.work import FOREVER, WorkHandle

__all__ = ["TorchTransport"]

logger = logging.getLogger("syncline")

MOST_DROPPED = 64
MOST_DROPPED_BYTES = 64 << 20
PATIENCE = 5.0

EXACT, HEADER, BODY, ABORT = 0 * MAX_TAG, 1 * MAX_TAG, 2 * MAX_TAG, 3 * MAX_TAG


class TorchTransport(Transport):
    """One rank on one process group."""

    name = "torch.distributed"

    def __init__(self, engine: Engine, members: tuple[int, ...], global_rank: int, channel: str = "0") -> None:
        super().__init__(members.index(global_rank), len(members), engine.liveness.runtime, engine.timeout, members)
        self.engine = engine
        self.liveness = engine.liveness
        self.channel = channel
        pending = f"ranks {list(members)} to make a channel"
        self.monitor = LivenessMonitor(self.liveness, channel)
        self.monitor.enter(pending)
        over = self.liveness.waiting(pending, channel, members)
        try:
            engine.await_members(channel, members, global_rank)
            self.groups = engine.groups(channel, self.rank, self.size)
        except WorldError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self.failure(None, pending, 0.0, error) from error
        finally:
            over()
        self.native = NativeTorch(self)
        self._numbers = count()
        self._splits = count(1)
        self._mailbox = Mailbox(self.runtime)
        self._pumps: dict[int, dict[int, Task]] = {}
        self._silent: set[tuple[int, int]] = set()
        self._lock = self.runtime.lock()
        self._refusals = LimitedLog(logger, self.runtime.now)
        self._closed = False
        self._aborted = False
        self._idle = 0
        """Waits without end: closing has to break them."""
        self.dropped: deque[WorkHandle] = deque()
        """Sends whose handles nobody waited for: the engine would cancel them with the handle."""

    # Sending.

    def _send(self, data: Tensor, to: int, tag: int, exact: bool, lossy: bool) -> Handle:
        if to == self.rank:
            self._mailbox.deliver(data.cpu().clone(), self.rank, tag)
            return Completed(data.numel())
        data = data.cpu()  # the same tensor where it is on the CPU already
        if exact:
            return self.post_send(data, to, EXACT + tag, lossy)
        number = next(self._numbers) % MAX_TAG
        header = Header(self.rank, tag, data.numel(), number).pack()
        first = self.post_send(torch.frombuffer(bytearray(header), dtype=torch.uint8), to, HEADER + tag, lossy)
        return _Both(first, self.post_send(data, to, BODY + number, lossy)) if data.numel() else first

    def post_send(self, data: Tensor, to: int, engine_tag: int, lossy: bool = False) -> Handle:
        """Hand bytes to the engine. Of a lossy message that cannot be sent nobody is told, and nobody blamed."""
        pending = f"rank {self.members[to]} to take {format_bytes(data.numel())}"
        large = data.numel() > MOST_DROPPED_BYTES // MOST_DROPPED  # as many small ones cannot be too much
        while len(self.dropped) > MOST_DROPPED or (
            large and sum(handle.nbytes for handle in self.dropped) > MOST_DROPPED_BYTES
        ):
            self.dropped.popleft().wait()  # long done, as a rule: the engine does not tell without a wait
        try:
            work = self.groups.cpu.send([data], to, engine_tag)
        except RuntimeError as error:
            if lossy:
                return Completed(data.numel())
            raise self.failure(to, pending, 0.0, error) from error
        return WorkHandle(self, work, data, to, pending, outlives=True, lossy=lossy)

    # Receiving.

    def _recv(self, data: Tensor, source: int | None, tag: int, exact: bool) -> Handle:
        if source == self.rank or (source is None and self.size == 1):
            return MailboxHandle(self, self._mailbox, self._mailbox.post(data, source, tag, exact))
        if source is not None and exact:
            return self.post_recv(data, source, EXACT + tag)
        if source is None or tag in self._pumps:
            self._pump(tag)
            posted = self._mailbox.post(data, source, tag, exact)
            for silent in [other for known, other in list(self._silent) if known == tag and source in (None, other)]:
                self._peer_is_silent(tag, silent, None)
            return MailboxHandle(self, self._mailbox, posted)
        return _FramedRecv(self, data, source, tag)

    def post_recv(self, data: Tensor, source: int | None, engine_tag: int, pending: str = "") -> WorkHandle:
        """Ask the engine for bytes; `pending` is what people are told of it."""
        pending = pending or describe_recv(self, source, engine_tag % MAX_TAG, data.numel())
        landing = torch.empty_like(data, device="cpu") if data.is_cuda else data
        try:
            if source is None:
                work = self.groups.cpu.recv_anysource([landing], engine_tag)
            else:
                work = self.groups.cpu.recv([landing], source, engine_tag)
        except RuntimeError as error:
            raise self.failure(source, pending, 0.0, error) from error
        return WorkHandle(self, work, landing, source, pending, copy_to=data if data.is_cuda else None)

    def _pump(self, tag: int) -> None:
        with self._lock:
            if tag not in self._pumps:
                self._pumps[tag] = {
                    peer: self.runtime.spawn(self._pump_loop, tag, peer, name=f"anyone-{tag}-{peer}")
                    for peer in range(self.size)
                    if peer != self.rank
                }

    def _pump_loop(self, tag: int, peer: int) -> None:
        """Read what comes from `peer` under `tag` into the mailbox, until the channel closes or the peer is gone."""
        while not self._closed:
            try:
                header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                handle = self.post_recv(header, peer, HEADER + tag)
                handle.work.wait(FOREVER)  # it may have nothing to say, and a wait that ends breaks all pairs
                found = Header.read(header.numpy().tobytes(), peer=peer)
                self._mailbox.await_room(found.length, peer, tag)  # until then its sender waits
                self._mailbox.deliver(self.read_body(header, peer, None), peer, tag)
            except ProtocolError as error:
                self._refusals.warn(f"rank {self.members[self.rank]}: {error}")  # perhaps no caller is waiting
                self._break_receives(tag, peer, True, error)
            except (SynclineError, RuntimeError) as error:
                if not self._closed:
                    self._peer_is_silent(tag, peer, error)
                return

    def _peer_is_silent(self, tag: int, peer: int, cause: Exception | None) -> None:
        """Nothing more comes from a peer: break the receives that wait for it, or for anyone when all are silent."""
        self._silent.add((tag, peer))
        alone = all((tag, other) in self._silent for other in self._pumps.get(tag, {}))
        if self._mailbox.waits(lambda posted: _concerns(posted, tag, peer, alone)):
            pending = f"a message from {'anyone' if alone else f'rank {self.members[peer]}'} (tag {tag})"
            cause = cause or ConnectionError("the connection is closed")
            self._break_receives(tag, peer, alone, self.failure(peer, pending, 0.0, cause))

    def _break_receives(self, tag: int, peer: int, anyone: bool, error: Exception) -> None:
        self._mailbox.fail(lambda posted: error if _concerns(posted, tag, peer, anyone) else None)

    def read_body(self, header: Tensor, source: int, room: Tensor | None, timeout: float | None = None) -> Tensor:
        """The body that a header announces, in `room` where it fits there exactly or with space left.

        A body that is too long is still taken off the wire, so that its sender does not hang, and refused; unless
        it is longer than anything that may lie here unasked for.
        """
        found = Header.read(header.numpy().tobytes(), peer=source)
        limit = found.length if room is None else room.numel()  # a pump has made sure of the room
        refusal = ProtocolError(
            f"rank {source} sent {format_bytes(found.length)} (tag {found.tag}) where at most "
            f"{format_bytes(limit)} were due",
            peer=source,
        )
        if found.length > max(limit, LIMIT):
            raise refusal
        fits = room is not None and found.length <= limit
        data = room[: found.length] if room is not None and fits else torch.empty(found.length, dtype=torch.uint8)
        if found.length:
            pending = describe_recv(self, source, found.tag, found.length)
            self.post_recv(data, source, BODY + found.number, pending).wait(timeout)
        if found.length > limit:
            raise refusal
        return data

    # The rest of the contract.

    def _split(self, members: tuple[int, ...]) -> Transport | None:
        number = next(self._splits)
        if self.rank not in members:
            return None
        chosen = tuple(self.members[rank] for rank in members)
        # The ranks are part of the name: two halves that each split themselves off at once must not meet.
        name = f"{self.channel}.{number}.{zlib.crc32(repr(chosen).encode()):08x}"
        return TorchTransport(self.engine, chosen, self.members[self.rank], name)

    @property
    def has_ended(self) -> bool:
        """Whether this rank has closed or given up the channel."""
        return self._closed or self._aborted

    def waiting(self, pending: str, peer: int | None, idle: bool) -> Callable[[], object]:
        """This rank begins to wait; call what is returned when that is over. The others are not told of an idle one."""
        if not idle:
            whom = None if peer is None else self.members[peer]
            return self.liveness.waiting(pending, self.channel, self.members, whom, self._break_waits)
        with self._lock:
            self._idle += 1
        return self._no_longer_idle

    def _no_longer_idle(self) -> None:
        with self._lock:
            self._idle -= 1

    def lost(self) -> dict[int, str]:
        return self.liveness.lost()

    def gone_reason(self, rank: int) -> str:
        return super().gone_reason(rank) or (LEFT_WORLD if self.liveness.has_left(self.members[rank]) else "")

    def failure(
        self, peer: int | None, pending: str, seconds: float, cause: BaseException | None, idle: bool = False
    ) -> Exception:
        told = str(cause).lower()
        timed_out = "timed out" in told or "timeout" in told
        verdict = self.liveness.blame(
            self.channel,
            self.members,
            None if peer is None else self.members[peer],
            broken=cause is not None and not timed_out,
            idle=idle,
        )
        if verdict.mismatch:
            return IncompatibleError(f"rank {self.members[self.rank]} waited for {pending}: {verdict.reason}")
        who = "a peer" if verdict.rank is None else f"rank {verdict.rank}"
        if verdict.rank == self.members[self.rank]:
            verdict, who = Verdict(verdict.rank, "they have declared this rank lost"), "the others"
        after = f" after {seconds:.3g} s" if seconds else ""
        return PeerLostError(
            f"rank {self.members[self.rank]} lost {who}{after} while waiting for {pending}: {verdict.reason}",
            peer=verdict.rank,
            pending=pending,
            seconds=seconds,
        )

    def abort(self) -> None:
        """Break every wait on this channel, here and at the peers: gloo does so when one wait times out."""
        self._aborted = True
        self._mailbox.fail(no_more)
        self._break_waits()

    def _break_waits(self) -> None:
        # A peer that has left breaks its own pair at once and no other wait: only one that times out breaks them all.
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
        self._mailbox.close(no_more)
        if self._pumps or self._idle:
            self.abort()
            for pumps in self._pumps.values():
                for task in pumps.values():
                    task.join(PATIENCE)
        self.liveness.pending.pop(self.channel, None)
        if self.channel == "0":
            self.liveness.leave()  # first: closing the groups breaks the others' waits, and they look for the lost rank
        self.engine.release(self.groups)
        if self.channel == "0":
            self.engine.close()


class _Both:
    """A header and its body on their way."""

    def __init__(self, header: Handle, body: Handle) -> None:
        self._parts = (header, body)
        self.source = -1
        self.nbytes = body.nbytes

    def wait(self, timeout: float | None = None) -> None:
        for part in self._parts:
            part.wait(timeout)


class _FramedRecv:
    """A receive whose header tells how much is to come."""

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
        left = None if timeout == math.inf else timeout  # a body follows its header at once
        self.nbytes = self._transport.read_body(self._header, self.source, self._data, left).numel()


def _concerns(posted: Posted, tag: int, peer: int, anyone: bool) -> bool:
    """Whether a receive waits for this peer, or for anyone where that counts too."""
    return posted.tag == tag and (posted.wanted == peer or (anyone and posted.wanted is None))
