"""What a reduction asks of the network, as values. Pure: who runs it decides what moves the bytes.

A reduction is a generator: it yields a request, is sent the answer, and returns its result at the end. All ranks of a
team yield requests of the same kinds in the same order::

    request                 on rank r                              answer
    Sum(tensor)             is added up in place                   None
    Gather(data)            n bytes, as many on every rank         [p, n]: row i is rank i's
    Scatter(data)           [p, n]: row j goes to rank j           [p, n]: row i came from rank i
    Swap(peer, data, most)  data goes to the peer                  at most `most` bytes from the peer
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

__all__ = ["IDLE", "Gather", "Reduction", "Request", "Scatter", "Sum", "Swap"]

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Sum:
    """Add a tensor up over the ranks, in place. Answer: None."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Gather:
    """Give a row of bytes to all, the same length on every rank. Answer: all rows, as bytes[p, n]."""

    data: Tensor


@dataclass(frozen=True, eq=False)
class Scatter:
    """Give a row to each, bytes[p, n] with the same n on every rank. Answer: the row that each gave, as bytes[p, n]."""

    data: Tensor


@dataclass(frozen=True, eq=False)
class Swap:
    """Exchange bytes with one peer; the two lengths may differ. Answer: what the peer sent, at most `most` bytes.

    Without data only the peer sends; with `most` 0 only this rank does, and the answer is empty. Without a peer the
    rank has nothing to do in this round.
    """

    peer: int | None
    data: Tensor | None
    most: int


IDLE = Swap(None, None, 0)
"""A round in which this rank does nothing."""

Request: TypeAlias = Sum | Gather | Scatter | Swap
Reduction: TypeAlias = Generator[Request, Any, R]
