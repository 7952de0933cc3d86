"""The members of a server network: workers, then dedicated servers, then evaluators.

```text
co-located (the default)        two dedicated servers           an evaluator
worker 0   1   2   3            worker 0   1   2   3            worker 0   1   2   3     evaluator
member 0   1   2   3            member 0   1   2   3            member 0   1   2   3        4
server 0   1   2   3            server                 4   5    server 0   1   2   3
```

Workers that join an elastic job later have the numbers after these.

The launcher's environment variables give the number of each kind and this process's role.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from syncline.environment import Environment, Rendezvous, detect
from syncline.environment.base import Variables
from syncline.errors import SpecError, WorldError
from syncline.server.chain_log import ChainLog
from syncline.transports import Transport
from syncline.transports.base import DEFAULT_TIMEOUT_S
from syncline.transports.key_value_store import no_launcher_store, program_name
from syncline.world import World
from syncline.world.elastic import ELASTIC_VARIABLE, ElasticMember

__all__ = ["Roles", "ServerNetwork", "import_handlers", "join_network", "network_of", "read_roles", "server_network"]

HANDLERS_VARIABLE = "SYNCLINE_HANDLERS"
"""Modules, separated by commas, that register handlers. Every process that serves imports them."""
LABEL = "server"
CLOSE_TIMEOUT_S = 1.0
"""After an error, closing waits at most this long for messages to be delivered."""
TORCH = "torch.distributed"
SOURCE = "syncline run"
Role = Literal["worker", "server", "evaluator"]
ROLES = ("worker", "server", "evaluator")


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The number of members of each kind, and which of them this process is."""

    role: Role = "worker"
    workers: int = 0
    """0: the launcher has started workers only, and sets no variables."""
    servers: int = 0
    evaluators: int = 0
    replicas: int = 1
    """The number of servers that hold each shard."""
    number: int = 0
    """The number of this server, or of the lost one that it replaces."""
    joins: bool = False
    """Whether this server joins a running network, in the place of a lost one."""
    one_host: bool = False
    rendezvous: Rendezvous | None = None

    @property
    def workers_only(self) -> bool:
        return not self.servers and not self.evaluators

    @property
    def size(self) -> int:
        return self.workers + self.servers + self.evaluators

    def name_of(self, member: int) -> str:
        """A member's name in messages.

        >>> [Roles(workers=2, servers=1, evaluators=1).name_of(member) for member in (1, 2, 3)]
        ['rank 1', 'server 0', 'evaluator']
        """
        if member < self.workers or self.workers_only:
            return f"rank {member}"
        return f"server {member - self.workers}" if member < self.workers + self.servers else "evaluator"

    def environment(self, rank: int = 0) -> Environment:
        """This process as a member of the network. `rank` is a worker's rank."""
        first = {"worker": rank, "server": self.workers + self.number, "evaluator": self.workers + self.servers}
        return Environment(
            source=f"{SOURCE}, {self.role}",
            rank=first[self.role],
            size=self.size,
            local_size=self.size if self.one_host else 1,
            rendezvous=self.rendezvous,
        )


def read_roles(environ: Mapping[str, str] | None = None) -> Roles:
    """Read the launcher's variables about servers and evaluators.

    >>> read_roles({}).workers_only
    True
    >>> found = {"SYNCLINE_WORKERS": "4", "SYNCLINE_SERVERS": "2", "SYNCLINE_ROLE": "server", "SYNCLINE_SERVER": "1"}
    >>> read_roles(found).environment().rank
    5
    """
    variables = os.environ if environ is None else environ
    read = Variables(SOURCE, variables)
    role = variables.get("SYNCLINE_ROLE", "worker")
    if role not in ROLES:
        raise WorldError(f"SYNCLINE_ROLE={role!r} is none of {', '.join(ROLES)}; leave it to `syncline run`")
    servers, evaluators = read.whole("SYNCLINE_SERVERS", 0), read.whole("SYNCLINE_EVALUATORS", 0)
    workers = read.whole("SYNCLINE_WORKERS", None if servers or evaluators else 0)
    number, replicas = read.whole("SYNCLINE_SERVER", 0), read.whole("SYNCLINE_REPLICAS", 1)
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
        replicas=replicas,
        number=number,
        joins=role == "server" and variables.get("SYNCLINE_JOIN") == "1",
        one_host=variables.get("SYNCLINE_HOSTS") == "1",
        rendezvous=read.rendezvous(None, None),
    )


