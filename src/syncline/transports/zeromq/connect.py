"""Joins a world when it is launched, or later."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import TCPStore

from syncline.environment import Environment, Rendezvous
from syncline.environment.lost_after import lost_after
from syncline.errors import WorldError
from syncline.runtime import RealRuntime, Runtime
from syncline.transports.base import Transport
from syncline.transports.key_value_store import (
    ELASTIC_WORLD,
    KeyValueStore,
    find_rendezvous,
    first_line,
    listening_address,
    next_world_name,
    no_launcher_store,
    open_bounded_store,
    open_store,
    program_name,
)
from syncline.transports.link_probe import elastic_address, probe_links
from syncline.transports.liveness import Liveness
from syncline.transports.single import SingleTransport
from syncline.transports.zeromq.membership import KEY_VARIABLE, MembershipLog, choose_key
from syncline.transports.zeromq.node import Node
from syncline.transports.zeromq.transport import ZmqTeamTransport, ZmqTransport

__all__ = ["ZmqConnector", "connect", "join"]

LAUNCHER_TIMEOUT_FACTOR = 3
"""The timeout for silent peers is this many times longer if `syncline run` watches the processes."""
MAX_CLOSE_WAIT_S = 5.0
"""Seconds for which a member of an elastic job that leaves waits until the others have taken its messages."""
MIN_POLL_S, MAX_POLL_S = 0.02, 0.2
"""Seconds between two checks for ranks that have not joined yet: at first, and at most."""


def connect(
    environment: Environment,
    timeout: float,
    key: str | None = None,
    label: str = "",
    join_timeout: float | None = None,
    name_of: Callable[[int], str] = "rank {}".format,
    survives: bool = False,
) -> ZmqTransport:
    """Join the world that the launcher describes. Every rank calls it; it returns when all have joined.

    With a `label` it is a separate world at the same rendezvous, perhaps with other members; `name_of` returns their
    names. `join_timeout` is the time in seconds to wait for the others, by default `timeout`; `math.inf`: no limit.
    `survives`: ranks that have ended are not awaited. Those that join later must then have numbers of their own.
    """
    place = find_rendezvous(environment)
    store = open_store(environment, place, timeout)
    world = next_world_name(store, environment.rank, label)
    node = _node(store, place, world, timeout, key, environment.on_one_host, name_of)
    with _closing_on_error(node):
        if environment.rank == 0:
            node.membership.open(environment.size)
        if environment.rank == 0 or survives:
            store.set(f"syncline/world/{label}" if label else "syncline/world", world)
        node.join(environment.rank)
        _await_all(node, environment, place, timeout if join_timeout is None else join_timeout, survives)
        node.membership.check_versions(launched=0 if survives else environment.size)
        return ZmqTransport(node, tuple(range(environment.size)), timeout)


def join(
    place: Rendezvous,
    timeout: float,
    key: str | None = None,
    label: str = "",
    name_of: Callable[[int], str] = "rank {}".format,
    name: str = "",
    rank: int | None = None,
) -> ZmqTransport:
    """Join a running world. `place` is the rendezvous of its ranks.

    `label` and `name_of` are those of `connect`. `name` is this process's own name, if its launcher does not know it by
    its rank. `rank` is a number that no other process gets; by default it is the next one.
    """
    environment = Environment(source="a process that joins")
    store = open_store(environment, Rendezvous(place.address, place.port, hosted=True), timeout)
    try:
        world = store.get(f"syncline/world/{label}" if label else "syncline/world").decode()
    except RuntimeError as error:
        raise WorldError(
            f"no ZeroMQ world is open at {place.address}:{place.port}: its rank 0 starts with "
            f'sl.init(transport="zeromq") ({first_line(error)})'
        ) from error
    one_host = place.address.startswith("127.") or place.address == "localhost"
    node = _node(store, place, world, timeout, key, one_host, name_of)
    with _closing_on_error(node):
        until = node.runtime.now() + timeout
        _await_members(node, place, until)
        rank = node.membership.next_rank() if rank is None else rank
        node.join(rank, name)
        node.membership.refresh()
        while rank not in node.membership.members:
            if not node.membership.reachable or node.runtime.now() > until:
                raise WorldError(
                    f"rank {rank} has joined the world at {place.address}:{place.port}, but did not find its own entry "
                    f"in the membership log within {timeout:.3g} s: does the store answer, and do others write to it?"
                )
            node.runtime.sleep(MIN_POLL_S)
            node.membership.refresh()
        node.membership.check_versions()
        return ZmqTransport(node, tuple(range(rank + 1)), timeout)


@contextmanager
def _closing_on_error(node: Node) -> Iterator[None]:
    try:
        yield
    except BaseException:
        node.close(0.0)
        raise


def _await_members(node: Node, place: Rendezvous, until: float) -> None:
    """Wait until the membership log names a member. If none of its entries can be read, the key differs."""
    membership = node.membership
    membership.refresh()
    while not membership.members and membership.incomplete and node.runtime.now() < until:
        node.runtime.sleep(MIN_POLL_S)
        membership.refresh()
    if membership.refused and not membership.members:
        raise WorldError(
            f"the world at {place.address}:{place.port} has another key: none of the {membership.refused} entries "
            f"in its membership log is signed with this one; give join() the key that its ranks have ({KEY_VARIABLE})"
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
    ours = open_bounded_store(place, store, runtime, timeout)
    membership = MembershipLog(ours.prefixed(f"{world}/zeromq"), ours, key, runtime, name_of)

    def make_liveness(rank: int) -> Liveness:
        records = ours.prefixed(f"{world}/zeromq")
        liveness = Liveness(records, ours, rank, 0, runtime, program=program_name(), gone=lambda: dict(membership.gone))
        liveness.warn_after_s = math.inf  # the node warns of long waits itself
        return liveness

    # If a launcher watches the processes, its decision comes first: it sees more than missing messages.
    launched = bool(program_name())
    silence_s = (LAUNCHER_TIMEOUT_FACTOR if launched else 1) * lost_after()
    return Node(
        runtime, membership, key, address, make_liveness, ours.prefixed(f"{world}/control"), silence_s, launched
    )


def _await_all(node: Node, environment: Environment, place: Rendezvous, timeout: float, survives: bool) -> None:
    until, pause = node.runtime.now() + timeout, MIN_POLL_S
    while missing := sorted(set(range(environment.size)) - set(node.membership.members)):
        node.membership.refresh()
        ended = _ended(node, missing)
        if survives and ended.keys() >= set(missing):
            return
        if ended and not survives:
            rank, reason = next(iter(ended.items()))
            raise WorldError(
                f"rank {environment.rank} of {environment.size} ({environment.source}) cannot join: "
                f"{node.membership.name_of(rank)} has ended before all had joined: {reason}"
            )
        if node.runtime.now() > until:
            refused = f"; {node.membership.refused} entries were refused: is {KEY_VARIABLE} the same everywhere?"
            raise WorldError(
                f"rank {environment.rank} of {environment.size} ({environment.source}) waited {timeout:.3g} s at "
                f"{place.address}:{place.port}: ranks {missing} did not join"
                f"{refused if node.membership.refused else ''}"
            )
        if not node.membership.reachable:
            raise WorldError(f"rank {environment.rank} waited for ranks {missing}, and the store they meet at is gone")
        node.runtime.sleep(pause)
        pause = min(1.1 * pause, MAX_POLL_S)


def _ended(node: Node, missing: list[int]) -> dict[int, str]:
    """The missing members that have ended according to the launcher, each with the reason."""
    membership = node.membership
    try:
        return membership.deaths_of(missing) if membership.reachable and membership.answers else {}
    except RuntimeError:  # the next attempt may succeed
        return {}


class ZmqConnector:
    """Makes the channels of the teams of an elastic job, all on the sockets of one node.

    A change of the team opens no connection between members that stay. The connection to a newcomer is opened while
    its first messages wait.
    """

    def __init__(self, environment: Environment, timeout: float, member: int, key: str | None = None) -> None:
        self.member, self.timeout = member, timeout
        place = find_rendezvous(environment)
        if not place.hosted:
            raise WorldError(no_launcher_store(environment))
        address = elastic_address(place)
        key = choose_key(address, key)
        self.runtime: Runtime = RealRuntime()
        ours = open_bounded_store(place, open_store(environment, place, timeout), self.runtime, timeout)
        self.store: KeyValueStore = ours.prefixed("syncline")
        records = ours.prefixed(f"{ELASTIC_WORLD}/zeromq")

        def make_liveness(rank: int) -> Liveness:
            links = probe_links(records, rank, address, self.runtime)
            return Liveness(records, ours, rank, 0, self.runtime, program=program_name(), elastic=True, links=links)

        self.node = Node(
            self.runtime,
            MembershipLog(records, ours, key, self.runtime, trusts_launcher=True),
            key,
            address,
            make_liveness,
            ours.prefixed(f"{ELASTIC_WORLD}/control"),
            launched=True,
            elastic=True,
        )
        with _closing_on_error(self.node):
            self.node.join(member)

    def lost(self) -> dict[int, str]:
        return self.node.liveness.read_lost()

    def unreachable(self) -> dict[int, str]:
        links = self.node.liveness.links
        return {**self.node.broken_links, **({} if links is None else links.unreachable)}

    def follow(self, members: Iterable[int]) -> None:
        self.node.liveness.follow(members)

    def add_roles(self, transport: Transport) -> Transport:
        return transport

    def connect(self, members: tuple[int, ...], number: int) -> Transport:
        self.node.liveness.follow(members)
        if len(members) == 1:
            return SingleTransport(self.runtime, self.timeout)
        channel = ZmqTeamTransport(self.node, members, self.timeout, number)
        channel.monitor.watch(range(len(members)))
        return channel

    def close(self) -> None:
        self.node.close(min(self.timeout, MAX_CLOSE_WAIT_S))
