"""Datasets in tensors, splits, and helpers for models and batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from syncline.workloads.base import Batch, Splits

__all__ = ["Pairs", "Windows", "digest", "draw", "on_device_of", "seeded", "stratified"]


class Pairs(Dataset[Batch]):
    """Pairs of input and target. With `scale`, inputs are divided by it when they are read, and stored
    as they are: images as bytes need a quarter of the memory.

    >>> Pairs(torch.tensor([[0, 255]], dtype=torch.uint8), torch.tensor([3]), scale=255)[0]
    (tensor([0., 1.]), tensor(3))
    """

    def __init__(self, inputs: Tensor, targets: Tensor, scale: float | None = None) -> None:
        assert len(inputs) == len(targets), f"{len(inputs)} inputs, {len(targets)} targets"
        self.inputs = inputs
        self.targets = targets
        self.scale = scale

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        return self._scaled(self.inputs[index]), self.targets[index]

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        """Several samples by one gather; DataLoader calls it."""
        chosen = torch.tensor(indices)
        inputs, targets = self._scaled(self.inputs[chosen]), self.targets[chosen]
        return list(zip(inputs.unbind(0), targets.unbind(0), strict=True))

    def _scaled(self, inputs: Tensor) -> Tensor:
        return inputs if self.scale is None else inputs.to(torch.float32) / self.scale


class Windows(Dataset[Batch]):
    """A text in windows that do not overlap. The target of each byte is the next byte.

    >>> inputs, targets = Windows(torch.tensor(list(b"abcdefgh"), dtype=torch.uint8), length=3)[1]
    >>> bytes(inputs.tolist()), bytes(targets.tolist())
    (b'def', b'efg')
    """

    def __init__(self, text: Tensor, length: int) -> None:
        self.length = length
        self.rows = text.unfold(0, length + 1, length) if len(text) > length else text.new_empty(0, length + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        row = self.rows[index].long()
        return row[:-1], row[1:]

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        """Several samples at once; DataLoader calls it."""
        rows = self.rows[torch.tensor(indices)].long()
        return list(zip(rows[:, :-1].unbind(0), rows[:, 1:].unbind(0), strict=True))


def draw(seed: int) -> torch.Generator:
    """A new generator, so that the global one does not change."""
    return torch.Generator().manual_seed(seed)


def stratified(inputs: Tensor, targets: Tensor, seed: int, scale: float | None = None) -> Splits:
    """Split every class into three fifths, one fifth and one fifth, and shuffle each split.

    >>> sizes = stratified(torch.rand(20, 3), torch.arange(20) % 2, seed=0).sizes()
    >>> sizes["train"], sizes["validation"], sizes["test"]
    (12, 4, 4)
    """
    generator = draw(seed)
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for label in sorted(set(targets.tolist())):
        members = (targets == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        fifth = round(len(members) / 5)
        for part, chosen in zip(parts, members.split([len(members) - 2 * fifth, fifth, fifth]), strict=True):
            part.append(chosen)
    made = []
    for part in parts:
        rows = torch.cat(part)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        made.append(Pairs(inputs[rows], targets[rows], scale))
    return Splits(*made)


def digest(*tensors: Tensor) -> str:
    """The SHA-256 of the concatenated bytes of tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(cast(Any, tensor.contiguous().numpy()))
    return total.hexdigest()


def on_device_of(model: nn.Module, batch: Batch) -> Batch:
    """Move a batch to the device of the model."""
    device = next(model.parameters()).device
    return batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's CPU generator starts from `seed`. Afterwards it has its old state.

    `torch.manual_seed` would also seed the generators of GPUs.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
