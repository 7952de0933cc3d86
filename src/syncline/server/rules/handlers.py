"""Handlers: functions of users that servers apply to pushed values. Both ends register them under the same name.

Code is never sent. A push has the name, and the server calls the function that its own process has registered. So both
ends import the module that registers: the script, and `syncline run --handlers mymodule` on dedicated servers.
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
    """The names of the tensors in its state, and their initial values."""
    takes_rate: bool = False
    """Whether the function has a parameter `rate`."""

    def initial_state(self, numel: int) -> dict[str, Tensor]:
        """The state of `numel` weights before the first push."""
        return {name: torch.full((numel,), value, dtype=torch.float32) for name, value in self.slots}

    def __call__(self, weights: Tensor, values: Tensor, state: dict[str, Tensor], rate: float | None = None) -> None:
        if self.takes_rate:
            self.function(weights, values, state, rate=rate)
        elif rate is not None:
            raise ProtocolError(
                f"a push to handler {self.name!r} has the rate {rate}, and its function takes none: give it a fourth "
                "parameter `rate`, or push without"
            )
        else:
            self.function(weights, values, state)


class HandlerRegistry:
    """Handlers by name.

    >>> own = HandlerRegistry()
    >>> _ = own.add("double", lambda weights, values, state: weights.mul_(2))
    >>> own.names()
    ['double']
    """

    def __init__(self) -> None:
        self._handlers: dict[str, PushHandler] = {}

    def add(self, name: str, function: Callable[..., None], state: Mapping[str, float] | None = None) -> PushHandler:
        """Register a function. The same function may be registered again; another one under the name is refused."""
        if not (isinstance(name, str) and name.isidentifier()):
            raise SpecError(f"a handler's name is a Python name, as 'largest', not {name!r}")
        new = PushHandler(name, function, _check_state(name, state or {}), _takes_rate(name, function))
        known = self._handlers.setdefault(name, new)  # atomic: several threads may register
        if known is not new and not (_is_same(known.function, function) and known.slots == new.slots):
            raise SpecError(
                f"handler {name!r} is {_qualified(known.function)} already, and {_qualified(function)} would be "
                "another: give one of them a different name"
            )
        return known

    def find(self, name: str) -> PushHandler:
        """The handler of a name. The name may come from the network: an unknown one is a `ProtocolError`."""
        known = self._handlers.get(name)
        if known is None:
            hint = nearest(name, self.names()) if self._handlers else "none is registered"
            raise ProtocolError(
                f"no handler {name!r} in this process; {hint}; import the module that registers it here too: "
                "syncline run --handlers MODULE"
            )
        return known

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._handlers)


_HANDLERS = HandlerRegistry()
"""The handlers of this process. Modules register in it while they are imported."""


def handler(name: str, *, state: Mapping[str, float] | None = None) -> Callable[[F], F]:
    """Register a function that a server applies to pushed values.

    It is called as `function(weights, values, state)` and changes `weights` in place. All are 1-D float32 tensors of
    the same length: the slices or gathered elements that a push is about. `state` gives the names of tensors that the
    server keeps, and their initial values. A fourth parameter `rate` receives the learning rate of the push, or None.

    >>> import torch
    >>> @handler("mean", state={"seen": 0.0})
    ... def mean(weights, values, state):
    ...     state["seen"] += 1
    ...     weights += (values - weights) / state["seen"]
    >>> weights, state = torch.zeros(2), find_handler("mean").initial_state(2)
    >>> for values in (torch.tensor([2.0, 4.0]), torch.tensor([4.0, 0.0])):
    ...     find_handler("mean")(weights, values, state)
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
    """All names that are registered in this process, sorted."""
    return _HANDLERS.names()


@dataclass(frozen=True, repr=False)
class HandlerRule(UpdateRule):
    """Apply the handler of this name. The process that applies it must have registered it.

    >>> import torch
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
        return find_handler(self.handler).initial_state(numel)

    def apply(self, weights: Tensor, update: Tensor, state: dict[str, Tensor], rate: float | None) -> None:
        find_handler(self.handler)(weights, update, state, rate)


def _check_state(name: str, state: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    for slot, value in state.items():
        if not isinstance(slot, str) or isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SpecError(f"handler {name!r}: state is {{name: first value}}, as {{'seen': 0.0}}, not {dict(state)}")
    return tuple((slot, float(value)) for slot, value in state.items())


def _takes_rate(name: str, function: Callable[..., None]) -> bool:
    """Whether a function has a parameter `rate`. Functions with other required parameters are refused."""
    if not callable(function):
        raise SpecError(f"handler {name!r} is a function (weights, values, state), not {function!r}")
    signature = inspect.signature(function)
    takes_rate = "rate" in signature.parameters
    try:
        signature.bind(None, None, None, **({"rate": None} if takes_rate else {}))
    except TypeError as error:
        raise SpecError(
            f"handler {name!r} is called with (weights, values, state), and with rate=… where it has such a "
            f"parameter; {_qualified(function)} takes {signature}: {error}"
        ) from None
    return takes_rate


def _is_same(one: Any, other: Any) -> bool:
    """Whether two functions have the same code: a script that is also imported by name defines its functions twice."""
    if one is other:
        return True
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)) or one.__closure__ or other.__closure__:
        return False
    first, second = ((each.__code__, each.__defaults__, each.__kwdefaults__) for each in (one, other))
    files = {each.__code__.co_filename for each in (one, other)}
    # A notebook's cell that is run again has another file name, such as "<ipython-input-7>".
    return first == second and (len(files) == 1 or all(name.startswith("<") for name in files))


def _qualified(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
