"""Hooks on a user's module that are not copied with it: the hook of a copied module does nothing.

A bound method as a hook would be copied with its object: `copy.deepcopy(model)` would copy a whole run.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["ModuleHook"]

NOTHING: tuple[Any, ...] = (logging.getLogger("syncline").log, logging.NOTSET, "")
"""Arguments of `partial` for a hook that does nothing. It can be unpickled where Syncline is not installed."""


class ModuleHook:
    """Calls a method as long as its object lives, and only from the module that it was registered on.

    >>> import copy, torch
    >>> class Counter:
    ...     calls = 0
    ...     def count(self, module, args):
    ...         self.calls += 1
    >>> counter, module = Counter(), torch.nn.Identity()
    >>> handle = module.register_forward_pre_hook(ModuleHook(counter.count))
    >>> _ = module(1), copy.deepcopy(module)(1)
    >>> counter.calls
    1
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method: weakref.WeakMethod[Callable[..., Any]] = weakref.WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        return None if method is None else method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return partial(NOTHING[0], *NOTHING[1:])

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, NOTHING
