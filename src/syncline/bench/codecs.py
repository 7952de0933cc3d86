"""`syncline bench codecs`: speed and error of codecs compared with memcpy, in this process.

In each round all contenders run in random order, and ratios are taken within a round. A call encodes a gradient and
decodes it again, as a reduction does: payload codecs with `pack_into` and `unpack`, allreducible codecs with `rounds`
on one rank. A codec with error feedback is a separate contender.

The input resembles the gradient of a linear layer for a batch of 64, activations × errors. The scales of the neurons
are log-normal: most elements are small, some are large, and the matrix has a few strong directions. Several gradients
are used in turn, so that residuals grow as in training.
"""

from __future__ import annotations

import gc
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from syncline.bench.measuring import Summary, format_size, new_figure, ratios, save_figure, summarize
from syncline.codecs import build_codec
from syncline.codecs.base import Codec, PayloadCodec, RngKey, TensorSlice, max_payload_bytes, pack_into, unpack
from syncline.errors import SpecError

__all__ = ["CodecsPlan", "codecs_plot", "codecs_table", "gradients", "measure"]

DEFAULT_CODECS = (
    *("cast('fp16')", "cast('bf16')", "quantize(8)", "quantize(4)", "quantize(2)", "onebit", "ternary"),
    *("topk(0.01)", "topk(16, bucket=512)", "randomk(0.01)", "threshold(0.5)", "powersgd(2)", "lossless"),
    *("topk(0.01)|quantize(4)", "quantize(4)|lossless"),
)
"""Every codec, and two chains."""
MEMCPY = "memcpy"
INPUT = "gradient of a linear layer, batch 64, neurons of log-normal size (σ = 0.5)"
SCALE_SIGMA = 0.5
"""Of the log-normal scales of the neurons."""
GRADIENTS = 4
"""Different gradients that are used in turn."""
BATCH_SAMPLES = 64
FIRST_STEP = 1 << 20
"""The step of the first call. The warm-up steps of a codec are over by then."""
MIN_TURN_S = 0.004
"""A small tensor is encoded several times per turn, because one call is too short for the clock."""


@dataclass(frozen=True)
class CodecsPlan:
    """The options of the benchmark."""

    sizes: list[int]
    """Bytes of float32."""
    codecs: list[str] = field(default_factory=lambda: list(DEFAULT_CODECS))
    rounds: int = 15
    threads: int = 1
    seed: int = 0


