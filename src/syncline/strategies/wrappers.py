"""Refuses models that another wrapper synchronises: gradients would be averaged twice, or on parts of a weight."""

from __future__ import annotations

import gc

import torch.distributed as dist  # noqa: TID251 (only to ask whether there is a process group)
from torch import nn

from syncline.errors import IncompatibleError

__all__ = ["refuse_wrapped", "refuse_wrapper_around"]

WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Classes of torch that synchronise a module themselves, by name, so that they need not be imported."""


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that is, or contains, a wrapper of torch that synchronises it, or has sharded parameters."""
    for name, module in model.named_modules():
        found = _wrapper(module)
        if found is not None:
            where = "the model" if not name else f"the model's part {name!r}"
            raise IncompatibleError(
                f"{where} is a {found}, which synchronises its gradients itself: give sl.distribute the plain module, "
                f"and leave {found} out"
            )
    sharded = next((name for name, each in model.named_parameters() if type(each).__name__ == "DTensor"), None)
    if sharded is not None:
        raise IncompatibleError(
            f"{sharded} is a DTensor, which torch has sharded over the workers: give sl.distribute a model whose "
            "parameters are whole on every worker"
        )


def refuse_wrapper_around(model: nn.Module) -> None:
    """Refuse a model that is inside a wrapper of torch, such as of a framework that finds RANK and WORLD_SIZE.

    A wrapper needs torch's process group. Where there is none nothing is searched.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    for each in gc.get_objects():
        if not issubclass(type(each), nn.Module) or each is model:
            continue
        found = _wrapper(each)
        if found is not None and any(module is model for module in each.modules()):
            raise IncompatibleError(
                f"the model that sl.distribute synchronises is wrapped in a {found}, which averages its gradients "
                f"too: leave {found} out; a framework that adds it by itself finds no other workers after "
                "sl.init(hide=True)"
            )


def _wrapper(module: nn.Module) -> str | None:
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in WRAPPERS and _of_torch(kind)), None)


def _of_torch(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "torch"
