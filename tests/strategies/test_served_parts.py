"""Steps that go to the servers in several parts: all of them are as stale as the step, and none is overlooked."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.server.factors import factors_are_smaller
from syncline.server.protocol import MAX_INFLIGHT_REQUESTS
from syncline.strategies.master import MasterRun
from syncline.strategies.parameter_server import ParameterServerRun
from tests.strategies.cases import backward
from tests.strategies.served_cases import results


def in_parts(parts: int) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    """Each weight is a group of its own, and each group a part of every step."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(parts)])
    return model, torch.optim.SGD([{"params": [weight]} for weight in model], lr=0.3)


def attached(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str) -> Any:
    return sl.distribute(model, optimizer, strategy=strategy, algorithm="ring")


def step(model: nn.ParameterList, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.zero_grad()
    backward(torch.stack([weight[rank] for weight in model]).sum())
    optimizer.step()


def outpaced(strategy: str, parts: int, looks: bool = False) -> list[Any]:
    """Worker 0 takes three steps while worker 1 computes one: each worker's run, and what worker 1's step has done."""

    def work(world: sl.World) -> tuple[Any, list[float]]:
        model, optimizer = in_parts(parts)
        run = attached(model, optimizer, strategy)
        for _ in range(3 if world.rank == 0 else 1):
            world.compute(1.0 if world.rank == 0 else 3.5)
            if looks:  # at weights that no gradient comes of
                run.control_channel().load_weights(copy.deepcopy(model))
                run.shared_state()
            step(model, optimizer, world.rank)
        run.control_channel().finish()
        world.barrier()
        run.control_channel().load_weights(model)
        run.close()
        return run, [weight[1].item() for weight in model]

    return list(results(work, 2, dedicated=1))


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("parts", [2, MAX_INFLIGHT_REQUESTS])
def test_damp_applies_to_all_parts_of_a_step(parts: int, looks: bool) -> None:
    _, (_, done) = outpaced("master(sync=False, damp=True)", parts, looks)
    assert done == pytest.approx([-0.1] * parts)


def test_damp_does_not_change_buffers() -> None:
    """They are put, by whom others have overtaken too."""

    def work(world: sl.World) -> list[float]:
        model = nn.BatchNorm1d(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = attached(model, optimizer, "master(sync=False, damp=True)")
        for _ in range(5 if world.rank else 1):
            world.compute(1.0)
            optimizer.zero_grad()
            backward(model(torch.tensor([[1.0], [3.0]])).sum())
            optimizer.step()
        assert model.running_var is not None
        model.running_var.fill_(8.0)
        world.compute(0.0 if world.rank else 5.0)
        run.control_channel().finish()
        world.barrier()
        run.control_channel().load_weights(model)
        run.close()
        return [*model.running_var.tolist()]

    assert results(work, 2, dedicated=1) == ([8.0], [8.0])


@pytest.mark.parametrize("parts", [2, MAX_INFLIGHT_REQUESTS])
def test_staleness_does_not_depend_on_the_number_of_parts(parts: int) -> None:
    runs = [run for run, _ in outpaced("master(sync=False)", parts)]
    assert [run.pulls_with_push for run in runs] == [parts == 2] * 2
    assert runs[1].stats.staleness_counts == {3: 1}


@pytest.mark.parametrize("parts", [2, MAX_INFLIGHT_REQUESTS])
def test_late_steps_do_not_depend_on_the_number_of_parts(parts: int) -> None:
    def work(world: sl.World) -> int:
        model, optimizer = in_parts(parts)
        run = attached(model, optimizer, "master(fraction=0.5)")
        assert isinstance(run, MasterRun)
        for _ in range(4 if world.rank == 0 else 2):
            world.compute(1.0 if world.rank == 0 else 2.5)
            step(model, optimizer, world.rank)
        run.close()
        return run.late_steps

    alone, overtaken = results(work, 2, dedicated=1)
    assert alone == 0
    assert overtaken == 2


def test_a_worker_of_a_sub_master_reads_its_whole_step() -> None:
    def work(world: sl.World) -> list[list[float]]:
        model, optimizer = in_parts(3)
        run = attached(model, optimizer, "master(sync=False, masters=2)")
        assert isinstance(run, ParameterServerRun)
        seen = []
        for _ in range(3):
            world.compute(1.0)
            step(model, optimizer, world.rank)
            seen.append([weight[world.rank].item() for weight in model])
        run.close()
        return seen

    wanted = [pytest.approx([-0.3 * (taken + 1)] * 3) for taken in range(3)]
    for seen in results(work, 2):
        assert seen == wanted


# Factors.


def test_factors_are_sent_if_all_messages_are_fewer_bytes() -> None:
    whole = (0, 1 << 20)
    halves = [(0, 1 << 19), (1 << 19, 1 << 20)]
    assert factors_are_smaller(400, 1024, 1024, [whole])
    assert not factors_are_smaller(400, 1024, 1024, halves)  # the layer's input goes twice
    assert factors_are_smaller(300, 1024, 1024, halves)
    assert factors_are_smaller(200, 8192, 8192)
    assert not factors_are_smaller(1200, 8192, 8192)  # fewer bytes than the gradient, and too long for a message


def test_a_layer_of_many_pieces_is_sent_dense() -> None:
    """A gradient of 4 MB on two servers; a batch whose factors are fewer bytes than it, and twice its input's more."""

    def work(world: sl.World) -> tuple[int, Tensor]:
        model = nn.Linear(1024, 1024, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with attached(model, optimizer, "bsp(factors=True)") as run:
            before = run.client.bytes_wire
            backward(model(torch.full((400, 1024), 0.1)).sum())
            optimizer.step()
            sent = run.client.bytes_wire - before
        return sent, model.weight.detach()[0, 0]

    (sent, weight), _ = results(work, 2, dedicated=2)
    assert weight.item() == pytest.approx(-40.0, rel=1e-4)
    assert sent == 2 * 4 * 1024 * 1024  # the gradient there, the weights back
