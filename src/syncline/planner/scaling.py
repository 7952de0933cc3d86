"""The scaling curve: the predicted throughput of the best plan on 1, 2, 4 … devices of a cluster.

```text
devices of one host first, then whole hosts: 1 2 4 8 | 16 32 64 128
efficiency(n) = (throughput(n) / n) / (throughput(first) / first)
```

With a given batch all sizes share it (strong scaling). Otherwise each rank keeps its samples (weak scaling). The first
size is the smallest on which a plan fits the memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from syncline.errors import SpecError
from syncline.planner.cluster import Cluster
from syncline.planner.prediction import PredictedStep, StepPredictor
from syncline.planner.search import PlanSearch, SearchSettings

__all__ = ["ScalingCurve", "ScalingSize", "part_of_cluster", "scaling_curve"]


@dataclass(frozen=True)
class ScalingSize:
    """The best plan on one number of ranks."""

    ranks: int
    best: PredictedStep
    efficiency: float
    """Throughput of a rank ÷ that of a rank on the smallest size."""

    @property
    def throughput_interval(self) -> tuple[float, float]:
        """Samples per second between which 80 % of such steps lie."""
        low, high = self.best.interval
        return self.best.plan.batch / high, self.best.plan.batch / low

    @property
    def efficiency_interval(self) -> tuple[float, float]:
        """The same interval, as efficiencies: the throughput of the smallest size counts as exact."""
        low, high = self.best.factors
        return self.efficiency / high, self.efficiency / low


@dataclass(frozen=True)
class ScalingCurve:
    """The sizes that have a plan, ascending, and the reasons why others have none."""

    sizes: tuple[ScalingSize, ...]
    refused: tuple[tuple[int, str], ...]
    """Numbers of ranks without a plan, and why."""
    strong: bool
    """True if all sizes share the batch, False if each rank keeps its samples."""


def scaling_curve(predictor: StepPredictor, settings: SearchSettings, *, strong: bool) -> ScalingCurve:
    """Search the best plan on each part of the cluster.

    >>> from syncline.planner.cluster import read_cluster
    >>> from syncline.planner.layer_costs import DescribedCosts
    >>> from syncline.planner.models import build_model
    >>> cluster = read_cluster("2 hosts x 4 a100, 100gbit")
    >>> predictor = StepPredictor(DescribedCosts(build_model("resnet(50)"), cluster.device), cluster)
    >>> curve = scaling_curve(predictor, SearchSettings(batch=512, optimizer="sgd"), strong=False)
    >>> [(size.ranks, size.best.plan.batch) for size in curve.sizes]
    [(1, 64), (2, 128), (4, 256), (8, 512)]
    """
    whole = predictor.cluster
    found: list[PredictedStep] = []
    refused = []
    for ranks in _sizes(whole):
        batch = settings.batch if strong else max(1, round(settings.batch * ranks / whole.size))
        part = predictor.on(part_of_cluster(whole, ranks))
        try:
            found.append(PlanSearch(part, replace(settings, batch=batch)).run().best)
        except SpecError as error:
            refused.append((ranks, str(error)))
    return ScalingCurve(tuple(_with_efficiency(found)), tuple(refused), strong)


def _with_efficiency(found: Iterable[PredictedStep]) -> Iterable[ScalingSize]:
    base: float | None = None
    for best in found:
        rate = best.throughput / best.plan.ranks
        base = base or rate
        yield ScalingSize(best.plan.ranks, best, rate / base)


def _sizes(cluster: Cluster) -> list[int]:
    """Powers of two of the members of each level, from the inside to the outside, and each level's own number.

    >>> from syncline.planner.cluster import read_cluster
    >>> _sizes(read_cluster("6 hosts x 4 a100, 100gbit"))
    [1, 2, 4, 8, 16, 24]
    """
    found, below = {1}, 1
    for level in cluster.levels:
        members = 1
        while members < level.members:
            found.add(below * members)
            members *= 2
        below *= level.members
        found.add(below)
    return sorted(found)


def part_of_cluster(cluster: Cluster, ranks: int) -> Cluster:
    """The first `ranks` devices of a cluster: some devices of one host, or some whole hosts.

    >>> from syncline.planner.cluster import read_cluster
    >>> part_of_cluster(read_cluster("6 hosts x 4 a100, 100gbit"), 8).describe().partition(";")[0]
    '2 hosts x 4 a100 (8 devices'
    """
    levels, left = [], ranks
    for level in cluster.levels:
        members = min(level.members, left)
        if left % members:
            raise SpecError(f"{ranks} ranks are not a whole number of {level.name}s of {level.members}")
        levels.append(replace(level, members=members))
        left //= members
    slow = {rank: factor for rank, factor in cluster.slow.items() if rank < ranks}
    return replace(cluster, levels=tuple(levels), slow=slow)
