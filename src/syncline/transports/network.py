"""Models of a network: what a message costs.

A message of n bytes holds its sender's port for o + n·β and arrives after α + o + n·β if the receiver's port is free;
ports are full duplex, one per rank; combining costs γ a byte::

    sender's port    ├── o + n·β ──┤
    receiver's port        ├── o + n·β ──┤
                     ◄─ α ─►             ▲ arrives
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from syncline.errors import SpecError

__all__ = ["Link", "Network"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection: seconds until the first byte, bytes a second after it.

    >>> Link(latency=1e-6, bandwidth=10e9).seconds(10_000)
    2e-06
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency < math.inf and self.bandwidth > 0):
            raise SpecError(
                f"a link needs latency >= 0 and bandwidth > 0 (latency: {self.latency}, bandwidth: {self.bandwidth})"
            )

    def seconds(self, nbytes: int) -> float:
        """The time of one message that finds both ports free."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network for the simulator and for predictions.

    `latency` in seconds and `bandwidth` in bytes a second hold between any two ranks, except: with
    `ranks_per_host`, ranks of one host are joined by `inside`; `links` names single pairs; a rank in `slow`
    takes that many times as long for everything. `per_message` is o, seconds that each message holds a port
    beyond its bytes. `combine` is γ, seconds for each byte reduced. `jitter`
    stretches each latency by a random share up to this one. A send of more than `eager` bytes ends only when
    its receive is there, as with MPI and gloo.

    >>> inside = Link(latency=1e-6, bandwidth=10e9)
    >>> hosts = Network(latency=50e-6, bandwidth=125e6, ranks_per_host=4, inside=inside)
    >>> hosts.link(0, 3).bandwidth, hosts.link(3, 4).bandwidth
    (10000000000.0, 125000000.0)
    """

    latency: float = 50e-6
    bandwidth: float = 1.25e9
    per_message: float = 0.0
    combine: float = 0.0
    jitter: float = 0.0
    eager: float = math.inf
    ranks_per_host: int | None = None
    inside: Link | None = None
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    slow: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Link(latency=self.latency, bandwidth=self.bandwidth)  # checks both
        amounts = (self.per_message, self.combine, self.jitter)
        if not (all(0 <= amount < math.inf for amount in amounts) and self.eager >= 0):
            raise SpecError(
                f"per_message, combine, jitter and eager are not negative (per_message: {self.per_message}, "
                f"combine: {self.combine}, jitter: {self.jitter}, eager: {self.eager})"
            )
        if (self.inside is None) != (self.ranks_per_host is None) or (self.ranks_per_host or 1) < 1:
            raise SpecError(
                "hosts need both ranks_per_host >= 1 and inside "
                f"(ranks_per_host: {self.ranks_per_host}, inside: {self.inside})"
            )
        if any(factor <= 0 for factor in self.slow.values()):
            raise SpecError(f"a slowdown is a factor above 0 (slow: {dict(self.slow)})")

    def link(self, source: int, to: int) -> Link:
        """The link from one rank to another."""
        if (source, to) in self.links:
            return self.links[source, to]
        if self.inside is not None and self.host(source) == self.host(to):
            return self.inside
        return Link(latency=self.latency, bandwidth=self.bandwidth)

    def host(self, rank: int) -> int:
        """The number of the host that a rank lives on: without hosts, each on its own."""
        return rank // self.ranks_per_host if self.ranks_per_host else rank
