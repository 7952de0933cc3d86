"""`syncline bench elastic`: how a job survives losses, and how fast it continues.

examples:
  syncline bench elastic -n 4 --seconds 60 --kill-every 15           a worker is killed every 15 seconds
  syncline bench elastic --strategy "allreduce;diloco(period=8)"     ten minutes of each, and as long without losses
  syncline bench elastic --undisturbed 60 --seconds 3600 --kill-every 60       one hour: is the memory flat?
  syncline bench elastic --lost freeze --lost-after 4                frozen instead of killed
  syncline bench elastic --against torchft                           torchft with the same kills, beside allreduce
  syncline bench elastic --servers 2 --replicas 2 --kill both --strategy "ssp(slack=3)"

Each strategy trains a workload as an elastic job of `syncline run`. Killed workers are started again. The table has the
time to the next step, what newcomers cost, the steps compared with an undisturbed run, and the memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from syncline.bench.elastic.plan import ElasticPlan
from syncline.cli.placement import Placement, add_placement_options
from syncline.training.run_folder import make_writable

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    usual = ElasticPlan()
    parser.description = __doc__
    add_placement_options(parser, "-n", "--servers", "--replicas", "--lost-after", help={"-n": "workers; default 4"})
    parser.add_argument(
        "--strategy", action="append", help="strategies, separated by ';' or given several times; default allreduce"
    )
    parser.add_argument(
        "--against",
        action="append",
        metavar="torchft",
        help="also measure torchft, with the same kills; it listens on all interfaces of this machine",
    )
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="of a run; default %(default)g")
    parser.add_argument(
        "--undisturbed",
        type=float,
        metavar="S",
        help="seconds of the run without losses, 0 for none; default --seconds",
    )
    parser.add_argument("--kill-every", type=float, default=usual.kill_every, help="seconds; default %(default)g")
    parser.add_argument(
        "--kill", choices=("workers", "servers", "both"), default=usual.kill, help="what is lost; default %(default)s"
    )
    parser.add_argument(
        "--lost", choices=("kill", "freeze"), default=usual.lost, help="SIGKILL or SIGSTOP; default %(default)s"
    )
    parser.add_argument("--transport", choices=("torch_dist", "zeromq"), help="of the workers; default torch_dist")
    parser.add_argument("--workload", default=usual.workload, help="what to train; default %(default)s")
    parser.add_argument("--batch", type=int, help="samples per step and worker; default: the workload's")
    parser.add_argument("--learning-rate", type=float, help="default: the workload's, by the strategy's preset")
    parser.add_argument("--rounds", type=int, default=usual.rounds, help="runs of each; default %(default)s")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of weights and victims; default %(default)s")


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the benchmark; return 0 if every job continued and ended well, else 1."""
    from syncline.bench.elastic.report import failed, measure, table

    names = ["seconds", "undisturbed", "kill_every", "kill", "lost", "lost_after", "servers", "replicas", "transport"]
    names += ["workload", "batch", "learning_rate", "rounds", "seed"]
    plan = ElasticPlan(
        strategies=_read_specs(arguments.strategy or ["allreduce"]),
        against=_read_specs(arguments.against or []),
        workers=Placement.read(arguments, default_ranks=4).ranks,
        **{name: getattr(arguments, name) for name in names},
    )
    plan.check()
    make_writable(folder)
    document = measure(plan, folder, lambda text: print(text, file=sys.stderr, flush=True))
    print(f"{table(document)}\n\nwritten: {folder / 'elastic.json'}")
    return int(any(failed(one) for one in document["runs"]))


def _read_specs(texts: list[str]) -> tuple[str, ...]:
    """Specs that are separated by ';' or given several times, each once.

    >>> _read_specs(["allreduce; diloco", "allreduce"])
    ('allreduce', 'diloco')
    """
    return tuple(dict.fromkeys(spec.strip() for text in texts for spec in text.split(";") if spec.strip()))
