"""The training loop of `syncline train`: epochs of steps, evaluations, checkpoints and the run log.

```text
        ┌───────────────── an epoch ─────────────────┐
 load ─►│ step step step ·· checkpoint ·· step step  │─► evaluate ─► checkpoint ─► … ─► test
        └── training seconds, without checkpoints ───┘
        └──────────────── time to target: everything up to an evaluation ─┘
```

`Trainer` has the loop. A `SyncPolicy` does what needs the other workers: evaluate, stop, save and end the run.

| policy | steps | evaluation | decisions |
|---|---|---|---|
| `SynchronousPolicy` | the same on all workers; also of pipelines | rank 0, between two steps | by collectives |
| `AsynchronousPolicy` | each worker its own | an evaluator, meanwhile | by posts on the control channel |
"""

from __future__ import annotations

import itertools
import logging
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler
from torch.utils.data import DataLoader

from syncline.checkpoint import load, save
from syncline.checkpoint.participants import Participants
from syncline.data import move
from syncline.errors import DivergedError, IncompatibleError, ProtocolError, SpecError
from syncline.file_lock import FileLock
from syncline.parallel.expert_layers import expert_statistics, find_experts
from syncline.reduction import check_same
from syncline.strategies import AutoStrategy, Shard, Step, Steps, Strategy, StrategyRun, build_strategy, strategy_run
from syncline.training.distribute import distribute
from syncline.training.pipeline_run import PipelineRun
from syncline.training.progress import NoProgress, Progress, ProgressReport, SpeedMeter, duration
from syncline.training.records import RunLogWriter, describe_run, summarize
from syncline.training.run_folder import RunFolder, checkpoints_in
from syncline.training.run_state import (
    DATA,
    PIPELINE_STEP,
    UPDATE,
    LoopState,
    Outcome,
    StopReason,
    TrainingClock,
    phases,
)
from syncline.training.settings import Settings
from syncline.training.stragglers import ComputePacer, Slow, check_slow
from syncline.training.system import describe_world
from syncline.workloads.base import Workload, batches
from syncline.world import World, current_world

__all__ = ["Outcome", "Schedule", "SyncPolicy", "Trainer", "train"]

logger = logging.getLogger("syncline")

LOG_PROGRESS_EVERY_S = 5.0
"""Interval between two log lines of speeds and loss within an epoch."""
WARM_UP_STEPS = 2
"""Steps before the clock starts that compile the kernels of a codec."""
DATA_KEYS = ("workload", "sha256", "script_sha256")
"""Parts of a workload's description that must be the same on all ranks."""

