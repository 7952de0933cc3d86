"""Checkpoints of elastic jobs in which each worker has its own pace, on the simulator: workers save after losses and
joins, and when the launcher ends the job. A later job of another size continues."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import syncline as sl
from syncline.control.team import ENDING
from syncline.environment.base import JOB_FOLDER_VARIABLE
from syncline.server import network_of, serve, server_network
from syncline.strategies import Run
from syncline.testing import hunt_cases
from syncline.transports.faults import Fault, Join
from syncline.transports.simulated import kill_rank
from syncline.world import Simulation, World
from tests.data.cases import Numbers
from tests.hunting import HUNTING, seeds
from tests.strategies.push_records import PushRecords, check_weights

# A newcomer steps the scheduler in epochs that it has missed.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

WORKERS, EPOCHS, BATCH = 3, 2, 2
STRATEGIES = {
    "ssp": "ssp(slack=1)",
    "bsp": "bsp",
    "downpour": "downpour(push=2, fetch=3, rule='sgd(1.0)')",
    "master": "master(sync=False)",
    "easgd": "easgd(sync=False, period=2)",
    "gossip": "gossip(pairwise=True)",
}
LATE = ("the job has ended", "not admitted")
"""Words of the errors of a newcomer that came too late."""
MAX_SECONDS = 200.0
"""Virtual seconds. Timeouts are 300 s."""
LAUNCHER = "the launcher received SIGUSR1"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One draw: what happens in the first job, and the size of the second one."""

    seed: int = 0
    chaos: bool = False
    samples: int = 24
    servers: int = 2
    replicas: int = 1
    kills: Mapping[int, int] = field(default_factory=dict)
    """By member: the step before which it is killed."""
    leaves: Mapping[int, int] = field(default_factory=dict)
    """By member: the step before which it alone is asked to leave."""
    joins: tuple[Fault, ...] = ()
    ends_after: int | None = None
    """The steps of all workers together after which the launcher ends the job; None: it does not."""
    told: frozenset[int] = frozenset(range(WORKERS))
    """The workers that receive a signal then. The others read the log."""
    saves: bool = False
    """Whether the script saves after epoch 0."""
    dies: tuple[int, float] | None = None
    """A worker that is killed while it saves, and after how many virtual seconds."""
    later_workers: int = 2
    later_elastic: bool = True

    @staticmethod
    def draw(seed: int) -> Case:
        draw = random.Random(f"asynchronous checkpoints {seed}")
        servers = draw.choice((1, 2))
        how = draw.choice(("ends", "ends", "all leave", "saves"))
        struck = draw.sample(range(WORKERS), draw.choice((0, 1, 1, 2)))
        kills = {member: draw.randrange(8) for member in struck}
        # Some workers may get the last signal before their first step.
        leaves = {member: draw.randrange(8) for member in range(WORKERS) if member not in kills and how == "all leave"}
        if how == "ends" and draw.random() < 0.3:
            leaves[draw.randrange(WORKERS)] = draw.randrange(4)
        return Case(
            seed=seed,
            chaos=seed % 2 == 1,
            samples=draw.choice([16, 25, 36]),
            servers=servers,
            replicas=draw.randint(1, servers),
            kills=kills,
            leaves=leaves,
            joins=tuple(Join(at=draw.uniform(0, 0.2)) for _ in range(draw.choice((0, 0, 1, 2)))),
            ends_after=draw.randrange(30) if how == "ends" else None,
            told=frozenset(draw.sample(range(WORKERS), draw.randint(1, WORKERS))),
            saves=how == "saves",
            dies=(draw.randrange(WORKERS), draw.uniform(0, 0.05)) if draw.random() < 0.4 else None,
            later_workers=draw.randint(1, 4),
            later_elastic=draw.random() < 0.5,
        )


