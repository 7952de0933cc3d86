"""What one request carries, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, nan

from torch import Tensor

from syncline.errors import ProtocolError
from syncline.server.outgoing import Span
from syncline.server.protocol import Request

__all__ = ["Load", "pushing"]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one request carries, and how; the same for all its parts."""

    keys: Span
    values: Tensor | None = None
    factors: tuple[Tensor, Tensor] | None = None
    out: Tensor | None = None
    coded: bool = False
    """Whether the answer may come in the space's codec."""
    plain: bool = False
    """Whether the values go as they are, whatever the codec."""
    pick: Callable[[int], tuple[Span, Tensor]] | None = None
    """Where a filter says what goes: by the number of the push, when nothing can refuse it any more."""


def pushing(kind: int, rate: float | None, scale: float) -> Request:
    """A push, with numbers that a server takes."""
    if not isfinite(scale) or (rate is not None and not isfinite(rate)):
        raise ProtocolError(f"rate={rate} and scale={scale}: both are finite numbers, or rate=None for the rule's own")
    return Request(kind, rate=nan if rate is None else rate, scale=scale)
