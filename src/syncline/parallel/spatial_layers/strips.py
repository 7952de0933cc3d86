"""Tensors of which each worker of a team has a strip, and the functions that compute with them.

```text
the image, 7 rows      0 1 2 3 4 5 6          x.shape[2] == 7 on every worker
worker 0 of 3          0 1
worker 1                   2 3
worker 2                       4 5 6
```

Code between layers works as on whole images: a strip has the shape of the whole image, and each function of torch that
gets a strip is computed by a rule. There is a rule for each function that is known to be right. Others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from syncline.errors import IncompatibleError
from syncline.parallel.team import LayerTeam, copy_to_team, gather, take_own_part

__all__ = [
    "Rule",
    "SplitAxis",
    "Strip",
    "function_name",
    "gather_rows",
    "memory_order",
    "refuse",
    "require_strip",
    "rows_of",
    "share_over_team",
]

Rule = Callable[..., Any]
"""Computes a function of torch that gets strips: `rule(function, *args, **kwargs)`."""


@dataclass(frozen=True)
class SplitAxis:
    """The dimension in which images are split over a team."""

    team: LayerTeam = field(repr=False)
    dim: int
    """Counted from the last dimension: −2 is the height, −1 the width."""
    length: int
    """The rows of the whole image, or its columns."""
    rules: Mapping[str, Rule] = field(repr=False, compare=False)

    @property
    def edges(self) -> list[int]:
        """Where the strips of the workers begin and end."""
        return self.team.edges(self.length)

    @property
    def lengths(self) -> list[int]:
        """The rows of each worker."""
        return self.team.lengths(self.length)

    @property
    def kind(self) -> str:
        """What is split, in words."""
        return {-1: "width", -2: "height"}.get(self.dim, f"dimension {self.dim}")

    def strip(self, rows: Tensor, dim: int | None = None, length: int | None = None) -> Strip:
        """This worker's rows as a strip of an image with other rows, or in another dimension."""
        strip = rows.as_subclass(Strip)
        strip.axis = replace(self, dim=self.dim if dim is None else dim, length=length or self.length)
        return strip

    def cut(self, whole: Tensor) -> Strip:
        """This worker's strip of a tensor that every worker has."""
        return self.strip(take_own_part(whole, self.team, self.dim))

    def check_length(self, length: int, result: str) -> int:
        """Refuse an image that has fewer rows than the team has workers."""
        if length < self.team.size:
            raise IncompatibleError(
                f"{result} has {length} in its {self.kind}, fewer than the {self.team.size} workers that divide it: "
                "end the region before it, or use fewer workers"
            )
        return length


class Strip(Tensor):
    """A worker's strip of an image that is split over a team. Code sees the shape of the whole image."""

    axis: SplitAxis

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = function_name(func), kwargs or {}
        axis = next(_strips((*args, *kwargs.values()))).axis
        rule = axis.rules.get(name)
        if rule is None or isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            hint = {"backward": "; use torch.utils.checkpoint with use_reentrant=False"}.get(
                name, ": end the region before it"
            )
            refuse(func, f"is not supported on images that are split along the {axis.kind}{hint}")
        return rule(func, *args, **kwargs)


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function of torch, without the underscore of functions that work in place.

    >>> function_name(torch.relu_), function_name(Tensor.__add__), function_name(Tensor.shape.__get__)
    ('relu', 'add', 'get shape')
    """
    name = getattr(function, "__name__", repr(function))
    if name in ("__get__", "__set__"):
        owner = getattr(function, "__self__", None)
        return f"{name.strip('_')} {getattr(owner, '__name__', owner)}"
    name = name.strip("_")
    return _OPERATORS.get(name, name)


_OPERATORS = {
    **{f"{prefix}{name}": name for prefix in "ir" for name in ("add", "sub", "mul", "pow")},
    **dict.fromkeys(("truediv", "itruediv", "rtruediv", "rdiv", "idiv"), "div"),
    "invert": "bitwise_not",
}
"""Names of operators, and those of the functions that they call."""


def refuse(function: Callable[..., Any], reason: str) -> NoReturn:
    """Raise an error that begins with the name of a function."""
    raise IncompatibleError(f"{getattr(function, '__name__', function)} {reason}")


def require_strip(function: Callable[..., Any], x: Any) -> tuple[SplitAxis, Tensor]:
    """The split axis of an argument that has to be a strip, and this worker's rows as a plain tensor."""
    if not isinstance(x, Strip):
        refuse(function, "gets a strip of an image, but not as its first argument")
    return x.axis, rows_of(x)


def rows_of(x: Strip) -> Tensor:
    """This worker's rows as a plain tensor, with the same memory and gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _strips(values: Sequence[Any]) -> Iterator[Strip]:
    for value in values:
        if isinstance(value, Strip):
            yield value
        elif isinstance(value, list | tuple):
            yield from _strips(value)


def gather_rows(rows: Tensor, axis: SplitAxis) -> Tensor:
    """The whole image on every worker, in the same order in memory as the rows."""
    whole = gather(rows, axis.team, axis.dim, axis.lengths)
    return whole.clone(memory_format=memory_order(rows))  # torch refuses functions in place on what `gather` returns


def memory_order(x: Tensor) -> torch.memory_format:
    """Whether channels are the last dimension in memory."""
    channels_last = x.dim() == 4 and x.stride(1) == 1 and x.shape[1] > 1
    return torch.channels_last if channels_last else torch.contiguous_format


class _CopyAll(Function):
    """Tensors themselves; the gradients are summed over the team in one all-reduce."""

    @staticmethod
    def forward(ctx: Any, team: LayerTeam, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.team = team
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = ctx.team.reduce(torch.cat([each.reshape(-1) for each in gradients]))
        parts = torch.split(flat, [each.numel() for each in gradients])
        return None, *(part.view(each.shape) for part, each in zip(parts, gradients, strict=True))


def share_over_team(team: LayerTeam, *tensors: Tensor | None) -> list[Tensor | None]:
    """Tensors that every worker has, to compute with its strip: their gradients are summed over the team."""
    wanted = [each for each in tensors if each is not None and each.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return list(tensors)
    if len(wanted) == 1 or len({(each.dtype, each.device) for each in wanted}) > 1:
        copies = [copy_to_team(each, team) for each in wanted]
    else:
        copies = list(_CopyAll.apply(team, *wanted))  # type: ignore[no-untyped-call]
    found = iter(copies)
    return [next(found) if each is not None and each.requires_grad else each for each in tensors]
