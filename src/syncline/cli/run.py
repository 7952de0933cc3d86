"""Run a script on many workers: on this machine, on hosts by ssh, with MPI, or in an emulated cluster.

examples:
  syncline run -n 4 train.py --epochs 3            four workers here
  syncline run -n 4 -m package.train               a module, as with python -m
  syncline run --hosts a:2,b:2 train.py            over ssh; every host has the same paths
  syncline run --hosts slurm -n 8 train.py         inside a Slurm job, by srun
  syncline run -n 4 --mpi train.py                 by mpiexec
  syncline run -n 4 --servers 2 train.py           two parameter servers beside the workers
  syncline run --lab 4@100mbit train.py            four hosts at 100 Mbit/s, emulated on this machine
  syncline run --lab 4@100mbit --mpi train.py      the same by mpiexec

Rank 0 writes to the terminal itself; each line of the others begins with its rank. When a rank fails, the others are
ended, its traceback is shown once with all ranks that raised the same error, and the exit code is its own.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from syncline.environment.heartbeats import read_lost_after
from syncline.errors import IncompatibleError, SpecError
from syncline.launch.hosts import HERE, Host, parse_hosts
from syncline.launch.machine import warn_if_crowded
from syncline.launch.mpi import mpi_command
from syncline.launch.slurm import srun_command
from syncline.launch.start import Job, hand_over, run_here, run_on_hosts
from syncline.launch.variables import company, network_key, threads_each

__all__ = ["configure", "run"]

SLURM = "slurm"
HINTS = {
    **dict.fromkeys(("--nproc-per-node", "--nproc_per_node", "--np", "--num-workers", "--workers"), "write -n N"),
    **dict.fromkeys(("--host", "-H", "--hostfile", "--machinefile"), "write --hosts a:2,b:2"),
    **dict.fromkeys(
        ("--strategy", "--codec", "--collective"),
        "set it in the script, as in sl.distribute(model, optimizer, strategy='ssp', codec='quantize(4)')",
    ),
    "": "options of the script come after its name",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what this command takes."""
    parser.add_argument("-n", type=int, metavar="N", dest="ranks", help="workers; --hosts and --lab may give it too")
    parser.add_argument("--hosts", metavar="a:2,b:2", help="hosts and their workers, over ssh; 'slurm' inside a job")
    parser.add_argument("--mpi", action="store_true", help="let mpiexec start the workers, and MPI carry the bytes")
    parser.add_argument("--lab", metavar="4@100mbit", help="so many hosts at that rate, emulated on this machine")
    parser.add_argument("--servers", type=int, default=0, metavar="S", help="parameter servers beside the workers")
    parser.add_argument("--handlers", metavar="M,…", default="", help="modules with handlers that the servers import")
    parser.add_argument(
        "--on-failure",
        choices=("stop", "continue"),
        default="stop",
        help="when a worker fails: stop the others (the default), or tell them and let them go on",
    )
    parser.add_argument(
        "--lost-after",
        metavar="SECONDS",
        help="kill a worker that sends no heartbeat for so many seconds; default 30, 0 for never",
    )
    parser.add_argument("--address", metavar="A", help="this machine's address that the workers can reach")
    parser.add_argument("-m", action="store_true", dest="module", help="run a module, as python -m does")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="script.py args…", help="what to run")


def run(arguments: argparse.Namespace) -> int:
    """Run it; the exit code."""
    _check(arguments)
    target = _target(arguments)
    job = Job(
        target=target,
        policy=arguments.on_failure,
        address=arguments.address,
        servers=arguments.servers,
        handlers=arguments.handlers,
        mpi=arguments.mpi,
        lost_after=arguments.lost_after,
    )
    ranks: int | None = arguments.ranks
    if arguments.lab is not None:
        from syncline.launch.in_lab import run_in_lab
        from syncline.launch.lab import parse_lab

        hosts, rate = parse_lab(arguments.lab)
        return run_in_lab(job, hosts, rate, ranks)
    if arguments.hosts == SLURM:
        # In the environment, which srun takes along: a command line is for all to see.
        variables = {"SYNCLINE_KEY": network_key(), **company(_required(ranks), handlers=job.handlers)}
        return hand_over(srun_command(target, _required(ranks), os.environ), variables)
    named = () if arguments.hosts is None else parse_hosts(arguments.hosts, ranks)
    if arguments.mpi:
        return _run_mpi(job, sum(host.slots for host in named) or _required(ranks), named)
    if named:
        warn_if_crowded(sum(host.slots for host in named if host.name == HERE))
        return run_on_hosts(job, named)
    warn_if_crowded(_required(ranks))
    return run_here(job, _required(ranks))


