"""Workers are lost, leave and join while the others average in pairs, on the simulator."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import syncline as sl
from syncline.errors import PeerLostError
from syncline.server import network_of, serve
from syncline.strategies.base import strategy_run
from syncline.strategies.gossip import GRAPHS, Gossip, PairwiseRun
from syncline.strategies.gossip.pairwise import REQUEST_TAG, STATE, PairMessage, PairwisePeers
from syncline.testing import hunt_cases
from syncline.transports.faults import Fault, Join
from syncline.transports.simulated import cut_off_rank, freeze_rank, kill_rank
from syncline.world import Simulation, World
from tests.data.cases import Numbers
from tests.hunting import seeds

WORKERS, EPOCHS = 4, 2
FIXED_GRAPHS: dict[str, tuple[Any, int]] = {
    "edges": ("0-1, 1-2, 2-3", 0),
    "matrix": ([[0.5, 0.25, 0, 0.25], [0.25, 0.5, 0.25, 0], [0, 0.25, 0.5, 0.25], [0.25, 0, 0.25, 0.5]], 0),
    "servers": ("ring", 1),
}
"""Graphs that no worker can join, each with the servers of the job."""
LATE = ("the job has ended", "not admitted")
"""What a newcomer says that comes too late."""
LOST = ("was declared lost", "declared this rank lost")
"""What a worker says that was frozen or cut off for too long."""
REFUSED = "survives the loss of a worker, but no worker can join"


@dataclass(frozen=True)
class Blow:
    """What happens to a worker: "kill", "freeze" or "cut", before a step, in `agreed()` or when it closes its run.

    With "leave" it is asked to leave as by SIGTERM, before a step.
    """

    kind: str
    where: str
    number: int
    seconds: float = 0.0

    def strike(self, world: World, where: str, number: int) -> None:
        if (self.where, self.number) != (where, number):
            return
        if self.kind == "leave":
            assert world.elastic is not None
            world.elastic.leave_reason = "it received SIGTERM"
        elif self.kind == "kill":
            kill_rank(world.transport.job_channel)
        elif self.kind == "freeze":
            freeze_rank(world.transport.job_channel, self.seconds)
        else:
            cut_off_rank(world.transport.job_channel, self.seconds)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One draw."""

    seed: int
    strategy: Gossip
    samples: int
    rate: float
    blows: Mapping[int, Blow]
    joins: Sequence[Fault]
    servers: int = 0

    @staticmethod
    def draw(seed: int, fixed: str = "") -> Case:
        """`fixed` names a graph that no worker can join."""
        draw = random.Random(f"pairwise {seed}")
        blows = {}
        for member in draw.sample(range(WORKERS), draw.choice([0, 1, 1, 2, 3])):
            kind = draw.choice(["kill", "kill", "freeze", "cut", "leave"])
            where = "step" if kind == "leave" else draw.choice(["step", "step", "step", "agreed", "close"])
            blows[member] = Blow(
                kind, where, draw.randrange(8 if where == "step" else EPOCHS), draw.choice([0.1, 15.0])
            )
        if len(blows) == WORKERS - 1 and draw.random() < 0.5:  # the newcomers may be all that is left
            blows[min(set(range(WORKERS)) - blows.keys())] = Blow("kill", "step", 7)
        graph, servers = FIXED_GRAPHS[fixed] if fixed else (draw.choice(sorted(GRAPHS)), 0)
        return Case(
            seed=seed,
            servers=servers,
            strategy=Gossip(graph, pairwise=True, period=draw.randint(1, 2), seed=seed),
            samples=draw.choice([24, 33, 48]),
            rate=draw.choice([0.0, 1.0]),
            blows=blows,
            joins=[Join(at=draw.uniform(0, 0.15)) for _ in range(draw.randint(0, 2))],
        )


@dataclass
class Journal:
    """What all workers of a simulation have done, in virtual order."""

    trained: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By epoch and sample: the steps that have ended with it."""
    read: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By epoch and sample: the batches that were read with it."""
    begun: dict[int, Tensor] = field(default_factory=dict)
    """By worker: the weights with which it takes part."""
    steps: dict[int, Tensor] = field(default_factory=dict)
    """By worker: the sum of its steps."""


@dataclass(frozen=True)
class Result:
    """What a worker has at its end."""

    member: int
    weights: Tensor
    buffer: Tensor
    rate: float
    agreed: tuple[Tensor, ...]


