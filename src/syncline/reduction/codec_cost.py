"""Predicts the communication time of a step with a codec and without it, before the first step.

The network is the calibrated one. The codec's work is measured on numbers like gradients, by all ranks at the same
time, as in training. The best of several attempts counts: the first one compiles, others may be disturbed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.codecs import Codec, PayloadCodec, RngKey, TensorSlice
from syncline.codecs.base import pack, unpack
from syncline.codecs.kernels.dispatch import needs_compiling
from syncline.collectives import NATIVE
from syncline.costs import predict_on
from syncline.reduction.buckets import real_numel
from syncline.reduction.communicator import Communicator

__all__ = ["codec_advice", "compressed_seconds", "dense_seconds", "slowdown_warning"]

logger = logging.getLogger("syncline")

MAX_MEASURED_ELEMENTS = 1 << 22
"""Larger tensors are measured in part; their time is extrapolated."""

Buckets = Sequence[tuple[Codec, Sequence[Tensor]]]


def slowdown_warning(communicator: Communicator, buckets: Buckets) -> str | None:
    """A warning with numbers if the codec costs more time than it saves. Every rank calls it."""
    if communicator.size == 1 or communicator.group.transport.timing.virtual or not buckets:
        return None  # nothing is sent, or time is simulated
    if communicator.rank == 0 and needs_compiling():
        logger.warning("compiling the codecs' kernels: once on this machine, for some ten seconds")
    dense = dense_seconds(communicator, [sum(parameter.nbytes for parameter in held) for _, held in buckets])
    return codec_advice(dense, sum(compressed_seconds(communicator, buckets)), repr(communicator.codec))


def codec_advice(dense_seconds: float, codec_seconds: float, spec: str) -> str | None:
    """A warning if the codec makes steps slower: the communication time of a step without it and with it.

    >>> codec_advice(0.031, 0.044, "topk(0.01)")
    'communication takes 31 ms a step, and 44 ms with topk(0.01): this network is fast enough; use codec=None'
    >>> codec_advice(0.5, 0.02, "topk(0.01)") is None
    True
    """
    if codec_seconds < dense_seconds:
        return None
    dense, encoded = (f"{1e3 * seconds:.3g} ms" for seconds in (dense_seconds, codec_seconds))
    return f"communication takes {dense} a step, and {encoded} with {spec}: this network is fast enough; use codec=None"


def dense_seconds(communicator: Communicator, sizes: Sequence[int]) -> float:
    """Predicted seconds to reduce unencoded buckets of `sizes` bytes."""
    network = communicator.group.auto.network()
    return sum(predict_on(communicator.group.channel, NATIVE, nbytes, network).seconds for nbytes in sizes)


def compressed_seconds(communicator: Communicator, buckets: Buckets) -> tuple[float, float]:
    """Predicted seconds of a step with the codec: sending, and the codec's work. Every rank calls it."""
    network = communicator.group.auto.network()
    sending = working = 0.0
    measured: dict[str, tuple[int, float, list[int]]] = {}
    for codec, parameters in buckets:
        numel = sum(parameter.numel() for parameter in parameters)
        known = measured.get(repr(codec))
        if known is None or known[0] < min(numel, MAX_MEASURED_ELEMENTS):  # in large models the first buckets suffice
            known = measured[repr(codec)] = (numel, *_measure(communicator, codec, parameters))
        share = numel / max(1, known[0])
        working += known[1] * share
        wire = [round(each * share) for each in known[2]]
        if codec.traits.allreducible:
            sending += sum(predict_on(communicator.group.channel, NATIVE, each, network).seconds for each in wire)
        else:
            sizes = tuple(map(real_numel, parameters))
            sending += communicator.compressed.seconds(codec, sizes, communicator.size, network)
    return sending, working


def _measure(communicator: Communicator, codec: Codec, parameters: Sequence[Tensor]) -> tuple[float, list[int]]:
    """Measured seconds of the codec's work in a step, and the bytes of each tensor that the wire sums."""
    now, seconds = communicator.world.runtime.now, float("inf")
    wire: list[int] = []
    step = codec.traits.steady_from_step
    rng = RngKey(step=step, rank=communicator.rank)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = [_part(codec, parameter, str(number)) for number, parameter in enumerate(parameters)]
    scale = sum(p.numel() for p in parameters) / max(1, sum(part.numel for part in parts))
    for attempt in range(4):
        start, wire = now(), []
        if codec.traits.allreducible:
            wire = [round(tensor.nbytes * scale) for tensor in codec.reduce_rounds(parts, rng, 1)]
        elif isinstance(codec, PayloadCodec):
            payload = pack(codec, parts, rng)
            between = now()
            unpack(codec, payload, [part.flat for part in parts], True, step=step)
            # Its own and the others' payloads, or shards of them twice.
            start -= (now() - between) * (min(communicator.size, 2) - 1)
        seconds = min(seconds, now() - start) if attempt else seconds
    return seconds * scale, wire


def _part(codec: Codec, parameter: Tensor, name: str) -> TensorSlice:
    """Numbers like the gradient of a parameter. Of a large matrix only the first rows are measured."""
    shape = tuple(parameter.shape)
    if parameter.numel() > MAX_MEASURED_ELEMENTS:
        row = parameter.numel() // shape[0]
        shape = (max(1, MAX_MEASURED_ELEMENTS // row), *shape[1:])
    flat = torch.randn(torch.Size(shape).numel(), device=parameter.device, dtype=torch.float32) * 1e-3
    residual = torch.zeros_like(flat) if codec.keeps_residual else None
    return TensorSlice(flat, name, shape=shape, residual=residual)
