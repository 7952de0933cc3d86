"""What codecs of all elements share: a body of one length, written and read by one kernel each."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from syncline.codecs.base import PayloadCodec, RngKey, TensorSlice
from syncline.errors import DivergedError, ProtocolError

__all__ = ["DenseCodec"]


class DenseCodec(PayloadCodec):
    """A codec with a code for every element."""

    @abstractmethod
    def encode_body(self, part: TensorSlice, body: Tensor, rng: RngKey) -> bool:
        """Write a body; whether all was finite."""

    @abstractmethod
    def decode_body(self, body: Tensor, out: Tensor, accumulate: bool) -> str:
        """Read a body of the right length; what is wrong with it, or nothing."""

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        if not self.encode_body(part, body, rng):
            if part.residual is None:
                raise DivergedError(f"{self!r} cannot encode {part.name or 'a tensor'}: it holds NaN or Inf")
            raise DivergedError(f"{self!r}: the residual and the gradient of {part.name!r} add up to Inf or NaN")
        return body.numel()

    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        due = self.body_bytes(out.numel())
        if body.numel() != due:
            raise ProtocolError(f"{body.numel()} B are not the {due} B of {out.numel()} values of {self!r}")
        fault = self.decode_body(body, out, accumulate)
        if fault:
            raise ProtocolError(f"a payload of {self!r} has {fault}")
