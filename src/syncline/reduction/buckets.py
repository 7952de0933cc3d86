"""Which gradients share a bucket, and the flat memory of the buckets.

Backward produces the gradients of the last layers first. A bucket is closed when it holds enough bytes; the first of a
kind is small, so that the network starts early::

    order of gradients   d  c  b  a              a bucket is closed at its limit:
    buckets              [d c]  [b]  [a]         1 MB for the first of a kind, then `bucket_bytes`

Gradients of one kind (dtype, device and codec) share buckets. A large gradient, from a tenth of a bucket on, is a
bucket of its own and is reduced in place: a copy would cost more than a message. Small ones are views into a bucket::

    bucket 0   │ fc2.weight │                                    large: the gradient itself, no copy
    bucket 1   │ fc3.bias │ fc3.weight │ fc2.bias │ control │    the last one carries the control numbers, if its
                                                                 dtype can

A codec encodes gradients in place, whatever their size. If the last bucket has a codec, the control numbers follow its
payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.codecs import Codec
from syncline.errors import SpecError
from syncline.reduction.control import control_length

__all__ = ["BUCKET_BYTES", "Bucket", "BucketItem", "BucketSet", "assign_buckets", "real_numel"]

BUCKET_BYTES = 25 << 20
"""Default size of a bucket in bytes; DistributedDataParallel has the same."""
FIRST_BUCKET_BYTES = 1 << 20
"""Size of the first bucket of a kind in bytes, so that communication starts early."""
OWN_BUCKET_DIVISOR = 10
"""A gradient of at least 1/10 of `bucket_bytes` is a bucket of its own."""
CONTROL_DTYPES = (torch.float32, torch.float64)
"""Dtypes that hold the control numbers without rounding."""


@dataclass(frozen=True)
class BucketItem:
    """A gradient to be assigned to a bucket."""

    nbytes: int
    kind: str = "float32 on cpu"
    contiguous: bool = True
    """Only contiguous gradients can be reduced in place."""


def assign_buckets(
    items: Sequence[BucketItem], order: Sequence[int], bucket_bytes: int = BUCKET_BYTES
) -> list[tuple[int, ...]]:
    """The buckets, as indices of items, in the order in which they become full.

    >>> assign_buckets([BucketItem(400), BucketItem(600), BucketItem(2_000_000)], order=[2, 1, 0])
    [(2,), (1, 0)]
    """
    if bucket_bytes < 1:
        raise SpecError(f"bucket_bytes={bucket_bytes}: a bucket holds at least one byte")
    closed: list[tuple[int, ...]] = []
    filling: dict[str, list[int]] = {}
    started: set[str] = set()
    for number in order:
        kind = items[number].kind
        if _is_large(items[number], bucket_bytes):
            closed.append((number,))
            continue
        bucket = filling.setdefault(kind, [])
        bucket.append(number)
        limit = bucket_bytes if kind in started else min(FIRST_BUCKET_BYTES, bucket_bytes)
        if sum(items[member].nbytes for member in bucket) >= limit:
            started.add(kind)
            closed.append(tuple(filling.pop(kind)))
    position = {number: at for at, number in enumerate(order)}
    rest = sorted(filling.values(), key=lambda bucket: position[bucket[-1]])
    return closed + [tuple(bucket) for bucket in rest]


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together."""

    items: tuple[int, ...]
    flat: Tensor | None
    """The memory. None: the gradients are reduced in place."""
    data: Tensor | None
    """The gradients without the control numbers."""
    codec: Codec | None = None
    """None: sent unencoded."""
    sizes: tuple[int, ...] = ()
    """Number of real elements of each gradient, if there is a codec."""


