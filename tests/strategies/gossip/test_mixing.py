"""Synchronous gossip: both forms do what their equations say, and each catch of the theory holds."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.strategies.gossip import Gossip, GossipRun, build_graph
from syncline.strategies.gossip.synchronous import SKETCH_SIZE, ConsensusSketch, PlainMixing
from tests.strategies.cases import backward
from tests.strategies.gossip.cases import begin, distance, expected, goal, row, take_step

GRAPHS: tuple[Any, ...] = (
    "ring",
    "torus",
    "exponential",
    "complete",
    "0-1, 1-2, 2-3, 1-4",
    ((0.5, 0.5, 0.0, 0.0, 0.0), (0.0, 0.5, 0.5, 0.0, 0.0), (0.0, 0.0, 0.5, 0.5, 0.0), (0.0, 0.0, 0.0, 0.5, 0.5),
     (0.5, 0.0, 0.0, 0.0, 0.5)),
)  # fmt: skip
WORKERS = 5


def run_of(strategy: Gossip, steps: int, rate: float, ranks: int = WORKERS, **options: Any) -> list[Tensor]:
    """Everybody's weights after each step."""

    def work(world: sl.World) -> list[Tensor]:
        model, optimizer, run = begin(world, strategy, rate, **options)
        seen = []
        for _ in range(steps):
            take_step(model, optimizer)
            seen.append(row(model))
        run.close()
        return seen

    found = sl.simulate(work, ranks).results
    return [torch.stack([seen[step] for seen in found]) for step in range(steps)]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("form", ["after", "beside"])
@pytest.mark.parametrize("period", [1, 3])
def test_weights_are_what_the_equation_says(graph: Any, form: Any, period: int) -> None:
    found = run_of(Gossip(graph, form=form, period=period), 8, 0.1)
    wanted = expected(build_graph(Gossip(graph).graph, WORKERS), form, period, 0.1, 8)
    for one, due in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, due, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["after", "beside"])
def test_the_mean_moves_by_the_mean_of_the_gradients(form: Any) -> None:
    found = run_of(Gossip(form=form), 6, 0.2)
    goals = torch.stack([goal(rank) for rank in range(WORKERS)])
    for before, after in itertools.pairwise(found):
        moved = after.mean(dim=0) - before.mean(dim=0)
        torch.testing.assert_close(moved, -0.2 * (before - goals).mean(dim=0), rtol=1e-4, atol=1e-5)


def test_a_matrix_with_wrong_column_sums_moves_the_mean() -> None:
    """Planted: rows alone. The check of `Gossip` is what keeps such a matrix out."""
    lopsided = ((0.9, 0.1, 0.0, 0.0, 0.0), (0.5, 0.5, 0.0, 0.0, 0.0), (0.0, 0.5, 0.5, 0.0, 0.0),
                (0.0, 0.0, 0.5, 0.5, 0.0), (0.0, 0.0, 0.0, 0.5, 0.5))  # fmt: skip
    checks = "syncline.strategies.gossip.graphs"
    with mock.patch(f"{checks}.check_matrix", lambda rows, what: rows), mock.patch(f"{checks}.check_connected"):
        found = run_of(Gossip(lopsided), 3, 0.0)
    assert float((found[-1].mean(dim=0) - found[0].mean(dim=0)).abs().max()) > 0.1


def test_complete_graph_with_form_after_is_synchronous_sgd() -> None:
    """From the same weights on, which is where the theory compares them."""

    def work(world: sl.World, strategy: Any) -> Tensor:
        model, optimizer, run = begin(world, strategy, 0.3, scattered=False, algorithm="ring")
        for _ in range(5):
            take_step(model, optimizer)
        run.close()
        return row(model)

    wanted = sl.simulate(lambda world: work(world, "allreduce"), WORKERS).results[0]
    after = sl.simulate(lambda world: work(world, Gossip("complete")), WORKERS).results
    for one in after:
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-6)
    beside = run_of_equal(Gossip("complete", form="beside"))
    assert distance(beside) > 0.01, "gradients are taken at weights that were not mixed: workers stay apart"
    assert distance(run_of_equal(Gossip("complete"))) < 1e-6