@dataclass
class Journal:
    """What all workers of a simulation have done."""

    pushes: PushRecords = field(default_factory=PushRecords)
    steps: int = 0
    trained: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By epoch and sample: the steps that have ended with it."""
    ending: bool = False
    dying: bool = False


@dataclass(frozen=True)
class State:
    """What a checkpoint must keep of a worker."""

    weights: Tensor
    momentum: Tensor
    steps: int
    rate: float
    epoch: int

    @staticmethod
    def of(run: Run, epoch: int) -> State:
        [parameter] = run.model.parameters()
        momentum = run.optimizer.state[parameter].get("momentum_buffer", torch.zeros_like(parameter))
        rate = float(run.optimizer.param_groups[0]["lr"])
        return State(parameter.detach().clone(), momentum.clone(), run.stats.steps, rate, epoch)


@dataclass(frozen=True)
class Result:
    """The state of a worker at its start and at its end, and whether it was asked to leave."""

    start: State
    end: State
    left: bool


def train(
    world: World, strategy: str, case: Case, journal: Journal, folder: Path, loads: Path | None, momentum: float = 0.0
) -> Result:
    """Sample i changes row i of the model alone. `loads`: continue from the latest checkpoint there."""
    member = 0 if world.elastic is None else world.elastic.limits.member
    member, steps = world.rank if world.elastic is None else member, 0
    network = server_network(world, 1 if "gossip" in strategy else case.replicas).transport
    model = torch.nn.Embedding(case.samples, 2)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    epoch, start = 0, None

    def die(delay_s: float) -> None:
        world.runtime.sleep(delay_s)
        kill_rank(network)

    def die_in_save() -> None:
        if case.dies is not None and case.dies[0] == member and not journal.dying:
            journal.dying = True
            world.runtime.spawn(die, case.dies[1], name="dies")

    try:
        with sl.distribute(model, optimizer, strategy=strategy, algorithm="auto") as run:
            shard = run.shard(DataLoader(Numbers(case.samples), batch_size=BATCH, shuffle=True))
            if loads is not None:
                assert sl.load(loads, run=run, scheduler=scheduler) is not None
            epoch = shard.epoch
            with run.agreed():  # the weights at the servers; a worker of downpour may have its own
                start = State.of(run, epoch)
            for epoch in range(start.epoch, EPOCHS):
                for batch in shard:
                    journal.pushes.epochs[member] = epoch
                    if case.kills.get(member) == steps:
                        kill_rank(network)
                    ask_to_leave(world, case, journal, member, steps)
                    if journal.ending:
                        die_in_save()
                    steps += 1
                    world.compute(0.01 * (1 + member % 2))
                    model.weight.grad = torch.zeros_like(model.weight).index_fill_(0, batch, 1.0)
                    optimizer.step()
                    journal.steps += 1
                    journal.trained.update((epoch, int(each)) for each in batch)
                scheduler.step()
                if case.saves and epoch == 0:
                    die_in_save()
                    sl.save(folder, step=run.stats.steps, run=run, scheduler=scheduler)
    except SystemExit:
        assert start is not None
        return Result(start, State.of(run, epoch), left=True)
    return Result(start, State.of(run, epoch), left=False)


def ask_to_leave(world: World, case: Case, journal: Journal, member: int, steps: int) -> None:
    elastic = world.elastic
    if elastic is None:
        return
    if case.ends_after is not None and journal.steps >= case.ends_after:
        if not journal.ending:
            journal.ending = True
            elastic.formation.log.append(ENDING, reason=LAUNCHER)
        if member in case.told:
            elastic.leave_reason = "it received SIGTERM"
    if case.leaves.get(member) == steps:
        elastic.leave_reason = "it received SIGTERM"


def simulated(
    strategy: str, case: Case, folder: Path, workers: int = WORKERS, loads: Path | None = None, momentum: float = 0.0
) -> tuple[Simulation, Journal]:
    """A job of this case. One that loads has no faults."""
    journal, servers = Journal(), 0 if "gossip" in strategy else case.servers
    elastic = loads is None or case.later_elastic
    if loads is not None:
        case = replace(case, kills={}, leaves={}, joins=(), ends_after=None, saves=False, dies=None)
    members = [
        lambda transport: serve(network_of(transport, workers, servers, replicas=case.replicas, elastic=elastic))
    ] * servers
    with journal.pushes.recording():
        found = sl.simulate(
            lambda world: train(world, strategy, case, journal, folder, loads, momentum),
            workers,
            elastic=(1, workers + 2) if elastic else None,
            extra=members,
            faults=case.joins,
            seed=case.seed,
            chaos=case.chaos,
            return_exceptions=True,
        )
    late = any(isinstance(each, BaseException) for each in found.results)  # it may have waited for servers that end
    assert late or found.time < MAX_SECONDS, "a wait has ended at its timeout"
    return found, journal


def results_of(found: Simulation, case: Case) -> list[Result]:
    """The results of the workers that are left. A newcomer may come too late."""
    for number, result in enumerate(found.results):
        if isinstance(result, Result):
            continue
        if isinstance(result, BaseException):
            assert number >= WORKERS, repr(result)
            assert any(words in str(result) for words in LATE), repr(result)
        else:
            dies = case.dies is not None and case.dies[0] == number
            assert number in case.kills or dies, f"worker {number} has no result"
    return [result for result in found.results if isinstance(result, Result)]


def acknowledged(pushes: PushRecords) -> set[tuple[int, int]]:
    """The epochs and samples that are in pushes which a server has acknowledged."""
    return {
        (part.epoch, (part.first + int(key)) // 2)
        for parts in pushes.by_server().values()
        for part in parts
        if part.acknowledged
        for key in part.values.nonzero()
    }


def check_case(strategy: str, case: Case, folder: Path) -> bool:
    """Run a job, and one that continues it. Returns whether there was a checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    found, journal = simulated(strategy, case, folder)
    results = results_of(found, case)
    finished = [result for result in results if not result.left]
    if not results or (finished and not case.saves):
        return False  # all were lost, or have trained to the end
    if not folder.exists():
        left_before = case.leaves and (case.kills or case.dies)  # some left alone, and all others were lost then
        assert case.saves or left_before, "the last workers have saved nothing"
        return False
    later, continued = simulated(strategy, case, folder, case.later_workers, folder)
    starts = [result.start for result in later.results if isinstance(result, Result)]
    assert len(starts) == case.later_workers, later.results
    assert all(each.epoch == starts[0].epoch and each.steps == starts[0].steps for each in starts)
    first = starts[0].epoch
    pushes, pushed = journal.pushes, not strategy.startswith(("easgd", "gossip"))
    if case.saves:
        assert first == 1
        pushes = PushRecords([push for push in pushes.sent if push.epoch < first])
    assert all(each.rate == 0.5**first for each in starts)
    if pushed and strategy == "bsp":
        check_weights(pushes, starts[0].weights, synchronous=True)
    elif pushed:
        check_weights(pushes, starts[0].weights)
    for epoch in range(EPOCHS):
        before = acknowledged(pushes) if pushed else journal.trained.keys()
        for sample in range(case.samples):
            trained = (epoch, sample) in continued.trained or (epoch, sample) in before
            assert trained, f"sample {sample} of epoch {epoch} is lost (continued in epoch {first})"
            assert epoch >= first or (epoch, sample) not in continued.trained
    ends = [result.end.weights for result in later.results if isinstance(result, Result)]
    assert all(torch.equal(each, ends[0]) for each in ends)
    return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoints of the jobs of this test."""
    monkeypatch.setenv(JOB_FOLDER_VARIABLE, str(tmp_path / "job"))
    return tmp_path / "job" / "checkpoints"


def endure(name: str, folder: Path) -> Callable[[int], object]:
    """A case for each seed."""
    return lambda seed: check_case(STRATEGIES[name], Case.draw(seed), folder)


@pytest.mark.hunt
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_later_job_continues_whatever_has_happened(name: str, folder: Path) -> None:
    hunt_cases(
        endure(name, folder), seeds(2 if name in ("ssp", "gossip") else 1, 300), f"endure({name!r}, folder)({{seed}})"
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_save_together_if_the_launcher_ends_the_job(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One worker was killed before, one has joined, and one of the others gets the signal."""
    case = Case(samples=36, kills={1: 2}, joins=(Join(at=0.02),), ends_after=16, told=frozenset({2}))
    found, _ = simulated(STRATEGIES[name], case, folder, momentum=0.5)
    left = [result for result in found.results if isinstance(result, Result)]
    assert [result.left for result in left] == [True] * 3
    assert found.time < 5.0, "no wait has ended by its timeout"
    step = max(result.end.steps for result in left)
    assert caplog.text.count(f"{LAUNCHER}: step {step} is saved in {folder}") == 1
    again, _ = simulated(STRATEGIES[name], case, folder, 2, folder, momentum=0.5)
    for result in again.results:
        assert (result.start.steps, result.start.rate, result.start.epoch) == (step, 1.0, 0)
        if name in ("ssp", "bsp", "master"):  # the momentum is at the servers
            assert torch.equal(result.start.momentum, left[0].end.momentum)
            assert bool(result.start.momentum.any())


