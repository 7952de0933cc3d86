"""A script's parts tried on two samples, so that a mistake is told before a worker is started."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from syncline.bench.workloads.script_file import ScriptFile, randomness
from syncline.errors import SpecError
from syncline.training.workload import Batch, Workload, evaluating

__all__ = ["try_out"]

LOSS = "loss(model, batch)"
METRIC = "metric(model, batch)"

logger = logging.getLogger("syncline")


def try_out(workload: Workload, script: ScriptFile) -> None:
    """Model, data, a step and an evaluation; the generators are afterwards as they were."""
    for phrase in script.unread():
        logger.warning("%s: %s", script.shown, phrase)
    with randomness(0):
        model = workload.model(0)
        _check_seed(script, model, workload.model(0))
        splits = workload.splits()
        first = {name: _two_samples(script, name, split) for name, split in vars(splits).items()}
        _try_optimizer(workload, script, model)
        _try_loss(workload, script, model, first["train"])
        for name in ("validation", "test"):
            _try_metric(workload, script, model, first[name])


def _check_seed(script: ScriptFile, model: nn.Module, again: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=False):
        if not torch.equal(one, other):
            raise SpecError(
                f"{script.shown}: model() gives another {name} each time; draw from torch's, NumPy's or random's own "
                "generators, which are seeded before it is called"
            )


def _two_samples(script: ScriptFile, name: str, split: Dataset[Batch]) -> Batch:
    """The first two, or the only one, as a batch."""
    where = f"{script.shown}: a sample of the {name} split"
    size: int = len(split)  # type: ignore[arg-type]
    with script.telling(f"reading the {name} split"):
        samples: list[Any] = [split[index] for index in range(min(2, size))]
    if not all(isinstance(sample, (tuple, list)) and len(sample) == 2 for sample in samples):
        raise SpecError(f"{where} is {_kind(samples[0])}; give pairs of input and target")
    with script.telling(f"putting samples of the {name} split into a batch"):
        inputs, targets = default_collate(samples)
    for part, it in (("input", inputs), ("target", targets)):
        if not isinstance(it, Tensor):
            raise SpecError(f"{where} has a {type(it).__name__} for its {part}; give tensors or numbers")
    return inputs, targets


def _try_optimizer(workload: Workload, script: ScriptFile, model: nn.Module) -> None:
    usual = workload.defaults.learning_rate
    rates = []
    for rate in (usual, usual / 2):
        optimizer = workload.optimizer(model, rate)
        rates.append([group.get("lr") for group in optimizer.param_groups])
    if rates[0] == rates[1]:
        raise SpecError(
            f"{script.shown}: optimizer(model, learning_rate) has the rates {rates[0]} whatever learning_rate is; "
            "pass it on as lr=learning_rate"
        )
    ours = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
        raise SpecError(
            f"{script.shown}: optimizer(model, learning_rate) trains no parameter of the model that it is given; "
            "give it model.parameters()"
        )


def _try_loss(workload: Workload, script: ScriptFile, model: nn.Module, batch: Batch) -> None:
    model.train()
    with script.telling(LOSS):
        loss: Any = workload.loss(model, batch)
    where = f"{script.shown}: {LOSS}"
    if not isinstance(loss, Tensor) or loss.shape != ():
        raise SpecError(f"{where} gives {_kind(loss)}, not one number; give the mean over the batch, a scalar tensor")
    if not math.isfinite(float(loss.detach())):
        raise SpecError(f"{where} is {float(loss.detach())} on the first samples; look at the data and the loss")
    if not loss.requires_grad:
        raise SpecError(
            f"{where} is not differentiable: nothing leads back to the model's parameters; leave out .item(), "
            ".detach(), argmax and no_grad"
        )
    with script.telling(f"backward() of {LOSS}"):
        loss.backward()  # type: ignore[no-untyped-call]
    grown = {name: it.grad for name, it in model.named_parameters() if it.grad is not None}
    if not grown:
        raise SpecError(f"{where} gives no parameter of the model a gradient; compute it from model(inputs)")
    wrong = [name for name, grad in grown.items() if not bool(torch.isfinite(grad.to_dense()).all())]
    if wrong:
        raise SpecError(f"{where} gives {wrong[0]} a gradient with NaN or Inf on the first samples; look at the loss")
    _check_mean(workload, script, model, batch)


def _check_mean(workload: Workload, script: ScriptFile, model: nn.Module, batch: Batch) -> None:
    """Refuse the sum over a batch: its gradients would grow with the batch, and so would every comparison be wrong."""
    inputs, targets = batch
    if len(inputs) < 2:
        return
    try:
        with evaluating(model), torch.no_grad():
            whole = float(workload.loss(model, batch))
            one, other = (float(workload.loss(model, (inputs[i : i + 1], targets[i : i + 1]))) for i in range(2))
    except Exception:  # a loss that needs more than one sample says nothing here
        return
    total = one + other
    if math.isclose(whole, total, rel_tol=1e-5) and not math.isclose(whole, total / 2, rel_tol=1e-3):
        raise SpecError(
            f"{script.shown}: {LOSS} is the sum over the batch ({one:.4g} + {other:.4g} = {whole:.4g}); give the mean"
        )


def _try_metric(workload: Workload, script: ScriptFile, model: nn.Module, batch: Batch) -> None:
    with evaluating(model), torch.no_grad(), script.telling(METRIC if script.get("metric") else LOSS):
        found: Any = workload.measures(model, batch)
    value = float(found[workload.metric])
    low, high = workload.metric_range
    if not math.isfinite(value) or not low <= value <= high:
        which = METRIC if script.get("metric") else LOSS
        raise SpecError(
            f"{script.shown}: {workload.metric} by {which} is {value:g} on the first samples, not from {low:g} to "
            f"{high:g}; mend it, or say METRIC_RANGE"
        )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
