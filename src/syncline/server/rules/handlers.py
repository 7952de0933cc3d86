"""What users want a server to do with pushed values: functions that both ends register under one name.

Code is never sent. A push says the name; the server runs the function that its own process has under it. So the module
that registers is imported on both ends: by the script, and at dedicated servers by `syncline run --handlers mymodule`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from syncline.errors import ProtocolError, SpecError
from syncline.server.rules.base import UpdateRule
from syncline.specs import nearest

__all__ = ["HandlerRegistry", "HandlerRule", "PushHandler", "find_handler", "handler", "handler_names"]

F = TypeVar("F", bound=Callable[..., None])


@dataclass(frozen=True)
class PushHandler:
    """A registered function; called like the function itself."""

    name: str
    function: Callable[..., None]
    slots: tuple[tuple[str, float], ...] = ()
    """The tensors it keeps beside the weights, and what they are filled with at first."""
    rated: bool = False
    """Whether the function has a parameter `rate`."""

    def fresh(self, numel: int) -> dict[str, Tensor]:
        """Its state for so many weights before the first push."""
        return {name: torch.full((numel,), value, dtype=torch.float32) for name, value in self.slots}

    def __call__(self, weights: Tensor, values: Tensor, state: dict[str, Tensor], rate: float | None = None) -> None:
        if self.rated:
            self.function(weights, values, state, rate=rate)
        elif rate is not None:
            raise ProtocolError(
                f"a push to handler {self.name!r} has the rate {rate}, and its function takes none: give it a fourth "
                "parameter `rate`, or push without"
            )
        else:
            self.function(weights, values, state)


class HandlerRegistry:
    """Names and the functions that they stand for.

    >>> own = HandlerRegistry()
    >>> _ = own.add("double", lambda weights, values, state: weights.mul_(2))
    >>> own.names()
    ['double']
    """

    def __init__(self) -> None:
        self._known: dict[str, PushHandler] = {}

    def add(self, name: str, function: Callable[..., None], state: Mapping[str, float] | None = None) -> PushHandler:
        """Make `name` mean this function. Twice the same is once; another function under the name is refused."""
        if not (isinstance(name, str) and name.isidentifier()):
            raise SpecError(f"a handler's name is a Python name, as 'largest', not {name!r}")
        made = PushHandler(name, function, _slots(name, state or {}), _rated(name, function))
        # One step that no other thread can come between: a look and then a write would be two.
        found = self._known.setdefault(name, made)
        if found is not made and not (_same(found.function, function) and found.slots == made.slots):
            raise SpecError(
                f"handler {name!r} is {_where(found.function)} already, and {_where(function)} would be another: "
                "give one of them a different name"
            )
        return found

    def find(self, name: str) -> PushHandler:
        """What a name stands for. The name may come from the network: an unknown one is a `ProtocolError`."""
        found = self._known.get(name)
        if found is None:
            known = nearest(name, self.names()) if self._known else "none is registered"
            raise ProtocolError(
                f"no handler {name!r} in this process; {known}; import the module that registers it here too: "
                "syncline run --handlers MODULE"
            )
        return found

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        return sorted(self._known)


_HANDLERS = HandlerRegistry()
"""Of this process: modules register in it while they are imported, before there is anything else to hold it."""


def handler(name: str, *, state: Mapping[str, float] | None = None) -> Callable[[F], F]:
    """Register a function under a name: what a server does with pushed values.

    It is called as `function(weights, values, state)` and changes `weights` in place: rows of float32, all of the same
    length, the slices or gathered elements that a push is about. `state` names tensors that are kept beside the
    weights, and what fills them at first. With a fourth parameter `rate` it gets the push's, or None.

    >>> import torch
    >>> @handler("mean", state={"seen": 0.0})
    ... def mean(weights, values, state):
    ...     state["seen"] += 1
    ...     weights += (values - weights) / state["seen"]
    >>> weights, kept = torch.zeros(2), find_handler("mean").fresh(2)
    >>> for values in (torch.tensor([2.0, 4.0]), torch.tensor([4.0, 0.0])):
    ...     find_handler("mean")(weights, values, kept)
    >>> weights
    tensor([3., 2.])
    """

    def register(function: F) -> F:
        _HANDLERS.add(name, function, state)
        return function

    return register


def find_handler(name: str) -> PushHandler:
    """The handler of this name in this process, or a `ProtocolError` that lists the known ones."""
    return _HANDLERS.find(name)


def handler_names() -> list[str]:
    """Every name that is registered in this process, sorted."""
    return _HANDLERS.names()


def _slots(name: str, state: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    for slot, value in state.items():
        if not isinstance(slot, str) or isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SpecError(f"handler {name!r}: state is {{name: first value}}, as {{'seen': 0.0}}, not {dict(state)}")
    return tuple((slot, float(value)) for slot, value in state.items())


def _rated(name: str, function: Callable[..., None]) -> bool:
    """Whether a function has a parameter `rate`; one that cannot be called as handlers are is refused."""
    if not callable(function):
        raise SpecError(f"handler {name!r} is a function (weights, values, state), not {function!r}")
    signature = inspect.signature(function)
    rated = "rate" in signature.parameters
    try:
        signature.bind(None, None, None, **({"rate": None} if rated else {}))
    except TypeError as error:
        raise SpecError(
            f"handler {name!r} is called with (weights, values, state), and with rate=… where it has such a "
            f"parameter; {_where(function)} takes {signature}: {error}"
        ) from None
    return rated


def _same(one: Any, other: Any) -> bool:
    """Whether two functions are one: a script that is also imported by its name defines each of its own twice."""
    if one is other:
        return True
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)) or one.__closure__ or other.__closure__:
        return False
    first, second = ((each.__code__, each.__defaults__, each.__kwdefaults__) for each in (one, other))
    places = {each.__code__.co_filename for each in (one, other)}
    # A notebook's cell that is run again is a file of another name: "<ipython-input-7>".
    return first == second and (len(places) == 1 or all(place.startswith("<") for place in places))


def _where(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


@dataclass(frozen=True, repr=False)
class HandlerRule(UpdateRule):
    """What the handler of this name does; it is looked up where it runs, because code is never sent.

    >>> import torch
    >>> from syncline.server.rules.handlers import handler
    >>> @handler("largest")
    ... def largest(weights, values, state):
    ...     torch.maximum(weights, values, out=weights)
    >>> weights = torch.tensor([1.0, 5.0])
    >>> HandlerRule("largest").apply(weights, torch.tensor([3.0, 3.0]), {}, None)
    >>> weights
    tensor([3., 5.])
    """

    handler: str

    name: ClassVar[str] = "handler"

    def __post_init__(self) -> None:
        if not (isinstance(self.handler, str) and self.handler.isidentifier()):
            raise SpecError(f"handler takes the name of one, as handler('largest'), not {self.handler!r}")

    def state(self, numel: int) -> dict[str, Tensor]:
        return find_handler(self.handler).fresh(numel)

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        find_handler(self.handler)(weights, update, state, rate)
