"""Workloads: data, model and loss, each with train, validation and test splits.

>>> import torch
>>> from syncline.bench.workloads import build
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

from syncline.bench.workloads.catalog import build, names
from syncline.bench.workloads.convex import Logistic, Regression
from syncline.bench.workloads.digits import Digits
from syncline.bench.workloads.fashion import Fashion
from syncline.bench.workloads.script import ScriptWorkload
from syncline.bench.workloads.stdlib import Stdlib

__all__ = ["Digits", "Fashion", "Logistic", "Regression", "ScriptWorkload", "Stdlib", "build", "names"]
