"""Converts arrays of any library to tensors and back, and dtypes that the engines lack to wider ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from syncline.errors import IncompatibleError
from syncline.transports import Op

__all__ = ["Back", "import_array", "import_dlpack", "widen"]

Back = Callable[[Tensor], Any]

_WIDER: dict[torch.dtype, torch.dtype] = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.bool: torch.int32,
}
_SIGN = torch.iinfo(torch.int64).min


def import_array(x: Any) -> tuple[Tensor, Back]:
    """A detached tensor of `x`, and a function that converts a tensor to the type of `x`.

    >>> tensor, back = import_array(np.arange(3.0))
    >>> back(tensor * 2)
    array([0., 2., 4.])
    """
    if isinstance(x, Tensor):
        if x.layout != torch.strided or x.is_quantized:
            raise IncompatibleError(f"a dense tensor is needed, this one is {x.layout}; call .to_dense() first")
        if x.is_meta:
            raise IncompatibleError("a tensor on the meta device has no data to send: move it with .to_empty() first")
        return x.detach(), lambda tensor: tensor
    if isinstance(x, np.ndarray | np.generic):
        try:
            return torch.from_numpy(np.array(x, order="C")), lambda tensor: tensor.cpu().numpy()
        except (TypeError, ValueError):
            raise IncompatibleError(
                f"NumPy dtype {x.dtype} has no tensor; use a number or bool dtype of this machine's byte order"
            ) from None
    if hasattr(x, "__dlpack__") or _is_traced(x):
        namespace = None if _is_traced(x) else getattr(x, "__array_namespace__", lambda: None)()
        restore = getattr(namespace, "from_dlpack", None)
        return import_dlpack(x), lambda tensor: tensor if restore is None else restore(tensor)
    raise IncompatibleError(
        f"a torch tensor, a NumPy array or an object with __dlpack__ is needed, not {type(x).__name__}; "
        "wrap a number as torch.tensor(x)"
    )


def import_dlpack(x: Any) -> Tensor:
    """A tensor over the memory of an array of another library.

    >>> import_dlpack(np.arange(3))
    tensor([0, 1, 2])
    """
    if _is_traced(x):
        raise IncompatibleError(
            f"a {type(x).__name__} of JAX has no values while a function is traced (inside jit, grad or vmap): call "
            "the collective outside of it, or inside through jax.experimental.io_callback(function, result_shape, x, "
            "ordered=True), which runs it with the values"
        )
    try:
        return from_dlpack(x)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise IncompatibleError(
            f"this {type(x).__name__} cannot be read through DLPack ({error}): pass a NumPy array or a torch tensor"
        ) from error


def _is_traced(x: Any) -> bool:
    """Whether this is a tracer, without values, in a function that JAX traces."""
    return any(each.__name__ == "Tracer" and each.__module__.partition(".")[0] == "jax" for each in type(x).__mro__)


def widen(tensor: Tensor, op: Op) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A new contiguous tensor that can be reduced with `op` in place, and a function that restores the dtype.

    >>> wide, back = widen(torch.tensor([1, 2], dtype=torch.int16), "sum")
    >>> wide.dtype, back(wide).dtype
    (torch.int32, torch.int16)
    """
    dtype = tensor.dtype
    if dtype in _WIDER:
        return _fresh(tensor, _WIDER[dtype]), lambda wide: wide.to(dtype)
    if dtype == torch.uint64:  # the same bits: sums and products wrap alike; flipping the sign bit keeps the order
        flip = _SIGN if op in ("min", "max") else 0
        return _fresh(tensor).view(torch.int64).bitwise_xor_(flip), lambda wide: wide.bitwise_xor_(flip).view(dtype)
    if dtype.is_complex:
        if op in ("min", "max"):
            raise IncompatibleError(f"complex numbers have no order: {op} of {dtype} is not defined")
        if op == "sum":
            return torch.view_as_real(_fresh(tensor.resolve_conj())), torch.view_as_complex
        return _fresh(tensor.resolve_conj()), lambda wide: wide
    if dtype.is_floating_point and dtype.itemsize == 1:
        return _fresh(tensor, torch.float32), lambda wide: wide.to(dtype)
    return _fresh(tensor), lambda wide: wide


def _fresh(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return tensor.to(dtype or tensor.dtype, memory_format=torch.contiguous_format, copy=True).contiguous()