Schedule = LRScheduler | ChainedScheduler


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

    Files are written to `folder`, and nowhere else. `lock` keeps other jobs from writing there. `resume=True` continues
    from the newest checkpoint in it, if there is one; a path continues from the checkpoints there. `stop` is called
    about once a second: if it returns True on any rank, all stop after the same step with a checkpoint. The generators
    of torch, NumPy and `random` are seeded.

    `strategy` replaces the one of the settings, if it has no spec. With `predict`, config.json has the step time that
    `costs` predicts. `seconds_a_sample` is the time that a worker computes for one sample: virtual seconds on the
    simulator, where computing takes no time, and a sleep on real workers. `slow` names workers that take a multiple of
    it. With `rehearsed` the kernels of a codec are compiled before the clock starts.

    With `settings.pipeline` the model is split over the workers; each pipeline reads a batch of its own.

    If the strategy is asynchronous, each worker takes its own steps; see `syncline.training.asynchronous`.
    """
    from syncline.training.asynchronous import AsynchronousPolicy
    from syncline.training.synchronous import SynchronousPolicy

    world = current_world() if world is None else world
    settings = (settings or Settings()).resolved(workload, world.size)
    check_slow(slow, world.size, seconds_a_sample, settings.pipeline)
    place = None if folder is None else RunFolder(folder)
    source = _checkpoint_source(place, resume)
    with ExitStack() as stack:
        stack.enter_context(_hold_folder(world, place, new_run=resume is False, lock=lock))
        if rehearsed and settings.codec is not None and not world.transport.timing.virtual:
            _compile_codec(workload, settings, strategy, world)
        strategy = strategy or build_strategy(settings.strategy)
        if isinstance(strategy, AutoStrategy):
            strategy = replace(strategy, earlier=_earlier_choice(source, world))
        run, scheduler = _distributed(workload, settings, strategy, world, seconds_a_sample)
        stack.enter_context(run)
        description = {key: str(value) for key, value in workload.describe().items() if key in DATA_KEYS}
        check_same(run.communicator, "data", description)  # hosts may have other files, or another Python's library
        trainer = Trainer(workload, settings, run, scheduler, place, stop)
        policy = (AsynchronousPolicy if run.asynchronous else SynchronousPolicy)(trainer)
        trainer.predicted = run.predict() if predict and isinstance(run, StrategyRun) else None
        if source is not None:
            trainer.load(source, needed=resume is not True)
            policy.after_load()
        policy.prepare()
        log = RunLogWriter(world, place, trace=trace, tensorboard=tensorboard, step=trainer.state.step)
        with trainer.recording(log, progress or NoProgress(), policy), trainer.paced(seconds_a_sample, slow):
            return trainer.run(policy)


class SyncPolicy(ABC):
    """What the loop does together with the other workers. `Trainer` calls it; it uses the trainer's state."""

    @abstractmethod
    def begin(self) -> None:
        """The clock runs, and the first step follows."""

    @abstractmethod
    def stop_reason(self) -> StopReason | None:
        """Why no epoch follows; None if one does. Called before each epoch."""

    @abstractmethod
    def between_steps(self, samples: int) -> StopReason | None:
        """Act between two steps of an epoch, after a step of `samples` samples; why the run stops here, or None."""

    @abstractmethod
    def after_epoch(self, reason: StopReason | None) -> StopReason | None:
        """Act after an epoch that ended for `reason`, or None if it is complete; why the run stops, or None."""

    @abstractmethod
    def conclude(self, reason: StopReason) -> Outcome:
        """End the run together: the last checkpoint, the test and the result."""

    def prepare(self) -> None:  # noqa: B027 (optional)
        """Prepare before the clock runs. Every rank calls it."""

    def after_load(self) -> None:  # noqa: B027 (optional)
        """A checkpoint was loaded."""

    def on_divergence(self) -> None:  # noqa: B027 (optional)
        """This worker raises a `DivergedError`."""

    @property
    def writer(self) -> int:
        """The rank that writes the result of the run."""
        return 0


