"""`syncline train kmeans`: a problem that is no network, by one-sided SGD or by aggregation.

examples:
  syncline train kmeans -n 4 --strategy onesided                 a million points, 100 centres, 10 dimensions; on MPI
  syncline train kmeans -n 4 --strategy aggregate                Lloyd's rounds, one all-reduce each
  syncline train "kmeans(k=10, points=20000)" -n 2 --strategy "onesided(part=0.25, buffers=8)" --batch 100 --lr 0.2
"""

from __future__ import annotations

import argparse
from typing import Any

from syncline.cli.placement import Placement
from syncline.errors import IncompatibleError, SpecError
from syncline.launch.start import Job

__all__ = ["is_kmeans", "train_kmeans"]

TAKEN = {"batch": "batch", "epochs": "epochs", "learning_rate": "rate"}
"""Options of `train` that one-sided SGD takes, and their names there."""
FOR_NETWORKS: dict[str, Any] = {
    "codec": None,
    "diagnose": 0,
    "global_batch": None,
    "steps": None,
    "warmup": 0.0,
    "target": None,
    "evaluate_every": None,
    "evaluations_after": 0,
    "momentum": None,
    "out": None,
    "resume": None,
    "checkpoint_every": None,
    "trace": False,
    "tensorboard": False,
    "servers": 0,
    "on_failure": "stop",
    "lab": None,
    "pace": None,
    "slow": [],
    "hosts": None,
}
"""Options of `train` that mean nothing here, and what they are where nobody has given them."""


def is_kmeans(spec: str) -> bool:
    """Whether a workload is solved here.

    >>> is_kmeans("kmeans(k=5)"), is_kmeans("digits")
    (True, False)
    """
    return spec.partition("(")[0].strip() == "kmeans"


def train_kmeans(arguments: argparse.Namespace) -> int:
    """Solve it; the exit code. One-sided SGD on several workers is handed over to mpiexec."""
    from syncline.bench.kmeans import KMeansPlan, build_blobs

    ranks = 1 if arguments.ranks is None else arguments.ranks
    if ranks < 1:
        raise SpecError(f"-n {ranks}: a run takes at least one worker")
    for name, usual in FOR_NETWORKS.items():
        if getattr(arguments, name, usual) != usual:
            raise IncompatibleError(
                f"--{name.replace('_', '-')}: kmeans is no network and has no use for it; it takes -n, --strategy, "
                "--batch, --epochs, --lr and --seed"
            )
    given = {new: getattr(arguments, old) for old, new in TAKEN.items() if getattr(arguments, old, None) is not None}
    plan = KMeansPlan(problem=arguments.workload, strategy=arguments.strategy, given=given, seed=arguments.seed)
    problem = build_blobs(plan.problem)
    name, _, _ = plan.solver()
    if problem.points < ranks:
        raise IncompatibleError(f"{problem} has too few points for {ranks} workers; take fewer (-n)")
    target = ("-m", "syncline.bench.kmeans", plan.as_json())
    return Placement(ranks, mpi=name == "onesided" and ranks > 1).run(Job(target=target))
