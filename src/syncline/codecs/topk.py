"""Sends the elements of largest magnitude, of the tensor or of every bucket; with the options of DGC.

    e = residual + g      send e_i for the k largest |e_i|      residual = e, 0 where it was sent

With `momentum` m the residual accumulates velocities instead of gradients: a gradient that is sent late then counts as
if momentum had been applied all the time. With `masking` the velocity is reset where an element was sent:

    u = m·u + g           residual = residual + u               send as above, and u_i = 0 there

Aji, Heafield: Sparse communication for distributed gradient descent, 2017. Lin et al.: Deep gradient compression, 2018.
Renggli et al.: SparCML, 2019 (k of every bucket).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from syncline.codecs.base import CodecTraits, RngKey, TensorSlice, is_number, is_whole_number
from syncline.codecs.kernels.dispatch import fused, sparse_kernels
from syncline.codecs.kernels.indices import layout
from syncline.codecs.quantize import Quantize
from syncline.codecs.sparse import SparseCodec
from syncline.errors import DivergedError, SpecError

__all__ = ["TopK"]

FIRST_WARMUP_RATIO = 0.25
"""The ratio at the start of the warm-up."""


@dataclass(frozen=True, repr=False)
class TopK(SparseCodec):
    """Send the elements of largest magnitude; of equal ones the first.

    >>> TopK(0.01), TopK(16, bucket=512)
    (topk(0.01), topk(16, bucket=512))
    >>> TopK(0.5).decode(TopK(0.5).encode(torch.tensor([3.0, 0.1, -2.0, 0.2])), torch.empty(4))
    tensor([ 3.,  0., -2.,  0.])
    """

    keep: float
    """A fraction such as 0.01, or a number of elements: of each parameter, or of each bucket."""
    bucket: int | None = None
    """Number of elements of a bucket. None: the whole parameter."""
    feedback: bool | None = None
    momentum: float = 0.0
    """DGC's momentum correction. The optimizer must have no momentum."""
    masking: bool = False
    """DGC's momentum factor masking: reset momentum where an element was sent. It reduced accuracy when measured."""
    warmup: int = 0
    """Number of steps in which the fraction falls exponentially from 1/4 to `keep`."""
    clip: float | None = None
    """Maximum norm of a parameter's gradient on this rank. For a bound c of the mean over p ranks, DGC uses c / √p."""
    whole: int = 0
    """Parameters of up to this many elements are sent whole: biases and norms matter more than their size."""

    name: ClassVar[str] = "topk"
    codec_id: ClassVar[int] = 5
    positional: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not (is_whole_number(self.keep, 1) or (isinstance(self.keep, float) and 0 < self.keep <= 1)):
            raise SpecError(
                f"topk keeps a fraction in (0, 1], as 0.01, or a number of elements, as 16, not {self.keep!r}"
            )
        if self.bucket is not None and not is_whole_number(self.bucket, 1):
            raise SpecError(f"topk's bucket is a number of elements, as 512, not {self.bucket!r}")
        if self.bucket is not None and self.keep > self.bucket:
            raise SpecError(
                f"topk cannot keep {self.keep} of every {self.bucket}; keep at most as many as a bucket has"
            )
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise SpecError(f"topk's momentum is in [0, 1), as 0.9, not {self.momentum!r}")
        if self.momentum and self.feedback is False:
            raise SpecError(f"topk's momentum={self.momentum} lives in the residual; leave out feedback=False")
        if not is_whole_number(self.warmup):
            raise SpecError(f"topk's warmup is a number of steps, not {self.warmup!r}")
        if self.clip is not None and not (is_number(self.clip) and 0 < self.clip < math.inf):
            raise SpecError(f"topk's clip is a norm above 0, not {self.clip!r}")
        if not is_whole_number(self.whole):
            raise SpecError(f"topk's whole is a number of elements, as 4096, not {self.whole!r}")
        self.check_feedback()
        if not isinstance(self.masking, bool):
            raise SpecError(f"topk's masking is True or False, not {self.masking!r}")

    @cached_property
    def traits(self) -> CodecTraits:
        options = (("momentum", self.momentum), ("masking", self.masking), ("clip", self.clip))
        return CodecTraits(
            steady_from_step=self.warmup,
            momentum=self.momentum,
            gradient_options=tuple(f"{name}={value!r}" for name, value in options if value),
            parameter_options=(f"whole={self.whole}",) if self.whole else (),
        )

    def max_selected(self, numel: int, step: int = 0) -> int:
        if numel <= self.whole:
            return numel
        if self.bucket is None:
            return min(numel, self._count(numel, step))
        whole, rest = divmod(numel, self.bucket)
        each = self._count(self.bucket, step)
        return whole * each + min(each, rest)

    def is_valid_count(self, numel: int, count: int) -> bool:
        return self.max_selected(numel, self.warmup) <= count <= self.max_selected(numel)

    def select(self, part: TensorSlice, rng: RngKey) -> tuple[Tensor, Tensor]:
        flat = self._with_momentum(part)
        run = sparse_kernels(flat)
        if self.bucket is None or part.numel <= self.whole:
            indices, values = run.largest(flat, part.residual, self.max_selected(part.numel, rng.step))
        else:
            each = self._count(self.bucket, rng.step)
            indices, values = run.largest_of_buckets(flat, part.residual, each, self.bucket)
        if self.momentum and self.masking:
            run.scatter(flat, indices, torch.zeros_like(values), accumulate=False)
        return indices, values

    def can_fuse(self, part: TensorSlice) -> bool:
        """True if one kernel can select and quantise."""
        simple = self.bucket is None and not (self.momentum and (self.masking or part.residual is None))
        return simple and fused(part.flat) and 0 < part.numel < 2**31

    def write_fused(self, part: TensorSlice, body: Tensor, rng: RngKey, values: Quantize) -> int:
        """Like `write`, if `can_fuse`."""
        from syncline.codecs.kernels.sparse_fused import NOT_FINITE, write_largest

        flat, k = self._clipped(part.flat), self.max_selected(part.numel, rng.step)
        velocity = part.memory.setdefault("velocity", torch.zeros_like(flat)) if self.momentum else None
        how = (values.bits, values.bucket, values.norm == "l2", values.stochastic)
        plan = layout(part.numel, k)
        moving = (rng.start, rng.key, velocity, self.momentum)
        if write_largest(flat, part.residual, body, k, plan, how, *moving) == NOT_FINITE:
            raise DivergedError(f"{self!r}: {part.name or 'a tensor'} and its residual add up to Inf")
        return body.numel()

    def _with_momentum(self, part: TensorSlice) -> Tensor:
        """The clipped gradient, with momentum."""
        flat = self._clipped(part.flat)
        if not self.momentum:
            return flat
        return part.memory.setdefault("velocity", torch.zeros_like(flat)).mul_(self.momentum).add_(flat)

    def _restore_residual(self, part: TensorSlice, indices: Tensor, selected: Tensor) -> None:
        if not self.momentum:
            super()._restore_residual(part, indices, selected)
        elif part.residual is not None:
            velocity = part.memory["velocity"]
            sparse_kernels(selected).scatter(part.residual, indices, selected, accumulate=False)
            part.residual.sub_(velocity).nan_to_num_(0.0, 0.0, 0.0)
            velocity.sub_(self._clipped(part.flat)).div_(self.momentum).nan_to_num_(0.0, 0.0, 0.0)

    def _count(self, size: int, step: int) -> int:
        """Number of elements selected of `size` in a step."""
        if size == 0:
            return 0
        kept = self.keep if isinstance(self.keep, int) else max(1, round(self.keep * size))
        last = kept / size if isinstance(self.keep, int) else self.keep
        if step >= self.warmup or last >= FIRST_WARMUP_RATIO:
            return kept
        ratio = FIRST_WARMUP_RATIO * math.exp(math.log(last / FIRST_WARMUP_RATIO) * step / self.warmup)
        return min(size, max(kept, round(ratio * size)))

    def _clipped(self, flat: Tensor) -> Tensor:
        if self.clip is None:
            return flat
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        return flat * (self.clip / norm) if norm > self.clip else flat
