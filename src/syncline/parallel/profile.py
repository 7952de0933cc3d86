"""Measures what each layer of a model costs: time of forward and backward, bytes of its output and its parameters.

A layer's time lasts from its own beginning to that of the next layer, so code between two layers belongs to the first
of them, as in a model that is cut where a layer begins. Hooks take the time, and the layers' times are rescaled so that
their sum equals a step without hooks::

    forward     │ layer 0 │ layer 1 + code after it │ layer 2, loss │
    backward    │ layer 2, loss │ layer 1 │ layer 0 │

Autograd runs the functions of backward in the reverse of the order in which forward made them. So a layer's backward
begins with the last function that was made in its time, and the functions also show which layer uses which.

Each layer has time(b) = a + c·b for a batch of b samples, measured with two batch sizes.
"""

from __future__ import annotations

import random
import statistics
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from syncline.errors import SpecError
from syncline.parallel.partition.base import LayerCost, ModelProfile
from syncline.specs import nearest

__all__ = ["LayerClock", "TrainingStep", "layer_starts", "profile_model", "restoring_state", "tensors_in"]

WARM_UP_STEPS = 2
MIN_SAMPLES_TO_HALVE = 4
"""Samples from which the second batch size is the half; batch norm refuses some batches of one sample."""


def profile_model(
    model: nn.Module,
    inputs: Tensor | Sequence[Any],
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    targets: Any = None,
    loss_of: Callable[[nn.Module, Tensor, Any], Tensor] | None = None,
    names: Sequence[str] | None = None,
    batch_sizes: tuple[int, int] | None = None,
    repeats: int = 5,
) -> ModelProfile:
    """Run forward and backward of a model, and return what each layer costs. The model stays as it is.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> profile = profile_model(model, torch.randn(6, 8), repeats=1)
    >>> profile.names, profile.batch_size, profile.measured_batch_sizes
    (('0', '1', '2'), 6, (3, 6))
    >>> [layer.activation_bytes for layer in profile.layers], [layer.parameter_bytes for layer in profile.layers]
    ([384, 384, 96], [576, 0, 272])

    Args:
        inputs: the argument of the model, or a list or tuple of its arguments. The first dimension of each tensor is
            the batch.
        loss_fn: makes a number of the model's output, as `loss_fn(output)`, or `loss_fn(output, targets)` if there are
            targets. By default the sum of the output.
        targets: a tensor, or a list or tuple of tensors.
        loss_of: makes the loss of the model itself, as `loss_of(model, inputs, targets)`, in place of `loss_fn`.
        names: the layers, as names of modules that do not contain each other. By default the modules inside the model,
            with those inside `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict` in their place.
        batch_sizes: the two batch sizes. Larger batches than that of the inputs repeat their samples. By default the
            whole and the half.
        repeats: how often each is measured; the median counts.

    Raises:
        SpecError: if a layer is not called exactly once, or nothing is trained.
    """
    arguments = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    own = _batch_size(arguments)
    sizes = _check_batch_sizes(batch_sizes, own)
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise SpecError(f"repeats is {repeats!r}; it must be a whole number, at least 1")
    with restoring_state(model), torch.enable_grad():
        model.train()
        steps = {size: TrainingStep(model, arguments, targets, loss_fn, size, loss_of) for size in {own, *sizes}}
        layers = _called_layers(model, steps[sizes[0]], names)
        structure = _structure(steps[own], layers)
        times = {size: _measure(steps[size], layers, repeats) for size in sizes}
    return ModelProfile(
        layers=tuple(_layer_cost(name, place, structure, times, own) for place, name in enumerate(layers)),
        batch_size=own,
        edges=structure.edges(list(layers)),
        measured_batch_sizes=sizes,
        model=type(model).__name__,
        machine=_machine(steps[own].device),
    )


def _layer_cost(
    name: str, place: int, structure: _Structure, times: Mapping[int, _LayerTimes], batch_size: int
) -> LayerCost:
    forward_s, forward_fixed_s = _fit({size: each.forward_s[place] for size, each in times.items()}, batch_size)
    backward_s, backward_fixed_s = _fit({size: each.backward_s[place] for size, each in times.items()}, batch_size)
    return LayerCost(
        name=name,
        forward_s=forward_s,
        backward_s=backward_s,
        activation_bytes=structure.output_bytes[place],
        parameter_bytes=structure.parameter_bytes[place],
        saved_bytes=structure.saved_bytes[place],
        forward_fixed_s=forward_fixed_s,
        backward_fixed_s=backward_fixed_s,
    )


