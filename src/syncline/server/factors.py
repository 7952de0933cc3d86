"""The gradient of a fully connected layer as its two factors, multiplied at the server.

    gradient (m × n) = δᵀ · o        δ: b × m, the gradient of the layer's output        o: b × n, its input

For a batch of b rows the factors are b(m + n) numbers in place of mn. A payload holds what a range of the weight's
elements needs: all of o, and the columns of δ whose rows the range touches::

    magic u16 │ version u8 │ 0 u8 │ batch u32 │ rows u64 │ columns u64 │ skip u64 │ count u64 │ CRC-32 u32 │ 0 u32
    δ, batch × rows float32 │ o, batch × columns float32

The range is `count` elements, after the first `skip` of those rows. Zhang et al., *Poseidon*, 2017.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from syncline.errors import IncompatibleError, ProtocolError
from syncline.server.protocol import MOST_BYTES
from syncline.world.hooks import ModuleHook

__all__ = ["HEADER_BYTES", "FactorRecorder", "factors_are_smaller", "pack_factors", "pack_range", "unpack_and_multiply"]

MAGIC = 0x51FA
VERSION = 1
_HEADER = struct.Struct("<HBBIQQQQ")
_CRC = struct.Struct("<II")
HEADER_BYTES = _HEADER.size + _CRC.size


def factors_are_smaller(b: int, m: int, n: int, cuts: Sequence[tuple[int, int]] | None = None) -> bool:
    """Whether the factors of a batch of b are fewer bytes than an m × n gradient, and none too long for a message.

    `cuts` are the ranges of elements that go by themselves: o goes with each of them.

    >>> factors_are_smaller(32, 1024, 1024), factors_are_smaller(1024, 1024, 1024)
    (True, False)
    >>> factors_are_smaller(400, 1024, 1024), factors_are_smaller(400, 1024, 1024, [(0, 1 << 19), (1 << 19, 1 << 20)])
    (True, False)
    """
    ranges = [(0, m * n)] if cuts is None else cuts
    bodies = [4 * b * (_rows(start % n if n else 0, stop - start, n) + n) for start, stop in ranges]
    return sum(bodies) < 4 * m * n and HEADER_BYTES + max(bodies, default=0) <= MOST_BYTES


def pack_factors(delta: Tensor, o: Tensor, rows: tuple[int, int] | None = None) -> Tensor:
    """The payload, bytes, of these rows of the gradient (first, after); all of them by default.

    >>> delta, o = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]])
    >>> unpack_and_multiply(pack_factors(delta, o, rows=(1, 2)), torch.empty(3))
    tensor([ 6.,  8., 10.])
    """
    _check(delta, o)
    first, after = (0, delta.shape[1]) if rows is None else rows
    return pack_range(delta, o, first * o.shape[1], after * o.shape[1])


def pack_range(delta: Tensor, o: Tensor, start: int, stop: int) -> Tensor:
    """The payload of elements `start` to `stop` of the gradient, laid out in one row: shards end where they end.

    >>> delta, o = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]])
    >>> unpack_and_multiply(pack_range(delta, o, 2, 5), torch.empty(3))
    tensor([5., 6., 8.])
    """
    _check(delta, o)
    (batch, m), n = delta.shape, o.shape[1]
    if not 0 <= start <= stop <= m * n:
        raise IncompatibleError(f"elements {start} to {stop} do not lie in a gradient of {m} × {n}")
    first = start // n if n else 0
    skip, count = start - first * n, stop - start
    rows = _rows(skip, count, n)
    head = _HEADER.pack(MAGIC, VERSION, 0, batch, rows, n, skip, count)
    payload = torch.empty(HEADER_BYTES + 4 * batch * (rows + n), dtype=torch.uint8, device=delta.device)
    payload[:HEADER_BYTES] = torch.frombuffer(bytearray(head + _CRC.pack(zlib.crc32(head), 0)), dtype=torch.uint8)
    numbers = payload[HEADER_BYTES:].view(torch.float32)
    numbers[: batch * rows].view(batch, rows).copy_(delta[:, first : first + rows])
    numbers[batch * rows :].view(batch, n).copy_(o)
    return payload


def unpack_and_multiply(payload: Tensor, out: Tensor) -> Tensor:
    """Write the range of the gradient that a payload stands for into `out`, as many elements of float32.

    What was not packed here, or for another range, is a `ProtocolError`, and then `out` is as it was.
    """
    if out.dtype != torch.float32 or not out.is_contiguous():
        raise IncompatibleError(f"factors are multiplied into contiguous float32, not {out.dtype}{list(out.shape)}")
    batch, rows, n, skip = _read_header(payload, out.numel())
    if batch == 0 or out.numel() == 0:
        return out.zero_()
    numbers = _floats(payload[HEADER_BYTES:])
    delta, o = numbers[: batch * rows].view(batch, rows), numbers[batch * rows :].view(batch, n)
    if skip == 0 and rows * n == out.numel():
        torch.mm(delta.t(), o, out=out.view(rows, n))
    else:
        out.view(-1).copy_((delta.t() @ o).view(-1)[skip : skip + out.numel()])
    return out


def _read_header(payload: Tensor, numel: int) -> tuple[int, int, int, int]:
    """Batch, rows, columns and elements to skip. All of it is checked before a byte of the rest is looked at."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() < HEADER_BYTES:
        raise ProtocolError(f"factors are a row of at least {HEADER_BYTES} B, not {payload.dtype}{list(payload.shape)}")
    head = payload[:HEADER_BYTES].cpu().numpy().tobytes()
    magic, version, _, batch, rows, n, skip, count = _HEADER.unpack_from(head)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"what came are no factors of version {VERSION} (magic {magic:#06x}, version {version})")
    if _CRC.unpack_from(head, _HEADER.size) != (zlib.crc32(head[: _HEADER.size]), 0):
        raise ProtocolError("the checksum of factors does not match their header")
    if count != numel:
        raise ProtocolError(f"factors for {count} elements of a gradient, where {numel} are due")
    if rows != _rows(skip, count, n) or skip >= max(n, 1) or (count and not n):
        raise ProtocolError(f"factors of {rows} rows of {n} cannot stand for {count} elements after {skip}")
    due = HEADER_BYTES + 4 * batch * (rows + n)
    if payload.numel() != due:
        raise ProtocolError(f"factors of {payload.numel()} B, where {batch} × ({rows} + {n}) numbers take {due} B")
    return batch, rows, n, skip


