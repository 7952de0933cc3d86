"""Sends the gradient of a fully connected layer as its two factors, which the server multiplies.

    gradient (m × n) = δᵀ · o        δ: b × m, the gradient of the layer's output        o: b × n, its input

For a batch of b rows the factors have b(m + n) numbers instead of mn. A payload is about a range of the weight's
elements. It has all of o, and the columns of δ for the rows that the range touches::

    magic u16 │ version u8 │ 0 u8 │ batch u32 │ rows u64 │ columns u64 │ skip u64 │ count u64 │ CRC-32 u32 │ 0 u32
    δ, batch × rows float32 │ o, batch × columns float32

The range is `count` elements, after the first `skip` of those rows. Zhang et al., *Poseidon*, 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from syncline.errors import IncompatibleError, ProtocolError
from syncline.server.protocol import MAX_BODY_BYTES
from syncline.wire import WireHeader
from syncline.world.hooks import ModuleHook

__all__ = ["HEADER_BYTES", "FactorRecorder", "factors_are_smaller", "pack_factors", "pack_range", "unpack_and_multiply"]

_HEADER = WireHeader(b"\xfa\x51", version=1, fields="xIQQQQ", padding=4)
HEADER_BYTES = _HEADER.nbytes


def factors_are_smaller(b: int, m: int, n: int, ranges: Sequence[tuple[int, int]] | None = None) -> bool:
    """Whether the factors of a batch of b have fewer bytes than an m × n gradient, and fit into messages.

    `ranges` are the ranges of elements in separate messages. Each message contains o.

    >>> factors_are_smaller(32, 1024, 1024), factors_are_smaller(1024, 1024, 1024)
    (True, False)
    >>> factors_are_smaller(400, 1024, 1024), factors_are_smaller(400, 1024, 1024, [(0, 1 << 19), (1 << 19, 1 << 20)])
    (True, False)
    """
    parts = [(0, m * n)] if ranges is None else ranges
    bodies = [4 * b * (_rows(start % n if n else 0, stop - start, n) + n) for start, stop in parts]
    return sum(bodies) < 4 * m * n and HEADER_BYTES + max(bodies, default=0) <= MAX_BODY_BYTES


def pack_factors(delta: Tensor, o: Tensor, rows: tuple[int, int] | None = None) -> Tensor:
    """The payload of the gradient's rows (first, end); by default of all rows.

    >>> delta, o = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]])
    >>> unpack_and_multiply(pack_factors(delta, o, rows=(1, 2)), torch.empty(3))
    tensor([ 6.,  8., 10.])
    """
    _check(delta, o)
    first, end = (0, delta.shape[1]) if rows is None else rows
    return pack_range(delta, o, first * o.shape[1], end * o.shape[1])


def pack_range(delta: Tensor, o: Tensor, start: int, stop: int) -> Tensor:
    """The payload of elements `start` to `stop` of the flattened gradient. A range may begin and end within a row.

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
    header = _HEADER.pack(batch, rows, n, skip, count)
    payload = torch.empty(HEADER_BYTES + 4 * batch * (rows + n), dtype=torch.uint8, device=delta.device)
    payload[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    numbers = payload[HEADER_BYTES:].view(torch.float32)
    numbers[: batch * rows].view(batch, rows).copy_(delta[:, first : first + rows])
    numbers[batch * rows :].view(batch, n).copy_(o)
    return payload


def unpack_and_multiply(payload: Tensor, out: Tensor) -> Tensor:
    """Compute a payload's range of the gradient into `out`, a float32 tensor.

    A malformed payload, or one for another number of elements, raises a `ProtocolError`; `out` is unchanged then.
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
    """Batch, rows, columns and elements to skip; all are checked."""
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise ProtocolError(f"factors are a row of bytes, not {payload.dtype}{list(payload.shape)}")
    batch, rows, n, skip, count = _HEADER.read(payload[:HEADER_BYTES].cpu().numpy().tobytes(), _refuse)
    if count != numel:
        raise ProtocolError(f"factors for {count} elements of a gradient, where {numel} are due")
    if rows != _rows(skip, count, n) or skip >= max(n, 1) or (count and not n):
        raise ProtocolError(f"factors of {rows} rows of {n} cannot stand for {count} elements after {skip}")
    due = HEADER_BYTES + 4 * batch * (rows + n)
    if payload.numel() != due:
        raise ProtocolError(f"factors of {payload.numel()} B, where {batch} × ({rows} + {n}) numbers take {due} B")
    return batch, rows, n, skip


def _refuse(reason: str) -> ProtocolError:
    return ProtocolError(f"factors were refused: {reason}")


def _rows(skip: int, count: int, n: int) -> int:
    """The number of rows of n elements that `count` elements after `skip` touch."""
    return -(-(skip + count) // n) if n and count else 0


def _floats(data: Tensor) -> Tensor:
    """Bytes as float32; copied if they are not aligned."""
    aligned = data.is_contiguous() and data.data_ptr() % 4 == 0 and data.storage_offset() % 4 == 0
    return (data if aligned else data.clone(memory_format=torch.contiguous_format)).view(torch.float32)


def _check(delta: Tensor, o: Tensor) -> None:
    if delta.dim() != 2 or o.dim() != 2 or delta.shape[0] != o.shape[0]:
        raise IncompatibleError(
            f"factors are δ, batch × m, and o, batch × n, of one batch, not {list(delta.shape)} and {list(o.shape)}"
        )


class FactorRecorder:
    """Records the factors of the gradients of a model's fully connected layers during backward passes.

    A layer is recorded if its weight is used once in a backward pass. Several passes before a `take` add up. With
    `check` the factors are compared with the weight's gradient along one random direction. They are left out if the
    gradient has other parts, from clipping, weight penalties or another use of the weight. The caller sends the dense
    gradient for weights without factors.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> with FactorRecorder(model) as recorder:
    ...     model(torch.randn(4, 3)).sum().backward()
    ...     {name: (tuple(delta.shape), tuple(o.shape)) for name, (delta, o) in recorder.take().items()}
    {'0.weight': ((4, 2), (4, 3)), '2.weight': ((4, 1), (4, 2))}
    """

    def __init__(self, model: nn.Module, *, check: bool = True) -> None:
        self.check = check
        self._handles: list[RemovableHandle] = []
        self._layers: dict[int, _Layer] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        linear = [module for module in model.modules() if _is_plain(module)]
        elsewhere = _other_parameters(model, linear)
        for module in linear:
            weight = module._parameters["weight"]
            if weight is None or not weight.requires_grad or id(weight) in elsewhere:
                continue
            layer = self._layers.get(id(weight))
            if layer is None:
                layer = self._layers[id(weight)] = _Layer(names[id(weight)], weight)
                self._handles.append(weight.register_post_accumulate_grad_hook(layer.finish_pass))  # type: ignore[no-untyped-call]
            # Before all other hooks: a hook that changes the output would change the meaning of δ.
            hook = ModuleHook(layer.forward)
            self._handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))

    @property
    def names(self) -> list[str]:
        """The names of the recorded weights."""
        return [layer.name for layer in self._layers.values()]

    def take(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (δ, o) by the weight's name, for the backward passes since the last `take`, and forget them."""
        found = {}
        for layer in self._layers.values():
            factors = layer.take()
            if factors is not None and (not self.check or _agree(layer.weight.grad, *factors)):
                found[layer.name] = factors
        return found

    def close(self) -> None:
        """Remove the hooks."""
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
    """The recorded factors of one weight."""

    name: str
    weight: nn.Parameter
    finished: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """One pair for each finished backward pass."""
    current: tuple[Tensor, Tensor] | None = None
    """The pair of the current backward pass."""
    dense: bool = False
    """Whether the weight was used in a way that factors cannot express."""

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if torch.is_grad_enabled() and self.weight.requires_grad and output.grad_fn is not None:
            o: Tensor = args[0] if args else kwargs["input"]
            _product(output.grad_fn).register_prehook(partial(self.backward, o.detach()))

    def backward(self, o: Tensor, gradients: Sequence[Tensor | None]) -> None:
        self.dense = self.dense or self.current is not None or gradients[0] is None
        self.current = None if gradients[0] is None else (gradients[0].detach(), o)

    def finish_pass(self, weight: Tensor) -> None:
        """The weight's gradient is complete. Autograd calls this once in each backward pass."""
        if self.current is None:
            self.dense = True
        elif not self.dense:
            self.finished.append(self.current)
        self.current = None

    def take(self) -> tuple[Tensor, Tensor] | None:
        pairs, dense = self.finished, self.dense
        self.finished, self.current, self.dense = [], None, False
        if dense or not pairs:
            return None
        m, n = self.weight.shape
        deltas, inputs = [delta.reshape(-1, m) for delta, _ in pairs], [o.reshape(-1, n) for _, o in pairs]
        return (deltas[0], inputs[0]) if len(pairs) == 1 else (torch.cat(deltas), torch.cat(inputs))


def _product(node: Node) -> Node:
    """The autograd node of a layer's product. The output of a batch with more dimensions is a view of it. If the output
    is then changed in place, as by ReLU, autograd skips the view's own node.
    """
    while node.name().removeprefix("Unsafe").startswith(("View", "Reshape")):
        after = node.next_functions[0][0]
        if after is None:
            break
        node = after
    return node


def _is_plain(module: nn.Module) -> bool:
    """Whether a module computes only x·Wᵀ + bias, with a weight that is its own parameter."""
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return plain and module._parameters.get("weight") is not None


def _other_parameters(model: nn.Module, linear: list[nn.Module]) -> set[int]:
    """The ids of parameters of other modules, and of biases: an embedding may share a layer's weight."""
    plain = set(map(id, linear))
    return {
        id(parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not (id(module) in plain and name == "weight")
    }


def _agree(gradient: Tensor | None, delta: Tensor, o: Tensor) -> bool:
    """Whether δᵀ·o is the gradient, tested along one direction, without a matrix product."""
    if gradient is None:
        return False
    draw = torch.Generator().manual_seed(0x51C7)
    probe = torch.rand(o.shape[1], generator=draw, dtype=torch.float32) + 0.5
    probe = torch.where(torch.rand(o.shape[1], generator=draw, dtype=torch.float32) < 0.5, probe, -probe).to(
        gradient.device
    )
    exact = delta.dtype == o.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    delta, o = delta.float(), o.float()
    product = delta.t() @ (o @ probe)
    bound = delta.abs().t() @ (o.abs() @ probe.abs())
    difference = (gradient.float() @ probe - product).abs()
    return bool((difference <= bound * (1e-5 if exact else 2e-2)).all())
