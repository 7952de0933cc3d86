"""Codecs that choose a codec for each parameter, by name or by size."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from syncline.codecs.base import Codec, CodecTraits, RngKey, is_whole_number
from syncline.codecs.raw import Raw
from syncline.errors import SpecError
from syncline.specs import Spec

__all__ = ["BySize", "Chooser", "PerLayer"]


class Chooser(Codec):
    """Chooses a codec for each parameter. A trait of it is that of any of its choices.

    The wire carries the chosen codecs only. A tensor without a name is encoded by `codec_for("", numel)`.
    """

    codec_id: ClassVar[int] = 0

    @abstractmethod
    def choices(self) -> Iterable[Codec | None]:
        """All codecs that may be chosen. None: the parameter is sent unencoded."""

    @abstractmethod
    def choose(self, name: str, numel: int) -> Codec | None:
        """The codec for one parameter. It may be a chooser too."""

    def codec_for(self, name: str, numel: int) -> Codec | None:
        found = self.choose(name, numel)
        return None if found is None else found.codec_for(name, numel)

    def pick(self, name: str, numel: int) -> Codec | None:
        """The former name of `codec_for`."""
        warnings.warn("pick() is now codec_for()", DeprecationWarning, stacklevel=2)
        return self.codec_for(name, numel)

    def alternatives(self) -> list[Codec]:
        return [leaf for each in self._codecs() for leaf in each.alternatives()]

    @cached_property
    def traits(self) -> CodecTraits:
        found = [codec.traits for codec in self.alternatives()]
        return CodecTraits(
            biased=any(each.biased for each in found),
            exact=all(each.exact for each in found),
            allreducible=any(each.allreducible for each in found),
            residual_needs_sum=any(each.residual_needs_sum for each in found),
        )

    @cached_property
    def keeps_residual(self) -> bool:
        return any(codec.keeps_residual for codec in self.alternatives())

    def max_bytes(self, numel: int) -> int:
        return self._alone(numel).max_bytes(numel)

    def encode(self, tensor: Tensor, rng: RngKey | None = None, residual: Tensor | None = None) -> Tensor:
        return self._alone(tensor.numel()).encode(tensor, rng, residual)

    def decode(self, payload: Tensor, out: Tensor, accumulate: bool = False, step: int = 0) -> Tensor:
        return self._alone(out.numel()).decode(payload, out, accumulate, step)

    def _alone(self, numel: int) -> Codec:
        return self.codec_for("", numel) or Raw()

    def _codecs(self) -> list[Codec]:
        return [each for each in self.choices() if each is not None]


@dataclass(frozen=True, repr=False)
class PerLayer(Chooser):
    """Chooses by the parameter's name: the first pattern that matches. Without a match it is sent unencoded.

    Patterns are those of file names: `*` is anything, `?` one character, `[01]` one of these.

    >>> codec = PerLayer({"*.bias": None, "0.*": "topk(0.01)|quantize(4)"})
    >>> codec
    per_layer({'*.bias': None, '0.*': 'topk(0.01)|quantize(4)'})
    >>> codec.codec_for("0.weight", 1000), codec.codec_for("0.bias", 10), codec.codec_for("1.weight", 1000)
    (topk(0.01)|quantize(4), None, None)
    """

    rules: Mapping[str, Codec | str | None]

    name: ClassVar[str] = "per_layer"
    positional: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping) or not self.rules:
            raise SpecError(
                f"per_layer: give patterns and their codecs, such as {{'*.bias': None, '*': 'topk(0.01)'}}, "
                f"not {self.rules!r}"
            )
        for pattern in self.rules:
            if not isinstance(pattern, str) or not pattern:
                raise SpecError(f"per_layer: a pattern is a string such as '*.bias', not {pattern!r}")
        built = {pattern: _built(self.name, repr(pattern), codec) for pattern, codec in self.rules.items()}
        object.__setattr__(self, "rules", built)

    def choices(self) -> Iterable[Codec | None]:
        return (each for each in self.rules.values() if not isinstance(each, str))

    def choose(self, name: str, numel: int) -> Codec | None:
        found = next((codec for pattern, codec in self.rules.items() if fnmatchcase(name, pattern)), None)
        assert not isinstance(found, str), "built in __post_init__"
        return found

    def __repr__(self) -> str:
        return str(Spec(self.name, ({pattern: _written(codec) for pattern, codec in self.rules.items()},)))

    def __hash__(self) -> int:
        return hash(repr(self))


@dataclass(frozen=True, repr=False)
class BySize(Chooser):
    """Chooses by the number of elements: `small` below `threshold`, else `large`.

    >>> codec = BySize(4096, None, "onebit")
    >>> codec
    by_size(4096, None, 'onebit')
    >>> codec.codec_for("bias", 10), codec.codec_for("weight", 4096)
    (None, onebit)
    """

    threshold: int
    small: Codec | str | None
    large: Codec | str | None

    name: ClassVar[str] = "by_size"
    positional: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if not is_whole_number(self.threshold, 1):
            raise SpecError(f"by_size: the threshold is a number of elements, at least 1, not {self.threshold!r}")
        object.__setattr__(self, "small", _built(self.name, "small", self.small))
        object.__setattr__(self, "large", _built(self.name, "large", self.large))

    def choices(self) -> Iterable[Codec | None]:
        return (each for each in (self.small, self.large) if not isinstance(each, str))

    def choose(self, name: str, numel: int) -> Codec | None:
        found = self.small if numel < self.threshold else self.large
        assert not isinstance(found, str), "built in __post_init__"
        return found

    def __repr__(self) -> str:
        return str(Spec(self.name, (self.threshold, _written(self.small), _written(self.large))))


def _built(name: str, where: str, codec: Codec | str | None) -> Codec | None:
    from syncline.codecs import build_codec

    try:
        return build_codec(codec)
    except SpecError as error:
        raise SpecError(f"{name}, {where}: {error}") from None


def _written(codec: Codec | str | None) -> str | None:
    return None if codec is None else str(codec)
