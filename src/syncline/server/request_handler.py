"""What a server does with a request, whoever carries it: answer, wait, or refuse. No transport here, and no waiting.

request ─► known client? new number? ─► earlier ones in? ─► push ─► may it read? ─► answer
              │            └ repeated: the same answer   └ no: parked     └ no: parked, until a clock advances
              └ no: refused
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from syncline.errors import ProtocolError, SynclineError
from syncline.runtime import Lock
from syncline.server import protocol
from syncline.server.client_session import (
    ClientSession,
    DeferredRequest,
    OutgoingReply,
    answers_itself,
    check,
    encode_changes,
    find_keys,
    make_push,
)
from syncline.server.control_requests import ControlRequests
from syncline.server.protocol import INLINE, ReplyHeader, RequestHeader
from syncline.server.shard import ParameterShard
from syncline.server.space import SpaceDescription
from syncline.server.sub_master import AggregatingShard

__all__ = ["BufferPool", "OutgoingReply", "RequestHandler"]

logger = logging.getLogger("syncline")

MOST_SPACES = 64


class RequestHandler:
    """The spaces of one server. Its caller lets one task in at a time, and sends what it answers."""

    def __init__(
        self,
        number_of: Callable[[SpaceDescription], int],
        pool: BufferPool | None = None,
        workers: Collection[int] = (),
    ) -> None:
        self._pool = pool or BufferPool()
        self._number_of = number_of
        """This server's number among those of a space."""
        self.spaces: dict[int, ParameterShard] = {}
        self._sessions: dict[tuple[int, int], ClientSession] = {}
        self._boards = ControlRequests(workers)
        self._early: list[tuple[int, RequestHeader]] = []
        """Observers of spaces that nobody has described yet."""
        self._lost: set[int] = set()
        self._served = False
        self.gathers = False
        """Whether a space is a sub-master's, or was."""
        self._leaving = False
        """Whether somebody has left, and a space may be forgotten soon."""

    # Requests.

    def refuses(self, member: int, request: RequestHeader) -> str:
        """Why a request's body is not worth receiving; nothing where it is."""
        most = protocol.MOST_BYTES
        return f"a body of {request.length} B, and {most} B are the most" if request.length > most else ""

    def refuse(self, member: int, request: RequestHeader, reason: str) -> OutgoingReply:
        """Tell the sender what is wrong; nothing is changed."""
        text = torch.from_numpy(np.frombuffer(reason.encode()[: protocol.INLINE], np.uint8).copy())
        reply = ReplyHeader(
            protocol.REFUSED, space=request.space, number=request.number, min_clock=-1, length=text.numel()
        )
        return OutgoingReply(member, reply, text, request.repeats)

    def take(self, member: int, request: RequestHeader, body: Tensor) -> list[OutgoingReply]:
        """Deal with a request; the answers that can be given now, to this client and to others."""
        try:
            answers = self._take(member, request, body)
        except Exception as error:  # a user's handler may raise anything, and the server goes on
            answers = [self._refuse_for(member, request, error)]
        return self._going_on(answers)

    def reject(self, member: int, request: RequestHeader, reason: str) -> list[OutgoingReply]:
        """Refuse a request whose body was not received."""
        return self._going_on([self._refuse_for(member, request, ProtocolError(reason))])

    def _going_on(self, answers: list[OutgoingReply]) -> list[OutgoingReply]:
        answers += self._review()
        if self._leaving:
            self._forget_left()
        return answers

    def _refuse_for(self, member: int, request: RequestHeader, error: Exception) -> OutgoingReply:
        reason = str(error) if isinstance(error, SynclineError) else f"{type(error).__name__}: {error}"
        answer, session = self.refuse(member, request, reason), self._sessions.get((request.space, member))
        if session is not None and session.expects(request.number):
            if session.worker:
                self._end_refused_step(session, request)
                answer = replace(answer, reply=answer.reply._replace(min_clock=session.space.clocks.of[member]))
            session.done(request.number)
            if request.number not in session.answers:
                session.keep(answer)
        return answer

    @staticmethod
    def _end_refused_step(session: ClientSession, request: RequestHeader) -> None:
        """A step whose last part is refused is over all the same: other servers may have taken theirs."""
        space, member, clock = session.space, session.member, request.clock
        if not request.flags & protocol.TICK or space.clocks.of[member] != clock or space.is_far(clock):
            return
        try:
            if space.is_late(member, clock):
                space.skip(member)
            else:
                space.tick(member, clock)
        except Exception as error:  # of a user's rule, about what others have pushed: this one is refused already
            logger.warning("space %r: step %d is not applied: %s", space.description.name, clock, error)

    def _take(self, member: int, request: RequestHeader, body: Tensor) -> list[OutgoingReply]:
        if request.kind == protocol.HELLO:
            return self._hello(member, request, body)
        session = self._sessions.get((request.space, member))
        if session is None:
            raise ProtocolError(
                f"member {member} is a stranger in space {request.space:#010x}: it has not said hello, or the space "
                "is another model's"
            )
        if session.space.orphaned:
            return [self._tell_orphaned(session, request)]
        known = self._known(session, request)
        if known is not None:
            return known
        parked = DeferredRequest(request, body)
        if request.kind in protocol.ABOUT_VALUES:
            check(session, request, body, len(self._boards.handlers))
        if request.after > session.applied:
            session.parked[request.number] = parked
            return []
        return self._serve(session, parked)

    def _known(self, session: ClientSession, request: RequestHeader) -> list[OutgoingReply] | None:
        """The answer to a request that came before; None where it is new."""
        number = request.number
        if request.acked >= number or request.after >= number:
            raise ProtocolError(f"request {number} claims to follow {max(request.acked, request.after)}")
        for old in session.acknowledge(request.acked):
            self._pool.give(old.body)
        if number in session.answers:  # one that cannot be lost is sent once: nobody makes us send it for ever
            return [session.answers[number]] if request.repeats else []
        if session.knows(number):
            return []
        session.check_number(number)
        return None

    def _serve(self, session: ClientSession, parked: DeferredRequest) -> list[OutgoingReply]:
        request, space = parked.request, session.space
        if request.kind == protocol.BYE:
            return [self._leave(session, request)]
        if request.kind == protocol.CONTROL:
            told = self._boards.control(session, parked.body)
            session.done(request.number)
            return [self._answer(session, request, told)]
        if not find_keys(session, parked):
            reply = ReplyHeader(protocol.NEED_KEYS, space=request.space, number=request.number)
            return [OutgoingReply(session.member, reply, lossy=request.repeats)]
        if request.kind != protocol.PULL and not parked.pushed:
            self._push(session, parked)
        session.done(request.number)
        if request.kind == protocol.PUSH:
            if not space.description.keeps and parked.keys is None:
                self._pool.give(parked.body)
            return [self._answer(session, request, late=parked.late, staleness=parked.staleness)]
        if not space.may_read(request.wanted, session.member):
            session.parked[request.number] = parked
            return []
        return [self._read(session, parked)]

    def _push(self, session: ClientSession, parked: DeferredRequest) -> None:
        """Apply or keep an update."""
        request, space = parked.request, session.space
        ticks = bool(request.flags & protocol.TICK)
        of_step = ticks or (request.clock >= 0 and session.worker and not request.handler and not request.plane)
        parked.late = of_step and space.is_late(session.member, request.clock)
        if session.worker and not request.handler and not request.plane:
            space.begin_step(session.member)
        parked.staleness = space.staleness(session.member) if session.worker else -1
        if not parked.late:
            if of_step:
                space.expect(session.member, request.clock)
            if request.count:
                push = make_push(session, parked, self._boards.handlers)
                parked.answered = space.push(session.member, request.clock, push, answers_itself(session, request))
        parked.pushed = True
        if ticks and parked.late:
            space.skip(session.member)
        elif ticks:
            space.tick(session.member, request.clock, request.scale)

    def _read(self, session: ClientSession, parked: DeferredRequest) -> OutgoingReply:
        request, space = parked.request, session.space
        stale, exact = parked.staleness, True
        if request.wanted >= 0 and session.worker:
            own = space.clocks.of[session.member]
            stale = max(0, own - min(space.least, own))
        if request.flags & protocol.ANSWER_ENCODED:
            values, exact = encode_changes(session, request)
        elif parked.answered:
            values = parked.body
        elif parked.keys is not None:
            values = space.weights[parked.keys - space.first].view(torch.uint8)
        else:
            found = space.read(request.plane, request.first, request.count)
            reused = parked.body if parked.pushed and parked.body.numel() == 4 * request.count else None
            reused = None if space.description.keeps or request.flags & protocol.ENCODED else reused
            values = self._pool.take(4 * request.count) if reused is None else reused
            values.view(torch.float32).copy_(found)
        # Looks aside, as an evaluation's or a checkpoint's, wait for no clock: gradients do not come of them.
        if request.wanted >= 0 or (request.kind == protocol.PUSH_PULL and not request.handler):
            space.note_read(session.member)
        return self._answer(session, request, values, parked.late, stale, exact)

    def _answer(
        self,
        session: ClientSession,
        request: RequestHeader,
        body: Tensor | None = None,
        late: bool = False,
        staleness: int = -1,
        exact: bool = True,
    ) -> OutgoingReply:
        space = session.space
        reply = ReplyHeader(
            protocol.LATE if late else protocol.OK,
            (protocol.STOP if space.stopping else 0) | (0 if exact else protocol.CODED),
            space.clocks.live,
            0,
            request.space,
            request.number,
            staleness,
            space.clocks.of[session.member] if late and session.worker else space.least,
            space.clocks.steps,
            0 if body is None else body.numel(),
        )
        return session.keep(OutgoingReply(session.member, reply, body, request.repeats))

    def _review(self) -> list[OutgoingReply]:
        """Requests that waited, and may go on now."""
        answers: list[OutgoingReply] = []
        going = any(session.parked for session in self._sessions.values())
        while going:
            going = False
            for session in list(self._sessions.values()):
                for number, parked in list(session.parked.items()):
                    if not self._ready(session, parked):
                        continue
                    del session.parked[number]
                    going = True
                    try:
                        answers += self._serve(session, parked)
                    except Exception as error:
                        answers.append(self._refuse_for(session.member, parked.request, error))
        return answers

    @staticmethod
    def _ready(session: ClientSession, parked: DeferredRequest) -> bool:
        if parked.request.after > session.applied:
            return False
        pushes = parked.request.kind != protocol.PULL
        return (pushes and not parked.pushed) or session.space.may_read(parked.request.wanted, session.member)

    # Sub-masters.

    def answered(
        self, space: AggregatingShard, values: Sequence[tuple[int, Tensor]], stop: bool
    ) -> list[OutgoingReply]:
        """A sub-master's parent has answered: what its children wait for."""
        space.answered(values)
        space.stopping |= stop
        return self._going_on([])

    def orphan(self, space: ParameterShard, reason: str) -> list[OutgoingReply]:
        """A sub-master's parent is lost: its children are told now, and whenever they ask."""
        space.orphaned = reason
        answers: list[OutgoingReply] = []
        for session in [each for each in self._sessions.values() if each.space is space]:
            parked, session.parked = session.parked, {}
            answers += [self._tell_orphaned(session, each.request) for each in parked.values()]
        return self._going_on(answers)

    def _tell_orphaned(self, session: ClientSession, request: RequestHeader) -> OutgoingReply:
        """Leaving goes on, so that nobody waits for it."""
        if request.kind == protocol.BYE:
            return self._leave(session, request)
        refusal = self.refuse(session.member, request, session.space.orphaned)
        session.done(request.number)
        reply = refusal.reply._replace(status=protocol.ORPHANED)
        return OutgoingReply(refusal.member, reply, refusal.body, refusal.lossy)

    # Coming and going.

    def _hello(self, member: int, request: RequestHeader, body: Tensor) -> list[OutgoingReply]:
        if not body.numel():
            return self._observe(member, request)
        description = SpaceDescription.from_json(bytes(body.numpy()))
        if description.space_id != request.space:
            raise ProtocolError(f"a hello to space {request.space:#010x} describes {description.name!r}")
        space = self.spaces.get(request.space)
        if space is None:
            space = self._make_space(description)
        elif space.description != description:
            raise ProtocolError(
                f"space {description.name!r} is another model's: it has {space.description.numel} keys and rules "
                f"{list(space.description.rules)}, and member {member} brings {description.numel} and "
                f"{list(description.rules)}"
            )
        session = self._open(member, request, space, member in description.workers)
        answers = [self._answer(session, request)]
        early, self._early = self._early, []
        for observer, waiting in early:
            answers += self._observe(observer, waiting)
        return answers

    def _make_space(self, description: SpaceDescription) -> ParameterShard:
        if len(self.spaces) >= MOST_SPACES:
            raise ProtocolError(f"{MOST_SPACES} spaces are open: close one first")
        number = self._number_of(description)
        space = AggregatingShard(description, number) if description.upward else ParameterShard(description, number)
        for member in self._lost & set(description.workers):
            space.leave(member)
        self.spaces[description.space_id] = space
        self.gathers |= bool(description.upward)
        self._served = True
        return space

    def _open(self, member: int, request: RequestHeader, space: ParameterShard, worker: bool) -> ClientSession:
        found = self._sessions.get((request.space, member))
        if found is None:
            found = self._sessions[request.space, member] = ClientSession(member, space, worker)
        if request.number == found.applied + 1:
            found.done(request.number)
        return found

    def _observe(self, member: int, request: RequestHeader) -> list[OutgoingReply]:
        """Somebody wants to watch a space that others describe; it waits until they have."""
        space = self.spaces.get(request.space)
        if space is None:
            others = [(who, what) for who, what in self._early if (who, what.space) != (member, request.space)]
            self._early = [*others[-MOST_SPACES:], (member, request)]
            return []
        session = self._open(member, request, space, worker=False)
        told = torch.from_numpy(np.frombuffer(space.description.to_json(), np.uint8).copy())
        return [self._answer(session, request, told)]

    def lose(self, member: int, left: bool = False) -> list[OutgoingReply]:
        """A member is lost, or has left by itself: no read waits for its clocks any more, even if it never joined."""
        self._lost.add(member)
        self._leaving = True
        self._early = [(who, what) for who, what in self._early if who != member]
        for session in [each for each in self._sessions.values() if each.member == member]:
            session.forget()
        for space in self.spaces.values():
            space.leave(member, lost=not left)
        return self._going_on([])

    def _leave(self, session: ClientSession, request: RequestHeader) -> OutgoingReply:
        session.done(request.number)
        session.left = self._leaving = True
        if session.worker:
            session.space.leave(session.member)
        return self._answer(session, request)

    def through(self) -> bool:
        """Whether there were spaces, and everybody has left them."""
        return self._served and not self.spaces

    def present(self, space_id: int) -> list[int]:
        """Workers and observers that have not left a space."""
        return sorted(
            member
            for (of, member), each in self._sessions.items()
            if of == space_id and not each.left and member not in self._lost
        )

    def slowest(self) -> tuple[int, int] | None:
        """The worker whose step the deferred reads wait for, and its clock; None if no read waits."""
        waited = {id(session.space): session.space for session in self._sessions.values() if session.parked}
        clocks = [space.clocks for space in waited.values() if space.clocks.live]
        found = [(each.of[who], who) for each in clocks for who in each.of if each.trains(who)]
        return min(found)[::-1] if found else None

    def _forget_left(self) -> None:
        """Let go of the spaces that all their workers have left, and where nobody waits for an answer."""
        for space_id, space in list(self.spaces.items()):
            there = {
                member: each
                for (of, member), each in self._sessions.items()
                if of == space_id and member not in self._lost
            }
            if any(not each.left or each.parked for each in there.values()):
                continue
            if set(space.description.workers) - self._lost <= set(there):
                del self.spaces[space_id]
                self._boards.forget(space_id)
                self._sessions = {key: each for key, each in self._sessions.items() if key[0] != space_id}
        self._leaving = bool(self._lost) or any(each.left for each in self._sessions.values())


