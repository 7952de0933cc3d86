"""Memory of a rank by kind: weights, gradients, optimizer, activations, buckets, residuals, versions.

Activations of a transformer layer with 16-bit elements (V. Korthikanti et al., *Reducing activation recomputation in
large transformer models*, 2022), for s tokens, b samples, hidden size h, a heads, t tensor ranks:

    none                             s·b·h·(10 + 24/t + 5·a·s/(h·t))
    none, sequence parallel          s·b·h/t·(34 + 5·a·s/h)
    selective                        s·b·h·(10 + 24/t)         sequence parallel: 34·s·b·h/t
    full                             2·s·b·h                   the layer's input, whole on every rank

Each rank keeps them for its layers and for the micro-batches between forward and backward: `TrainingPlan.in_flight`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from syncline.planner.models import TransformerShape
from syncline.planner.plans import Recomputation, TrainingPlan
from syncline.planner.quantities import format_size

if TYPE_CHECKING:
    from syncline.planner.layer_costs import StageLayers

__all__ = ["RankMemory", "block_activation_bytes", "rank_memory"]

RESIDUAL_BYTES = 4
"""Bytes of a codec's residual for each parameter."""
CODECS_WITHOUT_RESIDUAL = ("cast", "lossless", "raw")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank by kind.

    >>> memory = RankMemory(weights=4e9, gradients=4e9, optimizer=8e9, activations=2e9)
    >>> print(memory)
    18 GB: optimizer 8 GB, weights 4 GB, gradients 4 GB, activations 2 GB
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buckets: float = 0.0
    """Gradients packed for the network."""
    residuals: float = 0.0
    versions: float = 0.0
    """Weights that are gathered or kept for later backwards."""

    @property
    def total(self) -> float:
        """All kinds."""
        return math.fsum(getattr(self, each.name) for each in fields(self))

    def by_kind(self) -> list[tuple[str, float]]:
        """Kinds that are not empty, the largest first."""
        kinds = [(each.name, float(getattr(self, each.name))) for each in fields(self)]
        return sorted((kind for kind in kinds if kind[1]), key=lambda kind: -kind[1])

    def __str__(self) -> str:
        return f"{format_size(self.total)}: {', '.join(f'{name} {format_size(size)}' for name, size in self.by_kind())}"


def block_activation_bytes(
    shape: TransformerShape,
    samples: float,
    tensor: int = 1,
    *,
    sequence: bool = False,
    recomputation: Recomputation = "none",
) -> float:
    """Bytes that one transformer layer keeps for the backward, on one rank of a tensor team.

    >>> shape = TransformerShape(layers=48, hidden=6144, heads=64, sequence=2048, vocabulary=51200)
    >>> 48 * block_activation_bytes(shape, 4, 8) / 2**30
    59.25
    """
    sbh = shape.sequence * samples * shape.hidden
    if recomputation == "full":
        return 2 * sbh
    kept = 0.0 if recomputation == "selective" or shape.attention == "flash" else 5 * shape.heads * shape.sequence
    whole, divided = (0, 34) if sequence else (10, 24)
    return sbh * (whole + divided / tensor + kept / (shape.hidden * tensor))


def rank_memory(plan: TrainingPlan, stage: StageLayers, place: int) -> RankMemory:
    """The memory of the ranks of one stage."""
    per = plan.bytes_per_parameter
    parameters = stage.parameters
    shards = plan.data if plan.strategy == "fsdp" else 1
    exchanged = plan.data > 1 and plan.strategy != "fsdp"
    return RankMemory(
        weights=per.weight * parameters / shards,
        gradients=per.gradient * parameters / shards,
        optimizer=0.0 if plan.strategy in ("bsp", "ssp", "downpour") else per.state * parameters / shards,
        activations=_activations(plan, stage, place),
        buckets=plan.sent_gradient_bytes * parameters if exchanged and plan.overlap else 0.0,
        residuals=_residual_bytes(plan) * parameters if exchanged else 0.0,
        versions=2 * per.weight * max(layer.parameters for layer, _ in stage.layers) if shards > 1 else 0.0,
    )


def _residual_bytes(plan: TrainingPlan) -> int:
    if plan.codec is None or plan.codec.partition("(")[0] in CODECS_WITHOUT_RESIDUAL:
        return 0
    return RESIDUAL_BYTES


def _activations(plan: TrainingPlan, stage: StageLayers, place: int) -> float:
    """Micro-batches in flight, and what one of them needs while it is recomputed."""
    kept = sum(count * layer.saved_bytes for layer, count in stage.layers)
    largest = max((layer.recomputed_bytes for layer, _ in stage.layers), default=0.0)
    return plan.in_flight(place) * kept + largest
