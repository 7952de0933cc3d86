"""State that belongs to one simulated task or rank: torch's per-thread modes, and random numbers.

Several simulated tasks share one thread. A task that waits inside `torch.no_grad()`, `torch.autocast(…)` and the like
must not pass that on to the next task: it is saved and reset before the switch, and restored after it. Each rank has
its own random-number state of torch, NumPy and `random`, as a process would.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.overrides
import torch.utils._python_dispatch

from syncline.errors import UnsupportedError

__all__ = ["RandomStates", "ThreadState"]

_torch: Any = torch._C  # its type hints are incomplete
_autograd: Any = _torch._autograd
overrides: Any = torch.overrides
dispatch: Any = torch.utils._python_dispatch
_frames: Any = _torch._dynamo.eval_frame
_events: Any = asyncio.events
_default_device: Any = torch._GLOBAL_DEVICE_CONTEXT

AUTOCAST_DEVICES = tuple(
    device
    for device in ("cpu", "cuda", "xpu", "ipu", "hpu", "xla", "mps", "mtia", "maia", "privateuseone")
    if _torch._is_autocast_available(device)
)

# These are called at every switch: bound once, they take half the time.
deepen_autocast: Callable[[], int] = _torch.autocast_increment_nesting
leave_autocast: Callable[[], int] = _torch.autocast_decrement_nesting
included_keys: Callable[[], Any] = _torch._dispatch_tls_local_include_set
excluded_keys: Callable[[], Any] = _torch._dispatch_tls_local_exclude_set
has_forward_grad: Callable[[], bool] = _torch._is_fwd_grad_enabled
has_backward_threads: Callable[[], bool] = _torch._is_multithreading_enabled
has_torch_function: Callable[[], bool] = _torch._is_torch_function_enabled
count_function_modes: Callable[[], int] = _torch._len_torch_function_stack
saved_tensor_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks
saved_hooks_refusal: Callable[[], str | None] = _autograd._saved_tensors_hooks_get_disabled_error_message
running_loop: Callable[[], object] = _events._get_running_loop
frame_callback: Callable[[], object] = _frames.get_eval_frame_callback


class ThreadState:
    """Saves and restores torch's per-thread state. Create it on a new thread."""

    def __init__(self) -> None:
        self._included = included_keys()
        self._excluded = excluded_keys()
        self._autocast = [(device, False, torch.get_autocast_dtype(device)) for device in AUTOCAST_DEVICES]

    def save_and_reset(self, default_modes: bool = False) -> Callable[[], None] | None:
        """Give this thread the state of a new one. Returns a function that restores it, or None if nothing changed.

        `default_modes` says that `has_default_modes` is known to be true. That check takes most of the time.
        """
        graded = torch.is_grad_enabled()
        if not graded:
            _torch._set_grad_enabled(True)
        if default_modes or self.has_default_modes():
            return None if graded else _disable_grad
        undo = ExitStack()
        if not graded:
            undo.callback(_disable_grad)
        try:
            self._reset(undo)
            if not self.has_default_modes():
                raise UnsupportedError(
                    f"a simulated rank waits for others inside {self._place()}, which torch keeps to one thread: "
                    "call sl.simulate(…, threads=True)"
                )
        except BaseException:
            undo.close()
            raise
        return undo.close

    def has_default_modes(self) -> bool:
        """Whether all modes except the grad mode are those of a new thread."""
        deepen_autocast()
        return (
            leave_autocast() == 0
            and included_keys() == self._included
            and excluded_keys() == self._excluded
            and has_forward_grad()
            and has_backward_threads()
            and has_torch_function()
            and count_function_modes() == 0
            and saved_tensor_hooks(False) is None
            and saved_hooks_refusal() is None
            and frame_callback() is None
            and running_loop() is None
        )

    def _place(self) -> str:
        """A description of the code whose state could not be reset."""
        if not has_torch_function():
            return "torch._C.DisableTorchFunction()"
        included, excluded = included_keys() - self._included, excluded_keys() - self._excluded
        return f"an operator or a torch.func transform (dispatch keys included: {included}, excluded: {excluded})"

    def _reset(self, undo: ExitStack) -> None:
        """Reset each part of the state; `undo` restores them in reverse order."""
        if (loop := running_loop()) is not None:
            undo.callback(_events._set_running_loop, loop)
            undo.callback(sys.set_asyncgen_hooks, *sys.get_asyncgen_hooks())
            _events._set_running_loop(None)
            sys.set_asyncgen_hooks(None, None)
        if frame_callback() is not None:
            undo.callback(_frames.set_eval_frame, _frames.set_eval_frame(None))
        if (refusal := saved_hooks_refusal()) is not None:
            _autograd._saved_tensors_hooks_enable()
            undo.callback(_autograd._saved_tensors_hooks_disable, refusal)
        while (hooks := saved_tensor_hooks(False)) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            undo.callback(_autograd._push_saved_tensors_default_hooks, *hooks)
        while count_function_modes():
            undo.callback(overrides._push_mode, overrides._pop_mode())
        if (device := getattr(_default_device, "device_context", None)) is not None:
            _default_device.device_context = None
            undo.callback(setattr, _default_device, "device_context", device)
        while _torch._len_torch_dispatch_stack():
            undo.callback(dispatch._push_mode, dispatch._pop_mode())
        self._reset_autocast(undo)
        if torch.is_inference_mode_enabled():
            guard = _torch._InferenceMode(False)
            guard.__enter__()
            undo.callback(guard.__exit__, None, None, None)
        if not has_forward_grad():
            _torch._set_fwd_grad_enabled(True)
            undo.callback(_torch._set_fwd_grad_enabled, False)
        if not has_backward_threads():
            _torch._set_multithreading_enabled(True)
            undo.callback(_torch._set_multithreading_enabled, False)

    def _reset_autocast(self, undo: ExitStack) -> None:
        deepen_autocast()
        nesting = leave_autocast()
        now = [(dev, torch.is_autocast_enabled(dev), torch.get_autocast_dtype(dev)) for dev in AUTOCAST_DEVICES]
        cached = torch.is_autocast_cache_enabled()
        if nesting or now != self._autocast or not cached:
            undo.callback(_set_autocast, now, nesting, cached)
            _set_autocast(self._autocast, -nesting, True)


