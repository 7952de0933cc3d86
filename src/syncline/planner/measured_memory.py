"""The memory of a training step, from a measured step: how many bytes at most, of which kinds, and when.

A step is measured layer by layer, at two batch sizes. What is alive besides the weights grows in forward and shrinks in
backward, while gradients of the weights appear::

    bytes           ╱▔▔▔╲____                 weights, optimizer state, residuals, …   the whole step
                  ╱      ╲   ▔▔▔╲             activations                              forward to backward
                ╱         ╲      ▁▁▁▁         gradients                                backward to update
              forward   backward  update

`predict_memory` adds what was not measured, by formula: another batch size, optimizer or codec, buckets and versions of
the weights. The step with recomputation is measured too, with `torch.utils.checkpoint` around each layer.

Only tensors count. Memory that a kernel takes and returns within one operation is not seen. For PowerSGD, the payloads
are an upper bound.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.hooks import RemovableHandle

from syncline.codecs import Codec, PayloadCodec, build_codec
from syncline.codecs.base import max_payload_bytes
from syncline.errors import SpecError
from syncline.parallel.profile import LayerClock, TrainingStep, layer_starts, tensors_in
from syncline.reduction.buckets import BUCKET_BYTES, Bucket, BucketSet
from syncline.reduction.reduction_pass import MAX_WAITING_BYTES
from syncline.specs import nearest
from syncline.transports.base import format_bytes

__all__ = [
    "OPTIMIZERS",
    "LayerMemory",
    "MemoryMeasurement",
    "OptimizerMemory",
    "ParameterSize",
    "PredictedMemory",
    "StorageTracker",
    "measure_memory",
    "measure_optimizer",
    "predict_memory",
]

Pair = tuple[float, float]
"""Bytes at the two measured batch sizes."""
RESIDUAL_BYTES = 4
"""A residual is float32."""
SUMMED_COPIES = 3
"""Of a bucket whose tensors the wire sums: what is sent, the sum and what was sent, until it is decoded."""
STEP_COUNT_BYTES = 4
"""Adam keeps the number of steps of each parameter, as float32."""


@dataclass(frozen=True)
class OptimizerFormula:
    """What an optimizer of torch keeps, and what its step takes for a moment: it updates one parameter at a time."""

    state: int
    """Tensors of the size of each parameter that it keeps."""
    temporary: int
    """Tensors of the size of the largest parameter."""
    counts_steps: bool = False


OPTIMIZERS = {
    "sgd": OptimizerFormula(state=0, temporary=0),
    "momentum": OptimizerFormula(state=1, temporary=0),
    "adam": OptimizerFormula(state=2, temporary=2, counts_steps=True),
    "adamw": OptimizerFormula(state=2, temporary=2, counts_steps=True),
}
"""By name; "momentum" is SGD with it. On CPUs, where torch does not update several parameters together."""


@dataclass(frozen=True)
class ParameterSize:
    """A parameter that is trained."""

    name: str
    elements: int
    bytes: int
    shape: tuple[int, ...] = ()
    """Empty: not known, as in files of earlier releases."""


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """The most bytes that are alive in the time of one layer, without weights, buffers, batch and optimizer state.

    Each is a pair, for the two batch sizes. Gradients of weights count apart.
    """

    name: str
    forward_bytes: Pair
    backward_bytes: Pair
    gradient_bytes: Pair
    """Gradients of weights at the moment of `backward_bytes`."""


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """What an optimizer keeps, and the most that its step takes besides."""

    name: str
    state_bytes: float
    temporary_bytes: float


@dataclass(frozen=True, kw_only=True)
class MemoryMeasurement:
    """The memory of a training step, as measured at two batch sizes."""

    batch_sizes: tuple[int, int]
    layers: tuple[LayerMemory, ...]
    """In the order of execution."""
    recomputed: tuple[LayerMemory, ...]
    """The same with recomputation of each layer. Empty: the model cannot be recomputed."""
    parameters: tuple[ParameterSize, ...]
    """Those that are trained, in the order of the model."""
    weight_bytes: float
    """Of all parameters, frozen ones too."""
    buffer_bytes: float
    input_bytes: Pair
    """Of a batch."""
    optimizer: OptimizerMemory | None = None

    @property
    def gradient_bytes(self) -> int:
        """Of all parameters that are trained."""
        return sum(each.bytes for each in self.parameters)

    def between(self, pair: Pair, batch_size: int) -> float:
        """The bytes for another batch size, on the line through both measurements."""
        small, large = self.batch_sizes
        return max(0.0, pair[0] + (pair[1] - pair[0]) * (batch_size - small) / (large - small))


@dataclass(frozen=True, kw_only=True)
class PredictedMemory:
    """The bytes of a training step at the moment when they are most, by kind."""

    moment: str
    """When that is."""
    weights: float
    buffers: float
    batch: float
    optimizer_state: float
    gradients: float
    activations: float
    """What forward keeps for backward, and the gradients of activations."""
    temporary: float
    """Of the optimizer's step, or of the reduction."""
    buckets: float
    payloads: float
    """What a codec sends and receives."""
    residuals: float
    weight_versions: float

    @property
    def kinds(self) -> dict[str, float]:
        """The bytes of each kind, without those of which there are none."""
        return {key: value for key, value in asdict(self).items() if key != "moment" and value}

    @property
    def peak_bytes(self) -> float:
        """The sum of all kinds."""
        return math.fsum(self.kinds.values())

    def __str__(self) -> str:
        kinds = sorted(self.kinds.items(), key=lambda each: -each[1])
        parts = ", ".join(f"{key.replace('_', ' ')} {format_bytes(round(value))}" for key, value in kinds)
        return f"{format_bytes(round(self.peak_bytes))} {self.moment}: {parts}"


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, the bytes of the tensors that operations return count while they are alive.

    The tensors of `known` do not count. A tensor that shares memory with another counts once. It sees the thread that
    enters it, and the backward passes that this thread starts on the CPU.

    >>> with StorageTracker() as tracker:
    ...     x = torch.ones(100)
    ...     y = x.view(10, 10) * 2
    ...     del y
    >>> tracker.live_bytes, tracker.peak_bytes
    (400, 800)
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.gradient_bytes = 0
        """Of `live_bytes`: tensors that `note_gradient` was given."""
        self.peak_bytes = 0
        """The most since the latest `begin`."""
        self.gradient_bytes_at_peak = 0
        self._sizes: dict[int, int] = {}
        self._gradients: set[int] = set()
        self._references: dict[int, weakref.ref[Any]] = {}
        """By the identity of the storage: torch keeps the Python object of a storage as long as the storage."""
        self._known = [storage for each in known for storage in _storages(each)]
        self._known_ids = {id(storage) for storage in self._known}

    def begin(self) -> None:
        """A new span: the peak is that of what is alive now."""
        self.peak_bytes, self.gradient_bytes_at_peak = self.live_bytes, self.gradient_bytes

    def note_gradient(self, tensor: Tensor) -> None:
        """Count a tensor as the gradient of a weight."""
        for storage in _storages(tensor):
            key = id(storage)
            self._note(storage)
            if key not in self._gradients and key in self._sizes:
                self._gradients.add(key)
                self.gradient_bytes += self._sizes[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            for storage in _storages(tensor):
                self._note(storage)
        if self.live_bytes > self.peak_bytes:
            self.begin()
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._known_ids:
            return
        if key not in self._references:
            self._references[key] = weakref.ref(storage, partial(self._forget, key))
            self._sizes[key] = 0
        self.live_bytes += storage.nbytes() - self._sizes[key]
        self._sizes[key] = storage.nbytes()

    def _forget(self, key: int, reference: Any) -> None:
        size = self._sizes.pop(key)
        del self._references[key]
        self.live_bytes -= size
        if key in self._gradients:
            self._gradients.remove(key)
            self.gradient_bytes -= size


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor; of a sparse one that of its indices and values."""
    if tensor.layout == torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout == torch.sparse_coo:
        yield tensor._indices().untyped_storage()
        yield tensor._values().untyped_storage()


def measure_memory(
    steps: Mapping[int, TrainingStep], layers: Mapping[str, nn.Module], optimizer: OptimizerMemory | None = None
) -> MemoryMeasurement:
    """Take a step at each of two batch sizes, as it is and with recomputation of each layer.

    The gradients of the model are replaced. Weights do not change.
    """
    small, large = sorted(steps)
    model = steps[small].model
    plain = _pairs([_measure_step(steps[size], layers, recompute=False) for size in (small, large)], list(layers))
    try:
        again = _pairs([_measure_step(steps[size], layers, recompute=True) for size in (small, large)], list(layers))
    except CheckpointError:  # a layer does not compute the same a second time
        again = ()
    return MemoryMeasurement(
        batch_sizes=(small, large),
        layers=plain,
        recomputed=again,
        parameters=tuple(
            ParameterSize(name, each.numel(), each.nbytes, tuple(each.shape))
            for name, each in model.named_parameters()
            if each.requires_grad
        ),
        weight_bytes=_nbytes(model.parameters()),
        buffer_bytes=_nbytes(model.buffers()),
        input_bytes=(_batch_bytes(steps[small]), _batch_bytes(steps[large])),
        optimizer=optimizer,
    )


def measure_optimizer(name: str, optimizer: Optimizer) -> OptimizerMemory:
    """Take two steps with the gradients that the parameters have: what the optimizer keeps and takes."""
    optimizer.step()  # makes the state
    kept = [each for state in optimizer.state.values() for each in tensors_in(state)]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [each.grad for each in parameters if each.grad is not None]
    with StorageTracker([*parameters, *gradients, *kept]) as tracker:
        optimizer.step()
    return OptimizerMemory(name=name, state_bytes=_nbytes(kept), temporary_bytes=tracker.peak_bytes)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the memory of some tensors; memory that they share counts once."""
    found = {id(storage): storage for each in tensors for storage in _storages(each)}
    return sum(storage.nbytes() for storage in found.values())


def _batch_bytes(step: TrainingStep) -> int:
    """The bytes of a batch, which may be a part of a larger one."""
    return sum(each.nbytes for each in tensors_in(step.batch))


@dataclass
class _StepPeaks:
    """The peaks of one step, by layer."""

    forward: list[int]
    backward: list[tuple[int, int]]
    """What is alive without gradients of weights, and these gradients."""


@dataclass
class _SpanRecorder:
    """Assigns the peaks of a tracker to the layer in whose time they are."""

    tracker: StorageTracker
    peaks: _StepPeaks
    place: int = 0
    backward: bool = False

    def enter(self, place: int) -> None:
        """A layer begins."""
        self.close()
        self.place = place
        self.tracker.begin()

    def begin_backward(self) -> None:
        """Forward is over. Backward begins in the last layer."""
        self.enter(len(self.peaks.backward) - 1)
        self.backward = True

    def close(self) -> None:
        """The span ends: keep its peak."""
        tracker, peaks = self.tracker, self.peaks
        activations = tracker.peak_bytes - tracker.gradient_bytes_at_peak
        if not self.backward:
            peaks.forward[self.place] = max(peaks.forward[self.place], activations)
        elif tracker.peak_bytes > sum(peaks.backward[self.place]):
            peaks.backward[self.place] = (activations, tracker.gradient_bytes_at_peak)


def _measure_step(step: TrainingStep, layers: Mapping[str, nn.Module], *, recompute: bool) -> _StepPeaks:
    count, model = len(layers), step.model
    model.zero_grad(set_to_none=True)
    peaks = _StepPeaks([0] * count, [(0, 0)] * count)
    clock = LayerClock(step, layers)
    tracker = StorageTracker([*model.parameters(), *model.buffers(), *tensors_in(step.batch)])
    spans = _SpanRecorder(tracker, peaks)
    with ExitStack() as stack:
        for each in model.parameters():
            if each.requires_grad:
                register: Callable[..., RemovableHandle] = each.register_post_accumulate_grad_hook
                stack.callback(register(partial(_note_gradient, tracker)).remove)
        if recompute:
            stack.enter_context(_recomputed(layers.values()))
        with clock.running(), ExitStack() as hooks:
            for place, module in enumerate(layers.values()):
                hooks.callback(module.register_forward_pre_hook(_enter_hook(spans, place)).remove)
            stack.enter_context(tracker)
            loss = step.forward()
        spans.begin_backward()
        for place, function in layer_starts(loss, clock).items():
            stack.callback(function.register_prehook(_enter_hook(spans, place)).remove)
        loss.backward()  # type: ignore[no-untyped-call]
        spans.close()
    model.zero_grad(set_to_none=True)
    return peaks


def _enter_hook(spans: _SpanRecorder, place: int) -> Callable[..., None]:
    def enter(*_: Any) -> None:
        spans.enter(place)

    return enter


def _note_gradient(tracker: StorageTracker, parameter: Tensor) -> None:
    if parameter.grad is not None:
        tracker.note_gradient(parameter.grad)


@contextmanager
def _recomputed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the modules keep their inputs only, and compute the rest again in backward."""
    with ExitStack() as stack:
        for module in modules:
            own = vars(module).get("forward")
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
            stack.callback(partial(_restore_forward, module, own))
        yield


def _restore_forward(module: nn.Module, own: Any) -> None:
    del module.forward
    if own is not None:
        module.forward = own


def _pairs(measured: Sequence[_StepPeaks], names: Sequence[str]) -> tuple[LayerMemory, ...]:
    small, large = measured
    return tuple(
        LayerMemory(
            name=name,
            forward_bytes=(small.forward[place], large.forward[place]),
            backward_bytes=(small.backward[place][0], large.backward[place][0]),
            gradient_bytes=(small.backward[place][1], large.backward[place][1]),
        )
        for place, name in enumerate(names)
    )


def predict_memory(
    memory: MemoryMeasurement,
    *,
    batch_size: int,
    optimizer: str | None = None,
    recompute: bool = False,
    codec: str | Codec | None = None,
    workers: int = 1,
    buckets: bool | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    weight_versions: int = 0,
) -> PredictedMemory:
    """The peak of a training step on one worker of data parallelism, and its kinds.

    Args:
        batch_size: samples of this worker in a step, or in a micro-batch.
        optimizer: one of `OPTIMIZERS`. None: the one that was measured.
        recompute: with `torch.utils.checkpoint` around each layer.
        buckets: whether gradients are reduced. None: if there are several workers, or a codec.
        weight_versions: further copies of the weights that a pipeline keeps.

    Raises:
        SpecError: if an argument needs a value that was not measured.
    """
    if batch_size < 1 or workers < 1 or weight_versions < 0:
        raise SpecError(
            f"batch_size {batch_size}, workers {workers}, weight_versions {weight_versions}: the first two must be at "
            "least 1, and the last at least 0"
        )
    if recompute and not memory.recomputed:
        raise SpecError("recomputation was not measured: a layer of this model does not compute the same again")
    layers = memory.recomputed if recompute else memory.layers
    kept = _optimizer_memory(memory, optimizer)
    built = build_codec(codec) if isinstance(codec, str) else codec
    reduces = workers > 1 or built is not None if buckets is None else buckets
    reduction = _Reduction(memory, built, workers, bucket_bytes) if reduces else None
    constant = {
        "weights": memory.weight_bytes,
        "buffers": memory.buffer_bytes,
        "batch": memory.between(memory.input_bytes, batch_size),
        "optimizer_state": kept.state_bytes,
        "residuals": 0.0 if reduction is None else reduction.residual_bytes,
        "buckets": 0.0 if reduction is None else reduction.bucket_bytes,
        "weight_versions": weight_versions * memory.weight_bytes,
    }
    changing = {"gradients": 0.0, "activations": 0.0, "temporary": 0.0, "payloads": 0.0}

    def at(moment: str, **parts: float) -> PredictedMemory:
        return PredictedMemory(moment=moment, **{**constant, **changing, **parts})

    moments = []
    for place, layer in enumerate(layers):
        parts = {} if reduction is None else reduction.before_backward()
        forward = memory.between(layer.forward_bytes, batch_size)
        moments.append(at(f"in the forward of {layer.name}", activations=forward, **parts))
        gradients = memory.between(layer.gradient_bytes, batch_size)
        parts = {"gradients": gradients} if reduction is None else reduction.during_backward(place, gradients)
        backward = memory.between(layer.backward_bytes, batch_size)
        moments.append(at(f"in the backward of {layer.name}", activations=backward, **parts))
    parts = {"gradients": float(memory.gradient_bytes)} if reduction is None else reduction.after_backward()
    moments.append(at("at the end of backward", **parts))
    moments.append(at("in the update", gradients=parts["gradients"], temporary=kept.temporary_bytes))
    return max(moments, key=lambda each: each.peak_bytes)


def _optimizer_memory(memory: MemoryMeasurement, name: str | None) -> OptimizerMemory:
    if name is None:
        if memory.optimizer is None:
            raise SpecError(f"no optimizer was measured; name one: {', '.join(OPTIMIZERS)}")
        return memory.optimizer
    if name not in OPTIMIZERS:
        raise SpecError(f"unknown optimizer {name!r}; {nearest(name, list(OPTIMIZERS))}")
    formula, sizes = OPTIMIZERS[name], [each.bytes for each in memory.parameters]
    return OptimizerMemory(
        name=name,
        state_bytes=formula.state * sum(sizes) + (STEP_COUNT_BYTES * len(sizes) if formula.counts_steps else 0),
        temporary_bytes=formula.temporary * max(sizes, default=0),
    )


class _Reduction:
    """The memory that buckets and a codec take, with the layout that a `GradientReducer` makes."""

    def __init__(self, memory: MemoryMeasurement, codec: Codec | None, workers: int, bucket_bytes: int) -> None:
        self._sizes = [each.bytes for each in memory.parameters]
        self._place = _places(memory)
        self._workers = workers
        like = [torch.empty(each.elements, dtype=_dtype(each), device="meta") for each in memory.parameters]
        codecs = [None if codec is None else codec.codec_for(each.name, each.elements) for each in memory.parameters]
        order = range(len(like))[::-1]
        self._layout = BucketSet(like, order, bucket_bytes, codecs)
        self.residual_bytes = float(
            sum(
                RESIDUAL_BYTES * each.elements
                for each, own in zip(memory.parameters, codecs, strict=True)
                if own is not None and own.keeps_residual
            )
        )
        self.bucket_bytes = float(sum(each.flat.nbytes for each in self._layout.buckets if each.flat is not None))
        self._small = {index for each in self._layout.buckets if each.flat is not None for index in each.items}
        used = [own for own in codecs if own is not None]
        self._held_over = any(own.traits.residual_needs_sum for own in used)
        """The codec keeps the gradients of a step until the first gradient of the next one."""

    def before_backward(self) -> dict[str, float]:
        """Gradients of the step before."""
        return {"gradients": self._outside(range(len(self._sizes))) if self._held_over else 0.0}

    def during_backward(self, place: int, gradients: float) -> dict[str, float]:
        """Gradients outside of the buckets, and the payloads of the buckets that are full, in the time of a layer."""
        if not gradients:
            return self.before_backward()
        behind = {index for index, own in enumerate(self._place) if own > place}
        here = [index for index, own in enumerate(self._place) if own == place]
        here_bytes = sum(self._sizes[index] for index in here)
        share = min(1.0, max(0.0, gradients - sum(self._sizes[index] for index in behind)) / max(1, here_bytes))
        outside = self._outside(behind) + share * self._outside(here)
        full = [bucket for bucket in self._layout.buckets if behind.issuperset(bucket.items)]
        collected = {index for bucket in full for index in bucket.items}
        waiting = float(sum(self._sizes[index] for index in (behind - collected) & self._small))
        waiting += share * sum(self._sizes[index] for index in self._small.intersection(here))
        return {
            "gradients": outside + min(MAX_WAITING_BYTES, waiting),
            "payloads": float(sum(_payload_bytes(bucket, self._workers, decoding=False) for bucket in full)),
        }

    def after_backward(self) -> dict[str, float]:
        """All gradients outside of the buckets, and all payloads."""
        sent = [_payload_bytes(bucket, self._workers, decoding=True) for bucket in self._layout.buckets]
        return {"gradients": self._outside(range(len(self._sizes))), "payloads": float(sum(sent))}

    def _outside(self, indices: Iterable[int]) -> float:
        """The bytes of gradients that are reduced in their own memory."""
        return float(sum(self._sizes[index] for index in indices if index not in self._small))


def _places(memory: MemoryMeasurement) -> list[int]:
    """The layer of each parameter. Those outside of all layers come last in backward, as those of the first layer."""
    names = {layer.name: place for place, layer in enumerate(memory.layers)}
    places = []
    for each in memory.parameters:
        parts = each.name.split(".")
        owners = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        places.append(next((names[owner] for owner in owners if owner in names), 0))
    return places


def _dtype(size: ParameterSize) -> torch.dtype:
    """A dtype with elements of this size, as buckets of one kind have."""
    return {2: torch.float16, 8: torch.float64}.get(size.bytes // max(1, size.elements), torch.float32)


def _payload_bytes(bucket: Bucket, workers: int, *, decoding: bool) -> int:
    """What a bucket sends and receives; while it decodes, the received bodies are there twice."""
    codec = bucket.codec
    if codec is None:
        return 0
    if codec.traits.allreducible:
        longest = sum(codec.max_bytes(size) for size in bucket.sizes)
        return longest if codec.traits.residual_needs_sum else SUMMED_COPIES * longest
    assert isinstance(codec, PayloadCodec), f"{codec!r} neither sums nor gives bytes"
    payload = max_payload_bytes(codec, bucket.sizes, codec.traits.steady_from_step)
    copies = 2 if decoding and codec.traits.fixed_length else 1
    return payload * (1 + copies * workers)