def run_of_equal(strategy: Gossip) -> Tensor:
    def work(world: sl.World) -> Tensor:
        model, optimizer, run = begin(world, strategy, 0.3, scattered=False)
        for _ in range(5):
            take_step(model, optimizer)
        last = row(model)
        run.close()
        return last

    return torch.stack(list(sl.simulate(work, WORKERS).results))


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("form", ["after", "beside"])
def test_rounds_contract_at_least_by_the_spectral_gap(graph: Any, form: Any) -> None:
    found = run_of(Gossip(graph, form=form), 10, 0.0)
    contraction = build_graph(Gossip(graph).graph, WORKERS).contraction
    for before, after in itertools.pairwise(found):
        assert distance(after) <= contraction * distance(before) + 1e-5
    torch.testing.assert_close(found[-1].mean(dim=0), found[0].mean(dim=0), rtol=1e-5, atol=1e-5)


def test_mixing_twice_the_difference_does_not_contract() -> None:
    finish = PlainMixing.finish

    def twice(self: PlainMixing) -> list[Tensor]:
        return [2.5 * change for change in finish(self)]

    with mock.patch.object(PlainMixing, "finish", twice):
        found = run_of(Gossip(), 6, 0.0)
    assert distance(found[-1]) > build_graph("ring", WORKERS).contraction ** 5 * distance(found[0])


def test_what_a_run_tells() -> None:
    def work(world: sl.World) -> tuple[float | None, int, dict[str, Any], float]:
        model, optimizer, run = begin(world, Gossip("ring"), 0.0)
        before = distance(torch.tensor([[(-2.0) ** rank] * 6 for rank in range(WORKERS)]))
        take_step(model, optimizer)
        told = run.stats.consensus, run.stats.bytes_wire, run.config, before
        run.close()
        return told

    for consensus, sent, config, before in sl.simulate(work, WORKERS).results:
        assert consensus == pytest.approx(before, rel=1e-6)
        weights, looks = 4 * 4 + 2 * 8, 6 * 8
        assert sent == 2 * weights + looks, "to two neighbours, and how far apart they are"
        assert config["spectral_gap"] == pytest.approx(build_graph("ring", WORKERS).gap)


def test_consensus_of_large_models_is_accurate_to_percents() -> None:
    weights = [torch.randn(300, 100, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    exact = distance(torch.stack([each.reshape(-1).double() for each in weights]))
    apart = ConsensusSketch(weights[:1])
    assert apart.sums(weights[:1]).numel() == SKETCH_SIZE
    told = distance(torch.stack([apart.sums([each]) for each in weights]))
    assert told == pytest.approx(exact, rel=0.06)


@pytest.mark.parametrize("form", ["after", "beside"])
@pytest.mark.parametrize("period", [1, 2])
def test_workers_without_data_continue_to_mix(form: Any, period: int) -> None:
    """Nine samples in batches of one over four workers: three epochs in which one worker takes a step more."""

    def work(world: sl.World) -> tuple[int, int, int, Tensor]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, Gossip(form=form, period=period), algorithm="ring")
        assert isinstance(run, GossipRun)
        own = 0
        loader = DataLoader(TensorDataset(torch.ones(9, 1)), batch_size=1)
        for _ in range(3):
            for (x,) in run.shard(loader):
                optimizer.zero_grad()
                backward(model(x).sum())
                optimizer.step()
                own += 1
        rounds, steps = run.rounds, run.stats.steps
        run.close()
        return own, steps, rounds, row(model)

    found = sl.simulate(work, 4).results
    assert sorted(own for own, _, _, _ in found) == [6, 6, 6, 9]
    assert {steps for _, steps, _, _ in found} == {9}
    assert len({rounds for _, _, rounds, _ in found}) == 1
    for _, _, _, weight in found:  # every gradient is 1, and counts a quarter of itself in the mean
        torch.testing.assert_close(weight, torch.tensor([-0.1 * 27 / 4], dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_half_precision_weights_are_mixed_in_single() -> None:
    def work(world: sl.World) -> Tensor:
        model = nn.Linear(3, 1, bias=False).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = sl.distribute(model, optimizer, Gossip())
        with torch.no_grad():
            model.weight.fill_(float(world.rank))
        backward(model(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
        optimizer.step()
        last = model.weight.detach().float().reshape(-1).clone()
        run.close()
        return last

    assert all(torch.equal(last, torch.ones(3)) for last in sl.simulate(work, 3).results)


def test_what_is_not_finite_is_named() -> None:
    def work(world: sl.World) -> None:
        model, optimizer, _ = begin(world, Gossip(), 0.1, check_finite=True)
        if world.rank == 1:
            with torch.no_grad():
                model.first.fill_(float("nan"))
        take_step(model, optimizer)

    with pytest.raises(sl.errors.DivergedError, match="on rank 1 after"):
        sl.simulate(work, 3)
