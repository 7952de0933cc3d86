"""A convolutional network on handwritten digits, as a script for Horovod has it; only the import is another.

python examples/horovod_mnist.py
syncline run -n 4 examples/horovod_mnist.py
syncline horovodrun -np 4 -H localhost:4 python examples/horovod_mnist.py
"""

import argparse
import zlib

import torch
import torch.nn.functional as f
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import syncline.compat.horovod.torch as hvd


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

    hvd.init()
    torch.manual_seed(args.seed)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")

    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
    test = torch.arange(len(images)) % 5 == 0
    train = TensorDataset(images[~test], labels[~test])
    sampler: DistributedSampler[int] = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            f.cross_entropy(model(x.to(device)), y.to(device)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    model.eval()
    mine = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        scores, truth = model(images[test][mine].to(device)).cpu(), labels[test][mine]
    loss = hvd.allreduce(f.cross_entropy(scores, truth), name="test_loss").item()
    right = hvd.allreduce((scores.argmax(1) == truth).sum(), op=hvd.Sum, name="test_right").item()
    sums = hvd.allgather(checksum(model)).tolist()
    if hvd.rank() == 0:
        alike = "the same" if len(set(sums)) == 1 else "NOT the same"
        accuracy = right / int(test.sum())
        print(f"workers: {hvd.size()}; test loss {loss:.4f}, accuracy {accuracy:.3f}; weights {sums[0]:08x}, {alike}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
