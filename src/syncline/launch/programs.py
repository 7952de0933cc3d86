"""The programs of a run: one for each rank, each server and the evaluator, their hosts and environment variables."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from syncline.environment.base import JOB_FOLDER_VARIABLE
from syncline.errors import SpecError
from syncline.launch.machine import cores

LOCALHOST = "localhost"
"""The one host name on which programs are started without ssh."""


@dataclass(frozen=True)
class Host:
    """A host of `--hosts a:2,b:2`: its name for ssh, and its number of ranks."""

    name: str
    slots: int


def parse_hosts(text: str, ranks: int | None = None) -> tuple[Host, ...]:
    """Parse a list of hosts. Without counts, `ranks` are divided evenly, or each host takes one rank.

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
            raise SpecError(
                f"--hosts {text}: {ranks} ranks cannot be divided evenly among {len(found)} hosts; give a:N"
            )
    hosts = tuple(Host(name, even if slots is None else slots) for name, slots in found)
    total = sum(host.slots for host in hosts)
    if ranks is not None and total != ranks:
        raise SpecError(f"-n {ranks} but --hosts {text} takes {total} ranks; leave -n out, or make them agree")
    return hosts


def _parse_host(part: str, text: str) -> tuple[str, int | None]:
    # A name must not begin with a dash: ssh would read it as an option.
    match = re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.@-]*)(?::(\d+))?", part)
    if match is None:
        raise SpecError(f"--hosts {text}: {part!r} is not a host; write a:2,b:2 (name:ranks, separated by commas)")
    slots = None if match[2] is None else int(match[2])
    if slots == 0:
        raise SpecError(f"--hosts {text}: {match[1]} would take 0 ranks; leave it out")
    return match[1], slots


