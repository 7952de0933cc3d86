"""Times of the all-reduce schedules as formulas, for equal links.

n bytes, p ranks, L = log₂p; α latency, β = 1/bandwidth, o seconds a message, γ seconds a combined byte. Doubling,
halving-doubling and the tree have their exact formulas for p a power of two. Otherwise the extra ranks fold in, about
2(α + o) + 2nβ + nγ more; but ranks with no partner run ahead, and their messages meet the folded ones at a port: there
`play` counts, and no formula is offered.

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

from syncline.transports import Network

__all__ = ["FORMS", "closed_form"]


def closed_form(algorithm: str, size: int, nbytes: int, network: Network) -> float | None:
    """The formula's seconds for an all-reduce, or None where no formula is exact.

    >>> closed_form("ring", 8, 8_000_000, Network(latency=0.0, bandwidth=1e9))
    0.014
    """
    equal = not network.links and network.inside is None and not network.slow
    if algorithm not in FORMS or not equal or (algorithm in POWERS_ALONE and size & (size - 1)):
        return None
    return FORMS[algorithm](size, nbytes, network)


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
    """How long a message holds a port."""
    return net.per_message + nbytes / net.bandwidth


FORMS: dict[str, Callable[[int, int, Network], float]] = {
    "naive": _naive,
    "sharded": _sharded,
    "ring": _ring,
    "recursive_doubling": _recursive_doubling,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
}
POWERS_ALONE = frozenset({"recursive_doubling", "halving_doubling", "tree"})
"""Exact only where the number of ranks is a power of two."""
