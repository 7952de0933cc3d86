"""Train a CNN whose convolutions are data-parallel and whose dense layers are divided over the workers.

syncline run -n 2 examples/weird_trick.py
syncline run -n 4 examples/weird_trick.py c        # the scheme: a, b or c
"""

import sys

import torch
import torch.nn.functional as f
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl


def main(scheme: str = "b", epochs: int = 6) -> None:
    world = sl.init()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    labels = torch.tensor(digits.target)
    test = torch.arange(len(images)) % 5 == 0
    data = TensorDataset(images[~test], labels[~test])
    loader = DataLoader(data, batch_size=64 // world.size, shuffle=True, drop_last=True)

    features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
    classifier = nn.Sequential(
        nn.Linear(32 * 4 * 4, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    model = nn.Sequential(features, nn.MaxPool2d(2), nn.Flatten(), classifier).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run = sl.distribute(model, optimizer, parallel=sl.parallel.weird_trick(scheme=scheme))
    for epoch in range(epochs):
        for x, y in run.shard(loader):
            loss = f.cross_entropy(model(x.to(world.device)), y.to(world.device))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        model.eval()
        with torch.no_grad():  # all workers call the divided model, each with the same images
            right = (model(images[test].to(world.device)).argmax(1).cpu() == labels[test]).double().mean()
        model.train()
        if world.rank == 0:
            print(f"epoch {epoch + 1}: accuracy {right:.3f} with scheme {scheme} on {world.size} workers", flush=True)
    run.close()
    world.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "b")
