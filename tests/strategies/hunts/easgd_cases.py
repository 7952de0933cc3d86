"""Elastic averaging without gradients, under a drawn case: whatever goes wrong on the way, the sum of all stays.

Σ x_i + x̃ is looked at for every weight. A worker that is killed in an exchange leaves each of its weights in one of two
states: the centre has what it gave, or has not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import syncline as sl
from syncline.strategies.easgd import EASGD
from syncline.strategies.easgd.parameter_server import ServerElasticRun, ServerElasticTreeRun
from syncline.strategies.easgd.synchronous import ElasticRun
from syncline.testing.hunting import kill_soon
from syncline.transports.faults import Delay, Drop, Duplicate, Fault, Slow
from tests.server.hunts import harness
from tests.server.hunts.harness import Journal, Servers
from tests.server.hunts.store_cases import PATIENCE
from tests.strategies.cases import backward

NUMEL = 6
"""Weights in each of two parameter groups."""


@dataclass(frozen=True)
class Outcome:
    """What a case came to."""

    killed: tuple[int, ...]
    opened: bool
    moved: float
    """How far the centre went: an exchange that never happens conserves too."""


@dataclass
class Case:
    """One draw."""

    seed: int
    workers: int
    servers: int
    steps: int
    period: int
    momentum: float
    centres: int
    chaos: bool
    faults: tuple[Fault, ...]
    doomed: int | None
    doom: int
    left: list[Tensor | None] = field(default_factory=list)
    """Each worker's x, as it has it when it ends or is killed."""
    given: list[list[Tensor]] = field(default_factory=list)
    """What a worker's exchange that is not over has on its way: to its centre, and from there to the root."""

    @staticmethod
    def draw(kind: str, seed: int) -> Case:
        draw = random.Random(f"easgd/{kind}/{seed}")
        served = kind.startswith("served")
        workers, steps = draw.randint(2, 4), draw.randint(3, 8)
        faults: list[Fault] = []
        if draw.random() < 0.5:
            faults.append(Slow(draw.randrange(workers), draw.choice((3.0, 10.0)), start=draw.random() * 0.01))
        if draw.random() < 0.5:
            faults.append(Delay(draw.random() * 0.01, probability=0.3))
        if served and draw.random() < 0.6:
            faults.append(Duplicate(0.3))
        if served and draw.random() < 0.5:
            faults.append(Drop(0.15))
        return Case(
            seed=seed,
            workers=workers,
            servers=draw.randint(1, 3),
            steps=steps,
            period=draw.randint(1, 3),
            momentum=draw.choice((0.0, 0.9)),
            centres=draw.randint(2, workers) if kind.endswith("tree") else 1,
            chaos=draw.random() < 0.75,
            faults=tuple(faults),
            doomed=draw.randrange(workers) if served and draw.random() < 0.4 else None,
            doom=draw.randrange(steps),
            left=[None] * workers,
            given=[[] for _ in range(workers)],
        )

    @property
    def strategy(self) -> EASGD:
        return EASGD(
            period=self.period,
            momentum=self.momentum,
            sync=not self.servers,
            centres=self.centres,
            root_every=1 + self.seed % 3 if self.centres > 1 else 1,
        )

    def starts(self, worker: int) -> Tensor:
        return torch.randn(2 * NUMEL, generator=torch.Generator().manual_seed(100 * self.seed + worker))

    @property
    def total(self) -> Tensor:
        """What must stay; the centres begin at 0."""
        return torch.stack([self.starts(worker) for worker in range(self.workers)]).double().sum(dim=0)