def _rows(skip: int, count: int, n: int) -> int:
    """How many rows of n elements `count` elements after `skip` touch."""
    return -(-(skip + count) // n) if n and count else 0


def _floats(data: Tensor) -> Tensor:
    """Bytes as float32; copied where they do not lie as float32 must."""
    aligned = data.is_contiguous() and data.data_ptr() % 4 == 0 and data.storage_offset() % 4 == 0
    return (data if aligned else data.clone(memory_format=torch.contiguous_format)).view(torch.float32)


def _check(delta: Tensor, o: Tensor) -> None:
    if delta.dim() != 2 or o.dim() != 2 or delta.shape[0] != o.shape[0]:
        raise IncompatibleError(
            f"factors are δ, batch × m, and o, batch × n, of one batch, not {list(delta.shape)} and {list(o.shape)}"
        )


class FactorRecorder:
    """Listens to a model's fully connected layers, and has the factors of their gradients after a backward.

    A layer counts where its weight is used once in a backward; several backwards before a `take` add up. With `check`
    the factors are compared with the weight's gradient, along one random direction: where something else has had a
    part in it, as clipping, a penalty on the weights or another use of them, they are left out. Who finds no factors
    of a weight sends its gradient.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> with FactorRecorder(model) as tap:
    ...     model(torch.randn(4, 3)).sum().backward()
    ...     {name: (tuple(delta.shape), tuple(o.shape)) for name, (delta, o) in tap.take().items()}
    {'0.weight': ((4, 2), (4, 3)), '2.weight': ((4, 1), (4, 2))}
    """

    def __init__(self, model: nn.Module, *, check: bool = True) -> None:
        self.check = check
        self._handles: list[RemovableHandle] = []
        self._layers: dict[int, _Layer] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        linear = [module for module in model.modules() if _is_plain(module)]
        elsewhere = _others(model, linear)
        for module in linear:
            weight = module._parameters["weight"]
            if weight is None or not weight.requires_grad or id(weight) in elsewhere:
                continue
            layer = self._layers.get(id(weight))
            if layer is None:
                layer = self._layers[id(weight)] = _Layer(names[id(weight)], weight)
                self._handles.append(weight.register_post_accumulate_grad_hook(layer.settle))  # type: ignore[no-untyped-call]
            # First of all hooks: one that changes the output would change what δ is the gradient of.
            hook = ModuleHook(layer.forward)
            self._handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))

    @property
    def names(self) -> list[str]:
        """Weights that it listens to."""
        return [layer.name for layer in self._layers.values()]

    def take(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(δ, o) by the weight's name, of the backwards since the last `take`; they are forgotten here."""
        found = {}
        for layer in self._layers.values():
            factors = layer.take()
            if factors is not None and (not self.check or _agree(layer.weight.grad, *factors)):
                found[layer.name] = factors
        return found

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._layers.clear()

    def __enter__(self) -> FactorRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Layer:
    """What was heard of one weight."""

    name: str
    weight: nn.Parameter
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """One for each backward that is over."""
    heard: tuple[Tensor, Tensor] | None = None
    """In the backward that is on."""
    dense: bool = False
    """Whether the weight was used in a way that factors cannot tell."""

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if torch.is_grad_enabled() and self.weight.requires_grad and output.grad_fn is not None:
            o: Tensor = args[0] if args else kwargs["input"]
            _product(output.grad_fn).register_prehook(partial(self.backward, o.detach()))

    def backward(self, o: Tensor, gradients: Sequence[Tensor | None]) -> None:
        self.dense = self.dense or self.heard is not None or gradients[0] is None
        self.heard = None if gradients[0] is None else (gradients[0].detach(), o)

    def settle(self, weight: Tensor) -> None:
        """The weight's gradient is complete: autograd comes here once a backward."""
        if self.heard is None:
            self.dense = True
        elif not self.dense:
            self.kept.append(self.heard)
        self.heard = None

    def take(self) -> tuple[Tensor, Tensor] | None:
        kept, dense = self.kept, self.dense
        self.kept, self.heard, self.dense = [], None, False
        if dense or not kept:
            return None
        m, n = self.weight.shape
        deltas, inputs = [delta.reshape(-1, m) for delta, _ in kept], [o.reshape(-1, n) for _, o in kept]
        return (deltas[0], inputs[0]) if len(kept) == 1 else (torch.cat(deltas), torch.cat(inputs))


def _product(node: Node) -> Node:
    """The node that made a layer's output. That of batches of more dimensions is a view of it, and where somebody then
    changes the output in place, as ReLU may, autograd goes past the view's own node.
    """
    while node.name().removeprefix("Unsafe").startswith(("View", "Reshape")):
        after = node.next_functions[0][0]
        if after is None:
            break
        node = after
    return node


def _is_plain(module: nn.Module) -> bool:
    """Whether a module computes x·Wᵀ + bias and nothing else; a weight that is computed is no parameter of its own."""
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return plain and module._parameters.get("weight") is not None


def _others(model: nn.Module, linear: list[nn.Module]) -> set[int]:
    """Parameters that modules of other kinds hold, or that are no weights: an embedding may share a layer's."""
    plain = set(map(id, linear))
    return {
        id(parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not (id(module) in plain and name == "weight")
    }


def _agree(gradient: Tensor | None, delta: Tensor, o: Tensor) -> bool:
    """Whether δᵀ·o is the gradient, seen along one direction: two products with a vector, not one of matrices."""
    if gradient is None:
        return False
    draw = torch.Generator().manual_seed(0x51C7)
    probe = torch.rand(o.shape[1], generator=draw, dtype=torch.float32) + 0.5
    probe = torch.where(torch.rand(o.shape[1], generator=draw, dtype=torch.float32) < 0.5, probe, -probe).to(
        gradient.device
    )
    exact = delta.dtype == o.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    delta, o = delta.float(), o.float()
    made = delta.t() @ (o @ probe)
    bound = delta.abs().t() @ (o.abs() @ probe.abs())
    apart = (gradient.float() @ probe - made).abs()
    return bool((apart <= bound * (1e-5 if exact else 2e-2)).all())
