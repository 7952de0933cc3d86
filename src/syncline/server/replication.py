"""One server's part in the chain of a shard: what is replicated, in which order, and when a client gets its reply.

A shard lives on the servers of its chain. Clients send to the first of them that is not lost, the head. It numbers
every request and every loss of a client, and forwards each as a record. All servers handle the same records in the same
order, so that they have the same state: weights, clocks, optimizer state, lists of keys, and the replies that a client
may ask for again::

    client ── request ──► head ── record 7 ──► replica ── record 7 ──► replica (the last)
                           │  ◄── acked 7 ──────  │  ◄── acked 7 ───────┤
           ◄── reply ──────┴─────────────────── or ────────────────────┘

A reply waits until all servers have the record. So a client gets no reply, and sees no value, that is lost with the
head. A request names the server that replies: for a short one, the last server that its client knows. No message
passes between the servers after that, and the last one acknowledges such records later, many at once (van Renesse and
Schneider, OSDI 2004). The head replies to the others. Every server that is named replies when it knows that those
after it have the record, so that the client's knowledge of the chain may be old.

A record with a short body is handled while it travels. The handler gets a copy, because it changes the body, and the
record may have to be sent again. A long body is forwarded without a copy, and handled when all servers after this one
have it. When a server is lost, the one before it sends all unacknowledged records to the next one. When the head is
lost, the next server is the head. A client sends a request again, under the same number, if the head or the server
that it has named is lost. Every server has the same `RequestHandler`, which is deterministic: what a request does
depends on the earlier records only.

A new server is added at the end. It asks the last server for its state, which comes in pieces while serving continues.
The new server is *level* when it has acknowledged all records::

    new server ── join ──► last server    its state after record 7, packed
               ◄── snapshot, piece by piece ──┤    records 8, 9, … are handled as before, and kept
               ◄── records 8, 9, … ───────────┤    from now on the last server waits for the new one's acks
               ── acked 9 ──► level           └──► "replica" in the chain log: it is in the chain
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.errors import ProtocolError
from syncline.server import protocol
from syncline.server.protocol import RecordHeader, RequestHeader
from syncline.server.request_handler import OutgoingReply, RequestHandler, refuse
from syncline.state_trees import pack, unpack

__all__ = ["ReplicaChain", "ReplicaRecord"]

NO_REQUEST, NO_BODY = RequestHeader(protocol.BYE), torch.empty(0, dtype=torch.uint8)
"""Stand for the request in records of losses and in acknowledgements."""
SNAPSHOT_PIECE_BYTES = 1 << 22
PIECES_IN_FLIGHT = 2
"""Pieces of a snapshot that are sent before the first of them is acknowledged."""
ACK_EVERY_RECORDS = 16
"""Records after which the last server acknowledges them, if no reply of another server waits for it."""
MAX_BACKLOG_BYTES = 1 << 26
"""Bytes of records that are kept for a new server until it has the snapshot. Beyond that clients wait for it."""


@dataclass(frozen=True)
class ReplicaRecord:
    """A request of a client, its refusal, or its loss, as all servers of a chain handle it. Or a snapshot's piece."""

    header: RecordHeader
    request: RequestHeader
    body: Tensor
    """The request's body; for a refusal, the reason."""


@dataclass
class _Newcomer:
    """A server that is about to be added after this one."""

    member: int
    server: int
    """The number of the server that it replaces."""
    attempt: int
    """Counts its attempts to join, to distinguish the pieces of two snapshots."""
    number: int
    """The snapshot is the state after this record."""
    pieces: Sequence[Tensor]
    document_bytes: int
    """The snapshot begins with a JSON document of this length; the tensors follow."""
    sent: int = 0
    received: int = 0
    """Pieces that it has acknowledged."""
    backlog: list[ReplicaRecord] = field(default_factory=list)
    """Records after the snapshot that were handled here, with copies of their bodies."""
    backlog_bytes: int = 0
    gates_replies: bool = False
    """Whether it has the snapshot and gets the records, so that replies wait for its acknowledgements."""
    level_at: int = 0
    """It is level when it has acknowledged this record."""
    reported: bool = False
    """Whether `on_level` was called."""


