"""The rows of an image that a worker needs and others hold: the halo.

A kernel of 3 with padding 1 on 7 rows, which 3 workers have; f is a row of the padding:

```text
rows              f 0 1 2 3 4 5 6 f
worker 0 needs    f 0 1 2                 row 2 comes from worker 1
worker 1 needs        1 2 3 4             row 1 from worker 0, row 4 from worker 2
worker 2 needs            3 4 5 6 f       row 3 from worker 1
```

In backward the gradient of a received row is sent back to its owner, which adds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from syncline.parallel.spatial_layers.strips import SplitAxis, memory_order

__all__ = ["Rows", "fetch_rows", "received_rows"]

Rows = tuple[int, int]
"""The first row and the one after the last. Rows below 0 and above the image are padding."""


def received_rows(edges: Sequence[int], needs: Sequence[Rows], receiver: int) -> Iterator[tuple[int, int, int]]:
    """The worker, the first row and the one after the last, of the rows that a worker needs and others hold.

    >>> list(received_rows([0, 2, 4, 7], [(-1, 3), (1, 5), (3, 8)], receiver=1))
    [(0, 1, 2), (2, 4, 5)]
    """
    for owner in range(len(edges) - 1):
        start, stop = _overlap(edges, owner, needs[receiver])
        if owner != receiver and start < stop:
            yield owner, start, stop


def fetch_rows(x: Tensor, axis: SplitAxis, needs: Sequence[Rows], fill: float = 0.0) -> Tensor:
    """The rows that this worker needs, `needs[rank]`, with padding of a value where they are outside of the image."""
    if list(needs) == list(pairwise(axis.edges)):
        return x
    result: Tensor = _FetchRows.apply(x, axis, needs, fill)  # type: ignore[no-untyped-call]
    return result


class _FetchRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: SplitAxis, needs: Sequence[Rows], fill: float) -> Tensor:
        ctx.axis, ctx.needs = axis, needs
        team, dim, edges = axis.team, axis.dim, axis.edges
        start, stop = needs[team.rank]
        first = edges[team.rank]
        sends = [
            (receiver, x.narrow(dim, begin - first, end - begin))
            for receiver in range(team.size)
            for owner, begin, end in received_rows(edges, needs, receiver)
            if owner == team.rank
        ]
        incoming = [
            (begin, owner, x.new_empty(_with_rows(x, dim, end - begin)))
            for owner, begin, end in received_rows(edges, needs, team.rank)
        ]
        if sends or incoming:
            team.swap(sends, [(owner, rows) for _, owner, rows in incoming])
        output = _empty(x, dim, stop - start)
        below, above = min(max(-start, 0), stop - start), min(max(stop - axis.length, 0), stop - start)
        output.narrow(dim, 0, below).fill_(fill)
        output.narrow(dim, stop - start - above, above).fill_(fill)
        for begin, _, rows in incoming:
            output.narrow(dim, begin - start, rows.shape[dim]).copy_(rows)
        begin, end = _overlap(edges, team.rank, needs[team.rank])
        if begin < end:
            output.narrow(dim, begin - start, end - begin).copy_(x.narrow(dim, begin - first, end - begin))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        axis, needs, gradient = ctx.axis, ctx.needs, gradients[0]
        team, dim, edges = axis.team, axis.dim, axis.edges
        start, first = needs[team.rank][0], edges[team.rank]
        sends = [
            (owner, gradient.narrow(dim, begin - start, end - begin))
            for owner, begin, end in received_rows(edges, needs, team.rank)
        ]
        incoming = [
            (begin, receiver, gradient.new_empty(_with_rows(gradient, dim, end - begin)))
            for receiver in range(team.size)
            for owner, begin, end in received_rows(edges, needs, receiver)
            if owner == team.rank
        ]
        if sends or incoming:
            team.swap(sends, [(receiver, rows) for _, receiver, rows in incoming])
        output = _empty(gradient, dim, edges[team.rank + 1] - first).zero_()
        begin, end = _overlap(edges, team.rank, needs[team.rank])
        if begin < end:
            output.narrow(dim, begin - first, end - begin).copy_(gradient.narrow(dim, begin - start, end - begin))
        for begin, _, rows in incoming:
            output.narrow(dim, begin - first, rows.shape[dim]).add_(rows)
        return output, None, None, None


def _overlap(edges: Sequence[int], owner: int, rows: Rows) -> Rows:
    """The rows of a range that a worker holds. The first may be after the last."""
    return max(rows[0], edges[owner]), min(rows[1], edges[owner + 1])


def _with_rows(x: Tensor, dim: int, rows: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = rows
    return shape


def _empty(x: Tensor, dim: int, rows: int) -> Tensor:
    """A tensor like `x` with so many rows, and in the same order in memory."""
    shape = _with_rows(x, dim, rows)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_order(x))
