"""Every strategy by its name."""

from __future__ import annotations

from syncline.specs import Registry
from syncline.strategies.allreduce import AllReduce
from syncline.strategies.base import Strategy

__all__ = ["build_strategy", "strategy_names"]


def build_strategy(spec: str | Strategy) -> Strategy:
    """The strategy that a spec describes.

    >>> build_strategy("allreduce(delay=1)")
    allreduce(delay=1)
    """
    return spec if isinstance(spec, Strategy) else _registry().build(spec)


def strategy_names() -> list[str]:
    """Every name that a strategy spec may begin with."""
    return _registry().names()


def _registry() -> Registry[Strategy]:
    registry = Registry[Strategy]("strategy")
    registry.add(AllReduce.name, AllReduce)
    return registry
