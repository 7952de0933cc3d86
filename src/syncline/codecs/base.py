"""The codec contract: how a tensor is encoded for the wire.

Codec
├── PayloadCodec     bytes: one body per slice, written and read by the codec     quantize, onebit, ternary, lossless
│   └── SparseCodec  selected elements: their indices, then their values          topk, threshold, randomk
└── allreducible     tensors that the wire may sum, in one round or several       cast, randomk, powersgd

A codec is a frozen dataclass whose repr is its spec. It has no state. What must be kept for a parameter between steps
(the residual of error feedback, a warm start) is in its `TensorSlice`. Random bits come from an `RngKey`.

The author of a payload codec writes `name`, `codec_id`, `body_bytes`, `write` and `read`, and `traits` where the
defaults do not hold. The author of an allreducible codec also writes `reduce_rounds`.

The payload of a bucket is a header, then the bodies of its slices::

    magic u16 │ version u8 │ codec_id u8 │ CRC-32 of the codec's spec u32 │ elements u64 │ bodies …

A body of fixed length follows directly. A body of variable length is preceded by its length, as u32. The receiver
knows the slices, so a payload of another codec, version or length is refused before anything is decoded.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from syncline.errors import DivergedError, IncompatibleError, ProtocolError, SpecError
from syncline.specs import Spec

if TYPE_CHECKING:
    from syncline.codecs.chain import Chain
    from syncline.codecs.kernels.dispatch import DenseKernel

__all__ = [
    "HEADER",
    "MAX_BUCKET_ELEMENTS",
    "SHARED_MEMORY_KEY",
    "Codec",
    "CodecTraits",
    "DenseCodec",
    "PayloadCodec",
    "RngKey",
    "TensorSlice",
    "all_finite",
    "check_no_gradient_options",
    "check_optimizer_momentum",
    "floats_of",
    "get_u32",
    "is_number",
    "is_whole_number",
    "max_payload_bytes",
    "pack",
    "pack_into",
    "put_u32",
    "split_bodies",
    "unpack",
    "unpack_all",
    "write_bytes",
]


MAX_BUCKET_ELEMENTS = 2**30
"""The kernels count the elements of a block in 32 bits."""
HEADER = struct.Struct("<HBBIQ")
LENGTH_BYTES = 4
SHARED_MEMORY_KEY = "q"
"""The key in `TensorSlice.memory` of what is equal on every rank: a warm start."""
MAGIC = 0x51C7
VERSION = 1


@dataclass(frozen=True)
class RngKey:
    """The key of counter-based random bits. The same key and element position always give the same bits.

    >>> RngKey(seed=1, step=2, rank=0).key == RngKey(seed=1, step=2, rank=0).key != RngKey(seed=1, step=2, rank=1).key
    True
    """

    seed: int = 0
    step: int = 0
    rank: int = 0
    name: str = ""
    start: int = 0
    """Index of the slice's first element in the parameter."""

    @cached_property
    def key(self) -> int:
        """32 bits that differ between ranks."""
        return _digest(f"{self.seed}/{self.step}/{self.rank}/{self.name}")

    @cached_property
    def shared_key(self) -> int:
        """32 bits that are the same on every rank."""
        return _digest(f"{self.seed}/{self.step}/all/{self.name}")

    def for_slice(self, name: str, start: int = 0) -> RngKey:
        """The key of another parameter, or of a slice of one."""
        return RngKey(self.seed, self.step, self.rank, name, start)


@dataclass
class TensorSlice:
    """A parameter's gradient, or a contiguous slice of it, with the codec's state for it."""

    flat: Tensor
    """Contiguous 1-D float32, finite. Encoding does not change it."""
    name: str = ""
    start: int = 0
    """Index of the first element in the parameter."""
    shape: tuple[int, ...] = ()
    """Shape of the whole parameter, for codecs that need matrices. Empty: one dimension."""
    residual: Tensor | None = None
    """Error feedback: what earlier steps did not send, like `flat`. Changed in place. None: no error feedback."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """Other state of the codec for this parameter between steps, such as momentum."""

    @property
    def numel(self) -> int:
        return self.flat.numel()

    def drop_nonfinite_state(self) -> None:
        """Set NaN and Inf to 0 in the residual and the momentum: they would make every later step NaN."""
        for state in (self.residual, *self.memory.values()):
            if state is not None:
                state.nan_to_num_(0.0, 0.0, 0.0)

    def drop_own_state(self) -> None:
        """Forget this rank's state for this step. The state that is equal on every rank stays."""
        self.residual = None
        self.memory = {key: value for key, value in self.memory.items() if key == SHARED_MEMORY_KEY}


