"""`syncline bench server`: its options, and the processes that it starts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.bench.measuring import parse_size, parse_sizes
from syncline.cli.placement import Placement, add_placement_options
from syncline.errors import IncompatibleError, SpecError
from syncline.launch.start import Job
from syncline.training.run_folder import make_writable

if TYPE_CHECKING:
    from syncline.bench.server.rates import RatesPlan

__all__ = ["configure", "run"]

MAX_SERVERS = 16
MAX_INFLIGHT_REQUESTS = 16
"""Of a client, for small requests."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_placement_options(
        parser, "-n", "--lab", "--hosts", help={"-n": "workers; default 4, with 1, 2 and 4 of them at once"}
    )
    parser.add_argument(
        "--servers", type=int, help="dedicated servers; default 1, and a second table with none; soak: 2"
    )
    add_placement_options(parser, "--replicas")
    parser.add_argument("--engine", choices=("zeromq", "mpi"), default="zeromq", help="the transport; default zeromq")
    parser.add_argument("--sizes", default="4KB,4MB,40MB", help="as in 4KB,4MB,40MB, the default")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender; default 15")
    parser.add_argument("--depth", type=int, default=1, help="requests in flight of a worker; default 1")
    parser.add_argument(
        "--sweep", action="store_true", help="compare 1, 2, 4, … dedicated servers, and co-located ones"
    )
    parser.add_argument("--size", default="40MB", help="size of the model, for --sweep; default 40MB")
    parser.add_argument("--passes", type=int, default=3, help="launches of each choice, for --sweep; default 3")
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="check every answer, and the memory, for this time"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the soak's requests; default 0")


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the benchmark; return the exit code."""
    from syncline.bench.server.rates import rates_table

    _check(arguments)
    make_writable(folder)
    if arguments.soak is not None:
        return _soak(arguments, folder)
    if arguments.sweep:
        return _sweep(arguments, folder)
    dedicated = 1 if arguments.servers is None else arguments.servers
    code, written = 0, []
    for servers in dict.fromkeys([dedicated, 0]) if arguments.servers is None else [dedicated]:
        result = folder / f"server-{servers or 'co-located'}.json"
        code = _launch(arguments, "rates", asdict(_plan(arguments, result, servers)), servers)
        if code:
            break
        print(f"{rates_table(json.loads(result.read_text()))}\n")
        written.append(str(result))
    if written:
        print(f"written: {', '.join(written)}")
    return code


def _check(arguments: argparse.Namespace) -> None:
    servers = arguments.servers
    _placement(arguments)  # refuses a wrong -n, --lab or --hosts
    if arguments.rounds < 1 or arguments.passes < 1 or not 1 <= arguments.depth <= MAX_INFLIGHT_REQUESTS:
        raise SpecError(
            f"at least one round and one pass, and a depth of 1 to {MAX_INFLIGHT_REQUESTS} (--rounds "
            f"{arguments.rounds}, --passes {arguments.passes}, --depth {arguments.depth})"
        )
    if servers is not None and not 0 <= servers <= MAX_SERVERS:
        raise SpecError(f"--servers {servers}: 0, which is co-located, to {MAX_SERVERS}")
    if arguments.soak is not None and not 0 < arguments.soak <= 60 * 24:
        raise SpecError(f"--soak {arguments.soak}: minutes, more than 0 and at most a day")
    places = {"--engine mpi": arguments.engine == "mpi", "--lab": bool(arguments.lab), "--hosts": bool(arguments.hosts)}
    modes = {"--sweep": arguments.sweep, "--soak": arguments.soak is not None}
    for group in (places, modes):
        if sum(group.values()) > 1:
            named = " and ".join(name for name, taken in group.items() if taken)
            raise IncompatibleError(f"{named} cannot be used together; leave one out")
    if arguments.sweep and servers is not None:
        raise IncompatibleError(f"--sweep chooses the numbers of servers; leave --servers {servers} out")


def _placement(arguments: argparse.Namespace) -> Placement:
    mpi = arguments.engine == "mpi"
    return replace(Placement.read(argparse.Namespace(**{**vars(arguments), "mpi": mpi}), default_ranks=4), mpi=mpi)


def _plan(arguments: argparse.Namespace, result: Path, servers: int) -> RatesPlan:
    from syncline.bench.server.rates import RatesPlan

    ranks = _placement(arguments).ranks
    counts = sorted({*(count for count in (1, 2, 4) if count <= ranks), ranks})
    return RatesPlan(
        out=str(result.absolute()),
        engine=arguments.engine,
        sizes=parse_sizes(arguments.sizes),
        workers=counts,
        rounds=arguments.rounds,
        depth=arguments.depth,
    )


def choices(workers: int) -> list[int]:
    """Numbers of dedicated servers to try; 0 is co-located.

    >>> choices(4), choices(1)
    ([0, 1, 2, 4], [0, 1])
    """
    return [0, *(1 << power for power in range(workers.bit_length()) if 1 << power <= min(workers, MAX_SERVERS))]


def _sweep(arguments: argparse.Namespace, folder: Path) -> int:
    """Launch every choice in turn, several times, so that a disturbance of the machine affects all of them."""
    from syncline.bench.server.rates import RatesPlan, place, sweep_table

    nbytes, workers, result = parse_size(arguments.size), _placement(arguments).ranks, folder / "sweep.json"
    samples: dict[str, list[list[float]]] = {}
    own = folder / "sweep-last.json"
    document: dict[str, Any] = {}
    for turn in range(arguments.passes):
        tried = choices(workers)
        for servers in tried if turn % 2 == 0 else tried[::-1]:
            name = f"{servers} server{'s' if servers > 1 else ''}" if servers else "co-located"
            print(f"pass {turn + 1} of {arguments.passes}: {name}", file=sys.stderr, flush=True)
            plan = RatesPlan(
                out=str(own.absolute()), engine=arguments.engine, sizes=[nbytes], workers=[workers],
                rounds=arguments.rounds, depth=arguments.depth, echo=False,
            )  # fmt: skip
            code = _launch(arguments, "rates", asdict(plan), servers)
            if code:
                return code
            document = json.loads(own.read_text())
            samples.setdefault(name, []).append(document["results"][0]["seconds"])
    report = {
        "kind": "server sweep",
        "bytes": nbytes,
        "workers": workers,
        "engine": arguments.engine,
        "seconds": samples,
    }
    result.write_text(json.dumps(report, indent=1))
    own.unlink()
    print(f"{sweep_table(samples, nbytes, workers, place(document))}\n\nwritten: {result}")
    return 0


def _soak(arguments: argparse.Namespace, folder: Path) -> int:
    from syncline.bench.server import soak

    servers = 2 if arguments.servers is None else arguments.servers
    result = folder / "soak.json"
    plan = soak.SoakPlan(
        out=str(result.absolute()), engine=arguments.engine, seconds=60 * arguments.soak, seed=arguments.seed
    )
    code = _launch(arguments, "soak", asdict(plan), servers)
    if result.exists():
        print(f"{soak.describe(json.loads(result.read_text()))}\n\nwritten: {result}")
    return code


def _launch(arguments: argparse.Namespace, module: str, plan: Mapping[str, object], servers: int) -> int:
    """Start workers and servers; return the exit code."""
    from syncline.bench.server.echo import SERVER_PROGRAM

    target = ("-m", f"syncline.bench.server.{module}", json.dumps(plan))
    job = Job(target=target, servers=servers, replicas=arguments.replicas, server=SERVER_PROGRAM)
    return _placement(arguments).run(job, mpiexec="call")
