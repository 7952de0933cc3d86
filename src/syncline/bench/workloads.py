"""The old place of `syncline.workloads`: importing from here still works, with a `DeprecationWarning`."""

from __future__ import annotations

import warnings
from typing import Any

import syncline.workloads as moved


def __getattr__(name: str) -> Any:
    value = getattr(moved, name)
    warnings.warn(f"syncline.bench.workloads.{name} is now syncline.workloads.{name}", DeprecationWarning, stacklevel=2)
    return value
