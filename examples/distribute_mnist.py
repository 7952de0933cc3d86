"""The network of horovod_mnist.py, trained with `sl.distribute`: the same weights, bit for bit.

python examples/distribute_mnist.py
syncline run -n 4 examples/distribute_mnist.py
"""

import argparse
import zlib

import torch
import torch.nn.functional as f
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import syncline as sl


class Net(nn.Module):
    """Two convolutions and two dense layers, for images of 8×8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scores of the ten digits."""
        x = f.relu(f.max_pool2d(self.conv1(x), 2))
        x = f.relu(f.max_pool2d(self.conv2(x), 2))
        scores: torch.Tensor = self.fc2(f.relu(self.fc1(x.flatten(1))))
        return scores


def checksum(model: nn.Module) -> torch.Tensor:
    """One number for all weights, which any other bit changes."""
    data = b"".join(weights.detach().cpu().numpy().tobytes() for weights in model.parameters())
    return torch.tensor([zlib.crc32(data)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16, help="of each worker")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05, help="for one worker")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    world = sl.init()
    torch.manual_seed(args.seed)
    device = world.device

    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
    test = torch.arange(len(images)) % 5 == 0
    train = TensorDataset(images[~test], labels[~test])
    sampler: DistributedSampler[int] = DistributedSampler(train, num_replicas=world.size, rank=world.rank)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=sl.optim.scale_lr(args.lr, "linear"), momentum=0.9)
    run = sl.distribute(model, optimizer)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            f.cross_entropy(model(x.to(device)), y.to(device)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    run.close()

    model.eval()
    mine = slice(world.rank, None, world.size)
    with torch.no_grad():
        scores, truth = model(images[test][mine].to(device)).cpu(), labels[test][mine]
    loss = sl.allreduce(f.cross_entropy(scores, truth), op="mean").item()
    right = sl.allreduce((scores.argmax(1) == truth).sum(), op="sum").item()
    sums = sl.allgather(checksum(model)).tolist()
    if world.rank == 0:
        alike = "the same" if len(set(sums)) == 1 else "NOT the same"
        accuracy = right / int(test.sum())
        print(f"workers: {world.size}; test loss {loss:.4f}, accuracy {accuracy:.3f}; weights {sums[0]:08x}, {alike}")
    world.close()


if __name__ == "__main__":
    main()