KEPT = 64 << 20
"""Bytes that are kept for later."""


class BufferPool:
    """Rows of bytes. With a lock, several tasks may use it.

    Memory is kept in powers of two: requests of ever other lengths would fill it with rows that nobody asks for again.

    >>> pool = BufferPool()
    >>> row = pool.take(900_000)
    >>> pool.give(row)
    >>> pool.take(1_000_000).data_ptr() == row.data_ptr()
    True
    """

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = nullcontext() if lock is None else lock
        self._free: dict[int, list[Tensor]] = {}
        self._kept = 0

    def take(self, nbytes: int) -> Tensor:
        """A row whose bytes are anything."""
        if nbytes <= INLINE:
            return torch.empty(nbytes, dtype=torch.uint8)
        size = _class_of(nbytes)
        with self._lock:
            rows = self._free.get(size)
            whole = rows.pop() if rows else None
            if whole is not None:
                self._kept -= size
        return (torch.empty(size, dtype=torch.uint8) if whole is None else whole)[:nbytes]

    def give(self, row: Tensor | None) -> None:
        """Take back a row that nobody uses any more; one that is no row of a pool is let go."""
        if row is None or row.numel() <= INLINE:
            return
        memory, size = row.untyped_storage(), _class_of(row.numel())
        if memory.nbytes() != size or row.storage_offset() or row.dtype != torch.uint8:
            return
        with self._lock:
            if self._kept + size <= KEPT:
                self._kept += size
                self._free.setdefault(size, []).append(torch.empty(0, dtype=torch.uint8).set_(memory))


def _class_of(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()
