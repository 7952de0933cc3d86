"""A language model of bytes on the source of Python's own standard library: real text that is already there."""

from __future__ import annotations

import builtins
import math
import platform
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from syncline.bench.workloads.checks import check_choice, check_whole
from syncline.bench.workloads.classification import on_device_of
from syncline.bench.workloads.corpus import Corpus, read_corpus
from syncline.bench.workloads.datasets import Windows
from syncline.bench.workloads.models import GRULanguageModel, Transformer, seeded
from syncline.errors import SpecError
from syncline.training.workload import Batch, Defaults, Splits, Workload

__all__ = ["Stdlib"]


class Stdlib(Workload):
    """Predict the next byte; 8 bits per byte is knowing nothing.

    >>> Stdlib(model="rnn")
    stdlib(model='rnn')
    """

    name = "stdlib"
    metric = "bits_per_byte"
    higher_is_better = False
    metric_range = (0.0, 8.0)

    def __init__(self, model: str = "transformer", bytes: int = 1_000_000, length: int = 128) -> None:
        self.architecture = check_choice(self.name, "model", model, ["transformer", "rnn"])
        self.size = check_whole(self.name, "bytes", bytes, 100_000, 100_000_000)
        self.length = check_whole(self.name, "length", length, 8, 4096)
        super().__init__(model=model, bytes=bytes, length=length)
        self._corpus: Corpus | None = None

    @property
    def defaults(self) -> Defaults:
        """AdamW at a constant rate."""
        if self.architecture == "rnn":
            return Defaults(batch=16, epochs=2, learning_rate=5e-3, optimizer="adamw", weight_decay=0.01, target=2.4)
        return Defaults(batch=8, epochs=2, learning_rate=2e-3, optimizer="adamw", weight_decay=0.01, target=2.7)

    def model(self, seed: int = 0) -> nn.Module:
        """Two layers of width 64, or one GRU of width 128."""
        with seeded(seed):
            return Transformer(self.length) if self.architecture == "transformer" else GRULanguageModel()

    def corpus(self) -> Corpus:
        """The text, read at the first call and kept."""
        if self._corpus is None:
            self._corpus = read_corpus(self.size)
        return self._corpus

    def make_splits(self) -> Splits:
        """By file: no split has a line of another's files."""
        corpus = self.corpus()
        made = [_windows(text, self.length) for text in (corpus.train, corpus.validation, corpus.test)]
        if not all(len(windows) for windows in made):
            raise SpecError(
                f"{self}: a split has no window of {self.length} bytes; write a larger bytes= or a smaller length="
            )
        return Splits(*made)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of a byte, in nats."""
        inputs, targets = on_device_of(model, batch)
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def measures(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The loss in nats, and in bits."""
        loss = self.loss(model, batch)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}

    def describe(self) -> dict[str, Any]:
        """With the corpus: other Python versions have other files."""
        corpus = self.corpus()
        python = platform.python_version()
        return {**super().describe(), "sha256": corpus.sha256, "files": corpus.files, "python": python}


def _windows(text: builtins.bytes, length: int) -> Windows:
    return Windows(torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0), length)