def measure(plan: CodecsPlan) -> dict[str, Any]:
    """Measure every codec at every size; return the document of the results."""
    if plan.rounds < 1 or plan.threads < 1 or not plan.codecs or not plan.sizes:
        raise SpecError(
            f"at least one codec ({len(plan.codecs)}), size ({len(plan.sizes)}), round ({plan.rounds}) and "
            f"thread ({plan.threads})"
        )
    codecs = [_build(spec) for spec in plan.codecs]
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(plan.threads)
    gc.disable()
    try:
        results = [row for size in plan.sizes for row in _measure_size(codecs, size // 4, plan)]
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()
    about = {"kind": "codecs", "baseline": MEMCPY, "input": INPUT, "torch": torch.__version__}
    return {**about, "plan": asdict(plan), "results": results}


def _build(spec: str) -> Codec:
    codec = build_codec(spec)
    if codec is None:
        raise SpecError(f"{spec!r} encodes nothing, so there is nothing to measure; memcpy is always included")
    return codec


def gradients(numel: int, count: int, seed: int) -> list[Tensor]:
    """Flat tensors that resemble gradients; the same seed gives the same ones.

    >>> first, second = gradients(12, 2, seed=0)
    >>> first.shape, bool(torch.equal(first, second))
    (torch.Size([12]), False)
    """
    rng = torch.Generator().manual_seed(seed)
    rows, columns = _shape(numel)
    into, out = ((SCALE_SIGMA * torch.randn(n, generator=rng)).exp() for n in (rows, columns))
    tensors = []
    for _ in range(count):
        active = torch.randn(BATCH_SAMPLES, rows, generator=rng).relu() * into
        errors = torch.randn(BATCH_SAMPLES, columns, generator=rng) * out
        tensors.append((active.T @ errors).flatten() / BATCH_SAMPLES)
    return tensors


def _shape(numel: int) -> tuple[int, int]:
    """The shape of the matrix with `numel` elements that is closest to a square."""
    rows = next(rows for rows in range(math.isqrt(numel), 0, -1) if numel % rows == 0)
    return rows, numel // rows


class _Contender:
    """Something that encodes a gradient and decodes it into `out`: memcpy, or a codec."""

    def __init__(self, name: str, numel: int, feedback: bool = False) -> None:
        self.name = name
        self.feedback = feedback
        self.payload_bytes = 4 * numel
        self.out = torch.zeros(numel)
        residual = torch.zeros(numel) if feedback else None
        self.part = TensorSlice(self.out, name="weight", shape=_shape(numel), residual=residual)
        self.times: list[tuple[float, float]] = []
        """Seconds of encoding and of decoding, one pair per turn."""

    def call(self, gradient: Tensor, number: int) -> tuple[float, float]:
        """Seconds of encoding, and of decoding; here of a copy."""
        start = perf_counter()
        self.out.copy_(gradient)
        seconds = perf_counter() - start
        return seconds, seconds


class _PayloadContender(_Contender):
    """A codec that encodes to bytes."""

    def __init__(self, codec: PayloadCodec, numel: int, feedback: bool) -> None:
        super().__init__(repr(codec), numel, feedback)
        self.codec = codec
        self._payload = torch.zeros(max_payload_bytes(codec, [numel], FIRST_STEP), dtype=torch.uint8)

    def call(self, gradient: Tensor, number: int) -> tuple[float, float]:
        self.part.flat = gradient
        rng = RngKey(step=FIRST_STEP + number)
        start = perf_counter()
        self._payload.zero_()  # as in a reduction
        self.payload_bytes = pack_into(self.codec, [self.part], rng, self._payload)
        middle = perf_counter()
        unpack(self.codec, self._payload[: self.payload_bytes], [self.out], False, step=rng.step)
        return middle - start, perf_counter() - middle


class _AllreducibleContender(_Contender):
    """A codec whose tensors are all-reduced. Encoding ends when its last tensor is ready to be sent."""

    def __init__(self, codec: Codec, numel: int, feedback: bool) -> None:
        super().__init__(repr(codec), numel, feedback)
        self.codec = codec

    def call(self, gradient: Tensor, number: int) -> tuple[float, float]:
        self.out.copy_(gradient)  # the sum replaces the gradient
        self.payload_bytes = 0
        start = middle = perf_counter()
        for leaves in self.codec.reduce_rounds([self.part], RngKey(step=FIRST_STEP + number), 1):
            self.payload_bytes += leaves.numel() * leaves.element_size()
            middle = perf_counter()
        return middle - start, perf_counter() - middle


def _contenders(codec: Codec, numel: int) -> Sequence[_Contender]:
    """The codec without error feedback, and with it if it has a residual."""
    chosen = codec.codec_for("weight", numel)
    if chosen is None:
        raise SpecError(f"{codec!r} does not encode a tensor of {numel} elements: there is nothing to measure")
    feedbacks = [False, True] if chosen.keeps_residual else [False]
    if chosen.traits.allreducible:
        return [_AllreducibleContender(chosen, numel, feedback) for feedback in feedbacks]
    assert isinstance(chosen, PayloadCodec), f"{chosen!r} neither sums nor gives bytes"
    return [_PayloadContender(chosen, numel, feedback) for feedback in feedbacks]


def _measure_size(codecs: Sequence[Codec], numel: int, plan: CodecsPlan) -> list[dict[str, Any]]:
    inputs = gradients(numel, GRADIENTS, plan.seed)
    memcpy = _Contender(MEMCPY, numel)
    contenders = [memcpy, *(each for codec in codecs for each in _contenders(codec, numel))]
    errors: dict[str, float] = {}
    """By codec, measured without error feedback."""
    calls: dict[_Contender, int] = {}
    for each in contenders:
        if not each.feedback:
            print(f"{format_size(4 * numel)} {each.name}: compiling and warming up", file=sys.stderr, flush=True)
        losses = []
        for number, gradient in enumerate(inputs):
            seconds = min(each.call(gradient, number))
            losses.append(_relative_error(gradient, each.out))
        errors.setdefault(each.name, sum(losses) / len(losses))
        calls[each] = max(1, math.ceil(MIN_TURN_S / max(seconds, 1e-6)))
    for number in range(plan.rounds):
        print(f"{format_size(4 * numel)}: round {number + 1} of {plan.rounds}", file=sys.stderr, flush=True)
        order = list(contenders)
        random.Random(f"{plan.seed} {number}").shuffle(order)
        for each in order:
            each.times.append(_turn(each, inputs, GRADIENTS + number * calls[each], calls[each]))
    copies = [seconds for seconds, _ in memcpy.times]
    return [_row(each, numel, errors[each.name], copies) for each in contenders]


def _turn(each: _Contender, inputs: Sequence[Tensor], first: int, calls: int) -> tuple[float, float]:
    seconds = [each.call(inputs[number % GRADIENTS], number) for number in range(first, first + calls)]
    return sum(one for one, _ in seconds) / calls, sum(two for _, two in seconds) / calls


def _relative_error(gradient: Tensor, decoded: Tensor) -> float:
    """‖x − decode(encode(x))‖ ÷ ‖x‖."""
    whole = float(gradient.double().norm())
    return float((gradient.double() - decoded.double()).norm()) / whole if whole else 0.0


def _row(each: _Contender, numel: int, error: float, copies: Sequence[float]) -> dict[str, Any]:
    row: dict[str, Any] = {"contender": each.name, "feedback": each.feedback, "bytes": 4 * numel}
    row |= {"payload_bytes": each.payload_bytes, "bits": 8 * each.payload_bytes / numel, "error": error}
    for what, own in zip(("encode", "decode"), zip(*each.times, strict=True), strict=True):
        row[what] = {
            "seconds": list(own),
            "gigabytes_a_second": asdict(summarize([4e-9 * numel / seconds for seconds in own])),
            "of_memcpy": asdict(ratios(copies, own)),
        }
    return row


def codecs_table(document: dict[str, Any]) -> str:
    """A table of payload bytes, error, and speed relative to memcpy."""
    plan, rows = document["plan"], document["results"]
    width = max(len(row["contender"]) for row in rows)
    lines = [
        f"codecs on {plan['threads']} thread{'s' if plan['threads'] > 1 else ''}, {plan['rounds']} rounds; "
        "GB/s of float32 input, medians; ÷ memcpy: paired share of its speed, with 95 % intervals",
        f"input: {document['input']}; feedback: the encoder with error feedback",
        "",
        f"{'size':>7} {'codec':{width}} {'payload':>9} {'bits':>6} {'error':>8} {'encode':>7} {'÷ memcpy':>21} "
        f"{'feedback':>9} {'÷ memcpy':>21} {'decode':>7} {'÷ memcpy':>21}",
    ]
    for size in dict.fromkeys(row["bytes"] for row in rows):
        fed = {row["contender"]: row for row in rows if row["bytes"] == size and row["feedback"]}
        for row in rows:
            if row["bytes"] == size and not row["feedback"]:
                lines.append(_line(row, fed.get(row["contender"]), width))
        lines.append("")
    return "\n".join(lines[:-1])


def _line(row: dict[str, Any], fed: dict[str, Any] | None, width: int) -> str:
    with_residual = f"{'':>9} {'':>21}" if fed is None else f"{_speed(fed['encode']):>9} {_share(fed['encode']):>21}"
    return (
        f"{format_size(row['bytes']):>7} {row['contender']:{width}} {format_size(row['payload_bytes']):>9} "
        f"{row['bits']:6.2f} {row['error']:8.2g} {_speed(row['encode']):>7} {_share(row['encode']):>21} "
        f"{with_residual} {_speed(row['decode']):>7} {_share(row['decode']):>21}"
    )


def _speed(result: dict[str, Any]) -> str:
    return f"{result['gigabytes_a_second']['median']:.2f}"


def _share(result: dict[str, Any]) -> str:
    return Summary(**result["of_memcpy"]).text(".3f")


def codecs_plot(document: dict[str, Any], stem: Path) -> list[Path]:
    """Plot error against payload bytes at the largest size, as SVG and PNG."""
    figure = new_figure(9, 6.4)
    axes = figure.subplots()
    size = max(row["bytes"] for row in document["results"])
    rows = [row for row in document["results"] if row["bytes"] == size and not row["feedback"]]
    # A logarithmic axis cannot show an error of zero: these codecs are drawn below all others.
    exact = min((row["error"] for row in rows if row["error"]), default=1.0) / 10
    for number, row in enumerate(rows):
        place = (row["payload_bytes"], row["error"] or exact)
        axes.scatter(*place, color=f"C{number % 10}", marker="o" if row["error"] else "s")
        axes.annotate(row["contender"], place, xytext=(3, 5), textcoords="offset points", fontsize=8, rotation=40)
    axes.set(
        xlabel=f"payload bytes of {format_size(size)}",
        ylabel="‖x − decode(encode(x))‖ ÷ ‖x‖ (squares: exact)",
        xscale="log",
        yscale="log",
    )
    axes.grid(True, which="major", color="0.9")
    axes.margins(x=0.1, y=0.2)
    figure.suptitle(f"error against bytes: {document['input']}", fontsize=10)
    return save_figure(figure, stem)
