"""Models whose layers are divided in several ways, and their training on the batches of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import syncline as sl
from syncline.parallel import Experts
from syncline.parallel.expert_layers import NoisyTopK
from syncline.world import World

SAMPLES = 12
"""Of a step, of all workers together."""


class ExpertNet(nn.Module):
    """A layer of experts between dense layers. Its balance loss has a weight."""

    tensor_plan: ClassVar[dict[str, str]] = {"first": "columns+gather"}

    def __init__(self, balance: float = 0.0, count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        expert = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 8))
        self.moe = Experts(expert, count, top=2, capacity=None, gate=NoisyTopK(8, count, 2, loss_weight=balance))
        self.head = nn.Linear(8, 3)
        self.moe.gate.eval()  # without noise, which differs between workers

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        output: Tensor = self.head(hidden + self.moe(hidden))
        return output


def make_cnn() -> nn.Module:
    """A convolution with a dense head."""
    head = nn.Sequential(nn.Linear(24, 10), nn.ReLU(), nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 3))
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), head)


class Block(nn.Module):
    """A transformer block with a residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 4, batch_first=True)
        self.up = nn.Linear(8, 14)
        self.down = nn.Linear(14, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, x, x, need_weights=False)[0]
        output: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return output


class TransformerNet(nn.Module):
    """Two blocks on sequences of three tokens. Its plan divides attention and MLP."""

    tensor_plan: ClassVar[dict[str, str]] = {
        "blocks.*.attn": "heads",
        "blocks.*.up": "columns",
        "blocks.*.down": "rows",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(self.embed(x.reshape(-1, 3, 2))).mean(1))
        return output


class LanguageNet(nn.Module):
    """Experts between an embedding and an output layer, which are one parameter if `tied`. Numbers become words."""

    tensor_plan: ClassVar[dict[str, str]] = {"embed": "vocabulary", "head": "vocabulary"}

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        expert = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 8))
        self.moe = Experts(expert, count=4, top=2, capacity=None, gate=NoisyTopK(8, 4, 2, loss_weight=0.0))
        self.moe.gate.eval()
        self.head = nn.Linear(8, 11, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.embed((3 * x).round().long().abs() % 11)).mean(1)
        output: Tensor = self.head(hidden + self.moe(hidden))
        return output


def criterion(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a model: that of divided logits where the output layer is divided by the vocabulary."""
    if not isinstance(model, LanguageNet):
        return functional.cross_entropy
    return lambda logits, targets: sl.parallel.cross_entropy(logits, targets, model.head)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "experts": ExpertNet,
    "three experts": lambda: ExpertNet(count=3),
    "balanced": lambda: ExpertNet(0.1),
    "cnn": make_cnn,
    "transformer": TransformerNet,
    "language": LanguageNet,
    "tied language": lambda: LanguageNet(tied=True),
}


def make_model(name: str) -> Any:
    """A model in double precision with random weights; gates too, which start with zeros otherwise."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


def make_optimizer(model: nn.Module, kind: str = "sgd") -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW."""
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All state of the optimizer, by parameter. Those without a gradient have none, such as the noise of a gate."""
    return {
        f"{name} {key}": torch.as_tensor(value).clone()
        for name, each in model.named_parameters()
        for key, value in optimizer.state.get(each, {}).items()
    }


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The samples of a step, of all workers together."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (SAMPLES,), generator=generator)


def own_batch(world: World, step: int) -> tuple[Tensor, Tensor]:
    """This worker's share of it: the same for workers that differ along "tensor" and "pipeline" only."""
    mesh = world.mesh
    _, data, shared, _ = mesh.position(world.rank)
    own, count = data * mesh.shared + shared, mesh.data * mesh.shared
    x, y = batch_of(step)
    return x[own::count].to(world.device), y[own::count].to(world.device)


def train(
    world: World,
    name: str,
    parallel: Any = None,
    steps: Sequence[int] = range(4),
    *,
    optimizer: str = "sgd",
    clip: float | None = 0.5,
    load: Path | None = None,
    save: Path | None = None,
    thaw: int | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Some steps with `sl.distribute`; the whole model afterwards. Before step `thaw` only the last layer trains."""
    model = make_model(name).to(world.device)
    freeze(model, thaw is not None)
    trainer = make_optimizer(model, optimizer)
    run: Any = sl.distribute(model, trainer, parallel=parallel, **options)
    if load is not None:
        sl.load(load, run=run)
    for step in steps:
        x, y = own_batch(world, step)
        trainer.zero_grad()
        freeze(model, thaw is not None and step < thaw)
        torch.autograd.backward(criterion(model)(model(x), y))
        if clip is not None:
            run.clip_grad_norm_(clip)
        trainer.step()
    if save is not None:
        sl.save(save, step=max(steps) + 1, run=run)
    run.close()
    return {key: value.cpu().clone() for key, value in model.state_dict().items()}


def freeze(model: nn.Module, frozen: bool) -> None:
    """Freeze or thaw all parameters but those of the last layer."""
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(not frozen)


def train_alone(
    name: str,
    steps: Sequence[int] = range(4),
    optimizer: str = "sgd",
    clip: float | None = 0.5,
    thaw: int | None = None,
) -> Any:
    """The same in one process, without Syncline."""
    model = make_model(name)
    trainer = make_optimizer(model, optimizer)
    for step in steps:
        x, y = batch_of(step)
        trainer.zero_grad()
        freeze(model, thaw is not None and step < thaw)
        torch.autograd.backward(criterion(model)(model(x), y))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        trainer.step()
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Within rounding, and with the same names."""
    assert list(found) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)


DIVIDED: dict[str, Any] = {
    "transformer": "tensor(2)",
    "experts": "experts(2)",
    "cnn": ["spatial('1', 2)", "tensor({'4.0': 'columns', '4.2': 'rows'}, size=2)"],
}
"""A division of each model over two workers."""


def train_divided(world: World, algorithm: str = "auto") -> list[dict[str, Tensor]]:
    """Every model divided over two workers."""
    return [train(world, name, parallel, range(2), algorithm=algorithm) for name, parallel in DIVIDED.items()]


def assert_trained(found: list[dict[str, Tensor]]) -> None:
    """The results of `train_divided` are those of one process."""
    for name, state in zip(DIVIDED, found, strict=True):
        assert_equal(state, train_alone(name, range(2)))
