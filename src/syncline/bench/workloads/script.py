"""A workload from a user's file: plain functions and constants, no base class, nothing of Syncline to import.

    def model(): …                    an nn.Module; random numbers are seeded before the call
    def data(): …                     train, validation, test
    def loss(model, batch): …         the mean over a batch of (inputs, targets)

    def metric(model, batch): …       optional: a number, or a dict of them; without it the loss counts
    def optimizer(model, learning_rate): …                               optional: SGD with momentum 0.9
    METRIC, HIGHER_IS_BETTER, METRIC_RANGE, TARGET, BATCH, EPOCHS, LEARNING_RATE                optional

`template.py` is an example of it all, and `syncline new` copies it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from syncline.bench.workloads.checks import check_whole
from syncline.bench.workloads.script_data import as_splits, digest_of
from syncline.bench.workloads.script_file import ScriptFile, load_script, randomness
from syncline.bench.workloads.script_trial import try_out
from syncline.data import move
from syncline.errors import SpecError
from syncline.training.workload import Batch, Defaults, Splits, Workload

__all__ = ["ScriptWorkload"]

OWN = "script"
"""The name, in the log, of an optimizer that the script makes."""
MOST = 1_000_000_000


class ScriptWorkload(Workload):
    """What a script defines. Its spec is the file's absolute path, so that every process finds it.

    >>> from importlib.resources import files
    >>> workload = ScriptWorkload(str(files("syncline.bench.workloads") / "template.py"))
    >>> workload.check()
    >>> workload.name, workload.metric, workload.splits().sizes()
    ('template', 'accuracy', {'train': 3000, 'validation': 600, 'test': 600})
    """

    name = OWN
    metric = "loss"
    higher_is_better = False
    metric_range = (-math.inf, math.inf)

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.script = load_script(path)
        self.spec = Path(self.script.path).as_posix()
        self._digest: str | None = None
        # The contract has these of the class; here each script has its own.
        vars(self).update(name=Path(path).stem, **_judged(self.script))
        self._defaults = self._read_defaults()

    @property
    def defaults(self) -> Defaults:
        """The script's constants; where it has none, batch 32, ten epochs, a rate of 0.01."""
        return self._defaults

    def model(self, seed: int = 0) -> nn.Module:
        """What `model()` gives after all generators were seeded."""
        with randomness(seed), self.script.telling("model()"):
            made = self.script.module.model()
        if not isinstance(made, nn.Module):
            raise SpecError(f"{self.script.shown}: model() gives {type(made).__name__}, not an nn.Module; return one")
        if not any(parameter.requires_grad for parameter in made.parameters()):
            raise SpecError(
                f"{self.script.shown}: model() gives a {type(made).__name__} without a parameter to train; "
                "return one with requires_grad"
            )
        if any(isinstance(parameter, UninitializedParameter) for parameter in made.parameters()):
            raise SpecError(
                f"{self.script.shown}: model() has lazy layers that have no sizes yet; call it once, then return it"
            )
        return made

    def make_splits(self) -> Splits:
        """What `data()` gives. Seeded as well: a script that draws its data gets the same on every rank."""
        with randomness(0), self.script.telling("data()"):
            found = self.script.module.data()
        return as_splits(self.script.shown, found)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The script's loss; the batch is where the model is."""
        found: Tensor = self.script.module.loss(model, _moved(model, batch))
        return found

    def measures(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The loss, and what `metric` says. Where that has a "loss" too, it is not computed twice."""
        judge = self.script.get("metric")
        if judge is None:
            return {"loss": self.loss(model, batch)}
        found = judge(model, _moved(model, batch))
        means = dict(found) if isinstance(found, Mapping) else {self.metric: found}
        if self.metric not in means:
            raise SpecError(
                f"{self.script.shown}: metric(model, batch) gives {sorted(map(str, means))} and not {self.metric!r}; "
                f"give it, or name another one with METRIC"
            )
        numbers = {str(key): self._number(str(key), value) for key, value in means.items()}
        return numbers if "loss" in numbers else {"loss": self.loss(model, batch), **numbers}

    def optimizer(self, model: nn.Module, learning_rate: float | None = None) -> torch.optim.Optimizer:
        """The script's own, or SGD with momentum 0.9."""
        make = self.script.get("optimizer")
        if make is None:
            return super().optimizer(model, learning_rate)
        with self.script.telling("optimizer(model, learning_rate)"):
            made = make(model, self.defaults.learning_rate if learning_rate is None else learning_rate)
        if not isinstance(made, torch.optim.Optimizer):
            raise SpecError(
                f"{self.script.shown}: optimizer(model, learning_rate) gives {type(made).__name__}, not an optimizer; "
                "return one of torch.optim"
            )
        return made

    def describe(self) -> dict[str, Any]:
        """With the SHA-256 of the script, and of the samples where they are tensors."""
        if self._digest is None:
            self._digest = digest_of(self.splits())
        data = {} if self._digest is None else {"sha256": self._digest}
        return {**super().describe(), **data, "script_sha256": self.script.sha256}

    def check(self) -> None:
        """Try it all on two samples: what is wrong with the script is told here, before a worker is started."""
        try_out(self, self.script)

    def _number(self, key: str, value: Any) -> Tensor:
        given = value if isinstance(value, Tensor) else None
        if given is None and isinstance(value, (int, float, np.number)):
            given = torch.tensor(float(value), dtype=torch.float64)
        if given is None or given.numel() != 1 or given.is_complex():
            raise SpecError(
                f"{self.script.shown}: metric(model, batch) gives {value!r} for {key!r}, not a number; "
                "give the mean over the batch"
            )
        return given

    def _read_defaults(self) -> Defaults:
        script, shown = self.script, self.script.shown
        given = {name: script.get(name) for name in ("BATCH", "EPOCHS", "LEARNING_RATE", "TARGET")}
        rate = 0.01 if given["LEARNING_RATE"] is None else given["LEARNING_RATE"]
        if not _is_number(rate) or not 0 < rate < math.inf:
            raise SpecError(f"{shown}: LEARNING_RATE is a number above 0 (LEARNING_RATE: {rate!r})")
        return Defaults(
            batch=32 if given["BATCH"] is None else check_whole(shown, "BATCH", given["BATCH"], 1, MOST),
            epochs=10 if given["EPOCHS"] is None else check_whole(shown, "EPOCHS", given["EPOCHS"], 1, MOST),
            learning_rate=float(rate),
            optimizer="sgd" if script.get("optimizer") is None else OWN,
            momentum=0.9 if script.get("optimizer") is None else 0.0,
            target=None if given["TARGET"] is None else self.check_target(given["TARGET"]),
        )


def _judged(script: ScriptFile) -> dict[str, Any]:
    """By what, and in which direction, models are compared."""
    shown, own = script.shown, script.get("metric") is not None
    name = script.get("METRIC") or ("metric" if own else "loss")
    if not isinstance(name, str) or not name.isidentifier():
        raise SpecError(f"{shown}: METRIC is a name such as 'accuracy' (METRIC: {name!r})")
    if not own and name != "loss":
        raise SpecError(f"{shown}: METRIC is {name!r} and there is no metric(model, batch) that gives it; write one")
    higher = script.get("HIGHER_IS_BETTER")
    higher = name != "loss" if higher is None else higher
    if not isinstance(higher, bool):
        raise SpecError(f"{shown}: HIGHER_IS_BETTER is True or False (HIGHER_IS_BETTER: {higher!r})")
    if not own and higher:
        raise SpecError(f"{shown}: HIGHER_IS_BETTER is True and the metric is the loss; write metric(model, batch)")
    span = script.get("METRIC_RANGE")
    if span is None:
        span = (0.0, 1.0) if name == "accuracy" else (-math.inf, math.inf)
    pair = isinstance(span, (tuple, list)) and len(span) == 2 and all(map(_is_number, span))
    if not pair or not span[0] < span[1]:
        raise SpecError(f"{shown}: METRIC_RANGE is a pair (least, most) such as (0, 1) (METRIC_RANGE: {span!r})")
    return {"metric": name, "higher_is_better": higher, "metric_range": (float(span[0]), float(span[1]))}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _moved(model: nn.Module, batch: Batch) -> Any:
    return move(batch, next(model.parameters()).device)
