"""What torch and asyncio keep for each thread, where several simulated tasks share one thread.

A task that waits in the middle of `torch.no_grad()`, `torch.autocast(…)` and the like must not pass that on to the
next task. It is saved and reset before the switch and restored after it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.overrides
import torch.utils._python_dispatch

from syncline.errors import UnsupportedError

__all__ = ["ThreadState"]

_torch: Any = torch._C  # its type hints leave out much of what is here
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
        """Give this thread the state of a new one. Returns what restores it, or None if nothing was to be done.

        `default_modes` says that `has_default_modes` is known to be true, which saves most of the time.
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
        """Whether all but the grad mode is as on a new thread."""
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
        """Where a task is whose state could not be reset."""
        if not has_torch_function():
            return "torch._C.DisableTorchFunction()"
        included, excluded = included_keys() - self._included, excluded_keys() - self._excluded
        return f"an operator or a torch.func transform (dispatch keys included: {included}, excluded: {excluded})"

    def _reset(self, undo: ExitStack) -> None:
        """Reset each part of the state; `undo` takes them back, the last one first."""
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
