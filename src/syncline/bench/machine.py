"""`syncline bench machine`: what the planner needs of this machine and its network. Each rank runs this module.

The network model comes from the calibration that `algorithm="auto"` uses, the codecs from `bench/codecs.py`: all ranks
encode at the same time, as in training. Computing and communicating are timed alone and together, in turn.

Exchanges of gradients are timed as a training step makes them, with `distribute`: hooks, buckets, codec, collective,
and thread wake-ups. A model of square matrices w has the loss Σ g·w, so that g is its gradient; the same step
without other workers is subtracted::

    distributed │ forward │ backward ─ encode ─ send ─ decode │ update │
    alone       │ forward │ backward │ update │                          the difference is the exchange
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import syncline
from syncline.bench import codecs as codec_bench
from syncline.bench.measuring import over_ranks
from syncline.codecs import build_codec
from syncline.costs import calibrate
from syncline.errors import SpecError, WorldError
from syncline.launch.machine import cores
from syncline.launch.start import Job, run_here
from syncline.planner.machine import CodecRate, GradientExchange, MachineMeasurement, TimedAllreduce
from syncline.planner.quantities import format_duration, format_size
from syncline.training.distribute import distribute
from syncline.training.pipeline import pipeline
from syncline.world import World, allreduce, barrier, init

__all__ = ["MachinePlan", "describe", "measure", "measure_machine", "measure_world"]

MATRIX_SIDE = 256
"""The computation multiplies square matrices of this side."""
CALLS_EACH_ROUND = 20
CODEC_ROUNDS = 3
SMALL_EXCHANGE_DIVISOR = 64
"""The bytes of the large exchange divided by those of the small one."""
EXCHANGED_TENSORS = 16
"""Tensors of the exchange of several small ones: what a tensor costs beside its bytes."""
SERVED = "ssp"
"""The strategy with which an exchange by parameter servers is measured."""
WARM_UP_EXCHANGES = 3
SMALL_EXCHANGE_ROUNDS = 4
"""Small exchanges are timed so many times as often: their times vary more, and they take little."""
MORE_MICRO_BATCHES = 16
"""The difference in micro-batches between the two pipelines whose steps are compared."""
COPY_BYTES = 32 << 20
"""Copies of this size do not fit the caches of most processors."""
PLANNER_CODECS = ("cast('fp16')", "quantize(4)", "topk(0.01)", "topk(0.01)|quantize(4)", "powersgd(2)", "onebit")


@dataclass(frozen=True)
class MachinePlan:
    """The options of the benchmark."""

    out: str
    codecs: tuple[str, ...] = PLANNER_CODECS
    codec_bytes: int = 4 << 20
    """Bytes of the gradients that the codecs encode."""
    servers: bool = True
    """Whether exchanges by parameter servers are measured too."""
    part_s: float = 0.03
    """Approximate seconds of the computation, and of the all-reduce."""
    rounds: int = 11


def measure(plan: MachinePlan) -> None:
    """Run the benchmark on this rank; rank 0 writes the measurement to `plan.out`."""
    with init() as world:
        found = measure_world(world, plan)
        if world.rank == 0:
            found.write(plan.out)


def measure_machine(plan: MachinePlan | None = None, ranks: int = 2) -> MachineMeasurement:
    """Start workers on this machine, measure, and return the result.

    Raises:
        WorldError: if the workers fail.
    """
    with TemporaryDirectory() as folder:
        out = Path(folder) / "machine.json"
        given = MachinePlan("") if plan is None else plan
        options = {**vars(given), "out": str(out)}
        code = run_here(Job(target=("-m", "syncline.bench.machine", json.dumps(options))), ranks)
        if code:
            raise WorldError(f"the measurement of this machine on {ranks} workers ended with exit code {code}")
        return MachineMeasurement.read(out)


def measure_world(world: World, plan: MachinePlan) -> MachineMeasurement:
    """Measure on the ranks of a world. Every rank calls it; the slowest rank counts."""
    if world.size < 2:
        raise SpecError("a machine is measured by at least 2 workers, which exchange messages: -n 2")
    for spec in plan.codecs:  # an unknown one is refused before anything takes time
        build_codec(spec)
    calibration = calibrate(world.everyone.channel)  # not a kept one, which may be from a busy minute
    call_s = _median_of_ranks(world, [_timed(_calls(world)) / CALLS_EACH_ROUND for _ in range(plan.rounds)])
    computing, times = _Computation(plan.part_s), _Times()
    nbytes = max(4, int(plan.part_s * calibration.bandwidth))
    tensor = torch.zeros(nbytes // 4)
    for _ in range(plan.rounds):
        barrier(group=world.everyone)
        times.compute.append(_timed(computing))
        barrier(group=world.everyone)
        times.allreduce.append(_timed(lambda: allreduce(tensor, "sum", group=world.everyone)))
        barrier(group=world.everyone)
        begin = perf_counter()
        pending = allreduce(tensor, "sum", group=world.everyone, async_=True)
        times.compute_beside.append(_timed(computing))
        pending.wait()
        times.together.append(perf_counter() - begin)
    contention = _measure_contention(world, computing, plan)
    compute_s, allreduce_s, beside_s, together_s = (
        _median_of_ranks(world, each) for each in (times.compute, times.allreduce, times.compute_beside, times.together)
    )
    return MachineMeasurement(
        workers=world.size,
        hosts=len(set(world.hosts)),
        threads=torch.get_num_threads(),
        network=calibration,
        call_s=call_s,
        compute_s=compute_s,
        allreduce_s=allreduce_s,
        together_s=together_s,
        compute_slowdown=beside_s / compute_s,
        codecs=_measure_codecs(world, plan),
        cores=cores(),
        compute_contention=contention[0],
        copy_contention=contention[1],
        copy_bytes_per_s=contention[2],
        allreduces=_measure_allreduces(world, plan),
        exchanges=_measure_exchanges(world, plan),
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        micro_batch_s=_measure_micro_batch(world, plan.rounds),
        lab=os.environ.get("SYNCLINE_LAB", ""),
        torch_version=torch.__version__,
        syncline_version=syncline.__version__,
    )


class _Times:
    """Seconds of each round."""

    def __init__(self) -> None:
        self.compute: list[float] = []
        self.allreduce: list[float] = []
        self.compute_beside: list[float] = []
        self.together: list[float] = []


class _Computation:
    """Products of matrices that take about so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._matrix = torch.randn(MATRIX_SIDE, MATRIX_SIDE)
        self._count = 1
        self()  # warms up
        each = min(_timed(self) for _ in range(5))
        self._count = max(1, round(seconds / each))

    def __call__(self) -> None:
        for _ in range(self._count):
            torch.mm(self._matrix, self._matrix)


