"""The loop behind `syncline train`: epochs of steps, an evaluation after each, checkpoints, and the run log.

```text
        ┌───────────────── an epoch ─────────────────┐
 load ─►│ step step step ·· checkpoint ·· step step  │─► evaluate ─► checkpoint ─► … ─► test
        └───── training seconds, but the checkpoint ─┘
        └──────────────── time to target: everything up to an evaluation ─┘
```
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence, Sized
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from syncline.errors import DivergedError
from syncline.reduction import check_same
from syncline.strategies import Strategy, StrategyRun, strategy_run
from syncline.training.basis import Basis, Schedule
from syncline.training.distribute import distribute
from syncline.training.folder import RunFolder
from syncline.training.journal import Journal
from syncline.training.loose import LooseLoop
from syncline.training.outcome import Outcome, Reason
from syncline.training.phases import AGREEING, DATA, EVALUATION, phases
from syncline.training.progress import Progress, Silent, duration
from syncline.training.ranks import RankTable
from syncline.training.rehearsal import rehearse
from syncline.training.settings import Settings, steps_of_epoch
from syncline.training.start import find_checkpoints, folder_held, seed_everything
from syncline.training.stragglers import Slow, check_slow
from syncline.workloads.base import Workload
from syncline.world import World, broadcast, current_world

__all__ = ["Outcome", "train"]

LOOK = 1.0
"""Seconds between two looks whether somebody wants the run to stop, about."""
RARELY = 1000
"""Steps between two such looks, at most."""
NOTE = 5.0
"""Seconds between two notes of speeds in the log within an epoch."""
OLD = 30.0
"""Seconds after which a checkpoint is worth replacing between epochs."""


def train(
    workload: Workload,
    settings: Settings | None = None,
    *,
    world: World | None = None,
    folder: str | Path | None = None,
    resume: bool | str | Path = False,
    trace: bool = False,
    tensorboard: bool = False,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    strategy: Strategy | None = None,
    predict: bool = False,
    seconds_a_sample: float | None = None,
    slow: Sequence[Slow] = (),
    rehearsed: bool = False,
    lock: bool = True,
) -> Outcome:
    """Train a workload on the current world; every rank calls it with the same arguments.

    Files are written where `folder` says, and only then; `lock` keeps other jobs from writing there. `resume=True`
    goes on from the newest checkpoint in it, if there is one; a path goes on from what lies there. `stop` is asked
    about once a second: where it says yes on any rank, all stop after the same step with a checkpoint. The generators
    of torch, NumPy and `random` are seeded.

    `strategy` is used in place of the one that the settings name, where that has no spec of ours. With `predict` the
    configuration tells what `costs` expects of a step. `seconds_a_sample` is what a worker computes for one sample:
    virtual seconds on the simulator, where that takes no time by itself, a sleep on real workers. Those that `slow`
    names take a multiple of it for a while. With `rehearsed` a codec's kernels are compiled before the clock.

    Where the strategy lets every worker go at its own pace, each takes its own steps; see `syncline.training.loose`.
    """
    world = current_world() if world is None else world
    settings = (settings or Settings()).resolved(workload, world.size)
    check_slow(slow, world.size, seconds_a_sample)
    place = None if folder is None else RunFolder(folder)
    source = find_checkpoints(place, resume)
    with ExitStack() as stack:
        stack.enter_context(folder_held(world, place, begins=resume is False, lock=lock))
        if rehearsed and settings.codec is not None and not world.transport.timing.virtual:
            rehearse(workload, settings, strategy, world)
        run, scheduler = _distributed(workload, settings, strategy, world)
        stack.enter_context(run)
        kept = ("workload", "sha256", "script_sha256")
        told = {key: str(value) for key, value in workload.describe().items() if key in kept}
        check_same(run.exchange, "data", told)  # hosts may have other files, or another Python's library
        kind = LooseLoop if run.asynchronous else _Loop
        loop: LooseLoop | _Loop = kind(workload, settings, run, scheduler, place)
        loop.predicted = run.predict() if predict else None
        if source is not None:
            loop.load(source, needed=resume is not True)
        loop.prepare()
        journal = Journal(world, place, trace=trace, tensorboard=tensorboard, step=loop.at.step)
        with loop.telling(journal, progress or Silent()), loop.paced(seconds_a_sample, slow):
            return loop.run(stop)


def _distributed(
    workload: Workload, settings: Settings, strategy: Strategy | None, world: World
) -> tuple[StrategyRun, Schedule | None]:
    """Model, optimizer and schedule, kept together on all workers."""
    seed_everything(settings.seed, world.rank)
    model = workload.model(settings.seed).to(world.device)
    optimizer = settings.optimizer(workload, model, world.size)
    steps = steps_of_epoch(workload, settings.a_step(world.size))
    total = min(steps * cast(int, settings.epochs), settings.steps or sys.maxsize)
    scheduler = settings.schedule(optimizer, world.size, epoch_steps=steps, total_steps=total)
    run = distribute(
        model,
        optimizer,
        strategy=strategy or settings.strategy,
        codec=settings.codec,
        algorithm=settings.collective,
        check_finite=settings.check_finite,
        schedulers=() if scheduler is None else (scheduler,),
        seed=settings.seed,
        diagnose=settings.diagnose,
    )
    return strategy_run(run), scheduler


class _Loop(Basis):
    """Every worker takes the same steps, and all do everything together."""

    def __init__(
        self,
        workload: Workload,
        settings: Settings,
        run: StrategyRun,
        scheduler: Schedule | None,
        place: RunFolder | None,
    ) -> None:
        super().__init__(workload, settings, run, scheduler, place)
        self.look = 0
        """The step before which nobody asks whether to stop."""
        self.looked = (0, 0.0)
        """Steps and seconds of training at the latest such question."""
        self.ranks = RankTable(self.world, run.stats)

    def run(self, stop: Callable[[], bool] | None) -> Outcome:
        at = self.at
        self.total = self.steps_in_all()
        self.attached.expect(self.total)
        self.looked = (at.step, self.watch.trained)
        self.moment()  # speeds are taken from here on
        reason = self._finished()
        while reason is None:
            reason = self._epoch(stop)
            if reason == "signal":
                break
            if at.position >= self.length:
                at.epoch, at.position = at.epoch + 1, 0
            reason = reason or self._finished()
            old = self._validate() if reason or self._due() else False
            reason = self._finished() or reason
            if reason is None and self._asked_to_stop(stop):
                reason = "signal"
            every = self.settings.checkpoint_every
            if reason is None and (old or (every and at.step % every == 0)):
                self.save()
        if self.settings.checkpoint_every != 0:
            self.save()
        return self._conclude(reason)

    def _finished(self) -> Reason | None:
        target, validation, after = self.settings.target, self.at.validation, self.settings.evaluations_after
        if self.at.satisfied(after):
            return "target"
        if target is not None and validation is not None and not after and self.workload.reached(validation, target):
            return "target"
        if self.at.epoch >= cast(int, self.settings.epochs):
            return "epochs"
        return "steps" if self.at.step >= self.total else None

    def _due(self) -> bool:
        """Whether to evaluate at the end of an epoch."""
        every = self.settings.evaluate_every
        return every is None or self.at.step % every == 0

    def _epoch(self, stop: Callable[[], bool] | None) -> Reason | None:
        """The rest of an epoch; why it was broken off, if it was."""
        self.journal.epoch_started(self.at.epoch + 1, self.at.step)
        self.attached.model.train()
        self.watch.start()
        batches = iter(self.reader)
        reason: Reason | None = None
        while reason is None:
            with self.events.span(DATA, lane="data", what="next batch"):
                batch = next(batches, None)
            if batch is None:
                break
            self.step(batch)
            taken = self.count()
            # In a short last step a rank may have no data and not come by here. What all do together waits for the
            # end of the epoch then, which all reach.
            if taken >= self.world.size and self.at.position < self.length:
                reason = self._between_steps(stop)
        if reason is None and self.at.position < self.length:
            self.count()  # the step in which this rank took part with empty hands
        self.note()
        self.watch.pause()
        self.journal.epoch_stopped(self.at.epoch + 1, self.at.step)
        return reason

    def _between_steps(self, stop: Callable[[], bool] | None) -> Reason | None:
        if self.progress.due():
            self.progress.show(self.moment())
        if self.now() - self.noted >= NOTE:
            self.note()
        if self.at.step >= self.total:
            return "steps"
        if self.settings.evaluate_every is not None and self._due():
            running = self.watch.running
            self.watch.pause()
            self._validate()
            self.attached.model.train()
            if running:
                self.watch.start()
            if self._finished() == "target":
                return "target"
        if self.at.step >= self.look and self._asked_to_stop(stop):
            return "signal"
        every = self.settings.checkpoint_every
        if every and self.at.step % every == 0:
            self.save()
        return None

    def _asked_to_stop(self, stop: Callable[[], bool] | None) -> bool:
        """Whether any rank is asked to. When to look again says the one that is furthest from doing so."""
        if stop is None:
            return False
        steps, seconds = self.looked
        self.looked = (self.at.step, self.watch.trained)
        pace = (self.at.step - steps) / max(self.watch.trained - seconds, 1e-9)
        gap = min(RARELY, max(1, int(LOOK * pace)))
        with self.events.span(AGREEING, lane="compute", what="asks whether to stop"):
            told = self.ranks.tell(self.at.step, [float(stop()), float(gap)])
        self.journal.ranks(self.ranks.latest)
        self.look = self.at.step + int(told[1])
        return bool(told[0])

    def _validate(self) -> bool:
        """Evaluate and tell of it; whether rank 0 finds the last checkpoint old."""
        at, metric = self.at, self.workload.metric
        if at.evaluated == at.step:
            return False
        # An epoch that has just ended is not the next one yet.
        epoch = at.epoch + (at.position > 0)
        self.journal.evaluating(epoch, at.step)
        found = self._evaluate(self.workload.splits().validation)
        old = self.settings.checkpoint_every is None and self.now() - self.kept >= OLD
        loss = 0.0 if self.loss is None else float(self.loss)
        with self.events.span(EVALUATION, lane="compute", what="waits for the result"):
            told = self._from_rank_0([found.get(metric, 0.0), self.watch.elapsed, float(old), loss])
        validation, elapsed, due, loss = told
        if self.settings.check_finite and not math.isfinite(loss):
            raise DivergedError(f"the loss of rank 0 is {loss}", rank=0, step=at.step)
        at.evaluated = at.step
        standing = self.standing(validation, elapsed, at.samples, self.attached.stats.staleness)
        self.journal.evaluated(found, epoch, at.step, standing)
        target = self.settings.target
        at.judge(validation, elapsed, target is not None and self.workload.reached(validation, target))
        rest = "".join(f", {key} {value:.4g}" for key, value in found.items() if key != metric)
        self.progress.say(
            f"epoch {epoch}/{self.settings.epochs}: validation {metric} {validation:.4g}{rest}, "
            f"after {duration(elapsed)}"
        )
        return bool(due)

    def _evaluate(self, dataset: Dataset[Any]) -> dict[str, float]:
        """What rank 0 finds with the weights that all agree on; nothing on the other ranks."""
        with self.events.span(EVALUATION, lane="compute", what="evaluation"), self.attached.agreed():
            if self.world.rank != 0:
                return {}
            if self.pace is not None:
                self.pace.forward(self.attached.members * len(cast(Sized, dataset)))
            return self.workload.evaluate(self.attached.model, dataset)

    def _from_rank_0(self, numbers: list[float]) -> list[float]:
        told = broadcast(torch.tensor(numbers, dtype=torch.float64), group=self.world.everyone)
        return [float(number) for number in told]

    def _conclude(self, reason: Reason) -> Outcome:
        metric = self.workload.metric
        found = {} if reason == "signal" else self._evaluate(self.workload.splits().test)
        watch = self.watch
        with self.events.span(EVALUATION, lane="compute", what="waits for the result"):
            test, seconds, elapsed = self._from_rank_0([found.get(metric, 0.0), watch.trained, watch.elapsed])
        outcome = replace(self.outcome(reason, test), seconds=seconds, elapsed=elapsed)
        self.write_config()
        totals = {**self.attached.stats.as_dict(), DATA: self.events.totals.get(DATA, 0.0)}
        del totals["steps"]
        self.journal.concluded(asdict(outcome), totals, phases(self.events.totals, self.attached.stats))
        self.write_summary(outcome)
        return outcome
