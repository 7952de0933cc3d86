"""The states of objects as trees: runs, modules, optimizers, objects with a state dict, plain values, generators."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from syncline.errors import IncompatibleError, ProtocolError
from syncline.model_parts import ModelPart
from syncline.world import World

__all__ = [
    "Kind",
    "RunLike",
    "Stateful",
    "check_model",
    "check_optimizer",
    "check_rng_states",
    "get_rng_states",
    "kind_of",
    "load_model",
    "load_optimizer",
    "model_tree",
    "optimizer_tree",
    "parameter_names",
    "rng_seed",
    "seed_new_rank",
    "set_rng_states",
]

Kind = Literal["run", "module", "optimizer", "stateful", "value"]

COMPILED_PREFIX = "_orig_mod."
"""`torch.compile` adds it to the names of a module's state."""
VERSIONS = "(versions)"
"""The key of the modules' versions. No parameter has this name."""
MAX_SHOWN_NAMES = 5
"""Names of each kind in a message; the rest is counted."""


@runtime_checkable
class Stateful(Protocol):
    """A scheduler, a scaler, a sampler: any object with a state dict."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@runtime_checkable
class RunLike(Stateful, Protocol):
    """The part of a run that a checkpoint needs."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def world(self) -> World: ...

    def saving(self) -> AbstractContextManager[Any]: ...

    def loading(self) -> AbstractContextManager[Any]: ...

    def model_part(self) -> ModelPart | None:
        """The part of the model that this worker has; None if every worker has the whole model."""


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
    """A module's state by name, and its submodules' versions, which torch needs to read an old state."""
    state = model.state_dict()
    versions = {str(name): dict(local) for name, local in getattr(state, "_metadata", {}).items()}
    return {**{_plain(name): value for name, value in state.items()}, VERSIONS: versions}


def load_model(model: nn.Module, tree: Mapping[str, Any]) -> None:
    """Load the tree of `model_tree`, or a part of it, into the model's tensors."""
    names = [name for name in model.state_dict() if _plain(name) in tree]
    state: OrderedDict[str, Any] = OrderedDict((name, tree[_plain(name)]) for name in names)
    setattr(state, "_metadata", tree[VERSIONS])  # noqa: B010 (torch stores it as an attribute of the dict)
    model.load_state_dict(state, strict=False)  # `check_model` has compared the names


def check_model(model: nn.Module, tree: Mapping[str, Any], names: Collection[str], source: str) -> None:
    """Refuse the state of another model, with the differences. `names` are all that it has, `tree` may be a part."""
    here = {_plain(name): value for name, value in model.state_dict().items()}
    there = set(names)
    different = [
        f"{name} ({_signature(tree[name])} there, {_signature(here[name])} here)"
        for name in here
        if name in tree and _signature(here[name]) != _signature(tree[name])
    ]
    problems = [
        _listed("it lacks", [name for name in here if name not in there]),
        _listed("it has, and the model has not,", [name for name in sorted(there) if name not in here]),
        _listed("other shapes or dtypes:", different),
    ]
    differences = "; ".join(problem for problem in problems if problem)
    if differences:
        raise IncompatibleError(
            f"{source} is of another model: {differences}; build the model as it was when it was saved"
        )


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by its id; a tied parameter has its first name."""
    return {id(parameter): _plain(name) for name, parameter in model.named_parameters()}


def optimizer_tree(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's state by parameter name instead of by position."""
    packed = optimizer.state_dict()
    labels = _labels(optimizer, names)
    by_number: dict[int, str] = {}
    groups = []
    for group, names_here in zip(packed["param_groups"], labels, strict=True):
        by_number.update(zip(group["params"], names_here, strict=True))
        groups.append({**group, "params": names_here})
    state = {by_number.get(number, number): entry for number, entry in packed["state"].items()}
    return {"class": type(optimizer).__qualname__, "groups": groups, "state": state}


