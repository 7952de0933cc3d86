"""Small trainings that tests run on simulated ranks and on real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.testing.collectives import world_on
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
    run = sl.distribute(model, own, **{"algorithm": "ring", **options})
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


def on_gloo(transport: Transport, case: Callable[..., Any], *args: Any) -> Any:
    """A case that wants a world, on the ranks of a pool."""
    return case(world_on(transport), *args)
