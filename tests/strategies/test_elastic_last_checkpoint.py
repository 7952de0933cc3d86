"""Elastic jobs on the simulator that end because too few workers are left: the survivors save, and a job continues."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import syncline as sl
from syncline.control.team import ENDING
from syncline.environment.base import JOB_FOLDER_VARIABLE
from syncline.errors import WorldError
from syncline.strategies import Run
from syncline.testing import hunt_cases
from syncline.transports.faults import Join, Kill
from syncline.transports.simulated import kill_rank
from syncline.world import World
from tests.data.cases import Numbers
from tests.hunting import seeds

SAMPLES = 96
LEFT = "left"
LAUNCHER = "the launcher received SIGTERM"


@dataclass(frozen=True)
class State:
    """What a checkpoint must keep of a worker."""

    weights: Tensor
    momentum: Tensor
    steps: int
    rate: float
    epoch: int

    @classmethod
    def of(cls, run: Run, epoch: int) -> State:
        [parameter] = run.model.parameters()
        momentum = run.optimizer.state[parameter].get("momentum_buffer", torch.zeros_like(parameter))
        rate = float(run.optimizer.param_groups[0]["lr"])
        return cls(parameter.detach().clone(), momentum.clone(), run.stats.steps, rate, epoch)


@dataclass(frozen=True)
class Result:
    """The state of a worker at its start and at its end, what it has read in its first epoch, and why it has ended."""

    start: State
    end: State
    read: tuple[int, ...]
    error: str


def train(
    world: World,
    strategy: str,
    codec: str | None = None,
    victims: Mapping[int, int] | None = None,
    leavers: Mapping[int, int] | None = None,
    checkpoints: Path | None = None,
    samples: int = SAMPLES,
    epochs: int = 1,
    ending: bool = False,
) -> Result:
    """Sample i changes row i of the model alone. `checkpoints`: continue from the latest one there.

    With `ending` the leavers are asked to leave by the launcher, which ends the job.
    """
    assert world.elastic is not None
    member, steps, error = world.elastic.limits.member, 0, ""
    model = torch.nn.Embedding(samples, 2)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run = sl.distribute(model, optimizer, strategy=strategy, codec=codec)
    shard = run.shard(DataLoader(Numbers(samples), batch_size=4, shuffle=True))
    if checkpoints is not None:
        sl.load(checkpoints, run=run, scheduler=scheduler)
    start = State.of(run, shard.epoch)
    epoch, read = start.epoch, list[int]()
    try:
        for epoch in range(start.epoch, epochs):
            for batch in shard:
                if (victims or {}).get(member) == steps:
                    kill_rank(world.transport)
                if (leavers or {}).get(member) == steps:
                    if ending and not world.elastic.formation.read_ending():
                        world.elastic.formation.log.append(ENDING, reason=LAUNCHER)
                    world.elastic.leave_reason = "it received SIGTERM"
                steps += 1
                world.compute(0.01)
                read += batch.tolist() if epoch == start.epoch else []
                optimizer.zero_grad()
                loss = model(batch).sum()
                run.note_loss(loss)
                loss.backward()
                optimizer.step()
                scheduler.step()
        run.close()
    except WorldError as ended:
        error = str(ended)
    except SystemExit:
        error = LEFT
    return Result(start, State.of(run, epoch), tuple(read), error)


def assert_same(loaded: State, saved: State, weights: bool = True) -> None:
    assert (loaded.steps, loaded.epoch) == (saved.steps, saved.epoch)
    assert loaded.rate == pytest.approx(saved.rate)
    if weights:
        assert torch.equal(loaded.weights, saved.weights)
        assert torch.equal(loaded.momentum, saved.momentum)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoints of the jobs of this test."""
    monkeypatch.setenv(JOB_FOLDER_VARIABLE, str(tmp_path / "job"))
    return tmp_path / "job" / "checkpoints"


