"""Giving all ranks one rank's parameters, optimizer state or objects; gathering objects."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.compat.horovod.context import ProcessSet, context, global_process_set
from syncline.compat.horovod.ops import allgather_async, broadcast_async_, synchronize
from syncline.errors import IncompatibleError, ProtocolError

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "loading_in_place",
    "pack",
    "unpack",
]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give every rank the root's values, in place.

    `params` is a state dict, `model.named_parameters()`, or a list of tensors, in the same order on every rank. What
    a state dict holds beside tensors is left alone.

    >>> import syncline as sl
    >>> import syncline.compat.horovod.torch as hvd
    >>> def same(world):
    ...     hvd.init()
    ...     weights = {"w": torch.tensor([float(hvd.rank())])}
    ...     hvd.broadcast_parameters(weights, root_rank=1)
    ...     return weights["w"].item()
    >>> sl.simulate(same, ranks=3).results
    (1.0, 1.0, 1.0)
    """
    context(operation=True)  # first, so that a missing init() is the error that is raised
    handles = [
        broadcast_async_(tensor.detach(), root_rank, name, process_set)
        for name, tensor in _pairs(params)
        if isinstance(tensor, Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def _pairs(params: Any) -> list[tuple[str | None, Any]]:
    if isinstance(params, Mapping):
        return [(str(name), params[name]) for name in sorted(params)]
    if isinstance(params, (str, bytes, Tensor)) or not isinstance(params, Iterable):
        raise IncompatibleError(
            f"broadcast_parameters takes a state dict, named_parameters() or a list of tensors, not "
            f"{type(params).__name__}"
        )
    pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    strange = next((pair for pair in pairs if len(pair) != 2 or not isinstance(pair[0], (str, type(None)))), None)
    if strange is not None:
        raise IncompatibleError(f"broadcast_parameters: {strange!r:.80} is no pair of a name and a tensor")
    return pairs


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's optimizer state: learning rates and other options, momenta, counts.

    The other ranks' optimizers may hold any state or none; L-BFGS works too. No step is taken; Horovod takes one
    with zero gradients to create the state. `model` tells Horovod which of those zeros must be
    sparse; it is not needed here.
    """
    meet = getattr(optimizer, "_current", None)  # a DistributedOptimizer's, which stands on this module
    if meet is not None:
        meet()  # after a new init() its ranks meet first: the root, which loads nothing, too
    mine = context().world.rank == root_rank
    state = broadcast_object(optimizer.state_dict() if mine else None, root_rank, process_set=process_set)
    if not mine:
        with loading_in_place(optimizer):
            optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object, on every rank.

    It is plain: None, numbers, str, bytes, lists, tuples, sets, dicts, tensors, NumPy arrays. Nothing is unpickled, so
    that other objects are refused, on every rank. Tensors arrive on the CPU.

    >>> import syncline as sl
    >>> import syncline.compat.horovod.torch as hvd
    >>> def resume(world):
    ...     hvd.init()
    ...     return hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0)
    >>> sl.simulate(resume, ranks=2).results
    ({'epoch': 3}, {'epoch': 3})
    """
    mine = context().world.rank == root_rank
    data = _bytes(pack(obj)) if mine else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()], dtype=torch.int64)
    synchronize(broadcast_async_(length, root_rank, _named(name, "length"), process_set))
    if not mine:
        data = torch.empty(int(length), dtype=torch.uint8)
    synchronize(broadcast_async_(data, root_rank, _named(name, "object"), process_set))
    found = unpack(data.numpy().tobytes(), root_rank)
    return obj if mine else found  # unpacked on the root too: what cannot be sent is refused there as well


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """`broadcast_object` for one root, as a function of the object."""

    def broadcast(obj: Any = None) -> Any:
        return broadcast_object(obj, root_rank, name, process_set)

    return broadcast


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, in the order of ranks; plain ones, as for `broadcast_object`.

    >>> import syncline as sl
    >>> import syncline.compat.horovod.torch as hvd
    >>> def gather(world):
    ...     hvd.init()
    ...     return hvd.allgather_object(("rank", hvd.rank()))
    >>> sl.simulate(gather, ranks=2).results[0]
    [('rank', 0), ('rank', 1)]
    """
    data = _bytes(pack(obj))
    length = torch.tensor([data.numel()], dtype=torch.int64)
    lengths = synchronize(allgather_async(length, _named(name, "lengths"), process_set)).tolist()
    gathered = synchronize(allgather_async(data, _named(name, "objects"), process_set))
    parts = torch.split(gathered, lengths)
    return [unpack(part.numpy().tobytes(), rank) for rank, part in zip(process_set.ranks, parts, strict=True)]


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _named(name: str | None, what: str) -> str | None:
    """Without a name it is one of the unnamed operations, which match in the order in which they are asked for."""
    return None if name is None else f"{name}.{what}"


@contextmanager
def loading_in_place(optimizer: Optimizer) -> Iterator[None]:
    """Inside, `load_state_dict` fills the existing groups and state in place, where torch creates new ones.

    Schedulers of the wrapped optimizer hold references to these groups.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if loaded is not group:
            group.clear()
            group.update(loaded)
    if optimizer.state is not state:
        loaded_state = dict(optimizer.state)
        state.clear()
        state.update(loaded_state)
    optimizer.param_groups, optimizer.state = groups, state


