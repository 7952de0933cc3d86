"""Who is who beside the workers, as the launcher's variables tell it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from syncline.environment import Environment, Rendezvous
from syncline.environment.base import Variables
from syncline.errors import WorldError

__all__ = ["Role", "Roles", "read_roles"]

Role = Literal["worker", "server", "evaluator"]
ROLES = ("worker", "server", "evaluator")
SOURCE = "syncline run"


@dataclass(frozen=True, kw_only=True)
class Roles:
    """How many members a server network has, of which kind, and which of them this process is.

    Workers come first, as in the world; then servers; then evaluators.
    """

    role: Role = "worker"
    workers: int = 0
    """0: the launcher did not say, because there is nobody else."""
    servers: int = 0
    evaluators: int = 0
    number: int = 0
    """Of a server: which one."""
    one_host: bool = False
    rendezvous: Rendezvous | None = None

    @property
    def alone(self) -> bool:
        """Whether there are workers only."""
        return not self.servers and not self.evaluators

    @property
    def size(self) -> int:
        return self.workers + self.servers + self.evaluators

    def name_of(self, member: int) -> str:
        """A member as its launcher names it.

        >>> [Roles(workers=2, servers=1, evaluators=1).name_of(member) for member in (1, 2, 3)]
        ['rank 1', 'server 0', 'evaluator']
        """
        if member < self.workers or self.alone:
            return f"rank {member}"
        return f"server {member - self.workers}" if member < self.workers + self.servers else "evaluator"

    def environment(self, rank: int = 0) -> Environment:
        """This process as a member; `rank` is a worker's own."""
        first = {"worker": rank, "server": self.workers + self.number, "evaluator": self.workers + self.servers}
        return Environment(
            source=f"{SOURCE}, {self.role}",
            rank=first[self.role],
            size=self.size,
            local_size=self.size if self.one_host else 1,
            rendezvous=self.rendezvous,
        )


def read_roles(environ: Mapping[str, str] | None = None) -> Roles:
    """What the launcher says of servers and evaluators; nobody but workers where it says nothing.

    >>> read_roles({}).alone
    True
    >>> found = {"SYNCLINE_WORKERS": "4", "SYNCLINE_SERVERS": "2", "SYNCLINE_ROLE": "server", "SYNCLINE_SERVER": "1"}
    >>> read_roles(found).environment().rank
    5
    """
    found = os.environ if environ is None else environ
    read = Variables(SOURCE, found)
    role = found.get("SYNCLINE_ROLE", "worker")
    if role not in ROLES:
        raise WorldError(f"SYNCLINE_ROLE={role!r} is none of {', '.join(ROLES)}; leave it to `syncline run`")
    servers, evaluators = read.whole("SYNCLINE_SERVERS", 0), read.whole("SYNCLINE_EVALUATORS", 0)
    workers = read.whole("SYNCLINE_WORKERS", None if servers or evaluators else 0)
    number = read.whole("SYNCLINE_SERVER", 0)
    if min(workers, servers, evaluators, number) < 0 or (role == "server" and number >= max(1, servers)):
        raise WorldError(
            f"SYNCLINE_WORKERS={workers}, SYNCLINE_SERVERS={servers}, SYNCLINE_EVALUATORS={evaluators} and "
            f"SYNCLINE_SERVER={number} do not fit together; leave them to `syncline run --servers S`"
        )
    return Roles(
        role=role,  # type: ignore[arg-type]  # checked above
        workers=workers,
        servers=servers,
        evaluators=evaluators,
        number=number,
        one_host=found.get("SYNCLINE_HOSTS") == "1",
        rendezvous=read.rendezvous(None, None),
    )
