"""Elastic jobs on the simulator with every fault: workers are killed, frozen, cut off, leave and join."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import syncline as sl
from syncline.errors import WorldError
from syncline.strategies.base import strategy_run
from syncline.testing import hunt_cases
from syncline.transports.faults import Fault, Freeze, Join, Partition
from syncline.transports.simulated import cut_off_rank, freeze_rank, kill_rank
from syncline.world import Simulation, World
from tests.data.cases import Numbers
from tests.hunting import seeds
from tests.strategies.test_elastic import STRATEGIES, WORKERS, member_of
from tests.strategies.test_elastic_averaging import STRATEGIES as AVERAGING_STRATEGIES

# A newcomer steps the scheduler in epochs that it has missed.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

ALL_STRATEGIES = {**STRATEGIES, **AVERAGING_STRATEGIES}
EPOCHS = 2
LATE = ("the job has ended", "not admitted")
"""Words of the errors of a newcomer that came too late."""


@dataclass(frozen=True)
class Trouble:
    """What happens to a worker before one of its steps."""

    kind: str
    step: int
    seconds: float = 0.0


@dataclass
class Journal:
    """What all workers of a job have done, as an observer sees it."""

    trained: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By member: epoch and number of each sample in its steps that survive its loss."""
    unsafe: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By member: the same for its steps since the last round."""
    rounds: dict[int, int] = field(default_factory=dict)
    """By member: its `counted_steps` when it was last asked."""
    teams: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)
    """By generation: the members of the team, as the workers see them."""

    def note_team(self, world: World) -> None:
        assert world.elastic is not None
        team = world.elastic.team
        self.teams.setdefault(team.generation, set()).add(team.members)

    def note_rounds(self, member: int, counted: int) -> None:
        """Before each batch, after its step and at the end: the steps so far survive if `counted` has grown.

        A round after the last batch of the data does not contain the batch that is read next.
        """
        if counted != self.rounds.get(member):
            self.trained.setdefault(member, []).extend(self.unsafe.pop(member, []))
        self.rounds[member] = counted

    def note_step(self, member: int, epoch: int, samples: list[int]) -> None:
        self.unsafe.setdefault(member, []).extend((epoch, sample) for sample in samples)


@dataclass(frozen=True)
class Outcome:
    """What a worker has at its end."""

    weights: Tensor
    steps: int
    rate: float
    teams: int
    changed: tuple[frozenset[int], ...]
    """The samples that have changed the model in each epoch."""


def strike(world: World, trouble: Trouble) -> None:
    if trouble.kind == "leave":
        raise SystemExit(0)
    if trouble.kind == "kill":
        kill_rank(world.transport)
    else:
        (freeze_rank if trouble.kind == "freeze" else cut_off_rank)(world.transport, trouble.seconds)


def train(
    world: World,
    strategy: str,
    codec: str | None,
    samples: int,
    troubles: Mapping[int, Trouble],
    journal: Journal,
) -> Outcome:
    """Sample i changes row i of the model alone, so that the model shows which samples were trained."""
    member, steps = member_of(world), 0
    model = torch.nn.Embedding(samples, 3)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    changed = []
    with sl.distribute(model, optimizer, strategy=strategy, codec=codec, algorithm="auto") as run:
        shard = run.shard(DataLoader(Numbers(samples), batch_size=4, shuffle=True))
        before = model.weight.detach().clone()
        for epoch in range(shard.epoch, EPOCHS):
            for batch in shard:
                joins = world.elastic is not None and world.elastic.joining  # nothing of a warm-up is kept
                journal.note_rounds(member, strategy_run(run).counted_steps)
                if not joins:
                    journal.note_team(world)
                if member in troubles and troubles[member].step == steps:
                    strike(world, troubles[member])
                steps += 1
                world.compute(0.01)
                optimizer.zero_grad()
                loss = model(batch).sum()
                run.note_loss(loss)
                loss.backward()
                optimizer.step()
                journal.note_step(member, epoch, [] if joins else batch.tolist())
                journal.note_rounds(member, strategy_run(run).counted_steps)
            with run.agreed():
                now = model.weight.detach().clone()
            changed.append(frozenset(map(int, (now != before).any(1).nonzero().view(-1).tolist())))
            before = now
            scheduler.step()
        journal.note_rounds(member, strategy_run(run).counted_steps)
        taken = run.stats.steps
        journal.note_team(world)
    assert world.elastic is not None
    rate = float(optimizer.param_groups[0]["lr"])
    return Outcome(model.weight.detach().clone(), taken, rate, world.elastic.team.generation, tuple(changed))


def draw_troubles(draw: random.Random) -> dict[int, Trouble]:
    """Up to three of four workers get into trouble. A silence may be shorter than the launcher's limit or longer."""
    troubles = {}
    for member in draw.sample(range(WORKERS), draw.randint(0, WORKERS - 1)):
        seconds = draw.choice([draw.uniform(0.01, 9.0), draw.uniform(11.0, 20.0)])
        troubles[member] = Trouble(draw.choice(["kill", "freeze", "cut", "leave"]), draw.randrange(8), seconds)
    return troubles