@dataclass(frozen=True, kw_only=True)
class CodecTraits:
    """What the framework must know about a codec. The defaults are those of a biased codec of fixed length."""

    biased: bool = True
    """decode(encode(x)) differs from x on average. Such a codec needs error feedback."""
    exact: bool = False
    """decode(encode(x)) equals x, bit for bit."""
    fixed_length: bool = True
    """A body always takes `body_bytes`. If False, that is the maximum and `write` returns the length."""
    steady_from_step: int = 0
    """The step from which on the lengths of bodies no longer change."""
    detects_nonfinite: bool = False
    """`write` detects NaN and Inf without extra cost, where there is no residual. Otherwise the framework checks."""
    allreducible: bool = False
    """The codec has `reduce_rounds`: the wire may sum its tensors."""
    residual_needs_sum: bool = False
    """The residual depends on the reduced result, so the next step must wait for it."""
    momentum: float = 0.0
    """Momentum that the codec applies. The optimizer must have none, and each gradient must be that of a whole step."""
    gradient_options: tuple[str, ...] = ()
    """Options, as written in a spec, that need all workers to sum gradients."""
    parameter_options: tuple[str, ...] = ()
    """Options, as written in a spec, that need slices to be whole parameters."""


class Codec(ABC):
    """How a tensor looks on the wire.

    >>> import torch, syncline as sl
    >>> codec = sl.codecs.TopK(0.5)
    >>> payload = codec.encode(torch.tensor([3.0, 0.1, -2.0, 0.2]))
    >>> codec.decode(payload, torch.empty(4))
    tensor([ 3.,  0., -2.,  0.])
    """

    name: ClassVar[str]
    codec_id: ClassVar[int]
    """Identifies the codec's class in the payload header. An id is never reused."""
    positional: ClassVar[int] = 0
    """Number of fields that the spec writes without their names."""
    feedback: bool | None = None
    """Error feedback on or off. None: on where the codec is biased."""

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits()

    @cached_property
    def keeps_residual(self) -> bool:
        """Error feedback is on."""
        traits = self.traits
        return not traits.exact and (traits.biased if self.feedback is None else self.feedback)

    @cached_property
    def spec_crc(self) -> int:
        """CRC-32 of the spec. The payload header carries it, so that both ends use the same options."""
        return zlib.crc32(repr(self).encode())

    def check_feedback(self) -> None:
        """Refuse a `feedback` that is neither a bool nor None."""
        if not (self.feedback is None or isinstance(self.feedback, bool)):
            raise SpecError(f"{self.name}'s feedback is True or False, not {self.feedback!r}")

    def codec_for(self, name: str, numel: int) -> Codec | None:
        """The codec of one parameter. None: the parameter is sent unencoded. Codecs that choose override this."""
        return self

    def alternatives(self) -> list[Codec]:
        """All codecs that `codec_for` may return."""
        return [self]

    @abstractmethod
    def max_bytes(self, numel: int) -> int:
        """Maximum size in bytes of the payload of `numel` elements, header included."""

    @abstractmethod
    def encode(self, tensor: Tensor, rng: RngKey | None = None, residual: Tensor | None = None) -> Tensor:
        """The payload of one tensor: bytes with a header. NaN and Inf are refused.

        A `residual` (float32, as many elements) is added first. Afterwards it holds what was not sent.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, accumulate: bool = False, step: int = 0) -> Tensor:
        """Decode a payload into `out`, or add it. A payload that does not fit is a `ProtocolError`.

        `step` is the training step at which it was encoded: some codecs send more in their first steps.
        """

    def reduce_rounds(self, parts: Sequence[TensorSlice], rng: RngKey, size: int) -> Generator[Tensor, None, None]:
        """If `traits.allreducible`: yield tensors to sum in place over `size` ranks.

        At the end each slice's `flat` holds the decoded sum, the same on every rank, and its residual what this rank
        did not send.
        """
        raise AssertionError(f"{self!r} is not allreducible")
        yield  # makes it a generator

    def __or__(self, other: Codec) -> Chain:
        from syncline.codecs.chain import Chain

        return Chain((*_links(self), *_links(other)))

    def __repr__(self) -> str:
        own = [each for each in fields(self) if each.init]  # type: ignore[arg-type]
        first = tuple(getattr(self, each.name) for each in own[: self.positional])
        rest = {
            each.name: getattr(self, each.name)
            for each in own[self.positional :]
            if getattr(self, each.name) != each.default
        }
        return str(Spec(self.name, first, rest))


class PayloadCodec(Codec):
    """A codec of bytes. A body has no header of its own; the payload of a bucket has one."""

    @abstractmethod
    def body_bytes(self, numel: int, step: int = 0) -> int:
        """Size in bytes of the body of `numel` elements in a step; the maximum where the length varies."""

    @abstractmethod
    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        """Encode residual + flat into `body`, uint8 of `body_bytes`. Returns the number of bytes used.

        Afterwards the residual, if there is one, holds what the body does not. `rng` is the key of this slice.
        """

    @abstractmethod
    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        """Decode a body into `out`, 1-D float32, or add it. The bytes are untrusted.

        Bytes that no `write` makes are a `ProtocolError`; nothing is read or written out of bounds.
        """

    def read_all(self, rows: Tensor, out: Tensor, scale: float) -> None:
        """Decode `scale` times the sum of all ranks' bodies, one per row, in rank order. Override it to fuse this."""
        for rank, row in enumerate(rows):
            try:
                self.read(row, out, rank > 0)
            except ProtocolError as error:
                raise ProtocolError(f"from rank {rank}: {error}", peer=rank) from None
        if scale != 1.0:
            out.mul_(scale)

    def check_length(self, body: Tensor, out: Tensor) -> None:
        """Refuse a body of fixed length that is not as long as that of `out`."""
        due = self.body_bytes(out.numel())
        if body.numel() != due:
            raise ProtocolError(f"{body.numel()} B are not the {due} B of {out.numel()} values of {self!r}")

    def store(self, values: Tensor, out: Tensor, accumulate: bool) -> None:
        """Write decoded values, or add them. NaN and Inf are refused."""
        if not all_finite(values):
            raise ProtocolError(f"a payload of {self!r} holds NaN or Inf")
        if accumulate:
            out += values
        else:
            out.copy_(values)

    def max_bytes(self, numel: int) -> int:
        return max_payload_bytes(self, [numel])

    def encode(self, tensor: Tensor, rng: RngKey | None = None, residual: Tensor | None = None) -> Tensor:
        part = TensorSlice(_flat_float32(tensor), shape=tuple(tensor.shape), residual=_row(residual, tensor.numel()))
        return pack(self, [part], rng or RngKey())

    def decode(self, payload: Tensor, out: Tensor, accumulate: bool = False, step: int = 0) -> Tensor:
        flat = out.view(-1) if out.is_contiguous() and out.dtype == torch.float32 else None
        into = torch.zeros(out.numel(), device=out.device, dtype=torch.float32) if flat is None else flat
        if flat is None and accumulate:
            into.copy_(out.reshape(-1))
        unpack(self, payload, [into], accumulate, step=step)
        if flat is None:
            out.copy_(into.view(out.shape))
        return out


