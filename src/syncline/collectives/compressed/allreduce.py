"""The all-reduce of a bucket by its codec: tensors that the wire sums, payloads, or sparse streams.

`CompressedCollectives` decides which collective carries the payloads of a bucket: the one that the user names, or the
one with the least predicted time on this network. `compressed_allreduce` is the reduction itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from syncline.codecs import Chain, Codec, PayloadCodec, Quantize, RngKey, TensorSlice
from syncline.codecs.base import all_finite
from syncline.collectives.compressed.cost import predict_collectives
from syncline.collectives.compressed.gather_split import OwnerResiduals, gather, reclaim_residuals, split
from syncline.collectives.compressed.requests import AllReduceRequest, Reduction
from syncline.collectives.compressed.sparse import is_sparse, sparse_doubling, sparse_split, sparse_split_dense
from syncline.collectives.schedules import AUTO, NATIVE, build
from syncline.errors import DivergedError, IncompatibleError, SpecError
from syncline.specs import Registry
from syncline.transports import Network

__all__ = [
    "COMPRESSED_COLLECTIVES",
    "CompressedCollective",
    "CompressedCollectives",
    "NonfiniteGuard",
    "check_collective",
    "compressed_allreduce",
]

COMPRESSED_COLLECTIVES = ("gather", "split", "sparse_doubling", "sparse_split", "sparse_split_dense")
DENSE_COLLECTIVES = ("gather", "split")
OWNER_COLLECTIVES = ("split", "sparse_split_dense")
"""Collectives in which the owner of a shard encodes its sum, and so may keep a residual."""
PREFER_GATHER_RATIO = 1.5
"""Other collectives need more rounds and wake more threads than gather: they must be faster by this ratio."""
CHOICE_PREFIX = "payloads of "
"""The start of the keys of our choices, among those of dense all-reduce."""


class CompressedCollective:
    """One of `COMPRESSED_COLLECTIVES`, and the codec of the dense phase of `sparse_split_dense`."""

    def __init__(self, name: str, bits: int | None = None) -> None:
        self.name = name
        self.quantize = None if bits is None else Quantize(bits, feedback=True)

    def __repr__(self) -> str:
        return self.name if self.quantize is None else f"{self.name}(bits={self.quantize.bits})"


def _make_registry() -> Registry[CompressedCollective]:
    registry = Registry[CompressedCollective]("collective of payloads")
    for name in COMPRESSED_COLLECTIVES[:-1]:
        registry.add(name, lambda name=name: CompressedCollective(name))
    registry.add("sparse_split_dense", lambda bits=None: CompressedCollective("sparse_split_dense", bits))
    return registry


_REGISTRY = _make_registry()


class CompressedCollectives:
    """The collective that the user asked for, or those that were chosen for the buckets of a run."""

    def __init__(self, collective: str, codec: Codec | None) -> None:
        self.choices: dict[str, str] = {}
        """The chosen collective of each kind of bucket, as specs."""
        self.fixed = _named(collective)
        """The collective that the user asked for. None: it is chosen."""
        self._resolved: dict[tuple[Codec, tuple[int, ...]], CompressedCollective] = {}
        if self.fixed is not None and codec is None:
            raise IncompatibleError(f"algorithm={collective!r} is for payloads, and there is no codec; give one")
        if self.fixed is None and collective not in (NATIVE, AUTO):
            _check_schedule(collective, codec)
        if self.fixed is not None and codec is not None:
            _check_compressed(self.fixed, codec)

    def resolve(self, codec: Codec, sizes: tuple[int, ...]) -> CompressedCollective | None:
        """The collective of a bucket whose slices have these sizes. None: the wire sums the codec's tensors."""
        if self.fixed is not None or codec.traits.allreducible:
            return self.fixed
        found = self._resolved.get((codec, sizes))
        if found is None:
            found = _named(self.choices.get(_key(codec, sizes), "gather"))
            assert found is not None, "choices name compressed collectives"
            self._resolved[codec, sizes] = found
        return found

    def choose(self, codec: Codec, sizes: tuple[int, ...], size: int, network: Callable[[], Network]) -> None:
        """Choose the fastest on this network. Every rank calls it, with the same network."""
        key = _key(codec, sizes)
        if self.fixed is not None or key in self.choices or codec.traits.allreducible:
            return
        assert isinstance(codec, PayloadCodec), f"{codec!r} gives bytes"
        # Where values are quantised anyway, the dense second phase is quantised too.
        bits = codec.rest.bits if isinstance(codec, Chain) and isinstance(codec.rest, Quantize) else None
        second = None if bits is None else Quantize(bits)
        step = codec.traits.steady_from_step
        seconds = predict_collectives(codec, sizes, network(), size, step=step, quantize=second)
        found = min(seconds, key=lambda name: seconds[name] * (1.0 if name == "gather" else PREFER_GATHER_RATIO))
        self.choices[key] = repr(CompressedCollective(found, bits if found == "sparse_split_dense" else None))
        self._resolved.clear()

    def seconds(self, codec: Codec, sizes: tuple[int, ...], size: int, network: Network) -> float:
        """The predicted time of a bucket's reduction."""
        assert isinstance(codec, PayloadCodec), f"{codec!r} gives bytes"
        found, step = self.resolve(codec, sizes), codec.traits.steady_from_step
        assert found is not None, f"{codec!r} is not allreducible"
        return predict_collectives(codec, sizes, network, size, step=step, quantize=found.quantize)[found.name]

    def adopt(self, choices: Mapping[str, str]) -> dict[str, str]:
        """Use an earlier run's choices. Returns those that are not about payloads."""
        self.choices = {key: name for key, name in choices.items() if key.startswith(CHOICE_PREFIX)}
        self._resolved.clear()
        return {key: name for key, name in choices.items() if not key.startswith(CHOICE_PREFIX)}


