"""Mixing by compressed differences: a codec's losses are never lost.

Everybody keeps x̂_i, what all believe that worker i has, for itself and for its neighbours::

    q_i = C(x_i − x̂_i) ──► neighbours         the bytes on the wire
    x̂_j ← x̂_j + s·q_j                          alike at j and at all its neighbours: they decode the same bytes
    x_i ← x_i + γ Σ_j W_ij (x̂_j − x̂_i)         the mean stays, whatever C has done to q

What C leaves out of q stays in x_i − x̂_i and is in the next q: no other error feedback is needed. The same holds for
what float32, which codecs encode, leaves out of a difference of double precision. s and γ follow from how much of a
random row survives C, δ = ⟨x, Cx⟩² / (‖x‖²‖Cx‖²). s = ⟨x, Cx⟩ / ‖Cx‖² makes s·C a contraction, also where
C is unbiased and noisy; γ = δ (1 + δ) / 2 unless it is told, which of some rules tried came together fastest.

Koloskova, Stich, Jaggi: Decentralized stochastic optimization and gossip algorithms with compressed communication
(2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.codecs import Codec, PayloadCodec, RngKey, TensorSlice
from syncline.codecs.base import all_finite
from syncline.codecs.payload import max_payload_bytes, pack, unpack
from syncline.codecs.raw import Raw
from syncline.errors import DivergedError, IncompatibleError
from syncline.reduction import Communicator
from syncline.strategies.gossip.mixing import Neighbours
from syncline.transports import Handle

__all__ = ["Choco", "Pace", "pace_of"]

HATS = 1 << 16
"""The tag of estimates that are sent as they are."""


@dataclass(frozen=True)
class Pace:
    """How far the estimates go along with a message, and the weights with the estimates: s and γ."""

    scale: float
    gamma: float


@dataclass(frozen=True)
class _Piece:
    """Parameters that one codec carries."""

    codec: PayloadCodec
    numbers: tuple[int, ...]


class Choco:
    """CHOCO-Gossip on one worker. All begin with the same weights, so that is what they believe of each other."""

    def __init__(
        self, neighbours: Neighbours, weights: Mapping[str, Tensor], codec: Codec, pace: Pace, rank: int, seed: int
    ) -> None:
        self.pace = pace
        self._neighbours = neighbours
        self._layout = _Layout(weights, codec)
        self._codec, self._rank, self._seed = codec, rank, seed
        self._number = 0
        self._payloads: list[Tensor] = []
        self._coming: dict[int, list[tuple[Handle, Tensor]]] = {}
        self.hat = self._layout.read(list(weights.values()))
        """What the neighbours believe of this worker, as a row."""
        self._hats = {source: self.hat.clone() for source in neighbours.sources}
        self._scratch = torch.empty_like(self.hat)
        self._decoded = self._scratch.float()  # the same tensor if it is float32

    def begin(self, weights: Sequence[Tensor], number: int) -> None:
        neighbours, layout = self._neighbours, self._layout
        neighbours.begin()
        self._number = number
        news = layout.read(weights).sub_(self.hat).float()
        if not all_finite(news):
            raise DivergedError(
                f"the weights of rank {self._rank} are not finite in round {number}, and {self._codec!r} cannot carry "
                "them",
                rank=self._rank,
            )
        rooms = [torch.empty(layout.room(piece, number), dtype=torch.uint8) for piece in layout.pieces]
        self._coming = {
            source: [
                (neighbours.channel.recv(buffer, source, tag), buffer)
                for tag, buffer in enumerate(room.clone() for room in rooms)
            ]
            for source in neighbours.sources
        }
        rng = RngKey(self._seed, number, self._rank)
        self._payloads = [pack(piece.codec, layout.parts(piece, news), rng) for piece in layout.pieces]
        for tag, (piece, payload) in enumerate(zip(layout.pieces, self._payloads, strict=True)):
            neighbours.send(payload, tag, self.hat.element_size() * layout.numel(piece), exact=False)

    def finish(self) -> list[Tensor]:
        self._neighbours.wait([handle for coming in self._coming.values() for handle, _ in coming])
        self._believe(self.hat, self._payloads, "")
        change = torch.zeros_like(self.hat)
        for source, weight in self._neighbours.sources.items():
            payloads = [buffer[: handle.nbytes] for handle, buffer in self._coming[source]]
            self._believe(self._hats[source], payloads, f" from rank {self._neighbours.channel.members[source]}")
            self._neighbours.channel.timing.reduced(self.hat.nbytes)
            torch.sub(self._hats[source], self.hat, out=self._scratch)
            change.add_(self._scratch, alpha=weight * self.pace.gamma)
        return self._layout.views(change)

    def exchange_hats(self, hat: Tensor | None) -> None:
        """Go on from other estimates, such as a checkpoint's; every worker calls it, outside of rounds."""
        channel = self._neighbours.channel
        if hat is not None:
            self.hat.copy_(hat.reshape(-1))
        handles = [channel.recv(row, source, HATS, exact=True) for source, row in self._hats.items()]
        handles += [channel.send(self.hat, to, HATS, exact=True) for to in self._neighbours.targets]
        for handle in handles:
            handle.wait()

    def begin_anew(self, weights: Sequence[Tensor]) -> Tensor:
        """Estimates for weights that everybody has."""
        return self._layout.read(weights)

    def _believe(self, hat: Tensor, payloads: Sequence[Tensor], sender: str) -> None:
        """What the payloads say, added to an estimate."""
        for piece, payload in zip(self._layout.pieces, payloads, strict=True):
            rows = [part.flat for part in self._layout.parts(piece, self._decoded)]
            unpack(piece.codec, payload, rows, accumulate=False, sender=sender, step=self._number)
        hat.add_(self._decoded, alpha=self.pace.scale)


