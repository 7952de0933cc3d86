"""A batch, whatever it is made of, onto a device."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import torch

__all__ = ["move"]


def move(batch: Any, device: torch.device | str) -> Any:
    """The batch with every tensor in its tuples, lists and dicts on `device`; the same object for the CPU.

    Batches come from loaders, and loaders give them on the CPU. What has a `to` of its own is asked to move itself;
    what has none and is no container stays as it is.

    >>> x, names = move((torch.ones(2), ["a", "b"]), "meta")
    >>> x.device.type, names
    ('meta', ['a', 'b'])
    """
    device = torch.device(device)
    return batch if device.type == "cpu" else _moved(batch, device)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        # Only from pinned memory can the copy run beside the computing.
        return batch.to(device, non_blocking=batch.device.type == "cpu" and batch.is_pinned())
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)  # a subclass keeps what else it holds
        for key, value in batch.items():
            moved[key] = _moved(value, device)
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(each, device) for each in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_moved(each, device) for each in batch)
    return batch
