"""Real processes of a pipeline on gloo: a stage that is frozen, one that is killed, one that never answers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launching import finish, start, torch_variables

pytestmark = pytest.mark.xdist_group("gloo")

TRAIN = """
import logging, os, signal, sys, torch, syncline as sl
from torch import nn
logging.basicConfig(format="%(message)s")
world = sl.init(timeout=float(sys.argv[1]))
world.transport.liveness.warn_after_s = 1.0
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(world.size)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = sl.pipeline(model, optimizer, nn.functional.mse_loss, stages=world.size, microbatches=4)
forwards = 0
def count(module, inputs):
    global forwards
    forwards += 1
    if forwards == 4 + 3:                           # micro-batch 2 of step 1
        print(os.getpid(), flush=True)
        if "PIPE" in os.environ:
            open(os.environ["PIPE"]).read()         # until the test opens the other end
        os.kill(os.getpid(), signal.SIGSTOP)
    if forwards == 8 + 4:                           # micro-batch 3 of step 2
        os.kill(os.getpid(), signal.SIGKILL)
if world.rank == 1:
    run.graph.stages[1].module.register_forward_pre_hook(count)
x = torch.ones(8, 4)
try:
    for step in range(4):
        run.step(x, x)
except sl.errors.PeerLostError as error:
    print("LOST", error.peer, error)
"""


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """The first line of the error output that has these words."""
    assert process.stderr is not None
    return next((line for line in process.stderr if words in line), "no such line")


def test_a_frozen_stage_is_named_while_others_wait_and_a_killed_one_at_once() -> None:
    """The second of three stages stops for a while in step 1, and is killed in step 2."""
    processes = [start(["-c", TRAIN, "60"], each) for each in torch_variables(3)]
    victim = processes[1]
    assert victim.stdout is not None
    number = int(victim.stdout.readline())
    first, last = (read_until(processes[rank], "has waited") for rank in (0, 2))
    os.kill(number, signal.SIGCONT)
    ended = finish(processes)
    waited = r"rank {} has waited 1 s for a message from rank 1 \(the {} stage 1 for micro-batch {}, \d+ B\)"
    assert re.search(waited.format(0, "gradient of 0 from", 1), first), first
    assert re.search(waited.format(2, "output 1 of", 2), last), last
    assert ended[1].code == -signal.SIGKILL
    for rank, places in ((0, "[12]"), (2, "[23]")):  # the killed one may not have sent or taken the value before
        out = ended[rank].out
        assert f"LOST 1 rank {rank} lost rank 1" in out, ended[rank]
        assert "rank 1 computes stage 1;" in out, ended[rank]
        assert re.search(rf"is in step 2 at the .* for micro-batch {places}$", out, re.MULTILINE), ended[rank]


def test_a_stage_that_never_answers_is_named_at_the_timeout(tmp_path: Path) -> None:
    """It is alive: what it was computing when the others gave up is in their errors."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    processes = [start(["-c", TRAIN, "2"], {**each, "PIPE": str(pipe)}) for each in torch_variables(2)]
    try:
        (ended,) = finish(processes[:1])
    finally:
        processes[1].kill()
        processes[1].communicate()
    assert "LOST 1 rank 0 lost rank 1 after 2" in ended.out, ended
    assert "(the gradient of 0 from stage 1 for micro-batch 2" in ended.out
    assert "it is alive but did not answer" in ended.out
    assert "rank 1 has not delivered the result of the forward of stage 1 for micro-batch 2" in ended.out
