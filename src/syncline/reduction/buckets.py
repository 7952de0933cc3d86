"""Flat memory for gradients: small ones are views into a bucket, large ones are reduced where they lie.

bucket 0   │ fc2.weight │                                    large: the gradient itself, no copy
bucket 1   │ fc3.bias │ fc3.weight │ fc2.bias │ control │    the last one carries the control numbers, where its
                                                             dtype can

What a codec encodes is read where it lies, whatever its size, and buckets are of one codec each; the payload of the
last one has the control numbers behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.codecs import Codec
from syncline.reduction.control import control_length
from syncline.reduction.layout import Item, is_large, lay_out

__all__ = ["Bucket", "BucketSet", "flattened", "owns_memory"]

PRECISE = (torch.float32, torch.float64)
"""Dtypes that count without rounding; the control numbers need one."""
HOLDERS = 2
"""Of a storage that is one tensor's alone: that tensor, and the handle by which we ask."""


@dataclass(frozen=True)
class Bucket:
    """What is reduced at once."""

    items: tuple[int, ...]
    flat: Tensor | None
    """None for a large gradient, which brings its own memory."""
    data: Tensor | None
    """The gradients alone, without the control numbers."""
    codec: Codec | None = None
    """None: it goes as it is."""


class BucketSet:
    """Buckets for one backward pass, and the views that are its gradients."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        order: Sequence[int],
        bucket_bytes: int,
        codecs: Sequence[Codec | None] | None = None,
    ) -> None:
        codecs = [None] * len(parameters) if codecs is None else codecs
        items = [_item(parameter, codec) for parameter, codec in zip(parameters, codecs, strict=True)]
        groups = lay_out(items, order, bucket_bytes)
        self.large = {i for i in order if is_large(items[i], bucket_bytes) or codecs[i] is not None}
        """Those that are reduced where they lie."""
        groups, shared = _control_last(
            groups, [g[0] not in self.large and parameters[g[0]].dtype in PRECISE for g in groups]
        )
        extra = control_length(len(parameters))
        self.buckets: list[Bucket] = []
        self.views: dict[int, Tensor] = {}
        self.home: dict[int, int] = {}
        for number, group in enumerate(groups):
            self.home |= dict.fromkeys(group, number)
            if group[0] in self.large:
                self.buckets.append(Bucket(group, None, None, codecs[group[0]]))
                continue
            numel = sum(_reals(parameters[index]) for index in group)
            first = parameters[group[0]]
            tail = extra if shared and number == len(groups) - 1 else 0
            flat = torch.empty(numel + tail, dtype=_real(first.dtype), device=first.device)
            self.buckets.append(Bucket(group, flat, flat[:numel]))
            offset = 0
            for index in group:
                self.views[index] = _view(flat, offset, parameters[index])
                offset += _reals(parameters[index])
        last = self.buckets[-1].flat if shared else None
        if last is None:
            last = torch.zeros(extra, dtype=torch.float32, device=_device(parameters))
        if not shared and not (self.buckets and self.buckets[-1].codec is not None):
            self.buckets.append(Bucket((), last, last[:0]))
        self.control = last[-extra:]
        self.outside = [index for index in range(len(parameters)) if index not in self.home]
        """Parameters without a place: frozen, unused or sparse ones."""
        self.homes = [self.home.get(index, -1) for index in range(len(parameters))]
        self.bytes = [item.nbytes for item in items]

    def sizes(self, parameters: Sequence[Tensor]) -> list[tuple[int, torch.dtype, torch.device]]:
        """What will be reduced as it is: elements, dtype and device of every such bucket."""
        found = []
        for bucket in self.buckets:
            if bucket.codec is not None:
                continue
            if bucket.flat is None:
                large = parameters[bucket.items[0]]
                found.append((_reals(large), _real(large.dtype), large.device))
            else:
                found.append((bucket.flat.numel(), bucket.flat.dtype, bucket.flat.device))
        return found


def flattened(gradient: Tensor) -> Tensor:
    """A contiguous gradient's memory as one row of real numbers."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return real.view(-1)


def owns_memory(gradient: Tensor) -> bool:
    """Whether nobody else holds the memory of a gradient: autograd may have given it a view of another's."""
    storage = gradient.untyped_storage()
    return storage.nbytes() == gradient.nbytes and torch._C._storage_Use_Count(storage._cdata) <= HOLDERS


def _control_last(groups: list[tuple[int, ...]], fit: list[bool]) -> tuple[list[tuple[int, ...]], bool]:
    """The last bucket that can carry the control numbers, at the end; whether there is one.

    It leaves last, so it must not be one that could have left long before.
    """
    if not groups or not any(fit[-2:]):
        return groups, False
    if fit[-1]:
        return groups, True
    return [*groups[:-2], groups[-1], groups[-2]], True


def _item(parameter: Tensor, codec: Codec | None) -> Item:
    kind = f"{parameter.dtype} on {parameter.device}"
    if codec is not None:
        return Item(parameter.nbytes, f"{kind} by {codec!r}", movable=False)
    return Item(parameter.nbytes, kind, parameter.is_contiguous())


def _device(parameters: Sequence[Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")


def _view(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """The gradient of `parameter` in `flat`, with its strides where they are dense: optimizers like them equal."""
    part = flat[offset : offset + _reals(parameter)]
    if parameter.is_complex():
        return torch.view_as_complex(part.view(*parameter.shape, 2))
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()  # a permutation: no holes
    return part.as_strided(parameter.shape, parameter.stride()) if dense else part.view(parameter.shape)


def _reals(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