def _measure_contention(world: World, computing: Callable[[], None], plan: MachinePlan) -> tuple[float, float, float]:
    """How much longer a computation, and a copy in memory, take on all ranks at once than on rank 0 alone; bytes that
    each rank copies in a second while all do."""
    source = torch.zeros(COPY_BYTES // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    each_s = max(1e-6, min(_timed(lambda: target.copy_(source)) for _ in range(3)))
    count = int(_of_rank_0(world, max(1, round(plan.part_s / each_s))))

    def copying() -> None:
        for _ in range(count):
            target.copy_(source)

    found = []
    for work in (computing, copying):
        alone, together = [], []
        for _ in range(plan.rounds):
            barrier(group=world.everyone)
            if world.rank == 0:
                alone.append(_timed(work))
            barrier(group=world.everyone)
            together.append(_timed(work))
        ratio = statistics.median(together) / statistics.median(alone) if alone else 1.0
        # Every rank has the same work, but only rank 0 knows what it takes alone.
        found += [max(1.0, _of_rank_0(world, ratio)), _median_of_ranks(world, together)]
    return found[0], found[2], count * COPY_BYTES / found[3]


def _of_rank_0(world: World, value: float) -> float:
    number = torch.tensor([value if world.rank == 0 else 0.0], dtype=torch.float64)
    return float(allreduce(number, "sum", group=world.everyone))


def _measure_allreduces(world: World, plan: MachinePlan) -> tuple[TimedAllreduce, ...]:
    """The engine's all-reduce of a small, a middle and the codecs' number of bytes."""
    found = []
    for nbytes in _sizes(plan):
        reduce, seconds = partial(allreduce, torch.zeros(nbytes // 4), "sum", group=world.everyone), []
        for _ in range(1 + plan.rounds * (1 if nbytes == plan.codec_bytes else SMALL_EXCHANGE_ROUNDS)):
            barrier(group=world.everyone)
            seconds.append(_timed(reduce))
        found.append(TimedAllreduce(nbytes, _median_of_ranks(world, seconds[1:])))
    return tuple(found)


def _sizes(plan: MachinePlan) -> list[int]:
    large = plan.codec_bytes
    return [max(4, large // SMALL_EXCHANGE_DIVISOR), max(8, large // 8), large]


class _Matrices(nn.Module):
    """A model whose gradients are given: its loss is the sum of the products of weights and gradients."""

    def __init__(self, tensors: int, nbytes: int, rank: int) -> None:
        super().__init__()
        side = max(2, round((nbytes / tensors / 4) ** 0.5))
        self.nbytes = 4 * tensors * side * side
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(side, side)) for _ in range(tensors)])
        self.gradients = [
            each.view(side, side) for each in codec_bench.gradients(side * side, min(4, tensors), seed=rank)
        ]

    def forward(self) -> Tensor:
        pairs = ((w, self.gradients[place % len(self.gradients)]) for place, w in enumerate(self.weights))
        return torch.stack([(w * gradient).sum() for w, gradient in pairs]).sum()


def _measure_exchanges(world: World, plan: MachinePlan) -> tuple[GradientExchange, ...]:
    """Exchanges of one small matrix, of several of as many bytes together, and of a large one: unencoded, with each
    codec, and by parameter servers."""
    small, _, large = _sizes(plan)
    kinds = [("allreduce", ""), *(("allreduce", repr(build_codec(spec))) for spec in plan.codecs)]
    kinds += [(SERVED, "")] if plan.servers else []
    found = []
    with _without_advice():
        for tensors, nbytes in ((1, small), (EXCHANGED_TENSORS, small), (1, large)):
            model = _Matrices(tensors, nbytes, world.rank)
            rounds = plan.rounds if nbytes == large else SMALL_EXCHANGE_ROUNDS * plan.rounds
            alone = _exchange_s(world, model, None, rounds)
            for strategy, codec in kinds:
                whole = _exchange_s(world, model, (strategy, codec), rounds)
                seconds = _median_of_ranks(world, [max(0.0, whole - alone)])
                found.append(
                    GradientExchange(
                        strategy=strategy, codec=codec, tensors=tensors, nbytes=model.nbytes, seconds=seconds
                    )
                )
    return tuple(found)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """No warnings that a codec is slower than none here: that is what is measured."""
    logger = logging.getLogger("syncline")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _exchange_s(world: World, model: _Matrices, kind: tuple[str, str] | None, rounds: int) -> float:
    """The median seconds of a step on this rank. `kind`: strategy and codec; None: without other workers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = None
    if kind is not None:
        strategy, spec = kind
        codec = build_codec(spec) if spec else None
        native = strategy == "allreduce" and (codec is None or codec.traits.allreducible)
        run = distribute(model, optimizer, strategy=strategy, codec=codec, algorithm="native" if native else "auto")
    seconds = []
    for number in range(WARM_UP_EXCHANGES + rounds):
        barrier(group=world.everyone)
        begin = perf_counter()
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        if number >= WARM_UP_EXCHANGES:
            seconds.append(perf_counter() - begin)
    if run is not None:
        run.close()
    return statistics.median(seconds)


def _measure_micro_batch(world: World, rounds: int) -> float:
    """What one more micro-batch adds to the step of a pipeline whose stages compute next to nothing."""
    width = 4
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(world.size)))
    few, many = 2 * world.size, 2 * world.size + MORE_MICRO_BATCHES
    x = torch.zeros(few * many, width)
    medians = []
    for count in (few, many):
        copied = copy.deepcopy(model)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.0)
        cuts = [str(place) for place in range(1, world.size)]
        run = pipeline(copied, optimizer, nn.functional.mse_loss, stages=cuts, microbatches=count)
        seconds = []
        for _ in range(WARM_UP_EXCHANGES + rounds):
            barrier(group=world.everyone)
            seconds.append(_timed(partial(run.step, x, x)))
        run.close()
        medians.append(_median_of_ranks(world, seconds[WARM_UP_EXCHANGES:]))
    return max(0.0, medians[1] - medians[0]) / MORE_MICRO_BATCHES


def _calls(world: World) -> Callable[[], None]:
    number = torch.zeros(1)

    def call() -> None:
        for _ in range(CALLS_EACH_ROUND):
            allreduce(number, "sum", group=world.everyone)

    return call


def _timed(work: Callable[[], Any]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin


def _median_of_ranks(world: World, seconds: list[float]) -> float:
    """The median round of the slowest rank."""
    return float(over_ranks(world.everyone.channel, [statistics.median(seconds)], "max")[0])


def _measure_codecs(world: World, plan: MachinePlan) -> tuple[CodecRate, ...]:
    """Rank 0's medians, while all ranks encode."""
    if not plan.codecs:
        return ()
    options = codec_bench.CodecsPlan(
        sizes=[plan.codec_bytes], codecs=list(plan.codecs), rounds=CODEC_ROUNDS, threads=torch.get_num_threads()
    )
    barrier(group=world.everyone)
    with contextlib.redirect_stderr(sys.stderr if world.rank == 0 else io.StringIO()):
        rows = codec_bench.measure(options)["results"]
    barrier(group=world.everyone)
    rates = []
    for spec in plan.codecs:
        name = repr(build_codec(spec))
        found = [row for row in rows if row["contender"] == name]
        fed = max(found, key=lambda row: bool(row["feedback"]))  # with the residual, if there is one
        encode, decode = (1e9 * fed[what]["gigabytes_a_second"]["median"] for what in ("encode", "decode"))
        rates.append(
            CodecRate(
                spec=name,
                encode_bytes_per_s=encode,
                decode_bytes_per_s=decode,
                payload_ratio=fed["payload_bytes"] / fed["bytes"],
            )
        )
    return tuple(rates)


def describe(found: MachineMeasurement) -> str:
    """The measurement as text."""
    network = found.network
    lines = [
        f"{found.workers} workers on {found.hosts} host{'s' * (found.hosts > 1)}, {found.threads} "
        f"thread{'s' * (found.threads > 1)} each",
        f"  latency {1e6 * network.latency:.1f} µs, bandwidth {1e-6 * network.bandwidth:.1f} MB/s, work of a message "
        f"{1e6 * network.per_message:.1f} µs, an all-reduce of one number {1e6 * found.call_s:.1f} µs",
        f"  computing {1e3 * found.compute_s:.1f} ms, all-reduce {1e3 * found.allreduce_s:.1f} ms, together "
        f"{1e3 * found.together_s:.1f} ms: {found.hidden_share:.0%} of the shorter is hidden, and computing takes "
        f"{found.compute_slowdown:.2f} times as long meanwhile",
    ]
    if found.cores:
        lines.append(
            f"  {found.cores} core{'s' * (found.cores > 1)}: while all workers are busy, computing takes "
            f"{found.compute_contention:.2f} times and copying in memory {found.copy_contention:.2f} times as long as "
            f"alone; each copies {1e-9 * found.copy_bytes_per_s:.1f} GB/s"
        )
    width = max((len(each.spec) for each in found.codecs), default=0)
    for each in found.codecs:
        lines.append(
            f"  {each.spec:{width}}  encodes {1e-9 * each.encode_bytes_per_s:.2f} GB/s, decodes "
            f"{1e-9 * each.decode_bytes_per_s:.2f} GB/s, sends {each.payload_ratio:.2%}"
        )
    for kind in dict.fromkeys((each.strategy, each.codec) for each in found.exchanges):
        times = ", ".join(
            f"{each.tensors} x {format_size(each.nbytes / each.tensors)} in {format_duration(each.seconds)}"
            for each in found.exchanges
            if (each.strategy, each.codec) == kind
        )
        lines.append(f"  exchange by {kind[0]}{f' with {kind[1]}' if kind[1] else ''}: {times}")
    return "\n".join(lines)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    measure(MachinePlan(**{**options, "codecs": tuple(options["codecs"])}))
