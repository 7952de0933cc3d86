"""A profile and a measurement of a machine, made of plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from syncline.costs import Calibration
from syncline.parallel.partition import LayerCost, ModelProfile
from syncline.planner.machine import CodecRate, GradientExchange, MachineMeasurement
from syncline.planner.measured_memory import LayerMemory, MemoryMeasurement, OptimizerMemory, ParameterSize
from syncline.planner.profile import LayerFlops, TrainingProfile

BANDWIDTH = 12.5e6
CALIBRATION = Calibration(1e-4, BANDWIDTH, 5e-5, 0.0, 0.0, 0.0)


def profile_of(
    shapes: Sequence[tuple[int, ...]], *, forward_s: float = 0.01, backward_s: float = 0.02, update_s: float = 0.003
) -> TrainingProfile:
    """A chain of layers, each with one parameter, for a batch of 8 samples. All times are of samples."""
    names = [f"layer{place}" for place in range(len(shapes))]
    parameters = []
    layers = []
    for name, shape in zip(names, shapes, strict=True):
        elements = 1
        for side in shape:
            elements *= side
        parameters.append(ParameterSize(f"{name}.weight", elements, 4 * elements, shape))
        layers.append(
            LayerCost(
                name=name,
                forward_s=forward_s,
                backward_s=backward_s,
                activation_bytes=8 * 1000.0,
                parameter_bytes=4.0 * elements,
            )
        )
    weight_bytes = float(sum(each.bytes for each in parameters))
    memory = MemoryMeasurement(
        batch_sizes=(4, 8),
        layers=tuple(
            LayerMemory(name=name, forward_bytes=(1e4, 2e4), backward_bytes=(1e4, 2e4), gradient_bytes=(0.0, 0.0))
            for name in names
        ),
        recomputed=(),
        parameters=tuple(parameters),
        weight_bytes=weight_bytes,
        buffer_bytes=0.0,
        input_bytes=(400.0, 800.0),
        optimizer=OptimizerMemory(name="momentum", state_bytes=weight_bytes, temporary_bytes=0.0),
    )
    return TrainingProfile(
        workload="chain",
        layers=ModelProfile(layers=tuple(layers), batch_size=8, measured_batch_sizes=(4, 8)),
        flops=tuple(LayerFlops(1e6, 2e6) for _ in names),
        memory=memory,
        update_s=update_s,
        samples_per_s=4000.0,
        sample_bytes=100.0,
        threads=1,
        torch_version="2.13",
        syncline_version="0",
    )


def machine_of(workers: int = 4, *, cores: int = 0, lab: bool = False, **changes: Any) -> MachineMeasurement:
    """Hosts with a worker each on a network of 100 Mbit/s."""
    times: Mapping[str, float] = {
        "call_s": 1e-4,
        "compute_s": 0.04,
        "allreduce_s": 0.02,
        "together_s": 0.04,
        "compute_slowdown": 1.0,
    }
    given: dict[str, Any] = {
        "hosts": workers,
        "threads": 1,
        "network": CALIBRATION,
        "cores": cores,
        "lab": f"{workers}@100mbit" if lab else "",
        **times,
        **changes,
    }
    return MachineMeasurement(workers=workers, **given)


def exchanges_of(strategy: str, codec: str, seconds: Sequence[float], side: int = 32) -> tuple[GradientExchange, ...]:
    """A small exchange, one of 16 small tensors with as many bytes, and one with 64 times as many."""
    small = 4 * side * side * 16
    rows = ((1, small), (16, small), (1, 64 * small))
    return tuple(
        GradientExchange(strategy=strategy, codec=codec, tensors=tensors, nbytes=nbytes, seconds=each)
        for (tensors, nbytes), each in zip(rows, seconds, strict=True)
    )


ONEBIT = CodecRate(spec="onebit", encode_bytes_per_s=1e9, decode_bytes_per_s=1e9, payload_ratio=1 / 32)