def check_outcome(found: Simulation, troubles: Mapping[int, Trouble]) -> list[Outcome]:
    """Workers end well, are lost, or were declared lost and say so. Returns those that ended well."""
    for member, result in enumerate(found.results):
        if isinstance(result, BaseException):
            silent = member in troubles and troubles[member].kind in ("freeze", "cut")
            if (silent and "declared lost" in str(result)) or (
                member >= WORKERS and any(words in str(result) for words in LATE)
            ):
                continue
            raise result
        if result is None:
            assert troubles[member].kind in ("kill", "leave")
    return [result for result in found.results if isinstance(result, Outcome)]


def endure(strategy: str, codec: str | None) -> Callable[[int], None]:
    """A case for each seed, which draws what happens to whom and when. The survivors must agree."""

    def check(seed: int) -> None:
        draw, journal = random.Random(seed), Journal()
        troubles, samples, chaos = draw_troubles(draw), draw.choice([48, 62, 96]), seed % 2 == 1
        faults: list[Fault] = [Join(at=draw.uniform(0, 0.2)) for _ in range(draw.randint(0, 2))]
        if draw.random() < 0.3 and not chaos:  # one link between two workers that both reach the launcher
            one, other = draw.sample(range(WORKERS), 2)
            start = draw.uniform(0, 0.3)
            faults.append(Partition((one,), start, start + draw.uniform(0.01, 8.0), (other,)))
        found = sl.simulate(
            partial(train, strategy=strategy, codec=codec, samples=samples, troubles=troubles, journal=journal),
            WORKERS,
            elastic=(1, WORKERS + 2),
            faults=faults,
            seed=seed,
            chaos=chaos,
            return_exceptions=True,
        )
        results = check_outcome(found, troubles)
        assert results, "no worker has ended well"
        for result in results:
            assert torch.equal(result.weights, results[0].weights)
            assert (result.steps, result.rate) == (results[0].steps, 0.25)
            assert result.teams == results[0].teams
        assert all(len(teams) == 1 for teams in journal.teams.values()), journal.teams
        twice = Counter(sample for each in journal.trained.values() for sample in each)
        assert max(twice.values()) <= 2, [each for each, count in twice.items() if count > 2]
        if codec is None and (strategy, codec) in STRATEGIES.values():  # no other strategy promises every sample
            for result in (each for each in found.results[:WORKERS] if isinstance(each, Outcome)):
                missing = [sorted(set(range(samples)) - epoch) for epoch in result.changed]
                assert missing == [[]] * EPOCHS, missing
        assert found.time < 300.0, "a wait has ended at its timeout"

    return check


@pytest.mark.hunt
@pytest.mark.parametrize("name", ALL_STRATEGIES)
def test_survivors_agree_whatever_happens(name: str) -> None:
    check, sample = endure(*ALL_STRATEGIES[name]), 2 if name in STRATEGIES else 1
    hunt_cases(check, seeds(4 if name == "dense" else sample, 1200), f"endure{ALL_STRATEGIES[name]}({{seed}})")


def count_steps(world: World, strategy: str = "allreduce", steps: int = 8) -> tuple[int, tuple[int, ...]]:
    """The steps of a worker, and the members of its last team."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.distribute(model, optimizer, strategy=strategy, algorithm="ring") as run:
        for _ in range(steps):
            world.compute(0.1)
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    assert world.elastic is not None
    return run.stats.steps, world.elastic.team.members


SILENCES: list[Callable[[float], Fault]] = [
    lambda seconds: Freeze(1, at=0.35, seconds=seconds),
    lambda seconds: Partition((1,), start=0.35, stop=0.35 + seconds),
]


@pytest.mark.parametrize("silence", SILENCES, ids=["frozen", "cut off"])
def test_a_silent_worker_is_declared_lost_and_fenced_off(silence: Callable[[float], Fault]) -> None:
    """The others continue after the launcher's limit. The worker that wakes up later changes nothing, and says why."""
    found = sl.simulate(count_steps, 3, elastic=(1, 3), faults=[silence(15.0)], return_exceptions=True)
    assert found.results[0] == found.results[2] == (8, (0, 2))
    assert isinstance(found.results[1], WorldError)
    assert "member 1 was declared lost" in str(found.results[1])
    assert 15.0 < found.time < 20.0


