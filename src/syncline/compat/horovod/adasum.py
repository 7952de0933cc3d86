"""Adasum: sums where gradients are at right angles, averages where they are parallel.

    adasum(a, b) = (1 − a·b / 2‖a‖²) a + (1 − a·b / 2‖b‖²) b

Applied to pairs of ranks, then to pairs of pairs; for each tensor by itself. Maleki et al., Scaling Distributed
Training with Adaptive Summation, MLSys 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.world import Team

__all__ = ["adasum", "combine"]

TAG = 7


def combine(first: Tensor, second: Tensor) -> Tensor:
    """Of two tensors; the dot products are taken in double precision.

    >>> combine(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    tensor([1., 1.])
    >>> combine(torch.tensor([2.0, 0.0]), torch.tensor([2.0, 0.0]))
    tensor([2., 0.])
    """
    a, b = first.double(), second.double()
    dot, a_norm, b_norm = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1.0 - dot / (2.0 * a_norm) if a_norm > 0 else torch.tensor(1.0, dtype=torch.float64)
    right = 1.0 - dot / (2.0 * b_norm) if b_norm > 0 else torch.tensor(1.0, dtype=torch.float64)
    return (left * a + right * b).to(first.dtype)


def adasum(team: Team, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of all ranks, a power of two; the same bits on every rank, for both of a pair combine in the order of ranks.

    ```text
    round 1   0─1   2─3   4─5   6─7
    round 2   0───2   1───3   …
    round 3   0───────4   …
    ```
    """
    results = [tensor.clone() for tensor in tensors]
    distance = 1
    while distance < team.size:
        partner = team.rank ^ distance
        theirs = [torch.empty_like(result) for result in results]
        sent = [team.transport.send(result, partner, TAG) for result in results if result.numel()]
        received = [team.transport.recv(other, partner, TAG) for other in theirs if other.numel()]
        for handle in (*received, *sent):
            handle.wait()
        pairs = zip(results, theirs, strict=True)
        results = [combine(a, b) if team.rank < partner else combine(b, a) for a, b in pairs]
        distance *= 2
    return results
