"""The TCP store of a run, served by the launcher, and the events that are posted there."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

from syncline.environment.lost_after import ALIVE, DEAD
from syncline.errors import ProtocolError, WorldError
from syncline.launch.processes import ProcessExit

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

    from syncline.transports.key_value_store import BoundedStore

STORE_TIMEOUT_S = 20.0
ENDED = "run/ended"
RAISED = "run/raised"
READY = "run/agent"


def serve_store(address: str, ranks: int = 1) -> TCPStore:
    """Serve a store that listens at `address` only, at a free port. torch would listen on every interface."""
    from torch._C._distributed_c10d import TCPStore

    listener = _listen(address, max(128, ranks))
    port = int(listener.getsockname()[1])
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _listen(address: str, backlog: int) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.bind(place)
        listener.listen(backlog)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise WorldError(
            f"cannot listen at {address}: {error}; name an address of this machine with --address"
        ) from error
    return listener


def join_store(address: str, port: int, timeout_s: float = STORE_TIMEOUT_S) -> TCPStore:
    """Connect to the store that another process serves."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


class ProcessEvents:
    """Events in the store: failures for the ranks, and reports of agents for the launcher."""

    def __init__(self, store: Store | BoundedStore) -> None:
        self.store = store
        self._read = {ENDED: 0, RAISED: 0}

    def post_dead(self, ended: ProcessExit, reason: str = "") -> None:
        """Report to the ranks that a rank, server or evaluator has failed, or that a rank has left for a reason."""
        who = ended.name if ended.rank is None else ended.rank
        self.store.set(f"{DEAD}/{who}", json.dumps({"rank": ended.rank, "reason": reason or ended.reason()}))
        self.store.add(DEAD, 1)

    def read_heartbeats(self, names: Iterable[str]) -> dict[str, str]:
        """The latest heartbeat of each program; "" for a program that has sent none."""
        keys = {name: f"{ALIVE}/{name}" for name in names}
        return {name: self.store.get(key).decode() if self.store.check([key]) else "" for name, key in keys.items()}

    def post(self, kind: str, what: ProcessExit) -> None:
        """Report to the launcher a program of this host: one that has `ENDED`, or has `RAISED` and not ended yet."""
        number = self.store.add(f"{kind}/next", 1)
        self.store.set(f"{kind}/{number}", what.to_json())
        self.store.add(kind, 1)

    def read_new(self, kind: str) -> list[ProcessExit]:
        """The reports of other hosts since the last call: programs that have `ENDED`, or have `RAISED`."""
        found = []
        count = self.store.add(kind, 0)
        # A writer takes a number before it writes the value, so a lower number may still be missing.
        while self._read[kind] < count and self.store.check([f"{kind}/{self._read[kind] + 1}"]):
            self._read[kind] += 1
            found.append(self._read_one(f"{kind}/{self._read[kind]}"))
        return found

    def _read_one(self, key: str) -> ProcessExit:
        text = self.store.get(key)
        try:
            return ProcessExit.from_json(text)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(
                f"{key} in the store is not a report of an agent: {text[:80]!r}; does another program write there?"
            ) from error

    def post_ready(self, host: int) -> None:
        """Report to the launcher that the agent of a host has started its programs."""
        self.store.set(f"{READY}/{host}", "1")

    def is_ready(self, host: int) -> bool:
        """Whether the agent of a host has started its programs."""
        return bool(self.store.check([f"{READY}/{host}"]))
