"""The content of `summary.json`: the result of a run, for scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline.reduction import Stats
from syncline.training.checkpoint.folder import entries
from syncline.training.folder import RunFolder
from syncline.training.outcome import Outcome

__all__ = ["json_number", "summarize"]


def summarize(
    outcome: Outcome,
    place: RunFolder,
    described: Mapping[str, Any],
    stats: Stats,
    lost: Mapping[int, str],
    error: BaseException | None = None,
) -> dict[str, Any]:
    """The whole document; `described` is that of `config.json`. With `error`, `outcome` is the state at the error."""
    target = described["target"]
    aborted = error is not None or outcome.stopped_by == "signal"
    return {
        "status": "aborted" if aborted else "success",
        "stopped_by": None if error is not None else outcome.stopped_by,
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "lost": {str(rank): reason for rank, reason in lost.items()},
        "workload": described["workload"],
        "workers": described["workers"],
        "seed": described["seed"],
        **{key: described["run"].get(key) for key in ("strategy", "codec", "collective")},
        "metric": outcome.metric,
        "test": json_number(outcome.test),
        "validation": json_number(outcome.validation),
        "target": target,
        "target_reached": None if target is None else outcome.time_to_target is not None,
        "time_to_target_seconds": outcome.time_to_target,
        "epochs": outcome.epochs,
        "steps": outcome.steps,
        "samples": outcome.samples,
        "training_seconds": outcome.seconds,
        "elapsed_seconds": outcome.elapsed,
        "bytes_logical": stats.bytes_logical,
        "bytes_wire": stats.bytes_wire,
        "folder": str(place.path.absolute()),
        "log": str(place.log.absolute()),
        "checkpoint": _newest(place.checkpoints),
        "code_version": described["code_version"],
    }


def json_number(value: Any) -> Any:
    """A value that JSON can hold: NaN and infinity become strings.

    >>> json_number(math.nan), json_number(0.5)
    ('nan', 0.5)
    """
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _newest(folder: Path) -> str | None:
    found = entries(folder)
    return str((folder / found[-1].name).absolute()) if found else None
