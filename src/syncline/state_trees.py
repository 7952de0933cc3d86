"""State trees as JSON and tensors. Checkpoints and messages between ranks use it, so that nothing is unpickled.

    {"lr": 0.1, "betas": (0.9, 0.99), "m": tensor}
        JSON     {"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}, "m": {"$tensor": "m"}}
        tensors  {"m": tensor}

A JSON object whose key starts with "$" is a mark. A dict of the user with such a key is written as pairs, in "$dict".

| mark | body |
|---|---|
| `$tensor`, `$complex` | the name of a tensor; a complex one is stored as pairs of reals |
| `$sparse` | indices, values, shape, whether it is coalesced |
| `$array`, `$number` | a NumPy array or number: the name of its tensor, or a `$complex` |
| `$bytes` | the name of a tensor of uint8 |
| `$float` | the text of a number that JSON does not have: nan, inf, -inf |
| `$tuple`, `$set`, `$frozenset` | a list of the items |
| `$dict`, `$counter` | a list of pairs |
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncline.errors import IncompatibleError, ProtocolError

__all__ = [
    "CHECKPOINT",
    "MAX_DEPTH",
    "MESSAGE",
    "TreeKinds",
    "clone",
    "decode",
    "encode",
    "pack",
    "packed_bytes",
    "tensor_names",
    "unpack",
]

MAX_DEPTH = 100
"""Levels of a tree. No state dict is deeper; a tree that contains itself ends here."""
TENSOR_MARKS = ("$tensor", "$complex", "$array", "$number", "$bytes")
"""Marks whose body may be the name of a tensor."""
ALIGN_BYTES = 16
"""Tensors of a packed tree begin at multiples of this."""


@dataclass(frozen=True, kw_only=True)
class TreeKinds:
    """Which values a tree may have, beside dicts, lists, tuples, tensors, NumPy arrays, numbers, text and None."""

    advice: str
    """The part of an error message that says what is allowed, and what to do."""
    extended: bool = False
    """Bytes, sets, subclasses of tuple and Mapping (they become tuple and dict), and keys of any hashable kind."""
    numpy_numbers: bool = False
    """Keep NumPy's numbers; otherwise they become Python's."""


CHECKPOINT = TreeKinds(
    advice="a checkpoint holds tensors, numbers, text, and lists and dicts of them, but no code: keep it out of the "
    "state, or save what describes it"
)
MESSAGE = TreeKinds(
    advice="None, numbers, str, bytes, list, tuple, set, dict, tensors and NumPy arrays can be sent to other ranks. "
    "Nothing is pickled: send what it is made of, such as its state_dict()",
    extended=True,
)


def encode(value: Any, name: str, kinds: TreeKinds = CHECKPOINT) -> tuple[Any, dict[str, Tensor]]:
    """Split a tree into JSON and tensors by name. A value of another kind is refused with its path.

    >>> encode({"step": 3, "m": torch.zeros(2)}, "adam")
    ({'step': 3, 'm': {'$tensor': 'adam.m'}}, {'adam.m': tensor([0., 0.])})
    >>> encode({"rules": [print]}, "scheduler")
    Traceback (most recent call last):
        ...
    syncline.errors.IncompatibleError: scheduler.rules[0] is a builtin_function_or_method; a checkpoint holds tensors, \