@dataclass(frozen=True)
class ServerNetwork:
    """The members by kind, and the transport between them. All numbers are members of the transport."""

    transport: Transport
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    me: int
    dedicated: bool
    """Whether the servers are processes of their own."""
    evaluators: tuple[int, ...] = ()
    replicas: int = 1
    """The number of servers that hold each shard."""
    replaces: int | None = None
    """If this process is a new server: the number of the lost one whose place it takes."""
    newcomers: tuple[int, ...] = ()
    """On the simulator: members that may become new servers."""
    elastic: bool = False
    """Whether workers may join later."""

    @cached_property
    def chain_log(self) -> ChainLog:
        """With replicas: which servers hold which shard now."""
        transport = self.transport
        return ChainLog(transport.control_store, transport.runtime, self.servers, self.replicas)

    @property
    def server_number(self) -> int:
        """The number of the server in this process, or of the lost one that it replaces."""
        return self.servers.index(self.me) if self.replaces is None else self.replaces

    @property
    def first_later(self) -> int:
        """The number after all members that were known at the start."""
        return 1 + max(self.workers + self.servers + self.evaluators + self.newcomers)

    @property
    def joined_workers(self) -> tuple[int, ...]:
        """On the simulator: workers that join later. In real processes a later member may also be a new server."""
        return tuple(range(self.first_later, self.transport.size)) if self.elastic else ()

    @property
    def joins(self) -> bool:
        """Whether this process is a worker that has joined later."""
        return self.replaces is None and self.me >= self.first_later

    def is_lost(self, member: int) -> bool:
        """Whether a member is lost, and has not left by itself."""
        return self.number_in_job(member) in self.transport.lost()

    def number_in_job(self, member: int) -> int:
        """The number of a member in the transport's reports. One that has joined later keeps its own."""
        members = self.transport.members
        return members[member] if member < len(members) else member

    def chain(self, server: int) -> tuple[int, ...]:
        """The servers that hold the shard of a server: itself, then the next ones.

        >>> from syncline.transports import SingleTransport
        >>> ServerNetwork(SingleTransport(), (0,), (1, 2, 3), me=0, dedicated=True, replicas=2).chain(3)
        (3, 1)
        """
        first = self.servers.index(server)
        return tuple(self.servers[(first + after) % len(self.servers)] for after in range(self.replicas))

    @property
    def serves(self) -> bool:
        """Whether this process runs a server."""
        return self.me in self.servers or self.replaces is not None

    def close(self) -> None:
        """Close the transport. Calls that still wait on it end with an error."""
        if sys.exc_info()[1] is not None:  # an error is reported soon, even if messages are not delivered
            self.transport.timeout = min(self.transport.timeout, CLOSE_TIMEOUT_S)
        self.transport.close()


def network_of(
    transport: Transport,
    workers: int,
    servers: int = 0,
    evaluators: int = 0,
    replicas: int = 1,
    *,
    newcomers: int = 0,
    replaces: int | None = None,
    elastic: bool = False,
) -> ServerNetwork:
    """The network on a transport whose members have the order above. Without servers every worker serves, except those
    that join later.

    `replicas` is the number of servers that hold each shard. On the simulator `newcomers` more members follow, which
    may become new servers; `replaces` is the number of the server whose place such a member takes. `elastic`: workers
    may join later.

    >>> from syncline.transports import SingleTransport
    >>> network_of(SingleTransport(), workers=1).servers
    (0,)
    """
    end = workers + servers
    known, more = end + evaluators + newcomers, elastic or replaces is not None
    if workers < 1 or transport.size < known or (transport.size > known and not more):
        raise WorldError(
            f"{workers} workers, {servers} servers and {evaluators} evaluators are not the {transport.size} members of "
            "this transport"
        )
    if replicas != 1 and not 1 <= replicas <= servers:
        raise WorldError(
            f"replicas={replicas} with {servers} dedicated servers: a shard lives on 1 to {max(1, servers)} of them; "
            "start more servers (syncline run --servers S --replicas R)"
        )
    if replaces is not None and (replicas < 2 or not 0 <= replaces < servers):
        raise WorldError(
            f"a new server cannot replace server {replaces} of {servers} with replicas={replicas}: no other server has "
            "its shard (syncline run --servers S --replicas R --restart K)"
        )
    network = ServerNetwork(
        transport=transport,
        workers=tuple(range(workers)),
        servers=tuple(range(workers, end)) if servers else tuple(range(workers)),
        me=transport.rank,
        dedicated=servers > 0,
        evaluators=tuple(range(end, end + evaluators)),
        replicas=replicas,
        replaces=replaces,
        newcomers=tuple(range(end + evaluators, known)),
        elastic=elastic,
    )
    clients = (*network.workers, *network.evaluators)
    if elastic and not servers:
        return network  # a worker may have ended before it has joined, and others may come
    transport.monitor.watch(sorted({*network.servers, *(clients if network.serves else ())}))
    return network


def server_network(world: World, replicas: int | None = None) -> ServerNetwork:
    """The world's server network. All workers make it together at the first call. It is closed with the world.

    In an evaluator's process, which has a world of its own, it is the network of the workers. On the simulator,
    `replicas` is the number of servers that hold each shard, as their `network_of` has it; `syncline run --replicas R`
    sets it otherwise.

    >>> import syncline as sl
    >>> with sl.init() as world:
    ...     server_network(world).workers
    (0,)
    """
    network = world.keep(LABEL, lambda: _make_network(world, 1 if replicas is None else replicas))
    if replicas not in (None, network.replicas):
        raise WorldError(
            f"replicas={replicas}, and each shard of this network lives on {network.replicas}: give it at the first "
            "use of the servers on the simulator, or to syncline run (--replicas R)"
        )
    return network


