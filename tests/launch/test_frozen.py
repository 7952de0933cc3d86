"""A worker that is stopped in the middle: the others go on without it, and the run ends."""

from __future__ import annotations

import json
import os

import pytest

from syncline.launch.agent import LauncherInput
from tests.launch.runs import Runs, wait_for

STOPPED = """
import signal
import torch
import syncline as sl
world = sl.init(timeout=60)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = sl.distribute(model, optimizer, strategy={strategy!r})
for step in range(4):
    if rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
while not world.lost:
    time.sleep(0.01)
say("lost", *world.lost, *world.lost.values())
"""


@pytest.mark.parametrize(("strategy", "servers"), [("hogwild", 0), ("ssp(slack=0)", 1)])
def test_a_frozen_worker_is_lost_and_ended(runs: Runs, strategy: str, servers: int) -> None:
    """With servers its clock no longer holds the others back; without, nobody waits. Nobody waits for the timeout."""
    script = runs.script(STOPPED.format(strategy=strategy))
    options = ("--servers", str(servers), "--on-failure", "continue", "--lost-after", "2")
    run = runs.run("run", "-n", "2", *options, script)
    assert run.code == 137, run.describe()
    assert run.out.startswith("lost 1 it sent no heartbeat for"), run.describe()
    assert "syncline: rank 1 sent no heartbeat for" in run.err
    assert run.err.endswith("syncline: rank 1 failed; the others ended by themselves\n")
    wait_for(lambda: not runs.processes(), "no process is left")


def test_agent_reads_orders() -> None:
    """The launcher's lines: a signal for all, for the ranks alone, or the end of one program."""
    reading, writing = os.pipe()
    lines = ({"signal": 15}, {"signal": 2, "ranks_only": True}, {"signal": 9, "name": "rank 3"})
    os.write(writing, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    os.close(writing)
    assert LauncherInput(reading).orders() == list(lines)
    os.close(reading)
