"""Requests and answers as bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.compat.horovod.messages import (
    DTYPES,
    KINDS,
    OPS,
    Departure,
    MessageReader,
    MessageWriter,
    OperationFailure,
    OperationPlan,
    OperationRequest,
    TensorInfo,
)
from syncline.errors import ProtocolError

numbers = st.integers(0, 2**62)
parts = st.builds(TensorInfo, st.sampled_from(DTYPES), st.lists(numbers, max_size=4).map(tuple))
requests = st.builds(
    OperationRequest,
    st.sampled_from(KINDS),
    st.text(max_size=40),
    st.lists(parts, max_size=3).map(tuple),
    st.sampled_from(OPS),
    st.integers(-1, 1000),
    st.floats(allow_nan=False),
    st.floats(allow_nan=False),
    st.sampled_from(["cpu", "cuda"]),
    st.lists(numbers, max_size=5).map(tuple),
    st.text(max_size=40),
)
plans = st.builds(
    OperationPlan, requests, st.integers(-1, 5000), st.lists(st.lists(numbers).map(tuple), max_size=4).map(tuple)
)


@given(plans)
def test_what_is_packed_is_read_again(plan: OperationPlan) -> None:
    writer = MessageWriter()
    plan.pack(writer)
    others = OperationFailure("a", "b", (1, 2), (3,)), Departure(4, "why", True, 3, ((0, 7), (1, 2)))
    for other in others:
        other.pack(writer)
    reader = MessageReader(writer.data, peer=3)
    assert OperationPlan.read(reader) == plan
    assert (OperationFailure.read(reader), Departure.read(reader)) == others
    assert reader.left() == 0


@given(requests, st.data())
def test_cut_or_changed_messages_are_handled(request: OperationRequest, data: st.DataObject) -> None:
    writer = MessageWriter()
    request.pack(writer)
    raw = bytearray(writer.data)
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.integers(0, 255))
    found: object
    try:
        found = OperationRequest.read(MessageReader(raw, peer=3))
    except ProtocolError as error:
        found = error.peer
    assert isinstance(found, OperationRequest) or found == 3


def test_wrong_length_is_refused() -> None:
    with pytest.raises(ProtocolError, match="rank 5 sent an invalid message"):
        MessageReader(b"\x01\x02", peer=5).numbers(1 << 40)


def test_dtypes_keep_their_numbers() -> None:
    assert DTYPES[7] is torch.float32
