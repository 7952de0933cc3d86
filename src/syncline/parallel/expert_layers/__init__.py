"""Sparsely-gated mixtures of experts, whose experts may be on different workers."""

from syncline.parallel.expert_layers.division import ExpertsDivision
from syncline.parallel.expert_layers.experts import (
    Experts,
    ExpertStatistics,
    expert_loss,
    expert_statistics,
    find_experts,
)
from syncline.parallel.expert_layers.gate import ExpertGate, NoisyTopK, Routing, SwitchGate

__all__ = [
    "ExpertGate",
    "ExpertStatistics",
    "Experts",
    "ExpertsDivision",
    "NoisyTopK",
    "Routing",
    "SwitchGate",
    "expert_loss",
    "expert_statistics",
    "find_experts",
]
