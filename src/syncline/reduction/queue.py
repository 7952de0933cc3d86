"""The reductions of one pass that are under way, in bucket order, where some of them are compressed.

With a spare processor the comm task encodes, in parallel with backward. Without one, encoding happens where a bucket
becomes full, because a second thread would only take turns with backward::

    hooks        ─ fill 0 ──────── fill 1 ─────────────────────────── fill 2 ─ end ─ wait
    comm task         encode 0, launch    encode 1, launch, wait 0, decode 0     encode 2 …
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from syncline.collectives.compressed import LaunchedRequest, Reduction
from syncline.errors import SynclineError
from syncline.reduction.stats import CodecPhase

if TYPE_CHECKING:
    from syncline.collectives.compressed.requests import WaitableReduction
    from syncline.reduction.communicator import Communicator

__all__ = ["CompressedReduction", "PlainReduction", "QueuedReduction", "ReductionQueue", "ignore_errors"]


class QueuedReduction(Protocol):
    """A reduction that proceeds step by step."""

    done: bool

    def launch(self, in_comm_task: bool = False) -> None:
        """Start it."""
        ...

    def advance(self, in_comm_task: bool = False) -> None:
        """Wait for what is under way, and take the next step. Nothing happens once it is done."""
        ...

    def settle(self) -> None:
        """Wait for what is under way, and ignore errors: a lost worker has interrupted it."""
        ...


class PlainReduction:
    """An unencoded bucket. `prepare` is called before it is sent."""

    result = None

    def __init__(
        self, communicator: Communicator, flat: Tensor, what: str, prepare: Callable[[], None] | None = None
    ) -> None:
        self.done = False
        self._communicator = communicator
        self._flat = flat
        self._what = what
        self._prepare = prepare
        self._pending: WaitableReduction | None = None

    def launch(self, in_comm_task: bool = False) -> None:
        if self._prepare is not None:
            self._prepare()
        self._pending = self._communicator.launch_sum(self._flat, self._what, in_comm_task)

    def advance(self, in_comm_task: bool = False) -> None:
        assert self._pending is not None, "it was launched"
        self._pending.wait()
        self.done = True

    def settle(self) -> None:
        if self._pending is not None:
            ignore_errors(self._pending.wait)


class CompressedReduction:
    """An encoded bucket: a generator of requests, and those requests that are under way.

    launch     encode, and launch the first requests                where the bucket became full, or in the comm task
    advance    wait for them; decode, or encode again and launch    at the end of backward, or in the comm task
    """

    def __init__(self, communicator: Communicator, work: Reduction[Any], what: str, logical_bytes: int) -> None:
        self.result: Any = None
        """What the generator returned."""
        self.done = False
        self._communicator = communicator
        self._stats = communicator.stats
        self._work = work
        self._what = what
        self._logical_bytes = logical_bytes
        self._pending: tuple[LaunchedRequest, ...] = ()
        self._single = True
        self._launched_at = 0.0
        self._watched = communicator.stats.watching

    def launch(self, in_comm_task: bool = False) -> None:
        self._next(None, in_comm_task, "before")

    def advance(self, in_comm_task: bool = False) -> None:
        if self.done:
            return
        answers = [pending.wait() for pending in self._pending]
        if self._watched:
            self._stats.reduced(self._launched_at, self._communicator.now(), self._what)
        self._next(answers[0] if self._single else answers, in_comm_task, "within")

    def settle(self) -> None:
        for pending in self._pending:
            ignore_errors(pending.wait)

    def _next(self, answer: Any, in_comm_task: bool, phase: CodecPhase) -> None:
        now = self._communicator.now
        start = end = now()
        try:
            asked = self._work.send(answer)
        except StopIteration as finished:
            self.result, self.done, self._pending = finished.value, True, ()
            return
        finally:
            end = now()
            self._stats.coded(start, end, self._what, "beside" if in_comm_task else phase)
        self._launched_at = end
        self._single = not isinstance(asked, tuple)
        requests = asked if isinstance(asked, tuple) else (asked,)
        launch = self._communicator.requests.launch
        self._pending = tuple([launch(request, self._what, in_comm_task) for request in requests])
        self._stats.sent(self._logical_bytes, sum([pending.sent_bytes for pending in self._pending]))
        self._logical_bytes = 0  # counted once


class ReductionQueue:
    """The reductions of one pass. Every rank launches the same ones in the same order."""

    def __init__(self, communicator: Communicator) -> None:
        self._team = communicator.group
        self._in_comm_task = communicator.overlap_encoding
        self._reductions: list[QueuedReduction] = []
        self._calls: list[Any] = []

    def add(self, reduction: QueuedReduction) -> None:
        """Launch one more."""
        previous = self._reductions[-1] if self._reductions else None
        self._reductions.append(reduction)
        if not self._in_comm_task:
            reduction.launch()
            return

        def work() -> None:
            reduction.launch(in_comm_task=True)
            if previous is not None:
                _finish(previous)

        self._call(work)

    def close(self) -> None:
        """No more reductions are added in this pass."""
        if self._in_comm_task and self._reductions:
            last = self._reductions[-1]
            self._call(lambda: _finish(last))

    def wait(self) -> None:
        """Return when all are done. They take turns: one decodes while the bytes of another are on the wire."""
        for call in self._calls:
            call.wait()
        waiting = [reduction for reduction in self._reductions if not reduction.done]
        while waiting:
            for reduction in waiting:
                reduction.advance()
            waiting = [reduction for reduction in waiting if not reduction.done]

    def settle(self) -> None:
        """Wait until nothing is under way, after a lost worker has interrupted the pass. Errors are ignored."""
        for call in self._calls:
            ignore_errors(call.wait)
        for reduction in self._reductions:
            reduction.settle()

    def _call(self, work: Callable[[], None]) -> None:
        self._calls.append(self._team.call("the encoding of gradients", work, async_=True))


def ignore_errors(wait: Callable[[], object]) -> None:
    """Wait for something that a lost worker has interrupted."""
    with suppress(SynclineError):
        wait()


def _finish(reduction: QueuedReduction) -> None:
    while not reduction.done:
        reduction.advance(in_comm_task=True)
