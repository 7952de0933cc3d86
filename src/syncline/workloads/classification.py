"""The base of workloads that classify, and their models."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from syncline.workloads.base import Batch, Workload, on_device_of

__all__ = ["Classification", "image_cnn", "mlp"]


class Classification(Workload):
    """The loss is cross-entropy, and the metric is accuracy."""

    metric = "accuracy"
    higher_is_better = True
    metric_range = (0.0, 1.0)

    def output_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return F.cross_entropy(outputs, targets)

    def measures(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy and accuracy."""
        inputs, targets = on_device_of(model, batch)
        outputs = model(inputs)
        right = (outputs.argmax(-1) == targets).double().mean()
        return {"loss": self.output_loss(outputs, targets), "accuracy": right}


def mlp(*widths: int) -> nn.Sequential:
    """Fully connected layers with ReLU between them.

    >>> sum(parameter.numel() for parameter in mlp(64, 64, 10).parameters())
    4810
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def image_cnn(side: int, channels: tuple[int, ...], classes: int, norm: bool) -> nn.Sequential:
    """3×3 convolutions, each with 2×2 pooling, then one linear layer; `norm` adds batch norm before each ReLU."""
    layers: list[nn.Module] = []
    before = 1
    for after in channels:
        layers.append(nn.Conv2d(before, after, 3, padding=1, bias=not norm))
        layers += [nn.BatchNorm2d(after)] if norm else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        before, side = after, side // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * side * side, classes))
