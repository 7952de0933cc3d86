"""Small models of the kinds that are split into stages, with inputs, and an interpreter that runs stages by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from syncline.parallel.stages import MODEL_INPUT, StageGraph


@dataclass(frozen=True)
class SplitCase:
    """A model, where to cut it, and its inputs for a batch of some size."""

    name: str
    build: Callable[[], nn.Module]
    cuts: tuple[str, ...]
    inputs: Callable[[int], tuple[Tensor, ...]]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    def block(channels: int, to: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, to, 3, padding=1), nn.Sequential(nn.BatchNorm2d(to), nn.ReLU(inplace=True))
        )

    return nn.Sequential(
        nn.Sequential(block(2, 4), block(4, 4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


class ResidualBlock(nn.Module):
    """Its Python could not be traced: it depends on values."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        result: Tensor = out.relu() if float(x.detach().sum()) < 1e9 else out
        return result


class ResNet(nn.Module):
    """The output of the stem skips three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.blocks = nn.Sequential(*(ResidualBlock(4) for _ in range(4)))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.stem(x)
        y = skip
        for block in self.blocks:
            y = block(y)
        y = y + skip
        result: Tensor = self.head(y.mean((2, 3)).view(x.size(0), -1))
        return result


class UNet(nn.Module):
    """Each level's output goes to the level of the same size on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)])
        self.bottom = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(8, 3, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1)])
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            x = level(x).relu()
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for level in self.up:
            skip = skips.pop()
            x = nn.functional.interpolate(x, size=skip.shape[-2:])
            x = level(torch.cat([x, skip], 1))
        return x


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(mask, float("-inf"))
        result: Tensor = x + scores.softmax(-1) @ v
        return result


class Transformer(nn.Module):
    """The head has the embedding's weight; positions are a parameter of the model itself, the mask is a buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)
        self.embed = nn.Embedding(11, 8)
        self.head.weight = self.embed.weight
        self.positions = nn.Parameter(torch.randn(16, 8))
        self.layers = nn.ModuleList(Attention(8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("mask", torch.ones(16, 16).tril() == 0, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        assert length <= 16, "too long"
        places = torch.arange(length, device=ids.device)
        x = self.embed(ids) + self.positions[places] + torch.zeros(batch, length, 8, dtype=torch.float64)
        for layer in self.layers:
            x = layer(x, self.mask[:length, :length])
        logits: Tensor = self.head(self.norm(x)).view(batch * length, -1)
        return logits


class TwoTowers(nn.Module):
    """Two inputs, of which the last stage uses one; outputs of all stages in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 6)
        self.right = nn.Linear(3, 6)
        self.join = nn.Bilinear(6, 6, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor, scale: float = 2.0) -> dict[str, Any]:
        left = self.left(x).relu()
        right = self.right(y).relu()
        joined = self.join(left, right) * scale
        return {"joined": joined + y[:, :2], "towers": (left, [right]), "batch": x.shape[0], "extra": None}


