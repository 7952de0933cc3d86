"""What all channels of a process share: the library, how to wait, and the end.

MPI moves bytes only inside its own calls, and its own waits spin without end. So every wait here is a loop of tests:
it yields the processor for a moment, then sleeps a little longer each time, ends at the timeout, and lets Ctrl-C in.
One that lasts long says for what it waits.
A test that takes long has moved bytes, and more are likely at once: then the loop starts afresh.
Each turn of any loop also matches the receives that wait on *all* channels: two ranks that both wait for a send first
have posted their receives, and must get on.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from syncline.runtime import RealRuntime, Runtime, Task
from syncline.transports.base import DEFAULT_TIMEOUT_S, LANE_TAGS

if TYPE_CHECKING:
    from syncline.transports.mpi.transport import MpiTransport

__all__ = ["Engine", "RequestHandle", "Unfinished", "abort_job", "byte_spec", "mpi_tag", "warn_of_a_wait"]

logger = logging.getLogger("syncline")


SPIN = 200e-6
"""Seconds that a wait yields before it sleeps: a small message is there by then."""
SHORTEST, LONGEST = 50e-6, 1e-3
"""Sleeps of a wait, in seconds."""
MOVED = 5e-6
"""Seconds by which a turn is longer than an idle one when it has moved bytes."""
MANY = 16
"""Operations that nobody holds, from which on the finished ones are let go."""
BLOCK = 1 << 20
PATIENCE = 5.0
GLANCE = 0.02
"""Seconds between a server's looks whether all others are at their end."""
WARN_AFTER = 10.0
"""Seconds after which a wait is reported, in one line."""
WARN_AGAIN = 30.0
"""Seconds between the lines of the wait at exit: it is the last that is heard of this process."""
LAST_WORDS = 0.5
"""Seconds before an abort: MPICH's mpiexec drops what it has not read by then, such as the end of a traceback."""
LAST = "the other ranks to come to their end, as it has (or do they wait for it, and it has left early?)"
"""What a process waits for at exit."""


class Unfinished(Protocol):
    """An operation that MPI has not finished and whose buffer must live until then."""

    outgoing: bool
    """Whether a peer waits for it."""

    def over(self) -> bool: ...


class Pumped(Protocol):
    """What wants a turn in every wait."""

    def pump(self) -> None:
        """Match what has come."""
        ...


