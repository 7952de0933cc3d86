"""Fits the few efficiencies of a device and its network to measured steps, and says how far predictions were off.

The parameters are physical and few, whatever the number of rows:

    matrix_efficiency, half_flops, memory_efficiency                          of the device
    link_efficiency, network_efficiency, crossing_efficiency                  of the network

Small models on one host determine launch_s, large ones on many hosts the others: `names` says which are fitted.

The fit minimises Σ min(|ln(predicted / measured)|, 0.3): a bad run counts as much as any other row that is 35 % off, so
it does not move the fit. The search is a deterministic pattern search.

An interval is made of the residuals of rows that were not in the fit. Rows of one source, or of one model, resemble
each other, so the quantiles of all rows are too narrow for a new group. They are moved away from the median until 80 %
of all rows lie inside the interval that the other groups give:

    bounds(w) = median + w · (quantile − median)          quantiles 10 % and 90 %
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from syncline.errors import SpecError
from syncline.planner.cluster import Cluster
from syncline.planner.devices import Device
from syncline.planner.layer_costs import DescribedCosts
from syncline.planner.models import build_model
from syncline.planner.plans import TrainingPlan
from syncline.planner.prediction import StepPredictor

__all__ = [
    "A100_TRANSFORMERS",
    "A100_TRANSFORMERS_ONE_HOST",
    "DESCRIBED",
    "LAB",
    "MEASURED",
    "DeviceCalibration",
    "MeasuredStep",
    "apply_efficiencies",
    "calibrate",
    "calibration_for",
    "held_out_coverage",
    "interval_factors",
    "predict_steps",
    "residual_factors",
]

PARAMETERS = (
    "matrix_efficiency",
    "half_flops",
    "memory_efficiency",
    "link_efficiency",
    "network_efficiency",
    "crossing_efficiency",
)
SHARES = frozenset(name for name in PARAMETERS if name.endswith("efficiency"))
MAX_RESIDUAL = 0.3
"""A row that is further off counts no more than this."""
FIRST_STEP, LAST_STEP = 0.4, 0.02
"""Changes of a parameter, in logarithms, with which the search begins and ends."""
LOW_QUANTILE, HIGH_QUANTILE = 0.1, 0.9
COVERAGE = 0.8
"""The share of rows that an interval covers."""
WIDENING_STEP, MAX_WIDENING_STEPS = 0.05, 200


@dataclass(frozen=True)
class MeasuredStep:
    """A published or measured step."""

    model: str
    hosts: int
    plan: TrainingPlan
    seconds: float


@dataclass(frozen=True)
class DeviceCalibration:
    """Efficiencies by name, the bounds of the interval as factors, and where they are from."""

    efficiencies: tuple[tuple[str, float], ...]
    factors: tuple[float, float]
    rows: int
    source: str

    def apply(self, cluster: Cluster) -> Cluster:
        """The cluster with these efficiencies."""
        return apply_efficiencies(cluster, dict(self.efficiencies))


def apply_efficiencies(cluster: Cluster, values: dict[str, float]) -> Cluster:
    """The cluster with other efficiencies of its device and levels."""
    device: Device = replace(cluster.device, **values)  # type: ignore[arg-type]
    inside = replace(cluster.levels[0], efficiency=device.link_efficiency)
    outside = [
        replace(level, efficiency=device.network_efficiency, crossing_efficiency=device.crossing_efficiency)
        for level in cluster.levels[1:]
    ]
    return replace(cluster, device=device, levels=(inside, *outside))


def predict_steps(
    cluster: Callable[[int], Cluster], steps: Sequence[MeasuredStep], values: dict[str, float] | None = None
) -> list[float]:
    """Predicted seconds of each step. `cluster` gives the cluster of a number of hosts."""
    predictors: dict[tuple[str, int], StepPredictor] = {}
    found = []
    for step in steps:
        key = (step.model, step.hosts)
        if key not in predictors:
            here = cluster(step.hosts)
            here = apply_efficiencies(here, values) if values else here
            predictors[key] = StepPredictor(DescribedCosts(build_model(step.model), here.device), here)
        found.append(predictors[key].predict(step.plan).seconds)
    return found


def calibrate(
    cluster: Callable[[int], Cluster],
    steps: Sequence[MeasuredStep],
    *,
    names: Sequence[str] = PARAMETERS,
    start: Mapping[str, float] | None = None,
    source: str = "",
) -> DeviceCalibration:
    """Fit the efficiencies `names` to measured steps. `start` has other values than the device's to begin with.

    Raises:
        SpecError: if there are fewer steps than parameters.
    """
    if len(steps) < len(names):
        raise SpecError(f"{len(steps)} measured steps cannot determine {len(names)} efficiencies")
    device = cluster(steps[0].hosts).device
    values = {name: float(getattr(device, name)) for name in names} | dict(start or {})

    def loss(candidate: dict[str, float]) -> float:
        residuals = _residuals(predict_steps(cluster, steps, candidate), steps)
        return math.fsum(min(abs(each), MAX_RESIDUAL) for each in residuals)

    best, step = loss(values), FIRST_STEP
    while step > LAST_STEP:  # a step that finds no better value is halved
        moved = False
        for name in names:
            for factor in (math.exp(step), math.exp(-step)):
                value = values[name] * factor
                candidate = {**values, name: min(1.0, value) if name in SHARES else value}
                if candidate[name] != values[name] and (found := loss(candidate)) < best - 1e-9:
                    best, values, moved = found, candidate, True
                    break
        step = step if moved else step / 2
    residuals = _residuals(predict_steps(cluster, steps, values), steps)
    return DeviceCalibration(tuple(values.items()), residual_factors(residuals), len(steps), source)


def interval_factors(groups: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """The bounds of the 80 % interval as multiples of a prediction, from ln(measured / predicted) by group.

    >>> low, high = interval_factors({"one": [0.0, 0.1, 0.2], "two": [-0.2, -0.1, 0.0]})
    >>> round(low, 2), round(high, 2)
    (0.57, 1.76)
    """
    low, high = _log_bounds(_joined(groups), _widening(groups))
    return math.exp(low), math.exp(high)


def held_out_coverage(groups: Mapping[str, Sequence[float]]) -> dict[str, tuple[int, int]]:
    """For each group: how many of its rows lie inside the interval that the other groups give, and how many it has."""
    found = {}
    for name, residuals in groups.items():
        others = _without(groups, name)
        found[name] = _inside(residuals, _log_bounds(_joined(others), _widening(others))), len(residuals)
    return found


def _widening(groups: Mapping[str, Sequence[float]]) -> float:
    """The smallest w with which the intervals of the other groups have 80 % of all rows inside."""
    if len(groups) < 2:
        return 1.0
    total = sum(map(len, groups.values()))
    for number in range(MAX_WIDENING_STEPS):
        widening = 1.0 + WIDENING_STEP * number
        inside = sum(
            _inside(residuals, _log_bounds(_joined(_without(groups, name)), widening))
            for name, residuals in groups.items()
        )
        if inside >= COVERAGE * total:
            return widening
    raise SpecError(f"the residuals of {', '.join(groups)} have nothing in common: no interval covers them")


def _without(groups: Mapping[str, Sequence[float]], name: str) -> dict[str, Sequence[float]]:
    return {other: residuals for other, residuals in groups.items() if other != name}


def _joined(groups: Mapping[str, Sequence[float]]) -> list[float]:
    return sorted(each for residuals in groups.values() for each in residuals)


def _log_bounds(ordered: Sequence[float], widening: float) -> tuple[float, float]:
    middle = _quantile(ordered, 0.5)
    low, high = _quantile(ordered, LOW_QUANTILE), _quantile(ordered, HIGH_QUANTILE)
    return middle + widening * (low - middle), middle + widening * (high - middle)


def _inside(residuals: Sequence[float], bounds: tuple[float, float]) -> int:
    return sum(bounds[0] <= each <= bounds[1] for each in residuals)


def _residuals(predicted: Sequence[float], steps: Sequence[MeasuredStep]) -> list[float]:
    """ln(measured / predicted) of each step."""
    return [math.log(step.seconds / seconds) for seconds, step in zip(predicted, steps, strict=True)]


def residual_factors(residuals: Sequence[float]) -> tuple[float, float]:
    """The bounds of the 80 % interval as multiples of a prediction: quantiles of measured / predicted.

    >>> low, high = residual_factors([-0.1, -0.05, 0.0, 0.05, 0.1])
    >>> round(low, 3), round(high, 3)
    (0.923, 1.083)
    """
    ordered = sorted(residuals)
    return math.exp(_quantile(ordered, LOW_QUANTILE)), math.exp(_quantile(ordered, HIGH_QUANTILE))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile with linear interpolation."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


A100_TRANSFORMERS = DeviceCalibration(
    efficiencies=(
        ("matrix_efficiency", 0.816),
        ("half_flops", 1.241e10),
        ("memory_efficiency", 0.883),
        ("launch_s", 3.32e-5),
        ("link_efficiency", 0.883),
        ("network_efficiency", 0.951),
        ("crossing_efficiency", 0.493),
    ),
    factors=(0.919, 1.09),
    rows=62,
    source="residuals of 62 published steps of GPT on 64 to 512 A100, each model size predicted from the other two",
)
"""Fitted to vTrain's rows of 3.6B and 175B parameters; launch_s to every eighth of its rows on one host."""
A100_TRANSFORMERS_ONE_HOST = replace(
    A100_TRANSFORMERS,
    factors=(0.872, 1.144),
    rows=840,
    source="residuals of 840 published steps of small GPTs on 1 to 8 A100 of one host",
)
"""The same efficiencies. The host's time to start kernels counts more with few devices and small models."""
DESCRIBED = DeviceCalibration(
    efficiencies=(),
    factors=(0.73, 1.96),
    rows=25,
    source="residuals of 25 published steps on A100, H100, V100, P100 and K80, predicted from descriptions alone",
)
"""For devices and models without a calibration: the datasheet, and the same efficiencies for all devices."""
MEASURED = DeviceCalibration(
    efficiencies=(),
    factors=(0.945, 1.084),
    rows=27,
    source="residuals of 27 published scaling rows, predicted from the computation measured at the smallest scale",
)
"""For measured profiles: only communication and waiting are predicted."""

LAB = DeviceCalibration(
    efficiencies=(),
    factors=(0.93, 1.19),
    rows=54,
    source="residuals of 54 runs on emulated hosts that share the processors of one machine",
)
"""For measured profiles on measured machines."""


def calibration_for(cluster: Cluster, transformer: bool | None) -> DeviceCalibration:
    """The calibration of a cluster. `transformer`: whether the described model is one; None: a measured profile."""
    if transformer is None:
        return MEASURED
    if not transformer or not cluster.device.name.startswith("a100"):
        return DESCRIBED
    return A100_TRANSFORMERS if cluster.hosts > 1 else A100_TRANSFORMERS_ONE_HOST
