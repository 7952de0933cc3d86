"""Workloads: data, model and loss, each with train, validation and test splits.

>>> import torch
>>> from syncline.workloads import build
>>> workload = build("regression(features=4, samples=256, condition=1)")
>>> model, splits = workload.model(seed=0), workload.splits()
>>> splits.sizes()
{'train': 256, 'validation': 64, 'test': 64}
>>> optimizer = workload.optimizer(model, learning_rate=0.5)
>>> for step in range(100):  # the whole split at once
...     optimizer.zero_grad()
...     workload.loss(model, (splits.train.inputs, splits.train.targets)).backward()
...     optimizer.step()
>>> workload.evaluate(model, splits.train)["gap"] < 1e-9
True
"""

from __future__ import annotations

import os

from syncline.errors import SpecError
from syncline.specs import Registry
from syncline.workloads.base import Workload
from syncline.workloads.convex import Logistic, Regression
from syncline.workloads.digits import Digits
from syncline.workloads.fashion import Fashion
from syncline.workloads.script import ScriptWorkload
from syncline.workloads.stdlib import Stdlib

__all__ = ["Digits", "Fashion", "Logistic", "Regression", "ScriptWorkload", "Stdlib", "Workload", "build", "names"]

OTHER_NAMES = {
    "mnist": "digits;fashion",
    **dict.fromkeys(("fashionmnist", "fmnist"), "fashion"),
    **dict.fromkeys(("linear", "linearregression", "leastsquares"), "regression"),
    "logisticregression": "logistic",
    **dict.fromkeys(("transformer", "gpt", "charlm", "language", "text"), "stdlib"),
}
"""Names that users may know a workload by, and our names for it."""


def build(spec: str) -> Workload:
    """The workload that a spec describes, or the script at a path. No data is read before its `splits()` are asked for.

    >>> build("digits(model='cnn')").metric
    'accuracy'
    >>> build("./wrkload.py")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: there is no file ./wrkload.py; syncline new ./wrkload.py writes one to begin with
    """
    if _is_path(spec):
        return ScriptWorkload(spec)
    registry = _registry()
    try:
        return registry.build(spec)
    except SpecError as error:
        name = str(spec).partition("(")[0].strip()
        if name.isidentifier() and name not in registry.names() and os.path.isfile(f"{name}.py"):
            raise SpecError(f"{error}; for the script beside you write {name}.py") from None
        raise


def names() -> list[str]:
    """The workloads there are.

    >>> names()
    ['digits', 'fashion', 'logistic', 'regression', 'stdlib']
    """
    return _registry().names()


def _is_path(text: str) -> bool:
    """Whether it names a file. Arguments in brackets may hold paths, and make a spec all the same."""
    return isinstance(text, str) and (text.endswith(".py") or ("(" not in text and (os.sep in text or "." in text)))


def _registry() -> Registry[Workload]:
    registry = Registry[Workload]("workload", OTHER_NAMES)
    for kind in (Digits, Fashion, Logistic, Regression, Stdlib):
        registry.add(kind.name, kind)
    return registry
