"""A workload from a user's file of plain functions and constants. The file imports nothing of Syncline.

    def model(): …                    an nn.Module; random numbers are seeded before the call
    def data(): …                     train, validation, test
    def loss(model, batch): …         the mean over a batch of (inputs, targets)

    def metric(model, batch): …               optional: a number, or a dict of them; without it the loss counts
    def output_loss(outputs, targets): …      optional: the loss, given model(inputs); pipelines need it
    def optimizer(model, learning_rate): …    optional: SGD with momentum 0.9
    METRIC, HIGHER_IS_BETTER, METRIC_RANGE, TARGET, BATCH, EPOCHS, LEARNING_RATE     optional

`template.py` is an example, which `syncline new` copies.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import Dataset, Subset, default_collate

from syncline.data import move
from syncline.errors import SpecError
from syncline.workloads.base import (
    Batch,
    Defaults,
    Pairs,
    Splits,
    Workload,
    check_whole,
    evaluating,
    sample_tensors,
    seeded,
)
from syncline.workloads.script_file import ScriptFile, load_script

__all__ = ["ScriptWorkload"]

SCRIPT_OPTIMIZER = "script"
"""The name in the log of an optimizer that the script makes."""
MAX_COUNT = 1_000_000_000
"""Largest BATCH and EPOCHS."""


class ScriptWorkload(Workload):
    """The workload of a script. Its spec is the absolute path of the file, for all processes.

    >>> from importlib.resources import files
    >>> workload = ScriptWorkload(str(files("syncline.workloads") / "template.py"))
    >>> workload.check()
    >>> workload.name, workload.metric, workload.splits().sizes()
    ('template', 'accuracy', {'train': 3000, 'validation': 600, 'test': 600})
    """

    name = SCRIPT_OPTIMIZER
    metric = "loss"
    higher_is_better = False
    metric_range = (-math.inf, math.inf)

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.script = load_script(path)
        self.spec = Path(self.script.path).as_posix()
        # Class attributes in the contract; here they differ between scripts.
        vars(self).update(name=Path(path).stem, **_judged(self.script))
        self._defaults = self._read_defaults()

    @property
    def defaults(self) -> Defaults:
        """The script's constants; without them batch 32, ten epochs, a rate of 0.01."""
        return self._defaults

    def model(self, seed: int = 0) -> nn.Module:
        """The result of `model()`, with all generators seeded."""
        with seeded(seed), self.script.errors_at("model()"):
            made = self.script.module.model()
        if not isinstance(made, nn.Module):
            raise SpecError(f"{self.script.shown}: model() returns {type(made).__name__}, not an nn.Module; return one")
        if not any(parameter.requires_grad for parameter in made.parameters()):
            raise SpecError(
                f"{self.script.shown}: model() returns a {type(made).__name__} without trainable parameters; "
                "return one with requires_grad"
            )
        if any(isinstance(parameter, UninitializedParameter) for parameter in made.parameters()):
            raise SpecError(
                f"{self.script.shown}: model() has lazy layers without sizes; call it on a batch, then return it"
            )
        return made

    def make_splits(self) -> Splits:
        """The result of `data()`, with all generators seeded, so that random data is the same on every rank."""
        with seeded(0), self.script.errors_at("data()"):
            found = self.script.module.data()
        return as_splits(self.script.shown, found)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The script's loss; the batch is on the model's device."""
        found: Tensor = self.script.module.loss(model, _moved(model, batch))
        return found

    def output_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The script's loss, given the model's output."""
        own = self.script.get("output_loss")
        found: Tensor = super().output_loss(outputs, targets) if own is None else own(outputs, targets)
        return found

    def measures(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The loss, and the result of `metric`. If that has a "loss" too, it is not computed twice."""
        judge = self.script.get("metric")
        if judge is None:
            return {"loss": self.loss(model, batch)}
        found = judge(model, _moved(model, batch))
        means = dict(found) if isinstance(found, Mapping) else {self.metric: found}
        if self.metric not in means:
            raise SpecError(
                f"{self.script.shown}: metric(model, batch) returns {sorted(map(str, means))} and not {self.metric!r}; "
                f"give it, or name another one with METRIC"
            )
        numbers = {str(key): self._number(str(key), value) for key, value in means.items()}
        return numbers if "loss" in numbers else {"loss": self.loss(model, batch), **numbers}

    def optimizer(self, model: nn.Module, learning_rate: float | None = None) -> torch.optim.Optimizer:
        """The script's own, or SGD with momentum 0.9."""
        make = self.script.get("optimizer")
        if make is None:
            return super().optimizer(model, learning_rate)
        with self.script.errors_at("optimizer(model, learning_rate)"):
            made = make(model, self.defaults.learning_rate if learning_rate is None else learning_rate)
        if not isinstance(made, torch.optim.Optimizer):
            raise SpecError(
                f"{self.script.shown}: optimizer(model, learning_rate) returns {type(made).__name__}, not an "
                "optimizer; return one of torch.optim"
            )
        return made

    def describe(self) -> dict[str, Any]:
        """Adds the SHA-256 of the script."""
        return {**super().describe(), "script_sha256": self.script.sha256}

    def check(self) -> None:
        """Try the script on two samples, so that errors are raised before a worker starts."""
        _try_script(self)

    def _number(self, key: str, value: Any) -> Tensor:
        given = value if isinstance(value, Tensor) else None
        if given is None and isinstance(value, (int, float, np.number)):
            given = torch.tensor(float(value), dtype=torch.float64)
        if given is None or given.numel() != 1 or given.is_complex():
            raise SpecError(
                f"{self.script.shown}: metric(model, batch) returns {value!r} for {key!r}, not a number; "
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
            batch=32 if given["BATCH"] is None else check_whole(shown, "BATCH", given["BATCH"], 1, MAX_COUNT),
            epochs=10 if given["EPOCHS"] is None else check_whole(shown, "EPOCHS", given["EPOCHS"], 1, MAX_COUNT),
            learning_rate=float(rate),
            optimizer="sgd" if script.get("optimizer") is None else SCRIPT_OPTIMIZER,
            momentum=0.9 if script.get("optimizer") is None else 0.0,
            target=None if given["TARGET"] is None else self.check_target(given["TARGET"]),
        )


def _judged(script: ScriptFile) -> dict[str, Any]:
    """The metric, its direction and its range."""
    shown, own = script.shown, script.get("metric") is not None
    name = script.get("METRIC") or ("metric" if own else "loss")
    if not isinstance(name, str) or not name.isidentifier():
        raise SpecError(f"{shown}: METRIC is a name such as 'accuracy' (METRIC: {name!r})")
    if not own and name != "loss":
        raise SpecError(f"{shown}: METRIC is {name!r} and there is no metric(model, batch) that returns it; write one")
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


NAMES = ("train", "validation", "test")
RETURN = "return train, validation, test"


def as_splits(shown: str, found: Any) -> Splits:
    """Make splits of the result of `data()`.

    >>> pairs = [(torch.rand(n, 2), torch.zeros(n)) for n in (6, 2, 2)]
    >>> as_splits("workload.py", pairs).sizes()
    {'train': 6, 'validation': 2, 'test': 2}
    """
    if not isinstance(found, (tuple, list)) or len(found) != len(NAMES):
        count = f"{len(found)} of them" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
        raise SpecError(f"{shown}: data() returns three splits, not {count}; end it with {RETURN}")
    named = dict(zip(NAMES, found, strict=True))
    for first, second in combinations(NAMES, 2):
        if named[first] is named[second]:
            raise SpecError(_not_apart(shown, first, second, "are one object"))
    splits = {name: _as_dataset(shown, name, given) for name, given in named.items()}
    for first, second in combinations(NAMES, 2):
        why = _overlap(splits[first], splits[second])
        if why:
            raise SpecError(_not_apart(shown, first, second, why))
    return Splits(**splits)


def _as_dataset(shown: str, name: str, given: Any) -> Dataset[Batch]:
    split: Any = given
    if isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(a, (Tensor, np.ndarray)) for a in given):
        inputs, targets = (torch.as_tensor(part) for part in given)
        lengths = [len(part) if part.ndim else 0 for part in (inputs, targets)]
        if lengths[0] != lengths[1]:
            raise SpecError(
                f"{shown}: the {name} split of data() has {lengths[0]} inputs and {lengths[1]} targets; "
                "give as many of one as of the other"
            )
        split = Pairs(inputs, targets)
    if hasattr(given, "batch_sampler"):
        raise SpecError(f"{shown}: the {name} split of data() is a loader; give its dataset, batches are made of it")
    try:
        size = len(split) if hasattr(split, "__getitem__") else None
    except TypeError:  # an iterable dataset has no length
        size = None
    if size is None or isinstance(split, (Mapping, str, bytes, Tensor, np.ndarray)):
        raise SpecError(
            f"{shown}: the {name} split of data() is a {type(given).__name__}; give a dataset with len() and [index], "
            "or a pair of tensors (inputs, targets)"
        )
    if not size:
        raise SpecError(f"{shown}: the {name} split of data() is empty; give it at least one sample")
    return cast(Dataset[Batch], split)


