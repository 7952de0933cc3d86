"""Every workload by name, and scripts by their path: a new one is one file and one line here."""

from __future__ import annotations

import os

from syncline.bench.workloads.convex import Logistic, Regression
from syncline.bench.workloads.digits import Digits
from syncline.bench.workloads.fashion import Fashion
from syncline.bench.workloads.script import ScriptWorkload
from syncline.bench.workloads.stdlib import Stdlib
from syncline.errors import SpecError
from syncline.specs import Registry
from syncline.training.workload import Workload

__all__ = ["build", "names"]

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
