"""The contract of a workload: data in three splits, a model, a loss, and one metric.

    Workload ── splits() ──► train · validation · test      the same bytes on every rank
        ├─ model(seed)                                      the same weights for the same seed
        ├─ optimizer(model, learning_rate)
        ├─ loss(model, batch)                               mean over the batch
        │    └─ output_loss(outputs, targets)               the same from the model's output
        └─ evaluate(model, dataset)                         {"loss": …, metric: …}

An author writes `defaults`, `model`, `make_splits` and `output_loss`, and may override `measures`, `optimizer`,
`evaluate` and `describe`. A loss that needs more than the model's output overrides `loss` instead. Nothing here knows
of ranks: `data` splits the samples, and a strategy synchronises the workers.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from syncline.errors import IncompatibleError, SpecError
from syncline.specs import Spec, nearest

__all__ = [
    "Batch",
    "Defaults",
    "Pairs",
    "Splits",
    "Workload",
    "batches",
    "check_choice",
    "check_number",
    "check_whole",
    "evaluating",
    "on_device_of",
    "sample_tensors",
    "seeded",
]

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, the samples along the first dimension."""

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The settings of a run if the user gives none.

    >>> Defaults(batch=32, epochs=5, learning_rate=0.1).optimizer
    'sgd'
    """

    batch: int
    """Samples per step and worker."""
    epochs: int
    learning_rate: float
    """The rate for one worker."""
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    target: float | None = None
    """A value of the metric that one worker reaches within the epochs, or None."""


@dataclass(frozen=True)
class Splits:
    """Three disjoint map-style datasets of (input, target). Choose by validation; use test once, at the end."""

    train: Dataset[Batch]
    validation: Dataset[Batch]
    test: Dataset[Batch]

    def sizes(self) -> dict[str, int]:
        """The number of samples of each split."""
        return {name: len(cast(Sized, split)) for name, split in vars(self).items()}


class Pairs(Dataset[Batch]):
    """Pairs of input and target, in two tensors. With `scale`, inputs are divided by it when they are read, so that
    images are stored as bytes, in a quarter of the memory.

    >>> Pairs(torch.tensor([[0, 255]], dtype=torch.uint8), torch.tensor([3]), scale=255)[0]
    (tensor([0., 1.]), tensor(3))
    """

    def __init__(self, inputs: Tensor, targets: Tensor, scale: float | None = None) -> None:
        assert len(inputs) == len(targets), f"{len(inputs)} inputs, {len(targets)} targets"
        self.tensors = self.inputs, self.targets = inputs, targets
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


class Workload(ABC):
    """A training problem. `repr()` is its spec, without arguments that have their default."""

    name: ClassVar[str]
    metric: ClassVar[str]
    """The key of `evaluate()` that is compared with a target."""
    higher_is_better: ClassVar[bool]
    metric_range: ClassVar[tuple[float, float]]
    """The range of targets. Its worse end is no target, because an untrained model reaches it."""

    def __init__(self, **arguments: Any) -> None:
        defaults = inspect.signature(type(self)).parameters
        changed = {
            key: arguments[key] for key in defaults if key in arguments and arguments[key] != defaults[key].default
        }
        self.spec = str(Spec(self.name, (), changed))
        self._splits: Splits | None = None
        self._sha256: str | None = None

    def __repr__(self) -> str:
        return self.spec

    @property
    @abstractmethod
    def defaults(self) -> Defaults:
        """Batch, epochs, optimizer and so on, if the user gives none."""

    @abstractmethod
    def model(self, seed: int = 0) -> nn.Module:
        """A new model on the CPU. Its weights depend on the seed only; the global generators do not change."""

    @abstractmethod
    def make_splits(self) -> Splits:
        """Read or generate the data: the same on every rank and in every call."""

    def output_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over a batch, given the model's output. The last stage of a pipeline has no more than that."""
        raise IncompatibleError(
            f"{self} has no output_loss(outputs, targets), the loss given the model's output, which is all that the "
            "last stage of a pipeline has: define it, or train without a pipeline"
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over a batch, for `backward()`."""
        inputs, targets = on_device_of(model, batch)
        return self.output_loss(model(inputs), targets)

    def splits(self) -> Splits:
        """The data; made at the first call."""
        if self._splits is None:
            self._splits = self.make_splits()
        return self._splits

    def measures(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The values of `evaluate`, as means over a batch."""
        return {"loss": self.loss(model, batch)}

    def evaluate(self, model: nn.Module, dataset: Dataset[Batch], batch: int = 512) -> dict[str, float]:
        """Means over the dataset, with "loss" and the metric. Every module returns to its mode."""
        if not len(cast(Sized, dataset)):
            raise SpecError(
                f"{self}: no samples to evaluate on; give each rank at least one, or evaluate the whole split"
            )
        sums: dict[str, float] = {}
        count = 0
        with evaluating(model), torch.no_grad():
            for samples in batches(dataset, batch):
                size = len(samples[0])
                count += size
                for key, value in self.measures(model, samples).items():
                    sums[key] = sums.get(key, 0.0) + size * float(value)
        return {key: value / count for key, value in sums.items()}

    def optimizer(self, model: nn.Module, learning_rate: float | None = None) -> torch.optim.Optimizer:
        """The optimizer of the defaults, over all parameters that require gradients."""
        defaults = self.defaults
        rate = defaults.learning_rate if learning_rate is None else learning_rate
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if defaults.optimizer not in OPTIMIZERS:
            known = ", ".join(map(repr, OPTIMIZERS))
            raise SpecError(f"{self}: unknown optimizer {defaults.optimizer!r}; available: {known}")
        options = {"momentum": defaults.momentum} if defaults.optimizer == "sgd" else {}
        make: Callable[..., torch.optim.Optimizer] = OPTIMIZERS[defaults.optimizer]
        return make(trained, lr=rate, weight_decay=defaults.weight_decay, **options)

    def describe(self) -> dict[str, Any]:
        """The entries of config.json: spec, metric, sizes. "sha256" shows whether the ranks have the same data.

        It is the digest of all samples, if they are in tensors.
        """
        self._sha256 = self._sha256 or _digest(self.splits())
        data = {"sha256": self._sha256} if self._sha256 else {}
        return {
            "workload": self.spec,
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "samples": self.splits().sizes(),
            "parameters": sum(parameter.numel() for parameter in self.model(0).parameters()),
            **data,
        }

    def reached(self, value: float, target: float) -> bool:
        """Whether `value` of the metric is as good as `target`."""
        return value >= target if self.higher_is_better else value <= target

    def check_target(self, value: float, metric: str | None = None) -> float:
        """Return the target if this workload can reach it; otherwise raise a `SpecError` with the range."""
        low, high = self.metric_range
        side = "higher" if self.higher_is_better else "lower"
        known = f"{self.spec} is judged by {self.metric} ({side} is better)"
        if metric is not None and metric != self.metric:
            raise SpecError(f"a target for {metric!r} (value: {value!r}): {known}; give a target for {self.metric!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise SpecError(f"target {value!r} is not a finite number; {known}")
        fits = low < value <= high if self.higher_is_better else low < value < high
        if not fits:
            above = "" if math.isinf(high) else f" and {'at most' if self.higher_is_better else 'below'} {high:g}"
            percent = self.higher_is_better and high < value <= 100 * high
            hint = f"; did you mean {value / 100:g}?" if percent else ""
            raise SpecError(f"target {value!r} cannot be: {known}, so write a number above {low:g}{above}{hint}")
        return float(value)


def sample_tensors(dataset: object) -> list[Tensor]:
    """The tensors of a dataset that stores its samples in tensors (`Pairs`, `TensorDataset`); of others none."""
    return list(dataset.tensors) if isinstance(dataset, (Pairs, TensorDataset)) else []


def _digest(splits: Splits) -> str | None:
    """The SHA-256 of all samples; None if a split does not store them in tensors."""
    samples = [sample_tensors(split) for split in vars(splits).values()]
    if not all(samples):
        return None
    total = hashlib.sha256()
    for tensors in samples:
        for tensor in tensors:
            # As bytes, because NumPy does not have every dtype of torch.
            total.update(cast(Any, tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    return total.hexdigest()


def on_device_of(model: nn.Module, batch: Batch) -> Batch:
    """Move a batch to the device of the model."""
    device = next(model.parameters()).device
    return batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the generators of torch (CPU), NumPy and `random` start from `seed`. Afterwards they are as before.

    >>> with seeded(3):
    ...     first = torch.rand(1)
    >>> with seeded(3):
    ...     torch.equal(torch.rand(1), first)
    True
    """
    numpy, python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(numpy)
        random.setstate(python)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode. Afterwards each module returns to its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def batches(dataset: Dataset[Batch], size: int) -> Iterator[Batch]:
    """The dataset in order, in batches of `size`. (A DataLoader would draw from the global generator.)

    >>> from torch.utils.data import TensorDataset
    >>> [len(x) for x, y in batches(TensorDataset(torch.arange(5), torch.arange(5)), 2)]
    [2, 2, 1]
    """
    if size < 1:
        raise SpecError(f"a batch has at least one sample (batch: {size})")
    several = getattr(dataset, "__getitems__", None)
    count = len(cast(Sized, dataset))
    for start in range(0, count, size):
        chosen = list(range(start, min(start + size, count)))
        samples = [dataset[index] for index in chosen] if several is None else several(chosen)
        inputs, targets = default_collate(samples)
        yield inputs, targets


def check_choice(workload: str, argument: str, value: Any, known: Iterable[str]) -> str:
    """Check that an argument is one of the known names.

    >>> check_choice("digits", "model", "cn", ["mlp", "cnn"])
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: digits: unknown model 'cn'; did you mean 'cnn'? available: 'cnn', 'mlp'
    """
    names = list(known)
    if value not in names:
        raise SpecError(f"{workload}: unknown {argument} {value!r}; {nearest(str(value), names)}")
    return str(value)


def check_whole(workload: str, argument: str, value: Any, least: int, most: int) -> int:
    """Check that an argument is a whole number in a range, with both ends."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SpecError(f"{workload}: {argument} is a whole number from {least:,} to {most:,} ({argument}: {value!r})")
    return value


def check_number(workload: str, argument: str, value: Any, least: float, most: float) -> float:
    """Check that an argument is a finite number in a range, with both ends."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not least <= value <= most:
        raise SpecError(f"{workload}: {argument} is a number from {least:g} to {most:g} ({argument}: {value!r})")
    return float(value)
