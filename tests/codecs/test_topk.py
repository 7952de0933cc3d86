"""topk: what is kept, what is left, and Deep Gradient Compression's equations."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from syncline.codecs.base import PayloadCodec, RngKey, TensorSlice, check_optimizer_momentum
from syncline.codecs.kernels.dispatch import reference_only
from syncline.codecs.sparse import SparseCodec
from syncline.codecs.topk import TopK
from syncline.errors import DivergedError, IncompatibleError, ProtocolError, SpecError


@dataclass(frozen=True, repr=False)
class Halves(PayloadCodec):
    """Whole halves, as int8: a coder of values whose error is easy to see."""

    name: ClassVar[str] = "halves"
    codec_id: ClassVar[int] = 99

    def body_bytes(self, numel: int, step: int = 0) -> int:
        return numel

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        total = part.flat if part.residual is None else part.residual + part.flat
        said = (total * 2).round().clamp(-127, 127).to(torch.int8)
        body.copy_(said.view(torch.uint8))
        if part.residual is not None:
            part.residual.copy_(total - said / 2)
        return part.numel

    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        out.copy_(body.view(torch.int8) / 2)


def _sent(codec: SparseCodec, part: TensorSlice, rng: RngKey, values: PayloadCodec | None = None) -> Tensor:
    """What a part's body says."""
    more: tuple[Any, ...] = () if values is None else (values,)
    body = torch.full((codec.body_bytes(part.numel, rng.step, *more),), 0x55, dtype=torch.uint8)
    assert codec.write(part, body, rng, *more) == body.numel()
    out = torch.full((part.numel,), 7.0)
    codec.read(body, out, False, *more)
    return out


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (TopK(0.01), "topk(0.01)"),
        (TopK(16, bucket=512), "topk(16, bucket=512)"),
        (TopK(0.001, momentum=0.9, warmup=100, clip=2.0), "topk(0.001, momentum=0.9, warmup=100, clip=2.0)"),
        (TopK(0.5, feedback=False), "topk(0.5, feedback=False)"),
    ],
)
def test_repr_is_the_spec(codec: TopK, text: str) -> None:
    assert repr(codec) == text


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"keep": 0.0}, r"fraction in \(0, 1\].*not 0.0"),
        ({"keep": 1.5}, "not 1.5"),
        ({"keep": -1}, "not -1"),
        ({"keep": True}, "not True"),
        ({"keep": math.nan}, "not nan"),
        ({"keep": "0.1"}, "not '0.1'"),
        ({"keep": 16, "bucket": 8}, "16 of every 8"),
        ({"keep": 16, "bucket": 0}, "as 512, not 0"),
        ({"keep": 0.1, "bucket": 512.0}, "as 512, not 512.0"),
        ({"keep": 0.1, "momentum": 1.0}, r"\[0, 1\), as 0.9, not 1.0"),
        ({"keep": 0.1, "momentum": 0.9, "feedback": False}, "leave out feedback=False"),
        ({"keep": 0.1, "warmup": -1}, "steps, not -1"),
        ({"keep": 0.1, "clip": 0.0}, "above 0, not 0.0"),
        ({"keep": 0.1, "clip": math.inf}, "above 0, not inf"),
        ({"keep": 0.1, "masking": 1}, "True or False, not 1"),
        ({"keep": 0.1, "feedback": 0}, "True or False, not 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        TopK(**arguments)


@pytest.mark.parametrize(("keep", "bucket", "numel", "kept"), [
    (0.01, None, 1000, 10), (0.01, None, 3, 1), (0.01, None, 0, 0), (1.0, None, 9, 9), (16, None, 10, 10),
    (16, None, 100, 16), (16, 512, 1024, 32), (16, 512, 1030, 38), (16, 512, 0, 0), (0.25, 8, 17, 5),
])  # fmt: skip
def test_how_many_are_kept(keep: float, bucket: int | None, numel: int, kept: int) -> None:
    codec = TopK(keep, bucket=bucket)
    assert codec.max_selected(numel) == kept
    indices, values = codec.select(
        TensorSlice(torch.randn(numel, generator=torch.Generator().manual_seed(0))), RngKey()
    )
    assert len(indices) == len(values) == kept


@pytest.mark.parametrize("codec", [TopK(0.01), TopK(16, bucket=512), TopK(1.0), TopK(0.3)], ids=repr)
@pytest.mark.parametrize("numel", [0, 1, 5, 700, 30_000])
def test_payloads_of_both_kernels_are_the_same(codec: TopK, numel: int) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    payload = codec.encode(flat)
    out, more = codec.decode(payload, torch.empty(numel)), torch.ones(numel)
    with reference_only():
        assert torch.equal(codec.encode(flat), payload)
        assert torch.equal(codec.decode(payload, torch.empty(numel)), out)
    assert payload.numel() == codec.max_bytes(numel)
    assert int((out != 0).sum()) == codec.max_selected(numel)
    assert torch.equal(codec.decode(payload, more, accumulate=True), out + 1)


@pytest.mark.parametrize("values", [None, Halves()], ids=["raw", "halves"])
@pytest.mark.parametrize("codec", [TopK(0.05), TopK(4, bucket=64)], ids=repr)
@pytest.mark.parametrize("plain", [False, True])
def test_what_is_sent_and_what_is_left_are_all_there_is(codec: TopK, values: PayloadCodec | None, plain: bool) -> None:
    """After any number of steps Σ sent + residual = Σ gradients."""
    generator = torch.Generator().manual_seed(3)
    part = TensorSlice(torch.zeros(500), residual=torch.zeros(500))
    given, sent = torch.zeros(500, dtype=torch.float64), torch.zeros(500, dtype=torch.float64)
    for step in range(40):
        part.flat = torch.randn(500, generator=generator) * 3
        given += part.flat
        with reference_only() if plain else nullcontext():
            sent += _sent(codec, part, RngKey(step=step), values)
        assert part.residual is not None
        torch.testing.assert_close(sent + part.residual, given, rtol=0, atol=1e-4)
    assert float(sent.abs().sum()) > 0


def test_a_residual_that_overflows_is_told() -> None:
    residual = torch.tensor([3e38, 0.0])
    with pytest.raises(DivergedError, match="add up to Inf"):
        TopK(0.5).encode(torch.tensor([3e38, 0.0]), residual=residual)


def test_momentum_correction_by_hand() -> None:
    """u = m·u + g; v = v + u; the largest of v is sent, and both are 0 there."""
    codec = TopK(1, momentum=0.5, masking=True)
    residual = torch.zeros(3)
    part = TensorSlice(torch.tensor([4.0, 2.0, 1.0]), residual=residual)
    assert _sent(codec, part, RngKey()).tolist() == [4.0, 0.0, 0.0]
    assert residual.tolist() == [0.0, 2.0, 1.0]
    assert part.memory["velocity"].tolist() == [0.0, 2.0, 1.0]
    part.flat = torch.tensor([1.0, 1.0, 1.0])  # u = [1, 2, 1.5], v = [1, 4, 2.5]
    assert _sent(codec, part, RngKey(step=1)).tolist() == [0.0, 4.0, 0.0]
    assert residual.tolist() == [1.0, 0.0, 2.5]
    assert part.memory["velocity"].tolist() == [1.0, 0.0, 1.5]
    assert part.flat.tolist() == [1.0, 1.0, 1.0]


def test_without_masking_velocity_goes_on() -> None:
    part = TensorSlice(torch.tensor([4.0, 2.0]), residual=torch.zeros(2))
    _sent(TopK(1, momentum=0.5, masking=False), part, RngKey())
    assert part.memory["velocity"].tolist() == [4.0, 2.0]


def test_sending_everything_with_momentum_is_momentum_sgd() -> None:
    """Without masking and with ratio 1, what is sent in a step is the velocity of SGD with momentum."""
    codec, velocity = TopK(1.0, momentum=0.9, masking=False), torch.zeros(50)
    part, generator = TensorSlice(torch.zeros(50), residual=torch.zeros(50)), torch.Generator().manual_seed(0)
    for step in range(5):
        part.flat = torch.randn(50, generator=generator)
        velocity = 0.9 * velocity + part.flat
        assert torch.allclose(_sent(codec, part, RngKey(step=step)), velocity, atol=1e-6)


def test_clip_bounds_the_norm_of_the_gradient() -> None:
    """Before it is added to the residual, and only where it is larger."""
    assert _sent(TopK(1.0, clip=1.0), TensorSlice(torch.tensor([3.0, 4.0])), RngKey()).tolist() == pytest.approx(
        [0.6, 0.8]
    )
    part = TensorSlice(torch.tensor([3.0, 4.0]), residual=torch.tensor([10.0, 0.0]))
    assert _sent(TopK(1.0, clip=6.0), part, RngKey()).tolist() == [13.0, 4.0]


def test_warmup_falls_from_a_quarter() -> None:
    codec = TopK(0.001, warmup=4)
    kept = [codec.max_selected(10_000, step) for step in range(6)]
    assert kept[0] == 2500
    assert kept[4:] == [10, 10]
    shrink = [b / a for a, b in pairwise(kept[:5])]
    assert shrink == pytest.approx([(0.001 / 0.25) ** 0.25] * 4, rel=0.02)
    assert [TopK(0.5, warmup=4).max_selected(100, step) for step in (0, 4)] == [
        50,
        50,
    ]  # it starts above a quarter already
    assert [TopK(16, bucket=512, warmup=4).max_selected(512, step) for step in (0, 4)] == [128, 16]


def test_bodies_follow_the_step_of_warmup() -> None:
    """Who decodes tells from the length and the count how many there are."""
    codec, flat = TopK(0.01, warmup=10), torch.randn(2000, generator=torch.Generator().manual_seed(5))
    sizes = set()
    for step in (0, 3, 9, 10, 11):
        payload = codec.encode(flat, RngKey(step=step))
        sizes.add(payload.numel())
        out = codec.decode(payload, torch.empty(2000), step=step)
        assert int((out != 0).sum()) == codec.max_selected(2000, step)
        assert payload.numel() <= codec.max_bytes(2000)
    assert len(sizes) == 4


def test_an_optimizer_with_momentum_is_refused() -> None:
    check_optimizer_momentum(TopK(0.01, momentum=0.9), 0.0)
    check_optimizer_momentum(TopK(0.01), 0.9)
    with pytest.raises(IncompatibleError, match=r"applies 0\.8 again; give the optimizer momentum=0"):
        check_optimizer_momentum(TopK(0.01, momentum=0.9), 0.8)


def test_a_stream_needs_no_dense_tensor() -> None:
    codec, flat = TopK(0.1), torch.randn(300, generator=torch.Generator().manual_seed(1))
    body = torch.zeros(codec.body_bytes(300), dtype=torch.uint8)
    codec.write(TensorSlice(flat), body, RngKey())
    indices, values = codec.read_stream(body, 300)
    assert indices.dtype == torch.int32
    assert torch.equal(flat[indices], values)


def test_a_body_of_another_count_is_refused() -> None:
    """Well formed, but not what this codec would have written."""
    body = torch.zeros(TopK(0.5).body_bytes(100), dtype=torch.uint8)
    TopK(0.5).write(TensorSlice(torch.ones(100)), body, RngKey())
    for codec in (TopK(0.4), TopK(0.6), TopK(0.01, warmup=5)):
        with pytest.raises(ProtocolError, match="holds 50 of 100 elements"):
            codec.read(body, torch.zeros(100), False)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(99), torch.zeros(100).double(), torch.zeros(200)[::2]], ids=["short", "double", "strided"]
)
@pytest.mark.parametrize("codec", [TopK(0.1), TopK(2, bucket=10)], ids=repr)
def test_a_residual_that_does_not_fit_is_refused(codec: TopK, wrong: Tensor) -> None:
    with pytest.raises(IncompatibleError, match="contiguous row of 100 float32"):
        codec.select(TensorSlice(torch.ones(100), residual=wrong), RngKey())