class Engine:
    """One process in MPI."""

    def __init__(self, mpi: ModuleType, comm: Any, timeout: float, neighbours: frozenset[int]) -> None:
        self.mpi = mpi
        self.comm = comm
        """Ours alone: for meeting before a split and for the end. No message of a channel goes this way."""
        self.timeout = timeout
        self.neighbours = neighbours
        """The world's ranks that share this host's memory."""
        self.runtime: Runtime = RealRuntime()
        self.most_tag = int(comm.Get_attr(mpi.TAG_UB))
        self.most_count = (1 << 31) - 1 if mpi.Get_version() < (4, 0) else 1 << 62
        """Elements of one operation: MPI counted in 32 bits before its version 4."""
        self.lost = False
        """A wait was given up for good: the end must not wait for everyone."""
        self.code = 1
        """What an aborted job ends with."""
        self.warn_after = WARN_AFTER
        self.last_patience = max(timeout, DEFAULT_TIMEOUT_S)
        """Seconds that this process waits at exit for the others to end too."""
        self._lock = self.runtime.lock()
        self._pumped: tuple[Pumped, ...] = ()
        self._dropped: deque[Unfinished] = deque()
        self._retiring: list[tuple[Any, Any]] = []
        self._everyone: Any = None
        self._watch: Task | None = None
        self._leaving = False
        atexit.register(self.goodbye)

    # Waiting.

    def wait(
        self,
        ready: Callable[[], bool],
        patience: float,
        pending: Callable[[], str],
        ended: Callable[[], bool] = lambda: False,
        again: float = math.inf,
    ) -> bool:
        """Wait until ready; False when the time was up or the channel ended first. Says what is pending when that
        takes long, and every `again` seconds; of a wait without end nothing.
        """
        if ready():
            return True
        now = self.runtime.now
        start = since = turned = now()
        pause, idle, warn = SHORTEST, 1.0, start + (self.warn_after if patience < math.inf else math.inf)
        while True:
            self.progress()
            if ready():
                return True
            before, turned = turned, now()
            idle = min(idle, turned - before)
            if turned - before > 2 * idle + MOVED:
                since, pause = turned, SHORTEST
            if turned > warn:
                warn = turned + again
                warn_of_a_wait(self.comm.Get_rank(), turned - start, pending())
            if turned - start > patience or ended():
                return False
            if turned - since < SPIN:
                os.sched_yield()
            else:
                self.runtime.sleep(min(pause, max(0.0, start + patience - turned)))
                pause = min(2 * pause, LONGEST)
            turned = now()

    def progress(self) -> None:
        """Match what has come on any channel."""
        for pumped in self._pumped:
            pumped.pump()

    def attend(self, pumped: Pumped) -> None:
        """Give it a turn in every wait."""
        with self._lock:
            self._pumped += (pumped,)

    def rest(self, pumped: Pumped) -> None:
        """No more turns."""
        with self._lock:
            self._pumped = tuple(each for each in self._pumped if each is not pumped)

    # What nobody holds.

    def keep(self, operation: Unfinished) -> None:
        """Hold an operation whose handle is gone until MPI has done with its buffer.

        Called when the handle is collected, at any moment and on any thread: so it takes no lock.
        """
        self._dropped.append(operation)

    def let_go(self) -> bool:
        """Forget the operations that have finished; True when no peer waits for one that is left."""
        outgoing = 0
        for _ in range(len(self._dropped)):
            with suppress(IndexError):  # another thread is at it too
                operation = self._dropped.popleft()
                if not operation.over():
                    self._dropped.append(operation)
                    outgoing += operation.outgoing
        return not outgoing

    def tidy(self) -> None:
        """Let go of what has finished, where there is much of it."""
        if len(self._dropped) > MANY:
            self.let_go()

    def retire(self, comm: Any) -> None:
        """Free a communicator once all its ranks have released it. A rank that closes early does not wait.

        They tell each other by messages, not by a barrier: others may be in a collective on this communicator, and MPI
        would match the two.
        """
        nothing, others = [bytearray(0), 0, self.mpi.BYTE], set(range(comm.Get_size())) - {comm.Get_rank()}
        with suppress(self.mpi.Exception):
            told = [comm.Isend(nothing, other, self.most_tag) for other in others]
            heard = [comm.Irecv(nothing, other, self.most_tag) for other in others]
            self._retiring.append((comm, [*told, *heard]))
        self.free_retired()

    def free_retired(self) -> None:
        """Free the communicators that everyone has let go."""
        with self._lock:
            retiring, self._retiring = self._retiring, []
        for comm, everyone in retiring:
            with suppress(self.mpi.Exception):
                if self.mpi.Request.Testall(everyone):
                    comm.Free()
                else:
                    self._retiring.append((comm, everyone))

    # The end.

    @property
    def unclean(self) -> bool:
        """Whether this process ends by an error: waiting for the others would be waiting for good."""
        return self.lost or sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None

    def leaving(self, error: BaseException | None) -> None:
        """A channel closes while `error` passes. Python forgets a SystemExit before the exit's own calls, so that one
        with a code that means failure is noted here.
        """
        if isinstance(error, SystemExit) and error.code not in (None, 0):
            self.lost = True
            self.code = error.code if isinstance(error.code, int) else 1

    def end_with_the_others(self, then: Callable[[], None]) -> None:
        """For one who serves: it is at its end as soon as all others are. `then` is called at that moment."""
        self.last_patience = math.inf
        self._everyone = self.comm.Ibarrier()

        def watch() -> None:
            while not self._leaving and not self._everyone.Test():
                self.runtime.sleep(GLANCE)
            then()

        self._watch = self.runtime.spawn(watch, name="end")

    def goodbye(self) -> None:
        """At exit: wait until all ranks are here, so that MPI can end; after an error end them all.

        MPI's own end waits for every rank, with no time limit, and one that fails never sends what the others wait
        for. So a rank that ends by an uncaught exception, or after it lost a peer, aborts the job: mpiexec then ends
        the others at once, as torchrun does. Without `syncline run` a `sys.exit(3)` outside of the world's `with`
        cannot be told from an end in peace: such a rank waits here, and says so.
        """
        if self.mpi.Is_finalized() or self.comm.Get_size() == 1:
            return
        self.leaving(getattr(sys, "last_value", None))
        if self.unclean:
            abort_job(self.mpi, self.code)
        try:
            self._leaving = True
            if self._watch is not None:
                self._watch.join(PATIENCE)  # two threads may not ask for one request
            everyone = self.comm.Ibarrier() if self._everyone is None else self._everyone
            if self.wait(everyone.Test, self.last_patience, lambda: LAST, again=WARN_AGAIN):
                self.free_retired()
                return
        except self.mpi.Exception as error:
            logger.error("MPI broke at the end: %s", error)
        logger.error(
            "rank %d has waited up to %.3g s at its end for the other ranks to end too: aborting the job",
            self.comm.Get_rank(),
            self.last_patience,
        )
        abort_job(self.mpi, self.code)


