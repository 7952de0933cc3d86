"""What the ranks of an MPI job do with one-sided states; each prints what it saw as one line of JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

import syncline as sl
from syncline.solvers import KMeans, asgd
from syncline.strategies.onesided import OneSided
from syncline.strategies.onesided.mailslots import Mailslots, on_same_host
from syncline.strategies.onesided.update import step
from syncline.training.loop import train
from syncline.training.settings import Settings
from syncline.workloads import build

PATIENCE = 60.0
LARGE = 1 << 20


def tell(case: str, **told: Any) -> None:
    print(json.dumps({"case": case, **told}) + "\n", end="", flush=True)


def deaf(world: sl.World) -> None:
    """Rank 1 computes for a second without a call of the library; meanwhile rank 0 puts a state into its slots."""
    slots = Mailslots(world.transport, 1000, np.float64, same_host=on_same_host(world))
    token = torch.zeros(1)
    if world.rank == 0:
        world.transport.recv(token, 1).wait()
        slots.post(np.ones(1000), to=1)
        slots.settle()
        tell("deaf", rank=0, placed=time.monotonic())
    else:
        memory, matrix = slots.memory, np.eye(64)
        world.transport.send(token, 0).wait()
        begun = time.monotonic()
        seen: float | None = None
        while (elapsed := time.monotonic() - begun) < 1.0 or (seen is None and elapsed < PATIENCE):
            matrix = matrix @ matrix
            if seen is None and memory[:, 8].any():  # a glance at its own memory: the message's number
                seen = time.monotonic()
        ended = time.monotonic()
        after, accepted = step(np.zeros(1000), np.full(1000, -0.1), 0.1, slots.collect())
        found = [float(after.min()), float(after.max())]
        tell("deaf", rank=1, seen=seen, ended=ended, accepted=accepted, after=found)
    slots.close()


def torn(world: sl.World) -> None:
    """Rank 0 writes large states over each other while rank 1 reads them, until some were seen half written."""
    slots = Mailslots(world.transport, LARGE, np.float64, buffers=1, same_host=on_same_host(world), chunk_bytes=1 << 16)
    begun = time.monotonic()
    if world.rank == 0:
        number = 0
        while not slots.collect() and time.monotonic() - begun < PATIENCE:
            number += 1
            slots.post(np.full(LARGE, float(number)), to=1)
    else:
        whole = mixed = again = latest = 0
        while (whole < 5 or slots.counts.torn < 3) and time.monotonic() - begun < PATIENCE:
            for message in slots.collect():
                whole += 1
                mixed += bool((message.values != message.values[0]).any())
                again += message.sequence <= latest
                latest = message.sequence
        slots.post(np.zeros(LARGE), to=0)
        tell("torn", whole=whole, torn=slots.counts.torn, mixed=mixed, again=again)
    slots.close()


def solve(world: sl.World) -> None:
    """K-means on real processes."""
    random = np.random.default_rng(0)
    centres = np.array([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    points = centres[random.integers(3, size=30_000)] + random.normal(size=(30_000, 2))
    found = asgd(KMeans(3), points, rate=0.3, rate_end=0.02, batch=50, part=0.5, epochs=2)
    counts = {name: found.total(name) for name in ("steps", "sent", "accepted", "rejected")}
    tell("solve", rank=world.rank, value=found.value, state=found.state.tolist(), **counts)


def learn(world: sl.World) -> None:
    """Digits, with the loop of `syncline train`: the board and the evaluator's reads are on windows too."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(strategy=OneSided(pull=0.5), epochs=6, checkpoint_every=0)  # type: ignore[arg-type]
        outcome = train(build("digits"), settings, world=world, folder=folder)
    tell("learn", rank=world.rank, test=outcome.test, steps=outcome.steps, reason=outcome.stopped_by)


if __name__ == "__main__":
    with sl.init() as world:
        for case in sys.argv[1:]:
            {"deaf": deaf, "torn": torn, "solve": solve, "learn": learn}[case](world)
            world.barrier()