def _make_network(world: World, replicas: int) -> ServerNetwork:
    extra, elastic = world.transport.extra_roles, world.elastic
    workers = world.size if elastic is None else elastic.launched
    if extra or world.job_channel is not world.transport:
        servers = extra.count("server")
        evaluators, newcomers = extra.count("evaluator"), extra.count("new server")
        if extra != ("server",) * servers + ("evaluator",) * evaluators + ("new server",) * newcomers:
            raise WorldError(
                f"beside the ranks are {', '.join(extra)}: servers come first, then evaluators, then new servers, no "
                "others"
            )
        return network_of(
            world.job_channel,
            workers,
            servers,
            evaluators,
            replicas,
            newcomers=newcomers,
            elastic=elastic is not None,
        )
    simulated = world.transport.timing.virtual  # the launcher's variables are not about simulated ranks
    roles = Roles() if simulated else read_roles(world.environ)
    if roles.role != "worker":
        return join_network(roles, world.transport.timeout)
    if elastic is not None and elastic.joining:
        return _join_as_newcomer(world, roles, elastic)
    if not roles.workers_only and roles.workers != world.size:
        raise WorldError(
            f"this world has {world.size} ranks, but {roles.workers} workers were started with {roles.servers} servers "
            f"and {roles.evaluators} evaluators: let all of them be in one world"
        )
    if not simulated and not roles.servers:
        import_handlers()
    if roles.workers_only and elastic is None and world.transport.name != TORCH:
        transport = world.transport.split(range(world.size))
        assert transport is not None, "every rank is a member"
        return network_of(transport, world.size)
    zeromq = importlib.import_module("syncline.transports.zeromq")  # only here: MPI does not need it
    environment = detect(world.environ) if roles.workers_only else roles.environment(world.rank)
    survives = elastic is not None and roles.workers_only
    transport = zeromq.connect(
        environment, world.transport.timeout, label=LABEL, name_of=roles.name_of, survives=survives
    )
    world.count_losses_of(transport)
    return network_of(transport, workers, roles.servers, roles.evaluators, roles.replicas, elastic=elastic is not None)


def _join_as_newcomer(world: World, roles: Roles, elastic: ElasticMember) -> ServerNetwork:
    """Join the network of a job that trains already.

    In a network of workers alone a newcomer has its number in the job. Otherwise that may be the number of a server.
    """
    environment = detect(world.environ)
    place = environment.rendezvous if roles.rendezvous is None else roles.rendezvous
    if place is None:
        raise WorldError(no_launcher_store(environment))
    zeromq = importlib.import_module("syncline.transports.zeromq")
    transport = zeromq.join(
        place,
        world.transport.timeout,
        label=LABEL,
        name_of=roles.name_of,
        name=f"rank {elastic.limits.member}",
        rank=elastic.limits.member if roles.workers_only else None,
    )
    return network_of(transport, elastic.launched, roles.servers, roles.evaluators, roles.replicas, elastic=True)


def join_network(
    roles: Roles, timeout: float = DEFAULT_TIMEOUT_S, join_timeout_s: float | None = None
) -> ServerNetwork:
    """Join as a server or an evaluator. `join_timeout_s`: seconds to wait for the workers."""
    if roles.role == "worker" or roles.rendezvous is None:
        raise WorldError(
            f"this process is a {roles.role} and has no rendezvous address: `syncline run --servers S` starts servers "
            "and sets it (SYNCLINE_ROLE, MASTER_ADDR, MASTER_PORT)"
        )
    zeromq = importlib.import_module("syncline.transports.zeromq")
    elastic = bool(os.environ.get(ELASTIC_VARIABLE))
    if roles.joins:
        transport = zeromq.join(roles.rendezvous, timeout, label=LABEL, name_of=roles.name_of, name=program_name())
        return network_of(
            transport,
            roles.workers,
            roles.servers,
            roles.evaluators,
            roles.replicas,
            replaces=roles.number,
            elastic=elastic,
        )
    environment = roles.environment()
    transport = zeromq.connect(environment, timeout, label=LABEL, join_timeout=join_timeout_s, name_of=roles.name_of)
    return network_of(transport, roles.workers, roles.servers, roles.evaluators, roles.replicas, elastic=elastic)


def import_handlers(environ: Mapping[str, str] | None = None) -> None:
    """Import the modules that register handlers. Every process that serves calls it.

    >>> import_handlers({"SYNCLINE_HANDLERS": "no_such_module"})
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: SYNCLINE_HANDLERS=no_such_module: there is no module 'no_such_module' ...
    """
    text = (os.environ if environ is None else environ).get(HANDLERS_VARIABLE, "")
    for name in filter(None, (part.strip() for part in text.split(","))):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # of a module that the named one imports
            raise SpecError(
                f"{HANDLERS_VARIABLE}={text}: there is no module {name!r} in {os.getcwd()} or on PYTHONPATH; "
                "give --handlers the name of a module that can be imported there"
            ) from error
