"""What a partitioner reads and returns: the profile of a model, and its stages with the workers of each.

```text
profile      features.0   features.1   …   classifier.6      time, bytes of the output and of the parameters of each
partition    cuts = (features.17,)     replicas = (3, 1)
             stage 0: features.0 … features.16 on three workers, stage 1: features.17 … classifier.6 on one
```
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from syncline.errors import SpecError
from syncline.parallel.partition.json_files import JsonFields, read_json_fields, write_json_text
from syncline.specs import nearest
from syncline.transports.base import format_bytes

__all__ = ["Bottleneck", "LayerCost", "ModelProfile", "PartitionPrediction", "PredictedStage", "StagePartition"]

PROFILE_KIND = "profile of a model"
PARTITION_KIND = "partition into stages"
FILE_VERSION = 1
_JSON_END = "\n}\n"
MAX_SHOWN_LAYERS = 40
"""Names of layers that an error message lists."""

Bottleneck = Literal["compute", "all-reduce", "transfer"]
BOTTLENECKS: tuple[Bottleneck, ...] = ("compute", "all-reduce", "transfer")


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one layer, or one node of a graph of layers, costs for one mini-batch on one worker.

    >>> LayerCost(name="fc", forward_s=0.002, backward_s=0.004, activation_bytes=4000, parameter_bytes=16).seconds
    0.006
    """

    name: str
    """The module's name in the model."""
    forward_s: float
    backward_s: float
    activation_bytes: float
    """Bytes of the layer's output."""
    parameter_bytes: float
    """Bytes of its parameters that are trained: what an all-reduce sends."""
    saved_bytes: float | None = None
    """Bytes that forward keeps for backward. None: as many as the output has."""
    forward_fixed_s: float = 0.0
    """The part of `forward_s` that does not depend on the batch size."""
    backward_fixed_s: float = 0.0
    """The part of `backward_s` that does not depend on the batch size."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise SpecError(f"the name of a layer is {self.name!r}; it must be a text, not empty")
        for key, value in asdict(self).items():
            if key != "name" and not (key == "saved_bytes" and value is None):
                _check_number(value, f"layer {self.name!r}: {key}")
        for key in ("forward", "backward"):
            whole, fixed = getattr(self, f"{key}_s"), getattr(self, f"{key}_fixed_s")
            if fixed > whole:
                raise SpecError(f"layer {self.name!r}: {key}_fixed_s is {fixed}, more than {key}_s, {whole}")

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def kept_bytes(self) -> float:
        """Bytes that a mini-batch between forward and backward needs."""
        return self.activation_bytes if self.saved_bytes is None else self.saved_bytes

    def scaled(self, factor: float) -> LayerCost:
        """The costs of a batch that is `factor` times as large: a + c·b for the times, c·b for the bytes."""
        return replace(
            self,
            forward_s=self.forward_fixed_s + factor * (self.forward_s - self.forward_fixed_s),
            backward_s=self.backward_fixed_s + factor * (self.backward_s - self.backward_fixed_s),
            activation_bytes=factor * self.activation_bytes,
            saved_bytes=None if self.saved_bytes is None else factor * self.saved_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The costs of all layers of a model, in the order of execution.

    >>> layers = [
    ...     LayerCost(name=name, forward_s=0.1, backward_s=0.2, activation_bytes=8e6, parameter_bytes=parameters)
    ...     for name, parameters in [("conv", 4e3), ("fc", 4e8)]
    ... ]
    >>> profile = ModelProfile(layers=tuple(layers), batch_size=32)
    >>> round(profile.seconds, 6), profile.links()
    (0.6, (('conv', 'fc'),))
    >>> profile.at_batch(64).layers[0].activation_bytes
    16000000.0
    """

    layers: tuple[LayerCost, ...]
    batch_size: int
    """The samples of a mini-batch, to which all costs refer."""
    edges: tuple[tuple[str, str], ...] | None = None
    """Pairs of names: the second layer uses the output of the first. None: each layer uses that of the one before."""
    measured_batch_sizes: tuple[int, ...] = ()
    model: str = ""
    machine: str = ""
    """Where the times were measured."""
    source: str = ""
    """Where the numbers are from, if they were not measured here."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise SpecError("the profile has no layers")
        for what, sizes in ("batch_size", (self.batch_size,)), ("measured_batch_sizes", self.measured_batch_sizes):
            if any(type(size) is not int or size < 1 for size in sizes):
                raise SpecError(f"{what} is {getattr(self, what)!r}; a batch size is a whole number, at least 1")
        repeated = [name for name, count in Counter(self.names).items() if count > 1]
        if repeated:
            raise SpecError(f"two layers have the name {repeated[0]!r}; each layer needs a name of its own")
        self._check_edges()

    def _check_edges(self) -> None:
        seen: set[tuple[str, str]] = set()
        for edge in self.edges or ():
            if len(edge) != 2:
                raise SpecError(f"edge {list(edge)} has {len(edge)} names; it must have two: [from, to]")
            places = [self.place(name, f"edge {list(edge)}") for name in edge]
            if places[0] >= places[1]:
                raise SpecError(
                    f"edge {list(edge)} leads from layer {places[0]} to layer {places[1]}: layers must be in the order "
                    "of execution, so that each uses only outputs of layers before it"
                )
            if edge in seen:
                raise SpecError(f"edge {list(edge)} is there twice; remove one")
            seen.add(edge)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the layers, in the order of execution."""
        return tuple(layer.name for layer in self.layers)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    @property
    def seconds(self) -> float:
        """Forward and backward of one mini-batch on one worker."""
        return math.fsum(layer.seconds for layer in self.layers)

    def place(self, name: str, what: str = "the partition") -> int:
        """The place of a layer in the order of execution.

        Raises:
            SpecError: if there is no such layer; `what` names it.
        """
        if name not in self._places:
            raise _unknown_layer(what, name, self.names)
        return self._places[name]

    def links(self) -> tuple[tuple[str, str], ...]:
        """The edges; those of a chain too."""
        return tuple(zip(self.names, self.names[1:], strict=False)) if self.edges is None else self.edges

    def at_batch(self, batch_size: int) -> ModelProfile:
        """The profile for another batch size: time(b) = a + c·b for each layer, bytes in proportion to b."""
        layers = tuple(layer.scaled(batch_size / self.batch_size) for layer in self.layers)
        return replace(self, layers=layers, batch_size=batch_size)

    def write(self, path: str | Path, training: Mapping[str, Any] | None = None) -> None:
        """Write the profile to a JSON file, one layer a line.

        `training` is an object that `read` passes over: what `syncline.planner` measures besides the layers.
        """
        head = {
            "format": PROFILE_KIND,
            "version": FILE_VERSION,
            "model": self.model,
            "machine": self.machine,
            "source": self.source,
            "batch_size": self.batch_size,
            "measured_batch_sizes": list(self.measured_batch_sizes),
        }
        head = {key: value for key, value in head.items() if value not in ("", [])}
        lists = {"layers": [_without_defaults(layer) for layer in self.layers]}
        if self.edges is not None:
            lists["edges"] = [list(edge) for edge in self.edges]  # type: ignore[misc]
        text = _json_text(head, lists)
        if training is not None:
            flat = {key: value for key, value in training.items() if not isinstance(value, list)}
            inner = _json_text(flat, {key: value for key, value in training.items() if isinstance(value, list)})
            indented = inner.rstrip().replace("\n", "\n  ")
            text = f'{text.removesuffix(_JSON_END)},\n  "training": {indented}{_JSON_END}'
        write_json_text(path, text)

    @classmethod
    def read(cls, path: str | Path) -> ModelProfile:
        """Read a profile from a JSON file.

        Raises:
            SpecError: if the file cannot be read, or a value in it cannot be right.
        """
        fields = read_json_fields(path, kind=PROFILE_KIND, version=FILE_VERSION)
        edges = fields.lists("edges") if "edges" in fields else None
        if "training" in fields:
            fields.inner("training")
        try:
            profile = cls(
                layers=tuple(_read_layer(each) for each in fields.inners("layers")),
                batch_size=fields.whole("batch_size", least=1),
                edges=edges,  # type: ignore[arg-type]
                measured_batch_sizes=(
                    fields.wholes("measured_batch_sizes", least=1) if "measured_batch_sizes" in fields else ()
                ),
                model=fields.text("model", ""),
                machine=fields.text("machine", ""),
                source=fields.text("source", ""),
            )
        except SpecError as error:
            raise _named(error, path) from None
        fields.finish()
        return profile


