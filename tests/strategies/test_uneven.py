"""Workers that run out of data at different times."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import syncline as sl
from syncline.testing import Pool, hunt
from tests.strategies.cases import backward, flat, mlp, on_gloo


def own_data(world: sl.World, lengths: list[int], epochs: int = 2, momentum: float = 0.9, **options: Any) -> Any:
    """Each rank has so many batches of its own; gradients, parameters and schedule after each step and in the end."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run = sl.distribute(model, optimizer, schedulers=[scheduler], **{"algorithm": "ring", **options})
    seen: list[float] = []
    batches = [torch.full((1, 1), float(world.rank + 1)) for _ in range(lengths[world.rank])]
    for _ in range(epochs):
        for x in run.shard(batches, split=False):
            optimizer.zero_grad()
            backward(model(x).sum())
            assert model.weight.grad is not None
            seen.append(round(float(model.weight.grad), 5))
            optimizer.step()
            scheduler.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    buffer = optimizer.state[model.weight]["momentum_buffer"].clone()
    run.close()
    return seen, flat(model), rates, scheduler.last_epoch, buffer


@pytest.mark.parametrize("lengths", [[3, 3, 3], [1, 3, 2], [4, 1, 1], [2, 2, 5]])
def test_the_mean_is_over_those_who_have_data(lengths: list[int]) -> None:
    results = sl.simulate(lambda world: own_data(world, lengths), ranks=3).results
    longest = max(range(3), key=lambda rank: lengths[rank])
    for step in range(lengths[longest]):
        having = [rank + 1.0 for rank in range(3) if lengths[rank] > step]
        assert results[longest][0][step] == pytest.approx(sum(having) / len(having), abs=1e-4)
    for _, parameters, rates, steps, buffer in results:
        assert torch.equal(parameters, results[0][1])
        assert torch.equal(buffer, results[0][4])
        assert rates == results[0][2]
        assert steps == 2 * max(lengths)


@pytest.mark.hunt
def test_no_order_of_messages_hangs_it() -> None:
    def same(run: sl.Simulation) -> None:
        assert all(torch.equal(run.results[0][1], other[1]) for other in run.results)

    seeds = range(300 if os.environ.get("SYNCLINE_HUNT") else 6)
    hunt(lambda world: own_data(world, [1, 4, 2], bucket_bytes=1), ranks=3, seeds=seeds, invariant=same)


@pytest.mark.xdist_group("gloo")
def test_on_gloo(gloo: Pool) -> None:
    results = gloo.run(on_gloo, 3, own_data, [1, 3, 2])
    assert all(torch.equal(results[0][1], other[1]) for other in results)


def test_delayed_gradients_too() -> None:
    results = sl.simulate(lambda world: own_data_delayed(world, [1, 4, 2]), ranks=3).results
    assert all(torch.equal(results[0], other) for other in results)


def own_data_delayed(world: sl.World, lengths: list[int]) -> Tensor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = sl.distribute(model, optimizer, strategy="allreduce(delay=1)", algorithm="ring")
    batches = [torch.randn(2, 6, generator=torch.Generator().manual_seed(i)) for i in range(lengths[world.rank])]
    for _ in range(3):
        for x in run.shard(batches, split=False):
            optimizer.zero_grad()
            backward(model(x).square().mean())
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("samples", [24, 25, 29, 31])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_short_last_batch_counts_by_its_samples(samples: int, ranks: int) -> None:
    def case(world: sl.World) -> Tensor:
        draw = torch.Generator().manual_seed(5)
        data = TensorDataset(torch.randn(samples, 6, generator=draw), torch.randn(samples, 3, generator=draw))
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = sl.distribute(model, optimizer, algorithm="ring")
        for _ in range(3):
            for x, y in run.shard(DataLoader(data, batch_size=12 // world.size, shuffle=True), name="train"):
                optimizer.zero_grad()
                backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
        return flat(model)

    alone = sl.simulate(case, ranks=1).results[0]
    together = sl.simulate(case, ranks=ranks).results
    assert all(torch.equal(together[0], other) for other in together)
    assert float((together[0] - alone).norm() / alone.norm()) < 1e-5


class Stream(IterableDataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(torch.arange(float(self.length)).view(-1, 1))


def test_a_stream_of_unknown_length_is_shared_out_once() -> None:
    def case(world: sl.World) -> tuple[list[float], Tensor]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        run = sl.distribute(model, optimizer, algorithm="ring")
        seen: list[float] = []
        for x in run.shard(DataLoader(Stream(11), batch_size=2)):
            seen += x.view(-1).tolist()
            optimizer.zero_grad()
            backward(model(x).square().mean())
            optimizer.step()
        return seen, flat(model)

    results = sl.simulate(case, ranks=3).results
    assert sorted(value for seen, _ in results for value in seen) == [float(value) for value in range(11)]
    assert all(torch.equal(results[0][1], other[1]) for other in results)


def test_reading_without_training_does_not_hang() -> None:
    def case(world: sl.World) -> int:
        model = nn.Linear(1, 1)
        run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm="ring")
        return sum(len(x) for x in run.shard(DataLoader(Stream(7), batch_size=2)))

    assert sum(sl.simulate(case, ranks=3).results) == 7


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro", [None, 2])
def test_a_global_batch_held_fixed_by_micro_batches(ranks: int, micro: int | None) -> None:
    def case(world: sl.World) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(5)
        data = TensorDataset(torch.randn(29, 6, generator=draw), torch.randn(29, 3, generator=draw))
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = sl.distribute(model, optimizer, algorithm="ring")
        loader = DataLoader(data, batch_size=4, shuffle=True)
        count = 0
        for _ in range(3):
            for step in run.steps(loader, global_batch=12, micro_batch=micro):
                optimizer.zero_grad()
                for x, y in step:
                    assert micro is None or len(x) <= micro
                    backward(step.part(nn.functional.mse_loss(model(x), y)))
                optimizer.step()
                count += 1
        return flat(model), count

    alone = sl.simulate(case, ranks=1).results[0]
    together = sl.simulate(case, ranks=ranks).results
    assert alone[1] == 9
    assert all(torch.equal(together[0][0], other[0]) for other in together)
    assert float((together[0][0] - alone[0]).norm() / alone[0].norm()) < 1e-5
