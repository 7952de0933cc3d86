"""Every workload by name: a new one is one file and one line here."""

from __future__ import annotations

from syncline.bench.workloads.convex import Logistic, Regression
from syncline.bench.workloads.digits import Digits
from syncline.bench.workloads.fashion import Fashion
from syncline.bench.workloads.stdlib import Stdlib
from syncline.specs import Registry
from syncline.training.workload import Workload

__all__ = ["build", "names"]


def build(spec: str) -> Workload:
    """The workload that a spec describes. Nothing is read before its `splits()` are asked for.

    >>> build("digits(model='cnn')").metric
    'accuracy'
    """
    return _registry().build(spec)


def names() -> list[str]:
    """The workloads there are.

    >>> names()
    ['digits', 'fashion', 'logistic', 'regression', 'stdlib']
    """
    return _registry().names()


def _registry() -> Registry[Workload]:
    registry = Registry[Workload]("workload")
    for kind in (Digits, Fashion, Logistic, Regression, Stdlib):
        registry.add(kind.name, kind)
    return registry
