"""Parameters that several pipeline ranks use, such as an embedding that is also the output layer.

The first pipeline rank that uses one owns it. It alone updates the parameter::

    owner   ── gradient ──◄── copies send theirs ──   optimizer step   ── weights ──► copies
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from syncline.parallel.boundary import Boundary, Place
from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.stages import StageGraph, TiedParameter

__all__ = ["TiedParameters", "tied_ranks"]


@dataclass(frozen=True)
class _Tie:
    """One parameter that this worker shares with others."""

    parameter: nn.Parameter
    gradient: Place
    weights: Place
    sources: tuple[int, ...]
    """On the owner: the workers that send gradients and receive weights. Empty on a copy."""
    owner: int | None
    """On a copy: the worker of the owner."""
    factor: float
    """Of a copy's gradient; see `PipelinePlacement.gradient_factor`."""


def tied_ranks(tie: TiedParameter, placement: PipelinePlacement) -> list[int]:
    """The pipeline ranks that use a parameter, the owner first."""
    return list(dict.fromkeys(placement.schedule.rank_of(stage, placement.ranks) for stage in tie.stages))


class TiedParameters:
    """The tied parameters of one worker."""

    def __init__(
        self, graph: StageGraph, placement: PipelinePlacement, worker: int, boundary: Boundary, first_number: int
    ) -> None:
        self._boundary = boundary
        self._ties: list[_Tie] = []
        rank, replica = placement.position(worker)
        for number, tie in enumerate(graph.tied):
            ranks = tied_ranks(tie, placement)
            if len(ranks) == 1 or rank not in ranks:
                continue
            stage, name = next(
                (stage, name)
                for stage, name in zip(tie.stages, tie.names, strict=True)
                if placement.schedule.rank_of(stage, placement.ranks) == rank
            )
            parameter = dict(graph.stages[stage].module.named_parameters(remove_duplicate=False))[name]
            owners = placement.team(ranks[0])
            copies = [
                worker
                for copy in ranks[1:]
                for place, worker in enumerate(placement.team(copy))
                if place % len(owners) == replica
            ]
            is_owner = rank == ranks[0]
            self._ties.append(
                _Tie(
                    parameter,
                    Place(first_number + 2 * number, 0, f"the gradient of the tied parameter {name}"),
                    Place(first_number + 2 * number + 1, 0, f"the weights of the tied parameter {name}"),
                    tuple(copies) if is_owner else (),
                    None if is_owner else owners[replica % len(owners)],
                    placement.replicas[ranks[0]] / placement.replicas[rank],
                )
            )

    @property
    def copies(self) -> list[nn.Parameter]:
        """The parameters that another pipeline rank updates."""
        return [tie.parameter for tie in self._ties if tie.owner is not None]

    def add_gradients(self, step: int) -> None:
        """Send the gradients of copies to their owners, which add them. Copies have none afterwards."""
        for tie in self._ties:
            if tie.owner is not None:
                gradient = tie.parameter.grad
                gradient = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
                scaled = gradient if gradient is None or tie.factor == 1.0 else gradient * tie.factor
                self._boundary.send(scaled, tie.owner, tie.gradient, step)
                tie.parameter.grad = None
            for source in tie.sources:
                found = self._boundary.receive(source, tie.gradient, step)
                if found is not None:
                    own = tie.parameter.grad
                    tie.parameter.grad = found if own is None else found + own  # own may be sparse

    def copy_weights(self, step: int) -> None:
        """Copy the weights of the owners after an update."""
        for tie in self._ties:
            for source in tie.sources:
                self._boundary.send(tie.parameter.detach(), source, tie.weights, step)
        for tie in self._ties:
            if tie.owner is not None:
                found = self._boundary.receive(tie.owner, tie.weights, step)
                assert found is not None, "weights are never empty"
                with torch.no_grad():
                    tie.parameter.copy_(found)
