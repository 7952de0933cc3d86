"""`run.shard(loader)` in the loops that people write around a DataLoader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import syncline as sl
from syncline.strategies import strategy_run
from tests.strategies.cases import backward

EPOCHS = 4


class Numbers(Dataset[torch.Tensor]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Trainer:
    """A model of one weight, whose steps are counted with the samples that they see."""

    def __init__(self, strategy: str = "allreduce", **options: Any) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.run = sl.distribute(self.model, self.optimizer, strategy=strategy, **options)
        self.seen: list[int] = []

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        backward(self.model(batch).mean())
        self.optimizer.step()
        self.seen += [int(sample) for sample in batch.view(-1)]

    def end(self, world: sl.World) -> None:
        board = strategy_run(self.run).control_channel()
        if board is not None:
            board.finish()
            world.barrier()  # a server lives with its worker
        self.run.close()


def by_range(shard: sl.strategies.Shard) -> Iterator[Any]:
    batches = iter(shard)
    for _ in range(len(shard)):
        yield next(batches)


def by_zip(shard: sl.strategies.Shard) -> Iterator[Any]:
    for _, batch in zip(range(len(shard)), shard, strict=False):
        yield batch


def by_slice(shard: sl.strategies.Shard) -> Iterator[Any]:
    return islice(iter(shard), len(shard))


def by_break(shard: sl.strategies.Shard) -> Iterator[Any]:
    for number, batch in enumerate(shard, 1):
        yield batch
        if number == len(shard):
            break


def to_the_end(shard: sl.strategies.Shard) -> Iterator[Any]:
    yield from shard


LOOPS = [by_range, by_zip, by_slice, by_break, to_the_end]


@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_gets_whole_epochs(loop: Callable[[sl.strategies.Shard], Iterator[Any]]) -> None:
    def train(world: sl.World) -> list[list[int]]:
        trainer = Trainer()
        shard = trainer.run.shard(DataLoader(Numbers(16), batch_size=1, shuffle=True))
        epochs = []
        for epoch in range(EPOCHS):
            assert shard.epoch == epoch
            trainer.seen = []
            for batch in loop(shard):
                trainer.step(batch)
            epochs.append(trainer.seen)
        return epochs

    for epoch in zip(*sl.simulate(train, ranks=2).results, strict=True):
        assert [len(share) for share in epoch] == [8, 8]
        assert sorted(epoch[0] + epoch[1]) == list(range(16))


def test_a_held_iterator_does_not_shorten_the_next_epoch() -> None:
    def train(world: sl.World) -> list[int]:
        trainer = Trainer()
        shard = trainer.run.shard(DataLoader(Numbers(8), batch_size=1))
        counts = []
        while shard.epoch < 3:
            batches = iter(shard)  # the one before is held until here
            for _ in range(len(shard)):
                trainer.step(next(batches))
            counts.append(len(trainer.seen))
        return counts

    assert sl.simulate(train, ranks=2).results == ([4, 8, 12],) * 2


@pytest.mark.parametrize("length", [12, 13])
def test_a_look_at_a_batch_takes_nothing_from_the_epoch(length: int) -> None:
    """Also where one rank alone looks, before training, between epochs and in a loop's body, and holds the iterator."""

    def train(world: sl.World) -> list[list[int]]:
        trainer = Trainer()
        shard = trainer.run.shard(DataLoader(Numbers(length), batch_size=2, shuffle=True))
        held = iter(shard)
        epochs = []
        for _ in range(3):
            if world.rank == 0:
                assert len(next(iter(shard))) == 2
                next(held)
                held = iter(shard)
            trainer.seen = []
            for batch in shard:
                if world.rank == 0:
                    next(iter(shard))
                trainer.step(batch)
            epochs.append(trainer.seen)
        return epochs

    found = sl.simulate(train, ranks=2).results
    for epoch in zip(*found, strict=True):
        assert sorted(epoch[0] + epoch[1]) == list(range(length))
    assert len({tuple(epoch) for epoch in found[1]}) == 3, "each is shuffled anew"


def test_a_loop_left_early_begins_a_fresh_epoch() -> None:
    def train(world: sl.World) -> list[list[int]]:
        trainer = Trainer()
        loader = DataLoader(Numbers(40), batch_size=1, shuffle=True)
        epochs = []
        for _ in range(6):
            trainer.seen = []
            for batch in islice(trainer.run.shard(loader), 3):
                trainer.step(batch)
            epochs.append(trainer.seen)
        return epochs

    for epochs in sl.simulate(train, ranks=2).results:
        assert len({tuple(epoch) for epoch in epochs}) == 6


