"""One process set on one rank: takes requests by name, tells the coordinator, runs what all ranks have asked for.

```text
threads of the user    submit ─┐                                       ┌─► handle is done
                               ▼                                       │
this rank              what is to be told ── one message ──►  coordinator (rank 0 of the set): a table
                                                                       │
executor task          runs, in the order of the answers  ◄── one ─────┘
```

A message goes when somebody waits, or a cycle after the first request of it. It is short: a bit for each operation
that was carried out like this before, and in full what is new. Departures of ranks are sent under a tag of their own,
because the executor may be in the middle of an operation.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from syncline.compat.horovod.errors import HorovodInternalError
from syncline.compat.horovod.execution import FusionGroup, execute, fuse_plans
from syncline.compat.horovod.messages import (
    CoordinatorAnswer,
    Departure,
    OperationFailure,
    OperationPlan,
    OperationRequest,
    as_tensor,
    pack_answer,
    pack_departure,
    pack_requests,
    read_answer,
    read_departure,
    read_requests,
)
from syncline.compat.horovod.negotiation import NegotiationTable, bits
from syncline.compat.horovod.pending import CollectiveCounter, PendingOperation
from syncline.compat.horovod.settings import HorovodSettings
from syncline.compat.horovod.timeline import TimelineObserver
from syncline.errors import IncompatibleError, PeerLostError, ProtocolError, SynclineError
from syncline.runtime import Queue, Task
from syncline.transports import Transport
from syncline.world import Group

__all__ = ["ProcessSetEngine"]

logger = logging.getLogger("syncline")

HEADER = struct.Struct("<II")
"""How many bytes follow in a message of their own, and what kind of message it is."""
NEWS, FAREWELL = 0, 1
SHUT_DOWN = "Horovod has been shut down"
MOST = 64 << 20
"""Bytes of requests in full that one message may have."""
TAG, DEPARTURE_TAG = 1, 2
LINE = 1 << 16
GROUPINGS = 256
"""Answers whose groups and buffers are kept for the next time."""
LEAVING = 5.0
"""Seconds that the tasks may take to end."""
AT_EASE = 16
EASE = 0.02
"""Seconds after which what was not sent is looked for, where nobody is woken for it."""
ROOM = 64 << 20
"""Bytes of buffers that are kept with the groupings."""


class ProcessSetEngine:
    """Negotiates and carries out the operations of one process set."""

    def __init__(
        self,
        team: Group,
        control: Transport | None,
        settings: HorovodSettings,
        timeline: Callable[[], TimelineObserver | None],
    ) -> None:
        self.team = team
        self.channels: list[CollectiveCounter] = []
        """Of optimizers, in the order in which all ranks have made them."""
        self._control = control
        self._settings = settings
        self._timeline = timeline
        runtime = self._runtime = team.world.runtime
        self._steps = CollectiveCounter(runtime, self._abort)
        self._broken = False
        """Whether an operation failed on this rank."""
        self._lock = runtime.lock()
        self._sending = runtime.lock()
        self._tabling = runtime.lock()
        self._telling = runtime.lock()
        self._dirty = runtime.event()
        self._mine: dict[str, PendingOperation] = {}
        self._known: dict[str, tuple[int, OperationRequest]] = {}
        self._plans: dict[int, OperationPlan] = {}
        self._mask = 0
        self._requests: list[OperationRequest] = []
        self._refused: dict[str, str] = {}
        """What has failed before this rank asked for it."""
        self._groupings: dict[int, list[FusionGroup]] = {}
        self._held_bytes = 0
        self._over = ""
        self._left = False
        self._deserted = False
        """Whether the coordinator has left."""
        self._parted: set[int] = set()
        """To whom this rank has said farewell."""
        self._reason = ""
        """Why this rank has stopped; empty after a plain shutdown."""
        self._unwatched = 0
        """How often in a row those who wait have sent everything: then nobody need be woken at every request."""
        self._counts: dict[str, int] = {}
        self._idle = True
        self._rank = team.rank  # a closed world does not answer any more
        self._mask_bytes = (settings.cache_capacity + 7) // 8
        self._table = NegotiationTable(team.size, settings.cache_capacity, team.ranks) if team.rank == 0 else None
        self._answers: Queue[CoordinatorAnswer | None] = runtime.queue(LINE)
        self._tasks: list[Task] = []
        self._listeners: list[Task] = []
        if control is not None:
            executor = runtime.spawn(self._serve, name="hvd-executor")
            hearers = [
                runtime.spawn(self._hear, source, name=f"hvd-hears-{source}")
                for source in (range(1, team.size) if team.rank == 0 else ())
            ]
            if not hearers:
                hearers = [executor, runtime.spawn(self._receive_departures, name="hvd-alarm")]
            self._tasks = [executor, runtime.spawn(self._tend, name="hvd-cycle"), *hearers]
            self._listeners = hearers

    @property
    def patience(self) -> float:
        """Seconds after which an operation that not all have asked for is given up."""
        return self._settings.stall_shutdown or self.team.world.transport.timeout

    # What the user's threads call.

    def unnamed(self, kind: str) -> str:
        """The name of an operation that was given none: they are matched in the order in which they are asked for."""
        with self._lock:
            number = self._counts.get(kind, 0)
            self._counts[kind] = number + 1
        return f"{kind}.noname.{number}"

    def known(self, name: str) -> OperationRequest | None:
        """How this rank asked for an operation the last time, where it has a number."""
        found = self._known.get(name)
        return None if found is None else found[1]

    def submit(self, pending: PendingOperation) -> None:
        """Ask for an operation; its end is told by `pending`."""
        request = pending.request
        name = request.name
        if self._timeline() is not None:
            pending.asked_at = self._runtime.now()
        with self._lock:
            if self._over:
                raise HorovodInternalError(self._over)
            if name in self._refused:
                raise HorovodInternalError(f"{request.kind} '{request.label}' has failed: {self._refused.pop(name)}")
            if name in self._mine:
                raise IncompatibleError(
                    f"Duplicate tensor name {request.label}: requested to {request.kind} a tensor with the same name "
                    "as another tensor that is currently being processed (it is in flight). If you want to request "
                    "another tensor, use a different tensor name, or wait for the first with synchronize()"
                )
            self._mine[name] = pending
            known = self._known.get(name)
            if known is not None and (known[1] is request or known[1] == request):
                self._mask |= 1 << known[0]
            else:
                self._requests.append(request)
        if self._control is None:
            self._alone()
        elif self._unwatched < AT_EASE and not self._dirty.is_set():
            self._dirty.set()

    def refuse(self, request: OperationRequest) -> None:
        """Tell the other ranks that this rank has refused a call, so that they do not wait for it."""
        if self._control is None:
            return
        with self._lock:
            if self._over:
                return
            self._requests.append(request)
        self.flush(waited=False)

    def wait(self, pending: PendingOperation) -> Any:
        """What came of an operation; whatever this rank has not told yet is told first."""
        if not pending.done():
            self.flush()
        return pending.wait(2 * self.patience + LEAVING)

    def flush(self, waited: bool = True) -> None:
        """Tell the coordinator what was asked for since the last time; `waited`: because somebody waits for it."""
        with self._sending:
            with self._lock:
                mask, requests = self._mask, self._requests
                self._mask, self._requests = 0, []
            if not mask and not requests:
                return
            self._unwatched = self._unwatched + 1 if waited else 0
            try:
                if self._table is not None:
                    self._enter(0, mask, requests)
                else:
                    self._tell((0,), NEWS, mask, pack_requests(requests))
            except SynclineError as error:
                self._break(f"the coordinator cannot be told: {error}", error)

    def leave(self, reason: str = "") -> None:
        """Stop taking part and tell the other ranks; `reason` is empty for a plain shutdown. Later calls do nothing."""
        with self._lock:
            self._over = self._over or SHUT_DOWN
            self._reason = self._reason or reason
        if self._control is not None:
            for rank in self._others():
                self._send_departure(rank)

    def close(self) -> None:
        """Leave: what was asked for and not answered fails. Others may go on with what does not need this rank."""
        self.leave()
        with self._lock:
            first, self._left = not self._left, True
        if self._control is None or not first:
            return
        for task in self._listeners:  # until the others have answered: then nobody waits on this channel any more
            task.join(LEAVING)
        self._dirty.set()
        self._answers.put(None)
        self._control.close()
        self._fail_all(HorovodInternalError(SHUT_DOWN))
        for task in self._tasks:
            task.join(LEAVING)

    # The coordinator.

    def _enter(self, rank: int, mask: int, requests: Sequence[OperationRequest]) -> None:
        """Put requests on the table, and tell all what has become possible."""
        table = self._table
        assert table is not None, "this is the coordinator"
        with self._tabling:
            table.ask(rank, mask, requests, self._runtime.now())
            self._announce(table.settle())
            if table.waiting and self._idle:
                self._idle = False
                self._dirty.set()

    def _announce(self, answer: CoordinatorAnswer) -> None:
        if not answer:
            return
        self._tell(self._others(), NEWS, answer.mask, pack_answer(answer))
        self._answers.put(answer)

    def _hear(self, source: int) -> None:
        """Take the requests of one rank until it leaves."""
        table = self._table
        assert table is not None, "this is the coordinator"
        try:
            while True:
                kind, mask, body = self._take(source)
                if kind == FAREWELL:
                    departure = self._departure(body, source)
                    self._send_departure(source, answering=True)
                    break
                if not table.known(mask):
                    raise ProtocolError(f"rank {source} asks for operations without a number", peer=source)
                self._enter(source, mask, read_requests(body, source))
        except SynclineError as error:
            if self._over:
                return
            departure = self._lost(source, error)
        with self._tabling:
            table.leave(source, departure.why)
            self._announce(table.settle())
            self._tell(self._others(), NEWS, 0, pack_departure(departure), DEPARTURE_TAG)
        self._departed(departure)

    def _tend(self) -> None:
        """Send what nobody has sent for a cycle; on the coordinator, look after what stalls."""
        patience: float | None = None
        warned: set[str] = set()
        while not self._over:
            before = self._unwatched
            if not self._dirty.wait(EASE if before >= AT_EASE else patience):
                if before >= AT_EASE and (before == self._unwatched or self._mask or self._requests):
                    self._unwatched = 0  # from now on each request wakes this task again
                    self.flush(waited=False)
                if self._table is not None:
                    patience = self._look_for_stalls(warned)
                continue
            self._dirty.clear()
            if self._over:
                return
            if self._mask or self._requests:
                self._runtime.sleep(self._settings.cycle_seconds)
                timeline = self._timeline()
                if timeline is not None:
                    timeline.cycle(self._runtime.now())
                self.flush(waited=False)
            if self._table is not None and patience is None and not self._idle:
                patience = self._between_looks()

    def _look_for_stalls(self, warned: set[str]) -> float | None:
        """Warn of what waits long, give up what waits too long; how long to sleep until the next look."""
        table, settings = self._table, self._settings
        assert table is not None, "this is the coordinator"
        limit = settings.stall_warning if settings.stall_check else math.inf
        with self._tabling:
            if not table.waiting:
                self._idle = True
                warned.clear()
                return None
            now = self._runtime.now()
            stalled = table.stalled(now, min(limit, self.patience))
            late = [found for found in stalled if found.seconds >= self.patience]
            self._announce(CoordinatorAnswer(failures=[table.give_up(found) for found in late]))
        news = [found for found in stalled if found.seconds >= limit and found.name not in warned]
        if news:
            warned.update(found.name for found in news)
            called = self.team.ranks
            told = "; ".join(f"{each.name} ({_ranks([called[r] for r in each.missing])} missing)" for each in news)
            logger.warning(
                "stalled for %.3g s or more: one or more tensors were submitted by some ranks only: %s",
                min(found.seconds for found in news),
                told,
            )
        return self._between_looks()

    def _between_looks(self) -> float:
        warning = self._settings.stall_warning if self._settings.stall_check else math.inf
        return max(0.01, min(warning, self.patience) / 4)

    # What all ranks run.

    def _serve(self) -> None:
        """Carry out the answers as they come."""
        try:
            with torch.no_grad():  # for this task alone
                while (answer := self._next_answer()) is not None:
                    self._carry_out(answer)
        except SynclineError as error:
            if not self._over:
                self._stop_after_error(str(error), error)
        except Exception as error:
            self._stop_after_error(f"{type(error).__name__}: {error}", error)

    def _stop_after_error(self, why: str, cause: Exception) -> None:
        """Stop this rank's engine after an operation failed, and end the waits of the ranks that take part in it."""
        self._broken = True
        self._break(why, cause)
        self.leave(why)
        self._abort()

    def _receive_departures(self) -> None:
        """Receive the departures of ranks from the coordinator, until this rank or the coordinator leaves."""
        try:
            while True:
                _, _, body = self._take(0, DEPARTURE_TAG)
                if not body:
                    return
                departure = read_departure(body, 0)
                self._departed(departure)
                if departure.rank == self.team.ranks[0]:
                    return
        except SynclineError as error:
            if not self._over:
                self._departed(self._lost(0, error))

    def _departed(self, departure: Departure) -> None:
        """Another rank has left: end the waits for it."""
        completed = dict(departure.rounds)
        for number, channel in enumerate(self.channels):
            channel.departed(departure.why, completed.get(number, 0) if departure.known else None)
        if not departure.known or departure.carried >= 0:
            self._steps.departed(departure.why, departure.carried if departure.known else None)

    def _lost(self, source: int, error: SynclineError) -> Departure:
        rank = self.team.ranks[source]
        found = error.peer if isinstance(error, PeerLostError) and error.peer is not None else rank
        return Departure(rank, f"rank {found} is lost: {error}")

    def _abort(self) -> None:
        """Break the waits of an operation. The process set's channel cannot be used afterwards."""
        with suppress(SynclineError):  # closed meanwhile
            self.team.transport.abort()

    def _next_answer(self) -> CoordinatorAnswer | None:
        if self._table is not None:
            return self._answers.get()
        kind, mask, body = self._take(0)
        if kind == FAREWELL:
            departure, self._deserted = self._departure(body, 0), True
            self._send_departure(0, answering=True)
            self._break(departure.why, None)
            return None
        return read_answer(mask, body)

    def _alone(self) -> None:
        """A world of one has nobody to ask."""
        table = self._table
        assert table is not None, "the only rank is the coordinator"
        with self._lock:
            mask, requests = self._mask, self._requests
            self._mask, self._requests = 0, []
        with self._tabling:
            table.ask(0, mask, requests, 0.0)
            answer = table.settle()
        with torch.no_grad(), suppress(Exception):  # the ranks that wait for it get the error
            self._carry_out(answer)

    def _carry_out(self, answer: CoordinatorAnswer) -> None:
        for failure in answer.failures:
            self._fail(failure)
        groups = self._groups_of(answer)
        for group in groups:
            asked = self._claim(group)
            start = self._runtime.now()
            try:
                with self._steps.waiting():
                    results = execute(self.team, group, asked, self._settings.hierarchical_allreduce)
            except Exception as error:
                problem = HorovodInternalError(f"{group.plans[0].request.name}: {self._steps.why or error}")
                problem.__cause__ = error
                for pending in asked:
                    if pending is not None:
                        pending.settle(error=problem)
                raise
            self._note(group, asked, start)
            if group.plans[0].request.kind == "join":  # until now some ranks have asked for more than others
                with self._lock:
                    self._counts.clear()
            for pending, result in zip(asked, results, strict=True):
                if pending is not None:
                    pending.settle(result)

    def _groups_of(self, answer: CoordinatorAnswer) -> list[FusionGroup]:
        """The groups in which an answer is carried out; those of known operations are kept, with their buffers."""
        fresh = [plan for plan in answer.plans if plan.number >= 0]
        if fresh:
            self._groupings.clear()
            self._held_bytes = 0
            self._plans.update((plan.number, plan) for plan in fresh)
        known = self._groupings.get(answer.mask) if answer.mask else []
        most = self._settings.fusion_bytes
        if known is None:
            known = fuse_plans([self._plans[number] for number in bits(answer.mask)], most)
            size = sum(group.nbytes for group in known)
            if len(self._groupings) < GROUPINGS and self._held_bytes + size <= ROOM:
                self._groupings[answer.mask] = known
                self._held_bytes += size
        return [*known, *fuse_plans(answer.plans, most)]

    def _claim(self, group: FusionGroup) -> list[PendingOperation | None]:
        """This rank's part of a group; from now on the names may be used again."""
        asked = []
        with self._lock:
            for plan in group.plans:
                name = plan.request.name
                pending = self._mine.pop(name, None)
                asked.append(pending)
                if plan.number < 0 or pending is None:
                    continue
                known = self._known.get(name)
                if known is None or known[1] is not pending.request:
                    self._known[name] = (plan.number, pending.request)
        return asked

    def _note(self, group: FusionGroup, asked: Sequence[PendingOperation | None], start: float) -> None:
        timeline = self._timeline()
        if timeline is None:
            return
        stop = self._runtime.now()
        for plan, pending in zip(group.plans, asked, strict=True):
            request = plan.request
            if pending is not None:
                timeline.negotiating(request.name, request.kind, pending.asked_at, start)
            timeline.running(request.name, request.kind, self.team.transport.name, start, stop)

    def _fail(self, failure: OperationFailure) -> None:
        if failure.only and self.team.rank not in failure.only:
            return
        with self._lock:
            pending = self._mine.pop(failure.name, None)
            if pending is None:
                if self.team.rank in failure.late:
                    self._refused[failure.name] = failure.why
                return
        request = pending.request
        pending.settle(error=HorovodInternalError(f"{request.kind} '{request.label}': {failure.why}"))

    def _break(self, why: str, cause: BaseException | None) -> None:
        """Nothing can be carried out any more."""
        with self._lock:
            self._over = self._over or why
        problem = HorovodInternalError(why)
        problem.__cause__ = cause
        self._fail_all(problem)
        self._dirty.set()

    def _fail_all(self, problem: HorovodInternalError) -> None:
        with self._lock:
            left, self._mine = list(self._mine.values()), {}
        for pending in left:
            pending.settle(error=problem)

    def _others(self) -> list[int]:
        """Whom this rank tells things: the coordinator, or all who have not left it."""
        if self._table is None:
            return [] if self._deserted else [0]
        return [rank for rank in range(1, self.team.size) if rank not in self._table.gone]

    def _send_departure(self, rank: int, answering: bool = False) -> None:
        """Send the goodbye message, once. The other rank answers it with one of its own."""
        mine = self.team.ranks[self._rank]
        with self._lock:
            said = rank in self._parted
            self._parted.add(rank)
        if said:
            return
        why = f"{SHUT_DOWN} on rank {mine}" + (f": {self._reason}" if self._reason else "")
        carried = self._steps.completed if self._broken else -1
        rounds = tuple((number, channel.completed) for number, channel in enumerate(self.channels))
        body = b"" if answering else pack_departure(Departure(mine, why, True, carried, rounds))
        with self._sending:
            self._tell([rank], FAREWELL, 0, body)
            if self._table is not None:
                self._tell([rank], FAREWELL, 0, body, DEPARTURE_TAG)

    def _departure(self, body: bytes, source: int) -> Departure:
        if body:
            return read_departure(body, source)
        return Departure(self.team.ranks[source], f"{SHUT_DOWN} on rank {self.team.ranks[source]}", known=True)

    # Messages.

    def _tell(self, to: Sequence[int], kind: int, mask: int, body: bytes | bytearray, tag: int = TAG) -> None:
        """Send one message to each; who has gone himself need not hear a farewell."""
        assert self._control is not None, "there is somebody to tell"
        leaving = kind == FAREWELL
        parts = [as_tensor(HEADER.pack(len(body), kind) + mask.to_bytes(self._mask_bytes, "little"))]
        if body:
            parts.append(as_tensor(body))
        for rank in to:
            try:
                with self._telling:  # another task's message must not come between the parts
                    for part in parts:
                        self._control.send(part, rank, tag, exact=True, lossy=leaving)
            except SynclineError as error:
                if self._table is None and not leaving:
                    raise
                logger.debug("rank %d cannot be told: %s", rank, error)

    def _take(self, source: int, tag: int = TAG) -> tuple[int, int, bytes]:
        """The next message of a rank."""
        assert self._control is not None, "there is somebody to hear"
        head = torch.empty(HEADER.size + self._mask_bytes, dtype=torch.uint8)
        self._control.recv(head, source, tag, exact=True).wait(math.inf)
        raw = head.numpy().tobytes()
        length, kind = HEADER.unpack_from(raw)
        if length > MOST or kind > FAREWELL:
            raise ProtocolError(f"rank {source} announces {length} bytes of kind {kind}", peer=source)
        mask = int.from_bytes(raw[HEADER.size :], "little")
        if not length:
            return kind, mask, b""
        body = torch.empty(length, dtype=torch.uint8)
        self._control.recv(body, source, tag, exact=True).wait()
        return kind, mask, body.numpy().tobytes()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
