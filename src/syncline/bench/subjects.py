"""The models that `syncline bench step` trains: small enough for a laptop, unlike one another in what they exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as f
from torch import Tensor, nn

__all__ = ["SUBJECTS", "Subject"]


@dataclass(frozen=True)
class Subject:
    """A model, and a batch for it drawn from a generator."""

    about: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer))
        same = inner == outer and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return f.relu(self.second(self.first(x)) + self.shortcut(x))


class ByteTransformer(nn.Module):
    """A causal transformer over bytes, without dropout: both contenders must compute the same."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        scores: Tensor = self.head(self.layers(self.tokens(x) + self.places, mask, is_causal=True))
        return scores.transpose(1, 2)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def _resnet() -> nn.Module:
    blocks = [
        Block(16, 16, 1),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 32, 1),
        Block(32, 64, 2),
        Block(64, 64, 1),
    ]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _labelled(shape: tuple[int, ...]) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    return lambda draw: (torch.randn(*shape, generator=draw), torch.randint(0, 10, (shape[0],), generator=draw))


def _bytes(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 256, (16, 65), generator=draw)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


SUBJECTS = {
    "mlp": Subject("MLP 784-1024-1024-10, batch 64", _mlp, _labelled((64, 784))),
    "resnet": Subject("ResNet-14 of width 16 on 32×32, batch 32", _resnet, _labelled((32, 3, 32, 32))),
    "transformer": Subject("transformer, 4 layers of width 128, 16 × 64 bytes", ByteTransformer, _bytes),
}
