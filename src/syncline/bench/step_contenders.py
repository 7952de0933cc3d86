"""The contenders and the models of `syncline bench step`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as f
from torch import Tensor, nn

from syncline.bench.measuring import over_ranks
from syncline.codecs import Codec, build_codec, check_optimizer_momentum
from syncline.collectives.channel import Channel
from syncline.errors import IncompatibleError
from syncline.reduction import COMPRESSED_COLLECTIVES
from syncline.strategies import Run, build_strategy
from syncline.strategies.allreduce import AllReduce
from syncline.training.distribute import distribute

__all__ = [
    "BASELINES",
    "BENCH_MODELS",
    "COMPUTE_ONLY",
    "DDPS",
    "HOROVOD",
    "ML_COMM",
    "NO_CODEC",
    "SYNCLINE",
    "BenchModel",
    "StepContender",
    "contender_algorithm",
    "ranks_agree",
    "usage_per_step",
]

SYNCLINE = "syncline"
"""Syncline, if no codec is compared."""
NO_CODEC = "none"
"""Syncline without a codec, if codecs are compared."""
DDPS = frozenset({"ddp", "ddp-fp16"})
"""DistributedDataParallel alone, and with torch's fp16 hook."""
HOROVOD = "hvd"
"""The same step with Horovod's API."""
ML_COMM = "ml_comm"
"""The same step with the API of Cray's plugin: pipelined if the strategy has a delay."""
BASELINES = ("ddp", "ddp-fp16", HOROVOD, ML_COMM)
COMPUTE_ONLY = "alone"
"""The same step on the same busy cores without communication: a lower bound for every codec."""
MOMENTUM = 0.9
ENDLESS_STEPS = 1 << 40
"""The number of steps that a wrapper is given which asks for it."""
USAGE = ("bytes_wire", "codec_seconds", "exposed_seconds")
"""Counters of a run's statistics."""


class StepContender:
    """A model and its optimizer; `options` are those of `distribute`."""

    def __init__(self, name: str, model: nn.Module, options: Mapping[str, Any], broadcast_buffers: bool) -> None:
        self.name = name
        self.inner = self.model = model
        codec = None if name in (SYNCLINE, NO_CODEC, COMPUTE_ONLY, *BASELINES) else build_codec(name)
        self.optimizer: torch.optim.Optimizer
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=_momentum(codec))
        self.run: Run | None = None
        if name in DDPS:
            from syncline.bench.baselines import ddp

            self.model = ddp(model, broadcast_buffers, half=name == "ddp-fp16")
        elif name == HOROVOD:
            import syncline.compat.horovod.torch as hvd

            hvd.init()
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=model.named_parameters())
        elif name == ML_COMM:
            import syncline.compat.ml_comm.ml_comm_torch as cdl

            strategy = build_strategy(options["strategy"])
            share = strategy.warmup / ENDLESS_STEPS if isinstance(strategy, AllReduce) and strategy.delay else 1.0
            cdl.DistributedOptimizer(self.optimizer, ENDLESS_STEPS, warmup=share, verb=0)
        elif name != COMPUTE_ONLY:
            algorithm = contender_algorithm(options["algorithm"], dense=name == NO_CODEC)
            self.run = distribute(model, self.optimizer, codec=codec, **{**options, "algorithm": algorithm})

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def usage(self) -> list[float]:
        """The counters of its run on this rank, in the order of `USAGE`."""
        return [0.0 if self.run is None else float(getattr(self.run.stats, name)) for name in USAGE]

    def close(self) -> None:
        if self.run is not None:
            self.run.close()


def _momentum(codec: Codec | None) -> float:
    """The optimizer's momentum: 0 if the codec has its own."""
    try:
        if codec is not None:
            check_optimizer_momentum(codec, MOMENTUM)
    except IncompatibleError:
        return 0.0
    return MOMENTUM


def contender_algorithm(algorithm: str, dense: bool) -> str:
    """The algorithm of a contender. A collective for payloads is replaced by `auto` if there is no codec.

    >>> contender_algorithm("split", dense=False), contender_algorithm("split", dense=True)
    ('split', 'auto')
    """
    return "auto" if dense and algorithm.split("(")[0].strip() in COMPRESSED_COLLECTIVES else algorithm


def usage_per_step(channel: Channel, before: list[float], after: list[float], steps: int) -> dict[str, float]:
    """The usage of one step, the maximum over the ranks. A collective call."""
    used = [(late - early) / steps for early, late in zip(before, after, strict=True)]
    return dict(zip(USAGE, over_ranks(channel, used, "max"), strict=True))


def ranks_agree(channel: Channel, parameters: Sequence[Tensor]) -> bool:
    """True if all ranks have the same bits. A collective call."""
    digest = hashlib.blake2b(digest_size=24)
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    own = list(digest.digest())
    return over_ranks(channel, own, "min") == over_ranks(channel, own, "max")


@dataclass(frozen=True)
class BenchModel:
    """A model, and a function that draws a batch for it."""

    about: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


class ResidualBlock(nn.Module):
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
    """A causal transformer over bytes, without dropout, because all contenders must compute the same."""

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
        ResidualBlock(16, 16, 1),
        ResidualBlock(16, 16, 1),
        ResidualBlock(16, 32, 2),
        ResidualBlock(32, 32, 1),
        ResidualBlock(32, 64, 2),
        ResidualBlock(64, 64, 1),
    ]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _labelled(shape: tuple[int, ...]) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    return lambda draw: (torch.randn(*shape, generator=draw), torch.randint(0, 10, (shape[0],), generator=draw))


def _bytes(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 256, (16, 65), generator=draw)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


BENCH_MODELS = {
    # Small enough for a laptop, with different communication patterns.
    "mlp": BenchModel("MLP 784-1024-1024-10, batch 64", _mlp, _labelled((64, 784))),
    "resnet": BenchModel("ResNet-14 of width 16 on 32×32, batch 32", _resnet, _labelled((32, 3, 32, 32))),
    "transformer": BenchModel("transformer, 4 layers of width 128, 16 × 64 bytes", ByteTransformer, _bytes),
}
