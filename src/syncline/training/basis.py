"""What the loops have in common, whether the workers step together or each at its own pace."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler
from torch.utils.data import DataLoader

from syncline.errors import IncompatibleError
from syncline.strategies import Shard, Step, Steps, StrategyRun
from syncline.training.checkpoint import load, save
from syncline.training.config import describe_run
from syncline.training.folder import RunFolder
from syncline.training.journal import Journal
from syncline.training.outcome import At, Outcome, Reason
from syncline.training.pace import Pace
from syncline.training.phases import phases
from syncline.training.progress import Moment, Progress, Silent, Speedometer
from syncline.training.settings import Settings
from syncline.training.stragglers import Slow
from syncline.training.summary import summarize
from syncline.training.system import describe_world
from syncline.training.watch import Watch
from syncline.workloads.base import Workload

__all__ = ["Basis", "Schedule"]

Schedule = LRScheduler | ChainedScheduler


def _reader(run: StrategyRun, workload: Workload, settings: Settings) -> Shard | Steps:
    loader: DataLoader[Any] = DataLoader(workload.splits().train, batch_size=settings.batch, shuffle=True)
    if settings.global_batch is None:
        return run.shard(loader, seed=settings.seed)
    return run.steps(loader, global_batch=settings.global_batch, micro_batch=settings.batch, seed=settings.seed)


class Basis:
    """A run with its place in the data, its clocks, its log and its checkpoints."""

    def __init__(
        self,
        workload: Workload,
        settings: Settings,
        run: StrategyRun,
        scheduler: Schedule | None,
        place: RunFolder | None,
    ) -> None:
        self.workload, self.settings, self.attached, self.world = workload, settings, run, run.world
        self.scheduler, self.place, self.total = scheduler, place, 0
        self.at = At()
        self.length = workload.splits().sizes()["train"]
        self.batch = settings.a_step(self.world.size)
        self.reader = _reader(run, workload, settings)
        self.events, self.now = self.world.events, self.world.runtime.now
        self.watch, self.meter = Watch(self.now), Speedometer()
        self.journal, self.progress = Journal(self.world, None), cast(Progress, Silent())
        self.loss: Tensor | None = None
        self.noted = self.kept = self.now()
        self.first = 0
        """The step with which this attempt began."""
        self.saved = -1
        self.predicted: dict[str, float] | None = None
        self.pace: Pace | None = None

    def prepare(self) -> None:
        """What is done before the clock runs. Every rank calls it."""

    def steps_in_all(self) -> int:
        """Those that were taken, perhaps by another number of workers, and those that are left."""
        at, epochs = self.at, cast(int, self.settings.epochs)
        left = -(-(self.length - at.position) // self.batch) if at.epoch < epochs else 0
        later = max(0, epochs - at.epoch - 1) * -(-self.length // self.batch)
        return max(1, min(at.step + left + later, self.settings.steps or sys.maxsize))

    def step(self, batch: Any) -> None:
        """Forward, backward and update."""
        span = self.events.span
        self.attached.optimizer.zero_grad()
        parts: list[Tensor] = []
        for micro in batch if isinstance(batch, Step) else (batch,):
            with span("sl_forward_seconds", lane="compute", what="forward"):
                loss = self.workload.loss(self.attached.replica, micro)
                if self.pace is not None:
                    self.pace.forward(len(micro[0]))
            with span("sl_backward_seconds", lane="compute", what="backward"):
                part = batch.part(loss) if isinstance(batch, Step) else loss
                part.backward()  # type: ignore[no-untyped-call]
            parts.append(part.detach())
        if self.attached.wants_loss:
            self.attached.note_loss(sum(parts[1:], parts[0]))
        with span("sl_update_seconds", lane="compute", what="update"):
            self.attached.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        self.loss = loss.detach()

    def count(self) -> int:
        """Count a step; its samples on all ranks."""
        taken = min(self.batch, self.length - self.at.position)
        self.at.step += 1
        self.at.samples += taken
        self.at.position += taken
        return taken

    def standing(self, metric: float, elapsed: float, samples: int, staleness: float) -> dict[str, Any]:
        """What an evaluation found, and all that it took until then: the curves of a report."""
        stats = self.attached.stats
        return {
            "metric": metric,
            "split": "validation",
            "count": self.workload.splits().sizes()["validation"],
            "elapsed": elapsed,
            "trained": min(self.watch.trained, elapsed),
            "samples": samples,
            "epochs": samples / self.length,
            "bytes_logical": stats.bytes_logical,
            "bytes_wire": stats.bytes_wire,
            "staleness": staleness,
            "consensus": stats.consensus,
            "phases": phases(self.events.totals, stats),
        }

    def note(self) -> None:
        """Speeds and loss go into rank 0's log."""
        self.noted = self.now()
        if self.world.rank == 0 and self.loss is not None:
            self.journal.moment(self.moment(), float(self.attached.optimizer.param_groups[0]["lr"]))

    def moment(self) -> Moment:
        """Where the run stands."""
        at, stats = self.at, self.attached.stats
        a_step = (self.watch.elapsed - self.watch.elapsed_before) / max(1, at.step - self.first)
        speeds = self.meter.read(self.watch.trained, at.samples, stats.bytes_wire, stats.exposed_seconds)
        return Moment(
            epoch=at.epoch + 1,
            epochs=cast(int, self.settings.epochs),
            step=at.step,
            steps=self.total,
            loss=float("nan") if self.loss is None else float(self.loss),
            speeds=speeds,
            left=a_step * (self.total - at.step),
        )

    def write_config(self) -> None:
        """What was asked for and what was chosen: written first, and again at the end, when `auto` has chosen."""
        if self.place is not None and self.world.rank == 0:
            document = describe_run(self.workload, self.settings, self.attached, self.predicted)
            self.place.write("config", document)

    @property
    def writer(self) -> int:
        """The rank that reports the result of the run."""
        return 0

    def write_summary(self, outcome: Outcome, error: BaseException | None = None) -> None:
        """Write the result for scripts, after everything else."""
        if self.place is not None and self.world.rank == self.writer:
            described = describe_run(self.workload, self.settings, self.attached, self.predicted)
            stats, lost = self.attached.stats, self.world.lost
            self.place.write("summary", summarize(outcome, self.place, described, stats, lost, error))

    def outcome(self, reason: Reason, test: float | None = None) -> Outcome:
        """How far the run came on this worker, and why it ended."""
        at = self.at
        return Outcome(
            metric=self.workload.metric,
            test=None if reason == "signal" else test,
            validation=at.validation,
            seconds=self.watch.trained,
            elapsed=self.watch.elapsed,
            time_to_target=at.time_to_target,
            epochs=at.epoch,
            steps=at.step,
            samples=at.samples,
            stopped_by=reason,
        )

    def save(self) -> None:
        """Write a checkpoint, unless this very step has one."""
        if self.place is not None and self.saved != self.at.step:
            self.save_as(self.place, self.at.step)

    def save_as(self, place: RunFolder, step: int) -> None:
        """Write one under a step that all ranks name alike. Its seconds are not training."""
        running = self.watch.running
        self.watch.pause()
        begun = self.now()
        told = {**asdict(self.at), "trained": self.watch.trained, "elapsed": self.watch.elapsed}
        told |= {"target": self.settings.target, "step": step}
        path = save(place.checkpoints, **self._objects(), **told)  # it counts its own seconds
        self.saved, self.kept = step, self.now()
        self.journal.saved(path.name, step, self.kept - begun)
        if running:
            self.watch.start()

    def load(self, source: Path, needed: bool) -> None:
        """Go on from the newest checkpoint; without one begin at the beginning, unless one is needed."""
        told = load(source, **self._objects())
        if told is None:
            if needed:
                raise IncompatibleError(f"there is no checkpoint in {source} to go on from")
            return
        self.at = At(**{key: told[key] for key in asdict(self.at) if key in told})  # older ones tell less
        if told["target"] != self.settings.target:
            self.at.time_to_target, self.at.since_target = None, 0
        self.watch = Watch(self.now, told["trained"], told["elapsed"])
        self.first = self.saved = self.at.step

    def _objects(self) -> dict[str, Any]:
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler}
        return {"run": self.attached, **scheduler}

    @contextmanager
    def paced(self, seconds_a_sample: float | None, slow: Sequence[Slow] = ()) -> Iterator[None]:
        """Charge for computing inside, where anything is to be charged."""
        if seconds_a_sample is None:
            yield
            return
        self.pace = Pace(self.world, self.attached.model, seconds_a_sample, slow)
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
                self.place.remove("summary")  # of an earlier attempt
                self.place.write("system", describe_world(self.world))
            self.write_config()
            config, loose = self.attached.config, self.attached.asynchronous
            journal.started(self.workload, self.settings, config, self.first, loose)
            self.watch.begin()
            yield
        except BaseException as error:
            journal.stopped("aborted", error=f"{type(error).__name__}: {error}")
            with suppress(Exception):  # the error itself is what must be reported
                self.write_summary(self.outcome("signal"), error)
            raise
        finally:
            progress.close()
            journal.close()
