"""The settings of a run. The same settings on the same world give the same bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from syncline.errors import IncompatibleError, SpecError
from syncline.lr_scaling import scale_factor
from syncline.specs import nearest

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from syncline.parallel.placement import PipelinePlacement
    from syncline.training.loop import Schedule
    from syncline.workloads.base import Workload

__all__ = ["DECAYS", "Settings"]

DECAYS = ("none", "cosine")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train. None means the workload's default.

    >>> Settings(epochs=3, scaling="linear", warmup=1).epochs
    3
    """

    strategy: str = "allreduce"
    codec: str | None = None
    collective: str = "auto"
    pipeline: str | None = None
    """The schedule of a pipeline, such as "1f1b(microbatches=8)"; None: every worker has the whole model."""
    stages: str | None = None
    """A number of stages, the modules with which stages 1, 2, … begin, as "blocks.2,head", or the file of a partition.
    None: as many stages as the workers can have."""
    diagnose: int = 0
    """Steps between two log entries about the codec's error in each layer; 0: never."""
    batch: int | None = None
    """Samples of each worker in a step, or of each pipeline. With `global_batch`: the largest micro-batch."""
    global_batch: int | None = None
    """Samples of all workers in a step, for any number of workers (strong scaling). None: `batch` times the workers."""
    epochs: int | None = None
    steps: int | None = None
    """Steps after which the run ends, unless the epochs end it earlier."""
    learning_rate: float | None = None
    """The rate for one worker; `scaling` makes the rate for all."""
    scaling: str = "none"
    warmup: float = 0.0
    """Epochs, or a fraction, in which the rate rises from that of one worker to the scaled one."""
    decay: str = "none"
    target: float | None = None
    """The validation metric at which the run ends; None: it does not end early."""
    evaluate_every: int | None = None
    """Steps between two evaluations; one more at the end. None: after each epoch."""
    evaluations_after: int = 0
    """Evaluations after the one that reached the target, which may have been chance."""
    momentum: float | None = None
    """The optimizer's momentum; None: the workload's. A codec with its own momentum needs 0."""
    seed: int = 0
    check_finite: bool = True
    checkpoint_every: int | None = None
    """Steps between two checkpoints. 0: never; None: between epochs, if the last one is old, and at the end."""

    def resolved(self, workload: Workload, workers: int) -> Settings:
        """These settings with the workload's defaults; refuses impossible ones.

        With steps and without epochs, there are as many epochs as the steps need.
        """
        self.check()
        if self.target is not None:
            workload.check_target(self.target)
        defaults = workload.defaults
        batch = defaults.batch if self.batch is None else self.batch
        rate = defaults.learning_rate if self.learning_rate is None else self.learning_rate
        epochs = defaults.epochs if self.epochs is None else self.epochs
        if self.epochs is None and self.steps is not None:
            epochs = -(-self.steps // replace(self, batch=batch).steps_per_epoch(workload, workers))
        return replace(self, batch=batch, epochs=epochs, learning_rate=rate)

    def check(self) -> None:
        """Refuse numbers out of range."""
        leasts = dict.fromkeys(("batch", "global_batch", "epochs", "steps", "evaluate_every"), 1)
        leasts |= dict.fromkeys(("checkpoint_every", "diagnose", "evaluations_after"), 0)
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise SpecError(f"{name.replace('_', '-')} {value}: at least {least}")
        if not (self.warmup >= 0 and math.isfinite(self.warmup)):
            raise SpecError(f"warmup {self.warmup}: a number of epochs, such as 5 or 0.5; 0 for none")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise SpecError(f"momentum {self.momentum}: from 0 to below 1")
        if self.decay not in DECAYS:
            raise SpecError(f"unknown decay {self.decay!r}; {nearest(self.decay, list(DECAYS))}")
        if not 0 <= self.seed < 2**63:
            raise SpecError(f"seed {self.seed}: a whole number from 0 to 2⁶³ − 1")
        self._check_pipeline()
        rate = self.learning_rate
        if rate is not None and not 0 < rate < math.inf:
            raise SpecError(f"lr {rate}: a finite number above 0")
        scale_factor(self.scaling, workers=1)  # refuses an unknown rule

    def _check_pipeline(self) -> None:
        if self.pipeline is None:
            if self.stages is not None:
                raise SpecError(
                    f"stages {self.stages}: there is no pipeline to divide; add --pipeline 1f1b, or leave it out"
                )
            return
        for name, why in (
            ("global_batch", "divides a batch for accumulation, and a pipeline divides it itself: write batch instead"),
            ("diagnose", "logs the codec's error on rank 0, which has only a part of the model: leave it out"),
        ):
            if getattr(self, name):
                raise IncompatibleError(f"{name.replace('_', '-')} {getattr(self, name)} {why}")

    def placement(self, workers: int) -> PipelinePlacement | None:
        """The schedule of the pipeline, and the workers of each of its ranks; None without a pipeline."""
        if self.pipeline is None:
            return None
        from syncline.parallel.placement import PipelinePlacement
        from syncline.parallel.schedules import build_schedule
        from syncline.training.pipeline_stages import AUTO, parse_stages, planned_replicas

        schedule = build_schedule(self.pipeline)
        return PipelinePlacement(schedule, planned_replicas(parse_stages(self.stages or AUTO), schedule, workers))

    def readers(self, workers: int) -> int:
        """How many of the workers read data of their own. With a pipeline: those of the first stage."""
        placement = self.placement(workers)
        return workers if placement is None else placement.replicas[0]

    def samples_per_step(self, workers: int) -> int:
        """Samples of all workers together in a step."""
        assert self.batch is not None, "settings are resolved before they are used"
        return self.global_batch or self.batch * self.readers(workers)

    def samples_per_epoch(self, workload: Workload, workers: int) -> int:
        """Samples of an epoch, without a short last batch where a pipeline needs whole ones."""
        samples, batch = workload.splits().sizes()["train"], self.samples_per_step(workers)
        placement = self.placement(workers)
        if placement is None or not placement.whole_batches:
            return samples
        if samples < batch:
            raise IncompatibleError(
                f"{workload} has {samples} samples to train on, and {placement.schedule!r} with {placement.replicas} "
                f"workers per stage needs whole batches, of {batch} here: take a smaller batch"
            )
        return samples - samples % batch

    def steps_per_epoch(self, workload: Workload, workers: int) -> int:
        """Steps of an epoch; the last one may be short."""
        return -(-self.samples_per_epoch(workload, workers) // self.samples_per_step(workers))

    def rate(self, workers: int) -> float:
        """The learning rate for this number of workers."""
        assert self.learning_rate is not None, "settings are resolved before they are used"
        return self.learning_rate * scale_factor(self.scaling, self.readers(workers))

    def optimizer(self, workload: Workload, model: nn.Module, workers: int) -> Optimizer:
        """The workload's optimizer, with the rate for this number of workers and the momentum of these settings."""
        made = workload.optimizer(model, self.rate(workers))
        for group in made.param_groups if self.momentum is not None else ():
            if "momentum" not in group:
                raise SpecError(
                    f"momentum {self.momentum}: {workload}'s {type(made).__name__} has no such setting; leave it out"
                )
            group["momentum"] = self.momentum
        return made

    def schedule(self, optimizer: Optimizer, workers: int, epoch_steps: int, total_steps: int) -> Schedule | None:
        """Warm-up and decay as one scheduler; None if the rate is constant."""
        from torch.optim.lr_scheduler import ChainedScheduler

        from syncline.optim import cosine_decay, warmup

        parts: list[LRScheduler] = []
        steps = round(self.warmup * epoch_steps)
        if steps:
            # An unscaled rate starts from a tenth of itself.
            readers = self.readers(workers)
            scaled = self.scaling != "none" and readers > 1
            parts.append(warmup(optimizer, steps, self.scaling if scaled else 0.1, workers=readers))
        if self.decay == "cosine":
            parts.append(cosine_decay(optimizer, total_steps))
        return ChainedScheduler(parts, optimizer=optimizer) if len(parts) > 1 else parts[0] if parts else None
