"""The parts of MPI that all channels of a process share: the library, the waits, and the exit.

MPI moves bytes only inside its own calls, and its own waits spin without a timeout. So every wait here is a loop of
tests: it yields the processor for a moment, then sleeps a little longer each time. It ends at the timeout, allows
Ctrl-C, and logs a warning if it takes long. A test that takes long has moved bytes, and more are likely to follow: the
loop then starts again with short sleeps. Each iteration also matches the receives of *all* channels: two ranks that
both wait for a send have posted their receives, and both must make progress.
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

from syncline.environment import Environment, Rendezvous
from syncline.errors import WorldError
from syncline.runtime import RealRuntime, Runtime, Task
from syncline.transports.base import DEFAULT_TIMEOUT_S, LANE_TAGS
from syncline.transports.key_value_store import BoundedStore, KeyValueStore, open_store

if TYPE_CHECKING:
    from syncline.transports.mpi.transport import MpiTransport

__all__ = ["MpiOperation", "MpiProcess", "RequestHandle", "abort_job", "byte_spec", "mpi_tag", "warn_long_wait"]

logger = logging.getLogger("syncline")


SPIN_S = 200e-6
"""Seconds for which a wait yields before it sleeps. A small message usually arrives in that time."""
MIN_SLEEP_S, MAX_SLEEP_S = 50e-6, 1e-3
"""Shortest and longest sleep of a wait, in seconds."""
PROGRESS_S = 5e-6
"""Seconds by which an iteration is longer than an idle one if it has moved bytes."""
MAX_DROPPED_OPERATIONS = 16
"""Operations without a handle. Beyond this number the finished ones are released."""
BLOCK_BYTES = 1 << 20
"""Size of a block of a message that is too long for MPI's counter."""
JOIN_TIMEOUT_S = 5.0
POLL_EVERY_S = 0.02
"""Seconds between two checks of a server whether all others have reached their exit."""
WARN_AFTER_S = 10.0
"""Seconds after which a wait is reported, in one line."""
WARN_AGAIN_EVERY_S = 30.0
"""Seconds between two warnings of the wait at exit."""
OUTPUT_GRACE_S = 0.5
"""Seconds before an abort. MPICH's mpiexec drops output that it has not read by then, such as a traceback."""
EXIT_PENDING = "the other ranks to come to their end, as it has (or do they wait for it, and it has left early?)"
"""What a process waits for at exit."""


class MpiOperation(Protocol):
    """An operation that MPI has not finished and whose buffer must live until then."""

    outgoing: bool
    """Whether a peer waits for it."""

    def over(self) -> bool: ...


