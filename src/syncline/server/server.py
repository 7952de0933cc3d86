"""A server: receives requests, handles them one at a time, and sends the replies. A slow client delays no other.

::

    client 2:   header ─► body, received into its buffer ─► RequestHandler (one at a time) ─► send the replies

With replicas, each shard that this server holds has a `ReplicaChain` around its handler, and one task reads and writes
the `ChainLog`: which servers are lost, and which are new. If the transport calls a listener for each message, no task
waits for requests. Otherwise one task for each client does.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError, SynclineError, WorldError
from syncline.runtime import Event, Task
from syncline.server import protocol
from syncline.server.chain_log import ChainEntry
from syncline.server.client import Client
from syncline.server.network import ServerNetwork
from syncline.server.protocol import MAX_BODY_BYTES, RECORD_BYTES, REQUEST_BYTES, RecordHeader, RequestHeader
from syncline.server.replication import ReplicaChain, ReplicaRecord
from syncline.server.request_handler import OutgoingReply, ReplyBuffers, RequestHandler, refuse
from syncline.server.space import SpaceDescription
from syncline.server.sub_master import AggregatingShard, Relay
from syncline.transports import RequestListener
from syncline.transports.messages import WarningLog

__all__ = ["Server", "serve"]

logger = logging.getLogger("syncline")

SPACE_OFFSET, NUMBER_OFFSET = 12, 40
"""Bytes before a request's space and number in its header."""
MAX_MESSAGE_BYTES = RECORD_BYTES + REQUEST_BYTES + protocol.MAX_INLINE_BYTES
MAX_BODIES_IN_FLIGHT = 2
"""Bodies of one client that are received at once: the next arrives while one is handled."""
ASK_AGAIN_S = 0.5
"""Seconds after which a new server asks again for the snapshots that it has not got."""
DECLARED_LOST = "the others have declared this server lost: it takes no part any more"
STORE_RETRY_S = 0.2
"""Seconds after which the chain log is read again, if the store has not answered."""


@dataclass(slots=True)
class _Incoming:
    """A request whose body has not arrived, or that is behind such a request."""

    header: RequestHeader
    refusal: str
    body: Tensor | None
    record: RecordHeader | None = None
    """If another server has sent it as a record."""
    receiving: bool = False

    @property
    def body_tag(self) -> int:
        if self.record is not None:
            return protocol.RECORD_BODY_TAG
        return protocol.first_tag(self.header.space, self.header.replica) + protocol.BODY_TAG