class BucketSet:
    """Buckets of one backward pass, and the views into them that become its gradients."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        order: Sequence[int],
        bucket_bytes: int,
        codecs: Sequence[Codec | None] | None = None,
        elastic: bool = False,
    ) -> None:
        """`elastic`: the control numbers of an elastic world, which has one more."""
        codecs = [None] * len(parameters) if codecs is None else codecs
        items = [_item(parameter, codec) for parameter, codec in zip(parameters, codecs, strict=True)]
        groups = assign_buckets(items, order, bucket_bytes)
        self.in_place = {i for i in order if _is_large(items[i], bucket_bytes) or codecs[i] is not None}
        """Indices of gradients that are reduced in place."""
        groups, shared = _control_last(
            groups, [g[0] not in self.in_place and parameters[g[0]].dtype in CONTROL_DTYPES for g in groups]
        )
        extra = control_length(len(parameters), elastic)
        self.buckets: list[Bucket] = []
        self.views: dict[int, Tensor] = {}
        home: dict[int, int] = {}
        for number, group in enumerate(groups):
            home |= dict.fromkeys(group, number)
            if group[0] in self.in_place:
                sizes = tuple(real_numel(parameters[index]) for index in group)
                self.buckets.append(Bucket(group, None, None, codecs[group[0]], sizes))
                continue
            numel = sum(real_numel(parameters[index]) for index in group)
            first = parameters[group[0]]
            tail = extra if shared and number == len(groups) - 1 else 0
            flat = torch.empty(numel + tail, dtype=_real(first.dtype), device=first.device)
            self.buckets.append(Bucket(group, flat, flat[:numel]))
            offset = 0
            for index in group:
                self.views[index] = _view(flat, offset, parameters[index])
                offset += real_numel(parameters[index])
        last = self.buckets[-1].flat if shared else None
        if last is None:
            last = torch.zeros(extra, dtype=torch.float32, device=_device(parameters))
        if not shared and not (self.buckets and self.buckets[-1].codec is not None):
            self.buckets.append(Bucket((), last, last[:0]))
        self.control = last[-extra:]
        self.outside = [index for index in range(len(parameters)) if index not in home]
        """Indices of parameters without a bucket: frozen, unused or sparse ones."""
        self.members = list(home)
        """Indices of parameters with a bucket."""
        self.bucket_of = [home.get(index, -1) for index in range(len(parameters))]
        """The bucket of each parameter; -1: none."""
        self.bytes = [item.nbytes for item in items]

    def sizes(self, parameters: Sequence[Tensor]) -> list[tuple[int, torch.dtype, torch.device]]:
        """Number of elements, dtype and device of every unencoded bucket."""
        found = []
        for bucket in self.buckets:
            if bucket.codec is not None:
                continue
            if bucket.flat is None:
                large = parameters[bucket.items[0]]
                found.append((real_numel(large), _real(large.dtype), large.device))
            else:
                found.append((bucket.flat.numel(), bucket.flat.dtype, bucket.flat.device))
        return found


def _is_large(item: BucketItem, bucket_bytes: int) -> bool:
    """True if the gradient is a bucket of its own."""
    return item.contiguous and item.nbytes * OWN_BUCKET_DIVISOR >= bucket_bytes and item.nbytes > 0


def _control_last(groups: list[tuple[int, ...]], fit: list[bool]) -> tuple[list[tuple[int, ...]], bool]:
    """Move the last bucket that can carry the control numbers to the end. Returns True if there is one.

    It is sent last, so only the last two buckets qualify: an earlier one would be delayed.
    """
    if not groups or not any(fit[-2:]):
        return groups, False
    if fit[-1]:
        return groups, True
    return [*groups[:-2], groups[-1], groups[-2]], True


def _item(parameter: Tensor, codec: Codec | None) -> BucketItem:
    kind = f"{parameter.dtype} on {parameter.device}"
    if codec is not None:
        return BucketItem(parameter.nbytes, f"{kind} by {codec!r}", contiguous=False)
    return BucketItem(parameter.nbytes, kind, parameter.is_contiguous())


def _device(parameters: Sequence[Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")


def _view(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """The gradient of `parameter` in `flat`, with its strides if they are dense: optimizers prefer equal strides."""
    part = flat[offset : offset + real_numel(parameter)]
    if parameter.is_complex():
        return torch.view_as_complex(part.view(*parameter.shape, 2))
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()  # a permutation without gaps
    return part.as_strided(parameter.shape, parameter.stride()) if dense else part.view(parameter.shape)


def real_numel(parameter: Tensor) -> int:
    """Number of real elements: a complex one counts twice."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
