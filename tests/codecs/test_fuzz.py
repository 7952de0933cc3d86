"""Payloads that nobody has encoded: each is a `ProtocolError` or finite numbers, and nothing else happens."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from syncline.codecs import build_codec
from syncline.codecs.base import HEADER, Codec, RngKey
from syncline.codecs.kernels.dispatch import reference_only
from syncline.errors import ProtocolError
from syncline.testing.codecs import guarded_tensor
from tests.codecs.test_contract import HALF, STEADY, STOCHASTIC

Bytes = NDArray[np.uint8]
Random = np.random.Generator

SPECS = HALF + STEADY + STOCHASTIC
COUNT = 100_000 if os.environ.get("SYNCLINE_HUNT") else 6_000
SHAPES = ((0,), (1,), (7,), (64,), (10, 13), (600,), (20, 60), (1030,))


def anything(payload: Bytes, random: Random) -> Bytes:
    """Noise, as long as a payload or not."""
    return random.integers(0, 256, random.integers(0, 2 * len(payload) + 2), dtype=np.uint8)


def any_body(payload: Bytes, random: Random) -> Bytes:
    """Noise behind a header that is right."""
    return np.concatenate([payload[: HEADER.size], random.integers(0, 256, len(payload) - HEADER.size, dtype=np.uint8)])


def any_long_body(payload: Bytes, random: Random) -> Bytes:
    """Noise of any length behind a header, and a length, that are right."""
    body = random.integers(0, 256, random.integers(0, 2 * len(payload)), dtype=np.uint8)
    length = np.frombuffer(len(body).to_bytes(4, "little"), dtype=np.uint8)
    return np.concatenate([payload[: HEADER.size], length, body])


def shorter(payload: Bytes, random: Random) -> Bytes:
    return payload[: random.integers(0, len(payload))]


def longer(payload: Bytes, random: Random) -> Bytes:
    return np.concatenate([payload, random.integers(0, 256, random.integers(1, 40), dtype=np.uint8)])


def flipped(payload: Bytes, random: Random) -> Bytes:
    """A few bits, anywhere."""
    return _flip(payload, random, 0, len(payload))


def flipped_head(payload: Bytes, random: Random) -> Bytes:
    return _flip(payload, random, 0, HEADER.size)


def flipped_start(payload: Bytes, random: Random) -> Bytes:
    """Where a body says how long it is, of how many elements, and by what to multiply them."""
    return _flip(payload, random, HEADER.size, min(len(payload), HEADER.size + 16))


def overwritten(payload: Bytes, random: Random) -> Bytes:
    """A stretch of the body, by the smallest or largest byte or that of NaN."""
    found: Bytes = payload.copy()
    if len(payload) > HEADER.size:
        first = random.integers(HEADER.size, len(payload))
        found[first : first + random.integers(1, 9)] = random.choice(np.array([0, 0x7F, 0x80, 0xFF], dtype=np.uint8))
    return found


def moved(payload: Bytes, random: Random) -> Bytes:
    """The body from somewhere on, out of step by a few bytes."""
    at = random.integers(HEADER.size, len(payload) + 1)
    return np.concatenate([payload[:at], np.roll(payload[at:], random.integers(1, 9))])


WAYS: tuple[Callable[[Bytes, Random], Bytes], ...] = (
    *(anything, any_body, any_body, any_long_body, shorter, longer, flipped, flipped),
    *(flipped_head, flipped_start, flipped_start, overwritten, moved),
)


@pytest.mark.hunt
@pytest.mark.parametrize("spec", SPECS)
def test_a_broken_payload_is_refused_or_is_numbers(spec: str) -> None:
    """What is decoded is finite, because a NaN from one peer would end in every rank's parameters."""
    codec = build_codec(spec)
    assert codec is not None
    refused = 0
    cases = COUNT // len(SPECS) + 1
    for seed in range(cases):
        refused += _decode(codec, seed)
    assert 0 < refused < cases, "the fuzzing does not reach what it is for"


def _decode(codec: Codec, seed: int) -> bool:
    """Whether it was refused."""
    random = np.random.default_rng(seed)
    shape = SHAPES[random.integers(len(SHAPES))]
    way = WAYS[random.integers(len(WAYS))]
    broken = torch.from_numpy(way(_payload(codec, shape, int(random.integers(4))), random).copy())
    accumulate, plain = bool(random.integers(2)), random.integers(4) == 0
    kept = broken.clone()
    try:
        with guarded_tensor(torch.Size(shape).numel()) as out:
            try:
                if plain:
                    with reference_only():
                        codec.decode(broken, out.view(shape), accumulate)
                else:
                    codec.decode(broken, out.view(shape), accumulate)
            except ProtocolError:
                return True
            assert bool(torch.isfinite(out).all()), "what was decoded is not finite"
            assert torch.equal(broken, kept), "decoding has changed the payload"
            return False
    except Exception as error:
        raise AssertionError(
            f"{codec!r}, seed {seed} ({way.__name__}, shape {shape}, accumulate={accumulate}, plain={plain}): {error!r}"
        ) from error


@lru_cache(maxsize=1024)
def _payload(codec: Codec, shape: tuple[int, ...], seed: int) -> Bytes:
    generator = torch.Generator().manual_seed(seed)
    scale = (1.0, 1e-30, 1e30, 1.0)[seed]
    return codec.encode(scale * torch.randn(shape, generator=generator), RngKey(seed)).numpy()


def _flip(payload: Bytes, random: Random, first: int, last: int) -> Bytes:
    found: Bytes = payload.copy()
    if last > first:
        for _ in range(random.integers(1, 5)):
            found[random.integers(first, last)] ^= np.uint8(1 << random.integers(8))
    return found
