"""Times of the all-reduce schedules as formulas, for equal links.

n bytes, p ranks, L = log₂p; α latency, β = 1/bandwidth, γ seconds a
combined byte. Doubling, halving-doubling and the tree have their exact formulas for p a power of two. Otherwise the
extra ranks fold in, about 2α + 2nβ + nγ more; but ranks with no partner run ahead, and their messages meet the folded
ones at a port: there `play` counts, and no formula is offered.

| schedule            | seconds                                            |
|---------------------|----------------------------------------------------|
| naive               | 2α + 2(p−1)nβ + (p−1)nγ                            |
| sharded             | 2α + 2(p−1)/p·nβ + (p−1)/p·nγ                      |
| ring                | 2(p−1)α + 2(p−1)/p·nβ + (p−1)/p·nγ                 |
| recursive_doubling  | L(α + nβ + nγ)                                     |
| halving_doubling    | 2Lα + 2(p−1)/p·nβ + (p−1)/p·nγ                     |
| tree                | 2L(α + nβ) + Lnγ                                   |

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
    return FORMS[algorithm](size, nbytes, network.latency, 1 / network.bandwidth, network.combine)


def _naive(p: int, n: int, alpha: float, beta: float, gamma: float) -> float:
    return 2 * alpha + 2 * (p - 1) * n * beta + (p - 1) * n * gamma if p > 1 else 0.0


def _sharded(p: int, n: int, alpha: float, beta: float, gamma: float) -> float:
    share = (p - 1) / p * n
    return 2 * alpha + 2 * share * beta + share * gamma if p > 1 else 0.0


def _ring(p: int, n: int, alpha: float, beta: float, gamma: float) -> float:
    share = (p - 1) / p * n
    return 2 * (p - 1) * alpha + 2 * share * beta + share * gamma


def _recursive_doubling(p: int, n: int, alpha: float, beta: float, gamma: float) -> float:
    levels = p.bit_length() - 1
    return levels * (alpha + n * beta + n * gamma)


def _halving_doubling(p: int, n: int, alpha: float, beta: float, gamma: float) -> float:
    levels = p.bit_length() - 1
    share = (p - 1) / p * n
    return 2 * levels * alpha + 2 * share * beta + share * gamma


def _tree(p: int, n: int, alpha: float, beta: float, gamma: float) -> float:
    levels = p.bit_length() - 1
    return 2 * levels * (alpha + n * beta) + levels * n * gamma


FORMS: dict[str, Callable[[int, int, float, float, float], float]] = {
    "naive": _naive,
    "sharded": _sharded,
    "ring": _ring,
    "recursive_doubling": _recursive_doubling,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
}
POWERS_ALONE = frozenset({"recursive_doubling", "halving_doubling", "tree"})
"""Exact only where the number of ranks is a power of two."""
