"""Run a script on many workers: on this machine, on hosts by ssh, with MPI, or in an emulated cluster.

examples:
  syncline run -n 4 train.py --epochs 3            four workers here
  syncline run -n 4 -m package.train               a module, as with python -m
  syncline run --hosts a:2,b:2 train.py            over ssh; every host has the same paths
  syncline run --hosts slurm -n 8 train.py         inside a Slurm job, by srun
  syncline run -n 4 --mpi train.py                 by mpiexec
  syncline run -n 4 --servers 2 train.py           with two parameter servers
  syncline run -n 8 --elastic 2:8 --restart 3 train.py      goes on with 2 to 8 workers, and restarts those that fail
  syncline run -n 4 --servers 2 --replicas 2 train.py      the loss of one of them loses nothing
  syncline run --lab 4@100mbit train.py            four hosts at 100 Mbit/s, emulated on this machine
  syncline run --lab 4@100mbit --mpi train.py      the same by mpiexec
  syncline run -n 4 --as ml_comm train.py          a script that imports ml_comm, ml_comm_torch or dl_comm
  syncline run -n 4 --as horovod train.py          a script that imports horovod.torch

Rank 0 writes to the terminal itself; each line of the others begins with its rank. When a rank fails, the others are
ended. Its traceback is shown once, with all ranks that raised the same error, and its exit code is returned. An
elastic job has a folder (runs/… or --folder) for syncline status and syncline join.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from syncline.cli.placement import (
    Placement,
    add_placement_options,
    failure_policy,
    read_elastic_options,
    read_server_restarts,
)
from syncline.compat.module_aliases import ALIASES, alias_variables
from syncline.errors import IncompatibleError, SpecError
from syncline.launch.start import Job, run_by_srun

__all__ = ["configure", "run"]

SLURM = "slurm"
HINTS = {
    **dict.fromkeys(("--nproc-per-node", "--nproc_per_node", "--np", "--num-workers", "--workers"), "write -n N"),
    **dict.fromkeys(("--max-restarts", "--max_restarts", "--restarts"), "write --elastic MIN:MAX --restart K"),
    **dict.fromkeys(("--nnodes", "--min-np", "--max-np", "--min", "--max"), "write --elastic MIN:MAX"),
    **dict.fromkeys(("--host", "-H", "--hostfile", "--machinefile"), "write --hosts a:2,b:2"),
    **dict.fromkeys(
        ("--strategy", "--codec", "--collective"),
        "set it in the script, as in sl.distribute(model, optimizer, strategy='ssp', codec='quantize(4)')",
    ),
    **dict.fromkeys(("--alias", "--import-as"), "write --as horovod or --as ml_comm"),
    **dict.fromkeys(("", "--epochs", "--steps"), "options of the script come after its name"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_placement_options(
        parser,
        *("-n", "--hosts", "--mpi", "--lab", "--servers", "--replicas"),
        *("--on-failure", "--lost-after", "--elastic", "--restart"),
        help={
            "-n": "number of workers; --hosts and --lab may give it too",
            "--hosts": "hosts and their numbers of workers, over ssh; 'slurm' inside a Slurm job",
        },
    )
    parser.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="the folder of an elastic job; default runs/ and the time"
    )
    parser.add_argument("--handlers", metavar="M,…", default="", help="modules with handlers that the servers import")
    parser.add_argument(
        "--as",
        action="append",
        default=[],
        dest="aliases",
        metavar="NAME",
        help=f"give the script Syncline's modules under the names of another library: {' or '.join(ALIASES)}",
    )
    parser.add_argument("--address", metavar="A", help="this machine's address that the workers can reach")
    parser.add_argument("-m", action="store_true", dest="module", help="run a module, as python -m does")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="script.py args…", help="what to run")


def run(arguments: argparse.Namespace) -> int:
    """Run the script and return the exit code."""
    _check(arguments)
    slurm = arguments.hosts == SLURM  # srun knows the hosts
    placement = Placement.read(argparse.Namespace(ranks=arguments.ranks) if slurm else arguments)
    job = Job(
        target=_target(arguments),
        policy=failure_policy(arguments),
        elastic=read_elastic_options(arguments, placement.ranks),
        address=arguments.address,
        servers=arguments.servers,
        replicas=arguments.replicas,
        server_restarts=read_server_restarts(arguments),
        handlers=arguments.handlers,
        mpi=arguments.mpi,
        lost_after=arguments.lost_after,
        variables=alias_variables(arguments.aliases, os.environ),
        horovod="horovod" in arguments.aliases,
    )
    return run_by_srun(job, placement.ranks) if slurm else placement.run_elastic(job, arguments.folder)


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
    check_readable(first)
    return tuple(program)


def check_readable(path: str) -> None:
    """Raise for a script without read permission."""
    if not os.access(path, os.R_OK):
        raise SpecError(f"the script {path!r} cannot be read: its mode is {os.stat(path).st_mode & 0o777:o}")


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
    """Refuse options that cannot be used together."""
    slurm = arguments.hosts == SLURM
    if arguments.lab is not None and slurm:
        raise IncompatibleError("--hosts slurm lets srun start the workers, not in a --lab; leave one out")
    if arguments.mpi and slurm:
        raise IncompatibleError("--hosts slurm lets srun start the workers, --mpi mpiexec; leave one out")
    if arguments.mpi or slurm:
        starter = "mpiexec" if arguments.mpi else "srun"
        if arguments.elastic is not None:
            raise IncompatibleError(
                f"--elastic {arguments.elastic}: {starter} ends all workers when one fails; leave it out"
            )
        if arguments.on_failure == "continue":
            raise IncompatibleError(f"--on-failure continue: {starter} ends all workers when one fails; leave it out")
        if arguments.lost_after is not None:
            raise IncompatibleError(f"--lost-after {arguments.lost_after}: {starter} watches the workers; leave it out")
    if arguments.folder is not None and arguments.elastic is None:
        raise IncompatibleError(f"--folder {arguments.folder}: only an elastic job has a folder; add --elastic MIN:MAX")
    if arguments.servers and slurm:
        raise IncompatibleError(f"--servers {arguments.servers}: srun starts workers alone; leave it out")
    if arguments.servers and arguments.mpi and arguments.hosts is not None:
        raise IncompatibleError(
            f"--servers {arguments.servers}: mpiexec cannot place servers on --hosts; leave one of --servers, --hosts "
            "and --mpi out"
        )
    for name in arguments.handlers.split(",") if arguments.handlers else []:
        if not all(part.isidentifier() for part in name.strip().split(".")):
            raise SpecError(f"--handlers {arguments.handlers}: {name!r} is not a module's name; write package.module")
