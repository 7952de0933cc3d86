"""Pipelines in `syncline train`: how the settings of a run become a `PipelineRun`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.data import move
from syncline.parallel.partition import StagePartition
from syncline.parallel.splitting import cut_candidates, split
from syncline.strategies import Strategy
from syncline.training.pipeline import check_strategy, default_micro_batches, pipeline
from syncline.training.pipeline_run import PipelineRun
from syncline.training.pipeline_stages import AUTO, open_partition, parse_stages
from syncline.training.settings import Settings
from syncline.workloads.base import Workload, batches
from syncline.world import World

__all__ = ["check_pipeline", "start_pipeline"]


def start_pipeline(
    workload: Workload,
    settings: Settings,
    model: nn.Module,
    optimizer: Optimizer,
    options: dict[str, Any],
    world: World,
) -> PipelineRun:
    """Split the model. A number of stages is balanced by the layers' times, measured with one micro-batch."""
    assert settings.batch is not None
    placement = settings.placement(world.size)
    assert placement is not None
    stages = parse_stages(settings.stages or AUTO)
    if stages == AUTO:  # as many as planned, whatever a measurement of the network would say
        stages = placement.stages
    micro_batches = placement.schedule.microbatches or default_micro_batches(placement)
    micro_batch = max(2, settings.batch // micro_batches)  # batch norm refuses some batches of one sample
    inputs, _ = move(next(batches(workload.splits().train, micro_batch)), world.device)
    return pipeline(
        model, optimizer, workload.output_loss, stages=stages, schedule=placement.schedule, example=inputs, **options
    )


def check_pipeline(workload: Workload, settings: Settings, strategy: Strategy, workers: int, *, data: bool) -> None:
    """Refuse what cannot be trained, before a worker starts. `data`: whether this host has the workload's data."""
    placement = settings.placement(workers)
    assert placement is not None
    check_strategy(strategy)
    placement.check(placement.schedule.microbatches or default_micro_batches(placement))
    model = workload.model(settings.seed)
    stages = open_partition(parse_stages(settings.stages or AUTO))
    if isinstance(stages, (StagePartition, list)):
        split(model, stages.cuts if isinstance(stages, StagePartition) else stages)
    else:
        cut_candidates(model, stages=placement.stages)
    if data:
        inputs, targets = next(batches(workload.splits().train, 2))
        with torch.no_grad():
            workload.output_loss(model.eval()(inputs), targets)
