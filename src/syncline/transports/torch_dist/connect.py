"""Meeting the other ranks at the launcher's address."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from syncline.environment import Environment, Rendezvous
from syncline.errors import PeerLostError, WorldError
from syncline.runtime import RealRuntime
from syncline.transports.torch_dist.engine import Engine
from syncline.transports.torch_dist.liveness import Liveness
from syncline.transports.torch_dist.transport import TorchTransport

__all__ = ["connect"]

logger = logging.getLogger("syncline")


def connect(environment: Environment, timeout: float) -> TorchTransport:
    """Join the world that the launcher describes. Every rank calls it; it returns when all are there."""
    place = environment.rendezvous
    if place is None and environment.size == 1:
        place = Rendezvous("127.0.0.1", 0)  # a port of our choice: nobody else needs to know it
    if place is None:
        raise WorldError(
            f"{environment.source} started {environment.size} ranks on several hosts but names no meeting point: "
            "set MASTER_ADDR to the first host and MASTER_PORT to a free port there"
        )
    store = _meet(environment, place, timeout)
    generation = store.add(f"syncline/generation/{environment.rank}", 1)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"syncline/{restart}/{generation}"
    prefix = PrefixStore(name, store)
    prefix.set(f"here/{environment.rank}", "1")
    liveness = Liveness(
        PrefixStore(name, _second_connection(place, store, timeout)),
        rank=environment.rank,
        size=environment.size,
        runtime=RealRuntime(),
        host_rank=None if place.hosted else 0,
    )
    engine = Engine(
        prefix, liveness, timeout, one_host=environment.local_known and environment.local_size == environment.size
    )
    try:
        return TorchTransport(engine, tuple(range(environment.size)), environment.rank)
    except PeerLostError as error:
        liveness.close()
        raise WorldError(_who_is_missing(prefix, environment, place, timeout, error)) from error


_stores: dict[tuple[str, int], TCPStore] = {}
"""For the life of the process: a server keeps its port, and a world that is made again meets there too."""


def _meet(environment: Environment, place: Rendezvous, timeout: float) -> TCPStore:
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
                f"within {timeout:.3g} s: is rank 0 running, and the port open? ({_first_line(error)})"
            ) from error
    store = _stores[key]
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _second_connection(place: Rendezvous, store: TCPStore, timeout: float) -> TCPStore:
    """Beats go on while the first connection waits for a key."""
    return TCPStore(
        place.address, store.port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False
    )


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


def _who_is_missing(store: Store, environment: Environment, place: Rendezvous, timeout: float, error: Exception) -> str:
    try:
        missing = [rank for rank in range(environment.size) if not store.check([f"here/{rank}"])]
    except RuntimeError:
        missing = []
    who = _first_line(error)
    if missing:
        who = f"ranks {missing} did not come (if a wrapper script starts them, set MASTER_ADDR and MASTER_PORT)"
    return (
        f"rank {environment.rank} of {environment.size} ({environment.source}) could not join at "
        f"{place.address}:{place.port} within {timeout:.3g} s: {who}"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