def test_a_new_loader_for_each_epoch_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    data = Numbers(6)
    with sl.init():
        run = Trainer().run
        for _ in range(3):
            list(run.shard(DataLoader(data, batch_size=2, shuffle=True), name="train"))
        list(run.shard(DataLoader(data, batch_size=2), pad=False))
        assert not caplog.messages
        for _ in range(3):
            list(run.shard(DataLoader(data, batch_size=2, shuffle=True)))
        assert [message.count("the same order") for message in caplog.messages] == [1]
        run.close()


def test_it_has_the_attributes_of_its_loader() -> None:
    with sl.init():
        run = Trainer().run
        loader = DataLoader(Numbers(6), batch_size=2, drop_last=True, num_workers=0)
        shard = run.shard(loader)
        for name in ("dataset", "batch_size", "sampler", "num_workers", "drop_last", "collate_fn", "pin_memory"):
            assert getattr(shard, name) is getattr(loader, name), name
        data = Numbers(6)
        assert (run.shard(data, batch=3).dataset, run.shard(data, batch=3).batch_size) == (data, 3)
        assert not hasattr(run.shard([1, 2]), "dataset")
        assert len(copy.copy(shard)) == 3
        run.close()


@pytest.mark.parametrize("stop", range(1, 13))
@pytest.mark.parametrize("loop", [by_zip, to_the_end])
def test_resume_at_any_step_equals_the_uninterrupted_run(
    loop: Callable[[sl.strategies.Shard], Iterator[Any]], stop: int
) -> None:
    """Three epochs of three steps, each with something at its end; a look at the data first."""

    def train(saved: Any, log: list[Any], states: dict[int, Any]) -> None:
        trainer = Trainer()
        shard = trainer.run.shard(DataLoader(Numbers(12), batch_size=4, shuffle=True))
        if saved is not None:
            strategy_run(trainer.run).load_state_dict(saved)
        if saved is None or stop % 4 != 3:  # else there is nothing to look at: the epoch's last batch was handed out
            next(iter(shard))
        for epoch in range(shard.epoch, 3):
            for batch in loop(shard):
                trainer.step(batch)
                log.append((epoch, batch.view(-1).tolist()))
                states[len(log)] = strategy_run(trainer.run).state_dict()
            log.append(f"end of epoch {epoch}")
            states[len(log)] = strategy_run(trainer.run).state_dict()
        trainer.run.close()

    with sl.init():
        log: list[Any] = []
        states: dict[int, Any] = {}
        train(None, log, states)
        assert len(log) == 3 * 4
        rest: list[Any] = []
        train(states[stop], rest, {})
        assert log[:stop] + rest == log


SYNCHRONOUS = ["allreduce", "allreduce(delay=1)", "local(period=2)", "diloco(period=2)", "gossip", "easgd(period=2)"]


def metrics(trainer: Trainer, world: sl.World) -> None:
    sl.allreduce(torch.tensor([float(len(trainer.seen))]), op="mean")


def evaluation(trainer: Trainer, world: sl.World) -> None:
    with trainer.run.agreed():
        pass


def saving(trainer: Trainer, world: sl.World) -> None:
    strategy_run(trainer.run).state_dict()


@pytest.mark.parametrize("then", [metrics, evaluation, saving, None])
@pytest.mark.parametrize("limit", [2, 3])
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_loops_that_stop_early_on_uneven_data_stay_in_step(strategy: str, limit: int, then: Any) -> None:
    """Rank 0 has three batches of the five samples, rank 1 two: one runs out, and the other stops by itself."""

    def train(world: sl.World) -> tuple[list[int], float, int]:
        trainer = Trainer(strategy)
        shard = trainer.run.shard(DataLoader(Numbers(5), batch_size=1))
        assert len(shard) == 3
        for _ in range(3):
            for batch in islice(shard, limit):
                trainer.step(batch)
            if then is not None:
                then(trainer, world)
        steps = trainer.run.stats.steps
        trainer.run.close()
        return trainer.seen, float(trainer.model.weight.detach()), steps

    first, second = sl.simulate(train, ranks=2).results
    assert first[0] == [0, 2, 4][:limit] * 3
    assert second[0] == [1, 3] * 3
    assert first[1] == second[1]
    assert first[2] == second[2] or then is None, "counted alike"


def test_leaving_an_epoch_early_together_needs_no_messages() -> None:
    """A run that is stopped there and saved is as it was."""

    def train(world: sl.World, limit: int) -> float:
        trainer = Trainer("local(period=100)")
        for batch in islice(trainer.run.shard(DataLoader(Numbers(5), batch_size=1)), limit):
            trainer.step(batch)
        strategy_run(trainer.run).state_dict()
        return float(trainer.model.weight.detach())

    def weights(limit: int) -> set[float]:
        return set(sl.simulate(lambda world: train(world, limit), ranks=2).results)

    assert len(weights(2)) == 2
    assert len(weights(3)) == 1, "rank 1 has run out, and meets the other"


