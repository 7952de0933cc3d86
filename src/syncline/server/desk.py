"""What a server does with a request, whoever carries it: answer, wait, or refuse. No transport here, and no waiting.

request ─► known client? new number? ─► earlier ones in? ─► push ─► may it read? ─► answer
              │            └ repeated: the same answer   └ no: parked     └ no: parked, until a clock advances
              └ no: refused
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from syncline.errors import ProtocolError, SynclineError
from syncline.server import protocol, updates
from syncline.server.board import Boards
from syncline.server.description import Description
from syncline.server.gathering import Gathering
from syncline.server.pool import Pool
from syncline.server.protocol import Reply, Request
from syncline.server.sessions import Answer, Parked, Session
from syncline.server.space import Space

__all__ = ["Answer", "Desk"]

logger = logging.getLogger("syncline")

MOST_SPACES = 64


class Desk:
    """The spaces of one server. Its caller lets one task in at a time, and sends what it answers."""

    def __init__(
        self, number_of: Callable[[Description], int], pool: Pool | None = None, workers: Collection[int] = ()
    ) -> None:
        self._pool = pool or Pool()
        self._number_of = number_of
        """This server's number among those of a space."""
        self.spaces: dict[int, Space] = {}
        self._sessions: dict[tuple[int, int], Session] = {}
        self._boards = Boards(workers)
        self._early: list[tuple[int, Request]] = []
        """Observers of spaces that nobody has described yet."""
        self._lost: set[int] = set()
        self._served = False
        self.gathers = False
        """Whether a space is a sub-master's, or was."""
        self._leaving = False
        """Whether somebody has left, and a space may be forgotten soon."""

    # Requests.

    def refuses(self, member: int, request: Request) -> str:
        """Why a request's body is not worth receiving; nothing where it is."""
        most = protocol.MOST_BYTES
        return f"a body of {request.length} B, and {most} B are the most" if request.length > most else ""

    def refuse(self, member: int, request: Request, reason: str) -> Answer:
        """Tell the sender what is wrong; nothing is changed."""
        text = torch.from_numpy(np.frombuffer(reason.encode()[: protocol.INLINE], np.uint8).copy())
        reply = Reply(protocol.REFUSED, space=request.space, number=request.number, min_clock=-1, length=text.numel())
        return Answer(member, reply, text, request.repeats)

    def take(self, member: int, request: Request, body: Tensor) -> list[Answer]:
        """Deal with a request; the answers that can be given now, to this client and to others."""
        try:
            answers = self._take(member, request, body)
        except Exception as error:  # a user's handler may raise anything, and the server goes on
            answers = [self._refuse_for(member, request, error)]
        return self._going_on(answers)

    def reject(self, member: int, request: Request, reason: str) -> list[Answer]:
        """Refuse a request whose body was not received."""
        return self._going_on([self._refuse_for(member, request, ProtocolError(reason))])

    def _going_on(self, answers: list[Answer]) -> list[Answer]:
        answers += self._review()
        if self._leaving:
            self._forget_left()
        return answers

    def _refuse_for(self, member: int, request: Request, error: Exception) -> Answer:
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
    def _end_refused_step(session: Session, request: Request) -> None:
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

    def _take(self, member: int, request: Request, body: Tensor) -> list[Answer]:
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
        parked = Parked(request, body)
        if request.kind in protocol.ABOUT_VALUES:
            updates.check(session, request, body, len(self._boards.handlers))
        if request.after > session.applied:
            session.parked[request.number] = parked
            return []
        return self._serve(session, parked)

    def _known(self, session: Session, request: Request) -> list[Answer] | None:
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

    def _serve(self, session: Session, parked: Parked) -> list[Answer]:
        request, space = parked.request, session.space
        if request.kind == protocol.BYE:
            return [self._leave(session, request)]
        if request.kind == protocol.CONTROL:
            told = self._boards.control(session, parked.body)
            session.done(request.number)
            return [self._answer(session, request, told)]
        if not updates.find_keys(session, parked):
            reply = Reply(protocol.NEED_KEYS, space=request.space, number=request.number)
            return [Answer(session.member, reply, lossy=request.repeats)]
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

    def _push(self, session: Session, parked: Parked) -> None:
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
                push = updates.make_push(session, parked, self._boards.handlers)
                parked.answered = space.push(
                    session.member, request.clock, push, updates.answers_itself(session, request)
                )
        parked.pushed = True
        if ticks and parked.late:
            space.skip(session.member)
        elif ticks:
            space.tick(session.member, request.clock, request.scale)

    def _read(self, session: Session, parked: Parked) -> Answer:
        request, space = parked.request, session.space
        stale, exact = parked.staleness, True
        if request.wanted >= 0 and session.worker:
            own = space.clocks.of[session.member]
            stale = max(0, own - min(space.least, own))
        if request.flags & protocol.ANSWER_ENCODED:
            values, exact = updates.encode_changes(session, request)
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
        self, session: Session, request: Request, body: Tensor | None = None, late: bool = False, staleness: int = -1,
        exact: bool = True,
    ) -> Answer:  # fmt: skip
        space = session.space
        reply = Reply(
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
        return session.keep(Answer(session.member, reply, body, request.repeats))

    def _review(self) -> list[Answer]:
        """Requests that waited, and may go on now."""
        answers: list[Answer] = []
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
    def _ready(session: Session, parked: Parked) -> bool:
        if parked.request.after > session.applied:
            return False
        pushes = parked.request.kind != protocol.PULL
        return (pushes and not parked.pushed) or session.space.may_read(parked.request.wanted, session.member)

    # Sub-masters.

    def answered(self, space: Gathering, values: Sequence[tuple[int, Tensor]], stop: bool) -> list[Answer]:
        """A sub-master's parent has answered: what its children wait for."""
        space.answered(values)
        space.stopping |= stop
        return self._going_on([])

    def orphan(self, space: Space, reason: str) -> list[Answer]:
        """A sub-master's parent is lost: its children are told now, and whenever they ask."""
        space.orphaned = reason
        answers: list[Answer] = []
        for session in [each for each in self._sessions.values() if each.space is space]:
            parked, session.parked = session.parked, {}
            answers += [self._tell_orphaned(session, each.request) for each in parked.values()]
        return self._going_on(answers)

    def _tell_orphaned(self, session: Session, request: Request) -> Answer:
        """Leaving goes on, so that nobody waits for it."""
        if request.kind == protocol.BYE:
            return self._leave(session, request)
        refusal = self.refuse(session.member, request, session.space.orphaned)
        session.done(request.number)
        reply = refusal.reply._replace(status=protocol.ORPHANED)
        return Answer(refusal.member, reply, refusal.body, refusal.lossy)

    # Coming and going.

    def _hello(self, member: int, request: Request, body: Tensor) -> list[Answer]:
        if not body.numel():
            return self._observe(member, request)
        description = Description.from_json(bytes(body.numpy()))
        if description.mark != request.space:
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

    def _make_space(self, description: Description) -> Space:
        if len(self.spaces) >= MOST_SPACES:
            raise ProtocolError(f"{MOST_SPACES} spaces are open: close one first")
        number = self._number_of(description)
        space = Gathering(description, number) if description.upward else Space(description, number)
        for member in self._lost & set(description.workers):
            space.leave(member)
        self.spaces[description.mark] = space
        self.gathers |= bool(description.upward)
        self._served = True
        return space

    def _open(self, member: int, request: Request, space: Space, worker: bool) -> Session:
        found = self._sessions.get((request.space, member))
        if found is None:
            found = self._sessions[request.space, member] = Session(member, space, worker)
        if request.number == found.applied + 1:
            found.done(request.number)
        return found

    def _observe(self, member: int, request: Request) -> list[Answer]:
        """Somebody wants to watch a space that others describe; it waits until they have."""
        space = self.spaces.get(request.space)
        if space is None:
            others = [(who, what) for who, what in self._early if (who, what.space) != (member, request.space)]
            self._early = [*others[-MOST_SPACES:], (member, request)]
            return []
        session = self._open(member, request, space, worker=False)
        told = torch.from_numpy(np.frombuffer(space.description.to_json(), np.uint8).copy())
        return [self._answer(session, request, told)]

    def lose(self, member: int, left: bool = False) -> list[Answer]:
        """A member is lost, or has left by itself: no read waits for its clocks any more, even if it never joined."""
        self._lost.add(member)
        self._leaving = True
        self._early = [(who, what) for who, what in self._early if who != member]
        for session in [each for each in self._sessions.values() if each.member == member]:
            session.forget()
        for space in self.spaces.values():
            space.leave(member, lost=not left)
        return self._going_on([])

    def _leave(self, session: Session, request: Request) -> Answer:
        session.done(request.number)
        session.left = self._leaving = True
        if session.worker:
            session.space.leave(session.member)
        return self._answer(session, request)

    def through(self) -> bool:
        """Whether there were spaces, and everybody has left them."""
        return self._served and not self.spaces

    def present(self, mark: int) -> list[int]:
        """Workers and observers that have not left a space."""
        return sorted(
            member
            for (of, member), each in self._sessions.items()
            if of == mark and not each.left and member not in self._lost
        )

    def slowest(self) -> tuple[int, int] | None:
        """The worker whose step the deferred reads wait for, and its clock; None if no read waits."""
        waited = {id(session.space): session.space for session in self._sessions.values() if session.parked}
        clocks = [space.clocks for space in waited.values() if space.clocks.live]
        found = [(each.of[who], who) for each in clocks for who in each.of if each.trains(who)]
        return min(found)[::-1] if found else None

    def _forget_left(self) -> None:
        """Let go of the spaces that all their workers have left, and where nobody waits for an answer."""
        for mark, space in list(self.spaces.items()):
            there = {
                member: each for (of, member), each in self._sessions.items() if of == mark and member not in self._lost
            }
            if any(not each.left or each.parked for each in there.values()):
                continue
            if set(space.description.workers) - self._lost <= set(there):
                del self.spaces[mark]
                self._boards.forget(mark)
                self._sessions = {key: each for key, each in self._sessions.items() if key[0] != mark}
        self._leaving = bool(self._lost) or any(each.left for each in self._sessions.values())
