"""The program of each rank of `syncline train`: trains one workload, or evaluates it."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from syncline.checkpoint import latest
from syncline.environment.base import SAVES
from syncline.errors import SynclineError
from syncline.strategies import build_strategy
from syncline.training.evaluator import is_evaluator, observe
from syncline.training.loop import Outcome, train
from syncline.training.progress import Progress, duration
from syncline.training.run_folder import RunFolder
from syncline.training.settings import Settings
from syncline.training.signals import INTERRUPTED_EXIT_CODE, StopSignals
from syncline.training.stragglers import Slow
from syncline.workloads import build
from syncline.world import World, init

__all__ = ["TrainPlan", "describe", "rank_main"]


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """The arguments of a rank: the workload, the settings and the folder."""

    workload: str
    settings: Settings
    folder: str
    resume: bool | str = False
    trace: bool = False
    tensorboard: bool = False
    terminal: bool = False
    width: int = 0
    seconds_a_sample: float | None = None
    """Seconds that a worker sleeps for each sample, in addition to computing."""
    slow: tuple[Slow, ...] = ()

    def as_json(self) -> str:
        """JSON for the command line of a rank."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> TrainPlan:
        """Read the text of `as_json`.

        >>> plan = TrainPlan(workload="digits", settings=Settings(epochs=2), folder="runs/a", slow=(Slow(1, 4.0),))
        >>> TrainPlan.from_json(plan.as_json()) == plan
        True
        """
        fields: dict[str, Any] = json.loads(text)
        slow = tuple(Slow(**one) for one in fields["slow"])
        return TrainPlan(**{**fields, "settings": Settings(**fields["settings"]), "slow": slow})


def rank_main(plan: TrainPlan) -> int:
    """Train on this rank, or evaluate in an evaluator process. Returns the exit code."""
    stop = StopSignals(terminated=SAVES in os.environ)
    if is_evaluator():  # it ends when the workers end, so signals are ignored
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        observe(build(plan.workload), plan.settings, build_strategy(plan.settings.strategy))
        return 0
    with init() as world:
        workload = build(plan.workload)
        outcome = train(
            workload,
            plan.settings,
            world=world,
            folder=plan.folder,
            resume=plan.resume,
            trace=plan.trace,
            tensorboard=plan.tensorboard,
            progress=Progress(sys.stdout, world.runtime.now, plan.terminal, plan.width) if world.rank == 0 else None,
            stop=stop,
            seconds_a_sample=plan.seconds_a_sample,
            slow=plan.slow,
            lock=False,  # the launcher holds it
        )
        if world.rank == _lowest_living_rank(world):
            print(describe(outcome, plan), flush=True)
    return INTERRUPTED_EXIT_CODE if outcome.stopped_by == "signal" else 0


def _lowest_living_rank(world: World) -> int:
    """Rank 0, or the lowest rank that is not lost. It prints the last line."""
    return next(rank for rank in range(world.size) if rank not in world.lost or rank == world.rank)


def describe(outcome: Outcome, plan: TrainPlan) -> str:
    """The last line of the output."""
    relative = os.path.relpath(plan.folder)
    folder = plan.folder if relative.startswith("..") else relative
    took = f"{outcome.steps} steps in {duration(outcome.seconds)} of training, {duration(outcome.elapsed)} in all"
    if outcome.test is None:
        resumable = latest(RunFolder(plan.folder).checkpoints) is not None
        saved = f"continue with --resume {folder}" if resumable else "nothing was saved"
        return f"stopped: {took}; {saved}"
    target = plan.settings.target
    if target is None:
        reached = ""
    elif outcome.time_to_target is None:
        reached = f"; target {target:g} not reached"
    else:
        reached = f"; target {target:g} reached after {duration(outcome.time_to_target)}"
    return f"test {outcome.metric} {outcome.test:.4g}, {took}{reached}; {folder}"


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a Syncline error in one line. Under a launcher, the launcher prints it."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        print(f"syncline train: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(rank_main(TrainPlan.from_json(sys.argv[1])))
    except SynclineError:
        sys.excepthook = _print_error
        raise
