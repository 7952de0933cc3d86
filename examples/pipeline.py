"""Train a network whose layers are split over the workers: two stages, or one on an odd number of workers.

syncline run -n 2 examples/pipeline.py
syncline run -n 4 examples/pipeline.py runs/pipeline        # two workers a stage; a second call continues
"""

import sys

import torch
import torch.nn.functional as f
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl


def main(folder: str | None = None, epochs: int = 8) -> None:
    world = sl.init()
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    test = torch.arange(len(images)) % 5 == 0
    loader = DataLoader(TensorDataset(images[~test], labels[~test]), batch_size=64, shuffle=True)

    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(64, 10)).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stages = 2 if world.size % 2 == 0 else 1
    with sl.pipeline(model, optimizer, f.cross_entropy, stages=stages, schedule="1f1b(microbatches=4)") as run:
        done = sl.load(folder, run=run) if folder else None
        for epoch in range(done["epoch"] if done else 0, epochs):
            for x, y in run.shard(loader):
                loss = run.step(x, y)  # forward, backward and update
            with run.agreed(), torch.no_grad():  # here every worker has the whole model
                model.eval()
                right = (model(images[test].to(world.device)).argmax(1).cpu() == labels[test]).double().mean()
                model.train()
            if folder:
                sl.save(folder, step=epoch + 1, run=run, epoch=epoch + 1)
            if world.rank == 0:
                print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {right:.3f} with {stages} stages", flush=True)
    world.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