def _not_apart(shown: str, first: str, second: str, why: str) -> str:
    return (
        f"{shown}: the splits {first} and {second} of data() {why}; keep them apart, or the result says nothing "
        "about samples that were not seen"
    )


def _overlap(first: Any, second: Any) -> str:
    """How two splits overlap, as far as it is known without reading them; empty if they do not."""
    if isinstance(first, Subset) and isinstance(second, Subset) and first.dataset is second.dataset:
        common = len(set(first.indices) & set(second.indices))
        return f"have {common} samples in common" if common else ""
    ours, theirs = sample_tensors(first)[:1], sample_tensors(second)[:1]
    for a, b in zip(ours, theirs, strict=False):
        if a.shape == b.shape and torch.equal(a, b):
            return f"have the same {len(a)} inputs"
        if a.device == b.device and a.is_contiguous() and b.is_contiguous():
            begin, end = max(a.data_ptr(), b.data_ptr()), min(a.data_ptr() + a.nbytes, b.data_ptr() + b.nbytes)
            if begin < end:
                return f"have {max(1, (end - begin) * len(a) // a.nbytes)} inputs in common"
    return ""


LOSS = "loss(model, batch)"
METRIC = "metric(model, batch)"

logger = logging.getLogger("syncline")


def _try_script(workload: ScriptWorkload) -> None:
    """Try model, data, a step and an evaluation. The generators keep their states."""
    script = workload.script
    for phrase in script.unused_names():
        logger.warning("%s: %s", script.shown, phrase)
    with seeded(0):
        model = workload.model(0)
        _check_seed(script, model, workload.model(0))
        splits = workload.splits()
        first = {name: _two_samples(script, name, split) for name, split in vars(splits).items()}
        _try_optimizer(workload, model)
        _try_loss(workload, model, first["train"])
        for name in ("validation", "test"):
            _try_metric(workload, model, first[name])


