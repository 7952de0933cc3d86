"""A workload of milliseconds with all kinds of state that a checkpoint must have: dropout, batch norm, momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset, TensorDataset

from syncline.workloads.base import Batch, Defaults, Splits, Workload
from syncline.world import current_world


class Tiny(Workload):
    """Two classes in eight dimensions. Stores its models by rank, and calls `watcher` at each loss."""

    name = "tiny"
    metric = "accuracy"
    higher_is_better = True
    metric_range = (0.0, 1.0)

    def __init__(self, samples: int = 50, watcher: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.samples = samples
        self.watcher = watcher
        self.models: dict[int, nn.Module] = {}
        self.losses: dict[int, int] = {}

    @property
    def defaults(self) -> Defaults:
        return Defaults(batch=4, epochs=3, learning_rate=0.1, momentum=0.9)

    def model(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            # Two values of a channel in each sample: batch norm refuses a single one, and a last batch may be one.
            norm = (nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4), nn.Flatten())
            made = nn.Sequential(nn.Linear(8, 8), *norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.models.setdefault(current_world().rank, made)
        return made

    def make_splits(self) -> Splits:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.samples + 40, 8, generator=generator)
        targets = (inputs.sum(1) > 0).long()
        cuts = (slice(0, self.samples), slice(self.samples, self.samples + 20), slice(self.samples + 20, None))
        train, validation, test = (cast(Dataset[Batch], TensorDataset(inputs[cut], targets[cut])) for cut in cuts)
        return Splits(train, validation, test)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            rank = current_world().rank
            self.losses[rank] = self.losses.get(rank, 0) + 1
            if self.watcher is not None:
                self.watcher(self.losses[rank])
        return F.cross_entropy(model(batch[0]), batch[1])

    def measures(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        outputs = model(batch[0])
        right = (outputs.argmax(1) == batch[1]).double().mean()
        return {"loss": F.cross_entropy(outputs, batch[1]), "accuracy": right}

    def weights(self, rank: int = 0) -> dict[str, Tensor]:
        """The parameters and buffers that a rank ended with."""
        return self.models[rank].state_dict()
