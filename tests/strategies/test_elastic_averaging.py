"""Strategies with weights of each worker in elastic jobs: what their averages conserve while workers are lost and join.

With a learning rate of 0 only rounds change the weights. `Snapshot`s after each round show what a round has changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import syncline as sl
from syncline.control import Team
from syncline.errors import IncompatibleError
from syncline.strategies.base import strategy_run
from syncline.strategies.gossip import build_graph
from syncline.testing import hunt_cases
from syncline.transports.faults import Fault, Join, Partition
from syncline.transports.simulated import kill_rank
from syncline.world import World
from tests.data.cases import Numbers
from tests.hunting import seeds
from tests.strategies.test_elastic import member_of, survive
from tests.strategies.test_elastic_asynchronous import DECLARED_LOST, Trouble

WORKERS = 4
LENGTH = 5
"""Numbers in the model."""
STRATEGIES = {
    "easgd": ("easgd(period=2)", None),
    "easgd with momentum": ("easgd(period=1, momentum=0.5)", None),
    "easgd, sparse": ("easgd(period=2)", "topk(0.3)"),
    "gossip": ("gossip", None),
    "diloco beside steps": ("diloco(period=2, overlap=True)", None),
    "diloco beside a step, quantized": ("diloco(period=2, overlap=True, delay=1)", "quantize(8)"),
    "gossip beside the step": ("gossip(graph='complete', form='beside', period=2)", None),
    "gossip, quantized": ("gossip", "quantize(8)"),
}


@dataclass(frozen=True)
class Snapshot:
    """One worker after a round."""

    own: Tensor
    """Its weights."""
    centre: Tensor
    """The centre; zeros for strategies without one."""
    team: Team
    """Its present team."""


Record = dict[int, Snapshot]
"""Snapshots by the number of the round, or by worker."""


@dataclass(frozen=True)
class Round:
    """The snapshots of the workers before and after a round. A worker that is lost in the round has none after it."""

    before: Record
    after: Record
    order: tuple[int, ...]
    """All members in the order of their ranks."""

    @property
    def centre(self) -> Tensor:
        return next(iter(self.before.values())).centre

    def teams(self) -> Iterator[tuple[int, ...]]:
        """The teams that may have taken the round: those with a snapshot after it, and any of the lost workers."""
        lost = sorted(self.before.keys() - self.after.keys())
        for count in range(len(lost) + 1):
            for some in combinations(lost, count):
                yield tuple(member for member in self.order if member in self.after or member in some)

    @staticmethod
    def total(workers: Record) -> Tensor:
        return torch.stack([each.own for each in workers.values()]).sum(dim=0)


def record_rounds(world: World, strategy: str, codec: str | None, victims: dict[int, int], found: Record) -> None:
    """Take steps of learning rate 0 from different weights."""
    member, steps = member_of(world), 0
    model = torch.nn.Linear(LENGTH, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sl.distribute(model, optimizer, strategy=strategy, codec=codec, algorithm="auto") as run:
        inner: Any = strategy_run(run)

        def note() -> None:
            if steps and inner.rounds not in found:
                centre = inner.centre.root[0] if hasattr(inner, "centre") else torch.zeros(LENGTH)
                own = model.weight.detach().clone().view(-1)
                found[inner.rounds] = Snapshot(own, centre.clone().view(-1), inner.world.elastic.team)

        def sync(active: bool = True, before: Callable[[bool], int] = inner.sync) -> int:
            alive = before(active)
            note()  # a worker without data takes part in rounds too
            return alive

        inner.sync = sync
        for batch in run.shard(DataLoader(Numbers(192), batch_size=3)):
            steps += 1
            if steps == 1:
                if member < WORKERS:  # a newcomer may have begun a round already
                    with torch.no_grad():
                        model.weight.add_(torch.randn(LENGTH, generator=torch.Generator().manual_seed(member)))
                note()
            if victims.get(member) == steps:
                kill_rank(world.transport)
            world.compute(0.01)
            optimizer.zero_grad()
            model(batch.view(-1, 1).double().expand(-1, LENGTH)).sum().backward()
            optimizer.step()
            note()


def rounds_of(strategy: str, codec: str | None, seed: int) -> Iterator[Round]:
    """Each round of a job in which up to three of four workers are killed, and up to two join."""
    draw = random.Random(seed)
    victims = {member: draw.randint(1, 8) for member in draw.sample(range(WORKERS), draw.randint(0, 3))}
    joins: list[Fault] = [Join(at=draw.uniform(0, 0.2)) for _ in range(draw.randint(0, 2))]
    records: dict[int, Record] = {}
    found = sl.simulate(
        lambda world: record_rounds(world, strategy, codec, victims, records.setdefault(member_of(world), {})),
        WORKERS,
        elastic=(1, WORKERS + 2),
        faults=joins,
        seed=seed,
        chaos=seed % 2 == 1,
        return_exceptions=True,
    )
    for result in found.results:
        late = isinstance(result, BaseException) and ("has ended" in str(result) or "not admitted" in str(result))
        if isinstance(result, BaseException) and not late:
            raise result
    last = max(max(record) for record in records.values() if record)
    assert last >= 2, "few rounds were recorded"
    teams = sorted(
        (each.team for record in records.values() for each in record.values()), key=lambda team: team.generation
    )
    order = tuple(dict.fromkeys(member for team in teams for member in team.members))
    for number in range(last):
        before = {member: record[number] for member, record in records.items() if number in record}
        after = {member: records[member][number + 1] for member in before if number + 1 in records[member]}
        # Workers that complete the round and are lost at once: if no survivor has the result, the survivors repeat it.
        newest = max((each.team for each in after.values()), key=lambda team: team.generation, default=None)
        after = {member: each for member, each in after.items() if newest is not None and member in newest.members}
        team = {member for each in after.values() for member in each.team.members}
        # A worker without data may complete a round and take another one before it is recorded: some are incomplete.
        if after and team <= before.keys():
            yield Round(before, after, order)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=1e-12)


def follows_elastic_averaging(found: Round) -> bool:
    """One α for all, and the centre moves by what the workers in the round subtract.

    Σ x_i + x̃ then stays the same, but for the weights of a lost worker, which disappear after the last round in which
    it took part.
    """
    centre = found.before[next(iter(found.after))].centre  # a lost worker may have taken another round last
    for team in found.teams():
        alpha = 0.9 / len(team)
        pulls = {member: alpha * (found.before[member].own - centre) for member in team}
        moved = centre + torch.stack(list(pulls.values())).sum(dim=0)
        if all(
            close(after.own, found.before[member].own - pulls[member]) and close(after.centre, moved)
            for member, after in found.after.items()
        ):
            return True
    return False


def check_elastic_averaging(strategy: str) -> Callable[[int], None]:
    def check(seed: int) -> None:
        for number, found in enumerate(rounds_of(strategy, None, seed)):
            first, *others = found.after.values()
            assert all(torch.equal(other.centre, first.centre) for other in others), number
            assert follows_elastic_averaging(found), (number, found)
            if found.before.keys() == found.after.keys():
                assert close(found.total(found.before) + found.centre, found.total(found.after) + first.centre), number

    return check


@pytest.mark.hunt
@pytest.mark.parametrize("period", [1, 2])
def test_easgd_conserves_the_sum_of_weights_and_centre(period: int) -> None:
    check = check_elastic_averaging(f"easgd(period={period})")
    hunt_cases(check, seeds(6, 1200), f"check_elastic_averaging('easgd(period={period})')({{seed}})")


def follows_mixing(found: Round, graph: str) -> bool:
    """x ← W x, with the matrix of one team for all: the mean of that team stays the same."""
    for team in found.teams():
        mixed = build_graph(graph, len(team)).tensor() @ torch.stack([found.before[member].own for member in team])
        if all(close(after.own, mixed[team.index(member)]) for member, after in found.after.items()):
            return True
    return False


def check_mixing(form: str, period: int) -> Callable[[int], None]:
    def check(seed: int) -> None:
        for number, found in enumerate(rounds_of(f"gossip(form={form!r}, period={period})", None, seed)):
            assert follows_mixing(found, "ring"), (number, found)
            if found.before.keys() == found.after.keys():
                assert close(found.total(found.before), found.total(found.after)), number

    return check


@pytest.mark.hunt
@pytest.mark.parametrize(("form", "period"), [("after", 1), ("beside", 1), ("beside", 2)])
def test_gossip_mixes_with_the_matrix_of_one_team(form: str, period: int) -> None:
    hunt_cases(check_mixing(form, period), seeds(3, 1200), f"check_mixing({form!r}, {period})({{seed}})")


def check_compressed_mixing(seed: int) -> None:
    """Mixing conserves the mean only if every worker's estimate is the same at itself and at all its neighbours."""
    for number, found in enumerate(rounds_of("gossip", "topk(0.4)", seed)):
        if found.before.keys() == found.after.keys():
            before, after = found.total(found.before), found.total(found.after)
            assert torch.allclose(before, after, rtol=0.0, atol=1e-5), number


