"""Where each tensor of a model lies among the keys of the servers.

```text
keys     │ group 0            │ group 1   │ buffers        │        one group of keys for each of the optimizer's
         │ fc1.weight fc1.bias │ fc2.weight │ bn.running_mean │      that has parameters to train, then float buffers
```
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError
from syncline.exchange import plain_name

__all__ = ["Field", "Group", "KeyMap", "dense_rows"]


@dataclass(frozen=True)
class Field:
    """A tensor's place."""

    name: str
    first: int
    shape: tuple[int, ...]

    @property
    def after(self) -> int:
        return self.first + math.prod(self.shape)


@dataclass(frozen=True)
class Group:
    """The keys of one parameter group."""

    number: int
    """Of the optimizer's groups."""
    first: int
    after: int


@dataclass(frozen=True)
class KeyMap:
    """Parameters, in the order of their groups, then buffers.

    >>> model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    >>> keys = KeyMap.of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> keys.trained, keys.numel, keys.bounds
    (5, 7, (0, 5))
    >>> [field.name for field in keys.buffers]
    ['1.running_mean', '1.running_var']
    """

    parameters: tuple[Field, ...]
    buffers: tuple[Field, ...]
    groups: tuple[Group, ...] = ()
    order: tuple[int, ...] = ()
    """For each parameter here, its place among the model's own."""

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer) -> KeyMap:
        """The keys of what an optimizer trains."""
        named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
        place = {id(parameter): at for at, (_, parameter) in enumerate(named)}
        order: list[int] = []
        groups: list[Group] = []
        total = 0
        for number, group in enumerate(optimizer.param_groups):
            mine = [place[id(parameter)] for parameter in group["params"] if parameter.requires_grad]
            count = sum(named[at][1].numel() for at in mine)
            if count:
                groups.append(Group(number, total, total + count))
                order += mine
                total += count
        if not groups:
            raise IncompatibleError(
                "the optimizer has no parameter that requires a gradient: there is nothing to train"
            )
        return KeyMap.in_order(model, order, groups)

    @staticmethod
    def in_order(model: nn.Module, order: Sequence[int], groups: Sequence[Group] = ()) -> KeyMap:
        """The keys of a model's parameters in an order that somebody else has told."""
        named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
        if any(not 0 <= at < len(named) for at in order):
            raise IncompatibleError(
                f"the servers hold parameter {max(order)} of a model, and this one has {len(named)}: build the same "
                "model here as on the workers"
            )
        parameters = _lay_out((named[at] for at in order), 0)
        buffers = [(plain_name(name), buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
        after = parameters[-1].after if parameters else 0
        return KeyMap(parameters, _lay_out(buffers, after), tuple(groups), tuple(order))

    @property
    def trained(self) -> int:
        """Keys of parameters; those of buffers follow."""
        return self.parameters[-1].after

    @property
    def numel(self) -> int:
        return self.buffers[-1].after if self.buffers else self.trained

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where each group begins, that of the buffers too."""
        return (*(group.first for group in self.groups), *((self.trained,) if self.buffers else ()))

    def trains(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters, in the order of the keys."""
        named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        return [named[field.name] for field in self.parameters]

    def read(self, model: nn.Module) -> Tensor:
        """What a model holds, as a row."""
        return torch.cat([self._row(tensor) for _, tensor in self._tensors(model)])

    def read_buffers(self, model: nn.Module) -> Tensor:
        """Its buffers alone."""
        found = dict(model.named_buffers())
        named = {plain_name(name): buffer for name, buffer in found.items()}
        return torch.cat([self._row(named[field.name]) for field in self.buffers])

    def write(self, model: nn.Module, row: Tensor) -> None:
        """Fill a model; a row without buffers leaves them as they are."""
        with torch.no_grad():
            for field, tensor in self._tensors(model):
                if field.after <= row.numel():
                    tensor.detach().copy_(row[field.first : field.after].view(field.shape))

    def named(self, row: Tensor) -> dict[str, Tensor]:
        """A row, cut up by the names of parameters and buffers."""
        fields = (*self.parameters, *self.buffers)
        return {
            field.name: row[field.first : field.after].view(field.shape).clone()
            for field in fields
            if field.after <= row.numel()
        }

    def joined(self, named: dict[str, Tensor], row: Tensor) -> Tensor:
        """The other way round: what is named goes into the row, the rest stays."""
        for field in (*self.parameters, *self.buffers):
            if field.name in named and field.after <= row.numel():
                row[field.first : field.after] = named[field.name].reshape(-1).to(row)
        return row

    def views(self, row: Tensor) -> list[Tensor]:
        """The parameters' parts of a row, in their shapes."""
        return [row[field.first : field.after].view(field.shape) for field in self.parameters]

    def _tensors(self, model: nn.Module) -> list[tuple[Field, Tensor]]:
        buffers = {plain_name(name): buffer for name, buffer in model.named_buffers()}
        own: list[tuple[Field, Tensor]] = list(zip(self.parameters, self.trains(model), strict=True))
        return own + [(field, buffers[field.name]) for field in self.buffers]

    @staticmethod
    def _row(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1).to("cpu", torch.float32)


def _lay_out(named: Iterable[tuple[str, Tensor]], at: int) -> tuple[Field, ...]:
    fields: list[Field] = []
    for name, tensor in named:
        if tensor.is_complex():
            raise IncompatibleError(f"{name} is complex, and servers hold float32: view it as real numbers")
        fields.append(Field(name, at, tuple(tensor.shape)))
        at = fields[-1].after
    return tuple(fields)


def dense_rows(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
    """Write gradients into their places: zeros where there is none, and sparse ones made dense."""
    there, gradients = [], []
    for parameter, view in zip(parameters, views, strict=True):
        if parameter.grad is None:
            view.zero_()
        else:
            gradient = parameter.grad.detach()
            gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
            there.append(view)
    torch._foreach_copy_(there, gradients)
