"""`syncline bench server`: compares push and pull with a bare echo of the same bytes. Each worker runs this module.

```text
worker 0 ── push_pull n bytes ──►┐               worker 0 ── n bare bytes ──►┐
worker 1 ── push_pull n bytes ──►┤ servers       worker 1 ── n bare bytes ──►┤ the same processes
         ◄── the new weights ────┘                        ◄── the same ──────┘
```

The two take turns in one run, and the time of a turn is that of the slowest worker. A row uses the first workers; the
others are idle.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from syncline.bench.measuring import Summary, format_size, quiet_machine, ratios, summarize
from syncline.bench.server.echo import BareEcho, ServerCommands, echo_processes, keep_in_flight
from syncline.server.client import Client, Future
from syncline.server.network import ServerNetwork
from syncline.server.opening import open_space
from syncline.world import World, allreduce, broadcast, init

__all__ = ["ECHO", "SYNCLINE", "RatesPlan", "measure", "rates_table", "sweep_table"]

SYNCLINE, ECHO = "syncline", "bare echo"
TURN_S = 0.1
"""Approximate time of a turn: small requests are repeated."""
MAX_CALLS = 500
WARM_UP_CALLS = 3


@dataclass(frozen=True)
class RatesPlan:
    """The options of the benchmark."""

    out: str
    engine: str = "zeromq"
    sizes: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    """Numbers of workers that send requests at the same time."""
    rounds: int = 15
    depth: int = 1
    """Requests in flight of each worker."""
    echo: bool = True
    """Also measure the bare echo."""
    label: str = ""


@dataclass(frozen=True)
class _Row:
    """The setting of one row of the table."""

    world: World
    network: ServerNetwork
    commands: ServerCommands
    bare_echo: BareEcho
    plan: RatesPlan
    servers: Sequence[int]
    active: int
    nbytes: int

    @property
    def takes_part(self) -> bool:
        return self.world.rank < self.active

    def echo(self, calls: int) -> None:
        self.bare_echo.ask(self.servers, self.nbytes, calls, self.plan.depth)

    def announce(self, name: str, calls: int) -> None:
        """Announce the next turn to the servers."""
        if name == ECHO and self.world.rank == 0:
            self.commands.echo(self.servers, self.nbytes, calls * self.active, self.plan.depth)

    def processor(self) -> float:
        """CPU seconds of this process; on rank 0 also those of the dedicated servers."""
        others = self.commands.usage() if self.network.dedicated and self.world.rank == 0 else []
        return time.process_time() + sum(seconds for _, seconds in others)


def measure(plan: RatesPlan) -> None:
    """Run the benchmark on this worker; worker 0 writes the results to `plan.out`."""
    with init(transport=plan.engine) as world, quiet_machine(), echo_processes(world) as (network, echo, commands):
        rows = []
        for active in plan.workers:
            servers = network.servers if network.dedicated else network.servers[:active]
            for nbytes in plan.sizes:
                rows += _compare(_Row(world, network, commands, echo, plan, servers, active, nbytes))
        document = {
            "kind": "server",
            "engine": plan.engine,
            "workers": world.size,
            "servers": len(network.servers) if network.dedicated else 0,
            "replicas": network.replicas,
            "hosts": list(world.hosts),
            "lab": os.environ.get("SYNCLINE_LAB", ""),
            "plan": asdict(plan),
            "results": rows,
        }
        if world.rank == 0:
            Path(plan.out).write_text(json.dumps(document, indent=1))


def _compare(setting: _Row) -> list[dict[str, Any]]:
    """Measure both contenders at one size; return the same rows on every rank."""
    world, plan = setting.world, setting.plan
    space = open_space(
        world, "bench", setting.nbytes // 4, servers=setting.servers, workers=tuple(range(setting.active))
    )
    requests = _requester(space, setting.nbytes, plan.depth)
    contenders: dict[str, Callable[[int], None]] = {SYNCLINE: requests} | ({ECHO: setting.echo} if plan.echo else {})
    calls = {name: _calls(setting, name, way) for name, way in contenders.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for number in range(plan.rounds):
        order = list(contenders)
        random.Random(number).shuffle(order)
        for name in order:
            times[name].append(_turn(setting, name, contenders[name], calls[name]))
    world.barrier()
    space.close()
    slowest, worked = {}, {}
    for name, own in times.items():
        seconds, processor = torch.tensor(own, dtype=torch.float64).T.contiguous()
        slowest[name], worked[name] = allreduce(seconds, "max").tolist(), allreduce(processor, "sum").tolist()
    return [_row(setting, name, slowest, worked) for name in contenders]


def _row(setting: _Row, name: str, slowest: dict[str, list[float]], worked: dict[str, list[float]]) -> dict[str, Any]:
    own = slowest[name]
    row: dict[str, Any] = {
        "contender": name,
        "bytes": setting.nbytes,
        "workers": setting.active,
        "servers": len(setting.servers),
        "depth": setting.plan.depth,
        "seconds": own,
        "processor_seconds": worked[name],
        "time": asdict(summarize(own)),
        "requests": asdict(summarize([setting.active / each for each in own])),
        "rate": asdict(summarize([2 * setting.active * setting.nbytes / each for each in own])),
        "processor": asdict(summarize(worked[name])),
    }
    if ECHO in slowest:
        row["of_echo"] = asdict(ratios(slowest[ECHO], own))
        row["processor_to_echo"] = asdict(ratios(worked[name], worked[ECHO]))
    return row


def _requester(space: Client, nbytes: int, depth: int) -> Callable[[int], None]:
    values = torch.ones(nbytes // 4)
    rows = [torch.empty(nbytes // 4) for _ in range(depth)]

    def ask(calls: int) -> None:
        in_flight: deque[Future] = deque()
        keep_in_flight(
            calls,
            depth,
            send=lambda call: in_flight.append(space.push_pull(None, values, rows[call % depth])),
            receive=lambda call: in_flight.popleft().wait(),
        )

    return ask


def _calls(setting: _Row, name: str, way: Callable[[int], None]) -> int:
    """Requests per turn, the same on all workers: they take about `TURN_S` seconds."""
    _turn(setting, name, way, max(WARM_UP_CALLS, setting.plan.depth))
    seconds, _ = _turn(setting, name, way, max(WARM_UP_CALLS, setting.plan.depth))
    return int(broadcast(torch.tensor([max(1, min(MAX_CALLS, round(TURN_S / seconds)))])))


def _turn(setting: _Row, name: str, way: Callable[[int], None], calls: int) -> list[float]:
    """Seconds and CPU seconds of one request on this worker."""
    world = setting.world
    world.barrier()
    before = setting.processor()
    setting.announce(name, calls)
    world.barrier()
    start = world.runtime.now()
    if setting.takes_part:
        way(calls)
    seconds = world.runtime.now() - start
    world.barrier()
    return [seconds / calls, (setting.processor() - before) / calls / setting.active]


ECHO_CALLS = {"zeromq": "ROUTER and DEALER sockets", "mpi": "MPI's Isend, Send and Recv"}


def rates_table(document: dict[str, Any]) -> str:
    """A table of the rates of push and pull with intervals, and relative to the bare echo."""
    servers, depth = document["servers"], document["plan"]["depth"]
    where = f"{servers} dedicated server{'s' if servers > 1 else ''}" if servers else "servers co-located with workers"
    replicas = document.get("replicas", 1)
    where += f", each shard on {replicas} of them" if replicas > 1 else ""
    lines = [
        f"push and pull of float32, {where}, {document['engine']}, {place(document)}; {depth} in flight per worker",
        f"bare echo: {ECHO_CALLS[document['engine']]} in the same processes, equal numbers of clients and requests",
        "",
        f"{'size':>6} {'workers':>7} {'servers':>7} {'contender':10} {'median ms':>10} {'95 % interval':>18} "
        f"{'GB/s':>7} {'requests/s':>10} {'of echo':>8} {'95 % interval':>14} {'CPU µs':>9} {'÷ echo':>6}",
    ]
    return "\n".join([*lines, *map(_line, document["results"])])


def _line(row: dict[str, Any]) -> str:
    time = Summary(**row["time"]).scaled(1e3)
    rate, requests, processor = (row[key]["median"] for key in ("rate", "requests", "processor"))
    line = (
        f"{format_size(row['bytes']):>6} {row['workers']:7} {row['servers']:7} {row['contender']:10} "
        f"{time.median:10.3f} {_span(time, '.4g'):>18} {rate / 1e9:7.3f} {requests:10.4g}"
    )
    if row["contender"] != SYNCLINE or "of_echo" not in row:
        return f"{line} {'':8} {'':14} {1e6 * processor:9.4g}"
    share, cost = Summary(**row["of_echo"]).scaled(100), row["processor_to_echo"]["median"]
    return f"{line} {share.median:7.0f}% {_span(share, '.0f'):>14} {1e6 * processor:9.4g} {cost:6.2f}"


def _span(summary: Summary, form: str) -> str:
    if summary.low is None or summary.high is None:
        return f"n={summary.samples}"
    return f"[{summary.low:{form}}, {summary.high:{form}}]"


def place(document: dict[str, Any]) -> str:
    """The place of the benchmark."""
    hosts = len(set(document["hosts"]))
    return document["lab"] or ("one host" if hosts == 1 else f"{hosts} hosts")


def sweep_table(samples: Mapping[str, Sequence[Sequence[float]]], nbytes: int, workers: int, where: str) -> str:
    """A table of the time of push and pull for each number of servers, and the fastest one.

    `samples` has for each choice and pass the seconds of every turn. Passes are compared, because two launches differ
    by more than two turns.

    >>> passes = [[0.10, 0.11], [0.10, 0.12], [0.11, 0.11]]
    >>> slower = [[0.20, 0.21], [0.19, 0.22], [0.20, 0.21]]
    >>> print(sweep_table({"co-located": passes, "1 server": slower}, 4 << 20, 2, "one host").splitlines()[-1])
    For 4MB and 2 workers, co-located is fastest: 110 ms; 1 server takes 1.86 times as long.
    """
    medians = {name: [summarize(turns).median for turns in passes] for name, passes in samples.items()}
    found = {name: summarize(passes).median for name, passes in medians.items()}
    ranked = sorted(found, key=lambda name: found[name])
    best = ranked[0]
    lines = [
        f"push and pull of {format_size(nbytes)} by {workers} workers at once, {where}; "
        f"{len(medians[best])} launches of each",
        "",
        f"{'servers':14} {'median ms':>10} {'over launches':>18} {'GB/s':>7} {'÷ fastest':>10} {'over launches':>14}",
    ]
    for name in found:
        own = medians[name]
        ratio = [one / other for one, other in zip(own, medians[best], strict=True)]
        lines.append(
            f"{name:14} {1e3 * found[name]:10.2f} {_range([1e3 * each for each in own], '.4g'):>18} "
            f"{2e-9 * workers * nbytes / found[name]:7.3f} {summarize(ratio).median:10.2f} {_range(ratio, '.2f'):>14}"
        )
    return "\n".join([*lines, "", _fastest(ranked, medians, found, nbytes, workers)])


def _fastest(
    ranked: Sequence[str],
    medians: Mapping[str, Sequence[float]],
    found: Mapping[str, float],
    nbytes: int,
    workers: int,
) -> str:
    best, slower = ranked[0], []
    equals = [name for name in ranked[1:] if not _slower(medians[name], medians[best])]
    for name in ranked[1:]:
        if name not in equals:
            slower.append(f"{name} takes {found[name] / found[best]:.3g} times as long")
    opening = f"For {format_size(nbytes)} and {workers} workers, {best} is fastest: {1e3 * found[best]:.3g} ms"
    if equals:
        opening = (
            f"For {format_size(nbytes)} and {workers} workers, {best} has the best median, {1e3 * found[best]:.3g} ms, "
            f"but {' and '.join(equals)} cannot be distinguished from it by this run"
        )
    return "; ".join([opening, *slower]) + "."


def _slower(own: Sequence[float], best: Sequence[float]) -> bool:
    """True if every launch was slower than the best choice in the same pass."""
    return len(own) > 1 and all(one > other for one, other in zip(own, best, strict=True))


def _range(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


if __name__ == "__main__":
    measure(RatesPlan(**json.loads(sys.argv[1])))
