"""Modules that compute on a part of the activations: of the sequence, or of the features of a divided layer.

Two workers, with the sequence divided around a block (sequence parallelism):

```text
        sequence        sequence+columns            rows+sequence          sequence
x₀ ── norm(x₀) ─┐                   ┌─ y₀ ── z₀ ─┐                 ┌─ z's first half ── dropout
                gather ── whole x ──┤            reduce and scatter
x₁ ── norm(x₁) ─┘                   └─ y₁ ── z₁ ─┘                 └─ z's other half ── dropout
```

A gather and a reduce-scatter send as many bytes as the all-reduce that they replace, and norms and dropouts compute and
keep 1/p of the activations. Each worker's gradient of a norm's weights is partial, so they are summed over the team.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from syncline.errors import IncompatibleError
from syncline.parallel.division import LayerDivision, Share, divide_class, restore_class
from syncline.parallel.team import LayerTeam, copy_to_team, gather, take_own_part
from syncline.parallel.tensor_layers.random_streams import split_random

__all__ = ["PartDivision", "PartModule"]


class PartModule:
    """A module that gets a part of the activations. Its parameters are whole; their gradients are summed."""

    tensor_team: LayerTeam
    tensor_division: PartDivision

    def forward(self, x: Any, *inputs: Any, **options: Any) -> Any:
        team, division = self.tensor_team, self.tensor_division
        if not team.active:
            return super().forward(x, *inputs, **options)  # type: ignore[misc]
        if division.slices:
            x = division.slice(x, team)
        module: Any = self
        with ExitStack() as stack:
            stack.enter_context(_copied_parameters(module, team))
            if module.training and division.is_random:
                stack.enter_context(split_random(team, x.device if isinstance(x, Tensor) else None))
            output = super().forward(x, *inputs, **options)  # type: ignore[misc]
        return gather(output, team, division.dim) if division.gathers else output


@contextmanager
def _copied_parameters(module: nn.Module, team: LayerTeam) -> Iterator[None]:
    """Inside, the parameters of a module are copies whose gradients are summed over the team."""
    owners = [each for each in module.modules() if any(p is not None for p in each._parameters.values())]
    for owner in owners:  # an instance's own attribute comes before the parameter of the same name
        vars(owner).update({name: copy_to_team(p, team) for name, p in owner._parameters.items() if p is not None})
    try:
        yield
    finally:
        for owner in owners:
            for name in owner._parameters:
                vars(owner).pop(name, None)


class PartDivision(LayerDivision):
    """A module that computes on this worker's part of the activations."""

    def __init__(
        self, name: str, module: nn.Module, *, dim: int = 1, slices: bool = False, gathers: bool = False
    ) -> None:
        super().__init__(name, module)
        self.dim, self.slices, self.gathers = dim, slices, gathers
        """The dimension of the sequence; whether the input is whole; whether the output shall be whole."""
        self.is_random = not isinstance(module, nn.LayerNorm | nn.RMSNorm)

    def check(self, size: int) -> None:
        for name, each in self.module.named_modules():
            if isinstance(each, nn.modules.batchnorm._BatchNorm):
                raise IncompatibleError(
                    f"{'.'.join(filter(None, (self.name, name)))} is a {type(each).__name__}, whose statistics would "
                    "be those of this worker's part: batch normalisation of divided channels has the role 'channels'"
                )
            if isinstance(each, nn.RNNBase):
                raise IncompatibleError(f"{self.name} is a {type(each).__name__}: it needs whole sequences")

    def slice(self, x: Tensor, team: LayerTeam) -> Tensor:
        """This worker's part of the sequence."""
        length = x.shape[self.dim]
        if length % team.size:
            raise IncompatibleError(
                f"{self.name} divides a sequence, and {length} positions cannot be divided over {team.size} workers in "
                f"equal parts: pad it to {length + -length % team.size}"
            )
        return take_own_part(x, team, self.dim)

    def share(self, rank: int, size: int) -> Share:
        return Share()

    def attach(self, team: LayerTeam) -> None:
        divide_class(self.module, PartModule, tensor_team=team, tensor_division=self)

    def detach(self) -> None:
        restore_class(self.module, "tensor_team", "tensor_division")
