"""The rules by which the learning rate follows the number of workers."""

from __future__ import annotations

import math

from syncline.errors import SpecError
from syncline.specs import nearest

__all__ = ["scale_factor"]

RULES = ["linear", "none", "sqrt"]


def scale_factor(rule: str, workers: int) -> float:
    """What a rule multiplies the learning rate of one worker by.

    >>> scale_factor("linear", 8), scale_factor("sqrt", 9), scale_factor("none", 8)
    (8.0, 3.0, 1.0)
    """
    if rule not in RULES:
        raise SpecError(f"unknown rule {rule!r} for the learning rate; {nearest(str(rule), RULES)}")
    return {"linear": float(workers), "sqrt": math.sqrt(workers), "none": 1.0}[rule]
