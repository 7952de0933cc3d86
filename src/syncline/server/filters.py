"""Filters choose which values a client sends to the servers now; the others are sent later.

    residual ← residual + new values       the chosen values are sent and become 0; the others stay

A filter only chooses. Values that it does not choose stay in the client's residual until a later push or a flush, so
that no filter loses anything. A filter is a frozen dataclass without state whose repr is its spec.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from syncline.codecs.kernels.random_bits import POSITION_FACTOR
from syncline.errors import SpecError
from syncline.specs import Registry, spec_of

__all__ = ["Cache", "Filter", "FilterChain", "Significant", "Skip", "build_filter", "digest_of"]

NO_FILTER = "none"
"""The spec of no filter, for places where only text can be written."""


class Filter(ABC):
    """A filter implements `narrow`.

    >>> significant = build_filter("significant(0.5)")
    >>> significant.choose(torch.tensor([0.1, -2.0, 0.5]), number=1)
    tensor([1, 2])
    """

    name: ClassVar[str]
    caches: bool = False
    """Whether client and server remember lists of keys, so that a digest can replace a list."""
    chooses: bool = True
    """Whether it may hold values back; otherwise no residual is needed."""

    @abstractmethod
    def narrow(self, residual: Tensor, places: Tensor | None, number: int) -> Tensor | None:
        """Of the `places` that earlier filters of a chain chose (None: all), those to send now; sorted int64.

        `residual` is a 1-D tensor of all unsent values, with the new ones added. `number` counts the pushes.
        """

    def choose(self, residual: Tensor, number: int) -> Tensor | None:
        """The places to send now, sorted int64; None: all."""
        return self.narrow(residual, None, number)

    def __or__(self, other: Filter) -> FilterChain:
        return FilterChain((*_links(self), *_links(other)))

    def __repr__(self) -> str:
        return str(spec_of(self.name, self))


@dataclass(frozen=True, repr=False)
class FilterChain(Filter):
    """Filters in a row, made by `|`. Each narrows the choice of the one before.

    >>> Significant(0.01) | Skip(0.5)
    significant(0.01)|skip(0.5)
    """

    links: tuple[Filter, ...]

    name: ClassVar[str] = "chain"

    def __post_init__(self) -> None:
        if len(self.links) < 2:
            raise SpecError("a chain has at least two filters")
        names = [link.name for link in self.links]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(f"{self!r}: {', '.join(twice)} stands there twice; once is enough")
        object.__setattr__(self, "caches", any(link.caches for link in self.links))
        object.__setattr__(self, "chooses", any(link.chooses for link in self.links))

    def narrow(self, residual: Tensor, places: Tensor | None, number: int) -> Tensor | None:
        for link in self.links:
            places = link.narrow(residual, places, number)
        return places

    def __repr__(self) -> str:
        return "|".join(map(repr, self.links))


@dataclass(frozen=True, repr=False)
class Cache(Filter):
    """Send a list of keys once, and afterwards a digest of 64 bits instead.

    It chooses all values. A server that does not know a digest asks for the keys.

    >>> Cache().caches
    True
    """

    name: ClassVar[str] = "cache"
    caches = True
    chooses = False

    def narrow(self, residual: Tensor, places: Tensor | None, number: int) -> Tensor | None:
        return places


@dataclass(frozen=True, repr=False)
class Significant(Filter):
    """Send the values of at least a given magnitude.

        relative=False: |r| ≥ t        relative=True: |r| ≥ t · √(mean of r²)

    A zero is never sent. NaN is always sent, so that checks at the servers see it. Li et al., *Scaling distributed
    machine learning with the parameter server*, 2014.

    >>> Significant(0.5).choose(torch.tensor([0.1, -2.0, 0.5]), number=1)
    tensor([1, 2])
    >>> Significant(1.5, relative=True).choose(torch.tensor([0.1, -2.0, 0.5]), number=1)    # the root is 1.19
    tensor([1])
    """

    t: float
    relative: bool = False

    name: ClassVar[str] = "significant"

    def __post_init__(self) -> None:
        number = isinstance(self.t, (int, float)) and not isinstance(self.t, bool)
        info = torch.finfo(torch.float32)
        if not (number and info.tiny <= self.t <= info.max):
            raise SpecError(f"significant's t is a number above 0 that float32 has, not {self.t!r}")
        if not isinstance(self.relative, bool):
            raise SpecError(f"significant's relative is True or False, not {self.relative!r}")

    def narrow(self, residual: Tensor, places: Tensor | None, number: int) -> Tensor | None:
        bound: float | Tensor = self.t
        if self.relative:
            norm = torch.linalg.vector_norm(residual, dtype=torch.float64)  # squares could overflow float32
            bound = (self.t * norm / max(1, residual.numel()) ** 0.5).to(torch.float32)
        values = residual if places is None else residual[places]
        enough = (values.abs() < bound).logical_not_()
        return _select(places, enough & (values != 0) if self.relative else enough)  # if all are 0, the bound is 0


@dataclass(frozen=True, repr=False)
class Skip(Filter):
    """Hold each value back with probability p.

    The seed, the number of the push and the place determine the choice, so that a repeated run chooses the same.

    >>> chosen = Skip(0.75).choose(torch.ones(10_000), number=1)
    >>> chosen is not None and 2_300 < len(chosen) < 2_700
    True
    """

    p: float
    seed: int = 0

    name: ClassVar[str] = "skip"

    def __post_init__(self) -> None:
        if not (isinstance(self.p, (int, float)) and not isinstance(self.p, bool) and 0 <= self.p < 1):
            raise SpecError(f"skip's p is a probability, 0 or more and below 1, not {self.p!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise SpecError(f"skip's seed is an integer, not {self.seed!r}")

    def narrow(self, residual: Tensor, places: Tensor | None, number: int) -> Tensor | None:
        where = torch.arange(residual.numel(), device=residual.device) if places is None else places
        return _select(places, hash_places(where, self._key(number)) >= round(self.p * 2**32) - 2**31)

    def _key(self, number: int) -> int:
        """32 bits for a push."""
        text = f"skip/{self.seed}/{number}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


FILTERS = Registry[Filter]("filter")
for _class in (Significant, Skip, Cache):
    FILTERS.add(_class.name, _class)


def build_filter(spec: str | Filter | None) -> Filter | None:
    """The filter, or chain of filters, of a spec; None for None and 'none'.

    >>> build_filter("significant(0.01)|cache")
    significant(0.01)|cache
    >>> build_filter("none") is None
    True
    """
    if spec is None or isinstance(spec, Filter):
        return spec
    if not isinstance(spec, str):
        raise SpecError(f"a filter is a spec such as 'significant(0.01)|cache', a filter or None, not {spec!r}")
    links = FILTERS.read(spec)
    if len(links) == 1 and links[0].name == NO_FILTER and not links[0].args and not links[0].kwargs:
        return None
    if any(link.name == NO_FILTER for link in links):
        raise SpecError(f"{spec!r}: 'none' stands alone, without arguments: it means that nothing is filtered")
    filters = tuple(FILTERS.make(link) for link in links)
    return filters[0] if len(filters) == 1 else FilterChain(filters)


def digest_of(keys: Tensor) -> int:
    """A hash of a list of keys with 64 bits, never 0.

    >>> digest_of(torch.tensor([1, 2])) == digest_of(torch.tensor([1, 2])) != digest_of(torch.tensor([1, 3]))
    True
    """
    data = keys.cpu().numpy().astype("<i8", copy=False).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def hash_places(places: Tensor, key: int) -> Tensor:
    """`random_bits` of these places, less 2^31, computed in int32, where products wrap."""
    x = places.to(torch.int32).mul_(_signed(POSITION_FACTOR)).bitwise_xor_(_signed(key))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    return x.bitwise_xor_(-(2**31))


def _signed(number: int) -> int:
    """The same 32 bits as an int32."""
    return number - 2**32 if number >= 2**31 else number


def _select(places: Tensor | None, mask: Tensor) -> Tensor | None:
    """The places where the mask is True. The mask has one element for each of the places, or for each value."""
    chosen = torch.from_numpy(np.flatnonzero(mask.cpu().numpy())).to(mask.device)  # faster than torch's nonzero
    if chosen.numel() == mask.numel():
        return places
    return chosen if places is None else places[chosen]


def _links(one: Filter) -> tuple[Filter, ...]:
    return one.links if isinstance(one, FilterChain) else (one,)
