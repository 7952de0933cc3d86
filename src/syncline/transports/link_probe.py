"""Finds links that are cut: TCP connections to a port at which every process of an elastic job listens.

A long wait has one of several causes: the peer computes, the network is slow, or a link is cut. The kernel of the
peer's host answers a connection even if the process is busy or stopped, or has ended. So only a host that does not
answer for `timeout_s` seconds cannot be reached::

    rank 1 ── connect ──► host of rank 2   answered or refused: the link works
           ── connect ──► host of rank 3   no answer for timeout_s: unreachable[3]

No call waits: the task that sends the heartbeats calls `poll` repeatedly.
"""

from __future__ import annotations

import errno
import json
import math
import select
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from syncline.environment import Rendezvous
from syncline.environment.lost_after import lost_after
from syncline.runtime import Runtime
from syncline.transports.key_value_store import KeyValueStore, listening_address

__all__ = ["LinkProbe", "elastic_address", "probe_links"]

BACKLOG = 128
REACHED = (0, errno.ECONNREFUSED, errno.ECONNRESET)
"""Results of a connection attempt that came from the peer's host."""


@dataclass(eq=False)
class _Attempt:
    address: tuple[str, int]
    since: float
    socket: socket.socket | None = None


class LinkProbe:
    """One process's port, and its connection attempts to those of the others."""

    def __init__(self, store: KeyValueStore, rank: int, address: str, runtime: Runtime, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        """Seconds without an answer after which a host cannot be reached."""
        self.unreachable: dict[int, str] = {}
        """The ranks whose hosts did not answer, each with the reason."""
        self._store = store
        self._rank = rank
        self._now = runtime.now
        self._lock = runtime.lock()
        self._addresses: dict[int, tuple[str, int]] = {}
        self._attempts: dict[int, _Attempt] = {}
        self._listener = socket.create_server((address, 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        store.set(f"probe/{rank}", json.dumps(self._listener.getsockname()[:2]))

    def start(self, ranks: Iterable[int]) -> None:
        """Begin to connect to these ranks, unless an attempt is in progress."""
        with self._lock:
            for rank in ranks:
                if rank != self._rank and rank not in self._attempts and rank not in self.unreachable:
                    address = self._address_of(rank)
                    if address is not None:
                        self._attempts[rank] = _Attempt(address, self._now())
        self.poll()

    def poll(self) -> list[int]:
        """Accept the connections of others, and look at the attempts. Returns the ranks found unreachable now."""
        found = []
        with self._lock:
            with suppress(OSError):  # no more of them, or closed
                for _ in range(BACKLOG):
                    self._listener.accept()[0].close()
            for rank, attempt in list(self._attempts.items()):
                if self._is_answered(attempt):
                    del self._attempts[rank]
                elif self._now() - attempt.since > self.timeout_s:
                    _close(attempt)
                    del self._attempts[rank]
                    host = attempt.address[0]
                    self.unreachable[rank] = f"its host ({host}) has not answered for {self.timeout_s:.3g} s"
                    found.append(rank)
        return found

    @property
    def pending(self) -> bool:
        """Whether an attempt is in progress."""
        return bool(self._attempts)

    def close(self) -> None:
        """End the attempts and stop listening."""
        with self._lock:
            for attempt in self._attempts.values():
                _close(attempt)
            self._attempts.clear()
            self._listener.close()

    def _address_of(self, rank: int) -> tuple[str, int] | None:
        """The address at which a rank listens; None if it has written none, or the store does not answer."""
        key = f"probe/{rank}"
        with suppress(RuntimeError):
            if rank not in self._addresses and self._store.check([key]):
                host, port = json.loads(self._store.get(key))
                self._addresses[rank] = (str(host), int(port))
        return self._addresses.get(rank)

    @staticmethod
    def _is_answered(attempt: _Attempt) -> bool:
        if attempt.socket is None:
            attempt.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            attempt.socket.setblocking(False)
            result = attempt.socket.connect_ex(attempt.address)
        else:
            watch = select.poll()
            watch.register(attempt.socket, select.POLLOUT)
            ended = bool(watch.poll(0))
            result = attempt.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if ended else errno.EINPROGRESS
        if result != errno.EINPROGRESS:
            _close(attempt)  # after an error of this host, such as no route, the next call tries again
        return result in REACHED


def elastic_address(rendezvous: Rendezvous) -> str:
    """The address at which a member of an elastic job listens: members of other hosts may join if they find the store.

    >>> elastic_address(Rendezvous("127.0.0.1", 1234))
    '127.0.0.1'
    """
    return listening_address(rendezvous.address, _is_loopback(rendezvous.address))


def probe_links(store: KeyValueStore, rank: int, address: str, runtime: Runtime) -> LinkProbe | None:
    """The probe of a member of an elastic job; None if no member is on another host, or losses have no time limit.

    A wait is suspicious after half the time after which a silent process counts as lost; a host that does not answer
    for the other half cannot be reached.
    """
    limit = lost_after()
    if _is_loopback(address) or limit == math.inf:
        return None
    return LinkProbe(store, rank, address, runtime, timeout_s=limit / 2)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "localhost"


def _close(attempt: _Attempt) -> None:
    if attempt.socket is not None:
        attempt.socket.close()
        attempt.socket = None
