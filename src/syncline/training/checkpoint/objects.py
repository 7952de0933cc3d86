"""What can be saved: runs, modules, optimizers, whatever has a state dict, and plain values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from syncline.errors import IncompatibleError
from syncline.world import World

__all__ = [
    "Kind",
    "RunLike",
    "Stateful",
    "check_model",
    "check_optimizer",
    "kind_of",
    "model_tree",
    "names_of",
    "optimizer_tree",
    "put_model",
    "put_optimizer",
]

Kind = Literal["run", "module", "optimizer", "stateful", "value"]

COMPILED = "_orig_mod."
"""What `torch.compile` puts into the names of a module's state."""
VERSIONS = "(versions)"
"""No parameter is called that."""
SHOWN = 5
"""Names of each sort in a message; the rest is counted."""


@runtime_checkable
class Stateful(Protocol):
    """A scheduler, a scaler, a sampler: anything that can say its state and take it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@runtime_checkable
class RunLike(Stateful, Protocol):
    """What `sl.distribute` returns, as far as a checkpoint needs it."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def world(self) -> World: ...

    def agreed(self) -> AbstractContextManager[Any]: ...


def kind_of(value: Any) -> Kind:
    """How a value is saved.

    >>> kind_of(nn.Linear(1, 1)), kind_of(3)
    ('module', 'value')
    """
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, RunLike):
        return "run"
    return "stateful" if isinstance(value, Stateful) else "value"


def model_tree(model: nn.Module) -> dict[str, Any]:
    """A module's state by name, and its modules' versions, by which they know how to read an old state."""
    state = model.state_dict()
    versions = {str(name): dict(told) for name, told in getattr(state, "_metadata", {}).items()}
    return {**{_plain(name): value for name, value in state.items()}, VERSIONS: versions}


def put_model(model: nn.Module, tree: Mapping[str, Any]) -> None:
    """Load what `model_tree` gave, into the tensors that the model has."""
    state: OrderedDict[str, Any] = OrderedDict((name, tree[_plain(name)]) for name in model.state_dict())
    setattr(state, "_metadata", tree[VERSIONS])  # noqa: B010 (torch keeps it as an attribute of the dict)
    model.load_state_dict(state)


def check_model(model: nn.Module, tree: Mapping[str, Any], source: str) -> None:
    """Refuse the state of another model, naming what differs."""
    here = {_plain(name): value for name, value in model.state_dict().items()}
    there = {name: value for name, value in tree.items() if name != VERSIONS}
    different = [
        f"{name} ({_signature(there[name])} there, {_signature(here[name])} here)"
        for name in here
        if name in there and _signature(here[name]) != _signature(there[name])
    ]
    problems = [
        _listed("it lacks", [name for name in here if name not in there]),
        _listed("it has, and the model has not,", [name for name in there if name not in here]),
        _listed("other shapes or dtypes:", different),
    ]
    told = "; ".join(problem for problem in problems if problem)
    if told:
        raise IncompatibleError(f"{source} is of another model: {told}; build the model as it was when it was saved")


def names_of(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by identity; a tied one has its first."""
    return {id(parameter): _plain(name) for name, parameter in model.named_parameters()}


def optimizer_tree(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's state keyed by parameter name instead of by position."""
    packed = optimizer.state_dict()
    labels = _labels(optimizer, names)
    by_number: dict[int, str] = {}
    groups = []
    for told, mine in zip(packed["param_groups"], labels, strict=True):
        by_number.update(zip(told["params"], mine, strict=True))
        groups.append({**told, "params": mine})
    state = {by_number.get(number, number): kept for number, kept in packed["state"].items()}
    return {"class": type(optimizer).__qualname__, "groups": groups, "state": state}


def put_optimizer(optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Load what `optimizer_tree` gave, in the order that the parameters have here."""
    numbers: dict[str, int] = {}
    groups = []
    for told, mine in zip(tree["groups"], _labels(optimizer, names), strict=True):
        for label in mine:
            numbers[label] = len(numbers)
        groups.append({**told, "params": [numbers[label] for label in mine]})
    state = {numbers.get(label, label): dict(kept) for label, kept in tree["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_optimizer(
    optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], names: Mapping[int, str], source: str
) -> None:
    """Refuse the state of another optimizer: another class, or other parameters in a group."""
    kind = type(optimizer).__qualname__
    if tree["class"] != kind:
        raise IncompatibleError(f"{source} is of the optimizer {tree['class']}, not {kind}: use the same one")
    here, there = _labels(optimizer, names), [group["params"] for group in tree["groups"]]
    if len(here) != len(there):
        raise IncompatibleError(f"{source} has {len(there)} parameter groups, the optimizer {len(here)}")
    for number, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        lacks = _listed("it lacks", [label for label in mine if label not in theirs])
        more = _listed("it has, and the optimizer has not,", [label for label in theirs if label not in mine])
        if lacks or more:
            told = "; ".join(filter(None, (lacks, more)))
            raise IncompatibleError(f"parameter group {number} of {source} has other parameters: {told}")


def _labels(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The parameters of each group by name; one that the model does not have, by its place."""
    return [
        [names.get(id(parameter), f"{number}:{place}") for place, parameter in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]


def _plain(name: str) -> str:
    return name.replace(COMPILED, "")


def _signature(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "state of its own"  # get_extra_state()
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what} {', '.join(names[:SHOWN])}{more}" if names else ""
