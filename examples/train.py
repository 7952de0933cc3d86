"""Train a small network on scikit-learn's digits: a plain PyTorch script, and three lines that make it run on many.

python examples/train.py
syncline run -n 4 examples/train.py
"""

import torch
import torch.nn.functional as f
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl


def main(epochs: int = 10) -> None:
    world = sl.init()
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    test = torch.arange(len(images)) % 5 == 0
    train = TensorDataset(images[~test], labels[~test])
    loader = DataLoader(train, batch_size=64 // world.size, shuffle=True)

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with sl.distribute(model, optimizer) as run:
        for _ in range(epochs):
            for x, y in run.shard(loader):
                optimizer.zero_grad()
                f.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    with torch.no_grad():  # after the run every worker has the same model
        right = int((model(images[test].to(world.device)).argmax(1).cpu() == labels[test]).sum())
    if world.rank == 0:
        print(f"{world.size} workers: {right} of {int(test.sum())} test images right after {epochs} epochs")
    world.close()


if __name__ == "__main__":
    main()
