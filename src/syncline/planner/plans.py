"""A plan: how many ranks divide what, in which order they compute, and how gradients are reduced."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from syncline.errors import SpecError
from syncline.specs import nearest, parse

__all__ = ["OPTIMIZERS", "OptimizerBytes", "TrainingPlan", "pipeline_s", "read_strategy"]

Recomputation = Literal["none", "selective", "full"]
RECOMPUTATIONS: tuple[Recomputation, ...] = ("none", "selective", "full")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
STRATEGIES = ("allreduce", "fsdp", "bsp", "ssp", "downpour", "local", "gossip")
"""Strategies of data parallelism whose waiting and messages have a formula. fsdp: weights in shards, as in torch."""
ASYNCHRONOUS = ("downpour",)
SERVED = ("bsp", "ssp", "downpour")
"""Strategies with parameter servers."""


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of a parameter on a rank, and bytes that its update reads and writes."""

    weight: int
    gradient: int
    state: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weight + self.gradient + self.state

    @property
    def update(self) -> int:
        """Bytes that an update reads and writes: all are read; weights and state are written."""
        return self.total + self.weight + self.state


OPTIMIZERS = {
    "adam-mixed": OptimizerBytes(2, 4, 12),
    "adam": OptimizerBytes(4, 4, 8),
    "momentum": OptimizerBytes(4, 4, 4),
    "sgd": OptimizerBytes(4, 4, 0),
}
"""adam-mixed: 16-bit weights, 32-bit gradients, and a 32-bit copy of the weights beside Adam's two moments."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Pipeline × tensor × data ranks. A step has `micro_batches` micro-batches on each data rank.

    >>> plan = TrainingPlan(pipeline=4, tensor=8, data=2, micro_batch=2, micro_batches=16)
    >>> plan.ranks, plan.batch
    (64, 64)
    >>> print(plan)
    pipeline(4, microbatches=16) x tensor(8) x allreduce on 2, micro-batch 2
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recomputation: Recomputation = "none"
    sequence: bool = False
    """Whether tensor teams also divide the sequence where they do not divide the layer (sequence parallelism)."""
    strategy: str = "allreduce"
    period: int = 1
    """Steps between two exchanges, with local."""
    servers: int = 0
    """Parameter servers, with bsp, ssp and downpour. 0: one on each host."""
    whole_tensors: bool = False
    """Whether a tensor is on one server, as in TensorFlow. Syncline divides tensors: servers have equal work."""
    codec: str | None = None
    collective: str = "native"
    blocking: bool = False
    """Whether ranks of an interleaved pipeline wait for each transfer, as in Megatron. Syncline's compute meanwhile."""
    scattered: bool = False
    """Whether a tensor team divides what it sends to the next stage, and gathers it there, as Megatron does."""
    overlap: bool = True
    """Whether gradients are reduced while the backward runs."""
    optimizer: str = "adam"
    gradient_bytes: int | None = None
    """Bytes of a gradient element on the network. None: as many as in memory."""

    def __post_init__(self) -> None:
        for key in ("data", "tensor", "pipeline", "micro_batch", "micro_batches", "chunks", "period"):
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise SpecError(f"{key} is {value!r}; it must be a whole number, at least 1")
        for key, known in (
            ("schedule", SCHEDULES),
            ("recomputation", RECOMPUTATIONS),
            ("strategy", STRATEGIES),
            ("optimizer", tuple(OPTIMIZERS)),
        ):
            if getattr(self, key) not in known:
                raise SpecError(f"unknown {key} {getattr(self, key)!r}; {nearest(str(getattr(self, key)), known)}")
        if type(self.servers) is not int or self.servers < 0:
            raise SpecError(f"servers is {self.servers!r}; it must be a whole number, at least 1")
        if self.chunks > 1 and self.schedule != "interleaved":
            raise SpecError(f"{self.schedule} has one stage a rank, not {self.chunks} chunks: use 'interleaved'")
        if self.schedule == "interleaved" and self.micro_batches % self.pipeline:
            raise SpecError(
                f"interleaved needs micro-batches that {self.pipeline} ranks divide, not {self.micro_batches}"
            )

    @property
    def ranks(self) -> int:
        """The ranks it needs."""
        return self.data * self.tensor * self.pipeline

    @property
    def batch(self) -> int:
        """The samples of a step on all ranks."""
        return self.data * self.micro_batch * self.micro_batches

    @property
    def bytes_per_parameter(self) -> OptimizerBytes:
        """Bytes of a parameter by kind."""
        return OPTIMIZERS[self.optimizer]

    @property
    def sent_gradient_bytes(self) -> int:
        """Bytes of a gradient element on the network."""
        return self.bytes_per_parameter.gradient if self.gradient_bytes is None else self.gradient_bytes

    def in_flight(self, stage: int) -> float:
        """Micro-batches between forward and backward on a rank at a time, each for all layers of the rank.

        Interleaved 1F1B keeps p · (1 + (p − 1) / (p·v)) of them on the first rank (Korthikanti et al., 2022).

        >>> TrainingPlan(pipeline=4, micro_batches=8).in_flight(0)
        4
        """
        p, m = self.pipeline, self.micro_batches
        match self.schedule:
            case "gpipe":
                return m
            case "zero_bubble":
                return min(m, p)
            case "interleaved" if self.chunks > 1 and p > 1:
                return min(m, (p - stage) * (p * self.chunks + p - 1) / (p * self.chunks))
            case _:
                return min(m, p - stage)

    def __str__(self) -> str:
        parts = []
        if self.pipeline > 1:
            schedule = "" if self.schedule == "1f1b" else f", schedule='{self._schedule_text()}'"
            parts.append(f"pipeline({self.pipeline}, microbatches={self.micro_batches}{schedule})")
        if self.tensor > 1:
            parts.append(f"tensor({self.tensor}{', sequence' if self.sequence else ''})")
        strategy = f"local(period={self.period})" if self.strategy == "local" else self.strategy
        if self.data > 1:
            parts.append(f"{strategy} on {self.data}")
        text = " x ".join(parts) or "one rank"
        notes = [f"micro-batch {self.micro_batch}"]
        if self.pipeline == 1 and self.micro_batches > 1:
            notes[0] += f" x {self.micro_batches}"
        if self.recomputation != "none":
            notes.append(f"{self.recomputation} recomputation")
        if self.codec is not None and self.data > 1:
            notes.append(self.codec)
        if self.collective != "native" and self.data > 1:
            notes.append(self.collective)
        return f"{text}, {', '.join(notes)}"

    def _schedule_text(self) -> str:
        return f"interleaved(chunks={self.chunks})" if self.schedule == "interleaved" else self.schedule


