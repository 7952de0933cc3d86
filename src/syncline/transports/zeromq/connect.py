"""Coming into a world: with the launch, or later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import TCPStore

from syncline.environment import Environment, Rendezvous
from syncline.errors import WorldError
from syncline.runtime import RealRuntime
from syncline.transports.store import find_place, first_line, listening_address, meet, second_connection
from syncline.transports.zeromq.directory import Directory
from syncline.transports.zeromq.node import Node
from syncline.transports.zeromq.security import VARIABLE, choose_key
from syncline.transports.zeromq.transport import ZmqTransport

__all__ = ["connect", "join"]

LOOK, LONGEST_LOOK = 0.02, 0.2
"""Seconds between looks for those who have not come yet: at first, and when that takes long."""


def connect(
    environment: Environment, timeout: float, key: str | None = None, label: str = "", patience: float | None = None
) -> ZmqTransport:
    """Join the world that the launcher describes. Every rank calls it; it returns when all are there.

    With a `label` it is a world of its own beside others at the same meeting point, perhaps with other members.
    `patience` is how long to wait for the others where that is not the timeout; `math.inf`: whenever they come.
    """
    place = find_place(environment)
    store = meet(environment, place, timeout)
    beside = f"/{label}" if label else ""
    generation = store.add(f"syncline/generation{beside}/{environment.rank}", 1)
    world = f"syncline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{generation}{beside}"
    one_host = environment.local_known and environment.local_size == environment.size
    node = _node(store, place, world, timeout, key, one_host)
    with _closing_on_error(node):
        if environment.rank == 0:
            node.directory.open(environment.size)
            store.set(f"syncline/world{beside}", world)
        node.join(environment.rank)
        _await_all(node, environment, place, timeout if patience is None else patience)
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


def _node(store: TCPStore, place: Rendezvous, world: str, timeout: float, key: str | None, one_host: bool) -> Node:
    address = listening_address(place.address, one_host)
    key = choose_key(address, key)
    runtime = RealRuntime()
    ours = second_connection(place, store, timeout)
    return Node(runtime, Directory(Directory.prefix(ours, world), ours, key, runtime), key, address)


def _await_all(node: Node, environment: Environment, place: Rendezvous, timeout: float) -> None:
    until, pause = node.runtime.now() + timeout, LOOK
    while missing := sorted(set(range(environment.size)) - set(node.directory.members)):
        node.directory.refresh()
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
