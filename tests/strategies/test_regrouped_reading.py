"""`run.shard` when the number of workers changes in the middle of an epoch, and for a worker that joins later."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

import syncline as sl
from syncline.checkpoint import load, save
from syncline.data import MicroBatches, Sharded
from syncline.strategies import strategy_run
from syncline.strategies.run import EpochContinues, Readers, Shard, Steps
from syncline.world import DataPlace
from tests.data.cases import Numbers, flat
from tests.strategies.test_reading import Trainer


class StandIn:
    """Stands for a run on one worker of a team. It trains nothing, and counts how often it settles."""

    def __init__(self, rank: int, size: int) -> None:
        self.readers = Readers(rank, size)
        self.communicator = SimpleNamespace(size=size)
        self.world = SimpleNamespace(finish_left=lambda: None, device="cpu")
        self.stats = SimpleNamespace(steps=0)
        self.uneven = SimpleNamespace(weight=(1.0, False), leave=self.leave)
        self.asynchronous = False
        self.epoch_needs_round = False
        self.checks = 0
        self.settled: list[int] = []
        self.left = 0
        self.lost_while_idle: tuple[int, int, tuple[int, ...]] | None = None

    @property
    def progress(self) -> int:
        return int(self.stats.steps)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def warms_up(self, place: DataPlace) -> bool:
        return False

    def set_weight(self, weight: float, uneven: bool) -> None:
        self.weight = (weight, uneven)

    def check_uneven(self) -> None:
        self.checks += 1

    def batch_read(self, reader: object) -> None:
        """Called for each batch of a loop that trains."""

    def note_trained(self) -> None:
        """Called after each batch."""

    def between_steps(self) -> bool:
        return False

    def leave(self, somebody_ran_out: bool) -> None:
        assert not somebody_ran_out
        self.left += 1

    def settle_uneven(self) -> None:
        self.settled.append(self.stats.steps)
        if self.lost_while_idle is not None:
            change, self.lost_while_idle = self.lost_while_idle, None
            if self.regroup(*change):
                raise EpochContinues

    def regroup(self, rank: int, size: int, lost: tuple[int, ...] = ()) -> bool:
        self.communicator.size = size
        return self.readers.regroup(rank, size, lost)

    def shard(self, data: Any, name: str | None = None, **options: Any) -> Shard:
        run: Any = self
        return Shard(run, self.readers.get(Sharded, data, name, options), options.get("pad", True))


def numbers(length: int, batch: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(length), batch_size=batch, **options)


def train(run: StandIn, shard: Shard, changes: dict[int, tuple[int, int, tuple[int, ...]]]) -> list[list[int]]:
    """One epoch. In the body of some steps the team changes."""
    found = []
    for batch in shard:
        found.append(flat(batch))
        if run.stats.steps in changes:
            run.regroup(*changes[run.stats.steps])
        run.stats.steps += 1
    return found


def test_a_loop_goes_on_with_the_new_team() -> None:
    run = StandIn(2, 3)
    shard = run.shard(numbers(14))
    assert len(shard) == 3
    assert train(run, shard, {0: (1, 2, (1,))}) == [[2, 5], [4, 7], [9, 11], [13]]
    assert (len(shard), shard.epoch) == (4, 1)
    steps: Any = Steps(run, run.readers.get(MicroBatches, numbers(12), "steps", {"global_batch": 6}))  # type: ignore[arg-type]
    found = []
    for number, step in enumerate(steps):
        found.append([flat(batch) for batch in step])
        if number == 0:
            run.regroup(0, 1, (0,))
    assert found == [[[1, 3], [5]], [[0, 2], [4, 6], [7, 8]], [[9, 10], [11]]]


def test_uneven_is_evaluated_again() -> None:
    run = StandIn(0, 3)
    shard = run.shard(numbers(19))
    assert train(run, shard, {0: (0, 2, ()), 1: (0, 1, (1,))})[:3] == [[0, 3], [6, 8], [7, 9]]
    assert (run.checks, run.left) == (2, 1), "it is uneven for three and two workers, not for one"
    assert run.settled == [8], "after a change of the team all workers wait for each other at the end"
    run = StandIn(0, 1)
    train(run, run.shard(numbers(19)), {0: (0, 3, ())})
    assert (run.checks, run.left, run.settled) == (1, 0, [4])
    assert run.weight == (1.0, False)


def test_a_worker_without_data_continues_with_a_lost_share() -> None:
    run = StandIn(1, 2)
    shard = run.shard(numbers(5))
    run.lost_while_idle = (0, 1, (0,))
    assert train(run, shard, {}) == [[1, 3], [4]]
    assert run.settled == [1, 2]
    assert shard.epoch == 1
    run = StandIn(2, 3)
    run.lost_while_idle = (1, 2, (0,))
    assert train(run, run.shard(numbers(7)), {}) == [[2, 5]], "the share goes to another worker"
    assert run.settled == [1, 1]


def test_a_worker_without_data_waits_on_when_another_joins() -> None:
    run = StandIn(1, 2)
    shard = run.shard(numbers(5))
    run.lost_while_idle = (1, 3, ())
    assert train(run, shard, {}) == [[1, 3]]
    assert run.settled == [1]
    assert shard.epoch == 1


@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("step", [0, 2])
def test_a_real_run_trains_a_share_again(length: int, step: int) -> None:
    def work(world: sl.World) -> list[int]:
        trainer = Trainer()
        shard = trainer.run.shard(numbers(length))
        for number, batch in enumerate(shard):
            trainer.step(batch.view(-1, 1).float())
            if number == step:
                strategy_run(trainer.run).readers.regroup(world.rank, 2, (1,))
        trainer.run.close()
        return trainer.seen

    first, second = sl.simulate(work, ranks=2).results
    again = [4 * step + 1, 4 * step + 3]
    assert sorted(first + second) == sorted([*range(length), *again])


@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_keeps_lost_shares(size: int, tmp_path: Path) -> None:
    """Saved in the body of the step in which the share was lost, and loaded on another number of workers."""

    def before(world: sl.World) -> list[int]:
        trainer = Trainer()
        for number, batch in enumerate(trainer.run.shard(numbers(20, shuffle=True))):
            trainer.step(batch.view(-1, 1).float())
            if number == 1:
                strategy_run(trainer.run).readers.regroup(world.rank, 2, (1,))
                save(tmp_path, run=trainer.run, step=2)
                break
        return trainer.seen

    def after(world: sl.World) -> list[int]:
        trainer = Trainer()
        load(tmp_path, run=trainer.run)
        for batch in trainer.run.shard(numbers(20, shuffle=True)):
            trainer.step(batch.view(-1, 1).float())
        trainer.run.close()
        return trainer.seen

    first, second = sl.simulate(before, ranks=2).results
    rest = [sample for seen in sl.simulate(after, ranks=size).results for sample in seen]
    assert sorted(first + second[:2] + rest) == list(range(20))


def position(epoch: int, samples: int) -> dict[str, Any]:
    return {"epoch": epoch, "samples": samples, "streams": []}


def enter(run: StandIn, positions: dict[str, Any], epoch: int) -> list[DataPlace]:
    """The run joins a team that reads an epoch. Returns a list of the places at which it has tried."""
    calls: list[DataPlace] = []

    def enter_at(place: DataPlace) -> bool:
        calls.append(place)
        if place.epoch < epoch:
            return False
        run.readers.load_state_dict(positions)
        run.regroup(2, 3)
        return True

    run.readers.enter_at = enter_at
    return calls


def test_a_newcomer_passes_the_epochs_that_the_others_have_finished() -> None:
    run = StandIn(0, 1)
    calls = enter(run, {"data0": position(2, 6)}, epoch=2)
    shard = run.shard(numbers(12))
    assert (shard.epoch, len(shard)) == (0, 6)
    epochs = []
    for epoch in range(shard.epoch, 4):
        assert shard.epoch == epoch
        epochs.append(train(run, shard, {}))
    assert epochs == [[], [], [[8, 11]], [[2, 5], [8, 11]]]
    assert calls == [("data0", 0), ("data0", 1), ("data0", 2)]


def test_a_newcomer_can_ask_for_the_epoch_of_the_others() -> None:
    run = StandIn(0, 1)
    calls = enter(run, {"data0": position(2, 6)}, epoch=2)
    run.readers.place_of_team = lambda: DataPlace("data0", 2)
    shard = run.shard(numbers(12))
    assert [train(run, shard, {}) for _ in range(shard.epoch, 3)] == [[[8, 11]]]
    assert calls == [("data0", 2)]


def test_a_newcomer_evaluates_alone_until_it_enters() -> None:
    run = StandIn(0, 1)
    calls = enter(run, {}, epoch=2)
    data = run.shard(numbers(6), "val", pad=False)
    assert [flat(batch) for batch in data] == [[0, 1], [2, 3], [4, 5]]
    assert calls == []


def test_a_loader_made_for_each_epoch_passes_them_too() -> None:
    run = StandIn(0, 1)
    enter(run, {"train": position(2, 0)}, epoch=2)
    assert [train(run, run.shard(numbers(6), "train"), {}) for _ in range(4)] == [[], [], [[2, 5]], [[2, 5]]]


def test_a_loaded_checkpoint_skips_nothing() -> None:
    run = StandIn(2, 3)
    run.readers.load_state_dict({"data0": position(2, 6)})
    shard = run.shard(numbers(12))
    assert shard.epoch == 2
    assert train(run, shard, {}) == [[8, 11]]


def test_peers_and_a_newcomer_read_every_sample_once() -> None:
    """The newcomer loads the positions in the body of a step, after a worker was lost in it."""
    peers = [StandIn(rank, 3) for rank in range(3)]
    shards = [peer.shard(numbers(23, shuffle=True)) for peer in peers]
    loops = [iter(shard) for shard in shards]
    read: list[int] = []
    for _ in range(2):
        read += [index for loop in loops for index in flat(next(loop))]
    batches = [flat(next(loop)) for loop in loops]
    for rank, peer in enumerate((peers[0], peers[2])):
        peer.stats.steps = 3
        peer.regroup(rank, 3, (1,))
        read += batches[2 * rank]
    newcomer = StandIn(0, 1)
    calls = enter(newcomer, peers[0].readers.next_state(), epoch=0)
    newcomers_loop = iter(newcomer.shard(numbers(23, shuffle=True)))
    for run, loop in ((peers[0], loops[0]), (peers[2], loops[2]), (newcomer, newcomers_loop)):
        for batch in loop:
            read += flat(batch)
            run.stats.steps += 1
    assert calls == [("data0", 0)]
    assert sorted(read) == list(range(23))
    assert [run.settled for run in (peers[0], peers[2], newcomer)] == [[5], [4], [1]], "seven samples were left"
