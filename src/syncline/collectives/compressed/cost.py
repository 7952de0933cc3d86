"""Predicted time of each compressed collective for a bucket, from bytes and expected density.

p ranks, N elements, a payload of B bytes; α latency, β = 1/bandwidth, o seconds per message, γ seconds per combined
byte. A rank selects k elements, so a sum of g ranks has about K(g) = N(1 − (1 − k/N)^g): S(g) bytes, dense from δ on.

    G(n) = (p − 1)(α + o + nβ)                an all-gather of n bytes, by a ring as in the engines
    T(n) = α + (p − 1)(o + nβ)                an all-to-all of rows of n bytes, in one round

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

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.codecs.base import HEADER, PayloadCodec, max_payload_bytes
from syncline.collectives.base import largest_power_of_two
from syncline.collectives.compressed.sparse import MAX_PADDING_BYTES, is_sparse, selector, stream_bytes
from syncline.transports import Network

__all__ = ["predict_collectives"]


def predict_collectives(
    codec: PayloadCodec,
    sizes: Sequence[int],
    network: Network,
    size: int,
    *,
    step: int = 0,
    quantize: PayloadCodec | None = None,
) -> dict[str, float]:
    """Predicted seconds of each collective that a codec can use, for slices of these sizes on `size` ranks.

    `quantize` is the codec of sums in the dense phase of `sparse_split_dense`. A codec that does not define how many
    elements it selects (threshold) counts as if it selected all.

    >>> from syncline.codecs.raw import Raw
    >>> fast = Network(latency=50e-6, bandwidth=1e9)
    >>> seconds = [predict_collectives(Raw(), [1_000_000], fast, ranks) for ranks in (2, 16)]
    >>> [min(each, key=each.get) for each in seconds]
    ['gather', 'split']
    """
    requests, numel = _RequestSeconds(network, size), sum(sizes)
    payload = max_payload_bytes(codec, sizes, step)
    lengths = 0.0 if codec.traits.fixed_length else requests.gather(8)
    if is_sparse(codec):
        selected = sum(selector(codec)[0].max_selected(each, step) for each in sizes)
        dense = max_payload_bytes(quantize, [numel // size], step) if quantize is not None else 4 * (numel // size)
        return _Sparse(requests, size, numel, selected, payload).seconds(lengths, dense)
    shard = HEADER.size + (payload - HEADER.size) / size
    return {
        "gather": lengths + requests.gather(payload) + 4 * size * numel * requests.gamma,
        "split": 2 * lengths + requests.scatter(shard) + requests.gather(shard) + 8 * numel * requests.gamma,
    }


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


@dataclass(frozen=True)
class _Sparse:
    """The collectives of a codec with which each rank selects `selected` of `numel` elements."""

    requests: _RequestSeconds
    size: int
    numel: int
    selected: int
    payload: int

    def seconds(self, gather_lengths: float, dense_bytes: int) -> dict[str, float]:
        """Of each collective. `dense_bytes`: a dense shard in the second phase of `sparse_split_dense`."""
        requests, each = self.requests, self.numel // self.size
        own = stream_bytes(each, round(self.selected / self.size))
        union, lengths = stream_bytes(each, min(each, self.selected)), 0.0
        if (self.size - 1) * (union - own) > MAX_PADDING_BYTES:
            union, lengths = stream_bytes(each, round(self.union(self.size) / self.size)), requests.gather(8)
        to_owners = requests.gather(8 * self.size) + requests.scatter(own) + 8 * self.selected * requests.gamma
        combined = 8 * self.size * self.selected * requests.gamma
        return {
            "gather": gather_lengths + requests.gather(self.payload) + combined,
            "sparse_doubling": self.doubling(),
            "sparse_split": to_owners + lengths + requests.gather(union) + 8 * self.union(self.size) * requests.gamma,
            "sparse_split_dense": to_owners + requests.gather(dense_bytes) + 4 * self.numel * requests.gamma,
        }

    def union(self, ranks: int) -> float:
        """Expected number of elements in the sum of `ranks` ranks that select independently."""
        return self.numel * (1 - (1 - self.selected / self.numel) ** ranks) if self.numel else 0.0

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
