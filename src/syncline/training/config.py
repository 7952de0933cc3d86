"""What `config.json` tells of a run: what was asked for, and what was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.strategies import StrategyRun
from syncline.training.settings import Settings
from syncline.training.system import code_digest, code_version
from syncline.workloads.base import Workload

__all__ = ["describe_run"]


def describe_run(
    workload: Workload, settings: Settings, run: StrategyRun, predicted: Mapping[str, float] | None
) -> dict[str, Any]:
    """The whole document."""
    workers = run.world.size
    return {
        **workload.describe(),
        **asdict(settings),
        "workers": workers,
        "loose": run.asynchronous,
        "samples_a_step": settings.a_step(workers),
        "scaled_learning_rate": settings.rate(workers),
        "code_version": code_version(),
        "code_digest": code_digest(),
        "input": _input(workload, run.model),
        "optimizer": _optimizer(run.optimizer),
        "predicted": predicted,
        "run": run.config,
    }


def _input(workload: Workload, model: nn.Module) -> dict[str, Any]:
    """The shape and kind of one sample, and of the parameters."""
    first = torch.as_tensor(workload.splits().train[0][0])
    kinds = sorted({_plain(parameter.dtype) for parameter in model.parameters()})
    return {"shape": list(first.shape), "dtype": _plain(first.dtype), "parameters": kinds}


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Its class, and what its first group is set to."""
    group = optimizer.param_groups[0]
    plain = {key: value for key, value in group.items() if value is None or isinstance(value, (bool, int, float, str))}
    return {"class": type(optimizer).__name__, **plain}


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
