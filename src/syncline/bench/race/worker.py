"""One run of a race, on each of its ranks."""

from __future__ import annotations

import os
import sys

from syncline.bench.race.entries import build_race_strategy
from syncline.training.evaluator import is_evaluator, observe
from syncline.training.loop import Outcome, train
from syncline.training.signals import INTERRUPTED_EXIT_CODE, StopSignals
from syncline.training.worker import TrainPlan
from syncline.workloads import build
from syncline.workloads.base import Workload
from syncline.world import World, init

__all__ = ["rank_main", "run_worker"]


def run_worker(plan: TrainPlan, workload: Workload, world: World, stop: StopSignals | None = None) -> Outcome:
    """Train on this rank, and log what a race needs."""
    return train(
        workload,
        plan.settings,
        world=world,
        folder=plan.folder,
        strategy=build_race_strategy(plan.settings.strategy),
        predict=True,
        rehearsed=True,
        seconds_a_sample=plan.seconds_a_sample,
        slow=plan.slow,
        stop=stop or (lambda: False),
    )


def rank_main(text: str) -> int:
    """Train, or evaluate, in a process of a race; return the exit code."""
    plan = TrainPlan.from_json(text)
    stop = StopSignals()
    if is_evaluator():  # it ends when the workers end
        observe(build(plan.workload), plan.settings, build_race_strategy(plan.settings.strategy))
        return 0
    with init() as world:
        outcome = run_worker(plan, build(plan.workload), world, stop)
    return INTERRUPTED_EXIT_CODE if outcome.stopped_by == "signal" else 0


if __name__ == "__main__":
    code = rank_main(sys.argv[1])
    if "mpi4py.MPI" in sys.modules:
        sys.exit(code)  # MPI_Finalize must run: it is a barrier of all ranks
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is written; unloading torch would delay the next run by seconds
