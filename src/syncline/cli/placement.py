"""The options that say where the workers of a command run, and the start of the workers there.

A command adds the options that it supports, reads them into a `Placement`, and runs its job:

    add_placement_options(parser, "-n", "--hosts", "--lab")
    …
    return Placement.read(arguments, default_ranks=2).run(Job(target=("train.py",)))
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from syncline.environment.lost_after import read_lost_after
from syncline.errors import IncompatibleError, SpecError
from syncline.launch.elastic import DEFAULT_RESTARTS, ElasticOptions
from syncline.launch.job_folder import fresh_job_name
from syncline.launch.lab import parse_lab
from syncline.launch.machine import warn_if_oversubscribed
from syncline.launch.programs import LOCALHOST, Host, parse_hosts
from syncline.launch.start import Job, run_by_mpiexec, run_here, run_in_lab, run_on_hosts
from syncline.launch.supervisor import FailurePolicy
from syncline.training.run_folder import RunFolder

__all__ = ["Placement", "add_placement_options", "failure_policy", "read_elastic_options", "read_server_restarts"]

OPTIONS: dict[str, dict[str, Any]] = {
    "-n": {"type": int, "dest": "ranks", "metavar": "N", "help": "number of workers"},
    "--hosts": {"metavar": "a:2,b:2", "help": "hosts and their numbers of workers, over ssh"},
    "--lab": {"metavar": "4@100mbit", "help": "number of hosts and link rate of a cluster emulated on this machine"},
    "--mpi": {"action": "store_true", "help": "start the workers with mpiexec, and communicate over MPI"},
    "--servers": {"type": int, "default": 0, "metavar": "S", "help": "number of parameter servers; default 0"},
    "--replicas": {
        "type": int,
        "default": 1,
        "metavar": "R",
        "help": "servers that hold each part of the weights: with 2, a lost server loses nothing; default 1",
    },
    "--on-failure": {
        "choices": ("stop", "continue", "restart"),
        "help": "when a worker fails: stop the others (the default), let them continue without it, or start it again "
        f"({DEFAULT_RESTARTS} times, with --elastic)",
    },
    "--lost-after": {
        "metavar": "SECONDS",
        "help": "kill a worker that sends no heartbeat for this long; default 30, with --elastic 10; 0 for never",
    },
    "--elastic": {
        "metavar": "MIN:MAX",
        "help": "go on without workers that fail, while MIN are left; up to MAX may join (syncline join)",
    },
    "--restart": {
        "type": int,
        "metavar": "K",
        "help": "start a worker (with --elastic) or a server (with --replicas) that fails again, K times at most; "
        "default 0",
    },
}


def add_placement_options(
    parser: argparse._ActionsContainer, *names: str, help: Mapping[str, str] | None = None
) -> None:
    """Add the named options to a parser or to a group of its options. `help` replaces the text of some of them."""
    for name in names:
        parser.add_argument(name, **{**OPTIONS[name], **({"help": help[name]} if help and name in help else {})})


@dataclass(frozen=True)
class Placement:
    """Where the workers of a command run: here by default, or on hosts, in a lab, or with mpiexec."""

    ranks: int
    hosts: tuple[Host, ...] = ()
    lab: tuple[int, str] | None = None
    """The number of hosts of the lab, and the rate of its links."""
    mpi: bool = False

    @classmethod
    def read(cls, arguments: argparse.Namespace, default_ranks: int | None = None) -> Placement:
        """Check the options of a command and read them. An option that the command does not have counts as absent."""
        given = vars(arguments)
        ranks, hosts, lab, lost_after = (given.get(name) for name in ("ranks", "hosts", "lab", "lost_after"))
        if ranks is not None and ranks < 1:
            raise SpecError(f"-n {ranks}: a run takes at least one worker")
        if lost_after is not None:
            read_lost_after(lost_after, f"--lost-after {lost_after}")
        if (given.get("servers") or 0) < 0:
            raise SpecError(f"--servers {given['servers']}: a number of servers cannot be negative")
        mpi = bool(given.get("mpi"))
        _check_replicas(given.get("replicas", 1), given.get("servers") or 0, mpi)
        if lab and hosts:
            raise IncompatibleError("--lab makes its own hosts and cannot be used with --hosts; leave one out")
        if lab:
            count, rate = parse_lab(lab)
            return cls(ranks or count, lab=(count, rate), mpi=mpi)
        if hosts is not None:
            parsed = parse_hosts(hosts, ranks)
            return cls(sum(host.slots for host in parsed), parsed, mpi=mpi)
        if ranks is None and default_ranks is None:
            raise SpecError("how many workers? Give -n N, as in syncline run -n 4 train.py, or --hosts or --lab")
        return cls(ranks or default_ranks or 1, mpi=mpi)

    def run(self, job: Job, *, mpiexec: Literal["exec", "call", "supervise"] = "exec") -> int:
        """Run the job and return its exit code.

        `mpiexec` says how mpiexec runs outside of a lab: "exec" replaces this process by it, "call" waits for it, and
        "supervise" watches it as any other program (`job.mpi` must be set).
        """
        if self.lab is not None:
            return run_in_lab(job, *self.lab, self.ranks)
        if self.mpi and mpiexec != "supervise":
            return run_by_mpiexec(job, self.ranks, self.hosts, wait=mpiexec == "call")
        warn_if_oversubscribed(
            sum(host.slots for host in self.hosts if host.name == LOCALHOST) if self.hosts else self.ranks
        )
        return run_on_hosts(job, self.hosts) if self.hosts else run_here(job, self.ranks)

    def run_elastic(self, job: Job, folder: Path | None) -> int:
        """Run the job. If it is elastic, it has a folder, which is locked meanwhile: the given one, or a new one."""
        if job.elastic is None:
            return self.run(job)
        run_folder = RunFolder(folder or Path("runs") / fresh_job_name())
        with run_folder.lock():
            return self.run(replace(job, folder=run_folder.path))


def read_elastic_options(arguments: argparse.Namespace, ranks: int) -> ElasticOptions | None:
    """Check the options of an elastic job and read them; None if the job is not elastic."""
    limits, restarts, policy = arguments.elastic, arguments.restart, arguments.on_failure
    if limits is None:
        for option, given in (
            ("--restart", restarts is not None and arguments.replicas == 1),
            ("--on-failure restart", policy == "restart"),
        ):
            if given:
                raise IncompatibleError(
                    f"{option}: the others must take the new worker into their team; add --elastic MIN:MAX"
                )
        return None
    if arguments.mpi:
        raise IncompatibleError(f"--elastic {limits}: mpiexec ends all workers when one fails; leave --mpi out")
    if policy == "stop":
        raise IncompatibleError(
            f"--on-failure stop: with --elastic {limits} the others go on without a worker; leave one out"
        )
    if restarts is None:
        restarts = DEFAULT_RESTARTS if policy == "restart" else 0
    return ElasticOptions.parse(limits, ranks, restarts)


def read_server_restarts(arguments: argparse.Namespace) -> int:
    """How many times a server that fails is started again. Other servers must have its part of the weights."""
    usual = DEFAULT_RESTARTS if arguments.on_failure == "restart" else 0
    restarts: int = usual if arguments.restart is None else arguments.restart
    if restarts < 0:
        raise SpecError(f"--restart {restarts}: a number of restarts cannot be negative")
    return restarts if arguments.replicas > 1 else 0


def failure_policy(arguments: argparse.Namespace) -> FailurePolicy:
    """What happens to the other ranks when one fails."""
    return "continue" if arguments.elastic is not None or arguments.on_failure == "continue" else "stop"


def _check_replicas(replicas: int, servers: int, mpi: bool) -> None:
    if replicas == 1:
        return
    if replicas > 1 and not servers:
        raise IncompatibleError(
            f"--replicas {replicas}: only dedicated servers have replicas; add --servers {replicas}"
        )
    if not 1 <= replicas <= servers:
        raise SpecError(
            f"--replicas {replicas} with --servers {servers}: each part of the weights lives on at least one server, "
            "and once on each"
        )
    if mpi:
        raise IncompatibleError(f"--replicas {replicas}: MPI ends all processes when one fails; leave it out")
