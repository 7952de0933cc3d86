"""What each layer costs for one micro-batch: of a described model on a described device, or of a measured profile.

Both give the same table, so that a prediction does not depend on where the numbers are from. A measured profile has no
tensor teams: how its layers would be divided is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from syncline.errors import SpecError
from syncline.planner.devices import ITEM_BYTES, Device
from syncline.planner.memory import block_activation_bytes
from syncline.planner.models import LayerWork, ModelWork, TransformerShape
from syncline.planner.plans import Recomputation

if TYPE_CHECKING:
    from syncline.parallel.partition import ModelProfile

__all__ = [
    "DescribedCosts",
    "LayerTime",
    "MeasuredCosts",
    "ModelCosts",
    "StageLayers",
    "cut_stages",
    "described_profile",
]

EXTRAPOLATED = 2
"""How many times smaller than the measured batches a micro-batch of a profile may be."""
COLLECTIVES_OF_BLOCK = 2
"""All-reduces of a tensor team in the forward of a transformer layer, and in its backward."""


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """One layer, or `copies` equal ones, for one micro-batch on one rank of a tensor team."""

    name: str
    copies: int
    forward_s: float
    backward_s: float
    """With the forward that recomputation repeats."""
    parameters: float
    """Of this rank."""
    output_bytes: float
    saved_bytes: float
    recomputed_bytes: float = 0.0
    """Bytes that exist only while the layer is computed again."""
    collectives: int = 0
    """All-reduces of the tensor team in forward and backward together."""
    collective_bytes: float = 0.0
    tied_parameters: float = 0.0
    """Of the first layer's parameters on this rank, those that this layer uses too."""
    largest_tensor: float = 0.0
    """Elements of its largest parameter tensor on this rank. 0: not known."""
    matrix_share: float | None = None
    """The share of the device's peak that its matrix products reach. None: not known."""


@dataclass(frozen=True)
class StageLayers:
    """Layers of one pipeline stage, each with how many of its copies."""

    layers: tuple[tuple[LayerTime, int], ...]

    @cached_property
    def forward_s(self) -> float:
        """Seconds of the forward of a micro-batch, without the tensor team's collectives."""
        return sum(count * layer.forward_s for layer, count in self.layers)

    @cached_property
    def backward_s(self) -> float:
        """Seconds of the backward of a micro-batch."""
        return sum(count * layer.backward_s for layer, count in self.layers)

    @cached_property
    def parameters(self) -> float:
        """Parameters on a rank."""
        return sum(count * layer.parameters for layer, count in self.layers)

    @property
    def tied_parameters(self) -> float:
        """Parameters whose gradients are summed over this stage and the first one."""
        return sum(layer.tied_parameters for layer, _ in self.layers)

    @property
    def largest_tensor(self) -> float:
        """Elements of the largest parameter tensor on a rank."""
        return max(layer.largest_tensor for layer, _ in self.layers)

    @property
    def output_bytes(self) -> float:
        """Bytes that it sends to the next stage."""
        return self.layers[-1][0].output_bytes


class ModelCosts(Protocol):
    """What a prediction needs to know about a model."""

    text: str
    unit: str
    sample_bytes: float
    tensor_limit: int
    cuts: int
    smallest_micro_batch: int
    """Smaller micro-batches cannot be predicted."""

    def layer_times(
        self, micro_batch: int, tensor: int, *, sequence: bool, recomputation: Recomputation
    ) -> tuple[LayerTime, ...]:
        """The costs of all layers."""


