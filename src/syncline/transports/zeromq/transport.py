"""ZeroMQ as a transport: any rank to any rank, on one set of sockets, with members that join and leave."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, PeerLostError, SynclineError, WorldError
from syncline.transports.base import (
    MAX_TAG,
    BytesHandle,
    Handle,
    RequestListener,
    Transport,
    as_bytes,
    format_bytes,
)
from syncline.transports.key_value_store import KeyValueStore
from syncline.transports.liveness import Liveness, LivenessMonitor, LossReason
from syncline.transports.messages import ArrivedMessage, CompletedHandle, Mailbox, PostedReceive, tag_name
from syncline.transports.zeromq.connection import ABORT, OutgoingMessage, PeerConnection, TooManyOffersError
from syncline.transports.zeromq.node import ABORTED, Node, Waitable

__all__ = ["ZmqTeamTransport", "ZmqTransport"]

LATE_MESSAGE = "it has not come within the timeout"
EMPTY_BUFFER = torch.empty(0, dtype=torch.uint8)
EMPTY_DATA = memoryview(b"")
MAX_NAMED_RANKS = 8
"""Lost ranks that an error names."""
MAX_CLOSE_WAIT_S = 60.0


class ZmqTransport(Transport):
    """One rank's channel. The root channel reaches every rank of the world, also those that joined later.

    So do the channels that `split_by_key` makes of it. Each rank has its number in the world there.
    """

    name = "zeromq"

    def __init__(
        self,
        node: Node,
        members: tuple[int, ...],
        timeout: float,
        channel: str = "0",
        number: int | None = None,
        reaches_all: bool = False,
    ) -> None:
        """`number` is that of the channel in the header; by default a checksum of its name."""
        super().__init__(members.index(node.rank), len(members), node.runtime, timeout, members)
        self.node = node
        self._channel = channel
        checksum = 0 if channel == "0" else zlib.crc32(channel.encode()) or 1
        self.channel_number = checksum if number is None else number
        self._mailbox: Mailbox = node.mailbox(self.channel_number)
        self._splits: Iterator[int] = count(1)
        self._root = channel == "0"
        self._reaches_all = self._root or reaches_all
        self._closed = False
        self._aborted = False
        self.monitor = _ConnectionMonitor(self, node.liveness, channel)

    def present(self) -> tuple[int, ...]:
        """The ranks that are in the world now. Those that joined after the launch have the highest numbers."""
        self.node.membership.refresh()
        return self.node.membership.present()

    def _send(self, data: Tensor, to: int, tag: int, exact: bool, lossy: bool) -> Handle:
        rank = to if self._reaches_all else self.members[to]
        if rank == self.node.rank:
            self._mailbox.deliver(data.cpu().clone(), rank, tag)
            self.node.wake()
            return CompletedHandle(data.numel())
        if data.is_cuda:
            data = data.cpu()
        try:
            outgoing = self._send_over(self.node.connection(rank), tag, data, to)
        except PeerLostError:
            raise
        except ConnectionError as error:
            raise self.failure(to, self.describe_send(to, data.numel()), 0.0, error) from error
        return CompletedHandle(data.numel()) if outgoing is None else _SendHandle(self, outgoing, to)

    def _send_over(self, connection: PeerConnection, tag: int, data: Tensor, to: int) -> OutgoingMessage | None:
        while True:
            if self._has_ended:
                raise self.aborted_error(self.describe_send(to, data.numel()))
            try:
                outgoing = connection.send(self.channel_number, tag, data)
                if self._has_ended:  # aborted between the two: no other thread abandons this message
                    self.node.abandon(self.channel_number, ABORTED)
                return outgoing
            except TooManyOffersError as crowd:
                if self.node.loop.is_driver:
                    raise ConnectionError("it takes nothing of what was sent to it") from None
                pending = partial(self.describe_send, to, data.numel())
                if not self.wait(crowd.oldest, self.timeout, pending, to):
                    raise self.failure(to, pending(), self.timeout, None) from None

    def send_bytes(self, parts: Sequence[bytes | memoryview], to: int, tag: int = 0, *, lossy: bool = False) -> None:
        if not (0 <= to < self.size and 0 <= tag < MAX_TAG):
            self._check(to, "to", tag)
        rank = to if self._reaches_all else self.members[to]
        if rank != self.node.rank and not self._has_ended:
            nbytes = sum(map(len, parts))
            try:
                if self.node.connection(rank).send_eager(self.channel_number, tag, parts, nbytes):
                    return
            except PeerLostError:
                raise
            except ConnectionError as error:
                raise self.failure(to, self.describe_send(to, nbytes), 0.0, error) from error
        super().send_bytes(parts, to, tag, lossy=lossy)

    def recv_bytes(self, max_bytes: int, source: int, tag: int = 0, *, via: int | None = None) -> BytesHandle:
        if not (0 <= source < self.size and 0 <= tag < MAX_TAG):
            self._check(source, "source", tag)
        rank = source if self._reaches_all else self.members[source]
        through = via if via is None or self._reaches_all else self.members[via]
        posted = PostedReceive(EMPTY_BUFFER, rank, tag, False, max_bytes=max_bytes, via=through)
        return _BytesReceiveHandle(self, self._mailbox, self._mailbox.add(posted), EMPTY_BUFFER, source)

    def describe_send(self, to: int, nbytes: int) -> str:
        """What a sender waits for, with the name of the member."""
        return f"{self.node.name(self.rank_of(to))} to take {format_bytes(nbytes)}"

    def _recv(self, data: Tensor, source: int | None, tag: int, exact: bool) -> Handle:
        rank = source if source is None or self._reaches_all else self.members[source]
        target = torch.empty_like(data, device="cpu") if data.is_cuda else data
        posted = self._mailbox.post(target, rank, tag, exact)
        return _ReceiveHandle(self, self._mailbox, posted, data, source)

    def listen(
        self,
        tag: int,
        max_bytes: int,
        on_request: Callable[[int, memoryview], None],
        on_peer_lost: Callable[[int], None],
    ) -> RequestListener:
        return ZmqRequestListener(self, self._mailbox, tag, max_bytes, on_request, on_peer_lost)

    def _check(self, peer: int, what: str, tag: int) -> None:
        if self._reaches_all and isinstance(peer, int) and peer >= self.size:
            self.node.membership.find(peer)  # a rank that joined later; an unknown one is refused here
            peer = 0
        super()._check(peer, what, tag)

    def rank_of(self, place: int) -> int:
        """The world rank of a rank in this channel."""
        return place if self._reaches_all else self.members[place]

    def place(self, rank: int) -> int:
        """The rank in this channel of a world rank."""
        return rank if self._reaches_all else self.members.index(rank)

    def _split(self, members: tuple[int, ...]) -> Transport | None:
        number = next(self._splits)
        if self.rank not in members:
            return None
        chosen = tuple(self.members[rank] for rank in members)
        name = f"{self._channel}.{number}.{zlib.crc32(repr(chosen).encode()):08x}"
        return ZmqTransport(self.node, chosen, self.timeout, name)

    def split_by_key(self, key: str) -> Transport:
        if not self._reaches_all:
            raise WorldError("a channel of some ranks has no channel that reaches those that join later")
        return ZmqTransport(self.node, self.members, self.timeout, f"{self._channel}/{key}", reaches_all=True)

    def control_store(self) -> KeyValueStore:
        return self.node.control_store

    def lost(self) -> dict[int, str]:
        membership = self.node.membership
        return {rank: reason for rank, reason in list(membership.gone.items()) if rank not in membership.left}

    def gone_reason(self, rank: int) -> str:
        return self.node.gone(self.rank_of(rank))

    def wait(self, operation: Waitable, timeout: float, pending: Callable[[], str], peer: int | None) -> bool:
        """Wait for an operation, and record which rank this one waits for, unless the wait has no deadline."""
        if operation.done:
            return True
        if timeout == math.inf:
            return self.node.wait(operation, timeout, pending)
        rank = None if peer is None else self.rank_of(peer)
        end_record = self.node.liveness.waiting(pending, self._channel, self.members, rank, self.abort)
        try:
            return self.node.loop.wait(operation, timeout, pending)
        finally:
            end_record()

    def failure(self, peer: int | None, pending: str, seconds: float, cause: BaseException | None) -> Exception:
        rank = None if peer is None else self.rank_of(peer)
        if self.node.failed:
            return self.node.peer_lost(self.node.rank, self.node.failed, pending, seconds)
        loss = self._loss_reason(rank, seconds, cause)
        if loss.mismatch:
            return IncompatibleError(f"rank {self.node.rank} waited for {pending}: {loss.reason}")
        if loss.rank == self.node.rank:
            loss = LossReason(loss.rank, "the others have declared this rank lost")
        return self.node.peer_lost(loss.rank, loss.reason, pending, seconds)

    def _loss_reason(self, rank: int | None, seconds: float, cause: BaseException | None) -> LossReason:
        """The rank that caused a wait for `rank` to fail: that rank, or one that it waits for itself."""
        if rank is None:
            return LossReason(None, self._describe_senders())
        gone, may_ask = self.node.gone(rank), not self.node.loop.is_driver
        differ = self.node.liveness.mismatch(self._channel) if may_ask and (gone or seconds >= self.timeout) else ""
        if differ:
            return LossReason(None, differ, mismatch=True)
        if gone:
            return self.node.liveness.cause_of(rank, gone) if may_ask else LossReason(rank, gone)
        if cause is not None:
            return LossReason(rank, str(cause))
        if may_ask and seconds >= self.timeout:
            return self.node.liveness.blame(self._channel, self.members, rank, broken=False)
        return LossReason(rank, f"{LATE_MESSAGE}; {self.node.name(rank)} is still there")

    def explain(self, error: Exception, peer: int | None, pending: str) -> Exception:
        """The error of a broken receive. The node, which broke it, knows that the peer ended, but not why."""
        if isinstance(error, WorldError) and (text := self.node.liveness.mismatch_found(self._channel)):
            return IncompatibleError(f"rank {self.node.rank} waited for {pending}: {text}")
        if not isinstance(error, PeerLostError) or peer is None or not self.node.gone(self.rank_of(peer)):
            return error
        return self.failure(peer, pending, 0.0, None)

    def _describe_senders(self) -> str:
        """Which of the ranks that could have sent a message are gone."""
        ranks = sorted(self.node.membership.members) if self._reaches_all else self.members
        others = [rank for rank in ranks if rank != self.node.rank]
        gone = {rank: reason for rank in others if (reason := self.node.gone(rank))}
        if not gone:
            return f"{LATE_MESSAGE}; everyone it could come from is still there"
        ends = [f"{self.node.name(rank)} ({reason})" for rank, reason in gone.items()]
        more = f" and {len(ends) - MAX_NAMED_RANKS} more" if len(ends) > MAX_NAMED_RANKS else ""
        named = ", ".join(ends[:MAX_NAMED_RANKS]) + more
        if len(gone) == len(others):
            return f"everyone it could come from is gone: {named}"
        return f"{LATE_MESSAGE}; of {len(others)} it could come from {len(gone)} are gone: {named}"

    def aborted_error(self, pending: str) -> SynclineError:
        """The error of an operation that was in progress when the channel was aborted."""
        return WorldError(f"{ABORTED} while rank {self.node.rank} waited for {pending}")

    @property
    def _has_ended(self) -> bool:
        """Whether the channel carries nothing more."""
        return self._aborted

    def abort(self) -> None:
        """Break every receive and every send on this channel. It carries nothing more."""
        self._aborted = True

        def error(posted: PostedReceive) -> Exception:
            return WorldError(f"{ABORTED} while tag {posted.tag} was awaited")

        self._mailbox.close(error)
        self.node.abandon(self.channel_number, ABORTED, error)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.node.liveness.undelivered.pop(self._channel, None)
        if self._root:
            self.node.close(min(self.timeout, MAX_CLOSE_WAIT_S))
        else:
            self.node.close_channel(self.channel_number)


MAX_TEAM_CHANNELS = 1 << 12
"""Channels of one team: its own and its splits."""


class ZmqTeamTransport(ZmqTransport):
    """The channel of one team of an elastic job, or a split of it: any member ends it for all.

    Messages of all teams pass the same sockets. The number of the channel tells them apart, so that late messages of
    an earlier team, and of a member that is not in the team, are discarded::

        1 bit: prepared in advance | 19 bits: number of the team | 12 bits: 0, or the number of the split
    """

    def __init__(
        self,
        node: Node,
        members: tuple[int, ...],
        timeout: float,
        team: int,
        split: int = 0,
        splits: Iterator[int] | None = None,
    ) -> None:
        if split >= MAX_TEAM_CHANNELS:
            raise WorldError(f"a team has at most {MAX_TEAM_CHANNELS} channels on ZeroMQ: make fewer groups")
        self._team = team
        number = (team >> 32 & 1) << 31 | team % (1 << 19) * MAX_TEAM_CHANNELS | split
        super().__init__(node, members, timeout, f"team{team}.{split}", number)
        self._splits = splits or count(1)

    def _split(self, members: tuple[int, ...]) -> Transport | None:
        number = next(self._splits)
        if self.rank not in members:
            return None
        chosen = tuple(self.members[rank] for rank in members)
        return ZmqTeamTransport(self.node, chosen, self.timeout, self._team, number, self._splits)

    @property
    def _has_ended(self) -> bool:
        return self._mailbox.closed  # by this member or another one

    def abort(self) -> None:
        """Break every wait on this channel, here and at the other members. A second call does nothing."""
        if self._aborted:
            return
        self._aborted = True
        self.node.abort_channel(self.channel_number)
        for member in self.members:
            peer = self.node.peers.get(member)
            if peer is not None and not peer.connection.gone:
                peer.connection.send_control(ABORT, self.channel_number)

    def aborted_error(self, pending: str) -> SynclineError:
        return self.node.peer_lost(None, ABORTED, pending, 0.0)

    def failure(self, peer: int | None, pending: str, seconds: float, cause: BaseException | None) -> Exception:
        """The error names a member that is known to be lost, without a search: the next team decides which are lost.

        A failed wait ends the channel: the others must not take a message of the next operation for one of this.
        """
        self.abort()
        if self.node.failed:
            return WorldError(f"{self.node.name()} cannot continue: {self.node.failed}")
        suspects = self.members if peer is None else (self.members[peer],)
        found = ((member, reason) for member in suspects if (reason := self.node.gone(member)))
        member, reason = next(found, (None if peer is None else self.members[peer], "no answer"))
        return self.node.peer_lost(member, str(cause or reason), pending, seconds)

    def explain(self, error: Exception, peer: int | None, pending: str) -> Exception:
        failure = self.failure(peer, pending, 0.0, error)
        return failure if self.node.failed else error

    def lost(self) -> dict[int, str]:
        return self.node.liveness.lost()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.node.liveness.forget(self._channel)
            self.node.close_channel(self.channel_number)


class _ConnectionMonitor(LivenessMonitor):
    """Records in the store, and connections to the ranks that are watched."""

    def __init__(self, transport: ZmqTransport, liveness: Liveness, channel: str) -> None:
        super().__init__(liveness, channel)
        self._transport = transport

    def watch(self, ranks: Sequence[int]) -> None:
        for rank in ranks:  # an open connection shows the end of its peer
            if rank != self._transport.rank:
                self._transport.node.connection(self._transport.rank_of(rank))


class _SendHandle:
    """A message whose bytes are still here."""

    def __init__(self, transport: ZmqTransport, outgoing: OutgoingMessage, to: int) -> None:
        self._transport = transport
        self._outgoing = outgoing
        self._to = to
        self.source = -1
        self.nbytes = outgoing.nbytes

    def wait(self, timeout: float | None = None) -> None:
        transport, outgoing = self._transport, self._outgoing
        limit = transport.timeout if timeout is None else timeout
        if not transport.wait(outgoing, limit, self._pending, self._to):
            raise transport.failure(self._to, self._pending(), limit, None)
        if outgoing.error == ABORTED:
            raise transport.explain(transport.aborted_error(self._pending()), self._to, self._pending())
        if outgoing.error:
            raise transport.failure(self._to, self._pending(), 0.0, ConnectionError(outgoing.error))

    def _pending(self) -> str:
        return self._transport.describe_send(self._to, self.nbytes)


class _ReceiveHandle:
    """A receive in progress."""

    def __init__(
        self, transport: ZmqTransport, mailbox: Mailbox, posted: PostedReceive, data: Tensor, source: int | None
    ) -> None:
        self._transport = transport
        self._mailbox = mailbox
        self._posted = posted
        self._data = data
        self._wanted = source
        self.source = -1
        self.nbytes = 0

    def done(self) -> bool:
        """Whether `wait` would return at once. The node's background task moves messages while no thread waits."""
        return self._posted.done

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the receive is done. Raises its error."""
        transport, posted = self._transport, self._posted
        if not posted.done:
            self._wait_until_done(transport.timeout if timeout is None else timeout)
        if posted.error is not None:
            raise transport.explain(posted.error, self._wanted, self._pending())
        self._take()

    def _take(self) -> None:
        """Take the message out of a receive that is done."""
        posted = self._posted
        if self._data is not posted.data:
            self._data.copy_(posted.data)
        self.source, self.nbytes = self._transport.place(posted.source), posted.nbytes

    def _wait_until_done(self, timeout: float) -> None:
        transport, posted, node = self._transport, self._posted, self._transport.node
        gone, lost = "", self._wanted
        if posted.wanted is not None and posted.wanted != node.rank:
            gone = node.connection(posted.wanted).gone
        if posted.via is not None and not gone:
            gone, lost = node.connection(posted.via).gone, transport.place(posted.via)
        if gone and self._mailbox.withdraw(posted):
            raise transport.failure(lost, self._pending(), 0.0, ConnectionError(gone))
        if not transport.wait(posted, timeout, self._pending, self._wanted) and self._mailbox.withdraw(posted):
            raise transport.failure(self._wanted, self._pending(), timeout, None)

    def _pending(self) -> str:
        posted = self._posted
        nbytes = posted.data.numel() if posted.max_bytes < 0 else posted.max_bytes
        name = self._transport.node.name
        sender = "anyone" if posted.wanted is None else name(posted.wanted)  # it may have joined later
        return f"a message from {sender} ({tag_name(posted.tag)}, {format_bytes(nbytes)})"


class _BytesReceiveHandle(_ReceiveHandle):
    """A receive of a short message, which keeps the memory in which it arrived."""

    data = EMPTY_DATA

    def cancel(self) -> None:
        if not self._posted.done:
            self._mailbox.cancel(self._posted)
            self._transport.node.wake()

    def _take(self) -> None:
        assert self._posted.content is not None, "the message has arrived"
        self.data = self._posted.content


class ZmqRequestListener:
    """Calls `on_request` for the messages with one tag, in order, on the thread that drives the node.

    A message whose bytes are still with its sender is accepted first. Later messages of that rank wait behind it.
    """

    def __init__(
        self,
        transport: ZmqTransport,
        mailbox: Mailbox,
        tag: int,
        max_bytes: int,
        on_request: Callable[[int, memoryview], None],
        on_peer_lost: Callable[[int], None],
    ) -> None:
        self._transport = transport
        self._node = transport.node
        self._mailbox = mailbox
        self._tag = tag
        self._max_bytes = max_bytes
        self._on_request = on_request
        self._on_peer_lost = on_peer_lost
        self._arrived: deque[ArrivedMessage] = deque()
        self._behind: dict[int, deque[ArrivedMessage]] = {}
        """By rank: messages that wait until the one before them is complete."""
        mailbox.listen(tag, self._schedule_message)
        for rank in self._node.add_lost_callback(self._schedule_loss):
            self._schedule_loss(rank)
        self._node.wake()

    def fetch(self, buffer: Tensor, source: int, tag: int, done: Callable[[Exception | None], None]) -> None:
        rank = self._transport.rank_of(source)

        def filled(posted: PostedReceive) -> None:
            self._node.loop.defer(lambda: done(posted.error))

        posted = self._mailbox.post(as_bytes(buffer), rank, tag, True, filled)
        gone = "" if rank == self._node.rank else self._node.connection(rank).gone
        if gone and self._mailbox.withdraw(posted):
            posted.error = self._node.peer_lost(rank, gone, f"a message (tag {tag})", 0.0)
            posted.finish()

    def close(self) -> None:
        self._mailbox.listen(self._tag, None)
        self._node.remove_lost_callback(self._schedule_loss)

    # Scheduled under locks, run by the driver.

    def _schedule_message(self, message: ArrivedMessage) -> None:
        self._arrived.append(message)
        self._node.loop.defer(self._handle_next)

    def _schedule_loss(self, rank: int) -> None:
        self._node.loop.defer(partial(self._handle_loss, rank))

    def _handle_next(self) -> None:
        message = self._arrived.popleft()
        behind = self._behind.get(message.source) if self._behind else None
        if behind is None:
            self._handle(message)
        else:
            behind.append(message)

    def _handle(self, message: ArrivedMessage) -> None:
        accept, source = message.accept, message.source
        if accept is None:
            data = message.data
            assert data is not None, "a message that is not offered has its data"
            view = data.numpy().data if isinstance(data, Tensor) else data
            try:
                self._on_request(self._transport.place(source), view if len(view) <= self._max_bytes else EMPTY_DATA)
            finally:
                message.matched()
        elif message.nbytes > self._max_bytes:
            accept(None)
            self._on_request(self._transport.place(source), EMPTY_DATA)
        else:
            self._behind[source] = deque()
            buffer = torch.empty(message.nbytes, dtype=torch.uint8)
            accept(PostedReceive(buffer, source, self._tag, True, source, message.nbytes, on_done=self._completed))

    def _completed(self, posted: PostedReceive) -> None:
        self._node.loop.defer(lambda: self._continue(posted))

    def _continue(self, posted: PostedReceive) -> None:
        """Handle an offered message that is complete now, and those that arrived meanwhile."""
        behind = self._behind.pop(posted.source)
        if posted.error is None:
            self._on_request(self._transport.place(posted.source), posted.data.numpy().data)
        while behind:
            self._handle(behind.popleft())
            if posted.source in self._behind:
                self._behind[posted.source].extend(behind)
                return

    def _handle_loss(self, rank: int) -> None:
        with suppress(ValueError):  # not a rank of this channel
            self._on_peer_lost(self._transport.place(rank))
