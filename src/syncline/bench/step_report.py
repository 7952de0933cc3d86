"""Steps beside DistributedDataParallel's, as a table."""

from __future__ import annotations

from typing import Any

from syncline.bench.stats import Summary

__all__ = ["step_table"]


def step_table(document: dict[str, Any]) -> str:
    """Step times, paired ratios with intervals, overlap and memory of every model."""
    plan, against = document["plan"], document["plan"]["against"]
    place = f"emulated hosts, {document['lab']}" if document["lab"] else "one host"
    lines = [
        f"training steps on {document['ranks']} ranks, {place}: syncline ({plan['strategy']}, "
        f"{plan['collective']}) beside {against}",
        f"{plan['repeats']} repeats of {plan['turns']} turns, paired; medians with 95 % intervals",
        "",
    ]
    for row in document["results"]:
        ours, theirs = Summary(**row["time"]["syncline"]), Summary(**row["time"][against])
        ratio = Summary(**row["ratio"])
        repeats = ", ".join(f"{value:.3f}" for value in row["repeats"])
        lines += [
            f"{row['model']}: {row['about']}",
            f"  step   syncline {_ms(ours)}   {against} {_ms(theirs)}",
            f"  ratio  {ratio.median:.3f}{_interval(ratio)}   by repeat: {repeats}",
            f"  {_overlap(row['overlap'])}",
            *_memory(document.get("memory", []), row["model"], against),
            f"  parameters after it: {'the same bits' if row['same_bits'] else 'differ in rounding'}",
            "",
        ]
    medians = [row["ratio"]["median"] for row in document["results"]]
    lines.append(f"mean of the ratios: {sum(medians) / len(medians):.3f}")
    return "\n".join(lines)


def _ms(summary: Summary) -> str:
    return f"{summary.scaled(1e3)} ms"


def _interval(ratio: Summary) -> str:
    return "" if ratio.low is None or ratio.high is None else f" [{ratio.low:.3f}, {ratio.high:.3f}]"


def _overlap(overlap: dict[str, Any]) -> str:
    if overlap["share"] is None:
        return "overlap none could lie inside backward: there is one bucket, and it is full at the end"
    return (
        f"overlap {100 * overlap['share']:.0f} % of the reduction time that could lie inside backward does "
        f"({1e3 * overlap['did_seconds']:.2f} of {1e3 * overlap['could_seconds']:.2f} ms)"
    )


def _memory(rows: list[dict[str, Any]], model: str, against: str) -> list[str]:
    """Several runs of each: peaks vary with the allocator and the threads."""
    peaks = {
        kind: sorted(row["peak_bytes"] for row in rows if (row["model"], row["contender"]) == (model, kind))
        for kind in ("syncline", against)
    }
    if not all(peaks.values()):
        return []
    told = ", ".join(
        f"{kind} {_mb(own[len(own) // 2])} ({_mb(own[0])} – {_mb(own[-1])})" for kind, own in peaks.items()
    )
    return [f"  peak memory of a process, median (range) of {len(peaks[against])} runs: {told}"]


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
