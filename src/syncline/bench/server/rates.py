"""Push and pull beside a bare echo of the same bytes: what each worker runs for `syncline bench server`.

```text
worker 0 ── push_pull n bytes ──►┐               worker 0 ── n bare bytes ──►┐
worker 1 ── push_pull n bytes ──►┤ servers       worker 1 ── n bare bytes ──►┤ the same processes
         ◄── the new weights ────┘                        ◄── the same ──────┘
```

The two take turns in one run; a turn's time is the slowest worker's. Workers beyond those that a row counts stand idle.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from syncline.bench.calm import calm
from syncline.bench.server.end import Orders, attend
from syncline.bench.server.raw import Raw, open_raw
from syncline.bench.stats import ratios, summarize
from syncline.server.client import Client, Future
from syncline.server.network import ServerNetwork, server_network
from syncline.server.opening import open_space
from syncline.world import World, allreduce, broadcast, init

__all__ = ["OURS", "RAW", "RatesPlan", "measure"]

OURS, RAW = "syncline", "bare echo"
TURN = 0.1
"""Seconds of a turn, about: small requests are made many times."""
MOST_CALLS = 500
WARM = 3


@dataclass(frozen=True)
class RatesPlan:
    """What to measure."""

    out: str
    engine: str = "zeromq"
    sizes: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    """How many of them ask at once, in turn."""
    rounds: int = 15
    depth: int = 1
    """Requests that each worker has under way."""
    echo: bool = True
    """Whether the bare echo takes part."""
    label: str = ""


@dataclass(frozen=True)
class _Turns:
    """What the contenders of one row need."""

    world: World
    network: ServerNetwork
    orders: Orders
    raw: Raw
    plan: RatesPlan
    servers: Sequence[int]
    active: int
    nbytes: int

    @property
    def takes_part(self) -> bool:
        return self.world.rank < self.active

    def echo(self, calls: int) -> None:
        self.raw.ask(self.servers, self.nbytes, calls, self.plan.depth)

    def announce(self, name: str, calls: int) -> None:
        """Tell the ends what comes."""
        if name == RAW and self.world.rank == 0:
            self.orders.echo(self.servers, self.nbytes, calls * self.active, self.plan.depth)

    def processor(self) -> float:
        """Seconds that this process has computed; on rank 0 the dedicated servers' too."""
        others = self.orders.usage() if self.network.dedicated and self.world.rank == 0 else []
        return time.process_time() + sum(seconds for _, seconds in others)


def measure(plan: RatesPlan) -> None:
    """Run the plan on this worker; worker 0 writes what came of it to `plan.out`."""
    with init(transport=plan.engine) as world, calm():
        network = server_network(world)
        raw = open_raw(network)
        end = None if network.dedicated else world.runtime.spawn(attend, raw, name="echo")
        orders = Orders(raw, network.servers)
        rows = []
        for active in plan.workers:
            servers = network.servers if network.dedicated else network.servers[:active]
            for nbytes in plan.sizes:
                turns = _Turns(world, network, orders, raw, plan, servers, active, nbytes)
                rows += _compare(turns)
        world.barrier()
        if world.rank == 0:
            orders.end()
            document = {
                "kind": "server",
                "engine": plan.engine,
                "workers": world.size,
                "servers": len(network.servers) if network.dedicated else 0,
                "hosts": list(world.hosts),
                "lab": os.environ.get("SYNCLINE_LAB", ""),
                "plan": asdict(plan),
                "results": rows,
            }
            Path(plan.out).write_text(json.dumps(document, indent=1))
        if end is not None:
            end.join(world.transport.timeout)
        world.barrier()
        raw.close()


def _compare(turns: _Turns) -> list[dict[str, Any]]:
    """Both contenders at one size; rows on every rank, alike."""
    world, plan = turns.world, turns.plan
    space = open_space(world, "bench", turns.nbytes // 4, servers=turns.servers, workers=tuple(range(turns.active)))
    ours = _asker(space, turns.nbytes, plan.depth)
    contenders: dict[str, Callable[[int], None]] = {OURS: ours} | ({RAW: turns.echo} if plan.echo else {})
    calls = {name: _calls(turns, name, way) for name, way in contenders.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for number in range(plan.rounds):
        order = list(contenders)
        random.Random(number).shuffle(order)
        for name in order:
            times[name].append(_turn(turns, name, contenders[name], calls[name]))
    world.barrier()
    space.close()
    slowest = {name: allreduce(torch.tensor([t for t, _ in own], dtype=torch.float64), "max").tolist()
               for name, own in times.items()}  # fmt: skip
    worked = {name: allreduce(torch.tensor([c for _, c in own], dtype=torch.float64), "sum").tolist()
              for name, own in times.items()}  # fmt: skip
    return [_row(turns, name, slowest, worked) for name in contenders]


def _row(turns: _Turns, name: str, slowest: dict[str, list[float]], worked: dict[str, list[float]]) -> dict[str, Any]:
    own = slowest[name]
    row: dict[str, Any] = {
        "contender": name,
        "bytes": turns.nbytes,
        "workers": turns.active,
        "servers": len(turns.servers),
        "depth": turns.plan.depth,
        "seconds": own,
        "processor_seconds": worked[name],
        "time": asdict(summarize(own)),
        "requests": asdict(summarize([turns.active / each for each in own])),
        "rate": asdict(summarize([2 * turns.active * turns.nbytes / each for each in own])),
        "processor": asdict(summarize(worked[name])),
    }
    if RAW in slowest:
        row["of_echo"] = asdict(ratios(slowest[RAW], own))
        row["processor_to_echo"] = asdict(ratios(worked[name], worked[RAW]))
    return row


def _asker(space: Client, nbytes: int, depth: int) -> Callable[[int], None]:
    values = torch.ones(nbytes // 4)
    rows = [torch.empty(nbytes // 4) for _ in range(depth)]

    def ask(calls: int) -> None:
        under_way: deque[Future] = deque()
        for call in range(calls):
            if len(under_way) == depth:
                under_way.popleft().wait()
            under_way.append(space.push_pull(None, values, rows[call % depth]))
        for future in under_way:
            future.wait()

    return ask


def _calls(turns: _Turns, name: str, way: Callable[[int], None]) -> int:
    """Requests of a turn: as many as take about `TURN` seconds, alike on all workers."""
    _turn(turns, name, way, max(WARM, turns.plan.depth))
    seconds, _ = _turn(turns, name, way, max(WARM, turns.plan.depth))
    return int(broadcast(torch.tensor([max(1, min(MOST_CALLS, round(TURN / seconds)))])))


def _turn(turns: _Turns, name: str, way: Callable[[int], None], calls: int) -> list[float]:
    """Seconds of one request on this worker, and of processor time."""
    world = turns.world
    world.barrier()
    before = turns.processor()
    turns.announce(name, calls)
    world.barrier()
    start = world.runtime.now()
    if turns.takes_part:
        way(calls)
    seconds = world.runtime.now() - start
    world.barrier()
    return [seconds / calls, (turns.processor() - before) / calls / turns.active]


if __name__ == "__main__":
    measure(RatesPlan(**json.loads(sys.argv[1])))