def _read_layer(fields: JsonFields) -> LayerCost:
    saved = fields.number("saved_bytes") if "saved_bytes" in fields else None
    names = ("forward_s", "backward_s", "activation_bytes", "parameter_bytes")
    layer = LayerCost(
        name=fields.text("name"),
        saved_bytes=saved,
        forward_fixed_s=fields.number("forward_fixed_s", 0.0),
        backward_fixed_s=fields.number("backward_fixed_s", 0.0),
        **{name: fields.number(name) for name in names},
    )
    fields.finish()
    return layer


@dataclass(frozen=True, kw_only=True)
class PredictedStage:
    """What a partitioner expects of one stage. Seconds are those of one mini-batch, divided by the workers."""

    first: str
    """The layer with which the stage begins."""
    last: str
    replicas: int
    compute_s: float
    """Forward and backward."""
    allreduce_s: float
    """The all-reduce of its weights among its workers."""
    transfer_s: float
    """Activations and their gradients, received from and sent to other stages."""
    time_s: float
    """The seconds between two mini-batches that leave this stage, if no other stage is slower."""
    limited_by: Bottleneck
    """What makes up most of `time_s`."""
    memory_bytes: float
    """Bytes on each of its workers."""


@dataclass(frozen=True, kw_only=True)
class PartitionPrediction:
    """What a partitioner expects of a partition."""

    stages: tuple[PredictedStage, ...]
    one_worker_s: float
    """Seconds of a mini-batch on one worker without a pipeline."""
    data_parallel_s: float | None = None
    """Seconds of a mini-batch, divided by the workers, if all workers train the whole model. None: unknown."""

    @property
    def slowest(self) -> int:
        """The stage that sets the pace of the pipeline."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].time_s)

    @property
    def time_s(self) -> float:
        """Seconds between two mini-batches: those of the slowest stage."""
        return self.stages[self.slowest].time_s

    @property
    def speedup(self) -> float:
        """The throughput in multiples of one worker's."""
        return self.one_worker_s / self.time_s if self.time_s else math.inf


