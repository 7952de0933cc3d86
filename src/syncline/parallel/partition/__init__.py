"""Where a model is cut into stages, and how many workers each stage has."""

from __future__ import annotations

from syncline.parallel.partition.balanced import balanced
from syncline.parallel.partition.base import (
    LayerCost,
    ModelProfile,
    PartitionPrediction,
    PredictedStage,
    StagePartition,
)
from syncline.parallel.partition.pipedream import pipedream, pipedream_for_network, predict_partition

__all__ = [
    "LayerCost",
    "ModelProfile",
    "PartitionPrediction",
    "PredictedStage",
    "StagePartition",
    "balanced",
    "pipedream",
    "pipedream_for_network",
    "predict_partition",
]
