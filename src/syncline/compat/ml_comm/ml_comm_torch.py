"""The API of `ml_comm_torch`, a wrapper of Cray's plugin for PyTorch that scripts import as `cdl`."""

from __future__ import annotations

from typing import Any, SupportsIndex, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from syncline.compat.ml_comm import (
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
from syncline.compat.ml_comm.arrays import ScriptArray
from syncline.compat.ml_comm.config import TeamConfig
from syncline.compat.ml_comm.context import context
from syncline.compat.ml_comm.optimizer import distribute_optimizer
from syncline.errors import SpecError
from syncline.world import allreduce

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


def DistributedOptimizer(  # noqa: N802 (the name of the wrapper)
    optimizer: AnyOptimizer,
    nstep: SupportsIndex,
    nteam: int = 1,
    nthread_per_team: int = 2,
    warmup: float = 0.10,
    verb: int = 2,
    freq: int = 100,
) -> AnyOptimizer:
    """Average the gradients of all ranks in each step of an optimizer, which is returned.

    The first `int(warmup * nstep)` steps are synchronous. Later ones are pipelined: they apply the means of the step
    before. With `warmup=1.0` all are synchronous. With `verb` 1 rank 0 prints this choice, with 2 also the
    performance of every `freq` steps. `nteam` and `nthread_per_team` have no effect: each optimizer has its own team.

    >>> import torch, syncline as sl
    >>> import syncline.compat.ml_comm.ml_comm_torch as cdl
    >>> def train(world):
    ...     model = torch.nn.Linear(1, 1, bias=False)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ...     optimizer = cdl.DistributedOptimizer(optimizer, 10, warmup=1.0, verb=0)
    ...     model(torch.tensor([[float(cdl.get_rank())]])).sum().backward()
    ...     return model.weight.grad.item()          # the mean of 0 and 1
    >>> sl.simulate(train, ranks=2).results
    (0.5, 0.5)
    """
    if not isinstance(nstep, SupportsIndex) or (steps := nstep.__index__()) < 1:
        raise SpecError(
            f"DistributedOptimizer(nstep={nstep!r}): the number of steps of the training, a whole number, at least 1"
        )
    return distribute_optimizer(optimizer, TeamConfig(0, int(warmup * steps), steps, verb, freq))


def average(value: Any) -> Any:
    """The mean of a number, a tensor or an array over the ranks. The value itself does not change.

    The wrapper's own function returned the value of this rank, unchanged.
    """
    here = context()
    found = ScriptArray(value, "average")
    mean: Tensor = allreduce(found.tensor, op="mean", group=here.group)
    return found.convert(mean)
