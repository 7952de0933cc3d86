"""A global batch of one size on any number of workers, in micro-batches; batches onto a device."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

from syncline.data import Cursor, MicroBatches, move
from syncline.errors import IncompatibleError, SpecError, UnsupportedError
from tests.data.cases import Counting, Mixed, Noisy, Numbers, flat, joined


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(0, 15), st.integers(1, 8), st.integers(5, 50))
def test_steps_have_the_same_samples_on_any_number_of_ranks(size: int, more: int, micro: int, length: int) -> None:
    batch = size + more
    alone = [
        sorted(index for part in step for index in flat(part.batch))
        for step in MicroBatches(Numbers(length), global_batch=batch, rank=0, size=1)
    ]
    ranks = [
        MicroBatches(Numbers(length), global_batch=batch, micro_batch=micro, rank=rank, size=size)
        for rank in range(size)
    ]
    found: list[list[int]] = [[] for _ in alone]
    weights = [0.0 for _ in alone]
    totals = [0.0 for _ in alone]
    for each in ranks:
        count = 0
        for number, step in enumerate(each):
            parts = list(step)
            indices = [flat(part.batch) for part in parts]
            assert max(map(len, indices)) <= micro
            assert [part.fraction for part in parts] == [len(part) / step.count for part in indices]
            assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
            assert step.weight == pytest.approx(step.count * size / batch)
            found[number] += joined(indices)
            weights[number] += step.weight
            totals[number] = step.total
            count += 1
        assert count == len(each)
    assert [sorted(step) for step in found] == alone
    assert weights == pytest.approx(totals)
    assert {each.uneven for each in ranks} == {len({len(each) for each in ranks}) > 1}


def test_the_gradient_is_that_of_the_whole_batch() -> None:
    """Fractions weigh micro-batches, weights weigh ranks."""
    x = torch.randn(23, 3, dtype=torch.float64)
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def gradient(samples: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((samples @ w).square().mean(), w)[0]

    total = torch.zeros(3, dtype=torch.float64)
    weights = 0.0
    for rank in range(4):
        for step in MicroBatches(Numbers(23), global_batch=23, micro_batch=2, rank=rank, size=4):
            for batch, fraction, _ in step:
                total += step.weight * fraction * gradient(x[batch])
            weights += step.weight
    assert weights == pytest.approx(4.0)
    assert torch.allclose(total / weights, gradient(x))


def test_a_loaders_batch_size_is_the_micro_batch() -> None:
    steps = MicroBatches(DataLoader(Numbers(20), batch_size=3), global_batch=20, rank=1, size=2)
    assert steps.micro_batch == 3
    assert [[len(part.batch) for part in step] for step in steps] == [[3, 3, 2, 2]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_resumed_on_another_number_of_ranks(size: int) -> None:
    def samples(rank: int, ranks: int, cursor: Cursor) -> list[int]:
        steps = MicroBatches(Numbers(40), global_batch=6, micro_batch=2, rank=rank, size=ranks, cursor=cursor)
        return [index for step in steps for part in step for index in flat(part.batch)]

    steps = MicroBatches(Numbers(40), global_batch=6, rank=0, size=1)
    before: list[int] = []
    for _, step in zip(range(3), steps, strict=False):
        before += [index for part in step for index in flat(part.batch)]
        place = steps.cursor.state_dict()
    assert place["samples"] == 18
    for rank in range(size):
        cursor = Cursor()
        cursor.load_state_dict(place)
        before += samples(rank, size, cursor)
        assert cursor.epoch == 1
    assert sorted(before) == list(range(40))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_loader_processes() -> None:
    data: DataLoader[Any] = DataLoader(Noisy(12), batch_size=2, num_workers=2)
    found = []
    for rank in (0, 1):
        for step in MicroBatches(data, global_batch=8, rank=rank, size=2):
            found += [(int(index), float(drawn)) for part in step for index, drawn in zip(*part.batch[:2], strict=True)]
    assert sorted(index for index, _ in found) == list(range(12))
    assert len({drawn for _, drawn in found}) == 12


def test_a_step_is_read_to_its_end() -> None:
    steps = iter(MicroBatches(Numbers(12), global_batch=6, micro_batch=2, rank=0, size=1))
    next(iter(next(steps)))
    with pytest.raises(IncompatibleError, match=r"left with 2 of its 3 micro-batches unread"):
        next(steps)


def test_an_epoch_in_the_middle_may_end_otherwise() -> None:
    steps = MicroBatches(Numbers(12), global_batch=4, rank=0, size=2)
    assert not steps.uneven
    steps.cursor.load_state_dict({"epoch": 0, "samples": 3})
    assert [(steps.uneven, len(list(step))) for step in steps] == [(True, 1)] * 3
    assert not steps.uneven


def test_data_that_micro_batches_refuse() -> None:
    with pytest.raises(IncompatibleError, match="a global batch of 3 cannot be split over 4 workers"):
        MicroBatches(Numbers(12), global_batch=3, rank=0, size=4)
    with pytest.raises(IncompatibleError, match="3 samples cannot be split over 4 workers"):
        MicroBatches(Numbers(3), global_batch=8, rank=0, size=4)
    with pytest.raises(SpecError, match="micro_batch=0"):
        MicroBatches(Numbers(12), global_batch=3, micro_batch=0, rank=0, size=1)
    for data in (DataLoader(Counting(9), batch_size=2), [1, 2, 3]):
        with pytest.raises(UnsupportedError, match=r"run\.shard takes any data"):
            MicroBatches(data, global_batch=4, rank=0, size=1)
    unsized = MicroBatches(DataLoader(Numbers(9), sampler=Mixed(3)), global_batch=4, rank=0, size=1)
    assert unsized.uneven
    with pytest.raises(TypeError, match="unknown"):
        len(unsized)


Pair = namedtuple("Pair", "x y")


class Marked(OrderedDict[str, Any]):
    mark = ""


def test_batches_of_any_structure_are_moved() -> None:
    batch: dict[str, Any] = {"a": [torch.ones(1), (torch.ones(2), "text")], "b": Pair(torch.ones(3), None)}
    moved = move(batch, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].x.is_meta
    assert moved["b"].y is None
    assert not batch["a"][0].is_meta


def test_kinds_are_kept_when_moved() -> None:
    marked = Marked(x=torch.ones(1))
    marked.mark = "kept"
    moved = move(marked, torch.device("meta"))
    assert type(moved) is Marked
    assert moved.mark == "kept"
    assert moved["x"].is_meta
    assert isinstance(move(pack_sequence([torch.ones(2)]), "meta"), PackedSequence)


def test_on_the_cpu_a_batch_stays_the_object_it_is() -> None:
    batch = [torch.ones(1)]
    assert move(batch, "cpu") is batch
