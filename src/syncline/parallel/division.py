"""How a layer is divided over a team of workers: the contract, and the class of a module that is divided.

The module stays the object that the user has made, with the same parameters and names. While it is divided, each of its
tensors holds this worker's share, and its class is a subclass that computes with the others:

```text
nn.Linear  weight (8, 4)                          class Linear: forward
   │ divide
   ▼
worker 0   weight (4, 4), rows 0–3                class ColumnLinear(Linear): forward with the team
worker 1   weight (4, 4), rows 4–7
```
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from syncline.model_parts import DimensionSlice
from syncline.parallel.team import Team

__all__ = ["LayerDivision", "Share", "divide_class", "restore_class"]


@dataclass(frozen=True)
class Share:
    """What one worker has of a layer. Names are those of the layer's own state dict, such as "weight".

    Tensors that are not named are whole and the same on every worker of the team.
    """

    slices: Mapping[str, DimensionSlice] = field(default_factory=dict)
    """The tensors of which each worker has a slice."""
    absent: frozenset[str] = frozenset()
    """The tensors that only other workers have, such as the weights of their experts."""


class LayerDivision(ABC):
    """How one module is divided. It changes nothing until `attach`."""

    axis: ClassVar[str] = "tensor"
    """The axis of the mesh. "tensor": the workers of a team read the same data. "shared": they read different data, so
    a gradient here is the sum over all of them, and is divided by their number."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module

    @property
    def partial(self) -> frozenset[str]:
        """Parameters that every worker has as a whole, and whose gradient is the sum over the team: norms that see a
        part of the sequence."""
        return frozenset()

    @abstractmethod
    def check(self, size: int) -> None:
        """Refuse, with names and numbers, a module that cannot be divided over a team of `size`. Called on the whole
        module, before anything is sent."""

    @abstractmethod
    def share(self, rank: int, size: int) -> Share:
        """What a worker has of it, by its rank in the team. Called on the whole module."""

    @abstractmethod
    def attach(self, team: Team) -> None:
        """Make the module compute with the team. Its tensors hold this worker's share when its forward is called.

        Where `team.divided` is False its tensors are whole, and it computes as before.
        """

    @abstractmethod
    def detach(self) -> None:
        """Make it the module that it was."""


def divide_class(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Let a module be an instance of `mixin` too, whose methods come first, and set attributes on it.

    >>> class Doubled:
    ...     def forward(self, x):
    ...         return 2 * super().forward(x)
    >>> layer = nn.Identity()
    >>> divide_class(layer, Doubled)
    >>> layer(3), type(layer).__name__, isinstance(layer, nn.Identity)
    (6, 'DoubledIdentity', True)
    >>> restore_class(layer)
    >>> layer(3), type(layer) is nn.Identity
    (3, True)
    """
    before = type(module)
    module.__class__ = type(f"{mixin.__name__}{before.__name__}", (mixin, before), {"_before": before})
    for name, value in attributes.items():
        object.__setattr__(module, name, value)


def restore_class(module: nn.Module, *attributes: str) -> None:
    """Undo `divide_class`, and remove these attributes."""
    module.__class__ = vars(type(module))["_before"]
    for name in attributes:
        vars(module).pop(name, None)
