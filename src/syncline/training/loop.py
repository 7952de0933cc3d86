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
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from syncline.errors import DivergedError, IncompatibleError
from syncline.exchange import check_same
from syncline.strategies import Run, Shard, Step, Steps, Strategy
from syncline.training.checkpoint import load, save
from syncline.training.config import describe_run
from syncline.training.distribute import distribute
from syncline.training.folder import RunFolder
from syncline.training.journal import Journal
from syncline.training.pace import Pace
from syncline.training.phases import AGREEING, DATA, EVALUATION, phases
from syncline.training.progress import Moment, Progress, Silent, Speedometer, duration
from syncline.training.ranks import RankTable
from syncline.training.rehearsal import rehearse
from syncline.training.settings import Schedule, Settings, steps_of_epoch
from syncline.training.start import find_checkpoints, seed_everything
from syncline.training.system import describe_world
from syncline.training.watch import Watch
from syncline.training.workload import Workload
from syncline.world import World, broadcast, current_world

__all__ = ["Outcome", "train"]

Reason = Literal["target", "epochs", "steps", "signal"]

LOOK = 1.0
"""Seconds between two looks whether somebody wants the run to stop, about."""
RARELY = 1000
"""Steps between two such looks, at most."""
NOTE = 5.0
"""Seconds between two notes of speeds in the log within an epoch."""
OLD = 30.0
"""Seconds after which a checkpoint is worth replacing between epochs."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run; the same on every rank.

    `seconds` is training alone; `time_to_target` is all that passed until an evaluation found the target reached,
    earlier evaluations and checkpoints too, and None where none did. `test` is None where the run was stopped.
    """

    metric: str
    test: float | None
    validation: float | None
    seconds: float
    elapsed: float
    time_to_target: float | None
    epochs: int
    steps: int
    samples: int
    stopped_by: Reason


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
    rehearsed: bool = False,
) -> Outcome:
    """Train a workload on the current world; every rank calls it with the same arguments.

    Files are written where `folder` says, and only then. `resume=True` goes on from the newest checkpoint in it, if
    there is one; a path goes on from what lies there. `stop` is asked about once a second: where it says yes on any
    rank, all stop after the same step with a checkpoint. The generators of torch, NumPy and `random` are seeded.

    `strategy` is used in place of the one that the settings name, where that has no spec of ours. With `predict` the
    configuration tells what `costs` expects of a step. `seconds_a_sample` is what a worker computes for one sample, for
    the simulator, where that takes no time by itself. With `rehearsed` a codec's kernels are compiled before the clock.
    """
    world = current_world() if world is None else world
    settings = (settings or Settings()).resolved(workload, world.size)
    place = None if folder is None else RunFolder(folder)
    source = find_checkpoints(world, place, resume)
    if rehearsed and settings.codec is not None and world.transport.network is None:
        rehearse(workload, settings, strategy, world)
    seed_everything(settings.seed, world.rank)
    model = workload.model(settings.seed).to(world.device)
    optimizer = settings.optimizer(workload, model, world.size)
    steps = steps_of_epoch(workload, settings.a_step(world.size))
    total = min(steps * cast(int, settings.epochs), settings.steps or sys.maxsize)
    scheduler = settings.schedule(optimizer, world.size, epoch_steps=steps, total_steps=total)
    with distribute(
        model,
        optimizer,
        strategy=strategy or settings.strategy,
        codec=settings.codec,
        collective=settings.collective,
        check_finite=settings.check_finite,
        schedulers=() if scheduler is None else (scheduler,),
        seed=settings.seed,
        diagnose=settings.diagnose,
    ) as run:
        kept = ("workload", "sha256", "script_sha256")
        told = {key: str(value) for key, value in workload.describe().items() if key in kept}
        check_same(run.exchange, "data", told)  # hosts may have other files, or another Python's library
        loop = _Loop(workload, settings, run, scheduler, place)
        loop.predicted = run.predict() if predict else None
        if source is not None:
            loop.load(source, needed=resume is not True)
        journal = Journal(world, place, trace=trace, tensorboard=tensorboard, step=loop.at.step)
        with loop.telling(journal, progress or Silent()), loop.paced(seconds_a_sample):
            return loop.run(stop)


@dataclass
class _At:
    """Where a run is: what a checkpoint keeps of the loop. Counts are the same on every rank."""

    epoch: int = 0
    step: int = 0
    samples: int = 0
    """Since the beginning, all ranks together."""
    position: int = 0
    """Samples of this epoch, all ranks together."""
    validation: float | None = None
    evaluated: int = -1
    """The step of the latest evaluation."""
    time_to_target: float | None = None
    since_target: int = 0
    """Evaluations after the one that found the target reached."""


def _reader(run: Run, workload: Workload, settings: Settings) -> Shard | Steps:
    loader: DataLoader[Any] = DataLoader(workload.splits().train, batch_size=settings.batch, shuffle=True)
    if settings.global_batch is None:
        return run.shard(loader, seed=settings.seed)
    return run.steps(loader, global_batch=settings.global_batch, micro_batch=settings.batch, seed=settings.seed)


