"""What sparse codecs compute, in plain torch: on any device, and what `sparse_fused` is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.codecs.kernels.indices import BITMAP, broken

__all__ = ["at_least", "largest", "largest_of_buckets", "merge", "pack_indices", "scatter", "unpack_indices"]


def largest(flat: Tensor, residual: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k of largest magnitude, in order; of equal ones the first."""
    total = _total(flat, residual)
    chosen = torch.zeros(total.shape, dtype=torch.bool, device=total.device)
    if k > 0:
        bits = _magnitudes(total)
        kth = bits.topk(k, sorted=False).values.min()
        chosen = bits > kth
        chosen[(bits == kth).nonzero().view(-1)[: k - int(chosen.sum())]] = True
    return _take(total, residual, chosen)


def largest_of_buckets(flat: Tensor, residual: Tensor | None, k: int, bucket: int) -> tuple[Tensor, Tensor]:
    """The k of largest magnitude of every `bucket`, in order; of equal ones the first."""
    total = _total(flat, residual)
    numel = total.numel()
    rows = -(-numel // bucket)
    table = torch.full((rows * bucket,), -1, dtype=torch.int32, device=total.device)  # below every magnitude
    table[:numel] = _magnitudes(total)
    order = table.view(rows, bucket).sort(dim=1, descending=True, stable=True).indices[:, :k]
    chosen = torch.zeros((rows, bucket), dtype=torch.bool, device=total.device).scatter_(1, order, True)
    return _take(total, residual, chosen.view(-1)[:numel])


def at_least(flat: Tensor, residual: Tensor | None, threshold: float) -> tuple[Tensor, Tensor]:
    """All of at least this magnitude, and NaN, in order."""
    total = _total(flat, residual)
    return _take(total, residual, ~(total.abs() < torch.tensor(threshold, dtype=torch.float32, device=total.device)))


def pack_indices(indices: Tensor, low: int, first: int, out: Tensor) -> None:
    """Write indices as `indices.IndexLayout` lays them out into `out`, zeroed."""
    wide = indices.to(torch.int64)
    upper = torch.zeros(8 * first, dtype=torch.uint8, device=out.device)
    if low == BITMAP:
        upper[wide] = 1
    else:
        upper[(wide >> low) + torch.arange(wide.numel(), device=out.device)] = 1
        rest = torch.zeros(8 * (out.numel() - first), dtype=torch.uint8, device=out.device)
        rest[: low * wide.numel()] = ((wide.unsqueeze(1) >> _places(low, out)) & 1).view(-1).to(torch.uint8)
        out[first:] = _packed(rest)
    out[:first] = _packed(upper)


def unpack_indices(packed: Tensor, numel: int, count: int, low: int, first: int, out: Tensor) -> None:
    """Read indices into `out`, `count` of them; `ProtocolError` where they cannot be."""
    found = _unpacked(packed[:first]).nonzero().view(-1)
    if found.numel() != count:
        raise broken(numel, count)
    if low != BITMAP:
        bits = _unpacked(packed[first:])[: low * count].view(count, low)
        rest = (bits << _places(low, packed)).sum(dim=1)
        found = (found - torch.arange(count, device=packed.device) << low) | rest
    if count and (int(found[-1]) >= numel or bool((found[1:] <= found[:-1]).any())):
        raise broken(numel, count)
    out.copy_(found)


def scatter(out: Tensor, indices: Tensor, values: Tensor, accumulate: bool) -> None:
    """Put values at indices, which are in range and unlike each other, or add them there."""
    wide = indices.to(torch.int64)
    out[wide] = out[wide] + values if accumulate else values


def merge(indices: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two sorted streams as one; what both hold is added."""
    places, order = torch.cat(indices).sort(stable=True)
    sums = torch.cat(values)[order]
    again = torch.zeros(places.shape, dtype=torch.bool, device=places.device)
    again[1:] = places[1:] == places[:-1]
    seconds = again.nonzero().view(-1)
    sums[seconds - 1] = sums[seconds - 1] + sums[seconds]
    return places[~again], sums[~again]


def _total(flat: Tensor, residual: Tensor | None) -> Tensor:
    return flat if residual is None else residual.add_(flat)


def _magnitudes(total: Tensor) -> Tensor:
    """Magnitudes as integers, which are in the same order."""
    return total.view(torch.int32) & 0x7FFFFFFF


def _take(total: Tensor, residual: Tensor | None, chosen: Tensor) -> tuple[Tensor, Tensor]:
    places = chosen.nonzero().view(-1)
    values = total[places]
    if residual is not None:
        residual[places] = 0.0
    return places.to(torch.int32 if total.numel() < 2**31 else torch.int64), values


def _places(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=like.device)


def _packed(bits: Tensor) -> Tensor:
    return (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=1).to(torch.uint8)


def _unpacked(packed: Tensor) -> Tensor:
    return (
        ((packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).view(-1).to(torch.int64)
    )
