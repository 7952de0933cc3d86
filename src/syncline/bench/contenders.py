"""Who trains side by side in `syncline bench step`: ours with each codec, DistributedDataParallel and others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from syncline.codecs import Codec, build_codec, check_optimizer_momentum
from syncline.collectives import build
from syncline.collectives.run import Channel, allreduce
from syncline.errors import IncompatibleError
from syncline.reduction import COMPRESSED_COLLECTIVES
from syncline.strategies import Run
from syncline.training.distribute import distribute

__all__ = ["ALONE", "BASELINES", "DDPS", "DENSE", "HOROVOD", "OURS", "Contender", "agree", "used", "wire"]

OURS = "syncline"
"""Our contender's name where no codec is asked for."""
DENSE = "none"
"""Ours without a codec, where others have one."""
DDPS = frozenset({"ddp", "ddp-fp16"})
"""DistributedDataParallel as it is, and with torch's hook that halves what travels."""
HOROVOD = "hvd"
"""The same step written as for Horovod, by its door."""
BASELINES = ("ddp", "ddp-fp16", HOROVOD)
ALONE = "alone"
"""The same step on the same crowded cores, with nothing exchanged: what no codec can be faster than."""
MOMENTUM = 0.9


class Contender:
    """A model and its optimizer in training; `options` are those of `distribute`."""

    def __init__(self, name: str, model: nn.Module, options: Mapping[str, Any], broadcast_buffers: bool) -> None:
        self.name = name
        self.inner = self.model = model
        codec = None if name in (OURS, DENSE, ALONE, *BASELINES) else build_codec(name)
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
        elif name != ALONE:
            collective = wire(options["collective"], dense=name == DENSE)
            self.run = distribute(model, self.optimizer, codec=codec, **{**options, "collective": collective})

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def so_far(self) -> Usage:
        """What its run has counted."""
        if self.run is None:
            return Usage(0.0, 0.0, 0.0)
        stats = self.run.stats
        return Usage(stats.bytes_wire, stats.codec_seconds, stats.exposed_seconds)

    def close(self) -> None:
        if self.run is not None:
            self.run.close()


def _momentum(codec: Codec | None) -> float:
    """The optimizer's: a codec may bring its own."""
    try:
        if codec is not None:
            check_optimizer_momentum(codec, MOMENTUM)
    except IncompatibleError:
        return 0.0
    return MOMENTUM


@dataclass(frozen=True)
class Usage:
    """What steps took of the network and of this rank's time."""

    bytes_wire: float
    codec_seconds: float
    exposed_seconds: float


def wire(collective: str, dense: bool) -> str:
    """The collective of a contender: one that is for payloads alone is not for ours without a codec among others.

    >>> wire("split", dense=False), wire("split", dense=True), wire("ring", dense=True)
    ('split', 'auto', 'ring')
    """
    return "auto" if dense and collective.split("(")[0].strip() in COMPRESSED_COLLECTIVES else collective


def used(channel: Channel, before: Usage, after: Usage, steps: int) -> dict[str, float]:
    """What one step took, the most over the ranks. Every rank calls it."""
    names = ("bytes_wire", "codec_seconds", "exposed_seconds")
    table = torch.tensor([(getattr(after, name) - getattr(before, name)) / steps for name in names]).double()
    allreduce(channel, table, "max", build("allreduce", "recursive_doubling"))
    return dict(zip(names, table.tolist(), strict=True))


def agree(channel: Channel, parameters: Sequence[Tensor]) -> bool:
    """Whether all ranks hold the same bits. Every rank calls it."""
    digest = hashlib.blake2b(digest_size=24)
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    own = torch.tensor(list(digest.digest()), dtype=torch.int32)
    least, most = own.clone(), own.clone()
    allreduce(channel, least, "min", build("allreduce", "recursive_doubling"))
    allreduce(channel, most, "max", build("allreduce", "recursive_doubling"))
    return torch.equal(least, most)
