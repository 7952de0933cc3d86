"""Chunks, buffers and carriers: where data lies, where it lands, how it is merged."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from syncline.collectives.base import Move
from syncline.collectives.channel import BufferPool
from syncline.collectives.executor import DenseChunks, SeparateChunks, chunk_edges
from syncline.runtime import RealRuntime
from syncline.transports import Op

repeatable = settings(derandomize=True, deadline=None)


@repeatable
@given(st.integers(0, 10**12), st.integers(1, 500))
def test_bounds_cover_and_balance(numel: int, chunks: int) -> None:
    """Chunks follow each other from 0 to the end, and their sizes differ by one at most."""
    edges = chunk_edges(numel, chunks)
    sizes = [stop - start for start, stop in pairwise(edges)]
    assert len(sizes) == chunks
    assert (edges[0], edges[-1]) == (0, numel)
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) <= 1


@pytest.fixture
def buffers() -> BufferPool:
    return BufferPool(RealRuntime())


def test_buffers_are_reused(buffers: BufferPool) -> None:
    """What is given back is taken again by who needs that length, and by one alone."""
    first = buffers.take(64)
    assert (first.dtype, first.shape) == (torch.uint8, (64,))
    buffers.give(first)
    other = buffers.take(65)
    assert other.numel() == 65
    again, third = buffers.take(64), buffers.take(64)
    assert again is first
    assert third.data_ptr() != first.data_ptr()


def test_buffers_of_no_length(buffers: BufferPool) -> None:
    """A buffer of no bytes can be taken and given like any other."""
    empty = buffers.take(0)
    assert empty.numel() == 0
    buffers.give(empty)
    assert buffers.take(0) is empty


def test_buffers_up_to_the_limit() -> None:
    """All that fits the limit is kept, and what was taken again makes room."""
    buffers = BufferPool(RealRuntime(), max_bytes=100)
    small, large = buffers.take(40), buffers.take(60)
    buffers.give(small)
    buffers.give(large)
    assert buffers.take(40) is small
    assert buffers.take(60) is large
    buffers.give(large)
    buffers.give(small)
    assert buffers.take(60) is large


def test_buffers_beyond_the_limit() -> None:
    """One that would pass the limit makes a new start: the others are let go, it is kept."""
    buffers = BufferPool(RealRuntime(), max_bytes=100)
    small, large = buffers.take(40), buffers.take(61)
    buffers.give(small)
    buffers.give(large)
    assert buffers.take(40) is not small
    assert buffers.take(61) is large
    buffers.give(small)
    assert buffers.take(40) is small


def test_a_buffer_larger_than_the_limit() -> None:
    """It is handed out, and never kept."""
    buffers = BufferPool(RealRuntime(), max_bytes=100)
    huge = buffers.take(101)
    assert huge.numel() == 101
    buffers.give(huge)
    assert buffers.take(101) is not huge


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


OPS: list[tuple[Op, list[int]]] = [
    ("sum", [1, 2, 13, 8, 5, 6]),
    ("min", [1, 2, 3, 4, 5, 6]),
    ("max", [1, 2, 10, 4, 5, 6]),
    ("product", [1, 2, 30, 16, 5, 6]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize(("op", "expected"), OPS)
def test_dense_merge_combines(op: Op, expected: list[int], dtype: torch.dtype, buffers: BufferPool) -> None:
    """What lands for a chunk is combined with it element by element, and the rest is left alone."""
    tensor = torch.tensor([1, 2, 3, 4, 5, 6], dtype=dtype)
    chunks = DenseChunks(tensor, [0, 2, 4, 6], op, buffers)
    move = Move(peer=0, chunk=1, combine=True)
    place = chunks.receive_buffer(move)
    place.copy_(as_bytes(torch.tensor([10, 4], dtype=dtype)))
    assert tensor.tolist() == [1, 2, 3, 4, 5, 6]
    chunks.merge(move, place)
    assert tensor.tolist() == expected
    assert tensor.dtype == dtype


def test_dense_merge_gives_the_buffer_back(buffers: BufferPool) -> None:
    """The buffer that was combined is the next to be landed in."""
    chunks = DenseChunks(torch.zeros(4), [0, 2, 4], "sum", buffers)
    move = Move(peer=0, chunk=0, combine=True)
    place = chunks.receive_buffer(move)
    place.zero_()
    chunks.merge(move, place)
    assert chunks.receive_buffer(Move(peer=1, chunk=1, combine=True)) is place


def test_dense_moves_without_a_copy(buffers: BufferPool) -> None:
    """What is not combined is read from its place and lands in its place."""
    tensor = torch.arange(6, dtype=torch.int16)
    chunks = DenseChunks(tensor, [0, 2, 4, 6], "sum", buffers)
    move = Move(peer=0, chunk=1, width=2)
    assert chunks.nbytes(move) == 8
    assert chunks.read(move).view(torch.int16).tolist() == [2, 3, 4, 5]
    place = chunks.receive_buffer(move)
    assert place.data_ptr() == tensor.data_ptr() + 4
    place.copy_(as_bytes(torch.tensor([7, 8, 9, 10], dtype=torch.int16)))
    chunks.merge(move, place)
    assert tensor.tolist() == [0, 1, 7, 8, 9, 10]


def test_dense_shapes(buffers: BufferPool) -> None:
    """Any shape is one line of elements; chunks may be empty, and so may the tensor."""
    matrix = torch.arange(6.0).reshape(2, 3)
    chunks = DenseChunks(matrix, [0, 0, 6], "sum", buffers)
    assert [chunks.nbytes(Move(0, 0)), chunks.nbytes(Move(0, 1))] == [0, 24]
    whole = Move(0, 0, width=2, combine=True)
    place = chunks.receive_buffer(whole)
    place.copy_(as_bytes(torch.ones(6)))
    chunks.merge(whole, place)
    assert matrix.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    empty = DenseChunks(torch.empty(0), [0, 0], "max", buffers)
    nothing = Move(0, 0, combine=True)
    empty.merge(nothing, empty.receive_buffer(nothing))
    assert empty.nbytes(nothing) == empty.read(nothing).numel() == 0


def test_pieces() -> None:
    """Pieces are moved by their number, from and to the tensors themselves."""
    pieces = {0: torch.arange(3.0), 7: torch.zeros(2, 2, dtype=torch.int16)}
    chunks = SeparateChunks(pieces)
    assert [chunks.nbytes(Move(0, 0)), chunks.nbytes(Move(0, 7))] == [12, 8]
    assert chunks.read(Move(0, 0)) is pieces[0]
    assert chunks.receive_buffer(Move(0, 7)) is pieces[7]
    chunks.merge(Move(0, 7), pieces[7])
    with pytest.raises(AssertionError, match="moved, not combined"):
        chunks.merge(Move(0, 7, combine=True), pieces[7])
