"""A byte-level language model on the source of Python's standard library, which every machine has."""

from __future__ import annotations

import hashlib
import math
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

from syncline.errors import SpecError, UnsupportedError
from syncline.workloads.base import (
    Batch,
    Defaults,
    Splits,
    Workload,
    check_choice,
    check_whole,
    seeded,
)

__all__ = ["ByteModel", "Stdlib", "Transformer"]


class ByteModel(Workload):
    """The base of workloads that predict the next byte. A uniform guess has 8 bits per byte."""

    metric = "bits_per_byte"
    higher_is_better = False
    metric_range = (0.0, 8.0)

    def __init__(self, *, bytes: int, length: int, **arguments: Any) -> None:
        self.size = check_whole(self.name, "bytes", bytes, 100_000, 100_000_000)
        self.length = check_whole(self.name, "length", length, 8, 4096)
        super().__init__(bytes=bytes, length=length, **arguments)

    @cached_property
    def corpus(self) -> Corpus:
        """The text."""
        return read_corpus(self.size)

    def make_splits(self) -> Splits:
        """Each file is in one split."""
        texts = (self.corpus.train, self.corpus.validation, self.corpus.test)
        if min(map(len, texts)) <= self.length:
            raise SpecError(
                f"{self}: a split has no window of {self.length} bytes; write a larger bytes= or a smaller length="
            )
        return Splits(*(Windows(text, self.length) for text in texts))

    def output_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of a byte, in nats."""
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def measures(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The loss in nats, and in bits."""
        loss = self.loss(model, batch)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}

    def describe(self) -> dict[str, Any]:
        """Adds the corpus, because other Python versions have other files."""
        corpus, python = self.corpus, platform.python_version()
        return {**super().describe(), "sha256": corpus.sha256, "files": corpus.files, "python": python}


class Stdlib(ByteModel):
    """A small transformer or a GRU.

    >>> Stdlib(model="rnn")
    stdlib(model='rnn')
    """

    name = "stdlib"

    def __init__(self, model: str = "transformer", bytes: int = 1_000_000, length: int = 128) -> None:
        self.architecture = check_choice(self.name, "model", model, ["transformer", "rnn"])
        super().__init__(model=model, bytes=bytes, length=length)

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


class Windows(Dataset[Batch]):
    """A text in windows that do not overlap. The target of each byte is the next byte.

    >>> inputs, targets = Windows(b"abcdefgh", length=3)[1]
    >>> bytes(inputs.tolist()), bytes(targets.tolist())
    (b'def', b'efg')
    """

    def __init__(self, text: bytes, length: int) -> None:
        self.rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        row = self.rows[index].long()
        return row[:-1], row[1:]

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        """Several samples at once; DataLoader calls it."""
        rows = self.rows[torch.tensor(indices)].long()
        return list(zip(rows[:, :-1].unbind(0), rows[:, 1:].unbind(0), strict=True))


PACKAGES = (
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
    "urllib",
    "xml",
)
"""Packages that are read in addition to the top-level modules."""
SHARES = MappingProxyType({"train": 0.8, "validation": 0.1, "test": 0.1})
MAX_FILE_BYTES = 1 << 16
"""Bytes that are read of one file, so that no file is a whole split."""


@dataclass(frozen=True)
class Corpus:
    """Three texts of different files, and the SHA-256 of all texts and names."""

    train: bytes
    validation: bytes
    test: bytes
    files: int
    sha256: str


def read_corpus(limit: int, folder: Path | None = None) -> Corpus:
    """Read `limit` bytes of the library's modules, in the order of the hashes of their names.

    Each file goes to the split that is furthest below its share.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    texts: dict[str, list[bytes]] = {split: [] for split in SHARES}
    sizes = dict.fromkeys(SHARES, 0)
    total = hashlib.sha256()
    files = taken = 0
    for name, path in sorted(_modules(folder), key=lambda module: hashlib.sha256(module[0].encode()).digest()):
        if taken == limit:
            break
        text = path.read_bytes()[: min(MAX_FILE_BYTES, limit - taken)]
        taken += len(text)
        files += 1
        total.update(f"{name}\0{len(text)}\0".encode())
        total.update(text)
        split = _furthest_below(sizes, taken)
        sizes[split] += len(text)
        texts[split].append(text)
    if taken < limit:
        raise UnsupportedError(
            f"the modules in {folder} have {taken:,} bytes (at most {MAX_FILE_BYTES:,} of each count), {limit:,} were "
            "asked for; write a smaller bytes=, or use a Python that has its library's source"
        )
    train, validation, test = (b"".join(texts[split]) for split in ("train", "validation", "test"))
    return Corpus(train, validation, test, files, total.hexdigest())


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    for pattern in ("*.py", *(f"{package}/**/*.py" for package in PACKAGES)):
        for path in folder.glob(pattern):
            # _sysconfigdata has the paths and flags of one machine.
            if not path.name.startswith("_sysconfigdata"):
                yield path.relative_to(folder).as_posix(), path


def _furthest_below(sizes: dict[str, int], taken: int) -> str:
    return max(SHARES, key=lambda split: SHARES[split] * taken - sizes[split])


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with a pre-norm and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, position, width) to the same."""
        batch, length, width = x.shape
        merged: Tensor = self.query_key_value(self.norm_attention(x))
        query, key, value = merged.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + _called(self.feed, self.norm_feed(x))


class Transformer(nn.Module):
    """A decoder over bytes with learned positions: (batch, position) to (batch, position, 256).

    With `tied` the embedding is also the weight of the head.
    """

    def __init__(self, length: int, width: int = 64, heads: int = 4, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        nn.init.normal_(self.bytes.weight, std=0.02)
        if tied:
            self.head.weight = self.bytes.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next byte."""
        hidden = self.bytes(x) + self.positions[: x.shape[1]]
        return _called(self.head, self.norm(self.blocks(hidden)))


class GRULanguageModel(nn.Module):
    """One gated recurrent layer over bytes: (batch, position) to (batch, position, 256)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, 64)
        self.recurrent = nn.GRU(64, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next byte; each window starts from a zero state."""
        hidden, _ = self.recurrent(self.bytes(x))
        return _called(self.head, hidden)


def _called(module: Callable[..., Tensor], x: Tensor) -> Tensor:
    """`module(x)` with a type: torch declares Any."""
    return module(x)
