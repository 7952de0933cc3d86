"""The arrays of scripts: NumPy's, torch's, TensorFlow's eager tensors and others, and lists of them in few buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncline.errors import IncompatibleError, UnsupportedError
from syncline.world.arrays import import_array

__all__ = ["Layout", "ScriptArray", "import_arrays", "join_arrays", "split_buffers"]

Layout = tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
"""The arrays of a list: place, shape and dtype. Entries that are None are left out."""


class ScriptArray:
    """An array that a script has passed, as a tensor.

    >>> array = np.arange(2.0)
    >>> ScriptArray(array, "average").fill(torch.tensor([5.0, 6.0]))
    array([5., 6.])
    >>> array
    array([5., 6.])
    """

    def __init__(self, value: Any, call: str) -> None:
        self._value = value
        array = _without_tensorflow(value, call)
        self.tensor: Tensor
        self.convert: Callable[[Tensor], Any]
        """Makes an array of the script's kind of a tensor."""
        if isinstance(array, (bool, int, float)):
            self.tensor, self.convert = torch.tensor(array, dtype=torch.float64), lambda tensor: tensor.item()
        else:
            self.tensor, self.convert = import_array(array)

    def fill(self, result: Tensor) -> Any:
        """Store a result in the array, and return the array. An array that cannot be changed gets a new one."""
        value = self._value
        if isinstance(value, Tensor):
            value.detach().copy_(result)
            return value
        if isinstance(value, np.ndarray) and value.flags.writeable:
            value[...] = result.cpu().numpy()
            return value
        return self.convert(result)


def _without_tensorflow(value: Any, call: str) -> Any:
    """A TensorFlow tensor or variable as a NumPy array, without an import of TensorFlow."""
    if type(value).__module__.partition(".")[0] != "tensorflow":
        return value
    if not hasattr(value, "numpy"):
        raise UnsupportedError(
            f"{call} got a {type(value).__name__} of a TensorFlow graph, which has no values: TensorFlow 1 scripts "
            "cannot run here; pass eager tensors of TensorFlow 2, torch tensors or NumPy arrays"
        )
    return np.asarray(value.numpy())


def import_arrays(values: Sequence[Any], call: str) -> tuple[list[ScriptArray | None], Layout]:
    """The arrays of a list, in which None stays None, and their layout."""
    if isinstance(values, (np.ndarray, Tensor)) or not isinstance(values, Sequence):
        raise IncompatibleError(f"{call} takes a list of arrays, not {type(values).__name__}: write [array]")
    arrays = [None if value is None else ScriptArray(value, call) for value in values]
    layout = tuple(
        (place, tuple(array.tensor.shape), array.tensor.dtype)
        for place, array in enumerate(arrays)
        if array is not None
    )
    return arrays, layout


def join_arrays(arrays: Sequence[ScriptArray | None]) -> list[Tensor]:
    """One flat tensor for each dtype and device among the arrays, in the order in which they first occur."""
    parts: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for array in arrays:
        if array is not None:
            tensor = array.tensor
            parts.setdefault((tensor.dtype, tensor.device), []).append(tensor.reshape(-1))
    return [torch.cat(each) for each in parts.values()]


def split_buffers(arrays: Sequence[ScriptArray | None], buffers: Sequence[Tensor]) -> list[Tensor | None]:
    """The parts of the buffers that belong to each array: the inverse of `join_arrays`."""
    left = {(buffer.dtype, buffer.device): buffer for buffer in buffers}
    found: list[Tensor | None] = []
    for array in arrays:
        if array is None:
            found.append(None)
            continue
        tensor = array.tensor
        kind = (tensor.dtype, tensor.device)
        found.append(left[kind][: tensor.numel()].view(tensor.shape))
        left[kind] = left[kind][tensor.numel() :]
    return found
