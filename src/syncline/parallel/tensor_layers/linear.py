"""Linear layers divided by their outputs or by their inputs.

Two workers, Y = GeLU(X·A), Z = Y·B:

```text
              columns                    rows
X  ─┬─ copy ── X·A₀ ── GeLU ── Y₀ ── Y₀·B₀ ─┐
    │                                        sum ── Z + bias
    └─ copy ── X·A₁ ── GeLU ── Y₁ ── Y₁·B₁ ─┘
```

Columns: one all-reduce in backward, for the gradient of X. Rows: one all-reduce in forward, for Z. The bias of the rows
is added once, after the sum.

Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from syncline.errors import IncompatibleError
from syncline.model_parts import DimensionSlice
from syncline.parallel.division import LayerDivision, Share, divide_class, restore_class
from syncline.parallel.team import (
    LayerTeam,
    copy_to_team,
    gather,
    gather_and_reduce,
    reduce_own_part,
    sum_over_team,
    take_own_part,
)

__all__ = [
    "ColumnLinear",
    "ColumnsDivision",
    "InputCopies",
    "RowLinear",
    "RowsDivision",
    "SharedInput",
    "SharedInputDivision",
    "check_length",
    "check_plain",
    "enter_layer",
    "leave_layer",
    "own_range",
]


def own_range(length: int, rank: int, size: int) -> tuple[int, int]:
    """The part of a worker along a dimension. Parts differ by one at most.

    >>> own_range(7, 0, 2), own_range(7, 1, 2)
    ((0, 3), (3, 7))
    """
    return length * rank // size, length * (rank + 1) // size


def check_length(name: str, length: int, size: int, things: str) -> None:
    """Refuse a division that would leave a worker without any."""
    if length < size:
        raise IncompatibleError(f"{name} has {length} {things}, which cannot be divided over {size} workers")


def check_plain(name: str, module: nn.Module, *tensors: str) -> None:
    """Refuse weights that are computed from others, and weights that have no shape yet."""
    for tensor in tensors if getattr(module, "bias", None) is None else (*tensors, "bias"):
        value = module._parameters.get(tensor)
        if isinstance(value, nn.parameter.UninitializedParameter):
            raise IncompatibleError(
                f"{name} is a {type(module).__name__}, whose {tensor} has no shape yet: call the model once before it "
                "is divided"
            )
        if value is None:
            raise IncompatibleError(
                f"{name}.{tensor} is computed from other tensors (a parametrization such as weight_norm): remove the "
                "parametrization, or leave the layer out of the plan"
            )


class InputCopies:
    """Copies of the tensors that several layers read in one forward.

    A copy has one all-reduce in backward, for the sum of the gradients of all layers that read it.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, layers that read the same tensor share its copy."""
        before, self._copies = self._copies, {}
        try:
            yield
        finally:
            self._copies = before

    def take(self, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """The copy of `x`."""
        if self._copies is None:
            return make(x)
        key = id(x), x._version, torch.is_grad_enabled()
        if key not in self._copies:
            self._copies[key] = x, make(x)  # with x itself, so that no other tensor gets its id
        return self._copies[key][1]


def enter_layer(x: Tensor, team: LayerTeam, sequence_dim: int | None) -> Tensor:
    """The whole input of a layer whose gradients are summed. `sequence_dim`: each worker has a part of the sequence."""
    if sequence_dim is None:
        return copy_to_team(x, team)
    return gather_and_reduce(x, team, sequence_dim, x.shape[sequence_dim] * team.size)


def leave_layer(partial: Tensor, bias: Tensor | None, team: LayerTeam, sequence_dim: int | None) -> Tensor:
    """The sum of the workers' partial outputs, with the bias. `sequence_dim`: each worker keeps its part of it."""
    if sequence_dim is None:
        whole = sum_over_team(partial, team)
        return whole if bias is None else whole + bias.to(whole.dtype)
    length = partial.shape[sequence_dim]
    if length % team.size:
        raise IncompatibleError(
            f"a sequence of {length} positions cannot be divided over {team.size} workers in equal parts: pad it to "
            f"{length + -length % team.size}, or leave '+sequence' out of the plan"
        )
    part = reduce_own_part(partial, team, sequence_dim)
    return part if bias is None else part + copy_to_team(bias, team).to(part.dtype)


