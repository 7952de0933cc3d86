"""Small trainings that tests run on simulated ranks and on real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.testing.functional import world_on
from syncline.transports import Transport

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def mlp(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def data(samples: int = 48) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 6, generator=draw), torch.randint(0, 3, (samples,), generator=draw))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def train(world: sl.World, optimizer: str = "momentum", steps: int = 50, batch: int = 12, **options: Any) -> Tensor:
    """So many steps of a global batch, shared out; the parameters after it."""
    model = mlp(seed=world.rank)  # rank 0's is the one that counts
    own = OPTIMIZERS[optimizer](model.parameters())
    run = sl.distribute(model, own, **{"collective": "ring", **options})
    loader = DataLoader(data(), batch_size=batch // world.size, shuffle=True)
    done = 0
    while done < steps:
        for x, y in run.shard(loader):
            own.zero_grad()
            backward(nn.functional.cross_entropy(model(x), y))
            own.step()
            done += 1
            if done == steps:
                break
    run.close()
    return flat(model)


@contextmanager
def process_group(transport: Transport, folder: str) -> Iterator[None]:
    """torch's default process group among the ranks of a pool."""
    store = dist.FileStore(str(Path(folder) / "store"), transport.size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=transport.rank, world_size=transport.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def beside_ddp(transport: Transport, folder: str, how: str) -> tuple[bool, float]:
    """Train the same model with DistributedDataParallel and with us; whether the bits agree, and how far apart."""
    world = world_on(transport)  # left open: the channel is the pool's
    with process_group(transport, folder):
        theirs, ours = mlp(), mlp()
        wrapped = DistributedDataParallel(theirs, gradient_as_bucket_view=True)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (theirs, ours)]
        run = sl.distribute(ours, optimizers[1], collective="native")
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3) for _ in range(2)]
        draw = torch.Generator().manual_seed(world.rank)
        for number in range(12):
            batches = [(torch.randn(4, 6, generator=draw), torch.randint(0, 3, (4,), generator=draw)) for _ in range(3)]
            for model, optimizer, scaler, quiet in (
                (wrapped, optimizers[0], scalers[0], wrapped.no_sync),
                (ours, optimizers[1], scalers[1], run.no_sync),
            ):
                optimizer.zero_grad(set_to_none=number % 2 == 0)
                _step(how, model, optimizer, scaler, quiet, batches)
        result = torch.equal(flat(theirs), flat(ours)), float((flat(theirs) - flat(ours)).abs().max())
        run.close()
    return result


def _step(how: str, model: nn.Module, optimizer: Optimizer, scaler: Any, quiet: Any, batches: list[Any]) -> None:
    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    if how == "accumulation":
        for batch in batches[:-1]:
            with quiet():
                backward(loss(batch))
        backward(loss(batches[-1]))
        optimizer.step()
    elif how == "clipping":
        backward(loss(batches[0]))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    elif how == "scaler":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scaled = scaler.scale(loss(batches[0]))
        backward(scaled)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    else:
        backward(loss(batches[0]))
        optimizer.step()


def on_gloo(transport: Transport, case: Callable[..., Any], *args: Any) -> Any:
    """A case that wants a world, on the ranks of a pool."""
    return case(world_on(transport), *args)
