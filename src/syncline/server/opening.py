"""Opening a space: by all workers together, or by somebody who only watches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from torch import Tensor

from syncline.codecs import Codec, build_codec, check_no_gradient_options
from syncline.errors import IncompatibleError, SpecError
from syncline.server.client import Client, ClusterStatus
from syncline.server.filters import Filter, build_filter
from syncline.server.network import ServerNetwork, server_network
from syncline.server.protocol import PIECE, Post
from syncline.server.rules import UpdateRule, build_rule
from syncline.server.server import Server
from syncline.server.space import Keys, SpaceDescription, pack_starts
from syncline.world import World, current_world

__all__ = ["TreeClient", "WorkerGroup", "groups_of", "open_space", "open_tree", "store", "watch_space"]

LEAVING = 60.0
"""Seconds that leaving waits for those who still need this process's shard, at least."""


def store(
    numel: int,
    rule: str | UpdateRule = "add",
    *,
    initial: Tensor | None = None,
    codec: str | Codec | None = None,
    filters: str | Filter | None = None,
    world: World | None = None,
) -> Client:
    """A space of `numel` float32 keys that all workers share, sharded over the servers. Every worker calls it.

    `rule` says what a push does: "add", "assign", "sgd(0.1)", "adagrad(0.1)", "handler('mine')", … Values go in
    `codec`; `filters` hold back what is not worth sending yet. The keys begin at 0, or at rank 0's `initial`.

    >>> import torch, syncline as sl
    >>> with sl.init() as world, sl.store(3, rule="sgd(0.5)") as weights:
    ...     weights.push_pull(None, torch.tensor([1.0, 2.0, 3.0])).wait()
    tensor([-0.5000, -1.0000, -1.5000])
    """
    world = current_world() if world is None else world
    if not isinstance(numel, int) or numel < 1:
        raise SpecError(f"store({numel!r}): a number of keys, at least one")
    coder = build_codec(codec)
    if coder is not None:
        check_no_gradient_options(coder, "a store")
    return open_space(
        world,
        "store",
        numel,
        rules=(repr(build_rule(rule)),),
        codec=None if coder is None else repr(coder),
        filters=None if filters is None else build_filter(filters),
        initial=initial,
    )


def open_space(
    world: World,
    name: str,
    numel: int,
    *,
    rules: Sequence[str] = ("add",),
    bounds: Sequence[int] = (0,),
    synchronous: bool = False,
    quorum: float = 1.0,
    damped: bool = False,
    codec: str | None = None,
    filters: Filter | None = None,
    servers: Sequence[int] | None = None,
    workers: Sequence[int] | None = None,
    mean: bool = False,
    upward: str = "",
    parameters: Sequence[int] = (),
    piece: int = PIECE,
    initial: Tensor | None = None,
    retry: float | None = None,
    seed: int = 0,
    kind: type[Client] = Client,
) -> Client:
    """Open a space together with the other workers of the world, in the same order on all of them.

    `servers` are members of the network that hold its shards (all that serve, if not told), `workers` those with a
    clock (all).
    """
    _check_filters(filters, rules)
    network = server_network(world)
    host = world.keep("syncline.server", lambda: Server(network).start()) if network.serves else None
    names = world.keep(("spaces", name), _Names)
    description = SpaceDescription(
        name=f"{name} {next(names.numbers)}",
        numel=numel,
        servers=tuple(network.servers if servers is None else servers),
        workers=tuple(network.workers if workers is None else workers),
        rules=tuple(rules),
        bounds=tuple(bounds),
        synchronous=synchronous,
        quorum=quorum,
        damped=damped,
        codec=codec,
        piece=piece,
        mean=mean,
        upward=upward,
        parameters=pack_starts(parameters) if parameters else "",
    )
    client = kind(
        network, description, filters=filters, retry=retry, seed=seed, on_close=_leaving(host, description, network)
    )
    client.hello()
    if initial is not None and network.me == description.workers[0]:
        client.put(None, initial)
    world.barrier()
    return client