class MpiProcess:
    """One process in MPI."""

    def __init__(self, mpi: ModuleType, comm: Any, timeout: float, neighbours: frozenset[int]) -> None:
        self.mpi = mpi
        self.comm = comm
        """A private communicator for splits and the exit. No channel sends messages on it."""
        self.timeout = timeout
        self.neighbours = neighbours
        """The world's ranks that share this host's memory."""
        self.runtime: Runtime = RealRuntime()
        self.max_tag = int(comm.Get_attr(mpi.TAG_UB))
        self.max_count = (1 << 31) - 1 if mpi.Get_version() < (4, 0) else 1 << 62
        """Largest number of elements of one operation. MPI counted in 32 bits before version 4."""
        self.lost = False
        """Whether a wait has failed at its final timeout. The exit then does not wait for the other ranks."""
        self.code = 1
        """The exit code of an aborted job."""
        self.warn_after_s = WARN_AFTER_S
        self.exit_timeout_s = max(timeout, DEFAULT_TIMEOUT_S)
        """Seconds that this process waits at exit for the others to end too."""
        self._lock = self.runtime.lock()
        self._polls: tuple[Callable[[], None], ...] = ()
        self.dropped: deque[MpiOperation] = deque()
        self._unused: list[tuple[Any, Any]] = []
        self._everyone: Any = None
        self._watch: Task | None = None
        self._leaving = False
        self.store_place: Rendezvous | None = None
        """Where rank 0 serves the key-value store of the job; None if other hosts cannot reach it."""
        self._store: KeyValueStore | None = None
        atexit.register(self.finish_at_exit)

    def control_store(self) -> KeyValueStore:
        """The key-value store of the job. The first call connects to it."""
        if self._store is None:
            if self.store_place is None:
                raise WorldError(
                    f"rank 0 has no address for a key-value store that all {self.comm.Get_size()} ranks reach, and the "
                    "workers of an asynchronous strategy inform each other there: set MASTER_ADDR to the first host"
                )
            here = Environment(source="MPI", rank=self.comm.Get_rank(), size=self.comm.Get_size())
            self._store = BoundedStore(open_store(here, self.store_place, self.timeout), self.runtime)
        return self._store

    # Waiting.

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        pending: Callable[[], str],
        ended: Callable[[], bool] = lambda: False,
        again: float = math.inf,
    ) -> bool:
        """Wait until ready; False at the timeout or if the channel ends first.

        A long wait logs what is pending, and again every `again` seconds. An infinite wait logs nothing.
        """
        if ready():
            return True
        now = self.runtime.now
        start = since = turned = now()
        pause, idle, warn = MIN_SLEEP_S, 1.0, start + (self.warn_after_s if timeout_s < math.inf else math.inf)
        while True:
            self.progress()
            if ready():
                return True
            before, turned = turned, now()
            idle = min(idle, turned - before)
            if turned - before > 2 * idle + PROGRESS_S:
                since, pause = turned, MIN_SLEEP_S
            if turned > warn:
                warn = turned + again
                warn_long_wait(self.comm.Get_rank(), turned - start, pending())
            if turned - start > timeout_s or ended():
                return False
            if turned - since < SPIN_S:
                os.sched_yield()
            else:
                self.runtime.sleep(min(pause, max(0.0, start + timeout_s - turned)))
                pause = min(2 * pause, MAX_SLEEP_S)
            turned = now()

    def progress(self) -> None:
        """Match the messages that have arrived on any channel."""
        for poll in self._polls:
            poll()

    def add_poll(self, poll: Callable[[], None]) -> None:
        """Call a function in every wait: it matches the messages that have arrived."""
        with self._lock:
            self._polls += (poll,)

    def remove_poll(self, poll: Callable[[], None]) -> None:
        """Stop calling it."""
        with self._lock:
            self._polls = tuple(each for each in self._polls if each != poll)

    # Operations without a handle.

    def hold(self, operation: MpiOperation) -> None:
        """Hold an operation whose handle was dropped until MPI no longer uses its buffer.

        Called when the handle is collected, at any moment and on any thread, so it takes no lock.
        """
        self.dropped.append(operation)

    def release_dropped(self) -> bool:
        """Release the finished operations; True if no peer waits for one of the others."""
        outgoing = 0
        for _ in range(len(self.dropped)):
            with suppress(IndexError):  # another thread does the same
                operation = self.dropped.popleft()
                if not operation.over():
                    self.dropped.append(operation)
                    outgoing += operation.outgoing
        return not outgoing

    def free_when_unused(self, comm: Any) -> None:
        """Free a communicator after all its ranks have released it. A rank that closes early does not wait.

        The ranks notify each other by messages, not by a barrier: others may be in a collective on this communicator,
        and MPI would match the two.
        """
        nothing, others = [bytearray(0), 0, self.mpi.BYTE], set(range(comm.Get_size())) - {comm.Get_rank()}
        with suppress(self.mpi.Exception):
            sends = [comm.Isend(nothing, other, self.max_tag) for other in others]
            receives = [comm.Irecv(nothing, other, self.max_tag) for other in others]
            self._unused.append((comm, [*sends, *receives]))
        self.free_unused()

    def free_unused(self) -> None:
        """Free the communicators that all ranks have released."""
        with self._lock:
            unused, self._unused = self._unused, []
        for comm, requests in unused:
            with suppress(self.mpi.Exception):
                if self.mpi.Request.Testall(requests):
                    comm.Free()
                else:
                    self._unused.append((comm, requests))

    # The end.

    @property
    def unclean(self) -> bool:
        """Whether this process ends with an error. It then must not wait for the others."""
        return self.lost or sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None

    def leaving(self, error: BaseException | None) -> None:
        """Store the exit code of an error: Python drops a SystemExit before it calls the exit functions."""
        if isinstance(error, SystemExit) and error.code not in (None, 0):
            self.lost = True
            self.code = error.code if isinstance(error.code, int) else 1

    def exit_with_others(self, then: Callable[[], None]) -> None:
        """Exit when all other processes do; for servers. `then` is called at that moment."""
        self.exit_timeout_s = math.inf
        self._everyone = self.comm.Ibarrier()

        def watch() -> None:
            while not self._leaving and not self._everyone.Test():
                self.runtime.sleep(POLL_EVERY_S)
            then()

        self._watch = self.runtime.spawn(watch, name="end")

    def finish_at_exit(self) -> None:
        """At exit: wait until all ranks have reached it, so that MPI can end; after an error abort the job.

        MPI's own end waits for every rank without a timeout, and a rank that fails never sends what the others wait
        for. So a rank that ends by an uncaught exception, or after it lost a peer, aborts the job: mpiexec then ends
        the others at once, as torchrun does. Without `syncline run` a `sys.exit(3)` outside the world's `with` cannot
        be distinguished from a normal end: such a rank waits here and logs a warning.
        """
        if self.mpi.Is_finalized() or self.comm.Get_size() == 1:
            return
        self.leaving(getattr(sys, "last_value", None))
        if self.unclean:
            abort_job(self.mpi, self.code)
        try:
            self._leaving = True
            if self._watch is not None:
                self._watch.join(JOIN_TIMEOUT_S)  # two threads must not test one request
            everyone = self.comm.Ibarrier() if self._everyone is None else self._everyone
            if self.wait(everyone.Test, self.exit_timeout_s, lambda: EXIT_PENDING, again=WARN_AGAIN_EVERY_S):
                self.free_unused()
                return
        except self.mpi.Exception as error:
            logger.error("MPI broke at the end: %s", error)
        logger.error(
            "rank %d has waited up to %.3g s at its end for the other ranks to end too: aborting the job",
            self.comm.Get_rank(),
            self.exit_timeout_s,
        )
        abort_job(self.mpi, self.code)


