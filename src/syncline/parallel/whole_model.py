"""The whole model and its optimizer, of which each worker trains only a part.

Outside of `whole()` the parameters of other workers hold no memory, and the optimizer has only this worker's::

    worker 0   layer 0: weights    layer 1: –              whole()      layer 0: weights    layer 1: weights
    worker 1   layer 0: –          layer 1: weights      ─────────►     layer 0: weights    layer 1: weights

Checkpoints and evaluations see the whole model, with its own names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError
from syncline.reduction import Communicator, broadcast_tensors
from syncline.world import broadcast_object

__all__ = ["WholeModel"]


class WholeModel:
    """Frees the parameters of other workers during training, and gathers them for evaluation and checkpoints.

    Every worker calls its methods."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        everyone: Communicator,
        owners: dict[str, int],
        mine: set[int],
        roots: Sequence[int],
        rank: int,
    ) -> None:
        """`owners`: the pipeline rank that has each parameter and buffer, by name. `mine`: the `id`s of those that this
        worker uses. `roots`: the worker of each pipeline rank that sends them. `rank`: the own pipeline rank."""
        self.model, self.optimizer = model, optimizer
        self._everyone, self._roots = everyone, roots
        self._tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._owners = owners
        self._foreign = {name: each for name, each in self._tensors.items() if id(each) not in mine}
        self._shapes = {name: each.shape for name, each in self._foreign.items()}
        self._groups: list[list[Any]] = [list(group["params"]) for group in optimizer.param_groups]
        self.parameter_names = [name for name, _ in model.named_parameters()]
        """All parameters, in the order of the model."""
        self._names_by_id = {id(each): name for name, each in model.named_parameters()}
        self.trained_here = {number for number, name in self._names_by_id.items() if owners[name] == rank}
        """The `id`s of the parameters that this worker's optimizer updates: its own, without copies of tied ones."""
        self._own_rank = rank
        self._depth = 0
        self._released = False
        self._guard = model.register_forward_pre_hook(self._refuse_forward)
        self.release()

    def owned(self, rank: int) -> list[str]:
        """The names of the parameters and buffers of a pipeline rank."""
        return [name for name in self._tensors if self._owners[name] == rank]

    def release(self) -> None:
        """Free the memory of what other workers train."""
        for each in self._foreign.values():
            each.data = torch.empty(0, dtype=each.dtype, device=each.device)
            each.grad = None
        for group in self.optimizer.param_groups:
            group["params"] = [each for each in group["params"] if id(each) in self.trained_here]
        for parameter in [each for each in self.optimizer.state if id(each) not in self.trained_here]:
            del self.optimizer.state[parameter]
        self._released = True

    @contextmanager
    def whole(self, *, fill: bool = True, optimizer: bool = False) -> Iterator[None]:
        """Inside, every worker has the whole model. `fill=False`: without the values of the others.

        `optimizer`: the optimizer has all parameters too, and their state.
        """
        self._depth += 1
        try:
            if self._depth == 1:
                self._allocate()
                if fill:
                    self._fill()
            if optimizer:
                self._complete_optimizer(fill)
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.release()

    def close(self) -> None:
        """The run is over: the model is whole from now on."""
        if self._released:
            self._allocate()
            self._fill()
        self.detach()

    def detach(self) -> None:
        """The model may be called again."""
        self._guard.remove()

    def _allocate(self) -> None:
        for name, each in self._foreign.items():
            each.data = torch.empty(self._shapes[name], dtype=each.dtype, device=each.device)
        self._released = False

    def _fill(self) -> None:
        for rank, root in enumerate(self._roots):
            broadcast_tensors(self._everyone, [self._tensors[name] for name in self.owned(rank)], root)

    def _complete_optimizer(self, fill: bool) -> None:
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = list(parameters)
        if not fill or self._everyone.size == 1:
            return
        parameters_by_name = dict(self.model.named_parameters())
        for rank, root in enumerate(self._roots):
            state: Any = None
            if self._everyone.rank == root:
                state = {self._names_by_id[id(each)]: dict(entry) for each, entry in self.optimizer.state.items()}
            found = broadcast_object(state, root, group=self._everyone.group)
            if rank != self._own_rank:
                for name, entry in found.items():
                    self.optimizer.state[parameters_by_name[name]] = entry

    def _refuse_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._released and self._foreign:
            raise IncompatibleError(
                f"this {type(module).__name__} is split over workers, and this one has only its own part: call "
                "run.step(x, y) to train, run.predict(x) for its output, or enter run.agreed() to have the whole model"
            )
