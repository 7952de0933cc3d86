"""Partitioners find what trying all partitions finds, and PipeDream's stages of VGG-16; files are checked."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from syncline.errors import SpecError
from syncline.parallel.partition import (
    LayerCost,
    ModelProfile,
    StagePartition,
    balanced,
    pipedream,
    pipedream_for_network,
    predict_partition,
)
from syncline.transports import Link, Network

VGG16 = Path(__file__).parent / "data" / "vgg16-profile.json"
CASES = 500
"""Random chains, and as many random graphs, for each formula."""


def random_profile(rng: random.Random, *, graph: bool, layers: int = 8) -> ModelProfile:
    """Layers whose computation, all-reduce and transfers take times of the same order at 1 byte per second."""
    count = min(layers, rng.randint(1, layers + 3))
    names = [f"layer{place}" for place in range(count)]
    costs = [
        LayerCost(
            name=name,
            forward_s=rng.choice([0.0, rng.uniform(0, 10)]),
            backward_s=rng.uniform(0, 20),
            activation_bytes=rng.choice([0, 1, rng.randint(0, 15)]),
            parameter_bytes=rng.choice([0, rng.randint(0, 12)]),
        )
        for name in names
    ]
    edges = [(names[i], names[j]) for i, j in combinations(range(count), 2) if j == i + 1 or rng.random() < 0.2]
    kept = tuple(edge for edge in edges if rng.random() < 0.8)
    return ModelProfile(layers=tuple(costs), batch_size=1, edges=kept if graph else None)


class EveryPartition:
    """All partitions of a small model, one after the other: the plain meaning of the formulas."""

    def __init__(self, profile: ModelProfile, bandwidth: list[float], workers: list[int], *, overlap: bool) -> None:
        self.layers = profile.layers
        names = [layer.name for layer in self.layers]
        self.users: dict[str, set[str]] = {name: set() for name in names}
        for source, target in profile.links():
            self.users[source].add(target)
        self.everything = frozenset(names)
        self.bandwidth, self.workers, self.overlap = bandwidth, workers, overlap
        self.states = [frozenset(some) for size in range(len(names) + 1) for some in self.closed(names, size)]

    def closed(self, names: list[str], size: int) -> Iterator[tuple[str, ...]]:
        for some in combinations(names, size):
            inside = set(some)
            if all(not (self.users[name] & inside) or name in inside for name in names):
                yield some

    def sum(self, key: str, names: frozenset[str]) -> float:
        return sum((float(getattr(layer, key)) for layer in self.layers if layer.name in names), 0.0)

    def crossing(self, state: frozenset[str]) -> float:
        if state == self.everything:
            return 0.0
        used = {name for name in state if not self.users[name] or self.users[name] - state}
        return self.sum("activation_bytes", frozenset(used))

    def stage(self, seconds: float, weights: float, machines: int, level: int, *, first: bool) -> float:
        group = math.prod(self.workers[:level]) if first else 1
        share = (machines - 1) / machines * weights / self.bandwidth[level] / group
        return max(seconds, 2 * share) / machines if self.overlap else (seconds + 4 * share) / machines

    def every(
        self, level: int, start: frozenset[str], stop: frozenset[str], left: int
    ) -> Iterator[tuple[float, list[tuple[frozenset[str], int]]]]:
        """The time and the innermost stages of each way to give layers to the `left` last machines of a level."""
        total = self.workers[level]
        for state in self.states:
            if not start < state <= stop:
                continue
            choices = [left] if state == stop else range(1, left)
            for machines in choices:
                rests = [(0.0, [])] if state == stop else list(self.every(level, state, stop, left - machines))
                for seconds, inner in self.inside(level, start, state):
                    time = self.stage(
                        seconds, self.sum("parameter_bytes", state - start), machines, level, first=left == total
                    )
                    if left < total:
                        for crossing in (self.crossing(start), self.crossing(state)):
                            time = max(time, 2 * crossing / (self.bandwidth[level] * machines))
                    here = [(names, replicas * machines) for names, replicas in inner]
                    for rest, later in rests:
                        yield max(time, rest), here + later

    def inside(
        self, level: int, start: frozenset[str], stop: frozenset[str]
    ) -> Iterator[tuple[float, list[tuple[frozenset[str], int]]]]:
        if level:
            yield from self.every(level - 1, start, stop, self.workers[level - 1])
        else:
            yield self.sum("forward_s", stop - start) + self.sum("backward_s", stop - start), [(stop - start, 1)]

    def memory(self, stages: list[tuple[frozenset[str], int]]) -> float:
        """Of the stage that needs most, with gradients."""
        needed = []
        for number, (names, replicas) in enumerate(stages):
            later = sum(count for _, count in stages[number + 1 :])
            weights = self.sum("parameter_bytes", names)
            mini_batches = 1 + math.ceil(later / replicas)
            needed.append(mini_batches * (self.sum("activation_bytes", names) + weights) + weights)
        return max(needed)

    def best(self, limit: float = math.inf) -> float:
        """The time of the slowest stage of the best partition within a limit of the memory."""
        found = self.every(len(self.workers) - 1, frozenset(), self.everything, self.workers[-1])
        return min((time for time, stages in found if self.memory(stages) <= limit), default=math.inf)


def found_time(
    profile: ModelProfile, workers: Any, bandwidth: Any, *, overlap: bool, limit: float = math.inf, reorder: bool = True
) -> float:
    """The time that the partitioner finds; infinite if it finds that no partition fits."""
    try:
        partition = pipedream(profile, workers, bandwidth, overlap=overlap, memory_bytes=limit, reorder=reorder)
    except SpecError:
        return math.inf
    assert partition.prediction is not None
    assert partition.workers == (workers if isinstance(workers, int) else math.prod(workers))
    return partition.prediction.time_s


@pytest.mark.parametrize("overlap", [False, True])
def test_pipedream_equals_all_partitions_of_chains(overlap: bool) -> None:
    rng = random.Random(1)
    for _ in range(CASES):
        profile, workers = random_profile(rng, graph=False), rng.randint(1, 5)
        every = EveryPartition(profile, [1.0], [workers], overlap=overlap)
        assert found_time(profile, workers, 1.0, overlap=overlap) == pytest.approx(every.best(), abs=1e-8)


@pytest.mark.parametrize("overlap", [False, True])
def test_pipedream_equals_all_partitions_of_graphs(overlap: bool) -> None:
    rng = random.Random(2)
    for _ in range(CASES):
        workers = rng.randint(1, 5)
        profile = random_profile(rng, graph=True, layers=8 if workers < 3 else 7)
        every = EveryPartition(profile, [1.0], [workers], overlap=overlap)
        assert found_time(profile, workers, 1.0, overlap=overlap) == pytest.approx(every.best(), abs=1e-8)


@pytest.mark.parametrize("overlap", [False, True])
def test_pipedream_equals_all_partitions_over_two_levels(overlap: bool) -> None:
    rng = random.Random(3)
    for _ in range(40):
        profile = random_profile(rng, graph=True, layers=5)
        workers, bandwidth = rng.choice([[2, 2], [3, 2], [2, 3], [2, 2, 2]]), [4.0, 1.0, 0.5]
        every = EveryPartition(profile, bandwidth[: len(workers)], workers, overlap=overlap)
        found = found_time(profile, workers, bandwidth[: len(workers)], overlap=overlap)
        assert found == pytest.approx(every.best(), abs=1e-8)


def test_pipedream_respects_the_memory_as_all_partitions_do() -> None:
    rng = random.Random(4)
    refused = 0
    for number in range(120):
        workers = rng.choice([[3], [4], [2, 2], [3, 2]])
        profile = random_profile(rng, graph=number % 2 == 0, layers=5)
        every = EveryPartition(profile, [4.0, 1.0][: len(workers)], workers, overlap=False)
        limit = rng.uniform(5, 60)
        best = every.best(limit)
        refused += best == math.inf
        found = found_time(profile, workers, [4.0, 1.0][: len(workers)], overlap=False, limit=limit)
        assert found == pytest.approx(best, abs=1e-8)
    assert 10 < refused < 60


def test_the_order_of_execution_is_kept_by_default() -> None:
    rng = random.Random(5)
    for _ in range(20):
        profile = random_profile(rng, graph=True)
        partition = pipedream(profile, 3, 1.0, overlap=False)
        assert partition.layers == ()
        partition.check(profile.names)
        chain = replace(profile, edges=None)
        assert found_time(profile, 3, 1.0, overlap=False) <= found_time(profile, 3, 1.0, overlap=False, reorder=False)
        assert found_time(chain, 3, 1.0, overlap=False, reorder=False) == found_time(chain, 3, 1.0, overlap=False)


def test_a_reordered_partition_lists_the_layers_of_each_stage() -> None:
    """Two branches of one layer each: the cheap cut puts the second branch before the first."""
    costs = {"stem": (1.0, 9), "left": (3.0, 50), "right": (2.0, 0), "join": (2.0, 0)}
    layers = tuple(
        LayerCost(name=name, forward_s=time, backward_s=0.0, activation_bytes=size, parameter_bytes=0)
        for name, (time, size) in costs.items()
    )
    edges = (("stem", "left"), ("stem", "right"), ("left", "join"), ("right", "join"))
    profile = ModelProfile(layers=layers, batch_size=1, edges=edges)
    partition = pipedream(profile, 2, 4.0, overlap=False, replicate=False, reorder=True)
    assert partition.layers == (("stem", "right"), ("left", "join"))
    assert partition.cuts == ("left",)
    partition.check(profile.names)
    assert pipedream(profile, 2, 4.0, overlap=False, replicate=False).layers == ()
    again = predict_partition(profile, partition, 4.0, overlap=False)
    assert again == partition


VGG16_ROWS = [
    # overlap, bytes per second, workers, replicas, last layer of each stage but the last, seconds, times, data parallel
    (False, 1e9, 4, (3, 1), (16,), 0.20552, 3.27, 1.15),
    (False, 1e9, 8, (7, 1), (23,), 0.10383, 6.48, 2.06),
    (False, 1e9, 16, (13, 2, 1), (23, 30), 0.05653, 11.90, 3.92),
    (False, 1.25e9, 4, (3, 1), (16,), 0.17635, 3.81, 1.34),
    (False, 1.25e9, 8, (7, 1), (23,), 0.10084, 6.67, 2.42),
    (False, 1.25e9, 16, (13, 2, 1), (23, 30), 0.05479, 12.27, 4.61),
    (False, 3.125e9, 4, (3, 1), (16,), 0.17339, 3.88, 2.23),
    (False, 3.125e9, 8, (7, 1), (23,), 0.09366, 7.18, 4.16),
    (False, 3.125e9, 16, (15, 1), (24,), 0.04552, 14.77, 8.05),
    (True, 1e9, 4, (3, 1), (16,), 0.20552, 3.27, 3.24),
    (True, 1e9, 8, (7, 1), (30,), 0.09463, 7.11, 5.56),
    (True, 1e9, 16, (15, 1), (30,), 0.04416, 15.23, 10.37),
    (True, 1.25e9, 4, (4,), (), 0.16813, 4.00, 4.00),
    (True, 1.25e9, 8, (7, 1), (23,), 0.08887, 7.57, 6.94),
    (True, 1.25e9, 16, (15, 1), (30,), 0.04416, 15.23, 12.96),
    (True, 3.125e9, 4, (4,), (), 0.16813, 4.00, 4.00),
    (True, 3.125e9, 8, (8,), (), 0.08407, 8.00, 8.00),
    (True, 3.125e9, 16, (16,), (), 0.04203, 16.00, 16.00),
]


@pytest.mark.parametrize(("overlap", "bandwidth", "workers", "replicas", "ends", "seconds", "times", "dp"), VGG16_ROWS)
def test_vgg16_has_the_published_stages(
    overlap: bool,
    bandwidth: float,
    workers: int,
    replicas: tuple[int, ...],
    ends: tuple[int, ...],
    seconds: float,
    times: float,
    dp: float,
) -> None:
    profile = ModelProfile.read(VGG16)
    partition = pipedream(profile, workers, bandwidth, overlap=overlap)
    predicted = partition.prediction
    assert predicted is not None
    assert predicted.data_parallel_s is not None
    assert partition.replicas == replicas
    assert tuple(profile.place(name) - 1 for name in partition.cuts) == ends
    # 0.2055209 is printed as .20552, and 0.1763492 as .17635.
    assert round(predicted.time_s, 5) == pytest.approx(seconds, abs=1e-9)
    assert round(predicted.speedup, 2) == pytest.approx(times)
    assert round(predicted.one_worker_s / predicted.data_parallel_s, 2) == pytest.approx(dp)


def test_the_vgg16_profile_has_the_published_totals() -> None:
    profile = ModelProfile.read(VGG16)
    assert len(profile.layers) == 39
    assert profile.seconds == pytest.approx(0.672535)
    assert sum(layer.parameter_bytes for layer in profile.layers) == 553_430_176
    assert profile.layers[0].activation_bytes == 128 * 64 * 224**2 * 4


def test_activations_that_cost_nothing_allow_earlier_cuts() -> None:
    profile = ModelProfile.read(VGG16)
    free = pipedream(profile, 4, 1e9, overlap=False, activation_compression=None)
    assert free.cuts == ("features.15",)
    assert free.prediction is not None
    assert free.prediction.stages[1].transfer_s == 0
    halved = pipedream(profile, 4, 1e9, overlap=False, activation_compression=2.0)
    assert halved.prediction is not None
    assert halved.prediction.stages[1].transfer_s == pytest.approx(0.10276, abs=1e-5)


def resnet50() -> ModelProfile:
    """ResNet-50 at batch 128: bytes by the shapes, times in proportion to the multiplications, 0.39 s in all."""
    shapes = [("stem", 118e6, 64 * 56**2, 9408)]
    width, size, inputs = 64, 56, 64
    for group, blocks in enumerate([3, 4, 6, 3]):
        for block in range(blocks):
            outputs = 4 * width
            weights = inputs * width + 9 * width**2 + width * outputs + (inputs * outputs if block == 0 else 0)
            shapes.append((f"layer{group + 1}.{block}", weights * size**2, outputs * size**2, weights))
            inputs = outputs
        width, size = 2 * width, size // 2
    shapes.append(("fc", 2e6, 1000, 2_049_000))
    whole = sum(work for _, work, _, _ in shapes)
    layers = tuple(
        LayerCost(
            name=name,
            forward_s=0.13 * work / whole,
            backward_s=0.26 * work / whole,
            activation_bytes=128 * 4 * values,
            parameter_bytes=4 * weights,
        )
        for name, work, values, weights in shapes
    )
    return ModelProfile(layers=layers, batch_size=128, model="ResNet-50")


@pytest.mark.parametrize("bandwidth", [1e9, 1.25e9, 3.125e9])
@pytest.mark.parametrize("workers", [4, 8, 16])
def test_resnet50_is_trained_data_parallel(bandwidth: float, workers: int) -> None:
    """By the paper's formula. Without overlap a pipeline avoids some of the all-reduce, but gains little."""
    profile = resnet50()
    assert sum(layer.parameter_bytes for layer in profile.layers) == pytest.approx(4 * 25.5e6, rel=0.01)
    assert pipedream(profile, workers, bandwidth, overlap=True).replicas == (workers,)
    prediction = pipedream(profile, workers, bandwidth, overlap=False).prediction
    assert prediction is not None
    assert prediction.data_parallel_s is not None
    assert prediction.data_parallel_s < 1.2 * prediction.time_s


