"""Searches the plans that a model and a cluster allow, and ranks them by predicted throughput.

```text
plans = { pipeline × tensor × data = ranks } × micro-batch × schedule × recomputation × codec
```

Memory is a constraint. Recomputation is tried in the order none, selective, full: the first that fits is taken, because
recomputation only adds time. Plans whose predictions differ by less than the planner can tell apart are ordered by
memory: a plan close to the limit is the one that fails, or becomes slow when the allocator has to search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from syncline.errors import SpecError
from syncline.planner.cluster import Cluster
from syncline.planner.layer_costs import ModelCosts
from syncline.planner.plans import RECOMPUTATIONS, TrainingPlan, divisors, read_strategy
from syncline.planner.prediction import PredictedStep, StepPredictor
from syncline.planner.quantities import format_size

__all__ = ["PlanSearch", "RankedPlans", "SearchSettings"]

USABLE_MEMORY = 0.92
"""The share of a device's memory that a plan may use. The rest is for the allocator and the libraries."""
INDISTINCT = 0.02
"""Relative difference of predictions that the planner cannot tell apart: its median error on published rows."""
MAX_MICRO_BATCH = 64
INTERLEAVED_CHUNKS = (2, 4)


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What is searched."""

    batch: int
    """Samples of a step, of all ranks together."""
    optimizer: str = "adam"
    strategies: tuple[str, ...] = ("allreduce",)
    codecs: tuple[str, ...] = ()
    """Codecs to try beside none."""
    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zero_bubble")
    base: TrainingPlan = field(default_factory=TrainingPlan)
    """The fields that are not searched."""

    def __post_init__(self) -> None:
        for strategy in self.strategies:
            read_strategy(strategy)
        if type(self.batch) is not int or self.batch < 1:
            raise SpecError(f"the batch is {self.batch!r}; it must be a whole number, at least 1")


@dataclass(frozen=True)
class RankedPlans:
    """The plans that fit, the best first."""

    plans: tuple[PredictedStep, ...]
    tried: int
    refused: int
    """Plans that need too much memory."""
    unpredicted: int = 0
    """Plans without a formula; see `StepPredictor.can_predict`."""

    @property
    def best(self) -> PredictedStep:
        """The first plan."""
        return self.plans[0]


class PlanSearch:
    """Searches plans of one model on one cluster.

    >>> from syncline.planner.cluster import read_cluster
    >>> from syncline.planner.layer_costs import DescribedCosts
    >>> from syncline.planner.models import build_model
    >>> cluster = read_cluster("1 hosts x 4 a100")
    >>> predictor = StepPredictor(DescribedCosts(build_model("vgg(16)"), cluster.device), cluster)
    >>> print(PlanSearch(predictor, SearchSettings(batch=256, optimizer="sgd")).run().best.plan)
    allreduce on 4, micro-batch 32 x 2
    """

    def __init__(self, predictor: StepPredictor, settings: SearchSettings) -> None:
        self.predictor, self.settings = predictor, settings
        self.cluster: Cluster = predictor.cluster
        self.costs: ModelCosts = predictor.costs
        self.limit = USABLE_MEMORY * self.cluster.device.memory_bytes

    def run(self) -> RankedPlans:
        """Predict all plans and rank them.

        Raises:
            SpecError: if the batch cannot be divided, or no plan fits the memory. It says by how much.
        """
        found: list[PredictedStep] = []
        tried = refused = unpredicted = 0
        smallest: tuple[float, TrainingPlan] | None = None
        for plan in self._plans():
            fitting, least = self._fitting(plan)
            tried += 1
            if smallest is None or least < smallest[0]:
                smallest = least, plan
            if fitting is None:
                refused += 1
            elif self.predictor.can_predict(fitting):
                found.append(self.predictor.predict(fitting))
            else:
                unpredicted += 1
        if smallest is None:
            raise SpecError(self._indivisible())
        if not found:
            raise SpecError(self._too_large(*smallest))
        return RankedPlans(tuple(self._ordered(found)), tried, refused, unpredicted)

    def _plans(self) -> Iterator[TrainingPlan]:
        """All plans that use every device, without recomputation."""
        ranks, batch, base = self.cluster.size, self.settings.batch, self.settings.base
        for tensor in divisors(ranks):
            if self.costs.tensor_limit % tensor:
                continue
            for pipeline in divisors(ranks // tensor):
                data = ranks // tensor // pipeline
                if pipeline > self.costs.cuts or batch % data:
                    continue
                for micro_batch in divisors(batch // data):
                    if micro_batch < self.costs.smallest_micro_batch:
                        continue
                    if (
                        micro_batch > max(MAX_MICRO_BATCH, 2 * self.costs.smallest_micro_batch)
                        and micro_batch != batch // data
                    ):
                        continue
                    common = replace(
                        base,
                        tensor=tensor,
                        pipeline=pipeline,
                        data=data,
                        micro_batch=micro_batch,
                        micro_batches=batch // data // micro_batch,
                        optimizer=self.settings.optimizer,
                    )
                    yield from self._variants(common)

    def _variants(self, plan: TrainingPlan) -> Iterator[TrainingPlan]:
        """Schedules of a pipeline, strategies and codecs of data parallelism."""
        for scheduled in self._schedules(plan):
            for strategy in self.settings.strategies if plan.data > 1 else ("allreduce",):
                chosen = replace(scheduled, **read_strategy(strategy))
                yield chosen
                if plan.data > 1 and chosen.strategy == "allreduce":
                    for codec in self.settings.codecs:
                        yield replace(chosen, codec=codec)

    def _schedules(self, plan: TrainingPlan) -> Iterator[TrainingPlan]:
        if plan.pipeline == 1:
            yield plan
            return
        for schedule in self.settings.schedules:
            if schedule != "interleaved":
                yield replace(plan, schedule=schedule)
                continue
            for chunks in INTERLEAVED_CHUNKS:
                if plan.pipeline * chunks <= self.costs.cuts and plan.micro_batches % plan.pipeline == 0:
                    yield replace(plan, schedule=schedule, chunks=chunks)

    def _fitting(self, plan: TrainingPlan) -> tuple[TrainingPlan | None, float]:
        """The plan with the least recomputation that fits, and the smallest memory that was found."""
        least = math.inf
        for recomputation in RECOMPUTATIONS:
            candidate = replace(plan, recomputation=recomputation)
            total = self.predictor.memory(candidate).total
            least = min(least, total)
            if total <= self.limit:
                return candidate, least
        return None, least

    def _ordered(self, found: Sequence[PredictedStep]) -> list[PredictedStep]:
        """By seconds. Of those that cannot be told apart from the fastest, the one with the least memory is first.

        A codec changes the result of training, so it must gain more than that.
        """
        ordered = sorted(found, key=lambda each: (each.seconds, each.memory.total, str(each.plan)))
        limit = ordered[0].seconds * (1 + INDISTINCT)
        equal = [each for each in ordered if each.seconds <= limit]
        equal.sort(key=lambda each: (each.plan.codec is not None, each.memory.total, each.seconds))
        return [*equal, *ordered[len(equal) :]]

    def _indivisible(self) -> str:
        ranks, batch, smallest = self.cluster.size, self.settings.batch, self.costs.smallest_micro_batch
        if smallest > 1:
            return (
                f"a batch of {batch} on {ranks} ranks has no micro-batch of {smallest} samples or more, and the "
                f"profile says nothing about smaller ones: use a batch of {ranks * smallest}, or profile smaller ones"
            )
        return (
            f"a batch of {batch} cannot be divided among {ranks} ranks: data ranks must divide the batch, tensor ranks "
            f"the {self.costs.tensor_limit} attention heads, and there are at most {self.costs.cuts} pipeline stages; "
            f"a batch of {math.ceil(batch / ranks) * ranks} can"
        )

    def _too_large(self, least: float, plan: TrainingPlan) -> str:
        device = self.cluster.device
        full = self.predictor.memory(replace(plan, recomputation="full"))
        kind, size = full.by_kind()[0]
        return (
            f"no plan fits: the smallest, {replace(plan, recomputation='full')}, needs {format_size(least)} on a "
            f"device with {format_size(device.memory_bytes)}, of which {format_size(self.limit)} can be used: "
            f"{format_size(least - self.limit)} too much; most of it is {kind} ({format_size(size)})"
        )
