"""The tasks of a server: one for each client, so that a slow one keeps nobody waiting.

task of client 2:   recv header ─► recv body, straight into place ─► desk (one at a time) ─► send the answers
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError, SynclineError, WorldError
from syncline.runtime import Event, Task
from syncline.server import protocol
from syncline.server.client import Client
from syncline.server.description import Description
from syncline.server.desk import Answer, Desk
from syncline.server.gathering import Gathering
from syncline.server.network import ServerNetwork
from syncline.server.pool import Pool
from syncline.server.protocol import REQUEST_BYTES, Reply, Request
from syncline.server.relay import Relay

__all__ = ["Server", "serve"]

logger = logging.getLogger("syncline")

SPACE_AT, NUMBER_AT = 12, 40
"""Where a request's space and number lie in its header."""


class Server:
    """This process's part of the servers of a network."""

    def __init__(self, network: ServerNetwork) -> None:
        self.network = network
        self._transport = network.transport
        self._runtime = network.transport.runtime
        self._lock = self._runtime.lock()
        self._pool = Pool(self._runtime.lock())
        self.desk = Desk(lambda found: found.servers.index(network.me), self._pool, network.workers)
        self._changed: Event = self._runtime.event()
        self._closed = False
        self._tasks: list[Task] = []
        self._relays: dict[int, Relay] = {}
        self._doors: dict[int, Client] = {}

    def start(self) -> Server:
        """Begin to serve."""
        # A sub-master is its parent's client; no server is its own, and a task that waits for nobody costs a switch.
        masters = [each for each in self.network.servers if each != self.network.me] if self.network.dedicated else ()
        for member in (*self.network.workers, *self.network.evaluators, *masters):
            self._tasks.append(self._runtime.spawn(self._attend, member, name=f"server-{member}"))
        return self

    def join(self) -> None:
        """Return when every client has left or is lost."""
        for task in self._tasks[: len(self.network.workers)]:
            task.join()  # without end, as its task waits: a timeout would hide deadlocks from the simulator

    def wait_left(self, mark: int, timeout: float) -> bool:
        """Wait until everybody has left a space; False when the timeout came first."""
        until = self._runtime.now() + timeout
        while True:
            with self._lock:
                if mark not in self.desk.spaces:
                    return True
                self._changed.clear()
            left = until - self._runtime.now()
            if left <= 0 or not self._changed.wait(left, "the other workers to leave a space", hang=True):
                return False

    def waiting_for(self, mark: int) -> list[int]:
        """Members that have not left a space."""
        with self._lock:
            return self.desk.present(mark)

    def close(self) -> None:
        """Serve no more. The network's channel is closed by who made it."""
        self._closed = True
        for relay in list(self._relays.values()):
            relay.stop()

    # Sub-masters.

    def lend_door(self, client: Client) -> None:
        """A client of this process whose space may be the parent of one that is served here."""
        self._doors[client.description.mark] = client

    def wait_relayed(self, mark: int, timeout: float) -> bool:
        """Wait until a sub-master that everybody has left has carried its last sum; False at the timeout."""
        relay = self._relays.get(mark)
        return relay is None or relay.wait_through(timeout)

    def _see_to_relays(self) -> None:
        for mark, space in list(self.desk.spaces.items()):
            if isinstance(space, Gathering) and mark not in self._relays:
                parent = Description.from_json(space.description.upward.encode())
                door = self._doors.pop(parent.mark, None)
                relay = self._relays[mark] = Relay(self.desk, space, self._act, self.network, parent, door)
                self._tasks.append(self._runtime.spawn(relay.run, name="relay"))
        for mark, relay in list(self._relays.items()):
            relay.wake()
            if relay.through and mark not in self.desk.spaces:
                del self._relays[mark]

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
            came = 0
            try:
                handle.wait(math.inf)
                came = handle.nbytes
                request = Request.read(view[:came])
            except ProtocolError as error:
                self._refuse_unread(member, view[:came], str(error))
                continue
            try:
                body = self._body(member, request, buffer, came)
            except ProtocolError as error:
                self._reject(member, request, str(error))
            else:
                if body is not None:
                    self._act(partial(self.desk.take, member, request, body))

    def _reject(self, member: int, request: Request, reason: str) -> None:
        logger.warning("server %d refuses what member %d sent: %s", self.network.me, member, reason)
        self._act(partial(self.desk.reject, member, request, reason))

    def _body(self, member: int, request: Request, buffer: Tensor, came: int) -> Tensor | None:
        """A request's body; None where it is not wanted, a `ProtocolError` where it does not fit its header."""
        inline = request.length if request.length <= protocol.INLINE else 0
        if came != REQUEST_BYTES + inline:
            raise ProtocolError(f"{came - REQUEST_BYTES} B with a header that says {inline} (of {request.length})")
        if inline or not request.length:
            return buffer[REQUEST_BYTES:came].clone()
        lane = protocol.lane(request.space)
        reason = self.desk.refuses(member, request)
        if reason:  # a receive without room takes the body off the wire, and keeps nothing of it
            self._reject(member, request, reason)
            with suppress(ProtocolError):
                self._transport.recv(torch.empty(0, dtype=torch.uint8), member, lane + protocol.BODY).wait(math.inf)
            return None
        body = self._pool.take(request.length)
        self._transport.recv(body, member, lane + protocol.BODY, exact=True).wait(math.inf)
        return body

    def _refuse_unread(self, member: int, data: memoryview, reason: str) -> None:
        """A header that cannot be read: tell who sent it, under the number that it seems to have."""
        whole = len(data) >= NUMBER_AT + 8
        number = struct.unpack_from("<Q", data, NUMBER_AT)[0] if whole else 0
        space = struct.unpack_from("<I", data, SPACE_AT)[0] if whole else 0
        logger.warning("server %d refuses what member %d sent: %s", self.network.me, member, reason)
        text = torch.from_numpy(np.frombuffer(reason.encode(), np.uint8).copy())
        reply = Reply(protocol.REFUSED, space=space, number=number, min_clock=-1, length=text.numel())
        self._send(Answer(member, reply, text, True))

    def _act(self, deed: Callable[[], list[Answer]]) -> None:
        with self._lock:
            answers = deed()
            self._changed.set()
            self._see_to_relays()
        for answer in answers:
            self._send(answer)

    def _send(self, answer: Answer) -> None:
        body, slot = answer.body, answer.reply.number % protocol.SLOTS
        header, lane = answer.reply.pack(), protocol.lane(answer.reply.space)
        try:
            if body is None or body.numel() <= protocol.INLINE:
                whole = bytearray(header)
                if body is not None:
                    whole += body.numpy().data
                data = torch.frombuffer(whole, dtype=torch.uint8)
                self._transport.send(data, answer.member, lane + protocol.REPLY + slot, lossy=answer.lossy)
            else:
                told = torch.from_numpy(np.frombuffer(bytearray(header), np.uint8))
                self._transport.send(told, answer.member, lane + protocol.REPLY + slot)
                self._transport.send(body, answer.member, lane + protocol.DATA + slot, exact=True)
        except SynclineError as error:  # its own task notices
            logger.debug("server %d could not answer member %d: %s", self.network.me, answer.member, error)


def serve(network: ServerNetwork) -> None:
    """Serve until every worker has left or is lost."""
    server = Server(network).start()
    try:
        server.join()
    finally:
        server.close()