def test_a_limit_of_the_memory_forces_a_pipeline() -> None:
    profile = resnet50()
    everything = sum(layer.kept_bytes + 2 * layer.parameter_bytes for layer in profile.layers)
    for limit in (0.9 * everything, 0.75 * everything):
        partition = pipedream(profile, 4, 3.125e9, overlap=True, memory_bytes=limit)
        assert partition.stages > 1
        assert partition.prediction is not None
        assert max(stage.memory_bytes for stage in partition.prediction.stages) <= limit
    assert pipedream(profile, 4, 3.125e9, overlap=True, memory_bytes=everything).replicas == (4,)


def test_memory_counts_mini_batches_in_flight() -> None:
    cost = {"forward_s": 1.0, "backward_s": 2.0, "activation_bytes": 8, "parameter_bytes": 4}
    profile = ModelProfile(layers=tuple(LayerCost(name=name, **cost) for name in "abc"), batch_size=1)
    partition = predict_partition(profile, StagePartition(("b", "c"), (2, 3, 1)), overlap=True, weight_copies=2.0)
    assert partition.prediction is not None
    assert [stage.memory_bytes for stage in partition.prediction.stages] == [3 * 12 + 8, 2 * 12 + 8, 12 + 8]
    saved = replace(profile, layers=(replace(profile.layers[0], saved_bytes=100), *profile.layers[1:]))
    partition = predict_partition(saved, partition, overlap=True, weight_copies=0.0)
    assert partition.prediction is not None
    assert partition.prediction.stages[0].memory_bytes == 3 * 104


