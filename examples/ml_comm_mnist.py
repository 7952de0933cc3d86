"""The recipe of Cray's plugin for TensorFlow, line by line on NumPy and torch: broadcast, gradients, average.

syncline run -n 2 --as ml_comm examples/ml_comm_mnist.py
syncline run -n 2 --mpi --as ml_comm examples/ml_comm_mnist.py
"""

import math

import ml_comm as mc
import numpy as np
import torch
import torch.nn.functional as f
from sklearn.datasets import load_digits
from torch import nn

MAX_STEPS = 200
BATCH = 16


def main() -> None:
    mc.init_mpi()
    torch.manual_seed(mc.get_rank())

    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    # Size the communication buffers by the model, and take 100 synchronous steps before the pipelined ones.
    parameters = list(model.parameters())
    mc.init(1, 1, sum(math.prod(parameter.shape) for parameter in parameters), "tensorflow")
    mc.config_team(0, 0, 100, MAX_STEPS, 2, 100)

    # All ranks start with the weights of rank 0.
    mc.broadcast([parameter.data.numpy() for parameter in parameters], 0)
    if mc.check_buffers_match([parameter.data.numpy() for parameter in parameters], 1) != 0:
        raise ValueError("not all ranks have the same initial model")

    for step in range(MAX_STEPS):
        batch = torch.randint(0, len(images), (BATCH,))
        scores = model(images[batch])
        loss = f.cross_entropy(scores, labels[batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = mc.gradients([parameter.grad for parameter in parameters], 0)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        if (step + 1) % 100 == 0:
            metrics = np.array([loss.item(), (scores.argmax(1) == labels[batch]).double().mean()], dtype=np.float32)
            mc.average(metrics)
            if mc.get_rank() == 0:
                print(f"step {step + 1}, loss {metrics[0]:.3f}, accuracy {metrics[1]:.3f}")

    mc.finalize()


if __name__ == "__main__":
    main()