@pytest.mark.parametrize(
    ("strategy", "codec", "workers"),
    [
        ("allreduce", None, 5),
        ("allreduce", "topk(0.3)|quantize(4)", 2),
        ("local(period=2)", None, 3),
        ("diloco(period=2)", None, 2),
        ("adacomm(start=2)", None, 2),
        ("easgd(period=1)", None, 3),
        ("gossip", None, 2),
    ],
)
def test_a_job_of_another_size_continues_from_the_survivors(
    strategy: str, codec: str | None, workers: int, folder: Path
) -> None:
    found = sl.simulate(
        lambda world: train(world, strategy, codec, victims={1: 2, 2: 3}), 4, elastic=(3, 4), timeout=5.0
    )
    first, second = (result for result in found.results if result is not None)
    for result in (first, second):
        assert "left (members [" in result.error
        assert "and the job needs at least 3: no other worker has joined" in result.error
    again = sl.simulate(lambda world: train(world, strategy, codec, checkpoints=folder), workers, elastic=(1, workers))
    for result in again.results:
        assert_same(result.start, first.end, strategy == "allreduce")
        assert result.error == ""
    trained = {row for row, change in enumerate(again.results[0].start.weights.tolist()) if any(change)}
    read = [sample for result in again.results for sample in result.read]
    assert trained
    if not strategy.startswith(("easgd", "gossip")):  # there each worker has its own weights
        assert trained | set(read) == set(range(SAMPLES))
    if (strategy, codec) == ("allreduce", None):
        assert sorted(read) == sorted(set(range(SAMPLES)) - trained)


def lose(folder: Path, strategy: str) -> Callable[[int], None]:
    """A case for each seed: workers are killed or leave until fewer than three or four are left."""

    def check(seed: int) -> None:
        draw = random.Random(seed)
        samples, minimum = draw.choice([48, 54, 62, 96]), draw.choice([3, 4])
        shutil.rmtree(folder, ignore_errors=True)
        kills = [Kill(member, at=draw.uniform(0, 0.3)) for member in draw.sample(range(4), draw.randint(1, 3))]
        leavers = {draw.randrange(4): draw.randrange(3)} if draw.random() < 0.3 else {}
        found = sl.simulate(
            lambda world: train(world, strategy, leavers=leavers, samples=samples),
            4,
            elastic=(minimum, 4),
            faults=kills,
            seed=seed,
            chaos=seed % 2 == 1,
            timeout=60.0,
            return_exceptions=True,
        )
        # The workers wait 60 s for newcomers, with chaos up to twice as long: each look at the store takes time then.
        assert found.time < (130.0 if seed % 2 else 100.0), "a wait of training has ended at its timeout"
        ended = [each for each in found.results if isinstance(each, Result) and each.error != LEFT]
        assert all(not each.error or "and the job needs at least" in each.error for each in ended), ended
        if not ended or not all(each.error for each in ended):
            return  # all are lost, or the epoch had ended before
        again = sl.simulate(
            lambda world: train(world, strategy, checkpoints=folder, samples=samples), 2, elastic=(1, 2), seed=seed
        )
        for result in again.results:
            assert_same(result.start, ended[0].end, strategy == "allreduce")
        trained = {row for row, change in enumerate(again.results[0].start.weights.tolist()) if any(change)}
        read = {sample for result in again.results for sample in result.read}
        assert trained | read == set(range(samples))

    return check


