"""One filter after another: each narrows what the former chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from syncline.errors import SpecError
from syncline.server.filters.base import Filter

__all__ = ["FilterChain"]


@dataclass(frozen=True, repr=False)
class FilterChain(Filter):
    """Filters in a row; made by `|`.

    >>> from syncline.server.filters import Significant, Skip
    >>> Significant(0.01) | Skip(0.5)
    significant(0.01)|skip(0.5)
    """

    links: tuple[Filter, ...]

    name: ClassVar[str] = "chain"

    def __post_init__(self) -> None:
        if len(self.links) < 2:
            raise SpecError("a chain has at least two links")
        names = [link.name for link in self.links]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(f"{self!r}: {', '.join(twice)} stands there twice; once is enough")

    @property
    def caches(self) -> bool:
        return any(link.caches for link in self.links)

    @property
    def chooses(self) -> bool:
        return any(link.chooses for link in self.links)

    def narrow(self, residual: Tensor, places: Tensor | None, number: int) -> Tensor | None:
        for link in self.links:
            places = link.narrow(residual, places, number)
        return places

    def __repr__(self) -> str:
        return "|".join(map(repr, self.links))
