"""Which codec for which parameter: choosing one is itself a codec."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from torch import Tensor

from syncline.codecs.base import Codec, Draw
from syncline.codecs.raw import Raw
from syncline.errors import SpecError
from syncline.specs import Spec

__all__ = ["BySize", "Chooser", "PerLayer"]


class Chooser(Codec):
    """A codec that is another one for each parameter. What it says of itself holds where any choice of it does.

    On the wire its choices are seen, never itself. A tensor alone, without a name, is encoded with `pick("", numel)`.
    """

    kind: ClassVar[int] = 0

    @abstractmethod
    def choices(self) -> Iterable[Codec | None]:
        """Everything that may be picked here; None where a parameter goes as it is."""

    @abstractmethod
    def choose(self, name: str, numel: int) -> Codec | None:
        """The choice for one parameter: it may be a chooser too."""

    def pick(self, name: str, numel: int) -> Codec | None:
        found = self.choose(name, numel)
        return None if found is None else found.pick(name, numel)

    def leaves(self) -> list[Codec]:
        return [leaf for each in self._codecs() for leaf in each.leaves()]

    @property
    def biased(self) -> bool:
        return any(each.biased for each in self._codecs())

    @property
    def exact(self) -> bool:
        return all(each.exact for each in self._codecs())

    @property
    def sums(self) -> bool:
        return any(each.sums for each in self._codecs())

    @property
    def lingers(self) -> bool:
        return any(each.lingers for each in self._codecs())

    @property
    def keeps_residual(self) -> bool:
        return any(each.keeps_residual for each in self._codecs())

    def check(self, momentum: float) -> None:
        for each in self._codecs():
            each.check(momentum)

    def max_bytes(self, numel: int) -> int:
        return self._alone(numel).max_bytes(numel)

    def encode(self, tensor: Tensor, draw: Draw | None = None, residual: Tensor | None = None) -> Tensor:
        return self._alone(tensor.numel()).encode(tensor, draw, residual)

    def decode(self, payload: Tensor, out: Tensor, accumulate: bool = False, step: int = 0) -> Tensor:
        return self._alone(out.numel()).decode(payload, out, accumulate, step)

    def _alone(self, numel: int) -> Codec:
        return self.pick("", numel) or Raw()

    def _codecs(self) -> list[Codec]:
        return [each for each in self.choices() if each is not None]


@dataclass(frozen=True, repr=False)
class PerLayer(Chooser):
    """By the parameter's name: the first pattern that matches it decides; without one it goes as it is.

    Patterns are those of file names: `*` is anything, `?` one character, `[01]` one of these.

    >>> codec = PerLayer({"*.bias": None, "0.*": "topk(0.01)|quantize(4)"})
    >>> codec
    per_layer({'*.bias': None, '0.*': 'topk(0.01)|quantize(4)'})
    >>> codec.pick("0.weight", 1000), codec.pick("0.bias", 10), codec.pick("1.weight", 1000)
    (topk(0.01)|quantize(4), None, None)
    """

    rules: Mapping[str, Codec | str | None]

    name: ClassVar[str] = "per_layer"
    positional: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping) or not self.rules:
            raise SpecError(
                f"per_layer: patterns and their codecs are due, such as {{'*.bias': None, '*': 'topk(0.01)'}}, "
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
        assert not isinstance(found, str), "built when this was made"
        return found

    def __repr__(self) -> str:
        return str(Spec(self.name, ({pattern: _written(codec) for pattern, codec in self.rules.items()},)))

    def __hash__(self) -> int:
        return hash(repr(self))


@dataclass(frozen=True, repr=False)
class BySize(Chooser):
    """By the number of elements: below `threshold` the small one, from there on the large one.

    >>> codec = BySize(4096, None, "onebit")
    >>> codec
    by_size(4096, None, 'onebit')
    >>> codec.pick("bias", 10), codec.pick("weight", 4096)
    (None, onebit)
    """

    threshold: int
    small: Codec | str | None
    large: Codec | str | None

    name: ClassVar[str] = "by_size"
    positional: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int) or self.threshold < 1:
            raise SpecError(f"by_size: the threshold is a number of elements, at least 1, not {self.threshold!r}")
        object.__setattr__(self, "small", _built(self.name, "small", self.small))
        object.__setattr__(self, "large", _built(self.name, "large", self.large))

    def choices(self) -> Iterable[Codec | None]:
        return (each for each in (self.small, self.large) if not isinstance(each, str))

    def choose(self, name: str, numel: int) -> Codec | None:
        found = self.small if numel < self.threshold else self.large
        assert not isinstance(found, str), "built when this was made"
        return found

    def __repr__(self) -> str:
        return str(Spec(self.name, (self.threshold, _written(self.small), _written(self.large))))


def _built(name: str, where: str, codec: Codec | str | None) -> Codec | None:
    from syncline.codecs.catalog import build_codec

    try:
        return build_codec(codec)
    except SpecError as error:
        raise SpecError(f"{name}, {where}: {error}") from None


def _written(codec: Codec | str | None) -> str | None:
    return None if codec is None else str(codec)
