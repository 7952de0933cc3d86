"""torch's `parallelize_module` on gloo, for `syncline bench parallel`.

Its module is imported only when it is needed: the import of torch.distributed.tensor takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from syncline.errors import IncompatibleError

__all__ = ["parallelize", "whole_parameters"]

STYLES: dict[str, type[ParallelStyle]] = {"columns": ColwiseParallel, "rows": RowwiseParallel}


def parallelize(model: nn.Module, roles: Mapping[str, str], workers: int) -> None:
    """Divide linear layers, named by patterns, over all ranks of the default process group."""
    other = next((role for role in roles.values() if role not in STYLES), None)
    if other is not None:
        raise IncompatibleError(f"DTensor has no counterpart of the role {other!r}: its styles are columns and rows")
    mesh = init_device_mesh("cpu", (workers,))
    parallelize_module(model, mesh, {pattern: STYLES[role]() for pattern, role in roles.items()})


def whole_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters of the undivided model. Every rank calls it."""
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in model.parameters()]