class ColumnLinear:
    """A linear layer of which each worker computes some outputs."""

    tensor_team: LayerTeam
    tensor_division: ColumnsDivision

    def forward(self, x: Tensor) -> Tensor:
        team, division = self.tensor_team, self.tensor_division
        if not team.active:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        own = division.copies.take(x, lambda x: enter_layer(x, team, division.sequence_dim))
        output: Tensor = super().forward(own)  # type: ignore[misc]
        return gather(output, team, -1, team.lengths(division.outputs)) if division.gathers else output


class RowLinear:
    """A linear layer of which each worker uses some inputs; the workers sum their outputs."""

    tensor_team: LayerTeam
    tensor_division: RowsDivision
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        team, division = self.tensor_team, self.tensor_division
        if not team.active:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        own = self.weight.shape[1]
        if division.slices_input:
            x = take_own_part(x, team, -1)
        if x.shape[-1] != own:
            raise IncompatibleError(
                f"{division.name} is divided by its inputs: worker {team.rank} of {team.size} has {own} of "
                f"{division.inputs} and got {x.shape[-1]}. Divide the layer before it by 'columns', or write "
                f"'slice+rows' if its input is whole"
            )
        return leave_layer(functional.linear(x, self.weight), self.bias, team, division.sequence_dim)


class ColumnsDivision(LayerDivision):
    """A linear layer divided by its outputs."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        gathers: bool = False,
        sequence_dim: int | None = None,
        blocks: Sequence[int] | None = None,
        unit: int = 1,
    ) -> None:
        super().__init__(name, module)
        self.gathers, self.sequence_dim = gathers, sequence_dim
        self.outputs = int(getattr(module, "out_features", 0))
        self.blocks, self.unit = tuple(blocks or (self.outputs,)), unit
        """Each block, such as q, k and v of (4, 4, 4) outputs, is divided in units, such as the outputs of a head."""
        self.copies = InputCopies()

    def check(self, size: int) -> None:
        check_plain(self.name, self.module, "weight")
        check_length(self.name, self.outputs, size, "outputs")

    def share(self, rank: int, size: int) -> Share:
        ranges, start = [], 0
        for block in self.blocks:
            first, stop = own_range(block // self.unit, rank, size)
            ranges.append((start + first * self.unit, start + stop * self.unit))
            start += block
        cut = DimensionSlice(0, tuple(ranges), self.outputs)
        names = ["weight"] if self.module.bias is None else ["weight", "bias"]
        return Share(dict.fromkeys(names, cut))

    def attach(self, team: LayerTeam) -> None:
        divide_class(self.module, ColumnLinear, tensor_team=team, tensor_division=self)

    def detach(self) -> None:
        restore_class(self.module, "tensor_team", "tensor_division")


class RowsDivision(LayerDivision):
    """A linear layer divided by its inputs."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        slices_input: bool = False,
        sequence_dim: int | None = None,
        unit: int = 1,
    ) -> None:
        super().__init__(name, module)
        self.slices_input, self.sequence_dim, self.unit = slices_input, sequence_dim, unit
        self.inputs = int(getattr(module, "in_features", 0))

    def check(self, size: int) -> None:
        check_plain(self.name, self.module, "weight")
        check_length(self.name, self.inputs, size, "inputs")

    def share(self, rank: int, size: int) -> Share:
        first, stop = own_range(self.inputs // self.unit, rank, size)
        return Share({"weight": DimensionSlice(1, ((first * self.unit, stop * self.unit),), self.inputs)})

    def attach(self, team: LayerTeam) -> None:
        divide_class(self.module, RowLinear, tensor_team=team, tensor_division=self)

    def detach(self) -> None:
        restore_class(self.module, "tensor_team", "tensor_division")


class SharedInput:
    """A module whose layers read the same tensor: they share its copy."""

    tensor_copies: InputCopies

    def forward(self, *inputs: Any, **options: Any) -> Any:
        with self.tensor_copies.shared():
            return super().forward(*inputs, **options)  # type: ignore[misc]


class SharedInputDivision(LayerDivision):
    """The parent of several layers that are divided by outputs, such as the gate and the up layer of SwiGLU."""

    def __init__(self, name: str, module: nn.Module, children: Sequence[ColumnsDivision]) -> None:
        super().__init__(name, module)
        self.copies = InputCopies()
        for child in children:
            child.copies = self.copies

    def check(self, size: int) -> None:
        """Nothing of it is divided."""

    def share(self, rank: int, size: int) -> Share:
        return Share()

    def attach(self, team: LayerTeam) -> None:
        divide_class(self.module, SharedInput, tensor_copies=self.copies)

    def detach(self) -> None:
        restore_class(self.module, "tensor_copies")