class RandomModel(nn.Module):
    """Layers that are called one after the other, and operations between them on any values that exist by then."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        kinds: list[Callable[[], nn.Module]] = [
            *(lambda: nn.Linear(4, 4), lambda: nn.BatchNorm1d(4), nn.ReLU, lambda: nn.ReLU(inplace=True)),
            *(nn.Identity, lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))),
        ]
        self.layers = nn.ModuleList(draw.choice(kinds)() for _ in range(draw.randint(3, 7)))
        self.weight = nn.Parameter(torch.randn(4))
        operations = ["add", "cat", "size", "double", "weight", "view"]
        if seed % 2:
            operations += ["iadd", "mul_", "relu_", "setitem"]
        self.program = []
        made = 1
        for index in range(len(self.layers)):
            self.program.append(("call", index, draw.randrange(made)))
            made += 1
            for _ in range(draw.randint(0, 3)):
                self.program.append((draw.choice(operations), draw.randrange(made), draw.randrange(made)))
                made += 1

    def forward(self, x: Tensor) -> dict[str, Any]:
        values, size = [x], 1
        for operation, one, other in self.program:
            if operation == "call":
                values.append(self.layers[one](values[other]))
                continue
            if operation in ("size", "double"):
                size = values[one].shape[0] if operation == "size" else size * 2 + 1
            values.append(self.operate(operation, values[one], values[other], size))
        return {"last": values[-1], "middle": [values[len(values) // 2], size]}

    def operate(self, operation: str, value: Tensor, other: Tensor, size: int) -> Tensor:
        if operation == "iadd":
            value += 0.5
        elif operation == "setitem":
            value[:, 0] = 0
        elif operation in ("mul_", "relu_"):
            return value.mul_(1.5) if operation == "mul_" else value.relu_()
        elif operation in ("add", "size", "double"):
            return value + other if operation == "add" else other * size
        elif operation == "cat":
            return torch.cat([value, other], 1)[:, 2:6]
        elif operation == "weight":
            return value * self.weight
        return value.view(-1, 4)


CASES = (
    SplitCase("mlp", mlp, ("1", "3"), lambda n: (torch.randn(n, 4).double(),)),
    SplitCase("cnn", cnn, ("0.0.1.1", "0.1", "1"), lambda n: (torch.randn(n, 2, 6, 6).double(),)),
    SplitCase(
        "resnet", ResNet, ("blocks.1", "blocks.2", "blocks.3", "head"), lambda n: (torch.randn(n, 2, 5, 5).double(),)
    ),
    SplitCase("unet", UNet, ("down.1", "bottom", "up.1"), lambda n: (torch.randn(n, 2, 8, 12).double(),)),
    SplitCase("transformer", Transformer, ("layers.0", "layers.2", "norm"), lambda n: (torch.randint(11, (n, 4 + n)),)),
    SplitCase(
        "towers", TwoTowers, ("right", "join"), lambda n: (torch.randn(n, 4).double(), torch.randn(n, 3).double())
    ),
)


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a nested result, in order."""
    if isinstance(result, Tensor):
        return [result]
    inner = result.values() if isinstance(result, dict) else result if isinstance(result, (tuple, list)) else ()
    return [each for value in inner for each in tensors(value)]


def loss_of(result: Any) -> Tensor:
    return torch.stack([each.square().mean() for each in tensors(result)]).sum()


def run_stages(graph: StageGraph, inputs: Sequence[Tensor], backward: bool = True) -> Any:
    """Run stages one after the other as separate workers would, forward and backward. Returns the model's output."""
    values = {
        number: inputs[value.input_index] for number, value in enumerate(graph.values) if value.source == MODEL_INPUT
    }
    received, returned = [], []
    for stage in graph.stages:
        taken = [values[number].detach().clone() for number in stage.inputs]
        for number, tensor in zip(stage.inputs, taken, strict=True):
            tensor.requires_grad_(values[number].requires_grad)
        result = stage.module(*taken)
        received.append(taken)
        returned.append(result)
        if stage.outputs:
            assert isinstance(result, tuple)
            values.update(zip(stage.outputs, result, strict=True))
    if backward:
        torch.autograd.backward(loss_of(returned[-1]))
        _run_backward(graph, received, returned)
    return returned[-1]


def _run_backward(graph: StageGraph, received: Sequence[Sequence[Tensor]], returned: Sequence[Any]) -> None:
    gradients: dict[int, Tensor] = {}
    for stage in reversed(graph.stages):
        if stage.outputs:
            pairs = [
                (output, gradients[number])
                for output, number in zip(returned[stage.index], stage.outputs, strict=True)
                if number in gradients and output.requires_grad
            ]
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        for number, tensor in zip(stage.inputs, received[stage.index], strict=True):
            if tensor.grad is not None:
                gradients[number] = gradients[number] + tensor.grad if number in gradients else tensor.grad
