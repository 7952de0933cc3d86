"""Measures what a training step costs here: times and FLOPs of the layers, memory, the update, the reading of data.

```text
syncline profile train.py
  layers       forward and backward of each at two batch sizes      parallel/profile.py
  FLOPs        of each layer                                         torch's FlopCounterMode
  memory       of each layer, at the same batch sizes                measured_memory.py
  optimizer    seconds of a step, bytes of its state
  data         samples a second of the DataLoader alone
profile.json   all of it, with the machine and the versions; partitioners read the layers in it
```

FlopCounterMode counts matrix products, convolutions and attention. What it does not count has 0 FLOPs: element-wise
functions, normalisation, pooling, softmax, look-ups in embeddings, recurrent layers that run as one operation, and the
optimizer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import syncline
from syncline.errors import SpecError
from syncline.parallel.partition import ModelProfile
from syncline.parallel.partition.base import FILE_VERSION, PROFILE_KIND
from syncline.parallel.partition.json_files import JsonFields, read_json_fields
from syncline.parallel.profile import LayerClock, TrainingStep, layer_starts, profile_model, restoring_state
from syncline.planner.measured_memory import (
    LayerMemory,
    MemoryMeasurement,
    OptimizerMemory,
    ParameterSize,
    measure_memory,
    measure_optimizer,
)
from syncline.specs import nearest
from syncline.training.system import describe_machine
from syncline.workloads import ScriptWorkload, Workload
from syncline.workloads.base import batches

__all__ = ["LayerFlops", "TrainingProfile", "profile_training"]

MAKE_OPTIMIZER: dict[str, Callable[[list[nn.Parameter], float], Optimizer]] = {
    "sgd": lambda trained, rate: SGD(trained, lr=rate),
    "momentum": lambda trained, rate: SGD(trained, lr=rate, momentum=0.9),
    "adam": lambda trained, rate: Adam(trained, lr=rate),
    "adamw": lambda trained, rate: AdamW(trained, lr=rate),
}
"""The names of `measured_memory.OPTIMIZERS`."""
MAX_DATA_BATCHES = 50
"""Batches whose reading is timed."""
MAX_DATA_SECONDS = 2.0
MIN_UPDATES = 5
"""Steps of the optimizer that are timed, at least."""


@dataclass(frozen=True)
class LayerFlops:
    """Floating-point operations of one layer for one mini-batch; a multiplication and an addition are two."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class TrainingProfile:
    """What a training step of one workload costs on one machine."""

    workload: str
    layers: ModelProfile
    """Times and sizes by layer."""
    flops: tuple[LayerFlops, ...]
    """By layer, for the batch size of `layers`."""
    memory: MemoryMeasurement
    update_s: float
    """A step of the optimizer."""
    samples_per_s: float
    """What the DataLoader reads in this process while nothing else runs."""
    sample_bytes: float
    """Inputs and targets of one sample."""
    threads: int
    torch_version: str
    syncline_version: str
    system: str = ""
    cores: int = 1
    copies: int = 1
    """Processes that took these steps at the same time."""

    @property
    def optimizer(self) -> OptimizerMemory:
        """The optimizer that was measured, and its memory."""
        assert self.memory.optimizer is not None, "a profile has an optimizer"
        return self.memory.optimizer

    @property
    def step_s(self) -> float:
        """A step on one worker, without reading data: forward, backward and the update."""
        return self.layers.seconds + self.update_s

    @property
    def total_flops(self) -> float:
        """Of forward and backward."""
        return sum(each.total for each in self.flops)

    def check_model(self, model: nn.Module) -> None:
        """Refuse another model than the one that was measured.

        Raises:
            SpecError: with the first difference.
        """
        now = {name: each.numel() for name, each in model.named_parameters() if each.requires_grad}
        then = {each.name: each.elements for each in self.memory.parameters}
        for name in [*then, *now]:
            if now.get(name) == then.get(name):
                continue
            counts = [f"{sizes[name]} elements" if name in sizes else "no such parameter" for sizes in (then, now)]
            raise SpecError(
                f"the profile is of another model: of {name!r} it has {counts[0]}, and this {type(model).__name__} has "
                f"{counts[1]}; measure this one: syncline profile"
            )

    def differences(self) -> list[str]:
        """What has another version or another number of threads here than where it was measured, as phrases."""
        pairs = {
            "torch": (self.torch_version, torch.__version__),
            "syncline": (self.syncline_version, syncline.__version__),
            "threads": (str(self.threads), str(torch.get_num_threads())),
        }
        return [f"{name} {then}, and here {now}" for name, (then, now) in pairs.items() if then != now]

    def write(self, path: str | Path) -> None:
        """Write a JSON file, which `ModelProfile.read` reads too."""
        self.layers.write(path, _as_document(self))

    @classmethod
    def read(cls, path: str | Path) -> TrainingProfile:
        """Read a profile from a JSON file.

        Raises:
            SpecError: if the file cannot be read, or a value in it cannot be right.
        """
        layers = ModelProfile.read(path)
        fields = read_json_fields(path, kind=PROFILE_KIND, version=FILE_VERSION)
        if "training" not in fields:
            raise SpecError(
                f"{path} has the layers of a model, and neither FLOPs nor memory nor an optimizer: write one by "
                "syncline profile"
            )
        training = fields.inner("training")
        try:
            profile = _from_document(layers, training)
        except SpecError as error:
            raise error if str(path) in str(error) else SpecError(f"{path}: {error}") from None
        training.finish()
        return profile


