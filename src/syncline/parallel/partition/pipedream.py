"""PipeDream's partitioner: cuts and replicas that make the slowest stage as fast as possible.

t, w: seconds and bytes of the weights of a stage; a: bytes that cross a cut; B: bytes per second of a worker; r: the
compression of activations. The best time of the first j layers on m workers, with the last stage on m′ of them::

    A(j, m) = min over i, m′ of  max{ A(i, m − m′),  T(i → j, m′),  2·aᵢ/(B·m′·r),  2·aⱼ/(B·m′·r) (j not the last) }
    or one stage                      T(0 → j, m)

    overlap=False     T(m) = ( t + 4·(m − 1)/m · w/B ) / m         the published code
    overlap=True      T(m) = max{ t,  2·(m − 1)/m · w/B } / m      the paper

Levels: the result of a level with all its workers is the t of the next one, whose "workers" are then groups of g
workers. A group's all-reduce serves g mini-batches, so the time of one stage over all groups has w/(B·g).

Memory of a worker: f · (activations + weights) + c · weights, f = 1 + ⌈workers of later stages / workers of the stage⌉
mini-batches between forward and backward, each with its own version of the weights.

D. Narayanan and others, *PipeDream: generalized pipeline parallelism for DNN training*, 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.errors import SpecError
from syncline.parallel.partition.base import (
    Bottleneck,
    ModelProfile,
    PartitionPrediction,
    PredictedStage,
    StagePartition,
)
from syncline.parallel.partition.states import GraphStates, Matrix, stage_memory
from syncline.transports import Network
from syncline.transports.base import format_bytes

__all__ = ["pipedream", "pipedream_for_network", "predict_partition"]

SUM_FACTOR, MAX_FACTOR = 4, 2
"""The bytes of an all-reduce at a worker's port, in multiples of (m − 1)/m · w: with full duplex only sent bytes."""


def pipedream(
    profile: ModelProfile,
    workers: int | Sequence[int],
    bandwidth: float | Sequence[float],
    *,
    overlap: bool,
    activation_compression: float | None = 1.0,
    memory_bytes: float | None = None,
    weight_copies: float = 1.0,
    replicate: bool = True,
    reorder: bool = False,
) -> StagePartition:
    """The partition whose slowest stage is the fastest; of several, one with the fewest bytes across cuts.

    >>> from syncline.parallel.partition import LayerCost
    >>> costs = [("conv", 0.3, 1e6, 1e5), ("fc", 0.1, 4e3, 4e8)]
    >>> layers = tuple(
    ...     LayerCost(name=n, forward_s=t / 3, backward_s=t * 2 / 3, activation_bytes=a, parameter_bytes=w)
    ...     for n, t, a, w in costs
    ... )
    >>> print(pipedream(ModelProfile(layers=layers, batch_size=32), 4, 1.25e9, overlap=True).describe())
    2 stages, 4 workers: 3-1, cut before fc
    stage  layers  workers    compute  all-reduce  transfer  mini-batch  memory
        0  conv          3  100.00 ms     0.04 ms   0.00 ms   100.00 ms  2.3 MB
        1  fc            1  100.00 ms     0.00 ms   1.60 ms   100.00 ms  800 MB
    slowest: stage 0, 100.00 ms a mini-batch: its computation takes 100.00 ms
    throughput: 4.00 times that of one worker; data parallelism: 3.33 times

    Args:
        workers: the number of workers. Several numbers are levels, the innermost first: (4, 2) means two machines
            with four workers each.
        bandwidth: bytes per second that a worker sends or receives; one number for each level.
        overlap: whether computation and the all-reduce run at the same time (the formula of the paper) or one after
            the other (the published code).
        activation_compression: how many times smaller activations are on the network. None: they cost nothing.
        memory_bytes: the memory of a worker.
        weight_copies: gradients and optimizer state, in copies of the weights: 1 for SGD, 2 with momentum, 3 for Adam.
        replicate: whether a stage may have several workers.
        reorder: whether parallel branches may be computed in another order than in the profile.

    Raises:
        SpecError: if no partition meets the limits.
    """
    network = _check_levels(workers, bandwidth)
    setting = _SearchSetting(overlap, activation_compression, memory_bytes, weight_copies, replicate)
    _check_setting(setting)
    total = math.prod(level.machines for level in network)
    if not replicate and total > len(profile.layers):
        raise SpecError(
            f"{total} workers without replicas need {total} stages, but the profile has {len(profile.layers)} layers: "
            f"use at most {len(profile.layers)} workers, or replicate=True"
        )
    states = GraphStates.of(profile, reorder=reorder)
    search = _PartitionSearch(states, network, setting)
    if not math.isfinite(search.best()):
        raise SpecError(_refusal(profile, search, total))
    parts = search.stages()
    return _partition(profile, search, parts)


