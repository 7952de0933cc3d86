"""Compressed differences: the mean stays, workers come together, and no codec's losses are lost."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.strategies.gossip import Gossip, GossipRun
from syncline.strategies.gossip.choco import Choco
from tests.strategies.gossip.cases import begin, distance, row, take_step

CODECS = (
    "topk(0.1)",
    "quantize(4)",
    "quantize(2)",
    "onebit",
    "ternary",
    "randomk(0.2)",
    "cast",
    "lossless",
    "topk(0.2)|quantize(4)",
    "by_size(100, None, 'topk(0.1)')",
    "per_layer({'bias': None, '*': 'quantize(4)'})",
)
WORKERS = 4


def come_together(codec: str, rounds: int, **options: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Weights of all before and after so many rounds without gradients; what the run tells of itself."""

    def work(world: sl.World) -> tuple[Tensor, Tensor, dict[str, Any]]:
        model = nn.Linear(40, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = sl.distribute(model, optimizer, Gossip(**options), codec=codec)
        draw = torch.Generator().manual_seed(world.rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
        first = row(model)
        for _ in range(rounds):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        last, told = row(model), {**run.config, "logical": run.stats.bytes_logical, "wire": run.stats.bytes_wire}
        run.close()
        return first, last, told

    found = sl.simulate(work, WORKERS).results
    first, last = (torch.stack([each[number] for each in found]) for number in (0, 1))
    assert len({(each[2]["gossip_gamma"], each[2]["gossip_scale"]) for each in found}) == 1, "alike everywhere"
    return first, last, found[0][2]


@pytest.mark.parametrize("codec", CODECS)
def test_the_mean_stays_and_workers_come_together(codec: str) -> None:
    first, last, told = come_together(codec, 60)
    torch.testing.assert_close(last.mean(dim=0), first.mean(dim=0), rtol=1e-4, atol=1e-4)
    assert distance(last) < 0.35 * distance(first)
    assert 0 < told["gossip_gamma"] <= 1
    assert 0 < told["gossip_scale"] <= 1
    assert codec == "lossless" or told["wire"] < told["logical"]


def test_without_estimates_workers_do_not_converge() -> None:
    """What a codec leaves out must stay in x − x̂: sending C(x) itself, as if x̂ were 0, comes to nothing."""
    begin_round = Choco.begin

    def forgetful(self: Choco, weights: Any, number: int) -> None:
        for hat in (self.estimate, *self.estimates.values()):
            hat.zero_()
        begin_round(self, weights, number)

    with mock.patch.object(Choco, "begin", forgetful):
        first, last, _ = come_together("topk(0.1)", 60)
    assert distance(last) > 0.35 * distance(first)


def test_a_gamma_that_is_too_large_parts_them() -> None:
    first, last, _ = come_together("randomk(0.2)", 60, gamma=1.0)
    assert distance(last) > distance(first)


def test_an_exact_codec_is_plain_gossip() -> None:
    _, plain, _ = come_together("lossless", 5)

    def work(world: sl.World) -> Tensor:
        model = nn.Linear(40, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = sl.distribute(model, optimizer, Gossip())
        draw = torch.Generator().manual_seed(world.rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
        for _ in range(5):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        last = row(model)
        run.close()
        return last

    found = torch.stack(list(sl.simulate(work, WORKERS).results))
    torch.testing.assert_close(plain, found, rtol=1e-5, atol=1e-5)


def test_the_mean_moves_by_the_mean_gradient() -> None:
    def work(world: sl.World) -> list[tuple[Tensor, Tensor]]:
        model, optimizer, run = begin(world, Gossip(), 0.1, codec="topk(0.3)")
        seen = []
        for _ in range(6):
            before = row(model)
            take_step(model, optimizer)
            seen.append((before - model.get_buffer("goal"), row(model) - before))
        run.close()
        return seen

    found = sl.simulate(work, WORKERS).results
    for step in range(6):
        gradient, moved = (torch.stack([each[step][number] for each in found]).mean(dim=0) for number in (0, 1))
        torch.testing.assert_close(moved, -0.1 * gradient, rtol=1e-4, atol=1e-4)


def test_estimates_survive_a_checkpoint(tmp_path: Any) -> None:
    def work(world: sl.World, resume: bool) -> tuple[Tensor, dict[int, Tensor]]:
        model, optimizer, run = begin(world, Gossip(), 0.1, codec="topk(0.3)")
        assert isinstance(run, GossipRun)
        mixing = run.mixing
        assert isinstance(mixing, Choco)
        if resume:
            sl.load(tmp_path, run=run)
        else:
            for _ in range(4):
                take_step(model, optimizer)
            sl.save(tmp_path, step=4, run=run)
        found = mixing.estimate.clone(), {source: hat.clone() for source, hat in mixing.estimates.items()}
        run.close()
        return found

    before = sl.simulate(lambda world: work(world, resume=False), WORKERS).results
    after = sl.simulate(lambda world: work(world, resume=True), WORKERS).results
    for rank in range(WORKERS):
        assert torch.equal(before[rank][0], after[rank][0])
        for source, hat in after[rank][1].items():
            assert torch.equal(hat, before[source][0])
    fewer = sl.simulate(lambda world: work(world, resume=True), 3).results
    for rank in range(3):
        assert all(torch.equal(hat, fewer[source][0]) for source, hat in fewer[rank][1].items())


def test_weights_that_are_not_finite_are_named() -> None:
    def work(world: sl.World) -> None:
        model, optimizer, _ = begin(world, Gossip(), 0.1, codec="quantize(4)")
        if world.rank == 1:
            with torch.no_grad():
                model.first.fill_(float("inf"))
        take_step(model, optimizer)

    with pytest.raises(
        sl.errors.DivergedError, match=r"the weights of rank 1 are not finite in round 0, and quantize\(4\)"
    ):
        sl.simulate(work, 3)


@pytest.mark.parametrize("codec", ["lossless", "topk(0.5)", "by_size(10, None, 'cast(\\'bf16\\')')"])
def test_double_precision_is_kept(codec: str) -> None:
    """The mean stays and workers come together far below what float32 tells apart, in a model of two types too."""

    def work(world: sl.World) -> tuple[Tensor, Tensor]:
        model = nn.ParameterList([torch.ones(20, dtype=torch.float64), torch.ones(7, dtype=torch.float32)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sl.distribute(model, optimizer, Gossip(), codec=codec)
        with torch.no_grad():
            model[0] += 1e-10 * torch.randn(20, generator=torch.Generator().manual_seed(world.rank)).double()
        first = model[0].detach().clone()
        for _ in range(30):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        assert model[1].dtype == torch.float32
        assert bool((model[1] == 1).all())
        return first, model[0].detach().clone()

    first, last = (torch.stack(each) for each in zip(*sl.simulate(work, 3).results, strict=True))
    assert float((first.mean(dim=0) - last.mean(dim=0)).abs().max()) < 1e-15
    assert distance(last) < 1e-3 * distance(first)