def profile_training(
    workload: Workload,
    *,
    batch: int | None = None,
    batch_sizes: tuple[int, int] | None = None,
    optimizer: str | None = None,
    names: Sequence[str] | None = None,
    repeats: int = 20,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> TrainingProfile:
    """Measure a workload in this process.

    Args:
        batch: samples of a mini-batch, to which the profile refers. None: the workload's.
        batch_sizes: the two sizes that are measured. None: the whole batch and the half.
        optimizer: "sgd", "momentum", "adam" or "adamw". None: the workload's.
        names: the layers; see `profile_model`.
        repeats: steps for each measured time; the median counts.
        progress: called with a text before each measurement.

    Raises:
        SpecError: if the model cannot be measured.
    """
    if optimizer is not None and optimizer not in MAKE_OPTIMIZER:
        raise SpecError(f"unknown optimizer {optimizer!r}; {nearest(optimizer, list(MAKE_OPTIMIZER))}")
    size = workload.defaults.batch if batch is None else batch
    if size < 1:
        raise SpecError(f"batch {size}: at least 1")
    progress("checking the workload, reading data")
    if isinstance(workload, ScriptWorkload):
        workload.check()
    model = workload.model(seed)
    inputs, targets = next(batches(workload.splits().train, size))

    def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return workload.loss(model, (inputs, targets))

    def step_of(samples: int) -> TrainingStep:
        return TrainingStep(model, (inputs,), targets, None, samples, loss_of)

    progress(f"layers: {repeats} steps at each of two batch sizes")
    layers = _profile_layers(workload, model, step_of(size), loss_of, names, batch_sizes, repeats)
    sizes = sorted(layers.measured_batch_sizes)
    modules = {name: model.get_submodule(name) if _has_layers(model) else model for name in layers.names}
    steps = {each: step_of(each) for each in {size, *sizes}}
    with restoring_state(model), torch.enable_grad():
        model.train()
        progress("FLOPs")
        flops = _measure_flops(steps[size], modules)
        progress("memory, as it is and with recomputation")
        memory = measure_memory({each: steps[each] for each in sizes}, modules)
        progress("optimizer")
        update_s, kept = _measure_update(workload, model, steps[size], optimizer, max(MIN_UPDATES, repeats))
    progress("reading data")
    return TrainingProfile(
        workload=str(workload),
        layers=layers,
        flops=tuple(flops),
        memory=_with_optimizer(memory, kept),
        update_s=update_s,
        samples_per_s=_measure_reading(workload, size),
        sample_bytes=memory.between(memory.input_bytes, size) / size,
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        syncline_version=syncline.__version__,
        **_machine(),
    )


def _profile_layers(
    workload: Workload,
    model: nn.Module,
    step: TrainingStep,
    loss_of: Callable[[nn.Module, Tensor, Any], Tensor],
    names: Sequence[str] | None,
    batch_sizes: tuple[int, int] | None,
    repeats: int,
) -> ModelProfile:
    inputs, targets = step.batch
    whole, loss_of_whole = model, loss_of
    if not _has_layers(model):

        def loss_of_whole(whole: nn.Module, inputs: Tensor, targets: Any) -> Tensor:
            return loss_of(model, inputs, targets)

        whole = _OneLayer(model)
    try:
        found = profile_model(
            whole,
            inputs,
            targets=targets,
            loss_of=loss_of_whole,
            names=names,
            batch_sizes=batch_sizes,
            repeats=repeats,
        )
        return replace(found, model=type(model).__name__)
    except SpecError as error:
        raise SpecError(f"{workload}: {error}") from None
    except (RuntimeError, ValueError) as error:  # of the model: batch norm refuses one sample, for example
        sizes = " and ".join(map(str, batch_sizes)) if batch_sizes else "the half and the whole batch"
        raise SpecError(f"{workload}: a step with the batch sizes {sizes} fails: {error}") from error


class _OneLayer(nn.Module):
    """A model without modules inside, as the only layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def _has_layers(model: nn.Module) -> bool:
    return any(True for _ in model.children())


def _measure_flops(step: TrainingStep, layers: Mapping[str, nn.Module]) -> list[LayerFlops]:
    """One step in which FLOPs are counted; those between two layers are of the first of them."""
    forward, backward = [0.0] * len(layers), [0.0] * len(layers)
    counter = FlopCounterMode(display=False)
    clock = LayerClock(step, layers)
    with counter:
        loss = _count_by_layer(counter, clock, forward, list(layers.values()))
        starts = layer_starts(loss, clock)
        done, place = counter.get_total_flops(), len(layers) - 1
        with ExitStack() as hooks:

            def begin(next_place: int) -> None:
                nonlocal done, place
                now = counter.get_total_flops()
                backward[place] += now - done
                done, place = now, next_place

            for each, function in starts.items():
                hooks.callback(function.register_prehook(_BeginHook(begin, each)).remove)
            step.backward(loss)
            begin(0)
    return [LayerFlops(*each) for each in zip(forward, backward, strict=True)]


def _count_by_layer(
    counter: FlopCounterMode, clock: LayerClock, forward: list[float], modules: Sequence[nn.Module]
) -> Tensor:
    """A forward pass; returns the loss."""
    before: list[int] = []
    with clock.running(), ExitStack() as hooks:
        for module in modules:
            note = _BeginHook(lambda _: before.append(counter.get_total_flops()), 0)
            hooks.callback(module.register_forward_pre_hook(note).remove)
        loss = clock.step.forward()
    edges = [0, *before[1:], counter.get_total_flops()]
    for place in range(len(modules)):
        forward[place] = float(edges[place + 1] - edges[place])
    return loss


@dataclass(frozen=True)
class _BeginHook:
    """A hook of a module or of an autograd function that says which layer begins."""

    begin: Callable[[int], None]
    place: int

    def __call__(self, *_: Any) -> None:
        self.begin(self.place)


def _measure_update(
    workload: Workload, model: nn.Module, step: TrainingStep, name: str | None, repeats: int
) -> tuple[float, OptimizerMemory]:
    """The median seconds of a step of the optimizer, and its memory. The weights are restored."""
    trained = [each for each in model.parameters() if each.requires_grad]
    rate = workload.defaults.learning_rate
    made = workload.optimizer(model) if name is None else MAKE_OPTIMIZER[name](trained, rate)
    weights = [each.detach().clone() for each in trained]
    step.forward().backward()  # type: ignore[no-untyped-call]
    kept = measure_optimizer(_optimizer_name(made) if name is None else name, made)
    seconds = []
    for _ in range(repeats):
        begin = step.now()
        made.step()
        seconds.append(step.now() - begin)
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for each, before in zip(trained, weights, strict=True):
            each.copy_(before)
    return statistics.median(seconds), kept


def _optimizer_name(optimizer: Optimizer) -> str:
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return "momentum" if type(optimizer) is SGD and momentum else type(optimizer).__name__.lower()


def _measure_reading(workload: Workload, batch: int) -> float:
    """Samples a second of a DataLoader as `syncline train` has it, after its first batch."""
    generator = torch.Generator().manual_seed(0)
    loader: DataLoader[Any] = DataLoader(workload.splits().train, batch_size=batch, shuffle=True, generator=generator)
    reader = iter(loader)
    first = next(reader)
    begin, samples = time.perf_counter(), 0
    for _ in range(MAX_DATA_BATCHES):
        found = next(reader, None)
        if found is None:
            break
        samples += len(found[0])
        if time.perf_counter() - begin > MAX_DATA_SECONDS:
            break
    if not samples:  # the split is one batch
        begin, samples = time.perf_counter(), len(first[0])
        next(iter(loader))
    return samples / max(time.perf_counter() - begin, 1e-9)


def _with_optimizer(memory: MemoryMeasurement, kept: OptimizerMemory) -> MemoryMeasurement:
    return replace(memory, optimizer=kept)


def _machine() -> dict[str, Any]:
    facts = describe_machine()
    return {"system": str(facts["system"]), "cores": facts["cores usable"]}


# The file.

PAIRS = ("forward_bytes", "backward_bytes", "gradient_bytes")
RECOMPUTED = "recomputed_"
"""The start of the keys of a layer's memory with recomputation."""


def _as_document(profile: TrainingProfile) -> dict[str, Any]:
    """What the file has besides the layers' times."""
    memory = profile.memory
    layers = []
    for place, (name, flops, plain) in enumerate(zip(profile.layers.names, profile.flops, memory.layers, strict=True)):
        row: dict[str, Any] = {"name": name, "forward_flops": flops.forward, "backward_flops": flops.backward}
        row |= {key: list(getattr(plain, key)) for key in PAIRS}
        if memory.recomputed:
            row |= {RECOMPUTED + key: list(getattr(memory.recomputed[place], key)) for key in PAIRS}
        layers.append(row)
    return {
        "workload": profile.workload,
        "syncline": profile.syncline_version,
        "torch": profile.torch_version,
        "threads": profile.threads,
        "system": profile.system,
        "cores": profile.cores,
        "copies": profile.copies,
        "optimizer": profile.optimizer.name,
        "update_s": profile.update_s,
        "optimizer_state_bytes": profile.optimizer.state_bytes,
        "optimizer_temporary_bytes": profile.optimizer.temporary_bytes,
        "samples_per_s": profile.samples_per_s,
        "sample_bytes": profile.sample_bytes,
        "weight_bytes": memory.weight_bytes,
        "buffer_bytes": memory.buffer_bytes,
        "small_batch_bytes": memory.input_bytes[0],
        "large_batch_bytes": memory.input_bytes[1],
        "layers": layers,
        "parameters": [asdict(each) for each in memory.parameters],
    }


def _from_document(layers: ModelProfile, fields: JsonFields) -> TrainingProfile:
    rows = fields.inners("layers")
    names = [row.text("name") for row in rows]
    if names != list(layers.names):
        raise SpecError(
            f"the profile has times of the layers {', '.join(layers.names[:3])}… and FLOPs and memory of "
            f"{', '.join(names[:3])}…: it was edited; measure again: syncline profile"
        )
    sizes = sorted(layers.measured_batch_sizes)
    if len(sizes) != 2:
        raise SpecError(f"measured_batch_sizes are {sizes}; a profile of a training step has two")
    again = all(RECOMPUTED + PAIRS[0] in row for row in rows)
    flops = tuple(LayerFlops(row.number("forward_flops"), row.number("backward_flops")) for row in rows)
    memory = MemoryMeasurement(
        batch_sizes=(sizes[0], sizes[1]),
        layers=tuple(_read_layer(name, row, "") for name, row in zip(names, rows, strict=True)),
        recomputed=tuple(_read_layer(name, row, RECOMPUTED) for name, row in zip(names, rows, strict=True) if again),
        parameters=tuple(map(_read_parameter, fields.inners("parameters"))),
        weight_bytes=fields.number("weight_bytes"),
        buffer_bytes=fields.number("buffer_bytes"),
        input_bytes=(fields.number("small_batch_bytes"), fields.number("large_batch_bytes")),
        optimizer=OptimizerMemory(
            name=fields.text("optimizer"),
            state_bytes=fields.number("optimizer_state_bytes"),
            temporary_bytes=fields.number("optimizer_temporary_bytes"),
        ),
    )
    for row in rows:
        row.finish()
    return TrainingProfile(
        workload=fields.text("workload"),
        layers=layers,
        flops=flops,
        memory=memory,
        update_s=fields.number("update_s"),
        samples_per_s=fields.number("samples_per_s"),
        sample_bytes=fields.number("sample_bytes"),
        threads=fields.whole("threads", least=1),
        torch_version=fields.text("torch"),
        syncline_version=fields.text("syncline"),
        system=fields.text("system", ""),
        cores=fields.whole("cores", least=1),
        copies=fields.whole("copies", least=1) if "copies" in fields else 1,
    )


def _read_layer(name: str, row: JsonFields, prefix: str) -> LayerMemory:
    return LayerMemory(name=name, **{key: row.pair(prefix + key) for key in PAIRS})


def _read_parameter(row: JsonFields) -> ParameterSize:
    shape = row.wholes("shape", least=0) if "shape" in row else ()
    found = ParameterSize(row.text("name"), row.whole("elements", least=0), row.whole("bytes", least=0), shape)
    row.finish()
    return found
