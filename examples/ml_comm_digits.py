"""A network on handwritten digits, as a script for Cray's plugin with PyTorch has it. Nothing in it names Syncline.

syncline run -n 2 --as ml_comm examples/ml_comm_digits.py
syncline run -n 2 --mpi --as ml_comm examples/ml_comm_digits.py
"""

import argparse
import zlib

import ml_comm_torch as cdl
import torch
import torch.nn.functional as f
from sklearn.datasets import load_digits
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16, help="of each worker")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--warmup", type=float, default=0.1, help="the share of steps that are synchronous")
    args = parser.parse_args()

    cdl.init_mpi()
    rank, size = cdl.get_rank(), cdl.get_nranks()
    torch.manual_seed(rank)

    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    test = torch.arange(len(images)) % 5 == 0
    mine = torch.arange(len(images))[~test][rank::size]
    batches = len(images[~test]) // size // args.batch_size

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
    optimizer = cdl.DistributedOptimizer(optimizer, args.epochs * batches, 1, 2, args.warmup, 2, 40)

    for _ in range(args.epochs):
        order = mine[torch.randperm(len(mine))]
        for step in range(batches):
            batch = order[step * args.batch_size : (step + 1) * args.batch_size]
            optimizer.zero_grad()
            f.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    with torch.no_grad():
        right = model(images[test][rank::size]).argmax(1) == labels[test][rank::size]
    accuracy = cdl.average(right.double().mean())
    same = cdl.check_buffers_match([parameter.detach().numpy() for parameter in model.parameters()], 0) == 0
    if rank == 0:
        weights = zlib.crc32(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
        alike = "the same" if same else "NOT the same"
        print(f"workers: {size}; accuracy {accuracy:.3f}; weights {weights:08x}, {alike}")
    cdl.finalize()


if __name__ == "__main__":
    main()
