"""Model parallelism: a model is split over workers."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from syncline.parallel.tensor_layers.heads import Heads
    from syncline.parallel.tensor_layers.plan import TensorPlan
    from syncline.parallel.tensor_layers.vocabulary import cross_entropy

__all__ = ["Heads", "TensorPlan", "cross_entropy"]

_MODULES = {
    "tensor_layers.heads": ("Heads",),
    "tensor_layers.plan": ("TensorPlan",),
    "tensor_layers.vocabulary": ("cross_entropy",),
}
"""Where each public name is defined."""


def __getattr__(name: str) -> _Any:
    """Import a name when it is first used."""
    for home, names in _MODULES.items():
        if name in names:
            return globals().setdefault(name, getattr(_import_module(f"syncline.parallel.{home}"), name))
    raise AttributeError(f"module 'syncline.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
