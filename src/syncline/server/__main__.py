"""`python -m syncline.server`: a process that only serves. `syncline run --servers S` starts it.

The launcher's variables give its number and the rendezvous address. It ends with exit code 0 when every worker has left
or is lost. After SIGTERM it says goodbye to the workers and ends by that signal, so that the launcher knows the reason.
If its workers save a checkpoint when they are asked to stop, it ignores Ctrl-C and SIGTERM: the workers need it until
they have saved, and then the launcher ends it.
"""

from __future__ import annotations

import importlib
import math
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from syncline.environment import detect
from syncline.environment.base import SAVES
from syncline.errors import SynclineError
from syncline.runtime import RealRuntime
from syncline.server import server
from syncline.server.network import ServerNetwork, import_handlers, join_network, network_of, read_roles
from syncline.transports.base import DEFAULT_TIMEOUT_S

__all__ = ["main"]


def main() -> int:
    """Serve, and return the exit code."""
    signal.signal(signal.SIGTERM, _end)
    if os.environ.get(SAVES):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    workers_ended = RealRuntime().event()
    try:
        import_handlers()
        network = _join_mpi(workers_ended.set) if os.environ.get("SYNCLINE_TRANSPORT") == "mpi" else _join()
        try:
            server.serve(network)
        finally:
            network.close()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself: the launcher may send a signal meanwhile
    except _TerminatedError:
        end_by(signal.SIGTERM)
    except KeyboardInterrupt:
        return 130
    except SynclineError:
        if not workers_ended.is_set():
            raise
    return 0


def _join() -> ServerNetwork:
    return join_network(read_roles(), DEFAULT_TIMEOUT_S, join_timeout_s=math.inf)


def _join_mpi(on_workers_ended: Callable[[], None]) -> ServerNetwork:
    """Workers that never use the servers send them nothing, so that MPI tells when all workers have ended."""
    roles = read_roles()
    transport = importlib.import_module("syncline.transports.mpi").connect(detect(), DEFAULT_TIMEOUT_S)

    def end() -> None:
        on_workers_ended()
        transport.abort()

    transport.engine.exit_with_others(end)
    return network_of(transport, roles.workers, roles.servers)


class _TerminatedError(BaseException):
    """SIGTERM was received. It is not an `Exception`, because the server continues after those."""


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the goodbye messages must not be interrupted
    raise _TerminatedError


def end_by(number: int) -> None:
    """End this process by a signal, as if the signal had no handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main())