class _Layout:
    """Parameters in one row, and which codec carries which. The row is float64 where a parameter is, else float32."""

    def __init__(self, weights: Mapping[str, Tensor], codec: Codec) -> None:
        self._names = list(weights)
        self._shapes = [tuple(weight.shape) for weight in weights.values()]
        self._sizes = [weight.numel() for weight in weights.values()]
        double = any(weight.dtype == torch.float64 for weight in weights.values())
        self._dtype = torch.float64 if double else torch.float32
        chosen: dict[PayloadCodec, list[int]] = {}
        for number, (name, weight) in enumerate(weights.items()):
            picked = codec.codec_for(name, weight.numel()) or Raw()
            if not isinstance(picked, PayloadCodec) or picked.traits.residual_needs_sum:
                raise IncompatibleError(
                    f"gossip sends what {picked!r} makes of one worker's weights, and that one sums among all workers: "
                    "take a codec such as topk(0.01) or quantize(4), or strategy allreduce"
                )
            if not weight.is_floating_point():
                raise IncompatibleError(
                    f"{name} is {weight.dtype}, and codecs are for real numbers: leave the codec out"
                )
            chosen.setdefault(picked, []).append(number)
        self.pieces = [_Piece(picked, tuple(numbers)) for picked, numbers in chosen.items()]

    def numel(self, piece: _Piece) -> int:
        return sum(self._sizes[number] for number in piece.numbers)

    def room(self, piece: _Piece, step: int) -> int:
        """The most bytes that its payload takes."""
        return max_payload_bytes(piece.codec, [self._sizes[number] for number in piece.numbers], step)

    def read(self, weights: Sequence[Tensor]) -> Tensor:
        return torch.cat([weight.detach().reshape(-1).to("cpu", self._dtype) for weight in weights])

    def parts(self, piece: _Piece, row: Tensor) -> list[TensorSlice]:
        split = torch.split_with_sizes(row, self._sizes)
        return [TensorSlice(split[number], self._names[number], shape=self._shapes[number]) for number in piece.numbers]

    def views(self, row: Tensor) -> list[Tensor]:
        return [
            part.view(shape) for part, shape in zip(torch.split_with_sizes(row, self._sizes), self._shapes, strict=True)
        ]


def pace_of(exchange: Communicator, weights: Mapping[str, Tensor], codec: Codec, gamma: float | None) -> Pace:
    """What suits a codec, measured by rank 0 on a random row with these parameters' shapes; every worker calls it.

    It must be the same everywhere, or the mean would not stay.
    """
    layout = _Layout(weights, codec)
    told = torch.ones(2, dtype=torch.float64)
    if exchange.rank == 0:
        draw = torch.Generator().manual_seed(0)
        row = torch.randn(sum(layout.numel(piece) for piece in layout.pieces), generator=draw, dtype=torch.float32)
        kept = torch.zeros_like(row)
        for piece in layout.pieces:
            step = piece.codec.traits.steady_from_step
            payload = pack(piece.codec, layout.parts(piece, row), RngKey(0, step, 0))
            unpack(piece.codec, payload, [part.flat for part in layout.parts(piece, kept)], accumulate=False, step=step)
        along, length, whole = (float(each) for each in (row @ kept, kept @ kept, row @ row))
        if along > 0:
            told = torch.tensor([along / length, along * along / (length * whole)], dtype=torch.float64)
    scale, survives = (float(each) for each in exchange.from_root(told))
    return Pace(min(1.0, scale), min(1.0, survives * (1.0 + survives) / 2) if gamma is None else gamma)
