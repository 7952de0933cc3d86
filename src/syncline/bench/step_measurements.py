"""The mean step of a run, from its log and configuration, for the sentences about what limits it.

The report reads a whole log, and the live page a growing one. Both have the same numbers: the phases of the latest
evaluation, or of `sl_ranks` before the first one; the computation of each rank; and what config.json says of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from syncline.bench.runlog import finite
from syncline.planner.measured_limits import PipelineShape, StepMeasurement

__all__ = ["measure_step", "rank_computation"]


def measure_step(
    config: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    steps: int,
    rank_compute_s: Sequence[float] = (),
    fixed_share: float | None = None,
) -> StepMeasurement | None:
    """The mean step until an evaluation. None if the log does not have its phases.

    Args:
        config: the content of config.json.
        evaluation: `phases` and, in newer logs, `communication` and `update`: seconds since the start.
        steps: until then.
        fixed_share: of the computation, what does not depend on the batch, by a profile.
    """
    phases = evaluation.get("phases")
    if not isinstance(phases, Mapping) or steps < 1:
        return None
    parts = {name: (finite(phases.get(name)) or 0.0) / steps for name in ("compute", "exposed", "codec", "data")}
    communication, update = (finite(evaluation.get(name)) for name in ("communication", "update"))
    workers = int(finite(config.get("workers")) or 1)
    pipeline = _pipeline(config)
    together = finite(config.get("samples_a_step")) or 0.0
    readers = pipeline[1] if pipeline is not None else workers
    return StepMeasurement(
        compute_s=max(0.0, parts["compute"]),
        exposed_s=max(0.0, parts["exposed"]),
        codec_s=parts["codec"],
        data_s=parts["data"],
        communication_s=None if communication is None else communication / steps,
        update_s=None if update is None else update / steps,
        rank_compute_s=tuple(rank_compute_s) if all(map(math.isfinite, rank_compute_s)) else (),
        synchronous=config.get("loose") is not True,
        workers=workers,
        servers=int(finite(_run(config).get("servers")) or 0),
        samples=together / max(1, readers),
        batch_fixed_share=fixed_share,
        optimizer=_optimizer(config.get("optimizer")),
        pipeline=None if pipeline is None else pipeline[0],
    )


def rank_computation(lines: Iterable[Any]) -> tuple[float, ...]:
    """The mean seconds of computation of each rank, from the values of `sl_ranks`; those of the latest number of ranks.

    >>> rank_computation([{"steps": 10, "compute": [1.0, 2.0]}, {"steps": 30, "compute": [1.0, 4.0]}])
    (1.0, 3.5)
    """
    sums: list[float] = []
    steps = 0.0
    for line in lines:
        try:
            count, seconds = float(line["steps"]), [float(each) for each in line["compute"]]
        except (KeyError, TypeError, ValueError):
            continue
        if len(seconds) != len(sums):
            sums, steps = [0.0] * len(seconds), 0.0
        sums = [total + count * each for total, each in zip(sums, seconds, strict=True)]
        steps += count
    return tuple(total / steps for total in sums) if steps > 0 else ()


def _run(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("run")
    return found if isinstance(found, Mapping) else {}


def _pipeline(config: Mapping[str, Any]) -> tuple[PipelineShape, int] | None:
    """The pipeline, and the workers of its first stage."""
    found: Any = _run(config).get("pipeline")
    try:
        replicas = [int(each) for each in found["replicas"]]
        shape = PipelineShape(str(found["schedule"]), len(replicas), int(found["micro_batches"]))
    except (KeyError, TypeError, ValueError):
        return None
    return (shape, max(1, replicas[0])) if replicas and shape.micro_batches > 0 else None


def _optimizer(found: Any) -> str:
    """The planner's name of an optimizer, or its class."""
    if not isinstance(found, Mapping):
        return ""
    name = str(found.get("class", "")).lower()
    if name == "sgd" and finite(found.get("momentum")):
        return "momentum"
    return {"adamw": "adam"}.get(name, name)
