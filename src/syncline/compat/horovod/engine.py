"""The engine of one process set on one rank: sends requests to the coordinator, executes what all have requested.

```text
threads of the user    submit ─┐                                    ┌─► handle is done
                               ▼                                    │
this rank              unsent requests ── one message ──►  coordinator (rank 0 of the set): a table
                                                                    │
executor task          runs in the order of the answers  ◄── one ───┘
```

A message is sent when a thread waits, or one cycle after its first request. It has one bit for each operation that was
executed with the same request before, and the full request for others. Departures of ranks have a separate tag, because
the executor may be inside an operation.
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
    MessageReader,
    OperationFailure,
    OperationPlan,
    OperationRequest,
    as_tensor,
    name_ranks,
    pack,
    pack_answer,
    read_answer,
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

logger = logging.getLogger("syncline")

HEADER = struct.Struct("<II")
"""Bytes of the second part of a message, and its kind."""
REQUESTS, GOODBYE = 0, 1
SHUT_DOWN = "Horovod has been shut down"
MAX_MESSAGE_BYTES = 64 << 20
TAG, DEPARTURE_TAG = 1, 2
MAX_QUEUED_ANSWERS = 1 << 16
MAX_CACHED_GROUPINGS = 256
"""Answers whose fusion groups and buffers are cached."""
MAX_CACHED_BYTES = 64 << 20
"""Bytes of these buffers."""
CLOSE_TIMEOUT_S = 5.0
"""Timeout of the end of each task."""
POLLING_AFTER_FLUSHES = 16
"""After so many flushes in a row by waiting threads, a request no longer wakes the cycle task."""
POLL_EVERY_S = 0.02
"""Seconds between two checks of the cycle task for unsent requests, if requests do not wake it."""


class ProcessSetEngine:
    """Negotiates and executes the operations of one process set."""

    def __init__(
        self,
        team: Group,
        control: Transport | None,
        settings: HorovodSettings,
        timeline: Callable[[], TimelineObserver | None],
    ) -> None:
        self.team = team
        self.channels: list[CollectiveCounter] = []
        """The channels of optimizers, in the order in which all ranks have created them."""
        self._control = control
        self._settings = settings
        self._timeline = timeline
        runtime = self._runtime = team.world.runtime
        self._steps = CollectiveCounter(runtime, self._abort)
        self._broken = False
        """Whether an operation failed on this rank."""
        self._lock = runtime.lock()
        self._flush_lock = runtime.lock()
        self._table_lock = runtime.lock()
        self._message_lock = runtime.lock()
        self._dirty = runtime.event()
        self._pending: dict[str, PendingOperation] = {}
        self._known: dict[str, tuple[int, OperationRequest]] = {}
        self._plans: dict[int, OperationPlan] = {}
        self._mask = 0
        self._requests: list[OperationRequest] = []
        self._refused: dict[str, str] = {}
        """Operations that have failed before this rank requested them."""
        self._groupings: dict[int, list[FusionGroup]] = {}
        self._cached_bytes = 0
        self._over = ""
        self._left = False
        self._coordinator_left = False
        """Whether the coordinator has left."""
        self._goodbyes_sent: set[int] = set()
        """The ranks to which this rank has sent its goodbye message."""
        self._reason = ""
        """The error that has stopped this rank; empty after a plain shutdown."""
        self._flushes_by_waiters = 0
        """Number of flushes in a row by waiting threads; see `POLLING_AFTER_FLUSHES`."""
        self._counts: dict[str, int] = {}
        self._idle = True
        self._rank = team.rank  # a closed world has no rank
        self._mask_bytes = (settings.cache_capacity + 7) // 8
        self._table = NegotiationTable(team.size, settings.cache_capacity, team.ranks) if team.rank == 0 else None
        self._answers: Queue[CoordinatorAnswer | None] = runtime.queue(MAX_QUEUED_ANSWERS)
        self._tasks: list[Task] = []
        self._listeners: list[Task] = []
        if control is not None:
            executor = runtime.spawn(self._execute_answers, name="hvd-executor")
            listeners = [
                runtime.spawn(self._receive_requests, source, name=f"hvd-requests-{source}")
                for source in (range(1, team.size) if team.rank == 0 else ())
            ]
            if not listeners:
                listeners = [executor, runtime.spawn(self._receive_departures, name="hvd-departures")]
            self._tasks = [executor, runtime.spawn(self._run_cycles, name="hvd-cycle"), *listeners]
            self._listeners = listeners

    @property
    def stall_timeout_s(self) -> float:
        """Seconds after which an operation fails that not all ranks have requested."""
        return self._settings.stall_shutdown or self.team.world.transport.timeout

    # Called by the threads of the user.

    def unnamed(self, kind: str) -> str:
        """The name of an operation without a name. Such operations are matched in the order of their requests."""
        with self._lock:
            number = self._counts.get(kind, 0)
            self._counts[kind] = number + 1
        return f"{kind}.noname.{number}"

    def known(self, name: str) -> OperationRequest | None:
        """The last request of this rank for a numbered operation; None if it has no number."""
        found = self._known.get(name)
        return None if found is None else found[1]

    def submit(self, pending: PendingOperation) -> None:
        """Request an operation. `pending` receives the result."""
        request = pending.request
        name = request.name
        if self._timeline() is not None:
            pending.requested_at = self._runtime.now()
        with self._lock:
            if self._over:
                raise HorovodInternalError(self._over)
            if name in self._refused:
                raise HorovodInternalError(f"{request.kind} '{request.label}' has failed: {self._refused.pop(name)}")
            if name in self._pending:
                raise IncompatibleError(
                    f"Duplicate tensor name {request.label}: requested to {request.kind} a tensor with the same name "
                    "as another tensor that is currently being processed (it is in flight). If you want to request "
                    "another tensor, use a different tensor name, or wait for the first with synchronize()"
                )
            self._pending[name] = pending
            known = self._known.get(name)
            if known is not None and (known[1] is request or known[1] == request):
                self._mask |= 1 << known[0]
            else:
                self._requests.append(request)
        if self._control is None:
            self._execute_alone()
        elif self._flushes_by_waiters < POLLING_AFTER_FLUSHES and not self._dirty.is_set():
            self._dirty.set()

    def refuse(self, request: OperationRequest) -> None:
        """Report to the other ranks that this rank has refused a call, so that they do not wait for it."""
        if self._control is None:
            return
        with self._lock:
            if self._over:
                return
            self._requests.append(request)
        self.flush(waited=False)

    def wait(self, pending: PendingOperation) -> Any:
        """Wait for the result of an operation. Unsent requests are sent first."""
        if not pending.done():
            self.flush()
        return pending.wait(2 * self.stall_timeout_s + CLOSE_TIMEOUT_S)

    def flush(self, waited: bool = True) -> None:
        """Send the requests since the last flush to the coordinator. `waited`: a thread waits for one of them."""
        with self._flush_lock:
            with self._lock:
                mask, requests = self._mask, self._requests
                self._mask, self._requests = 0, []
            if not mask and not requests:
                return
            self._flushes_by_waiters = self._flushes_by_waiters + 1 if waited else 0
            try:
                if self._table is not None:
                    self._add_requests(0, mask, requests)
                else:
                    self._send((0,), REQUESTS, mask, pack(requests))
            except SynclineError as error:
                self._break(f"the coordinator cannot be reached: {error}", error)

    def leave(self, reason: str = "") -> None:
        """Stop, and report that to the other ranks. `reason` is empty for a plain shutdown. Later calls do nothing."""
        with self._lock:
            self._over = self._over or SHUT_DOWN
            self._reason = self._reason or reason
        if self._control is not None:
            for rank in self._others():
                self._send_departure(rank)

    def close(self) -> None:
        """Leave: pending operations fail. Other ranks may continue with operations that do not need this rank."""
        self.leave()
        with self._lock:
            first, self._left = not self._left, True
        if self._control is None or not first:
            return
        for task in self._listeners:  # until the other ranks have answered: then no rank waits on this channel
            task.join(CLOSE_TIMEOUT_S)
        self._dirty.set()
        self._answers.put(None)
        self._control.close()
        self._fail_all(HorovodInternalError(SHUT_DOWN))
        for task in self._tasks:
            task.join(CLOSE_TIMEOUT_S)

    # On the coordinator.

    def _add_requests(self, rank: int, mask: int, requests: Sequence[OperationRequest]) -> None:
        """Add requests to the table, and announce the operations that can be executed."""
        table = self._table
        assert table is not None, "this is the coordinator"
        with self._table_lock:
            table.request(rank, mask, requests, self._runtime.now())
            self._announce(table.settle())
            if table.waiting and self._idle:
                self._idle = False
                self._dirty.set()

    def _announce(self, answer: CoordinatorAnswer) -> None:
        if not answer:
            return
        self._send(self._others(), REQUESTS, answer.mask, pack_answer(answer))
        self._answers.put(answer)

    def _receive_requests(self, source: int) -> None:
        """Receive the requests of one rank until it leaves."""
        table = self._table
        assert table is not None, "this is the coordinator"
        try:
            while True:
                kind, mask, body = self._receive(source)
                if kind == GOODBYE:
                    departure = self._departure(body, source)
                    self._send_departure(source, answering=True)
                    break
                if not table.known(mask):
                    raise ProtocolError(f"rank {source} requests operations by unknown numbers", peer=source)
                self._add_requests(source, mask, read_requests(body, source))
        except SynclineError as error:
            if self._over:
                return
            departure = self._lost(source, error)
        with self._table_lock:
            table.leave(source, departure.why)
            self._announce(table.settle())
            self._send(self._others(), REQUESTS, 0, pack([departure]), DEPARTURE_TAG)
        self._departed(departure)

    def _run_cycles(self) -> None:
        """Send requests that are one cycle old; on the coordinator, check for stalled operations."""
        timeout: float | None = None
        warned: set[str] = set()
        while not self._over:
            before = self._flushes_by_waiters
            if not self._dirty.wait(POLL_EVERY_S if before >= POLLING_AFTER_FLUSHES else timeout):
                if before >= POLLING_AFTER_FLUSHES and (
                    before == self._flushes_by_waiters or self._mask or self._requests
                ):
                    self._flushes_by_waiters = 0  # from now on each request wakes this task again
                    self.flush(waited=False)
                if self._table is not None:
                    timeout = self._check_stalls(warned)
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
            if self._table is not None and timeout is None and not self._idle:
                timeout = self._stall_check_interval()

    def _check_stalls(self, warned: set[str]) -> float | None:
        """Warn about stalled operations, fail those that are too old; return the seconds until the next check."""
        table, settings = self._table, self._settings
        assert table is not None, "this is the coordinator"
        limit = settings.stall_warning if settings.stall_check else math.inf
        with self._table_lock:
            if not table.waiting:
                self._idle = True
                warned.clear()
                return None
            now = self._runtime.now()
            stalled = table.stalled(now, min(limit, self.stall_timeout_s))
            late = [found for found in stalled if found.seconds >= self.stall_timeout_s]
            self._announce(CoordinatorAnswer(failures=[table.give_up(found) for found in late]))
        new = [found for found in stalled if found.seconds >= limit and found.name not in warned]
        if new:
            warned.update(found.name for found in new)
            ranks = self.team.ranks
            names = "; ".join(f"{each.name} ({name_ranks([ranks[r] for r in each.missing])} missing)" for each in new)
            logger.warning(
                "stalled for %.3g s or more: one or more tensors were submitted by some ranks only: %s",
                min(found.seconds for found in new),
                names,
            )
        return self._stall_check_interval()

    def _stall_check_interval(self) -> float:
        warning = self._settings.stall_warning if self._settings.stall_check else math.inf
        return max(0.01, min(warning, self.stall_timeout_s) / 4)

    # On all ranks.

    def _execute_answers(self) -> None:
        """Execute the answers in their order."""
        try:
            with torch.no_grad():  # for this task alone
                while (answer := self._next_answer()) is not None:
                    self._execute(answer)
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
                _, _, body = self._receive(0, DEPARTURE_TAG)
                if not body:
                    return
                departure = Departure.read(MessageReader(body, 0))
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
        if not departure.known or departure.executed >= 0:
            self._steps.departed(departure.why, departure.executed if departure.known else None)

    def _lost(self, source: int, error: SynclineError) -> Departure:
        rank = self.team.ranks[source]
        found = error.peer if isinstance(error, PeerLostError) and error.peer is not None else rank
        return Departure(rank, f"rank {found} is lost: {error}")

    def _abort(self) -> None:
        """End the waits of the current operation. The channel of the process set cannot be used afterwards."""
        with suppress(SynclineError):  # closed meanwhile
            self.team.transport.abort()

    def _next_answer(self) -> CoordinatorAnswer | None:
        if self._table is not None:
            return self._answers.get()
        kind, mask, body = self._receive(0)
        if kind == GOODBYE:
            departure, self._coordinator_left = self._departure(body, 0), True
            self._send_departure(0, answering=True)
            self._break(departure.why, None)
            return None
        return read_answer(mask, body)

    def _execute_alone(self) -> None:
        """Execute the requests at once, in a set of one rank."""
        table = self._table
        assert table is not None, "the only rank is the coordinator"
        with self._lock:
            mask, requests = self._mask, self._requests
            self._mask, self._requests = 0, []
        with self._table_lock:
            table.request(0, mask, requests, 0.0)
            answer = table.settle()
        with torch.no_grad(), suppress(Exception):  # the pending operation has the error
            self._execute(answer)

    def _execute(self, answer: CoordinatorAnswer) -> None:
        for failure in answer.failures:
            self._fail(failure)
        groups = self._fusion_groups(answer)
        for group in groups:
            requested = self._claim(group)
            start = self._runtime.now()
            try:
                with self._steps.waiting():
                    results = execute(self.team, group, requested, self._settings.hierarchical_allreduce)
            except Exception as error:
                problem = HorovodInternalError(f"{group.plans[0].request.name}: {self._steps.why or error}")
                problem.__cause__ = error
                for pending in requested:
                    if pending is not None:
                        pending.settle(error=problem)
                raise
            self._record_times(group, requested, start)
            if group.plans[0].request.kind == "join":  # until now some ranks have requested more than others
                with self._lock:
                    self._counts.clear()
            for pending, result in zip(requested, results, strict=True):
                if pending is not None:
                    pending.settle(result)

    def _fusion_groups(self, answer: CoordinatorAnswer) -> list[FusionGroup]:
        """The fusion groups of an answer. Those of known operations are cached, with their buffers."""
        fresh = [plan for plan in answer.plans if plan.number >= 0]
        if fresh:
            self._groupings.clear()
            self._cached_bytes = 0
            self._plans.update((plan.number, plan) for plan in fresh)
        known = self._groupings.get(answer.mask) if answer.mask else []
        max_bytes = self._settings.fusion_bytes
        if known is None:
            known = fuse_plans([self._plans[number] for number in bits(answer.mask)], max_bytes)
            size = sum(group.nbytes for group in known)
            if len(self._groupings) < MAX_CACHED_GROUPINGS and self._cached_bytes + size <= MAX_CACHED_BYTES:
                self._groupings[answer.mask] = known
                self._cached_bytes += size
        return [*known, *fuse_plans(answer.plans, max_bytes)]

    def _claim(self, group: FusionGroup) -> list[PendingOperation | None]:
        """This rank's operations of a group. From now on their names can be used again."""
        requested = []
        with self._lock:
            for plan in group.plans:
                name = plan.request.name
                pending = self._pending.pop(name, None)
                requested.append(pending)
                if plan.number < 0 or pending is None:
                    continue
                known = self._known.get(name)
                if known is None or known[1] is not pending.request:
                    self._known[name] = (plan.number, pending.request)
        return requested

    def _record_times(self, group: FusionGroup, requested: Sequence[PendingOperation | None], start: float) -> None:
        timeline = self._timeline()
        if timeline is None:
            return
        stop = self._runtime.now()
        for plan, pending in zip(group.plans, requested, strict=True):
            request = plan.request
            if pending is not None:
                timeline.negotiating(request.name, request.kind, pending.requested_at, start)
            timeline.running(request.name, request.kind, self.team.transport.name, start, stop)

    def _fail(self, failure: OperationFailure) -> None:
        if failure.only and self.team.rank not in failure.only:
            return
        with self._lock:
            pending = self._pending.pop(failure.name, None)
            if pending is None:
                if self.team.rank in failure.late:
                    self._refused[failure.name] = failure.why
                return
        request = pending.request
        pending.settle(error=HorovodInternalError(f"{request.kind} '{request.label}': {failure.why}"))

    def _break(self, why: str, cause: BaseException | None) -> None:
        """Fail all pending operations and all later ones."""
        with self._lock:
            self._over = self._over or why
        problem = HorovodInternalError(why)
        problem.__cause__ = cause
        self._fail_all(problem)
        self._dirty.set()

    def _fail_all(self, problem: HorovodInternalError) -> None:
        with self._lock:
            left, self._pending = list(self._pending.values()), {}
        for pending in left:
            pending.settle(error=problem)

    def _others(self) -> list[int]:
        """The ranks that this rank sends to: the coordinator, or on the coordinator all ranks that have not left."""
        if self._table is None:
            return [] if self._coordinator_left else [0]
        return [rank for rank in range(1, self.team.size) if rank not in self._table.gone]

    def _send_departure(self, rank: int, answering: bool = False) -> None:
        """Send the goodbye message, once. The other rank answers it with one of its own."""
        mine = self.team.ranks[self._rank]
        with self._lock:
            said = rank in self._goodbyes_sent
            self._goodbyes_sent.add(rank)
        if said:
            return
        why = f"{SHUT_DOWN} on rank {mine}" + (f": {self._reason}" if self._reason else "")
        executed = self._steps.completed if self._broken else -1
        rounds = tuple((number, channel.completed) for number, channel in enumerate(self.channels))
        body = b"" if answering else pack([Departure(mine, why, True, executed, rounds)])
        with self._flush_lock:
            self._send([rank], GOODBYE, 0, body)
            if self._table is not None:
                self._send([rank], GOODBYE, 0, body, DEPARTURE_TAG)

    def _departure(self, body: bytes, source: int) -> Departure:
        if body:
            return Departure.read(MessageReader(body, source))
        return Departure(self.team.ranks[source], f"{SHUT_DOWN} on rank {self.team.ranks[source]}", known=True)

    # Messages.

    def _send(self, to: Sequence[int], kind: int, mask: int, body: bytes | bytearray, tag: int = TAG) -> None:
        """Send one message to each rank. A goodbye message may be lost if the rank has left itself."""
        assert self._control is not None, "there are other ranks"
        leaving = kind == GOODBYE
        parts = [as_tensor(HEADER.pack(len(body), kind) + mask.to_bytes(self._mask_bytes, "little"))]
        if body:
            parts.append(as_tensor(body))
        for rank in to:
            try:
                with self._message_lock:  # another task's message must not come between the parts
                    for part in parts:
                        self._control.send(part, rank, tag, exact=True, lossy=leaving)
            except SynclineError as error:
                if self._table is None and not leaving:
                    raise
                logger.debug("rank %d cannot be reached: %s", rank, error)

    def _receive(self, source: int, tag: int = TAG) -> tuple[int, int, bytes]:
        """Receive the next message of a rank."""
        assert self._control is not None, "there are other ranks"
        head = torch.empty(HEADER.size + self._mask_bytes, dtype=torch.uint8)
        self._control.recv(head, source, tag, exact=True).wait(math.inf)
        raw = head.numpy().tobytes()
        length, kind = HEADER.unpack_from(raw)
        if length > MAX_MESSAGE_BYTES or kind > GOODBYE:
            raise ProtocolError(f"rank {source} announces {length} bytes of kind {kind}", peer=source)
        mask = int.from_bytes(raw[HEADER.size :], "little")
        if not length:
            return kind, mask, b""
        body = torch.empty(length, dtype=torch.uint8)
        self._control.recv(body, source, tag, exact=True).wait()
        return kind, mask, body.numpy().tobytes()