class Rows(nn.Module):
    """Two parameter groups, so that an exchange goes in several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(NUMEL))
        self.second = nn.Parameter(torch.zeros(NUMEL))

    def forward(self) -> Tensor:
        return self.first.sum() + self.second.sum()

    def fill(self, run: ElasticRun | ServerElasticRun, row: Tensor) -> None:
        """Put this worker elsewhere, at rest."""
        with torch.no_grad():
            for own in ([self.first, self.second], run.lookahead.x.values()):
                for number, tensor in enumerate(own):
                    tensor.copy_(row[number * NUMEL : (number + 1) * NUMEL])


def prepared(case: Case, world: sl.World) -> tuple[Rows, torch.optim.Optimizer, ElasticRun | ServerElasticRun]:
    model = Rows()
    optimizer = torch.optim.SGD([{"params": [model.first]}, {"params": [model.second]}], lr=0.0)
    run = sl.distribute(model, optimizer, strategy=case.strategy, algorithm="ring")
    assert isinstance(run, ElasticRun | ServerElasticRun)
    # The speed is taken from the way: without a rate it is what the exchanges did not explain, so none.
    model.fill(run, case.starts(world.rank))
    return model, optimizer, run


def row_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).clone()


# With servers.


def served(case: Case, world: sl.World, journal: Journal) -> None:
    model, optimizer, run = prepared(case, world)
    assert isinstance(run, ServerElasticRun)
    journal.opened = True
    draw = random.Random(f"{case.seed}/{world.rank}")
    case.left[world.rank] = row_of(run.own)
    for number in range(case.steps):
        if case.doomed == world.rank and number >= case.doom:
            kill_soon(world)
        world.compute(draw.random() * 1e-3)
        optimizer.zero_grad()
        backward(model())
        # Looked at when it is over: as of then.
        case.given[world.rank] = [
            run.difference,
            *([run.root_difference] if isinstance(run, ServerElasticTreeRun) else []),
        ]
        optimizer.step()
        case.left[world.rank] = row_of(run.own)
    run.control_channel().finish()
    case.given[world.rank] = []
    run.close()
    journal.ended = True


def check_served(kind: str, seed: int) -> Outcome:
    """Run one case and check that nothing is lost, with stragglers, delays, duplicates, losses and killed workers."""
    case = Case.draw(kind, seed)
    journals = [Journal(worker) for worker in range(case.workers)]
    servers = Servers(case.workers, case.servers)
    run, opened = harness.play(
        lambda world: served(case, world, journals[world.rank]), journals, servers, faults=case.faults, seed=seed,
        chaos=case.chaos, timeout=PATIENCE,
    )  # fmt: skip
    if not opened:
        return Outcome(tuple(run.killed), opened, 0.0)
    spaces = spaces_of(servers)
    held = torch.stack([row[: 2 * NUMEL] for row in spaces.values()]).double().sum(dim=0)
    off = torch.stack([row for row in case.left if row is not None]).double().sum(dim=0) + held - case.total
    for worker in run.killed:
        for given in case.given[worker]:
            # It was given and not yet taken off, or taken off and not arrived: by each weight.
            choices = torch.stack([off, off - given.double(), off + given.double()])
            off = choices.gather(0, choices.abs().argmin(dim=0, keepdim=True)).view(-1)
    assert off.abs().max() < 1e-4, f"worth {off.tolist()} has come from nowhere (killed: {run.killed})"
    return Outcome(tuple(run.killed), opened, float(spaces["easgd 1"].abs().max()))


def spaces_of(servers: Servers) -> dict[str, Tensor]:
    """What the servers hold at the end: the root's weights, and those of the groups."""
    parts: dict[str, list[Tensor]] = {}
    for server in sorted(servers.shards):
        for space in servers.shards[server].all:
            parts.setdefault(space.description.name, []).append(space.weights)
    return {name: torch.cat(rows) for name, rows in parts.items()}


# Without.


def together(case: Case, world: sl.World) -> tuple[Tensor, Tensor, Tensor]:
    """This worker's x, its group's share of a centre of its own, and the centre of all."""
    model, optimizer, run = prepared(case, world)
    assert isinstance(run, ElasticRun)
    for _ in range(case.steps):
        optimizer.zero_grad()
        backward(model())
        optimizer.step()
    share = torch.zeros(2 * NUMEL)
    groups: list[list[int]] = getattr(run.centre, "groups", [])
    for group in groups:
        if world.rank in group:
            share = row_of(run.centre.values) / len(group)
    found = row_of(run.own), share, row_of(run.centre.root)
    run.close()
    return found


def check_together(kind: str, seed: int) -> Outcome:
    """Run one synchronous case: the sum stays, and all have the same centre."""
    case = Case.draw(kind, seed)
    case.servers = 0
    found = sl.simulate(
        lambda world: together(case, world), case.workers, faults=case.faults, seed=seed, chaos=case.chaos,
        timeout=PATIENCE, network=sl.Network(latency=1e-4, jitter=0.5),
    ).results  # fmt: skip
    roots = [root for _, _, root in found]
    assert all(torch.equal(root, roots[0]) for root in roots), f"the centre differs: {roots}"
    off = torch.stack([own + share for own, share, _ in found]).double().sum(dim=0) + roots[0] - case.total
    assert off.abs().max() < 1e-4, f"worth {off.tolist()} has come from nowhere"
    return Outcome((), True, float(roots[0].abs().max()))
