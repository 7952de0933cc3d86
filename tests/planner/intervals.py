"""Residuals of all published rows by kind of prediction and by group, of which the planner's intervals are made.

A row's residual comes from a prediction that its group was not fitted to. Groups: the size of the model for
transformers on several hosts, the model on one host, and the source for the other rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from syncline.planner.calibration import (
    A100_TRANSFORMERS,
    A100_TRANSFORMERS_ONE_HOST,
    DESCRIBED,
    MEASURED,
    DeviceCalibration,
    held_out_coverage,
    predict_steps,
)
from tests.planner.published import SCALING_ROWS, vtrain_cluster, vtrain_single_host_steps, vtrain_steps

Groups = Mapping[str, Sequence[float]]
FITTED_EVERY = 8
"""Of the steps on one host, every eighth was used to fit launch_s."""
FITS_WITHOUT: dict[str, dict[str, float]] = {
    "3.6": {
        "matrix_efficiency": 0.8159,
        "half_flops": 248.7,
        "memory_efficiency": 1.0,
        "launch_s": 3.32e-5,
        "link_efficiency": 0.7596,
        "network_efficiency": 0.6886,
        "crossing_efficiency": 0.4692,
    },
    "18.4": dict(A100_TRANSFORMERS.efficiencies),
    "175": {
        "matrix_efficiency": 0.7761,
        "half_flops": 1.123e10,
        "memory_efficiency": 0.9277,
        "launch_s": 3.32e-5,
        "link_efficiency": 0.9048,
        "network_efficiency": 0.9512,
        "crossing_efficiency": 0.4692,
    },
}
"""The efficiencies that `calibrate` finds without one size of model."""


@dataclass(frozen=True)
class IntervalKind:
    """A kind of prediction, the groups of its residuals, and the interval that the planner gives for it."""

    question: str
    grouped_by: str
    groups: Groups
    calibration: DeviceCalibration

    @property
    def coverage(self) -> tuple[int, int]:
        """Rows inside the interval that the other groups give, and all rows."""
        found = held_out_coverage(self.groups).values()
        return sum(inside for inside, _ in found), sum(total for _, total in found)


def several_hosts() -> Groups:
    """Each size of model, predicted from the other two."""
    groups = {}
    for size, values in FITS_WITHOUT.items():
        steps = [step for name, step in vtrain_steps() if name == size]
        predicted = predict_steps(vtrain_cluster, steps, values)
        groups[f"{size}B"] = [math.log(step.seconds / seconds) for step, seconds in zip(steps, predicted, strict=True)]
    return groups


def one_host() -> Groups:
    """The steps that launch_s was not fitted to, by model."""
    steps = vtrain_single_host_steps()
    predicted = predict_steps(vtrain_cluster, steps, dict(A100_TRANSFORMERS.efficiencies))
    groups = defaultdict(list)
    for place, (step, seconds) in enumerate(zip(steps, predicted, strict=True)):
        if place % FITTED_EVERY:
            groups[step.model].append(math.log(step.seconds / seconds))
    return groups


def described() -> Groups:
    """The smallest scale of the data-parallel rows, from the description alone."""
    groups = defaultdict(list)
    for row in SCALING_ROWS:
        if not row.bad and "fp8" not in row.name:
            ranks, measured = row.scales[0]
            groups[row.source].append(math.log(row.throughput(ranks, 1.0) / measured))
    return groups


def scaled() -> Groups:
    """The largest scale of the data-parallel rows, from the computation at the smallest."""
    groups = defaultdict(list)
    for row in SCALING_ROWS:
        if not row.bad:
            groups[row.source].append(math.log(1 + row.error))
    return groups


@cache
def interval_kinds() -> tuple[IntervalKind, ...]:
    """All kinds."""
    return (
        IntervalKind(
            "a transformer on several hosts with A100", "size of the model", several_hosts(), A100_TRANSFORMERS
        ),
        IntervalKind("a transformer on one host with A100", "model", one_host(), A100_TRANSFORMERS_ONE_HOST),
        IntervalKind("another described model or device", "source", described(), DESCRIBED),
        IntervalKind("a measured profile", "source", scaled(), MEASURED),
    )
