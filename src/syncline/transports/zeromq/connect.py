"""Coming into a world: with the launch, or later."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import TCPStore

from syncline.environment import Environment, Rendezvous
from syncline.environment.heartbeats import lost_after
from syncline.errors import WorldError
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
from syncline.transports.zeromq.directory import Directory
from syncline.transports.zeromq.node import Node
from syncline.transports.zeromq.security import VARIABLE, choose_key
from syncline.transports.zeromq.transport import ZmqTransport

__all__ = ["connect", "join"]

LAUNCHER_TIMEOUT_FACTOR = 3
"""The timeout for silent peers is so many times longer where `syncline run` watches their processes."""
LOOK, LONGEST_LOOK = 0.02, 0.2
"""Seconds between looks for those who have not come yet: at first, and when that takes long."""


def connect(
    environment: Environment,
    timeout: float,
    key: str | None = None,
    label: str = "",
    patience: float | None = None,
    name_of: Callable[[int], str] = "rank {}".format,
) -> ZmqTransport:
    """Join the world that the launcher describes. Every rank calls it; it returns when all are there.

    With a `label` it is a separate world at the same meeting point, perhaps with other members; `name_of` returns
    their names. `patience` is the time in seconds to wait for the others, if not the timeout; `math.inf` for no limit.
    """
    place = find_place(environment)
    store = meet(environment, place, timeout)
    beside = f"/{label}" if label else ""
    generation = store.add(f"syncline/generation{beside}/{environment.rank}", 1)
    world = f"syncline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{generation}{beside}"
    one_host = environment.local_known and environment.local_size == environment.size
    node = _node(store, place, world, timeout, key, one_host, name_of)
    with _closing_on_error(node):
        if environment.rank == 0:
            node.directory.open(environment.size)
            store.set(f"syncline/world{beside}", world)
        node.join(environment.rank)
        _await_all(node, environment, place, timeout if patience is None else patience)
        node.directory.check_versions(launched=environment.size)
        return ZmqTransport(node, tuple(range(environment.size)), timeout)


def join(place: Rendezvous, timeout: float, key: str | None = None) -> ZmqTransport:
    """Join a world that is under way, under the next rank. `place` is where its ranks met."""
    stranger = Environment(source="a process that joins")
    store = meet(stranger, Rendezvous(place.address, place.port, hosted=True), timeout)
    try:
        world = store.get("syncline/world").decode()
    except RuntimeError as error:
        raise WorldError(
            f"no ZeroMQ world is open at {place.address}:{place.port}: its rank 0 starts with "
            f'sl.init(transport="zeromq") ({first_line(error)})'
        ) from error
    one_host = place.address.startswith("127.") or place.address == "localhost"
    node = _node(store, place, world, timeout, key, one_host)
    with _closing_on_error(node):
        until = node.runtime.now() + timeout
        _await_members(node, place, until)
        rank = node.directory.next_rank()
        node.join(rank)
        node.directory.refresh()
        while rank not in node.directory.members:
            if not node.directory.reachable or node.runtime.now() > until:
                raise WorldError(
                    f"rank {rank} has joined the world at {place.address}:{place.port}, but did not find its own entry "
                    f"in the directory within {timeout:.3g} s: is its store still there, and who else writes to it?"
                )
            node.runtime.sleep(LOOK)
            node.directory.refresh()
        node.directory.check_versions()
        return ZmqTransport(node, tuple(range(rank + 1)), timeout)


@contextmanager
def _closing_on_error(node: Node) -> Iterator[None]:
    try:
        yield
    except BaseException:
        node.close(0.0)
        raise


def _await_members(node: Node, place: Rendezvous, until: float) -> None:
    """Wait until the directory names one who is there. Where none of its entries can be read, the key is another."""
    directory = node.directory
    directory.refresh()
    while not directory.members and directory.behind and node.runtime.now() < until:
        node.runtime.sleep(LOOK)
        directory.refresh()
    if directory.refused and not directory.members:
        raise WorldError(
            f"the world at {place.address}:{place.port} has another key: none of the {directory.refused} entries "
            f"in its directory is signed with this one; give join() the key that its ranks have ({VARIABLE})"
        )


def _node(
    store: TCPStore,
    place: Rendezvous,
    world: str,
    timeout: float,
    key: str | None,
    one_host: bool,
    name_of: Callable[[int], str] = "rank {}".format,
) -> Node:
    address = listening_address(place.address, one_host)
    key = choose_key(address, key)
    runtime = RealRuntime()
    ours = second_connection(place, store, runtime, timeout)
    directory = Directory(ours.prefixed(f"{world}/zeromq"), ours, key, runtime, name_of)

    def watch(rank: int) -> Liveness:
        records = ours.prefixed(f"{world}/zeromq")
        found = Liveness(records, ours, rank, 0, runtime, program=program_name(), gone=lambda: dict(directory.gone))
        found.warn_after = math.inf  # the node warns of waits itself
        return found

    # If a launcher watches the processes, its decision comes first: it sees more than missing messages.
    launched = bool(program_name())
    patience = (LAUNCHER_TIMEOUT_FACTOR if launched else 1) * lost_after()
    return Node(runtime, directory, key, address, watch, patience, launched)


def _await_all(node: Node, environment: Environment, place: Rendezvous, timeout: float) -> None:
    until, pause = node.runtime.now() + timeout, LOOK
    while missing := sorted(set(range(environment.size)) - set(node.directory.members)):
        node.directory.refresh()
        _raise_if_ended(node, environment, missing)
        if node.runtime.now() > until:
            strangers = f"; {node.directory.refused} entries were refused: is {VARIABLE} the same everywhere?"
            raise WorldError(
                f"rank {environment.rank} of {environment.size} ({environment.source}) waited {timeout:.3g} s at "
                f"{place.address}:{place.port}: ranks {missing} did not come"
                f"{strangers if node.directory.refused else ''}"
            )
        if not node.directory.reachable:
            raise WorldError(f"rank {environment.rank} waited for ranks {missing}, and the store they meet at is gone")
        node.runtime.sleep(pause)
        pause = min(1.1 * pause, LONGEST_LOOK)


def _raise_if_ended(node: Node, environment: Environment, missing: list[int]) -> None:
    """Raise if a missing member has ended according to the launcher. A server waits for any number of members."""
    directory = node.directory
    try:
        ended = directory.deaths_of(missing) if directory.reachable and directory.answers else {}
    except RuntimeError:  # the next attempt may succeed
        return
    for rank, reason in ended.items():
        raise WorldError(
            f"rank {environment.rank} of {environment.size} ({environment.source}) cannot join: "
            f"{directory.name_of(rank)} has ended before all had joined: {reason}"
        )
