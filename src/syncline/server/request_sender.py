"""Sends a client's requests to the servers and receives the replies, each once, also if messages or servers are lost.

::

    send ─► in-flight limit? ─► number ─► wire ─┐
              └ reached: finish the oldest       ▼
    finish ◄── on_reply ◄── out filled ◄── reply ── server        no reply: send again what may be lost
                                              ╳                   lost: send everything again, to the next replica

A request that is sent again has the same number, so that it counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError, SynclineError
from syncline.runtime import Lock
from syncline.server import protocol
from syncline.server.network import ServerNetwork
from syncline.server.protocol import REPLY_BYTES, ReplyHeader, RequestHeader
from syncline.transports import BytesHandle, Handle, Transport

__all__ = ["PendingRequest", "RequestSender", "ServerConnection"]

MAX_REPLY_BYTES = REPLY_BYTES + protocol.MAX_INLINE_BYTES
EMPTY_BODY = torch.empty(0, dtype=torch.uint8)


class ShardServers:
    """The servers of a shard's chain, in order, each with the `replica` of requests there. New ones come at the end."""

    def __init__(self, network: ServerNetwork, server: int) -> None:
        self.replicated = network.replicas > 1
        self._network, self._server = network, server

    def __call__(self, refresh: bool = False) -> Sequence[tuple[int, int]]:
        """The chain as far as it is known; with `refresh`, as the chain log has it now, if the store answers."""
        if not self.replicated:
            return ((self._server, 0),)
        log = self._network.chain_log
        if refresh:
            with suppress(RuntimeError):
                log.read()
        return log.chain_of(self._network.servers.index(self._server))


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request to one server, until its reply is handled."""

    connection: ServerConnection
    header: RequestHeader
    body: Tensor
    """Bytes or values. They are kept until the reply arrives, because the request may be sent again."""
    out: Tensor | None
    """A 1-D float32 tensor that the reply fills."""
    lock: Lock
    keys: Tensor | None = None
    """The list of keys, for a server that no longer remembers it."""
    view: Tensor | None = None
    """For encoded replies: the values that the server assumes this client has."""
    reply: ReplyHeader | None = None
    reply_body: bytes = b""
    error: Exception | None = None
    finished: bool = False
    """Whether `reply` or `error` is set."""
    place: tuple[int, int] = (0, 0)
    """The places in the shard's chain of the server that has got the request, and of the one that replies."""
    replied: bool = False
    """Whether the reply's header has arrived, so that another server is not asked again."""
    reply_receive: BytesHandle | None = None
    data_receive: Handle | None = None
    sends: list[Handle] = field(default_factory=list)

    @property
    def arrived(self) -> bool:
        """Whether the reply has arrived, as far as the transport can tell without waiting."""
        if self.finished:
            return True
        if self.reply_receive is None or not self.reply_receive.done():
            return False
        poll: Callable[[], bool] | None = getattr(self.data_receive, "done", None)  # some transports cannot tell
        return self.data_receive is None or (poll is not None and poll())

    @property
    def reads(self) -> bool:
        """Whether the server may reply much later than it handles the request: reads wait for clocks."""
        return self.header.kind != protocol.PUSH

    @property
    def short(self) -> bool:
        """Whether the request is about values, and both messages are short: a reply that comes twice does no harm."""
        return self.header.kind in protocol.VALUES and self.header.repeats and self.view is None

    @property
    def may_need_keys(self) -> bool:
        """Whether the server may ask for the list of keys."""
        return self.header.flags & (protocol.CACHED | protocol.KEYS) == protocol.CACHED


