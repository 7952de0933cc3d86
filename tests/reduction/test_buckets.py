"""Which gradients share a bucket."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from syncline.errors import SpecError
from syncline.reduction.buckets import BucketItem, BucketSet, assign_buckets
from syncline.reduction.control import ControlNumbers, control_length, write_control

MB = 1 << 20


def test_the_first_bucket_is_small_and_the_others_are_as_asked() -> None:
    items = [BucketItem(MB // 2, contiguous=False)] * 8
    assert assign_buckets(items, range(8), 2 * MB) == [(0, 1), (2, 3, 4, 5), (6, 7)]


def test_a_large_gradient_is_a_bucket_alone() -> None:
    items = [BucketItem(100), BucketItem(4 * MB), BucketItem(100), BucketItem(3 * MB, contiguous=False)]
    assert assign_buckets(items, range(4), 25 * MB) == [(1,), (0, 2, 3)]


def test_kinds_do_not_share_a_bucket() -> None:
    items = [BucketItem(MB, "a", False), BucketItem(10, "b"), BucketItem(MB, "a", False), BucketItem(10, "b")]
    assert assign_buckets(items, [0, 1, 2, 3], MB) == [(0,), (2,), (1, 3)]


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from("ab")), max_size=30), st.integers(1, 8000))
def test_every_gradient_has_one_place(sizes: list[tuple[int, str]], bucket_bytes: int) -> None:
    items = [BucketItem(nbytes, kind) for nbytes, kind in sizes]
    buckets = assign_buckets(items, range(len(items)), bucket_bytes)
    assert sorted(number for bucket in buckets for number in bucket) == list(range(len(items)))
    assert all(len({items[number].kind for number in bucket}) == 1 for bucket in buckets)


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match="bucket_bytes=0"):
        assign_buckets([], [], 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_the_control_numbers_follow_the_views(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(2, 3, dtype=dtype)), nn.Parameter(torch.zeros(5, dtype=dtype))]
    found = BucketSet(parameters, [1, 0], bucket_bytes=MB)
    for index, parameter in enumerate(parameters):
        assert found.views[index].shape == parameter.shape
        assert found.views[index].dtype == parameter.dtype
        found.views[index].fill_(index + 1)
    assert found.control.dtype in (torch.float32, torch.float64)  # whatever the gradients are: it counts
    write_control(found.control, True, 0.5, False, [True, False], [False, True])
    told = ControlNumbers.read(found.control)
    assert (told.active, told.weight, told.not_finite, told.dense, told.sparse) == (1, 0.5, 0, (1, 0), (0, 1))
    assert all(bool((found.views[index] == index + 1).all()) for index in range(2))


def test_channels_last_weights_keep_their_strides() -> None:
    weight = nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    found = BucketSet([weight], [0], bucket_bytes=1)  # large, but not contiguous: it goes into a bucket
    assert found.views[0].stride() == weight.stride()


def test_a_set_without_places_carries_the_control_numbers_alone() -> None:
    found = BucketSet([nn.Parameter(torch.zeros(3))], [], bucket_bytes=MB)
    assert [bucket.items for bucket in found.buckets] == [()]
    assert found.control.numel() == control_length(1)
    assert found.outside == [0]


def test_the_control_numbers_go_last_and_hold_nothing_back() -> None:
    small, large = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3000))
    found = BucketSet([small, large, small], [0, 2, 1], bucket_bytes=10_000)
    assert [bucket.items for bucket in found.buckets] == [(1,), (0, 2)]
    alone = BucketSet([large], [0], bucket_bytes=10_000)
    assert [bucket.items for bucket in alone.buckets] == [(0,), ()]
    assert found.in_place == {1}
