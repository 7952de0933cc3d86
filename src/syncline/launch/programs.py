"""What is started where: one program for each rank, each server, and the evaluator."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from syncline.errors import SpecError
from syncline.launch.machine import cores

__all__ = [
    "EVALUATOR",
    "LOCALHOST",
    "MPIEXEC",
    "Host",
    "LaunchHost",
    "Program",
    "add_horovod_variables",
    "evaluator_programs",
    "forwarded_variables",
    "network_key",
    "parse_hosts",
    "rank_programs",
    "rendezvous_variables",
    "role_environment",
    "server_programs",
    "thread_variables",
]

LOCALHOST = "localhost"
"""The one name that is started without ssh."""


@dataclass(frozen=True)
class Host:
    """A host by the name that ssh knows it by."""

    name: str
    slots: int


def parse_hosts(text: str, ranks: int | None = None) -> tuple[Host, ...]:
    """The hosts of a list; where it gives no counts, `ranks` are dealt out evenly, or each host takes one.

    >>> parse_hosts("a:2,ada@b:1")
    (Host(name='a', slots=2), Host(name='ada@b', slots=1))
    >>> parse_hosts("a,b", ranks=4)
    (Host(name='a', slots=2), Host(name='b', slots=2))
    """
    found = [_parse_host(part.strip(), text) for part in text.split(",")]
    names = [name for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"--hosts {text}: {name} is named {names.count(name)} times; give its ranks as {name}:N")
    even = 1
    if ranks is not None and all(slots is None for _, slots in found):
        even, odd = divmod(ranks, len(found))
        if odd or not even:
            raise SpecError(f"--hosts {text}: {ranks} ranks cannot be dealt evenly to {len(found)} hosts; give a:N")
    hosts = tuple(Host(name, even if slots is None else slots) for name, slots in found)
    _check_count(text, hosts, ranks)
    return hosts


def _parse_host(part: str, text: str) -> tuple[str, int | None]:
    # A name may not begin with a dash: ssh would take it for an option.
    match = re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.@-]*)(?::(\d+))?", part)
    if match is None:
        raise SpecError(f"--hosts {text}: {part!r} is not a host; write a:2,b:2 (name:ranks, separated by commas)")
    slots = None if match[2] is None else int(match[2])
    if slots == 0:
        raise SpecError(f"--hosts {text}: {match[1]} would take 0 ranks; leave it out")
    return match[1], slots


def _check_count(text: str, hosts: Sequence[Host], ranks: int | None) -> None:
    total = sum(host.slots for host in hosts)
    if ranks is not None and total != ranks:
        raise SpecError(f"-n {ranks} but --hosts {text} takes {total} ranks; leave -n out, or make them agree")


EVALUATOR = "evaluator"
MPIEXEC = "mpiexec"
"""The name of the one program that represents all ranks where mpiexec starts them."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A process to start and to watch."""

    name: str
    target: tuple[str, ...]
    """What `launch/worker.py` is given: a script and its arguments, `-m` and a module, `--exec` and a command."""
    variables: Mapping[str, str]
    rank: int | None = None
    """None for a server and an evaluator: they end when all ranks have ended."""
    prefix: str | None = None
    """Before each line of its output; None: it writes to our own streams itself."""
    enter: tuple[str, ...] = ()
    """A command before the command: how to get into its network."""

    def to_json(self) -> dict[str, Any]:
        """As an agent reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Program:
        """What `to_json` gave."""
        rank, prefix = found["rank"], found["prefix"]
        return cls(
            name=str(found["name"]),
            target=tuple(map(str, found["target"])),
            variables={str(name): str(value) for name, value in found["variables"].items()},
            rank=None if rank is None else int(rank),
            prefix=None if prefix is None else str(prefix),
            enter=tuple(map(str, found["enter"])),
        )


@dataclass(frozen=True, kw_only=True)
class LaunchHost:
    """A host, and how many ranks it takes."""

    name: str
    slots: int
    enter: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    interface: str = ""
    door: str = ""
    """A program that is called as ssh is and runs a command at that address; for mpiexec in the lab."""


def rank_programs(
    places: Sequence[LaunchHost], target: Iterable[str], common: Mapping[str, str], plain_rank: int | None = 0
) -> list[list[Program]]:
    """The ranks of each place, counted through place by place.

    >>> found = rank_programs([LaunchHost(name="a", slots=2), LaunchHost(name="b", slots=1)], ["train.py"], {})
    >>> [[program.name for program in programs] for programs in found]
    [['rank 0', 'rank 1'], ['rank 2']]
    >>> found[1][0].variables["GROUP_RANK"], found[1][0].prefix
    ('1', '[2] ')
    """
    size = sum(place.slots for place in places)
    arguments = tuple(target)
    laid: list[list[Program]] = []
    rank = 0
    for number, place in enumerate(places):
        here = []
        for local in range(place.slots):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(place.slots),
                "GROUP_RANK": str(number),
                "SYNCLINE_PROGRAM": f"rank {rank}",
            }
            here.append(
                Program(
                    name=f"rank {rank}",
                    target=arguments,
                    variables={**place.variables, **common, **variables},
                    rank=rank,
                    prefix=None if rank == plain_rank else f"[{rank}] ",
                    enter=place.enter,
                )
            )
            rank += 1
        laid.append(here)
    return laid


def server_programs(
    places: Sequence[LaunchHost], target: Iterable[str], common: Mapping[str, str], count: int
) -> list[list[Program]]:
    """Servers beside the ranks, dealt to the places in turn.

    >>> [len(programs) for programs in server_programs([LaunchHost(name="a", slots=1)] * 2, ["-m", "server"], {}, 3)]
    [2, 1]
    """
    arguments = tuple(target)
    laid: list[list[Program]] = [[] for _ in places]
    for server in range(count):
        place = places[server % len(places)]
        role = {"SYNCLINE_ROLE": "server", "SYNCLINE_SERVER": str(server), "SYNCLINE_PROGRAM": f"server {server}"}
        laid[server % len(places)].append(
            Program(
                name=f"server {server}",
                target=arguments,
                variables={**place.variables, **common, **role},
                prefix=f"[server {server}] ",
                enter=place.enter,
            )
        )
    return laid


def evaluator_programs(
    places: Sequence[LaunchHost], target: Iterable[str], common: Mapping[str, str]
) -> list[list[Program]]:
    """The evaluator, on the last host. It is not a rank and has no variables of a rank.

    >>> [[program.name for program in each] for each in evaluator_programs([LaunchHost(name="a", slots=1)], [], {})]
    [['evaluator']]
    """
    last = places[-1]
    evaluator = Program(
        name=EVALUATOR,
        target=tuple(target),
        variables={**last.variables, **common, "SYNCLINE_ROLE": EVALUATOR, "SYNCLINE_PROGRAM": EVALUATOR},
        prefix=f"[{EVALUATOR}] ",
        enter=last.enter,
    )
    return [[] for _ in places[:-1]] + [[evaluator]]


FORWARDED_PREFIXES = (
    "OMP_",
    "MKL_",
    "NCCL_",
    "GLOO_",
    "TP_",
    "TORCH_",
    "CUDA_",
    "UCX_",
    "PYTHON",
    "SYNCLINE_",
    "HOROVOD_",
)
"""What goes along to other hosts, by the beginning of its name: their own environment has the rest."""
NOT_FORWARDED = (
    *("SYNCLINE_SSH", "SYNCLINE_SUPERVISOR", "SYNCLINE_KEY", "SYNCLINE_PROGRAM"),
    # Of a run that this one may be started in.
    *("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_RANK"),
    *("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_SIZE"),
)


def rendezvous_variables(address: str, port: int) -> dict[str, str]:
    """What all processes of a run are told: where they meet."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served by us, not by rank 0
        "TORCHELASTIC_RESTART_COUNT": "0",
        "SYNCLINE_RUN_ID": secrets.token_hex(8),
    }


