"""What an exchange of gradients takes on a measured machine: the network by its model, the rest as it was measured.

    seconds = call + tensors · tensor + bytes · byte + network(bytes)          of one bucket

`call` is Python and thread wake-ups, `tensor` the work of each gradient beside its bytes (hooks, copies, the
codec's calls), `byte` the codec's work. `syncline bench machine` times three exchanges of each kind, from which the
three follow: one small gradient, several of as many bytes together, and a large one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from syncline.codecs import Codec, PayloadCodec, PowerSGD, build_codec
from syncline.collectives.compressed import CompressedCollectives
from syncline.costs import predict
from syncline.errors import SpecError
from syncline.planner.machine import MachineMeasurement
from syncline.planner.measured_memory import ParameterSize
from syncline.transports import Network

__all__ = ["ExchangeCosts", "ExchangeWork", "shapes_of"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ExchangeWork:
    """Seconds that an exchange takes beside the network: per bucket, per gradient, and per byte of gradients."""

    call_s: float = 0.0
    tensor_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, tensors: int, nbytes: float) -> float:
        """The work of one bucket."""
        return self.call_s + tensors * self.tensor_s + nbytes * self.byte_s


class ExchangeCosts:
    """The exchanges of `workers` on a machine, or on another network with the machine's processors.

    >>> from syncline.costs import Calibration
    >>> times = dict(call_s=1e-4, compute_s=0.04, allreduce_s=0.02, together_s=0.05, compute_slowdown=1.2)
    >>> calibration = Calibration(5e-5, 12.5e6, 0.0, 0.0, 0.0, 0.0)
    >>> machine = MachineMeasurement(workers=4, hosts=4, threads=1, network=calibration, **times)
    >>> round(ExchangeCosts(machine, 4).allreduce_s(1_000_000), 3)
    0.12
    """

    def __init__(
        self, machine: MachineMeasurement, workers: int, network: Network | None = None, *, copies: int = 1
    ) -> None:
        """`copies`: processes that took the steps of the profile at the same time."""
        self.machine, self.workers, self._copies = machine, workers, copies
        self.network = machine.network.network() if network is None else network
        self.as_measured = network is None and workers == machine.workers
        """Whether the measured exchanges were those of as many workers on the same network."""
        self._work: dict[tuple[str, str], ExchangeWork] = {}
        self._collectives: dict[str, CompressedCollectives] = {}

    @property
    def cores(self) -> int:
        """Processors that all workers share: those of one host, or of all hosts of a lab. 0: there are others too."""
        return self.machine.cores if self.machine.lab or self.machine.hosts == 1 else 0

    @property
    def workers_per_core(self) -> float:
        """Workers for each processor, at least 1."""
        return max(1.0, self.workers / self.cores) if self.cores else 1.0

    @property
    def contention(self) -> float:
        """How many times as long a worker computes as in the profile.

        A profile whose copies kept all processors busy knows what they cost each other.
        """
        if self._knows_contention:
            return self._to_copies
        return _shared(self.machine, self.machine.compute_contention, self.workers)

    @property
    def copy_contention(self) -> float:
        """The same for work that is limited by memory, such as the optimizer's."""
        if self._knows_contention:
            return self._to_copies
        return _shared(self.machine, self.machine.copy_contention, self.workers)

    @property
    def _to_copies(self) -> float:
        """How many times as many workers there are for a processor as there were copies of the profile."""
        return self.workers_per_core / max(1.0, self._copies / self.cores)

    @property
    def _knows_contention(self) -> bool:
        return self._copies > 1 and self._copies >= min(self.cores, self.workers)

    def allreduce_s(self, nbytes: float) -> float:
        """The engine's own all-reduce: between the measured sizes if they were measured with as many workers."""
        if self.workers == 1 or nbytes <= 0:
            return 0.0
        points = {4: self.machine.call_s, **{each.nbytes: each.seconds for each in self.machine.allreduces}}
        if self.as_measured and len(points) > 2:
            return _between(sorted(points.items()), nbytes)
        return predict("ring", self.workers, math.ceil(nbytes), self.network).seconds + self._call_work_s()

    def exchange_s(self, codec: str | None, shapes: Sequence[Shape]) -> tuple[float, float]:
        """One bucket of gradients with these shapes: seconds on the network, and of the work beside it."""
        nbytes = 4 * sum(map(math.prod, shapes))
        measured = self.machine.compute_contention
        slower = _shared(self.machine, measured, self.workers) / max(1e-9, measured)
        work = self.work("allreduce", codec or "").seconds(_encoded(codec, shapes), nbytes)
        return self.network_s(codec, shapes), work * slower

    def network_s(self, codec: str | None, shapes: Sequence[Shape]) -> float:
        """Seconds of one bucket on the network."""
        sizes = [math.prod(shape) for shape in shapes]
        if codec is None or self.workers == 1:
            return self.allreduce_s(4 * sum(sizes))
        built = build_codec(codec)
        assert built is not None, f"{codec!r} encodes"
        if built.traits.allreducible:
            return sum(map(self.allreduce_s, _summed_bytes(built, shapes, self.machine)))
        assert isinstance(built, PayloadCodec), f"{codec} gives bytes"
        known = self._collectives.setdefault(codec, CompressedCollectives("auto", built))
        known.choose(built, tuple(sizes), self.workers, lambda: self.network)
        return known.seconds(built, tuple(sizes), self.workers, self.network)

    @staticmethod
    def is_summed(codec: str) -> bool:
        """Whether the engine sums what a codec sends."""
        built = build_codec(codec)
        return built is not None and built.traits.allreducible

    def work(self, strategy: str, codec: str) -> ExchangeWork:
        """The work beside the network, by the measured exchanges. Without them: by the codec's rates alone."""
        if codec:
            codec = repr(build_codec(codec))
        key = (strategy, codec)
        if key not in self._work:
            self._work[key] = self._fit(strategy, codec)
        return self._work[key]

    def _fit(self, strategy: str, codec: str) -> ExchangeWork:
        rows = [each for each in self.machine.exchanges if (each.strategy, each.codec) == (strategy, codec)]
        if len(rows) < 3:
            if not codec:
                return ExchangeWork()
            rate = self.machine.codec(codec)  # refuses a codec that was not measured
            return ExchangeWork(byte_s=rate.seconds(1.0))
        here = ExchangeCosts(self.machine, self.machine.workers)
        left = []
        for row in rows:
            side = math.isqrt(row.nbytes // row.tensors // 4)
            network_s = here.network_s(codec or None, [(side, side)] * row.tensors)
            left.append((row.tensors, row.nbytes, row.seconds - network_s))
        small, several, large = sorted(left, key=lambda each: (each[1], each[0]))
        tensor_s = max(0.0, (several[2] - small[2]) / max(1, several[0] - small[0]))
        byte_s = max(0.0, (large[2] - small[2]) / max(1, large[1] - small[1]))
        return ExchangeWork(max(0.0, small[2] - tensor_s - byte_s * small[1]), tensor_s, byte_s)

    def _call_work_s(self) -> float:
        """What an all-reduce of one number takes more than on the modelled network: Python and thread wake-ups."""
        ring = predict("ring", self.machine.workers, 4, self.machine.network.network()).seconds
        return max(0.0, self.machine.call_s - ring)


def _shared(machine: MachineMeasurement, measured: float, workers: int) -> float:
    """A contention for another number of workers. The hosts of a lab are one machine, so that all share its cores."""
    if workers == machine.workers or not machine.cores:
        return measured
    before = machine.workers if machine.lab else machine.workers // machine.hosts
    after = workers if machine.lab else max(1, before * workers // machine.workers)
    return measured * max(1.0, after / machine.cores) / max(1.0, before / machine.cores)


def _between(points: Sequence[tuple[float, float]], nbytes: float) -> float:
    """A value on the lines between points; beyond the last one on its line."""
    for (low, low_s), (high, high_s) in pairwise(points):
        if nbytes <= high or (high, high_s) == points[-1]:
            return max(0.0, low_s + (high_s - low_s) * (nbytes - low) / (high - low))
    raise AssertionError("there are two points")


def _encoded(codec: str | None, shapes: Sequence[Shape]) -> int:
    """How many gradients are encoded. PowerSGD sends what is no matrix as it is."""
    built = None if codec is None else build_codec(codec)
    if not isinstance(built, PowerSGD):
        return len(shapes)
    return sum(1 for shape in shapes if _rows(built, shape))


def _rows(codec: PowerSGD, shape: Shape) -> int:
    """The rows of a gradient that PowerSGD sends as two factors; 0: it is sent as it is."""
    numel, rows = math.prod(shape), shape[0] if len(shape) > 1 else 0
    return 0 if not rows or codec.rank * (rows + numel // rows) >= numel else rows


def _summed_bytes(codec: Codec, shapes: Sequence[Shape], machine: MachineMeasurement) -> list[float]:
    """The bytes of each all-reduce of a codec whose payloads add up."""
    if not isinstance(codec, PowerSGD):
        known = [each.payload_ratio for each in machine.codecs if each.spec == repr(codec)]
        return [4 * sum(map(math.prod, shapes)) * (known[0] if known else 1.0)]
    first = second = 0
    for shape in shapes:
        numel, rows = math.prod(shape), _rows(codec, shape)
        if not rows:
            first += numel
            continue
        first += codec.rank * rows
        second += codec.rank * (numel // rows)
    return [4.0 * first, 4.0 * second] if second else [4.0 * first]


def shapes_of(parameters: Sequence[ParameterSize]) -> list[Shape]:
    """The shapes of gradients; a square where a profile of an earlier release has none.

    Raises:
        SpecError: if there are none.
    """
    if not parameters:
        raise SpecError("the profile has no parameters that are trained, so there is nothing to exchange")
    return [each.shape or _square(each.elements) for each in parameters]


def _square(elements: int) -> Shape:
    side = math.isqrt(elements)
    return (side, elements // side) if side > 1 and elements % side == 0 else (elements,)
