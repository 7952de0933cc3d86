"""One server's part in the chain of a shard: what is replicated, in which order, and when a client gets its reply.

A shard lives on the servers of its chain. Clients send to the first of them that is not lost, the head. It numbers
every request and every loss of a client, and forwards each as a record. All servers handle the same records in the same
order, so that they have the same state: weights, clocks, optimizer state, lists of keys, and the replies that a client
may ask for again::

    client ── request ──► head ── record 7 ──► replica ── record 7 ──► replica (the last)
                           │  ◄── acked 7 ──────  │  ◄── acked 7 ───────┘
           ◄── reply ──────┘

A reply is sent when all servers of the chain have all records up to the one that it belongs to. So a client sees no
value that is lost with the head. When a server is lost, the one before it continues with the next one, and sends what
was not acknowledged once more. When the head is lost, the next server is the head. Records are handled by the same
`RequestHandler` on every server, which is deterministic: what a request does depends on the earlier records only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.errors import ProtocolError
from syncline.server import protocol
from syncline.server.protocol import RecordHeader, RequestHeader
from syncline.server.request_handler import OutgoingReply, ReplyBuffers, RequestHandler, refuse

__all__ = ["ReplicaChain", "ReplicaRecord"]

NO_REQUEST, NO_BODY = RequestHeader(protocol.BYE), torch.empty(0, dtype=torch.uint8)
"""Stand for the request in records of losses and in acknowledgements."""


@dataclass(frozen=True)
class ReplicaRecord:
    """A request of a client, its refusal, or its loss, as all servers of a chain handle it."""

    header: RecordHeader
    request: RequestHeader
    body: Tensor
    """The request's body; for a refusal, the reason."""


