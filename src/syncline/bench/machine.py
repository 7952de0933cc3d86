"""`syncline bench machine`: what the planner needs of this machine and its network. Each rank runs this module.

The network model comes from the calibration that `algorithm="auto"` uses, the codecs from `bench/codecs.py`: all ranks
encode at the same time, as in training. Computing and communicating are timed alone and together, in turn.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

import syncline
from syncline.bench import codecs as codec_bench
from syncline.bench.measuring import over_ranks
from syncline.codecs import build_codec
from syncline.errors import SpecError, WorldError
from syncline.launch.start import Job, run_here
from syncline.planner.machine import CodecRate, MachineMeasurement
from syncline.world import World, allreduce, barrier, init

__all__ = ["MachinePlan", "describe", "measure", "measure_machine", "measure_world"]

MATRIX_SIDE = 256
"""The computation multiplies square matrices of this side."""
CALLS_EACH_ROUND = 20
CODEC_ROUNDS = 3
PLANNER_CODECS = ("cast('fp16')", "quantize(4)", "topk(0.01)", "topk(0.01)|quantize(4)", "powersgd(2)", "onebit")


@dataclass(frozen=True)
class MachinePlan:
    """The options of the benchmark."""

    out: str
    codecs: tuple[str, ...] = PLANNER_CODECS
    codec_bytes: int = 4 << 20
    """Bytes of the gradients that the codecs encode."""
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
    calibration = world.everyone.auto.calibration()
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
    width = max((len(each.spec) for each in found.codecs), default=0)
    for each in found.codecs:
        lines.append(
            f"  {each.spec:{width}}  encodes {1e-9 * each.encode_bytes_per_s:.2f} GB/s, decodes "
            f"{1e-9 * each.decode_bytes_per_s:.2f} GB/s, sends {each.payload_ratio:.2%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    measure(MachinePlan(**{**options, "codecs": tuple(options["codecs"])}))
