"""Making sure that all ranks hold the same things, and giving them one rank's."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.errors import IncompatibleError
from syncline.exchange.exchange import Exchange
from syncline.world import allgather

__all__ = ["check_same", "share_tree", "spread"]

AT_ONCE = 1 << 20
"""Bytes of small tensors that are sent together."""


def check_same(exchange: Exchange, what: str, mine: Mapping[str, str]) -> None:
    """Raise, on every rank alike, the first entry in which a rank differs from rank 0."""
    if exchange.size == 1:
        return
    text = json.dumps(list(mine.items())).encode()
    digests = allgather(torch.tensor([zlib.crc32(text), len(text)], dtype=torch.int64).view(1, 2), group=exchange.team)
    if bool((digests == digests[0]).all()):
        return
    lengths = digests[:, 1].tolist()
    everything = allgather(torch.frombuffer(bytearray(text), dtype=torch.uint8), group=exchange.team)
    parts = torch.split(everything, lengths)
    tables = [dict(json.loads(bytes(part.tolist()))) for part in parts]
    ranks = exchange.team.ranks
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


def spread(exchange: Exchange, tensors: Sequence[Tensor], root: int = 0) -> None:
    """Copy the root's tensors into those of all ranks; small ones of a kind travel together."""
    if exchange.size == 1:
        return
    for group in _batches(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        flat = exchange.from_root(flat, root)
        offset = 0
        for tensor in group:
            tensor.detach().copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()


def _batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for tensor in tensors:
        batches = kinds.setdefault((tensor.dtype, tensor.device), [[]])
        if sum(other.numel() for other in batches[-1]) * tensor.element_size() > AT_ONCE:
            batches.append([])
        batches[-1].append(tensor)
    return [batch for batches in kinds.values() for batch in batches if batch]


def share_tree(exchange: Exchange, tree: Any, root: int) -> Any:
    """The root's state tree (dicts, lists, tensors and plain values), on every rank."""
    if exchange.size == 1:
        return tree
    tensors: list[Tensor] = []
    text = b""
    if exchange.rank == root:
        try:
            text = json.dumps(_plain(tree, tensors)).encode()
        except IncompatibleError as error:  # told to all: the others wait for the tree
            text = json.dumps({"refused": str(error)}).encode()
    length = int(exchange.from_root(torch.tensor([len(text)]), root))
    data = torch.frombuffer(bytearray(text.ljust(length, b"\0")), dtype=torch.uint8)
    shape = json.loads(bytes(exchange.from_root(data, root).tolist()))
    if "refused" in shape:
        raise IncompatibleError(shape["refused"])
    return _filled(shape, iter(tensors), exchange, root)


def _plain(node: Any, tensors: list[Tensor]) -> Any:
    """The tree as JSON: lists of pairs for dicts, whose keys need not be strings, and what each tensor looks like."""
    if isinstance(node, Tensor):
        tensors.append(node)
        return {"tensor": [str(node.dtype).removeprefix("torch."), list(node.shape), node.device.type]}
    if isinstance(node, Mapping):
        return {"dict": [[key, _plain(value, tensors)] for key, value in node.items()]}
    if isinstance(node, (list, tuple)):
        return {"tuple" if isinstance(node, tuple) else "list": [_plain(value, tensors) for value in node]}
    if node is None or isinstance(node, (str, int, float, bool)):
        return {"value": node}
    raise IncompatibleError(f"a {type(node).__name__} cannot be given to the other ranks: {node!r:.80}")


def _filled(node: Any, tensors: Any, exchange: Exchange, root: int) -> Any:
    [(kind, content)] = node.items()
    if kind == "value":
        return content
    if kind == "dict":
        return {key: _filled(value, tensors, exchange, root) for key, value in content}
    if kind in ("list", "tuple"):
        items = [_filled(value, tensors, exchange, root) for value in content]
        return tuple(items) if kind == "tuple" else items
    dtype, shape, device = content
    own = next(tensors) if exchange.rank == root else None
    place = exchange.world.device if device == "cuda" else torch.device("cpu")
    tensor = own if own is not None else torch.zeros(shape, dtype=getattr(torch, dtype), device=place)
    return exchange.from_root(tensor, root)
