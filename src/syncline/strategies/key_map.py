"""Where each tensor of a model lies among the keys of the servers.

```text
keys   │ group 0             │ group 1    │ buffers                                  │
       │ fc1.weight fc1.bias │ fc2.weight │ bn.running_mean │ bn.num_batches_tracked │
```

One group of keys for each of the optimizer's that has parameters to train, then the buffers. Keys are float32: of a
buffer that float32 does not hold exactly, such as a counter, each byte is a key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError
from syncline.reduction import plain_name
from syncline.server.rules import TorchRule, UpdateRule

__all__ = ["KeyField", "KeyGroup", "KeyMap", "dense_rows", "read_optimizer", "settings_of", "write_optimizer"]

EXACT = (torch.float32, torch.float16, torch.bfloat16)
"""What a key of float32 holds without loss."""


@dataclass(frozen=True)
class KeyField:
    """A tensor's place."""

    name: str
    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def in_bytes(self) -> bool:
        """Whether each byte of the tensor is a key."""
        return self.dtype not in EXACT

    @property
    def after(self) -> int:
        return self.first + math.prod(self.shape) * (self.dtype.itemsize if self.in_bytes else 1)

    def write(self, tensor: Tensor) -> Tensor:
        """A tensor as keys."""
        flat = tensor.detach().reshape(-1).cpu()
        return (flat.contiguous().view(torch.uint8) if self.in_bytes else flat).to(torch.float32)

    def read(self, row: Tensor) -> Tensor:
        """The tensor that lies in a row of all keys."""
        found = row[self.first : self.after]
        return (found.to(torch.uint8).view(self.dtype) if self.in_bytes else found).view(self.shape)


@dataclass(frozen=True)
class KeyGroup:
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
    (5, 15, (0, 5))
    >>> [field.name for field in keys.buffers]
    ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    """

    parameters: tuple[KeyField, ...]
    buffers: tuple[KeyField, ...]
    groups: tuple[KeyGroup, ...] = ()
    order: tuple[int, ...] = ()
    """For each parameter here, its place among the model's own."""

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer) -> KeyMap:
        """The keys of what an optimizer trains."""
        named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
        place = {id(parameter): at for at, (_, parameter) in enumerate(named)}
        order: list[int] = []
        groups: list[KeyGroup] = []
        total = 0
        for number, group in enumerate(optimizer.param_groups):
            mine = [place[id(parameter)] for parameter in group["params"] if parameter.requires_grad]
            count = sum(named[at][1].numel() for at in mine)
            if count:
                groups.append(KeyGroup(number, total, total + count))
                order += mine
                total += count
        if not groups:
            raise IncompatibleError(
                "the optimizer has no parameter that requires a gradient: there is nothing to train"
            )
        return KeyMap.in_order(model, order, groups)

    @staticmethod
    def in_order(model: nn.Module, order: Sequence[int], groups: Sequence[KeyGroup] = ()) -> KeyMap:
        """The keys of a model's parameters in an order that somebody else has told."""
        named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
        if any(not 0 <= at < len(named) for at in order):
            raise IncompatibleError(
                f"the servers hold parameter {max(order)} of a model, and this one has {len(named)}: build the same "
                "model here as on the workers"
            )
        for name, parameter in (named[at] for at in order):
            if parameter.dtype not in EXACT:
                raise IncompatibleError(
                    f"{name} is {str(parameter.dtype).removeprefix('torch.')}, and this strategy keeps weights in "
                    "float32, which would round them: give a model in float32 or less, or take strategy allreduce"
                )
        parameters = _lay_out((named[at] for at in order), 0)
        buffers = [(plain_name(name), buffer) for name, buffer in model.named_buffers()]
        buffers.sort(key=lambda pair: pair[1].dtype not in EXACT)  # those in bytes last
        after = parameters[-1].after if parameters else 0
        return KeyMap(parameters, _lay_out(buffers, after), tuple(groups), tuple(order))

    @property
    def trained(self) -> int:
        """Keys of parameters; those of buffers follow."""
        return self.parameters[-1].after

    @property
    def averaged(self) -> int:
        """Keys of which a mean over workers makes sense; those of buffers in bytes follow."""
        return next((field.first for field in self.buffers if field.in_bytes), self.numel)

    @property
    def numel(self) -> int:
        return self.buffers[-1].after if self.buffers else self.trained

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins, and the buffers."""
        fields = [field for field in self.parameters if field.after > field.first]
        return (*(field.first for field in fields), *((self.trained,) if self.buffers else ()))

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
        return torch.cat([field.write(tensor) for field, tensor in self._tensors(model)])

    def read_buffers(self, model: nn.Module) -> Tensor:
        """Its buffers alone."""
        found = dict(model.named_buffers())
        named = {plain_name(name): buffer for name, buffer in found.items()}
        return torch.cat([field.write(named[field.name]) for field in self.buffers])

    def write(self, model: nn.Module, row: Tensor) -> None:
        """Fill a model; a row without buffers leaves them as they are."""
        with torch.no_grad():
            for field, tensor in self._tensors(model):
                if field.after <= row.numel():
                    tensor.detach().copy_(field.read(row))

    def named(self, row: Tensor) -> dict[str, Tensor]:
        """A row, cut up by the names of parameters and buffers."""
        fields = (*self.parameters, *self.buffers)
        return {field.name: field.read(row).clone() for field in fields if field.after <= row.numel()}

    def joined(self, named: dict[str, Tensor], row: Tensor) -> Tensor:
        """The other way round: what is named goes into the row, the rest stays."""
        for field in (*self.parameters, *self.buffers):
            if field.name in named and field.after <= row.numel():
                row[field.first : field.after] = field.write(named[field.name]).to(row)
        return row

    def views(self, row: Tensor) -> list[Tensor]:
        """The parameters' parts of a row, in their shapes."""
        return [row[field.first : field.after].view(field.shape) for field in self.parameters]

    def _tensors(self, model: nn.Module) -> list[tuple[KeyField, Tensor]]:
        buffers = {plain_name(name): buffer for name, buffer in model.named_buffers()}
        own: list[tuple[KeyField, Tensor]] = list(zip(self.parameters, self.trains(model), strict=True))
        return own + [(field, buffers[field.name]) for field in self.buffers]


