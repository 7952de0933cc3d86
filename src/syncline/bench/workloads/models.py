"""The models, each small enough for a core or two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

__all__ = ["GRULanguageModel", "Transformer", "image_cnn", "mlp", "seeded"]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The CPU's generator starts from `seed` inside, and is as it was afterwards.

    `torch.manual_seed` would reach the generators of the GPUs too.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


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
    """Convolutions of 3×3, each halving the image, then one linear layer; `norm` puts batch norm before each ReLU."""
    layers: list[nn.Module] = []
    before = 1
    for after in channels:
        layers.append(nn.Conv2d(before, after, 3, padding=1, bias=not norm))
        layers += [nn.BatchNorm2d(after)] if norm else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        before, side = after, side // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * side * side, classes))


class Block(nn.Module):
    """Causal attention, then a feed-forward layer; each added to its input and normalised before."""

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
    """A decoder over bytes with learned positions: (batch, position) to (batch, position, 256)."""

    def __init__(self, length: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        nn.init.normal_(self.bytes.weight, std=0.02)

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
        """Logits of the next byte; each window starts from nothing."""
        hidden, _ = self.recurrent(self.bytes(x))
        return _called(self.head, hidden)


def _called(module: Callable[..., Tensor], x: Tensor) -> Tensor:
    """`module(x)`, whose type torch gives as Any."""
    return module(x)