def test_a_run_that_an_error_has_ended_is_not_waited_for() -> None:
    def fail(trainer: Trainer) -> None:
        with trainer.run:
            for batch in trainer.run.shard([torch.ones(1, 1)] * 3, split=False):
                trainer.step(batch)
                raise RuntimeError("of mine")

    def train(world: sl.World) -> float:
        with pytest.raises(RuntimeError, match="of mine"):
            fail(Trainer())
        assert not world.left
        return float(sl.allreduce(torch.ones(1), op="sum"))

    assert sl.simulate(train, ranks=2).results == (2.0, 2.0)


@pytest.mark.parametrize("strategy", [*SYNCHRONOUS, "bsp", "ssp(slack=1)"])
@pytest.mark.parametrize("kind", ["batch", "sequence", "epoch"])
def test_schedulers_need_no_naming_on_uneven_data(strategy: str, kind: str) -> None:
    """Each worker's rate is that of the steps that all have taken, whether it had data in them or not."""

    def train(world: sl.World) -> tuple[float, int]:
        trainer = Trainer(strategy)
        lr_scheduler, optimizer = torch.optim.lr_scheduler, trainer.optimizer
        shard = trainer.run.shard(DataLoader(Numbers(5), batch_size=1))
        if kind == "sequence":
            parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
            scheduler: Any = lr_scheduler.SequentialLR(optimizer, parts, [4])
        else:
            scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(shard))
        for _ in range(2):
            for batch in shard:
                trainer.step(batch)
                if kind != "epoch":
                    scheduler.step()
            if kind == "epoch":
                scheduler.step()
        trainer.end(world)
        return float(optimizer.param_groups[0]["lr"]), scheduler.last_epoch

    first, second = sl.simulate(train, ranks=2).results
    assert first == second
    assert first[1] == (2 if kind == "epoch" else 6)


def test_two_schedulers_of_a_kind_must_be_named() -> None:
    def train(world: sl.World) -> None:
        trainer = Trainer()
        kept = [torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.9) for _ in range(2)]
        for batch in trainer.run.shard(DataLoader(Numbers(5), batch_size=1)):
            trainer.step(batch)
        assert kept

    with pytest.raises(sl.errors.IncompatibleError, match=r"2 schedulers of the kind ExponentialLR.*schedulers="):
        sl.simulate(train, ranks=2)


@pytest.mark.parametrize("strategy", ["allreduce", "diloco(period=2)", "bsp"])
@pytest.mark.parametrize(("length", "ranks"), [(5, 2), (3, 4), (8, 2)])
def test_an_evaluation_reads_every_sample_once(strategy: str, length: int, ranks: int) -> None:
    """In the body of a training loop on uneven data, inside agreed(): and the training is what it is without it."""

    def train(world: sl.World, evaluate: bool) -> tuple[list[int], float]:
        trainer = Trainer(strategy)
        validation: DataLoader[Any] = DataLoader(Numbers(length), batch_size=1)
        seen: list[int] = []
        for number, batch in enumerate(trainer.run.shard(DataLoader(Numbers(4 * ranks + 1), batch_size=1))):
            trainer.step(batch)
            if evaluate and number == 1:
                with trainer.run.agreed():
                    shard = trainer.run.shard(validation, pad=False)
                    seen = [int(x) for x in shard]
                    assert len(shard) == len(seen)
                    next(iter(shard), None)
        trainer.end(world)
        return seen, float(trainer.model.weight.detach())

    found = sl.simulate(lambda world: train(world, True), ranks=ranks).results
    assert sorted(number for seen, _ in found for number in seen) == list(range(length))
    if strategy != "bsp":
        assert [weight for _, weight in found] == [
            weight for _, weight in sl.simulate(lambda world: train(world, False), ranks=ranks).results
        ]


def test_steps_of_micro_batches_are_whole_epochs_too() -> None:
    def train(world: sl.World) -> list[int]:
        trainer = Trainer()
        steps = trainer.run.steps(DataLoader(Numbers(13)), global_batch=4, micro_batch=1)
        assert len(steps) == 4
        counts = []
        for _ in range(3):
            next(iter(steps))
            trainer.seen = []
            for step in islice(steps, len(steps)):
                trainer.optimizer.zero_grad()
                for x in step:
                    backward(step.part(trainer.model(x.view(-1, 1)).mean()))
                    trainer.seen.append(int(x))
                trainer.optimizer.step()
            counts.append(len(trainer.seen))
        trainer.run.close()
        return counts

    assert sl.simulate(train, ranks=2).results == ([7, 7, 7], [6, 6, 6])
