"""Backward passes of simulated tasks run on threads of their own.

torch's autograd engine keeps one queue of work for each thread. Two backward passes that take turns on one thread,
because their hooks wait for other ranks, would mix in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import Variable

__all__ = ["backward_on_threads"]

_variable: Any = Variable
_engine_type: Any = type(_variable._execution_engine)
_call_by_thread: dict[int, Callable[..., Any]] = {}
_lock = threading.Lock()


class _ThreadedEngine(_engine_type):  # type: ignore[misc]
    """torch's engine. Backward passes called on the simulator's thread run on a thread of their own."""

    def run_backward(self, *args: Any, **options: Any) -> Any:
        call = _call_by_thread.get(threading.get_ident())
        run = super().run_backward
        return run(*args, **options) if call is None else call(run, *args, **options)


@contextmanager
def backward_on_threads(call: Callable[..., Any]) -> Iterator[None]:
    """Let `call(run, *args, **options)` run the backward passes that begin on this thread."""
    with _lock:
        if not _call_by_thread:
            _variable._execution_engine = _ThreadedEngine()
        _call_by_thread[threading.get_ident()] = call
    try:
        yield
    finally:
        with _lock:
            del _call_by_thread[threading.get_ident()]
            if not _call_by_thread:
                _variable._execution_engine = _engine_type()
