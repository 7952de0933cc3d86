"""Measure what a training step costs here, layer by layer: times, FLOPs, memory, the update, the reading of data.

examples:
  syncline profile digits                                      a workload that comes with Syncline
  syncline profile "transformer(layers=8)" --batches 8,32      at two batch sizes of your choice
  syncline profile train.py --optimizer adam                   a workload of your own, with another optimizer
  syncline profile train.py --out runs/profile.json            to another file than profile.json
  syncline profile profile.json --sort memory                  show a profile that was measured before

Times are medians, at two batch sizes. The workload takes these steps in this process; nothing is trained. Threads of
torch are those of this process: OMP_NUM_THREADS=1 syncline profile … measures with one. Partitioners of pipelines
read the file too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.errors import IncompatibleError, SpecError

if TYPE_CHECKING:
    from syncline.planner.profile import TrainingProfile

__all__ = ["configure", "profile_text", "run"]

HINTS = {
    **dict.fromkeys(("--batch-size", "--batch_size"), "write --batch"),
    **dict.fromkeys(("--batch-sizes", "--batch_sizes"), "write --batches 16,64"),
    **dict.fromkeys(("-o", "--output", "--json"), "write --out FILE"),
    **dict.fromkeys(("--steps", "--iterations"), "write --repeats"),
    "-n": "a profile is of one worker; syncline plan predicts others from it",
}
SORTS = ("time", "memory", "flops", "order")
OPTIMIZER_NAMES = ("sgd", "momentum", "adam", "adamw")
DEFAULT_FILE = Path("profile.json")
DEFAULT_ROWS = 20
COPY_REPEATS = 50
"""Copies take so many times as many steps, so that they are busy until this process has measured."""
MEASURES_LAYERS = "layers: "
"""The beginning of the text with which a copy says that it takes its steps."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "workload",
        metavar="WORKLOAD|script.py|profile.json",
        help="what to measure, as in syncline train; or a profile to show",
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--batch", type=int, help="samples of a step; default: the workload's")
    what.add_argument(
        "--batches", type=_two_sizes, metavar="16,64", help="the two measured batch sizes; default: the half and all"
    )
    what.add_argument("--optimizer", choices=OPTIMIZER_NAMES, help="default: the workload's own")
    what.add_argument("--layers", metavar="NAMES", help="modules that are the layers: features.0,blocks; default: all")
    what.add_argument(
        "--copies", type=int, help="processes that take the steps at the same time, as workers on one machine do"
    )
    what.add_argument("--repeats", type=int, default=20, help="steps for each measured time; default 20")
    show = parser.add_argument_group("what is shown")
    show.add_argument("--sort", choices=SORTS, default=SORTS[0], help="the order of the layers; default: slowest first")
    show.add_argument("--rows", type=int, default=DEFAULT_ROWS, help="layers that are shown; 0: all; default 20")
    show.add_argument("--out", type=Path, help="the file; default profile.json")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print, or print a file. Returns the exit code."""
    from syncline.planner.profile import TrainingProfile

    if arguments.rows < 0:
        raise SpecError(f"--rows {arguments.rows}: at least 0, for all")
    if arguments.workload.endswith(".json"):
        for name in ("batch", "batches", "optimizer", "layers", "copies", "out"):
            if getattr(arguments, name) is not None:
                raise IncompatibleError(
                    f"--{name} is for measuring, and {arguments.workload} is a profile to show: leave it out, or name "
                    "the workload"
                )
        profile = TrainingProfile.read(arguments.workload)
    else:
        copies = 1 if arguments.copies is None else arguments.copies
        if copies < 1:
            raise SpecError(f"--copies {copies}: at least 1, this process")
        with _copies(arguments, copies - 1):
            profile = replace(_measure(arguments), copies=copies)
        out = arguments.out or DEFAULT_FILE
        profile.write(out)
        _say(f"written to {out}")
    print(profile_text(profile, arguments.sort, arguments.rows))
    return 0


@contextmanager
def _copies(arguments: argparse.Namespace, count: int) -> Iterator[None]:
    """Further processes that measure the same. Their results are dropped, and they end with this process's."""
    words = [arguments.workload, "--repeats", str(COPY_REPEATS * arguments.repeats)]
    for name in ("batch", "optimizer", "layers"):
        if getattr(arguments, name) is not None:
            words += [f"--{name}", str(getattr(arguments, name))]
    if arguments.batches is not None:
        words += ["--batches", ",".join(map(str, arguments.batches))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "syncline", "profile", *words, "--out"]
        started = [
            subprocess.Popen(
                [*command, str(Path(folder) / f"{number}.json")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            for number in range(count)
        ]
        try:
            for each in started:
                assert each.stderr is not None, "it is a pipe"
                if not any(MEASURES_LAYERS.encode() in line for line in each.stderr):
                    raise SpecError(f"--copies: a copy ended with exit code {each.wait()} before it measured")
            yield
        finally:
            for each in started:
                each.kill()
                each.communicate()


def _measure(arguments: argparse.Namespace) -> TrainingProfile:
    from syncline.cli.train import is_kmeans
    from syncline.planner.profile import profile_training
    from syncline.workloads import build

    if is_kmeans(arguments.workload):
        raise IncompatibleError("kmeans is no network: it has no layers to measure")
    if arguments.repeats < 1:
        raise SpecError(f"--repeats {arguments.repeats}: at least 1")
    if arguments.out is not None and not arguments.out.absolute().parent.is_dir():
        raise SpecError(f"--out {arguments.out}: there is no folder {arguments.out.parent}; make it first")
    return profile_training(
        build(arguments.workload),
        batch=arguments.batch,
        batch_sizes=arguments.batches,
        optimizer=arguments.optimizer,
        names=None if arguments.layers is None else [name.strip() for name in arguments.layers.split(",")],
        repeats=arguments.repeats,
        progress=_say,
    )


def _say(text: str) -> None:
    print(f"syncline profile: {text}", file=sys.stderr, flush=True)


def _two_sizes(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: write two batch sizes, as 16,64")
    first, second = sorted(int(part) for part in parts)
    if first < 1 or first == second:
        raise argparse.ArgumentTypeError(f"{text!r}: two different batch sizes, at least 1")
    return first, second


COLUMNS = ("layer", "forward", "backward", "share", "MFLOP", "GFLOP/s", "parameters", "output", "peak")


def profile_text(profile: TrainingProfile, sort: str = "time", rows: int = DEFAULT_ROWS) -> str:
    """The table of the layers, and what concerns all of them."""
    from syncline.planner.measured_memory import predict_memory
    from syncline.transports.base import format_bytes

    layers, memory = profile.layers, profile.memory
    keys: dict[str, Callable[[int], float]] = {
        "time": lambda place: -layers.layers[place].seconds,
        "memory": lambda place: -_peak(profile, place),
        "flops": lambda place: -profile.flops[place].total,
        "order": lambda place: place,
    }
    places = sorted(range(len(layers.layers)), key=keys[sort])
    shown = places[:rows] if rows else places
    table = [COLUMNS, *(_row(profile, place) for place in shown)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for name, *cells in table]
    rest = places[len(shown) :]
    if rest:
        share = sum(layers.layers[place].seconds for place in rest) / layers.seconds
        lines.append(f"… {len(rest)} more layers with {share:.0%} of the time; --rows 0 shows all")
    peaks = [predict_memory(memory, batch_size=layers.batch_size, recompute=each) for each in _variants(profile)]
    step_s, batch = profile.step_s, layers.batch_size
    reading = batch / profile.samples_per_s / step_s
    head = [
        f"{profile.workload}: {layers.model}, batch {batch}, measured at "
        f"{' and '.join(map(str, layers.measured_batch_sizes))} with {layers.machine}",
        f"step     {1e3 * step_s:.4g} ms: forward and backward {1e3 * layers.seconds:.4g} ms, update by "
        f"{profile.optimizer.name} {1e3 * profile.update_s:.3g} ms; {batch / step_s:.4g} samples/s",
        f"compute  {1e-6 * profile.total_flops:.4g} MFLOP a step, {_rate(profile.total_flops, layers.seconds)} GFLOP/s "
        "(matrix products, convolutions and attention; nothing else counts)",
        f"data     {profile.samples_per_s:.4g} samples/s, read alone: a batch takes {reading:.0%} of a step's time",
        f"memory   {peaks[0]}",
        *(f"         {each}, with recomputation of each layer" for each in peaks[1:]),
        f"state    {sum(each.elements for each in memory.parameters):,} parameters are trained, "
        f"{format_bytes(round(memory.gradient_bytes))} of gradients",
    ]
    return "\n".join([*head, "", *lines])


def _variants(profile: TrainingProfile) -> tuple[bool, ...]:
    return (False, True) if profile.memory.recomputed else (False,)


def _row(profile: TrainingProfile, place: int) -> tuple[str, ...]:
    from syncline.transports.base import format_bytes

    layer, flops = profile.layers.layers[place], profile.flops[place]
    return (
        layer.name,
        f"{1e3 * layer.forward_s:.4g} ms",
        f"{1e3 * layer.backward_s:.4g} ms",
        f"{layer.seconds / profile.layers.seconds:.1%}",
        f"{1e-6 * flops.total:.4g}" if flops.total else "–",
        _rate(flops.total, layer.seconds) if flops.total else "–",
        format_bytes(round(layer.parameter_bytes)),
        format_bytes(round(layer.activation_bytes)),
        format_bytes(round(_peak(profile, place))),
    )


def _rate(flops: float, seconds: float) -> str:
    return f"{1e-9 * flops / seconds:.3g}" if seconds else "–"


def _peak(profile: TrainingProfile, place: int) -> float:
    """The most activations in the time of a layer."""
    memory = profile.memory
    layer, batch = memory.layers[place], profile.layers.batch_size
    return max(memory.between(layer.forward_bytes, batch), memory.between(layer.backward_bytes, batch))
