"""The contract of a codec: how a tensor looks on the wire.

Codec
├── PayloadCodec     bytes: a body for each part, written and read here          quantize, onebit, ternary, lossless
│   └── SparseCodec  some of the elements: their indices, then their values      topk, threshold, randomk
└── (sums)           tensors that add up on the wire, in one round or several    cast, randomk, powersgd

A codec is a frozen dataclass whose repr is its spec. It has no state: what must be remembered of a parameter between
steps (the residual of error feedback, a warm start) lies in its `Part`, and random bits come from a `Draw`.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, ProtocolError, SpecError
from syncline.specs import Spec

if TYPE_CHECKING:
    from syncline.codecs.chain import Chain

__all__ = ["Codec", "Draw", "Part", "PayloadCodec", "all_finite", "flat_float32"]


@dataclass(frozen=True)
class Draw:
    """Where random bits come from: a key, and the place in the tensor as a counter. The same draw gives the same bits.

    >>> Draw(seed=1, step=2, rank=0).key == Draw(seed=1, step=2, rank=0).key != Draw(seed=1, step=2, rank=1).key
    True
    """

    seed: int = 0
    step: int = 0
    rank: int = 0
    name: str = ""
    start: int = 0
    """Elements of the parameter before the first of this part."""

    @cached_property
    def key(self) -> int:
        """32 bits that are this rank's own."""
        return _digest(f"{self.seed}/{self.step}/{self.rank}/{self.name}")

    @cached_property
    def shared_key(self) -> int:
        """32 bits that are the same on every rank."""
        return _digest(f"{self.seed}/{self.step}/all/{self.name}")

    def of(self, name: str, start: int = 0) -> Draw:
        """For another parameter, or a part of one."""
        return Draw(self.seed, self.step, self.rank, name, start)