ARGUMENTS = {"local": ("period",), "bsp": ("servers",), "ssp": ("slack", "servers"), "downpour": ("servers",)}
"""Arguments of strategies. The slack of ssp bounds staleness; it does not change the mean time of a step."""


def read_strategy(text: str) -> dict[str, Any]:
    """The fields of a plan for a strategy's spec.

    >>> read_strategy("local(period=8)")
    {'strategy': 'local', 'period': 8}
    """
    links = parse(text)
    spec = links[0]
    if len(links) != 1 or spec.name not in STRATEGIES:
        raise SpecError(f"unknown strategy {text!r}; {nearest(spec.name, STRATEGIES)}")
    known = ARGUMENTS.get(spec.name, ())
    if len(spec.args) > 1 or any(key not in known for key in spec.kwargs) or (spec.args and not known):
        takes = f"takes {' and '.join(known)}" if known else "takes no arguments here"
        raise SpecError(f"strategy {text!r}: {spec.name} {takes}")
    values = {**dict(zip(known, spec.args, strict=False)), **spec.kwargs}
    values.pop("slack", None)
    return {"strategy": spec.name, **values}


def pipeline_s(
    schedule: str, p: int, m: int, forward_s: float, input_s: float, weight_s: float, c: float = 0.0
) -> float:
    """Seconds of one step of a pipeline with equal stages: what `syncline.parallel.player.play` gives, by formula.

    With T = F + B + W of a stage (of a chunk, in interleaved), m micro-batches, p ranks, transfers of c seconds:

        gpipe          (m + p − 1)·T + 2(p − 1)·c
        1f1b           (m + p − 1)·T + 2k·c,       k = m + p − 2 − ⌊(m + p − 2) / p⌋
        interleaved    (v·m + p − 1)·T + 2(v·p − 1)·c
        zero_bubble    m·T + (p − 1)·(F + B − W) + max(0, p − m)·W + 2j·c + (k − j)·max(0, 2c − W)

    with j = min(k, 2(p − 1)). zero_bubble holds while W ≤ F, B. interleaved holds if p divides m, and while c ≤ F: for
    longer transfers there is no formula here.

    >>> pipeline_s("1f1b", 4, 8, 1.0, 1.0, 1.0)
    33.0
    """
    name, _, chunks = schedule.partition(":")
    whole = forward_s + input_s + weight_s
    if p == 1:
        return m * whole * (int(chunks) if chunks else 1)
    steady = m + p - 2 - (m + p - 2) // p
    match name:
        case "gpipe":
            return (m + p - 1) * whole + 2 * (p - 1) * c
        case "interleaved":
            v = int(chunks or 1)
            return (v * m + p - 1) * whole + 2 * (v * p - 1) * c
        case "zero_bubble":
            idle = (p - 1) * (forward_s + input_s - weight_s) + max(0, p - m) * weight_s
            hidden = min(steady, 2 * (p - 1))  # of the other gaps, each has a W in it
            return m * whole + idle + hidden * 2 * c + (steady - hidden) * max(0.0, 2 * c - weight_s)
        case _:
            return (m + p - 1) * whole + 2 * steady * c


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})