def test_the_slowest_stage_and_the_reason_are_named() -> None:
    profile = ModelProfile.read(VGG16)
    text = pipedream(profile, 4, 1e9, overlap=False).describe()
    assert text.splitlines()[0] == "2 stages, 4 workers: 3-1, cut before features.17"
    assert "slowest: stage 1, 205.52 ms a mini-batch: the transfer of its activations takes 205.52 ms" in text
    assert "3.27 times that of one worker; data parallelism: 1.15 times" in text
    by_weights = predict_partition(profile, StagePartition(("classifier.0",), (2, 2)), 1e9, overlap=False).describe()
    assert "slowest: stage 1, 499.65 ms a mini-batch: the all-reduce of its weights takes 494.57 ms" in by_weights
    one = pipedream(profile, 1, 1e9, overlap=True).describe()
    assert one.startswith("1 stage, 1 worker: 1\n")
    assert "slowest: stage 0, 672.53 ms a mini-batch: its computation takes 672.53 ms" in one
    assert StagePartition(("fc",), (1, 1)).describe() == "2 stages, 2 workers: 1-1, cut before fc"


def test_workers_are_placed_machine_by_machine() -> None:
    """A pipeline inside each machine, and the machines are replicas of each other."""
    cost = {"forward_s": 1.0, "backward_s": 0.0}
    layers = (
        LayerCost(name="conv", activation_bytes=0, parameter_bytes=0, **cost),
        LayerCost(name="fc", activation_bytes=0, parameter_bytes=16, **cost),
    )
    profile = ModelProfile(layers=layers, batch_size=1)
    partition = pipedream(profile, (2, 3), (1.0, 1e6), overlap=False)
    assert partition.replicas == (3, 3)
    assert partition.stage_of() == (0, 1, 0, 1, 0, 1)
    assert partition.prediction is not None
    assert partition.prediction.time_s == pytest.approx(1 / 3, rel=1e-4)


