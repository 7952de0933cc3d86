"""What a run and its counts say of themselves when they are printed, and what becomes of a run that is copied."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import syncline as sl
from syncline.strategies import strategy_run
from tests.strategies.cases import backward


@pytest.mark.parametrize("strategy", ["allreduce", "local(period=2)", "gossip", "bsp", "ensemble"])
def test_the_configuration_is_there_after_close(strategy: str) -> None:
    def configure(world: sl.World) -> None:
        model = nn.Linear(2, 1)
        run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
        before = run.config
        board = strategy_run(run).control_channel()
        if board is not None:
            board.finish()
            world.barrier()  # a server lives with its worker
        run.close()
        assert run.config == before
        world.close()
        assert run.config == before
        assert "closed" in repr(run)

    sl.simulate(configure, ranks=2)


def test_runs_and_counts_are_readable() -> None:
    def train(world: sl.World) -> None:
        model = nn.Linear(100, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, codec="cast('fp16')", algorithm="ring")
        backward(model(torch.ones(1, 100)).sum())
        optimizer.step()
        shard = run.shard(DataLoader(list(range(8)), batch_size=2))  # type: ignore[arg-type]
        assert repr(shard) == "Shard(epoch 0, 2 steps an epoch)"
        assert "epoch 0" in repr(run.shard(iter([[1], [2]])))
        assert repr(run) == (
            f"Run(allreduce, codec cast('fp16'), collective ring, rank {world.rank} of 2, 1010 parameters, 1 step)"
        )
        assert "1 step, 2.05 kB of 4.04 kB sent" in repr(run.stats)
        for shown in (strategy_run(run)._repr_html_(), run.stats._repr_html_()):
            assert shown.startswith("<table>")
            assert "2.05 kB" in shown
        assert "cast(" in strategy_run(run)._repr_html_()
        run.close()
        assert repr(run).endswith("1 step, closed)")

    sl.simulate(train, ranks=2)


class Wrapped(nn.Module):
    """A module that keeps its run, as frameworks' modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1)
        self.run = sl.distribute(self.inner, optimizer)
        self.world = self.run.world


def test_a_module_that_keeps_its_run_can_be_copied_and_saved(tmp_path: Path) -> None:
    def keep(world: sl.World) -> None:
        module = Wrapped()
        for made in (copy.deepcopy(module), copy.copy(module)):
            assert made.run is module.run
            assert made.world is world
        file = tmp_path / f"{world.rank}.pt"
        del module.world
        torch.save(module, file)
        loaded = torch.load(file, weights_only=False)
        assert loaded.run is None
        assert torch.equal(loaded.inner.weight, module.inner.weight)
        with pytest.raises(TypeError, match=r"world.*cannot be pickled.*world\.rank"):
            torch.save(world, file)
        module.run.close()

    sl.simulate(keep, ranks=2)
