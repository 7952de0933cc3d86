"""The launcher's key-value store, through which the ranks find each other."""

from __future__ import annotations

import copy
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import TCPStore  # what torch.distributed re-exports untyped

from syncline.environment import Environment, Rendezvous, detect
from syncline.environment.lost_after import DEAD
from syncline.errors import WorldError
from syncline.runtime import Event, Queue, RealRuntime, Runtime

__all__ = [
    "ELASTIC_WORLD",
    "BoundedStore",
    "KeyValueStore",
    "StoreSilentError",
    "death_reason",
    "find_rendezvous",
    "first_line",
    "listening_address",
    "next_world_name",
    "no_launcher_store",
    "open_bounded_store",
    "open_store",
    "program_name",
    "watch_program",
]

logger = logging.getLogger("syncline")

T = TypeVar("T")

STORE_TIMEOUT_S = 10.0
"""Timeout in seconds of a call to the store: a cut network gives neither an answer nor an error."""
ELASTIC_WORLD = "syncline/elastic"
"""The prefix of the keys of an elastic job's world. There is one, whenever a member joins it."""
PROGRAM_VARIABLE = "SYNCLINE_PROGRAM"


def program_name() -> str:
    """The name under which the launcher watches this process, such as "rank 3"; empty without such a launcher."""
    return os.environ.get(PROGRAM_VARIABLE, "")


class KeyValueStore(Protocol):
    """A store of short texts that several processes share. Calls that fail raise a `RuntimeError`."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: Sequence[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...

    def close(self) -> None: ...


class StoreSilentError(RuntimeError):
    """The store has not answered in time. It may do so later: its process may be stopped, or the network cut."""


class BoundedStore:
    """A connection to a store whose calls time out: a `StoreSilentError` after `STORE_TIMEOUT_S` seconds.

    torch's own calls wait without end if the network is cut. Here a separate task makes them. While a call hangs in
    that task, every further call fails at once.
    """

    def __init__(self, store: Any, runtime: Runtime, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self.connection = _StoreConnection(store, runtime, timeout_s)
        self._prefix = ""

    def set(self, key: str, value: str) -> None:
        self.connection.call(lambda store: store.set(self._prefix + key, value))

    def get(self, key: str) -> bytes:
        return self.connection.call(lambda store: bytes(store.get(self._prefix + key)))

    def add(self, key: str, amount: int) -> int:
        return self.connection.call(lambda store: int(store.add(self._prefix + key, amount)))

    def check(self, keys: Sequence[str]) -> bool:
        return self.connection.call(lambda store: bool(store.check([self._prefix + key for key in keys])))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.connection.call(lambda store: bytes(store.compare_set(self._prefix + key, expected, desired)))

    def prefixed(self, prefix: str) -> KeyValueStore:
        """The part of the store whose keys begin with `prefix` and a slash."""
        part = copy.copy(self)
        part._prefix = f"{prefix}/"
        return part

    def close(self) -> None:
        """End the task after the calls before this one. Later calls fail, also those of the prefixed parts."""
        self.connection.close()


class _StoreConnection:
    """A store and the task that makes the calls to it, one at a time."""

    def __init__(self, store: Any, runtime: Runtime, timeout_s: float) -> None:
        self.store = store
        self.timeout_s = timeout_s
        self._runtime = runtime
        self._calls: Queue[_StoreCall | None] = runtime.queue(1 << 16)
        self._hangs: _StoreCall | None = None
        self._closed = False
        runtime.spawn(self._serve, name="store")

    def call(self, question: Callable[[Any], T]) -> T:
        hangs = self._hangs
        if self._closed:
            raise RuntimeError("this connection to the store is closed")
        if hangs is not None and not hangs.done.is_set():
            raise StoreSilentError(f"the store has not answered for {self._runtime.now() - hangs.since:.0f} s")
        call = _StoreCall(question, self._runtime.event(), self._runtime.now())
        self._calls.put(call)
        if not call.done.wait(self.timeout_s):
            self._hangs = call
            raise StoreSilentError(f"the store did not answer within {self.timeout_s:.3g} s")
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[no-any-return]

    def close(self) -> None:
        self._closed = True
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.result = call.question(self.store)
            except Exception as error:
                call.error = error
            finally:
                call.done.set()


@dataclass(eq=False)
class _StoreCall:
    """One call to the store. The caller waits for `done`."""

    question: Callable[[Any], Any]
    done: Event
    since: float
    result: Any = None
    error: Exception | None = None


def find_rendezvous(environment: Environment) -> Rendezvous:
    """The rendezvous of the ranks. Raises a `WorldError` if the launcher names none."""
    place = environment.rendezvous
    if place is None and environment.size == 1:
        place = Rendezvous("127.0.0.1", 0)  # any free port: no other process needs it
    if place is None:
        raise WorldError(
            f"{environment.source} started {environment.size} ranks on several hosts but names no rendezvous address: "
            "set MASTER_ADDR to the first host and MASTER_PORT to a free port there"
        )
    return place


def no_launcher_store(environment: Environment) -> str:
    """The refusal of an elastic job whose launcher serves no store."""
    return (
        f"an elastic job needs the store of `syncline run --elastic`, and {environment.source} serves none: "
        "the store must survive the loss of any worker"
    )


def listening_address(rendezvous: str, one_host: bool) -> str:
    """The address to listen at: the loopback interface, or the interface towards the rendezvous."""
    if one_host:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((rendezvous, 9))  # UDP: this sends nothing, it only looks up the route
        except OSError as error:
            raise WorldError(f"this host has no route to {rendezvous}: {error}; set MASTER_ADDR") from error
        return str(probe.getsockname()[0])


_stores: dict[tuple[str, int], TCPStore] = {}
"""Open stores, for the life of the process: a second world uses the same port."""


def open_store(environment: Environment, place: Rendezvous, timeout: float) -> TCPStore:
    """The store at the rendezvous. The launcher serves it, or else rank 0 for the life of its process."""
    key = (place.address, place.port)
    if key in _stores and not _answers(_stores[key]):
        del _stores[key]  # its server has ended; another job may use the port now
    if key not in _stores:
        is_host = environment.rank == 0 and not place.hosted
        listener = _listen(environment, place) if is_host else None
        port = place.port if listener is None else int(listener.getsockname()[1])
        try:
            _stores[key] = TCPStore(
                place.address,
                port,
                is_master=is_host,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        except (RuntimeError, ValueError) as error:
            raise WorldError(
                f"rank {environment.rank} ({environment.source}) found no store at {place.address}:{place.port} "
                f"within {timeout:.3g} s: is rank 0 running, and the port open? ({first_line(error)})"
            ) from error
    store = _stores[key]
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _answers(store: TCPStore) -> bool:
    try:
        store.check(["syncline"])
    except RuntimeError:
        return False
    return True


def next_world_name(store: TCPStore, rank: int, label: str = "") -> str:
    """The prefix of the keys of this rank's next world. It differs between worlds, and between restarts by torchrun."""
    suffix = f"/{label}" if label else ""
    generation = store.add(f"syncline/generation{suffix}/{rank}", 1)
    return f"syncline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{generation}{suffix}"