def load_optimizer(optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Load the tree of `optimizer_tree`, in the order of the parameters here."""
    numbers: dict[str, int] = {}
    groups = []
    for group, names_here in zip(tree["groups"], _labels(optimizer, names), strict=True):
        for label in names_here:
            numbers[label] = len(numbers)
        groups.append({**group, "params": [numbers[label] for label in names_here]})
    foreign = {label for group in tree["groups"] for label in group["params"]} - numbers.keys()
    state = {numbers.get(label, label): dict(entry) for label, entry in tree["state"].items() if label not in foreign}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    tree: Mapping[str, Any],
    names: Mapping[int, str],
    source: str,
    elsewhere: Collection[str] = (),
) -> None:
    """Refuse the state of another optimizer: another class, or other parameters in a group.

    Parameters `elsewhere` are those that other workers update.
    """
    kind = type(optimizer).__qualname__
    if tree["class"] != kind:
        raise IncompatibleError(f"{source} is of the optimizer {tree['class']}, not {kind}: use the same one")
    here, there = _labels(optimizer, names), [group["params"] for group in tree["groups"]]
    if len(here) != len(there):
        raise IncompatibleError(f"{source} has {len(there)} parameter groups, the optimizer {len(here)}")
    for number, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        lacks = _listed("it lacks", [label for label in mine if label not in theirs])
        more = _listed(
            "it has, and the optimizer has not,",
            [label for label in theirs if label not in mine and label not in elsewhere],
        )
        if lacks or more:
            differences = "; ".join(filter(None, (lacks, more)))
            raise IncompatibleError(f"parameter group {number} of {source} has other parameters: {differences}")


def _labels(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The parameters of each group by name; by position, if the model does not have them."""
    return [
        [names.get(id(parameter), f"{number}:{place}") for place, parameter in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]


def _plain(name: str) -> str:
    return name.replace(COMPILED_PREFIX, "")


def _signature(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "extra state"  # get_extra_state()
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN_NAMES} more" if len(names) > MAX_SHOWN_NAMES else ""
    return f"{what} {', '.join(names[:MAX_SHOWN_NAMES])}{more}" if names else ""


def get_rng_states() -> dict[str, Any]:
    """The states of the generators of torch, NumPy and `random`, and of the current GPU if it is in use.

    >>> before = get_rng_states()
    >>> drawn = torch.rand(1)
    >>> set_rng_states(before)
    >>> bool(torch.rand(1) == drawn)
    True
    """
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
        "cuda": torch.cuda.get_rng_state() if in_use else None,
    }


def set_rng_states(states: dict[str, Any]) -> None:
    """Restore the states of `get_rng_states`. A GPU's state is ignored without a GPU."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def check_rng_states(states: Any, source: str) -> None:
    """Refuse states that `set_rng_states` could not use, before anything is changed."""
    try:
        torch.Generator().set_state(states["torch"])
        mine = np.random.get_state(legacy=False)["bit_generator"]
        if states["numpy"]["bit_generator"] != mine:
            raise ValueError(f"NumPy draws by {mine} here, by {states['numpy']['bit_generator']} there")
        generator: Any = getattr(np.random, str(mine))
        np.random.RandomState(generator()).set_state(states["numpy"])
        random.Random().setstate(states["python"])
        assert states["cuda"] is None or states["cuda"].dtype == torch.uint8
    except Exception as error:  # each library raises its own errors
        raise ProtocolError(f"{source} has random-number states that cannot be used: {error}") from error


def rng_seed(states: dict[str, Any]) -> int:
    """A number made of the states, from which ranks that join later are seeded."""
    return int.from_bytes(hashlib.sha256(states["torch"].numpy().tobytes()).digest()[:8], "big")


def seed_new_rank(seed: int, rank: int, step: int) -> None:
    """Seed a rank without saved states: the same for each load of a checkpoint, different on every rank."""
    for_torch, for_numpy, for_python = np.random.SeedSequence([seed, rank, step]).generate_state(3)
    torch.manual_seed(int(for_torch))
    np.random.seed(int(for_numpy))
    random.seed(int(for_python))