def _fit(seconds: Mapping[int, float], batch_size: int) -> tuple[float, float]:
    """The time of a batch by time(b) = a + c·b through two points, with a and c at least 0; and a."""
    (small, first), (large, second) = sorted(seconds.items())
    slope = max(0.0, (second - first) / (large - small))
    fixed = second - slope * large
    if fixed < 0:  # noise: the larger batch is measured more exactly
        slope, fixed = second / large, 0.0
    return fixed + slope * batch_size, fixed


class TrainingStep:
    """Forward, loss and backward with a batch of some size. Gradients are returned, and no parameter changes."""

    def __init__(
        self,
        model: nn.Module,
        arguments: tuple[Any, ...],
        targets: Any,
        loss_fn: Callable[..., Tensor] | None,
        batch_size: int,
        loss_of: Callable[..., Tensor] | None = None,
    ) -> None:
        self.model = model
        self._loss_of = loss_of
        self._arguments = _resized(arguments, batch_size)
        self._targets = _resized(targets, batch_size)
        self._loss_fn = loss_fn
        self._trained = [each for each in model.parameters() if each.requires_grad]
        if not self._trained:
            raise SpecError("no parameter of the model requires a gradient: there is nothing to train")
        self.device = self._trained[0].device

    @property
    def batch(self) -> tuple[Any, ...]:
        """The inputs and the targets."""
        return (*self._arguments, self._targets)

    def forward(self) -> Tensor:
        """The loss."""
        if self._loss_of is not None:
            loss = self._loss_of(self.model, *self._arguments, self._targets)
        else:
            loss = self._loss_from(self.model(*self._arguments))
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise SpecError(f"the loss is {what}; it must be one number that depends on the parameters")
        return loss

    def _loss_from(self, output: Any) -> Tensor:
        if self._loss_fn is None:
            parts = [each.float().sum() for each in tensors_in(output) if each.requires_grad]
            return sum(parts[1:], parts[0]) if parts else torch.zeros(())
        return self._loss_fn(output) if self._targets is None else self._loss_fn(output, self._targets)

    def backward(self, loss: Tensor) -> None:
        """The gradients of all parameters. Those that the parameters hold do not change."""
        torch.autograd.grad(loss, self._trained, allow_unused=True)

    def now(self) -> float:
        """The time when all that was started on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@dataclass
class LayerClock:
    """The time and the number of autograd functions at which each layer begins in one forward."""

    step: TrainingStep
    layers: Mapping[str, nn.Module]
    began: list[float] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch one forward. Calls during backward, which recompute, do not count."""
        with ExitStack() as hooks:
            for module in self.layers.values():
                handle = module.register_forward_pre_hook(self._begin)
                hooks.callback(handle.remove)
            yield

    def _begin(self, module: nn.Module, arguments: Any) -> None:
        self.functions.append(_next_function())
        self.began.append(self.step.now())

    @property
    def place(self) -> int:
        """The layer that runs now; what comes before the first one belongs to it."""
        return max(0, len(self.began) - 1)

    def place_of(self, function: Any) -> int:
        """The layer in whose time a function was made."""
        return max(0, bisect_right(self.functions, function._sequence_nr()) - 1)


@dataclass
class _Structure:
    """What does not depend on time, for each layer."""

    output_bytes: list[int]
    saved_bytes: list[int]
    parameters: list[set[int]]
    """By id. A parameter that several layers use belongs to each."""
    links: set[tuple[int, int]]
    """The second layer uses what the first one has computed."""
    parameter_bytes: list[int] = field(default_factory=list)

    def edges(self, names: list[str]) -> tuple[tuple[str, str], ...] | None:
        """The links by name; None for a chain."""
        reached = {target for _, target in self.links}
        # Without gradients there are no functions to follow, as in frozen layers: each uses the one before it.
        followed = self.links | {(place - 1, place) for place in range(1, len(names)) if place not in reached}
        if followed == {(place - 1, place) for place in range(1, len(names))}:
            return None
        return tuple((names[source], names[target]) for source, target in sorted(followed))


