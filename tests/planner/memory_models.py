"""Six small models of different families, each with its input. The memory of their steps is predicted and measured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

__all__ = ["MEMORY_MODELS"]


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and the input added to their result."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        same = before == after
        self.short = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        change = self.second_norm(self.second(torch.relu(self.first_norm(self.first(x)))))
        return torch.relu(change + self.short(x))


class SmallTransformer(nn.Module):
    """Embedding, positions, blocks of attention, a head over all words: it also has a parameter outside of layers."""

    def __init__(self, words: int = 256, width: int = 32, layers: int = 3, length: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)  # type: ignore[no-any-return]


class LargeEmbedding(nn.Module):
    """Nearly all weights are in one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10_000, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.table(x))))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Features of the way down are joined to those of the way up, by code between the layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(1, width), self._block(width, 2 * width)
        self.middle = self._block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join2 = self._block(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join1 = self._block(2 * width, width)
        self.head = nn.Conv2d(width, 10, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Sequential:
        first, second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        third = self.middle(F.max_pool2d(second, 2))
        second = self.join2(torch.cat([self.up2(third), second], 1))
        first = self.join1(torch.cat([self.up1(second), first], 1))
        return self.head(first).mean((2, 3))  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def vgg() -> nn.Module:
    features = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
    return nn.Sequential(*features, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def resnet() -> nn.Module:
    blocks = (ResidualBlock(8, 8), ResidualBlock(8, 16, 2), ResidualBlock(16, 16))
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *blocks, pool, nn.Flatten(), nn.Linear(16, 10))


def images(count: int) -> Tensor:
    return torch.randn(count, 1, 16, 16)


MEMORY_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "MLP": (mlp, lambda count: torch.randn(count, 64)),
    "VGG": (vgg, images),
    "ResNet": (resnet, images),
    "transformer": (SmallTransformer, lambda count: torch.randint(256, (count, 16))),
    "large embedding": (LargeEmbedding, lambda count: torch.randint(10_000, (count, 8))),
    "U-Net": (UNet, images),
}
"""By name: makes the model, and makes an input for a number of samples. All have ten classes or more."""
