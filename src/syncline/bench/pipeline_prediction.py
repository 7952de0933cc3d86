"""What `syncline bench pipeline` expects of a schedule: the profile of the model, played on the measured network.

The profile is measured by all ranks at the same time, as in training, with the batch of a micro-batch and with that
of a worker of data parallelism; its times are means over the ranks. The step ends when the slowest worker has done
three things one after the other::

    worker   │ actions, as `play` predicts them │ all-reduce among replicas │ optimizer │
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from syncline.costs import predict_fastest
from syncline.parallel.boundary import HEADER_BYTES
from syncline.parallel.partition import LayerCost, ModelProfile, StagePartition
from syncline.parallel.placement import PipelinePlacement
from syncline.parallel.player import PipelineTimeline, StageCost, TimedAction, play
from syncline.parallel.profile import profile_model
from syncline.parallel.schedules import Action
from syncline.parallel.splitting import layer_names
from syncline.reduction import BUCKET_BYTES
from syncline.transports import Network

__all__ = [
    "PipelineCosts",
    "PipelinePrediction",
    "measure_costs",
    "predict_data_parallel",
    "predict_one_process",
    "predict_pipeline",
    "predict_reduced_backward",
]

WARM_UP, REPEATS = 2, 7
"""Steps of a measurement of the whole model. The first step creates the gradients, or the state of the optimizer."""
STEADY_STEPS = 2
"""Steps after which a pipeline that is never emptied repeats itself."""


@dataclass(frozen=True)
class PipelineCosts:
    """The measured times of a model."""

    profile: ModelProfile
    """For a batch of the size of a micro-batch. Its backward is scaled to one that adds to gradients that exist."""
    input_s: tuple[float, ...]
    """Seconds of backward of each layer, without the gradients of weights. Empty if no schedule needs it."""
    accumulate_s: float
    """Seconds to add gradients to those of an earlier micro-batch, for the whole model. The profile has none."""
    update_s: float
    """Seconds of the optimizer's step for the whole model."""

    @staticmethod
    def mean(several: Sequence[dict[str, Any]]) -> PipelineCosts:
        """The mean of those of several ranks, each as `asdict` gives it."""
        first = several[0]
        layers = [_mean([rank["profile"]["layers"][place] for rank in several]) for place in range(_count(first))]
        inputs = [rank["input_s"] for rank in several]
        return PipelineCosts(
            ModelProfile(
                layers=tuple(LayerCost(**layer) for layer in layers),
                batch_size=first["profile"]["batch_size"],
                edges=_edges(first["profile"]["edges"]),
                measured_batch_sizes=tuple(first["profile"]["measured_batch_sizes"]),
                model=first["profile"]["model"],
                machine=first["profile"]["machine"],
            ),
            tuple(float(each) for each in np.mean(inputs, axis=0)) if first["input_s"] else (),
            float(np.mean([rank["accumulate_s"] for rank in several])),
            float(np.mean([rank["update_s"] for rank in several])),
        )


def _count(costs: dict[str, Any]) -> int:
    return len(costs["profile"]["layers"])


def _edges(edges: Any) -> tuple[tuple[str, str], ...] | None:
    return None if edges is None else tuple((str(source), str(target)) for source, target in edges)