FAST, SLOW = Link(latency=0.0, bandwidth=1e12), Link(latency=0.0, bandwidth=1.0)


@pytest.mark.parametrize(
    ("workers", "network", "levels"),
    [
        (4, Network(bandwidth=1.0, ranks_per_host=2, inside=FAST), ((2, 2), (1e12, 1.0))),
        (8, Network(bandwidth=10.0, ranks_per_host=2, inside=Link(latency=0, bandwidth=50.0)), ((2, 4), (50.0, 10.0))),
        # Hosts with different numbers of ranks, or links of single pairs: the slowest link.
        (3, Network(bandwidth=1.0, ranks_per_host=2, inside=FAST), (3, 1.0)),
        (6, Network(bandwidth=1.0, ranks_per_host=4, inside=FAST), (6, 1.0)),
        (4, Network(bandwidth=1e12, ranks_per_host=2, inside=FAST, links={(1, 0): SLOW}), (4, 1.0)),
        # A stage would have one rank on each host, apart from each other.
        (4, Network(bandwidth=1e12, ranks_per_host=2, inside=SLOW), (4, 1.0)),
        # One host, and hosts of one rank.
        (4, Network(bandwidth=1.0, ranks_per_host=4, inside=FAST), (4, 1e12)),
        (2, Network(bandwidth=1.0, ranks_per_host=4, inside=FAST), (2, 1e12)),
        (3, Network(bandwidth=7.0), (3, 7.0)),
        (1, Network(bandwidth=7.0), (1, math.inf)),
    ],
)
def test_hosts_of_a_network_are_levels_of_bandwidth(workers: int, network: Network, levels: Any) -> None:
    """Data parallelism costs nothing inside a host, but it does between hosts."""
    cost = {"forward_s": 1.0, "backward_s": 2.0, "activation_bytes": 1.0}
    layers = tuple(LayerCost(name=name, parameter_bytes=20.0, **cost) for name in "abc")
    profile = ModelProfile(layers=layers, batch_size=1)
    for overlap in (False, True):
        found = pipedream_for_network(profile, workers, network, overlap=overlap)
        assert found == pipedream(profile, *levels, overlap=overlap)
        assert list(found.placement) == sorted(found.placement)


