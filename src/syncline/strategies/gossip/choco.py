"""A round of mixing with the neighbours, and CHOCO-Gossip, which mixes by compressed differences.

    begin    x_i ──► targets                    receives are posted, and no worker waits
    finish   Σ_j W_ij (x_j − x_i)               to be added to x_i, now or after a step

CHOCO: each worker keeps an estimate x̂ of its own weights and of each neighbour's, as the neighbours know them::

    q_i = C(x_i − x̂_i) ──► neighbours          the payload
    x̂_j ← x̂_j + s·q_j                           equal at j and at all its neighbours, which decode the same payload
    x_i ← x_i + γ Σ_j W_ij (x̂_j − x̂_i)          keeps the mean for any codec C

In an elastic job workers have other neighbours after a loss. Each sends its x̂_i to them once, without the codec.

What C leaves out of q stays in x_i − x̂_i and is in the next q, so no other error feedback is needed. The same holds for
what float32, which codecs encode, leaves out of a difference in double precision. s and γ follow from the part of a
random row that survives C, δ = ⟨x, Cx⟩² / (‖x‖²‖Cx‖²). s = ⟨x, Cx⟩ / ‖Cx‖² makes s·C a contraction, also for an
unbiased C with noise. The default γ = δ (1 + δ) / 2 converged fastest among several rules that were measured.

Koloskova, Stich, Jaggi: Decentralized stochastic optimization and gossip algorithms with compressed communication
(2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from syncline.codecs import Codec, PayloadCodec, RngKey, TensorSlice
from syncline.codecs.base import all_finite, max_payload_bytes, pack, unpack
from syncline.codecs.raw import Raw
from syncline.errors import DivergedError, IncompatibleError, SynclineError
from syncline.reduction import Communicator
from syncline.strategies.gossip.graphs import Graph
from syncline.transports import Handle, Transport

__all__ = ["Choco", "Mixing", "Neighbours", "StepSizes", "measure_step_sizes"]

ESTIMATES_TAG = 1 << 16
"""The message tag of estimates that are sent without a codec."""


class Mixing(Protocol):
    """How a round is carried out. One round is in progress at a time."""

    def begin(self, weights: Sequence[Tensor], number: int) -> None:
        """Send this worker's weights to the neighbours, in the round of that number."""
        ...

    def finish(self) -> list[Tensor]:
        """The change of each weight. Valid until the next `begin`."""
        ...

    def use(self, neighbours: Neighbours) -> None:
        """Continue with other neighbours: the team of an elastic job has changed."""
        ...


class Neighbours:
    """The run's own channel to the neighbours. Constructed by all workers together."""

    def __init__(self, communicator: Communicator, graph: Graph, channel: Transport) -> None:
        """`channel` has the ranks of the communicator, and no other messages."""
        self.rank = communicator.rank
        self.channel = channel
        self.sources = graph.sources(communicator.rank)
        """The workers whose weights arrive here, with the factor of each."""
        self.targets = graph.targets(communicator.rank)
        self._stats = communicator.stats
        self._now = communicator.world.runtime.now
        self._began = 0.0
        self._pending: list[Handle] = []
        """Messages in flight."""

    def begin(self) -> None:
        """Start to measure a round."""
        self._stats.next_round()
        self._began = self._now()

    def receive(self, buffer: Tensor, source: int, tag: int, exact: bool = False) -> Handle:
        """Receive from a source. The buffer must not be used until `wait` returns."""
        handle = self.channel.recv(buffer, source, tag, exact=exact)
        self._pending.append(handle)
        return handle

    def send(self, data: Tensor, tag: int, logical: int, exact: bool) -> None:
        """Send to all targets. The data must not change until `wait` returns."""
        self._pending += [self.channel.send(data, to, tag, exact=exact) for to in self.targets]
        self._stats.sent(logical * len(self.targets), data.nbytes * len(self.targets))

    def exchange(self, own: Tensor, theirs: Mapping[int, Tensor], tag: int) -> None:
        """Send `own` to all targets, and receive into `theirs` by source, outside of rounds."""
        for source, row in theirs.items():
            self.receive(row, source, tag, exact=True)
        self._pending += [self.channel.send(own, to, tag, exact=True) for to in self.targets]
        for handle in self._pending:
            handle.wait()
        self._pending = []

    def settle(self) -> None:
        """Wait until no message is in flight, after a lost worker has interrupted a round. Errors are ignored."""
        pending, self._pending = self._pending, []
        for handle in pending:
            with suppress(SynclineError):
                handle.wait()

    def wait(self) -> None:
        """Wait for all receives and sends."""
        since = self._now()
        for handle in self._pending:
            handle.wait()
        self._pending = []
        ended = self._now()
        self._stats.reduced(self._began, ended, "weights of neighbours")
        self._stats.waited(since, ended)