@pytest.mark.hunt
def test_compressed_gossip_conserves_the_mean() -> None:
    hunt_cases(check_compressed_mixing, seeds(4, 1200), "check_compressed_mixing({seed})")


@pytest.mark.hunt
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # in epochs that a newcomer has missed
@pytest.mark.parametrize("name", STRATEGIES)
def test_survivors_go_on_and_agree(name: str) -> None:
    hunt_cases(survive(*STRATEGIES[name]), seeds(2, 1200), f"survive{STRATEGIES[name]}({{seed}})")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("name", "seed"),
    [("diloco beside steps", 5004)],  # data is dealt to a worker that waits without data for a round in flight
)
def test_seeds_that_once_failed(name: str, seed: int) -> None:
    survive(*STRATEGIES[name])(seed)


@pytest.mark.hunt
@pytest.mark.parametrize("strategy", ["average", "ensemble(mean='outputs')"])
def test_a_lost_worker_is_left_out_of_the_mean(strategy: str) -> None:
    """One linear model: the mean of weights and the mean of predictions are equal, that of the survivors.

    Workers are killed, frozen, cut off, exit, or are asked to leave; sometimes one link is cut.
    """

    def work(world: World, troubles: dict[int, Trouble]) -> tuple[Tensor, Tensor, int]:
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with sl.distribute(model, optimizer, strategy=strategy, algorithm="ring") as run:
            for step, _ in enumerate(run.shard(DataLoader(Numbers(66), batch_size=4))):
                trouble = troubles.get(member_of(world))
                if trouble is not None and trouble.step == step:
                    trouble.strike(world)
                world.compute(0.01)
                optimizer.zero_grad()
                model(torch.full((1, 1), 2.0 ** member_of(world), dtype=torch.float64)).sum().backward()
                optimizer.step()
            own = model.weight.detach().clone()
            with run.agreed():
                found = model(torch.ones(1, 1, dtype=torch.float64)).detach().clone()
            return own, found, strategy_run(run).members

    def check(seed: int) -> None:
        draw, chaos = random.Random(seed), seed % 2 == 1
        troubles, faults = {}, list[Fault]()
        for member in draw.sample(range(WORKERS), draw.randint(0, 3)):
            seconds = draw.choice([draw.uniform(0.01, 9.0), draw.uniform(11.0, 20.0)])
            kind = draw.choice(["kill", "kill", "freeze", "cut", "exit", "leave"])
            troubles[member] = Trouble(kind, draw.randrange(4), seconds)
        if not chaos and draw.random() < 0.2:
            start = draw.uniform(0, 0.04)
            faults.append(Partition((0,), start, start + draw.uniform(0.01, 8.0), (draw.randrange(1, WORKERS),)))
        found = sl.simulate(
            lambda world: work(world, troubles),
            WORKERS,
            elastic=(1, WORKERS),
            faults=faults,
            seed=seed,
            chaos=chaos,
            return_exceptions=True,
        )
        left = [result for result in found.results if isinstance(result, tuple)]
        for member, result in enumerate(found.results):
            kind = troubles[member].kind if member in troubles else "none"
            if isinstance(result, BaseException) and not (
                (kind == "leave" and isinstance(result, SystemExit))
                or (kind in ("freeze", "cut") and any(words in str(result) for words in DECLARED_LOST))
            ):
                raise result
            assert result is not None or kind in ("kill", "exit")
        assert left, "no worker has ended well"
        assert found.time < 200.0, "a wait has ended at its timeout"
        mean = torch.stack([own for own, _, _ in left]).mean(dim=0)
        assert all(close(found, mean) for _, found, _ in left), (troubles, left)
        assert all(torch.equal(found, left[0][1]) for _, found, _ in left)

    hunt_cases(check, seeds(3, 600), "check({seed})")


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_count_if_all_workers_of_a_fraction_are_lost(victim: int) -> None:
    def work(world: World) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with sl.distribute(model, optimizer, strategy="local(period=2, fraction=0.5)", algorithm="ring"):
            for step in range(4):
                if step == 1 and member_of(world) == victim:
                    kill_rank(world.transport)
                world.compute(0.1)
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
        return model.weight.item()

    assert sl.simulate(work, 2, elastic=(1, 2)).results[1 - victim] == 1.0


