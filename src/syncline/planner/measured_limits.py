"""Says what limits a step that was measured, in the words of `limits.py`, and what a remedy would gain.

| limit | its seconds, measured | remedy, and what it saves |
|---|---|---|
| communication | exposed communication, without waiting for a slower rank | twice the bandwidth: half of it all |
| server | the same, with parameter servers | twice the servers, or twice the bandwidth |
| straggler | the slowest rank's computation − the median rank's | ranks of equal speed: all of it |
| input | waiting for the next batch | reading that is fast enough: all of it |
| bubble | the idle share of the schedule, of the computation | twice the micro-batches, by the schedule's formula |
| optimizer | the update | plain SGD, by the bytes that it moves; of SGD, four times the batch |
| skinny matrix products | the part of the computation that does not depend on the batch | four times the batch |

The computation of a rank that computes while it communicates is longer; that is not separated. Activations are not
recomputed by `syncline train`, so memory limits no measured step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.planner.limits import (
    BATCH_FACTOR,
    MIN_SHARE,
    SKINNY_SHARE,
    Limit,
    bubble_cause,
    communication_cause,
    compute_limit,
    input_cause,
    limit_of,
    optimizer_cause,
    server_cause,
    skinny_cause,
    straggler_cause,
)
from syncline.planner.plans import OPTIMIZERS, pipeline_s

__all__ = ["PipelineShape", "StepMeasurement", "measured_limits"]


@dataclass(frozen=True)
class PipelineShape:
    """The pipeline of a run."""

    schedule: str
    stages: int
    micro_batches: int

    def idle_share(self, factor: int = 1) -> float:
        """Idle ÷ busy seconds of a rank, with `factor` times the micro-batches. 0: no formula.

        >>> PipelineShape("1f1b", 4, 8).idle_share()
        0.375
        """
        name, m = self.schedule.partition("(")[0], factor * self.micro_batches
        if name not in ("gpipe", "1f1b", "zero_bubble") or self.stages < 2:
            return 0.0
        return pipeline_s(name, self.stages, m, 1 / 3, 1 / 3, 1 / 3) / m - 1


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """The mean seconds of a measured step on rank 0, by phase, and what is known about the run."""

    compute_s: float
    exposed_s: float = 0.0
    codec_s: float = 0.0
    data_s: float = 0.0
    communication_s: float | None = None
    """Seconds in which a reduction was under way, hidden or not. None: only the exposed ones are known."""
    update_s: float | None = None
    rank_compute_s: Sequence[float] = ()
    """Computation of every rank."""
    synchronous: bool = True
    """Whether ranks wait for each other in every step."""
    workers: int = 1
    servers: int = 0
    """Parameter servers; 0: none."""
    samples: float = 0.0
    """Samples of rank 0."""
    batch_fixed_share: float | None = None
    """The share of the computation that does not depend on the batch. None: not known."""
    optimizer: str = ""
    """A name of `plans.OPTIMIZERS`, or another one."""
    pipeline: PipelineShape | None = None

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute_s + self.exposed_s + self.codec_s + self.data_s


def measured_limits(step: StepMeasurement) -> tuple[Limit, ...]:
    """The limits of a measured step, the largest first. If there is none, the computation.

    >>> step = StepMeasurement(compute_s=0.06, exposed_s=0.04, communication_s=0.05, workers=4)
    >>> measured_limits(step)[0].sentence
    'communication limits it, most of it the exchange of gradients over the network: 40 ms of 100 ms a step (40%); \
with twice the bandwidth the step would be 25 ms (25%) shorter'
    """
    if step.seconds <= 0:
        return ()
    found = [
        *_waiting(step),
        *_input(step),
        *_bubble(step),
        *_update(step),
        *_skinny(step),
    ]
    large = [limit for limit in found if limit.share >= MIN_SHARE]
    if not large:
        return (compute_limit(step.compute_s / step.seconds, "these"),)
    return tuple(sorted(large, key=lambda limit: -limit.share))


def _waiting(step: StepMeasurement) -> list[Limit]:
    """What a rank waits for in its exchanges: a slower rank, other stages, the network or the servers."""
    found = []
    exposed = step.exposed_s
    if step.synchronous and len(step.rank_compute_s) > 1 and step.pipeline is None:
        slowest = max(range(len(step.rank_compute_s)), key=lambda rank: step.rank_compute_s[rank])
        longest, median = step.rank_compute_s[slowest], statistics.median_low(step.rank_compute_s)
        cost = longest - median
        if median > 0 and cost > 0:
            cause = straggler_cause(slowest, longest / median)
            # A rank that is slower than rank 0 is seen there as waiting; if it is rank 0, as computation.
            exposed = max(0.0, exposed - max(0.0, longest - step.rank_compute_s[0]))
            cost = min(cost, step.seconds)
            found.append(_limit(step, "straggler", cause, cost, "ranks of equal speed", cost))
    exposed = max(0.0, exposed - _bubble_s(step))
    if exposed <= 0:
        return found
    if step.servers:
        found.append(_server(step, exposed))
        return found
    # Messages that are under way together count more than once.
    whole = min(step.communication_s or 0.0, step.seconds)
    hidden = max(0.0, whole - step.exposed_s)
    saved = min(exposed, (exposed + hidden) / 2)
    part = "reduction" if step.pipeline is None else "transfer"
    found.append(
        _limit(step, "communication", communication_cause(part, "network"), exposed, "twice the bandwidth", saved)
    )
    return found


def _server(step: StepMeasurement, exposed: float) -> Limit:
    """Each server receives from all workers: more servers help until each worker's own link is the limit."""
    others = max(1, step.workers - 1)
    load = max(others / step.workers, others / step.servers)
    remedied = max(others / step.workers, others / (2 * step.servers))
    cause = server_cause(step.servers)
    if remedied < load:
        return _limit(step, "server", cause, exposed, f"{2 * step.servers} servers", exposed * (1 - remedied / load))
    return _limit(step, "server", cause, exposed, "twice the bandwidth", exposed / 2)


