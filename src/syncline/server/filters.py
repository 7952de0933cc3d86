"""The contract of a filter: which of the values that a client holds go to the servers now.

    residual ← residual + new values       the chosen are sent, and 0 from then on; the rest waits

A filter only ever chooses: what it does not choose stays in the client's residual and goes later, at the latest when
the client flushes. So no filter can lose anything. It is a frozen dataclass whose repr is its spec, and has no state.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from syncline.codecs.kernels.random_bits import POSITION_FACTOR
from syncline.errors import SpecError
from syncline.specs import Registry, Spec

__all__ = ["Cache", "Filter", "FilterChain", "Significant", "Skip", "build_filter", "digest_of", "filter_names"]


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


@dataclass(frozen=True, repr=False)
class Cache(Filter):
    """Send a list of keys once, and then a digest of 64 bits in its place.

    It chooses nothing itself: client and server see to it. A server that does not know a digest asks for the keys.

    >>> Cache().caches
    True
    """

    name: ClassVar[str] = "cache"

    @property
    def caches(self) -> bool:
        return True

    @property
    def chooses(self) -> bool:
        return False

    def narrow(self, residual: Tensor, places: Tensor | None, number: int) -> Tensor | None:
        return places


def digest_of(keys: Tensor) -> int:
    """64 bits that stand for a list of keys, never 0.

    >>> import torch
    >>> digest_of(torch.tensor([1, 2])) == digest_of(torch.tensor([1, 2])) != digest_of(torch.tensor([1, 3]))
    True
    """
    data = keys.cpu().numpy().astype("<i8", copy=False).tobytes()
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, repr=False)
class Significant(Filter):
    """Send the values of at least a given magnitude.

        relative=False: |r| ≥ t        relative=True: |r| ≥ t · √(mean of r²)

    A zero is never sent, and NaN always: whoever checks for it must get to see it. Li et al., *Scaling distributed
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
            norm = torch.linalg.vector_norm(residual, dtype=torch.float64)  # squares of float32 may leave float32
            bound = (self.t * norm / max(1, residual.numel()) ** 0.5).to(torch.float32)
        values = residual if places is None else residual[places]
        enough = (values.abs() < bound).logical_not_()
        return narrowed(places, enough & (values != 0) if self.relative else enough)  # of zeros the bound is 0 too


@dataclass(frozen=True, repr=False)
class Skip(Filter):
    """Each value waits for a later push with probability p.

    Seed, number of the push and place decide, whatever else was chosen: the same run skips the same.

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
            raise SpecError(f"skip's seed is a whole number, not {self.seed!r}")

    def narrow(self, residual: Tensor, places: Tensor | None, number: int) -> Tensor | None:
        where = torch.arange(residual.numel(), device=residual.device) if places is None else places
        return narrowed(places, _mixed(where, self._key(number)) >= round(self.p * 2**32) - 2**31)

    def _key(self, number: int) -> int:
        """32 bits for a push."""
        text = f"skip/{self.seed}/{number}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _mixed(places: Tensor, key: int) -> Tensor:
    """`random_bits` of these places, less 2^31: in int32, where products wrap by themselves."""
    x = places.to(torch.int32).mul_(_signed(POSITION_FACTOR)).bitwise_xor_(_signed(key))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    return x.bitwise_xor_(-(2**31))


def _signed(number: int) -> int:
    """The same 32 bits as an int32."""
    return number - 2**32 if number >= 2**31 else number


NOTHING = "none"
"""What stands for no filter where only text can be written."""


def build_filter(spec: str | Filter | None) -> Filter | None:
    """The filter, or chain of filters, that a spec describes; None for None and 'none'.

    >>> build_filter("significant(0.01)|cache")
    significant(0.01)|cache
    >>> build_filter("none") is None
    True
    """
    if spec is None or isinstance(spec, Filter):
        return spec
    if not isinstance(spec, str):
        raise SpecError(f"a filter is a spec such as 'significant(0.01)|cache', a filter or None, not {spec!r}")
    registry = _registry()
    links = registry.read(spec)
    if len(links) == 1 and links[0].name == NOTHING and not links[0].args and not links[0].kwargs:
        return None
    if any(link.name == NOTHING for link in links):
        raise SpecError(f"{spec!r}: 'none' stands alone, without arguments: it means that nothing is filtered")
    built = tuple(registry.make(link) for link in links)
    return built[0] if len(built) == 1 else FilterChain(built)


def filter_names() -> list[str]:
    """Every name that a link of a filter's spec may begin with."""
    return _registry().names()


def _registry() -> Registry[Filter]:
    registry = Registry[Filter]("filter")
    for each in (Significant, Skip, Cache):
        registry.add(each.name, each)
    return registry
