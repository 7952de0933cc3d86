"""How long and how expensive it is to train to a target, from a curve of epochs against the batch size.

Larger batches need more epochs. With E₀ and B₀ fitted to the given points by least squares:

    E(B) = E₀·(1 + B / B₀)          time = E(B) · samples / B · seconds of a step

C. Shallue and others, *Measuring the effects of data parallelism on neural network training*, 2019. The points of
MLPerf v0.7 for ResNet-50 follow it with a mean error of 5 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from syncline.errors import SpecError

__all__ = ["EpochCurve", "read_curve"]


@dataclass(frozen=True)
class EpochCurve:
    """Epochs to the target: epochs + slope · batch.

    >>> curve = read_curve("1664:36.2, 3328:41, 33280:56, 57600:71, 65536:87.2")
    >>> round(curve.epochs(32768), 1)
    58.6
    """

    base: float
    slope: float
    smallest: float
    largest: float
    """The batch sizes of the points."""

    def epochs(self, batch: int) -> float:
        """Epochs with a batch size."""
        return self.base + self.slope * batch

    def inside(self, batch: int) -> bool:
        """Whether the batch size lies between those of the points."""
        return self.smallest <= batch <= self.largest

    def steps(self, batch: int, samples: int) -> float:
        """Steps to the target."""
        return self.epochs(batch) * samples / batch


def read_curve(text: str) -> EpochCurve:
    """Read points such as "1664:36.2, 3328:41": batch size and epochs to the target.

    >>> read_curve("100:10")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: the curve '100:10' has one point: give the epochs of at least two batch sizes, as in \
'256:30, 4096:38'
    """
    points = []
    for part in text.split(","):
        batch, _, epochs = part.strip().partition(":")
        try:
            point = float(batch), float(epochs)
        except ValueError:
            point = math.nan, math.nan
        if not (0 < point[0] < math.inf and 0 < point[1] < math.inf):
            raise SpecError(f"the curve {text!r}: {part.strip()!r} is not a batch size and its epochs, as in '256:30'")
        points.append(point)
    if len({batch for batch, _ in points}) < 2:
        raise SpecError(
            f"the curve {text!r} has one point: give the epochs of at least two batch sizes, as in '256:30, 4096:38'"
        )
    n = len(points)
    mean_b, mean_e = sum(b for b, _ in points) / n, sum(e for _, e in points) / n
    slope = sum((b - mean_b) * (e - mean_e) for b, e in points) / sum((b - mean_b) ** 2 for b, _ in points)
    base = mean_e - slope * mean_b
    if base <= 0 or slope < 0:
        raise SpecError(f"the curve {text!r}: epochs must grow with the batch size, and not in proportion to it")
    return EpochCurve(base, slope, min(b for b, _ in points), max(b for b, _ in points))
