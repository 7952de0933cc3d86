"""What a server's process does for the bench beside serving: echo bare bytes, and say what it uses.

`python -m syncline.bench.server.end` is a dedicated one; co-located, each worker has it as a task of its own. Orders
come from worker 0.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from syncline.bench.server.raw import Raw, open_raw, shares
from syncline.environment import detect
from syncline.errors import SynclineError
from syncline.server.network import ServerNetwork, join_network, network_of, read_roles
from syncline.server.server import Server
from syncline.transports.base import DEFAULT_TIMEOUT_S

__all__ = ["PROGRAM", "Orders", "attend", "resident"]

PROGRAM = ("-m", "syncline.bench.server.end")
ECHO, USAGE, END = range(1, 4)
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of this process that lie in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


class Orders:
    """Worker 0's voice to the ends."""

    def __init__(self, raw: Raw, servers: Sequence[int]) -> None:
        self._raw = raw
        self._servers = servers

    def echo(self, servers: Sequence[int], nbytes: int, messages: int, depth: int) -> None:
        """Let ends answer so many messages that are cut evenly over them."""
        for server, share in zip(servers, shares(nbytes, len(servers)), strict=True):
            if share:
                self._raw.order(server, (ECHO, share, messages, depth))
                self._raw.told(server)  # it must know before the first message comes

    def usage(self) -> list[tuple[int, float]]:
        """Resident bytes and processor seconds of every server's process."""
        found = []
        for server in self._servers:
            self._raw.order(server, (USAGE, 0, 0, 0))
            memory, processor = self._raw.told(server)
            found.append((memory, 1e-9 * processor))
        return found

    def end(self) -> None:
        """All is closed: the ends are done with."""
        for server in self._servers:
            self._raw.order(server, (END, 0, 0, 0))


def attend(raw: Raw) -> None:
    """Do as worker 0 says, until it says that this was all."""
    while True:
        kind, nbytes, messages, depth = raw.next_order()
        if kind == ECHO:
            raw.tell(())
            raw.answer(nbytes, messages, depth)
        elif kind == USAGE:
            raw.tell((resident(), time.process_time_ns()))
        else:
            return


def main() -> int:
    """Serve, and attend to orders; the exit code."""
    signal.signal(signal.SIGTERM, _end)
    network = _join()
    try:
        server = Server(network).start()
        raw = open_raw(network)
        attend(raw)
        raw.close()
        server.close()
        network.transport.abort()  # its tasks wait for workers that have left: on MPI nobody would tell them
    except SynclineError as error:  # the workers are gone, and say themselves why
        print(f"server {network.me}: {error}", file=sys.stderr)
        return 1
    finally:
        network.close()
    return 0


def _join() -> ServerNetwork:
    roles = read_roles()
    if os.environ.get("SYNCLINE_TRANSPORT") == "mpi":
        mpi = importlib.import_module("syncline.transports.mpi")  # only here: importing it starts MPI
        return network_of(mpi.connect(detect(), DEFAULT_TIMEOUT_S), roles.workers, roles.servers)
    return join_network(roles, DEFAULT_TIMEOUT_S)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
