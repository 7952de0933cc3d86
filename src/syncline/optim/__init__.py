"""Large batches: learning-rate rules, warm-up and decay, LARS and LAMB.

All of it is ordinary torch: the schedules are `LRScheduler`s, LARS and LAMB are `Optimizer`s, and what they keep in
their state dicts is numbers, strings and tensors.
"""

from syncline.optim.lamb import LAMB
from syncline.optim.lars import LARS
from syncline.optim.rates import scale_lr
from syncline.optim.schedules import cosine_decay, exponential_decay, step_decay, warmup

__all__ = [
    "LAMB",
    "LARS",
    "cosine_decay",
    "exponential_decay",
    "scale_lr",
    "step_decay",
    "warmup",
]