def _mean(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A layer whose times are the means of several, and whose other values are those of the first."""
    found = dict(layers[0])
    for key in ("forward_s", "forward_fixed_s", "backward_s", "backward_fixed_s"):
        found[key] = float(np.mean([layer[key] for layer in layers]))
    return found


def measure_costs(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Any, Any], Tensor],
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    *,
    micro_batch: int,
    share: int,
    splits: bool,
) -> PipelineCosts:
    """Profile a model for batches of `micro_batch` and of `share` samples. The model is trained for a few steps.

    `splits`: measure the two halves of backward too.
    """
    x, y = (each[:micro_batch] for each in batch)
    sizes = (micro_batch, share) if share != micro_batch else (micro_batch, 2 * micro_batch)
    names = layer_names(model)
    profile = profile_model(model, x, loss_fn, targets=y, names=names, batch_sizes=sizes)
    inputs: tuple[float, ...] = ()
    if splits:
        with _only_inputs(model, names):
            found = profile_model(model, x, loss_fn, targets=y, names=names, batch_sizes=sizes)
        inputs = tuple(layer.backward_s for layer in found.layers)
    accumulate_s, update_s = _update_seconds(model, make_optimizer)
    whole_s = _backward_seconds(model, x, y, loss_fn) - accumulate_s
    factor = max(0.0, whole_s) / sum(layer.backward_s for layer in profile.layers)
    layers = [
        replace(layer, backward_s=factor * layer.backward_s, backward_fixed_s=factor * layer.backward_fixed_s)
        for layer in profile.layers
    ]
    return PipelineCosts(replace(profile, layers=tuple(layers)), inputs, accumulate_s, update_s)


def _backward_seconds(model: nn.Module, x: Tensor, y: Tensor, loss_fn: Callable[[Any, Any], Tensor]) -> float:
    """The median time of backward if it adds to gradients that exist, as after the first micro-batch.

    The profile asks for new gradients of all parameters at once. Their memory alone may take a third of its time.
    """
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        loss = loss_fn(model(x), y)
        start = time.perf_counter()
        torch.autograd.backward(loss)
        seconds.append(time.perf_counter() - start)
    model.zero_grad()
    return float(np.median(seconds[WARM_UP:]))


@contextmanager
def _only_inputs(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Inside, backward computes gradients down to the first layer, and of its weights only."""
    frozen = [each for each in model.parameters() if each.requires_grad]
    first = next((list(model.get_submodule(name).parameters()) for name in names if _trains(model, name)), [])
    for each in frozen:
        each.requires_grad_(any(each is own for own in first))
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_()


def _trains(model: nn.Module, name: str) -> bool:
    return any(each.requires_grad for each in model.get_submodule(name).parameters())


def _update_seconds(
    model: nn.Module, make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
) -> tuple[float, float]:
    """The median times to add gradients, and of the optimizer's step with the release of the gradients."""
    optimizer = make_optimizer(list(model.parameters()))
    more = [torch.zeros_like(each) for each in model.parameters()]
    adding, updating = [], []
    for _ in range(WARM_UP + REPEATS):
        gradients = [torch.zeros_like(each) for each in more]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        start = time.perf_counter()
        for gradient, other in zip(gradients, more, strict=True):
            gradient += other
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        adding.append(middle - start)
        updating.append(time.perf_counter() - middle)
    return float(np.median(adding[WARM_UP:])), float(np.median(updating[WARM_UP:]))


@dataclass(frozen=True)
class PipelinePrediction:
    """What a step of a schedule takes. Lists have one number for each worker."""

    step_s: float
    pipeline_s: float
    """From the start of the first action to the end of the last one."""
    bubble: float
    peak_activations: tuple[int, ...]
    stages: tuple[StageCost, ...]
    """The costs of one micro-batch."""
    update_s: tuple[float, ...]
    """Seconds of the optimizer's step of each worker."""
    actions: tuple[TimedAction, ...]
    """Those of one step, by worker."""


def predict_pipeline(
    costs: PipelineCosts, placement: PipelinePlacement, partition: StagePartition, micro_batches: int, network: Network
) -> PipelinePrediction:
    """Play a step. `micro_batches` are those of one worker of the first stage."""
    schedule = placement.schedule
    stages = [_stage(costs, partition, number, placement, micro_batches) for number in range(partition.stages)]
    bounds = [placement.stages_of(rank) for rank in range(placement.ranks)]
    weights = [sum(_parameter_bytes(costs, partition, stage) for stage in own) for own in bounds]
    total = sum(layer.parameter_bytes for layer in costs.profile.layers)
    update = [costs.update_s * each / total for each in weights]
    reduce = [
        predict_fastest(count, int(each), network) for each, count in zip(weights, placement.replicas, strict=True)
    ]
    after = [one + other for one, other in zip(update, reduce, strict=True)]
    if not schedule.flushes:  # an update follows each backward
        stages = [replace(cost, weight_s=cost.weight_s + after[rank]) for rank, cost in enumerate(stages)]
    timeline, first_s, last_s = _one_step(placement, stages, micro_batches, network)
    ranks = [rank for rank, _ in timeline.workers]
    rows = [[each for each in row if first_s <= each.start_s < last_s] for row in timeline.rows]
    ends = [
        row[-1].end_s + (after[rank] if schedule.flushes else 0.0) - first_s
        for rank, row in zip(ranks, rows, strict=True)
    ]
    step_s = max(ends) if schedule.flushes else last_s - first_s
    spans = [row[-1].end_s - row[0].start_s for row in rows]
    busy = [sum(each.end_s - each.start_s for each in row) for row in rows]
    numbers = {rank: number for number, rank in enumerate(ranks)}
    places = [placement.position(worker) for worker in range(placement.workers)]
    order = list(range(len(ranks))) if placement.unequal else [numbers[rank] for rank, _ in places]
    return PipelinePrediction(
        step_s=step_s,
        pipeline_s=max(row[-1].end_s for row in rows) - first_s,
        bubble=max(0.0, max(spans) - max(busy)) / max(spans),
        peak_activations=tuple(timeline.peak_activations[number] for number in order),
        stages=tuple(stages),
        update_s=tuple(update[rank] for rank, _ in places),
        actions=tuple(
            TimedAction(worker, each.action, each.start_s - first_s, each.end_s - first_s)
            for worker, number in enumerate(order)
            for each in rows[number]
        ),
    )


def predict_one_process(costs: PipelineCosts, batch: int) -> float:
    """Seconds of a step that one process computes alone."""
    layers = costs.profile.at_batch(batch).layers
    return sum(layer.forward_s + layer.backward_s for layer in layers) + costs.update_s


def predict_data_parallel(costs: PipelineCosts, workers: int, share: int, network: Network) -> float:
    """Seconds of a step of data parallelism with `share` samples a worker.

    A bucket is reduced when backward has its gradients and the bucket before is reduced.
    """
    layers = costs.profile.at_batch(share).layers
    forward_s = sum(layer.forward_s for layer in layers)
    return predict_reduced_backward(layers, forward_s, workers, network) + costs.update_s


def predict_reduced_backward(layers: Sequence[LayerCost], start_s: float, workers: int, network: Network) -> float:
    """When the gradients of layers are reduced over the workers, if their backward begins at `start_s`."""
    now = reduced = start_s
    waiting = 0.0
    for place, layer in reversed(list(enumerate(layers))):
        now += layer.backward_s
        waiting += layer.parameter_bytes
        if waiting >= BUCKET_BYTES or place == 0:
            reduced, waiting = max(now, reduced) + predict_fastest(workers, int(waiting), network), 0.0
    return max(now, reduced)


def _one_step(
    placement: PipelinePlacement, stages: Sequence[StageCost], micro_batches: int, network: Network
) -> tuple[PipelineTimeline, float, float]:
    """A timeline, and the time of a step in it: the whole, or a later one of a pipeline that is never emptied."""
    slowest = max(
        (network.link(worker, worker + 1) for worker in range(placement.workers - 1)),
        key=lambda link: link.seconds(1 << 20),
        default=network.link(0, 0),
    )

    def port_s(nbytes: int) -> float:
        return network.per_message + (nbytes + HEADER_BYTES) / slowest.bandwidth

    def transfer_s(nbytes: int) -> float:
        return slowest.latency + port_s(nbytes)

    flushes = placement.schedule.flushes
    count = micro_batches if flushes else micro_batches * (STEADY_STEPS + 2)
    timeline = play(placement.schedule, placement.setting(count), list(stages), transfer_s, port_s)
    if flushes:
        return timeline, 0.0, timeline.makespan_s + 1.0
    stride = placement.replicas[0] if placement.unequal else 1
    starts = [
        next(each.start_s for each in timeline.rows[0] if each.action == Action("F", 0, step * micro_batches * stride))
        for step in (STEADY_STEPS, STEADY_STEPS + 1)
    ]
    return timeline, starts[0], starts[1]


def _layers(costs: PipelineCosts, partition: StagePartition, stage: int) -> range:
    """The places of the layers of a stage."""
    bounds = [0, *map(costs.profile.place, partition.cuts), len(costs.profile.layers)]
    return range(bounds[stage], bounds[stage + 1])


def _parameter_bytes(costs: PipelineCosts, partition: StagePartition, stage: int) -> float:
    return sum(costs.profile.layers[place].parameter_bytes for place in _layers(costs, partition, stage))


def _stage(
    costs: PipelineCosts, partition: StagePartition, stage: int, placement: PipelinePlacement, micro_batches: int
) -> StageCost:
    """The cost of a stage. Stage 0 has no gradients of inputs to compute: all of its backward is W."""
    own, layers = _layers(costs, partition, stage), costs.profile.layers
    backward_s = sum(layers[place].backward_s for place in own)
    input_s = backward_s
    if placement.schedule.splits_backward:
        input_s = min(backward_s, sum(costs.input_s[place] for place in own)) if stage else 0.0
    crossing = {
        source
        for source, target in costs.profile.links()
        if costs.profile.place(source) in own and costs.profile.place(target) >= own.stop
    }
    share = _parameter_bytes(costs, partition, stage) / sum(layer.parameter_bytes for layer in layers)
    accumulated = (micro_batches - 1) / micro_batches if placement.schedule.flushes else 0.0  # not the first one
    return StageCost(
        forward_s=sum(layers[place].forward_s for place in own),
        input_s=input_s,
        weight_s=backward_s - input_s + costs.accumulate_s * share * accumulated,
        output_bytes=int(sum(layers[costs.profile.place(name)].activation_bytes for name in crossing)),
    )
