"""What Horovod's operations give, worked out in NumPy, and how the cases that are compared with it are run.

A case is a function of a process set. It knows the tensors of all members, so each rank checks its own result:

```text
numbers(members, …)  →  [ array of member 0, array of member 1, … ]  →  the reference  →  same(result, wanted)
```

NumPy has no bfloat16: such tensors are float32 arrays here, rounded as bfloat16 is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import syncline as sl
import syncline.compat.horovod.torch as hvd

Array = NDArray[Any]
Case = Callable[[hvd.ProcessSet], None]

WHOLES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*WHOLES, *REALS)
MOVABLE = (*DTYPES, torch.bool)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (5,), (2, 3), (3, 0, 2))
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
CLOSE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}

_CARRIERS: dict[torch.dtype, Any] = {
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.bfloat16: np.float32,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bool: np.bool_,
}
_COMBINE: dict[int, Callable[[Any, Any], Any]] = {
    hvd.Average: np.add,
    hvd.Sum: np.add,
    hvd.Min: np.minimum,
    hvd.Max: np.maximum,
    hvd.Product: np.multiply,
}


def run_all(world: sl.World, *cases: Case) -> None:
    """Cases on all ranks, one after the other."""
    hvd.init()
    for case in cases:
        case(hvd.global_process_set)
    hvd.shutdown()


def simulated(ranks: int, *cases: Case) -> None:
    """The same on simulated ranks."""
    sl.simulate(lambda world: run_all(world, *cases), ranks=ranks)


# What the ranks have.


def numbers(
    members: hvd.ProcessSet, shape: Sequence[int], dtype: torch.dtype, seed: int = 0, most: int = 9
) -> list[Array]:
    """Each member's array: whole numbers up to `most`, halves in floating point. Their sums are exact everywhere."""
    return [draw(shape, dtype, seed, place, most) for place in range(members.size())]


def draw(shape: Sequence[int], dtype: torch.dtype, seed: int, place: int, most: int = 9) -> Array:
    """The array of one member."""
    unsigned = dtype in (torch.uint8, torch.bool)
    drawn = np.random.default_rng([seed, place]).integers(0 if unsigned else -most, most + 1, tuple(shape))
    if dtype == torch.bool:
        drawn = drawn % 2
    return np.asarray(drawn / 2 if dtype.is_floating_point else drawn).astype(_CARRIERS[dtype])


def tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """A tensor of its own with an array's numbers."""
    return torch.from_numpy(np.array(array, order="C")).to(dtype)


def array_of(found: Tensor) -> Array:
    """A tensor's numbers."""
    dense = found.detach()
    result: Array = (dense.float() if dense.dtype == torch.bfloat16 else dense).numpy()
    return result


def same(found: Any, wanted: Array, dtype: torch.dtype, note: object = "") -> None:
    """A result is what it should be, to the bit."""
    assert isinstance(found, Tensor), f"{note}: {found!r} is not a tensor"
    assert found.dtype == dtype, f"{note}: {found.dtype} is not {dtype}"
    assert tuple(found.shape) == np.shape(wanted), f"{note}: shape {tuple(found.shape)} is not {np.shape(wanted)}"
    assert np.array_equal(array_of(found), wanted), f"{note} {dtype}: {array_of(found)} is not {wanted}"


def close(found: Tensor, wanted: Array, dtype: torch.dtype, note: object = "") -> None:
    """A result is what it should be, within the rounding of its dtype."""
    assert found.dtype == dtype, f"{note}: {found.dtype} is not {dtype}"
    assert tuple(found.shape) == np.shape(wanted), f"{note}: shape {tuple(found.shape)} is not {np.shape(wanted)}"
    near = np.allclose(array_of(found), wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert near, f"{note} {dtype}: {array_of(found)} is not near {wanted}"


# What the operations do.


def rounded(array: Any, dtype: torch.dtype) -> Array:
    """To the nearest number that a dtype has; ties to the even one."""
    if dtype != torch.bfloat16:
        return np.asarray(array).astype(_CARRIERS[dtype])
    bits = np.atleast_1d(np.asarray(array, dtype=np.float32)).view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    result: Array = upper.view(np.float32).reshape(np.shape(array))
    return result


def scaled(array: Array, factor: float, dtype: torch.dtype) -> Array:
    """Horovod's rounding on a CPU: whole numbers by a double and cut off, 16 bits by way of float32."""
    if factor == 1.0:
        return array
    if dtype in WHOLES:
        return np.asarray(np.trunc(array.astype(np.float64) * factor)).astype(array.dtype)
    if dtype == torch.float64:
        return np.asarray(array * factor)
    return rounded(array.astype(np.float32) * np.float32(factor), dtype)


def reduced(arrays: Sequence[Array], op: int, dtype: torch.dtype, before: float = 1.0, after: float = 1.0) -> Array:
    """Scaled, combined in their dtype, scaled again; an average is a sum whose second factor is divided."""
    total = scaled(arrays[0], before, dtype)
    for other in arrays[1:]:
        total = rounded(_COMBINE[op](total, scaled(other, before, dtype)), dtype)
    return scaled(total, after / len(arrays) if op == hvd.Average else after, dtype)


def adasum(arrays: Sequence[Array], dtype: torch.dtype) -> Array:
    """Neighbours, then pairs of pairs; twos alike give themselves, twos at right angles their sum."""
    if len(arrays) == 1:
        return arrays[0]
    half = len(arrays) // 2
    a, b = (adasum(part, dtype).astype(np.float64) for part in (arrays[:half], arrays[half:]))
    dot, one, other = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    left = 1.0 - dot / (2 * one) if one else 1.0
    right = 1.0 - dot / (2 * other) if other else 1.0
    return rounded(left * a + right * b, dtype)


def gathered(arrays: Sequence[Array]) -> Array:
    """One after the other; single numbers count as one row."""
    return np.concatenate([np.atleast_1d(array) for array in arrays])


def traded(arrays: Sequence[Array], splits: Sequence[Sequence[int]]) -> list[Array]:
    """What each member receives, when member s sends its first splits[s][0] rows to member 0, and so on."""
    pieces = [np.split(array, np.cumsum(split)[:-1]) for array, split in zip(arrays, splits, strict=True)]
    return [np.concatenate([cut[to] for cut in pieces]) for to in range(len(arrays))]


def shared_out(total: Array, size: int) -> list[Array]:
    """The rows of each member: alike, and one more for the first ones where they do not divide."""
    return list(np.array_split(total, size))


def dense_sum(parts: Sequence[tuple[Array, Array]], shape: Sequence[int], dtype: torch.dtype) -> Array:
    """Of sparse tensors, each the numbers of rows and the rows."""
    total = np.zeros(tuple(shape), _CARRIERS[dtype])
    for rows, values in parts:
        np.add.at(total, rows, values)
    return total
