"""Processes that are killed while they save: the last good checkpoint always loads, whole."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.checkpoint import load, save
from syncline.checkpoint.files import list_checkpoints
from syncline.testing.processes import fork_context
from tests.launching import finish, start, torch_variables

pytestmark = pytest.mark.xdist_group("killed")  # they share a fixture that takes long

logger = logging.getLogger("syncline")

HUNT = bool(os.environ.get("SYNCLINE_HUNT"))
KILLS = 50 if HUNT else 5
RANK_KILLS = 8 if HUNT else 2
PATIENCE = 120.0


class Marked(nn.Module):
    """About 6 MB, every number of which is the step."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(500, 500)) for _ in range(6)])

    def mark(self, step: int) -> None:
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(step)

    def marks(self) -> set[float]:
        return {value for weight in self.weights for value in weight.unique().tolist()}


def save_on_and_on(folder: str, told: Connection) -> None:
    """Go on from the newest checkpoint, save every step, and say so after each."""
    torch.set_num_threads(1)
    model = Marked()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    found = load(folder, model=model)
    step = 0 if found is None else int(found["step"])
    while True:
        step += 1
        model.mark(step)
        save(folder, step=step, keep=2, model=model, optimizer=optimizer, also=step)
        told.send(step)


def look(folder: str, told: Connection) -> None:
    """What a fresh process finds: the step, the numbers in the model, and every other checkpoint verified."""
    model = Marked()
    found = load(folder, model=model)
    every = [load(folder, step=entry.step) for entry in list_checkpoints(Path(folder))]
    told.send((found, model.marks(), [one["also"] for one in every if one is not None]))


@pytest.fixture(scope="module")
def spawn() -> Iterator[Callable[..., tuple[ForkServerProcess, Connection]]]:
    context = fork_context()
    begun: list[ForkServerProcess] = []

    def begin(target: Callable[..., None], folder: Path) -> tuple[ForkServerProcess, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(str(folder), theirs), daemon=True)
        process.start()
        theirs.close()
        begun.append(process)
        return process, ours

    yield begin
    for process in begun:
        process.kill()
        process.join(PATIENCE)


def hear(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE), "nothing was said"
    return pipe.recv()


@pytest.mark.hunt
@pytest.mark.parametrize("repetition", range(KILLS))
def test_killed_while_writing(tmp_path: Path, spawn: Any, repetition: int) -> None:
    """Two lives in one folder, each killed at a random moment of a save; then a third process looks."""
    draw, last = random.Random(repetition), 0
    for _ in range(2):
        saver, pipe = spawn(save_on_and_on, tmp_path)
        hear(pipe)
        begun = time.monotonic()
        last = hear(pipe)
        took = time.monotonic() - begun
        until = time.monotonic() + draw.uniform(0, 1.5) * took  # somewhere in the next save, or the one after
        while (left := until - time.monotonic()) > 0:
            if pipe.poll(left):
                last = pipe.recv()
        os.kill(saver.pid, signal.SIGKILL)
        saver.join(PATIENCE)
        try:
            while pipe.poll(0):
                last = pipe.recv()
        except EOFError:
            pass
    aside = [path for path in tmp_path.iterdir() if path.name.startswith(".") and path.is_dir()]
    logger.info("kill %d left %d files aside", repetition, sum(1 for path in aside for _ in path.rglob("*.*")))
    _, pipe = spawn(look, tmp_path)
    found, marks, others = hear(pipe)
    assert found is not None
    assert found["step"] in (last, last + 1)  # the one under way may have got its name before the kill
    assert marks == {float(found["step"])}
    assert found["also"] == found["step"]
    assert others == [entry.step for entry in list_checkpoints(tmp_path)]
    save(tmp_path, step=found["step"] + 1, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{found['step'] + 1:08d}"]  # no leftovers


RANK = """
import sys, torch, syncline as sl
from syncline.testing.processes import fork_context
from syncline.checkpoint import load, save
from tests.checkpoint.test_checkpoint_killed import Marked
torch.set_num_threads(1)
with sl.init(timeout=60) as world:
    model, step = Marked(), 0
    while True:
        step += 1
        model.mark(step)
        save(sys.argv[1], step=step, keep=2, model=model, also=step)
        print(step, flush=True)
"""


@pytest.mark.hunt
@pytest.mark.parametrize("repetition", range(RANK_KILLS))
def test_a_rank_killed_while_all_write(tmp_path: Path, repetition: int) -> None:
    folder, victim = tmp_path / "saved", repetition % 2
    ranks = [start(["-c", RANK, str(folder)], each) for each in torch_variables(2)]
    try:
        last = _kill_one(ranks, victim, random.Random(repetition))
    finally:
        ended = finish(ranks)
    assert ended[victim].code == -signal.SIGKILL
    assert ended[1 - victim].code == 1
    assert f"PeerLostError: rank {1 - victim} lost rank {victim}" in ended[1 - victim].err
    model = Marked()
    found = load(folder, model=model)
    assert found is not None
    assert found["step"] in (last, last + 1, last + 2)  # the other rank may have told less
    assert model.marks() == {float(found["step"])}
    save(folder, step=found["step"] + 1, keep=1)
    assert [path.name for path in folder.iterdir()] == [f"step-{found['step'] + 1:08d}"]


def _kill_one(ranks: list[subprocess.Popen[str]], victim: int, draw: random.Random) -> int:
    """Let them save twice, then kill one at a random moment of the third or fourth; the last step told before."""
    output = ranks[victim].stdout
    assert output is not None
    assert output.readline() == "1\n", ranks[victim].communicate()
    begun = time.monotonic()
    assert output.readline() == "2\n"
    time.sleep(draw.uniform(0, 2) * (time.monotonic() - begun))
    ranks[victim].kill()
    told = [int(line) for line in output.read().split()]
    return max(told, default=2)


@pytest.mark.parametrize("victim", range(3))
def test_a_simulated_rank_dies(tmp_path: Path, victim: int) -> None:
    """At any of the moments where the ranks wait for one another."""

    def script(world: sl.World) -> None:
        model = Marked()
        for step in (1, 2):
            model.mark(step)
            save(folder, step=step, model=model)

    for number in range(12):
        folder = tmp_path / str(number)
        fault = sl.faults.Kill(victim, at=number * 40e-6)
        run = sl.simulate(script, ranks=3, faults=[fault], return_exceptions=True, timeout=5)
        for rank, result in enumerate(run.results):
            assert rank == victim or result is None or isinstance(result, sl.errors.PeerLostError)
        model = Marked()
        found = load(folder, model=model)
        assert model.marks() == {0.0 if found is None else float(found["step"])}
        assert len(list_checkpoints(folder)) == (0 if found is None else found["step"])