def warn_long_wait(rank: int, seconds: float, pending: str) -> None:
    """Log that a wait takes long."""
    logger.warning("rank %d has waited %.0f s for %s", rank, seconds, pending)


def abort_job(mpi: ModuleType, code: int = 1) -> None:
    """End all ranks now, through mpiexec."""
    if mpi.Is_finalized():
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()  # MPI ends the process without Python's exit functions
    RealRuntime().sleep(OUTPUT_GRACE_S)
    mpi.COMM_WORLD.Abort(code)


def byte_spec(engine: MpiProcess, data: Tensor, nbytes: int) -> list[Any]:
    """The first bytes of a buffer as mpi4py takes them, in blocks if they exceed MPI's counter."""
    mpi = engine.mpi
    if nbytes <= engine.max_count:
        return [data.numpy(), nbytes, mpi.BYTE]
    whole, rest = divmod(nbytes, BLOCK_BYTES)
    block = mpi.BYTE.Create_contiguous(BLOCK_BYTES)
    everything = mpi.Datatype.Create_struct([whole, rest], [0, whole * BLOCK_BYTES], [block, mpi.BYTE]).Commit()
    block.Free()
    return [data.numpy(), 1, everything]


def mpi_tag(tag: int) -> int:
    """The MPI tag for a tag of ours. The tags of lanes are large, and only small tags work on every MPI.

    >>> mpi_tag(3), mpi_tag(LANE_TAGS + 3)
    (6, 7)
    """
    return 2 * tag if tag < LANE_TAGS else 2 * (tag - LANE_TAGS) + 1


class RequestHandle:
    """A request in progress. It keeps its buffers alive while MPI needs them."""

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
            self._transport.engine.hold(self)  # MPI may still read or write the buffers

    def over(self) -> bool:
        """Whether MPI no longer uses the buffers."""
        try:
            self._done = self._done or self._request.Test()
        except self._transport.engine.mpi.Exception:
            self._done = True  # no caller waits for the error
        return self._done

    def wait(self, timeout: float | None = None) -> None:
        if self._done:
            return
        transport, engine = self._transport, self._transport.engine
        timeout_s, start = transport.timeout if timeout is None else timeout, transport.runtime.now()
        cause: Exception | None = None
        try:
            finished = engine.wait(self._request.Test, timeout_s, lambda: self._pending, transport.has_ended)
        except engine.mpi.Exception as error:
            finished, cause, self._done = False, error, True
        if not finished:
            transport.give_up(for_good=timeout is None or cause is not None)
            raise transport.failure(self._peer, self._pending, transport.runtime.now() - start, cause) from cause
        self._done = True
        if self._finish is not None:
            self._finish()