class DescribedCosts:
    """The costs of a described model, by the roofline of the device.

    >>> from syncline.planner.devices import DEVICES
    >>> from syncline.planner.models import build_model
    >>> costs = DescribedCosts(build_model("gpt(layers=2, hidden=1024)"), DEVICES["a100"])
    >>> [layer.collectives for layer in costs.layer_times(1, 2, sequence=False, recomputation="full")]
    [1, 6, 1]
    """

    def __init__(self, model: ModelWork, device: Device) -> None:
        self.model, self.device = model, device
        self.text, self.unit, self.sample_bytes = model.text, model.unit, model.sample_bytes
        self.tensor_limit, self.cuts = model.tensor_limit, model.cuts
        self.smallest_micro_batch = 1
        self._known: dict[tuple[int, int, bool, str], tuple[LayerTime, ...]] = {}

    def layer_times(
        self, micro_batch: int, tensor: int, *, sequence: bool, recomputation: Recomputation
    ) -> tuple[LayerTime, ...]:
        """The costs of all layers."""
        key = (micro_batch, tensor, sequence, recomputation)
        if key not in self._known:
            self._known[key] = tuple(
                self._time(layer, micro_batch, tensor, sequence=sequence, recomputation=recomputation)
                for layer in self.model.layers
            )
        return self._known[key]

    def _time(
        self, layer: LayerWork, samples: int, tensor: int, *, sequence: bool, recomputation: Recomputation
    ) -> LayerTime:
        precision, device = self.model.precision, self.device
        if sequence and tensor > 1:
            streamed = layer.streamed_elements + layer.replicated_elements
            layer = replace(layer, streamed_elements=streamed, replicated_elements=0.0)
        forward = layer.forward_s(samples, tensor, device, precision)
        backward = layer.backward_s(samples, tensor, device, precision)
        applies = layer.recomputed and recomputation != "none"
        shape = self.model.transformer
        block = shape is not None and layer.copies == shape.layers and layer.name == "block"
        if applies:
            backward += forward if recomputation == "full" else self._scores_s(shape, samples, tensor)
        divided = tensor if layer.tensor else 1
        saved = samples * layer.saved_elements * ITEM_BYTES[precision] / divided
        again = 0.0
        if block and shape is not None:
            settings = {"sequence": sequence, "recomputation": recomputation}
            saved = block_activation_bytes(shape, samples, tensor, **settings)  # type: ignore[arg-type]
            if recomputation == "full":
                again = block_activation_bytes(shape, samples, tensor, sequence=sequence)
        elif applies and recomputation == "full":
            again, saved = saved, samples * layer.output_elements * ITEM_BYTES[precision]
        collectives = 0
        if divided > 1:
            passes = 3 if applies and recomputation == "full" else 2
            collectives = COLLECTIVES_OF_BLOCK * passes if block else 1
        outputs = layer.output_elements if block or layer.name == "embedding" or shape is None else 0.0
        return LayerTime(
            name=layer.name,
            copies=layer.copies,
            forward_s=forward,
            backward_s=backward,
            parameters=layer.parameters / divided,
            output_bytes=samples * layer.output_elements * ITEM_BYTES[precision],
            saved_bytes=saved,
            recomputed_bytes=again,
            collectives=collectives,
            collective_bytes=samples * outputs * ITEM_BYTES[precision],
            tied_parameters=layer.tied_parameters / divided,
            largest_tensor=layer.largest_tensor / divided,
            matrix_share=layer.matrix_share(samples, tensor, device, precision) if layer.flops else None,
        )

    def _scores_s(self, shape: TransformerShape | None, samples: int, tensor: int) -> float:
        """Seconds to compute the attention scores of a layer again."""
        if shape is None or shape.attention == "flash":
            return 0.0
        elements = 5 * shape.heads * shape.sequence**2 / tensor * samples
        flops = 4.0 * shape.sequence**2 * shape.hidden * samples / tensor
        precision = self.model.precision
        matrix = self.device.matrix_s(flops, products=2, weight_bytes=0.0, precision=precision)
        return matrix + self.device.stream_s(elements * ITEM_BYTES[precision])