class ServerConnection:
    """One client's requests to one shard: their numbers, and their messages.

    The shard lives on the servers of `chain`. The first of them that is not lost gets the requests. The last one
    replies to short requests, because it is the first to know that all have them.
    """

    def __init__(self, transport: Transport, chain: ShardServers, index: int, space_id: int) -> None:
        self.transport = transport
        self._servers = chain
        self._space_id = space_id
        self.replica = 0
        """The place in the chain of the server that gets the requests."""
        self._last = 0
        """The place in the chain of the last server that is not lost, as far as it is known."""
        self.index = index
        """The shard's number in the space."""
        self.last_number = 0
        self.last_push = 0
        """The number of the latest push. The server handles reads after it."""
        self.last_tick = 0
        """The number of the latest push that ended a step."""
        self.acked = 0
        """All replies up to this number have arrived."""
        self.failure: Exception | None = None
        """The first error of a request without a reply. Nothing is sent after it: a late reply could fill memory that
        the caller uses again.
        """
        self.pending: dict[int, PendingRequest] = {}
        self._set_chain(chain())
        self._finished: set[int] = set()
        self._wire = transport.runtime.lock()
        """Held while a header and its body are sent, so that no other task sends a body between them; and while the
        connection moves to another server.
        """

    def _set_chain(self, chain: Sequence[tuple[int, int]]) -> None:
        self.chain = tuple(member for member, _ in chain)
        self._offsets = [offset for _, offset in chain]
        """The `replica` of requests at each server of the chain."""
        self._first_tags = [protocol.first_tag(self._space_id, offset) for offset in self._offsets]
        self._last = len(self.chain) - 1

    @property
    def member(self) -> int:
        """The server that gets the requests."""
        return self.chain[self.replica]

    def blocking_request(self) -> PendingRequest | None:
        """The oldest request, if its reply must arrive before another request is sent; else None."""
        if len(self.pending) < protocol.MAX_INFLIGHT_REQUESTS and self.last_number - self.acked < protocol.REPLY_SLOTS:
            return None
        return self.pending[min(self.pending)]

    def mark_finished(self, number: int) -> None:
        """Record that the reply of this number has arrived."""
        self.pending.pop(number, None)
        self._finished.add(number)
        while self.acked + 1 in self._finished:
            self.acked += 1
            self._finished.discard(self.acked)

    def check(self) -> None:
        """Raise an error if an earlier request has got no reply."""
        if self.failure is not None:
            kind = PeerLostError if isinstance(self.failure, PeerLostError) else ProtocolError
            raise kind(
                f"nothing is sent to server {self.index} (member {self.member}) any more, because an earlier request "
                f"has no reply: {self.failure}",
                peer=self.member,
            )

    def post_and_send(self, pending: PendingRequest) -> None:
        """Post the receives of the reply, and send the request."""
        with self._wire:
            self._post(pending)
            place, error = pending.place, self._try_transmit(pending)
        if error is not None and not self.fail_over(pending, place):
            raise error

    def send_with_keys(self, pending: PendingRequest) -> None:
        """Send a request again, under the same number, with the list of keys that the server does not remember."""
        assert pending.keys is not None
        with self._wire:
            pending.body = torch.cat([pending.keys.contiguous().view(torch.uint8), pending.body.view(torch.uint8)])
            flags = pending.header.flags | protocol.KEYS
            pending.header = pending.header._replace(flags=flags, length=pending.body.numel())
        self.post_and_send(pending)

    def send_again(self, pending: PendingRequest) -> None:
        """Send a request that may be lost once more."""
        with self._wire:
            place, error = pending.place, self._try_transmit(pending)
        if error is not None and not self.fail_over(pending, place):
            raise error

    def fail_over(self, pending: PendingRequest, place: tuple[int, int]) -> bool:
        """If a server of a request is gone, send all such requests without a reply again, to the servers that are left.

        `place` is that of the request when it has failed. Another task may have sent it to other servers since. Returns
        False if no server of the request is gone, or if no replica is left.
        """
        with self._wire:
            if pending.place != place:
                return True
            pending.replied = False
            while True:
                if not self._skip_gone() or pending.place == self._place_of(pending):
                    return False
                unanswered = [each for each in list(self.pending.values()) if each.reply_receive and not each.replied]
                for each in sorted(unanswered, key=lambda each: each.header.number):
                    if each.place != self._place_of(each):
                        if each.reply_receive is not None:  # it could take the reply for which the next one waits
                            each.reply_receive.cancel()
                        self._post(each)
                        error = self._try_transmit(each)
                        if error is not None and not self.transport.gone_reason(self.member):
                            raise error
                if not self.transport.gone_reason(self.member):
                    return True

    def _skip_gone(self) -> bool:
        """Find the first and the last server that are not gone. False if no server is left."""
        while self.transport.gone_reason(self.member):
            if self.replica + 1 == len(self.chain):
                self._set_chain(self._servers(refresh=True))  # a new server is added at the end
            if self.replica + 1 == len(self.chain):
                return False
            self.replica += 1
        while self._last > self.replica and self.transport.gone_reason(self.chain[self._last]):
            self._last -= 1
        return True

    def _place_of(self, pending: PendingRequest) -> tuple[int, int]:
        """The places in the chain of the server that gets a request, and of the one that replies."""
        first, last = self.replica, self._last
        return (first, last) if last > first and pending.short else (first, first)

    def _post(self, pending: PendingRequest) -> None:
        """Post the receives of the reply."""
        self.cancel_receive(pending)
        pending.place, pending.replied = self._place_of(pending), False
        self._post_reply(pending)
        out = pending.out
        if out is not None and 4 * out.numel() > protocol.MAX_INLINE_BYTES and pending.view is None:
            pending.data_receive = self._receive_data(pending, out)

    def _try_transmit(self, pending: PendingRequest) -> PeerLostError | None:
        """Send a request; return the error if its server is lost."""
        try:
            self._transmit(pending)
        except PeerLostError as error:
            return error
        return None

    def _transmit(self, pending: PendingRequest) -> None:
        if pending.finished:
            return
        header, transport, member = pending.header, self.transport, self.member
        replica, last = self._place_of(pending)
        if self._offsets[replica] or last != replica:
            reply_from = 0 if last == replica else 1 + self.chain[last]
            header = header._replace(replica=self._offsets[replica], reply_from=reply_from)
        if header.length <= protocol.MAX_INLINE_BYTES:
            body = (pending.body.numpy().data.cast("B"),) if header.length else ()
            transport.send_bytes((header.pack(), *body), member, protocol.REQUEST_TAG, lossy=header.repeats)
        else:
            transport.send_bytes((header.pack(),), member, protocol.REQUEST_TAG)
            tag = self._first_tags[replica] + protocol.BODY_TAG
            pending.sends.append(transport.send(pending.body, member, tag, exact=True))

    def release(self, pending: PendingRequest) -> None:
        """Drop the tensors of a finished request: other objects may still refer to it."""
        with self._wire:  # no task sends it again now
            pending.body, pending.out, pending.keys, pending.view = EMPTY_BODY, None, None, None
            pending.reply_receive = pending.data_receive = None
            pending.sends.clear()

    def receive(self, pending: PendingRequest, retry_s: float | None, send_again: Callable[[], None]) -> ReplyHeader:
        """Wait for the reply. If messages may be lost, call `send_again` every `retry_s` seconds."""
        runtime = self.transport.runtime
        deadline = runtime.now() + self.transport.timeout
        while True:
            posted, place = pending.reply_receive, pending.place
            assert posted is not None
            try:
                posted.wait(retry_s)
                reply, header = ReplyHeader.read(posted.data), pending.header
                asked_twice = reply.status == protocol.NEED_KEYS and not pending.may_need_keys
                if (reply.space, reply.number) != (header.space, header.number) or asked_twice:
                    self._post_reply_again(pending, posted)  # a duplicate, or a reply of a space with the same tags
                elif self._mark_replied(pending, posted):
                    self._read_body(pending, reply, posted.data)
                    return reply
            except PeerLostError:
                if pending.reply_receive is not posted or self.fail_over(pending, place):
                    continue  # it was sent to another server
                gone = self.transport.gone_reason(self.member)
                if gone or retry_s is None or runtime.now() >= deadline:
                    raise
                self._post_reply_again(pending, posted)
                send_again()

    def _mark_replied(self, pending: PendingRequest, posted: BytesHandle) -> bool:
        """Record that the reply has arrived; False if the request was sent to another server meanwhile."""
        if not self._servers.replicated:
            return True
        with self._wire:
            pending.replied = pending.reply_receive is posted
            return pending.replied

    def _post_reply_again(self, pending: PendingRequest, posted: BytesHandle) -> None:
        with self._wire:
            if pending.reply_receive is posted:
                self._post_reply(pending)

    def cancel_receive(self, pending: PendingRequest) -> None:
        """Cancel the receive of the reply's values: their memory belongs to the caller again."""
        if pending.data_receive is not None:
            with suppress(SynclineError):
                pending.data_receive.wait(0.0)
            pending.data_receive = None

    def _post_reply(self, pending: PendingRequest) -> None:
        replica, last = pending.place
        tag = self._first_tags[last] + protocol.REPLY_TAG + pending.header.number % protocol.REPLY_SLOTS
        via = None if last == replica else self.chain[replica]
        pending.reply_receive = self.transport.recv_bytes(MAX_REPLY_BYTES, self.chain[last], tag, via=via)

    def _receive_data(self, pending: PendingRequest, buffer: Tensor) -> Handle:
        _, last = pending.place
        tag = self._first_tags[last] + protocol.DATA_TAG + pending.header.number % protocol.REPLY_SLOTS
        return self.transport.recv(buffer, self.chain[last], tag, exact=True)

    def _read_body(self, pending: PendingRequest, reply: ReplyHeader, data: memoryview) -> None:
        inline = reply.length if reply.length <= protocol.MAX_INLINE_BYTES else 0
        if len(data) != REPLY_BYTES + inline:
            raise self._error(f"sent {len(data) - REPLY_BYTES} B with a header that says {inline}")
        if reply.status in (protocol.REFUSED, protocol.ORPHANED, protocol.NEED_KEYS):
            self.cancel_receive(pending)
            pending.reply_body = bytes(data[REPLY_BYTES:])
        elif pending.out is None:
            pending.reply_body = bytes(data[REPLY_BYTES:])
        elif reply.flags & protocol.REPLY_ENCODED:
            pending.reply_body = self._read_payload(pending, reply, data)
        elif reply.length != 4 * pending.out.numel():
            raise self._error(f"replied with {reply.length} B, and {4 * pending.out.numel()} B were requested")
        elif inline:
            pending.out.numpy().data.cast("B")[:] = data[REPLY_BYTES:]
        elif reply.length:
            if pending.data_receive is None:  # the first encoded reply is exact
                pending.data_receive = self._receive_data(pending, pending.out)
            pending.data_receive.wait()

    def _read_payload(self, pending: PendingRequest, reply: ReplyHeader, data: memoryview) -> bytes:
        if pending.view is None:
            raise self._error("sent an encoded reply to a request for plain values")
        if reply.length <= protocol.MAX_INLINE_BYTES:
            return bytes(data[REPLY_BYTES:])
        if reply.length > protocol.MAX_BODY_BYTES:
            raise self._error(f"announces {reply.length} B; at most {protocol.MAX_BODY_BYTES} B are allowed")
        buffer = torch.empty(reply.length, dtype=torch.uint8)
        self._receive_data(pending, buffer).wait()
        return bytes(buffer.numpy())

    def _error(self, text: str) -> ProtocolError:
        return ProtocolError(f"server {self.index} {text}", peer=self.member)


