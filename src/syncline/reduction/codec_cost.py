"""Predicts the communication time of a step with a codec and without it, before the first step.

The network is the calibrated one. The codec's work is measured on numbers like gradients, by all ranks at the same
time, as in training. The best of several attempts counts: the first one compiles, others may be disturbed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from syncline.codecs import Codec, PayloadCodec, RngKey, TensorSlice
from syncline.codecs.base import pack, unpack
from syncline.codecs.kernels.dispatch import needs_compiling
from syncline.collectives import AUTO, NATIVE
from syncline.collectives.compressed import CompressedCollectives
from syncline.costs import predict_on
from syncline.reduction.buckets import BucketItem, assign_buckets, real_numel
from syncline.reduction.communicator import Communicator
from syncline.world import Group

__all__ = ["codec_advice", "codec_seconds", "compressed_seconds", "dense_seconds", "slowdown_warning"]

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
    return _expected_seconds(communicator.group, communicator.compressed, buckets)


def codec_seconds(group: Group, codec: Codec, parameters: Mapping[str, Tensor]) -> tuple[float, float]:
    """The same for a codec that is not in use yet, with buckets of the default size. Every rank of the group calls it.

    `parameters` are those of a model, by name.
    """
    tensors = list(parameters.values())
    codecs = [codec.codec_for(name, each.numel()) for name, each in parameters.items()]
    items = [
        BucketItem(each.nbytes, f"{each.dtype} by {coder!r}", contiguous=coder is None)
        for each, coder in zip(tensors, codecs, strict=True)
    ]
    buckets: list[tuple[Codec, list[Tensor]]] = []
    sending = 0.0
    for members in assign_buckets(items, order=range(len(items) - 1, -1, -1)):
        held, coder = [tensors[member] for member in members], codecs[members[0]]
        if coder is None:
            nbytes = sum(each.nbytes for each in held)
            sending += predict_on(group.channel, NATIVE, nbytes, group.auto.network()).seconds
        else:
            buckets.append((coder, held))
    compressed = CompressedCollectives(AUTO, codec)
    for coder, held in buckets:
        compressed.choose(coder, tuple(map(real_numel, held)), group.size, group.auto.network)
    sent, working = _expected_seconds(group, compressed, buckets)
    return sending + sent, working


def _expected_seconds(group: Group, compressed: CompressedCollectives, buckets: Buckets) -> tuple[float, float]:
    network = group.auto.network()
    sending = working = 0.0
    measured: dict[str, tuple[int, float, list[int]]] = {}
    for codec, parameters in buckets:
        numel = sum(parameter.numel() for parameter in parameters)
        known = measured.get(repr(codec))
        if known is None or known[0] < min(numel, MAX_MEASURED_ELEMENTS):  # in large models the first buckets suffice
            known = measured[repr(codec)] = (numel, *_measure(group, codec, parameters))
        share = numel / max(1, known[0])
        working += known[1] * share
        wire = [round(each * share) for each in known[2]]
        if codec.traits.allreducible:
            sending += sum(predict_on(group.channel, NATIVE, each, network).seconds for each in wire)
        else:
            sizes = tuple(map(real_numel, parameters))
            sending += compressed.seconds(codec, sizes, group.size, network)
    return sending, working


def _measure(group: Group, codec: Codec, parameters: Sequence[Tensor]) -> tuple[float, list[int]]:
    """Measured seconds of the codec's work in a step, and the bytes of each tensor that the wire sums."""
    now, seconds = group.world.runtime.now, float("inf")
    wire: list[int] = []
    step = codec.traits.steady_from_step
    rng = RngKey(step=step, rank=group.rank)
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
            start -= (now() - between) * (min(group.size, 2) - 1)
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