class ReplicaChain:
    """The replica of a shard on this server. The caller lets one task in at a time, and sends the replies.

    `members` are the servers of the chain in order. A new server is not among them until `append` adds it. `send` sends
    a record to one of them. `on_level` is called with a new server, and the number of the server that it replaces, when
    it may be added after this one.
    """

    def __init__(
        self,
        shard: int,
        members: Sequence[int],
        me: int,
        handler: RequestHandler,
        send: Callable[[int, ReplicaRecord], None],
        on_level: Callable[[int, int], None] = lambda member, server: None,
    ) -> None:
        self.shard = shard
        self.handler = handler
        self.is_head = members[0] == me
        """Whether this server is the first of the chain that is not lost."""
        self.joined = me in members
        """Whether this server is in the chain."""
        self._me = me
        self._members = list(members)
        self._before = list(members[: members.index(me)]) if self.joined else []
        """The servers of the chain before this one."""
        self._lost: set[int] = set()
        """The servers of the chain that are lost."""
        self._next = self._find_next()
        """The next server of the chain that is not lost, or a new one that must acknowledge; None if there is none."""
        self._send = send
        self._on_level = on_level
        self._last = 0
        """The number of the latest record that this server has."""
        self._acked = 0
        """The servers after this one have all records up to this number, and this one has handled them."""
        self._handled = 0
        """This server has handled all records up to this number."""
        self._held_replies: deque[tuple[int, list[OutgoingReply]]] = deque()
        """Replies to records that some server after this one may not have, with the numbers of these records."""
        self._sent_ack = 0
        """The number in the latest acknowledgement that this server has sent."""
        self._previous = members[0]
        """The server that has sent the latest record."""
        self._unacked: deque[ReplicaRecord] = deque()
        """Records that some server after this one may not have."""
        self._expected_replies: set[tuple[int, int, int]] = set()
        """Requests without a reply to which this server is to reply: space, client and number. Each gets one reply,
        because a second one could fill memory that the client uses again.
        """
        self._early_requests: dict[tuple[int, int, int], tuple[int, RequestHeader, Tensor, int]] = {}
        """Requests of clients that have noticed the loss of the head earlier than this server."""
        self._departed: dict[int, bool] = {}
        """Members that are gone, and whether they have left by themselves."""
        self._known_losses: set[int] = set()
        """Clients of whose loss there is a record."""
        self._newcomer: _Newcomer | None = None
        self._attempt = 0
        """If this server is new: counts its attempts to join."""
        self._source: int | None = None
        """If this server is new: the server that it has asked for a snapshot."""
        self._pieces: list[Tensor] = []
        """If this server is new: the pieces of the snapshot that have arrived."""
        self._early_records: list[tuple[int, ReplicaRecord]] = []
        """If this server is new: records of servers that know earlier than this one that it is in the chain."""

    def _find_next(self) -> int | None:
        if not self.joined:
            return None
        return next((each for each in self._members[len(self._before) + 1 :] if each not in self._lost), None)

    # From clients.

    def request(
        self, member: int, request: RequestHeader, body: Tensor, kind: int = protocol.REQUESTED
    ) -> list[OutgoingReply]:
        """Handle a client's request, or its refusal. A server that is not the head keeps it until it is."""
        key = (request.space, member, request.number)
        if self.is_head:
            if not request.reply_from or self._is_named(request):
                self._expect_reply(key)
            return self._add(ReplicaRecord(self._header(kind, member, self._last + 1), request, body))
        acked = [each for each in self._early_requests if each[:2] == key[:2] and each[2] <= request.acked]
        for each in acked:  # the last server has replied to them
            del self._early_requests[each]
        if sum(each[:2] == key[:2] for each in self._early_requests.keys() - {key}) >= protocol.REPLY_SLOTS:
            return [refuse(member, request, f"{protocol.REPLY_SLOTS} requests wait for the loss of the head")]
        self._early_requests[key] = (member, request, body, kind)
        return []

    # Members that are lost or added.

    def lose(self, member: int, left: bool) -> list[OutgoingReply]:
        """Handle the loss of a client or of a server."""
        self._departed[member] = left
        if self._newcomer is not None and self._newcomer.member == member:
            self._newcomer = None
        if member in self._members:
            self._lost.add(member)
        if member == self._source and not self.joined:
            self._source = None  # its snapshot is of no use: another server may be behind or ahead of it
        self._early_requests = {key: early for key, early in self._early_requests.items() if key[1] != member}
        self._expected_replies = {each for each in self._expected_replies if each[1] != member}
        return self._continue()

    def append(self, member: int) -> list[OutgoingReply]:
        """Handle the addition of a server at the end of the chain."""
        if member == self._me:
            self.joined, self._before = True, list(self._members)
        self._members.append(member)
        if self._newcomer is not None and self._newcomer.member == member:
            self._newcomer = None
        replies = self._continue()
        early, self._early_records = self._early_records, []
        for source, record in early:
            replies += self.receive(source, record)
        return replies

    def _continue(self) -> list[OutgoingReply]:
        """Do what the present members of the chain allow: acknowledge, send records again, act as the head."""
        before, newcomer = self._next, self._newcomer
        self.is_head = self.joined and self._lost >= set(self._before)
        self._next = self._find_next()
        if self._next is None and newcomer is not None and newcomer.gates_replies:
            self._next = newcomer.member
        replies: list[OutgoingReply] = []
        if self._next is None and newcomer is None and self._unacked:
            replies += self._acknowledge(self._last)
        elif self._next is not None and self._next != before:
            for record in self._unacked:
                self._send(self._next, record)
        if not self.is_head:
            return replies
        for client in self._departed.keys() - self._known_losses - set(self._members):
            self._known_losses.add(client)
            kind = protocol.LEFT if self._departed[client] else protocol.LOST
            replies += self._add(ReplicaRecord(self._header(kind, client, self._last + 1), NO_REQUEST, NO_BODY))
        early, self._early_requests = self._early_requests, {}
        for request in early.values():
            replies += self.request(*request)
        return replies

    # From other servers of the chain.

    def receive(self, source: int, record: ReplicaRecord) -> list[OutgoingReply]:
        """Handle a record of the server before this one. A repeated record is acknowledged once more."""
        number = record.header.number
        if not self.joined and source != self._source:
            self._early_records.append((source, record))
            return []
        if source in self._lost:  # it was declared lost and still runs
            return []
        if (self.joined and source not in self._before) or number > self._last + 1:
            raise ProtocolError(
                f"record {number} of shard {self.shard} from member {source}, where record {self._last + 1} from one "
                f"of {tuple(self._before)} was due"
            )
        self._previous = source
        if record.header.kind in (protocol.LOST, protocol.LEFT):
            self._known_losses.add(record.header.member)
        if number == self._last + 1:
            request = record.request
            if self._is_named(request):
                self._expect_reply((request.space, record.header.member, request.number))
            return self._add(record)
        self._send_ack()
        return []

    def acknowledge(self, source: int, number: int) -> list[OutgoingReply]:
        """The servers after this one have all records up to a number; return the replies that this allows."""
        if source != self._next:
            return []
        newcomer = self._newcomer
        if newcomer is not None and number >= newcomer.level_at and not newcomer.reported:
            newcomer.reported = True
            self._on_level(newcomer.member, newcomer.server)
        return self._acknowledge(min(number, self._last))

    # Records.

    def _header(self, kind: int, member: int, number: int) -> RecordHeader:
        return RecordHeader(kind, self.shard, member, number)

    def _add(self, record: ReplicaRecord) -> list[OutgoingReply]:
        """Forward the next record, or handle it if this server is the last; return the replies to send."""
        self._last = record.header.number
        self._unacked.append(record)
        if self._next is not None:
            self._send(self._next, record)
            self._handle_short()
            return []
        newcomer = self._newcomer
        if newcomer is not None:
            if newcomer.backlog_bytes > MAX_BACKLOG_BYTES:
                return []  # until the new server has the snapshot
            newcomer.backlog.append(ReplicaRecord(record.header, record.request, record.body.clone()))
            newcomer.backlog_bytes += record.body.numel()
        return self._acknowledge(self._last, may_delay=self._is_named(record.request))

    def _acknowledge(self, number: int, may_delay: bool = False) -> list[OutgoingReply]:
        """Handle the records up to a number, which all servers after this one have; return the replies to send.

        With `may_delay`, the servers before are told at once only if one of them has a reply that waits for it.
        """
        self._acked = max(number, self._acked)
        may_delay &= number < self._sent_ack + ACK_EVERY_RECORDS
        if not may_delay:
            self._send_ack()
        replies: list[OutgoingReply] = []
        while self._held_replies and self._held_replies[0][0] <= number:
            replies += self._held_replies.popleft()[1]
        while self._unacked and self._unacked[0].header.number <= number:
            record = self._unacked.popleft()
            if record.header.number > self._handled:
                replies += self._handle(record)
        self._handle_short()
        expected = [reply for reply in replies if self._is_expected(reply)]
        if may_delay and len(expected) < len(replies):
            self._send_ack()
        return expected

    def _handle_short(self) -> None:
        """Handle the short records that come next, and hold their replies."""
        while self._handled < self._last and self._next is not None:
            record = self._unacked[self._handled - self._last]
            if not record.request.repeats:
                return
            copy = ReplicaRecord(record.header, record.request, record.body.clone())
            self._held_replies.append((record.header.number, self._handle(copy)))

    def _is_named(self, request: RequestHeader) -> bool:
        """Whether the client that has sent a request to the head expects the reply from this server."""
        return request.reply_from == 1 + self._me

    def _expect_reply(self, key: tuple[int, int, int]) -> None:
        """Note that this server is to reply to a request."""
        self._expected_replies.add(key)
        if len(self._expected_replies) > protocol.REPLY_SLOTS * (1 + len(self.handler.sessions)):
            self._expected_replies = {each for each in self._expected_replies if self._may_reply(*each)}

    def _may_reply(self, space: int, member: int, number: int) -> bool:
        """Whether a request may still get a reply. A duplicate of an acknowledged one gets none."""
        session = self.handler.sessions.get((space, member))
        return session is None or number > session.acked

    def _is_expected(self, reply: OutgoingReply) -> bool:
        """Whether a client waits for a reply from this server. Others are kept in case that the client asks here."""
        key = (reply.header.space, reply.member, reply.header.number)
        found = key in self._expected_replies
        self._expected_replies.discard(key)
        return found

    def _handle(self, record: ReplicaRecord) -> list[OutgoingReply]:
        kind, member, handler = record.header.kind, record.header.member, self.handler
        self._handled = record.header.number
        if kind == protocol.REQUESTED:
            return handler.handle(member, record.request, record.body)
        if kind == protocol.REJECTED:
            return handler.reject(member, record.request, bytes(record.body.numpy()).decode(errors="replace"))
        return handler.lose(member, left=kind == protocol.LEFT)

    def _send_ack(self) -> None:
        if not self.is_head:
            self._sent_ack = self._acked
            self._send(self._previous, self._message(protocol.ACKED, 0, self._acked))

    def _message(self, kind: int, member: int, number: int) -> ReplicaRecord:
        return ReplicaRecord(self._header(kind, member, number), NO_REQUEST, NO_BODY)

    # A new server, as the last server of the chain sees it.

    def admit(self, source: int, server: int, attempt: int) -> None:
        """Send a snapshot to a new server that asks for it. One that asks another server than the last asks again."""
        newcomer = self._newcomer
        if not self.joined or self._next is not None or source in self._members or source in self._departed:
            return
        if newcomer is not None and (newcomer.member != source or newcomer.attempt >= attempt):
            return
        state = {"losses": sorted(self._known_losses), "handler": self.handler.snapshot()}
        document, buffer = pack(state, "snapshot")
        parts = (protocol.bytes_tensor(document), buffer)
        pieces = [piece for part in parts for piece in torch.split(part, SNAPSHOT_PIECE_BYTES)]
        self._newcomer = _Newcomer(source, server, attempt, self._acked, pieces, len(document))
        self._send_pieces(self._newcomer)

    def pieces_received(self, source: int, attempt: int, pieces: int) -> list[OutgoingReply]:
        """The new server has so many pieces. When it has all, send it the records since, and wait for its acks."""
        newcomer = self._newcomer
        if newcomer is None or newcomer.member != source or newcomer.gates_replies:
            return []
        if newcomer.attempt != attempt:  # it has given this snapshot up
            self._newcomer = None
            return self._continue()
        newcomer.received = max(newcomer.received, pieces)
        self._send_pieces(newcomer)
        if pieces < len(newcomer.pieces):
            return []
        records = [*newcomer.backlog, *self._unacked]
        newcomer.gates_replies, newcomer.pieces, newcomer.backlog = True, (), []
        newcomer.level_at, self._next = self._last, source
        for record in records:
            self._send(source, record)
        return self.acknowledge(source, newcomer.number)

    def _send_pieces(self, newcomer: _Newcomer) -> None:
        total = len(newcomer.pieces)
        while newcomer.sent < min(total, newcomer.received + PIECES_IN_FLIGHT):
            body = newcomer.pieces[newcomer.sent]
            newcomer.sent += 1
            request = NO_REQUEST._replace(
                number=newcomer.sent, count=total, first=newcomer.document_bytes, length=body.numel()
            )
            header = self._header(protocol.SNAPSHOT, newcomer.attempt, newcomer.number)
            self._send(newcomer.member, ReplicaRecord(header, request, body))

    # A new server, as it sees itself.

    def ask_to_join(self, source: int, server: int) -> None:
        """Ask a server for a snapshot, to take the place of a lost server. Asking again changes nothing."""
        if source != self._source:
            self._source, self._pieces = source, []
            self._attempt += 1
        self._send(source, self._message(protocol.JOIN, server, self._attempt))

    def receive_piece(self, source: int, record: ReplicaRecord) -> list[OutgoingReply]:
        """Take a piece of a snapshot. With the last one, this server has the state of the other."""
        if self.joined:
            return []
        if source == self._source and record.header.member == self._attempt:
            number, total = record.request.number, record.request.count
            if number != len(self._pieces) + 1 or number > total:
                raise ProtocolError(
                    f"piece {number} of {total} of a snapshot of shard {self.shard}, where piece "
                    f"{len(self._pieces) + 1} was due"
                )
            self._pieces.append(record.body)
            if number == total:
                self._load(record.header.number, document_bytes=record.request.first)
        self._send(source, self._message(protocol.RECEIVED, self._attempt, len(self._pieces)))
        return []

    def _load(self, number: int, document_bytes: int) -> None:
        """Continue like the server whose snapshot has arrived, after its record of this number."""
        data = torch.cat(self._pieces)
        document = bytes(data[:document_bytes].numpy())
        state = unpack(document, data[document_bytes:], f"a snapshot of shard {self.shard}")
        self._pieces = [NO_BODY] * len(self._pieces)  # only their number counts from now on
        self.handler.load_snapshot(state["handler"])
        self._known_losses = set(state["losses"])
        self._last = self._acked = self._handled = number
        self._unacked.clear()
        self._held_replies.clear()