class DenseCodec(PayloadCodec):
    """A payload codec with a code for every element: bodies of fixed length, written and read by one kernel each."""

    draws_random_bits: ClassVar[bool] = True

    @cached_property
    @abstractmethod
    def kernel(self) -> DenseKernel:
        """The kernels that write and read bodies."""

    def body_bytes(self, numel: int, step: int = 0) -> int:
        kernel = self.kernel
        whole, rest = divmod(numel, kernel.block)
        scales = min(numel, 1) if kernel.shared_scale else -(-numel // kernel.block)
        block_bytes, rest_bytes = -(-kernel.block // kernel.codes_per_byte), -(-rest // kernel.codes_per_byte)
        return kernel.scale_bytes * scales + kernel.planes * (whole * block_bytes + rest_bytes)

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        random = (rng.start, rng.key) if self.draws_random_bits else ()
        if not self.kernel.encode(part.flat, part.residual, body, *random):
            if part.residual is None:
                raise DivergedError(f"{self!r} cannot encode {part.name or 'a tensor'}: it holds NaN or Inf")
            raise DivergedError(f"{self!r}: the residual and the gradient of {part.name!r} add up to Inf or NaN")
        return body.numel()

    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        self.check_length(body, out)
        fault = self.kernel.decode(body, out, accumulate)
        if fault:
            raise ProtocolError(f"a payload of {self!r} has {fault}")


def max_payload_bytes(codec: PayloadCodec, sizes: Sequence[int], step: int = 0) -> int:
    """Maximum size in bytes of a payload of slices of these sizes; the exact size if bodies have a fixed length."""
    extra = 0 if codec.traits.fixed_length else LENGTH_BYTES
    return HEADER.size + sum(_lengths(codec, sizes, step)) + extra * len(sizes)


@lru_cache(maxsize=256)
def _body_lengths(codec: PayloadCodec, sizes: tuple[int, ...], step: int) -> tuple[int, ...]:
    """The lengths of bodies, cached: they change only in the first steps of some codecs."""
    return tuple(codec.body_bytes(numel, step) for numel in sizes)


def _lengths(codec: PayloadCodec, sizes: Sequence[int], step: int) -> tuple[int, ...]:
    return _body_lengths(codec, tuple(sizes), min(step, codec.traits.steady_from_step))


def pack(
    codec: PayloadCodec, parts: Sequence[TensorSlice], rng: RngKey, report: Callable[[TensorSlice], None] | None = None
) -> Tensor:
    """Encode the slices of a bucket; `report` as in `pack_into`."""
    device = parts[0].flat.device if parts else torch.device("cpu")
    whole = torch.zeros(max_payload_bytes(codec, [p.numel for p in parts], rng.step), dtype=torch.uint8, device=device)
    return whole[: pack_into(codec, parts, rng, whole, report)]


def pack_into(
    codec: PayloadCodec,
    parts: Sequence[TensorSlice],
    rng: RngKey,
    whole: Tensor,
    report: Callable[[TensorSlice], None] | None = None,
) -> int:
    """Encode the slices of a bucket into `whole`, zeroed bytes of `max_payload_bytes`. Returns the bytes used.

    A slice that holds NaN or Inf is an error or, with a callback `report`, is passed to it and sent as zeros. The
    codec's state of that slice then does not change. If finite values overflow with the state, it stays finite.
    """
    sizes = [part.flat.numel() for part in parts]
    write_bytes(whole, 0, HEADER.pack(MAGIC, VERSION, codec.codec_id, codec.spec_crc, sum(sizes)))
    at, fixed = HEADER.size, codec.traits.fixed_length
    for part, most in zip(parts, _lengths(codec, sizes, rng.step), strict=True):
        first = at if fixed else at + LENGTH_BYTES
        body, own = whole[first : first + most], rng.for_slice(part.name, part.start)
        try:
            if not (codec.traits.detects_nonfinite and part.residual is None) and not all_finite(part.flat):
                raise DivergedError(f"{codec!r} cannot encode {part.name or 'a tensor'}: it holds NaN or Inf")
            used = codec.write(part, body, own)
        except DivergedError:
            part.drop_nonfinite_state()
            if report is None:
                raise
            report(part)
            used = codec.write(TensorSlice(part.flat.zero_(), part.name, part.start, part.shape), body.zero_(), own)
        if not fixed:
            put_u32(whole[at:], used)
        at = first + used
    return at


def unpack_all(codec: PayloadCodec, rows: Tensor, outs: Sequence[Tensor], step: int, scale: float) -> None:
    """Decode `scale` times the sum of all ranks' payloads, one per row, with bodies of fixed length."""
    sizes = [out.numel() for out in outs]
    for rank, row in enumerate(rows):
        _check_header(codec, row, sum(sizes), f" from rank {rank}")
    at = HEADER.size
    for out, length in zip(outs, _lengths(codec, sizes, step), strict=True):
        codec.read_all(rows[:, at : at + length], out, scale)
        at += length


def unpack(
    codec: PayloadCodec,
    payload: Tensor,
    outs: Sequence[Tensor],
    accumulate: bool,
    sender: str = "",
    step: int = 0,
) -> None:
    """Decode into float32 rows, one for each slice, or add to them."""
    found = split_bodies(codec, payload, [out.numel() for out in outs], step, sender)
    for out, body in zip(outs, found, strict=True):
        codec.read(body, out, accumulate)


def split_bodies(
    codec: PayloadCodec, payload: Tensor, sizes: Sequence[int], step: int, sender: str = ""
) -> Iterator[Tensor]:
    """Yield the body of each slice in a payload. A payload that does not fit is a `ProtocolError`."""
    _check_header(codec, payload, sum(sizes), sender)
    at, fixed = HEADER.size, codec.traits.fixed_length
    for length in _lengths(codec, sizes, step):
        if not fixed:
            length = int.from_bytes(_read_bytes(payload, at, LENGTH_BYTES, sender), "little")
            at += LENGTH_BYTES
        if at + length > payload.numel():
            raise ProtocolError(
                f"a payload{sender} of {payload.numel()} B ends within a body of {length} B at {at}: it is truncated"
            )
        yield payload[at : at + length]
        at += length
    if at != payload.numel():
        raise ProtocolError(f"a payload{sender} of {payload.numel()} B has {payload.numel() - at} B too many")


def _check_header(codec: PayloadCodec, payload: Tensor, elements: int, sender: str) -> None:
    magic, version, codec_id, spec_crc, numel = HEADER.unpack(_read_bytes(payload, 0, HEADER.size, sender))
    if magic != MAGIC:
        raise ProtocolError(f"the data{sender} is not a payload (it begins with {magic:#06x}, not {MAGIC:#06x})")
    if version != VERSION:
        raise ProtocolError(f"a payload{sender} has version {version}, and this is version {VERSION}")
    if codec_id != codec.codec_id or spec_crc != codec.spec_crc:
        raise ProtocolError(
            f"a payload{sender} is of another codec (kind {codec_id}) than {codec!r} (kind {codec.codec_id})"
        )
    if numel != elements:
        raise ProtocolError(f"a payload{sender} holds {numel} elements, and {elements} are expected")


def _read_bytes(payload: Tensor, at: int, count: int, sender: str) -> bytes:
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise ProtocolError(f"a payload{sender} is a row of bytes, not {payload.dtype}{list(payload.shape)}")
    if at + count > payload.numel():
        raise ProtocolError(f"a payload{sender} of {payload.numel()} B is too short: it is truncated")
    return bytes(payload[at : at + count].cpu().numpy())


def write_bytes(whole: Tensor, at: int, data: bytes) -> None:
    """Copy bytes into a tensor, from index `at` on."""
    whole[at : at + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def put_u32(out: Tensor, number: int) -> None:
    """Write a number into the first four bytes."""
    write_bytes(out, 0, number.to_bytes(4, "little"))


def get_u32(body: Tensor) -> int:
    """The number in the first four bytes."""
    if body.numel() < 4:
        raise ProtocolError(f"a body of {body.numel()} B is too short: it is truncated")
    return int.from_bytes(bytes(body[:4].cpu().numpy()), "little")


def floats_of(data: Tensor) -> Tensor:
    """Bytes as float32. They are copied, because data may begin anywhere and a float may not."""
    values = torch.empty(data.numel() // 4, device=data.device, dtype=torch.float32)
    values.view(torch.uint8).copy_(data)
    return values


def check_optimizer_momentum(codec: Codec, momentum: float) -> None:
    """Refuse an optimizer's momentum where the codec applies its own. `momentum` is the largest of all groups."""
    for each in codec.alternatives():
        if each.traits.momentum and momentum:
            raise IncompatibleError(
                f"{each!r} applies momentum before it chooses, and the optimizer applies {momentum} again; "
                "give the optimizer momentum=0"
            )


def check_no_gradient_options(codec: Codec, user: str) -> None:
    """Refuse options that need all workers to sum gradients. `user` names the caller in the message."""
    for each in codec.alternatives():
        for option in each.traits.gradient_options:
            raise IncompatibleError(
                f"{user} cannot use {each!r}: {option} is for strategy allreduce alone, where what is encoded is "
                f"a parameter's gradient and all workers sum it; leave {option} out, or take strategy allreduce"
            )


def _row(residual: Tensor | None, numel: int) -> Tensor | None:
    """A residual that kernels accept: they check no bounds."""
    if residual is None:
        return None
    if residual.dtype != torch.float32 or residual.numel() != numel or not residual.is_contiguous():
        raise IncompatibleError(
            f"a residual is contiguous float32 with as many elements as the tensor ({numel}), not "
            f"{residual.dtype}{list(residual.shape)}"
        )
    return residual.view(-1)


def _flat_float32(tensor: Tensor) -> Tensor:
    """A tensor as contiguous 1-D float32; no copy where it is that already."""
    if not tensor.dtype.is_floating_point:
        raise IncompatibleError(f"codecs are for real floating-point tensors, not {tensor.dtype}; send it as it is")
    return tensor.detach().reshape(-1).to(torch.float32).contiguous()


def all_finite(values: Tensor) -> bool:
    """True if there is no NaN and no Inf. The sum decides in most cases, much faster than a check of each element.

    >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([1.0, torch.inf]))
    (True, False)
    """
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def is_whole_number(value: object, least: int = 0, most: int | None = None) -> bool:
    """True for an int from `least` to `most`. None: without an upper limit."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value and (most is None or value <= most)


def is_number(value: object) -> bool:
    """True for an int or a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _links(codec: Any) -> tuple[Any, ...]:
    return codec.links if hasattr(codec, "links") else (codec,)