def role_environment(
    workers: int, *, servers: int = 0, evaluators: int = 0, hosts: int = 1, handlers: str = ""
) -> dict[str, str]:
    """The variables that tell a process how many workers, servers, evaluators and hosts a run has.

    They are set even if there is no server, because a run may be started inside another run.


    >>> role_environment(4, servers=2)["SYNCLINE_SERVERS"]
    '2'
    """
    return {
        "SYNCLINE_WORKERS": str(workers),
        "SYNCLINE_SERVERS": str(servers),
        "SYNCLINE_EVALUATORS": str(evaluators),
        "SYNCLINE_HOSTS": str(hosts),
        "SYNCLINE_ROLE": "worker",
        "SYNCLINE_PROGRAM": "",
    } | ({"SYNCLINE_HANDLERS": handlers} if handlers else {})


def thread_variables(workers: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """A fair share of the cores for each worker's arithmetic, unless the user has said otherwise.

    >>> thread_variables(4, {"OMP_NUM_THREADS": "3"})
    {'OMP_NUM_THREADS': '3'}
    """
    chosen = (os.environ if environ is None else environ).get("OMP_NUM_THREADS")
    return {"OMP_NUM_THREADS": chosen or str(max(1, cores() // max(1, workers)))}


def network_key(environ: Mapping[str, str] | None = None) -> str:
    """A secret that admits to the run's network, where others may be on the wire: the user's own, or a fresh one.

    >>> network_key({"SYNCLINE_KEY": "none"}), len(network_key({}))
    ('none', 40)
    """
    import zmq

    chosen = (os.environ if environ is None else environ).get("SYNCLINE_KEY")
    return chosen or str(zmq.curve_keypair()[1].decode("ascii"))


def forwarded_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The user's variables that go along to other hosts.

    >>> forwarded_variables({"NCCL_DEBUG": "INFO", "HOME": "/home/user", "SYNCLINE_SSH": "ssh -v"})
    {'NCCL_DEBUG': 'INFO'}
    """
    found = os.environ if environ is None else environ
    return {
        name: value
        for name, value in found.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in NOT_FORWARDED
    }


def add_horovod_variables(places: Sequence[Sequence[Program]]) -> list[list[Program]]:
    """The ranks of each place, told who they are in Horovod's words too.

    The cross rank counts the places that have a rank with the same local rank.

    >>> hosts = [LaunchHost(name="a", slots=2), LaunchHost(name="b", slots=1)]
    >>> found = add_horovod_variables(rank_programs(hosts, ["train.py"], {}))
    >>> [program.variables["HOROVOD_CROSS_RANK"] for programs in found for program in programs]
    ['0', '0', '1']
    >>> [program.variables["HOROVOD_CROSS_SIZE"] for programs in found for program in programs]
    ['2', '1', '2']
    """
    sizes = [len(place) for place in places]
    told = []
    for number, place in enumerate(places):
        here = []
        for local, program in enumerate(place):
            variables = {
                "HOROVOD_RANK": str(program.rank),
                "HOROVOD_SIZE": str(sum(sizes)),
                "HOROVOD_LOCAL_RANK": str(local),
                "HOROVOD_LOCAL_SIZE": str(len(place)),
                "HOROVOD_CROSS_RANK": str(sum(size > local for size in sizes[:number])),
                "HOROVOD_CROSS_SIZE": str(sum(size > local for size in sizes)),
            }
            here.append(replace(program, variables={**program.variables, **variables}))
        told.append(here)
    return told
