"""What goes wrong, in the vocabulary of Horovod.

SynclineError
├── HorovodInternalError    an operation failed on this rank (also a RuntimeError)
├── HostsUpdatedInterrupt   the hosts of an elastic job have changed
└── NotInitializedError     a call before init() or after shutdown() (also a ValueError)
"""

from __future__ import annotations

from syncline.errors import SynclineError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "NotInitializedError"]


class HorovodInternalError(SynclineError, RuntimeError):
    """An operation that was asked for could not be carried out; elastic jobs restore their state at it.

    >>> issubclass(HorovodInternalError, RuntimeError)
    True
    """


class HostsUpdatedInterrupt(SynclineError):  # noqa: N818 (Horovod's name)
    """The hosts of an elastic job have changed; `skip_sync` where the state need not be sent again.

    >>> HostsUpdatedInterrupt(skip_sync=True).skip_sync
    True
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync


class NotInitializedError(SynclineError, ValueError):
    """A call before `hvd.init()` or after `hvd.shutdown()`.

    >>> issubclass(NotInitializedError, ValueError)
    True
    """

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")
