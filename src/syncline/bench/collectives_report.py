"""Collectives side by side, as a table for the terminal and a picture on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from syncline.bench.figures import save
from syncline.bench.sizes import written
from syncline.bench.stats import Summary
from syncline.errors import UnsupportedError

__all__ = ["plot", "table"]

OWN = ("gloo", "auto", "mpi")


def table(document: dict[str, Any]) -> str:
    """Medians with their intervals, the paired ratio to the engine's own, the prediction beside each."""
    network = document["network"]
    lines = [
        f"all-reduce of float32 on {document['ranks']} ranks, {_place(document)}",
        f"network: latency {1e6 * network['latency']:.0f} µs, {network['bandwidth'] / 1e6:.4g} MB/s "
        f"(± {100 * network['bandwidth_spread']:.0f} %), {1e6 * network['per_message']:.1f} µs a message, "
        f"combining {1e9 * network['combine']:.2g} ns a byte",
        "",
        f"{'size':>7} {'algorithm':20} {'median ms':>10} {'95 % interval':>22} "
        f"{'÷ ' + document['baseline']:>8} {'95 % interval':>16} {'predicted':>10} {'measured ÷ predicted':>21}",
    ]
    for size in dict.fromkeys(row["bytes"] for row in document["results"]):
        rows = [row for row in document["results"] if row["bytes"] == size]
        fastest = min(row["time"]["median"] for row in rows)
        lines += [_line(row, fastest) for row in sorted(rows, key=lambda row: float(row["time"]["median"]))]
        lines.append("")
    lines += [f"left out: {what}: {why}" for what, why in document["skipped"].items()]
    lines += [
        f"auto chose {choice['algorithm']} for {key}, {choice['reason']}" for key, choice in document["auto"].items()
    ]
    return "\n".join(lines)


def _place(document: dict[str, Any]) -> str:
    if document["lab"]:
        return f"emulated hosts, {document['lab']} (the lab adds no latency of its own)"
    hosts = len(set(document["hosts"]))
    return "one host" if hosts == 1 else f"{hosts} hosts"


def _line(row: dict[str, Any], fastest: float) -> str:
    time, ratio = Summary(**row["time"]), Summary(**row["ratio"])
    predicted = row["predicted"]
    told = f"{1e3 * predicted:10.3f} {time.median / predicted:21.2f}" if predicted else f"{'':10} {'':21}"
    mark = "*" if time.median == fastest else " "
    return (
        f"{written(row['bytes']):>7} {row['contender']:19}{mark} {1e3 * time.median:10.3f} "
        f"{_interval(time, 1e3):>22} {ratio.median:8.2f} {_interval(ratio, 1):>16} {told}".rstrip()
    )


def _interval(summary: Summary, scale: float) -> str:
    if summary.low is None or summary.high is None:
        return f"n={summary.samples}"
    return f"[{scale * summary.low:.4g}, {scale * summary.high:.4g}]"


def plot(document: dict[str, Any], stem: Path) -> list[Path]:
    """Times with predictions, and ratios with intervals; as SVG and PNG. Nothing where nothing was measured."""
    if not document["results"]:
        return []
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UnsupportedError("a picture needs matplotlib: pip install 'syncline[plot]'") from None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.2))
    for number, name in enumerate(dict.fromkeys(row["contender"] for row in document["results"])):
        rows = [row for row in document["results"] if row["contender"] == name]
        style = {"color": f"C{number}", "linewidth": 2.4 if name in OWN else 1.2}
        sizes = [row["bytes"] for row in rows]
        left.plot(sizes, [1e3 * row["time"]["median"] for row in rows], marker="o", markersize=3.5, label=name, **style)
        if rows[0]["predicted"]:
            told = [1e3 * row["predicted"] for row in rows]
            left.plot(sizes, told, linestyle=":", color=f"C{number}", linewidth=1)
        medians = [row["ratio"]["median"] for row in rows]
        spread = [
            [row["ratio"]["median"] - (row["ratio"]["low"] or row["ratio"]["median"]) for row in rows],
            [(row["ratio"]["high"] or row["ratio"]["median"]) - row["ratio"]["median"] for row in rows],
        ]
        right.errorbar(sizes, medians, yerr=spread, marker="o", markersize=3.5, capsize=2, **style)
    left.set(xlabel="size", ylabel="milliseconds (dotted: predicted)", yscale="log")
    right.set(xlabel="size", ylabel=f"time ÷ {document['baseline']}, paired, 95 % interval", xscale="log", yscale="log")
    right.axhline(1, color="0.4", linewidth=0.8)
    sizes = sorted({row["bytes"] for row in document["results"]})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [written(size) for size in sizes], fontsize=8)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}" if axes is right else "")
        axes.tick_params(axis="y", which="minor", labelsize=7)
        axes.grid(True, which="major", color="0.9")
    left.legend(fontsize=8)
    figure.suptitle(f"all-reduce on {document['ranks']} ranks, {_place(document)}", fontsize=11)
    return save(figure, stem)
