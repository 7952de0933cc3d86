"""Any elementwise optimizer of torch as an update rule, and the rules that stand for an optimizer a user has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import IncompatibleError, SpecError
from syncline.server.rules.base import Rule
from syncline.server.rules.sgd import Sgd
from syncline.specs import Spec, nearest

__all__ = ["TorchRule", "rule_of", "torch_rule"]

ALLOWED = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Their update of a weight depends on nothing but that weight's own gradients: it may be cut anywhere."""

REFUSED = {
    "Adafactor": "it keeps means over rows and columns of whole matrices",
    "LAMB": "it needs the norms of whole layers",
    "LARS": "it needs the norms of whole layers",
    "LBFGS": "it needs products of whole gradients, and evaluates the loss itself",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients, and a server's are dense; use adam, which counts each weight's pushes",
}

NOT_HERE = ("capturable", "differentiable", "params")
"""Arguments that make no sense at a server: CUDA graphs, gradients of the step itself."""


@dataclass(frozen=True, repr=False)
class TorchRule(Rule):
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
        if self.optimizer in REFUSED:
            raise IncompatibleError(_refusal(self.optimizer, REFUSED[self.optimizer]))
        if self.optimizer not in ALLOWED:
            raise SpecError(f"unknown optimizer {self.optimizer!r}; {nearest(str(self.optimizer), list(ALLOWED))}")
        for name, _ in self.options:
            if name in NOT_HERE:
                raise SpecError(f"{self!r}: {name} means nothing at a server; leave it out")
        order = [*_signature(self.optimizer).parameters]
        known = sorted(self.options, key=lambda each: order.index(each[0]) if each[0] in order else len(order))
        object.__setattr__(self, "options", tuple(known))
        try:
            self.make(torch.zeros(1))
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecError(f"{self!r}: {error}; write {self.optimizer}{_signature(self.optimizer)}") from None

    def make(self, weights: Tensor) -> Optimizer:
        """A fresh optimizer of these weights, which it changes in place."""
        kind: Callable[..., Optimizer] = getattr(torch.optim, self.optimizer)
        return kind([nn.Parameter(weights, requires_grad=False)], **dict(self.options))

    @cached_property
    def slots(self) -> dict[str, bool]:
        """The names of its state after a step, and whether each has an element for every weight."""
        probe = _Piece(self, torch.zeros(2))
        probe.apply(torch.zeros(2))
        return {name: each.dim() > 0 for name, each in probe.state_dict().items()}

    def open(self, weights: Tensor) -> _Piece:
        if weights.dtype != torch.float32 or weights.dim() != 1 or not weights.is_contiguous():
            raise IncompatibleError(f"{self!r} works on a row of float32, not {weights.dtype}{list(weights.shape)}")
        return _Piece(self, weights)

    def __repr__(self) -> str:
        return str(Spec(self.name, (self.optimizer,), dict(self.options)))


class _Piece:
    """An optimizer at work on one piece."""

    def __init__(self, rule: TorchRule, weights: Tensor) -> None:
        self.rule = rule
        self._optimizer = rule.make(weights)
        self._group: dict[str, Any] = self._optimizer.param_groups[0]
        self._parameter: nn.Parameter = self._group["params"][0]
        self._rate = float(self._group["lr"])

    def apply(self, update: Tensor, rate: float | None = None) -> None:
        self._group["lr"] = self.rule.pick(rate, self._rate)
        self._parameter.grad = update
        self._optimizer.step()
        self._parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        state = self._optimizer.state[self._parameter]
        return {name: each.clone() for name, each in state.items() if isinstance(each, Tensor)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if not state:
            fresh = self.rule.make(self._parameter.detach())
            self._optimizer.state[self._parameter] = next(iter(fresh.state.values()), {})
            return
        slots = self.rule.slots
        if not slots.keys() <= state.keys():
            raise IncompatibleError(f"{self.rule!r} keeps {sorted(slots)}, and what is to be loaded {sorted(state)}")
        self._optimizer.state[self._parameter] = {
            name: self._slot(name, state[name], elementwise) for name, elementwise in slots.items()
        }

    def _slot(self, name: str, saved: Tensor, elementwise: bool) -> Tensor:
        """A tensor of the state, as it is to be; a single number may come as a row of it, one for each weight."""
        row = saved.shape == self._parameter.shape
        fits = row if elementwise else saved.dim() == 0 or (row and bool((saved == saved[:1]).all()))
        if not fits or saved.dtype != torch.float32:
            due = list(self._parameter.shape) if elementwise else "of one value"
            raise IncompatibleError(
                f"{name} of {self.rule!r} is float32 {due} here, not {saved.dtype}{list(saved.shape)}: it was saved of "
                "other pieces"
            )
        return saved.clone() if elementwise else saved.reshape(-1)[0].clone()


def torch_rule(optimizer: str, **options: Any) -> TorchRule:
    """The rule of an optimizer of `torch.optim`, by its name and its own arguments.

    >>> torch_rule("SGD", lr=0.1, momentum=0.9)
    torch('SGD', lr=0.1, momentum=0.9)
    """
    return TorchRule(optimizer, tuple((name, _literal(name, value)) for name, value in options.items()))


def rule_of(optimizer: Optimizer) -> list[Rule]:
    """For each of its parameter groups, the rule that does at a server what the optimizer does here, bit for bit.

    Settings are those of now: a rate that a scheduler changes goes with each push. To rounding only where torch's
    fused kernels or a rate in a tensor are asked for.

    >>> layer = nn.Linear(2, 1)
    >>> rule_of(torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.0))
    [torch('AdamW', lr=0.1, weight_decay=0.0)]
    >>> rule_of(torch.optim.SGD([{"params": [layer.weight], "momentum": 0.9}, {"params": [layer.bias]}], lr=0.5))
    [torch('SGD', lr=0.5, momentum=0.9), sgd(lr=0.5)]
    """
    kind = type(optimizer)
    name = kind.__name__
    if name in REFUSED:
        raise IncompatibleError(_refusal(name, REFUSED[name]))
    if name not in ALLOWED or kind is not getattr(torch.optim, name):
        raise IncompatibleError(
            _refusal(f"{kind.__module__}.{name}", "only optimizers of torch.optim itself are known to be elementwise")
        )
    return [_rule(name, group) for group in optimizer.param_groups]


def _rule(name: str, group: dict[str, Any]) -> Rule:
    if group.get("differentiable"):
        raise IncompatibleError(f"{name} with differentiable=True cannot run at a server: make it without")
    known = _signature(name).parameters
    told = {
        key: literal
        for key, value in group.items()
        if key in known and key not in NOT_HERE and (literal := _literal(key, value)) != known[key].default
    }
    if name == "SGD" and set(told) <= {"lr"}:  # the same bits, no state, and any keys
        return Sgd(float(told.get("lr", known["lr"].default)))
    return torch_rule(name, **told)


def _signature(name: str) -> inspect.Signature:
    found = inspect.signature(getattr(torch.optim, name))
    return found.replace(parameters=[each for key, each in found.parameters.items() if key not in NOT_HERE])


def _literal(name: str, value: Any) -> Any:
    """A setting as a spec can say it: one-element tensors become numbers, and lists tuples."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return tuple(_literal(name, each) for each in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise SpecError(f"{name}={value!r} cannot be written in a spec: give a number, True, False or None")


def _refusal(name: str, reason: str) -> str:
    return f"{name} cannot run at a server, which holds pieces of the weights: {reason}; allowed: {', '.join(ALLOWED)}"