def _check_seed(script: ScriptFile, model: nn.Module, again: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=False):
        if not torch.equal(one, other):
            raise SpecError(
                f"{script.shown}: model() returns another {name} each time; draw from torch's, NumPy's or random's own "
                "generators, which are seeded before it is called"
            )


def _two_samples(script: ScriptFile, name: str, split: Dataset[Batch]) -> Batch:
    """The first two samples, or the only one, as a batch."""
    where = f"{script.shown}: a sample of the {name} split"
    size: int = len(split)  # type: ignore[arg-type]
    with script.errors_at(f"reading the {name} split"):
        samples: list[Any] = [split[index] for index in range(min(2, size))]
    if not all(isinstance(sample, (tuple, list)) and len(sample) == 2 for sample in samples):
        raise SpecError(f"{where} is {_kind(samples[0])}; give pairs of input and target")
    with script.errors_at(f"putting samples of the {name} split into a batch"):
        inputs, targets = default_collate(samples)
    for part, it in (("input", inputs), ("target", targets)):
        if not isinstance(it, Tensor):
            raise SpecError(f"{where} has a {type(it).__name__} for its {part}; give tensors or numbers")
    return inputs, targets


def _try_optimizer(workload: ScriptWorkload, model: nn.Module) -> None:
    where = f"{workload.script.shown}: optimizer(model, learning_rate)"
    usual = workload.defaults.learning_rate
    rates = []
    for rate in (usual, usual / 2):
        optimizer = workload.optimizer(model, rate)
        rates.append([group.get("lr") for group in optimizer.param_groups])
    if rates[0] == rates[1]:
        raise SpecError(f"{where} has the rates {rates[0]} whatever learning_rate is; pass it on as lr=learning_rate")
    ours = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
        raise SpecError(f"{where} trains no parameter of the model that it is given; give it model.parameters()")


