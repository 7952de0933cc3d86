"""Plain trees from one rank to all: JSON for their shape, a broadcast for each tensor. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncline.errors import IncompatibleError
from syncline.world.arrays import import_array
from syncline.world.functional import broadcast
from syncline.world.team import Team
from syncline.world.world import current_world

__all__ = ["broadcast_object"]

PLAIN = (
    "dicts, lists, tuples, strings, bytes, numbers, None, tensors and NumPy arrays are sent, and nothing is pickled: "
    "send what it is made of, such as its state_dict()"
)


def broadcast_object(value: Any = None, root: int = 0, group: Team | None = None) -> Any:
    """The root's `value` on every rank: a tree of dicts, lists and tuples that holds plain values and tensors.

    Strings, bytes, numbers, None, tensors and NumPy arrays may be in it; the keys of dicts are strings, numbers or
    None. What the other ranks pass is ignored. Every rank gets a tree of its own, the root too. Kinds of dict and of
    tuple come back as dict and tuple, NumPy's numbers as Python's, and tensors on a GPU on this rank's device.

    >>> import torch, syncline as sl
    >>> def settings(world):
    ...     return sl.broadcast_object({"rate": 0.1, "order": torch.tensor([2, 0, 1])} if world.rank == 0 else None)
    >>> sl.simulate(settings, ranks=2).results[1]
    {'rate': 0.1, 'order': tensor([2, 0, 1])}
    """
    team = current_world().everyone if group is None else group
    tensors: list[Tensor] = []
    text = b""
    if team.rank == root:
        try:
            text = json.dumps(_describe(value, "value", tensors)).encode()
        except (IncompatibleError, RecursionError, ValueError) as error:  # told to all: the others wait for the tree
            text = json.dumps({"refused": _reason(error)}).encode()
    length = int(broadcast(torch.tensor([len(text)]), root, group=team))
    padded = torch.frombuffer(bytearray(text.ljust(length, b"\0")), dtype=torch.uint8)
    described = json.loads(bytes(broadcast(padded, root, group=team).tolist()))
    if "refused" in described:
        raise IncompatibleError(described["refused"])
    return _build(described, iter(tensors), team, root)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the value is too deeply nested to be sent, or contains itself"
    if isinstance(error, ValueError) and not isinstance(error, IncompatibleError):
        return f"a number in the value has too many digits to be sent ({error})"
    return str(error)


def _describe(node: Any, path: str, tensors: list[Tensor]) -> dict[str, Any]:
    """The tree as JSON. A dict is a list of pairs, because keys need not be strings. A tensor is shape and dtype."""
    if isinstance(node, np.generic):
        node = node.item()
    if isinstance(node, Mapping):
        for key in node:
            if key is not None and not isinstance(key, (str, int, float)):
                raise IncompatibleError(f"the key {key!r:.80} of {path} is a {type(key).__name__}: {PLAIN}")
        return {"dict": [[key, _describe(each, f"{path}[{key!r:.40}]", tensors)] for key, each in node.items()]}
    if isinstance(node, (list, tuple)):
        kind = "tuple" if isinstance(node, tuple) else "list"
        return {kind: [_describe(each, f"{path}[{number}]", tensors) for number, each in enumerate(node)]}
    if node is None or isinstance(node, (str, int, float, bool)):
        return {"value": node}
    if isinstance(node, (bytes, bytearray)):
        tensors.append(torch.frombuffer(bytearray(node), dtype=torch.uint8) if node else torch.zeros(0).byte())
        return {"bytes": ["uint8", [len(node)], "cpu"]}
    if isinstance(node, (Tensor, np.ndarray)):
        tensor = _imported(node, path)
        tensors.append(tensor.cpu())
        looks = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type]
        return {"tensor" if isinstance(node, Tensor) else "array": looks}
    raise IncompatibleError(f"{path} is a {type(node).__name__} ({node!r:.80}): {PLAIN}")


def _imported(node: Tensor | np.ndarray[Any, Any], path: str) -> Tensor:
    if isinstance(node, Tensor) and node.is_meta:
        raise IncompatibleError(f"{path} has no data: it is on the meta device")
    if isinstance(node, Tensor) and node.layout != torch.strided:
        raise IncompatibleError(f"{path} is a sparse tensor ({node.layout}): call .to_dense() first")
    return import_array(node)[0]


def _build(node: Any, tensors: Iterator[Tensor], team: Team, root: int) -> Any:
    [(kind, content)] = node.items()
    if kind == "value":
        return content
    if kind == "dict":
        return {key: _build(each, tensors, team, root) for key, each in content}
    if kind in ("list", "tuple"):
        items = [_build(each, tensors, team, root) for each in content]
        return tuple(items) if kind == "tuple" else items
    dtype, shape, device = content
    own = next(tensors) if team.rank == root else torch.zeros(shape, dtype=getattr(torch, dtype))
    found: Tensor = broadcast(own, root, group=team)  # on the CPU: rare, and works where ranks share a GPU
    if kind == "bytes":
        return bytes(found.tolist())
    if kind == "array":
        return found.numpy()
    return found.to(team.world.device) if device == "cuda" else found
