"""The network in four numbers, and what the transports make of it: what each rank runs for `syncline bench network`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from syncline.bench.echo import echoes
from syncline.bench.sizes import written
from syncline.bench.stats import Summary
from syncline.collectives import names
from syncline.costs import Calibration, predict
from syncline.world import init

__all__ = ["NetworkPlan", "describe", "measure"]

TOLD = (4 << 10, 256 << 10, 16 << 20)
"""Bytes for which the best schedules are told."""


@dataclass(frozen=True)
class NetworkPlan:
    """What to measure."""

    out: str
    engine: str = "torch_dist"
    fresh: bool = False
    echo: bool = True
    rounds: int = 11


def measure(plan: NetworkPlan) -> None:
    """Run the plan on this rank; rank 0 writes what came of it to `plan.out`."""
    with init(transport=plan.engine) as world:
        calibration = world.everyone.auto.calibration(fresh=plan.fresh)
        rows = echoes(world, plan.rounds, calibration.bandwidth) if plan.echo and world.size > 1 else []
        if world.rank == 0:
            document = {
                "kind": "network",
                "engine": world.transport.name,
                "ranks": world.size,
                "hosts": list(world.hosts),
                "lab": os.environ.get("SYNCLINE_LAB", ""),
                "network": asdict(calibration),
                "echo": rows,
            }
            Path(plan.out).write_text(json.dumps(document, indent=1))


def describe(document: dict[str, Any]) -> str:
    """The numbers for the terminal."""
    found = Calibration(**document["network"])
    lines = [
        f"{document['ranks']} ranks on {_places(document)}, {document['engine']}",
        f"  latency      {1e6 * found.latency:9.1f} µs   (± {100 * found.latency_spread:.0f} %)",
        f"  bandwidth    {found.bandwidth / 1e6:9.1f} MB/s (± {100 * found.bandwidth_spread:.0f} %), all ranks at once",
        f"  per message  {1e6 * found.per_message:9.1f} µs",
        f"  combining    {1e9 * found.combine:9.2f} ns a byte",
    ]
    if found.ranks_per_host:
        lines.append(
            f"  inside hosts {1e6 * found.inside_latency:9.1f} µs, {found.inside_bandwidth / 1e6:.1f} MB/s "
            f"({found.ranks_per_host} ranks each)"
        )
    if document["ranks"] > 1:
        lines += ["", "best all-reduce schedules by these numbers"]
        lines += [f"  {written(size):>6}  {_best(size, document['ranks'], found)}" for size in TOLD]
    if document["echo"]:
        lines += ["", *_echo_table(document["echo"])]
    return "\n".join(lines)


def _places(document: dict[str, Any]) -> str:
    hosts = len(set(document["hosts"]))
    return document["lab"] or ("one host" if hosts == 1 else f"{hosts} hosts")


def _best(size: int, ranks: int, found: Calibration) -> str:
    network = found.network()
    told = {name: predict(name, ranks, size, network).seconds for name in names("allreduce")}
    ranked = sorted(told, key=lambda name: told[name])[:3]
    return ", ".join(f"{name} {1e3 * told[name]:.3g} ms" for name in ranked)


def _echo_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "push and pull between ranks 0 and 1, in one run; rates as a share of a bare echo's, paired",
        f"{'size':>7} {'contender':18} {'median ms':>10} {'of TCP':>8} {'95 % interval':>16} "
        f"{'of bare ZeroMQ':>15} {'95 % interval':>16}",
    ]
    for row in rows:
        time, tcp, bare = (Summary(**row[key]) for key in ("time", "of_tcp", "of_bare_zeromq"))
        lines.append(
            f"{written(row['bytes']):>7} {row['contender']:18} {1e3 * time.median:10.3f} {100 * tcp.median:7.0f}% "
            f"{_span(tcp):>16} {100 * bare.median:14.0f}% {_span(bare):>16}"
        )
    return lines


def _span(summary: Summary) -> str:
    if summary.low is None or summary.high is None:
        return f"n={summary.samples}"
    return f"[{100 * summary.low:.0f}, {100 * summary.high:.0f}]"


if __name__ == "__main__":
    measure(NetworkPlan(**json.loads(sys.argv[1])))
