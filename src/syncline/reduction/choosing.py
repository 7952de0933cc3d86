"""Which way a compressed bucket takes: what each would cost on a network, from bytes and expected density. Pure.

p ranks, N elements, a payload of B bytes; α latency, β = 1/bandwidth, o seconds a message, γ seconds a combined byte. A
rank chooses k elements, so a sum of g ranks has about K(g) = N(1 − (1 − k/N)^g) of them: S(g) bytes, dense from δ on.

    G(n) = (p − 1)(α + o + nβ)                a Gather of n bytes: the engines' own is a ring
    T(n) = α + (p − 1)(o + nβ)                a Scatter of rows of n bytes: all at once

| way                | seconds                                                            | + γ ×           |
|--------------------|--------------------------------------------------------------------|-----------------|
| gather             | G(B)                                                               | 4pN, sparse 8pk |
| split              | T(B/p) + G(B/p)                                                    | 8N              |
| sparse_doubling    | α + o + Bβ, then α + o + S(2ˡ)β for l = 1 … log₂p − 1              | Σ 8K(2ˡ⁺¹)      |
| sparse_split       | G(8p) + T(S(1)/p) + G(8) + G(S(p)/p)                               | 8k + 8K(p)      |
| sparse_split_dense | G(8p) + T(S(1)/p) + G(4N/p), or what the second codec makes of 4N/p | 8k + 4N         |

A codec whose length varies asks for lengths first: G(8) more. Ranks beyond a power of two fold: two messages more. A
`sparse_split` of little data does not ask how long the sums are, and pads them to the longest that they can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.codecs.base import PayloadCodec
from syncline.codecs.chain import Chain
from syncline.codecs.payload import HEADER, max_payload_bytes
from syncline.codecs.sparse import SparseCodec
from syncline.collectives.folding import largest_power_of_two
from syncline.errors import SpecError
from syncline.reduction.sparse_reduce import NOT_WORTH_A_ROUND, selector, stream_bytes
from syncline.transports import Network

__all__ = ["Choice", "advice", "choose", "expected_density"]


@dataclass(frozen=True)
class Choice:
    """The way to take, and the expected seconds of each."""

    algorithm: str
    seconds: Mapping[str, float]


def choose(
    codec: PayloadCodec,
    sizes: Sequence[int],
    network: Network,
    size: int,
    *,
    step: int = 0,
    density: float | None = None,
    quantize: PayloadCodec | None = None,
) -> Choice:
    """The quickest way for a bucket of parts of these sizes, on `size` ranks.

    `density` is the share of elements that a rank sends, where the codec itself does not say (a threshold's);
    `quantize` is what sums are coded with in the dense phase of a sparse split.

    >>> from syncline.codecs.raw import Raw
    >>> fast = Network(latency=50e-6, bandwidth=1e9)
    >>> choose(Raw(), [1_000_000], fast, 2).algorithm, choose(Raw(), [1_000_000], fast, 16).algorithm
    ('gather', 'split')
    """
    if density is not None and not 0 <= density <= 1:
        raise SpecError(f"density={density}: a share of the elements is from 0 to 1")
    if isinstance(codec.first if isinstance(codec, Chain) else codec, SparseCodec):
        seconds = _Sparse(codec, sizes, network, size, step, density).seconds(quantize)
    else:
        seconds = _dense(codec, sizes, network, size, step)
    return Choice(min(seconds, key=lambda way: seconds[way]), seconds)


def advice(dense_seconds: float, codec_seconds: float, spec: str) -> str | None:
    """A sentence where a codec does not pay: what a step's agreement takes without it and with it.

    >>> advice(0.031, 0.044, "topk(0.01)")
    'agreeing takes 31 ms a step dense and 44 ms with topk(0.01): this network is fast enough; use codec=None'
    >>> advice(0.5, 0.02, "topk(0.01)") is None
    True
    """
    if codec_seconds < dense_seconds:
        return None
    return (
        f"agreeing takes {_milliseconds(dense_seconds)} a step dense and {_milliseconds(codec_seconds)} with {spec}: "
        "this network is fast enough; use codec=None"
    )


def expected_density(density: float, ranks: int) -> float:
    """The share of elements in the sum of so many ranks that choose independently.

    >>> expected_density(0.5, 2)
    0.75
    """
    return 1 - (1 - density) ** ranks


class _Ports:
    """Seconds of single requests. Across hosts the links between them are the slow ones."""

    def __init__(self, network: Network, size: int) -> None:
        link = network.link(0, size - 1)
        self.others = size - 1
        self.alpha, self.o, self.beta = link.latency, network.per_message, 1 / link.bandwidth
        self.gamma = network.combine

    def message(self, nbytes: float) -> float:
        return self.alpha + self.o + nbytes * self.beta

    def gather(self, nbytes: float) -> float:
        return self.others * self.message(nbytes)

    def scatter(self, nbytes: float) -> float:
        return self.alpha + self.others * (self.o + nbytes * self.beta) if self.others else 0.0


def _dense(codec: PayloadCodec, sizes: Sequence[int], network: Network, size: int, step: int) -> dict[str, float]:
    ports, numel = _Ports(network, size), sum(sizes)
    payload = max_payload_bytes(codec, sizes, step)
    shard = HEADER.size + (payload - HEADER.size) / size
    asking = 0.0 if codec.traits.fixed_length else ports.gather(8)
    return {
        "gather": asking + ports.gather(payload) + 4 * size * numel * ports.gamma,
        "split": 2 * asking + ports.scatter(shard) + ports.gather(shard) + 8 * numel * ports.gamma,
    }


class _Sparse:
    """The ways of a codec that chooses elements."""

    def __init__(
        self,
        codec: PayloadCodec,
        sizes: Sequence[int],
        network: Network,
        size: int,
        step: int,
        density: float | None,
    ) -> None:
        self.ports, self.size, self.sizes, self.step = _Ports(network, size), size, sizes, step
        self.numel = sum(sizes)
        chooser, _ = selector(codec)
        most = sum(chooser.most(numel, step) for numel in sizes)
        self.kept = most if density is None else min(most, density * self.numel)
        self.asking = 0.0 if codec.traits.fixed_length else self.ports.gather(8)
        self.payload: float = max_payload_bytes(codec, sizes, step)
        if not codec.traits.fixed_length and most:
            self.payload = HEADER.size + (self.payload - HEADER.size) * self.kept / most

    def seconds(self, quantize: PayloadCodec | None) -> dict[str, float]:
        ports, each = self.ports, self.numel // self.size
        own = stream_bytes(each, round(self.kept / self.size))
        union, asking = stream_bytes(each, min(each, round(self.kept))), 0.0
        if (self.size - 1) * (union - own) > NOT_WORTH_A_ROUND:
            union, asking = stream_bytes(each, round(self.union(self.size) / self.size)), ports.gather(8)
        dense = 4 * each if quantize is None else max_payload_bytes(quantize, [each], self.step)
        to_owners = ports.gather(8 * self.size) + ports.scatter(own) + 8 * self.kept * ports.gamma
        return {
            "gather": self.asking + ports.gather(self.payload) + 8 * self.size * self.kept * ports.gamma,
            "sparse_doubling": self.doubling(),
            "sparse_split": to_owners + asking + ports.gather(union) + 8 * self.union(self.size) * ports.gamma,
            "sparse_split_dense": to_owners + ports.gather(dense) + 4 * self.numel * ports.gamma,
        }

    def union(self, ranks: int) -> float:
        """Elements in the sum of so many ranks, as expected."""
        return self.numel * expected_density(self.kept / self.numel, ranks) if self.numel else 0.0

    def doubling(self) -> float:
        ports, power = self.ports, largest_power_of_two(self.size)
        total, have = 0.0, 1
        if self.size > power:
            total += ports.message(self.payload) + 8 * self.union(2) * ports.gamma
            total += ports.message(stream_bytes(self.numel, round(self.union(self.size))))  # the result, at the end
            have = 2
        while power > 1:
            nbytes = self.payload if have == 1 else stream_bytes(self.numel, round(self.union(have)))
            have = min(2 * have, self.size)
            total += ports.message(nbytes) + 8 * self.union(have) * ports.gamma
            power //= 2
        return total


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
