"""One server's part in the chain of a shard: what is replicated, in which order, and when a client gets its reply.

A shard lives on the servers of its chain. Clients send to the first of them that is not lost, the head. It numbers
every request and every loss of a client, and forwards each as a record. All servers handle the same records in the same
order, so that they have the same state: weights, clocks, optimizer state, lists of keys, and the replies that a client
may ask for again::

    client ── request ──► head ── record 7 ──► replica ── record 7 ──► replica (the last)
                           │  ◄── acked 7 ──────  │  ◄── acked 7 ───────┘
           ◄── reply ──────┘

A server handles a record when all servers after it have it. So a client gets no reply, and sees no value, that is lost
with the head; and a body is forwarded without a copy, though the handler changes it. When a server is lost, the one
before it continues with the next one, and sends what was not acknowledged once more. When the head is lost, the next
server is the head. Every server has the same `RequestHandler`, which is deterministic: what a request does depends on
the earlier records only.
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
from syncline.server.request_handler import OutgoingReply, RequestHandler, refuse

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
        self._last = 0
        """The number of the latest record that this server has."""
        self._acked = 0
        """The servers after this one have all records up to this number, and this one has handled them."""
        self._previous = members[0]
        """The server that has sent the latest record."""
        self._unacked: deque[ReplicaRecord] = deque()
        """Records that some server after this one may not have."""
        self._asked: set[tuple[int, int, int]] = set()
        """Requests that clients have sent to this server and that have no reply: space, client and number. Each gets
        one reply, because a second one could fill memory that the client uses again.
        """
        self._early: dict[tuple[int, int, int], tuple[int, RequestHeader, Tensor, int]] = {}
        """Requests of clients that have noticed the loss of the head earlier than this server."""
        self._gone: dict[int, bool] = {}
        """Members that are gone, and whether they have left by themselves."""
        self._known_losses: set[int] = set()
        """Clients of whose loss there is a record."""

    # From clients.

    def request(
        self, member: int, request: RequestHeader, body: Tensor, kind: int = protocol.REQUESTED
    ) -> list[OutgoingReply]:
        """Handle a client's request, or its refusal. A server that is not the head keeps it until it is."""
        key = (request.space, member, request.number)
        if self.is_head:
            self._asked.add(key)
            if len(self._asked) > protocol.REPLY_SLOTS * (1 + len(self.handler.sessions)):
                self._asked = {each for each in self._asked if self._may_reply(*each)}
            return self._add(ReplicaRecord(self._header(kind, member, self._last + 1), request, body))
        if sum(each[:2] == key[:2] for each in self._early.keys() - {key}) >= protocol.REPLY_SLOTS:
            return [refuse(member, request, f"{protocol.REPLY_SLOTS} requests wait for the loss of the head")]
        self._early[key] = (member, request, body, kind)
        return []

    def lose(self, member: int, left: bool) -> list[OutgoingReply]:
        """Handle the loss of a client or of a server."""
        successor = self._next
        self._gone[member] = left
        self.is_head = self._gone.keys() >= set(self._members[: self.place])
        self._next = next((each for each in self._members[self.place + 1 :] if each not in self._gone), None)
        self._early = {key: early for key, early in self._early.items() if key[1] != member}
        self._asked = {each for each in self._asked if each[1] != member}
        replies: list[OutgoingReply] = []
        if member == successor:
            if self._next is None:
                replies += self._acknowledge(self._last)
            else:
                for record in self._unacked:
                    self._send(self._next, record)
        if not self.is_head:
            return replies
        for client in self._gone.keys() - self._known_losses - set(self._members):
            self._known_losses.add(client)
            kind = protocol.LEFT if self._gone[client] else protocol.LOST
            replies += self._add(ReplicaRecord(self._header(kind, client, self._last + 1), NO_REQUEST, NO_BODY))
        early, self._early = self._early, {}
        for request in early.values():
            replies += self.request(*request)
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
        if record.header.kind in (protocol.LOST, protocol.LEFT):
            self._known_losses.add(record.header.member)
        if number == self._last + 1:
            return self._add(record)
        self._send_ack()
        return []

    def acknowledge(self, source: int, number: int) -> list[OutgoingReply]:
        """The servers after this one have all records up to a number; return the replies that this allows."""
        return self._acknowledge(min(number, self._last)) if source == self._next else []

    # Records.

    def _header(self, kind: int, member: int, number: int) -> RecordHeader:
        return RecordHeader(kind, self.shard, member, number)

    def _add(self, record: ReplicaRecord) -> list[OutgoingReply]:
        """Forward the next record, or handle it if this server is the last; return the replies to send."""
        self._last = record.header.number
        self._unacked.append(record)
        if self._next is None:
            return self._acknowledge(self._last)
        self._send(self._next, record)
        return []

    def _acknowledge(self, number: int) -> list[OutgoingReply]:
        """Handle the records up to a number, which all servers after this one have; return the replies to send."""
        self._acked = max(number, self._acked)
        self._send_ack()
        replies: list[OutgoingReply] = []
        while self._unacked and self._unacked[0].header.number <= number:
            replies += self._handle(self._unacked.popleft())
        return [reply for reply in replies if self._was_asked(reply)]

    def _may_reply(self, space: int, member: int, number: int) -> bool:
        """Whether a request may still get a reply. A duplicate of an acknowledged one gets none."""
        session = self.handler.sessions.get((space, member))
        return session is None or number > session.acked

    def _was_asked(self, reply: OutgoingReply) -> bool:
        """Whether a client waits for a reply from this server. Others are kept in case that the client asks here."""
        key = (reply.header.space, reply.member, reply.header.number)
        found = key in self._asked
        self._asked.discard(key)
        return found

    def _handle(self, record: ReplicaRecord) -> list[OutgoingReply]:
        kind, member, handler = record.header.kind, record.header.member, self.handler
        if kind == protocol.REQUESTED:
            return handler.handle(member, record.request, record.body)
        if kind == protocol.REJECTED:
            return handler.reject(member, record.request, bytes(record.body.numpy()).decode(errors="replace"))
        return handler.lose(member, left=kind == protocol.LEFT)

    def _send_ack(self) -> None:
        if not self.is_head:
            header = self._header(protocol.ACKED, 0, self._acked)
            self._send(self._previous, ReplicaRecord(header, NO_REQUEST, NO_BODY))
