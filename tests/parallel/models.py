"""Models that pipelines must train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """A block whose skip connection crosses several stages. Each stage returns views."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        start = self.first(x)
        value = start
        for layer in self.middle:
            value = torch.tanh(layer(value)).view(-1, 6)
        output: Tensor = self.last(value + start)
        return output


class UNet(nn.Module):
    """Each level of the way down is used again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.bottom = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1))
        self.up2 = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.up1 = nn.Conv2d(8, 3, 3, padding=1)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.relu(self.down1(x))
        two = torch.relu(self.down2(one))
        low = self.bottom(two)
        up = torch.relu(self.up2(torch.cat([low, two], 1)))
        output: Tensor = self.head(self.up1(torch.cat([up, one], 1)).mean((2, 3)))
        return output


class Tied(nn.Module):
    """The embedding is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(self.embed(tokens)))
        return output


def _mlp(*extra: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), *(make() for make in extra), nn.Tanh()) for _ in range(7)), nn.Linear(6, 3)
    )


@dataclass(frozen=True)
class ModelCase:
    """A model, where it is cut into four stages and into eight, and its data."""

    make: Callable[[], nn.Module]
    cuts: tuple[str, str, str]
    eight: tuple[str, ...]
    input: Callable[[int], Tensor]
    classes: int = 3
    fewest: int = 1
    """The fewest samples that the model can train on."""

    def cuts_into(self, stages: int) -> tuple[str, ...]:
        """The modules with which stages 1, 2, … begin."""
        evenly = tuple(self.eight[place * 8 // stages - 1] for place in range(1, stages))
        return {2: self.cuts[1:2], 4: self.cuts}.get(stages, evenly)

    def batch(self, samples: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        torch.manual_seed(seed)
        return self.input(samples), torch.randint(self.classes, (samples,))

    def model(self) -> nn.Module:
        """The model with its first weights."""
        torch.manual_seed(1)
        return self.make().double()


def _vectors(samples: int) -> Tensor:
    return torch.randn(samples, 6, dtype=torch.float64)


def _images(samples: int) -> Tensor:
    return torch.randn(samples, 1, 8, 8, dtype=torch.float64)


def _tokens(samples: int) -> Tensor:
    return torch.randint(11, (samples,))


LAYERS = tuple(map(str, range(1, 8)))
MODELS = {
    "mlp": ModelCase(_mlp, ("2", "4", "6"), LAYERS, _vectors),
    "skips": ModelCase(
        Residual, ("middle.0", "middle.2", "last"), (*(f"middle.{n}" for n in range(6)), "last"), _vectors
    ),
    "unet": ModelCase(
        UNet,
        ("down2", "bottom", "up1"),
        ("down2", "bottom", "bottom.1", "bottom.2", "up2", "up1", "head"),
        _images,
    ),
    "tied": ModelCase(
        Tied,
        ("blocks.0", "blocks.2", "head"),
        ("blocks.0", "blocks.0.1", "blocks.1", "blocks.2", "blocks.2.1", "blocks.3", "head"),
        _tokens,
        classes=11,
    ),
    "dropout": ModelCase(lambda: _mlp(lambda: nn.Dropout(0.3)), ("2", "4", "6"), LAYERS, _vectors),
    "batch norm": ModelCase(lambda: _mlp(lambda: nn.BatchNorm1d(6)), ("2", "4", "6"), LAYERS, _vectors, fewest=3),
}


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy."""
    return functional.cross_entropy(output, labels)
