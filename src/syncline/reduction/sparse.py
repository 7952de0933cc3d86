"""The sum of sparse gradients: every rank gets the rows of all, in the order of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from syncline.reduction.communicator import Communicator
from syncline.world import allgather

__all__ = ["sum_sparse"]


def sum_sparse(exchange: Communicator, gradient: Tensor | None, parameter: Tensor, scale: float) -> Tensor:
    """The sum over the ranks of `scale` times each one's gradient; a rank that has none adds no row."""
    if gradient is None:
        indices = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
        values = torch.zeros(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    else:
        gradient = gradient.coalesce()
        indices, values = gradient.indices(), gradient.values() * scale
    if exchange.size > 1:
        rows = allgather(indices.t().contiguous(), algorithm=exchange.gathering, group=exchange.team)
        values = allgather(values.contiguous(), algorithm=exchange.gathering, group=exchange.team)
        indices = rows.t()
        nbytes = values.numel() * values.element_size() + indices.numel() * indices.element_size()
        exchange.stats.sent(nbytes, nbytes)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()