def test_without_replicas_each_worker_has_a_stage() -> None:
    profile = ModelProfile.read(VGG16)
    partition = pipedream(profile, (2, 2), (1e10, 1e9), overlap=True, replicate=False)
    assert partition.replicas == (1, 1, 1, 1)
    assert partition.stage_of() == (0, 1, 2, 3)


@pytest.mark.parametrize("by", ["time", "memory"])
def test_balanced_equals_all_cuts(by: Any) -> None:
    rng = random.Random(6)
    for _ in range(100):
        profile = random_profile(rng, graph=rng.random() < 0.5)
        stages = rng.randint(1, min(5, len(profile.layers)))
        every = EveryPartition(profile, [1.0], [1], overlap=False)
        rated = []
        for cuts in combinations(range(1, len(profile.layers)), stages - 1):
            ends = [0, *cuts, len(profile.layers)]
            parts = [frozenset(profile.names[a:b]) for a, b in pairwise(ends)]
            times = [every.sum("forward_s", part) + every.sum("backward_s", part) for part in parts]
            largest = max(times) if by == "time" else every.memory([(part, 1) for part in parts])
            crossing = sum(every.crossing(frozenset(profile.names[:cut])) for cut in cuts)
            rated.append((round(largest, 8), crossing))
        partition = balanced(profile, stages, by=by)
        assert partition.replicas == (1,) * stages
        assert partition.prediction is not None
        assert partition.prediction.data_parallel_s is None
        key = "time_s" if by == "time" else "memory_bytes"
        largest = max(getattr(stage, key) for stage in partition.prediction.stages)
        crossing = sum(every.crossing(frozenset(profile.names[: profile.place(name)])) for name in partition.cuts)
        assert (largest, crossing) == pytest.approx(min(rated), abs=1e-7)


