"""The contract of a filter: which of the values that a client holds go to the servers now.

    residual ← residual + new values       the chosen are sent, and 0 from then on; the rest waits

A filter only ever chooses: what it does not choose stays in the client's residual and goes later, at the latest when
the client flushes. So no filter can lose anything. It is a frozen dataclass whose repr is its spec, and has no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from syncline.specs import Spec

if TYPE_CHECKING:
    from syncline.server.filters.chain import FilterChain

__all__ = ["Filter"]


class Filter(ABC):
    """Which values go now.

    >>> import torch
    >>> from syncline.server.filters import build_filter
    >>> significant = build_filter("significant(0.5)")
    >>> significant.choose(torch.tensor([0.1, -2.0, 0.5]), number=1)
    tensor([1, 2])
    """

    name: ClassVar[str]

    @property
    def caches(self) -> bool:
        """Whether client and server remember lists of keys, and name them by a digest."""
        return False

    @property
    def chooses(self) -> bool:
        """Whether it ever holds something back; otherwise no residual is needed."""
        return True

    def choose(self, residual: Tensor, number: int) -> Tensor | None:
        """The places to send now, sorted int64; None: all.

        `residual` is a row of everything that was not sent yet, with the new values; `number` counts the pushes.
        """
        return self.narrow(residual, None, number)

    @abstractmethod
    def narrow(self, residual: Tensor, places: Tensor | None, number: int) -> Tensor | None:
        """Of the `places` that others chose before (None: all), those that it chooses too."""

    def __or__(self, other: Filter) -> FilterChain:
        from syncline.server.filters.chain import FilterChain

        return FilterChain((*_links(self), *_links(other)))

    def __repr__(self) -> str:
        own = [each for each in fields(self) if each.init]  # type: ignore[arg-type]
        first = tuple(getattr(self, each.name) for each in own if each.default is MISSING)
        rest = {
            each.name: getattr(self, each.name)
            for each in own
            if each.default is not MISSING and getattr(self, each.name) != each.default
        }
        return str(Spec(self.name, first, rest))


def narrowed(places: Tensor | None, chosen: Tensor) -> Tensor | None:
    """The places that a mask leaves; the mask is as long as what there was to choose from."""
    kept = torch.from_numpy(np.flatnonzero(chosen.cpu().numpy())).to(chosen.device)  # several times torch's own speed
    if kept.numel() == chosen.numel():
        return places
    return kept if places is None else places[kept]


def _links(one: Filter) -> tuple[Filter, ...]:
    found: tuple[Filter, ...] = getattr(one, "links", (one,))
    return found