def watch_space(network: ServerNetwork, name: str, number: int, servers: Sequence[int] | None = None) -> Client:
    """A client that only watches the `number`-th space of that name (from 1); it waits until the workers have it."""
    where = tuple(network.servers if servers is None else servers)
    placeholder = SpaceDescription(name=f"{name} {number}", numel=1, servers=where[:1], workers=network.workers)
    return Client(network, placeholder, retry=network.transport.retry_after_s).observe()


def _check_filters(filters: Filter | None, rules: Sequence[str]) -> None:
    """Refuse a filter that holds values back where the rule cannot take sums of them later, for some keys."""
    if filters is None or not filters.chooses:
        return
    for rule in map(build_rule, rules):
        if rule.name == "assign" or not rule.elementwise:
            reason = "takes no lists of keys" if rule.name != "assign" else "replaces values, and sums replace nothing"
            raise IncompatibleError(
                f"{filters!r} sends some keys now and sums of the others later, and {rule!r} {reason}: use a rule like "
                "sgd or adam, or no filter that chooses"
            )


class _Names:
    """Counts the spaces of one name, alike on every worker."""

    def __init__(self) -> None:
        self.numbers = count(1)

    def close(self) -> None:
        return


def _leaving(host: Server | None, description: SpaceDescription, network: ServerNetwork):  # type: ignore[no-untyped-def]
    """What closing a client waits for, where its process holds a shard."""
    if host is None or network.me not in description.servers:
        return None

    def wait() -> None:
        patience = max(LEAVING, network.transport.timeout)
        if not host.wait_left(description.space_id, patience):
            raise IncompatibleError(
                f"members {host.waiting_for(description.space_id)} have not left space {description.name!r} within "
                f"{patience:.0f} s: every worker closes its run, and this one holds a shard for them until then"
            )

    return wait


@dataclass(frozen=True)
class WorkerGroup:
    """Workers that share a sub-master. All are members of the network."""

    master: int
    workers: tuple[int, ...]


def groups_of(network: ServerNetwork, masters: int) -> list[WorkerGroup]:
    """Neighbours together, as evenly as can be.

    >>> from syncline.transports import SingleTransport
    >>> groups_of(ServerNetwork(SingleTransport(), tuple(range(5)), tuple(range(5)), me=0, dedicated=False), 2)
    [WorkerGroup(master=0, workers=(0, 1, 2)), WorkerGroup(master=3, workers=(3, 4))]
    """
    workers, servers = network.workers, network.servers
    if masters > len(workers):
        raise IncompatibleError(f"masters={masters} for {len(workers)} workers: a sub-master has at least one worker")
    if network.dedicated and masters >= len(servers):
        raise IncompatibleError(
            f"masters={masters} on {len(servers)} dedicated servers: the root is one, and so is each sub-master; start "
            f"{masters + 1} (syncline run --servers {masters + 1}), or none, and the workers' own processes are"
        )
    base, more = divmod(len(workers), masters)
    found, at = [], 0
    for number in range(masters):
        members = workers[at : at + base + (number < more)]
        # In the order of the groups, which is that of the sum.
        master = servers[1 + number] if network.dedicated else members[0]
        found.append(WorkerGroup(master, members))
        at += len(members)
    return found


