"""Whether a codec pays on this network: what agreeing takes with it and without, before the first step.

The network is the calibrated one; the codec's own work is done once on numbers like gradients, by all ranks at the same
time, for that is how they will do it. The best of some tries counts: the first compiles, others are disturbed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.codecs import Codec, PayloadCodec, RngKey, TensorSlice
from syncline.codecs.kernels.dispatch import cold
from syncline.codecs.payload import max_payload_bytes, pack_into, unpack
from syncline.collectives import NATIVE
from syncline.costs import predict_on
from syncline.reduction.choosing import advice
from syncline.reduction.communicator import Communicator

__all__ = ["coded_seconds", "dense_seconds", "judge"]

logger = logging.getLogger("syncline")

MOST = 1 << 22
"""Elements of a tensor that are tried; the time of larger ones is that in proportion."""

Buckets = Sequence[tuple[Codec, Sequence[Tensor]]]


def judge(exchange: Communicator, buckets: Buckets) -> str | None:
    """A sentence with numbers where the codec costs more than it saves. Every rank calls it."""
    if exchange.size == 1 or exchange.team.transport.timing.virtual or not buckets:
        return None  # nobody to agree with, or time is not real
    if exchange.rank == 0 and cold():
        logger.warning("compiling the codecs' kernels: once on this machine, for some ten seconds")
    dense = dense_seconds(exchange, [sum(parameter.nbytes for parameter in held) for _, held in buckets])
    return advice(dense, sum(coded_seconds(exchange, buckets)), repr(exchange.codec))


def dense_seconds(exchange: Communicator, sizes: Sequence[int]) -> float:
    """What reducing buckets of so many bytes as they are is expected to take on this network."""
    network = exchange.team.auto.network()
    return sum(predict_on(exchange.team.channel, NATIVE, nbytes, network).seconds for nbytes in sizes)


def coded_seconds(exchange: Communicator, buckets: Buckets) -> tuple[float, float]:
    """What a step with the codec is expected to take: sending, and the codec's own work. Every rank calls it."""
    network = exchange.team.auto.network()
    sending = working = 0.0
    tried: dict[str, tuple[int, float, list[int]]] = {}
    for codec, parameters in buckets:
        numel = sum(parameter.numel() for parameter in parameters)
        known = tried.get(repr(codec))
        if known is None or known[0] < min(numel, MOST):  # of large models the first buckets tell
            known = tried[repr(codec)] = (numel, *_try(exchange, codec, parameters))
        share = numel / max(1, known[0])
        working += known[1] * share
        wire = [round(each * share) for each in known[2]]
        if codec.traits.allreducible:
            sending += sum(predict_on(exchange.team.channel, NATIVE, each, network).seconds for each in wire)
        else:
            sending += exchange.ways.seconds(codec, [p.numel() for p in parameters], exchange.size, network)
    return sending, working


def _try(exchange: Communicator, codec: Codec, parameters: Sequence[Tensor]) -> tuple[float, list[int]]:
    """Seconds of the codec's work in a step, and the bytes of each tensor that is summed."""
    now, seconds = exchange.world.runtime.now, float("inf")
    wire: list[int] = []
    step = codec.traits.steady_from_step if isinstance(codec, PayloadCodec) else 0
    rng = RngKey(step=step, rank=exchange.rank)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = [_part(codec, parameter, str(number)) for number, parameter in enumerate(parameters)]
    scale = sum(p.numel() for p in parameters) / max(1, sum(part.numel for part in parts))
    for attempt in range(4):
        start, wire = now(), []
        if codec.traits.allreducible:
            wire = [round(tensor.nbytes * scale) for tensor in codec.reduce_rounds(parts, rng, 1)]
        elif isinstance(codec, PayloadCodec):
            room = max_payload_bytes(codec, [part.numel for part in parts], step)
            whole = torch.zeros(room, dtype=torch.uint8, device=parts[0].flat.device)
            payload = whole[: pack_into(codec, parts, rng, whole)]
            between = now()
            unpack(codec, payload, [part.flat for part in parts], True, step=step)
            # One's own and the others' payloads, or shards of them twice over.
            start -= (now() - between) * (min(exchange.size, 2) - 1)
        seconds = min(seconds, now() - start) if attempt else seconds
    return seconds * scale, wire


def _part(codec: Codec, parameter: Tensor, name: str) -> TensorSlice:
    shape = tuple(parameter.shape)
    if parameter.numel() > MOST:
        shape = (MOST,) if len(shape) < 2 else (max(1, MOST // max(1, parameter[0].numel())), *shape[1:])
    flat = torch.randn(torch.Size(shape).numel(), device=parameter.device, dtype=torch.float32) * 1e-3
    residual = torch.zeros_like(flat) if codec.keeps_residual else None
    return TensorSlice(flat, name, shape=shape, residual=residual)