@pytest.mark.hunt
def test_survivors_agree_on_the_checkpoint(folder: Path) -> None:
    hunt_cases(lose(folder, "allreduce"), seeds(3, 600), "lose(folder, 'allreduce')({seed})")


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        ("allreduce", None),
        ("allreduce", "topk(0.3)|quantize(4)"),
        ("local(period=2)", None),
        ("diloco(period=2, overlap=True)", None),
        ("easgd(period=1)", None),
        ("gossip", None),
    ],
)
@pytest.mark.parametrize("leavers", [{2: 1}, {0: 1, 1: 1, 2: 2, 3: 1}], ids=["one is told", "all are told"])
def test_all_save_and_leave_when_the_launcher_ends_the_job(
    strategy: str, codec: str | None, leavers: dict[int, int], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = sl.simulate(
        lambda world: train(world, strategy, codec, leavers=leavers, ending=True), 4, elastic=(2, 4), timeout=5.0
    )
    assert [result.error for result in found.results] == [LEFT] * 4
    saved = found.results[0].end
    assert f"{LAUNCHER}: step {saved.steps} is saved in {folder}" in caplog.text
    assert 2 <= saved.steps <= 4
    again = sl.simulate(lambda world: train(world, strategy, codec, checkpoints=folder), 3, elastic=(1, 3))
    for result in again.results:
        assert_same(result.start, saved, strategy == "allreduce")
    trained = {row for row, change in enumerate(again.results[0].start.weights.tolist()) if any(change)}
    read = [sample for result in again.results for sample in result.read]
    if not strategy.startswith(("easgd", "gossip")):  # there each worker has its own weights
        assert trained | set(read) == set(range(SAMPLES))
    if strategy == "allreduce" and codec is None:
        assert sorted([*trained, *read]) == list(range(SAMPLES))


@pytest.mark.parametrize("strategy", ["average", "ensemble", "gossip('0-1, 1-2', pairwise=True)"])
def test_strategies_without_a_last_checkpoint_say_so(
    strategy: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leavers = dict.fromkeys(range(3), 1)
    found = sl.simulate(lambda world: train(world, strategy, leavers=leavers, ending=True), 3, elastic=(2, 3))
    assert [result.error for result in found.results] == [LEFT] * 3
    assert caplog.text.count(f"{LAUNCHER}, and") == caplog.text.count("saves no checkpoint then") == 1
    assert not folder.exists()


@pytest.mark.parametrize("ending", [True, False])
def test_the_last_worker_of_hogwild_saves_the_steps_of_all(
    ending: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All leave after their own steps, two of them at the same time, and nobody waits for them."""
    network = sl.Network(ranks_per_host=3, inside=sl.Link(latency=1e-5, bandwidth=1e9))

    def work(world: World, leavers: Mapping[int, int]) -> Result:
        return train(world, "hogwild", leavers=leavers, ending=ending, checkpoints=None if leavers else folder)

    for leavers in ({0: 1, 1: 3, 2: 3}, {0: 4, 1: 1, 2: 2}):
        shutil.rmtree(folder, ignore_errors=True)
        caplog.clear()
        found = sl.simulate(lambda world: work(world, leavers), 3, elastic=(1, 3), network=network)  # noqa: B023
        assert [result.error for result in found.results] == [LEFT] * 3
        reason = LAUNCHER if ending else "all workers leave"
        assert caplog.text.count(f"{reason}: step ") == 1, caplog.text
        assert "saves no checkpoint" not in caplog.text
        again = sl.simulate(lambda world: work(world, {}), 3, elastic=(1, 3), network=network)
        read = {sample for result in found.results for sample in result.read}
        trained = {row for row, change in enumerate(again.results[0].start.weights.tolist()) if any(change)}
        assert trained == read, "the shared memory has the steps of all workers"
    assert found.time < 60.0, "no wait has ended at its timeout"


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_that_all_leave_save_before(workers: int, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A batch system has sent a signal to all of them, and none to the launcher."""
    leavers = dict.fromkeys(range(workers), 2)
    found = sl.simulate(lambda world: train(world, "allreduce", leavers=leavers), workers, elastic=(1, workers))
    assert [result.error for result in found.results] == [LEFT] * workers
    assert f"all workers leave: step 3 is saved in {folder}" in caplog.text
    again = sl.simulate(lambda world: train(world, "allreduce", checkpoints=folder), 2, elastic=(1, 2))
    for result in again.results:
        assert_same(result.start, found.results[0].end)


def end_job(folder: Path, strategy: str) -> Callable[[int], None]:
    """A case for each seed: the launcher ends the job, or all leave, while workers are killed."""

    def check(seed: int) -> None:
        draw = random.Random(seed)
        samples, minimum = draw.choice([48, 54, 62, 96]), draw.choice([1, 2, 4])
        shutil.rmtree(folder, ignore_errors=True)
        kills = [Kill(member, at=draw.uniform(0, 0.2)) for member in draw.sample(range(4), draw.randint(0, 2))]
        leavers = {member: draw.randrange(3) for member in draw.sample(range(4), draw.randint(1, 4))}
        ending = draw.random() < 0.7
        joins = [Join(at=draw.uniform(0, 0.2))] if draw.random() < 0.3 else []
        found = sl.simulate(
            lambda world: train(world, strategy, leavers=leavers, samples=samples, ending=ending),
            4,
            elastic=(minimum, 5),
            faults=[*kills, *joins],
            seed=seed,
            chaos=seed % 2 == 1,
            timeout=60.0,
            return_exceptions=True,
        )
        assert found.time < (130.0 if seed % 2 else 100.0), "a wait of training has ended at its timeout"
        for member, each in enumerate(found.results):
            if isinstance(each, Exception):
                assert member >= 4, repr(each)  # a newcomer that came too late
                assert "the job has ended" in str(each) or "no member" in str(each), repr(each)
        ended = [each for each in found.results if isinstance(each, Result)]
        if not ended or not all(each.error for each in ended) or not folder.exists():
            return  # all are lost, or the epoch had ended before
        last = max(ended, key=lambda each: each.end.steps).end
        again = sl.simulate(
            lambda world: train(world, strategy, checkpoints=folder, samples=samples), 2, elastic=(1, 2), seed=seed
        )
        for result in again.results:
            assert_same(result.start, last, strategy == "allreduce")
        trained = {row for row, change in enumerate(again.results[0].start.weights.tolist()) if any(change)}
        read = {sample for result in again.results for sample in result.read}
        assert trained | read == set(range(samples))

    return check


@pytest.mark.hunt
@pytest.mark.parametrize("strategy", ["allreduce", "local(period=2)"])
def test_the_last_workers_agree_on_the_checkpoint(strategy: str, folder: Path) -> None:
    hunt_cases(end_job(folder, strategy), seeds(2, 300), f"end_job(folder, {strategy!r})({{seed}})")


@pytest.mark.parametrize("lost", [True, False])
def test_workers_without_data_are_brought_up_to_date_before_the_save(lost: bool, folder: Path) -> None:
    """54 samples: in the last step workers 0 and 1 have data, and one of them is lost there, or leaves after it."""
    samples, victims, leavers = 54, {1: 3} if lost else {}, {} if lost else {0: 3}
    found = sl.simulate(
        lambda world: train(world, "allreduce", victims=victims, leavers=leavers, samples=samples),
        4,
        elastic=(4, 4),
        timeout=5.0,
        return_exceptions=True,
    )
    saved = next(each for each in found.results if isinstance(each, Result) and each.error)
    again = sl.simulate(
        lambda world: train(world, "allreduce", checkpoints=folder, samples=samples, epochs=2), 2, elastic=(1, 2)
    )
    for result in again.results:
        assert_same(result.start, saved.end)
        assert result.start.steps == 4


def test_survivors_save_and_a_newcomer_continues_the_job(folder: Path) -> None:
    found = sl.simulate(
        lambda world: train(world, "allreduce", victims={1: 2}), 3, elastic=(3, 3), faults=[Join(at=0.3)], timeout=5.0
    )
    results = [result for result in found.results if result is not None]
    assert [result.error for result in results] == ["", "", ""]
    for result in results:
        assert_same(result.end, results[0].end)
    assert sl.checkpoint.latest(folder) == 3
    assert all(any(row) for row in results[0].end.weights.tolist())


def test_a_full_disk_does_not_disturb_the_end(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir()
    folder.write_text("a file where the folder would be")
    found = sl.simulate(lambda world: train(world, "allreduce", victims={1: 2}), 2, elastic=(2, 2), timeout=5.0)
    assert "1 worker is left (members [0]), and the job needs at least 2" in found.results[0].error
    assert "step 3 could not be saved in" in caplog.text