class RequestSender:
    """One client's connections to the servers of a space. `on_reply` is called once for each reply."""

    def __init__(
        self,
        transport: Transport,
        space_id: int,
        chains: Sequence[ShardServers],
        retry_s: float | None,
        on_reply: Callable[[PendingRequest, ReplyHeader], None],
    ) -> None:
        self.connections = [ServerConnection(transport, chain, at, space_id) for at, chain in enumerate(chains)]
        self.retry_s = retry_s
        self.bytes_sent = 0
        self._space_id = space_id
        self._on_reply = on_reply
        self._runtime = transport.runtime
        self._lock = self._runtime.lock()

    def send(
        self,
        connection: ServerConnection,
        header: RequestHeader,
        body: Tensor = EMPTY_BODY,
        out: Tensor | None = None,
        keys: Tensor | None = None,
        view: Tensor | None = None,
        place: tuple[int, int, int, int] | None = None,
    ) -> PendingRequest:
        """Send a request. Wait first if too many are in flight. `place` replaces some fields; see `numbered`."""
        if view is not None:
            self._finish_overlapping_views(connection, header)
        while True:
            with self._lock:
                connection.check()
                oldest = connection.blocking_request()
                if oldest is None:
                    number = connection.last_number = connection.last_number + 1
                    if place is None:
                        after = number - 1 if header.kind == protocol.BYE else header.after
                        place = (after, header.first, header.count, header.seed)
                    header = header.numbered(self._space_id, number, connection.acked, body.nbytes, place)
                    pending = PendingRequest(connection, header, body, out, self._runtime.lock(), keys, view)
                    connection.pending[number] = pending
                    break
            self.finish(oldest)
        self.bytes_sent += header.length
        try:
            connection.post_and_send(pending)
        except Exception as error:
            self._fail(pending, error)
            raise
        return pending

    def check(self) -> None:
        """Raise an error if a server has not replied to an earlier request."""
        for connection in self.connections:
            connection.check()

    def finish(self, pending: PendingRequest) -> None:
        """Wait for the reply of one request."""
        if pending.finished:
            return
        for other in list(pending.connection.pending.values()):
            # A server that asks for a list of keys handles nothing else before the list arrives.
            if other.header.number < pending.header.number and other.may_need_keys:
                self.finish(other)
        with pending.lock:
            if not pending.finished:
                self._await_reply(pending)
                pending.connection.release(pending)

    def pending_requests(self) -> list[PendingRequest]:
        return [pending for connection in self.connections for pending in list(connection.pending.values())]

    def _finish_overlapping_views(self, connection: ServerConnection, header: RequestHeader) -> None:
        """An encoded reply has the change since the one before, so that two about the same keys must not overlap."""
        first, end = header.first, header.first + header.count
        for other in list(connection.pending.values()):
            theirs = other.header
            if other.view is not None and theirs.first < end and first < theirs.first + theirs.count:
                self.finish(other)

    def _await_reply(self, pending: PendingRequest) -> None:
        connection = pending.connection
        try:
            if connection.failure is not None and not pending.arrived:
                connection.check()
            reply = connection.receive(pending, self.retry_s, self._send_again)
            while reply.status == protocol.NEED_KEYS:
                connection.send_with_keys(pending)
                reply = connection.receive(pending, self.retry_s, self._send_again)
        except Exception as error:
            self._fail(pending, error)
            return
        try:
            self._on_reply(pending, reply)
            pending.reply = reply
        except Exception as error:
            pending.error = error
        pending.finished = True
        with self._lock:
            connection.mark_finished(pending.header.number)

    def _fail(self, pending: PendingRequest, error: Exception) -> None:
        """Give up a request. Its number is never acknowledged, so that the server keeps its reply."""
        connection = pending.connection
        connection.cancel_receive(pending)
        with self._lock:
            connection.failure = connection.failure or error
            connection.pending.pop(pending.header.number, None)
        pending.error, pending.finished = error, True

    def _send_again(self) -> None:
        """Send again every request that may be lost: a reply may wait for an earlier request, at any server."""
        for connection in self.connections:
            for pending in list(connection.pending.values()):
                if pending.header.repeats and not pending.finished:
                    connection.send_again(pending)
