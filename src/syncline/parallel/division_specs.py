"""The arguments of `parallel=`: which layers are divided, how, and over how many workers.

```text
sl.parallel.tensor(plan, size=2)     layers, over workers that read the same data
sl.parallel.spatial("features", 2)   images, over workers that read the same data
sl.parallel.experts(4)               experts, over workers that read different data
sl.parallel.weird_trick("b")         dense layers of a CNN, over workers that read different data
```
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from syncline.errors import SpecError
from syncline.parallel.division import LayerDivision
from syncline.specs import Registry, factors

__all__ = [
    "DIVISIONS",
    "DivisionSpec",
    "ExpertParallel",
    "SpatialParallel",
    "TensorParallel",
    "WeirdTrick",
    "read_divisions",
]


class DivisionSpec(ABC):
    """Which layers are divided, and over how many workers."""

    axis: ClassVar[str]
    """The axis of the mesh: "tensor" or "shared". See `LayerDivision.axis`."""

    @abstractmethod
    def workers(self, model: nn.Module, available: int) -> int:
        """The number of workers along the axis. `available`: the number that the other axes leave."""

    @abstractmethod
    def divisions(self, model: nn.Module, size: int) -> list[LayerDivision]:
        """The divisions of the layers, over teams of `size`. Refuses what cannot be divided."""


@dataclass(frozen=True)
class TensorParallel(DivisionSpec):
    """Layers divided over `size` workers that read the same data, as in Megatron-LM. The plan has a role for each
    pattern of module names; None: that of the model, see `default_plan`.

    >>> TensorParallel({"blocks.*.up": "columns", "blocks.*.down": "rows"}, size=2).size
    2
    """

    plan: Mapping[str, Any] | None = None
    size: int = 2

    axis: ClassVar[str] = "tensor"

    def __post_init__(self) -> None:
        if isinstance(self.plan, int) and not isinstance(self.plan, bool):  # "tensor(2)" in a text
            object.__setattr__(self, "size", self.plan)
            object.__setattr__(self, "plan", None)
        if self.plan is not None and not isinstance(self.plan, Mapping):
            raise SpecError(
                f"tensor({self.plan!r}): the plan is a dict of patterns and roles, such as "
                '{"blocks.*.up": "columns"}; the number of workers is size='
            )
        _check_size("tensor", self.size)

    def workers(self, model: nn.Module, available: int) -> int:
        return self.size

    def divisions(self, model: nn.Module, size: int) -> list[LayerDivision]:
        from syncline.parallel.tensor_layers.plan import default_plan, plan_divisions

        plan = default_plan(model) if self.plan is None else self.plan
        return plan_divisions(model, plan, size)


@dataclass(frozen=True)
class SpatialParallel(DivisionSpec):
    """Images divided along one axis, over `size` workers that read the same data. `regions` names the modules that
    work on strips of images.

    >>> SpatialParallel("features", size=2).regions
    ('features',)
    """

    regions: str | Sequence[str]
    size: int = 2
    along: Literal["height", "width"] = "height"

    axis: ClassVar[str] = "tensor"

    def __post_init__(self) -> None:
        names = (self.regions,) if isinstance(self.regions, str) else tuple(self.regions)
        object.__setattr__(self, "regions", names)
        _check_size("spatial", self.size)
        if self.along not in ("height", "width"):
            raise SpecError(f"spatial(along={self.along!r}): it must be 'height' or 'width'")

    def workers(self, model: nn.Module, available: int) -> int:
        return self.size

    def divisions(self, model: nn.Module, size: int) -> list[LayerDivision]:
        from syncline.parallel.spatial_layers import spatial_divisions

        return spatial_divisions(model, self.regions, self.along, size)


@dataclass(frozen=True)
class ExpertParallel(DivisionSpec):
    """The experts of every `Experts` module, divided over `size` workers. None: over as many as possible."""

    size: int | None = None

    axis: ClassVar[str] = "shared"

    def __post_init__(self) -> None:
        if self.size is not None:
            _check_size("experts", self.size)

    def workers(self, model: nn.Module, available: int) -> int:
        from syncline.parallel.expert_layers.experts import find_experts

        counts = [each.count for _, each in find_experts(model)]
        if not counts:
            raise SpecError("experts(…) divides the experts of sl.parallel.Experts modules, and the model has none")
        return math.gcd(available, *counts) if self.size is None else self.size

    def divisions(self, model: nn.Module, size: int) -> list[LayerDivision]:
        from syncline.parallel.expert_layers.division import ExpertsDivision
        from syncline.parallel.expert_layers.experts import find_experts

        return [ExpertsDivision(name, each, model) for name, each in find_experts(model)]


@dataclass(frozen=True)
class WeirdTrick(DivisionSpec):
    """The dense layers of a CNN divided over `size` workers, by default all, that read different data.

    Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks".
    """

    scheme: Literal["a", "b", "c"] = "b"
    head: str | Sequence[str] | None = None
    """The module with the dense layers. None: it is found."""
    size: int | None = None

    axis: ClassVar[str] = "shared"

    def __post_init__(self) -> None:
        if self.scheme not in ("a", "b", "c"):
            raise SpecError(f"weird_trick({self.scheme!r}): the scheme must be 'a', 'b' or 'c'")
        if self.size is not None:
            _check_size("weird_trick", self.size)

    def workers(self, model: nn.Module, available: int) -> int:
        return available if self.size is None else self.size

    def divisions(self, model: nn.Module, size: int) -> list[LayerDivision]:
        from syncline.parallel.divided_head import weird_trick_divisions

        head = (self.head,) if isinstance(self.head, str) else self.head
        return list(weird_trick_divisions(model, head, self.scheme, size))


DIVISIONS = Registry[DivisionSpec]("way to divide layers")
for _name, _spec in (
    ("tensor", TensorParallel),
    ("spatial", SpatialParallel),
    ("experts", ExpertParallel),
    ("weird_trick", WeirdTrick),
):
    DIVISIONS.add(_name, _spec)


def read_divisions(parallel: str | DivisionSpec | Sequence[str | DivisionSpec]) -> list[DivisionSpec]:
    """Read the specs of divisions from a text, an object or a list of both.

    >>> read_divisions("tensor(2) x experts(4)")
    [TensorParallel(plan=None, size=2), ExpertParallel(size=4)]
    """
    found: list[DivisionSpec] = []
    for part in [parallel] if isinstance(parallel, (str, DivisionSpec)) else parallel:
        if not isinstance(part, (str, DivisionSpec)):
            raise SpecError(f"parallel={part!r}: a text, the result of sl.parallel.tensor(…), or a list of these")
        found += [part] if isinstance(part, DivisionSpec) else [DIVISIONS.build(each) for each in factors(part)]
    return found


def _check_size(name: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise SpecError(f"{name}(size={size!r}): it must be a whole number of workers, at least 1")
