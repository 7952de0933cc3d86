"""Every update rule by its name."""

from __future__ import annotations

from functools import partial

from syncline.errors import SpecError
from syncline.server.rules.adagrad import Adagrad
from syncline.server.rules.adam import Adam
from syncline.server.rules.base import UpdateRule
from syncline.server.rules.handlers import HandlerRule, handler_names
from syncline.server.rules.plain import Add, Assign
from syncline.server.rules.sgd import Momentum, Sgd
from syncline.server.rules.torch_rule import TorchRule, torch_rule
from syncline.specs import Registry

__all__ = ["build_rule", "rule_names"]


def build_rule(spec: str | UpdateRule) -> UpdateRule:
    """The rule that a spec describes. The name of a registered handler is one too.

    >>> build_rule("momentum(0.1, 0.9)")
    momentum(lr=0.1)
    >>> build_rule("torch('Adam', lr=0.01, amsgrad=True)")
    torch('Adam', lr=0.01, amsgrad=True)
    """
    if isinstance(spec, UpdateRule):
        return spec
    if not isinstance(spec, str):
        raise SpecError(f"a rule is a spec such as 'adagrad(lr=0.1)' or a rule, not {spec!r}")
    registry = _registry()
    links = registry.read(spec)
    if len(links) != 1:
        raise SpecError(f"a rule is one name, not a chain: {spec!r}")
    if links[0].name not in registry.names():
        for name in handler_names():
            registry.add(name, partial(HandlerRule, name))
    return registry.make(links[0])


def rule_names() -> list[str]:
    """Every name that a rule's spec may begin with, handlers apart."""
    return _registry().names()


def _registry() -> Registry[UpdateRule]:
    registry = Registry[UpdateRule]("rule")
    for rule in (Add, Assign, Sgd, Momentum, Adagrad, Adam, HandlerRule):
        registry.add(rule.name, rule)
    registry.add(TorchRule.name, torch_rule)
    return registry
