"""Hierarchical all-reduce: links inside a host are fast, links between hosts slow, so little data crosses hosts.

With g ranks on each of N hosts (here g = 2, N = 2; chunks a b | c d, ``+`` combines)::

    round        host 0: 0          1            host 1: 2          3
    1  inside    cd→1  + ab    ab→0  + cd        cd→3  + ab    ab→2  + cd    reduce-scatter of g shards
    2  across    b→2   + a     d→3   + c         a→0   + b     c→1   + d     a ring for each shard,
    3            a→2     b     c→3     d         b→0     a     d→1     c       among the same ranks of all hosts
    4  inside    ab→1    cd    cd→0    ab        ab→3    cd    cd→2    ab    all-gather

2 + 2(N−1) rounds. With one rank per host, or unknown hosts, it is a plain ring. If hosts have different numbers of
ranks, the first rank of each is its leader: a tree reduces inside, the leaders form a ring, a tree broadcasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from syncline.collectives.base import Round, Setting, embed
from syncline.collectives.ring import ring
from syncline.collectives.sharded import sharded_allgather, sharded_reduce_scatter
from syncline.collectives.tree import tree_broadcast, tree_reduce

__all__ = ["hierarchical", "hierarchical_chunks"]


def hierarchical(rank: int, setting: Setting) -> Iterator[Round]:
    """All-reduce: inside each host, across the hosts, inside again."""
    groups, home = _groups(setting.size, setting.hosts)
    mine = groups[home[rank]]
    if len({len(group) for group in groups}) == 1:
        return _by_shards(rank, groups, mine)
    return _by_leaders(rank, groups, mine)


def hierarchical_chunks(size: int, hosts: tuple[int, ...]) -> int:
    """Number of chunks: one per rank if hosts have equal numbers of ranks, else one per host."""
    groups, _ = _groups(size, hosts)
    return size if len({len(group) for group in groups}) == 1 else len(groups)


@lru_cache(maxsize=16)
def _groups(size: int, hosts: tuple[int, ...]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The ranks of each host, and for each rank the index of its host in that list."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts or range(size)):
        members.setdefault(host, []).append(rank)
    place = {host: number for number, host in enumerate(members)}
    return [tuple(ranks) for ranks in members.values()], [place[host] for host in hosts or range(size)]


def _by_shards(rank: int, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> Iterator[Round]:
    across, inside, place = len(groups), len(mine), mine.index(rank)
    local = Setting(inside, inside)
    equals = tuple(group[place] for group in groups)
    yield from embed(sharded_reduce_scatter(place, local), mine, scale=across)
    yield from embed(ring(groups.index(mine), Setting(across, across)), equals, offset=place * across)
    yield from embed(sharded_allgather(place, local), mine, scale=across)


def _by_leaders(rank: int, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> Iterator[Round]:
    across, place = len(groups), mine.index(rank)
    local = Setting(len(mine), across)
    largest = Setting(max(map(len, groups)), across)
    leaders = tuple(group[0] for group in groups)
    idle = sum(1 for _ in tree_reduce(0, largest)) - sum(1 for _ in tree_reduce(0, local))
    yield from embed(tree_reduce(place, local), mine)
    yield from (Round() for _ in range(idle))  # as many rounds as the largest host
    if place == 0:
        yield from embed(ring(groups.index(mine), Setting(across, across)), leaders)
    else:
        yield from (Round() for _ in range(2 * (across - 1)))
    yield from (Round() for _ in range(idle))
    yield from embed(tree_broadcast(place, local), mine)
