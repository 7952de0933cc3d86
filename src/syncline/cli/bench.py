"""Measure this network, and what collectives, codecs, servers and training steps cost on it.

examples:
  syncline bench collectives -n 4                              every schedule, auto and gloo's own, side by side
  syncline bench collectives -n 4 --sizes 1MB:64MB --mpi       larger tensors only; MPI's own too
  syncline bench collectives --lab 4@100mbit --sizes 1MB       on four emulated hosts at 100 Mbit/s
  syncline bench network -n 2                                  latency, bandwidth, and the transports' echoes
  syncline bench network --engine mpi                          the same for MPI
  syncline bench step -n 2 --against ddp                       training steps beside DistributedDataParallel
  syncline bench step --lab 2@1gbit --models mlp --trace       on slow links, with a trace of every rank
  syncline bench step --codec "none;topk(0.01)|quantize(4)" --lab 2,4,8 --rate 100mbit,1gbit --against ddp,ddp-fp16
                                                               what codecs gain, on every lab in turn
  syncline bench codecs                                        encode and decode of every codec beside memcpy
  syncline bench codecs --codecs "quantize(4);topk(0.01)" --sizes 64MB
  syncline bench teams --lab 2@100mbit --compute 0,0           two models at once where the network is the limit
  syncline bench server                                        push and pull beside a bare echo, with 1, 2 and 4 workers
  syncline bench server --sweep -n 4 --size 40MB               how many servers this cluster wants
  syncline bench server --soak 10                              ten minutes of requests, every answer checked
  syncline bench stragglers -n 4                               bsp, ssp and downpour where some workers are slow
  syncline bench negotiation -n 4                              what Horovod's matching by name costs a step
  syncline bench step -n 2 --against hvd                       the same step written for Horovod
  syncline bench start -n 4                                    how long workers take to start

Medians with 95 % intervals of the median; ratios are paired within rounds. A table goes to the terminal, and the
samples with a picture to runs/bench-… (or --out).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from syncline.bench.sizes import parse_sizes
from syncline.cli import bench_codecs, bench_server, bench_step, bench_stragglers
from syncline.cli.placement import Placement, add_placement_options
from syncline.errors import IncompatibleError, SpecError, UnsupportedError
from syncline.launch.start import Job
from syncline.training.folder import make_writable

__all__ = ["configure", "run"]

PLACEMENT_HELP = {"-n": "number of ranks; default 4 for collectives, else 2"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what this command takes."""
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    first = what.add_parser("collectives", help="every all-reduce side by side")
    first.add_argument("--sizes", default="4KB:64MB", help="4KB:64MB (in steps of four), or 1MB,3MB; default 4KB:64MB")
    first.add_argument("--algorithms", default="", help="schedules, separated by ';'; default: all")
    first.add_argument("--rounds", type=int, default=25, help="turns of each contender; default 25")
    first.add_argument("--budget", type=float, default=30.0, help="seconds for each size, about; default 30")
    first.add_argument("--mpi", action="store_true", help="start by mpiexec and measure MPI's own all-reduce too")
    second = what.add_parser("network", help="latency, bandwidth, echoes")
    second.add_argument("--engine", choices=("torch_dist", "zeromq", "mpi"), default="torch_dist", help="whose network")
    second.add_argument("--fresh", action="store_true", help="measure even if this network is known")
    second.add_argument("--no-echo", dest="echo", action="store_false", help="only the model's numbers")
    second.add_argument("--rounds", type=int, default=15, help="turns of each echo; default 15")
    third = what.add_parser("step", help="training steps beside those of other libraries")
    bench_step.configure(third)
    fourth = what.add_parser("teams", help="two models at once on their own teams")
    fourth.add_argument("--megabytes", default="4,2", help="gradients of the two models; default 4,2")
    fourth.add_argument("--compute", default="30,20", help="milliseconds that each computes; default 30,20")
    fourth.add_argument("--collective", default="auto", help="which all-reduce; default auto")
    fourth.add_argument("--rounds", type=int, default=25, help="turns of each; default 25")
    fifth = what.add_parser("codecs", help="every codec beside memcpy, in this process")
    bench_codecs.configure(fifth)
    sixth = what.add_parser("server", help="the parameter server beside a bare echo")
    bench_server.configure(sixth)
    seventh = what.add_parser("stragglers", help="strategies where some workers are slow")
    bench_stragglers.configure(seventh)
    eighth = what.add_parser("negotiation", help="what Horovod's matching by name costs")
    eighth.add_argument("--tensors", type=int, default=100, help="named tensors in a step; default 100")
    eighth.add_argument("--numel", type=int, default=1000, help="numbers in each; default 1000")
    eighth.add_argument("--rounds", type=int, default=200, help="turns of each; default 200")
    ninth = what.add_parser("start", help="how long workers take to start")
    ninth.add_argument("-n", type=int, dest="ranks", default=4, help="workers; default %(default)s")
    ninth.add_argument("--rounds", type=int, default=9, help="starts in each way; default %(default)s")
    for command in (first, second, fourth, eighth):
        add_placement_options(command, "-n", "--lab", "--hosts", help=PLACEMENT_HELP)
    for command in (first, second, third, fourth, fifth, sixth, seventh, eighth, ninth):
        command.add_argument("--out", type=Path, help="folder for the samples and the picture")


