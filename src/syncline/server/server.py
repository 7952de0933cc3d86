"""A server at work: requests in, answers out, and a slow client keeps nobody waiting.

client 2:   header ─► body, straight into place ─► desk (one at a time) ─► send the answers

Where the engine calls whoever listens, nobody waits here at all; elsewhere a task for each client does.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError, SynclineError, WorldError
from syncline.runtime import Event, Task
from syncline.server import protocol
from syncline.server.client import Client
from syncline.server.network import ServerNetwork
from syncline.server.protocol import REQUEST_BYTES, ReplyHeader, RequestHeader
from syncline.server.request_handler import BufferPool, OutgoingReply, RequestHandler
from syncline.server.space import SpaceDescription
from syncline.server.sub_master import AggregatingShard, Relay
from syncline.transports import RequestListener
from syncline.transports.messages import WarningLog

__all__ = ["Server", "serve"]

logger = logging.getLogger("syncline")

SPACE_AT, NUMBER_AT = 12, 40
"""Where a request's space and number lie in its header."""
FETCHED = 2
"""Bodies of one client that are on their way at once: the next comes while one is dealt with."""


@dataclass(slots=True)
class _Coming:
    """A request whose body is on its way, or behind another's."""

    request: RequestHeader
    reason: str
    body: Tensor | None
    under_way: bool = False


