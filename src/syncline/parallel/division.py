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

import copy
import copyreg
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from syncline.model_parts import DimensionSlice
from syncline.parallel.team import LayerTeam

__all__ = ["LayerDivision", "Share", "divide_class", "restore_class", "take_share"]


@dataclass(frozen=True)
class Share:
    """The tensors of a layer that one worker has. Names are those of the layer's own state dict, such as "weight".

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
    a gradient here is the sum over all of them, and the run divides it by their number.

    A parameter that every worker has as a whole must have the same gradient on all workers of a tensor team. A layer
    whose workers see different parts of the input uses `copy_to_team(parameter, team)` instead of the parameter.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module

    @abstractmethod
    def check(self, size: int) -> None:
        """Refuse, with names and numbers, a module that cannot be divided over a team of `size`. Called on the whole
        module, before anything is sent."""

    @abstractmethod
    def share(self, rank: int, size: int) -> Share:
        """The share of the worker with this rank in the team. Called on the whole module."""

    @abstractmethod
    def attach(self, team: LayerTeam) -> None:
        """Make the module compute with the team. Its tensors hold this worker's share when its forward is called.

        Where `team.divided` is False its tensors are whole, and it computes as before.
        """

    @abstractmethod
    def detach(self) -> None:
        """Make the module whole again, with its own class."""


def divide_class(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Make a module also an instance of `mixin`, whose methods take precedence, and set attributes on it.

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
    before: Any = type(module)
    module.__class__ = _divided_class(mixin, before)
    for name, value in attributes.items():
        object.__setattr__(module, name, value)


@cache
def _divided_class(mixin: type, before: Any) -> Any:
    """The same class for all layers of a kind, so that a compiled model compiles their forward once."""
    members: dict[str, Any] = {"_before": before, "__reduce_ex__": _reduce_whole}
    if not hasattr(before, "__deepcopy__"):
        members["__deepcopy__"] = _copy_divided
    return type(f"{mixin.__name__}{before.__name__}", (mixin, before), members)


def _copy_divided(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy that computes with the team too: `copy.deepcopy` would use `__reduce_ex__`."""
    copied = type(module).__new__(type(module))
    memo[id(module)] = copied
    copied.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return copied


def _reduce_whole(module: nn.Module, protocol: Any) -> Any:
    """A pickled module is one of its own class: the other class exists in this process only."""
    reduced: Any = object.__reduce_ex__(module, 2)
    make = copyreg._reconstructor  # type: ignore[attr-defined]  # of Python itself, as in older pickles
    return (make, (vars(type(module))["_before"], object, None), *reduced[2:])


def restore_class(module: nn.Module, *attributes: str) -> None:
    """Undo `divide_class`, and remove these attributes."""
    module.__class__ = vars(type(module))["_before"]
    for name in attributes:
        vars(module).pop(name, None)


def take_share(module: nn.Module, share: Share) -> None:
    """Replace the tensors of a whole module by this worker's share of them. Tensors that it does not have are empty.

    >>> layer = nn.Linear(2, 4, bias=False)
    >>> take_share(layer, Share({"weight": DimensionSlice(0, ((0, 2),), 4)}))
    >>> layer.weight.shape
    torch.Size([2, 2])
    """
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    for name, cut in share.slices.items():
        if tensors[name].shape[cut.dimension] != cut.length:  # otherwise another layer that shares it was first
            tensors[name].data = cut.take(tensors[name].data)
    for name in share.absent:
        tensors[name].data = torch.empty(0, dtype=tensors[name].dtype, device=tensors[name].device)