def _run_mpi(job: Job, ranks: int, hosts: tuple[Host, ...]) -> int:
    told = company(ranks, servers=job.servers, hosts=len(hosts) or 1, handlers=job.handlers)
    variables = {"SYNCLINE_TRANSPORT": "mpi", "PYTHONUNBUFFERED": "1", **told}
    if hosts:
        variables["SYNCLINE_KEY"] = network_key()
    variables |= threads_each(ranks if not hosts else max(host.slots for host in hosts))
    environ = {**os.environ, **variables}
    command = mpi_command(job.target, ranks, hosts, environ, job.servers, job.server)
    return hand_over(command, variables, mpi=True)


def _target(arguments: argparse.Namespace) -> tuple[str, ...]:
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        what, form = ("module", "-m package.train") if arguments.module else ("script", "train.py")
        raise SpecError(f"no {what} is named: syncline run -n 4 {form}")
    first = program[0]
    if arguments.module:
        return ("-m", *program)
    if not os.path.exists(first):
        raise SpecError(f"there is no script {first!r} in {os.getcwd()}; {_suggestion(arguments, program)}")
    if os.path.isdir(first) and not os.path.exists(os.path.join(first, "__main__.py")):
        raise SpecError(f"{first} is a folder without __main__.py; name the script in it")
    if not os.access(first, os.R_OK):
        raise SpecError(f"the script {first!r} cannot be read: its mode is {os.stat(first).st_mode & 0o777:o}")
    return tuple(program)


def _suggestion(arguments: argparse.Namespace, program: Sequence[str]) -> str:
    """What to write instead of a first argument that is not a file."""
    from syncline.workloads import names

    first, second = program[0], program[1] if len(program) > 1 else "train.py"
    if os.path.basename(first).startswith("python"):
        return f"leave it out: syncline run -n 4 {second}"
    if first.partition("(")[0] in names():
        return f"for the workload write syncline train {first} -n 4"
    if arguments.hosts is not None and ":" in first:
        return f"hosts are separated by commas: --hosts {arguments.hosts},{first}"
    return "for a module use -m"


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be, and what cannot be together."""
    if arguments.ranks is not None and arguments.ranks < 1:
        raise SpecError(f"-n {arguments.ranks}: a run takes at least one worker")
    if arguments.lost_after is not None:
        read_lost_after(arguments.lost_after, f"--lost-after {arguments.lost_after}")
    if arguments.servers < 0:
        raise SpecError(f"--servers {arguments.servers}: a number of servers cannot be negative")
    ways = {"--hosts": arguments.hosts is not None, "--lab": arguments.lab is not None, "--mpi": arguments.mpi}
    if ways["--lab"] and ways["--hosts"]:
        raise IncompatibleError("--lab makes its own hosts and cannot be used with --hosts; leave one out")
    if ways["--mpi"] and arguments.hosts == SLURM:
        raise IncompatibleError("--hosts slurm lets srun start the workers, --mpi mpiexec; leave one out")
    if ways["--mpi"] or arguments.hosts == SLURM:
        starter = "mpiexec" if ways["--mpi"] else "srun"
        if arguments.on_failure == "continue":
            raise IncompatibleError(f"--on-failure continue: {starter} ends all workers when one fails; leave it out")
        if arguments.lost_after is not None:
            raise IncompatibleError(f"--lost-after {arguments.lost_after}: {starter} watches the workers; leave it out")
    if arguments.servers and arguments.hosts == SLURM:
        raise IncompatibleError(f"--servers {arguments.servers}: srun starts workers alone; leave it out")
    if arguments.servers and ways["--mpi"] and ways["--hosts"]:
        raise IncompatibleError(
            f"--servers {arguments.servers}: where mpiexec puts servers among --hosts is not settled; leave one out, "
            "or leave --mpi out"
        )
    if ways["--lab"]:
        from syncline.launch.lab import parse_lab

        parse_lab(arguments.lab)
    names = arguments.handlers.split(",") if arguments.handlers else []
    for name in names:
        if not all(part.isidentifier() for part in name.strip().split(".")):
            raise SpecError(f"--handlers {arguments.handlers}: {name!r} is not a module's name; write package.module")


def _required(ranks: int | None) -> int:
    if ranks is None:
        raise SpecError("how many workers? Give -n N, as in syncline run -n 4 train.py, or --hosts or --lab")
    return ranks
