"""A model whose layers are divided over teams of workers: its tensors hold this worker's share.

```text
                      worker 0              worker 1
up.weight             rows 0–3              rows 4–7          a slice on each
norm.weight           all                   all               whole on both
experts.0.weight      all                   –                 absent on one
```

Inside `whole()` every worker has all of it. The optimizer's state is divided as its parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError
from syncline.model_parts import DimensionSlice, ModelPart
from syncline.parallel.division import LayerDivision
from syncline.parallel.team import LayerTeam
from syncline.world import broadcast_object

__all__ = ["DividedModel", "DividedTensor", "divided_tensors"]


@dataclass(frozen=True)
class DividedTensor:
    """A parameter or buffer that is divided over the workers of a team, or that only one of them has."""

    name: str
    tensor: Tensor
    axis: str
    """The axis of the mesh along which it is divided."""
    shape: torch.Size
    """Its shape in the undivided model."""
    cuts: tuple[DimensionSlice | None, ...]
    """What each worker of the team has. None: all of it."""
    owners: tuple[int, ...]
    """The workers of the team that have it, or a slice of it."""


def divided_tensors(divisions: Sequence[LayerDivision], sizes: Mapping[str, int]) -> list[DividedTensor]:
    """The divided tensors of an undivided model. `sizes` has the number of workers along each axis."""
    found: dict[int, DividedTensor] = {}
    for division in divisions:
        size = sizes[division.axis]
        shares = [division.share(rank, size) for rank in range(size)]
        module = division.module
        tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        tensors |= dict(module.named_buffers(remove_duplicate=False))
        for key in dict.fromkeys(name for share in shares for name in (*share.slices, *sorted(share.absent))):
            tensor = tensors[key]
            each = DividedTensor(
                f"{division.name}.{key}".lstrip("."),
                tensor,
                division.axis,
                tensor.shape,
                tuple(share.slices.get(key) for share in shares),
                tuple(rank for rank, share in enumerate(shares) if key not in share.absent),
            )
            known = found.setdefault(id(tensor), each)
            if (known.axis, known.cuts, known.owners) != (each.axis, each.cuts, each.owners):
                raise IncompatibleError(
                    f"{known.name} and {each.name} are one parameter, and it would be divided in two ways: give both "
                    "layers roles that divide it alike, or leave one out"
                )
    return list(found.values())


class DividedModel:
    """Divides a model and its optimizer, and makes them whole again. Every worker calls its methods.

    `positions` has this worker's place along each axis, `teams` the team of each.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        divisions: Sequence[LayerDivision],
        tensors: Sequence[DividedTensor],
        teams: Mapping[str, LayerTeam],
        positions: Mapping[str, int],
    ) -> None:
        """Call it when all workers have the same values. An error leaves model and optimizer as they were."""
        self.model, self.optimizer = model, optimizer
        self.teams = dict(teams)
        self._divisions = list(divisions)
        self._positions = dict(positions)
        self._tensors = list(tensors)
        self._by_id = {id(each.tensor): each for each in self._tensors}
        self._shares: dict[int, Tensor] = {}
        """The shares, while the model is whole."""
        self._depth = 0
        self._original_tensors = [(each.tensor.data, each.tensor.grad) for each in self._tensors]
        self._original_states = {each: dict(entry) for each, entry in optimizer.state.items()}
        attached: list[LayerDivision] = []
        try:
            self._take_shares()
            for division in self._divisions:
                division.attach(self.teams[division.axis])
                attached.append(division)
        except BaseException:
            for division in attached:
                division.detach()
            self._restore_originals()
            raise
        self._scales: list[Any] = []
        self._guard = _PartGuard(self.teams, before_call=self.scale_shared_gradients)
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(_GuardHook(self._guard, "check_call")),
            model.register_state_dict_pre_hook(_GuardHook(self._guard, "check_save")),  # type: ignore[no-untyped-call]
        ]

    # What is divided.

    def axis_of(self, tensor: Tensor) -> str | None:
        """The axis along which a parameter is divided; None: every worker has all of it."""
        found = self._by_id.get(id(tensor))
        return None if found is None else found.axis

    def counts_here(self, tensor: Tensor) -> bool:
        """Whether this worker counts a parameter in a sum over the workers that hold parts of the model."""
        axis = self.axis_of(tensor)
        return all(place == 0 for each, place in self._positions.items() if each != axis)

    def is_absent(self, tensor: Tensor) -> bool:
        """Whether only other workers have this parameter."""
        found = self._by_id.get(id(tensor))
        return found is not None and self._positions[found.axis] not in found.owners

    @contextmanager
    def part(self) -> Iterator[None]:
        """Inside, a checkpoint reads or loads this worker's part of the model."""
        before, self._guard.saves = self._guard.saves, True
        try:
            yield
        finally:
            self._guard.saves = before

    def model_part(self, base: ModelPart, number: int) -> ModelPart:
        """The part of `base` that this worker saves and loads. All workers of the teams together have `base`."""
        with self.part():
            state = self.model.state_dict(keep_vars=True)
        slices: dict[str, DimensionSlice] = {}
        saves, loads = set(), set(base.loads)
        for name, value in state.items():
            known = isinstance(value, Tensor) and id(value) in self._by_id
            if known and self.is_absent(value):
                loads.discard(name)
                continue
            cut = self._cut(self._by_id[id(value)]) if known else None
            if cut is not None:
                slices[name] = cut
            here = self.counts_here(value) if isinstance(value, Tensor) else self._is_first
            if here and name in base.saves:
                saves.add(name)
        return ModelPart(number, frozenset(saves), frozenset(loads), slices, keeps_state=bool(base.saves))

    # Whole, and divided again.

    @property
    def is_whole(self) -> bool:
        """Whether the model is whole at the moment."""
        return self._depth > 0

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, every worker has the whole layers, and computes them alone."""
        self._depth += 1
        try:
            if self._depth == 1:
                self._shares = {id(each.tensor): each.tensor.data for each in self._tensors}
                self._gather()
                self._set_divided(False)
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                for each in self._tensors:
                    each.tensor.data = self._shares[id(each.tensor)]
                self._shares = {}
                self._set_divided(True)

    def close(self) -> None:
        """The run is over: every worker has the whole layers and their optimizer state."""
        self._complete_optimizer()
        self._gather()
        for each in self._tensors:
            each.tensor.grad = None
        self.end()

    def end(self) -> None:
        """Remove the hooks, and let the layers compute alone."""
        self._set_divided(False)
        for division in self._divisions:
            division.detach()
        self._divisions = []
        for hook in (*self._hooks, *self._scales):
            hook.remove()

    def roll_back(self) -> None:
        """The run could not be made: restore the model and the optimizer as they were before."""
        self.end()
        self._restore_originals()

    def scale_shared_gradients(self) -> None:
        """Divide the gradients of parameters along "shared" by the size of the team.

        They are sums over the workers of the team, and the loss of each worker is the mean over its own data. Call it
        before each forward pass: torch drops the hooks of a parameter that was frozen and is trained again.
        """
        for handle in self._scales:
            handle.remove()
        self._scales = [
            each.tensor.register_hook(_Scale(1.0 / len(each.cuts)))  # type: ignore[no-untyped-call]
            for each in self._tensors
            if each.axis == "shared" and each.tensor.requires_grad
        ]

    @property
    def _is_first(self) -> bool:
        return not any(self._positions.values())

    def _cut(self, each: DividedTensor) -> DimensionSlice | None:
        return each.cuts[self._positions[each.axis]]

    def _set_divided(self, divided: bool) -> None:
        for team in self.teams.values():
            team.divided = divided

    def _take_shares(self) -> None:
        for each in self._tensors:
            tensor, cut = each.tensor, self._cut(each)
            entry = self.optimizer.state.get(tensor)
            if self.is_absent(tensor):
                tensor.grad = None
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                self.optimizer.state.pop(tensor, None)
            elif cut is not None:
                gradient, tensor.grad = tensor.grad, None
                tensor.data = cut.take(tensor.data)
                tensor.grad = None if gradient is None else cut.take(gradient)
                for key, value in (entry or {}).items():
                    if isinstance(value, Tensor) and value.shape == each.shape:
                        entry[key] = cut.take(value)  # type: ignore[index]

    def _restore_originals(self) -> None:
        for each, (data, gradient) in zip(self._tensors, self._original_tensors, strict=True):
            each.tensor.grad = None
            each.tensor.data = data
            each.tensor.grad = gradient
        self.optimizer.state.update(self._original_states)

    def commit(self) -> None:
        """The run exists: `roll_back` is not possible any more."""
        self._original_tensors, self._original_states = [], {}

    def _gather(self) -> None:
        with torch.no_grad():
            for each in self._tensors:
                each.tensor.data = self._whole_tensor(each, each.tensor.data)

    def _whole_tensor(self, each: DividedTensor, own: Tensor) -> Tensor:
        """A tensor of the parameter's shape, from the parts of all workers of its team."""
        team = self.teams[each.axis]
        if len(each.owners) < len(each.cuts):
            root = each.owners[0]
            value = own if team.rank == root else torch.empty(each.shape, dtype=own.dtype, device=own.device)
            return team.broadcast(value, root)
        found = self._cut(each)
        assert found is not None, f"{each.name} has a slice on every worker"
        cuts = [cut for cut in each.cuts if cut is not None]
        parts = team.gather(own, found.dimension, [cut.length for cut in cuts])
        whole = torch.empty(each.shape, dtype=own.dtype, device=own.device)
        for cut, part in zip(cuts, torch.split(parts, [cut.length for cut in cuts], found.dimension), strict=True):
            cut.put(part, whole)
        return whole

    def _complete_optimizer(self) -> None:
        for each in self._tensors:
            team, tensor = self.teams[each.axis], each.tensor
            if len(each.owners) < len(each.cuts):
                root = each.owners[0]
                found = broadcast_object(self.optimizer.state.get(tensor), root, group=team.group)
                if found is not None and team.rank != root:
                    self.optimizer.state[tensor] = found
                continue
            entry = self.optimizer.state.get(tensor, {})
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.shape == tensor.shape:
                    entry[key] = self._whole_tensor(each, value)


