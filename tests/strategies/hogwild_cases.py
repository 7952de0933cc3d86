"""Trainings on shared memory that tests run on simulated ranks and on real ones."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from torch import Tensor, nn

import syncline as sl
from syncline.strategies import strategy_run
from syncline.testing.collectives import world_on
from syncline.transports import Transport
from syncline.workloads import build
from tests.strategies.cases import backward


def one_host(ranks: int) -> sl.Network:
    """A simulated network whose ranks share a host."""
    return sl.Network(ranks_per_host=ranks, inside=sl.Link(latency=1e-6, bandwidth=1e10))


class Tagged(nn.Module):
    """A weight for each step of each worker: plain SGD with rate 1 makes it 1 when that step is applied."""

    def __init__(self, workers: int, steps: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(workers, steps))

    def forward(self, worker: int, step: int) -> Tensor:
        return -self.seen[worker, step]


def learn_digits(transport: Transport, epochs: int) -> tuple[float, float, list[int], int]:
    """Real digits on real processes: accuracy before and after, everybody's steps, and the bytes that were sent."""
    world_on(transport)
    workload = build("digits")
    model = workload.model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    before = workload.evaluate(model, workload.splits().validation)["accuracy"]  # later the others' steps show
    run = sl.distribute(model, optimizer, strategy="hogwild")
    loader = torch.utils.data.DataLoader(workload.splits().train, batch_size=32, shuffle=True)
    for _ in range(epochs):
        for batch in run.shard(loader):
            optimizer.zero_grad()
            backward(workload.loss(model, batch))
            optimizer.step()
    with run.agreed():  # all have ended: everybody sees the same
        pass
    after = workload.evaluate(model, workload.splits().validation)["accuracy"]
    board = strategy_run(run).control_channel()
    assert board is not None
    steps, sent = board.steps(), run.stats.bytes_wire
    run.close()
    return before, after, steps, sent


def share_and_let_go(transport: Transport) -> list[str]:
    """Every rank writes its own element and reads all; what is mapped meanwhile and afterwards."""
    world = world_on(transport)
    gc.collect()
    assert _mapped() == "", "what earlier cases shared is let go"
    shared = transport.memory.shared(transport.size, torch.float64)
    assert shared.dtype == torch.float64
    assert shared.tolist() == [0.0] * transport.size
    world.barrier()
    shared[transport.rank] = transport.rank + 1.0
    world.barrier()
    assert shared.tolist() == [rank + 1.0 for rank in range(transport.size)]
    empty = transport.memory.shared(0, torch.int64)
    assert empty.numel() == 0
    mapped = [_mapped()]
    del shared
    gc.collect()
    return [*mapped, _mapped()]


def ask_for_different_sizes(transport: Transport) -> str:
    """Refused on every rank alike, and the channel goes on."""
    world = world_on(transport)
    try:
        transport.memory.shared(8 + transport.rank, torch.float32)
    except sl.SynclineError as error:
        world.barrier()
        return f"{type(error).__name__}: {error}"
    return "made"


def _mapped() -> str:
    """The shared files that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return "; ".join(line.split(maxsplit=5)[5] for line in lines if "syncline" in line and "memfd" in line)
