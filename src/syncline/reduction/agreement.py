"""Checks that all ranks hold the same values, and broadcasts of one rank's tensors and state."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.errors import IncompatibleError
from syncline.reduction.communicator import Communicator
from syncline.world import allgather, broadcast_object

__all__ = ["broadcast_tensors", "broadcast_tree", "check_same"]

BATCH_BYTES = 1 << 20
"""Small tensors are broadcast together, up to about this size."""


def check_same(communicator: Communicator, what: str, mine: Mapping[str, str]) -> None:
    """Compare text entries between the ranks. Raises the same error on every rank: the first difference from rank 0."""
    if communicator.size == 1:
        return
    text = json.dumps(list(mine.items())).encode()
    digests = allgather(
        torch.tensor([zlib.crc32(text), len(text)], dtype=torch.int64).view(1, 2), group=communicator.group
    )
    if bool((digests == digests[0]).all()):
        return
    lengths = digests[:, 1].tolist()
    everything = allgather(torch.frombuffer(bytearray(text), dtype=torch.uint8), group=communicator.group)
    parts = torch.split(everything, lengths)
    tables = [dict(json.loads(bytes(part.tolist()))) for part in parts]
    ranks = communicator.group.ranks
    for rank, table in zip(ranks, tables, strict=True):
        difference = _difference(tables[0], table, ranks[0], rank)
        if difference:
            raise IncompatibleError(f"the ranks hold different {what}: {difference}")
    orders = [list(table) for table in tables]
    rank = next((rank for rank, order in zip(ranks, orders, strict=True) if order != orders[0]), ranks[0])
    raise IncompatibleError(f"the ranks hold different {what}: rank {rank} has the same entries in another order")


def _difference(first: Mapping[str, str], other: Mapping[str, str], root: int, rank: int) -> str:
    for name in first:
        if name not in other:
            return f"{name} is {first[name]} on rank {root} and missing on rank {rank}"
        if first[name] != other[name]:
            return f"{name} is {first[name]} on rank {root} and {other[name]} on rank {rank}"
    extra = next((name for name in other if name not in first), None)
    return "" if extra is None else f"{extra} is {other[extra]} on rank {rank} and missing on rank {root}"


def broadcast_tensors(communicator: Communicator, tensors: Sequence[Tensor], root: int = 0) -> None:
    """Copy the root's tensors into those of all ranks."""
    if communicator.size == 1:
        return
    for group in _batches(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        flat = communicator.from_root(flat, root)
        offset = 0
        for tensor in group:
            tensor.detach().copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()


def _batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for tensor in tensors:
        batches = kinds.setdefault((tensor.dtype, tensor.device), [[]])
        if sum(other.numel() for other in batches[-1]) * tensor.element_size() > BATCH_BYTES:
            batches.append([])
        batches[-1].append(tensor)
    return [batch for batches in kinds.values() for batch in batches if batch]


def broadcast_tree(communicator: Communicator, tree: Any, root: int) -> Any:
    """The root's state tree (dicts, lists, tensors and plain values), on every rank."""
    return tree if communicator.size == 1 else broadcast_object(tree, root, group=communicator.group)
