"""Which servers hold which shard: the entries of a control log, the same for all clients and servers.

At the start the chain of a shard has the servers that `ServerNetwork.chain` names. Two kinds of entries change it::

    servers/chains/0   {"kind": "lost", "member": 4, "by": 5}                              removed from all chains
    servers/chains/1   {"kind": "replica", "shard": 0, "member": 7, "server": 1, "by": 5}  the new last server

The last server of a chain appends a new one when that has all records. An entry counts only if no earlier
entry declares its writer lost. So a server that was declared lost and still runs can neither add a server nor declare
one lost. All processes agree which chain a shard has. Chain replication adds servers at the end in the same
way (van Renesse and Schneider, OSDI 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from syncline.control import ControlLog
from syncline.runtime import Runtime
from syncline.transports.key_value_store import KeyValueStore

__all__ = ["ChainEntry", "ChainLog"]

LOG_KEY = "servers/chains"
LOST, REPLICA = "lost", "replica"


class ChainEntry(NamedTuple):
    """An entry that counts: a server is lost (`shard` is −1), or is the new last one of a shard's chain."""

    member: int
    shard: int = -1


class ChainLog:
    """One process's view of the chains. Several tasks may use it. A store that is gone raises a `RuntimeError`.

    `servers` are the first servers, and `replicas` is the number of them in each chain.

    >>> from syncline.control import MemoryStore
    >>> from syncline.runtime import RealRuntime
    >>> log = ChainLog(lambda: MemoryStore(), RealRuntime(), servers=(2, 3), replicas=2)
    >>> log.lose(2, by=3)
    >>> log.append(shard=0, member=4, server=0, by=3)
    >>> log.read(), log.chain_of(0)
    ([ChainEntry(member=2, shard=-1), ChainEntry(member=4, shard=0)], ((2, 0), (3, 1), (4, 0)))
    """

    def __init__(
        self, open_store: Callable[[], KeyValueStore], runtime: Runtime, servers: Sequence[int], replicas: int
    ) -> None:
        self._open_store = open_store
        self._runtime = runtime
        self._log: ControlLog | None = None
        self._lock = runtime.lock()
        self._servers = len(servers)
        self.numbers = {member: number for number, member in enumerate(servers)}
        """By member: its number among the servers. A new server has the number of the one that it replaces."""
        self.lost: set[int] = set()
        self._chains = [
            [servers[(shard + after) % len(servers)] for after in range(replicas)] for shard in range(len(servers))
        ]

    def chain_of(self, shard: int) -> tuple[tuple[int, int], ...]:
        """The servers that are or were in a shard's chain, in order, each with its distance from the shard's number."""
        return tuple((each, (self.numbers[each] - shard) % self._servers) for each in self._chains[shard])

    def last_of(self, shard: int) -> int | None:
        """The last server of a chain that is not lost; None if all are."""
        return next((each for each in reversed(self._chains[shard]) if each not in self.lost), None)

    def lose(self, member: int, by: int) -> None:
        """Report the loss of a server; `by` is the server that calls this."""
        with self._lock:
            if member not in self.lost:
                self._opened().append(LOST, member=member, by=by)

    def append(self, shard: int, member: int, server: int, by: int) -> None:
        """Add a server to the end of a shard's chain; `by` is the present last one, which calls this."""
        with self._lock:
            self._opened().append(REPLICA, shard=shard, member=member, server=server, by=by)

    def read(self) -> list[ChainEntry]:
        """The entries since the last call that count, oldest first."""
        with self._lock:
            found = []
            for entry in self._opened().read():
                fields = {name: int(value) for name, value in entry.fields.items()}
                member, shard, by = fields["member"], fields.get("shard", -1), fields["by"]
                if entry.kind == LOST and not {member, by} & self.lost:
                    self.lost.add(member)
                    found.append(ChainEntry(member))
                elif entry.kind == REPLICA and self._counts(shard, member, by):
                    self._chains[shard].append(member)
                    self.numbers[member] = fields["server"]
                    found.append(ChainEntry(member, shard))
            return found

    def _counts(self, shard: int, member: int, by: int) -> bool:
        return self.last_of(shard) == by and member not in self.lost and member not in self._chains[shard]

    def _opened(self) -> ControlLog:
        if self._log is None:
            self._log = ControlLog(self._open_store(), self._runtime.now, LOG_KEY)
        return self._log
