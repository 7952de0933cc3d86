"""One run of a race: what each of its ranks does."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from syncline.bench.race.field import build_entrant
from syncline.training.evaluator import is_evaluator, observe
from syncline.training.loop import Outcome, train
from syncline.training.settings import Settings
from syncline.training.signals import INTERRUPTED_EXIT_CODE, StopSignals
from syncline.training.stragglers import Slow
from syncline.workloads import build
from syncline.workloads.base import Workload
from syncline.world import World, init

__all__ = ["Entrant", "rank_main", "run"]


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """What a rank is told on its command line."""

    workload: str
    settings: Settings
    folder: str
    seconds_a_sample: float | None = None
    slow: tuple[Slow, ...] = ()
    """Workers that are slow on purpose."""
    engine: str | None = None
    """"mpi": mpiexec starts its ranks."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Entrant:
        """
        >>> entrant = Entrant(workload="digits", settings=Settings(epochs=2), folder="runs/a")
        >>> Entrant.from_json(entrant.as_json()) == entrant
        True
        """
        found: dict[str, Any] = json.loads(text)
        slow = tuple(Slow(**each) for each in found.get("slow", ()))
        return Entrant(**{**found, "settings": Settings(**found["settings"]), "slow": slow})


def run(entrant: Entrant, workload: Workload, world: World, stop: StopSignals | None = None) -> Outcome:
    """Train on this rank, with all that a race's log needs."""
    return train(
        workload,
        entrant.settings,
        world=world,
        folder=entrant.folder,
        strategy=build_entrant(entrant.settings.strategy),
        predict=True,
        rehearsed=True,
        seconds_a_sample=entrant.seconds_a_sample,
        slow=entrant.slow,
        stop=stop or _never,
    )


def _never() -> bool:
    return False


def rank_main(text: str) -> int:
    """Run on this rank of a world of processes, or evaluate beside it; the exit code."""
    entrant = Entrant.from_json(text)
    stop = StopSignals()
    if is_evaluator():  # it ends when the workers do
        observe(build(entrant.workload), entrant.settings, build_entrant(entrant.settings.strategy))
        return 0
    with init() as world:
        outcome = run(entrant, build(entrant.workload), world, stop)
    return INTERRUPTED_EXIT_CODE if outcome.stopped_by == "signal" else 0


if __name__ == "__main__":
    code = rank_main(sys.argv[1])
    if "mpi4py.MPI" in sys.modules:
        sys.exit(code)  # MPI has an end of its own, at which all ranks meet
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is written: taking torch apart would keep the next run waiting for seconds
