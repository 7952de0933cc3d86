"""Meeting the other ranks at the launcher's address."""

from __future__ import annotations

import os

from torch._C._distributed_c10d import PrefixStore, Store

from syncline.environment import Environment, Rendezvous
from syncline.errors import PeerLostError, WorldError
from syncline.runtime import RealRuntime
from syncline.transports.liveness import Liveness
from syncline.transports.store import (
    find_place,
    first_line,
    listening_address,
    meet,
    program_name,
    second_connection,
)
from syncline.transports.torch_dist.engine import Engine
from syncline.transports.torch_dist.transport import TorchTransport

__all__ = ["connect"]


def connect(environment: Environment, timeout: float) -> TorchTransport:
    """Join the world that the launcher describes. Every rank calls it; it returns when all are there."""
    place = find_place(environment)
    store = meet(environment, place, timeout)
    generation = store.add(f"syncline/generation/{environment.rank}", 1)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"syncline/{restart}/{generation}"
    prefix = PrefixStore(name, store)
    prefix.set(f"here/{environment.rank}", "1")
    runtime = RealRuntime()
    watch = second_connection(place, store, runtime, timeout)
    liveness = Liveness(
        watch.prefixed(name),
        watch,
        rank=environment.rank,
        size=environment.size,
        runtime=runtime,
        host_rank=None if place.hosted else 0,
        program=program_name(),
    )
    one_host = environment.local_known and environment.local_size == environment.size
    engine = Engine(prefix, liveness, timeout, listening_address(place.address, one_host), watch.close)
    try:
        return TorchTransport(engine, tuple(range(environment.size)), environment.rank)
    except WorldError:
        engine.close()
        raise
    except PeerLostError as error:
        ended = liveness.dead.get(-1 if error.peer is None else error.peer)
        engine.close()
        if ended is not None:
            raise WorldError(
                f"rank {environment.rank} of {environment.size} ({environment.source}) cannot join: rank {error.peer} "
                f"has ended before all had joined: {ended}"
            ) from error
        raise WorldError(_who_is_missing(prefix, environment, place, timeout, error)) from error


def _who_is_missing(store: Store, environment: Environment, place: Rendezvous, timeout: float, error: Exception) -> str:
    try:
        missing = [rank for rank in range(environment.size) if not store.check([f"here/{rank}"])]
    except RuntimeError:
        missing = []
    who = first_line(error)
    if missing:
        who = f"ranks {missing} did not come (if a wrapper script starts them, set MASTER_ADDR and MASTER_PORT)"
    return (
        f"rank {environment.rank} of {environment.size} ({environment.source}) could not join at "
        f"{place.address}:{place.port} within {timeout:.3g} s: {who}"
    )
