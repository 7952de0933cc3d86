"""The contract of codecs: the behaviour that all codecs share, for any input and any payload."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from syncline.codecs import build_codec
from syncline.codecs.base import HEADER, Codec, PayloadCodec, RngKey, TensorSlice, max_payload_bytes, pack, unpack
from syncline.codecs.kernels.dispatch import reference_only
from syncline.errors import DivergedError, IncompatibleError, ProtocolError
from syncline.testing.workloads import assert_rng_unchanged

__all__ = ["CodecContract", "guarded_tensor", "sum_in_lockstep"]

SHAPES = ((1,), (2,), (7,), (8,), (9,), (64,), (65,), (513,), (1025,), (30, 40), (5, 3, 100), (2049,))
GUARD = 0xA5


def sum_in_lockstep(
    codec: Codec, ranks: Sequence[Sequence[TensorSlice]], rng: RngKey | None = None
) -> list[torch.dtype]:
    """Run `reduce_rounds` of a codec on the tensors of all ranks in this process, and sum what it yields.

    Returns the dtypes of the summed tensors.
    """
    rng = rng or RngKey()
    running = [
        codec.reduce_rounds(parts, RngKey(rng.seed, rng.step, rank), len(ranks)) for rank, parts in enumerate(ranks)
    ]
    seen: list[torch.dtype] = []
    while True:
        yielded = [next(each, None) for each in running]
        tensors = [each for each in yielded if each is not None]
        assert len(tensors) in (0, len(ranks)), "the ranks have different numbers of rounds"
        if not tensors:
            return seen
        assert len({(each.shape, each.dtype) for each in tensors}) == 1, (
            "the ranks yield tensors that differ in shape or dtype"
        )
        total = tensors[0].clone()
        for each in tensors[1:]:
            total += each
        for each in tensors:
            each.copy_(total)
        seen.append(total.dtype)


@contextmanager
def guarded_tensor(numel: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """A tensor of zeros between guard bytes; assert that nothing was written outside the tensor."""
    size, guard_bytes = numel * dtype.itemsize, 256
    memory = torch.full((size + 2 * guard_bytes,), GUARD, dtype=torch.uint8)
    memory[guard_bytes : guard_bytes + size] = 0
    yield memory[guard_bytes : guard_bytes + size].view(dtype)
    assert bool((memory[:guard_bytes] == GUARD).all()), "something was written before the tensor"
    assert bool((memory[guard_bytes + size :] == GUARD).all()), "something was written after the tensor"


class CodecContract:
    """The contract of codecs.

    Inherit, define `make`, and set the attributes that differ:

    ```python
    class TestMyCodec(CodecContract):
        stochastic = True

        @classmethod
        def make(cls):
            return MyCodec(bits=4)
    ```
    """

    stochastic: ClassVar[bool] = False
    """True if the payload depends on the rank in the RNG key."""
    rounding: ClassVar[float] = 0.0
    """Maximum relative error of the mean for an unbiased codec that rounds to nearest."""

    @classmethod
    @abstractmethod
    def make(cls) -> Codec:
        """The codec under test."""

    @pytest.fixture
    def codec(self) -> Codec:
        """The codec under test; codecs have no state."""
        return self.make()

    def test_residual_is_the_encoding_error(self, codec: Codec) -> None:
        for shape in SHAPES:
            sent = _normal(shape, seed=sum(shape))
            original = sent.clone()
            with assert_rng_unchanged():
                decoded, residual, payload = _round_trip(codec, sent)
            assert torch.equal(sent, original), "encode has changed its input"
            assert payload.dtype == torch.uint8
            assert HEADER.size <= payload.numel() <= codec.max_bytes(sent.numel())
            _assert_equal_clamped(residual, sent - decoded)
            if codec.traits.exact:
                _assert_equal_clamped(decoded, sent)
            elif codec.traits.biased and not self.stochastic:
                assert (sent - decoded).norm() <= sent.norm() * (1 + 1e-6), (
                    f"the error is larger than the tensor ({shape})"
                )

    def test_residual_is_added_before_encoding(self, codec: Codec) -> None:
        sent, residual = _normal((30, 40), 1), _normal((30, 40), 2)
        wanted = (residual + sent).flatten()
        new_residual = residual.flatten().clone()
        decoded = codec.decode(codec.encode(sent, RngKey(7), new_residual), torch.empty(30, 40))
        alone = codec.decode(codec.encode(wanted.view(30, 40), RngKey(7)), torch.empty(30, 40))
        assert torch.equal(decoded, alone)
        _assert_equal_clamped(new_residual, wanted - decoded.flatten())

    def test_error_feedback_conserves_the_sum(self, codec: Codec) -> None:
        """Σ sent + residual = Σ gradients."""
        shape = (24, 50)
        residual, gradients_sum, decoded_sum = torch.zeros(1200), torch.zeros(1200).double(), torch.zeros(1200).double()
        magnitude = torch.zeros(1200).double()
        for step in range(30):
            gradient = _normal(shape, seed=step)
            decoded = codec.decode(codec.encode(gradient, RngKey(1, step), residual), torch.empty(shape), step=step)
            gradients_sum += gradient.flatten()
            decoded_sum += decoded.flatten()
            magnitude += gradient.flatten().abs() + decoded.flatten().abs()
        assert bool((decoded_sum.abs() > 0).any())
        assert bool(((decoded_sum + residual - gradients_sum).abs() <= 1e-6 * magnitude + 1e-6).all())

    def test_unbiased(self, codec: Codec) -> None:
        if codec.traits.biased or codec.traits.exact:
            pytest.skip("it is biased and keeps a residual" if codec.traits.biased else "it is exact")
        repeats, shape = (1000 if self.stochastic else 2), (8, 24)
        generator = torch.Generator().manual_seed(5)
        sent = (0.1 + 0.9 * torch.rand(shape, generator=generator)) * _normal(shape, 6).sign()
        seen = torch.stack([codec.decode(codec.encode(sent, RngKey(n)), torch.empty(shape)) for n in range(repeats)])
        off = seen.double() - sent
        # A rare level may be missing in the variance, so one more observation with the largest error is added.
        rarely = off.abs().max() / repeats if self.stochastic else 0.0
        sigma = (off.var(dim=0) / repeats + rarely**2).sqrt()
        limit = 4 * sigma + 1e-6 + self.rounding * sent.abs()
        error = off.mean(dim=0).abs()
        assert bool((error <= limit).all()), f"the mean error is {(error / limit).max()} times the allowed one"

    def test_empty_tensor(self, codec: Codec) -> None:
        residual = torch.zeros(0)
        payload = codec.encode(torch.zeros(0), residual=residual)
        assert payload.numel() <= codec.max_bytes(0)
        assert codec.decode(payload, torch.empty(0)).numel() == 0

    def test_zeros_stay_zero(self, codec: Codec) -> None:
        for shape in ((1,), (130,), (30, 40), (3000,)):
            decoded, residual, _ = _round_trip(codec, torch.zeros(shape))
            assert not decoded.any()
            assert not residual.any()

    @pytest.mark.parametrize("scale", [3e38, 1e-40, 1.5e-45], ids=["huge", "denormal", "smallest"])
    def test_huge_and_denormal_values(self, codec: Codec, scale: float) -> None:
        shapes = ((1,), (130,), (30, 40))
        rows = [(_normal(shape, 3).sign(), torch.ones(shape), _normal(shape, 3).clamp(-1, 1)) for shape in shapes]
        for pattern in (pattern for row in rows for pattern in row):
            sent = pattern * scale
            decoded, residual, payload = _round_trip(codec, sent)
            assert bool(torch.isfinite(decoded).all()), "a finite tensor is decoded as NaN or Inf"
            assert bool(torch.isfinite(residual).all())
            assert payload.numel() <= codec.max_bytes(sent.numel())
            _assert_equal_clamped(residual, sent - decoded)

    def test_large_and_small_values_together(self, codec: Codec) -> None:
        sent = torch.full((30, 40), 1e-40)
        sent[7, 11], sent[20, 1] = 3e38, -1e-3
        decoded, residual, _ = _round_trip(codec, sent)
        assert bool(torch.isfinite(decoded).all())
        _assert_equal_clamped(residual, sent - decoded)

    def test_strided_input_and_output(self, codec: Codec) -> None:
        wide = _normal((40, 60), 4)
        for view in (wide.T, wide[:, ::2], wide[5:, 3:]):
            payload = codec.encode(view, RngKey(3))
            assert torch.equal(payload, codec.encode(view.contiguous(), RngKey(3)))
            contiguous = codec.decode(payload, torch.empty(view.shape))
            strided = torch.full((view.shape[1], view.shape[0]), 9.0).T
            assert torch.equal(codec.decode(payload, strided), contiguous)

    def test_other_float_dtypes(self, codec: Codec) -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            sent = _normal((30, 40), 5).to(dtype)
            payload = codec.encode(sent, RngKey(3))
            assert torch.equal(payload, codec.encode(sent.float(), RngKey(3)))
            contiguous = codec.decode(payload, torch.empty(30, 40))
            assert torch.equal(codec.decode(payload, torch.empty(30, 40, dtype=dtype)), contiguous.to(dtype))
            base = torch.ones(30, 40, dtype=dtype)
            assert torch.equal(codec.decode(payload, base, accumulate=True), (1.0 + contiguous).to(dtype))

    def test_nan_and_inf_are_refused(self, codec: Codec) -> None:
        places = (((30, 40), 0), ((30, 40), 1199), ((90, 100), 7777))
        for (shape, at), wrong in product(places, (float("nan"), float("inf"), float("-inf"))):
            sent, residual = _normal(shape, 6), _normal((_numel(shape),), 7)
            original = residual.clone()
            sent.view(-1)[at] = wrong
            with pytest.raises(DivergedError, match="NaN or Inf"):
                codec.encode(sent)
            with pytest.raises(DivergedError):
                codec.encode(sent, residual=residual)
            assert torch.equal(residual, original), "the residual has changed"

    def test_integer_and_complex_dtypes_are_refused(self, codec: Codec) -> None:
        for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64):
            with pytest.raises(IncompatibleError, match=str(dtype)):
                codec.encode(torch.ones(30, 40).to(dtype))

    def test_decode_accumulates(self, codec: Codec) -> None:
        sent, base = _normal((30, 40), 7), _normal((30, 40), 8)
        payload = codec.encode(sent, RngKey(2))
        decoded = codec.decode(payload, torch.empty(30, 40))
        into = base.clone()
        assert codec.decode(payload, into, accumulate=True) is into
        assert torch.equal(into, base + decoded)

    def test_decode_overwrites_the_output(self, codec: Codec) -> None:
        payload = codec.encode(_normal((30, 40), 7), RngKey(2))
        over = torch.full((30, 40), float("nan"))
        assert torch.equal(codec.decode(payload, over), codec.decode(payload, torch.zeros(30, 40)))

    def test_rng_key_decides_the_payload(self, codec: Codec) -> None:
        sent = _normal((30, 40), 9)
        first, again, other = (codec.encode(sent, RngKey(1, 2, rank)) for rank in (0, 0, 1))
        assert torch.equal(first, again)
        assert torch.equal(first, other) != self.stochastic

    def test_reference_kernels_give_equal_bits(self, codec: Codec) -> None:
        for shape, sent in ((each, sent) for each in SHAPES for sent in _mixed_magnitudes(each)):
            start = _normal((_numel(shape),), 11) * 0.01
            quick, slow = start.clone(), start.clone()
            payload = codec.encode(sent, RngKey(4, 1), quick)
            with reference_only():
                plain = codec.encode(sent, RngKey(4, 1), slow)
                decoded = codec.decode(payload, torch.ones(shape), accumulate=True, step=1)
            assert torch.equal(payload, plain)
            assert _bits(quick) == _bits(slow)
            assert _bits(codec.decode(payload, torch.ones(shape), accumulate=True, step=1)) == _bits(decoded)

    def test_bucket_of_several_tensors(self, codec: Codec) -> None:
        if not isinstance(codec, PayloadCodec):
            pytest.skip("it is not a PayloadCodec")
        sizes = (5, 0, 1000, 1, 129)
        parts = [TensorSlice(_normal((size,), size), f"p{size}", start=3, residual=torch.zeros(size)) for size in sizes]
        originals = [part.flat.clone() for part in parts]
        payload = pack(codec, parts, RngKey(1, 1))
        limit = max_payload_bytes(codec, sizes, 1)
        assert payload.numel() == limit if codec.traits.fixed_length else payload.numel() <= limit
        outs = [torch.empty(size) for size in sizes]
        unpack(codec, payload, outs, accumulate=False, step=1)
        for part, out, original in zip(parts, outs, originals, strict=True):
            assert torch.equal(part.flat, original), "encode has changed its input"
            assert part.residual is not None
            _assert_equal_clamped(part.residual, part.flat - out)

    def test_nothing_is_written_outside_the_buffers(self, codec: Codec) -> None:
        if not isinstance(codec, PayloadCodec):
            pytest.skip("it is not a PayloadCodec")
        for numel in (1, 7, 64, 1025):
            part = TensorSlice(_normal((numel,), 1))
            with guarded_tensor(codec.body_bytes(numel), torch.uint8) as body, guarded_tensor(numel) as out:
                used = codec.write(part, body, RngKey(1))
                assert used == body.numel() if codec.traits.fixed_length else used <= body.numel()
                codec.read(body[:used], out, False)
                codec.read(body[:used], out, True)

    def test_payload_of_another_codec_is_refused(self, codec: Codec) -> None:
        for at, what in ((0, "not a payload"), (2, "version"), (3, "codec"), (4, "codec")):
            payload = codec.encode(_normal((30, 40), 1))
            payload[at] += 1
            with pytest.raises(ProtocolError, match=what):
                codec.decode(payload, torch.empty(30, 40))

    def test_payload_of_wrong_length_is_refused(self, codec: Codec) -> None:
        payload = codec.encode(_normal((30, 40), 1))
        with pytest.raises(ProtocolError, match="1200 elements, and 1199 are expected"):
            codec.decode(payload, torch.empty(1199))
        for length in (0, 1, HEADER.size - 1, HEADER.size, HEADER.size + 1, payload.numel() - 1):
            with pytest.raises(ProtocolError):
                codec.decode(payload[:length], torch.empty(30, 40))
        with pytest.raises(ProtocolError, match="row of bytes"):
            codec.decode(payload.view(1, -1), torch.empty(30, 40))
        with pytest.raises(ProtocolError, match="row of bytes"):
            codec.decode(payload.float(), torch.empty(30, 40))
        if isinstance(codec, PayloadCodec) and codec.traits.fixed_length:
            with pytest.raises(ProtocolError, match="1 B too many"):
                codec.decode(torch.cat([payload, payload[:1]]), torch.empty(30, 40))

    def test_repr_is_the_spec(self, codec: Codec) -> None:
        again = build_codec(repr(codec))
        assert again == codec
        assert repr(again) == repr(codec)
        assert again is not None
        assert hash(again) == hash(codec)

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_allreduce_of_payloads(self, codec: Codec, size: int) -> None:
        """All ranks have equal bits, and the sum plus the residuals equals the sum of the gradients."""
        if not codec.traits.allreducible:
            pytest.skip("it is not allreducible")
        shapes = ((30, 40), (7,), (1,), (4, 5, 25))
        ranks = [
            [TensorSlice(torch.zeros(_numel(s)), str(s), shape=s, residual=torch.zeros(_numel(s))) for s in shapes]
            for _ in range(size)
        ]
        for step in range(5):
            for rank, parts in enumerate(ranks):
                for part in parts:
                    part.flat.copy_(_normal(part.shape, 100 * step + rank).flatten())
            expected_sums = [sum(_wanted(p) for p in column) for column in zip(*ranks, strict=True)]
            magnitudes = [sum(_wanted(p).abs() for p in column) for column in zip(*ranks, strict=True)]
            dtypes = sum_in_lockstep(codec, ranks, RngKey(3, step))
            slack = size * max(torch.finfo(dtype).eps for dtype in dtypes)
            for column, expected, scale in zip(zip(*ranks, strict=True), expected_sums, magnitudes, strict=True):
                assert len({_bits(part.flat) for part in column}) == 1, "the ranks do not agree"
                residual = sum(part.residual.double() for part in column if part.residual is not None)
                assert bool(
                    ((column[0].flat + residual - expected).abs() <= 4 * slack * torch.as_tensor(scale).max()).all()
                )
                assert step or column[0].flat.any()

    def test_a_sum_at_the_end_of_the_range_is_finite(self, codec: Codec) -> None:
        """A sum that fits into float32 does not overflow on the wire, even if the wire has a narrower dtype."""
        if not codec.traits.allreducible:
            pytest.skip("it is not allreducible")
        for size in (3, 10):
            ranks = [[TensorSlice(torch.full((1200,), 3e38 / size), shape=(30, 40))] for _ in range(size)]
            sum_in_lockstep(codec, ranks)
            assert bool(torch.isfinite(ranks[0][0].flat).all())
            assert ranks[0][0].flat.any()


def _round_trip(codec: Codec, sent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode and decode a tensor; return the decoded tensor, the residual and the payload."""
    residual = torch.zeros(sent.numel())
    payload = codec.encode(sent, RngKey(11), residual)
    return codec.decode(payload, torch.full(sent.shape, 7.0)), residual.view(sent.shape), payload


def _assert_equal_clamped(residual: Tensor, wanted: Tensor) -> None:
    limit = torch.finfo(torch.float32).max
    wanted = wanted.clamp(-limit, limit)  # 3e38 - (-3e38) is not a float32
    assert torch.equal(residual, wanted), f"off by up to {(residual - wanted).abs().max()}"


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _mixed_magnitudes(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Tensors with values of many magnitudes, and of one magnitude."""
    mixed = _normal(shape, seed=10) * torch.logspace(-6, 3, _numel(shape)).view(shape)
    return mixed, torch.zeros(shape), torch.ones(shape), mixed * 1e-38, mixed.sign() * 3e38


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _wanted(part: TensorSlice) -> Tensor:
    assert part.residual is not None
    return part.flat.double() + part.residual


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())
