"""What the optimizers and schedules share: checks of arguments, and the step of LARS and LAMB."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline.errors import SpecError, UnsupportedError
from syncline.specs import nearest

__all__ = ["LayerwiseOptimizer", "count", "fraction", "norms", "positive"]

EXCLUDE = ["all", "none", "vectors"]


def positive(name: str, value: float) -> float:
    """A finite number above zero."""
    if not (_is_number(value) and value > 0):
        raise SpecError(f"{name} must be a finite number above 0, not {value!r}")
    return float(value)


def not_negative(name: str, value: float) -> float:
    """A finite number, zero or more."""
    if not (_is_number(value) and value >= 0):
        raise SpecError(f"{name} must be a finite number, 0 or more, not {value!r}")
    return float(value)


def fraction(name: str, value: float, *, below_one: bool = False) -> float:
    """A number from 0 to 1, or up to but not 1."""
    if not (_is_number(value) and 0 <= value <= 1) or (below_one and value == 1):
        raise SpecError(f"{name} must lie between 0 and 1{' and be less than 1' * below_one}, not {value!r}")
    return float(value)


def count(name: str, value: int) -> int:
    """A whole number, one or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{name} must be a whole number, 1 or more, not {value!r}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class LayerwiseOptimizer(Optimizer):
    """The common part of LARS and LAMB, whose groups have the options `lr`, `weight_decay` and `exclude`."""

    @abstractmethod
    def check_options(self, options: dict[str, Any]) -> None:
        """Check the other options of a parameter group."""

    @abstractmethod
    def moves(
        self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any], adapted: bool
    ) -> list[Tensor]:
        """The change of each parameter at a rate of −1. `adapted`: by the norms of its layer."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. torch calls it also for the groups of the constructor."""
        options = {**self.defaults, **param_group}
        if not isinstance(options["lr"], Tensor):
            not_negative("lr", options["lr"])
        not_negative("weight_decay", options["weight_decay"])
        if options["exclude"] not in EXCLUDE:
            raise SpecError(f"unknown exclude {options['exclude']!r}; {nearest(str(options['exclude']), EXCLUDE)}")
        self.check_options(options)
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step. `closure`, if given, computes the loss and the gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters, gradients, adapted in _batches(group, type(self).__name__):
                moves = self.moves(parameters, gradients, group, adapted)
                torch._foreach_add_(parameters, moves, alpha=-float(group["lr"]))
        return loss


def _batches(group: dict[str, Any], optimizer: str) -> Iterator[tuple[list[Tensor], list[Tensor], bool]]:
    """The parameters of a group with a gradient, the gradients, and whether they are adapted.

    Those of one device and dtype are together, so that one call of torch processes all of them.
    """
    by_kind: dict[tuple[torch.device, torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for number, parameter in enumerate(group["params"]):
        if parameter.grad is None:
            continue
        if parameter.grad.layout != torch.strided:
            raise UnsupportedError(
                f"{optimizer} needs dense gradients, and that of parameter {number} of its group, of shape "
                f"{tuple(parameter.shape)}, is sparse: make the embedding with sparse=False, or give it to "
                "torch.optim.SGD or SparseAdam"
            )
        adapted = group["exclude"] == "none" or (group["exclude"] == "vectors" and parameter.ndim >= 2)
        parameters, gradients = by_kind.setdefault((parameter.device, parameter.dtype, adapted), ([], []))
        parameters.append(parameter)
        gradients.append(parameter.grad)
    for (_, _, adapted), (parameters, gradients) in by_kind.items():
        yield parameters, gradients, adapted


def norms(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of each tensor, in one tensor on their device. Norms of half precision are in float32.

    >>> norms([torch.tensor([3.0, 4.0]), torch.zeros(2, 2)])
    tensor([5., 0.])
    """
    listed = list(tensors)
    wide = torch.float32 if listed[0].dtype in (torch.float16, torch.bfloat16) else None
    each: tuple[Tensor, ...] = torch._foreach_norm(listed, 2, dtype=wide)
    return torch.stack(each)
