"""What a server does with a request: reply, defer, or refuse. There is no transport here, and nothing blocks.

::

    request ─► known client? new number? ─► earlier requests done? ─► push ─► may it read? ─► reply
                  │            └ repeated: the same reply   └ no: deferred     └ no: deferred, until a clock advances
                  └ no: refused
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from syncline.errors import ProtocolError, SynclineError
from syncline.runtime import Lock
from syncline.server import protocol
from syncline.server.client_session import ClientSession, DeferredRequest, OutgoingReply
from syncline.server.control_requests import ControlRequests
from syncline.server.protocol import ReplyHeader, RequestHeader, bytes_tensor
from syncline.server.shard import ParameterShard
from syncline.server.space import SpaceDescription
from syncline.server.sub_master import AggregatingShard

__all__ = ["ReplyBuffers", "RequestHandler"]

logger = logging.getLogger("syncline")

MAX_SPACES = 64
MAX_POOLED_BYTES = 64 << 20


class ReplyBuffers:
    """Reuses byte buffers, because fresh memory costs a page fault for every 4 KiB. Several tasks may use it.

    Sizes are rounded up to powers of two, so that requests of many different lengths share buffers.

    >>> pool = ReplyBuffers()
    >>> buffer = pool.take(900_000)
    >>> pool.give_back(buffer)
    >>> pool.take(1_000_000).data_ptr() == buffer.data_ptr()
    True
    """

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = nullcontext() if lock is None else lock
        self._free: dict[int, list[Tensor]] = {}
        self._pooled_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """An uninitialised buffer."""
        if nbytes <= protocol.MAX_INLINE_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        size = _round_up(nbytes)
        with self._lock:
            free = self._free.get(size)
            buffer = free.pop() if free else None
            if buffer is not None:
                self._pooled_bytes -= size
        return (torch.empty(size, dtype=torch.uint8) if buffer is None else buffer)[:nbytes]

    def give_back(self, buffer: Tensor | None) -> None:
        """Return a buffer that is no longer used. Tensors that are not from a pool are ignored."""
        if buffer is None or buffer.numel() <= protocol.MAX_INLINE_BYTES:
            return
        memory, size = buffer.untyped_storage(), _round_up(buffer.numel())
        if memory.nbytes() != size or buffer.storage_offset() or buffer.dtype != torch.uint8:
            return
        with self._lock:
            if self._pooled_bytes + size <= MAX_POOLED_BYTES:
                self._pooled_bytes += size
                self._free.setdefault(size, []).append(torch.empty(0, dtype=torch.uint8).set_(memory))


def _round_up(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


class RequestHandler:
    """The shards of one server. The caller lets one task in at a time, and sends the replies.

    `index_of` gives this server's number among the servers of a space.
    """

    def __init__(
        self,
        index_of: Callable[[SpaceDescription], int],
        pool: ReplyBuffers | None = None,
        workers: Collection[int] = (),
    ) -> None:
        self.shards: dict[int, ParameterShard] = {}
        """By the space's id."""
        self.has_sub_masters = False
        """Whether a shard is, or was, a sub-master's."""
        self._pool = pool or ReplyBuffers()
        self._index_of = index_of
        self.sessions: dict[tuple[int, int], ClientSession] = {}
        """By the space's id and the client's member."""
        self._control = ControlRequests(workers)
        self._early_observers: list[tuple[int, RequestHeader]] = []
        """Observers of spaces that no client has described yet."""
        self._lost: set[int] = set()
        self._some_left = False
        """Whether a client has left, so that a space may be dropped soon."""

    # Requests.

    def refusal_of(self, header: RequestHeader) -> str:
        """Why a request's body is not received; empty if it is."""
        limit = protocol.MAX_BODY_BYTES
        return f"a body of {header.length} B; at most {limit} B are allowed" if header.length > limit else ""

    def handle(self, member: int, header: RequestHeader, body: Tensor) -> list[OutgoingReply]:
        """Handle a request, and return all replies that are ready now, to this client and to others."""
        try:
            replies = self._handle(member, header, body)
        except Exception as error:  # a user's handler may raise anything, and the server must continue
            replies = [self._refuse_failed(member, header, error)]
        return self._continue(replies)

    def reject(self, member: int, header: RequestHeader, reason: str) -> list[OutgoingReply]:
        """Refuse a request whose body was not received."""
        return self._continue([self._refuse_failed(member, header, ProtocolError(reason))])

    def _continue(self, replies: list[OutgoingReply]) -> list[OutgoingReply]:
        replies += self._handle_deferred()
        if self._some_left:
            self._drop_left_spaces()
        return replies

    def _refuse_failed(self, member: int, header: RequestHeader, error: Exception) -> OutgoingReply:
        reason = str(error) if isinstance(error, SynclineError) else f"{type(error).__name__}: {error}"
        reply, session = refuse(member, header, reason), self.sessions.get((header.space, member))
        if session is not None and session.expects(header.number):
            if session.worker:
                self._end_refused_step(session, header)
                clock = session.shard.clocks.of[member]
                reply = replace(reply, header=reply.header._replace(min_clock=clock))
            session.mark_done(header.number)
            if header.number not in session.replies:
                session.keep(reply)
        return reply

    @staticmethod
    def _end_refused_step(session: ClientSession, header: RequestHeader) -> None:
        """End a step whose last part is refused, because other servers may have applied their parts."""
        shard, member, clock = session.shard, session.member, header.clock
        if not header.flags & protocol.TICK or shard.clocks.of[member] != clock or shard.is_far_ahead(clock):
            return
        try:
            if shard.is_late(member, clock):
                shard.skip(member)
            else:
                shard.tick(member, clock)
        except Exception as error:  # of a user's rule, about other workers' pushes; this request is refused already
            logger.warning("space %r: step %d is not applied: %s", shard.description.name, clock, error)

    def _handle(self, member: int, header: RequestHeader, body: Tensor) -> list[OutgoingReply]:
        if header.kind == protocol.HELLO:
            return self._hello(member, header, body)
        session = self.sessions.get((header.space, member))
        if session is None:
            raise ProtocolError(
                f"member {member} is unknown in space {header.space:#010x}: it has not said hello, or the space "
                "is another model's"
            )
        if session.shard.orphan_reason:
            return [self._reply_orphaned(session, header)]
        repeated = self._replies_if_repeated(session, header)
        if repeated is not None:
            return repeated
        request = DeferredRequest(header, body)
        if header.kind in (protocol.PUSH, protocol.PULL, protocol.PUSH_PULL):
            session.check(header, body, len(self._control.handlers))
        if header.after > session.applied:
            session.deferred[header.number] = request
            return []
        return self._serve(session, request)

    def _replies_if_repeated(self, session: ClientSession, header: RequestHeader) -> list[OutgoingReply] | None:
        """The replies to a request that has arrived before; None for a new one."""
        number = header.number
        if header.acked >= number or header.after >= number:
            raise ProtocolError(f"request {number} claims to follow {max(header.acked, header.after)}")
        for old in session.acknowledge(header.acked):
            self._pool.give_back(old.body)
        if number in session.replies:  # a reply that cannot be lost is sent once
            return [session.replies[number]] if header.repeats else []
        if session.knows(number):
            return []
        session.check_number(number)
        return None

    def _serve(self, session: ClientSession, request: DeferredRequest) -> list[OutgoingReply]:
        header, shard = request.header, session.shard
        if header.kind == protocol.BYE:
            return [self._leave(session, header)]
        if header.kind == protocol.CONTROL:
            body = self._control.handle(session, request.body)
            session.mark_done(header.number)
            return [self._reply(session, header, body)]
        if not session.find_keys(request):
            reply = ReplyHeader(protocol.NEED_KEYS, space=header.space, number=header.number)
            return [OutgoingReply(session.member, reply, lossy=header.repeats)]
        if header.kind != protocol.PULL and not request.pushed:
            self._push(session, request)
        session.mark_done(header.number)
        if header.kind == protocol.PUSH:
            if not shard.description.keeps_pushes and request.keys is None:
                self._pool.give_back(request.body)
            return [self._reply(session, header, late=request.late, staleness=request.staleness)]
        if not shard.may_read(header.min_clock, session.member):
            session.deferred[header.number] = request
            return []
        return [self._read(session, request)]

    def _push(self, session: ClientSession, request: DeferredRequest) -> None:
        """Apply or keep a push, and end the step if this is its last request."""
        header, shard, member = request.header, session.shard, session.member
        ticks = bool(header.flags & protocol.TICK)
        by_rule = session.worker and not header.handler and not header.state_slot
        in_step = ticks or (header.clock >= 0 and by_rule)
        request.late = in_step and shard.is_late(member, header.clock)
        if by_rule:
            shard.begin_step(member)
        request.staleness = shard.staleness(member) if session.worker else -1
        if not request.late:
            if in_step:
                shard.check_step(member, header.clock)
            if header.count:
                push = session.make_push(request, self._control.handlers)
                request.has_weights = shard.push(member, header.clock, push, session.may_write_back(header))
        request.pushed = True
        if ticks and request.late:
            shard.skip(member)
        elif ticks:
            shard.tick(member, header.clock, header.scale)

    def _read(self, session: ClientSession, request: DeferredRequest) -> OutgoingReply:
        header, shard = request.header, session.shard
        staleness, exact = request.staleness, True
        if header.min_clock >= 0 and session.worker:
            own = shard.clocks.of[session.member]
            staleness = max(0, own - min(shard.min_clock, own))
        if header.flags & protocol.ENCODE_REPLY:
            body, exact = session.encode_changes(header)
        elif request.has_weights:
            body = request.body
        elif request.keys is not None:
            body = shard.weights[request.keys - shard.first].view(torch.uint8)
        else:
            values = shard.read(header.state_slot, header.first, header.count)
            keeps_body = shard.description.keeps_pushes or header.flags & protocol.ENCODED
            reuse = request.pushed and request.body.numel() == 4 * header.count and not keeps_body
            body = request.body if reuse else self._pool.take(4 * header.count)
            body.view(torch.float32).copy_(values)
        # A read for an evaluation or a checkpoint waits for no clock; no gradient is computed from it.
        if header.min_clock >= 0 or (header.kind == protocol.PUSH_PULL and not header.handler):
            shard.note_read(session.member)
        return self._reply(session, header, body, request.late, staleness, exact)

    def _reply(
        self,
        session: ClientSession,
        header: RequestHeader,
        body: Tensor | None = None,
        late: bool = False,
        staleness: int = -1,
        exact: bool = True,
    ) -> OutgoingReply:
        shard = session.shard
        reply = ReplyHeader(
            protocol.LATE if late else protocol.OK,
            (protocol.STOP if shard.stopping else 0) | (0 if exact else protocol.REPLY_ENCODED),
            shard.clocks.live,
            0,
            header.space,
            header.number,
            staleness,
            shard.clocks.of[session.member] if late and session.worker else shard.min_clock,
            shard.clocks.total_steps,
            0 if body is None else body.numel(),
        )
        return session.keep(OutgoingReply(session.member, reply, body, header.repeats))

    def _handle_deferred(self) -> list[OutgoingReply]:
        """Handle the deferred requests that are ready now."""
        replies: list[OutgoingReply] = []
        progress = any(session.deferred for session in self.sessions.values())
        while progress:
            progress = False
            for session in list(self.sessions.values()):
                for number, request in list(session.deferred.items()):
                    if not self._is_ready(session, request):
                        continue
                    del session.deferred[number]
                    progress = True
                    try:
                        replies += self._serve(session, request)
                    except Exception as error:
                        replies.append(self._refuse_failed(session.member, request.header, error))
        return replies

    @staticmethod
    def _is_ready(session: ClientSession, request: DeferredRequest) -> bool:
        if request.header.after > session.applied:
            return False
        must_push = request.header.kind != protocol.PULL and not request.pushed
        return must_push or session.shard.may_read(request.header.min_clock, session.member)

    # Sub-masters.

    def finish_sum(
        self, shard: AggregatingShard, values: Sequence[tuple[int, Tensor]], stop: bool
    ) -> list[OutgoingReply]:
        """Take the weights that a sub-master's parent has sent, and reply to the workers that wait for them."""
        shard.finish_sum(values)
        shard.stopping |= stop
        return self._continue([])

    def orphan(self, shard: ParameterShard, reason: str) -> list[OutgoingReply]:
        """Tell the workers of a sub-master that its parent is lost: now, and whenever they ask."""
        shard.orphan_reason = reason
        replies: list[OutgoingReply] = []
        for session in [each for each in self.sessions.values() if each.shard is shard]:
            deferred, session.deferred = session.deferred, {}
            replies += [self._reply_orphaned(session, each.header) for each in deferred.values()]
        return self._continue(replies)

    def _reply_orphaned(self, session: ClientSession, header: RequestHeader) -> OutgoingReply:
        if header.kind == protocol.BYE:  # clients can still leave
            return self._leave(session, header)
        refusal = refuse(session.member, header, session.shard.orphan_reason)
        session.mark_done(header.number)
        return replace(refusal, header=refusal.header._replace(status=protocol.ORPHANED))

    # Clients that join and leave.

    def _hello(self, member: int, header: RequestHeader, body: Tensor) -> list[OutgoingReply]:
        if not body.numel():
            return self._observe(member, header)
        description = SpaceDescription.from_json(bytes(body.numpy()))
        if description.space_id != header.space:
            raise ProtocolError(f"a hello to space {header.space:#010x} describes {description.name!r}")
        shard = self.shards.get(header.space)
        if shard is None:
            shard = self._make_shard(description)
        elif shard.description != description:
            raise ProtocolError(
                f"space {description.name!r} is another model's: it has {shard.description.numel} keys and rules "
                f"{list(shard.description.rules)}, and member {member} brings {description.numel} and "
                f"{list(description.rules)}"
            )
        session = self._open_session(member, header, shard, member in description.workers)
        replies = [self._reply(session, header)]
        observers, self._early_observers = self._early_observers, []
        for observer, waiting in observers:
            replies += self._observe(observer, waiting)
        return replies

    def _make_shard(self, description: SpaceDescription) -> ParameterShard:
        if len(self.shards) >= MAX_SPACES:
            raise ProtocolError(f"{MAX_SPACES} spaces are open: close one first")
        index = self._index_of(description)
        shard = AggregatingShard(description, index) if description.parent else ParameterShard(description, index)
        for member in self._lost & set(description.workers):
            shard.leave(member)
        self.shards[description.space_id] = shard
        self.has_sub_masters |= bool(description.parent)
        return shard

    def _open_session(self, member: int, header: RequestHeader, shard: ParameterShard, worker: bool) -> ClientSession:
        session = self.sessions.get((header.space, member))
        if session is None:
            session = self.sessions[header.space, member] = ClientSession(member, shard, worker)
        if header.number == session.applied + 1:
            session.mark_done(header.number)
        return session

    def _observe(self, member: int, header: RequestHeader) -> list[OutgoingReply]:
        """Send a space's description to an observer, as soon as the workers have described the space."""
        shard = self.shards.get(header.space)
        if shard is None:
            key = (member, header.space)
            others = [(who, what) for who, what in self._early_observers if (who, what.space) != key]
            self._early_observers = [*others[-MAX_SPACES:], (member, header)]
            return []
        session = self._open_session(member, header, shard, worker=False)
        return [self._reply(session, header, bytes_tensor(shard.description.to_json()))]

    def lose(self, member: int, left: bool = False) -> list[OutgoingReply]:
        """Remove a member that is lost or has left: no read waits for its clock, even if it never joined."""
        self._lost.add(member)
        self._some_left = True
        self._early_observers = [(who, what) for who, what in self._early_observers if who != member]
        for session in [each for each in self.sessions.values() if each.member == member]:
            session.forget()
        for shard in self.shards.values():
            shard.leave(member, lost=not left)
        return self._continue([])

    def _leave(self, session: ClientSession, header: RequestHeader) -> OutgoingReply:
        session.mark_done(header.number)
        session.left = self._some_left = True
        if session.worker:
            session.shard.leave(session.member)
        return self._reply(session, header)

    def members_in(self, space_id: int) -> list[int]:
        """Workers and observers that have not left a space."""
        return sorted(
            member
            for (space, member), session in self.sessions.items()
            if space == space_id and not session.left and member not in self._lost
        )

    def slowest(self) -> tuple[int, int] | None:
        """The worker whose step the deferred reads wait for, and its clock; None if no read waits."""
        shards = {id(session.shard): session.shard for session in self.sessions.values() if session.deferred}
        clocks = [shard.clocks for shard in shards.values() if shard.clocks.live]
        training = [(each.of[worker], worker) for each in clocks for worker in each.of if each.trains(worker)]
        return min(training)[::-1] if training else None

    def _drop_left_spaces(self) -> None:
        """Drop the spaces that all their workers have left, and in which no client waits for a reply."""
        for space_id, shard in list(self.shards.items()):
            present = {
                member: session
                for (space, member), session in self.sessions.items()
                if space == space_id and member not in self._lost
            }
            if any(not session.left or session.deferred for session in present.values()):
                continue
            if set(shard.description.workers) - self._lost <= set(present):
                del self.shards[space_id]
                self._control.forget(space_id)
                self.sessions = {key: session for key, session in self.sessions.items() if key[0] != space_id}
        self._some_left = bool(self._lost) or any(session.left for session in self.sessions.values())


def refuse(member: int, header: RequestHeader, reason: str) -> OutgoingReply:
    """A reply that says why a request is refused."""
    text = bytes_tensor(reason.encode()[: protocol.MAX_INLINE_BYTES])
    reply = ReplyHeader(protocol.REFUSED, space=header.space, number=header.number, min_clock=-1, length=text.numel())
    return OutgoingReply(member, reply, text, header.repeats)
