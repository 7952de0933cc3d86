"""One-sided asynchronous SGD: receive buffers that other workers write, and the update that selects among them."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from syncline.strategies.onesided.strategy import OneSided

__all__ = ["OneSided"]


def __getattr__(name: str) -> Any:
    """The solvers were here before."""
    solvers = importlib.import_module("syncline.solvers")
    if name not in solvers.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} is now in syncline.solvers", DeprecationWarning, stacklevel=2)
    return getattr(solvers, name)
