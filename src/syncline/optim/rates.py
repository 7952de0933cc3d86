"""How the learning rate follows the batch when workers are added."""

from __future__ import annotations

from syncline.environment import detect
from syncline.errors import WorldError
from syncline.optim.checks import count, positive
from syncline.scaling import scale_factor
from syncline.world import current_world

__all__ = ["scale_lr", "scale_of"]


def scale_lr(rate: float, rule: str = "linear", workers: int | None = None) -> float:
    """The rate for p workers of a batch each, where `rate` is right for one of them.

    | rule | rate | when |
    |---|---|---|
    | `"linear"` | η·p | SGD, with `warmup` where p is large (Goyal et al. 2017) |
    | `"sqrt"` | η·√p | adaptive optimizers; SGD where linear diverges (Krizhevsky 2014) |
    | `"none"` | η | the global batch did not grow |

    `workers` is the size of the current world by default: call this after `sl.init()`. Without a world it is 1; if a
    launcher has started several workers, an error is raised. It stands for how much larger the global batch has become;
    if the batch stays the same while workers change, leave the rate as it is.

    >>> scale_lr(0.1, workers=8), scale_lr(0.1, "sqrt", workers=4)
    (0.8, 0.2)
    >>> scale_lr(0.1)                                        # no world: one worker
    0.1
    >>> import syncline as sl
    >>> sl.simulate(lambda world: scale_lr(0.5), ranks=4).results
    (2.0, 2.0, 2.0, 2.0)
    """
    return positive("rate", rate) * scale_of(rule, workers)


def scale_of(rule: str, workers: int | None = None) -> float:
    """What a rule multiplies the rate by.

    >>> scale_of("sqrt", 9)
    3.0
    """
    return scale_factor(rule, _current_size() if workers is None else count("workers", workers))


def _current_size() -> int:
    try:
        return current_world().size
    except WorldError:  # a script that is tried without sl.init() is a script of one worker
        if detect().size > 1:  # a launcher has started several
            raise
        return 1