@dataclass(frozen=True)
class StagePartition:
    """Where a model is cut into stages, and how many workers each stage has.

    >>> partition = StagePartition(cuts=("classifier.0",), replicas=(3, 1))
    >>> print(partition)
    3-1, cut before classifier.0
    >>> StagePartition(cuts=("classifier.0",), replicas=(3,))
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: 1 cut makes 2 stages, but replicas (3,) has 1: give the workers of each stage
    """

    cuts: tuple[str, ...]
    """The names of the modules with which stages 1, 2, … begin."""
    replicas: tuple[int, ...]
    """The workers of each stage."""
    placement: tuple[int, ...] = ()
    """The stage of each worker, by rank. Empty: the workers of stage 0 come first, then those of stage 1, and so on."""
    layers: tuple[tuple[str, ...], ...] = ()
    """The layers of each stage. Empty: each stage has all layers from its cut to the next."""
    prediction: PartitionPrediction | None = None

    def __post_init__(self) -> None:
        stages = len(self.cuts) + 1
        if any(not isinstance(name, str) or not name for name in self.cuts):
            raise SpecError(f"cuts are {self.cuts!r}; they must be names of modules")
        repeated = [name for name, count in Counter(self.cuts).items() if count > 1]
        if repeated:
            raise SpecError(f"two stages begin with {repeated[0]!r}; remove one of the cuts {self.cuts!r}")
        if len(self.replicas) != stages:
            what = f"{len(self.cuts)} cut makes" if len(self.cuts) == 1 else f"{len(self.cuts)} cuts make"
            raise SpecError(
                f"{what} {stages} stages, but replicas {self.replicas} has {len(self.replicas)}: give the workers of "
                "each stage"
            )
        if any(type(count) is not int or count < 1 for count in self.replicas):
            raise SpecError(f"replicas are {self.replicas}; each stage needs a whole number of workers, at least 1")
        self._check_placement()
        self._check_layers()
        if self.prediction is not None and len(self.prediction.stages) != stages:
            raise SpecError(f"{stages} stages, but the prediction has {len(self.prediction.stages)}")

    def _check_placement(self) -> None:
        found = Counter(self.placement)
        if self.placement and found != Counter(dict(enumerate(self.replicas))):
            raise SpecError(
                f"placement gives {dict(sorted(found.items()))} workers to the stages, but replicas are "
                f"{self.replicas}: change one of them, or remove placement"
            )

    def _check_layers(self) -> None:
        if not self.layers:
            return
        names = [name for stage in self.layers for name in stage]
        firsts = tuple(stage[0] for stage in self.layers if stage)
        if len(firsts) != len(self.layers) or len(set(names)) != len(names) or firsts[1:] != self.cuts:
            raise SpecError(
                f"layers of the stages begin with {firsts}, and cuts are {self.cuts}: each stage needs layers of its "
                "own, and begins with its cut; remove layers to cut between consecutive layers"
            )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.replicas)

    @property
    def workers(self) -> int:
        """The workers of all stages together."""
        return sum(self.replicas)

    def stage_of(self) -> tuple[int, ...]:
        """The stage of each worker, by rank.

        >>> StagePartition(("fc",), (3, 1)).stage_of()
        (0, 0, 0, 1)
        """
        return self.placement or tuple(stage for stage, count in enumerate(self.replicas) for _ in range(count))

    def __str__(self) -> str:
        where = f", cut before {', '.join(self.cuts)}" if self.cuts else ""
        return f"{'-'.join(map(str, self.replicas))}{where}"

    def check(self, names: Sequence[str]) -> None:
        """Raise a `SpecError` if a cut is no layer of a model, or cuts are not in the order of execution.

        `names` are the layers of the model, in the order of execution.
        """
        places = {name: place for place, name in enumerate(names)}
        last = 0
        for name in self.cuts:
            if name not in places:
                raise _unknown_layer("cuts", name, names)
            if places[name] == 0:
                raise SpecError(f"cuts names {name!r}, the first layer: stage 0 would be empty; remove this cut")
            if not self.layers and places[name] <= last:
                raise SpecError(f"cuts are {self.cuts}; put them in the order of execution")
            last = places[name]
        if self.layers and {name for stage in self.layers for name in stage} != set(names):
            raise SpecError(f"layers of the partition have other names than the {len(names)} layers of the model")

    def describe(self) -> str:
        """A table of the stages; which is the slowest, and why.

        It has no prediction if the file of the partition was edited: `predict_partition` makes a new one.
        """
        title = f"{self.stages} stage{'s' * (self.stages > 1)}, {self.workers} worker{'s' * (self.workers > 1)}: {self}"
        if self.prediction is None:
            return title
        return "\n".join([title, *_table(self.prediction), *_reason(self.prediction)])

    def write(self, path: str | Path) -> None:
        """Write the partition to a JSON file that can be edited: `cuts` and `replicas` are enough."""
        head = {"format": PARTITION_KIND, "version": FILE_VERSION, "cuts": self.cuts, "replicas": self.replicas}
        if self.placement:
            head["placement"] = self.placement
        lists: dict[str, list[Any]] = {"layers": list(self.layers)} if self.layers else {}
        if self.prediction is not None:
            head["one_worker_s"] = self.prediction.one_worker_s
            if self.prediction.data_parallel_s is not None:
                head["data_parallel_s"] = self.prediction.data_parallel_s
            lists["predicted"] = [_whole_bytes(asdict(stage)) for stage in self.prediction.stages]
        write_json_text(path, _json_text(head, lists))

    @classmethod
    def read(cls, path: str | Path) -> StagePartition:
        """Read a partition from a JSON file. If the cuts or replicas were edited, the old prediction is left out.

        Raises:
            SpecError: if the file cannot be read, or a value in it cannot be right.
        """
        fields = read_json_fields(path, kind=PARTITION_KIND, version=FILE_VERSION)
        try:
            partition = cls(
                cuts=fields.texts("cuts"),
                replicas=fields.wholes("replicas", least=1),
                placement=fields.wholes("placement", least=0) if "placement" in fields else (),
                layers=fields.lists("layers") if "layers" in fields else (),
            )
        except SpecError as error:
            raise _named(error, path) from None
        prediction = _read_prediction(fields)
        fields.finish()
        if prediction is None:
            return partition
        described = [stage.replicas for stage in prediction.stages], [stage.first for stage in prediction.stages[1:]]
        same = described == (list(partition.replicas), list(partition.cuts))
        return replace(partition, prediction=prediction) if same else partition


