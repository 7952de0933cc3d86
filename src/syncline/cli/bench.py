"""Measure this network, and the cost of collectives, codecs, servers and training steps on it.

examples:
  syncline bench collectives -n 4                              every schedule, auto and gloo's all-reduce
  syncline bench collectives -n 4 --sizes 1MB:64MB --mpi       larger tensors only, and MPI's all-reduce
  syncline bench collectives --lab 4@100mbit --sizes 1MB       on four emulated hosts at 100 Mbit/s
  syncline bench network -n 2                                  latency, bandwidth, and round trips of the transports
  syncline bench network --engine mpi                          the same for MPI
  syncline bench machine -n 2                                  messages, codecs, computing while communicating
  syncline bench codecs                                        speed and error of every codec, relative to memcpy
  syncline bench codecs --codecs "quantize(4);topk(0.01)" --sizes 64MB
  syncline bench step -n 2 --against ddp                       training steps compared with DistributedDataParallel
  syncline bench step -n 2 --against hvd,ml_comm               the same step with the APIs of other libraries
  syncline bench step --lab 2@1gbit --models mlp --trace       on slow links, with a trace of every rank
  syncline bench step --codec "none;topk(0.01)|quantize(4)" --lab 2,4,8 --rate 100mbit,1gbit --against ddp,ddp-fp16
                                                               the gain of codecs, in several labs
  syncline bench pipeline -n 2 --schedule "1f1b;zero_bubble"   steps of pipelines, with what was predicted for them
  syncline bench pipeline --help                               its options, with examples
  syncline bench parallel -n 2 --against dtensor               divided layers, beside torch's parallelize_module
  syncline bench server                                        push and pull compared with a bare echo
  syncline bench server --sweep -n 4 --size 40MB               the best number of servers for this cluster
  syncline bench elastic -n 4 --seconds 60 --kill-every 15     a job that loses a worker every 15 seconds

Results are medians with 95 % intervals; ratios are paired within rounds. A table goes to the terminal, and the samples
with a plot to runs/bench-… (or --out). `syncline bench --developer` lists benchmarks of Syncline itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from syncline.bench.measuring import parse_sizes
from syncline.bench.stragglers import SCENARIOS, StragglersPlan
from syncline.cli import bench_elastic, bench_parallel, bench_pipeline, bench_server, bench_step
from syncline.cli.placement import Placement, add_placement_options
from syncline.errors import IncompatibleError, SpecError, UnsupportedError
from syncline.launch.start import Job
from syncline.training.run_folder import make_writable

__all__ = ["configure", "run"]

PLACEMENT_HELP = {"-n": "number of ranks; default 4 for collectives, else 2"}


@dataclass(frozen=True)
class _BenchCommand:
    """One benchmark: its line in the help, its options, and how to run it."""

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Path], int]
    for_users: bool = True
    hints: Mapping[str, str] = field(default_factory=dict)
    """What to write instead of options of other tools."""


def configure(parser: argparse.ArgumentParser) -> None:
    developer = [f"  {name:12} {bench.help}" for name, bench in BENCHES.items() if not bench.for_users]
    parser.add_argument(
        "--developer",
        action="version",
        version="\n".join(["benchmarks for the development of Syncline:", *developer]),
        help="list the benchmarks for the development of Syncline",
    )
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, bench in BENCHES.items():
        # A command without a help text is not listed.
        options: dict[str, Any] = {"help": bench.help} if bench.for_users else {}
        command = what.add_parser(name, hints=bench.hints, **options)
        bench.configure(command)
        command.add_argument("--out", type=Path, help="folder for the samples and the plot")


def run(arguments: argparse.Namespace) -> int:
    """Run one benchmark; return the exit code."""
    folder = arguments.out or Path("runs") / f"bench-{arguments.what}-{time.strftime('%Y%m%d-%H%M%S')}"
    return BENCHES[arguments.what].run(arguments, folder)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Benchmarks whose ranks each run a module of syncline.bench


def _check_ranks(arguments: argparse.Namespace) -> bool:
    """Refuse impossible options of a benchmark with ranks; return True if mpiexec starts them."""
    if arguments.ranks is not None and arguments.ranks < 2:
        raise SpecError(f"-n {arguments.ranks}: give at least 2 ranks")
    if arguments.rounds < 1:
        raise SpecError(f"--rounds {arguments.rounds}: at least 1")
    by_mpi = bool(vars(arguments).get("mpi")) or vars(arguments).get("engine") == "mpi"
    places = {"MPI": by_mpi, "--lab": bool(arguments.lab), "--hosts": bool(arguments.hosts)}
    if sum(places.values()) > 1:
        named = " and ".join(place for place, chosen in places.items() if chosen)
        raise IncompatibleError(f"{named} cannot be used together; leave one out")
    return by_mpi


def _on_ranks(
    plan: Callable[[argparse.Namespace, str], Any], show: Callable[[dict[str, Any], Path], str]
) -> Callable[[argparse.Namespace, Path], int]:
    """Run `syncline.bench.<name>` on every rank with the plan of the options, and print the result."""

    def run_ranks(arguments: argparse.Namespace, folder: Path) -> int:
        by_mpi = _check_ranks(arguments)
        result = folder / f"{arguments.what}.json"
        options = asdict(plan(arguments, str(result.absolute())))
        make_writable(folder)
        placement = Placement.read(arguments, default_ranks=4 if arguments.what == "collectives" else 2)
        job = Job(target=("-m", f"syncline.bench.{arguments.what}", json.dumps(options)))
        code = replace(placement, mpi=by_mpi).run(job, mpiexec="call")
        if code == 0:
            print(show(json.loads(result.read_text()), result))
        return code

    return run_ranks


def _show_description(document: dict[str, Any], result: Path) -> str:
    bench = importlib.import_module(f"syncline.bench.{result.stem}")
    return f"{bench.describe(document)}\n\nwritten: {result}"


def _configure_collectives(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default="4KB:64MB", help="4KB:64MB (in steps of four), or 1MB,3MB; default 4KB:64MB")
    parser.add_argument("--algorithms", default="", help="schedules, separated by ';'; default: all")
    parser.add_argument("--rounds", type=int, default=25, help="turns of each contender; default 25")
    parser.add_argument("--budget", type=float, default=30.0, help="approximate seconds for each size; default 30")
    parser.add_argument("--mpi", action="store_true", help="start with mpiexec and measure MPI's all-reduce too")
    add_placement_options(parser, "-n", "--lab", "--hosts", help=PLACEMENT_HELP)


def _plan_collectives(arguments: argparse.Namespace, out: str) -> Any:
    from syncline.bench.collectives import CollectivesPlan
    from syncline.collectives import build

    if not 0 < arguments.budget < math.inf:
        raise SpecError(f"--budget {arguments.budget}: seconds, above 0")
    algorithms = [name.strip() for name in arguments.algorithms.split(";") if name.strip()]
    for name in algorithms:
        build("allreduce", name)  # refused here, not on every rank
    return CollectivesPlan(
        sizes=parse_sizes(arguments.sizes),
        out=out,
        rounds=arguments.rounds,
        budget=arguments.budget,
        algorithms=algorithms,
        mpi=arguments.mpi,
    )


def _show_collectives(document: dict[str, Any], result: Path) -> str:
    from syncline.bench.collectives import plot, table

    return f"{table(document)}\n\n{_written(result, lambda: plot(document, result.with_suffix('')))}"


def _written(result: Path, plot: Callable[[], list[Path]]) -> str:
    try:
        return "written: " + ", ".join(map(str, [result, *plot()]))
    except UnsupportedError as error:
        return f"written: {result}; {error}"


def _configure_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("torch_dist", "zeromq", "mpi"), default="torch_dist", help="the transport")
    parser.add_argument("--fresh", action="store_true", help="measure again, even if this network is known")
    parser.add_argument("--no-echo", dest="echo", action="store_false", help="measure only the network model")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each round trip; default 15")
    add_placement_options(parser, "-n", "--lab", "--hosts", help=PLACEMENT_HELP)


def _plan_network(arguments: argparse.Namespace, out: str) -> Any:
    from syncline.bench.network import NetworkPlan

    return NetworkPlan(
        out=out, engine=arguments.engine, fresh=arguments.fresh, echo=arguments.echo, rounds=arguments.rounds
    )


def _show_network(document: dict[str, Any], result: Path) -> str:
    from syncline.bench.network import describe

    return describe(document)


def _configure_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codecs", metavar="SPECS", help="codecs with semicolons between; default: six")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each measurement; default 11")
    add_placement_options(parser, "-n", "--lab", "--hosts", help=PLACEMENT_HELP)


def _plan_machine(arguments: argparse.Namespace, out: str) -> Any:
    from syncline.bench.machine import PLANNER_CODECS, MachinePlan
    from syncline.codecs import build_codec

    given = arguments.codecs
    codecs = PLANNER_CODECS if given is None else tuple(each.strip() for each in given.split(";") if each.strip())
    for spec in codecs:  # an unknown one is refused before workers start
        if build_codec(spec) is None:
            raise SpecError(f"--codecs: {spec!r} encodes nothing, so there is nothing to measure")
    return MachinePlan(out=out, codecs=codecs, rounds=arguments.rounds)


def _show_machine(document: dict[str, Any], result: Path) -> str:
    from syncline.bench.machine import describe
    from syncline.planner.machine import MachineMeasurement

    return f"{describe(MachineMeasurement.read(result))}\nwritten: {result}"


def _configure_teams(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", default="4,2", help="gradients of the two models; default 4,2")
    parser.add_argument("--compute", default="30,20", help="milliseconds of computation of each; default 30,20")
    parser.add_argument("--collective", default="auto", help="the all-reduce; default auto")
    parser.add_argument("--rounds", type=int, default=25, help="turns of each; default 25")
    add_placement_options(parser, "-n", "--lab", "--hosts", help=PLACEMENT_HELP)


def _plan_teams(arguments: argparse.Namespace, out: str) -> Any:
    from syncline.bench.teams import TeamsPlan
    from syncline.reduction import check_collective

    check_collective(arguments.collective, None)  # refused here, not on every rank
    sizes, pauses = _pair("--megabytes", arguments.megabytes), _pair("--compute", arguments.compute)
    return TeamsPlan(out, sizes, pauses, turns=arguments.rounds, collective=arguments.collective)


def _pair(option: str, text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise SpecError(f"{option} {text}: two numbers, as in 4,2") from None
    if not (first >= 0 and second >= 0):
        raise SpecError(f"{option} {text}: neither may be negative")
    return first, second


def _configure_negotiation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, default=100, help="named tensors per step; default 100")
    parser.add_argument("--numel", type=int, default=1000, help="elements of each; default 1000")
    parser.add_argument("--rounds", type=int, default=200, help="turns of each; default 200")
    add_placement_options(parser, "-n", "--lab", "--hosts", help=PLACEMENT_HELP)


def _plan_negotiation(arguments: argparse.Namespace, out: str) -> Any:
    from syncline.bench.negotiation import NegotiationPlan

    if arguments.tensors < 1 or arguments.numel < 1:
        raise SpecError(f"--tensors {arguments.tensors} --numel {arguments.numel}: at least one of each")
    if arguments.hosts:
        raise IncompatibleError(f"--hosts {arguments.hosts}: negotiation is measured with the clock of one host")
    return NegotiationPlan(out, arguments.tensors, arguments.numel, arguments.rounds)


def _run_step(arguments: argparse.Namespace, folder: Path) -> int:
    _check_ranks(arguments)
    return bench_step.run(arguments, folder)


# Benchmarks in this process, or with workers of their own


def _configure_codecs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codecs", default="", help="specs, separated by ';'; default: every codec and two chains")
    parser.add_argument("--sizes", default="1MB,16MB", help="bytes of float32; default 1MB,16MB")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender; default 15")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; default 1")


def _run_codecs(arguments: argparse.Namespace, folder: Path) -> int:
    from syncline.bench.codecs import CodecsPlan, codecs_plot, codecs_table, measure

    plan = CodecsPlan(sizes=parse_sizes(arguments.sizes), rounds=arguments.rounds, threads=arguments.threads)
    codecs = [spec.strip() for spec in arguments.codecs.split(";") if spec.strip()]
    make_writable(folder)
    document = measure(replace(plan, codecs=codecs) if codecs else plan)
    result = folder / "codecs.json"
    result.write_text(json.dumps(document, indent=1))
    print(f"{codecs_table(document)}\n\n{_written(result, lambda: codecs_plot(document, folder / 'codecs'))}")
    return 0


def _configure_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=int, dest="ranks", default=4, help="workers; default %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="starts in each way; default %(default)s")


def _run_start(arguments: argparse.Namespace, folder: Path) -> int:
    from syncline.bench.start import measure, table

    if arguments.ranks < 1 or arguments.rounds < 1:
        raise SpecError(f"-n {arguments.ranks} --rounds {arguments.rounds}: at least one of each")
    make_writable(folder)
    document = measure(arguments.ranks, arguments.rounds, _say)
    result = folder / "start.json"
    result.write_text(json.dumps(document, indent=1))
    print(f"{table(document)}\n\nwritten: {result}")
    return 0


def _configure_stragglers(parser: argparse.ArgumentParser) -> None:
    usual = StragglersPlan(out="")
    parser.add_argument("-n", type=int, dest="workers", default=usual.workers, help="workers; default %(default)s")
    parser.add_argument("--entries", default=";".join(usual.entries), help="strategies by ';'; default %(default)s")
    parser.add_argument(
        "--scenarios", default=",".join(usual.scenarios), help=f"of {', '.join(SCENARIOS)}; default all"
    )
    parser.add_argument("--workload", default=usual.workload, help="the workload; default %(default)s")
    parser.add_argument("--target", type=float, default=usual.target, help="of its metric; default %(default)s")
    parser.add_argument("--seeds", type=int, default=usual.seeds, help="runs of each; default %(default)s")
    parser.add_argument("--factor", type=float, default=usual.factor, help="slow-down; default %(default)s")
    parser.add_argument("--step", type=float, default=usual.step, help="seconds of a step; default %(default)s")
    parser.add_argument("--batch", type=int, default=usual.batch, help="samples of a step; default %(default)s")
    parser.add_argument("--learning-rate", type=float, default=usual.learning_rate, help="default %(default)s")
    parser.add_argument("--simulate", action="store_true", help="run only on the simulator")


def _run_stragglers(arguments: argparse.Namespace, folder: Path) -> int:
    from syncline.bench.stragglers import measure, table

    names = ("workload", "workers", "seeds", "factor", "step", "batch", "learning_rate", "target", "simulate")
    plan = StragglersPlan(
        out=str((folder / "stragglers.json").absolute()),
        entries=tuple(spec.strip() for spec in arguments.entries.split(";") if spec.strip()),
        scenarios=tuple(name.strip() for name in arguments.scenarios.split(",") if name.strip()),
        **{name: getattr(arguments, name) for name in names},
    )
    plan.check()
    make_writable(folder)
    print(f"{table(measure(plan, _say))}\n\nwritten: {plan.out}")
    return 0


BENCHES = {
    "network": _BenchCommand(
        "latency, bandwidth, round trips", _configure_network, _on_ranks(_plan_network, _show_network)
    ),
    "machine": _BenchCommand(
        "what predictions need: messages, codecs, overlap", _configure_machine, _on_ranks(_plan_machine, _show_machine)
    ),
    "collectives": _BenchCommand(
        "every all-reduce schedule", _configure_collectives, _on_ranks(_plan_collectives, _show_collectives)
    ),
    "codecs": _BenchCommand("every codec compared with memcpy, in this process", _configure_codecs, _run_codecs),
    "step": _BenchCommand("training steps compared with those of other libraries", bench_step.configure, _run_step),
    "pipeline": _BenchCommand(
        "pipeline schedules compared with their predictions",
        bench_pipeline.configure,
        bench_pipeline.run,
        hints=bench_pipeline.HINTS,
    ),
    "parallel": _BenchCommand(
        "divided layers compared with data parallelism",
        bench_parallel.configure,
        bench_parallel.run,
        hints=bench_parallel.HINTS,
    ),
    "server": _BenchCommand("the parameter server compared with a bare echo", bench_server.configure, bench_server.run),
    "elastic": _BenchCommand("a job that loses workers and goes on", bench_elastic.configure, bench_elastic.run),
    "stragglers": _BenchCommand(
        "strategies with slow workers", _configure_stragglers, _run_stragglers, for_users=False
    ),
    "teams": _BenchCommand(
        "two models at once, each with its own team", _configure_teams, _on_ranks(_plan_teams, _show_description), False
    ),
    "negotiation": _BenchCommand(
        "the cost of matching Horovod's operations by name",
        _configure_negotiation,
        _on_ranks(_plan_negotiation, _show_description),
        for_users=False,
    ),
    "start": _BenchCommand("the time to start workers", _configure_start, _run_start, for_users=False),
}
