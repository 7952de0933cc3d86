"""State trees as JSON and tensors: what a checkpoint can hold, and nothing that runs.

    {"lr": 0.1, "betas": (0.9, 0.99), "m": tensor}
        JSON     {"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}, "m": {"$tensor": "m"}}
        tensors  {"m": tensor}

An object with one key that begins with "$" is a mark; a dict of the user's with such a key goes as pairs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from syncline.errors import IncompatibleError, ProtocolError

__all__ = ["clone", "decode", "encode"]

DEPTH = 100
"""Deeper than any state dict; what holds itself ends here."""


def encode(value: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """`value` as JSON, and its tensors by name. What is neither is refused with the path that leads to it.

    >>> encode({"step": 3, "m": torch.zeros(2)}, "adam")
    ({'step': 3, 'm': {'$tensor': 'adam.m'}}, {'adam.m': tensor([0., 0.])})
    >>> encode({"rules": [print]}, "scheduler")
    Traceback (most recent call last):
        ...
    syncline.errors.IncompatibleError: scheduler.rules[0] is a builtin_function_or_method; a checkpoint holds tensors, \
numbers, text, and lists and dicts of them, but no code: keep it out of the state, or save what describes it
    """
    encoder = _Encoder()
    return encoder.encode(value, name, 0), encoder.tensors


class _Encoder:
    """One pass over a tree. Tensors on the same memory, such as tied weights, are kept once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._views: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()
        self._alive: list[Tensor] = []  # a freed temporary's address could come again, as another tensor's

    def encode(self, value: Any, where: str, depth: int) -> Any:
        if depth > DEPTH:
            raise IncompatibleError(f"{where[:200]}… is nested more than {DEPTH} deep: does it hold itself?")
        if isinstance(value, np.generic) and value.ndim == 0:
            value = value.item()
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, np.ndarray):
            return {"$array": self._array(value, where)}
        if isinstance(value, dict):
            return self._dict(value, where, depth)
        if isinstance(value, list):
            return [self.encode(item, f"{where}[{place}]", depth + 1) for place, item in enumerate(value)]
        if type(value) in (tuple, torch.Size):
            return {"$tuple": [self.encode(item, f"{where}[{place}]", depth + 1) for place, item in enumerate(value)]}
        if isinstance(value, int | str) and not isinstance(value, Enum):
            return int(value) if isinstance(value, int) else str(value)
        kind = type(value).__name__
        raise IncompatibleError(
            f"{where} is {'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}; a checkpoint holds tensors, numbers, "
            "text, and lists and dicts of them, but no code: keep it out of the state, or save what describes it"
        )

    def _dict(self, value: dict[Any, Any], where: str, depth: int) -> Any:
        pairs = []
        for key, item in value.items():
            if type(key) not in (str, int):
                raise IncompatibleError(
                    f"{where} has the key {key!r}, {type(key).__name__}; keys in a checkpoint are text or whole numbers"
                )
            pairs.append((key, self.encode(item, f"{where}.{key}" if where else str(key), depth + 1)))
        if isinstance(value, Counter):
            return {"$counter": pairs}
        if any(type(key) is int or key.startswith("$") for key, _ in pairs):
            return {"$dict": pairs}
        return dict(pairs)

    def _tensor(self, tensor: Tensor, where: str) -> Any:
        if tensor.layout == torch.sparse_coo:
            return self._sparse(tensor.detach(), where)
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            what = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise IncompatibleError(
                f"{where} is a tensor of the kind {what}; a checkpoint holds dense ones and sparse_coo"
            )
        plain = tensor.detach().resolve_conj().resolve_neg()
        self._alive.append(plain)
        mark = "$complex" if plain.is_complex() else "$tensor"
        storage = plain.untyped_storage().data_ptr()
        view = (storage, plain.device, plain.dtype, plain.storage_offset(), plain.shape, plain.stride())
        if plain.numel() and view in self._views:
            return {mark: self._views[view]}
        # The file format refuses two tensors that share memory in part: the later one is kept as a copy.
        kept = plain.clone() if storage in self._storages else plain
        if plain.numel():
            self._storages.add(storage)
        name = self._keep(torch.view_as_real(kept) if kept.is_complex() else kept, where)
        self._views[view] = name
        return {mark: name}

    def _sparse(self, tensor: Tensor, where: str) -> Any:
        """A gradient on its way may be sparse; as it is, coalesced or not."""
        indices = self._tensor(tensor._indices(), f"{where}.indices")
        values = self._tensor(tensor._values(), f"{where}.values")
        return {"$sparse": [indices, values, list(tensor.shape), tensor.is_coalesced()]}

    def _array(self, array: np.ndarray[Any, Any], where: str) -> str:
        try:
            return self._keep(torch.from_numpy(np.array(array, order="C")), where)
        except TypeError:
            raise IncompatibleError(f"{where} is a NumPy array of {array.dtype}, which has no tensor") from None

    def _keep(self, tensor: Tensor, where: str) -> str:
        name, number = where, 2
        while name in self.tensors:  # {"a": {"b": …}, "a.b": …}
            name, number = f"{where}~{number}", number + 1
        self.tensors[name] = tensor.contiguous()
        return name


def decode(value: Any, tensors: Mapping[str, Tensor], source: str) -> Any:
    """What `encode` was given. A tensor that was kept once for several places is one tensor in all of them.

    >>> decode({"m": {"$tensor": "adam.m"}}, {"adam.m": torch.ones(2)}, "a test")
    {'m': tensor([1., 1.])}
    """
    return _Decoder(tensors, source).decode(value)


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
        if mark == "$array":
            return self._tensors[body].numpy()
        if mark == "$float":
            return float(body)
        if mark == "$tuple":
            return tuple(self.decode(item) for item in body)
        if mark == "$counter":
            return Counter({key: self.decode(item) for key, item in body})
        if mark == "$dict":
            return {key: self.decode(item) for key, item in body}
        raise ValueError(f"unknown mark {mark}")


def clone(value: Any) -> Any:
    """A copy of a tree that shares no memory with it; tensors go to the CPU.

    >>> weights = {"w": torch.zeros(1)}
    >>> kept = clone(weights)
    >>> _ = weights["w"].fill_(7)
    >>> kept
    {'w': tensor([0.])}
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copy = value.copy()  # a Counter stays one
        for key, item in value.items():
            copy[key] = clone(item)
        return copy
    if type(value) in (list, tuple):
        return type(value)(clone(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value