EVALUATOR = "evaluator"
MPIEXEC = "mpiexec"
"""The name of the program that represents all ranks if mpiexec starts them."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to start and to watch."""

    name: str
    target: tuple[str, ...]
    """The arguments of `worker.py`: a script with its arguments, `-m` and a module, or `--exec` and a command."""
    variables: Mapping[str, str]
    rank: int | None = None
    """None for a server or an evaluator, which are ended after all ranks."""
    prefix: str | None = None
    """Text before each line of its output; None if it writes to the launcher's own streams."""
    enter: tuple[str, ...] = ()
    """The command that runs another command in the host's network namespace; empty outside of a lab."""
    host: str = ""
    """The name of its `LaunchHost`."""
    output: str = ""
    """A folder on its host to which its output is written too, as files stdout and stderr; empty for none."""

    def to_json(self) -> dict[str, Any]:
        """As JSON, for an agent on another host."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Program:
        """Decode `to_json()`."""
        return cls(**{**found, "target": tuple(found["target"]), "enter": tuple(found["enter"])})


@dataclass(frozen=True, kw_only=True)
class LaunchHost:
    """A host as the launcher uses it: its number of ranks, and how programs run there."""

    name: str
    slots: int
    enter: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    interface: str = ""
    remote_shell: str = ""
    """The path of a program that is called like ssh and runs a command on a host of the lab; mpiexec uses it."""


def rank_programs(
    hosts: Sequence[LaunchHost],
    target: Iterable[str],
    common: Mapping[str, str],
    plain_rank: int | None = 0,
    horovod: bool = False,
    elastic: bool = False,
    output: Path | None = None,
) -> list[list[Program]]:
    """The programs of the ranks, by host. Ranks are numbered host by host.

    `horovod`: with Horovod's variables too. `elastic`: each rank has its member number, which at first is its rank.
    `output`: a folder to which their output is written too.

    >>> found = rank_programs([LaunchHost(name="a", slots=2), LaunchHost(name="b", slots=1)], ["train.py"], {})
    >>> [[program.name for program in programs] for programs in found]
    [['rank 0', 'rank 1'], ['rank 2']]
    >>> found[1][0].variables["GROUP_RANK"], found[1][0].prefix
    ('1', '[2] ')
    """
    size = sum(host.slots for host in hosts)
    found: list[list[Program]] = []
    for number, host in enumerate(hosts):
        first = sum(before.slots for before in hosts[:number])
        programs = []
        for local in range(host.slots):
            name = f"rank {first + local}"
            variables = {
                "RANK": str(first + local),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(host.slots),
                "GROUP_RANK": str(number),
            }
            if horovod:
                variables |= _horovod_variables([host.slots for host in hosts], number, first + local, local)
            if elastic:
                variables[MEMBER_VARIABLE] = str(first + local)
            plain = None if output is None else ""  # output that is also written to a file passes the launcher
            prefix = plain if first + local == plain_rank else f"[{first + local}] "
            program = _program(host, name, target, {**common, **variables}, prefix, rank=first + local)
            if output is not None:
                program = replace(program, output=str(output / _rank_folder(first + local, len(str(size - 1)))))
            programs.append(program)
        found.append(programs)
    return found


def _rank_folder(rank: int, digits: int) -> str:
    """The folder of a rank's output. Zeros make the order of names that of the ranks.

    >>> _rank_folder(3, 2)
    'rank.03'
    """
    return f"rank.{rank:0{digits}d}"


def _horovod_variables(slots: Sequence[int], host: int, rank: int, local: int) -> dict[str, str]:
    """HOROVOD_RANK and others. The cross rank counts the hosts that have a rank with the same local rank.

    >>> [_horovod_variables([2, 1], *place)["HOROVOD_CROSS_RANK"] for place in ((0, 0, 0), (0, 1, 1), (1, 2, 0))]
    ['0', '0', '1']
    >>> [_horovod_variables([2, 1], *place)["HOROVOD_CROSS_SIZE"] for place in ((0, 0, 0), (0, 1, 1), (1, 2, 0))]
    ['2', '1', '2']
    """
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(sum(slots)),
        "HOROVOD_LOCAL_RANK": str(local),
        "HOROVOD_LOCAL_SIZE": str(slots[host]),
        "HOROVOD_CROSS_RANK": str(sum(count > local for count in slots[:host])),
        "HOROVOD_CROSS_SIZE": str(sum(count > local for count in slots)),
    }


def newcomer_program(program: Program, member: int) -> Program:
    """The program of a new member of an elastic job at the place of one of its first ranks.

    It is not a rank of the first world. It starts alone, and asks the others to take it into their team.

    >>> [[first]] = rank_programs([LaunchHost(name="a", slots=1)], ["train.py"], {}, elastic=True)
    >>> found = newcomer_program(first, 8)
    >>> found.name, found.rank, found.prefix, found.variables["SYNCLINE_MEMBER"], found.variables["SYNCLINE_JOIN"]
    ('rank 8', 8, '[8] ', '8', '1')
    """
    name, local = f"rank {member}", program.variables.get(LOCAL_RANK_VARIABLE) or program.variables["LOCAL_RANK"]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    horovod = _horovod_variables([1], 0, 0, 0) if "HOROVOD_RANK" in program.variables else {}
    own = {MEMBER_VARIABLE: str(member), JOIN_VARIABLE: "1", LOCAL_RANK_VARIABLE: local, "SYNCLINE_PROGRAM": name}
    variables = {**program.variables, **alone, **horovod, **own}
    output = program.output
    if output:
        output = str(Path(output).with_name(_rank_folder(member, len(output.rpartition(".")[2]))))
    return replace(program, name=name, rank=member, prefix=f"[{member}] ", variables=variables, output=output)


def server_programs(
    hosts: Sequence[LaunchHost], target: Iterable[str], common: Mapping[str, str], count: int
) -> list[list[Program]]:
    """The programs of the servers, by host. Hosts take servers in turn.

    >>> [len(programs) for programs in server_programs([LaunchHost(name="a", slots=1)] * 2, ["-m", "server"], {}, 3)]
    [2, 1]
    """
    found: list[list[Program]] = [[] for _ in hosts]
    for server in range(count):
        number, name = server % len(hosts), f"server {server}"
        variables = {**common, "SYNCLINE_ROLE": "server", "SYNCLINE_SERVER": str(server)}
        found[number].append(_program(hosts[number], name, target, variables, f"[{name}] "))
    return found


def evaluator_programs(
    hosts: Sequence[LaunchHost], target: Iterable[str], common: Mapping[str, str]
) -> list[list[Program]]:
    """The evaluator, on the last host. It is not a rank and has no variables of a rank.

    >>> [[program.name for program in each] for each in evaluator_programs([LaunchHost(name="a", slots=1)], [], {})]
    [['evaluator']]
    """
    variables = {**common, "SYNCLINE_ROLE": EVALUATOR}
    return [[] for _ in hosts[:-1]] + [[_program(hosts[-1], EVALUATOR, target, variables, f"[{EVALUATOR}] ")]]


def _program(
    host: LaunchHost,
    name: str,
    target: Iterable[str],
    variables: Mapping[str, str],
    prefix: str | None,
    rank: int | None = None,
) -> Program:
    environment = {**host.variables, **variables, "SYNCLINE_PROGRAM": name}
    return Program(
        name=name,
        target=tuple(target),
        variables=environment,
        rank=rank,
        prefix=prefix,
        enter=host.enter,
        host=host.name,
    )


ELASTIC_VARIABLE = "SYNCLINE_ELASTIC"
"""MIN:MAX, the limits of an elastic job, in the environment of all its programs."""
MEMBER_VARIABLE = "SYNCLINE_MEMBER"
"""The number of a rank of an elastic job. It is never given twice."""
JOIN_VARIABLE = "SYNCLINE_JOIN"
"""Set for a rank that joins a running job."""
LOCAL_RANK_VARIABLE = "SYNCLINE_LOCAL_RANK"
"""The local rank of a rank that joins a running job. Its LOCAL_RANK is 0, because it starts in a world of one rank."""
ELASTIC_VARIABLES = (ELASTIC_VARIABLE, MEMBER_VARIABLE, JOIN_VARIABLE, LOCAL_RANK_VARIABLE, JOB_FOLDER_VARIABLE)
FORWARDED_PREFIXES = (
    *("OMP_", "MKL_", "NCCL_", "GLOO_", "TP_", "TORCH_", "CUDA_", "UCX_", "PYTHON"),
    *("SYNCLINE_", "HOROVOD_"),
)
"""Prefixes of the environment variables that are forwarded to other hosts."""
NOT_FORWARDED = (
    *("SYNCLINE_SSH", "SYNCLINE_SUPERVISOR", "SYNCLINE_KEY", "SYNCLINE_PROGRAM"),
    # They belong to an outer run, inside which this one may be started.
    *ELASTIC_VARIABLES,
    *("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_RANK"),
    *("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_SIZE"),
)


def rendezvous_variables(address: str, port: int) -> dict[str, str]:
    """The variables that tell all processes of a run the address of its store."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher serves the store, not rank 0
        "TORCHELASTIC_RESTART_COUNT": "0",
        "SYNCLINE_RUN_ID": secrets.token_hex(8),
    }