class _Scale:
    """A tensor hook that multiplies a gradient. A copy of the parameter has none."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * self.factor


class _PartGuard:
    """A hook that refuses to save a divided model as it is, and to call a copy of it in another state.

    A copy that was made while the model was divided has only this worker's part. A copy that was made inside `whole()`
    has all of it. The layers of a copy compute with the team whenever the layers of the model do.
    """

    def __init__(
        self,
        teams: Mapping[str, LayerTeam],
        copied_divided: bool | None = None,
        before_call: Callable[[], None] | None = None,
    ) -> None:
        self.teams, self.before_call = teams, before_call
        self.saves = False
        """Whether a checkpoint reads this worker's part at the moment."""
        self.copied_divided = copied_divided
        """In a copy: whether the model was divided when it was copied."""

    @property
    def divided(self) -> bool:
        return any(team.divided for team in self.teams.values())

    def check_call(self, module: nn.Module, *arguments: Any) -> None:
        if self.before_call is not None and not torch.compiler.is_compiling():
            self.before_call()
        if self.copied_divided in (None, self.divided):
            return
        name = f"this {type(module).__name__} is a copy of a divided model"
        if self.copied_divided:
            raise IncompatibleError(
                f"{name}, and has only this worker's part of it: copy the model inside run.agreed() to evaluate the "
                "copy there, or after the run"
            )
        raise IncompatibleError(
            f"{name} that was made inside run.agreed(), and outside of it the layers compute with the other workers: "
            "call the copy inside run.agreed(), or after the run"
        )

    def check_save(self, module: nn.Module, *arguments: Any) -> None:
        if not self.saves and self.copied_divided is None and self.divided:
            raise IncompatibleError(
                f"this {type(module).__name__} is divided over workers, and this one has only its own part: save it "
                "by sl.save(folder, step=step, run=run), or call state_dict() inside run.agreed()"
            )


class _GuardHook:
    """One of the two hooks of a guard. A copy of the module has a guard of its own."""

    def __init__(self, guard: _PartGuard, check: str) -> None:
        self.guard, self.check = guard, check

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        getattr(self.guard, self.check)(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GuardHook:
        return _GuardHook(_PartGuard(self.guard.teams, self.guard.divided), self.check)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as a hook that refuses nothing, with the whole model; a part is refused."""
        if self.guard.divided:
            raise IncompatibleError(
                "this model is divided over workers, and this one has only its own part: save it by "
                "sl.save(folder, step=step, run=run), or pickle it inside run.agreed()"
            )
        return _GuardHook, (_PartGuard({}), self.check)
