"""Flat memory for gradients: each parameter's gradient is a view into a bucket.

bucket 0   │ fc3.bias │ fc3.weight │
bucket 1   │ fc2.bias │ fc2.weight │ control │      the last one carries the control numbers, where its dtype can
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.exchange.control import control_length
from syncline.exchange.layout import Item, lay_out

__all__ = ["Bucket", "BucketSet", "items_of"]

PRECISE = (torch.float32, torch.float64)
"""Dtypes that count without rounding; the control numbers need one."""


@dataclass(frozen=True)
class Bucket:
    """What is reduced at once."""

    flat: Tensor
    items: tuple[int, ...]
    data: Tensor
    """The gradients alone, without the control numbers."""


class BucketSet:
    """Buckets for one backward pass, and the views that are its gradients."""

    def __init__(self, parameters: Sequence[Tensor], order: Sequence[int], bucket_bytes: int) -> None:
        items = items_of(parameters)
        groups = lay_out(items, order, bucket_bytes)
        extra = control_length(len(parameters))
        shared = bool(groups) and parameters[groups[-1][0]].dtype in PRECISE
        self.buckets: list[Bucket] = []
        self.views: dict[int, Tensor] = {}
        self.home: dict[int, int] = {}
        for number, group in enumerate(groups):
            numel = sum(_reals(parameters[index]) for index in group)
            first = parameters[group[0]]
            tail = extra if shared and number == len(groups) - 1 else 0
            flat = torch.zeros(numel + tail, dtype=_real(first.dtype), device=first.device)
            self.buckets.append(Bucket(flat, group, flat[:numel]))
            offset = 0
            for index in group:
                self.home[index] = number
                self.views[index] = _view(flat, offset, parameters[index])
                offset += _reals(parameters[index])
        if not shared:
            device = parameters[0].device if parameters else torch.device("cpu")
            flat = torch.zeros(extra, device=device)
            self.buckets.append(Bucket(flat, (), flat[:0]))
        self.control = self.buckets[-1].flat[-extra:]
        self.outside = [index for index in range(len(parameters)) if index not in self.home]
        """Parameters without a place: frozen, unused or sparse ones."""


def items_of(parameters: Sequence[Tensor]) -> list[Item]:
    """What the layout needs to know of them."""
    return [Item(p.numel() * p.element_size(), f"{p.dtype} on {p.device}") for p in parameters]


def _view(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """The gradient of `parameter` in `flat`, with its strides where they are dense: optimizers like them equal."""
    part = flat[offset : offset + _reals(parameter)]
    if parameter.is_complex():
        return torch.view_as_complex(part.view(*parameter.shape, 2))
    if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)


def _reals(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
