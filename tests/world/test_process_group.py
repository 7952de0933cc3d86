"""`sl.init(process_group=True)` and `sl.init(hide=True)`: beside code that speaks torch.distributed itself."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DistributedSampler

import syncline as sl
from syncline.environment import Environment
from syncline.transports.torch_dist.process_groups import DefaultGroup
from tests.launching import launch, torch_variables


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    yield
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()
    assert not left


def test_a_world_of_one_has_a_group_as_long_as_it_lives() -> None:
    hook = sys.excepthook
    for _ in range(2):
        with sl.init(process_group=True) as world:
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
            assert list(DistributedSampler(range(3), shuffle=False)) == [0, 1, 2]  # type: ignore[arg-type]
            assert sl.init(process_group=True) is world
        assert not dist.is_initialized()
        assert sys.excepthook is hook


def test_the_process_group_is_optional_and_can_be_made_later() -> None:
    with sl.init() as world:
        assert not dist.is_initialized()
        assert sl.init(process_group=True) is world
        assert dist.is_initialized()


def test_a_group_of_the_scripts_own_stays() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with sl.init(process_group=True):
        pass
    assert dist.is_initialized()
    dist.destroy_process_group()
    with sl.init(process_group=True):
        dist.destroy_process_group()  # and a script may destroy ours


def test_a_simulation_has_none() -> None:
    with pytest.raises(sl.errors.UnsupportedError, match=r"process_group=True.*simulated"):
        sl.simulate(lambda world: sl.init(process_group=True), ranks=2)


LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "SLURM_NTASKS": "1"}


def test_launcher_variables_are_hidden_until_the_world_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_TRANSPORT", "single")
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        world = sl.init(hide=True)
        assert not any(name in os.environ for name in LAUNCHER)
        assert all(world.environ[name] == value for name, value in LAUNCHER.items())
        assert sl.init(hide=True) is world
        os.environ["LOCAL_RANK"] = "7"  # set by somebody meanwhile
        world.close()
        assert os.environ["LOCAL_RANK"] == "7"
        os.environ["LOCAL_RANK"] = "0"
        assert all(os.environ[name] == value for name, value in LAUNCHER.items())


def test_sync_batch_norm_without_a_group_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def train(world: sl.World, model: nn.Module) -> None:
        sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)).close()

    synchronised = nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1))
    with caplog.at_level(logging.WARNING, "syncline"):
        sl.simulate(lambda world: train(world, synchronised), ranks=1)
        sl.simulate(lambda world: train(world, nn.BatchNorm1d(1)), ranks=2)
        assert not caplog.messages
        sl.simulate(lambda world: train(world, synchronised), ranks=2)
    (message,) = caplog.messages
    assert "SyncBatchNorm (1)" in message
    assert "process_group=True" in message


SCRIPT = """
import os, torch, torch.distributed as dist, syncline as sl
from torch.utils.data import DistributedSampler
for transport in ("torch_dist", "zeromq"):
    with sl.init(transport, timeout=60, process_group=True, hide=True) as world:
        total = torch.tensor([world.rank + 1.0])
        dist.all_reduce(total)
        share = list(DistributedSampler(range(4), shuffle=False))
        print(dist.get_rank(), total.item(), share, "RANK" in os.environ)
        model = torch.nn.Linear(1, 1)
        run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="bsp")  # its servers meet too
        run.control_channel().finish()
        world.barrier()
        run.close()
    assert not dist.is_initialized() and os.environ["WORLD_SIZE"] == "2"
dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING']}", rank=world.rank, world_size=2)
with sl.init(timeout=60, process_group=True):
    pass
dist.barrier()
dist.destroy_process_group()
print("done")
"""


@pytest.mark.xdist_group("gloo")
def test_two_processes(tmp_path: Path) -> None:
    variables = [each | {"MEETING": str(tmp_path / "store")} for each in torch_variables(2)]
    for rank, one in enumerate(launch(SCRIPT, variables)):
        share = [0, 2] if rank == 0 else [1, 3]
        assert one.out == f"{rank} 3.0 {share} False\n" * 2 + "done\n", one
        assert one.code == 0, one


def test_a_group_of_other_ranks_is_refused() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with pytest.raises(
        sl.errors.WorldError, match=r"rank 0 of 1, and in this world it is rank 1 of 2.*init_process_group"
    ):
        DefaultGroup(Environment(source="a test", rank=1, size=2, local_rank=1, local_size=2), timeout=5)
    dist.destroy_process_group()
