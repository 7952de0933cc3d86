"""The keys of a model's tensors at the servers, and the optimizer's state as rows of keys.

```text
keys   │ group 0             │ group 1    │ buffers                                  │
       │ fc1.weight fc1.bias │ fc2.weight │ bn.running_mean │ bn.num_batches_tracked │
```

Each of the optimizer's parameter groups is a group of keys; the buffers follow. Keys are float32. If float32 cannot
hold a buffer exactly, as a counter, each byte of the buffer is a key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError
from syncline.reduction import plain_name
from syncline.server.rules import TorchRule, UpdateRule

__all__ = ["KeyField", "KeyGroup", "KeyMap", "read_optimizer", "write_optimizer"]

EXACT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What float32 holds without loss."""


@dataclass(frozen=True)
class KeyField:
    """The keys of one tensor."""

    name: str
    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def in_bytes(self) -> bool:
        """Whether each byte of the tensor is a key."""
        return self.dtype not in EXACT_DTYPES

    @property
    def after(self) -> int:
        """The end of the keys."""
        return self.first + math.prod(self.shape) * (self.dtype.itemsize if self.in_bytes else 1)

    def write(self, tensor: Tensor) -> Tensor:
        """The values of a tensor's keys."""
        flat = tensor.detach().reshape(-1).cpu()
        return (flat.contiguous().view(torch.uint8) if self.in_bytes else flat).to(torch.float32)

    def read(self, row: Tensor) -> Tensor:
        """The tensor in a row of all keys."""
        values = row[self.first : self.after]
        return (values.to(torch.uint8).view(self.dtype) if self.in_bytes else values).view(self.shape)


@dataclass(frozen=True)
class KeyGroup:
    """The keys of one parameter group."""

    number: int
    """The number of the optimizer's parameter group."""
    first: int
    after: int


