"""What LARS and LAMB share: which parameters they adapt, and the ratio of two norms for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from syncline.errors import SpecError, UnsupportedError
from syncline.specs import nearest

__all__ = ["batches", "check_exclude", "norms"]

EXCLUDE = ["all", "none", "vectors"]


def check_exclude(exclude: str) -> str:
    """`exclude` itself, where it is a word that is known."""
    if exclude not in EXCLUDE:
        raise SpecError(f"unknown exclude {exclude!r}; {nearest(str(exclude), EXCLUDE)}")
    return exclude


def batches(group: dict[str, Any], optimizer: str) -> Iterator[tuple[list[Tensor], list[Tensor], bool]]:
    """Parameters of a group that have a gradient, the gradients, and whether they are adapted.

    Those of one device and dtype come together, so that one call of torch serves all of them.
    """
    found: dict[tuple[torch.device, torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
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
        parameters, gradients = found.setdefault((parameter.device, parameter.dtype, adapted), ([], []))
        parameters.append(parameter)
        gradients.append(parameter.grad)
    for (_, _, adapted), (parameters, gradients) in found.items():
        yield parameters, gradients, adapted


def norms(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of each tensor, in one tensor that stays on their device; of half precision ones in float32.

    >>> norms([torch.tensor([3.0, 4.0]), torch.zeros(2, 2)])
    tensor([5., 0.])
    """
    listed = list(tensors)
    wide = torch.float32 if listed[0].dtype in (torch.float16, torch.bfloat16) else None
    found: tuple[Tensor, ...] = torch._foreach_norm(listed, 2, dtype=wide)
    return torch.stack(found)