def _disable_grad() -> None:
    _torch._set_grad_enabled(False)


def _set_autocast(devices: list[tuple[str, bool, torch.dtype]], deeper: int, cached: bool) -> None:
    for device, enabled, dtype in devices:
        _torch.set_autocast_enabled(device, enabled)
        _torch.set_autocast_dtype(device, dtype)
    for _ in range(abs(deeper)):
        (deepen_autocast if deeper > 0 else leave_autocast)()
    _torch.set_autocast_cache_enabled(cached)


_numpy_state: Any = np.random  # the generators behind np.random can be swapped, which its type hints do not say
_python: Any = random.getrandbits.__self__  # type: ignore[attr-defined]  # the generator behind random's functions
MERSENNE_WORDS = 625
"""Words of 32 bits in the state of `random.Random`: the position, then the state of the Mersenne Twister."""


_State = tuple[torch.Tensor, Any, Any]
"""The states of torch, NumPy and `random`."""


def _words_of(generator: random.Random) -> memoryview:
    """The memory that holds the state of a generator."""
    words = (ctypes.c_uint32 * MERSENNE_WORDS).from_address(id(generator) + object.__basicsize__)
    return memoryview(words).cast("B")


def _knows_layout() -> bool:
    """Whether this Python keeps the state of a generator as CPython does."""
    if random.Random.__basicsize__ < object.__basicsize__ + 4 * MERSENNE_WORDS:
        return False
    generator = random.Random(0)
    position, *words = _words_of(generator).cast("I")
    return bool(generator.getstate()[1] == (*words, position))


_words = _words_of(_python) if _knows_layout() else None
"""Copying the words takes 1 µs. `getstate` makes an object of each of them, which takes 20 µs."""


def _take_python(generator: Any = _python, words: memoryview | None = _words) -> Any:
    return generator.getstate() if words is None else (bytes(words), generator.gauss_next)


def _put_python(state: Any) -> None:
    if _words is None:
        random.setstate(state)
    else:
        _words[:], _python.gauss_next = state


class RandomStates:
    """Swaps the global generators at every switch from one rank to another."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._outside: _State | None = None
        self._rank: int | None = None
        self._states: dict[int, _State] = {}

    def enter(self) -> None:
        """Save the caller's state."""
        self._outside = self._take()

    def leave(self) -> None:
        """Restore the caller's state."""
        assert self._outside is not None
        self._put(self._outside)
        self._outside = self._rank = None

    def switch(self, rank: int) -> None:
        """Load the generators of `rank`. After `leave` this does nothing."""
        if rank == self._rank or self._outside is None:
            return
        if self._rank is not None:
            self._states[self._rank] = self._take()
        self._put(self._states.pop(rank) if rank in self._states else self._fresh(rank))
        self._rank = rank

    def _fresh(self, rank: int) -> _State:
        torch_seed, numpy_seed, python_seed = np.random.SeedSequence([abs(self.seed), rank]).generate_state(3)
        python = random.Random(int(python_seed))
        return (
            torch.Generator().manual_seed(int(torch_seed)).get_state(),
            np.random.MT19937(int(numpy_seed)),
            _take_python(python, None if _words is None else _words_of(python)),
        )

    @staticmethod
    def _take() -> _State:
        return (torch.default_generator.get_state(), _numpy_state.get_bit_generator(), _take_python())

    @staticmethod
    def _put(state: _State) -> None:
        of_torch, of_numpy, of_python = state
        torch.default_generator.set_state(of_torch)
        _numpy_state.set_bit_generator(of_numpy)
        _put_python(of_python)