def role_environment(
    workers: int, *, servers: int = 0, replicas: int = 1, evaluators: int = 0, hosts: int = 1, handlers: str = ""
) -> dict[str, str]:
    """The variables that tell a process how many workers, servers, replicas, evaluators and hosts a run has.

    They are set even if there is no server, because a run may be started inside another run.

    >>> role_environment(4, servers=2)["SYNCLINE_SERVERS"]
    '2'
    """
    return {
        "SYNCLINE_WORKERS": str(workers),
        "SYNCLINE_SERVERS": str(servers),
        "SYNCLINE_REPLICAS": str(replicas),
        "SYNCLINE_EVALUATORS": str(evaluators),
        "SYNCLINE_HOSTS": str(hosts),
        "SYNCLINE_ROLE": "worker",
        "SYNCLINE_PROGRAM": "",
    } | ({"SYNCLINE_HANDLERS": handlers} if handlers else {})


def thread_variables(workers: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The number of threads of each worker: an equal share of the cores, unless the user has set it.

    >>> thread_variables(4, {"OMP_NUM_THREADS": "3"})
    {'OMP_NUM_THREADS': '3'}
    """
    chosen = (os.environ if environ is None else environ).get("OMP_NUM_THREADS")
    return {"OMP_NUM_THREADS": chosen or str(max(1, cores() // max(1, workers)))}


def network_key(environ: Mapping[str, str] | None = None) -> str:
    """The secret key of the run's network: the user's own, or a new one.

    >>> network_key({"SYNCLINE_KEY": "none"}), len(network_key({}))
    ('none', 40)
    """
    import zmq

    chosen = (os.environ if environ is None else environ).get("SYNCLINE_KEY")
    return chosen or str(zmq.curve_keypair()[1].decode("ascii"))


def forwarded_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The user's environment variables that are forwarded to other hosts.

    >>> forwarded_variables({"NCCL_DEBUG": "INFO", "HOME": "/home/user", "SYNCLINE_SSH": "ssh -v"})
    {'NCCL_DEBUG': 'INFO'}
    """
    found = os.environ if environ is None else environ
    return {
        name: value
        for name, value in found.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in NOT_FORWARDED
    }
