"""The API of `dl_comm.torch`. Its `DistributedOptimizer` knows no number of steps, and every step is synchronous."""

from __future__ import annotations

from typing import TypeVar

from torch.optim import Optimizer

from syncline.compat.ml_comm.config import TeamConfig
from syncline.compat.ml_comm.ml_comm_torch import (
    average,
    barrier,
    broadcast,
    check_buffers_match,
    config_team,
    finalize,
    get_n_ranks,
    get_nranks,
    get_rank,
    gradients,
    init,
    init_mpi,
)
from syncline.compat.ml_comm.optimizer import distribute_optimizer

__all__ = [
    "DistributedOptimizer",
    "average",
    "barrier",
    "broadcast",
    "check_buffers_match",
    "config_team",
    "finalize",
    "get_n_ranks",
    "get_nranks",
    "get_rank",
    "gradients",
    "init",
    "init_mpi",
]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def DistributedOptimizer(  # noqa: N802 (the name of the plugin)
    optimizer: AnyOptimizer, nteam: int = 1, nthread_per_team: int = 2
) -> AnyOptimizer:
    """Average the gradients of all ranks in each step of an optimizer, which is returned.

    `nteam` and `nthread_per_team` have no effect: each optimizer has its own team.
    """
    return distribute_optimizer(optimizer, TeamConfig())
