"""Gossip under a drawn case: which graph, which form, how many workers, what goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

import syncline as sl
from syncline.strategies.gossip import Gossip, GossipRun, PairwiseRun
from syncline.strategies.gossip.choco import Choco
from syncline.testing.hunting import kill_soon
from syncline.transports.faults import Delay, Fault, Slow
from tests.strategies.cases import backward
from tests.strategies.gossip.cases import begin, distance, expected, row, start, take_step

GRAPHS = ("ring", "torus", "exponential", "complete", "edges")
CODECS = ("topk(0.3)", "quantize(4)", "quantize(2)", "onebit", "ternary")
PATIENCE = 60.0


@dataclass(frozen=True)
class Case:
    """One draw."""

    seed: int
    workers: int
    graph: str
    form: str
    period: int
    steps: int
    rate: float
    codec: str
    chaos: bool
    faults: tuple[Fault, ...]
    doomed: int | None
    doom: int

    @staticmethod
    def draw(kind: str, seed: int) -> Case:
        draw = random.Random(f"{kind}/{seed}")
        workers = draw.randint(2, 6)
        faults: list[Fault] = []
        if draw.random() < 0.5:
            faults.append(Slow(draw.randrange(workers), draw.choice((3.0, 10.0)), start=draw.random() * 0.01))
        if draw.random() < 0.7:
            faults.append(Delay(draw.random() * 0.01, probability=0.3))
        edges = ", ".join(f"{draw.randrange(rank)}-{rank}" for rank in range(1, workers))  # a random tree
        graph = draw.choice(GRAPHS)
        return Case(
            seed=seed,
            workers=workers,
            graph=edges if graph == "edges" else graph,
            form=draw.choice(("after", "beside")),
            period=draw.randint(1, 3),
            steps=draw.randint(4, 9),
            rate=draw.choice((0.0, 0.1)),
            codec=draw.choice(CODECS),
            chaos=draw.random() < 0.75,
            faults=tuple(faults),
            doomed=draw.randrange(1, workers) if kind == "killed" else None,
            doom=draw.randrange(4),
        )

    def computes(self, rank: int, step: int) -> float:
        return random.Random(f"{self.seed}/{rank}/{step}").random() * 1e-3


def check_mixing(seed: int) -> float:
    """Weights are what the equations say after every step; without gradients they come together as the gap promises.

    Returns how much of the distance was left.
    """
    case = Case.draw("mixing", seed)
    strategy = Gossip(case.graph, form=case.form, period=case.period)  # type: ignore[arg-type]

    def work(world: sl.World) -> tuple[list[Tensor], Tensor, GossipRun]:
        model, optimizer, run = begin(world, strategy, case.rate)
        assert isinstance(run, GossipRun)
        seen = []
        for step in range(case.steps):
            world.compute(case.computes(world.rank, step))
            take_step(model, optimizer)
            seen.append(row(model))
        run.close()
        return seen, row(model), run

    found = sl.simulate(work, case.workers, faults=case.faults, seed=seed, chaos=case.chaos, timeout=PATIENCE).results
    graph = found[0][2].graph
    wanted = expected(graph, case.form, case.period, case.rate, case.steps)
    for step, due in enumerate(wanted):
        torch.testing.assert_close(torch.stack([seen[step] for seen, _, _ in found]), due, rtol=1e-5, atol=1e-4)
    for _, left, _ in found:
        torch.testing.assert_close(left, wanted[-1].mean(dim=0), rtol=1e-5, atol=1e-4)
        assert torch.equal(left, found[0][1]), "all have the same at the end"
    if case.rate:
        return 1.0
    distances = [distance(torch.stack([seen[step] for seen, _, _ in found])) for step in range(case.steps)]
    first = distance(torch.tensor([[start(rank)] * 6 for rank in range(case.workers)], dtype=torch.float64))
    rounds = sum(step % case.period == 0 for step in range(1, case.steps + (case.form == "after")))
    assert distances[-1] <= first * graph.contraction**rounds + 1e-4, (first, distances, graph.contraction, rounds)
    return distances[-1] / first


def check_choco(seed: int) -> float:
    """The mean stays, and everybody believes the same of everybody; how much of the distance was left."""
    case = Case.draw("choco", seed)
    rounds = 12
    strategy = Gossip(case.graph, form=case.form)  # type: ignore[arg-type]

    def work(world: sl.World) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        model, optimizer, run = begin(world, strategy, 0.0, codec=case.codec, seed=seed)
        assert isinstance(run, GossipRun)
        mixing = run.mixing
        assert isinstance(mixing, Choco)
        for step in range(rounds):
            world.compute(case.computes(world.rank, step))
            take_step(model, optimizer)
        run.drop_round()
        last = row(model)
        believed = {**mixing.estimates, world.rank: mixing.estimate}
        run.close()
        return last, row(model), believed

    found = sl.simulate(work, case.workers, faults=case.faults, seed=seed, chaos=case.chaos, timeout=PATIENCE).results
    first = torch.tensor([[start(rank)] * 6 for rank in range(case.workers)], dtype=torch.float64)
    last = torch.stack([own for own, _, _ in found])
    torch.testing.assert_close(last.mean(dim=0), first.mean(dim=0), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found[0][1], first.mean(dim=0), rtol=1e-4, atol=1e-3)
    for _, _, believed in found:
        for worker, hat in believed.items():
            assert torch.equal(hat, found[worker][2][worker]), f"what is believed of worker {worker} differs"
    return distance(last) / distance(first)


@dataclass
class Journal:
    """What a worker leaves, though it may be killed."""

    steps: int = 0
    last: Tensor | None = None
    agreed: Tensor | None = None
    draws: int = field(default=0)


def check_pairs(seed: int) -> int:
    """Averages of two conserve the sum under any order of events; how many there were."""
    case = Case.draw("pairs", seed)
    journals = _play(case, seed, steps=case.steps)
    total = torch.stack([journal.last for journal in journals if journal.last is not None]).sum(dim=0)
    assert all(journal.steps == case.steps for journal in journals)
    # Each step adds one to a weight of the worker's own, and everybody began somewhere else.
    begun = sum(start(rank) for rank in range(case.workers))
    due = torch.tensor([begun + (case.steps if at < case.workers else 0) for at in range(6)], dtype=torch.float64)
    torch.testing.assert_close(total, due, rtol=1e-5, atol=1e-4)
    for journal in journals:
        assert journal.agreed is not None
        torch.testing.assert_close(journal.agreed, due / case.workers, rtol=1e-5, atol=1e-4)
    return sum(journal.draws for journal in journals)


def check_killed(seed: int) -> bool:
    """One worker is killed at any moment: the others take all their steps, and nobody's weights leave the range that
    averages cannot leave. Whether it was killed before its end.
    """
    case = Case.draw("killed", seed)
    journals = _play(case, seed, steps=case.steps, rate=0.0)
    ends = [start(rank) for rank in range(case.workers)]
    for rank, journal in enumerate(journals):
        if rank == case.doomed:
            continue
        assert journal.steps == case.steps, f"worker {rank} has taken {journal.steps} steps"
        assert journal.last is not None
        assert journal.agreed is not None
        for found in (journal.last, journal.agreed):
            assert min(ends) - 1e-4 <= float(found.min()), found
            assert float(found.max()) <= max(ends) + 1e-4, found
    assert case.doomed is not None
    return journals[case.doomed].agreed is None


def _play(case: Case, seed: int, steps: int, rate: float = 1.0) -> list[Journal]:
    journals = [Journal() for _ in range(case.workers)]
    strategy = Gossip(case.graph, pairwise=True, period=case.period, seed=seed)

    def work(world: sl.World) -> None:
        model, optimizer, run = begin(world, strategy, rate)
        assert isinstance(run, PairwiseRun)
        journal = journals[world.rank]
        run.absorb()  # where everybody begins is part of the sum
        world.barrier()  # nobody averages with weights that do not begin where they should: what is added later adds up
        for step in range(steps):
            if case.doomed == world.rank and step >= case.doom:
                kill_soon(world)
            world.compute(case.computes(world.rank, step))
            optimizer.zero_grad()
            weights = torch.cat([model.first.reshape(-1).double(), model.second])
            backward(0.0 * model() - weights[world.rank])  # called as a whole: the average goes on beside it
            optimizer.step()
            journal.steps += 1
        journal.draws = run.draws
        if case.doomed is None:
            world.barrier()  # nobody changes anything any more
        assert run.peers is not None
        journal.last = run.peers.weights.double().clone()
        run.close()
        journal.agreed = row(model)

    sl.simulate(
        work, case.workers, faults=case.faults, seed=seed, chaos=case.chaos, timeout=PATIENCE,
    )  # fmt: skip
    return journals