class _Loop:
    def __init__(
        self,
        workload: Workload,
        settings: Settings,
        run: Run,
        scheduler: Schedule | None,
        place: RunFolder | None,
    ) -> None:
        self.workload, self.settings, self.attached, self.world = workload, settings, run, run.world
        self.scheduler, self.place, self.total = scheduler, place, 0
        self.at = _At()
        self.length = workload.splits().sizes()["train"]
        self.batch = settings.a_step(self.world.size)
        self.reader = _reader(run, workload, settings)
        self.events, self.now = self.world.events, self.world.runtime.now
        self.watch, self.meter = Watch(self.now), Speedometer()
        self.journal, self.progress = Journal(self.world, None), cast(Progress, Silent())
        self.loss: Tensor | None = None
        self.noted = self.kept = self.now()
        self.look = 0
        """The step before which nobody asks whether to stop."""
        self.looked = (0, 0.0)
        """Steps and seconds of training at the latest such question."""
        self.first = 0
        """The step with which this attempt began."""
        self.saved = -1
        self.predicted: dict[str, float] | None = None
        self.pace: Pace | None = None
        self.ranks = RankTable(self.world, run.stats)

    def run(self, stop: Callable[[], bool] | None) -> Outcome:
        at = self.at
        self.total = self._steps_in_all()
        self.attached.expect(self.total)
        self.looked = (at.step, self.watch.trained)
        self._moment()  # speeds are taken from here on
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

    def _steps_in_all(self) -> int:
        """Those that were taken, perhaps by another number of workers, and those that are left."""
        at, epochs = self.at, cast(int, self.settings.epochs)
        left = -(-(self.length - at.position) // self.batch) if at.epoch < epochs else 0
        later = max(0, epochs - at.epoch - 1) * -(-self.length // self.batch)
        return max(1, min(at.step + left + later, self.settings.steps or sys.maxsize))

    def _finished(self) -> Reason | None:
        target, validation, after = self.settings.target, self.at.validation, self.settings.evaluations_after
        if self.at.time_to_target is not None and self.at.since_target >= after:
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
            self._step(batch)
            taken = self._count()
            # In a short last step a rank may have no data and not come by here. What all do together waits for the
            # end of the epoch then, which all reach.
            if taken >= self.world.size and self.at.position < self.length:
                reason = self._between_steps(stop)
        if reason is None and self.at.position < self.length:
            self._count()  # the step in which this rank took part with empty hands
        self._note()
        self.watch.pause()
        self.journal.epoch_stopped(self.at.epoch + 1, self.at.step)
        return reason

    def _step(self, batch: Any) -> None:
        span = self.events.span
        self.attached.optimizer.zero_grad()
        for micro in batch if isinstance(batch, Step) else (batch,):
            with span("sl_forward_seconds", lane="compute", what="forward"):
                loss = self.workload.loss(self.attached.replica, micro)
                if self.pace is not None:
                    self.pace.forward(len(micro[0]))
            with span("sl_backward_seconds", lane="compute", what="backward"):
                part = batch.part(loss) if isinstance(batch, Step) else loss
                part.backward()  # type: ignore[no-untyped-call]
        with span("sl_update_seconds", lane="compute", what="update"):
            self.attached.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        self.loss = loss.detach()

    def _count(self) -> int:
        """Count a step; its samples on all ranks."""
        taken = min(self.batch, self.length - self.at.position)
        self.at.step += 1
        self.at.samples += taken
        self.at.position += taken
        return taken

    def _between_steps(self, stop: Callable[[], bool] | None) -> Reason | None:
        if self.progress.due():
            self.progress.show(self._moment())
        if self.now() - self.noted >= NOTE:
            self._note()
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
        at.validation, elapsed, due, loss = told
        if self.settings.check_finite and not math.isfinite(loss):
            raise DivergedError(f"the loss of rank 0 is {loss} after {at.step} steps")
        at.evaluated = at.step
        self.journal.evaluated(found, epoch, at.step, self._standing(at.validation, elapsed))
        target = self.settings.target
        if at.time_to_target is not None:
            at.since_target += 1
        elif target is not None and self.workload.reached(at.validation, target):
            at.time_to_target = elapsed
        rest = "".join(f", {key} {value:.4g}" for key, value in found.items() if key != metric)
        self.progress.say(
            f"epoch {epoch}/{self.settings.epochs}: validation {metric} {at.validation:.4g}{rest}, "
            f"after {duration(elapsed)}"
        )
        return bool(due)

    def _standing(self, metric: float, elapsed: float) -> dict[str, Any]:
        """What an evaluation found, and all that it took until then: the curves of a report."""
        stats = self.attached.stats
        return {
            "metric": metric,
            "split": "validation",
            "count": self.workload.splits().sizes()["validation"],
            "elapsed": elapsed,
            "trained": self.watch.trained,
            "samples": self.at.samples,
            "epochs": self.at.samples / self.length,
            "bytes_logical": stats.bytes_logical,
            "bytes_wire": stats.bytes_wire,
            "staleness": stats.staleness,
            "consensus": stats.consensus,
            "phases": phases(self.events.totals, self.attached.stats),
        }

    def _evaluate(self, dataset: Dataset[Any]) -> dict[str, float]:
        """What rank 0 finds with the weights that all agree on; nothing on the other ranks."""
        with self.events.span(EVALUATION, lane="compute", what="evaluation"), self.attached.agreed():
            if self.world.rank != 0:
                return {}
            if self.pace is not None:
                self.pace.forward(len(cast(Sized, dataset)))
            return self.workload.evaluate(self.attached.model, dataset)

    def _from_rank_0(self, numbers: list[float]) -> list[float]:
        told = broadcast(torch.tensor(numbers, dtype=torch.float64), group=self.world.everyone)
        return [float(number) for number in told]

    def _conclude(self, reason: Reason) -> Outcome:
        at, metric = self.at, self.workload.metric
        found = {} if reason == "signal" else self._evaluate(self.workload.splits().test)
        watch = self.watch
        with self.events.span(EVALUATION, lane="compute", what="waits for the result"):
            test, seconds, elapsed = self._from_rank_0([found.get(metric, 0.0), watch.trained, watch.elapsed])
        outcome = Outcome(
            metric=metric,
            test=None if reason == "signal" else test,
            validation=at.validation,
            seconds=seconds,
            elapsed=elapsed,
            time_to_target=at.time_to_target,
            epochs=at.epoch,
            steps=at.step,
            samples=at.samples,
            stopped_by=reason,
        )
        self._write_config()
        totals = {**self.attached.stats.as_dict(), DATA: self.events.totals.get(DATA, 0.0)}
        del totals["steps"]
        self.journal.concluded(asdict(outcome), totals, phases(self.events.totals, self.attached.stats))
        return outcome

    def _note(self) -> None:
        self.noted = self.now()
        if self.world.rank == 0 and self.loss is not None:
            self.journal.moment(self._moment(), float(self.attached.optimizer.param_groups[0]["lr"]))

    def _moment(self) -> Moment:
        at, stats = self.at, self.attached.stats.as_dict()
        sent, exposed = stats["sl_comm_bytes_wire"], stats["sl_comm_exposed_seconds"]
        a_step = (self.watch.elapsed - self.watch.elapsed_before) / max(1, at.step - self.first)
        return Moment(
            epoch=at.epoch + 1,
            epochs=cast(int, self.settings.epochs),
            step=at.step,
            steps=self.total,
            loss=float("nan") if self.loss is None else float(self.loss),
            speeds=self.meter.read(self.watch.trained, at.samples, sent, exposed),
            left=a_step * (self.total - at.step),
        )

    def _write_config(self) -> None:
        """What was asked for and what was chosen: written first, and again at the end, when `auto` has chosen."""
        if self.place is not None and self.world.rank == 0:
            document = describe_run(self.workload, self.settings, self.attached, self.predicted)
            self.place.write("config", document)

    def save(self) -> None:
        """Write a checkpoint, unless this very step has one. Its seconds are not training."""
        if self.place is None or self.saved == self.at.step:
            return
        running = self.watch.running
        self.watch.pause()
        begun = self.now()
        told = {**asdict(self.at), "trained": self.watch.trained, "elapsed": self.watch.elapsed}
        told["target"] = self.settings.target
        path = save(self.place.checkpoints, **self._objects(), **told)  # it counts its own seconds
        self.saved, self.kept = self.at.step, self.now()
        self.journal.saved(path.name, self.at.step, self.kept - begun)
        if running:
            self.watch.start()

    def load(self, source: Path, needed: bool) -> None:
        """Go on from the newest checkpoint; without one begin at the beginning, unless one is needed."""
        told = load(source, **self._objects())
        if told is None:
            if needed:
                raise IncompatibleError(f"there is no checkpoint in {source} to go on from")
            return
        self.at = _At(**{key: told[key] for key in asdict(self.at) if key in told})  # older ones tell less
        if told["target"] != self.settings.target:
            self.at.time_to_target, self.at.since_target = None, 0
        self.watch = Watch(self.now, told["trained"], told["elapsed"])
        self.first = self.saved = self.at.step

    def _objects(self) -> dict[str, Any]:
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler}
        return {"run": self.attached, **scheduler}

    @contextmanager
    def paced(self, seconds_a_sample: float | None) -> Iterator[None]:
        """Charge the virtual clock for computing inside, where there is one."""
        if seconds_a_sample is None or self.world.transport.network is None:
            yield
            return
        self.pace = Pace(self.world, self.attached.model, seconds_a_sample)
        try:
            yield
        finally:
            self.pace.close()

    @contextmanager
    def telling(self, journal: Journal, progress: Progress) -> Iterator[None]:
        """Write log, configuration and progress inside; say how it ended, however it does."""
        self.journal, self.progress = journal, progress
        try:
            if self.place is not None and self.world.rank == 0:
                self.place.write("system", describe_world(self.world))
            self._write_config()
            journal.started(self.workload, self.settings, self.attached.config, self.first)
            self.watch.begin()
            yield
        except BaseException as error:
            journal.stopped("aborted", error=f"{type(error).__name__}: {error}")
            raise
        finally:
            progress.close()
            journal.close()
