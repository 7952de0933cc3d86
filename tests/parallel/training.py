"""The same training without a pipeline and in one, for every model of `models.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import syncline as sl
from syncline.data.partition import mix_seeds
from syncline.parallel.stage_runner import stream_seed
from syncline.world import World
from tests.parallel.models import MODELS, ModelCase, loss_of

SCHEDULES = ("gpipe", "1f1b", "interleaved(chunks=2)", "zero_bubble", "zbv")
CPU = torch.device("cpu")
MICRO_BATCHES = 4
MAX_NORM = 0.05
"""Below the norm of every gradient of the models."""


@dataclass(frozen=True)
class Training:
    """What a training computes: a loss for each batch, predictions after each update, and the state at the end."""

    losses: list[float]
    predictions: list[Tensor]
    state: dict[str, Tensor]


def batch_sizes(case: ModelCase) -> tuple[tuple[int, ...], ...]:
    """The samples of the batches of each update.

    17 are no multiple of 4 micro-batches. `fewest` make one micro-batch, fewer than there are ranks. The last update
    accumulates two batches and is clipped.
    """
    return (17,), (case.fewest,), (16,), (9, 4)


def make(case: ModelCase, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model with its first weights, and its optimizer."""
    model = case.model().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch_on(device: torch.device, case: ModelCase, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """A batch on a device."""
    x, y = case.batch(samples, seed)
    return x.to(device), y.to(device)


def has_stages(schedule: str, ranks: int) -> int:
    """The number of stages that the tests use with a schedule."""
    return ranks * (2 if schedule.startswith(("interleaved", "zbv")) else 1)


def train_in_pipeline(world: World, name: str, schedule: str, **options: Any) -> Training:
    """Train with the stages on all ranks, with an evaluation after each update."""
    case, device = MODELS[name], world.device
    model, optimizer = make(case, device)
    cuts = case.cuts_into(has_stages(schedule, world.size))
    run = sl.pipeline(model, optimizer, loss_of, stages=cuts, schedule=schedule, microbatches=MICRO_BATCHES, **options)
    losses, predictions = [], []
    for number, sizes in enumerate(batch_sizes(case)):
        batches = [batch_on(device, case, size, 10 * number + place) for place, size in enumerate(sizes)]
        if len(batches) == 1:
            losses.append(run.step(*batches[0]).item())
        else:
            losses += [run.backward(*batch).item() for batch in batches]
            assert run.clip_grad_norm_(MAX_NORM) > MAX_NORM
            run.update()
        model.eval()
        predictions.append(run.predict(batch_on(device, case, 5, 99)[0]))
        model.train()
    run.close()
    return Training(losses, predictions, {key: each.detach().clone() for key, each in model.state_dict().items()})


@functools.cache
def train_alone(name: str, stages: int = 1, device: torch.device = CPU) -> Training:
    """Train the whole model.

    Dropout and batch norm depend on the micro-batches, so these are computed one by one, each weighted by its samples.
    The others see whole batches. `stages` says where dropout begins a new stream of random numbers.
    """
    case = MODELS[name]
    model, optimizer = make(case, device)
    losses, predictions = [], []
    for number, sizes in enumerate(batch_sizes(case)):
        optimizer.zero_grad()
        for place, size in enumerate(sizes):
            x, y = batch_on(device, case, size, 10 * number + place)
            with _streams(model, case.cuts_into(stages), step=number + place) as begin, _whole_statistics(model):
                loss = _add_gradients(model, x, y, _micro_batches(name, size), begin)
            losses.append(loss)
        if len(sizes) > 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            predictions.append(model(batch_on(device, case, 5, 99)[0]))
        model.train()
    return Training(losses, predictions, {key: each.detach().clone() for key, each in model.state_dict().items()})


def _micro_batches(name: str, samples: int) -> list[int]:
    """The sizes of the parts that are computed one by one. With batch norm each has two samples or more."""
    if name not in ("dropout", "batch norm"):
        return [samples]
    count = min(MICRO_BATCHES, max(1, samples // 2) if name == "batch norm" else samples)
    return [samples // count + (place < samples % count) for place in range(count)]


def _add_gradients(model: nn.Module, x: Tensor, y: Tensor, sizes: list[int], begin: Callable[[int], None]) -> float:
    """Add the gradients of the mean loss of a batch. Returns the loss."""
    total = 0.0
    for number, (inputs, labels) in enumerate(zip(torch.split(x, sizes), torch.split(y, sizes), strict=True)):
        begin(number)
        loss = loss_of(model(inputs), labels) * (len(labels) / len(y))
        torch.autograd.backward(loss)
        total += loss.item()
    return total


@contextmanager
def _streams(model: nn.Module, cuts: Sequence[str], step: int) -> Iterator[Callable[[int], None]]:
    """Each forward of a stage draws from a stream of its own, made of the seed, the step, the stage and the number."""
    number = 0
    step_seed = stream_seed(mix_seeds(0, 0), 0, step)  # of the run's seed and of the first pipeline

    def begin_stage(stage: int) -> None:
        torch.manual_seed(stream_seed(step_seed, stage, number))

    def begin_micro_batch(place: int) -> None:
        nonlocal number
        number = place
        begin_stage(0)

    hooks = [
        model.get_submodule(cut).register_forward_pre_hook(lambda module, args, stage=stage: begin_stage(stage))
        for stage, cut in enumerate(cuts, 1)
    ]
    yield begin_micro_batch
    for hook in hooks:
        hook.remove()


@contextmanager
def _whole_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norms take the statistics of everything that they see inside, once and at the end."""
    layers = [each for each in model.modules() if isinstance(each, nn.BatchNorm1d)]
    seen: list[list[Tensor]] = [[] for _ in layers]
    hooks = [
        layer.register_forward_pre_hook(lambda module, args, parts=parts: parts.append(args[0].detach()))
        for layer, parts in zip(layers, seen, strict=True)
    ]
    before = [int(layer.num_batches_tracked or 0) for layer in layers]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 0.0  # micro-batches change nothing
    yield
    for layer, parts, momentum, count in zip(layers, seen, momenta, before, strict=True):
        layer.momentum = momentum
        whole = torch.cat(parts)
        layer.get_buffer("running_mean").lerp_(whole.mean(0), momentum or 0.0)
        layer.get_buffer("running_var").lerp_(whole.var(0), momentum or 0.0)
        layer.get_buffer("num_batches_tracked").fill_(count + 1)
    for hook in hooks:
        hook.remove()


def compare(found: Training, expected: Training) -> None:
    """Losses are float32, weights float64."""
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=1e-6, atol=0.0)
    assert list(found.state) == list(expected.state)
    for one, other in zip(found.predictions, expected.predictions, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    for name, value in expected.state.items():
        torch.testing.assert_close(found.state[name], value, rtol=1e-9, atol=1e-12)
