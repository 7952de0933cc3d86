"""The whole model and its optimizer, of which each worker trains only a part.

Outside of `whole()` the parameters of other workers hold no memory, and the optimizer has only this worker's::

    worker 0   layer 0: weights    layer 1: –              whole()      layer 0: weights    layer 1: weights
    worker 1   layer 0: –          layer 1: weights      ─────────►     layer 0: weights    layer 1: weights

Evaluations see the whole model. A checkpoint has the part of each worker, with the names of the whole model. A model
that was made on the meta device is never whole: the parameters of other workers stay there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError
from syncline.model_parts import ModelPart
from syncline.reduction import Communicator, broadcast_tensors
from syncline.world import broadcast_object

__all__ = ["WholeModel"]


class WholeModel:
    """Frees the parameters of other workers during training, and gathers them for evaluation and checkpoints.

    Every worker calls its methods.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        everyone: Communicator,
        owners: dict[str, int],
        mine: set[int],
        roots: Sequence[int],
        rank: int,
        saves: bool,
    ) -> None:
        """`owners`: the pipeline rank that has each parameter and buffer, by name. `mine`: the `id`s of those that this
        worker uses. `roots`: the worker of each pipeline rank that sends them. `rank`: the own pipeline rank. `saves`:
        whether this worker saves its part in checkpoints."""
        self.model, self.optimizer = model, optimizer
        self._everyone, self._roots = everyone, roots
        self._owners = owners
        foreign = {name: each for name, each in self._tensors().items() if id(each) not in mine}
        self._shapes = {name: each.shape for name, each in foreign.items()}
        """The parameters and buffers of other workers, by name."""
        self._before = {name: each.data for name, each in foreign.items()}
        """Their values until the run exists."""
        self._groups: list[list[Any]] = [list(group["params"]) for group in optimizer.param_groups]
        self._states = dict(optimizer.state)
        self.parameter_names = [name for name, _ in model.named_parameters()]
        """All parameters, in the order of the model."""
        self._names_by_id = {id(each): name for name, each in model.named_parameters()}
        self.trained_here = {number for number, name in self._names_by_id.items() if owners[name] == rank}
        """The `id`s of the parameters that this worker's optimizer updates: its own, without copies of tied ones."""
        self._own_rank = rank
        self._saves = saves
        self._uses = mine
        self.never_whole = any(each.is_meta for each in foreign.values())
        """Whether no worker may have the whole model: it was made on the meta device."""
        self._depth = 0
        self._guard = _PartialModelGuard(active=False)
        self._hooks = [
            model.register_forward_pre_hook(self._guard),
            model.register_state_dict_pre_hook(self._guard),  # type: ignore[no-untyped-call]
        ]
        self.release()

    @property
    def is_whole(self) -> bool:
        """Whether the model is whole at the moment."""
        return self._depth > 0

    def commit(self) -> None:
        """The run exists: `roll_back` is not possible any more."""
        self._before = {}
        self._states = {}

    def roll_back(self) -> None:
        """The run could not be made: give the model and the optimizer back as they were."""
        tensors = self._tensors()
        for name, data in self._before.items():
            tensors[name].data = data
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self.optimizer.state.update(self._states)
        self._guard.active = False
        self.end()

    def owned(self, rank: int) -> list[str]:
        """The names of the parameters and buffers of a pipeline rank."""
        return [name for name in self._tensors() if self._owners.get(name) == rank]

    def release(self) -> None:
        """Free the memory of what other workers train."""
        tensors = self._tensors()
        for name in self._shapes:
            each = tensors[name]
            if each.is_meta:
                continue
            each.data = torch.empty(0, dtype=each.dtype, device=each.device)
            each.grad = None
        self._note_new_groups()
        for group in self.optimizer.param_groups:
            group["params"] = [each for each in group["params"] if id(each) in self.trained_here]
        for parameter in [each for each in self.optimizer.state if id(each) not in self.trained_here]:
            del self.optimizer.state[parameter]
        self._guard.active = bool(self._shapes)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, every worker has the whole model."""
        if self.never_whole:
            raise IncompatibleError(
                "the model was made on the meta device, so no worker has all of it: call run.predict(x) for its "
                "output, or sl.save(folder, step=…, run=run), and load the checkpoint into a whole model"
            )
        self._depth += 1
        try:
            if self._depth == 1:
                self._allocate()
                self._fill()
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.release()

    @contextmanager
    def part(self) -> Iterator[None]:
        """Inside, a checkpoint reads or loads this worker's part of the model."""
        before, self._guard.active = self._guard.active, False
        try:
            yield
        finally:
            self._guard.active = before

    def model_part(self) -> ModelPart:
        """What of the model this worker saves and loads."""
        with self.part():
            state = self.model.state_dict(keep_vars=True)
        first_names = {id(each): name for name, each in self._tensors().items()}
        owners = {name: self._owners.get(first_names.get(id(value), name), 0) for name, value in state.items()}
        own = frozenset(name for name, rank in owners.items() if rank == self._own_rank)
        used = {name for name, value in state.items() if id(value) in self._uses}
        # A module may have assigned a new tensor to a buffer; it is of the owner's part.
        return ModelPart(self._own_rank, own if self._saves else frozenset(), own | used)

    def close(self) -> None:
        """The run is over: the model and the optimizer are whole from now on, unless it was made on the meta device."""
        if self.never_whole:
            self._guard.reason = ", because it was made on the meta device: load a checkpoint into a whole model"
            return
        self._allocate()
        try:
            self._fill()
            self._complete_optimizer()
        except BaseException:
            self.release()  # some parameters have no values
            raise

    def end(self) -> None:
        """Remove the hooks. After an error the model stays in parts, and says so when it is called."""
        if self._guard.active:
            self._guard.reason = self._guard.reason or (
                ", because an error has ended its run: load a checkpoint into a new model"
            )
            return
        for hook in self._hooks:
            hook.remove()

    def _tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers by name. A module may have assigned another tensor to a buffer."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _allocate(self) -> None:
        tensors = self._tensors()
        for name, shape in self._shapes.items():
            each = tensors[name]
            each.data = torch.empty(shape, dtype=each.dtype, device=each.device)
        self._guard.active = False

    def _fill(self) -> None:
        tensors = self._tensors()
        for rank, root in enumerate(self._roots):
            broadcast_tensors(self._everyone, [tensors[name] for name in self.owned(rank)], root)

    def _note_new_groups(self) -> None:
        """Note the groups and parameters that the script has added to the optimizer since."""
        for number, group in enumerate(self.optimizer.param_groups):
            if number == len(self._groups):
                self._groups.append([])
            known = {id(each) for each in self._groups[number]}
            self._groups[number] += [each for each in group["params"] if id(each) not in known]

    def _complete_optimizer(self) -> None:
        self._note_new_groups()
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = list(parameters)
        if self._everyone.size == 1:
            return
        parameters_by_name = dict(self.model.named_parameters())
        for rank, root in enumerate(self._roots):
            state: Any = None
            if self._everyone.rank == root:
                state = {
                    self._names_by_id[id(each)]: dict(entry)
                    for each, entry in self.optimizer.state.items()
                    if id(each) in self.trained_here
                }
            found = broadcast_object(state, root, group=self._everyone.group)
            if rank != self._own_rank:
                for name, entry in found.items():
                    self.optimizer.state[parameters_by_name[name]] = entry


class _PartialModelGuard:
    """A hook that refuses to call or to save a model of which this worker has only a part."""

    def __init__(self, active: bool) -> None:
        self.active = active
        self.reason = ""
        """After the run: why the model is not whole."""

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if not self.active:
            return
        name = f"this {type(module).__name__} is split over workers, and this one has only its own part"
        if self.reason:
            raise IncompatibleError(f"{name}{self.reason}")
        raise IncompatibleError(
            f"{name}: call run.step(x, y) to train, run.predict(x) for its output, or enter run.agreed() to have the "
            "whole model"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _PartialModelGuard:
        """A copy of the whole model is a model of its own. One of a part stays refused."""
        return _PartialModelGuard(self.active)
