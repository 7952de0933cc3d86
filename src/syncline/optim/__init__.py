"""Large batches: learning-rate rules, warm-up and decay, LARS and LAMB.

The schedules are `LRScheduler`s of torch, and LARS and LAMB are `Optimizer`s. Their state dicts contain numbers,
strings and tensors.
"""

from syncline.optim.lamb import LAMB
from syncline.optim.lars import LARS
from syncline.optim.schedules import cosine_decay, exponential_decay, scale_lr, step_decay, warmup

__all__ = [
    "LAMB",
    "LARS",
    "cosine_decay",
    "exponential_decay",
    "scale_lr",
    "step_decay",
    "warmup",
]