@pytest.mark.hunt
@pytest.mark.parametrize("name", ["ssp", "gossip"])
def test_a_worker_is_lost_in_the_middle_of_a_save(name: str, folder: Path) -> None:
    moments = ((1, 0.01), (0, 0.02), (0, 0.01), (1, 0.02))  # worker 0 writes the shared part
    for moment in moments if HUNTING else moments[:2]:
        case = Case(samples=12, ends_after=3, dies=moment, later_workers=1)
        assert check_case(STRATEGIES[name], case, folder)


@pytest.mark.parametrize("name", ["ssp", "gossip"])
def test_the_last_worker_that_leaves_saves(name: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A batch system has sent a signal to all workers, and none to the launcher."""
    assert check_case(STRATEGIES[name], Case(leaves={0: 1, 1: 3, 2: 2}), folder)
    assert caplog.text.count("all workers leave: step") == 1


def test_a_full_disk_does_not_disturb_the_end(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir()
    folder.write_text("a file where the folder would be")
    found, _ = simulated("ssp(slack=1)", Case(ends_after=6), folder)
    assert [result.left for result in found.results] == [True] * WORKERS
    assert "could not be saved in" in caplog.text


def rescale(seed: int, strategy: str) -> int:
    """Workers are killed, leave and join, and all scale their learning rate. Returns how many have joined."""
    draw = random.Random(f"on_resize {seed}")
    struck = draw.sample(range(WORKERS), draw.randint(0, 2))
    kinds = {member: (draw.choice(("kill", "leave")), draw.randrange(6)) for member in struck}
    joins = [Join(at=draw.uniform(0, 0.1)) for _ in range(draw.randint(0, 2))]

    def run_script(world: World) -> tuple[list[tuple[int, int]], float]:
        assert world.elastic is not None
        network = server_network(world).transport
        member, resized, steps = world.elastic.limits.member, list[tuple[int, int]](), 0
        model = torch.nn.Embedding(120, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def on_resize(old: int, new: int) -> None:
            resized.append((old, new))
            optimizer.param_groups[0]["lr"] *= new / old

        with sl.distribute(model, optimizer, strategy=strategy, algorithm="auto", on_resize=on_resize) as run:
            shard = run.shard(DataLoader(Numbers(120), batch_size=BATCH))
            for _ in range(shard.epoch, 2):
                for batch in shard:
                    kind, at = kinds.get(member, ("none", -1))
                    if at == steps and kind == "kill":
                        kill_rank(network)
                    elif at == steps:
                        world.elastic.leave_reason = "it received SIGTERM"
                    steps += 1
                    world.compute(0.01 * (1 + member % 2))
                    model.weight.grad = torch.zeros_like(model.weight).index_fill_(0, batch, 1.0)
                    optimizer.step()
        return resized, float(optimizer.param_groups[0]["lr"])

    servers = [] if "gossip" in strategy else [lambda transport: serve(network_of(transport, WORKERS, 1, elastic=True))]
    found = sl.simulate(
        run_script,
        WORKERS,
        elastic=(1, WORKERS + 2),
        extra=servers,
        faults=joins,
        seed=seed,
        return_exceptions=True,
    )
    results = [result for result in found.results if isinstance(result, tuple)]
    expected = WORKERS - len(struck) + len(joins)
    assert len(results) == expected, found.results
    for resized, rate in results:
        assert rate == pytest.approx(expected / WORKERS)
        assert all(before[1] == after[0] for before, after in pairwise(resized))
        assert not resized or resized[-1][1] == expected
        assert all(old != new for old, new in resized)
    for resized, _ in results[: WORKERS - len(struck)]:
        assert not resized or resized[0][0] == WORKERS
    return len(joins)


@pytest.mark.hunt
@pytest.mark.parametrize("name", ["ssp", "downpour", "gossip"])
def test_all_workers_are_told_how_many_they_are(name: str) -> None:
    hunt_cases(lambda seed: rescale(seed, STRATEGIES[name]), seeds(3, 300), f"rescale({{seed}}, {name!r})")