def _input(step: StepMeasurement) -> list[Limit]:
    if step.data_s <= 0:
        return []
    rate = f"a worker reads {step.samples / step.data_s:.3g} samples/s" if step.samples else "reading is slower"
    remedy = "batches that are read ahead"
    return [_limit(step, "input", input_cause(rate), step.data_s, remedy, step.data_s)]


def _bubble_s(step: StepMeasurement) -> float:
    if step.pipeline is None:
        return 0.0
    return min(step.exposed_s, step.pipeline.idle_share() * step.compute_s)


def _bubble(step: StepMeasurement) -> list[Limit]:
    cost, shape = _bubble_s(step), step.pipeline
    if shape is None or cost <= 0:
        return []
    saved = cost * (1 - shape.idle_share(2) / shape.idle_share())
    remedy = f"{2 * shape.micro_batches} micro-batches of half the size"
    return [_limit(step, "bubble", bubble_cause(shape.micro_batches, shape.stages), cost, remedy, saved)]


def _update(step: StepMeasurement) -> list[Limit]:
    if not step.update_s:
        return []
    cost = min(step.update_s, step.compute_s)
    cause = optimizer_cause(f"the update of {step.optimizer}" if step.optimizer else "its update")
    own, plain = OPTIMIZERS.get(step.optimizer), OPTIMIZERS["sgd"]
    if own is not None and own.update > plain.update:
        saved = cost * (1 - plain.update / own.update)
        return [_limit(step, "optimizer", cause, cost, "plain SGD", saved)]
    return [_limit(step, "optimizer", cause, cost, _larger_batch(step), cost * (1 - 1 / BATCH_FACTOR))]


def _larger_batch(step: StepMeasurement) -> str:
    if not step.samples:
        return f"{BATCH_FACTOR} times the batch, for as many samples,"
    return f"{BATCH_FACTOR * step.samples:.3g} samples at a time, for as many samples,"


def _skinny(step: StepMeasurement) -> list[Limit]:
    share = step.batch_fixed_share
    if share is None or not step.samples or 1 - share >= SKINNY_SHARE:
        return []
    compute = step.compute_s - (step.update_s or 0.0)
    cost = share * compute
    cause = skinny_cause(
        f"{step.samples:.3g} samples",
        f"a sample takes {1 / max(1e-9, 1 - share):.2g} times as long as in large batches",
    )
    remedy = _larger_batch(step)
    return [_limit(step, "skinny matrix products", cause, cost, remedy, cost * (1 - 1 / BATCH_FACTOR))]


def _limit(step: StepMeasurement, kind: str, cause: str, cost: float, remedy: str, saved: float) -> Limit:
    return limit_of(kind, cause, cost, step.seconds, remedy, step.seconds - saved)
