"""Predicted time of each compressed collective for a bucket, from bytes and expected density.

p ranks, N elements, a payload of B bytes; α latency, β = 1/bandwidth, o seconds per message, γ seconds per combined
byte. A rank selects k elements, so a sum of g ranks has about K(g) = N(1 − (1 − k/N)^g): S(g) bytes, dense from δ on.

    G(n) = (p − 1)(α + o + nβ)                a Gather of n bytes, by a ring as in the engines
    T(n) = α + (p − 1)(o + nβ)                a Scatter of rows of n bytes, in one round

| collective         | seconds                                                            | + γ ×           |
|--------------------|--------------------------------------------------------------------|-----------------|
| gather             | G(B)                                                               | 4pN, sparse 8pk |
| split              | T(B/p) + G(B/p)                                                    | 8N              |
| sparse_doubling    | α + o + Bβ, then α + o + S(2ˡ)β for l = 1 … log₂p − 1              | Σ 8K(2ˡ⁺¹)      |
| sparse_split       | G(8p) + T(S(1)/p) + G(8) + G(S(p)/p)                               | 8k + 8K(p)      |
| sparse_split_dense | G(8p) + T(S(1)/p) + G(4N/p), or the second codec's bytes of 4N/p | 8k + 4N         |

If the length of payloads varies, lengths are gathered first: G(8) more. Ranks beyond a power of two fold: two more
messages. A `sparse_split` of little data does not gather the lengths of sums; it pads them to the maximum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.codecs.base import HEADER, PayloadCodec, max_payload_bytes
from syncline.codecs.chain import Chain
from syncline.codecs.sparse import SparseCodec
from syncline.collectives.base import largest_power_of_two
from syncline.collectives.compressed.sparse import MAX_PADDING_BYTES, selector, stream_bytes
from syncline.errors import SpecError
from syncline.transports import Network

__all__ = ["CollectiveChoice", "choose", "codec_advice", "expected_density"]


@dataclass(frozen=True)
class CollectiveChoice:
    """The fastest compressed collective, and the predicted seconds of each."""

    collective: str
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
) -> CollectiveChoice:
    """The fastest collective for a bucket of slices of these sizes, on `size` ranks.

    `density` is the share of elements that a rank sends, for codecs that do not define it (threshold). `quantize` is
    the codec of sums in the dense phase of `sparse_split_dense`.

    >>> from syncline.codecs.raw import Raw
    >>> fast = Network(latency=50e-6, bandwidth=1e9)
    >>> choose(Raw(), [1_000_000], fast, 2).collective, choose(Raw(), [1_000_000], fast, 16).collective
    ('gather', 'split')
    """
    if density is not None and not 0 <= density <= 1:
        raise SpecError(f"density={density}: a share of the elements is from 0 to 1")
    if isinstance(codec.first if isinstance(codec, Chain) else codec, SparseCodec):
        seconds = _Sparse(codec, sizes, network, size, step, density).seconds(quantize)
    else:
        seconds = _dense(codec, sizes, network, size, step)
    return CollectiveChoice(min(seconds, key=lambda name: seconds[name]), seconds)


def codec_advice(dense_seconds: float, codec_seconds: float, spec: str) -> str | None:
    """A warning if the codec makes steps slower: the communication time of a step without it and with it.

    >>> codec_advice(0.031, 0.044, "topk(0.01)")
    'agreeing takes 31 ms a step dense and 44 ms with topk(0.01): this network is fast enough; use codec=None'
    >>> codec_advice(0.5, 0.02, "topk(0.01)") is None
    True
    """
    if codec_seconds < dense_seconds:
        return None
    return (
        f"agreeing takes {_milliseconds(dense_seconds)} a step dense and {_milliseconds(codec_seconds)} with {spec}: "
        "this network is fast enough; use codec=None"
    )


def expected_density(density: float, ranks: int) -> float:
    """The share of nonzero elements in the sum of `ranks` ranks that select independently.

    >>> expected_density(0.5, 2)
    0.75
    """
    return 1 - (1 - density) ** ranks


class _RequestSeconds:
    """Seconds of single requests, on the slowest link: the one between hosts."""

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
    requests, numel = _RequestSeconds(network, size), sum(sizes)
    payload = max_payload_bytes(codec, sizes, step)
    shard = HEADER.size + (payload - HEADER.size) / size
    lengths = 0.0 if codec.traits.fixed_length else requests.gather(8)
    return {
        "gather": lengths + requests.gather(payload) + 4 * size * numel * requests.gamma,
        "split": 2 * lengths + requests.scatter(shard) + requests.gather(shard) + 8 * numel * requests.gamma,
    }


class _Sparse:
    """The collectives of a codec that selects elements."""

    def __init__(
        self,
        codec: PayloadCodec,
        sizes: Sequence[int],
        network: Network,
        size: int,
        step: int,
        density: float | None,
    ) -> None:
        self.requests, self.size, self.sizes, self.step = _RequestSeconds(network, size), size, sizes, step
        self.numel = sum(sizes)
        first, _ = selector(codec)
        most = sum(first.max_selected(numel, step) for numel in sizes)
        self.selected = most if density is None else min(most, density * self.numel)
        self.lengths = 0.0 if codec.traits.fixed_length else self.requests.gather(8)
        self.payload: float = max_payload_bytes(codec, sizes, step)
        if not codec.traits.fixed_length and most:
            self.payload = HEADER.size + (self.payload - HEADER.size) * self.selected / most

    def seconds(self, quantize: PayloadCodec | None) -> dict[str, float]:
        requests, each = self.requests, self.numel // self.size
        own = stream_bytes(each, round(self.selected / self.size))
        union, lengths = stream_bytes(each, min(each, round(self.selected))), 0.0
        if (self.size - 1) * (union - own) > MAX_PADDING_BYTES:
            union, lengths = stream_bytes(each, round(self.union(self.size) / self.size)), requests.gather(8)
        dense = 4 * each if quantize is None else max_payload_bytes(quantize, [each], self.step)
        to_owners = requests.gather(8 * self.size) + requests.scatter(own) + 8 * self.selected * requests.gamma
        return {
            "gather": self.lengths + requests.gather(self.payload) + 8 * self.size * self.selected * requests.gamma,
            "sparse_doubling": self.doubling(),
            "sparse_split": to_owners + lengths + requests.gather(union) + 8 * self.union(self.size) * requests.gamma,
            "sparse_split_dense": to_owners + requests.gather(dense) + 4 * self.numel * requests.gamma,
        }

    def union(self, ranks: int) -> float:
        """Expected number of elements in the sum of `ranks` ranks."""
        return self.numel * expected_density(self.selected / self.numel, ranks) if self.numel else 0.0

    def doubling(self) -> float:
        requests, power = self.requests, largest_power_of_two(self.size)
        total, have = 0.0, 1
        if self.size > power:
            total += requests.message(self.payload) + 8 * self.union(2) * requests.gamma
            total += requests.message(stream_bytes(self.numel, round(self.union(self.size))))  # the result, at the end
            have = 2
        while power > 1:
            nbytes = self.payload if have == 1 else stream_bytes(self.numel, round(self.union(have)))
            have = min(2 * have, self.size)
            total += requests.message(nbytes) + 8 * self.union(have) * requests.gamma
            power //= 2
        return total


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