def warn_of_a_wait(rank: int, seconds: float, pending: str) -> None:
    """Say that a wait takes long, and for what."""
    logger.warning("rank %d has waited %.0f s for %s", rank, seconds, pending)


def abort_job(mpi: ModuleType, code: int = 1) -> None:
    """End all ranks now: mpiexec does it when one asks."""
    if mpi.Is_finalized():
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()  # MPI ends the process without Python's own end
    RealRuntime().sleep(LAST_WORDS)
    mpi.COMM_WORLD.Abort(code)


def byte_spec(engine: Engine, data: Tensor, nbytes: int) -> list[Any]:
    """The first bytes of a buffer, as mpi4py takes them; in blocks where MPI could not count them."""
    mpi = engine.mpi
    if nbytes <= engine.most_count:
        return [data.numpy(), nbytes, mpi.BYTE]
    whole, rest = divmod(nbytes, BLOCK)
    block = mpi.BYTE.Create_contiguous(BLOCK)
    everything = mpi.Datatype.Create_struct([whole, rest], [0, whole * BLOCK], [block, mpi.BYTE]).Commit()
    block.Free()
    return [data.numpy(), 1, everything]


def mpi_tag(tag: int) -> int:
    """A tag of ours as MPI's: those of lanes are large, and small ones work on every MPI.

    >>> mpi_tag(3), mpi_tag(LANE_TAGS + 3)
    (6, 7)
    """
    return 2 * tag if tag < LANE_TAGS else 2 * (tag - LANE_TAGS) + 1


class RequestHandle:
    """A request under way; keeps its buffers alive, past its own end where MPI still needs them."""

    def __init__(
        self,
        transport: MpiTransport,
        request: Any,
        buffers: tuple[Tensor, ...],
        peer: int | None,
        pending: str,
        finish: Callable[[], object] | None = None,
        outgoing: bool = False,
    ) -> None:
        self.source = -1 if peer is None else peer
        self.nbytes = buffers[0].numel() * buffers[0].element_size() if buffers else 0
        self.outgoing = outgoing
        self._transport = transport
        self._request = request
        self._buffers = buffers
        self._peer = peer
        self._pending = pending
        self._finish = finish
        self._done = False
        self._kept = False

    def __del__(self) -> None:
        if not self._done and not self._kept:
            self._kept = True
            self._transport.engine.keep(self)  # lives on there: the bytes may still be read or written

    def over(self) -> bool:
        """Whether MPI has done with the buffers."""
        try:
            self._done = self._done or bool(self._request.Test())
        except self._transport.engine.mpi.Exception:
            self._done = True  # nobody waits to be told
        return self._done

    def wait(self, timeout: float | None = None) -> None:
        if self._done:
            return
        transport, engine = self._transport, self._transport.engine
        patience, start = transport.timeout if timeout is None else timeout, transport.runtime.now()
        cause: Exception | None = None
        try:
            finished = engine.wait(self._test, patience, lambda: self._pending, transport.has_ended)
        except engine.mpi.Exception as error:
            finished, cause, self._done = False, error, True
        if not finished:
            transport.give_up(for_good=timeout is None or cause is not None)
            raise transport.failure(self._peer, self._pending, transport.runtime.now() - start, cause) from cause
        self._done = True
        if self._finish is not None:
            self._finish()

    def _test(self) -> bool:
        return bool(self._request.Test())
