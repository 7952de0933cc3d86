"""The exceptions of Syncline, in one tree.

    SynclineError
    ├── SpecError          a spec string or argument that cannot be read (also a ValueError)
    ├── IncompatibleError  things that cannot work together, named with their values (also a ValueError)
    ├── WorldError         launch, rendezvous, a world used at the wrong time (also a RuntimeError)
    │   ├── DeadlockError  every simulated task waits: who waits for whom
    │   └── JobEndedError  an elastic job has ended before this worker could join it
    ├── ProtocolError      bytes that are short, long, corrupt or from a stranger
    ├── PeerLostError      a peer is gone: who, since when, what was pending (also a ConnectionError)
    ├── DivergedError      NaN or Inf where a number was expected: rank, parameter, step (also an ArithmeticError)
    └── UnsupportedError   what is not available here, and where it would work

Errors of the engines (gloo, NCCL, MPI) are translated at the edge, so that a user catches these alone.
"""

from __future__ import annotations

import warnings

__all__ = [
    "DeadlockError",
    "DivergedError",
    "IncompatibleError",
    "JobEndedError",
    "PeerLostError",
    "ProtocolError",
    "SpecError",
    "SynclineError",
    "UnsupportedError",
    "WorldError",
]

REMEDY = "lower the learning rate, clip the gradients, or look for NaN in the data"


class SynclineError(Exception):
    """The root of every exception that Syncline raises on purpose.

    >>> issubclass(PeerLostError, SynclineError)
    True
    """


class SpecError(SynclineError, ValueError):
    """A spec string or an argument that cannot be read; the message shows the nearest valid ones.

    >>> issubclass(SpecError, ValueError)
    True
    """


class IncompatibleError(SynclineError, ValueError):
    """Things that cannot work together: shapes that differ between ranks, a codec and a strategy.

    >>> issubclass(IncompatibleError, ValueError)
    True
    """


class WorldError(SynclineError, RuntimeError):
    """Launching, rendezvous, or a world used before it exists or after it was closed.

    >>> issubclass(WorldError, RuntimeError)
    True
    """


class DeadlockError(WorldError):
    """Every task of a simulation waits and nothing can wake one; the message says who waits for whom.

    >>> issubclass(DeadlockError, WorldError)
    True
    """


class JobEndedError(WorldError):
    """An elastic job has ended before this worker could join it. A worker of `syncline run` then exits with code 0.

    >>> issubclass(JobEndedError, WorldError)
    True
    """


class ProtocolError(SynclineError):
    """A message that is short, long, corrupt or foreign. It never became a tensor.

    >>> ProtocolError("12 bytes where 32 were due", peer=3).peer
    3
    """

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class PeerLostError(SynclineError, ConnectionError):
    """A peer is gone or does not answer within the timeout.

    >>> error = PeerLostError("rank 2 is gone", peer=2, pending="allreduce #7")
    >>> error.peer, error.pending
    (2, 'allreduce #7')
    """

    def __init__(self, message: str, *, peer: int | None = None, pending: str = "", seconds: float = 0.0) -> None:
        super().__init__(message)
        self.peer = peer
        self.pending = pending
        self.seconds = seconds


class DivergedError(SynclineError, ArithmeticError):
    """NaN or Inf in something that training needs finite. `step` counts the steps that were complete before.

    >>> error = DivergedError("NaN or Inf in the gradient of fc.bias on rank 1", rank=1, parameter="fc.bias", step=9)
    >>> print(error)
    NaN or Inf in the gradient of fc.bias on rank 1 after 9 steps: lower the learning rate, clip the gradients, or \
look for NaN in the data
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        parameter: str | None = None,
        step: int | None = None,
        remedy: str = REMEDY,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.parameter = parameter
        self.step = step
        self.remedy = remedy

    def at_step(self, step: int) -> DivergedError:
        """Set the step if it is not set yet. Returns the error."""
        self.step = step if self.step is None else self.step
        return self

    def __str__(self) -> str:
        when = "" if self.step is None else f" after {self.step} step{'' if self.step == 1 else 's'}"
        return f"{self.args[0]}{when}: {self.remedy}"


class UnsupportedError(SynclineError):
    """What was asked for is not available here; the message says where it would work.

    >>> issubclass(UnsupportedError, SynclineError)
    True
    """


def warn_deprecated(old: str, new: str) -> None:
    """Warn the caller of a public function that `old` will be removed; `new` says what to write instead."""
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=3)