class Server:
    """This process's part of the servers of a network."""

    def __init__(self, network: ServerNetwork) -> None:
        self.network = network
        self._transport = network.transport
        self._runtime = network.transport.runtime
        self._lock = self._runtime.lock()
        self._pool = BufferPool(self._runtime.lock())
        self.desk = RequestHandler(lambda found: found.servers.index(network.me), self._pool, network.workers)
        self._changed: Event = self._runtime.event()
        self._parting: Event = self._runtime.event()
        self._closed = False
        self._tasks: list[Task] = []
        self._listening: RequestListener | None = None
        self._lines: dict[int, deque[_Coming]] = {}
        """By client: requests whose bodies are on their way, and what came behind them."""
        self._refusals = WarningLog(logger, self._runtime.now)
        self._parted: set[int] = set()
        self._relays: dict[int, Relay] = {}
        self._doors: dict[int, Client] = {}

    def start(self) -> Server:
        """Begin to serve."""
        if self.network.dedicated:
            torch.set_num_threads(1)  # adding rows waits for memory; OpenMP's threads would spin between the pieces
        network, most = self.network, REQUEST_BYTES + protocol.INLINE
        self._transport.monitor.set_pending(self._owes, self._awaits)
        self._listening = self._transport.listen(protocol.REQUEST, most, self._hear, self._part_from)
        if self._listening is None:
            # A sub-master is its parent's client; no server is its own: a task that waits for nobody costs a switch.
            masters = [each for each in network.servers if each != network.me] if network.dedicated else ()
            for member in (*network.workers, *network.evaluators, *masters):
                self._tasks.append(self._runtime.spawn(self._attend, member, name=f"server-{member}"))
        return self

    def _awaits(self) -> int | None:
        """The worker whose step the reads wait for here; clients that wait for answers name it."""
        with self._lock:
            found = self.desk.slowest()
        return None if found is None else self._transport.members[found[0]]

    def _owes(self) -> str:
        with self._lock:
            found = self.desk.slowest()
        return "" if found is None else f"reads, which wait for worker {found[0]} (its clock: {found[1]})"

    def join(self) -> None:
        """Return when every client has left or is lost."""
        for task in self._tasks[: len(self.network.workers)]:
            task.join()  # without end, as its task waits: a timeout would hide deadlocks from the simulator
        while self._listening is not None:
            with self._lock:
                if self._closed or self._parted.issuperset(self.network.workers):
                    return
                self._parting.clear()
            self._parting.wait(why="the workers to leave")

    def wait_left(self, space_id: int, timeout: float) -> bool:
        """Wait until everybody has left a space; False when the timeout came first."""
        until = self._runtime.now() + timeout
        while True:
            with self._lock:
                if space_id not in self.desk.spaces:
                    return True
                self._changed.clear()
            left = until - self._runtime.now()
            if left <= 0 or not self._changed.wait(left, "the other workers to leave a space", hang=True):
                return False

    def waiting_for(self, space_id: int) -> list[int]:
        """Members that have not left a space."""
        with self._lock:
            return self.desk.present(space_id)

    def close(self) -> None:
        """Serve no more. The network's channel is closed by who made it."""
        self._closed = True
        if self._listening is not None:
            self._listening.close()
            self._parting.set()
        for relay in list(self._relays.values()):
            relay.stop()

    # Sub-masters.

    def lend_door(self, client: Client) -> None:
        """A client of this process whose space may be the parent of one that is served here."""
        self._doors[client.description.space_id] = client

    def wait_relayed(self, space_id: int, timeout: float) -> bool:
        """Wait until a sub-master that everybody has left has carried its last sum; False at the timeout."""
        relay = self._relays.get(space_id)
        return relay is None or relay.wait_through(timeout)

    def _see_to_relays(self) -> None:
        for space_id, space in list(self.desk.spaces.items()):
            if isinstance(space, AggregatingShard) and space_id not in self._relays:
                parent = SpaceDescription.from_json(space.description.upward.encode())
                door = self._doors.pop(parent.space_id, None)
                relay = self._relays[space_id] = Relay(self.desk, space, self._act, self.network, parent, door)
                self._tasks.append(self._runtime.spawn(relay.run, name="relay"))
        for space_id, relay in list(self._relays.items()):
            relay.wake()
            if relay.through and space_id not in self.desk.spaces:
                del self._relays[space_id]

    # Where the engine calls.

    def _hear(self, member: int, data: memoryview) -> None:
        """A request has come, without its body where that is long."""
        if self._closed or member in self._parted:
            return
        request, reason = self._read(member, data)
        if request is None:
            return
        line = self._lines.get(member)
        if line is None:
            line = self._lines[member] = deque()
        long = request.length > protocol.INLINE
        if not line and not reason and not long:  # the short way of nearly all
            self._act(partial(self.desk.take, member, request, _copied(data)))
            return
        line.append(_Coming(request, reason, None if long else _copied(data)))
        self._go_on(member, line)

    def _go_on(self, member: int, line: deque[_Coming]) -> None:
        """Deal with what is here, in order, and have the next bodies sent."""
        while line and line[0].body is not None:
            coming = line.popleft()
            if coming.reason:
                self._reject(member, coming.request, coming.reason)
            elif coming.body is not None:
                self._act(partial(self.desk.take, member, coming.request, coming.body))
        assert self._listening is not None, "it calls us"
        for coming in list(line)[:FETCHED]:
            if coming.body is None and not coming.under_way:
                coming.under_way = True
                room = self._pool.take(0 if coming.reason else coming.request.length)
                tag = protocol.lane(coming.request.space) + protocol.BODY
                self._listening.fetch(room, member, tag, partial(self._filled, member, coming, room))

    def _filled(self, member: int, coming: _Coming, body: Tensor, error: Exception | None) -> None:
        """A body is here. One that was not wanted was taken off the wire, and nothing is kept of it."""
        if error is not None and not coming.reason:
            coming.reason = str(error)
        coming.body = body
        if member in self._lines:
            self._go_on(member, self._lines[member])

    def _part_from(self, member: int) -> None:
        """A member is lost or has left; all it has sent was heard."""
        if self._closed:
            return
        logger.debug("server %d: member %d is gone", self.network.me, member)
        self._lines.pop(member, None)
        with self._lock:
            self._parted.add(member)
            self._parting.set()
        left = self._transport.members[member] not in self._transport.lost()
        self._act(partial(self.desk.lose, member, left))

    # Where tasks wait.

    def _attend(self, member: int) -> None:
        try:
            self._listen(member)
        except (PeerLostError, WorldError, ConnectionError) as error:
            if not self._closed:
                logger.debug("server %d: member %d is gone: %s", self.network.me, member, error)
        if not self._closed:
            self._act(partial(self.desk.lose, member))

    def _listen(self, member: int) -> None:
        buffer = torch.empty(REQUEST_BYTES + protocol.INLINE, dtype=torch.uint8)
        view = buffer.numpy().data
        while not self._closed:
            handle = self._transport.recv(buffer, member, protocol.REQUEST)
            try:
                handle.wait(math.inf)
            except ProtocolError as error:
                self._refuse_unread(member, view[:0], str(error))
                continue
            request, reason = self._read(member, view[: handle.nbytes])
            if request is None:
                continue
            if request.length > protocol.INLINE:
                self._take_long(member, request, reason)
            elif reason:
                self._reject(member, request, reason)
            else:
                self._act(partial(self.desk.take, member, request, _copied(view[: handle.nbytes])))

    def _take_long(self, member: int, request: RequestHeader, reason: str) -> None:
        tag = protocol.lane(request.space) + protocol.BODY
        if reason:  # a receive without room takes the body off the wire, and keeps nothing of it
            self._reject(member, request, reason)
            with suppress(ProtocolError):
                self._transport.recv(torch.empty(0, dtype=torch.uint8), member, tag).wait(math.inf)
            return
        body = self._pool.take(request.length)
        try:
            self._transport.recv(body, member, tag, exact=True).wait(math.inf)
        except ProtocolError as error:
            self._reject(member, request, str(error))
        else:
            self._act(partial(self.desk.take, member, request, body))

    # Both.

    def _read(self, member: int, data: memoryview) -> tuple[RequestHeader | None, str]:
        """A request, and why it is refused; None where who sent it was told that it cannot be read."""
        try:
            request = RequestHeader.read(data)
        except ProtocolError as error:
            self._refuse_unread(member, data, str(error))
            return None, ""
        inline, came = request.length if request.length <= protocol.INLINE else 0, len(data) - REQUEST_BYTES
        if came != inline:
            told = f"{came} B with a header that says {inline} (of {request.length})"
            return request._replace(length=0), told  # nothing of it follows
        return request, self.desk.refuses(member, request) if not inline else ""

    def _reject(self, member: int, request: RequestHeader, reason: str) -> None:
        self._refusals.warn(f"server {self.network.me} refuses what member {member} sent: {reason}")
        self._act(partial(self.desk.reject, member, request, reason))

    def _refuse_unread(self, member: int, data: memoryview, reason: str) -> None:
        """A header that cannot be read: tell who sent it, under the number that it seems to have."""
        whole = len(data) >= NUMBER_AT + 8
        number = struct.unpack_from("<Q", data, NUMBER_AT)[0] if whole else 0
        space = struct.unpack_from("<I", data, SPACE_AT)[0] if whole else 0
        self._refusals.warn(f"server {self.network.me} refuses what member {member} sent: {reason}")
        text = torch.from_numpy(np.frombuffer(reason.encode(), np.uint8).copy())
        reply = ReplyHeader(protocol.REFUSED, space=space, number=number, min_clock=-1, length=text.numel())
        self._send(OutgoingReply(member, reply, text, True))

    def _act(self, deed: Callable[[], list[OutgoingReply]]) -> None:
        with self._lock:
            answers = deed()
            if not self._changed.is_set():
                self._changed.set()
            if self.desk.gathers:
                self._see_to_relays()
        for answer in answers:
            self._send(answer)

    def _send(self, answer: OutgoingReply) -> None:
        body, slot = answer.body, answer.reply.number % protocol.SLOTS
        header, lane = answer.reply.pack(), protocol.lane(answer.reply.space)
        try:
            if body is None or body.numel() <= protocol.INLINE:
                parts = (header,) if body is None else (header, body.numpy().data)
                self._transport.send_bytes(parts, answer.member, lane + protocol.REPLY + slot, lossy=answer.lossy)
            else:
                self._transport.send_bytes((header,), answer.member, lane + protocol.REPLY + slot)
                self._transport.send(body, answer.member, lane + protocol.DATA + slot, exact=True)
        except SynclineError as error:  # its own task notices
            logger.debug("server %d could not answer member %d: %s", self.network.me, answer.member, error)


def _copied(data: memoryview) -> Tensor:
    """What follows a header, in memory of its own."""
    return torch.from_numpy(np.frombuffer(data, np.uint8, -1, REQUEST_BYTES).copy())


def serve(network: ServerNetwork) -> None:
    """Serve until every worker has left or is lost."""
    server = Server(network).start()
    try:
        server.join()
    finally:
        server.close()