REFUSALS: dict[str, tuple[Callable[[ModelProfile], Any], str]] = {
    "more stages than layers": (lambda p: balanced(p, 40), "40 stages need as many layers, but the profile has 39"),
    "no stages": (lambda p: balanced(p, 0), "stages is 0"),
    "balanced by nothing known": (lambda p: balanced(p, 2, by=cast(Any, "size")), "by is 'size'"),
    "more workers than layers": (
        lambda p: pipedream(p, 40, 1e9, overlap=True, replicate=False),
        "40 workers without replicas need 40 stages, but the profile has 39 layers: use at most 39",
    ),
    "too little memory": (
        lambda p: pipedream(p, 4, 1e9, overlap=True, memory_bytes=1e9),
        r"over 4 workers needs at most memory_bytes=1 GB on each; the smallest needs 8.8 GB: use a smaller batch",
    ),
    "a cut that does not exist": (
        lambda p: predict_partition(p, StagePartition(("features.31",), (1, 1)), overlap=True),
        "'features.31', which is none of the 39 layers; did you mean 'features.3",
    ),
    "the first layer as a cut": (
        lambda p: predict_partition(p, StagePartition(("features.0",), (1, 1)), overlap=True),
        "stage 0 would be empty",
    ),
    "cuts in another order": (
        lambda p: predict_partition(p, StagePartition(("features.9", "features.3"), (1, 1, 1)), overlap=True),
        "put them in the order of execution",
    ),
    "no workers": (lambda p: pipedream(p, 0, 1e9, overlap=True), "workers is 0"),
    "no bandwidth": (lambda p: pipedream(p, 2, 0.0, overlap=True), "bandwidth is 0.0"),
    "levels without bandwidth": (lambda p: pipedream(p, (2, 2), 1e9, overlap=True), "2 levels and bandwidth 1"),
    "no compression": (
        lambda p: pipedream(p, 2, 1e9, overlap=True, activation_compression=0.0),
        "activation_compression is 0.0",
    ),
    "negative memory": (lambda p: pipedream(p, 2, 1e9, overlap=True, memory_bytes=-1.0), "memory_bytes is -1.0"),
    "negative copies": (lambda p: pipedream(p, 2, 1e9, overlap=True, weight_copies=-1.0), "weight_copies is -1.0"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_refused_with_values(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(SpecError, match=message):
        call(ModelProfile.read(VGG16))


def test_a_graph_with_too_many_states_is_refused() -> None:
    cost = {"forward_s": 1.0, "backward_s": 2.0, "activation_bytes": 8, "parameter_bytes": 4}
    profile = ModelProfile(layers=tuple(LayerCost(name=f"l{k}", **cost) for k in range(30)), batch_size=1, edges=())
    assert pipedream(profile, 2, 1.0, overlap=True).workers == 2
    with pytest.raises(SpecError, match=r"30 layers can be cut in more than 1000 places: merge layers, or .*reorder"):
        pipedream(profile, 2, 1.0, overlap=True, reorder=True)


def partition_file(tmp_path: Path) -> tuple[StagePartition, Path]:
    partition = pipedream(ModelProfile.read(VGG16), 4, 1e9, overlap=False)
    path = tmp_path / "plan.json"
    partition.write(path)
    return partition, path


def test_a_partition_is_written_and_read(tmp_path: Path) -> None:
    partition, path = partition_file(tmp_path)
    assert StagePartition.read(path) == partition
    assert json.loads(path.read_text())["cuts"] == ["features.17"]
    levels = pipedream(ModelProfile.read(VGG16), (2, 2), (1e10, 1e9), overlap=True)
    levels.write(path)
    assert StagePartition.read(path) == levels
    assert list(tmp_path.iterdir()) == [path]
    branches = StagePartition(("b",), (1, 2), layers=(("a", "c"), ("b", "d")))
    branches.write(path)
    assert StagePartition.read(path) == branches


def test_an_edited_partition_loses_its_old_prediction(tmp_path: Path) -> None:
    _, path = partition_file(tmp_path)
    document = json.loads(path.read_text())
    for key, value in ("cuts", ["features.24"]), ("replicas", [2, 2]):
        path.write_text(json.dumps({**document, key: value}))
        edited = StagePartition.read(path)
        assert edited.prediction is None
        assert list(getattr(edited, key)) == value
        assert predict_partition(ModelProfile.read(VGG16), edited, 1e9, overlap=False).prediction is not None
    path.write_text(json.dumps({key: document[key] for key in ("format", "version", "cuts", "replicas")}))
    assert StagePartition.read(path).cuts == ("features.17",)


def test_a_profile_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    rng = random.Random(7)
    profiles = [ModelProfile.read(VGG16), *(random_profile(rng, graph=True) for _ in range(5))]
    layer = LayerCost(
        name="größe/α",
        forward_s=0.3,
        backward_s=1e-7,
        activation_bytes=3,
        parameter_bytes=0,
        saved_bytes=0,
        forward_fixed_s=0.1,
    )
    profiles.append(ModelProfile(layers=(layer,), batch_size=2, measured_batch_sizes=(2, 4), machine="cpu"))
    for profile in profiles:
        profile.write(path)
        assert ModelProfile.read(path) == profile


def test_the_batch_size_of_a_profile_can_change() -> None:
    layer = LayerCost(
        name="fc",
        forward_s=0.3,
        backward_s=0.5,
        activation_bytes=6,
        parameter_bytes=8,
        saved_bytes=10,
        forward_fixed_s=0.1,
        backward_fixed_s=0.5,
    )
    other = ModelProfile(layers=(layer,), batch_size=2).at_batch(8)
    assert other.batch_size == 8
    expected = replace(layer, forward_s=0.9, backward_s=0.5, activation_bytes=24, saved_bytes=40)
    for key, value in vars(expected).items():
        assert getattr(other.layers[0], key) == (value if key == "name" else pytest.approx(value))


PARTITION_DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"format": "profile of a model"}, "'format' is 'profile of a model'"),
    "a later version": ({"version": 2}, "'version' is 2; this release reads version 1"),
    "an unknown key": ({"replica": [1]}, "unknown key 'replica'; did you mean 'replicas'"),
    "cuts as text": ({"cuts": "features.17"}, "'cuts' is 'features.17'; it must be a list"),
    "a cut that is no text": ({"cuts": [17]}, r"'cuts'\[0\] is 17; it must be a text"),
    "an empty cut": ({"cuts": [""]}, "it must be a text, not empty"),
    "a cut twice": ({"cuts": ["a", "a"], "replicas": [1, 1, 1]}, "two stages begin with 'a'"),
    "too many replicas": ({"replicas": [1, 1, 1]}, "1 cut makes 2 stages, but replicas .* has 3"),
    "no replica": ({"replicas": [3, 0]}, r"'replicas'\[1\] is 0; it must be a whole number, at least 1"),
    "true as a number": ({"replicas": [3, True]}, r"'replicas'\[1\] is true"),
    "half a worker": ({"replicas": [3, 0.5]}, r"'replicas'\[1\] is 0.5"),
    "a wrong placement": ({"placement": [0, 0, 1, 1]}, "placement gives {0: 2, 1: 2} workers"),
    "a placement of texts": ({"placement": ["0"]}, r"'placement'\[0\] is '0'"),
    "layers that do not begin with the cut": ({"layers": [["a"], ["b"]]}, "layers of the stages begin with"),
    "layers that are no lists": ({"layers": ["a", "b"]}, r"'layers'\[0\] is 'a'; it must be a list of texts"),
    "an empty stage": ({"layers": [[], ["features.17"]]}, "layers of the stages begin with"),
    "predictions without the time of one worker": ({"one_worker_s": None}, "'one_worker_s' is null"),
    "a negative time": ({"one_worker_s": -1}, "'one_worker_s' is -1; it must be a number, at least 0"),
    "a prediction that is no object": ({"predicted": [1, 2]}, r"'predicted'\[0\] is 1; it must be an object"),
    "a prediction without times": ({"predicted": [{}]}, r"'predicted'\[0\]: the key 'first' is missing"),
}


