"""Opens spaces: by all workers together, by an observer, or as a tree of masters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from torch import Tensor

from syncline.codecs import Codec, build_codec, check_no_gradient_options
from syncline.control import poll
from syncline.errors import IncompatibleError, SpecError
from syncline.server.client import Client, ClusterStatus
from syncline.server.filters import Filter, build_filter
from syncline.server.network import ServerNetwork, server_network
from syncline.server.protocol import MAX_PIECE_ELEMENTS
from syncline.server.rules import UpdateRule, build_rule
from syncline.server.server import Server
from syncline.server.space import SpaceDescription, pack_starts
from syncline.world import World, current_world

__all__ = ["TreeClient", "WorkerGroup", "groups_of", "open_space", "open_tree", "store", "watch_space"]

MIN_LEAVE_TIMEOUT_S = 60.0
"""A process that holds a shard waits at least this long for the others to leave."""


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

    `rule` defines the effect of a push: "add", "assign", "sgd(0.1)", "adagrad(0.1)", "handler('mine')", … `codec`
    compresses values; `filters` hold back values that are not worth sending yet. The keys begin at 0, or at rank 0's
    `initial`.

    >>> import torch, syncline as sl
    >>> with sl.init() as world, sl.server.store(3, rule="sgd(0.5)") as weights:
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
    parent: str = "",
    parameters: Sequence[int] = (),
    piece: int = MAX_PIECE_ELEMENTS,
    initial: Tensor | None = None,
    replicas: int | None = None,
    retry_s: float | None = None,
    seed: int = 0,
    client_class: type[Client] = Client,
) -> Client:
    """Open a space. All workers of the world call it, in the same order if there are several spaces.

    `servers` are the members that hold its shards (default: all servers), `workers` those with a clock (default: all).
    `replicas` is that of `server_network`. The other options are fields of `SpaceDescription` or arguments of `Client`.
    """
    _check_filters(filters, rules)
    network = server_network(world, replicas)
    server = local_server(world)
    numbers = world.keep(("spaces", name), _SpaceNumbers)
    description = SpaceDescription(
        name=f"{name} {next(numbers.count)}",
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
        parent=parent,
        parameters=pack_starts(parameters) if parameters else "",
        replicas=network.replicas,
    )
    on_close = _wait_for_others(server, description, network)
    client = client_class(network, description, filters=filters, retry_s=retry_s, seed=seed, on_close=on_close)
    if network.joins:
        client.hello_as_newcomer()
        return client
    client.hello()
    if initial is not None and network.me == description.workers[0]:
        client.put(None, initial)
    world.barrier()
    return client


def watch_space(network: ServerNetwork, name: str, number: int) -> Client:
    """A client that observes the `number`-th space of a name (from 1). It waits until the workers have opened it."""
    placeholder = SpaceDescription(
        name=f"{name} {number}", numel=1, servers=network.servers[:1], workers=network.workers
    )
    return Client(network, placeholder, retry_s=network.transport.retry_after_s).observe()


def local_server(world: World) -> Server | None:
    """The server in this process, started at the first call; None if this process does not serve."""
    network = server_network(world)
    return world.keep("syncline.server", lambda: Server(network).start()) if network.serves else None


def _check_filters(filters: Filter | None, rules: Sequence[str]) -> None:
    """Raise an error if a filter holds values back and a rule cannot apply their sum later."""
    if filters is None or not filters.chooses:
        return
    for rule in map(build_rule, rules):
        if rule.name == "assign" or not rule.elementwise:
            reason = "takes no lists of keys" if rule.name != "assign" else "replaces values, and sums replace nothing"
            raise IncompatibleError(
                f"{filters!r} sends some keys now and sums of the others later, and {rule!r} {reason}: use a rule like "
                "sgd or adam, or no filter that chooses"
            )


class _SpaceNumbers:
    """Counts the spaces of one name, in the same way on every worker."""

    def __init__(self) -> None:
        self.count = count(1)

    def close(self) -> None:
        return


def _wait_for_others(
    server: Server | None, description: SpaceDescription, network: ServerNetwork
) -> Callable[[], None] | None:
    """What closing a client waits for, if its process holds a shard; else None."""
    if server is None or network.me not in description.servers:
        return None

    def wait() -> None:
        timeout_s = max(MIN_LEAVE_TIMEOUT_S, network.transport.timeout)
        if not server.wait_left(description.space_id, timeout_s):
            raise IncompatibleError(
                f"members {server.members_in(description.space_id)} have not left space {description.name!r} within "
                f"{timeout_s:.0f} s: every worker closes its run, and this one holds a shard for them until then"
            )

    return wait


# Trees of masters: groups of neighbouring workers, each with a sub-master between it and the root.
#
#     masters=2, six workers          root: the first server
#                                   ▲                    ▲
#                          sub-master 0          sub-master 1        one push and pull for the whole group
#                          ▲    ▲    ▲           ▲    ▲    ▲
#                 worker   0    1    2           3    4    5
#
# Without dedicated servers a sub-master is a task in the process of its group's first worker. Otherwise it is one of
# the dedicated servers, after the root.


@dataclass(frozen=True)
class WorkerGroup:
    """The workers of one sub-master. All numbers are members of the network."""

    master: int
    workers: tuple[int, ...]


def groups_of(network: ServerNetwork, masters: int) -> list[WorkerGroup]:
    """Divide the workers into groups of neighbours of nearly equal size.

    >>> from syncline.transports import SingleTransport
    >>> groups_of(ServerNetwork(SingleTransport(), tuple(range(5)), tuple(range(5)), me=0, dedicated=False), 2)
    [WorkerGroup(master=0, workers=(0, 1, 2)), WorkerGroup(master=3, workers=(3, 4))]
    """
    workers, servers = network.workers, network.servers
    if network.replicas > 1:
        raise IncompatibleError(
            f"masters={masters} with replicas={network.replicas}: a sub-master cannot be replicated; leave one of them "
            "out (syncline run --replicas R)"
        )
    if masters > len(workers):
        raise IncompatibleError(f"masters={masters} for {len(workers)} workers: a sub-master has at least one worker")
    if network.dedicated and masters >= len(servers):
        raise IncompatibleError(
            f"masters={masters} on {len(servers)} dedicated servers: the root is one, and so is each sub-master; start "
            f"{masters + 1} (syncline run --servers {masters + 1}), or none, and the workers' own processes serve"
        )
    base, more = divmod(len(workers), masters)
    groups, at = [], 0
    for number in range(masters):
        members = workers[at : at + base + (number < more)]
        # The order of the masters is that of the groups, in which the root adds.
        master = servers[1 + number] if network.dedicated else members[0]
        groups.append(WorkerGroup(master, members))
        at += len(members)
    return groups


class TreeClient(Client):
    """A worker's client of its sub-master. Requests that are not about a step go to the root."""

    server: Server | None = None
    _status = ClusterStatus()

    @property
    def status(self) -> ClusterStatus:
        """What the sub-master tells about the group. A request to stop may come from the root first."""
        root = self.root
        return replace(self._status, stop=True) if root is not self and root.status.stop else self._status

    @status.setter
    def status(self, status: ClusterStatus) -> None:
        self._status = status

    def applied(self) -> bool:
        """Whether the sub-masters have relayed their last sums to the root and finished there."""
        self.root.control({"do": "steps"})
        return self.root.status.live == 0

    def stop(self) -> None:
        self.root.stop()
        super().stop()

    def join(self) -> None:
        """Continue after a pause, when the root waits for this group again."""
        for _ in poll(self.network.transport.runtime):
            if not super().control({"do": "join"})["away"]:
                break
        super().join()

    def control(self, request: dict[str, Any], everywhere: bool = False) -> Any:
        """Clocks of a checkpoint are those of all workers, and go to the root; the group gets its own separately."""
        if request.get("do") == "rules":  # a sub-master applies none
            return self.root.control(request, everywhere=True)
        if request.get("do") == "clocks":
            clocks = zip(self.network.workers, request["clocks"], strict=False)
            steps = {str(worker): [int(clock), 0] for worker, clock in clocks}
            return self.root.control({"do": "below", "below": steps})
        return super().control(request, everywhere)

    def set_clocks(self, clocks: Sequence[int]) -> None:
        """Let the group continue from these clocks, one for each worker of the world. Every worker calls it."""
        workers = self.description.workers
        own = [int(clocks[self.network.workers.index(worker)]) for worker in workers]
        if self.network.me == workers[0]:
            super().control({"do": "clocks", "clocks": own}, everywhere=True)
        self.clock = own[workers.index(self.network.me)]

    def close(self) -> None:
        """Leave the group, then the root. A process with a sub-master waits until its last sum is relayed."""
        if self._closed:
            return
        super().close()
        timeout_s = max(MIN_LEAVE_TIMEOUT_S, self.network.transport.timeout)
        if self.server is not None and not self.server.wait_relayed(self.description.space_id, timeout_s):
            raise IncompatibleError(f"a sub-master has not relayed its last sum to the root within {timeout_s:.0f} s")
        self.root.close()


