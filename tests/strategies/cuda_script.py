"""Run on each rank by test_cuda, and by hand on a machine with a GPU: training on it."""

from typing import Any

import torch
from torch import nn

import syncline as sl
from tests.gpus import share_gpus


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def alone(size: int, steps: int) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            (model(batch(step, rank)).square().mean() / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def with_codecs(world: sl.World, together: bool) -> None:
    """Every codec trains on the GPU, and all ranks agree; NaN is told in the step it comes in."""
    summing = ["cast('fp16')", "randomk(0.2)", "powersgd(2)", "powersgd(2)|cast('bf16', stochastic=True)"]
    payloads = [
        "quantize(4)",
        "onebit",
        "ternary",
        "topk(0.2)",
        "topk(0.2, momentum=0.9)|quantize(4)",
        "threshold(0.01)",
    ]
    for codec in summing if together else summing + payloads:  # payloads are gathered by NCCL
        model = net().to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sl.distribute(model, optimizer, codec=codec, algorithm="ring" if together else "auto") as run:
            for step in range(10):
                optimizer.zero_grad()
                model(batch(step, world.rank).to(world.device)).square().mean().backward()
                optimizer.step()
            weights = torch.cat([parameter.detach().cpu().view(-1) for parameter in model.parameters()])
            assert bool(torch.isfinite(weights).all())
            assert torch.equal(sl.broadcast(weights), weights)
            optimizer.zero_grad()
            (model(batch(0, 0).to(world.device)).sum() * float("nan")).backward()
            gradient = next(model.parameters()).grad
            assert gradient is not None
            assert not bool(torch.isfinite(gradient).any()), codec
            assert run.stats.bytes_wire < run.stats.bytes_logical or codec == "threshold(0.01)"
        print("fine:", codec)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.heads = nn.ModuleList([nn.Linear(3, 2) for _ in range(2)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        result: torch.Tensor = self.heads[head](self.body(x))
        return result


def with_unused(world: sl.World, algorithm: str) -> None:
    """Parameters that no rank uses keep their gradients, and those that some use get the mean: nobody asks the GPU."""
    model: Any = Heads().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sl.distribute(model, optimizer, algorithm=algorithm, find_unused_parameters=True):
        for step, used in enumerate((0, 1, 1, 0)):  # the first rounds find out which parameters there are
            model(batch(step, world.rank).to(world.device), used).sum().backward()
        kept = model.heads[1].weight.grad
        assert kept is not None
        before = kept.clone()
        for step in range(2):
            model(batch(step, world.rank).to(world.device), 0).sum().backward()
            assert torch.equal(model.heads[1].weight.grad, before), step
        optimizer.zero_grad()
        model(batch(0, world.rank).to(world.device), world.rank % 2).sum().backward()
        for number, head in enumerate(model.heads):
            gradients = [batch(0, rank) for rank in range(world.size) if rank % 2 == number]
            if not gradients:
                assert head.weight.grad is None
                continue
            own = sum(model.body(x.to(world.device)).sum(dim=0) for x in gradients) / world.size
            torch.testing.assert_close(head.weight.grad[0], own.detach())
    print("fine: unused parameters")


def with_allreduce(world: sl.World, together: bool) -> None:
    """Some steps equal those of one process; unequal numbers of batches; NaN on one rank."""
    device = world.device
    model = net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    algorithm = "ring" if together else "native"
    run = sl.distribute(model, optimizer, algorithm=algorithm, bucket_bytes=64, check_finite=True)
    for step in range(10):
        optimizer.zero_grad()
        model(batch(step, world.rank).to(device)).square().mean().backward()
        optimizer.step()
    for found, wanted in zip(model.parameters(), alone(world.size, 10), strict=True):
        torch.testing.assert_close(found.detach().cpu(), wanted)
    own = [batch(step, world.rank).to(device) for step in range(2 + world.rank)]
    for x in run.shard(own, split=False):  # a rank that runs out of data learns when all have
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    weights = torch.cat([parameter.detach().cpu().view(-1) for parameter in model.parameters()])
    assert torch.equal(sl.broadcast(weights), weights)
    try:  # told one step later: nobody waits for the device
        for _ in range(2):
            (model(batch(0, 0).to(device)).sum() * (float("nan") if world.rank == world.size - 1 else 1.0)).backward()
        raise AssertionError("NaN passed unseen")
    except sl.errors.DivergedError as error:
        print("told:", error)
    run.close()


def main() -> None:
    if not torch.cuda.is_available():
        print("there is no GPU, so nothing is tested")
        return
    with sl.init(transport="torch_dist", timeout=60) as world:
        for together in [True, False] if share_gpus(world) else [False]:  # first without NCCL, then with it
            with_allreduce(world, together)
            with_unused(world, "ring" if together else "native")
            with_codecs(world, together)
        print("fine on", torch.cuda.get_device_name(), "rank", world.rank, "of", world.size)


if __name__ == "__main__":
    main()