@dataclass(frozen=True)
class _LayerTimes:
    forward_s: list[float]
    backward_s: list[float]


def _structure(step: TrainingStep, layers: Mapping[str, nn.Module]) -> _Structure:
    """One forward with hooks on each layer and on each tensor that autograd saves."""
    count = len(layers)
    trained = {id(each): each for each in step.model.parameters() if each.requires_grad}
    own = [{id(each) for each in module.parameters()} & trained.keys() for module in layers.values()]
    found = _Structure([0] * count, [0] * count, own, set())
    clock = LayerClock(step, layers)
    seen = {each.untyped_storage().data_ptr() for each in (*step.model.parameters(), *step.model.buffers())}

    def measure_output(module: nn.Module, arguments: Any, output: Any) -> None:
        found.output_bytes[clock.place] = sum(each.nbytes for each in tensors_in(output))

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found.saved_bytes[clock.place] += storage.nbytes()
        return tensor.detach()  # keeps the memory, and so its address, but makes no cycle with the function

    with clock.running(), ExitStack() as hooks, saved_tensors_hooks(save, lambda tensor: tensor):
        for module in layers.values():
            hooks.callback(module.register_forward_hook(measure_output).remove)
        loss = step.forward()
    for function in _functions(loss):
        target = clock.place_of(function)
        for source, _ in function.next_functions:
            if source is None:
                continue
            if _accumulates(source):
                found.parameters[target] |= {id(source.variable)} & trained.keys()
            elif clock.place_of(source) < target:
                found.links.add((clock.place_of(source), target))
    found.parameter_bytes = [sum(trained[each].nbytes for each in used) for used in found.parameters]
    return found


def _measure(step: TrainingStep, layers: Mapping[str, nn.Module], repeats: int) -> _LayerTimes:
    """The median times of each layer, rescaled to the median step without hooks."""
    for _ in range(WARM_UP_STEPS):
        step.backward(step.forward())
    whole, parts = [], []
    for _ in range(repeats):
        begin = step.now()
        step.backward(step.forward())
        whole.append(step.now() - begin)
        parts.append(_timed_step(step, layers))
    medians = [statistics.median(each) for each in zip(*parts, strict=True)]
    scale = statistics.median(whole) / sum(medians)
    forward_s, backward_s = medians[: len(layers)], medians[len(layers) :]
    return _LayerTimes([each * scale for each in forward_s], [each * scale for each in backward_s])


def _timed_step(step: TrainingStep, layers: Mapping[str, nn.Module]) -> list[float]:
    """Seconds of forward of each layer, then of backward of each layer."""
    clock = LayerClock(step, layers)
    begin = step.now()
    with clock.running():
        loss = step.forward()
    middle = step.now()
    reached: dict[int, float] = {}
    with ExitStack() as hooks:
        for place, function in layer_starts(loss, clock).items():
            note = _Note(place, reached, step)
            hooks.callback(function.register_prehook(note).remove)
        backward = step.now()
        step.backward(loss)
        end = step.now()
    edges = [begin, *clock.began[1:], middle]
    forward_s = [after - before for before, after in pairwise(edges)]
    backward_s = [0.0] * len(layers)
    for place in sorted(reached):
        backward_s[place] = end - reached[place]
        end = reached[place]
    backward_s[max(reached)] += end - backward
    return [*forward_s, *backward_s]


def layer_starts(loss: Tensor, clock: LayerClock) -> dict[int, Any]:
    """The autograd function with which the backward of each layer begins: the last one that the layer made."""
    starts: dict[int, Any] = {}
    for function in _functions(loss):
        place = clock.place_of(function)
        if place not in starts or function._sequence_nr() > starts[place]._sequence_nr():
            starts[place] = function
    return starts


@dataclass(frozen=True)
class _Note:
    """A hook of an autograd function that notes when the function begins."""

    place: int
    reached: dict[int, float]
    step: TrainingStep

    def __call__(self, gradients: tuple[Tensor, ...]) -> None:
        self.reached.setdefault(self.place, self.step.now())