def open_bounded_store(place: Rendezvous, store: TCPStore, runtime: Runtime, timeout: float) -> BoundedStore:
    """A second connection with timeouts, for heartbeats. The first one may be waiting for a key."""
    limit = timedelta(seconds=timeout)
    return BoundedStore(
        TCPStore(place.address, store.port, is_master=False, timeout=limit, wait_for_workers=False), runtime
    )


def watch_program(name: str, timeout: float) -> Callable[[], str | None]:
    """A function that returns how a process such as the evaluator has failed; None while it has not.

    It always returns None without `syncline run`, which records failures.
    """
    environment = detect()
    place = environment.rendezvous
    if place is None or not place.hosted:
        return lambda: None
    store = open_bounded_store(place, open_store(environment, place, timeout), RealRuntime(), timeout)

    def ended() -> str | None:
        try:
            return death_reason(store.get(f"{DEAD}/{name}")) if store.check([f"{DEAD}/{name}"]) else None
        except RuntimeError:  # the store is gone
            return None

    return ended


def death_reason(record: bytes) -> str | None:
    """How a process has ended according to the launcher's record; None if another program has written the record."""
    try:
        return str(json.loads(record)["reason"])
    except (ValueError, KeyError, TypeError):
        return None


def _listen(environment: Environment, place: Rendezvous) -> socket.socket:
    """A listening socket on the rendezvous address alone: torch would listen on every interface."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        if str(address[0]).startswith("127.") and environment.local_known and environment.local_size < environment.size:
            logger.warning(
                "rank 0 listens at %s (%s), which other hosts cannot reach: set MASTER_ADDR to an address they can",
                address[0],
                place.address,
            )
        listener.listen(max(128, environment.size))
        return listener
    except OSError as error:
        raise WorldError(
            f"rank 0 ({environment.source}) cannot listen at {place.address}:{place.port}: {error}; "
            "set MASTER_ADDR to an address of this host and MASTER_PORT to a free port"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an engine's error, without its trace."""
    return str(error).strip().split("\n", 1)[0]