def _try_loss(workload: ScriptWorkload, model: nn.Module, batch: Batch) -> None:
    script = workload.script
    where = f"{script.shown}: {LOSS}"
    model.train()
    with script.errors_at(LOSS):
        loss: Any = workload.loss(model, batch)
    if not isinstance(loss, Tensor) or loss.shape != ():
        raise SpecError(f"{where} returns {_kind(loss)}, not one number; give the mean over the batch, a scalar tensor")
    if not math.isfinite(float(loss.detach())):
        raise SpecError(f"{where} is {float(loss.detach())} on the first samples; look at the data and the loss")
    if not loss.requires_grad:
        raise SpecError(
            f"{where} is not differentiable: nothing leads back to the model's parameters; leave out .item(), "
            ".detach(), argmax and no_grad"
        )
    with script.errors_at(f"backward() of {LOSS}"):
        loss.backward()  # type: ignore[no-untyped-call]
    grown = {name: it.grad for name, it in model.named_parameters() if it.grad is not None}
    if not grown:
        raise SpecError(f"{where} gives no parameter of the model a gradient; compute it from model(inputs)")
    wrong = [name for name, grad in grown.items() if not bool(torch.isfinite(grad.to_dense()).all())]
    if wrong:
        raise SpecError(f"{where} gives {wrong[0]} a gradient with NaN or Inf on the first samples; look at the loss")
    _check_mean(workload, model, batch)
    if script.get("output_loss") is not None:
        _check_output_loss(workload, model, batch)


def _check_output_loss(workload: ScriptWorkload, model: nn.Module, batch: Batch) -> None:
    """Refuse an `output_loss` that is another function than the loss."""
    inputs, targets = _moved(model, batch)
    with evaluating(model), torch.no_grad(), workload.script.errors_at("output_loss(model(inputs), targets)"):
        whole, parts = float(workload.loss(model, batch)), float(workload.output_loss(model(inputs), targets))
    if not math.isclose(whole, parts, rel_tol=1e-4, abs_tol=1e-6):
        raise SpecError(
            f"{workload.script.shown}: output_loss(model(inputs), targets) is {parts:.6g}, and {LOSS} is {whole:.6g}: "
            "they must be the same function"
        )


def _check_mean(workload: ScriptWorkload, model: nn.Module, batch: Batch) -> None:
    """Refuse the sum over a batch: its gradients grow with the batch, so that comparisons are wrong."""
    inputs, targets = batch
    if len(inputs) < 2:
        return
    try:
        with evaluating(model), torch.no_grad():
            whole = float(workload.loss(model, batch))
            one, other = (float(workload.loss(model, (inputs[i : i + 1], targets[i : i + 1]))) for i in range(2))
    except Exception:  # a loss that needs more than one sample cannot be checked
        return
    total = one + other
    if math.isclose(whole, total, rel_tol=1e-5) and not math.isclose(whole, total / 2, rel_tol=1e-3):
        shown = workload.script.shown
        raise SpecError(
            f"{shown}: {LOSS} is the sum over the batch ({one:.4g} + {other:.4g} = {whole:.4g}); give the mean"
        )


def _try_metric(workload: ScriptWorkload, model: nn.Module, batch: Batch) -> None:
    script = workload.script
    which = METRIC if script.get("metric") else LOSS
    with evaluating(model), torch.no_grad(), script.errors_at(which):
        found: Any = workload.measures(model, batch)
    value = float(found[workload.metric])
    low, high = workload.metric_range
    if not math.isfinite(value) or not low <= value <= high:
        raise SpecError(
            f"{script.shown}: {workload.metric} by {which} is {value:g} on the first samples, not from {low:g} to "
            f"{high:g}; fix it, or set METRIC_RANGE"
        )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