@dataclass(frozen=True)
class StepSizes:
    """s and γ: how far an estimate moves with a payload, and the weights with the estimates."""

    scale: float
    gamma: float


@dataclass(frozen=True)
class _CodedParameters:
    """Parameters that one codec encodes."""

    codec: PayloadCodec
    numbers: tuple[int, ...]


class Choco:
    """CHOCO-Gossip on one worker. All workers begin with the same weights, which are the first estimates."""

    def __init__(
        self,
        neighbours: Neighbours,
        weights: Mapping[str, Tensor],
        codec: Codec,
        step_sizes: StepSizes,
        seed: int,
    ) -> None:
        self.step_sizes = step_sizes
        self._neighbours = neighbours
        self._layout = _CodedLayout(weights, codec)
        self._codec, self._seed = codec, seed
        self._number = 0
        self._exchange_due = False
        """Whether the next round begins with an exchange of estimates, because the neighbours have changed."""
        self._payloads: list[Tensor] = []
        self._receiving: dict[int, list[tuple[Handle, Tensor]]] = {}
        self.estimate = self.flat(list(weights.values()))
        """The neighbours' estimate of this worker's weights, as a flat tensor."""
        self.estimates = {source: self.estimate.clone() for source in neighbours.sources}
        """This worker's estimates of its neighbours' weights."""
        self._difference = torch.empty_like(self.estimate)
        self._decoded = self._difference.float()  # the same tensor if it is float32

    def flat(self, weights: Sequence[Tensor]) -> Tensor:
        """A flat copy of the weights."""
        return self._layout.flat(weights)

    def begin(self, weights: Sequence[Tensor], number: int) -> None:
        neighbours, layout, rank = self._neighbours, self._layout, self._neighbours.rank
        if self._exchange_due:
            self.exchange_estimates(self.estimate)
        neighbours.begin()
        self._number = number
        change = layout.flat(weights).sub_(self.estimate).float()
        if not all_finite(change):
            world_rank = neighbours.channel.members[rank]
            raise DivergedError(
                f"the weights of rank {world_rank} are not finite in round {number}, and {self._codec!r} cannot carry "
                "them",
                rank=world_rank,
            )
        sizes = [layout.max_bytes(part, number) for part in layout.parts]
        self._receiving = {
            source: [
                (neighbours.receive(buffer, source, tag), buffer)
                for tag, buffer in enumerate(torch.empty(size, dtype=torch.uint8) for size in sizes)
            ]
            for source in neighbours.sources
        }
        rng = RngKey(self._seed, number, rank)
        self._payloads = [pack(part.codec, layout.slices(part, change), rng) for part in layout.parts]
        for tag, (part, payload) in enumerate(zip(layout.parts, self._payloads, strict=True)):
            neighbours.send(payload, tag, self.estimate.element_size() * layout.numel(part), exact=False)

    def finish(self) -> list[Tensor]:
        neighbours = self._neighbours
        neighbours.wait()
        self._add_payloads(self.estimate, self._payloads, "")
        change = torch.zeros_like(self.estimate)
        for source, weight in neighbours.sources.items():
            payloads = [buffer[: handle.nbytes] for handle, buffer in self._receiving[source]]
            self._add_payloads(self.estimates[source], payloads, f" from rank {neighbours.channel.members[source]}")
            neighbours.channel.timing.reduced(self.estimate.nbytes)
            torch.sub(self.estimates[source], self.estimate, out=self._difference)
            change.add_(self._difference, alpha=weight * self.step_sizes.gamma)
        return self._layout.views(change)

    def exchange_estimates(self, estimate: Tensor) -> None:
        """Continue from another estimate, such as a checkpoint's. Every worker calls it, outside of rounds."""
        neighbours = self._neighbours
        self.estimate.copy_(estimate.reshape(-1))
        neighbours.exchange(self.estimate, self.estimates, ESTIMATES_TAG)
        self._exchange_due = False

    def use(self, neighbours: Neighbours) -> None:
        """This worker's estimate stays. Its new neighbours receive it before the next round.

        A round that is repeated with them needs no more: the estimate may contain the payload of the first attempt.
        """
        self._neighbours = neighbours
        self.estimates = {source: torch.empty_like(self.estimate) for source in neighbours.sources}
        self._exchange_due = True

    def restart(self, estimate: Tensor) -> None:
        """Continue from another estimate, which the neighbours receive before the next round."""
        self.estimate.copy_(estimate.reshape(-1))
        self._exchange_due = True

    def _add_payloads(self, estimate: Tensor, payloads: Sequence[Tensor], sender: str) -> None:
        """Decode the payloads and add them to an estimate."""
        for part, payload in zip(self._layout.parts, payloads, strict=True):
            rows = [each.flat for each in self._layout.slices(part, self._decoded)]
            unpack(part.codec, payload, rows, accumulate=False, sender=sender, step=self._number)
        estimate.add_(self._decoded, alpha=self.step_sizes.scale)


