"""Measuring the network under a channel, in a second or two: α, β, o and γ of this cluster and this engine.

All ranks measure together, because that is how they will use it: bandwidth is what everyone gets while everyone sends
to its neighbour, which on a real switch is the link's and on one machine the processors' share::

    α + o   half the round trip of a tiny message, median
    o       what each further tiny message adds when many go at once
    β       (T(4n) − T(n)) / 3n of a shift to the right by all ranks, n so large that it takes long enough; T is the
            lower quartile: what disturbs a machine only ever adds time
    γ       one reduction of the same bytes on all ranks at once
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

import torch

from syncline.collectives import Channel, build
from syncline.collectives.run import allreduce, broadcast, meet
from syncline.transports import Link, Network, Transport
from syncline.transports.base import LANE_TAGS

__all__ = ["Calibration", "calibrate"]

TAG = LANE_TAGS + 4096
"""Beside the lanes', and not large: MPI promises tags up to 32,767 only."""
PINGS = 60
TRAIN = 64
"""Tiny messages that are sent at once."""
REPEATS = 7
LONG_ENOUGH = 0.08
"""Seconds that the longer shift takes at least: what comes and goes must not count."""
LARGEST = 16 << 20


@dataclass(frozen=True)
class Calibration:
    """What was measured, in seconds and bytes a second; the spreads are half the middle half's width, relative."""

    latency: float
    bandwidth: float
    per_message: float
    combine: float
    latency_spread: float
    bandwidth_spread: float
    inside_latency: float = 0.0
    inside_bandwidth: float = 0.0
    ranks_per_host: int = 0
    """0 where ranks do not share hosts, or all do."""

    def network(self) -> Network:
        """The model that these numbers give."""
        inside = None
        if self.ranks_per_host:
            inside = Link(latency=self.inside_latency, bandwidth=self.inside_bandwidth)
        return Network(
            latency=self.latency,
            bandwidth=self.bandwidth,
            per_message=self.per_message,
            combine=self.combine,
            ranks_per_host=self.ranks_per_host or None,
            inside=inside,
        )

    def numbers(self) -> list[float]:
        """As floats in a fixed order, for the wire."""
        return [float(value) for value in asdict(self).values()]

    @staticmethod
    def of(numbers: Sequence[float]) -> Calibration:
        """What `numbers` wrote."""
        named = dict(zip((each.name for each in fields(Calibration)), numbers, strict=True))
        return Calibration(**{**named, "ranks_per_host": int(named["ranks_per_host"])})  # type: ignore[arg-type]


def calibrate(channel: Channel) -> Calibration:
    """Measure; every rank of the channel calls it and gets rank 0's word. A channel of one has nothing to measure."""
    if channel.size == 1:
        return Calibration(0.0, 1e12, 0.0, 0.0, 0.0, 0.0)
    probe = _Probe(channel)
    block = _ranks_per_host(channel.hosts)
    latency, latency_spread = probe.pair(block or 1)
    per_message = probe.train(block or 1)
    beta, beta_spread, nbytes = probe.shift(block or channel.size, step=block or 1)
    found = {
        "latency": max(0.0, latency - per_message),
        "bandwidth": 1 / beta,
        "per_message": per_message,
        "combine": probe.combine(nbytes),
        "latency_spread": latency_spread,
        "bandwidth_spread": beta_spread,
    }
    if block:
        found["inside_latency"] = max(0.0, probe.pair(1)[0] - per_message)
        found["inside_bandwidth"] = 1 / probe.shift(block, step=1)[0]
        found["ranks_per_host"] = block
    word = torch.tensor(Calibration(**found).numbers(), dtype=torch.float64)  # type: ignore[arg-type]
    broadcast(channel, word.view(torch.uint8), 0, build("broadcast", "tree"))
    return Calibration.of(word.tolist())