class NonfiniteGuard:
    """Keeps NaN and Inf away from codecs, which cannot encode them, and writes the control numbers.

    `note` records a slice with NaN or Inf. `write_control` writes the control numbers, if they belong to this bucket.
    """

    def __init__(self, note: Callable[[TensorSlice], None], write_control: Callable[[], None]) -> None:
        self._note = note
        self.write_control = write_control

    def check(self, parts: Sequence[TensorSlice], with_residual: bool = False) -> None:
        """Check slices before they are encoded, then write the control numbers.

        `with_residual`: check the sum with the residual. A slice with NaN or Inf becomes zeros without state.
        """
        for part in parts:
            if not all_finite(part.flat + part.residual if with_residual and part.residual is not None else part.flat):
                self._note(part)
                part.flat.zero_()
                part.drop_own_state()
        self.write_control()

    def report(self, part: TensorSlice) -> None:
        """The codec has detected NaN or Inf in a slice and sends zeros. The control numbers are written again."""
        self._note(part)
        self.write_control()


def compressed_allreduce(
    codec: Codec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    collective: CompressedCollective | None,
    size: int,
    control: Tensor | None,
    guard: NonfiniteGuard,
    owner_residuals: OwnerResiduals,
) -> Reduction[Tensor | None]:
    """Make the slices their mean over the ranks, in place. `collective` None: the wire sums the codec's tensors.

    The `control` numbers are summed in place too, or returned as the bytes of each rank, bytes[p, n].
    """
    if collective is None:
        reclaim_residuals(owner_residuals, parts, [])
        guard.check(parts, with_residual=codec.keeps_residual and not codec.traits.residual_needs_sum)
        yield from _sum_rounds(codec, parts, rng, size, control)
        _scale(parts, 1 / size)
        return None
    assert isinstance(codec, PayloadCodec), f"{codec!r} gives bytes"
    name = collective.name
    if owner_residuals and name not in OWNER_COLLECTIVES:
        reclaim_residuals(owner_residuals, parts, [])  # of the owners in an earlier run
    device = parts[0].flat.device
    if name == "split" or (control is not None and control.device != device):
        guard.check(parts, with_residual=True)
    else:
        guard.write_control()  # and again if encoding detects NaN or Inf
    extra = torch.empty(0, dtype=torch.uint8) if control is None else control.view(torch.uint8)
    extra = extra.to(device)
    if name == "gather":
        rows = yield from gather(codec, parts, rng, size, extra, scale=1 / size, report=guard.report)
        return rows
    work = (codec, parts, rng, size, extra)
    if name == "split":
        rows = yield from split(*work, owner_residuals)
    elif name == "sparse_doubling":
        rows = yield from sparse_doubling(*work, report=guard.report)
    elif name == "sparse_split":
        rows = yield from sparse_split(*work, report=guard.report)
    else:
        rows = yield from sparse_split_dense(*work, owner_residuals, collective.quantize, report=guard.report)
    _scale(parts, 1 / size)
    return rows