class Rows(nn.Module):
    """Sample i changes row i alone."""

    def __init__(self, samples: int, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((samples, 2), start, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: Tensor) -> Tensor:
        self.get_buffer("seen").add_(len(batch))
        return self.weight[batch].sum()


def start_of(member: int) -> float:
    return 2.0**member


def train(world: World, case: Case, journal: Journal) -> Result:
    assert world.elastic is not None
    member, steps, agreed = world.elastic.limits.member, 0, []
    blow = case.blows.get(member, Blow("none", "never", 0))
    model = Rows(case.samples, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with sl.distribute(model, optimizer, strategy=case.strategy, algorithm="auto") as run:
        inner = strategy_run(run)
        assert isinstance(inner, PairwiseRun)
        if member < WORKERS:
            with torch.no_grad():
                model.weight.fill_(start_of(member))
            inner.absorb()
            journal.begun[member] = model.weight.detach().clone()
            inner.wait_for_all("begin with weights of their own")
        shard = run.shard(DataLoader(Numbers(case.samples), batch_size=2, shuffle=True))
        for epoch in range(shard.epoch, EPOCHS):
            for batch in shard:
                journal.read.update((epoch, int(each)) for each in batch)
                blow.strike(world, "step", steps)
                steps += 1
                world.compute(0.01 * (1 + member % 2))
                optimizer.zero_grad()
                (case.rate * model(batch)).backward()
                optimizer.step()
                journal.trained.update((epoch, int(each)) for each in batch)
                assert model.weight.grad is not None
                moved = optimizer.param_groups[0]["lr"] * model.weight.grad
                journal.steps[member] = journal.steps.get(member, torch.zeros(1, dtype=torch.float64)) - moved
            blow.strike(world, "agreed", epoch)
            with run.agreed():
                agreed.append(model.weight.detach().clone())
            scheduler.step()
        blow.strike(world, "close", 0)
    rate = float(optimizer.param_groups[0]["lr"])
    return Result(member, model.weight.detach().clone(), model.get_buffer("seen").clone(), rate, tuple(agreed))


def simulated(case: Case) -> tuple[Simulation, Journal]:
    journal = Journal()
    prepare = PairwiseRun.prepare_to_join

    def prepare_and_note(run: PairwiseRun) -> None:
        """Nobody averages with a newcomer before it takes part: what it has now is what it adds to the sum."""
        prepare(run)
        assert run.peers is not None
        assert run.membership is not None
        journal.begun[run.membership.member] = run.peers.weights.clone().view(case.samples, 2)

    with mock.patch.object(PairwiseRun, "prepare_to_join", prepare_and_note):
        found = sl.simulate(
            lambda world: train(world, case, journal),
            WORKERS,
            elastic=(1, WORKERS + 2),
            faults=case.joins,
            seed=case.seed,
            chaos=case.seed % 2 == 1,
            extra=[lambda transport: serve(network_of(transport, WORKERS, 1, elastic=True))] * case.servers,
            timeout=60.0,
            return_exceptions=True,
        )
    return found, journal


def outcome(found: Simulation, case: Case) -> list[Result]:
    """The results of the workers that ended well. A newcomer may come too late, and a frozen one be declared lost."""
    for number, result in enumerate(found.results):
        if not isinstance(result, BaseException):
            continue
        kind = case.blows[number].kind if number < WORKERS and number in case.blows else "none"
        if kind == "leave" and isinstance(result, SystemExit):
            continue
        expected = LOST if kind in ("freeze", "cut") else (*LATE, *((REFUSED,) if number >= WORKERS else ()))
        if not any(words in str(result) for words in expected):
            raise result
    return [result for result in found.results if isinstance(result, Result)]


def check(seed: int, fixed: str = "") -> int:
    """All workers that are left end with the same model, and averages change no sum. Returns how many have joined.

    With a `fixed` graph it returns how many newcomers were refused.
    """
    case = Case.draw(seed, fixed)
    found, journal = simulated(case)
    results = outcome(found, case)
    spared = [member for member in range(WORKERS) if member not in case.blows]
    assert {each.member for each in results} >= set(spared)
    for result in results:
        assert torch.equal(result.weights, results[0].weights)
        assert torch.equal(result.buffer, results[0].buffer)
        assert result.rate == 0.5**EPOCHS
    full = [each for each in results if each.member < WORKERS]
    for at_end in zip(*(each.agreed for each in full), strict=True):
        assert all(torch.equal(each, at_end[0]) for each in at_end)
    late = [
        each
        for each in found.results
        if isinstance(each, BaseException) and any(words in str(each) for words in (*LATE, REFUSED))
    ]
    losses = len(found.results) - len(results) - len(late)
    assert found.time < 60.0 * 2, "a wait has ended at its timeout"
    for epoch in range(EPOCHS):
        for sample in range(case.samples if results and not fixed else 0):
            assert journal.trained[epoch, sample] >= 1, (epoch, sample)
            assert journal.read[epoch, sample] <= 1 + losses, (epoch, sample)
    joined = [each for each in results if each.member >= WORKERS]
    if case.rate == 0.0:  # means cannot leave the range in which the first workers have begun
        for weights in (*journal.begun.values(), *(each.weights for each in results)):
            assert start_of(0) - 1e-9 <= float(weights.min())
            assert float(weights.max()) <= start_of(WORKERS - 1) + 1e-9
    if fixed:
        assert not joined
        assert set(journal.read.values()) <= {1}, "no batch is dealt again"
    if losses == 0:
        total = sum(journal.begun[each.member] + journal.steps.get(each.member, 0.0) for each in results)
        assert isinstance(total, Tensor)
        torch.testing.assert_close(len(results) * results[0].weights, total)
    return sum(REFUSED in str(result) for result in found.results[WORKERS:]) if fixed else len(joined)


@pytest.mark.hunt
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_workers_leave_and_join() -> None:
    joined: list[int] = []
    hunt_cases(lambda seed: joined.append(check(seed)), seeds(6), "check({seed})")
    assert sum(joined) >= len(joined) // 4


@pytest.mark.hunt
@pytest.mark.parametrize("graph", FIXED_GRAPHS)
def test_workers_leave_a_graph_that_nobody_can_join(graph: str) -> None:
    refused: list[int] = []
    hunt_cases(lambda seed: refused.append(check(seed, graph)), seeds(6), f"check({{seed}}, {graph!r})")
    assert sum(refused), "no newcomer was refused"


@pytest.mark.parametrize("seed", [14, 25])
def test_a_worker_that_was_declared_lost_at_its_end_says_so(seed: int) -> None:
    """In a graph that no worker can join. It once ended with weights of its own."""
    check(seed, "servers")


def test_a_worker_leaves_a_graph_of_edges_at_once() -> None:
    def work(world: World) -> float:
        assert world.elastic is not None
        model = Rows(24, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with suppress(SystemExit), sl.distribute(model, optimizer, Gossip("0-1, 1-2", pairwise=True)) as run:
            for step, batch in enumerate(run.shard(DataLoader(Numbers(24), batch_size=1))):
                if world.elastic.limits.member == 1 and step == 2:
                    world.elastic.leave_reason = "it received SIGTERM"
                world.compute(1.0)
                optimizer.zero_grad()
                run.model(batch).backward()
                optimizer.step()
        return world.runtime.now()

    first, leaving, last = sl.simulate(work, 3, elastic=(1, 3)).results
    assert leaving < 5.0
    assert 8.0 < first < 15.0
    assert 8.0 < last < 15.0


@pytest.mark.parametrize("lost_in", ["read the weights", "leave with the same model"])
def test_a_state_that_not_all_have_counts_for_nobody(lost_in: str) -> None:
    """Worker 2 is killed when it has sent its weights to worker 0, and not to worker 1."""
    exchange = PairwisePeers.exchange_states

    def exchange_or_die(peers: PairwisePeers, number: int, alive: Any, what: str) -> dict[int, Tensor]:
        if peers.channel.rank == 2 and what == lost_in:
            peers.channel.send(PairMessage.write(STATE, number, peers.state), 0, REQUEST_TAG).wait()
            kill_rank(peers.channel)
            peers.channel.runtime.sleep(1.0)
        return exchange(peers, number, alive, what)

    def work(world: World) -> list[float]:
        model = Rows(4, 0.0)
        run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), Gossip(pairwise=True))
        inner = strategy_run(run)
        assert isinstance(inner, PairwiseRun)
        with torch.no_grad():
            model.weight.fill_(start_of(world.rank))
        inner.absorb()
        with run.agreed():
            agreed = float(model.weight.detach().mean())
        run.close()
        return [agreed, float(model.weight.detach().mean())]

    with mock.patch.object(PairwisePeers, "exchange_states", exchange_or_die):
        found = sl.simulate(work, 3, elastic=(1, 3), return_exceptions=True).results
    of_two, of_three = (1.0 + 2.0) / 2, (1.0 + 2.0 + 4.0) / 3
    agreed = of_two if lost_in == "read the weights" else pytest.approx(of_three)
    assert found == ([agreed, of_two], [agreed, of_two], None)


def test_a_graph_of_edges_takes_no_newcomer() -> None:
    def work(world: World) -> float:
        model = Rows(4, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with sl.distribute(model, optimizer, Gossip("0-1, 1-2", pairwise=True)) as run:
            world.compute(1.0)
            optimizer.zero_grad()
            run.model(torch.arange(4)).backward()
            optimizer.step()
        return float(model.weight.detach().sum())

    found = sl.simulate(work, 3, elastic=(1, 4), faults=[Join(at=0.5)], return_exceptions=True).results
    assert isinstance(found[3], sl.errors.IncompatibleError)
    assert "no worker can join: take a graph by its name" in str(found[3])
    assert found[:3] == (-8.0, -8.0, -8.0)


def test_a_newcomer_that_reaches_no_worker_gives_up() -> None:
    """The others train for 60 s, and the newcomer waits for 5 s at most."""

    def unreachable(peers: PairwisePeers, peer: int) -> Tensor:
        raise PeerLostError(f"no way to {peer}", peer=peer)

    def work(world: World) -> float:
        model = Rows(12, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with sl.distribute(model, optimizer, Gossip("ring", pairwise=True)) as run:
            for batch in run.shard(DataLoader(Numbers(12), batch_size=2)):
                world.compute(20.0)
                optimizer.zero_grad()
                run.model(batch).backward()
                optimizer.step()
        return float(model.weight.detach().sum())

    with mock.patch.object(PairwisePeers, "read_state", unreachable):
        found = sl.simulate(work, 2, elastic=(1, 3), faults=[Join(at=0.5)], timeout=5.0, return_exceptions=True)
    assert found.results[:2] == (-12.0, -12.0)
    assert "has reached none of the workers [0, 1] in 5 s" in str(found.results[2])
