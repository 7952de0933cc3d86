"""Run on each rank by test_cuda, and by hand on a machine with a GPU: pipelines and divided layers on it.

The ranks may share one GPU. By hand, on two ranks: `syncline run -n 2 -m tests.parallel.cuda_script`. Four ranks
test pipelines with several workers for each stage only. With `lost` as an argument only the loss of a worker is tested.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import PeerLostError, SynclineError
from syncline.parallel.division_specs import WeirdTrick
from syncline.transports import Transport
from tests.gpus import share_gpus
from tests.parallel.models import MODELS, loss_of
from tests.parallel.team_cases import check_collectives, check_exchange, exchange_rows, run_collectives
from tests.parallel.training import SCHEDULES, batch_on, compare, has_stages, train_alone, train_in_pipeline
from tests.training.mesh_models import assert_equal, assert_trained, train, train_divided
from tests.training.mesh_models import train_alone as train_mesh_alone

MESSAGE_BYTES = (1, 4, 1000, 1 << 16, (1 << 20) + 3, 1 << 24)
WIDTH, LAYERS, SAMPLES = 2048, 8, 1024
"""Of the MLP whose steps are timed."""
MICRO_BATCHES = 8
TIMED_STEPS = 15
SHORT_TIMEOUT_S = 5.0


class Warnings(logging.Handler):
    """Collects what is logged as a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def warnings() -> Iterator[list[str]]:
    """The warnings that Syncline logs inside."""
    handler, logger = Warnings(), logging.getLogger("syncline")
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


def with_schedules(world: sl.World, schedules: Sequence[str], how: str) -> None:
    """Every model with every schedule equals the model in one process on the same GPU."""
    for schedule in schedules:
        for name in MODELS:
            expected = train_alone(name, has_stages(schedule, world.size), world.device)
            compare(train_in_pipeline(world, name, schedule), expected)
            if schedule == "1f1b":
                compare(train_in_pipeline(world, name, schedule, recompute="always"), expected)
        print(f"fine {how}:", schedule, flush=True)


def with_half_precision(world: sl.World) -> None:
    """Autocast and a GradScaler on the GPU, and `pipedream`: the loss falls, and all ranks have the same weights."""
    case = MODELS["mlp"]
    for schedule in ("1f1b", "pipedream"):
        model = case.model().float().to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cuda") if schedule == "1f1b" else None
        cuts = case.cuts_into(world.size)
        with sl.pipeline(
            model, optimizer, loss_of, stages=cuts, schedule=schedule, microbatches=4, scaler=scaler
        ) as run:
            x, y = batch_on(world.device, case, 16, 0)
            losses = []
            for _ in range(40):
                with torch.autocast("cuda", torch.float16):
                    losses.append(run.step(x.float(), y).item())
        assert losses[-1] < losses[1], losses
        assert math.isfinite(losses[-1])
        weights = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
        assert torch.equal(sl.broadcast(weights), weights)
        print("fine in half precision:", schedule, flush=True)


def with_divided_layers(world: sl.World, algorithm: str) -> None:
    """Divided models equal those of one process on the CPU."""
    assert_trained(train_divided(world, algorithm))
    more = {"language": "tensor(2)", "tied language": "tensor(2)", "cnn": WeirdTrick("b", size=2)}
    for name, parallel in more.items():
        assert_equal(train(world, name, parallel, range(2), algorithm=algorithm), train_mesh_alone(name, range(2)))
    print("fine with divided layers:", algorithm, flush=True)


def with_team_collectives(world: sl.World) -> None:
    """The collectives of divided layers and their gradients, with shapes that can be divided equally and others."""
    for shape in ((5, 7), (4 * world.size, 2 * world.size)):
        check_collectives(run_collectives(world, shape), world.rank, world.size, shape)
    check_exchange(exchange_rows(world), world.rank, world.size)
    print("fine with collectives of divided layers", flush=True)


def with_channels(world: sl.World) -> None:
    """Tensors of many sizes between all ranks at once, in an order that differs between sender and receiver."""
    transport = world.group().transport
    pairs = list(permutations(range(world.size), 2))
    channels = transport.tensor_channels(pairs, world.device)

    def message(source: int, number: int) -> Tensor:
        nbytes = MESSAGE_BYTES[number % len(MESSAGE_BYTES)]
        return torch.full((nbytes,), 16 * source + number, dtype=torch.uint8, device=world.device)

    others = [rank for rank in range(world.size) if rank != world.rank]
    for to in others:
        channel = channels.find(world.rank, to)
        assert channel is not None
        assert channel.carries(torch.zeros(1, device=world.device))
        assert not channel.carries(torch.zeros(1))
        for number in range(12):
            channel.send(message(world.rank, number), f"message {number}")
    pending = []
    for source in reversed(others):
        channel = channels.find(source, world.rank)
        assert channel is not None
        pending += [
            (source, number, channel.receive(len(message(source, number)), f"message {number}")) for number in range(12)
        ]
    for source, number, each in pending:
        assert torch.equal(each.wait(), message(source, number)), (source, number)
    channels.close()
    print("fine with channels", flush=True)


def with_teams(world: sl.World) -> None:
    """Two pipelines of two stages, whose teams reduce by NCCL: the batches of both count."""
    case = MODELS["mlp"]
    batches = [batch_on(world.device, case, 16, number) for number in range(2)]
    model = case.model().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run: Any = sl.pipeline(model, optimizer, loss_of, stages=case.cuts_into(2), schedule="1f1b", microbatches=4)
    for _ in range(4):
        run.step(*batches[world.rank % 2])
    run.close()
    alone = case.model().to(world.device)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        torch.autograd.backward([loss_of(alone(x), y) / 2 for x, y in batches])
        optimizer.step()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    print("fine with teams", flush=True)