class MeasuredCosts:
    """The costs of a measured profile: time(b) = a + c·b for each layer."""

    sample_bytes = 0.0
    tensor_limit = 1
    unit = "samples"

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.text = profile.model or "the profile"
        self.cuts = len(profile.layers)
        # One batch size does not tell fixed costs from those of each sample, two tell them roughly.
        sizes = profile.measured_batch_sizes or (profile.batch_size,)
        self.smallest_micro_batch = max(1, min(sizes) // EXTRAPOLATED)

    def layer_times(
        self, micro_batch: int, tensor: int, *, sequence: bool, recomputation: Recomputation
    ) -> tuple[LayerTime, ...]:
        """The costs of all layers."""
        if tensor > 1:
            raise SpecError("a measured profile does not say how tensor teams divide its layers: use tensor=1")
        full = recomputation == "full"
        return tuple(
            LayerTime(
                name=layer.name,
                copies=1,
                forward_s=layer.forward_s,
                backward_s=layer.backward_s + (layer.forward_s if full else 0.0),
                parameters=layer.parameter_bytes / 4,
                output_bytes=layer.activation_bytes,
                saved_bytes=layer.activation_bytes if full else layer.kept_bytes,
                recomputed_bytes=layer.kept_bytes if full else 0.0,
            )
            for layer in self.profile.at_batch(micro_batch).layers
        )


def described_profile(costs: DescribedCosts, batch_size: int) -> ModelProfile:
    """The profile of a described model on one device, for partitioners: as if it had been measured.

    >>> from syncline.planner.devices import DEVICES
    >>> from syncline.planner.models import build_model
    >>> profile = described_profile(DescribedCosts(build_model("vgg(16)"), DEVICES["v100"]), 64)
    >>> sum(layer.parameter_bytes for layer in profile.layers)
    553430176.0
    """
    from syncline.parallel.partition import LayerCost, ModelProfile

    item = ITEM_BYTES[costs.model.precision]
    layers = [
        LayerCost(
            name=layer.name if layer.copies == 1 else f"{layer.name}.{number}",
            forward_s=layer.forward_s,
            backward_s=layer.backward_s,
            activation_bytes=layer.output_bytes,
            parameter_bytes=item * layer.parameters,
            saved_bytes=layer.saved_bytes,
        )
        for layer in costs.layer_times(batch_size, 1, sequence=False, recomputation="none")
        for number in range(layer.copies)
    ]
    return ModelProfile(layers=tuple(layers), batch_size=batch_size, model=costs.text)


def cut_stages(layers: Sequence[LayerTime], stages: int) -> tuple[StageLayers, ...]:
    """Contiguous stages: of a repeated block as equal numbers as possible, else of times as equal as possible.

    A later stage has its own copy of the parameters of the first layer that it uses.

    >>> each = dict(forward_s=1.0, backward_s=2.0, parameters=1.0, output_bytes=1.0, saved_bytes=1.0)
    >>> layers = [LayerTime(name=name, copies=copies, **each) for name, copies in (("in", 1), ("block", 5), ("out", 1))]
    >>> [sum(count for _, count in stage.layers) for stage in cut_stages(layers, 2)]
    [4, 3]
    """
    if stages == 1:
        return (StageLayers(tuple((layer, layer.copies) for layer in layers)),)
    repeated = max(range(len(layers)), key=lambda place: layers[place].copies)
    block = layers[repeated]
    if block.copies > 1:
        if stages > block.copies:
            raise SpecError(f"{stages} stages need as many layers {block.name!r}, but there are {block.copies}")
        base, more = divmod(block.copies, stages)
        found = [[(block, base + (place < more))] for place in range(stages)]
        found[0] = [*((layer, layer.copies) for layer in layers[:repeated]), *found[0]]
        found[-1] += [(_with_copy(layer), layer.copies) for layer in layers[repeated + 1 :]]
        return tuple(StageLayers(tuple(each)) for each in found)
    if stages > len(layers):
        raise SpecError(f"{stages} stages need as many layers, but there are {len(layers)}")
    ends = [*_balanced_ends([layer.forward_s + layer.backward_s for layer in layers], stages), len(layers)]
    begins = [0, *ends[:-1]]
    return tuple(
        StageLayers(tuple((layer, 1) for layer in layers[begin:end])) for begin, end in zip(begins, ends, strict=True)
    )


def _with_copy(layer: LayerTime) -> LayerTime:
    """A layer of a later stage, with its copy of tied parameters."""
    return replace(layer, parameters=layer.parameters + layer.tied_parameters) if layer.tied_parameters else layer


def _balanced_ends(seconds: Sequence[float], stages: int) -> list[int]:
    """Where the stages 1, 2, … begin, by `syncline.parallel.partition.balanced`."""
    from syncline.parallel.partition import LayerCost, ModelProfile, balanced

    layers = tuple(
        LayerCost(name=str(place), forward_s=each, backward_s=0.0, activation_bytes=1.0, parameter_bytes=1.0)
        for place, each in enumerate(seconds)
    )
    return [int(name) for name in balanced(ModelProfile(layers=layers, batch_size=1), stages).cuts]