def pipedream_for_network(profile: ModelProfile, workers: int, network: Network, *, overlap: bool) -> StagePartition:
    """The partition for the ranks 0, 1, … of a network, whose stages follow each other.

    Ranks of a host and hosts are two levels of bandwidth. If the best partition by levels places the ranks of a stage
    apart, or if hosts have different numbers of ranks, all ranks count as connected by the slowest link.

    >>> from syncline.parallel.partition import LayerCost
    >>> from syncline.transports import Link, Network
    >>> cost = {"forward_s": 0.1, "backward_s": 0.2, "activation_bytes": 1e4, "parameter_bytes": 1e7}
    >>> profile = ModelProfile(layers=tuple(LayerCost(name=name, **cost) for name in "ab"), batch_size=8)
    >>> hosts = Network(bandwidth=1e7, ranks_per_host=2, inside=Link(latency=0, bandwidth=1e10))
    >>> print(pipedream_for_network(profile, 4, hosts, overlap=False))
    2-2, cut before b
    """
    inside, each = network.inside, network.ranks_per_host or 1
    if inside is not None and 1 < each < workers and workers % each == 0 and not network.links:
        levels, rates = (each, workers // each), (inside.bandwidth, network.bandwidth)
        found = pipedream(profile, levels, rates, overlap=overlap)
        if list(found.placement) == sorted(found.placement):
            return found
    slowest = min((network.link(*pair).bandwidth for pair in permutations(range(workers), 2)), default=math.inf)
    return pipedream(profile, workers, slowest, overlap=overlap)


def predict_partition(
    profile: ModelProfile,
    partition: StagePartition,
    bandwidth: float = math.inf,
    *,
    overlap: bool,
    activation_compression: float | None = 1.0,
    weight_copies: float = 1.0,
) -> StagePartition:
    """The partition with a prediction by the formulas of `pipedream`, for workers that are all connected alike.

    Without a bandwidth communication takes no time.

    >>> from syncline.parallel.partition import LayerCost
    >>> cost = {"forward_s": 1.0, "backward_s": 2.0, "activation_bytes": 8e6, "parameter_bytes": 4e6}
    >>> profile = ModelProfile(layers=tuple(LayerCost(name=name, **cost) for name in "abc"), batch_size=8)
    >>> predicted = predict_partition(profile, StagePartition(("b",), (1, 2)), overlap=False)
    >>> predicted.prediction.time_s, predicted.prediction.slowest
    (3.0, 0)
    """
    partition.check(profile.names)
    _check_setting(setting := _SearchSetting(overlap, activation_compression, None, weight_copies, True))
    network = _check_levels(partition.workers, bandwidth)
    search = _PartitionSearch(_states_of(profile, partition), network, setting)
    ends = range(1, partition.stages + 1)
    parts = [_Part(end - 1, end, count, ()) for end, count in zip(ends, partition.replicas, strict=True)]
    predicted = _partition(profile, search, parts).prediction
    if predicted is not None and bandwidth == math.inf:
        predicted = replace(predicted, data_parallel_s=None)
    return replace(partition, prediction=predicted)


class _Level(NamedTuple):
    machines: int
    bandwidth: float
    group: int
    """The workers of one machine of this level."""


@dataclass(frozen=True)
class _SearchSetting:
    overlap: bool
    activation_compression: float | None
    memory_bytes: float | None
    weight_copies: float
    replicate: bool


class _Part(NamedTuple):
    """A stage between two states on some machines of a level, and the stages inside each machine."""

    start: int
    stop: int
    machines: int
    inside: tuple[_Part, ...]


class _Prediction(NamedTuple):
    """A stage of the innermost level. Seconds of one mini-batch, divided by the workers."""

    start: int
    stop: int
    replicas: int
    compute_s: float
    allreduce_s: float
    transfer_s: float
    time_s: float


def _check_levels(workers: int | Sequence[int], bandwidth: float | Sequence[float]) -> list[_Level]:
    counts = [workers] if isinstance(workers, int) else list(workers)
    rates = [bandwidth] if isinstance(bandwidth, int | float) else list(bandwidth)
    if len(counts) != len(rates) or not counts:
        raise SpecError(f"workers has {len(counts)} levels and bandwidth {len(rates)}: give one number for each level")
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
        raise SpecError(f"workers is {workers!r}; it must be a whole number, at least 1, for each level")
    if any(isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0 for rate in rates):
        raise SpecError(f"bandwidth is {bandwidth!r}; it must be more than 0 bytes per second for each level")
    return [_Level(counts[k], rates[k], math.prod(counts[:k])) for k in range(len(counts))]


def _check_setting(setting: _SearchSetting) -> None:
    compression, memory, copies = setting.activation_compression, setting.memory_bytes, setting.weight_copies
    if compression is not None and not 0 < compression < math.inf:
        raise SpecError(f"activation_compression is {compression!r}; it must be more than 0, or None")
    if memory is not None and not memory > 0:
        raise SpecError(f"memory_bytes is {memory!r}; it must be more than 0, or None for no limit")
    if not 0 <= copies < math.inf:
        raise SpecError(f"weight_copies is {copies!r}; it must be a number, at least 0")


class _PartitionSearch:
    """The dynamic programme over states, workers and levels.

    `behind` is the number of workers of later stages for each replica of a range of layers: it sets how many
    mini-batches its stages keep.
    """

    def __init__(
        self, states: GraphStates, network: list[_Level], setting: _SearchSetting, *, minimize_memory: bool = False
    ) -> None:
        self.states = states
        self.network = network
        self.setting = setting
        self._least_memory = minimize_memory
        """Whether to minimise the largest memory of a stage, instead of the time of the slowest stage."""
        self._tables: dict[tuple[int, Fraction], Matrix] = {}

    def best(self) -> float:
        """The time of the slowest stage of the best partition; infinite if there is none."""
        return float(self._table(len(self.network) - 1, Fraction(0))[0, -1])

    def stages(self) -> list[_Part]:
        """The stages of the best partition."""
        return self._cut(len(self.network) - 1, Fraction(0), 0, self.states.count - 1, self.best())

    def _table(self, level: int, behind: Fraction) -> Matrix:
        """A for all pairs of states, with all machines of a level; at the top for the first state alone."""
        if (level, behind) in self._tables:
            return self._tables[level, behind]
        count = self.network[level].machines
        rows = slice(0, 1) if level == len(self.network) - 1 else slice(None)
        tables: dict[int, Matrix] = {}
        for used in range(1, count + 1):
            table = self._one_stage(level, behind, used)[rows]
            for machines in self._replicas(used - 1):
                table = np.minimum(table, _min_max(tables[used - machines], self._later(level, behind, used, machines)))
            tables[used] = table
        self._tables[level, behind] = tables[count]
        return tables[count]

    def _replicas(self, most: int) -> range:
        return range(1, (most if self.setting.replicate else min(most, 1)) + 1)

    def _one_stage(self, level: int, behind: Fraction, used: int) -> Matrix:
        """T for one stage from the beginning of the range, on `used` machines."""
        if used > 1 and not self.setting.replicate:
            return np.full_like(self.states.seconds, np.inf)
        allreduce = self.allreduce(level, used) / self.network[level].group
        return self._combined(self._inner(level, behind, used, used), allreduce, used)

    def _later(self, level: int, behind: Fraction, used: int, machines: int) -> Matrix:
        """max{T, transfers} for a stage after others, on the last `machines` of `used` ones."""
        time = self._combined(self._inner(level, behind, used, machines), self.allreduce(level, machines), machines)
        return time if self._least_memory else np.maximum(time, self.transfer(level, machines))

    def _combined(self, seconds: Matrix, allreduce: Matrix, machines: int) -> Matrix:
        if self._least_memory:
            return seconds
        whole: Matrix = np.maximum(seconds, allreduce) if self.setting.overlap else seconds + allreduce
        return whole / machines

    def _inner(self, level: int, behind: Fraction, used: int, machines: int) -> Matrix:
        """t of a stage: on one machine of the level, or on one worker."""
        limit = math.inf if self.setting.memory_bytes is None else self.setting.memory_bytes
        unlimited = limit == math.inf and not self._least_memory
        after = Fraction(0) if unlimited else self._behind(level, behind, used, machines)
        if level:
            return self._table(level - 1, after)
        if unlimited:
            return self.states.seconds
        needed = stage_memory(self.states, 1 + math.ceil(after), self.setting.weight_copies)
        return needed if self._least_memory else np.where(needed <= limit, self.states.seconds, np.inf)

    def _behind(self, level: int, behind: Fraction, used: int, machines: int) -> Fraction:
        here = self.network[level]
        return ((here.machines - used) * here.group + behind) / machines

    def allreduce(self, level: int, machines: int) -> Matrix:
        """Seconds of the all-reduce of a stage's weights, before the division by the machines."""
        factor = MAX_FACTOR if self.setting.overlap else SUM_FACTOR
        return factor * (machines - 1) / machines * self.states.parameter_bytes / self.network[level].bandwidth

    def transfer(self, level: int, machines: int) -> Matrix:
        """Seconds of the larger of a stage's two transfers."""
        compression = self.setting.activation_compression
        cut = self.states.cut_bytes
        if compression is None:
            return np.zeros((len(cut), len(cut)))
        return 2 / (self.network[level].bandwidth * machines * compression) * np.maximum(cut[:, None], cut[None, :])

    def _cut(self, level: int, behind: Fraction, start: int, stop: int, limit: float) -> list[_Part]:
        """The stages of a range on all machines of a level, none slower than `limit`, with the fewest bytes cut."""
        count = self.network[level].machines
        best: list[NDArray[np.float64]] = [np.full(self.states.count, np.inf)]
        before: dict[tuple[int, int], tuple[int, int]] = {}
        """(machines, state) → the state at which the last stage begins, and its machines."""
        for used in range(1, count + 1):
            alone = self._one_stage(level, behind, used)[start] <= limit
            fewest = np.where(alone, 0.0, np.inf)
            before.update({(used, int(state)): (start, used) for state in np.flatnonzero(alone)})
            for machines in self._replicas(used - 1):
                allowed = self._later(level, behind, used, machines) <= limit
                total = np.where(allowed, (best[used - machines] + self.states.cut_bytes)[:, None], np.inf)
                at = total.argmin(axis=0)
                found = total[at, np.arange(len(at))]
                better = np.flatnonzero(found < fewest)
                fewest[better] = found[better]
                before.update({(used, int(state)): (int(at[state]), machines) for state in better})
            best.append(fewest)
        return self._walk(level, behind, (start, stop), before)

    def _walk(
        self, level: int, behind: Fraction, ends: tuple[int, int], before: dict[tuple[int, int], tuple[int, int]]
    ) -> list[_Part]:
        """Read the stages from the last to the first, and cut each inside its machines."""
        parts: list[_Part] = []
        used, state = self.network[level].machines, ends[1]
        while used:
            begin, machines = before[used, state]
            inside: tuple[_Part, ...] = ()
            if level:
                after = self._behind(level, behind, used, machines) if self.setting.memory_bytes else Fraction(0)
                limit = float(self._table(level - 1, after)[begin, state])
                inside = tuple(self._cut(level - 1, after, begin, state, limit))
            parts.insert(0, _Part(begin, state, machines, inside))
            used, state = used - machines, begin
        return parts


def _min_max(left: Matrix, right: Matrix) -> Matrix:
    """min over c of max{left[a, c], right[c, b]}."""
    if len(left) == 1:
        return np.asarray(np.maximum(left[0][:, None], right).min(axis=0, keepdims=True))
    found = np.full((len(left), right.shape[1]), np.inf)
    for middle in range(len(right)):
        np.minimum(found, np.maximum(left[:, middle, None], right[None, middle]), out=found)
    return found


def _predict(search: _PartitionSearch, level: int, parts: Sequence[_Part]) -> list[_Prediction]:
    """The predictions of the innermost stages."""
    overlap = search.setting.overlap
    found: list[_Prediction] = []
    for number, (start, stop, machines, inside) in enumerate(parts):
        if inside:
            stages = _predict(search, level - 1, inside)
        else:
            seconds = float(search.states.seconds[start, stop])
            stages = [_Prediction(start, stop, 1, seconds, 0.0, 0.0, seconds)]
        group = search.network[level].group if number == 0 else 1
        allreduce = float(search.allreduce(level, machines)[start, stop]) / group
        transfer = float(search.transfer(level, machines)[start, stop]) if number else 0.0
        for place, each in enumerate(stages):
            arriving = 0.0 if place else transfer
            time = max(each.time_s, allreduce) if overlap else each.time_s + allreduce
            both = max(each.allreduce_s, allreduce) if overlap else each.allreduce_s + allreduce
            found.append(
                _Prediction(
                    each.start,
                    each.stop,
                    each.replicas * machines,
                    each.compute_s / machines,
                    both / machines,
                    max(each.transfer_s / machines, arriving),
                    max(time / machines, arriving),
                )
            )
    return found


def _partition(profile: ModelProfile, search: _PartitionSearch, parts: Sequence[_Part]) -> StagePartition:
    """The partition with its prediction."""
    level = len(search.network) - 1
    predictions = _predict(search, level, parts)
    stages: list[PredictedStage] = []
    runs: list[tuple[str, ...]] = []
    for number, each in enumerate(predictions):
        runs.append(tuple(profile.names[place] for place in search.states.layers(each.start, each.stop)))
        later = sum(stage.replicas for stage in predictions[number + 1 :])
        needed = stage_memory(
            search.states, 1 + math.ceil(Fraction(later, each.replicas)), search.setting.weight_copies
        )
        stages.append(
            PredictedStage(
                first=runs[-1][0],
                last=runs[-1][-1],
                replicas=each.replicas,
                compute_s=_nanoseconds(each.compute_s),
                allreduce_s=_nanoseconds(each.allreduce_s),
                transfer_s=_nanoseconds(each.transfer_s),
                time_s=_nanoseconds(each.time_s),
                limited_by=_bottleneck(each),
                memory_bytes=float(needed[each.start, each.stop]),
            )
        )
    in_order = tuple(name for run in runs for name in run) == profile.names
    prediction = PartitionPrediction(
        stages=tuple(stages),
        one_worker_s=_nanoseconds(profile.seconds),
        data_parallel_s=_nanoseconds(_data_parallel(search)),
    )
    return StagePartition(
        cuts=tuple(run[0] for run in runs[1:]),
        replicas=tuple(stage.replicas for stage in predictions),
        placement=tuple(_placement(parts)[0]) if level else (),
        layers=() if in_order else tuple(runs),
        prediction=prediction,
    )


def _bottleneck(stage: _Prediction) -> Bottleneck:
    """What makes up most of the time of a stage."""
    if stage.transfer_s >= max(stage.time_s, stage.compute_s, stage.allreduce_s):
        return "transfer"
    parts: dict[Bottleneck, float] = {"compute": stage.compute_s, "all-reduce": stage.allreduce_s}
    if stage.compute_s + stage.allreduce_s < stage.time_s:  # a transfer inside the machines
        parts["transfer"] = stage.transfer_s
    return max(parts, key=lambda name: parts[name])


def _data_parallel(search: _PartitionSearch) -> float:
    """Seconds of a mini-batch if all workers train the whole model."""
    seconds = float(search.states.seconds[0, -1])
    for number, level in enumerate(search.network):
        allreduce = float(search.allreduce(number, level.machines)[0, -1]) / level.group
        seconds = (max(seconds, allreduce) if search.setting.overlap else seconds + allreduce) / level.machines
    return seconds


def _placement(parts: Sequence[_Part], first: int = 0) -> tuple[list[int], int]:
    """The stage of each worker, machine by machine, and the number of the next stage."""
    found: list[int] = []
    for part in parts:
        inside, after = _placement(part.inside, first) if part.inside else ([first], first + 1)
        found += inside * part.machines
        first = after
    return found, first


def _states_of(profile: ModelProfile, partition: StagePartition) -> GraphStates:
    """Only the states between the stages of a partition."""
    if partition.layers:
        groups = [{profile.place(name) for name in stage} for stage in partition.layers]
    else:
        ends = [0, *(profile.place(name) for name in partition.cuts), len(profile.layers)]
        groups = [set(range(start, stop)) for start, stop in pairwise(ends)]
    members = [0]
    for group in groups:
        members.append(members[-1] | sum(1 << place for place in group))
    return GraphStates.between(profile, members)


def _refusal(profile: ModelProfile, search: _PartitionSearch, workers: int) -> str:
    """Why there is no partition, and which limit would allow one."""
    limit = search.setting.memory_bytes or math.inf
    setting = replace(search.setting, memory_bytes=None)
    least = _PartitionSearch(search.states, search.network, setting, minimize_memory=True).best()
    return (
        f"no partition of {len(profile.layers)} layers over {workers} workers needs at most memory_bytes="
        f"{format_bytes(round(limit))} on each; the smallest needs {format_bytes(math.ceil(least))}: use a smaller "
        f"batch than {profile.batch_size}, more workers, or recompute activations"
    )


def _nanoseconds(seconds: float) -> float:
    """Seconds with nine digits after the point, so that a file is easy to read."""
    return round(seconds, 9)