def time_steps(world: sl.World) -> None:
    """The time of a step of two stages with values by NCCL, and through the memory of the CPU, alternated."""

    def make(by_nccl: bool) -> Any:
        torch.manual_seed(0)
        layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        model = nn.Sequential(*layers).to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        kind = type(world.group().transport)
        own = kind.tensor_channels
        if not by_nccl:
            kind.tensor_channels = Transport.tensor_channels  # type: ignore[method-assign]
        try:
            return sl.pipeline(
                model, optimizer, nn.functional.mse_loss, stages=2, schedule="1f1b", microbatches=MICRO_BATCHES
            )
        finally:
            kind.tensor_channels = own  # type: ignore[method-assign]

    runs = {"NCCL": make(by_nccl=True), "memory of the CPU": make(by_nccl=False)}
    x = torch.randn(SAMPLES, WIDTH, device=world.device)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(TIMED_STEPS + 3):
        for name, run in runs.items():
            sl.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            run.step(x, x)
            torch.cuda.synchronize()
            if step >= 3:
                seconds[name].append(time.perf_counter() - start)
    for run in runs.values():
        run.close()
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratio = statistics.median(one / other for one, other in zip(*seconds.values(), strict=True))
    texts = ", ".join(f"{name} {1000 * each:.2f} ms" for name, each in medians.items())
    body = SAMPLES // MICRO_BATCHES * WIDTH * 4
    print(f"rank {world.rank}: a step with values of {body} bytes: {texts}; ratio {ratio:.3f}", flush=True)


def find_lost(work: Callable[[], object]) -> PeerLostError:
    """The error about a lost rank that a function raises."""
    try:
        work()
    except PeerLostError as error:
        return error
    raise AssertionError("nobody was missed")


def with_silent_worker() -> None:
    """A worker that is alive and sends nothing: the GPU stops waiting at the timeout, and the error says for what."""
    with sl.init(transport="torch_dist", timeout=SHORT_TIMEOUT_S) as world:
        store = world.transport.control_store()
        channels = world.transport.tensor_channels([(1, 0)], world.device)
        channel = channels.find(1, 0)
        assert channel is not None
        if world.rank == 1:
            until = time.monotonic() + 60
            while time.monotonic() < until and not store.check(["done"]):
                time.sleep(0.1)
            return
        start = time.monotonic()
        channel.receive(1000, "the output x of stage 0 for micro-batch 3").wait()
        torch.cuda.synchronize()
        assert SHORT_TIMEOUT_S <= time.monotonic() - start < SHORT_TIMEOUT_S + 20, time.monotonic() - start
        error = find_lost(channels.check)
        store.set("done", "1")
        assert error.peer == 1, error
        assert "the output x of stage 0 for micro-batch 3" in str(error), error
        print("fine:", error, flush=True)


def with_killed_worker() -> None:
    """A worker ends in the middle of a step: the other one names it, its stage and the micro-batch, and ends."""
    with sl.init(transport="torch_dist", timeout=60) as world:
        case = MODELS["mlp"]
        model = case.model().to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.pipeline(model, optimizer, loss_of, stages=case.cuts_into(2), schedule="1f1b", microbatches=4)
        forwards = 0

        def end(*inputs: object) -> None:
            nonlocal forwards
            forwards += 1
            if forwards == 2 * 4 + 3:  # micro-batch 2 of step 2
                torch.cuda.synchronize()
                os._exit(0)

        if world.rank == 1:
            run.graph.stages[1].module.register_forward_pre_hook(end)
        x, y = batch_on(world.device, case, 16, 0)

        def steps() -> None:
            for _ in range(4):
                run.step(x, y).item()

        error = find_lost(steps)
        assert error.peer == 1, error
        assert "rank 1 computes stage 1" in str(error), error
        assert "micro-batch" in str(error), error
        print("fine:", error, flush=True)
        again = find_lost(run.close)  # at once, and leaving the world is quiet then
        assert again.peer == 1, again
        assert str(again).startswith(str(error)), again


def main() -> None:
    if not torch.cuda.is_available():
        print("there is no GPU, so nothing is tested")
        return
    if sys.argv[1:] == ["lost"]:
        with sl.init(transport="torch_dist", timeout=60) as world:
            share_gpus(world)
        with_killed_worker()
        return
    with sl.init(transport="torch_dist", timeout=60) as world:
        torch.cuda.set_device(world.device)
        shared = torch.cuda.device_count() < world.size
        if world.size <= 2:
            with warnings() as texts:
                with_schedules(world, SCHEDULES[1:2] if shared else SCHEDULES, "without NCCL" if shared else "alone")
            assert any("use the same GPU" in text for text in texts) == (shared and world.rank == 0), texts
            if world.size == 2:
                with_divided_layers(world, "ring" if shared else "auto")
        if world.size > 1:
            share_gpus(world)
            with_channels(world)
        if world.size == 2:
            with warnings() as texts:
                with_schedules(world, SCHEDULES, "by NCCL")
            assert not any("memory of the CPU" in text for text in texts), texts
            with_divided_layers(world, "native")
        if world.size > 1:
            with_team_collectives(world)
        if world.size == 4:
            with_teams(world)
            both = train(world, "language", "experts(2) x tensor(2)", range(2))
            assert_equal(both, train_mesh_alone("language", range(2)))
        if world.size <= 2:
            with_half_precision(world)
        if world.size == 2:
            time_steps(world)
        print("fine on", torch.cuda.get_device_name(), "rank", world.rank, "of", world.size, flush=True)
    if world.size == 2:
        with suppress(SynclineError) if world.rank == 1 else nullcontext():  # the other one has declared it lost
            with_silent_worker()
        with_killed_worker()


if __name__ == "__main__":
    main()