@pytest.mark.parametrize("seed", [17, 42])
def test_adacomm_has_one_rate_after_a_loss_while_rates_are_compared(seed: int) -> None:
    """Some workers have the sum of three rates, and the others take it over when their team has two members."""

    def work(world: World) -> float:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.distribute(model, optimizer, strategy="adacomm(start=1, interval=1)", algorithm="ring") as run:
            for step in range(1, 5):
                if step == 2 and member_of(world) == seed % 3:
                    kill_rank(world.transport)
                optimizer.zero_grad()
                loss = model(torch.ones(1, 1)).sum()
                run.note_loss(1.0)
                loss.backward()
                optimizer.step()
            return float(strategy_run(run).state_dict()["shared"]["state"]["interval"]["top"])

    found = sl.simulate(work, 3, elastic=(1, 3), seed=seed, chaos=True).results
    assert [rate for rate in found if rate is not None] == pytest.approx([0.1, 0.1])


def test_a_newcomer_to_adacomm_without_losses_takes_the_same_rounds() -> None:
    def work(world: World) -> int:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.distribute(model, optimizer, strategy="adacomm(start=2)", algorithm="ring") as run:
            for batch in run.shard(DataLoader(Numbers(48), batch_size=2)):
                world.compute(0.1)
                model(batch.view(-1, 1).float()).sum().backward()
                optimizer.step()
        return world.size

    assert sl.simulate(work, 2, elastic=(1, 3), faults=[Join(at=0.1)]).results == (3, 3, 3)


def test_no_worker_joins_a_mean_that_is_taken_once() -> None:
    def work(world: World) -> None:
        model = torch.nn.Linear(1, 1)
        run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="average", algorithm="ring")
        for _ in run.shard(DataLoader(Numbers(16), batch_size=4)):
            world.compute(1.0)
        run.close()

    found = sl.simulate(work, 2, elastic=(1, 3), faults=[Join(at=0.5)], return_exceptions=True).results
    assert found[:2] == (None, None)
    assert isinstance(found[2], IncompatibleError)
    assert "no worker can join" in str(found[2])