@pytest.mark.parametrize("silence", SILENCES, ids=["frozen", "cut off"])
def test_a_short_silence_loses_no_worker(silence: Callable[[float], Fault]) -> None:
    found = sl.simulate(count_steps, 3, elastic=(1, 3), faults=[silence(5.0)])
    assert found.results == ((8, (0, 1, 2)),) * 3
    assert 5.0 < found.time < 10.0


def test_a_frozen_rank_of_a_fixed_world_makes_the_others_wait() -> None:
    def work(world: World) -> float:
        return float(sl.allreduce(torch.ones(1), op="sum"))

    found = sl.simulate(work, 3, faults=[Freeze(1, at=0.0, seconds=12.0)])
    assert found.results == (3.0, 3.0, 3.0)
    assert found.time > 12.0


def test_one_of_two_workers_whose_link_is_cut_is_left_out() -> None:
    cut = Partition((0,), start=0.35, stop=20.0, others=(1,))
    found = sl.simulate(count_steps, 3, elastic=(1, 3), faults=[cut], timeout=12.0, return_exceptions=True)
    assert found.results[0] == found.results[2] == (8, (0, 2))
    assert "it and member 0 cannot reach each other" in str(found.results[1])
    assert found.time < 25.0


@pytest.mark.parametrize("strategy", ["allreduce", "local(period=2)"])
def test_a_worker_that_exits_is_not_waited_for(strategy: str) -> None:
    def work(world: World) -> tuple[int, tuple[int, ...]]:
        return count_steps(world, strategy, steps=8) if member_of(world) != 1 else leave(world)

    def leave(world: World) -> tuple[int, tuple[int, ...]]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.distribute(model, optimizer, strategy=strategy, algorithm="ring"):
            raise SystemExit(0)

    found = sl.simulate(work, 3, elastic=(1, 3))
    assert found.results[0] == found.results[2] == (8, (0, 2))
    assert found.results[1] is None
    assert found.time < 2.0


@pytest.mark.parametrize("strategy", ["average", "ensemble"])
def test_a_worker_that_sends_nothing_leaves_after_its_own_step(strategy: str) -> None:
    def work(world: World) -> int:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.distribute(model, optimizer, strategy=strategy, algorithm="ring") as run:
            for _ in run.shard(DataLoader(Numbers(12), batch_size=1)):
                world.compute(0.1)
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                if member_of(world) == 1 and world.elastic is not None:
                    world.elastic.leave_reason = "it received SIGTERM"
        return run.stats.steps

    found = sl.simulate(work, 3, elastic=(1, 3), return_exceptions=True)
    assert found.results[0] == found.results[2] == 4
    assert isinstance(found.results[1], SystemExit)
    assert found.time < 2.0


@pytest.mark.parametrize("strategy", ["local(period=8)", "diloco(period=8)"])
def test_local_steps_of_a_worker_lost_at_the_end_of_an_epoch_are_dealt_again(strategy: str) -> None:
    """The others have ended the epoch, whose batches are in no round yet."""
    troubles = {2: Trouble("kill", 2)}
    for seed in range(4):
        work = partial(train, strategy=strategy, codec=None, samples=48, troubles=troubles, journal=Journal())
        found = sl.simulate(work, WORKERS, elastic=(1, WORKERS), seed=seed, chaos=True)
        for result in check_outcome(found, troubles):
            assert [len(epoch) for epoch in result.changed] == [48, 48]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("adacomm", 50005),  # two workers are lost in a row with the same sample, before a round contains it
        ("diloco", 145),  # a newcomer without data in the step after it has entered waits with the others
        ("adacomm", 4),  # a newcomer does not enter between two rounds
        ("local", 115),  # a worker whose run is made after a loss that the others have seen in theirs
        ("gossip beside the step", 5025),  # a newcomer enters where all workers have run out of data
        ("diloco beside steps", 5052),  # a loss while the round in flight is completed before a newcomer enters
        ("dense", 5024),  # a team forms while a worker is cut off for less than the launcher's limit
    ],
)
def test_faults_that_once_failed(name: str, seed: int) -> None:
    endure(*ALL_STRATEGIES[name])(seed)
