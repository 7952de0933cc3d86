"""Trees of masters: groups of neighbouring workers, each with a sub-master between it and the root.

```text
masters=2, six workers          root: the first server
                              ▲                    ▲
                     sub-master 0          sub-master 1        one push and pull for the whole group
                     ▲    ▲    ▲           ▲    ▲    ▲
            worker   0    1    2           3    4    5
```

Without dedicated servers a sub-master is a task in the process of its group's first worker; with them it is one of
the servers, after the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from syncline.errors import IncompatibleError
from syncline.server.board import Post
from syncline.server.client import Client, Told
from syncline.server.description import Description
from syncline.server.layout import Keys
from syncline.server.network import ServerNetwork, server_network
from syncline.server.server import Server
from syncline.server.store import LEAVING, open_space
from syncline.world import World

__all__ = ["Group", "TreeClient", "groups_of", "open_tree"]


@dataclass(frozen=True)
class Group:
    """Workers that share a sub-master. All are members of the network."""

    master: int
    workers: tuple[int, ...]


def groups_of(network: ServerNetwork, masters: int) -> list[Group]:
    """Neighbours together, as evenly as can be.

    >>> from syncline.transports import SingleTransport
    >>> groups_of(ServerNetwork(SingleTransport(), tuple(range(5)), tuple(range(5)), me=0, dedicated=False), 2)
    [Group(master=0, workers=(0, 1, 2)), Group(master=3, workers=(3, 4))]
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
        found.append(Group(master, members))
        at += len(members)
    return found


class TreeClient(Client):
    """A worker's door to its sub-master. What is not about a step, it asks of the root."""

    top: Client
    host: Server | None = None
    _told = Told()

    @property
    def told(self) -> Told:
        """What the sub-master tells of the group; a wish to stop may come from the root first."""
        top = getattr(self, "top", None)  # it comes after the first answers
        return replace(self._told, stop=True) if top is not None and top.told.stop else self._told

    @told.setter
    def told(self, told: Told) -> None:
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
        if self.host is not None and not self.host.wait_relayed(self.description.mark, patience):
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


def _json(description: Description) -> str:
    return description.to_json().decode()
