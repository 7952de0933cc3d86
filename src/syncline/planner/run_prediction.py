"""Predicts a training step of a measured model on a measured machine, for any strategy, codec or pipeline.

```text
profile.json   forward, backward, update on one worker alone     ┐
machine.json   network, codecs, Python, sharing of processors    ├─►  predict_run  ─►  seconds by kind
strategy, codec, workers                                         ┘
```

- **synchronous**: compute + work of the exchange + what of its network time is left after the backward + update.
  Buckets are those of training; of the time that could be hidden behind the backward, the measured share is.
- **local(period)**: one exchange every `period` steps.
- **asynchronous** (ssp, bsp, downpour, easgd, gossip): the strategy's own code in the simulator.
- **pipeline(stages, microbatches)**: its actions on the processors that the ranks share.

Computation is slower by the measured contention where ranks share processors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from syncline.errors import SpecError
from syncline.parallel.boundary import HEADER_BYTES
from syncline.parallel.partition import ModelProfile, balanced
from syncline.parallel.player import StageCost
from syncline.parallel.schedules import PipelineSchedule, PipelineSetting, build_schedule
from syncline.planner.calibration import LAB
from syncline.planner.exchange_costs import ExchangeCosts, shapes_of
from syncline.planner.machine import MachineMeasurement
from syncline.planner.profile import TrainingProfile
from syncline.planner.shared_cores import play_on_cores, simulate_step_s
from syncline.reduction.buckets import BUCKET_BYTES, BucketItem, assign_buckets
from syncline.specs import parse
from syncline.strategies import Local, build_strategy
from syncline.transports import Network

__all__ = ["RunPrediction", "pipeline_parts", "predict_run"]

PIPELINE = "pipeline"
DEFAULT_MICRO_BATCHES = 4
"""Micro-batches for each stage, if the spec does not say: those of `sl.pipeline`."""
SIMULATED_RANKS = 64
"""The largest number of workers for which asynchronous strategies are simulated."""


@dataclass(frozen=True)
class RunPrediction:
    """A predicted step of a run. `parts` are seconds by kind; they sum to `seconds`."""

    strategy: str
    codec: str | None
    workers: int
    parts: Mapping[str, float]
    cuts: tuple[str, ...] = ()
    """Of a pipeline: the layers with which stages 1, 2, … begin."""
    factors: tuple[float, float] = field(default=LAB.factors, compare=False)
    """The bounds of the 80 % interval in multiples of the prediction."""

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step; of an asynchronous strategy, the mean over the workers."""
        return math.fsum(self.parts.values())

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which 80 % of such steps lie."""
        return self.seconds * self.factors[0], self.seconds * self.factors[1]


def predict_run(
    profile: TrainingProfile,
    machine: MachineMeasurement,
    network: Network | None = None,
    strategy: str = "allreduce",
    codec: str | None = None,
    *,
    workers: int | None = None,
    batch: int | None = None,
    reads_data: bool = False,
) -> RunPrediction:
    """Predict a step of `strategy` with `codec` on the machine.

    Args:
        network: another network than the measured one. None: as measured.
        strategy: as in `sl.distribute`; or "pipeline(microbatches=8)" with a stage on each worker.
        workers: None: as many as were measured.
        batch: samples of a worker in a step; of a pipeline, its batch divided by its workers. None: the profile's.
        reads_data: whether each step also reads its batch in the same process.

    Raises:
        SpecError: for a strategy or codec that cannot be predicted from these measurements.
    """
    count = machine.workers if workers is None else workers
    size = profile.layers.batch_size if batch is None else batch
    if count < 1 or size < 1:
        raise SpecError(f"workers {count}, batch {size}: both must be at least 1")
    costs = ExchangeCosts(machine, count, network, copies=profile.copies)
    question = _Question(profile, costs, strategy, codec, count, size)
    name = parse(strategy)[0].name
    parts, cuts = question.pipeline() if name == PIPELINE else (question.data_parallel(), ())
    if reads_data:
        parts["input"] = size / profile.samples_per_s * question.costs.contention
    return RunPrediction(strategy, codec, count, parts, cuts)


@dataclass(frozen=True)
class _Question:
    """What is asked, and the costs of exchanges."""

    profile: TrainingProfile
    costs: ExchangeCosts
    strategy: str
    codec: str | None
    workers: int
    batch: int

    @cached_property
    def layers(self) -> ModelProfile:
        return self.profile.layers.at_batch(self.batch)

    @property
    def update_s(self) -> float:
        return self.profile.update_s * self.costs.copy_contention

    def data_parallel(self) -> dict[str, float]:
        parts = {"compute": self.layers.seconds * self.costs.contention, "optimizer": self.update_s}
        if self.workers == 1:
            return parts
        strategy = build_strategy(self.strategy)
        if isinstance(strategy, Local):
            work_s, network_s = self._whole_exchange_s()
            return parts | {"codec": work_s / strategy.period, "reduction": network_s / strategy.period}
        if strategy.name == "allreduce":
            work_s, network_s = self._overlapped_exchange_s()
            return parts | {"codec": work_s, "reduction": network_s}
        return self._simulated()

    # Synchronous exchanges.

    @cached_property
    def _buckets(self) -> list[tuple[int, ...]]:
        """The buckets of training, as places of parameters, in the order in which backward fills them."""
        found = self.profile.memory.parameters
        items = [BucketItem(each.bytes, contiguous=self.codec is None) for each in found]
        return assign_buckets(items, list(reversed(range(len(items)))), BUCKET_BYTES)

    def _exchange_s(self, bucket: Sequence[int]) -> tuple[float, float]:
        shapes = shapes_of([self.profile.memory.parameters[place] for place in bucket])
        return self.costs.exchange_s(self.codec, shapes)

    def _whole_exchange_s(self) -> tuple[float, float]:
        """Work, and network, of all buckets, one after the other."""
        found = [self._exchange_s(bucket) for bucket in self._buckets]
        return math.fsum(work for _, work in found), math.fsum(network for network, _ in found)

    def _overlapped_exchange_s(self) -> tuple[float, float]:
        """Work, and what is left of the network's time after the backward."""
        ready = self._ready_s()
        backward_s = self.costs.contention * math.fsum(layer.backward_s for layer in self.layers.layers)
        end = work_s = total_s = 0.0
        for bucket in self._buckets:
            network_s, own_work_s = self._exchange_s(bucket)
            begins = max(ready.get(place, backward_s) for place in bucket)
            end = max(end, begins) + network_s
            work_s, total_s = work_s + own_work_s, total_s + network_s
        # The engine's threads wait beside the backward for the sums of all buckets but the last one.
        if self.codec is not None and self.costs.is_summed(self.codec):
            call_s = self.costs.work("allreduce", self.codec).call_s
            work_s -= self.costs.machine.hidden_share * call_s * (len(self._buckets) - 1)
        hidden_s = total_s - max(0.0, end - backward_s)
        return work_s, total_s - self.costs.machine.hidden_share * hidden_s

    def _ready_s(self) -> dict[int, float]:
        """When backward has the gradient of each parameter, since its beginning."""
        ready_by_layer: dict[str, float] = {}
        now = 0.0
        for layer in reversed(self.layers.layers):
            now += layer.backward_s * self.costs.contention
            ready_by_layer[layer.name] = now
        found = {}
        for place, parameter in enumerate(self.profile.memory.parameters):
            inside = [name for name in ready_by_layer if f"{parameter.name}.".startswith(f"{name}.")]
            if inside:
                found[place] = ready_by_layer[max(inside, key=len)]
        return found

    # Asynchronous strategies.

    def _simulated(self) -> dict[str, float]:
        """Compute and optimizer are what they take on a processor of their own; the rest is waiting and exchange."""
        workers, per_core = self.workers, self.costs.workers_per_core
        if workers > SIMULATED_RANKS:
            raise SpecError(
                f"{self.strategy} has no formula, and it is simulated for up to {SIMULATED_RANKS} workers, not "
                f"{workers}"
            )
        work = self.costs.work("ssp", "") if self._is_served else self.costs.work("allreduce", "")
        sizes = [each.elements for each in self.profile.memory.parameters]
        compute_s = self.layers.seconds * self.costs.contention / per_core
        update_s = self.update_s / per_core
        period = int(getattr(build_strategy(self.strategy), "period", 1))
        own_s = compute_s + update_s + work.seconds(len(sizes), 4 * sum(sizes)) / per_core / period
        step_s = simulate_step_s(self.strategy, sizes, workers, self.costs.network, own_s, cores=self.costs.cores)
        rest_s = max(0.0, step_s - compute_s - update_s)
        return {"compute": compute_s, "optimizer": update_s, "reduction": rest_s}

    @property
    def _is_served(self) -> bool:
        return build_strategy(self.strategy).name in ("ssp", "bsp", "downpour", "easgd", "master")

    # Pipelines.

    def pipeline(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """The parts of a pipeline with a stage on each worker, and where the model is cut."""
        spec = parse(self.strategy)[0]
        unknown = [key for key in spec.kwargs if key not in ("microbatches", "schedule")]
        if spec.args or unknown or self.codec is not None:
            raise SpecError(
                f"{self.strategy!r}: write pipeline(microbatches=8, schedule='1f1b'), without a codec: it has as many "
                "stages as workers"
            )
        count = int(spec.kwargs.get("microbatches", DEFAULT_MICRO_BATCHES * self.workers))
        whole = self.batch * self.workers
        if count < 1 or whole % count:
            raise SpecError(f"{self.strategy!r}: {count} micro-batches do not divide a batch of {whole} samples")
        schedule = build_schedule(spec.kwargs.get("schedule", "1f1b"))
        return pipeline_parts(self.profile, self.costs, schedule, self.workers, whole // count, count)


def pipeline_parts(
    profile: TrainingProfile,
    costs: ExchangeCosts,
    schedule: PipelineSchedule,
    ranks: int,
    micro_batch: int,
    micro_batches: int,
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Seconds by kind of a pipeline's step, and where the model is cut.

    `ranks` divide the layers; if there are several times as many workers, equal pipelines compute at the same time,
    and reduce their gradients afterwards.
    """
    if not schedule.flushes:
        raise SpecError(f"{schedule}: only schedules that empty the pipeline are predicted for a machine")
    layers = profile.layers.at_batch(micro_batch)
    stages = ranks * schedule.stages_per_rank
    cuts = tuple(balanced(layers, stages).cuts) if stages > 1 else ()
    replicas = max(1, costs.workers // ranks)
    per_core, machine, network = costs.workers_per_core, costs.machine, costs.network
    stage_costs = _stage_costs(
        layers, cuts, costs.contention / per_core, machine.micro_batch_s / per_core / 2, schedule.splits_backward
    )

    def port_s(nbytes: int) -> float:
        return network.per_message + (nbytes + HEADER_BYTES) / network.bandwidth

    def transfer_s(nbytes: int) -> float:
        return network.latency + port_s(nbytes)

    setting = PipelineSetting(ranks=ranks, micro_batches=micro_batches)
    cores = costs.cores / replicas if costs.cores else float(ranks)
    makespan_s = play_on_cores(schedule, setting, stage_costs, transfer_s, port_s, cores)
    busy = [0.0] * ranks
    for stage, cost in enumerate(stage_costs):
        busy[schedule.rank_of(stage, ranks)] += micro_batches * (cost.forward_s + cost.input_s + cost.weight_s)
    bounds = [0, *(layers.place(cut) for cut in cuts), len(layers.layers)]
    nbytes = [sum(layer.parameter_bytes for layer in layers.layers[begin:end]) for begin, end in pairwise(bounds)]
    # The first rank ends last, so its update ends the step.
    share = sum(nbytes[stage] for stage in range(stages) if schedule.rank_of(stage, ranks) == 0) / max(1.0, sum(nbytes))
    parts = {
        "compute": max(busy),
        "bubble": max(0.0, makespan_s - max(busy)),
        "optimizer": profile.update_s * costs.copy_contention / per_core * share,
    }
    if replicas > 1:
        team = ExchangeCosts(machine, replicas, network, copies=profile.copies)
        parts["reduction"] = team.allreduce_s(max(nbytes))
    return parts, cuts


def _stage_costs(
    profile: ModelProfile, cuts: Sequence[str], slower: float, action_s: float, splits: bool
) -> list[StageCost]:
    """The cost of each stage for one micro-batch. `action_s` is Python's work for an action.

    A divided backward has the same work in both halves.
    """
    bounds = [0, *(profile.place(cut) for cut in cuts), len(profile.layers)]
    found = []
    for begin, end in pairwise(bounds):
        own = profile.layers[begin:end]
        crossing = {
            source
            for source, target in profile.links()
            if begin <= profile.place(source) < end and profile.place(target) >= end
        }
        backward_s = slower * math.fsum(layer.backward_s for layer in own)
        weight_s = backward_s / 2 if splits else 0.0
        found.append(
            StageCost(
                forward_s=slower * math.fsum(layer.forward_s for layer in own) + action_s,
                input_s=backward_s - weight_s + action_s,
                weight_s=weight_s,
                output_bytes=int(sum(profile.layers[profile.place(name)].activation_bytes for name in crossing)),
            )
        )
    return found