numbers, text, and lists and dicts of them, but no code: keep it out of the state, or save what describes it
    """
    encoder = _Encoder(kinds)
    return encoder.encode(value, name, 0), encoder.tensors


class _Encoder:
    """One pass over a tree. Tensors with the same memory and shape, such as tied weights, are stored once."""

    def __init__(self, kinds: TreeKinds) -> None:
        self.kinds = kinds
        self.tensors: dict[str, Tensor] = {}
        self._views: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()
        self._alive: list[Tensor] = []  # while a tensor lives, no other tensor can have its address

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise IncompatibleError(f"{path[:200]}… is nested more than {MAX_DEPTH} deep: does it contain itself?")
        if isinstance(value, np.generic) and value.ndim == 0:
            if self.kinds.numpy_numbers:
                return {"$number": self._array(np.asarray(value), path)}
            value = value.item()
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return {"$array": self._array(value, path)}
        if isinstance(value, dict) or (self.kinds.extended and isinstance(value, Mapping)):
            return self._dict(value, path, depth)
        if isinstance(value, list):
            return self._items(value, path, depth)
        if type(value) in (tuple, torch.Size) or (self.kinds.extended and isinstance(value, tuple)):
            return {"$tuple": self._items(value, path, depth)}
        if isinstance(value, int | str) and not isinstance(value, Enum):
            return int(value) if isinstance(value, int) else str(value)
        if self.kinds.extended and isinstance(value, bytes | bytearray):
            content = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.zeros(0).byte()
            return {"$bytes": self._add(content, path)}
        if self.kinds.extended and type(value) in (set, frozenset):
            return {f"${type(value).__name__}": self._items(value, path, depth)}
        kind = type(value).__name__
        article = "an" if kind[0].lower() in "aeiou" else "a"
        raise IncompatibleError(f"{path} is {article} {kind}; {self.kinds.advice}")

    def _items(self, items: Any, path: str, depth: int) -> list[Any]:
        return [self.encode(item, f"{path}[{place}]", depth + 1) for place, item in enumerate(items)]

    def _dict(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        pairs = []
        for key, item in value.items():
            if type(key) not in (str, int) and not self.kinds.extended:
                raise IncompatibleError(
                    f"{path} has the key {key!r}, {type(key).__name__}; keys in a checkpoint are text or whole numbers"
                )
            child = f"{path}.{key}" if path else str(key)
            pairs.append((self.encode(key, f"a key of {path}", depth + 1), self.encode(item, child, depth + 1)))
        if isinstance(value, Counter):
            return {"$counter": pairs}
        if any(type(key) is not str or key.startswith("$") for key, _ in pairs):
            return {"$dict": pairs}
        return dict(pairs)

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        if tensor.layout == torch.sparse_coo:
            return self._sparse(tensor.detach(), path)
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise IncompatibleError(
                f"{path} is a tensor of the kind {kind}; only dense and sparse_coo ones are possible"
            )
        plain = tensor.detach().resolve_conj().resolve_neg()
        self._alive.append(plain)
        mark = "$complex" if plain.is_complex() else "$tensor"
        storage = plain.untyped_storage().data_ptr()
        view = (storage, plain.device, plain.dtype, plain.storage_offset(), plain.shape, plain.stride())
        if plain.numel() and view in self._views:
            return {mark: self._views[view]}
        # The file format refuses two tensors that share a part of their memory: the later one is copied.
        own = plain.clone() if storage in self._storages else plain
        if plain.numel():
            self._storages.add(storage)
        name = self._add(torch.view_as_real(own) if own.is_complex() else own, path)
        self._views[view] = name
        return {mark: name}

    def _sparse(self, tensor: Tensor, path: str) -> Any:
        """A pending gradient may be sparse. It stays as it is, coalesced or not."""
        indices = self._tensor(tensor._indices(), f"{path}.indices")
        values = self._tensor(tensor._values(), f"{path}.values")
        return {"$sparse": [indices, values, list(tensor.shape), tensor.is_coalesced()]}

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Any:
        try:
            tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
        except TypeError:
            raise IncompatibleError(f"{path} is a NumPy array of {array.dtype}, which has no tensor") from None
        return self._tensor(tensor, path) if tensor.is_complex() else self._add(tensor, path)

    def _add(self, tensor: Tensor, path: str) -> str:
        name, number = path, 2
        while name in self.tensors:  # {"a": {"b": …}, "a.b": …}
            name, number = f"{path}~{number}", number + 1
        self.tensors[name] = tensor.contiguous()
        return name


def decode(value: Any, tensors: Mapping[str, Tensor], source: str) -> Any:
    """Build the tree that `encode` split. A tensor that was stored once for several places is one tensor again.

    >>> decode({"m": {"$tensor": "adam.m"}}, {"adam.m": torch.ones(2)}, "a test")
    {'m': tensor([1., 1.])}
    """
    return _Decoder(tensors, source).decode(value)


def tensor_names(value: Any) -> set[str]:
    """The names of the tensors in the JSON of `encode`.

    >>> tensor_names({"m": {"$tensor": "adam.m"}, "lr": 0.1})
    {'adam.m'}
    """
    if isinstance(value, list):
        return set().union(*(tensor_names(item) for item in value))
    if not isinstance(value, dict):
        return set()
    names = {body for mark, body in value.items() if mark in TENSOR_MARKS and isinstance(body, str)}
    return names.union(*(tensor_names(item) for item in value.values()))


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor], source: str) -> None:
        self._tensors = tensors
        self._source = source
        self._complex: dict[str, Tensor] = {}

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        marks = [key for key in value if key.startswith("$")]
        if not marks:
            return {key: self.decode(item) for key, item in value.items()}
        mark = marks[0]
        try:
            return self._marked(mark, value[mark])
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise ProtocolError(
                f"{self._source} has a {mark} that cannot be read ({type(error).__name__}: {error}): it was not "
                "written by this format"
            ) from None

    def _marked(self, mark: str, body: Any) -> Any:
        if mark == "$tensor":
            return self._tensors[body]
        if mark == "$complex":
            if body not in self._complex:
                self._complex[body] = torch.view_as_complex(self._tensors[body])
            return self._complex[body]
        if mark == "$sparse":
            indices, values, shape, coalesced = (self.decode(item) for item in body)
            return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)
        if mark in ("$array", "$number"):
            tensor = self._tensors[body] if isinstance(body, str) else self.decode(body)
            return tensor.numpy() if mark == "$array" else tensor.numpy()[()]
        if mark == "$bytes":
            return self._tensors[body].numpy().tobytes()
        if mark == "$float":
            return float(body)
        if mark == "$counter":
            return Counter({self.decode(key): self.decode(item) for key, item in body})
        if mark == "$dict":
            return {self.decode(key): self.decode(item) for key, item in body}
        items = (self.decode(item) for item in body)
        if mark == "$tuple":
            return tuple(items)
        if mark == "$set":
            return set(items)
        if mark == "$frozenset":
            return frozenset(items)
        raise ValueError(f"unknown mark {mark}")


def clone(value: Any) -> Any:
    """Copy a tree. The copy shares no memory with it, and its tensors are on the CPU.

    >>> weights = {"w": torch.zeros(1)}
    >>> copy = clone(weights)
    >>> _ = weights["w"].fill_(7)
    >>> copy
    {'w': tensor([0.])}
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copy = value.copy()  # a Counter stays a Counter
        for key, item in value.items():
            copy[key] = clone(item)
        return copy
    if type(value) in (list, tuple):
        return type(value)(clone(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def pack(value: Any, name: str) -> tuple[bytes, Tensor]:
    """A tree as the bytes of a JSON document and one buffer with a copy of all tensors, to be sent to another rank.

    >>> document, buffer = pack({"step": 3, "m": torch.zeros(2)}, "adam")
    >>> buffer.dtype, unpack(document, buffer, "adam")
    (torch.uint8, {'step': 3, 'm': tensor([0., 0.])})
    """
    tree, tensors = encode(value, name, MESSAGE)
    headers: list[tuple[str, str, list[int], str, int]] = []
    offset = 0
    for key, tensor in tensors.items():
        headers.append((key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type, offset))
        offset += -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    buffer = torch.zeros(offset, dtype=torch.uint8)
    for (*_, start), tensor in zip(headers, tensors.values(), strict=True):
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            buffer[start : start + tensor.nbytes].copy_(flat)
    return json.dumps({"tree": tree, "tensors": headers, "bytes": offset}).encode(), buffer


def packed_bytes(document: bytes) -> int:
    """The length of the buffer that belongs to a document."""
    return int(json.loads(document)["bytes"])


def unpack(document: bytes, buffer: Tensor, name: str, device: torch.device | None = None) -> Any:
    """The tree of `pack`. Tensors that were on a GPU are moved to `device`."""
    found = json.loads(document)
    tensors: dict[str, Tensor] = {}
    for key, kind, shape, place, start in found["tensors"]:
        dtype = getattr(torch, kind)
        nbytes = math.prod(shape) * dtype.itemsize
        # A copy: a view would keep the whole buffer alive, and torch.save would save all of it.
        tensor = buffer[start : start + nbytes].clone().view(dtype).view(shape)
        tensors[key] = tensor.to(device) if place == "cuda" and device is not None else tensor
    return decode(found["tree"], tensors, name)