@dataclass
class Part:
    """A parameter's gradient, or a slice of it, as a codec sees it."""

    flat: Tensor
    """One row of float32, contiguous and finite. Never changed by encoding."""
    name: str = ""
    start: int = 0
    """Where in the parameter it begins."""
    shape: tuple[int, ...] = ()
    """Of the parameter; for codecs that need matrices. Empty: a row."""
    residual: Tensor | None = None
    """What earlier steps have left unsent, like `flat`; changed in place. None: no error feedback."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """What else the codec keeps of this parameter between steps."""

    @property
    def numel(self) -> int:
        return self.flat.numel()

    def drop_nonfinite_state(self) -> None:
        """Set NaN and Inf to 0 in the residual and the momentum: kept, they would make every later step NaN."""
        for kept in (self.residual, *self.memory.values()):
            if kept is not None:
                kept.nan_to_num_(0.0, 0.0, 0.0)


class Codec(ABC):
    """How a tensor looks on the wire.

    >>> import torch, syncline as sl
    >>> codec = sl.TopK(0.5)
    >>> payload = codec.encode(torch.tensor([3.0, 0.1, -2.0, 0.2]))
    >>> codec.decode(payload, torch.empty(4))
    tensor([ 3.,  0., -2.,  0.])
    """

    name: ClassVar[str]
    kind: ClassVar[int]
    """Its number in a payload's header: never given to another."""
    positional: ClassVar[int] = 0
    """How many of its fields are written without their names."""
    feedback: bool | None = None
    """Whether what was not sent is kept for the next step; None: where the codec is biased."""

    @cached_property
    def mark(self) -> int:
        """CRC-32 of the spec: what a payload's header knows the codec by."""
        return zlib.crc32(repr(self).encode())

    @property
    def biased(self) -> bool:
        """Whether decode(encode(x)) is not x on average: such a codec needs error feedback."""
        return True

    @property
    def exact(self) -> bool:
        """Whether decode(encode(x)) is x, bit for bit."""
        return False

    @property
    def sums(self) -> bool:
        """Whether it gives tensors that add up on the wire, by `rounds`."""
        return False

    @property
    def lingers(self) -> bool:
        """Whether the residual is settled only when the sums are back, so that no step may begin before."""
        return False

    @property
    def keeps_residual(self) -> bool:
        """Whether error feedback is on."""
        return not self.exact and (self.biased if self.feedback is None else self.feedback)

    def check_feedback(self) -> None:
        """Refuse what is neither yes nor no."""
        if not (self.feedback is None or isinstance(self.feedback, bool)):
            raise SpecError(f"{self.name}'s feedback is True or False, not {self.feedback!r}")

    def pick(self, name: str, numel: int) -> Codec | None:
        """The codec for one parameter; None where it goes as it is. Choosing a codec is itself a codec."""
        return self

    def leaves(self) -> list[Codec]:
        """The codecs that a parameter may get: this one, or all that it chooses from."""
        return [self]

    @property
    def counts_steps(self) -> bool:
        """Whether each gradient must be that of a whole step: a gradient reduced before would count twice."""
        return False

    @property
    def gradient_options(self) -> tuple[str, ...]:
        """Its options, as written in a spec, that apply only where gradients are all-reduced."""
        return ()

    @property
    def parameter_options(self) -> tuple[str, ...]:
        """Its options, as written in a spec, that apply only where a part is a whole parameter."""
        return ()

    def check(self, momentum: float) -> None:  # noqa: B027 (most have nothing against it)
        """Refuse an optimizer that cannot work with this codec; `momentum` is the largest it uses."""

    def check_beyond_allreduce(self, user: str) -> None:
        """Refuse options that apply only where gradients are all-reduced; `user` names the caller in messages."""
        for leaf in self.leaves():
            for option in leaf.gradient_options:
                raise IncompatibleError(
                    f"{user} cannot use {leaf!r}: {option} is for strategy allreduce alone, where what is encoded is "
                    f"a parameter's gradient and all workers sum it; leave {option} out, or take strategy allreduce"
                )

    @abstractmethod
    def max_bytes(self, numel: int) -> int:
        """The most bytes that the payload of so many elements takes, header included."""

    @abstractmethod
    def encode(self, tensor: Tensor, draw: Draw | None = None, residual: Tensor | None = None) -> Tensor:
        """The payload of one tensor: bytes, with a header. NaN and Inf are refused.

        With a `residual` (float32, as many elements) it is added first, and then holds what was not sent.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, accumulate: bool = False, step: int = 0) -> Tensor:
        """Write what a payload says into `out`, or add it. A payload that is not ours is a `ProtocolError`.

        `step` is that of the draw, for codecs that send more in their first steps.
        """

    def rounds(self, parts: Sequence[Part], draw: Draw, size: int) -> Generator[Tensor, None, None]:
        """Where the codec `sums`: yield tensors to be summed in place over `size` ranks; at the end each part's
        `flat` holds the sum as decoded, the same on every rank, and each residual what this rank did not send.
        """
        raise AssertionError(f"{self!r} does not sum on the wire")
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
    """A codec of bytes. Bodies have no header of their own; `payload.py` puts one before those of a bucket."""

    @property
    def fixed(self) -> bool:
        """Whether a body always takes `body_bytes`; otherwise that is the most, and `write` tells how many it took."""
        return True

    @property
    def settled(self) -> int:
        """The step from which on bodies keep their length."""
        return 0

    @property
    def notices(self) -> bool:
        """Whether `write` finds NaN and Inf in a part by itself, at no cost.

        Other codecs, and every codec with a residual, get finite parts only: `pack_into` checks first.
        """
        return False

    @abstractmethod
    def body_bytes(self, numel: int, step: int = 0) -> int:
        """How many bytes the body of so many elements takes in a step."""

    @abstractmethod
    def write(self, part: Part, body: Tensor, draw: Draw) -> int:
        """Encode a part into `body`, uint8 of `body_bytes`; how many bytes were used. `draw` is this part's own.

        With a residual, what is encoded is residual + flat, and the residual then holds what the body does not say.
        """

    @abstractmethod
    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        """Decode a body into `out`, a row of float32, or add to it. The bytes may be anybody's: what cannot be is a
        `ProtocolError`, and nothing is read or written out of bounds.
        """

    def read_all(self, rows: Tensor, out: Tensor, scale: float) -> None:
        """The sum of what many ranks' bodies say, one a row, in this order; `scale` times."""
        for rank, row in enumerate(rows):
            try:
                self.read(row, out, rank > 0)
            except ProtocolError as error:
                raise ProtocolError(f"from rank {rank}: {error}", peer=rank) from None
        if scale != 1.0:
            out.mul_(scale)

    def max_bytes(self, numel: int) -> int:
        from syncline.codecs.payload import most_bytes

        return most_bytes(self, [numel])

    def encode(self, tensor: Tensor, draw: Draw | None = None, residual: Tensor | None = None) -> Tensor:
        from syncline.codecs.payload import pack

        part = Part(flat_float32(tensor), shape=tuple(tensor.shape), residual=_row(residual, tensor.numel()))
        return pack(self, [part], draw or Draw())

    def decode(self, payload: Tensor, out: Tensor, accumulate: bool = False, step: int = 0) -> Tensor:
        from syncline.codecs.payload import unpack

        flat = out.view(-1) if out.is_contiguous() and out.dtype == torch.float32 else None
        into = torch.zeros(out.numel(), device=out.device, dtype=torch.float32) if flat is None else flat
        if flat is None and accumulate:
            into.copy_(out.reshape(-1))
        unpack(self, payload, [into], accumulate, step=step)
        if flat is None:
            out.copy_(into.view(out.shape))
        return out


def _row(residual: Tensor | None, numel: int) -> Tensor | None:
    """A residual as kernels take it: they check no bounds."""
    if residual is None:
        return None
    if residual.dtype != torch.float32 or residual.numel() != numel or not residual.is_contiguous():
        raise IncompatibleError(
            f"a residual is contiguous float32 with as many elements as the tensor ({numel}), not "
            f"{residual.dtype}{list(residual.shape)}"
        )
    return residual.view(-1)


def flat_float32(tensor: Tensor) -> Tensor:
    """A tensor as one row of float32: itself where it is that."""
    if not tensor.dtype.is_floating_point:
        raise IncompatibleError(f"codecs are for real floating-point tensors, not {tensor.dtype}; send it as it is")
    return tensor.detach().reshape(-1).to(torch.float32).contiguous()


def all_finite(values: Tensor) -> bool:
    """Whether there is no NaN and no Inf. A sum tells in most cases, many times faster than a look at each.

    >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([1.0, torch.inf]))
    (True, False)
    """
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _links(codec: Any) -> tuple[Codec, ...]:
    return codec.links if hasattr(codec, "links") else (codec,)