def run(arguments: argparse.Namespace) -> int:
    """Measure; the exit code."""
    folder = arguments.out or Path("runs") / f"bench-{arguments.what}-{time.strftime('%Y%m%d-%H%M%S')}"
    if arguments.what == "codecs":
        return bench_codecs.run(arguments, folder)
    if arguments.what == "server":
        return bench_server.run(arguments, folder)
    if arguments.what == "stragglers":
        return bench_stragglers.run(arguments, folder)
    if arguments.what == "start":
        return _start(arguments, folder)
    if arguments.ranks is not None and arguments.ranks < 2:
        raise SpecError(f"-n {arguments.ranks}: give at least 2 ranks")
    if arguments.rounds < 1:
        raise SpecError(f"--rounds {arguments.rounds}: at least 1")
    by_mpi = bool(vars(arguments).get("mpi")) or vars(arguments).get("engine") == "mpi"
    ways = {"MPI": by_mpi, "--lab": bool(arguments.lab), "--hosts": bool(arguments.hosts)}
    if sum(ways.values()) > 1:
        named = " and ".join(way for way, taken in ways.items() if taken)
        raise IncompatibleError(f"{named} cannot be used together; leave one out")
    if arguments.what == "step":
        return bench_step.run(arguments, folder)
    result = folder / f"{arguments.what}.json"
    plan = _plan(arguments, str(result.absolute()))
    make_writable(folder)
    placement = Placement.read(arguments, default_ranks=4 if arguments.what == "collectives" else 2)
    job = Job(target=("-m", f"syncline.bench.{arguments.what}", json.dumps(plan)))
    code = replace(placement, mpi=by_mpi).run(job, mpiexec="call")
    if code:
        return code
    _show(arguments.what, result)
    return 0


def _start(arguments: argparse.Namespace, folder: Path) -> int:
    """Measure how long workers take to start; the exit code."""
    from syncline.bench.start import measure, table

    if arguments.ranks < 1 or arguments.rounds < 1:
        raise SpecError(f"-n {arguments.ranks} --rounds {arguments.rounds}: at least one of each")
    make_writable(folder)
    document = measure(arguments.ranks, arguments.rounds, lambda text: print(text, file=sys.stderr, flush=True))
    result = folder / "start.json"
    result.write_text(json.dumps(document, indent=1))
    print(f"{table(document)}\n\nwritten: {result}")
    return 0


def _show(what: str, result: Path) -> None:
    """Print what a bench has written, and draw it where there is a picture."""
    from syncline.bench import negotiation, network, teams
    from syncline.bench.collectives_report import plot, table

    document = json.loads(result.read_text())
    if what == "network":
        print(network.describe(document))
    elif what == "teams":
        print(f"{teams.describe(document)}\n\nwritten: {result}")
    elif what == "negotiation":
        print(f"{negotiation.describe(document)}\n\nwritten: {result}")
    else:
        print(table(document))
        try:
            pictures = plot(document, result.with_suffix(""))
            print("\nwritten: " + ", ".join(map(str, [result, *pictures])))
        except UnsupportedError as error:
            print(f"\nwritten: {result}; {error}")


def _pair(option: str, text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise SpecError(f"{option} {text}: two numbers, as in 4,2") from None
    if not (first >= 0 and second >= 0):
        raise SpecError(f"{option} {text}: neither may be negative")
    return first, second


def _plan(arguments: argparse.Namespace, out: str) -> dict[str, object]:
    from syncline.bench import collectives, negotiation, network, teams
    from syncline.collectives import build
    from syncline.reduction import check_collective

    if arguments.what == "teams":
        sizes, pauses = _pair("--megabytes", arguments.megabytes), _pair("--compute", arguments.compute)
        collective, turns = arguments.collective, arguments.rounds
        check_collective(collective, None)  # refused here, not on every rank
        return asdict(teams.TeamsPlan(out, sizes, pauses, turns=turns, collective=collective))
    if arguments.what == "negotiation":
        if arguments.tensors < 1 or arguments.numel < 1:
            raise SpecError(f"--tensors {arguments.tensors} --numel {arguments.numel}: at least one of each")
        if arguments.hosts:
            raise IncompatibleError(f"--hosts {arguments.hosts}: negotiation is told by one clock, of one host")
        return asdict(negotiation.NegotiationPlan(out, arguments.tensors, arguments.numel, arguments.rounds))
    if arguments.what == "network":
        return asdict(
            network.NetworkPlan(
                out=out, engine=arguments.engine, fresh=arguments.fresh, echo=arguments.echo, rounds=arguments.rounds
            )
        )
    if not 0 < arguments.budget < math.inf:
        raise SpecError(f"--budget {arguments.budget}: seconds, above 0")
    algorithms = [name.strip() for name in arguments.algorithms.split(";") if name.strip()]
    for name in algorithms:
        build("allreduce", name)  # refused here, not on every rank
    return asdict(
        collectives.Plan(
            sizes=parse_sizes(arguments.sizes),
            out=out,
            rounds=arguments.rounds,
            budget=arguments.budget,
            algorithms=algorithms,
            mpi=arguments.mpi,
        )
    )
