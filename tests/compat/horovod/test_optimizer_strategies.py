"""`DistributedOptimizer(strategy=…)`: the run that `sl.distribute` makes, behind Horovod's words."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import syncline as sl
from syncline.compat.horovod.context import init
from syncline.compat.horovod.ops import join
from tests.compat.horovod.training import STEPS, by_distribute, by_horovod, gradients, loss_of, wrapped
from tests.strategies.cases import backward, flat, mlp


@pytest.mark.parametrize("strategy", ["local(period=2)", "allreduce", "allreduce(delay=1)", "diloco(period=3)"])
def test_the_bits_of_distribute(strategy: str) -> None:
    ours = sl.simulate(partial(by_distribute, strategy=strategy), ranks=3).results
    theirs = sl.simulate(partial(by_horovod, strategy=strategy), ranks=3).results
    for found, wanted in zip(theirs, ours, strict=True):  # ranks may stand apart between two meetings
        assert torch.equal(found, wanted)


def test_a_codec_goes_with_it() -> None:
    spec = "local(period=2)"
    ours = sl.simulate(partial(by_distribute, strategy=spec, codec="quantize(8)"), ranks=2).results
    theirs = sl.simulate(partial(by_horovod, strategy=spec, compression="quantize(8)"), ranks=2).results
    assert torch.equal(theirs[0], ours[0])


def test_the_run_is_there() -> None:
    def case(world: sl.World) -> tuple[Tensor, Tensor]:
        init()
        model = mlp()
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="local(period=100)")
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(loss_of(model, step, world.rank))
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        assert optimizer.run.stats.steps == STEPS
        own = flat(model)
        with optimizer.run.agreed():
            agreed = flat(model)
        optimizer.run.close()
        return own, agreed

    results = sl.simulate(case, ranks=2).results
    assert not torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][1], (results[0][0] + results[1][0]) / 2)


def test_without_a_strategy_there_is_no_run() -> None:
    def case(world: sl.World) -> Any:
        init()
        model = mlp()
        return wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1)).run

    assert sl.simulate(case, ranks=2).results == (None, None)


@pytest.mark.parametrize("strategy", ["allreduce", "local(period=1)"])
def test_passes_add_up(strategy: str) -> None:
    def case(world: sl.World) -> Tensor:
        init()
        model = mlp()
        optimizer = wrapped(
            model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, backward_passes_per_step=2
        )
        for step in range(2):
            optimizer.zero_grad()
            for part in range(2):
                backward(loss_of(model, 2 * step + part, world.rank))
            optimizer.step()
        return flat(model)

    model = mlp()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        plain.zero_grad()
        for part in range(2):
            for rank in range(2):
                backward(loss_of(model, 2 * step + part, rank) / 2)
        plain.step()
    for found in sl.simulate(case, ranks=2).results:
        torch.testing.assert_close(found, flat(model))


def test_step_after_half_of_the_passes_is_refused() -> None:
    def case(world: sl.World) -> None:
        init()
        model = mlp()
        optimizer = wrapped(
            model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="allreduce", backward_passes_per_step=2
        )
        backward(loss_of(model, 0, world.rank))
        with pytest.raises(AssertionError, match="1 of backward_passes_per_step=2"):
            optimizer.step()

    sl.simulate(case, ranks=2)


def test_ranks_that_join_wait_for_the_others() -> None:
    def case(world: sl.World) -> tuple[int, list[Any]]:
        init()
        model = mlp()
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.0), strategy="allreduce")
        found = []
        for step in range(1 + world.rank):
            optimizer.zero_grad()
            backward(loss_of(model, step, world.rank))
            found.append(gradients(model))
            optimizer.step()
        return join(), found

    results = sl.simulate(case, ranks=2).results
    assert [last for last, _ in results] == [1, 1]
    assert len(results[1][1]) == 2
