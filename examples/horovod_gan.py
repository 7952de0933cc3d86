"""A generator and a discriminator, each with its own DistributedOptimizer, as a script for Horovod has them.

The generator learns a distribution of points in the plane: two correlated numbers, away from zero.

python examples/horovod_gan.py
syncline run -n 2 examples/horovod_gan.py
"""

import argparse

import torch
import torch.nn.functional as f
from torch import Tensor, nn

import syncline.compat.horovod.torch as hvd

NOISE = 4
MEAN = torch.tensor([3.0, -2.0])
MIX = torch.tensor([[1.0, 0.0], [0.6, 0.8]])


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def distribute(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """An optimizer that all workers share, and the same weights to begin with."""
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.5, 0.9))
    made: torch.optim.Optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return made


def judge(scores: Tensor, real: bool) -> Tensor:
    """The loss of scores that should say that all points are real, or that none is."""
    return f.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def distance(generator: nn.Module) -> float:
    """How far the middle of generated points is from that of real ones."""
    with torch.no_grad():
        points: Tensor = generator(torch.randn(2000, NOISE, generator=torch.Generator().manual_seed(0)))
    return float((points.mean(dim=0) - MEAN).norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--lr", type=float, default=0.005)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    generator, discriminator = network(NOISE, 2), network(2, 1)
    g_optimizer, d_optimizer = distribute(generator, args.lr), distribute(discriminator, args.lr)
    first = distance(generator)
    torch.manual_seed(1 + hvd.rank())  # from here on each worker draws points of its own
    for _ in range(args.steps):
        real = MEAN + torch.randn(args.batch_size, 2) @ MIX.T
        fake = generator(torch.randn(args.batch_size, NOISE))

        d_optimizer.zero_grad()
        loss = judge(discriminator(real), real=True) + judge(discriminator(fake.detach()), real=False)
        loss.backward()  # type: ignore[no-untyped-call]
        d_optimizer.step()

        g_optimizer.zero_grad()
        judge(discriminator(fake), real=True).backward()  # type: ignore[no-untyped-call]
        g_optimizer.step()

    totals = [float(sum(w.detach().double().sum() for w in each.parameters())) for each in (generator, discriminator)]
    same = len(set(map(tuple, hvd.allgather_object(totals)))) == 1
    if hvd.rank() == 0:
        told = "the same" if same else "NOT the same"
        print(f"workers: {hvd.size()}; distance {first:.3f} to {distance(generator):.3f}; weights {told}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