def _called_layers(model: nn.Module, step: TrainingStep, names: Sequence[str] | None) -> dict[str, nn.Module]:
    """The layers, in the order of execution; each is called exactly once."""
    candidates = _named_layers(model, names) if names is not None else dict(_default_layers(model, ""))
    calls: list[str] = []
    with ExitStack() as hooks:
        for name, module in candidates.items():
            hooks.callback(module.register_forward_pre_hook(_CallRecorder(name, calls)).remove)
        step.forward()
    counts = Counter(calls)
    if names is None:
        # Modules without parameters may be used several times. Their time counts for the layer before them.
        candidates = {
            name: module
            for name, module in candidates.items()
            if counts[name] == 1 or (counts[name] > 1 and any(True for _ in module.parameters()))
        }
    for name in candidates:
        if counts[name] != 1:
            often = "not called" if not counts[name] else f"called {counts[name]} times"
            raise SpecError(f"layer {name!r} is {often} in forward; name only modules that are called once")
    if not candidates:
        raise SpecError(f"{type(model).__name__} has no modules inside that can be layers: there is nothing to cut")
    return {name: candidates[name] for name in calls if name in candidates}


@dataclass(frozen=True)
class _CallRecorder:
    name: str
    calls: list[str]

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        self.calls.append(self.name)


def _default_layers(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules inside a model, and for containers those inside them."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or type(child).forward is nn.Sequential.forward:
            yield from _default_layers(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _named_layers(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules or not name:
            raise SpecError(f"names has {name!r}, which is no module of the model; {nearest(name, list(modules)[1:])}")
    inside = [(one, other) for one in names for other in names if one.startswith(f"{other}.")]
    if inside:
        raise SpecError(f"names has {inside[0][0]!r} and {inside[0][1]!r}, which contains it; remove one of them")
    if len(set(names)) != len(names):
        raise SpecError(f"names has {Counter(names).most_common(1)[0][0]!r} twice; remove one")
    return {name: modules[name] for name in names}


@contextmanager
def restoring_state(model: nn.Module) -> Iterator[None]:
    """Restore the modes and buffers of a model and the state of the random generators afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    contents = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, named in buffers:
            module._buffers.clear()
            module._buffers.update(named)
        with torch.no_grad():
            for buffer, content in contents:
                buffer.copy_(content)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def _functions(loss: Tensor) -> list[Any]:
    """All autograd functions of a loss, without those that accumulate gradients."""
    found: dict[Any, None] = {loss.grad_fn: None}
    waiting = [loss.grad_fn]
    while waiting:
        function = waiting.pop()
        for source, _ in function.next_functions if function is not None else ():
            if source is not None and source not in found and not _accumulates(source):
                found[source] = None
                waiting.append(source)
    return list(found)


def _accumulates(function: Any) -> bool:
    """Whether a function adds to the gradient of a leaf. Its number says nothing about when it was made."""
    return bool(function.name() == "torch::autograd::AccumulateGrad")


def _next_function() -> int:
    """A number above those of the autograd functions made so far, and below those of later ones."""
    with torch.inference_mode(False), torch.enable_grad():
        return int(torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr())  # type: ignore[union-attr]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in the output of a module."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def _batch_size(arguments: tuple[Any, ...]) -> int:
    sizes = {len(each) for each in arguments if isinstance(each, Tensor) and each.dim()}
    if len(sizes) != 1 or 0 in sizes:
        found = f"the sizes {sorted(sizes)}" if sizes else "no tensor"
        raise SpecError(f"inputs have {found} in their first dimension; it must be the batch, and the same for all")
    return sizes.pop()


def _check_batch_sizes(batch_sizes: tuple[int, int] | None, own: int) -> tuple[int, int]:
    if batch_sizes is None:
        return (own // 2, own) if own >= MIN_SAMPLES_TO_HALVE else (own, 2 * own)
    sizes = tuple(sorted(set(batch_sizes)))
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise SpecError(f"batch_sizes is {batch_sizes!r}; it must be two different whole numbers, at least 1")
    return sizes[0], sizes[1]


def _resized(value: Any, batch_size: int) -> Any:
    """The first samples of each tensor; a smaller batch is repeated."""
    if isinstance(value, list | tuple):
        return tuple(_resized(each, batch_size) for each in value)
    if not isinstance(value, Tensor) or not value.dim():
        return value
    times = -(-batch_size // len(value))
    return torch.cat([value] * times)[:batch_size] if times > 1 else value[:batch_size]


def _machine(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}"
