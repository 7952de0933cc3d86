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
from syncline.workloads.convex import LogisticRegression, Regression
from syncline.workloads.digits import Digits
from syncline.workloads.fashion import Fashion
from syncline.workloads.script import ScriptWorkload
from syncline.workloads.stdlib import Stdlib
from syncline.workloads.transformer import TransformerLM
from syncline.workloads.vgg import VGG

__all__ = [
    "VGG",
    "Digits",
    "Fashion",
    "LogisticRegression",
    "Regression",
    "ScriptWorkload",
    "Stdlib",
    "TransformerLM",
    "Workload",
    "build",
    "names",
]

OTHER_NAMES = {
    "mnist": "digits;fashion",
    **dict.fromkeys(("fashionmnist", "fmnist"), "fashion"),
    **dict.fromkeys(("linear", "linearregression", "leastsquares"), "regression"),
    "logisticregression": "logistic",
    **dict.fromkeys(("gpt", "decoder", "language", "languagemodel", "text"), "stdlib;transformer"),
    **dict.fromkeys(("charlm", "rnn", "gru"), "stdlib"),
    **dict.fromkeys(("vgg11", "vgg16", "alexnet", "cnn"), "vgg"),
}
"""Other names of workloads, and our names for them."""
REGISTRY = Registry[Workload]("workload", OTHER_NAMES)
for _kind in (Digits, Fashion, LogisticRegression, Regression, Stdlib, TransformerLM, VGG):
    REGISTRY.add(_kind.name, _kind)


def build(spec: str) -> Workload:
    """Build the workload of a spec, or of the script at a path. Its data is read by the first `splits()`.

    >>> build("digits(model='cnn')").metric
    'accuracy'
    >>> build("./wrkload.py")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: there is no file ./wrkload.py; syncline new ./wrkload.py writes one to begin with
    """
    if _is_path(spec):
        return ScriptWorkload(spec)
    try:
        return REGISTRY.build(spec)
    except SpecError as error:
        name = str(spec).partition("(")[0].strip()
        if name.isidentifier() and name not in REGISTRY.names() and os.path.isfile(f"{name}.py"):
            raise SpecError(f"{error}; for the script in this folder write {name}.py") from None
        raise


def names() -> list[str]:
    """The names of all workloads.

    >>> names()
    ['digits', 'fashion', 'logistic', 'regression', 'stdlib', 'transformer', 'vgg']
    """
    return REGISTRY.names()


def _is_path(text: str) -> bool:
    """Whether it names a file. A text with arguments in brackets is a spec, even if they contain a path."""
    return isinstance(text, str) and (text.endswith(".py") or ("(" not in text and (os.sep in text or "." in text)))
