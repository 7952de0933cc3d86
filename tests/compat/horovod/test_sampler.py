"""`hvd.elastic.ElasticSampler`: every sample once, whatever was done before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import syncline as sl
from syncline.compat.horovod.context import init
from syncline.compat.horovod.elastic import ElasticSampler
from syncline.compat.horovod.errors import NotInitializedError


def on_ranks(ranks: int, what: Callable[[sl.World], Any]) -> tuple[Any, ...]:
    def begin(world: sl.World) -> Any:
        init()
        return what(world)

    return sl.simulate(begin, ranks=ranks).results


def together(shares: tuple[list[int], ...]) -> list[int]:
    """In the order in which they were dealt."""
    return [index for turn in zip(*shares, strict=True) for index in turn]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("length", [0, 1, 7, 12])
def test_each_sample_is_dealt_and_no_more_twice_than_must_be(ranks: int, length: int) -> None:
    shares = on_ranks(ranks, lambda world: list(ElasticSampler(range(length))))
    assert {len(share) for share in shares} == {-(-length // ranks)}
    counts = Counter(together(shares))
    assert sorted(counts) == list(range(length))
    assert sum(counts.values()) - length < ranks


def test_sample_order_changes_each_epoch() -> None:
    def orders(world: sl.World) -> list[list[int]]:
        sampler = ElasticSampler(range(40), seed=3)
        found = [list(sampler), list(sampler)]
        sampler.set_epoch(1)
        return [*found, list(sampler), list(ElasticSampler(range(40), seed=4)), list(ElasticSampler(range(40), False))]

    first, again, later, same, plain = (together(shares) for shares in zip(*on_ranks(2, orders), strict=True))
    assert first == again != later == same  # as Horovod has it: the seed and the epoch add up
    assert sorted(first) == sorted(later) == plain == list(range(40))


def test_recorded_batches_are_not_dealt_again() -> None:
    def share(world: sl.World) -> tuple[list[int], list[int]]:
        sampler = ElasticSampler(range(20))
        first = list(sampler)[:4]
        for batch in range(2):
            sampler.record_batch(batch, batch_size=2)
        sampler.reset()
        return first, list(sampler)

    firsts, rests = zip(*on_ranks(2, share), strict=True)
    assert sorted(together(firsts) + together(rests)) == list(range(20))


def test_recorded_indices_are_not_dealt_again() -> None:
    def share(world: sl.World) -> tuple[list[int], list[int]]:
        sampler = ElasticSampler(range(20))
        done = sampler.get_indices(batch_idx=1, batch_size=3)
        sampler.record_indices(torch.tensor(done))
        sampler.reset()
        return done, list(sampler)

    for done, rest in on_ranks(2, share):
        assert len(done) == 3
        assert not set(done) & set(rest)


def test_batches_and_indices_go_together() -> None:
    def share(world: sl.World) -> list[int]:
        sampler = ElasticSampler(range(12), shuffle=False)
        sampler.record_batch(0, batch_size=2)  # 0 to 3
        sampler.record_indices([6, 7])
        sampler.reset()
        sampler.record_batch(0, batch_size=1)  # 4 and 5
        sampler.reset()
        return list(sampler)

    assert together(on_ranks(2, share)) == [8, 9, 10, 11]


def test_a_checkpoint_goes_on_with_another_number_of_ranks() -> None:
    def save(world: sl.World) -> tuple[dict[str, Any], list[int]]:
        sampler = ElasticSampler(range(30), seed=1)
        sampler.set_epoch(2)
        done = list(sampler)[:4]
        sampler.record_batch(0, batch_size=4)
        return sampler.state_dict(), done

    saved = on_ranks(3, save)
    state = saved[0][0]
    assert all(found == state for found, _ in saved)
    assert state == {"epoch": 2, "processed_num": 12, "processed_indices": []}

    def load(world: sl.World) -> list[int]:
        sampler = ElasticSampler(range(30), seed=1)
        sampler.load_state_dict(state)
        return list(sampler)

    done = together(tuple(found for _, found in saved))
    assert sorted(done + together(on_ranks(2, load))) == list(range(30))


def test_a_new_epoch_forgets_what_was_done() -> None:
    def share(world: sl.World) -> int:
        sampler = ElasticSampler(range(10))
        sampler.record_batch(0, batch_size=2)
        sampler.record_indices([9])
        sampler.set_epoch(1)
        return len(sampler)

    assert on_ranks(2, share) == (5, 5)


def test_more_recorded_than_there_is_leaves_nothing() -> None:
    def share(world: sl.World) -> list[int]:
        sampler = ElasticSampler(range(5))
        for batch in range(2):
            sampler.record_batch(batch, batch_size=2)
        sampler.reset()
        return list(sampler)

    assert on_ranks(2, share) == ([], [])


def test_a_loader_takes_it() -> None:
    def share(world: sl.World) -> list[int]:
        data = torch.utils.data.TensorDataset(torch.arange(8))
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=ElasticSampler(data, shuffle=False))
        return [int(value) for (batch,) in loader for value in batch]

    assert on_ranks(2, share) == ([0, 2, 4, 6], [1, 3, 5, 7])


def test_before_init_it_says_so() -> None:
    with pytest.raises(NotInitializedError, match="has not been initialized"):
        ElasticSampler(range(3))
