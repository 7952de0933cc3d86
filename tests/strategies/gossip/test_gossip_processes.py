"""Gossip between real processes: on gloo, on ZeroMQ, on MPI."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from syncline.strategies.gossip import build_graph
from syncline.testing import Pool
from tests.hunting import only_hunting
from tests.launch.runs import Runs, wait_for
from tests.launching import ROOT
from tests.mpi import Flavour, one_or_both, play
from tests.strategies.gossip.cases import distance, expected, start
from tests.strategies.gossip.process_cases import STEPS, mix_on

WORKERS = 4
PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
"""The processes import the tests too."""


def check_mix(found: list[list[list[float]]], form: str, codec: str | None) -> None:
    """`found[rank][step]` are weights; the last of each rank what all agree on."""
    size = len(found)
    seen = [torch.tensor([each[step] for each in found], dtype=torch.float64) for step in range(len(found[0]))]
    assert bool((seen[-1] == seen[-1][0]).all())
    if codec is None:
        for one, due in zip(seen, expected(build_graph("ring", size), form, 1, 0.1, STEPS), strict=False):
            torch.testing.assert_close(one, due, rtol=1e-5, atol=1e-5)
        return
    mean = torch.full((6,), sum(map(start, range(size))) / size, dtype=torch.float64)
    torch.testing.assert_close(seen[-1][0], mean, rtol=1e-4, atol=1e-3)
    assert distance(seen[-2]) < 0.2 * distance(seen[0])


def check_pairs(told: list[dict[str, Any]]) -> None:
    mean = sum(each["first"] for each in told) / len(told)
    last = torch.tensor([each["last"] for each in told], dtype=torch.float64)
    assert last.mean(dim=0).tolist() == pytest.approx([mean] * 6)
    for each in told:
        assert each["agreed"] == pytest.approx([mean] * 6)
        assert each["agreed"] == told[0]["agreed"]
        assert each["steps"] == [30] * len(told)
        assert each["sent"] > 0


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("form", "codec"), [("after", None), ("beside", "topk(0.5)")])
def test_four_processes_mix_on_gloo(gloo: Pool, form: str, codec: str | None) -> None:
    check_mix(gloo.run(mix_on, WORKERS, form, codec), form, codec)


@pytest.mark.xdist_group("zeromq")
@pytest.mark.parametrize(("form", "codec"), [("after", "quantize(4)")])
@only_hunting
def test_four_processes_mix_on_zeromq(zeromq: Pool, form: str, codec: str | None) -> None:
    check_mix(zeromq.run(mix_on, WORKERS, form, codec), form, codec)


@pytest.mark.xdist_group("mpi")
@one_or_both
def test_two_processes_mix_and_average_in_pairs_on_mpi(flavour: Flavour) -> None:
    told = play(flavour, "tests.strategies.gossip.process_cases")
    check_mix([each["seen"] for each in told], "beside", None)
    check_pairs([each["pairs"] for each in told])


PAIRS = """
import json, syncline as sl
from tests.strategies.gossip.process_cases import pairs
with sl.init() as world:
    post(f"told{rank}", json.dumps(pairs(world)))
"""


@only_hunting
def test_three_processes_average_in_pairs_on_gloo(runs: Runs) -> None:
    runs.run("run", "-n", "3", runs.script(PAIRS), variables=PATHS)
    check_pairs([json.loads(runs.read(f"told{rank}")) for rank in range(3)])
    wait_for(lambda: not runs.processes(), "no process is left")


UNEVEN = """
import signal, torch, syncline as sl
from syncline.strategies.gossip import Gossip
with sl.init() as world:
    torch.manual_seed(0)
    x, truth = torch.randn(64, 4), torch.randn(4, 1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = sl.distribute(model, optimizer, Gossip(pairwise=True))
    for step in range(300):
        if rank == 1 and step == 5:
            post("waits")
            until("go on")  # its step takes as long as the test likes
        if rank == 0 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x @ truth).backward()
        optimizer.step()
    post(f"steps{rank}", run.control_channel().steps())
    run.close()
    post(f"end{rank}", f"{float((model.weight.detach().T - truth).abs().max()):.6f}")
"""


def test_processes_continue_with_a_slow_and_a_killed_one(runs: Runs) -> None:
    run = runs.start("run", "-n", "4", "--on-failure", "continue", runs.script(UNEVEN))
    runs.read("waits")
    wait_for(lambda: "SIGKILL" in run.all_err or run.process.exitcode is not None, "rank 0 is killed")
    steps = [json.loads(runs.read(f"steps{rank}")) for rank in (2, 3)]
    assert all(each[1] <= 6 for each in steps), "worker 1 has stood still all the while"
    assert steps[0][2] == steps[1][3] == 300
    runs.post("go on")
    ends = [runs.read(f"end{rank}") for rank in (1, 2, 3)]
    run.finish()
    assert ends[0] == ends[1] == ends[2]
    assert float(ends[0]) < 0.01
    wait_for(lambda: not runs.processes(), "no process is left")
