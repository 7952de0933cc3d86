"""Predicted time of a collective: by a formula where one is exact, else by simulating the schedule's rounds.

Formulas of all-reduce for equal links: n bytes, p ranks, L = log₂p; α latency, β = 1/bandwidth, o seconds per message,
γ seconds per combined byte. Those of recursive_doubling, halving_doubling and tree are exact for p a power of two.
Otherwise extra ranks fold in, about 2(α + o) + 2nβ + nγ more. But ranks without a partner run ahead, and their messages
share ports with the folded ones: then there is no formula, and `play` simulates.

| schedule            | seconds                                            |
|---------------------|----------------------------------------------------|
| naive               | 2α + 2(p−1)(o + nβ) + (p−1)nγ                      |
| sharded             | 2α + 2(p−1)(o + nβ/p) + (p−1)/p·nγ                 |
| ring                | 2(p−1)(α + o) + 2(p−1)/p·nβ + (p−1)/p·nγ           |
| recursive_doubling  | L(α + o + nβ + nγ)                                 |
| halving_doubling    | 2L(α + o) + 2(p−1)/p·nβ + (p−1)/p·nγ               |
| tree                | 2L(α + o + nβ) + Lnγ                               |

Sources: Thakur, Rabenseifner and Gropp (2005); Chan, Heimlich, Purkayastha and van de Geijn (2007).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from syncline.collectives import NATIVE, Channel, Operation, build, names
from syncline.costs.simulation import play
from syncline.transports import Network

__all__ = ["CostPrediction", "closed_form", "predict", "predict_fastest", "predict_on"]

NATIVE_MODEL = "ring"
"""The schedule that models the engines' own all-reduce: gloo's is a segmented ring, MPI's and NCCL's often are."""


@dataclass(frozen=True)
class CostPrediction:
    """Predicted seconds, and their source: a formula, or the simulated rounds of the schedule."""

    seconds: float
    by: Literal["formula", "rounds"]


def predict(
    algorithm: str,
    size: int,
    nbytes: int,
    network: Network,
    *,
    operation: Operation = "allreduce",
    itemsize: int = 1,
    hosts: tuple[int, ...] = (),
    lanes: int = 1,
) -> CostPrediction:
    """The time of one call on a network: by the formula if one is exact, else by simulating the rounds.

    `lanes` is the number of lanes, see `Channel.lanes_for`.

    >>> predict("ring", 8, 8_000_000, Network(latency=0.0, bandwidth=1e9))
    CostPrediction(seconds=0.014, by='formula')
    """
    if algorithm == NATIVE and operation == "allreduce":
        algorithm = NATIVE_MODEL
    if operation == "allreduce" and lanes == 1:
        seconds = closed_form(algorithm, size, nbytes, network)
        if seconds is not None:
            return CostPrediction(seconds, "formula")
    cost = play(build(operation, algorithm), size, nbytes, network, itemsize=itemsize, hosts=hosts, lanes=lanes)
    return CostPrediction(cost.time, "rounds")


def predict_fastest(size: int, nbytes: int, network: Network) -> float:
    """The seconds of an all-reduce by the algorithm that is predicted to be the fastest."""
    return min(predict(name, size, nbytes, network).seconds for name in names("allreduce")) if size > 1 else 0.0


def predict_on(channel: Channel, algorithm: str, nbytes: int, network: Network) -> CostPrediction:
    """The time of an all-reduce on a channel, with its hosts and lanes. The engine's own algorithm has no lanes."""
    lanes = 1 if algorithm == NATIVE else channel.lanes_for(build("allreduce", algorithm), nbytes)
    return predict(algorithm, channel.size, nbytes, network, hosts=channel.hosts, lanes=lanes)


def closed_form(algorithm: str, size: int, nbytes: int, network: Network) -> float | None:
    """The seconds of an all-reduce by formula. None: no formula is exact.

    >>> closed_form("ring", 8, 8_000_000, Network(latency=0.0, bandwidth=1e9))
    0.014
    """
    equal = not network.links and network.inside is None and not network.slow
    if algorithm not in FORMULAS or not equal or (algorithm in POWER_OF_TWO_ONLY and size & (size - 1)):
        return None
    return FORMULAS[algorithm](size, nbytes, network)


def _naive(p: int, n: int, net: Network) -> float:
    if p == 1:
        return 0.0
    return 2 * net.latency + (p - 1) * (2 * _port(net, n) + n * net.combine)


def _sharded(p: int, n: int, net: Network) -> float:
    if p == 1:
        return 0.0
    return 2 * net.latency + (p - 1) * (2 * _port(net, n / p) + n / p * net.combine)


def _ring(p: int, n: int, net: Network) -> float:
    return (p - 1) * (2 * (net.latency + _port(net, n / p)) + n / p * net.combine)


def _recursive_doubling(p: int, n: int, net: Network) -> float:
    return _levels(p) * (net.latency + _port(net, n) + n * net.combine)


def _halving_doubling(p: int, n: int, net: Network) -> float:
    share = (p - 1) / p * n
    return 2 * _levels(p) * (net.latency + net.per_message) + share * (2 / net.bandwidth + net.combine)


def _tree(p: int, n: int, net: Network) -> float:
    return _levels(p) * (2 * (net.latency + _port(net, n)) + n * net.combine)


def _levels(p: int) -> int:
    return p.bit_length() - 1


def _port(net: Network, nbytes: float) -> float:
    """Seconds during which a message occupies a port."""
    return net.per_message + nbytes / net.bandwidth


FORMULAS: dict[str, Callable[[int, int, Network], float]] = {
    "naive": _naive,
    "sharded": _sharded,
    "ring": _ring,
    "recursive_doubling": _recursive_doubling,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
}
POWER_OF_TWO_ONLY = frozenset({"recursive_doubling", "halving_doubling", "tree"})
"""Exact only if the number of ranks is a power of two."""