def _read_prediction(fields: JsonFields) -> PartitionPrediction | None:
    """The prediction in a partition's file, if it has one."""
    data_parallel_s = fields.number("data_parallel_s") if "data_parallel_s" in fields else None
    if "predicted" not in fields:
        fields.number("one_worker_s", 0.0)
        return None
    one_worker_s = fields.number("one_worker_s")
    stages = []
    numbers = ("compute_s", "allreduce_s", "transfer_s", "time_s", "memory_bytes")
    for each in fields.inners("predicted"):
        stage = PredictedStage(
            first=each.text("first"),
            last=each.text("last"),
            replicas=each.whole("replicas", least=1),
            limited_by=each.choice("limited_by", BOTTLENECKS),
            **{name: each.number(name) for name in numbers},
        )
        each.finish()
        stages.append(stage)
    return PartitionPrediction(stages=tuple(stages), one_worker_s=one_worker_s, data_parallel_s=data_parallel_s)


def _table(prediction: PartitionPrediction) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("stage", "layers", "workers", "compute", "all-reduce", "transfer", "mini-batch", "memory")
    ]
    for number, stage in enumerate(prediction.stages):
        seconds = (stage.compute_s, stage.allreduce_s, stage.transfer_s, stage.time_s)
        layers = stage.first if stage.first == stage.last else f"{stage.first} … {stage.last}"
        memory = format_bytes(round(stage.memory_bytes))
        rows.append((str(number), layers, str(stage.replicas), *map(_milliseconds, seconds), memory))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _reason(prediction: PartitionPrediction) -> list[str]:
    """Which stage is the slowest, and why."""
    number = prediction.slowest
    stage = prediction.stages[number]
    reasons: dict[Bottleneck, str] = {
        "compute": f"its computation takes {_milliseconds(stage.compute_s)}",
        "all-reduce": f"the all-reduce of its weights takes {_milliseconds(stage.allreduce_s)}",
        "transfer": f"the transfer of its activations takes {_milliseconds(stage.transfer_s)}",
    }
    lines = [f"slowest: stage {number}, {_milliseconds(stage.time_s)} a mini-batch: {reasons[stage.limited_by]}"]
    compared = f"throughput: {prediction.speedup:.2f} times that of one worker"
    if prediction.data_parallel_s:
        compared += f"; data parallelism: {prediction.one_worker_s / prediction.data_parallel_s:.2f} times"
    return [*lines, compared]