def _lay_out(named: Iterable[tuple[str, Tensor]], at: int) -> tuple[KeyField, ...]:
    fields: list[KeyField] = []
    for name, tensor in named:
        fields.append(KeyField(name, at, tuple(tensor.shape), tensor.dtype))
        at = fields[-1].after
    return tuple(fields)


def dense_rows(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> list[int]:
    """Write gradients into their places: zeros where there is none, and sparse ones made dense.

    The numbers of the parameters that have none.
    """
    there, gradients, absent = [], [], []
    for number, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
        if parameter.grad is None:
            view.zero_()
            absent.append(number)
        else:
            gradient = parameter.grad.detach()
            gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
            there.append(view)
    if there:
        torch._foreach_copy_(there, gradients)
    return absent


SENT_ALONG = ("params", "lr", "initial_lr")
"""Keys of a parameter group that are no settings of a rule. Learning rates go with each push."""


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, such as momentum and weight decay."""
    return [
        {
            key: float(value) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in SENT_ALONG
        }
        for group in optimizer.param_groups
    ]


def read_optimizer(
    optimizer: Optimizer, keys: KeyMap, parameters: Sequence[nn.Parameter], rules: Sequence[UpdateRule]
) -> dict[str, Tensor]:
    """The state of the optimizer as rows of keys, by name; NaN where a parameter has none yet."""
    rows: dict[str, Tensor] = {}
    for group, rule in zip(keys.groups, rules, strict=True):
        if not isinstance(rule, TorchRule):
            continue
        for field, parameter in zip(keys.parameters, parameters, strict=True):
            state = optimizer.state.get(parameter, {})
            for name in rule.slots if group.first <= field.first < group.after else ():
                row = rows.setdefault(name, torch.full((keys.numel,), math.nan, dtype=torch.float32))
                value = state.get(name)
                if value is not None:
                    flat = torch.as_tensor(value).detach().reshape(-1).to("cpu", torch.float32)
                    row[field.first : field.after] = flat  # a single number goes to every key
    return rows


def write_optimizer(
    optimizer: Optimizer,
    keys: KeyMap,
    parameters: Sequence[nn.Parameter],
    rules: Sequence[UpdateRule],
    rows: Mapping[str, Tensor],
) -> None:
    """Fill the optimizer's state from rows of keys."""
    for group, rule in zip(keys.groups, rules, strict=True):
        if not isinstance(rule, TorchRule):
            continue
        for field, parameter in zip(keys.parameters, parameters, strict=True):
            if not group.first <= field.first < group.after:
                continue
            found = {name: rows[name][field.first : field.after] for name in rule.slots if name in rows}
            if not found or all(bool(row.isnan().all()) for row in found.values()):
                continue
            state = optimizer.state[parameter]
            for name, row in found.items():
                if rule.slots[name]:
                    state[name] = row.view(field.shape).to(parameter.device, parameter.dtype, copy=True)
                else:
                    device = parameter.device if optimizer.param_groups[group.number].get("fused") else "cpu"
                    state[name] = row[0].to(device, copy=True)