class Server:
    """The server in this process."""

    def __init__(self, network: ServerNetwork) -> None:
        self.network = network
        self._transport = network.transport
        self._runtime = network.transport.runtime
        self._lock = self._runtime.lock()
        self._pool = ReplyBuffers(self._runtime.lock())
        own = network.servers[network.server_number]
        self.handler = RequestHandler(self._shard_numbers(own), self._pool, network.workers)
        self.chains: dict[int, ReplicaChain] = {}
        """With replicas: by the number of the server whose shard it is."""
        self._clients = {*network.workers, *network.evaluators} - set(network.servers)
        self._lost_servers: list[int] = []
        """Losses that are not in the chain log yet."""
        self._level_servers: list[tuple[int, int, int]] = []
        """New servers that this one may add to the chain log: shard, member, and the number of the replaced server."""
        self._chain_news: Event = self._runtime.event()
        """Set when the chain log is to be read or written."""
        self._error: Exception | None = None
        """Why this server cannot continue."""
        if network.replicas > 1:
            self.chains = {chain.shard: chain for chain in map(self._make_chain, range(network.replicas))}
        self._changed: Event = self._runtime.event()
        self._member_gone: Event = self._runtime.event()
        self._closed = False
        self._tasks: list[Task] = []
        self._worker_tasks: list[Task] = []
        """On a transport without listeners: those of `_tasks` that serve a worker."""
        self._listening: RequestListener | None = None
        self._incoming: dict[int, deque[_Incoming]] = {}
        """By client: requests whose bodies are being received, and those behind them."""
        self._refusals = WarningLog(logger, self._runtime.now)
        self._gone: set[int] = set()
        self._first_later = network.first_later
        self._joined_workers: set[int] = set()
        """Workers that have joined later, as far as they have sent requests to this server. New servers send none."""
        self._relays: dict[int, Relay] = {}
        self._parent_clients: dict[int, Client] = {}

    def _shard_numbers(self, server: int) -> Callable[[SpaceDescription], int]:
        """Gives the number of a server's shard in a space. The space must have as many replicas as this network."""

        def number(space: SpaceDescription) -> int:
            if space.replicas != self.network.replicas:
                raise ProtocolError(
                    f"space {space.name!r} has replicas={space.replicas}, and this server has {self.network.replicas}: "
                    "start all processes with the same number"
                )
            return space.servers.index(server)

        return number

    def _make_chain(self, place: int) -> ReplicaChain:
        """The chain in which this server has a place: 0 for its own shard, n for that of the n-th server before."""
        network, me = self.network, self.network.me
        shard = (network.server_number - place) % len(network.servers)
        server, handler = network.servers[shard], self.handler
        if place:
            handler = RequestHandler(self._shard_numbers(server), self._pool, network.workers)
        on_level = partial(self._add_to_log, shard)
        return ReplicaChain(shard, network.chain(server), me, handler, self._send_record, on_level)

    def start(self) -> Server:
        """Begin to serve."""
        if self.network.dedicated:
            torch.set_num_threads(1)  # additions are limited by memory; OpenMP's threads would spin between pieces
        network, most = self.network, MAX_MESSAGE_BYTES
        self._transport.monitor.set_undelivered(self._describe_awaited, self._awaited_worker)
        self._listening = self._transport.listen(protocol.REQUEST_TAG, most, self._on_request, self._on_member_gone)
        if self._listening is None:
            # A sub-master is a client of its parent. No server is its own client.
            masters = [each for each in network.servers if each != network.me] if network.dedicated else ()
            newcomers = [each for each in network.newcomers if each != network.me]
            workers = (*network.workers, *network.joined_workers)
            for member in (*workers, *network.evaluators, *masters, *newcomers):
                self._tasks.append(self._runtime.spawn(self._serve_member, member, name=f"server-{member}"))
            self._worker_tasks = self._tasks[: len(workers)]
        if self.chains:
            self._tasks.append(self._runtime.spawn(self._follow_chain_log, name="chains"))
        if network.replaces is not None:
            self._tasks.append(self._runtime.spawn(self._catch_up, name="catch-up"))
        return self

    def _awaited_worker(self) -> int | None:
        """The worker whose step the deferred reads wait for. Clients that wait for replies name it in errors."""
        slowest = self._slowest()
        return None if slowest is None else self.network.number_in_job(slowest[0])

    def _slowest(self) -> tuple[int, int] | None:
        with self._lock:
            handlers = [chain.handler for chain in self.chains.values()] or [self.handler]
            return next(filter(None, (handler.slowest() for handler in handlers)), None)

    def _describe_awaited(self) -> str:
        slowest = self._slowest()
        return "" if slowest is None else f"reads, which wait for worker {slowest[0]} (its clock: {slowest[1]})"

    def join(self) -> None:
        """Return when every worker has left or is lost."""
        for task in self._worker_tasks:
            task.join()  # without a timeout, which would hide deadlocks from the simulator
        while self._listening is not None:
            with self._lock:
                if self._closed or self._error or self._workers_are_gone():
                    break
                self._member_gone.clear()
            self._member_gone.wait(why="the workers to leave")
        if self._error is not None:
            raise self._error

    def _workers_are_gone(self) -> bool:
        """Whether every worker has left or is lost. A new server knows those that have joined from the snapshots."""
        if self.network.elastic and not all(chain.joined for chain in self.chains.values()):
            return False
        handlers = [chain.handler for chain in self.chains.values()] or [self.handler]
        present = {each for handler in handlers for space in handler.shards for each in handler.members_in(space)}
        joined = {each for each in present if each >= self._first_later}
        return self._gone.issuperset((*self.network.workers, *self._joined_workers, *joined))

    def wait_left(self, space_id: int, timeout_s: float) -> bool:
        """Wait until all clients have left a space; False after the timeout."""
        deadline = self._runtime.now() + timeout_s
        while True:
            with self._lock:
                if space_id not in self.handler.shards:
                    return True
                self._changed.clear()
            left = deadline - self._runtime.now()
            if left <= 0 or not self._changed.wait(left, "the other workers to leave a space", hang=True):
                return False

    def members_in(self, space_id: int) -> list[int]:
        """Members that have not left a space."""
        with self._lock:
            return self.handler.members_in(space_id)

    def close(self) -> None:
        """Stop serving. Whoever made the network closes its transport."""
        self._closed = True
        self._chain_news.set()
        if self._listening is not None:
            self._listening.close()
            self._member_gone.set()
        for relay in list(self._relays.values()):
            relay.stop()

    # Sub-masters.

    def lend_client(self, client: Client) -> None:
        """Let a sub-master in this process use this client of its parent."""
        self._parent_clients[client.description.space_id] = client

    def wait_relayed(self, space_id: int, timeout_s: float) -> bool:
        """Wait until a sub-master has relayed its last sum; False after the timeout."""
        relay = self._relays.get(space_id)
        return relay is None or relay.wait_ended(timeout_s)

    def _update_relays(self) -> None:
        for space_id, shard in list(self.handler.shards.items()):
            if isinstance(shard, AggregatingShard) and space_id not in self._relays:
                parent = SpaceDescription.from_json(shard.description.parent.encode())
                client = self._parent_clients.pop(parent.space_id, None)
                relay = Relay(self.handler, shard, self._act, self.network, parent, client)
                self._relays[space_id] = relay
                self._tasks.append(self._runtime.spawn(relay.run, name="relay"))
        for space_id, relay in list(self._relays.items()):
            relay.wake()
            if relay.ended and space_id not in self.handler.shards:
                del self._relays[space_id]

    # Transports that call a listener.

    def _on_request(self, member: int, data: memoryview) -> None:
        """A header has arrived; a short body is with it."""
        if self._closed or member in self._gone:
            return
        record = None
        if self.chains and self._is_record(member, data):
            record, data = self._read_record(member, data)
            if record is None:
                return
        elif member >= self._first_later:
            self._note_joined_worker(member)
        header, refusal = self._read_header(member, data)
        if header is None:
            return
        queue = self._incoming.get(member)
        if queue is None:
            queue = self._incoming[member] = deque()
        long = header.length > protocol.MAX_INLINE_BYTES
        if not queue and not refusal and not long:  # the usual case
            self._handle(member, header, _copy_body(data), record)
            return
        queue.append(_Incoming(header, refusal, None if long else _copy_body(data), record))
        self._handle_arrived(member, queue)

    def _handle_arrived(self, member: int, queue: deque[_Incoming]) -> None:
        """Handle the requests that are complete, in order, and receive the next bodies."""
        while queue and queue[0].body is not None:
            incoming = queue.popleft()
            if incoming.refusal and incoming.record is not None:
                queue.clear()  # the other server is lost: it has not sent the body
            elif incoming.refusal:
                self._reject(member, incoming.header, incoming.refusal)
            elif incoming.body is not None:
                self._handle(member, incoming.header, incoming.body, incoming.record)
        assert self._listening is not None, "it has called this"
        for incoming in list(queue)[:MAX_BODIES_IN_FLIGHT]:
            if incoming.body is None and not incoming.receiving:
                incoming.receiving = True
                buffer = self._pool.take(0 if incoming.refusal else incoming.header.length)
                done = partial(self._on_body, member, incoming, buffer)
                self._listening.fetch(buffer, member, incoming.body_tag, done)

    def _on_body(self, member: int, incoming: _Incoming, body: Tensor, error: Exception | None) -> None:
        """A body has arrived. The body of a refused request is received into an empty buffer, and dropped."""
        if error is not None and not incoming.refusal:
            incoming.refusal = str(error)
        incoming.body = body
        if member in self._incoming:
            self._handle_arrived(member, self._incoming[member])

    def _on_member_gone(self, member: int) -> None:
        """A member is lost or has left. All its requests were received before."""
        if self._closed:
            return
        logger.debug("server %d: member %d is gone", self.network.me, member)
        self._incoming.pop(member, None)
        with self._lock:
            self._gone.add(member)
            self._member_gone.set()
        self._lose(member, left=not self.network.is_lost(member))

    # Transports without listeners: a task for each client.

    def _serve_member(self, member: int) -> None:
        try:
            self._receive_requests(member)
        except (PeerLostError, WorldError, ConnectionError) as error:
            if not self._closed:
                logger.debug("server %d: member %d is gone: %s", self.network.me, member, error)
        if not self._closed:
            self._lose(member, left=False)

    def _receive_requests(self, member: int) -> None:
        buffer = torch.empty(MAX_MESSAGE_BYTES, dtype=torch.uint8)
        view = buffer.numpy().data
        while not self._closed:
            receive = self._transport.recv(buffer, member, protocol.REQUEST_TAG)
            try:
                receive.wait(math.inf)
            except ProtocolError as error:
                self._refuse_unreadable(member, view[:0], str(error))
                continue
            record, data = None, view[: receive.nbytes]
            if self.chains and self._is_record(member, data):
                record, data = self._read_record(member, data)
                if record is None:
                    continue
            elif member >= self._first_later:
                self._note_joined_worker(member)
            header, refusal = self._read_header(member, data)
            if header is None:
                continue
            if header.length > protocol.MAX_INLINE_BYTES:
                self._receive_body(member, _Incoming(header, refusal, None, record))
            elif refusal:
                self._reject(member, header, refusal)
            else:
                self._handle(member, header, _copy_body(data), record)

    def _receive_body(self, member: int, incoming: _Incoming) -> None:
        header, tag = incoming.header, incoming.body_tag
        if incoming.refusal:  # a receive into an empty buffer drops the body
            self._reject(member, header, incoming.refusal)
            with suppress(ProtocolError):
                self._transport.recv(torch.empty(0, dtype=torch.uint8), member, tag).wait(math.inf)
            return
        body = self._pool.take(header.length)
        try:
            self._transport.recv(body, member, tag, exact=True).wait(math.inf)
        except ProtocolError as error:
            self._reject(member, header, str(error))
        else:
            self._handle(member, header, body, incoming.record)

    # Both kinds of transports.

    def _note_joined_worker(self, member: int) -> None:
        """A member that has joined later has sent a request: it is a worker."""
        if member not in self._joined_workers:
            with self._lock:
                self._joined_workers.add(member)

    def _read_header(self, member: int, data: memoryview) -> tuple[RequestHeader | None, str]:
        """A request's header, and why it is refused; None if the header cannot be read, which the sender is told."""
        try:
            header = RequestHeader.read(data)
        except ProtocolError as error:
            self._refuse_unreadable(member, data, str(error))
            return None, ""
        inline, arrived = header.length if header.length <= protocol.MAX_INLINE_BYTES else 0, len(data) - REQUEST_BYTES
        if arrived != inline:  # no body follows
            return header._replace(length=0), f"{arrived} B with a header that says {inline} (of {header.length})"
        if header.length > MAX_BODY_BYTES:
            return header, f"a body of {header.length} B; at most {MAX_BODY_BYTES} B are allowed"
        return header, ""

    def _is_record(self, member: int, data: memoryview) -> bool:
        """Whether a message is a server's record. A server may have joined after this one."""
        return member not in self._clients and data[: len(protocol.RECORD_MAGIC)] == protocol.RECORD_MAGIC

    def _read_record(self, member: int, data: memoryview) -> tuple[RecordHeader | None, memoryview]:
        """The header of a record, and the request after it; None if nothing is to be done about the request."""
        try:
            record = RecordHeader.read(data)
            chain = self.chains.get(record.shard)
            if chain is None:
                raise ProtocolError(f"a record of shard {record.shard}: this server has {sorted(self.chains)}")
        except ProtocolError as error:
            self._refusals.warn(f"server {self.network.me} drops a record of member {member}: {error}")
            return None, data
        if record.kind in protocol.ANSWERS:
            self._act(partial(self._answer, chain, member, record), self._offset(chain))
            return None, data
        return record, data[RECORD_BYTES:]

    def _answer(self, chain: ReplicaChain, member: int, record: RecordHeader) -> list[OutgoingReply]:
        if record.kind == protocol.ACKED:
            return chain.acknowledge(member, record.number)
        if record.kind == protocol.RECEIVED:
            return chain.pieces_received(member, record.member, record.number)
        chain.admit(member, record.member, record.number)
        return []

    def _offset(self, chain: ReplicaChain) -> int:
        """The `replica` of requests about a chain's shard at this server."""
        return (self.network.server_number - chain.shard) % len(self.network.servers)

    def _handle(self, member: int, header: RequestHeader, body: Tensor, record: RecordHeader | None = None) -> None:
        """Handle a complete request, of a client or as the record of another server."""
        if not self.chains and not header.replica:
            self._act(partial(self.handler.handle, member, header, body))
        elif record is not None:
            chain = self.chains[record.shard]
            receive = chain.receive_piece if record.kind == protocol.SNAPSHOT else chain.receive
            self._act(partial(receive, member, ReplicaRecord(record, header, body)), self._offset(chain))
        elif (asked := self._chain_of(header)) is not None:
            self._act(partial(asked.request, member, header, body), header.replica)
        else:
            reason = f"replica {header.replica} of a shard on another server, and this one has {len(self.chains)}"
            self._send(refuse(member, header, reason), header.replica)

    def _chain_of(self, header: RequestHeader) -> ReplicaChain | None:
        if header.replica >= len(self.chains):
            return None
        return self.chains[(self.network.server_number - header.replica) % len(self.network.servers)]

    def _lose(self, member: int, left: bool) -> None:
        """Tell the handlers that a member is gone. The loss of a server counts when it is in the chain log."""
        if not self.chains:
            self._act(partial(self.handler.lose, member, left))
            return
        if member not in self.network.chain_log.numbers:
            self._lose_in_chains(member, left)
        if member not in self._clients | self._joined_workers:
            with self._lock:
                self._lost_servers.append(member)
            self._chain_news.set()

    def _lose_in_chains(self, member: int, left: bool) -> None:
        for chain in self.chains.values():
            self._act(partial(chain.lose, member, left), self._offset(chain))

    def _reject(self, member: int, header: RequestHeader, reason: str) -> None:
        self._refusals.warn(f"server {self.network.me} refuses a request of member {member}: {reason}")
        chain = self._chain_of(header)
        if chain is None:
            self._act(partial(self.handler.reject, member, header, reason))
        else:
            text = protocol.bytes_tensor(reason.encode()[: protocol.MAX_INLINE_BYTES])
            refused = header._replace(length=text.numel())
            self._act(partial(chain.request, member, refused, text, protocol.REJECTED), header.replica)

    def _refuse_unreadable(self, member: int, data: memoryview, reason: str) -> None:
        """Refuse a header that cannot be read, under the number that it seems to have."""
        self._refusals.warn(f"server {self.network.me} refuses a request of member {member}: {reason}")
        whole = len(data) >= NUMBER_OFFSET + 8
        number = struct.unpack_from("<Q", data, NUMBER_OFFSET)[0] if whole else 0
        space = struct.unpack_from("<I", data, SPACE_OFFSET)[0] if whole else 0
        self._send(refuse(member, RequestHeader(protocol.PUSH, space=space, number=number), reason))

    def _act(self, action: Callable[[], list[OutgoingReply]], replica: int = 0) -> None:
        """Call the request handler, alone, and send the replies. `replica` is that of the requests."""
        with self._lock:
            replies = action()
            if not self._changed.is_set():
                self._changed.set()
            if self.handler.has_sub_masters:
                self._update_relays()
        for reply in replies:
            self._send(reply, replica)

    # The chain log, and a new server.

    def _add_to_log(self, shard: int, member: int, server: int) -> None:
        """A new server has all records of this one, the last server of a chain."""
        self._level_servers.append((shard, member, server))
        self._chain_news.set()

    def _follow_chain_log(self) -> None:
        """Write what this server has noticed into the chain log, and do what the log says."""
        log = self.network.chain_log
        while not self._closed:
            self._chain_news.wait(why="news of the chains")
            self._chain_news.clear()
            if self.network.is_lost(self.network.me):  # all others seem lost to it, and it must not say so
                self._fail(WorldError(DECLARED_LOST))
                return
            with self._lock:
                lost, level = list(self._lost_servers), list(self._level_servers)
            try:
                for member in lost:
                    log.lose(member, by=self.network.me)
                for shard, member, server in level:
                    log.append(shard, member, server, by=self.network.me)
                entries = log.read()
            except RuntimeError as error:
                logger.debug("server %d: the store does not answer: %s", self.network.me, error)
                self._runtime.sleep(STORE_RETRY_S)
                self._chain_news.set()
                continue
            with self._lock:
                del self._lost_servers[: len(lost)], self._level_servers[: len(level)]
            self._apply_entries(entries)

    def _apply_entries(self, entries: Sequence[ChainEntry]) -> None:
        for entry in entries:
            if entry.shard < 0:
                if entry.member == self.network.me:
                    self._fail(WorldError(DECLARED_LOST))
                self._lose_in_chains(entry.member, left=False)
            elif entry.shard in self.chains:
                chain = self.chains[entry.shard]
                self._act(partial(chain.append, entry.member), self._offset(chain))

    def _fail(self, error: Exception) -> None:
        """End this server: `join` raises the error."""
        self._closed, self._error = True, error
        self._member_gone.set()

    def _catch_up(self) -> None:
        """As a new server: ask the last server of each chain for its state, until this one is in all chains."""
        network, log, begun = self.network, self.network.chain_log, self._runtime.now()
        while not self._closed:
            with self._lock:
                missing = [chain for chain in self.chains.values() if not chain.joined]
                for chain in missing:
                    last = log.last_of(chain.shard)
                    if last is not None and not self._transport.gone_reason(last):
                        chain.ask_to_join(last, network.server_number)
            if not missing:
                seconds = self._runtime.now() - begun
                logger.warning(
                    "this server has taken the place of server %d: the state of its %d shards was copied in %.1f s",
                    network.server_number,
                    len(self.chains),
                    seconds,
                )
                self._member_gone.set()  # all workers are known now
                return
            self._chain_news.set()  # servers may have been added or lost
            self._runtime.sleep(ASK_AGAIN_S)

    def _send_record(self, member: int, record: ReplicaRecord) -> None:
        """Send a record, or an acknowledgement, to another server of a chain."""
        header, request, body, transport = record.header, record.request, record.body, self._transport
        try:
            if header.kind in protocol.ANSWERS:
                transport.send_bytes((header.pack(),), member, protocol.REQUEST_TAG)
                return
            long = body.numel() > protocol.MAX_INLINE_BYTES
            parts = (header.pack(), request.pack()) if long else (header.pack(), request.pack(), body.numpy().data)
            transport.send_bytes(parts, member, protocol.REQUEST_TAG)
            if long:
                transport.send(body, member, protocol.RECORD_BODY_TAG, exact=True)
        except SynclineError as error:  # it is sent again to the next one when the loss is known
            logger.debug("server %d could not send a record to member %d: %s", self.network.me, member, error)

    def _send(self, reply: OutgoingReply, replica: int = 0) -> None:
        header, body, member, transport = reply.header, reply.body, reply.member, self._transport
        tags, slot = protocol.first_tag(header.space, replica), header.number % protocol.REPLY_SLOTS
        tag = tags + protocol.REPLY_TAG + slot
        try:
            if body is None or body.numel() <= protocol.MAX_INLINE_BYTES:
                parts = (header.pack(),) if body is None else (header.pack(), body.numpy().data)
                transport.send_bytes(parts, member, tag, lossy=reply.lossy)
            else:
                transport.send_bytes((header.pack(),), member, tag)
                transport.send(body, member, tags + protocol.DATA_TAG + slot, exact=True)
        except SynclineError as error:  # the member's loss is handled where its requests are received
            logger.debug("server %d could not reply to member %d: %s", self.network.me, member, error)


def _copy_body(data: memoryview) -> Tensor:
    """A copy of the bytes after a header."""
    return torch.from_numpy(np.frombuffer(data, np.uint8, -1, REQUEST_BYTES).copy())


def serve(network: ServerNetwork) -> None:
    """Serve until every worker has left or is lost."""
    server = Server(network).start()
    try:
        server.join()
    finally:
        server.close()
