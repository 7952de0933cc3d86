"""What codecs cost and lose, beside memcpy in the same run: what `syncline bench codecs` runs, in this process.

The contenders take turns in an order that each round rngs, and ratios are taken within a round. A call encodes a
gradient and decodes it again, as an exchange does: codecs of bytes through `pack_into` and `unpack`, those that sum on
the wire through `rounds` with one rank. With error feedback is a contender of its own.

The input looks like the gradient of a linear layer for a batch of 64, activations × errors, where the neurons differ
in size as a log-normal rng does: most elements are small, some are large, and the matrix has few strong directions.
Several are drawn and used in turn, so that residuals grow as they do in training.
"""

from __future__ import annotations

import gc
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline.bench.sizes import written
from syncline.bench.stats import ratios, summarize
from syncline.codecs.base import Codec, PayloadCodec, RngKey, TensorSlice
from syncline.codecs.catalog import build_codec
from syncline.codecs.payload import max_payload_bytes, pack_into, unpack
from syncline.errors import SpecError

__all__ = ["CodecsPlan", "gradients", "measure"]

FIELD = (
    *("cast('fp16')", "cast('bf16')", "quantize(8)", "quantize(4)", "quantize(2)", "onebit", "ternary"),
    *("topk(0.01)", "topk(16, bucket=512)", "randomk(0.01)", "threshold(0.5)", "powersgd(2)", "lossless"),
    *("topk(0.01)|quantize(4)", "quantize(4)|lossless"),
)
"""Every codec, and two chains."""
MEMCPY = "memcpy"
INPUT = "gradient of a linear layer, batch 64, neurons of log-normal size (σ = 0.5)"
SPREAD = 0.5
FRESH = 4
"""Gradients that are used in turn."""
BATCH = 64
LATE = 1 << 20
"""The step of the first call: whatever a codec does in its first steps is over."""
TURN = 0.004
"""Seconds that a turn should take at least: a single call of a small tensor is too short for the clock."""


@dataclass(frozen=True)
class CodecsPlan:
    """What to measure."""

    sizes: list[int]
    """Bytes of float32."""
    codecs: list[str] = field(default_factory=lambda: list(FIELD))
    rounds: int = 15
    threads: int = 1
    seed: int = 0


class _Contender(Protocol):
    name: str
    feedback: bool

    def call(self, gradient: Tensor, number: int) -> tuple[float, float]:
        """Seconds of encoding and of decoding."""