DEEPEST = 200
HOLDERS: dict[str, Callable[[list[Any]], Any]] = {"l": list, "t": tuple, "S": set, "z": frozenset}
NUMPY_KINDS = "biufc"
TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}
WHAT_WORKS = (
    "None, bool, int, float, str, bytes, list, tuple, set, dict, tensors, and arrays and "
    "numbers of NumPy can be sent; send obj.state_dict() or a dict of its fields instead"
)


class UnsupportedObjectError(IncompatibleError):
    """An object that is not plain."""


def pack(obj: Any) -> bytes:
    """The bytes of a plain object, or of the refusal that `unpack` raises on every rank.

    >>> unpack(pack({"epoch": 3, 7: (1.5, None, {b"x"})}), rank=0)
    {'epoch': 3, 7: (1.5, None, {b'x'})}
    """
    out = bytearray()
    try:
        _write(obj, out, 0)
    except UnsupportedObjectError as refusal:
        text = str(refusal).encode()
        return b"!" + _number(len(text)) + text
    return bytes(out)


def unpack(data: bytes, rank: int) -> Any:
    """The object that `rank` has packed.

    >>> unpack(b"l", rank=2)
    Traceback (most recent call last):
    syncline.errors.ProtocolError: an object of rank 2 is broken at byte 1 of 1: it ends too early
    """
    reader = _Reader(data, rank)
    found = reader.read(0)
    reader.end()
    return found


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _write(obj: Any, out: bytearray, depth: int) -> None:
    if depth > DEEPEST:
        raise UnsupportedObjectError(
            f"an object that nests more than {DEEPEST} deep cannot be sent; or does it hold itself?"
        )
    kind = type(obj)
    if obj is None or kind is bool:
        out += b"N" if obj is None else b"T" if obj else b"F"
    elif kind is int:
        body = obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)
        out += b"i" + _number(len(body)) + body
    elif kind is float:
        out += b"f" + struct.pack("<d", obj)
    elif kind is str or kind is bytes:
        body = obj.encode("utf-8", "surrogatepass") if kind is str else obj
        out += (b"s" if kind is str else b"b") + _number(len(body)) + body
    elif isinstance(obj, Tensor):
        _write_tensor(obj, out)
    elif isinstance(obj, np.generic):
        _write_array(b"g", np.asarray(obj), out)
    elif isinstance(obj, np.ndarray):
        _write_array(b"a", obj, out)
    elif isinstance(obj, dict):  # an OrderedDict or defaultdict too: it arrives as a plain one
        out += b"d" + _number(len(obj))
        _write_all((each for pair in obj.items() for each in pair), out, depth)
    elif kind in (list, tuple, set, frozenset):
        tag = next(tag for tag, made in HOLDERS.items() if made is kind)
        out += tag.encode() + _number(len(obj))
        _write_all(obj, out, depth)
    else:
        raise UnsupportedObjectError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks: {WHAT_WORKS}"
        )


def _write_all(items: Iterable[Any], out: bytearray, depth: int) -> None:
    for item in items:
        _write(item, out, depth + 1)