class _Probe:
    """The measurements, each made by all ranks together."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._transport: Transport = channel.transport
        self._now: Callable[[], float] = self._transport.runtime.now

    def pair(self, peer: int) -> tuple[float, float]:
        """Half the round trip of a tiny message between rank 0 and `peer`, while the others are quiet."""
        ball = torch.zeros(8, dtype=torch.uint8)
        times = []
        for _ in range(PINGS if self._channel.rank in (0, peer) else 0):
            start = self._now()
            if self._channel.rank == 0:
                self._send(ball, peer)
                self._receive(ball, peer)
            else:
                self._receive(ball, 0)
                self._send(ball, 0)
            times.append((self._now() - start) / 2)
        self._meet()
        return _middle(times[PINGS // 6 :] or [0.0])

    def train(self, peer: int) -> float:
        """What each of many tiny messages adds when they are sent at once."""
        rank, transport = self._channel.rank, self._transport
        balls = [torch.zeros(8, dtype=torch.uint8) for _ in range(TRAIN)]
        times: dict[int, list[float]] = {1: [], TRAIN: []}
        for count in [1, TRAIN] * REPEATS if rank in (0, peer) else []:
            start = self._now()
            if rank == 0:
                for handle in [transport.send(ball, peer, TAG, exact=True) for ball in balls[:count]]:
                    handle.wait()
                self._receive(balls[0], peer)
            else:
                for handle in [transport.recv(ball, 0, TAG, exact=True) for ball in balls[:count]]:
                    handle.wait()
                self._send(balls[0], 0)
            times[count].append(self._now() - start)
        self._meet()
        if rank not in (0, peer):
            return 0.0
        return max(0.0, _middle(times[TRAIN])[0] - _middle(times[1])[0]) / (TRAIN - 1)

    def shift(self, block: int, step: int) -> tuple[float, float, int]:
        """Seconds a byte, their spread, and the bytes it was measured with: every rank sends to the one `step` on.

        With a `step` of less than a `block`, to the next within its block.
        """
        rank, size = self._channel.rank, self._channel.size
        first = rank - rank % block if step < block else 0
        around = block if step < block else size
        to, source = first + (rank - first + step) % around, first + (rank - first - step) % around
        nbytes = 16 << 10
        while self._move(4 * nbytes, to, source) < LONG_ENOUGH and 4 * nbytes < LARGEST:
            nbytes *= 4
        small, large = [], []
        for _ in range(REPEATS):
            small.append(self._move(nbytes, to, source))
            large.append(self._move(4 * nbytes, to, source))
        beta = max(1e-13, (_lower_quartile(large) - _lower_quartile(small)) / (3 * nbytes))
        return beta, _middle(large)[1], 4 * nbytes

    def _move(self, nbytes: int, to: int, source: int) -> float:
        """The slowest rank's time for one shift."""
        out, into = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        self._meet()
        start = self._now()
        receipt = self._transport.recv(into, source, TAG, exact=True)
        self._transport.send(out, to, TAG, exact=True).wait()
        receipt.wait()
        return self._slowest(self._now() - start)

    def combine(self, nbytes: int) -> float:
        """Seconds a byte of a reduction in memory, on all ranks at once; the slowest rank's."""
        a, b = torch.zeros(nbytes // 4, dtype=torch.float32), torch.zeros(nbytes // 4, dtype=torch.float32)
        self._meet()
        times = []
        for _ in range(REPEATS):
            start = self._now()
            a += b
            self._transport.timing.reduced(nbytes)
            times.append(self._now() - start)
        return self._slowest(_middle(times)[0] / nbytes)

    def _send(self, ball: torch.Tensor, to: int) -> None:
        self._transport.send(ball, to, TAG, exact=True).wait()

    def _receive(self, ball: torch.Tensor, source: int) -> None:
        self._transport.recv(ball, source, TAG, exact=True).wait()

    def _meet(self) -> None:
        meet(self._channel)

    def _slowest(self, seconds: float) -> float:
        worst = torch.tensor([seconds], dtype=torch.float64)
        allreduce(self._channel, worst, "max", build("allreduce", "recursive_doubling"))
        return float(worst)


def _middle(times: Sequence[float]) -> tuple[float, float]:
    """The median, and half the width of the middle half in proportion to it."""
    median = statistics.median(times)
    if len(times) < 4 or not median:
        return median, 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return median, (high - low) / 2 / median


def _lower_quartile(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


def _ranks_per_host(hosts: tuple[int, ...]) -> int:
    """How many ranks each host has, where several hosts have several each in blocks; otherwise 0."""
    block = hosts.count(hosts[0]) if hosts else 0
    regular = all(hosts[rank] == hosts[rank - rank % block] for rank in range(len(hosts))) if block else False
    return block if regular and 1 < block < len(hosts) and len(hosts) % block == 0 else 0
