"""The elementwise optimizers of torch as update rules, and the rules that correspond to a user's optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError, ProtocolError, SpecError
from syncline.server.rules.base import UpdateRule
from syncline.server.rules.elementwise import Sgd
from syncline.specs import Spec, nearest

__all__ = ["PieceOptimizer", "TorchRule", "rule_of", "torch_rule"]

ELEMENTWISE_OPTIMIZERS = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""The update of a weight depends only on that weight's own gradients, so that weights can be split anywhere."""

REFUSED_OPTIMIZERS = {
    "Adafactor": "it keeps means over rows and columns of whole matrices",
    "LAMB": "it needs the norms of whole layers",
    "LARS": "it needs the norms of whole layers",
    "LBFGS": "it needs products of whole gradients, and evaluates the loss itself",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients, and a server's are dense; use adam, which counts each weight's pushes",
}

UNSUPPORTED_ARGUMENTS = ("capturable", "differentiable", "params")
"""Arguments without meaning at a server: CUDA graphs, gradients of the step itself."""


@dataclass(frozen=True, repr=False)
class TorchRule(UpdateRule):
    """An optimizer of `torch.optim`, one for each piece of the weights. Made by `torch_rule`.

    >>> rule, weights = torch_rule("AdamW", lr=0.1), torch.zeros(2)
    >>> rule
    torch('AdamW', lr=0.1)
    >>> applier = rule.open(weights)
    >>> applier.apply(torch.tensor([1.0, -1.0]))
    >>> weights
    tensor([-0.1000,  0.1000])
    """

    optimizer: str
    options: tuple[tuple[str, Any], ...] = ()

    name: ClassVar[str] = "torch"
    elementwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.optimizer in REFUSED_OPTIMIZERS:
            raise IncompatibleError(_refusal(self.optimizer, REFUSED_OPTIMIZERS[self.optimizer]))
        if self.optimizer not in ELEMENTWISE_OPTIMIZERS:
            raise SpecError(
                f"unknown optimizer {self.optimizer!r}; {nearest(str(self.optimizer), list(ELEMENTWISE_OPTIMIZERS))}"
            )
        for name, _ in self.options:
            if name in UNSUPPORTED_ARGUMENTS:
                raise SpecError(f"{self!r}: {name} means nothing at a server; leave it out")
        order = [*_signature(self.optimizer).parameters]
        known = sorted(self.options, key=lambda each: order.index(each[0]) if each[0] in order else len(order))
        object.__setattr__(self, "options", tuple(known))
        try:
            self.make(torch.zeros(1, dtype=torch.float32))
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecError(f"{self!r}: {error}; write {self.optimizer}{_signature(self.optimizer)}") from None

    def make(self, *weights: Tensor) -> Optimizer:
        """A new optimizer that updates these weights in place."""
        kind: Callable[..., Optimizer] = getattr(torch.optim, self.optimizer)
        return kind([nn.Parameter(each, requires_grad=False) for each in weights], **dict(self.options))

    @cached_property
    def slots(self) -> dict[str, bool]:
        """The names of its state after a step, and whether each has one element for each weight."""
        probe = PieceOptimizer(self, torch.zeros(2, dtype=torch.float32))
        probe.apply(torch.zeros(2, dtype=torch.float32))
        return {name: each.dim() > 0 for name, each in probe.state_dict().items()}

    def open(self, weights: Tensor, starts: Sequence[int] = ()) -> PieceOptimizer:
        if weights.dtype != torch.float32 or weights.dim() != 1 or not weights.is_contiguous():
            raise IncompatibleError(f"{self!r} works on a 1-D float32 tensor, not {weights.dtype}{list(weights.shape)}")
        return PieceOptimizer(self, weights, starts)

    def __repr__(self) -> str:
        return str(Spec(self.name, (self.optimizer,), dict(self.options)))