class _CodedLayout:
    """All parameters in one flat tensor, and the codec of each. It is float64 if a parameter is, else float32."""

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
        self.parts = [_CodedParameters(picked, tuple(numbers)) for picked, numbers in chosen.items()]

    def numel(self, part: _CodedParameters) -> int:
        return sum(self._sizes[number] for number in part.numbers)

    def max_bytes(self, part: _CodedParameters, step: int) -> int:
        """The largest size of its payload."""
        return max_payload_bytes(part.codec, [self._sizes[number] for number in part.numbers], step)

    def flat(self, weights: Sequence[Tensor]) -> Tensor:
        return torch.cat([weight.detach().reshape(-1).to("cpu", self._dtype) for weight in weights])

    def slices(self, part: _CodedParameters, row: Tensor) -> list[TensorSlice]:
        split = torch.split_with_sizes(row, self._sizes)
        return [TensorSlice(split[number], self._names[number], shape=self._shapes[number]) for number in part.numbers]

    def views(self, row: Tensor) -> list[Tensor]:
        split = torch.split_with_sizes(row, self._sizes)
        return [part.view(shape) for part, shape in zip(split, self._shapes, strict=True)]


def measure_step_sizes(
    communicator: Communicator, weights: Mapping[str, Tensor], codec: Codec, gamma: float | None
) -> StepSizes:
    """The step sizes for a codec, measured by rank 0 on a random row of these shapes. Every worker calls it.

    All workers must use the same ones, or the mean would change.
    """
    layout = _CodedLayout(weights, codec)
    measured = torch.ones(2, dtype=torch.float64)
    if communicator.rank == 0:
        generator = torch.Generator().manual_seed(0)
        numel = sum(layout.numel(part) for part in layout.parts)
        row = torch.randn(numel, generator=generator, dtype=torch.float32)
        decoded = torch.zeros_like(row)
        for part in layout.parts:
            step = part.codec.traits.steady_from_step
            payload = pack(part.codec, layout.slices(part, row), RngKey(0, step, 0))
            rows = [each.flat for each in layout.slices(part, decoded)]
            unpack(part.codec, payload, rows, accumulate=False, step=step)
        product, length, whole = (float(each) for each in (row @ decoded, decoded @ decoded, row @ row))
        if product > 0:
            measured = torch.tensor([product / length, product * product / (length * whole)], dtype=torch.float64)
    scale, survives = (float(each) for each in communicator.from_root(measured))
    return StepSizes(min(1.0, scale), min(1.0, survives * (1.0 + survives) / 2) if gamma is None else gamma)
