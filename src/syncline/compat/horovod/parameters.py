"""The parameters of an optimizer by name, and the checks that Horovod makes of what a script tells about them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from syncline.errors import IncompatibleError, SynclineError

__all__ = [
    "NO_NEW_GROUPS",
    "TOO_MANY_PASSES",
    "ZEROED_TOO_SOON",
    "PassesError",
    "after_gradient",
    "below",
    "check_groups",
    "describe",
    "held_by",
    "loading_in_place",
    "named_of",
]

TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally"
)
ZEROED_TOO_SOON = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize()"
)
GROUPS_ARE_NEWER = "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0."
"""Horovod's text, which scripts may match."""
NO_NEW_GROUPS = (
    "add_param_group on a DistributedOptimizer: its ranks have agreed on the parameters; add the group to the plain "
    "optimizer, and make the DistributedOptimizer of it anew"
)

K = TypeVar("K", bound=Optimizer)


class PassesError(SynclineError, AssertionError):
    """Backward passes, `zero_grad()` and `step()` in an order that loses gradients.

    >>> issubclass(PassesError, AssertionError)
    True
    """


def held_by(optimizer: Optimizer) -> list[Parameter]:
    """All parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_of(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[str, Parameter]:
    """The optimizer's parameters by the names that the script gives, in its order; Horovod's where it gives none.

    Names of parameters that the optimizer does not hold are left out: often the script names the whole model's.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    >>> list(named_of(optimizer, None)), list(named_of(optimizer, model.named_parameters()))
    (['allreduce.noname.0.0', 'allreduce.noname.1.0'], ['weight', 'bias'])
    """
    held = held_by(optimizer)
    if named_parameters is None:
        return {
            f"allreduce.noname.{group}.{place}": parameter
            for group, each in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(each["params"])
        }
    pairs = list(named_parameters)
    strange = next((pair for pair in pairs if not _is_pair(pair)), None)
    if strange is not None:
        raise IncompatibleError(
            f"named_parameters holds a {type(strange).__name__}, and takes pairs (name, parameter): give "
            "model.named_parameters()"
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise IncompatibleError(
            f"named_parameters has {', '.join(twice)} more than once: names must be unique; put the model's name "
            "before those of several models"
        )
    wanted = {id(parameter) for parameter in held}
    named: dict[str, Parameter] = {}
    for name, parameter in pairs:
        if id(parameter) in wanted:
            wanted.discard(id(parameter))  # one that has two names goes by the first
            named[name] = parameter  # type: ignore[assignment]
    if wanted:
        shapes = [tuple(parameter.shape) for parameter in held if id(parameter) in wanted]
        raise IncompatibleError(
            f"{len(shapes)} of the optimizer's {len(held)} parameters have no name in named_parameters (the first has "
            f"shape {shapes[0]}): name those of every model that it trains, or leave named_parameters out"
        )
    return named


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)


def check_groups(num_groups: Any, groups: Any) -> None:
    """Raise what Horovod refuses of `num_groups` and `groups`."""
    if not isinstance(num_groups, int) or isinstance(num_groups, bool) or num_groups < 0:
        raise IncompatibleError(f"num_groups={num_groups!r}: a number of groups, not negative")
    if num_groups:
        warnings.warn(GROUPS_ARE_NEWER, DeprecationWarning, stacklevel=3)
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return
    lists = isinstance(groups, list) and all(isinstance(group, (list, tuple)) for group in groups)
    if not lists or not all(isinstance(each, Tensor) for group in groups for each in group):
        raise IncompatibleError(f"groups={groups!r:.80}: a number that is not negative, or a list of lists of tensors")
    members = [id(each) for group in groups for each in group]
    if len(set(members)) < len(members):
        raise IncompatibleError("groups: a parameter is in two of the lists, and may be in one only")


def after_gradient(parameter: Tensor, fn: Callable[[Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    """A hook that is called when a gradient was added to the parameter's."""
    register: Callable[..., torch.utils.hooks.RemovableHandle] = parameter.register_post_accumulate_grad_hook
    return register(fn)


def below(kind: type[K], optimizer: Optimizer) -> K:
    """An object of a new class below `kind` and the optimizer's class, with the optimizer's groups and state."""
    made_of: Any = type(type(optimizer).__name__, (kind, type(optimizer)), {})
    made: K = made_of.__new__(made_of)
    # A scheduler that was made before has put its own `step` into the optimizer: it would go past ours.
    made.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    return made


@contextmanager
def loading_in_place(optimizer: Optimizer) -> Iterator[None]:
    """Inside, `load_state_dict` fills the existing groups and state in place, where torch creates new ones.

    Schedulers of the wrapped optimizer hold references to these groups.
    """
    groups, state = optimizer.param_groups, optimizer.state
    yield
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if loaded is not group:
            group.clear()
            group.update(loaded)
    if optimizer.state is not state:
        loaded_state = dict(optimizer.state)
        state.clear()
        state.update(loaded_state)
    optimizer.param_groups, optimizer.state = groups, state


def describe(names: Sequence[str], parameters: Sequence[Tensor]) -> dict[str, str]:
    """What must be the same on every rank, by name."""
    return {
        name: f"{_dtype(parameter)}{list(parameter.shape)}" + ("" if parameter.requires_grad else " (frozen)")
        for name, parameter in zip(names, parameters, strict=True)
    }


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