class PieceOptimizer:
    """The optimizer of one piece. It has one parameter, the piece. After a step that leaves out some of the model's
    parameters in the piece, it has these parameters instead.
    """

    def __init__(self, rule: TorchRule, weights: Tensor, starts: Sequence[int] = ()) -> None:
        self.rule = rule
        self._weights = weights
        self._edges = [0, *(start for start in starts if 0 < start < weights.numel()), weights.numel()]
        self._spans = [(0, weights.numel())]
        self._optimizer = rule.make(weights)
        self._rate = float(self._group["lr"])

    @property
    def _group(self) -> dict[str, Any]:
        return self._optimizer.param_groups[0]

    @property
    def _parts(self) -> list[tuple[tuple[int, int], nn.Parameter]]:
        return list(zip(self._spans, self._group["params"], strict=True))

    def apply(self, update: Tensor, rate: float | None = None, first: int = 0) -> None:
        """Update the piece in place, or whole parameters of it from element `first` on. `update` may be overwritten."""
        after = first + update.numel()
        if (first, after) != (0, self._weights.numel()):
            if first not in self._edges or after not in self._edges:
                raise ProtocolError(
                    f"{self.rule!r} takes whole parameters: elements {first} to {after} of a piece in which they begin "
                    f"at {self._edges[:-1]}"
                )
            self._split()
        group = self._group
        group["lr"] = self._rate if rate is None else rate
        for (start, stop), parameter in zip(self._spans, group["params"], strict=True):
            if first <= start and stop <= after:
                parameter.grad = update[start - first : stop - first]
        self._optimizer.step()
        self._optimizer.zero_grad()

    def use(self, rule: TorchRule) -> None:
        """Continue with other settings of the same optimizer."""
        fresh = rule.make(torch.zeros(1, dtype=torch.float32)).param_groups[0]
        self._group.update({name: value for name, value in fresh.items() if name != "params"})
        self.rule, self._rate = rule, float(fresh["lr"])

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the state: tensors as long as the piece, or single numbers."""
        states = [self._optimizer.state[parameter] for _, parameter in self._parts]
        names = dict.fromkeys(name for state in states for name, each in state.items() if isinstance(each, Tensor))
        if len(states) == 1:
            return {name: states[0][name].clone() for name in names}
        rows = {}
        for name in names:
            parts = [
                _row_of(state.get(name), stop - start) for (start, stop), state in zip(self._spans, states, strict=True)
            ]
            rows[name] = torch.cat(parts)
        return rows

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a state; an empty one is a fresh start."""
        slots = self.rule.slots
        if state and not slots.keys() <= state.keys():
            raise IncompatibleError(f"{self.rule!r} keeps {sorted(slots)}, and what is to be loaded {sorted(state)}")
        rows = {name: each.expand(self._weights.shape) if each.dim() == 0 else each for name, each in state.items()}
        if state and not self._fits_one(rows):
            self._split()
        for (start, stop), parameter in self._parts:
            part = {name: self._slot(name, rows[name], start, stop) for name in slots} if state else {}
            empty = not part or all(bool(each.isnan().all()) for each in part.values())
            self._optimizer.state[parameter] = self._fresh(parameter) if empty else part

    def snapshot(self) -> dict[str, Any]:
        """Everything that a copy of this optimizer on another server needs to continue with the same bits."""
        return {"split": len(self._spans) > 1, "rate": self._rate, "optimizer": self._optimizer.state_dict()}

    def load_snapshot(self, state: dict[str, Any]) -> None:
        """Continue like the optimizer whose `snapshot` this is. The weights have been copied before."""
        if state["split"]:
            self._split()
        self._rate = state["rate"]
        self._optimizer.load_state_dict(state["optimizer"])

    def _fresh(self, parameter: nn.Parameter) -> dict[str, Any]:
        return dict(next(iter(self.rule.make(parameter.detach()).state.values()), {}))

    def _split(self) -> None:
        """Split the piece into the model's parameters, each with its part of the state."""
        if len(self._spans) > 1 or len(self._edges) == 2:
            return
        state, rate = self.state_dict(), self._group["lr"]
        self._spans = list(pairwise(self._edges))
        self._optimizer = self.rule.make(*(self._weights[start:stop] for start, stop in self._spans))
        self._group["lr"] = rate
        if state:
            self.load_state_dict(state)

    def _fits_one(self, rows: dict[str, Tensor]) -> bool:
        """Whether one parameter can hold the state: the whole piece has state, and its scalars are equal."""
        slots = self.rule.slots
        single = all(
            slots[name] or _is_one_value(rows[name]) for name in slots if rows[name].shape == self._weights.shape
        )
        return single and not any(bool(rows[name].isnan().any()) for name in slots)

    def _slot(self, name: str, saved: Tensor, start: int, stop: int) -> Tensor:
        """A tensor of the state in the optimizer's shape. A scalar arrives as a row with one copy for each weight."""
        elementwise, row = self.rule.slots[name], saved.shape == self._weights.shape
        part = saved[start:stop] if row else saved
        if not row or saved.dtype != torch.float32 or not (elementwise or _is_one_value(part)):
            due = list(self._weights.shape) if elementwise else "of one value"
            raise IncompatibleError(
                f"{name} of {self.rule!r} is float32 {due} here, not {saved.dtype}{list(saved.shape)}: it was saved of "
                "other pieces"
            )
        return part.clone() if elementwise else part[0].clone()


