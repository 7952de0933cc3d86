"""Measures the network of a channel in a second or two: α, β, o and γ of this cluster and engine.

All ranks measure together, as they communicate in training. Bandwidth is what each rank gets while all send to their
neighbours: on a real switch the link's, on one machine the processors' share. Results are cached on disk::

    α + o   half the round trip of a tiny message, median
    o       what each further tiny message adds when many are sent together
    β       (T(4n) − T(n)) / 3n of a shift to the right by all ranks, n so large that it takes long enough; T is the
            lower quartile: disturbances only add time
    γ       one reduction of the same bytes on all ranks in parallel
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from syncline.collectives import Channel, build
from syncline.collectives.channel import allreduce, barrier, broadcast
from syncline.environment.base import cache_folder
from syncline.transports import Link, Network, Transport
from syncline.transports.base import LANE_TAGS

__all__ = ["Calibration", "cache_file", "calibrate", "load_calibration", "store_calibration"]

logger = logging.getLogger("syncline")

CALIBRATION_TAG = LANE_TAGS + 4096
"""Not a tag of lanes, and not large: MPI guarantees tags up to 32,767 only."""
PINGS = 60
TRAIN_MESSAGES = 64
"""Tiny messages that are sent together."""
REPEATS = 7
MIN_SHIFT_S = 0.08
"""The longer shift takes at least this many seconds, so that disturbances average out."""
MAX_SHIFT_BYTES = 16 << 20


@dataclass(frozen=True)
class Calibration:
    """Measured values, in seconds and bytes per second. Spreads are half the interquartile range, relative."""

    latency: float
    bandwidth: float
    per_message: float
    combine: float
    latency_spread: float
    bandwidth_spread: float
    inside_latency: float = 0.0
    inside_bandwidth: float = 0.0
    ranks_per_host: int = 0
    """0 if no ranks share a host, or all do."""

    def network(self) -> Network:
        """The network model with these values."""
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
        """The values as floats in a fixed order, for the wire."""
        return [float(value) for value in asdict(self).values()]

    @staticmethod
    def of(numbers: Sequence[float]) -> Calibration:
        """The inverse of `numbers`."""
        named = dict(zip((each.name for each in fields(Calibration)), numbers, strict=True))
        return Calibration(**{**named, "ranks_per_host": int(named["ranks_per_host"])})  # type: ignore[arg-type]


def calibrate(channel: Channel) -> Calibration:
    """Measure the network. Every rank of the channel calls it and gets rank 0's result."""
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
    """Measurements, each made by all ranks together."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._transport: Transport = channel.transport
        self._now: Callable[[], float] = self._transport.runtime.now

    def pair(self, peer: int) -> tuple[float, float]:
        """Half the round trip of a tiny message between rank 0 and `peer`, while the others are idle."""
        message = torch.zeros(8, dtype=torch.uint8)
        times = []
        for _ in range(PINGS if self._channel.rank in (0, peer) else 0):
            start = self._now()
            if self._channel.rank == 0:
                self._send(message, peer)
                self._receive(message, peer)
            else:
                self._receive(message, 0)
                self._send(message, 0)
            times.append((self._now() - start) / 2)
        barrier(self._channel)
        return _middle(times[PINGS // 6 :] or [0.0])

    def train(self, peer: int) -> float:
        """Seconds that each of many tiny messages adds when they are sent together."""
        rank, transport = self._channel.rank, self._transport
        messages = [torch.zeros(8, dtype=torch.uint8) for _ in range(TRAIN_MESSAGES)]
        times: dict[int, list[float]] = {1: [], TRAIN_MESSAGES: []}
        for count in [1, TRAIN_MESSAGES] * REPEATS if rank in (0, peer) else []:
            start = self._now()
            if rank == 0:
                for handle in [
                    transport.send(message, peer, CALIBRATION_TAG, exact=True) for message in messages[:count]
                ]:
                    handle.wait()
                self._receive(messages[0], peer)
            else:
                for handle in [transport.recv(message, 0, CALIBRATION_TAG, exact=True) for message in messages[:count]]:
                    handle.wait()
                self._send(messages[0], 0)
            times[count].append(self._now() - start)
        barrier(self._channel)
        if rank not in (0, peer):
            return 0.0
        return max(0.0, _middle(times[TRAIN_MESSAGES])[0] - _middle(times[1])[0]) / (TRAIN_MESSAGES - 1)

    def shift(self, block: int, step: int) -> tuple[float, float, int]:
        """Seconds per byte, their spread, and the bytes used: every rank sends to rank + `step`.

        If `step` is less than `block`, to the next rank within its block.
        """
        rank, size = self._channel.rank, self._channel.size
        first = rank - rank % block if step < block else 0
        around = block if step < block else size
        to, source = first + (rank - first + step) % around, first + (rank - first - step) % around
        nbytes = 16 << 10
        while self._move(4 * nbytes, to, source) < MIN_SHIFT_S and 4 * nbytes < MAX_SHIFT_BYTES:
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
        barrier(self._channel)
        start = self._now()
        receipt = self._transport.recv(into, source, CALIBRATION_TAG, exact=True)
        self._transport.send(out, to, CALIBRATION_TAG, exact=True).wait()
        receipt.wait()
        return self._slowest(self._now() - start)

    def combine(self, nbytes: int) -> float:
        """Seconds per byte of a reduction in memory, on all ranks in parallel: the slowest rank's."""
        a, b = torch.zeros(nbytes // 4, dtype=torch.float32), torch.zeros(nbytes // 4, dtype=torch.float32)
        barrier(self._channel)
        times = []
        for _ in range(REPEATS):
            start = self._now()
            a += b
            self._transport.timing.reduced(nbytes)
            times.append(self._now() - start)
        return self._slowest(_middle(times)[0] / nbytes)

    def _send(self, message: torch.Tensor, to: int) -> None:
        self._transport.send(message, to, CALIBRATION_TAG, exact=True).wait()

    def _receive(self, message: torch.Tensor, source: int) -> None:
        self._transport.recv(message, source, CALIBRATION_TAG, exact=True).wait()

    def _slowest(self, seconds: float) -> float:
        worst = torch.tensor([seconds], dtype=torch.float64)
        allreduce(self._channel, worst, "max", build("allreduce", "recursive_doubling"))
        return float(worst)


def _middle(times: Sequence[float]) -> tuple[float, float]:
    """The median, and half the interquartile range relative to it."""
    median = statistics.median(times)
    if len(times) < 4 or not median:
        return median, 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return median, (high - low) / 2 / median


def _lower_quartile(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


def _ranks_per_host(hosts: tuple[int, ...]) -> int:
    """Number of ranks per host, if several hosts have equal blocks of several ranks; otherwise 0."""
    block = hosts.count(hosts[0]) if hosts else 0
    regular = all(hosts[rank] == hosts[rank - rank % block] for rank in range(len(hosts))) if block else False
    return block if regular and 1 < block < len(hosts) and len(hosts) % block == 0 else 0


def cache_file() -> Path:
    """The file of stored calibrations: one for each cluster and engine."""
    return cache_folder() / "networks.json"


def load_calibration(where: str) -> Calibration | None:
    """The stored calibration of a network, if there is one."""
    try:
        found = _read_cache().get(where)
        return None if found is None else Calibration.of([float(number) for number in found])
    except (TypeError, ValueError) as error:
        logger.warning("%s: the entry for %s cannot be read and is measured anew (%s)", cache_file(), where, error)
        return None


def store_calibration(where: str, calibration: Calibration) -> None:
    """Store a calibration. If the folder cannot be written, the next run measures again."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {**_read_cache(), where: calibration.numbers()}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(entries, file, indent=1)
        os.replace(file.name, path)  # atomic
    except OSError as error:
        logger.warning("the calibration could not be kept in %s: %s", path, error)


def _read_cache() -> dict[str, list[float]]:
    try:
        entries = json.loads(cache_file().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read and is made anew: %s", cache_file(), error)
        return {}
    return entries if isinstance(entries, dict) else {}