def _named(error: SpecError, path: str | Path) -> SpecError:
    """The error with the name of the file, unless it has it."""
    return error if str(error).startswith(str(path)) else SpecError(f"{path}: {error}")


def _unknown_layer(what: str, name: str, names: Sequence[str]) -> SpecError:
    shown = list(names) if len(names) <= MAX_SHOWN_LAYERS else [*names[:10], *names[-10:]]
    close = difflib.get_close_matches(name, names, n=3)
    return SpecError(
        f"{what} names {name!r}, which is none of the {len(names)} layers; {nearest(name, sorted({*shown, *close}))}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _check_number(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise SpecError(f"{what} is {value!r}; it must be a number, at least 0")


def _without_defaults(layer: LayerCost) -> dict[str, Any]:
    """The values of a layer as its file has them."""
    optional = {"saved_bytes": None, "forward_fixed_s": 0.0, "backward_fixed_s": 0.0}
    values = asdict(layer).items()
    return _whole_bytes({key: value for key, value in values if key not in optional or value != optional[key]})


def _whole_bytes(values: dict[str, Any]) -> dict[str, Any]:
    """Bytes without a point, so that a file is easy to read."""
    return {
        key: int(value) if key.endswith("_bytes") and float(value).is_integer() else value
        for key, value in values.items()
    }


def _json_text(head: dict[str, Any], lists: dict[str, list[Any]]) -> str:
    """A JSON document with one key a line, and of the lists one item a line."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    for key, items in lists.items():
        inside = ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in items)
        lines.append(f"  {json.dumps(key)}: [\n{inside}\n  ]")
    return "{\n" + ",\n".join(lines) + _JSON_END