@pytest.mark.parametrize("name", PARTITION_DAMAGE)
def test_a_damaged_partition_is_refused(name: str, tmp_path: Path) -> None:
    _, path = partition_file(tmp_path)
    change, message = PARTITION_DAMAGE[name]
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(SpecError, match=message) as caught:
        StagePartition.read(path)
    assert str(path) in str(caught.value)


PREDICTION_DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown reason": ({"limited_by": "luck"}, "'limited_by' is 'luck'; it must be 'compute' or 'all-reduce'"),
    "a reason that is no text": ({"limited_by": []}, "'limited_by' is a list of 0"),
    "a time that is no number": ({"time_s": "1"}, "'time_s' is '1'; it must be a number"),
    "an unknown key": ({"seconds": 1}, "unknown key 'seconds'"),
}


@pytest.mark.parametrize("name", PREDICTION_DAMAGE)
def test_a_damaged_prediction_is_refused(name: str, tmp_path: Path) -> None:
    _, path = partition_file(tmp_path)
    document = json.loads(path.read_text())
    change, message = PREDICTION_DAMAGE[name]
    document["predicted"][1] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(SpecError, match=message):
        StagePartition.read(path)


TEXT_DAMAGE = {
    "empty": (b"", "cannot be read as JSON"),
    "cut off": (b'{"format": "partition into st', "cannot be read as JSON"),
    "no object": (b"[1, 2]", "is a list of 2; it must be an object"),
    "no text": (b"\xff\xfe\x00", "cannot be read as JSON"),
    "too deep": (b"[" * 200_000, "cannot be read as JSON"),
    "a key twice": (b'{"cuts": [], "cuts": []}', "has the key 'cuts' twice"),
    "not a number": (b'{"one_worker_s": NaN}', "NaN is not a number of JSON"),
    "without its kind": (b"{}", "the key 'format' is missing"),
    "a number without end": (b'{"one_worker_s": 1' + b"0" * 5000 + b"}", "cannot be read as JSON|'format' is missing"),
}