class TreeClient(Client):
    """A worker's door to its sub-master. What is not about a step, it asks of the root."""

    top: Client
    host: Server | None = None
    _told = ClusterStatus()

    @property
    def told(self) -> ClusterStatus:
        """What the sub-master tells of the group; a wish to stop may come from the root first."""
        top = getattr(self, "top", None)  # it comes after the first answers
        return replace(self._told, stop=True) if top is not None and top.told.stop else self._told

    @told.setter
    def told(self, told: ClusterStatus) -> None:
        self._told = told

    def get(self, keys: Keys = None) -> Tensor:
        return self.top.get(keys)

    def put(self, keys: Keys, values: Tensor) -> None:
        self.top.put(keys, values)

    def add(self, keys: Keys, values: Tensor) -> None:
        self.top.add(keys, values)

    def steps(self) -> list[int]:
        return self.top.steps()

    def applied(self) -> bool:
        """The sub-masters have carried their last sums to the root, and finished there."""
        self.top.control({"do": "steps"})
        return self.top.told.live == 0

    def stop(self) -> None:
        self.top.stop()
        super().stop()

    def post(self, kind: str, values: Sequence[float]) -> None:
        self.top.post(kind, values)

    def read_posts(self, since: int = 0) -> list[Post]:
        return self.top.read_posts(since)

    def planes(self, names: Sequence[str] | None = None) -> list[str]:
        return self.top.planes(names)

    def read_plane(self, number: int) -> Tensor:
        return self.top.read_plane(number)

    def write_plane(self, number: int, values: Tensor) -> None:
        self.top.write_plane(number, values)

    def control(self, asked: dict[str, Any], everywhere: bool = False) -> Any:
        """Clocks out of a checkpoint are those of the whole tree: the root hears of them, the group takes its own."""
        if asked.get("do") == "rules":  # a sub-master applies none
            return self.top.control(asked, everywhere=True)
        if asked.get("do") == "clocks":
            below = zip(self.network.workers, asked["clocks"], strict=False)
            return self.top.control({"do": "below", "below": {str(worker): [int(at), 0] for worker, at in below}})
        return super().control(asked, everywhere)

    def set_clocks(self, clocks: Sequence[int]) -> None:
        """Have the group go on from these steps, one for each worker of the world; every worker calls it."""
        workers = self.description.workers
        own = [int(clocks[self.network.workers.index(worker)]) for worker in workers]
        if self.network.me == workers[0]:
            super().control({"do": "clocks", "clocks": own}, everywhere=True)
        self.clock = own[workers.index(self.network.me)]

    def close(self) -> None:
        """Leave the group, then the root; whose process is a sub-master does so when its last sum is there."""
        if self._closed:
            return
        super().close()
        patience = max(LEAVING, self.network.transport.timeout)
        if self.host is not None and not self.host.wait_relayed(self.description.space_id, patience):
            raise IncompatibleError(f"a sub-master has not carried its last sum to the root within {patience:.0f} s")
        self.top.close()


def open_tree(world: World, name: str, numel: int, masters: int, initial: Tensor, **options: Any) -> TreeClient:
    """Open a tree together with the other workers. `options` are `open_space`'s; a quorum is each group's own."""
    network = server_network(world)
    groups = groups_of(network, masters)
    quorum, filters = options.pop("quorum", 1.0), options.pop("filters", None)
    top = open_space(
        world, name, numel, servers=network.servers[:1], workers=[group.master for group in groups], **options
    )
    host = world.keep("syncline.server", lambda: Server(network).start()) if network.serves else None
    if host is not None and network.me in top.description.workers:
        host.lend_door(top)
    mine = next(number for number, group in enumerate(groups) if network.me in group.workers)
    if world.rank == 0:
        top.put(None, initial)
        top.control({"do": "below", "below": {str(worker): [0, 0] for worker in network.workers}})
    world.barrier()  # a child's hello starts the relay, which is to find its door
    bounds = options.get("bounds", (0,))
    leaf = open_space(
        world,
        f"{name} group {mine}",
        numel,
        servers=(groups[mine].master,),
        workers=groups[mine].workers,
        quorum=quorum,
        filters=filters,
        upward=_json(top.description),
        kind=TreeClient,
        **{**options, "rules": ["assign"] * len(bounds), "damped": False},
    )
    assert isinstance(leaf, TreeClient)
    leaf.top, leaf.host = top, host
    if network.me == groups[mine].workers[0]:
        Client.put(leaf, None, initial)
    world.barrier()
    return leaf


def _json(description: SpaceDescription) -> str:
    return description.to_json().decode()
