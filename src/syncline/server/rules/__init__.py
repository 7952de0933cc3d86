"""Update rules: what a server does with pushed values. The elementwise ones, torch's optimizers, and handlers."""

from __future__ import annotations

from functools import partial

from syncline.errors import SpecError
from syncline.server.rules.base import UpdateRule
from syncline.server.rules.elementwise import Adagrad, Adam, Add, Assign, Momentum, Sgd
from syncline.server.rules.handlers import HandlerRule, handler_names
from syncline.server.rules.torch_rule import PieceOptimizer, TorchRule, rule_of, torch_rule
from syncline.specs import Registry

__all__ = [
    "RULES",
    "Adagrad",
    "Adam",
    "Add",
    "Assign",
    "HandlerRule",
    "Momentum",
    "PieceOptimizer",
    "Sgd",
    "TorchRule",
    "UpdateRule",
    "build_rule",
    "rule_of",
    "torch_rule",
]


def _registry(*handlers: str) -> Registry[UpdateRule]:
    registry = Registry[UpdateRule]("rule")
    for rule in (Add, Assign, Sgd, Momentum, Adagrad, Adam, HandlerRule):
        registry.add(rule.name, rule)
    registry.add(TorchRule.name, torch_rule)
    for name in handlers:
        registry.add(name, partial(HandlerRule, name))
    return registry


RULES = _registry()


def build_rule(spec: str | UpdateRule) -> UpdateRule:
    """The rule of a spec. The name of a registered handler is a spec, too.

    >>> build_rule("momentum(0.1, 0.9)")
    momentum(lr=0.1)
    >>> build_rule("torch('Adam', lr=0.01, amsgrad=True)")
    torch('Adam', lr=0.01, amsgrad=True)
    """
    if isinstance(spec, UpdateRule):
        return spec
    if not isinstance(spec, str):
        raise SpecError(f"a rule is a spec such as 'adagrad(lr=0.1)' or a rule, not {spec!r}")
    links = RULES.read(spec)
    if len(links) != 1:
        raise SpecError(f"a rule is one name, not a chain: {spec!r}")
    known = links[0].name in RULES.names()
    return (RULES if known else _registry(*handler_names())).make(links[0])
