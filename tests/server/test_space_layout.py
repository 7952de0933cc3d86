"""Shards and cuts: every key has one place, and requests are cut the same way each time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ProtocolError
from syncline.server.space import SpaceLayout, check_keys, parse_keys


@st.composite
def layouts(draw: st.DrawFn) -> SpaceLayout:
    numel = draw(st.integers(1, 60))
    bounds = draw(st.sets(st.integers(1, 60), max_size=4))
    return SpaceLayout(numel, draw(st.integers(1, 8)), (0, *sorted(bounds)), draw(st.integers(1, 20)))


@given(layouts())
def test_shards_are_contiguous_and_nearly_equal(layout: SpaceLayout) -> None:
    shards = [layout.shard(server) for server in range(layout.servers)]
    assert [first for first, _ in shards] == [0, *(after for _, after in shards)][:-1]
    assert shards[-1][1] == layout.numel
    sizes = [after - first for first, after in shards]
    assert max(sizes) - min(sizes) <= 1


@given(layouts(), st.data())
def test_a_range_is_split_at_shards_groups_and_pieces(layout: SpaceLayout, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, layout.numel))
    after = data.draw(st.integers(first, layout.numel))
    parts = layout.split_range(first, after)
    assert [key for part in parts for key in range(part.first, part.first + part.count)] == list(range(first, after))
    assert [place for part in parts for place in range(part.start, part.stop)] == list(range(after - first))
    for part in parts:
        low, high = layout.shard(part.server)
        assert low <= part.first < part.first + part.count <= high
        assert part.count <= layout.piece
        assert not any(part.first < bound < part.first + part.count for bound in layout.bounds)
    whole = {(part.server, part.first + part.count) for part in layout.split_range(0, layout.numel)}
    ends = {(part.server, part.first + part.count) for part in parts[:-1]}
    assert ends <= whole, "a part of a range is cut elsewhere than the whole"


@given(layouts(), st.data())
def test_a_list_is_split_by_its_keys(layout: SpaceLayout, data: st.DataObject) -> None:
    keys = sorted(data.draw(st.sets(st.integers(0, layout.numel - 1))))
    parts = layout.split_keys(torch.tensor(keys, dtype=torch.int64))
    assert [place for part in parts for place in range(part.start, part.stop)] == list(range(len(keys)))
    edges = layout.edges
    for part in parts:
        low, high = layout.shard(part.server)
        piece = edges[edges.index(part.first) + 1]
        assert all(max(low, part.first) <= key < min(high, piece) for key in keys[part.start : part.stop])
    by_server = layout.split(torch.tensor(keys, dtype=torch.int64))
    assert [part for server in by_server for part in by_server[server]] == parts


@pytest.mark.parametrize(
    ("keys", "found"),
    [(None, (0, 10)), (range(2, 5), (2, 5)), (slice(3), (0, 3)), (slice(-2, None), (8, 10)), ((4, 4), (4, 4))],
)
def test_forms_of_a_range(keys: object, found: tuple[int, int]) -> None:
    assert parse_keys(keys, 10) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (range(0, 8, 2), "steps of 2"),
        ((3, 2), "keys 3 to 2 do not lie in a space of 10"),
        ((-1, 2), "keys -1 to 2 do not lie"),
        ((0, 11), "do not lie in a space of 10 keys"),
        (torch.tensor([1, 1]), "1 at place 0 comes twice"),
        (torch.tensor([0, 5, 4]), "5 at place 1 comes before a smaller one"),
        (torch.tensor([9, 10]), "keys 9 to 10 do not lie between 0 and 10"),
        (torch.tensor([-1, 3]), "do not lie"),
        (torch.tensor([1.0]), "int64, not torch.float32"),
        (torch.tensor([[1]]), r"int64, not torch.int64\[1, 1\]"),
    ],
)
def test_invalid_keys_are_refused(keys: object, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse_keys(keys, 10)  # type: ignore[arg-type]


def test_keys_so_far_apart_that_their_difference_overflows() -> None:
    with pytest.raises(ProtocolError, match=r"sorted|do not lie"):
        check_keys(torch.tensor([-(2**63), 2**63 - 1, 0]), 0, 10)
    with pytest.raises(ProtocolError, match=r"sorted|do not lie"):
        check_keys(torch.tensor([2**63 - 1, -(2**63)]), 0, 10)
