"""`broadcast_object`: a state tree from one rank to all, as JSON and one broadcast per tensor. Nothing is pickled."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from syncline.errors import IncompatibleError
from syncline.state_trees import MESSAGE, decode, encode
from syncline.world.functional import broadcast
from syncline.world.group import Group
from syncline.world.world import current_world

__all__ = ["broadcast_object"]


def broadcast_object(value: Any = None, root: int = 0, group: Group | None = None) -> Any:
    """Give every rank the root's `value`: a tree of dicts, lists, tuples and sets with plain values and tensors.

    Strings, bytes, numbers, None, tensors and NumPy arrays may be in it. The values of the other ranks are ignored.
    Every rank gets a tree of its own, the root too. Subclasses of dict and tuple arrive as dict and tuple, NumPy's
    numbers as Python's, and tensors on a GPU arrive on the device of the receiving rank.

    >>> import torch, syncline as sl
    >>> def settings(world):
    ...     return sl.broadcast_object({"rate": 0.1, "order": torch.tensor([2, 0, 1])} if world.rank == 0 else None)
    >>> sl.simulate(settings, ranks=2).results[1]
    {'rate': 0.1, 'order': tensor([2, 0, 1])}
    """
    comm = current_world().everyone if group is None else group
    tensors: dict[str, Tensor] = {}
    text = b""
    if comm.rank == root:
        try:
            tree, tensors = encode(value, "value", MESSAGE)
            text = json.dumps({"tree": tree, "tensors": _headers(tensors)}).encode()
        except (IncompatibleError, ValueError) as error:  # sent to all ranks, because they wait for the tree
            digits = "" if isinstance(error, IncompatibleError) else "a number has too many digits to be sent: "
            text = json.dumps({"refused": f"{digits}{error}"}).encode()
    length = int(broadcast(torch.tensor([len(text)]), root, group=comm))
    padded = torch.frombuffer(bytearray(text.ljust(length, b"\0")), dtype=torch.uint8)
    document = json.loads(bytes(broadcast(padded, root, group=comm).tolist()))
    if "refused" in document:
        raise IncompatibleError(document["refused"])
    received: dict[str, Tensor] = {}
    for name, dtype, shape, device in document["tensors"]:
        own = tensors[name].cpu() if comm.rank == root else torch.zeros(shape, dtype=getattr(torch, dtype))
        tensor: Tensor = broadcast(own, root, group=comm)  # on the CPU: it is rare, and ranks may share a GPU
        received[name] = tensor.to(comm.world.device) if device == "cuda" else tensor
    return decode(document["tree"], received, f"the object of rank {comm.ranks[root]}")


def _headers(tensors: dict[str, Tensor]) -> list[list[Any]]:
    """Name, dtype, shape and device type of each tensor."""
    return [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type]
        for name, tensor in tensors.items()
    ]