class Trainer:
    """The loop of one worker: its steps, its place in the data, its clock, its log and its checkpoints."""

    def __init__(
        self,
        workload: Workload,
        settings: Settings,
        run: StrategyRun | PipelineRun,
        scheduler: Schedule | None,
        folder: RunFolder | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.workload, self.settings, self.attached, self.world = workload, settings, run, run.world
        self.scheduler, self.folder, self.stop = scheduler, folder, stop
        self.total = 0
        """Steps of the whole run."""
        self.state = LoopState()
        self.length = settings.samples_per_epoch(workload, self.world.size)
        self.batch = settings.samples_per_step(self.world.size)
        self.readers = settings.readers(self.world.size)
        self.reader = _reader(run, workload, settings)
        self.events, self.now = self.world.events, self.world.runtime.now
        self.clock, self.speeds = TrainingClock(self.now), SpeedMeter()
        self.log, self.progress = RunLogWriter(self.world, None), cast(Progress, NoProgress())
        self.loss: Tensor | None = None
        self.experts = expert_statistics(run.model)
        """The totals of layers of experts that the log has, by name."""
        self.logged_at = self.saved_at = self.now()
        self.first_step = 0
        """The step with which this attempt started."""
        self.saved_step = -1
        self.waited_in_updates = 0.0
        """Seconds of communication and codecs inside the updates."""
        self.predicted: dict[str, float] | None = None
        self.pacer: ComputePacer | None = None

    # The loop.

    def run(self, policy: SyncPolicy) -> Outcome:
        """Train until the policy ends the run."""
        self.total = self._total_steps()
        self.attached.expect(self.total)
        self.report()  # speeds are measured from here on
        policy.begin()
        try:
            reason = policy.stop_reason()
            while reason is None:
                reason = self._epoch(policy)
                if reason is None:
                    self.state.epoch, self.state.position = self.state.epoch + 1, 0
                reason = policy.after_epoch(reason)
        except DivergedError:
            policy.on_divergence()
            raise
        return policy.conclude(reason)

    def _total_steps(self) -> int:
        """Steps that were taken, perhaps by another number of workers, and steps that are left."""
        state, epochs = self.state, cast(int, self.settings.epochs)
        left = -(-(self.length - state.position) // self.batch) if state.epoch < epochs else 0
        later = max(0, epochs - state.epoch - 1) * -(-self.length // self.batch)
        return max(1, min(state.step + left + later, self.settings.steps or sys.maxsize))

    def _epoch(self, policy: SyncPolicy) -> StopReason | None:
        """Train the rest of an epoch; why it was broken off, or None."""
        state = self.state
        self.log.begin("epoch_start", epoch_num=state.epoch + 1, step=state.step)
        self.attached.model.train()
        self.clock.start()
        reason: StopReason | None = None
        for batch in self._batches():
            self._step(batch)
            samples = self._count_step()
            if state.position < self.length:
                reason = self._between_steps(policy, samples)
            if reason is not None:
                break
        if reason is None and state.position < self.length:
            self._count_step()  # the last round had no data for this rank
        self.log_progress()
        self.clock.pause()
        self.log.end("epoch_stop", epoch_num=state.epoch + 1, step=state.step)
        return reason

    def _batches(self) -> Iterator[Any]:
        reader = iter(self.reader)
        while True:
            with self.events.span(DATA, lane="data", what="next batch"):
                batch = next(reader, None)
            if batch is None:
                return
            yield batch

    def _step(self, batch: Any) -> None:
        """Forward, backward and update."""
        if isinstance(self.attached, PipelineRun):
            with self.events.span(PIPELINE_STEP, lane="compute", what="step of the pipeline"):
                self.loss = self.attached.step(*batch)
            if self.attached.loss_is_late and self.state.step == self.first_step:
                self.loss = None  # there is no step before
        else:
            self.loss = self._step_here(batch, self.attached)
        if self.scheduler is not None:
            self.scheduler.step()

    def _step_here(self, batch: Any, run: StrategyRun) -> Tensor:
        """A step with the whole model on this worker. Returns the loss of the last micro-batch."""
        span = self.events.span
        run.optimizer.zero_grad()
        parts: list[Tensor] = []
        for micro in batch if isinstance(batch, Step) else (batch,):
            with span("sl_forward_seconds", lane="compute", what="forward"):
                loss = self.workload.loss(run.replica, micro)
                if self.pacer is not None:
                    self.pacer.forward(len(micro[0]))
            with span("sl_backward_seconds", lane="compute", what="backward"):
                part = batch.part(loss) if isinstance(batch, Step) else loss
                part.backward()  # type: ignore[no-untyped-call]
            parts.append(part.detach())
        if run.wants_loss:
            run.note_loss(sum(parts[1:], parts[0]))
        waited = run.stats.exposed_seconds + run.stats.codec_before_seconds
        with span(UPDATE, lane="compute", what="update"):
            run.optimizer.step()
        self.waited_in_updates += run.stats.exposed_seconds + run.stats.codec_before_seconds - waited
        return loss.detach()

    def _count_step(self) -> int:
        """Count a step. Returns its samples on all ranks."""
        samples = min(self.batch, self.length - self.state.position)
        self.state.step += 1
        self.state.samples += samples
        self.state.position += samples
        return samples

    def _between_steps(self, policy: SyncPolicy, samples: int) -> StopReason | None:
        if self.progress.due():
            self.progress.show(self.report())
        if self.now() - self.logged_at >= LOG_PROGRESS_EVERY_S:
            self.log_progress()
        return policy.between_steps(samples)

    # Log and result.

    def report(self) -> ProgressReport:
        """How far the run is, and how fast."""
        state, stats = self.state, self.attached.stats
        seconds_per_step = (self.clock.elapsed - self.clock.elapsed_before) / max(1, state.step - self.first_step)
        speeds = self.speeds.read(self.clock.trained, state.samples, stats.bytes_wire, stats.exposed_seconds)
        return ProgressReport(
            epoch=state.epoch + 1,
            epochs=cast(int, self.settings.epochs),
            step=state.step,
            steps=self.total,
            loss=float("nan") if self.loss is None else float(self.loss),
            speeds=speeds,
            left=seconds_per_step * (self.total - state.step),
        )

    def log_progress(self) -> None:
        """Write speeds and loss into rank 0's log."""
        self.logged_at = self.now()
        if self.world.rank == 0 and self.loss is not None:
            self.log.log_progress(self.report(), float(self.attached.optimizer.param_groups[0]["lr"]))
            before, self.experts = self.experts, expert_statistics(self.attached.model)
            new = {name: each - before[name] if name in before else each for name, each in self.experts.items()}
            self.log.log_experts(new, self.state.epoch + 1, self.state.step)

    def record_evaluation(
        self, measures: dict[str, float], value: float, epoch: int, step: int, *, elapsed: float, samples: int,
        staleness: float,
    ) -> None:  # fmt: skip
        """Log a validation and what the run has cost until then, and store whether it reached the target.

        `measures` are empty on ranks that did not evaluate; `value` is the metric on every rank.
        """
        stats, metric, target = self.attached.stats, self.workload.metric, self.settings.target
        costs = {
            "metric": value,
            "split": "validation",
            "count": self.workload.splits().sizes()["validation"],
            "elapsed": elapsed,
            "trained": min(self.clock.trained, elapsed),
            "samples": samples,
            "epochs": samples / self.length,
            "bytes_logical": stats.bytes_logical,
            "bytes_wire": stats.bytes_wire,
            "staleness": staleness,
            "consensus": stats.consensus,
            "phases": phases(self.events.totals, stats),
            "communication": stats.comm_seconds,
            "update": max(0.0, self.events.totals.get(UPDATE, 0.0) - self.waited_in_updates),
        }
        self.log.log_evaluation(measures, epoch, step, costs)
        self.state.record(value, elapsed, target is not None and self.workload.reached(value, target))
        rest = "".join(f", {key} {number:.4g}" for key, number in measures.items() if key != metric)
        self.progress.say(
            f"epoch {epoch}/{self.settings.epochs}: validation {metric} {value:.4g}{rest}, after {duration(elapsed)}"
        )

    def _write_config(self) -> None:
        """Write config.json on rank 0: first at the start, and again at the end, when `auto` has chosen."""
        if self.folder is not None and self.world.rank == 0:
            config = describe_run(self.workload, self.settings, self.attached, self.predicted)
            self.folder.write("config", config)

    def write_result(self, outcome: Outcome, policy: SyncPolicy, tested: int | None = None) -> None:
        """Write the result into the log, config.json and summary.json. `tested`: the step of the tested weights."""
        self._write_config()
        stats = self.attached.stats
        totals = {**stats.as_dict(), DATA: self.events.totals.get(DATA, 0.0)}
        del totals["steps"]
        if self.attached.asynchronous:  # logged for all workers together
            totals.pop("sl_staleness_histogram", None)
        self.log.log_result(outcome, totals, phases(self.events.totals, stats), tested)
        self._write_summary(outcome, policy)

    def _write_summary(self, outcome: Outcome, policy: SyncPolicy, error: BaseException | None = None) -> None:
        if self.folder is not None and self.world.rank == policy.writer:
            config = describe_run(self.workload, self.settings, self.attached, self.predicted)
            summary = summarize(outcome, self.folder, config, self.attached.stats, self.world.lost, error)
            self.folder.write("summary", summary)

    def outcome(self, reason: StopReason, test: float | None = None) -> Outcome:
        """The result of this worker."""
        state = self.state
        return Outcome(
            metric=self.workload.metric,
            test=None if reason == "signal" else test,
            validation=state.validation,
            seconds=self.clock.trained,
            elapsed=self.clock.elapsed,
            time_to_target=state.time_to_target,
            epochs=state.epoch,
            steps=state.step,
            samples=state.samples,
            stopped_by=reason,
        )

    @contextmanager
    def recording(self, log: RunLogWriter, progress: Progress, policy: SyncPolicy) -> Iterator[None]:
        """Write log, configuration and progress inside. If it raises, the log and summary.json say so."""
        self.log, self.progress = log, progress
        try:
            if self.folder is not None and self.world.rank == 0:
                self.folder.remove("summary")  # of an earlier attempt
                self.folder.write("system", describe_world(self.world))
            self._write_config()
            if (choice := self.attached.config.get("auto")) is not None:
                progress.say(f"auto {'keeps' if choice['kept'] else 'takes'} {choice['reason']}")
            config, asynchronous = self.attached.config, self.attached.asynchronous
            log.log_start(self.workload, self.settings, config, self.first_step, asynchronous)
            self.clock.begin()
            yield
        except BaseException as error:
            log.end("run_stop", status="aborted", error=f"{type(error).__name__}: {error}")
            with suppress(Exception):  # the error itself must be reported
                self._write_summary(self.outcome("signal"), policy, error)
            raise
        finally:
            progress.close()
            log.close()

    # Checkpoints.

    def checkpoint_due(self) -> bool:
        """Whether `checkpoint_every` asks for a checkpoint after this step."""
        every = self.settings.checkpoint_every
        return bool(every) and self.state.step % cast(int, every) == 0

    def save(self) -> None:
        """Save a checkpoint, unless this step has one."""
        if self.folder is not None and self.saved_step != self.state.step:
            self.save_as(self.folder, self.state.step)

    def save_as(self, folder: RunFolder, step: int) -> None:
        """Save a checkpoint under a step that is the same on all ranks. Its seconds are not training time."""
        with self.clock_paused():
            began = self.now()
            state = {**asdict(self.state), "trained": self.clock.trained, "elapsed": self.clock.elapsed}
            state |= {"target": self.settings.target, "step": step}
            path = save(folder.checkpoints, **self._objects(), **state)  # it counts its own seconds
            self.saved_step, self.saved_at = step, self.now()
            self.log.point("sl_checkpoint", path.name, step=step, seconds=self.saved_at - began)

    def load(self, source: Path, needed: bool) -> None:
        """Continue from the newest checkpoint. Without one the run starts anew, or raises if one is `needed`."""
        state = load(source, **self._objects())
        if state is None:
            if needed:
                raise IncompatibleError(f"there is no checkpoint in {source} to continue from")
            return
        for key in asdict(self.state):
            if key in state:  # old checkpoints have fewer keys
                setattr(self.state, key, state[key])
        if state["target"] != self.settings.target:
            self.state.time_to_target, self.state.since_target = None, 0
        self.clock = TrainingClock(self.now, state["trained"], state["elapsed"])
        self.first_step = self.saved_step = self.state.step

    def _objects(self) -> dict[str, Any]:
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler}
        return {"run": self.attached, **scheduler}

    # Time.

    @contextmanager
    def clock_paused(self) -> Iterator[None]:
        """Inside, no training time is counted."""
        running = self.clock.running
        self.clock.pause()
        yield
        if running:
            self.clock.start()

    @contextmanager
    def paced(self, seconds_a_sample: float | None, slow: Sequence[Slow] = ()) -> Iterator[None]:
        """Inside, computing takes `seconds_a_sample` for each sample; None changes nothing."""
        if seconds_a_sample is None:
            yield
            return
        self.pacer = ComputePacer(self.world, self.attached.model, seconds_a_sample, slow)
        try:
            yield
        finally:
            self.pacer.close()


def _reader(run: StrategyRun | PipelineRun, workload: Workload, settings: Settings) -> Shard | Steps:
    loader: DataLoader[Any] = DataLoader(workload.splits().train, batch_size=settings.batch, shuffle=True)
    if settings.global_batch is None:
        return run.shard(loader, seed=settings.seed)
    return run.steps(loader, global_batch=settings.global_batch, micro_batch=settings.batch, seed=settings.seed)


def _distributed(
    workload: Workload,
    settings: Settings,
    strategy: Strategy | None,
    world: World,
    seconds_a_sample: float | None = None,
) -> tuple[StrategyRun | PipelineRun, Schedule | None]:
    """The model, its optimizer and its schedule, attached to the strategy."""
    _seed_everything(settings.seed, world.rank)
    model = workload.model(settings.seed).to(world.device)
    optimizer = settings.optimizer(workload, model, world.size)
    steps = settings.steps_per_epoch(workload, world.size)
    total = min(steps * cast(int, settings.epochs), settings.steps or sys.maxsize)
    scheduler = settings.schedule(optimizer, world.size, epoch_steps=steps, total_steps=total)
    if isinstance(strategy, AutoStrategy) and strategy.profile is None:
        strategy = replace(strategy, step=_step_of(workload, settings, model, world, seconds_a_sample))
    options: dict[str, Any] = {
        "strategy": strategy or settings.strategy,
        "codec": settings.codec,
        "algorithm": settings.collective,
        "check_finite": settings.check_finite,
        "schedulers": () if scheduler is None else (scheduler,),
        "seed": settings.seed,
    }
    if settings.pipeline is not None:
        from syncline.training.pipeline_training import start_pipeline

        return start_pipeline(workload, settings, model, optimizer, options, world), scheduler
    if any(True for _ in find_experts(model)):  # the steps of an epoch are counted for whole models
        options["parallel"] = "experts(1)"
    return strategy_run(distribute(model, optimizer, diagnose=settings.diagnose, **options)), scheduler


def _step_of(
    workload: Workload, settings: Settings, model: nn.Module, world: World, seconds_a_sample: float | None
) -> Callable[[], None]:
    """A function that reads a batch and computes forward and backward on this worker, for `auto` to time."""
    samples = cast(int, settings.batch)
    loader: DataLoader[Any] = DataLoader(
        workload.splits().train, batch_size=samples, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    reader = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
    share = samples if settings.global_batch is None else -(-settings.global_batch // world.size)

    def step() -> None:
        pacer = None if seconds_a_sample is None else ComputePacer(world, model, seconds_a_sample)
        try:
            for _ in range(-(-share // samples)):
                batch = move(next(reader), world.device)
                loss = workload.loss(model, batch)
                if pacer is not None:
                    pacer.forward(len(batch[0]))
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            if pacer is not None:
                pacer.close()

    return step


def _earlier_choice(source: Path | None, world: World) -> dict[str, Any] | None:
    """What `auto` chose for the run that is continued, on rank 0."""
    if source is None or world.rank != 0:
        return None
    for folder in (source.parent, source.parent.parent):  # of the checkpoints, or of one checkpoint
        try:
            run = (RunFolder(folder).read("config") or {}).get("run")
        except ProtocolError as error:
            logger.warning("auto chooses again: %s", error)
            continue
        if isinstance(run, dict) and isinstance(run.get("auto"), dict):
            return dict(run["auto"])
    return None


def _compile_codec(workload: Workload, settings: Settings, strategy: Strategy | None, world: World) -> None:
    """Take steps with a model that is thrown away, so that a codec's kernels are compiled. Every rank calls it.

    The first use of a codec on a machine compiles for about ten seconds, in the code that a step runs. Random numbers
    are drawn: seed afterwards.
    """
    # A loss that is not finite is reported by the training, which has a log.
    plain = replace(settings, check_finite=False, diagnose=0)
    run, _ = _distributed(workload, plain, strategy, world)
    with run:
        batch = next(batches(workload.splits().train, settings.batch or 1))
        for _ in range(WARM_UP_STEPS):
            if isinstance(run, PipelineRun):
                run.step(*move(batch, world.device))
                continue
            run.optimizer.zero_grad()
            workload.loss(run.replica, batch).backward()  # type: ignore[no-untyped-call]
            run.optimizer.step()


def _seed_everything(seed: int, rank: int) -> None:
    """Seed torch, NumPy and `random`, differently on each rank, so that dropout differs too."""
    mixed = (1_000_003 * seed + rank) % 2**63
    torch.manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)


def _checkpoint_source(folder: RunFolder | None, resume: bool | str | Path) -> Path | None:
    """The folder to load from, or None for a new run."""
    if resume is False:
        return None
    if resume is not True:
        return checkpoints_in(resume)
    if folder is None:
        raise SpecError("resume=True continues from the newest checkpoint in the run's folder: give folder=")
    return folder.checkpoints


@contextmanager
def _hold_folder(world: World, folder: RunFolder | None, new_run: bool, lock: bool) -> Iterator[None]:
    """Inside, rank 0 holds the lock of the run's folder. Refuses a folder in use, or one with a run for a new run.

    Every rank calls it, and all raise the same error: another rank may already see what rank 0 writes. Without `lock`
    the launcher holds the lock.
    """
    if folder is None:
        yield
        return
    locks: list[FileLock] = []

    def check() -> None:
        if world.rank != 0:
            return
        if lock:
            locks.append(folder.lock())
        if new_run and folder.used():
            raise IncompatibleError(folder.refusal())

    try:
        Participants(world).run_on_all("take the run's folder", check)
        yield
    finally:
        for each in locks:
            each.release()