def _write_tensor(tensor: Tensor, out: bytearray) -> None:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in TORCH_DTYPES or tensor.layout != torch.strided:
        raise UnsupportedObjectError(
            f"a tensor of {tensor.dtype} and {tensor.layout} cannot be sent in an object: "
            "make it dense, of a usual dtype"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    body = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    _write_block(b"x", name, tuple(tensor.shape), body, out)


def _write_array(tag: bytes, array: Any, out: bytearray) -> None:
    if array.dtype.kind not in NUMPY_KINDS:
        raise UnsupportedObjectError(f"a NumPy array of {array.dtype} cannot be sent: make it a list, or numbers")
    if sys.byteorder == "big" or array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    _write_block(tag, array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes(), out)


def _write_block(tag: bytes, dtype: str, shape: tuple[int, ...], body: bytes, out: bytearray) -> None:
    out += tag + bytes([len(dtype)]) + dtype.encode() + bytes([len(shape)])
    for length in shape:
        out += _number(length)
    out += _number(len(body)) + body


class _Reader:
    """Reads one object, and never further than its bytes go."""

    def __init__(self, data: bytes, rank: int) -> None:
        self._data = data
        self._rank = rank
        self._at = 0

    def read(self, depth: int) -> Any:
        tag = self._take(1).decode("latin-1")
        if tag in "NTF":
            return {"N": None, "T": True, "F": False}[tag]
        if tag == "i":
            return int.from_bytes(self._body(), "little", signed=True)
        if tag == "f":
            return struct.unpack("<d", self._take(8))[0]
        if tag == "b":
            return self._body()
        if tag in "s!":
            text = self._text()
            if tag == "!":
                raise UnsupportedObjectError(f"rank {self._rank}: {text}")
            return text
        if tag in "xag":
            return self._block(tag)
        if depth > DEEPEST:
            raise self._broken(f"it nests more than {DEEPEST} deep")
        return self._holder(tag, depth)

    def end(self) -> None:
        if self._at != len(self._data):
            raise self._broken(f"{len(self._data) - self._at} bytes are left over")

    def _holder(self, tag: str, depth: int) -> Any:
        if tag not in HOLDERS and tag != "d":
            raise self._broken(f"the tag {tag!r} is unknown")
        count = self._number() * (2 if tag == "d" else 1)
        if count > len(self._data) - self._at:  # each has a byte at least
            raise self._broken(f"it tells of {count} items")
        items = [self.read(depth + 1) for _ in range(count)]
        try:
            return dict(zip(items[::2], items[1::2], strict=True)) if tag == "d" else HOLDERS[tag](items)
        except TypeError as error:
            raise self._broken(f"a key or member cannot be one ({error})") from None

    def _block(self, tag: str) -> Any:
        name = self._take(self._take(1)[0]).decode("latin-1")
        shape = tuple(self._number() for _ in range(self._take(1)[0]))
        body = self._body()
        if tag == "x":
            dtype = TORCH_DTYPES.get(name)
            if dtype is None or math.prod(shape) * dtype.itemsize != len(body):
                raise self._broken(f"{len(body)} bytes are no tensor of {name}{list(shape)}")
            flat = torch.frombuffer(bytearray(body), dtype=dtype) if body else torch.empty(0, dtype=dtype)
            return flat.view(shape)
        try:
            kind = np.dtype(name)
        except TypeError:
            raise self._broken(f"the dtype {name!r} is unknown") from None
        if kind.kind not in NUMPY_KINDS or math.prod(shape) * kind.itemsize != len(body):
            raise self._broken(f"{len(body)} bytes are no array of {name}{list(shape)}")
        array = np.frombuffer(bytearray(body), dtype=kind.newbyteorder("<")).astype(kind).reshape(shape)
        return array if tag == "a" else array[()]

    def _text(self) -> str:
        try:
            return self._body().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self._broken(f"its text is none ({error.reason})") from None

    def _number(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _body(self) -> bytes:
        return self._take(self._number())

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise self._broken("it ends too early")
        self._at += count
        return self._data[self._at - count : self._at]

    def _broken(self, why: str) -> ProtocolError:
        return ProtocolError(
            f"an object of rank {self._rank} is broken at byte {self._at} of {len(self._data)}: {why}", peer=self._rank
        )
