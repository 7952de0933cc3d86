"""What `syncline bench server` found, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from syncline.bench.server.rates import OURS
from syncline.bench.sizes import written
from syncline.bench.stats import Summary, summarize

__all__ = ["rates_table", "sweep_table"]

CALLS = {"zeromq": "ROUTER and DEALER sockets", "mpi": "MPI's Isend, Send and Recv"}


def rates_table(document: dict[str, Any]) -> str:
    """Rates of push and pull with their intervals, and as a share of the bare echo's."""
    servers, depth = document["servers"], document["plan"]["depth"]
    where = f"{servers} dedicated server{'s' if servers > 1 else ''}" if servers else "servers co-located with workers"
    lines = [
        f"push and pull of float32, {where}, {document['engine']}, {place(document)}; {depth} under way at a worker",
        f"bare echo: {CALLS[document['engine']]} in the same processes, as many clients, as many under way; paired",
        "",
        f"{'size':>6} {'workers':>7} {'servers':>7} {'contender':10} {'median ms':>10} {'95 % interval':>18} "
        f"{'GB/s':>7} {'requests/s':>10} {'of echo':>8} {'95 % interval':>14} {'CPU µs':>9} {'÷ echo':>6}",
    ]
    for row in document["results"]:
        lines.append(_line(row))
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    time = Summary(**row["time"]).scaled(1e3)
    rate, requests, processor = (row[key]["median"] for key in ("rate", "requests", "processor"))
    told = (
        f"{written(row['bytes']):>6} {row['workers']:7} {row['servers']:7} {row['contender']:10} {time.median:10.3f} "
        f"{_span(time, '.4g'):>18} {rate / 1e9:7.3f} {requests:10.4g}"
    )
    if row["contender"] != OURS or "of_echo" not in row:
        return f"{told} {'':8} {'':14} {1e6 * processor:9.4g}"
    share, cost = Summary(**row["of_echo"]).scaled(100), row["processor_to_echo"]["median"]
    return f"{told} {share.median:7.0f}% {_span(share, '.0f'):>14} {1e6 * processor:9.4g} {cost:6.2f}"


def _span(summary: Summary, form: str) -> str:
    if summary.low is None or summary.high is None:
        return f"n={summary.samples}"
    return f"[{summary.low:{form}}, {summary.high:{form}}]"


def place(document: dict[str, Any]) -> str:
    """Where it was."""
    hosts = len(set(document["hosts"]))
    return document["lab"] or ("one host" if hosts == 1 else f"{hosts} hosts")


def sweep_table(samples: Mapping[str, Sequence[Sequence[float]]], nbytes: int, workers: int, where: str) -> str:
    """How long a push and pull takes with each number of servers, and which is fastest.

    `samples`: for each choice, the seconds of every turn, of each pass. Passes are compared, because what two launches
    differ by is more than what turns do.

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
        f"push and pull of {written(nbytes)} by {workers} workers at once, {where}; "
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
    return "\n".join([*lines, "", _verdict(ranked, medians, found, nbytes, workers)])


def _verdict(
    ranked: Sequence[str],
    medians: Mapping[str, Sequence[float]],
    found: Mapping[str, float],
    nbytes: int,
    workers: int,
) -> str:
    best, told = ranked[0], []
    equals = [name for name in ranked[1:] if not _slower(medians[name], medians[best])]
    for name in ranked[1:]:
        if name not in equals:
            told.append(f"{name} takes {found[name] / found[best]:.3g} times as long")
    opening = f"For {written(nbytes)} and {workers} workers, {best} is fastest: {1e3 * found[best]:.3g} ms"
    if equals:
        opening = (
            f"For {written(nbytes)} and {workers} workers, {best} has the best median, {1e3 * found[best]:.3g} ms, but "
            f"{' and '.join(equals)} cannot be told from it by this run"
        )
    return "; ".join([opening, *told]) + "."


def _slower(own: Sequence[float], best: Sequence[float]) -> bool:
    """Whether every launch was slower than the best one's launch of the same pass."""
    return len(own) > 1 and all(one > other for one, other in zip(own, best, strict=True))


def _range(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"
