"""Two binary trees over the same ranks, each carrying half of the data in a pipeline (Sanders, Speck and Träff, 2009).

In a full binary tree numbered in order, the leaves have the even positions. The second tree is shifted (p odd) or
mirrored (p even), so its leaves are inner ranks of the first. Each rank is an inner one in at most one tree::

    p = 7            3                           2
                  ╱     ╲                     ╱     ╲
    tree 0       1       5       tree 1      0       4       (positions shifted by one)
                ╱ ╲     ╱ ╲                 ╱ ╲     ╱ ╲
               0   2   4   6               6   1   3   5

With p even, a full tree of p − 1 ranks hangs below the last rank. Each half is cut into c chunks. Chunk k
climbs from height h to h + 1 in round h + k + 1 and descends from depth d to d + 1 in round H + d + k + 1,
where H is the height; both ways and both trees overlap, so there are 2H + c − 1 rounds and no rank sends more
than 2n bytes::

    p = 3, c = 2:  tree 0: 1 over 0 and 2     tree 1: 0 over 2 and 1        (a0 a1 | b0 b1 the chunks)
    round 1     0: a0→1, +b0 from 2, 1     1: +a0 from 0, 2, b0→0       2: a0→1, b0→0
    round 2     0: a1→1, +b1, b0→2, 1      1: +a1, b1→0, a0→0, 2, ← b0  2: a1→1, b1→0, ← a0, b0
    round 3     0: ← a1, b1→2, 1           1: a1→0, 2, ← b1             2: ← a1, b1
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from syncline.collectives.base import Move, Round, Setting

__all__ = ["Tree", "build_trees", "double_tree"]


class Tree(NamedTuple):
    """For each rank: its parent (None at the root), its children, its height above the lowest leaf and its depth."""

    parent: tuple[int | None, ...]
    children: tuple[tuple[int, ...], ...]
    height: tuple[int, ...]
    depth: tuple[int, ...]


def double_tree(rank: int, setting: Setting) -> Iterator[Round]:
    """All-reduce: `setting.chunks` is 2c, the first c go through tree 0, the others through tree 1."""
    if setting.size == 1:
        return
    trees = build_trees(setting.size)
    pieces = setting.chunks // 2
    top = max(tree.height[root] for tree in trees for root in range(setting.size) if tree.parent[root] is None)
    for step in range(2 * top + pieces - 1):
        sends: list[Move] = []
        recvs: list[Move] = []
        for number, tree in enumerate(trees):
            _up(rank, tree, step, number * pieces, pieces, sends, recvs)
            _down(rank, tree, step - top, number * pieces, pieces, sends, recvs)
        yield Round(tuple(sends), tuple(recvs))


def _up(rank: int, tree: Tree, step: int, first: int, pieces: int, sends: list[Move], recvs: list[Move]) -> None:
    parent, k = tree.parent[rank], step - tree.height[rank]
    if parent is not None and 0 <= k < pieces:
        sends.append(Move(parent, first + k))
    for child in tree.children[rank]:
        k = step - tree.height[child]
        if 0 <= k < pieces:
            recvs.append(Move(child, first + k, combine=True))


def _down(rank: int, tree: Tree, step: int, first: int, pieces: int, sends: list[Move], recvs: list[Move]) -> None:
    k = step - tree.depth[rank]
    if 0 <= k < pieces:
        sends.extend(Move(child, first + k) for child in tree.children[rank])
    parent = tree.parent[rank]
    if parent is not None and 0 <= k + 1 < pieces:  # what the parent, one less deep, sends in this step
        recvs.append(Move(parent, first + k + 1))


@lru_cache(maxsize=64)
def build_trees(size: int) -> tuple[Tree, Tree]:
    """The two trees.

    >>> first, second = build_trees(7)
    >>> first.parent.index(None), second.parent.index(None)
    (3, 2)
    """
    places = size - 1 if size % 2 == 0 else size
    parents: list[int | None] = [None] * places
    top = _in_order(0, places, parents)
    if size % 2:
        forward, backward = list(range(size)), [(place - 1) % size for place in range(size)]
    else:
        parents[top] = places  # the extra rank becomes the root
        parents.append(None)
        forward, backward = list(range(size)), [size - 1 - place for place in range(size)]
    return _tree(parents, forward), _tree(parents, backward)


def _in_order(low: int, high: int, parents: list[int | None]) -> int:
    """Build a full binary tree of the positions from low to high (an odd number). Returns its root."""
    if high - low == 1:
        return low
    left = (high - low - 1) // 2
    left += 1 - left % 2  # both subtrees are full, so both sizes are odd
    root = low + left
    parents[_in_order(low, root, parents)] = root
    parents[_in_order(root + 1, high, parents)] = root
    return root


def _tree(parents: list[int | None], rank_of: list[int]) -> Tree:
    """The tree in terms of ranks."""
    size = len(parents)
    parent: list[int | None] = [None] * size
    children: list[list[int]] = [[] for _ in range(size)]
    for place, above in enumerate(parents):
        if above is not None:
            parent[rank_of[place]] = rank_of[above]
            children[rank_of[above]].append(rank_of[place])

    def height(rank: int) -> int:
        return max((height(child) + 1 for child in children[rank]), default=0)

    def depth(rank: int) -> int:
        above = parent[rank]
        return 0 if above is None else depth(above) + 1

    return Tree(
        tuple(parent),
        tuple(tuple(below) for below in children),
        tuple(height(rank) for rank in range(size)),
        tuple(depth(rank) for rank in range(size)),
    )
