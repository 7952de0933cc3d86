"""`broadcast_object`: plain trees from one rank to all, nothing pickled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import syncline as sl

TREE: dict[Any, Any] = {
    "text": "naïve \ud83d",
    7: [1, -2.5, True, None, float("inf"), 2**200],
    None: {"empty": [{}, [], (), "", b""]},
    "bytes": b"\x00\xff",
    "tensors": (torch.arange(6).view(2, 3).t(), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 2)),
    "arrays": [np.arange(3, dtype=np.int16), np.float32(0.5)],
    "sets": {(0, 1): {2, "a"}},
}


def same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and np.array_equal(first, second)
    return bool(first == second)


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_gets_the_roots_tree(ranks: int) -> None:
    def share(world: sl.World) -> Any:
        return sl.broadcast_object(TREE if world.rank == ranks - 1 else None, root=ranks - 1)

    expected = {**TREE, "arrays": [TREE["arrays"][0], 0.5]}
    for found in sl.simulate(share, ranks=ranks, check=True).results:
        assert same(found, expected)
        assert found["tensors"][0].data_ptr() != TREE["tensors"][0].data_ptr()


def test_it_goes_over_a_team() -> None:
    def share(world: sl.World) -> Any:
        team = world.group([0, 2])
        return sl.broadcast_object({"rank": world.rank}, root=1, group=team) if team.member else None

    assert sl.simulate(share, ranks=3).results == ({"rank": 2}, None, {"rank": 2})


class Point:
    pass


def deep() -> list[Any]:
    tree: list[Any] = []
    for _ in range(100_000):
        tree = [tree]
    return tree


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: {"model": [0, Point()]}, r"value\.model\[1\] is a Point"),
        (lambda: {1 + 2j}, r"value\[0\] is a complex"),
        (lambda: {Point: 2}, "a key of value is a type"),
        (lambda: torch.zeros(2, device="meta"), "value is a .*meta"),
        (deep, "nested"),
        (lambda: 10**5000, "too many digits"),
    ],
)
def test_unsupported_objects_are_refused_on_every_rank(make: Callable[[], Any], words: str, ranks: int) -> None:
    def share(world: sl.World) -> None:
        with pytest.raises(sl.errors.IncompatibleError, match=words):
            sl.broadcast_object(make() if world.rank == 0 else None)
        assert sl.broadcast_object(world.rank) == 0, "and the ranks are not out of step"

    sl.simulate(share, ranks=ranks)


def test_kinds_of_dict_and_tuple_come_back_plain() -> None:
    with sl.init():
        found = sl.broadcast_object([OrderedDict(a=torch.Size([2]))])
    assert found == [{"a": (2,)}]
    assert type(found[0]) is dict
    assert type(found[0]["a"]) is tuple
