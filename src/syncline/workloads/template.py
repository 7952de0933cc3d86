"""A workload: a model, its data, its loss and its target.

Train it on two workers, then compare synchronisation strategies:

    syncline train workload.py -n 2
    syncline race workload.py -n 2

It separates three rings of points in the plane, in seconds. Change the functions to make it yours.
"""

import torch
from torch import Tensor, nn

# Validation accuracy at which a run ends. One worker should reach it within EPOCHS.
TARGET = 0.97
METRIC = "accuracy"  # the name of the value of metric()
HIGHER_IS_BETTER = True

BATCH = 32  # samples of each worker in a step
EPOCHS = 15
LEARNING_RATE = 0.02  # for one worker


def model() -> nn.Module:
    """A new model. Random numbers are seeded before the call."""
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Train, validation and test: each a pair (inputs, targets), or any dataset of such pairs.

    No sample may be in two of them. Every worker calls this, and all must get the same data: random numbers are seeded
    here too.
    """
    return rings(3000), rings(600), rings(600)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss to minimise: the mean over the batch."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def metric(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """The metric of the target: the mean over the batch too. To use the loss instead, remove this function, METRIC,
    HIGHER_IS_BETTER and TARGET.
    """
    inputs, targets = batch
    right = model(inputs).argmax(1) == targets
    return float(right.double().mean())


def optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """The optimizer. Without this function it is the same: SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)


def rings(count: int) -> tuple[Tensor, Tensor]:
    """Points near circles of radius 1, 2 and 3, and the number of the circle. Replace it by reading your data."""
    labels = torch.randint(3, (count,))
    radius = labels + 1 + 0.2 * torch.randn(count)
    angle = 2 * torch.pi * torch.rand(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels
