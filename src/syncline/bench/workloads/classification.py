"""What the workloads that name a class have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from syncline.bench.workloads.datasets import Pairs, digest
from syncline.training.workload import Batch, Workload

__all__ = ["Classification", "on_device_of"]


class Classification(Workload):
    """Cross-entropy is trained, the share of right answers counts."""

    metric = "accuracy"
    higher_is_better = True
    metric_range = (0.0, 1.0)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy."""
        inputs, targets = on_device_of(model, batch)
        return F.cross_entropy(model(inputs), targets)

    def measures(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropy and the share of right answers."""
        inputs, targets = on_device_of(model, batch)
        outputs = model(inputs)
        right = (outputs.argmax(-1) == targets).double().mean()
        return {"loss": F.cross_entropy(outputs, targets), "accuracy": right}

    def describe(self) -> dict[str, Any]:
        """With the SHA-256 of all samples."""
        tensors: list[Tensor] = []
        for split in vars(self.splits()).values():
            assert isinstance(split, Pairs)
            tensors += [split.inputs, split.targets]
        return {**super().describe(), "sha256": digest(*tensors)}


def on_device_of(model: nn.Module, batch: Batch) -> Batch:
    """The batch where the model is."""
    device = next(model.parameters()).device
    return batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)