def open_tree(world: World, name: str, numel: int, masters: int, initial: Tensor, **options: Any) -> TreeClient:
    """Open a tree together with the other workers. `options` are those of `open_space`; a quorum is of each group."""
    network = server_network(world)
    groups = groups_of(network, masters)
    quorum, filters = options.pop("quorum", 1.0), options.pop("filters", None)
    root = open_space(
        world, name, numel, servers=network.servers[:1], workers=[group.master for group in groups], **options
    )
    server = local_server(world)
    if server is not None and network.me in root.description.workers:
        server.lend_client(root)
    number, group = next((at, group) for at, group in enumerate(groups) if network.me in group.workers)
    if world.rank == 0:
        root.put(None, initial)
        root.control({"do": "below", "below": {str(worker): [0, 0] for worker in network.workers}})
    world.barrier()  # the first hello of a group starts its relay, which needs the client of the root
    client = open_space(
        world,
        f"{name} group {number}",
        numel,
        servers=(group.master,),
        workers=group.workers,
        quorum=quorum,
        filters=filters,
        parent=root.description.to_json().decode(),
        initial=initial,
        client_class=TreeClient,
        **{**options, "rules": ["assign"] * len(options.get("bounds", (0,))), "damped": False},
    )
    assert isinstance(client, TreeClient)
    client.root, client.server = root, server
    return client
