"""`python -m syncline.server`: a process that does nothing but serve, as `syncline run --servers S` starts it.

Its number and where to meet are in the launcher's variables. It ends when every worker has left or is lost, with exit
code 0. SIGTERM ends it too: it says goodbye to the workers, and then ends by that signal, so that whoever watches it
knows why. If its workers save when they are asked to stop, it ignores Ctrl-C and SIGTERM: the workers need
it until they have saved, and then the launcher ends it.
"""

from __future__ import annotations

import importlib
import math
import os
import signal
import sys
from types import FrameType
from typing import Any

from syncline.environment import detect
from syncline.environment.base import SAVES
from syncline.errors import SynclineError
from syncline.runtime import RealRuntime
from syncline.server.network import ServerNetwork, import_handlers, join_network, network_of, read_roles
from syncline.transports.base import DEFAULT_TIMEOUT_S

__all__ = ["main"]


def main() -> int:
    """Serve; the exit code."""
    signal.signal(signal.SIGTERM, _end)
    if os.environ.get(SAVES):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    over = RealRuntime().event()
    try:
        import_handlers()
        network = _join_mpi(over.set) if os.environ.get("SYNCLINE_TRANSPORT") == "mpi" else _join()
        try:
            # Only now: it takes its time to import, and the others wait for this process to be there.
            importlib.import_module("syncline.server.server").serve(network)
        finally:
            network.close()
    except _TerminatedError:
        end_by(signal.SIGTERM)
    except KeyboardInterrupt:
        return 130
    except SynclineError:
        if not over.is_set():
            raise
    return 0


def _join() -> ServerNetwork:
    return join_network(read_roles(), DEFAULT_TIMEOUT_S, patience=math.inf)


def _join_mpi(over: Any) -> ServerNetwork:
    """A worker that never uses the servers says nothing to them: MPI tells when all are at their end."""
    roles = read_roles()
    transport = importlib.import_module("syncline.transports.mpi").connect(detect(), DEFAULT_TIMEOUT_S)

    def end() -> None:
        over()
        transport.abort()

    transport.engine.exit_with_others(end)
    return network_of(transport, roles.workers, roles.servers)


class _TerminatedError(BaseException):
    """SIGTERM was received. It is not an `Exception`, because the serving loop continues after those."""


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the goodbye messages must not be interrupted
    raise _TerminatedError


def end_by(number: int) -> None:
    """End this process by a signal, as if the signal had no handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main())
