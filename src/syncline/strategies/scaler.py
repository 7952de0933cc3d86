"""How a GradScaler steps an optimizer, as far as a strategy must know.

A GradScaler divides the gradients by its scale before `optimizer.step()`, and skips the step if one of them is
not finite. A fused optimizer does both itself: `step()` is called every time, with gradients that are still scaled, and
the scaler leaves `grad_scale` and `found_inf` on the optimizer for it.
"""

from __future__ import annotations

import inspect

from torch import Tensor
from torch.optim import Optimizer

from syncline.errors import IncompatibleError

__all__ = ["refuse_skipped_steps", "scale_of_gradients"]

MAX_CALLER_FRAMES = 8
"""Largest number of stack frames above a step hook that are searched: torch's wrappers of `step` come first."""


def scale_of_gradients(optimizer: Optimizer) -> float | None:
    """The loss scale of the gradients at a fused optimizer's step, usually 1; None if the step is skipped."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    if found is not None and bool(found.item()):
        return None
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def refuse_skipped_steps(strategy: object, optimizer: Optimizer) -> None:
    """Refuse a GradScaler that would skip steps of this optimizer without a call that the strategy sees.

    Called in a hook on the optimizer's step.
    """
    if hasattr(optimizer, "found_inf"):  # fused: every step comes here
        return
    frame = inspect.currentframe()
    for _ in range(MAX_CALLER_FRAMES):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            raise IncompatibleError(
                f"{strategy!r} with a GradScaler: the scaler may skip a step on one worker only, and the workers "
                "would no longer be in the same round; give the optimizer fused=True, which counts such steps too, "
                "train in bfloat16 without a scaler, or take strategy allreduce"
            )
