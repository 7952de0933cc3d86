"""By which way payloads that do not sum on the wire are reduced: as asked, or the one that costs least here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from syncline.codecs import Chain, Codec, PayloadCodec, PowerSGD, Quantize, SparseCodec
from syncline.collectives import NATIVE, build
from syncline.costs import AUTO
from syncline.errors import IncompatibleError, SpecError
from syncline.reduction.choosing import choose
from syncline.specs import Registry
from syncline.transports import Network

__all__ = ["COMPRESSED_COLLECTIVES", "CompressedCollective", "CompressedCollectives", "check_collective", "is_sparse"]

COMPRESSED_COLLECTIVES = ("gather", "split", "sparse_doubling", "sparse_split", "sparse_split_dense")
DENSE_CODES = ("gather", "split")
PREFER_GATHER = 1.5
"""One round of the engine's own. Others need more rounds and wake more threads: they must be faster by more."""
MARK = "payloads of "
"""How a choice of ours begins, among those of the all-reduce."""


class CompressedCollective:
    """One of `COMPRESSED_COLLECTIVES`, and for the last one how its dense phase is quantised."""

    def __init__(self, name: str, bits: int | None = None) -> None:
        self.name = name
        self.quantize = None if bits is None else Quantize(bits, feedback=True)

    def __repr__(self) -> str:
        return self.name if self.quantize is None else f"{self.name}(bits={self.quantize.bits})"


class CompressedCollectives:
    """The way that was asked for, or those that were chosen for the buckets of a run."""

    def __init__(self, collective: str, codec: Codec | None) -> None:
        self.chosen: dict[str, str] = {}
        self.told = _told(collective)
        """None where it is to be chosen."""
        if self.told is not None and codec is None:
            raise IncompatibleError(f"collective={collective!r} is for payloads, and there is no codec; give one")
        if self.told is None and collective not in (NATIVE, AUTO):
            _check_schedule(collective, codec)
        if self.told is not None and codec is not None:
            _check_way(self.told, codec)

    def way(self, codec: PayloadCodec, sizes: Sequence[int]) -> CompressedCollective:
        """The way of a bucket whose parts have these sizes."""
        if self.told is not None:
            return self.told
        spec = self.chosen.get(_key(codec, sizes), COMPRESSED_COLLECTIVES[0])
        found = _told(spec)
        assert found is not None, f"{spec} is one of ours"
        return found

    def choose(self, codec: Codec, sizes: Sequence[int], size: int, network: Callable[[], Network]) -> None:
        """Take what costs least on this network. Every rank calls it, and knows the same network."""
        key = _key(codec, sizes)
        if (
            self.told is None
            and key not in self.chosen
            and not codec.traits.allreducible
            and isinstance(codec, PayloadCodec)
        ):
            # Where values are quantised anyway, so is a dense second phase.
            bits = codec.rest.bits if isinstance(codec, Chain) and isinstance(codec.rest, Quantize) else None
            second = None if bits is None else Quantize(bits)
            seconds = choose(codec, sizes, network(), size, step=codec.traits.steady_from_step, quantize=second).seconds
            found = min(
                seconds, key=lambda way: seconds[way] * (1.0 if way == COMPRESSED_COLLECTIVES[0] else PREFER_GATHER)
            )
            self.chosen[key] = repr(CompressedCollective(found, bits if found == COMPRESSED_COLLECTIVES[-1] else None))

    def seconds(self, codec: Codec, sizes: Sequence[int], size: int, network: Network) -> float:
        """What the way of a bucket is expected to take."""
        assert isinstance(codec, PayloadCodec), f"{codec!r} sums on the wire"
        way = self.way(codec, sizes)
        return choose(codec, sizes, network, size, step=codec.traits.steady_from_step, quantize=way.quantize).seconds[
            way.name
        ]

    def adopt(self, choices: Mapping[str, str]) -> dict[str, str]:
        """Take ours out of an earlier run's choices; the others are given back."""
        self.chosen = {key: way for key, way in choices.items() if key.startswith(MARK)}
        return {key: way for key, way in choices.items() if not key.startswith(MARK)}


def check_collective(collective: str, codec: Codec | None) -> None:
    """Refuse a collective that does not exist, or not for this codec."""
    CompressedCollectives(collective, codec)


def is_sparse(codec: Codec) -> bool:
    """Whether a codec's payload names some elements, so that streams can be merged."""
    return isinstance(codec.first if isinstance(codec, Chain) else codec, SparseCodec)


def _key(codec: Codec, sizes: Sequence[int]) -> str:
    return f"{MARK}{len(sizes)} tensors, {sum(sizes)} elements by {codec!r}"


def _told(collective: str) -> CompressedCollective | None:
    """The way that a spec names; None where it names something else."""
    if not isinstance(collective, str) or collective.split("(")[0].strip() not in COMPRESSED_COLLECTIVES:
        return None
    registry = Registry[CompressedCollective]("way of payloads")
    for name in COMPRESSED_COLLECTIVES[:-1]:
        registry.add(name, lambda name=name: CompressedCollective(name))
    registry.add(COMPRESSED_COLLECTIVES[-1], lambda bits=None: CompressedCollective(COMPRESSED_COLLECTIVES[-1], bits))
    return registry.build(collective)


def _check_schedule(collective: str, codec: Codec | None) -> None:
    """A schedule of all-reduce adds tensors up on their way."""
    try:
        build("allreduce", collective)
    except SpecError as error:
        raise SpecError(
            f"{error}; also 'auto' and 'native'; with a codec {', '.join(map(repr, COMPRESSED_COLLECTIVES))}"
        ) from None
    stubborn = [] if codec is None else [leaf for leaf in codec.alternatives() if not leaf.traits.allreducible]
    if stubborn:
        raise IncompatibleError(
            f"collective={collective!r} adds up on the wire, and payloads of {stubborn[0]!r} cannot be added: use "
            f"'auto' or one of {', '.join(map(repr, COMPRESSED_COLLECTIVES))}"
        )


def _check_way(way: CompressedCollective, codec: Codec) -> None:
    for leaf in codec.alternatives():
        if not isinstance(leaf, PayloadCodec) or isinstance(getattr(leaf, "first", None), PowerSGD):
            raise IncompatibleError(f"collective={way!r} is for payloads, and {leaf!r} sums on the wire: use 'auto'")
        if way.name not in DENSE_CODES and not is_sparse(leaf):
            raise IncompatibleError(
                f"collective={way!r} merges streams of some elements, and {leaf!r} sends all: use 'gather' or 'split'"
            )
        if way.name == "split" and is_sparse(leaf):
            raise IncompatibleError(
                f"collective='split' is for codes of all elements; use 'sparse_split' with {leaf!r}"
            )
