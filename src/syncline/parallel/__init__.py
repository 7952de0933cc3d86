"""Model parallelism: a model is split over workers.

`sl.pipeline` splits it between layers. `sl.distribute(…, parallel=sl.parallel.tensor(plan, size=2))` divides layers.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from syncline.parallel.division_specs import ExpertParallel as experts  # noqa: N813
    from syncline.parallel.division_specs import SpatialParallel as spatial  # noqa: N813
    from syncline.parallel.division_specs import TensorParallel as tensor  # noqa: N813
    from syncline.parallel.division_specs import WeirdTrick as weird_trick  # noqa: N813
    from syncline.parallel.expert_layers import Experts, expert_loss
    from syncline.parallel.tensor_layers.heads import Heads
    from syncline.parallel.tensor_layers.plan import TensorPlan
    from syncline.parallel.tensor_layers.vocabulary import cross_entropy

__all__ = [
    "Experts",
    "Heads",
    "TensorPlan",
    "cross_entropy",
    "expert_loss",
    "experts",
    "spatial",
    "tensor",
    "weird_trick",
]

_PLACES = {
    "Experts": ("expert_layers", "Experts"),
    "Heads": ("tensor_layers.heads", "Heads"),
    "TensorPlan": ("tensor_layers.plan", "TensorPlan"),
    "cross_entropy": ("tensor_layers.vocabulary", "cross_entropy"),
    "expert_loss": ("expert_layers", "expert_loss"),
    "experts": ("division_specs", "ExpertParallel"),
    "spatial": ("division_specs", "SpatialParallel"),
    "tensor": ("division_specs", "TensorParallel"),
    "weird_trick": ("division_specs", "WeirdTrick"),
}
"""Where each public name is defined, and its name there."""


def __getattr__(name: str) -> _Any:
    """Import a name when it is first used."""
    if name not in _PLACES:
        raise AttributeError(f"module 'syncline.parallel' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return globals().setdefault(name, getattr(_import_module(f"syncline.parallel.{module}"), attribute))


def __dir__() -> list[str]:
    return sorted(__all__)