def check_collective(collective: str, codec: Codec | None) -> None:
    """Refuse a collective that does not exist, or not for this codec."""
    CompressedCollectives(collective, codec)


def _sum_rounds(
    codec: Codec, parts: Sequence[TensorSlice], rng: RngKey, size: int, control: Tensor | None
) -> Reduction[None]:
    """The codec's own rounds. The control numbers go beside the first: half precision could not count them."""
    first = True
    try:
        for tensor in codec.reduce_rounds(parts, rng, size):
            if first and control is not None:
                yield AllReduceRequest(tensor), AllReduceRequest(control)
            else:
                yield AllReduceRequest(tensor)
            first = False
    except DivergedError:
        for part in parts:
            part.drop_nonfinite_state()
        raise


def _scale(parts: Sequence[TensorSlice], scale: float) -> None:
    for part in parts if scale != 1.0 else ():
        part.flat.mul_(scale)


def _key(codec: Codec, sizes: Sequence[int]) -> str:
    return f"{CHOICE_PREFIX}{len(sizes)} tensors, {sum(sizes)} elements by {codec!r}"


def _named(collective: str) -> CompressedCollective | None:
    """The compressed collective that a spec names. None: the spec names something else."""
    if not isinstance(collective, str) or collective.split("(")[0].strip() not in COMPRESSED_COLLECTIVES:
        return None
    return _REGISTRY.build(collective)


def _check_schedule(collective: str, codec: Codec | None) -> None:
    """Refuse a schedule of dense all-reduce for payloads that cannot be summed."""
    names = ", ".join(map(repr, COMPRESSED_COLLECTIVES))
    try:
        build("allreduce", collective)
    except SpecError as error:
        raise SpecError(f"{error}; also 'auto' and 'native'; with a codec {names}") from None
    for each in [] if codec is None else codec.alternatives():
        if not each.traits.allreducible:
            raise IncompatibleError(
                f"algorithm={collective!r} adds up on the wire, and payloads of {each!r} cannot be added: use "
                f"'auto' or one of {names}"
            )


def _check_compressed(collective: CompressedCollective, codec: Codec) -> None:
    for each in codec.alternatives():
        if not isinstance(each, PayloadCodec) or each.traits.residual_needs_sum:
            raise IncompatibleError(
                f"algorithm={collective!r} is for payloads, and {each!r} sums on the wire: use 'auto'"
            )
        if collective.name not in DENSE_COLLECTIVES and not is_sparse(each):
            raise IncompatibleError(
                f"algorithm={collective!r} merges streams of some elements, and {each!r} sends all: use 'gather' or "
                "'split'"
            )
        if collective.name == "split" and is_sparse(each):
            raise IncompatibleError(f"algorithm='split' is for codes of all elements; use 'sparse_split' with {each!r}")