def test_fuzzed_bodies_are_tensors_or_refused() -> None:
    """Random, cut short, with flipped bits: a finite tensor or a ProtocolError, and what is refused writes nothing."""
    rng, refused = random.Random(0), 0
    for codec, numel in ((TopK(0.02), 900), (TopK(4, bucket=64), 300), (TopK(0.5), 60), (TopK(0.1, warmup=3), 200)):
        right = torch.zeros(codec.body_bytes(numel), dtype=torch.uint8)
        codec.write(TensorSlice(torch.randn(numel, generator=torch.Generator().manual_seed(numel))), right, RngKey())
        for trial in range(5000):
            body = _damaged(right, rng, trial)
            out = torch.full((numel,), 7.0)
            try:
                codec.read(body, out, accumulate=bool(trial & 1))
            except ProtocolError:
                refused += 1
                assert bool((out == 7.0).all())
            assert bool(torch.isfinite(out).all())
    assert 5000 < refused < 20_000


def _damaged(right: Tensor, rng: random.Random, trial: int) -> Tensor:
    if trial % 4 == 0:
        return torch.frombuffer(bytearray(rng.randbytes(right.numel())), dtype=torch.uint8)
    if trial % 4 == 1:
        return right[: rng.randrange(right.numel())].clone()
    body = right.clone()
    for _ in range(trial % 4 - 1):
        body[rng.randrange(body.numel())] ^= 1 << rng.randrange(8)
    return body