class ReplicaChain:
    """The replica of a shard on this server. The caller lets one task in at a time, and sends the replies.

    `members` are the servers of the chain in order. `send` sends a record to one of them.
    """

    def __init__(
        self,
        shard: int,
        members: tuple[int, ...],
        me: int,
        handler: RequestHandler,
        send: Callable[[int, ReplicaRecord], None],
        pool: ReplyBuffers,
    ) -> None:
        self.shard = shard
        self.handler = handler
        self.place = members.index(me)
        """The number of servers of the chain before this one."""
        self.is_head = self.place == 0
        """Whether this server is the first of the chain that is not lost."""
        self._next = next(iter(members[self.place + 1 :]), None)
        """The next server of the chain that is not lost; None if this is the last."""
        self._members = members
        self._send = send
        self._pool = pool
        self._last = 0
        """The number of the latest record that this server has handled."""
        self._acked = 0
        """The servers after this one have all records up to this number."""
        self._previous = members[0]
        """The server that has sent the latest record."""
        self._unacked: deque[ReplicaRecord] = deque()
        self._held: deque[tuple[int, list[OutgoingReply]]] = deque()
        """Replies, each with the record that must be acknowledged before."""
        self._early: list[tuple[int, RequestHeader, Tensor, int]] = []
        """Requests of clients that have noticed the loss of the head earlier than this server."""
        self._gone: dict[int, bool] = {}
        """Members that are gone, and whether they have left by themselves."""
        self._gone_clients: set[int] = set()
        """Clients whose loss all servers of the chain know."""

    # From clients.

    def request(
        self, member: int, request: RequestHeader, body: Tensor, kind: int = protocol.REQUESTED
    ) -> list[OutgoingReply]:
        """Handle a client's request, or its refusal. A server that is not the head keeps it until it is."""
        if self.is_head:
            return self._handle(ReplicaRecord(self._header(kind, member, self._last + 1), request, body))
        if sum(client == member for client, *_ in self._early) >= protocol.REPLY_SLOTS:
            return [refuse(member, request, f"{protocol.REPLY_SLOTS} requests wait for the loss of the head")]
        self._early.append((member, request, body, kind))
        return []

    def lose(self, member: int, left: bool) -> list[OutgoingReply]:
        """Handle the loss of a client or of a server."""
        was_head, successor = self.is_head, self._next
        self._gone[member] = left
        self.is_head = self._gone.keys() >= set(self._members[: self.place])
        self._next = next((each for each in self._members[self.place + 1 :] if each not in self._gone), None)
        self._early = [each for each in self._early if each[0] != member]
        replies: list[OutgoingReply] = []
        if member == successor:
            if self._next is None:
                replies += self._acknowledge(self._last)
            else:
                for record in self._unacked:
                    self._send(self._next, record)
        if not self.is_head:
            return replies
        for client in self._gone.keys() - self._gone_clients - set(self._members):
            kind = protocol.LEFT if self._gone[client] else protocol.LOST
            replies += self._handle(ReplicaRecord(self._header(kind, client, self._last + 1), NO_REQUEST, NO_BODY))
        early, self._early = [] if was_head else self._early, []
        for each in early:
            replies += self.request(*each)
        return replies

    # From other servers of the chain.

    def receive(self, source: int, record: ReplicaRecord) -> list[OutgoingReply]:
        """Handle a record of the server before this one. A repeated record is acknowledged once more."""
        number = record.header.number
        if source not in self._members[: self.place] or number > self._last + 1:
            raise ProtocolError(
                f"record {number} of shard {self.shard} from member {source}, where record {self._last + 1} from one "
                f"of {self._members[: self.place]} was due"
            )
        self._previous = source
        if number == self._last + 1:
            return self._handle(record)
        self._send_ack()
        return []

    def acknowledge(self, source: int, number: int) -> list[OutgoingReply]:
        """The servers after this one have all records up to a number; return the replies that this allows."""
        return self._acknowledge(min(number, self._last)) if source == self._next else []

    # Records.

    def _header(self, kind: int, member: int, number: int) -> RecordHeader:
        return RecordHeader(kind, self.shard, member, number)

    def _handle(self, record: ReplicaRecord) -> list[OutgoingReply]:
        """Forward the next record, handle it, and return the replies that may be sent now."""
        self._last = record.header.number
        if record.header.kind in (protocol.LOST, protocol.LEFT):
            self._gone_clients.add(record.header.member)
        if self._next is None:
            self._acked = self._last
            self._send_ack()
        else:
            copy = self._pool.take(record.body.numel())  # the handler changes values in place
            copy.copy_(record.body)
            self._unacked.append(ReplicaRecord(record.header, record.request, copy))
            self._send(self._next, self._unacked[-1])
        replies = self._run(record)
        if not self.is_head:  # it is kept in case that the client asks again
            return []
        self._held.append((self._last, replies))
        return self._release()

    def _run(self, record: ReplicaRecord) -> list[OutgoingReply]:
        kind, member, handler = record.header.kind, record.header.member, self.handler
        if kind == protocol.REQUESTED:
            return handler.handle(member, record.request, record.body)
        if kind == protocol.REJECTED:
            return handler.reject(member, record.request, bytes(record.body.numpy()).decode(errors="replace"))
        return handler.lose(member, left=kind == protocol.LEFT)

    def _acknowledge(self, number: int) -> list[OutgoingReply]:
        if number <= self._acked:
            return []
        self._acked = number
        while self._unacked and self._unacked[0].header.number <= number:
            self._pool.give_back(self._unacked.popleft().body)
        self._send_ack()
        return self._release()

    def _send_ack(self) -> None:
        if not self.is_head:
            header = self._header(protocol.ACKED, 0, self._acked)
            self._send(self._previous, ReplicaRecord(header, NO_REQUEST, NO_BODY))

    def _release(self) -> list[OutgoingReply]:
        """The replies that may be sent now."""
        replies: list[OutgoingReply] = []
        while self._held and self._held[0][0] <= self._acked:
            replies += self._held.popleft()[1]
        return replies
