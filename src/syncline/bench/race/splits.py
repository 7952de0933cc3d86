"""A digest of every sample of a race's splits, so that anybody can see later that they were disjoint."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from syncline.workloads.base import Workload

__all__ = ["MOST", "SPLITS", "digest_sample", "read_splits", "write_splits"]

SPLITS = ("train", "validation", "test")
MOST = 1 << 17
"""Digests kept of a split: its smallest ones. Two large splits that overlap share some of those too."""


def write_splits(workload: Workload, folder: Path) -> dict[str, str]:
    """Write `splits/<name>.u64`, sorted digests of 8 bytes; the sums of the files."""
    from syncline.workloads.base import batches

    place = folder / "splits"
    place.mkdir(parents=True, exist_ok=True)
    sums = {}
    for name in SPLITS:
        found = [
            digest_sample(inputs[row], targets[row])
            for inputs, targets in batches(getattr(workload.splits(), name), 512)
            for row in range(len(inputs))
        ]
        kept = sorted(found)[:MOST]
        data = struct.pack(f"<{len(kept)}Q", *kept)
        (place / f"{name}.u64").write_bytes(data)
        sums[name] = hashlib.sha256(data).hexdigest()
    return sums


def read_splits(folder: Path) -> dict[str, frozenset[int]]:
    """The digests that `write_splits` kept, by split; of those that there are."""
    found = {}
    for name in SPLITS:
        path = folder / "splits" / f"{name}.u64"
        if path.exists():
            data = path.read_bytes()
            count = len(data) // 8
            found[name] = frozenset(struct.unpack(f"<{count}Q", data[: 8 * count]))
    return found


def digest_sample(inputs: torch.Tensor, target: torch.Tensor) -> int:
    """Of one sample: its input and its target, byte by byte."""
    import torch

    told = hashlib.blake2b(digest_size=8)
    for tensor in (inputs, target):
        told.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(told.digest(), "little")