@dataclass(frozen=True)
class KeyMap:
    """The keys of a model: parameters in the order of their groups, then buffers.

    >>> model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    >>> keys = KeyMap.of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> keys.trained, keys.numel
    (5, 15)
    >>> [field.name for field in keys.buffers]
    ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    """

    parameters: tuple[KeyField, ...]
    buffers: tuple[KeyField, ...]
    groups: tuple[KeyGroup, ...] = ()
    order: tuple[int, ...] = ()
    """The index of each parameter in `model.named_parameters()`."""

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer) -> KeyMap:
        """The keys of the parameters that an optimizer trains."""
        named = list(model.named_parameters())
        index = {id(parameter): at for at, (_, parameter) in enumerate(named)}
        order: list[int] = []
        groups: list[KeyGroup] = []
        total = 0
        for number, group in enumerate(optimizer.param_groups):
            own = [index[id(parameter)] for parameter in group["params"] if parameter.requires_grad]
            count = sum(named[at][1].numel() for at in own)
            if count:
                groups.append(KeyGroup(number, total, total + count))
                order += own
                total += count
        if not groups:
            raise IncompatibleError(
                "the optimizer has no parameter that requires a gradient: there is nothing to train"
            )
        return KeyMap.in_order(model, order, groups)

    @staticmethod
    def in_order(model: nn.Module, order: Sequence[int], groups: Sequence[KeyGroup] = ()) -> KeyMap:
        """The keys of a model's parameters in a given order."""
        named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
        if any(not 0 <= at < len(named) for at in order):
            raise IncompatibleError(
                f"the servers hold parameter {max(order)} of a model, and this one has {len(named)}: build the same "
                "model here as on the workers"
            )
        for name, parameter in (named[at] for at in order):
            if parameter.dtype not in EXACT_DTYPES:
                raise IncompatibleError(
                    f"{name} is {str(parameter.dtype).removeprefix('torch.')}, and this strategy keeps weights in "
                    "float32, which would round them: give a model in float32 or less, or take strategy allreduce"
                )
        parameters = _lay_out((named[at] for at in order), 0)
        buffers = [(plain_name(name), buffer) for name, buffer in model.named_buffers()]
        buffers.sort(key=lambda pair: pair[1].dtype not in EXACT_DTYPES)  # those in bytes last
        after = parameters[-1].after if parameters else 0
        return KeyMap(parameters, _lay_out(buffers, after), tuple(groups), tuple(order))

    @property
    def trained(self) -> int:
        """Number of keys of parameters; those of buffers follow."""
        return self.parameters[-1].after

    @property
    def averaged(self) -> int:
        """Number of keys that workers can average; those of buffers in bytes follow."""
        return next((field.first for field in self.buffers if field.in_bytes), self.numel)

    @property
    def numel(self) -> int:
        """Number of all keys."""
        return self.buffers[-1].after if self.buffers else self.trained

    @property
    def starts(self) -> tuple[int, ...]:
        """The first key of each parameter, and of the buffers."""
        fields = [field for field in self.parameters if field.after > field.first]
        return (*(field.first for field in fields), *((self.trained,) if self.buffers else ()))

    def trains(self, model: nn.Module) -> list[nn.Parameter]:
        """The model's parameters in the order of the keys."""
        named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        return [named[field.name] for field in self.parameters]

    def read(self, model: nn.Module) -> Tensor:
        """The values of all keys, from a model."""
        return torch.cat([field.write(tensor) for field, tensor in self._tensors(model)])

    def read_buffers(self, model: nn.Module) -> Tensor:
        """The values of the buffers' keys, from a model."""
        named = {plain_name(name): buffer for name, buffer in model.named_buffers()}
        return torch.cat([field.write(named[field.name]) for field in self.buffers])

    def write(self, model: nn.Module, row: Tensor) -> None:
        """Fill a model from a row of keys. A row without buffers leaves the model's buffers unchanged."""
        with torch.no_grad():
            for field, tensor in self._tensors(model):
                if field.after <= row.numel():
                    tensor.detach().copy_(field.read(row))

    def named(self, row: Tensor) -> dict[str, Tensor]:
        """Split a row of keys into tensors by name."""
        fields = (*self.parameters, *self.buffers)
        return {field.name: field.read(row).clone() for field in fields if field.after <= row.numel()}

    def joined(self, named: dict[str, Tensor], row: Tensor) -> Tensor:
        """Write tensors by name into a row of keys. Other keys stay unchanged."""
        for field in (*self.parameters, *self.buffers):
            if field.name in named and field.after <= row.numel():
                row[field.first : field.after] = field.write(named[field.name]).to(row)
        return row

    def views(self, row: Tensor) -> list[Tensor]:
        """Views of the parameters in a row of keys, in their shapes."""
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


# The optimizer's state: rows of keys at the servers, tensors for each parameter here. A checkpoint has it in the
# optimizer's form, which every strategy reads.


def read_optimizer(
    optimizer: Optimizer, keys: KeyMap, parameters: Sequence[nn.Parameter], rules: Sequence[UpdateRule]
) -> dict[str, Tensor]:
    """The optimizer's state as rows of keys, by name; NaN where a parameter has none yet."""
    rows: dict[str, Tensor] = {}
    for rule, _, field, parameter in _torch_fields(keys, parameters, rules):
        state = optimizer.state.get(parameter, {})
        for name in rule.slots:
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
    for rule, group, field, parameter in _torch_fields(keys, parameters, rules):
        values = {name: rows[name][field.first : field.after] for name in rule.slots if name in rows}
        if not values or all(bool(row.isnan().all()) for row in values.values()):
            continue
        state = optimizer.state[parameter]
        for name, row in values.items():
            if rule.slots[name]:
                state[name] = row.view(field.shape).to(parameter.device, parameter.dtype, copy=True)
            else:
                device = parameter.device if optimizer.param_groups[group.number].get("fused") else "cpu"
                state[name] = row[0].to(device, copy=True)


def _torch_fields(
    keys: KeyMap, parameters: Sequence[nn.Parameter], rules: Sequence[UpdateRule]
) -> Iterable[tuple[TorchRule, KeyGroup, KeyField, nn.Parameter]]:
    """The parameters whose rule is an optimizer of torch, with rule, group and keys."""
    for group, rule in zip(keys.groups, rules, strict=True):
        for field, parameter in zip(keys.parameters, parameters, strict=True):
            if isinstance(rule, TorchRule) and group.first <= field.first < group.after:
                yield rule, group, field, parameter
