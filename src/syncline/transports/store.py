"""The launcher's store: where the ranks of a world meet before they have any other way to talk."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # what torch.distributed re-exports untyped

from syncline.environment import Environment, Rendezvous, detect
from syncline.errors import WorldError

__all__ = ["DEAD", "find_place", "first_line", "listening_address", "meet", "second_connection", "watch_program"]

logger = logging.getLogger("syncline")

DEAD = "syncline/dead"
"""Where the launcher counts the ranks that it has seen end badly; under DEAD/RANK it says how.

Of a program that is no rank it says so under DEAD/NAME.
"""


def find_place(environment: Environment) -> Rendezvous:
    """Where the ranks meet, or a `WorldError` that says how to name a place."""
    place = environment.rendezvous
    if place is None and environment.size == 1:
        place = Rendezvous("127.0.0.1", 0)  # a port of our choice: nobody else needs to know it
    if place is None:
        raise WorldError(
            f"{environment.source} started {environment.size} ranks on several hosts but names no meeting point: "
            "set MASTER_ADDR to the first host and MASTER_PORT to a free port there"
        )
    return place


def listening_address(meeting_point: str, one_host: bool) -> str:
    """Where to listen: the loopback interface, or the interface from which the meeting point is reached."""
    if one_host:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((meeting_point, 9))  # sends nothing: it only asks for the route
        except OSError as error:
            raise WorldError(f"no way leads from here to {meeting_point}: {error}; set MASTER_ADDR") from error
        return str(probe.getsockname()[0])


_stores: dict[tuple[str, int], TCPStore] = {}
"""For the life of the process: a server keeps its port, and a world that is made again meets there too."""


def meet(environment: Environment, place: Rendezvous, timeout: float) -> TCPStore:
    """The store at the meeting point: served by the launcher, or else by rank 0 for the life of its process."""
    key = (place.address, place.port)
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


def second_connection(place: Rendezvous, store: TCPStore, timeout: float) -> TCPStore:
    """Beats go on while the first connection waits for a key."""
    return TCPStore(
        place.address, store.port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False
    )


def watch_program(name: str, timeout: float) -> Callable[[], str | None]:
    """What the launcher tells of a program beside the ranks: a call gives how it ended badly, None while it has not.

    Where no launcher of ours serves the store nothing is told.
    """
    environment = detect()
    place = environment.rendezvous
    if place is None or not place.hosted:
        return lambda: None
    store = second_connection(place, meet(environment, place, timeout), timeout)

    def ended() -> str | None:
        try:
            return str(json.loads(store.get(f"{DEAD}/{name}"))["reason"]) if store.check([f"{DEAD}/{name}"]) else None
        except (RuntimeError, ValueError, KeyError, TypeError):  # the store is gone, or somebody else writes there
            return None

    return ended


def _listen(environment: Environment, place: Rendezvous) -> socket.socket:
    """A listening socket on the meeting point's own address: torch alone would listen on every interface."""
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
    """What an engine's error says before its trace."""
    return str(error).strip().split("\n", 1)[0]