def measure(plan: CodecsPlan) -> dict[str, Any]:
    """Every codec at every size; the document of the run."""
    if plan.rounds < 1 or plan.threads < 1 or not plan.codecs or not plan.sizes:
        raise SpecError(
            f"at least one codec ({len(plan.codecs)}), size ({len(plan.sizes)}), round ({plan.rounds}) and "
            f"thread ({plan.threads})"
        )
    codecs = [_built(spec) for spec in plan.codecs]
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(plan.threads)
    gc.disable()
    try:
        results = [row for size in plan.sizes for row in _side_by_side(codecs, size // 4, plan)]
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()
    about = {"kind": "codecs", "baseline": MEMCPY, "input": INPUT, "torch": torch.__version__}
    return {**about, "plan": asdict(plan), "results": results}


def _built(spec: str) -> Codec:
    codec = build_codec(spec)
    if codec is None:
        raise SpecError(f"{spec!r} encodes nothing, so there is nothing to measure: memcpy stands beside the others")
    return codec


def gradients(numel: int, count: int, seed: int) -> list[Tensor]:
    """Rows that look like gradients; the same seed gives the same ones.

    >>> first, second = gradients(12, 2, seed=0)
    >>> first.shape, bool(torch.equal(first, second))
    (torch.Size([12]), False)
    """
    rng = torch.Generator().manual_seed(seed)
    rows, columns = _shape(numel)
    into, out = ((SPREAD * torch.randn(n, generator=rng)).exp() for n in (rows, columns))
    made = []
    for _ in range(count):
        active = torch.randn(BATCH, rows, generator=rng).relu() * into
        errors = torch.randn(BATCH, columns, generator=rng) * out
        made.append((active.T @ errors).flatten() / BATCH)
    return made


def _shape(numel: int) -> tuple[int, int]:
    """The matrix of so many elements that is nearest to a square."""
    rows = next(rows for rows in range(math.isqrt(numel), 0, -1) if numel % rows == 0)
    return rows, numel // rows


class _Memcpy:
    name, feedback = MEMCPY, False

    def __init__(self, numel: int) -> None:
        self._out = torch.empty(numel)

    def call(self, gradient: Tensor, number: int) -> tuple[float, float]:
        start = perf_counter()
        self._out.copy_(gradient)
        seconds = perf_counter() - start
        return seconds, seconds


class _Coded:
    """What both kinds have: a parameter whose gradient is encoded again and again."""

    def __init__(self, codec: Codec, numel: int, feedback: bool) -> None:
        self.name = repr(codec)
        self.feedback = feedback
        self.bytes = 0
        self.out = torch.zeros(numel)
        residual = torch.zeros(numel) if feedback else None
        self.part = TensorSlice(self.out, name="weight", shape=_shape(numel), residual=residual)


class _Bytes(_Coded):
    """A codec whose payload is bytes."""

    def __init__(self, codec: PayloadCodec, numel: int, feedback: bool) -> None:
        super().__init__(codec, numel, feedback)
        self.codec = codec
        self._payload = torch.zeros(max_payload_bytes(codec, [numel], LATE), dtype=torch.uint8)

    def call(self, gradient: Tensor, number: int) -> tuple[float, float]:
        self.part.flat = gradient
        rng = RngKey(step=LATE + number)
        start = perf_counter()
        self._payload.zero_()  # as the exchange's is
        self.bytes = pack_into(self.codec, [self.part], rng, self._payload)
        middle = perf_counter()
        unpack(self.codec, self._payload[: self.bytes], [self.out], False, step=rng.step)
        return middle - start, perf_counter() - middle


class _Sums(_Coded):
    """A codec whose tensors add up on the wire: encoding ends when its last tensor is ready to leave."""

    def __init__(self, codec: Codec, numel: int, feedback: bool) -> None:
        super().__init__(codec, numel, feedback)
        self.codec = codec

    def call(self, gradient: Tensor, number: int) -> tuple[float, float]:
        self.out.copy_(gradient)  # the sum replaces the gradient
        self.bytes = 0
        start = middle = perf_counter()
        for leaves in self.codec.reduce_rounds([self.part], RngKey(step=LATE + number), 1):
            self.bytes += leaves.numel() * leaves.element_size()
            middle = perf_counter()
        return middle - start, perf_counter() - middle


def _entered(codec: Codec, numel: int) -> Sequence[_Bytes | _Sums]:
    """The codec without error feedback, and with it where it keeps a residual."""
    chosen = codec.codec_for("weight", numel)
    if chosen is None:
        raise SpecError(f"{codec!r} leaves a tensor of {numel} elements as it is: there is nothing to measure")
    ways = [False, True] if chosen.keeps_residual else [False]
    if chosen.traits.allreducible:
        return [_Sums(chosen, numel, feedback) for feedback in ways]
    assert isinstance(chosen, PayloadCodec), f"{chosen!r} neither sums nor gives bytes"
    return [_Bytes(chosen, numel, feedback) for feedback in ways]


def _side_by_side(codecs: Sequence[Codec], numel: int, plan: CodecsPlan) -> list[dict[str, Any]]:
    inputs = gradients(numel, FRESH, plan.seed)
    coded = [each for codec in codecs for each in _entered(codec, numel)]
    field: list[_Contender] = [_Memcpy(numel), *coded]
    errors: dict[str, float] = {}
    calls: dict[int, int] = {}
    for each in field:
        if not each.feedback:
            print(f"{written(4 * numel)} {each.name}: compiles, warms up", file=sys.stderr, flush=True)
        lost = []
        for number, gradient in enumerate(inputs):
            seconds = min(each.call(gradient, number))
            if isinstance(each, _Coded) and not each.feedback:
                lost.append(_lost(gradient, each.out))
        errors[each.name] = sum(lost) / len(lost) if lost else errors.get(each.name, 0.0)
        calls[id(each)] = max(1, math.ceil(TURN / max(seconds, 1e-6)))
    times: dict[int, list[tuple[float, float]]] = {id(each): [] for each in field}
    for number in range(plan.rounds):
        print(f"{written(4 * numel)}: round {number + 1} of {plan.rounds}", file=sys.stderr, flush=True)
        order = list(field)
        random.Random(f"{plan.seed} {number}").shuffle(order)
        for each in order:
            times[id(each)].append(_turn(each, inputs, FRESH + number * calls[id(each)], calls[id(each)]))
    copies = [seconds for seconds, _ in times[id(field[0])]]
    rows = [_row(MEMCPY, False, numel, 4 * numel, 0.0, times[id(field[0])], copies)]
    rows += [_row(c.name, c.feedback, numel, c.bytes, errors[c.name], times[id(c)], copies) for c in coded]
    return rows


def _turn(each: _Contender, inputs: Sequence[Tensor], first: int, calls: int) -> tuple[float, float]:
    taken = [each.call(inputs[number % FRESH], number) for number in range(first, first + calls)]
    return sum(one for one, _ in taken) / calls, sum(two for _, two in taken) / calls


def _lost(gradient: Tensor, decoded: Tensor) -> float:
    """‖x − decode(encode(x))‖ ÷ ‖x‖."""
    whole = float(gradient.double().norm())
    return float((gradient.double() - decoded.double()).norm()) / whole if whole else 0.0


def _row(
    name: str,
    feedback: bool,
    numel: int,
    payload: int,
    error: float,
    times: Sequence[tuple[float, float]],
    copies: Sequence[float],
) -> dict[str, Any]:
    row: dict[str, Any] = {"contender": name, "feedback": feedback, "bytes": 4 * numel, "payload_bytes": payload}
    row |= {"bits": 8 * payload / numel, "error": error}
    for what, own in (("encode", [one for one, _ in times]), ("decode", [two for _, two in times])):
        row[what] = {
            "seconds": own,
            "gigabytes_a_second": asdict(summarize([4e-9 * numel / seconds for seconds in own])),
            "of_memcpy": asdict(ratios(copies, own)),
        }
    return row