@pytest.mark.parametrize("name", TEXT_DAMAGE)
def test_what_is_no_partition_at_all_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    content, message = TEXT_DAMAGE[name]
    path.write_bytes(content)
    for read in (StagePartition.read, ModelProfile.read):
        with pytest.raises(SpecError, match=message):
            read(path)


def test_files_that_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        StagePartition.read(tmp_path / "no.json")
    with pytest.raises(SpecError, match="cannot be read"):
        StagePartition.read(tmp_path)
    with pytest.raises(SpecError, match="cannot be written"):
        StagePartition((), (1,)).write(tmp_path / "no" / "plan.json")
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(SpecError, match="more than a partition into stages can have"):
        StagePartition.read(huge)


def test_every_cut_off_file_is_refused(tmp_path: Path) -> None:
    _, path = partition_file(tmp_path)
    content = path.read_bytes().rstrip()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(SpecError, match=str(path)):
            StagePartition.read(path)


LAYER = {"name": "fc", "forward_s": 1, "backward_s": 2, "activation_bytes": 3, "parameter_bytes": 4}
PROFILE_DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"layers": []}, "the profile has no layers"),
    "a name twice": ({"layers": [LAYER, LAYER]}, "two layers have the name 'fc'"),
    "a layer without name": ({"layers": [{**LAYER, "name": ""}]}, "it must be a text, not empty"),
    "a layer without a time": ({"layers": [{"name": "fc"}]}, "is missing"),
    "a negative time": ({"layers": [{**LAYER, "forward_s": -1}]}, "'forward_s' is -1"),
    "an infinite time": ({"layers": [{**LAYER, "forward_s": 1e999}]}, "Infinity"),
    "too large a time": ({"layers": [{**LAYER, "forward_s": 10**400}]}, "'forward_s' is a whole number of 1329 bits"),
    "an unknown key": ({"layers": [{**LAYER, "flops": 1}]}, "unknown key 'flops'"),
    "a fixed part above the whole": (
        {"layers": [{**LAYER, "forward_fixed_s": 3}]},
        "fixed_s is 3.0, more than",
    ),
    "no batch": ({"batch_size": 0}, "'batch_size' is 0"),
    "a batch size of no number": ({"measured_batch_sizes": [1, "2"]}, r"'measured_batch_sizes'\[1\] is '2'"),
    "a model that is no text": ({"model": 16}, "'model' is 16; it must be a text"),
    "an edge to nowhere": ({"edges": [["fc", "conv"]]}, "'conv', which is none of the 2 layers"),
    "an edge of one layer": ({"edges": [["fc"]]}, "it must have two"),
    "an edge back": ({"edges": [["out", "fc"]]}, "from layer 1 to layer 0: layers must be in the order of execution"),
    "an edge to itself": ({"edges": [["fc", "fc"]]}, "from layer 0 to layer 0"),
    "an edge twice": ({"edges": [["fc", "out"]] * 2}, "is there twice"),
    "another key": ({"layer": []}, "unknown key 'layer'; did you mean 'layers'"),
}


@pytest.mark.parametrize("name", PROFILE_DAMAGE)
def test_a_damaged_profile_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    right = {
        "format": "profile of a model",
        "version": 1,
        "batch_size": 4,
        "layers": [LAYER, {**LAYER, "name": "out"}],
    }
    path.write_text(json.dumps(right))
    assert ModelProfile.read(path).names == ("fc", "out")
    change, message = PROFILE_DAMAGE[name]
    path.write_text(json.dumps({**right, **change}))
    with pytest.raises(SpecError, match=message) as caught:
        ModelProfile.read(path)
    assert str(path) in str(caught.value)
