"""The old place of `syncline.workloads.base`: importing from here still works, with a `DeprecationWarning`."""

from __future__ import annotations

import warnings
from typing import Any

import syncline.workloads.base as moved


def __getattr__(name: str) -> Any:
    value = getattr(moved, name)
    warnings.warn(
        f"syncline.training.workload.{name} is now syncline.workloads.base.{name}", DeprecationWarning, stacklevel=2
    )
    return value
