"""The exceptions of Horovod's API.

SynclineError
├── HorovodInternalError          an operation failed on this rank (also a RuntimeError); elastic jobs continue after it
│   └── UnsupportedReductionError an op that reducescatter does not have (also a ValueError)
├── HostsUpdatedInterrupt         the hosts of an elastic job have changed (also a RuntimeError)
├── NotInitializedError           a call before init() or after shutdown() (also a ValueError)
│   └── UninitializedOperationError   the same, of an operation (also a HorovodInternalError)
└── UnsupportedAdasumError        Adasum where it is not available (also a ValueError and a NotImplementedError)
"""

from __future__ import annotations

from syncline.errors import IncompatibleError, SynclineError, UnsupportedError


class HorovodInternalError(SynclineError, RuntimeError):
    """An operation could not be executed. Elastic jobs then restore their state."""


class UnsupportedReductionError(HorovodInternalError, IncompatibleError):
    """A `reducescatter` with another op than Average and Sum."""


class UnsupportedAdasumError(IncompatibleError, UnsupportedError, NotImplementedError):
    """Adasum on a number of ranks that is not a power of two, or an optimizer with Adasum on some ranks only."""


class HostsUpdatedInterrupt(SynclineError, RuntimeError):  # noqa: N818 (Horovod's name)
    """The hosts of an elastic job have changed. `skip_sync`: the state need not be sent again."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync


class NotInitializedError(SynclineError, ValueError):
    """A call before `hvd.init()` or after `hvd.shutdown()`."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")


class UninitializedOperationError(NotInitializedError, HorovodInternalError):
    """An operation before `hvd.init()` or after `hvd.shutdown()`. Elastic jobs then call init again."""