def _is_one_value(row: Tensor) -> bool:
    return bool((row == row[:1]).all()) or bool(row.isnan().all())


def _row_of(state: Any, numel: int) -> Tensor:
    """A tensor of the state, one element for each weight; NaN if there is none yet, because zeros are a valid state."""
    if not isinstance(state, Tensor):
        return torch.full((numel,), math.nan, dtype=torch.float32)
    return state.to(torch.float32).expand(numel) if state.dim() == 0 else state.clone()


def torch_rule(optimizer: str, **options: Any) -> TorchRule:
    """The rule of an optimizer of `torch.optim`, by its name and its own arguments.

    >>> torch_rule("SGD", lr=0.1, momentum=0.9)
    torch('SGD', lr=0.1, momentum=0.9)
    """
    return TorchRule(optimizer, tuple((name, _literal(name, value)) for name, value in options.items()))


def rule_of(optimizer: Optimizer) -> list[UpdateRule]:
    """For each parameter group, the rule that does at a server what the optimizer does here, with the same bits.

    The rules have the current settings; each push has the current learning rate. With torch's fused kernels, or a
    learning rate in a tensor, results may differ by rounding.

    >>> layer = nn.Linear(2, 1)
    >>> rule_of(torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.0))
    [torch('AdamW', lr=0.1, weight_decay=0.0)]
    >>> rule_of(torch.optim.SGD([{"params": [layer.weight], "momentum": 0.9}, {"params": [layer.bias]}], lr=0.5))
    [torch('SGD', lr=0.5, momentum=0.9), sgd(lr=0.5)]
    """
    kind = type(optimizer)
    name = kind.__name__
    if name in REFUSED_OPTIMIZERS:
        raise IncompatibleError(_refusal(name, REFUSED_OPTIMIZERS[name]))
    if name not in ELEMENTWISE_OPTIMIZERS or kind is not getattr(torch.optim, name):
        raise IncompatibleError(
            _refusal(f"{kind.__module__}.{name}", "only optimizers of torch.optim itself are known to be elementwise")
        )
    return [_rule(name, group) for group in optimizer.param_groups]


def _rule(name: str, group: dict[str, Any]) -> UpdateRule:
    if group.get("differentiable"):
        raise IncompatibleError(f"{name} with differentiable=True cannot run at a server: make it without")
    known = _signature(name).parameters
    changed = {
        key: literal
        for key, value in group.items()
        if key in known and key not in UNSUPPORTED_ARGUMENTS and (literal := _literal(key, value)) != known[key].default
    }
    if name == "SGD" and set(changed) <= {"lr"}:  # the same bits, without state, and for any keys
        return Sgd(float(changed.get("lr", known["lr"].default)))
    return torch_rule(name, **changed)


def _signature(name: str) -> inspect.Signature:
    found = inspect.signature(getattr(torch.optim, name))
    return found.replace(
        parameters=[each for key, each in found.parameters.items() if key not in UNSUPPORTED_ARGUMENTS]
    )


def _literal(name: str, value: Any) -> Any:
    """A setting in the form of a spec: one-element tensors become numbers, and lists become tuples."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return tuple(_literal(name, each) for each in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise SpecError(f"{name}={value!r} cannot be written in a spec: give a number, True, False or None")


def _refusal(name: str, reason: str) -> str:
    allowed = ", ".join(ELEMENTWISE_OPTIMIZERS)
    return f"{name} cannot run at a server, which holds pieces of the weights: {reason}; allowed: {allowed}"
