"""The training script of `syncline bench elastic`: trains a workload until a file appears, and journals every step.

It is an ordinary script: `sl.init`, `sl.distribute`, `run.shard`. Each worker writes a journal without a buffer, so a
killed worker loses no line::

    {"member": 3, "place": 1, "pid": 4711, "joined": true, "time": 51230.1}    the first line
    51231.732105 871 4                                              a step: time, number, number of workers
    51231.739904 872 4 872 3401                                     with servers: pushed steps, and those of all there
    {"metrics": {"accuracy": 0.96, "loss": 0.2}, "steps": 9110}     the last line

All times are those of the monotonic clock, which is the same in all processes of a machine. The place is the local
rank: a worker that is started again has the place of the one that was lost.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import syncline as sl
from syncline.errors import SynclineError
from syncline.strategies import Run, build_strategy
from syncline.workloads import build
from syncline.workloads.base import Workload

__all__ = ["Journal", "ScriptSettings", "make_optimizer", "train"]

AGREE_EVERY_STEPS = 32
"""The workers of a synchronous strategy agree about the end after about this many steps, where an epoch ends."""
MAX_EPOCHS = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ScriptSettings:
    """The argument of the script, as JSON."""

    folder: str
    """The folder of the journals."""
    stop_file: str
    """The workers end when this file exists."""
    strategy: str
    workload: str
    workers: int
    batch: int
    learning_rate: float
    momentum: float | None = None
    transport: str | None = None
    seed: int = 0

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Journal:
    """The journal of this worker."""

    def __init__(self, folder: str) -> None:
        self._member = int(os.environ.get("SYNCLINE_MEMBER") or os.environ.get("RANK") or 0)
        path = os.path.join(folder, f"worker-{self._member}.txt")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.place = int(os.environ.get("SYNCLINE_LOCAL_RANK") or os.environ.get("LOCAL_RANK") or 0)
        joined = bool(os.environ.get("SYNCLINE_JOIN"))
        self.write(member=self._member, place=self.place, pid=os.getpid(), joined=joined, time=time.monotonic())

    def write(self, **facts: Any) -> None:
        """A line about something other than a step."""
        os.write(self._file, f"{json.dumps(facts)}\n".encode())

    def write_step(self, step: int, workers: int, *pushes: int) -> None:
        """A line about a step that is complete."""
        os.write(self._file, f"{time.monotonic():.6f} {' '.join(map(str, (step, workers, *pushes)))}\n".encode())


def train(settings: ScriptSettings) -> None:
    """Train on this worker until the stop file exists, and journal the metrics of the final model."""
    torch.set_num_threads(1)
    journal = Journal(settings.folder)
    workload = build(settings.workload)
    world = sl.init(transport=settings.transport)
    model = workload.model(settings.seed)
    optimizer = make_optimizer(workload, model, settings)
    loader = DataLoader(workload.splits().train, batch_size=settings.batch, shuffle=True)
    try:
        run = sl.distribute(model, optimizer, strategy=settings.strategy)
    except SynclineError as error:
        journal.write(refused=f"{type(error).__name__}: {error}")
        raise
    _train(run, workload, loader, settings, journal)
    run.close()
    client = getattr(run, "client", None)
    counted = {} if client is None else {"clock": client.ticks, "applied": client.status.steps}
    # Targets are those of the validation split.
    journal.write(metrics=workload.evaluate(model, workload.splits().validation), steps=run.stats.steps, **counted)
    world.close()


def _train(run: Run, workload: Workload, loader: DataLoader[Any], settings: ScriptSettings, journal: Journal) -> None:
    asynchronous = build_strategy(settings.strategy).asynchronous
    shard = run.shard(loader, seed=settings.seed)
    steps_of_epoch = max(1, len(loader) // settings.workers)
    epochs_between = max(1, round(AGREE_EVERY_STEPS / steps_of_epoch))
    for epoch in range(shard.epoch, MAX_EPOCHS):
        for batch in shard:
            optimizer = run.optimizer
            optimizer.zero_grad()
            loss = workload.loss(run.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            run.note_loss(loss)
            optimizer.step()
            elastic = run.world.elastic
            if elastic is None or not elastic.joining:  # a newcomer's warm-up is no step
                journal.write_step(run.stats.steps, run.world.size, *_count_pushes(run))
            if asynchronous and os.path.exists(settings.stop_file):
                return
        # Workers of a synchronous strategy must end at the same step.
        if not asynchronous and (epoch + 1) % epochs_between == 0:
            stop = torch.tensor([int(os.path.exists(settings.stop_file))])
            if int(sl.allreduce(stop, op="max")):
                return


def make_optimizer(workload: Workload, model: nn.Module, settings: ScriptSettings) -> Optimizer:
    """The workload's optimizer, with the learning rate and the momentum of the settings."""
    optimizer = workload.optimizer(model, settings.learning_rate)
    if settings.momentum is not None:
        for group in optimizer.param_groups:
            group["momentum"] = settings.momentum
    return optimizer


def _count_pushes(run: Run) -> tuple[int, ...]:
    """With servers: the pushed steps of this worker, and the steps of all that the servers have counted."""
    client = getattr(run, "client", None)
    if client is None:
        return ()
    in_flight = any(not future.done() for future in getattr(run, "pushed", ()))
    return (client.ticks - in_flight, client.status.steps)


if __name__ == "__main__":
    train(ScriptSettings(**json.loads(sys.argv[1])))
