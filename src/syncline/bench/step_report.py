"""Steps beside DistributedDataParallel's, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syncline.bench.contenders import ALONE, DENSE
from syncline.bench.link import told_link
from syncline.bench.stats import Summary

__all__ = ["codec_steps_table", "step_table"]


def step_table(document: dict[str, Any]) -> str:
    """Step times, paired ratios with intervals, overlap and memory of every model."""
    plan, (against, *others) = document["plan"], document["plan"]["against"]
    lines = [
        f"training steps on {document['ranks']} ranks, {_place(document)}: syncline ({plan['strategy']}, "
        f"{plan['collective']}) beside {against}",
        f"{plan['repeats']} repeats of {plan['turns']} turns, paired; medians with 95 % intervals",
        *_echo(document),
        "",
    ]
    for row in document["results"]:
        ours, theirs = Summary(**row["time"]["syncline"]), Summary(**row["time"][against])
        ratio = Summary(**row["ratio"])
        repeats = ", ".join(f"{value:.3f}" for value in row["repeats"])
        beside = "".join(f"   {name} {_ms(Summary(**row['time'][name]))}" for name in others)
        lines += [
            f"{row['model']}: {row['about']}",
            f"  step   syncline {_ms(ours)}   {against} {_ms(theirs)}{beside}",
            f"  ratio  {ratio.median:.3f}{_interval(ratio)}   by repeat: {repeats}",
            f"  {_overlap(row['overlap'])}",
            *_memory(document, row["model"]),
            f"  parameters after it: {_bits(row)}",
            "",
        ]
    medians = [row["ratio"]["median"] for row in document["results"]]
    lines.append(f"mean of the ratios: {sum(medians) / len(medians):.3f}")
    return "\n".join(lines)


def codec_steps_table(documents: Sequence[dict[str, Any]]) -> str:
    """Every contender in every place: step time, how many times faster than the baseline, what the wire took."""
    plan = documents[0]["plan"]
    against = plan["against"][0]
    width = max(len(name) for row in documents[0]["results"] for name in row["time"])
    lines = [
        f"training steps with codecs ({plan['strategy']}, {plan['collective']}) beside {', '.join(plan['against'])}",
        f"{plan['repeats']} repeats of {plan['turns']} turns, paired; medians with 95 % intervals; the wire, codec and "
        "exposed columns are of one step, the most over the ranks",
        f"{ALONE}: the same step with nothing exchanged, all ranks at once",
    ]
    for document in documents:
        for row in document["results"]:
            lines += ["", f"{document['ranks']} ranks, {_place(document)}; {row['model']}: {row['about']}"]
            lines += _echo(document)
            lines.append(
                f"  {'contender':{width}} {'step ms':>24} {against + ' ÷ it':>24} {'÷ ' + ALONE:>24} {'wire KB':>9} "
                f"{'codec ms':>9} {'exposed ms':>11}  bits"
            )
            order = sorted(row["time"], key=lambda name: float(row["time"][name]["median"]))
            lines += [_codec_line(row, name, width) for name in order]
            lines += _memory(document, row["model"])
    return "\n".join(lines)


def _codec_line(row: dict[str, Any], name: str, width: int) -> str:
    step, faster, slower = (Summary(**row[what][name]) for what in ("time", "faster", "of_alone"))
    line = f"  {name:{width}} {_short(step.scaled(1e3)):>24} {_short(faster):>24} {_short(slower):>24}"
    used = row["used"].get(name)
    if used is None:
        return line
    bits = "agree" if row["ranks_agree"][name] else "DIFFER between the ranks"
    as_ddp = ", as ddp's" if name == DENSE and row["same_bits"] else ""
    return (
        f"{line} {used['bytes_wire'] / 1e3:9.1f} {1e3 * used['codec_seconds']:9.2f} "
        f"{1e3 * used['exposed_seconds']:11.2f}  {bits}{as_ddp}"
    )


def _short(summary: Summary) -> str:
    if summary.low is None or summary.high is None:
        return f"{summary.median:.4g} (n={summary.samples})"
    return f"{summary.median:.4g} [{summary.low:.4g}, {summary.high:.4g}]"


def _place(document: dict[str, Any]) -> str:
    return f"emulated hosts, {document['lab']}" if document["lab"] else "one host"


def _echo(document: dict[str, Any]) -> list[str]:
    told = told_link(document.get("link"))
    return [told] if told else []


def _bits(row: dict[str, Any]) -> str:
    if not all(row["ranks_agree"].values()):
        return "DIFFER between the ranks"
    if row["same_bits"] is None:
        return "the same bits on all ranks"
    return (
        "the same bits"
        if row["same_bits"]
        else "the same bits on all ranks; they differ from the baseline's in rounding"
    )


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


def _memory(document: dict[str, Any], model: str) -> list[str]:
    """Several runs of each: peaks vary with the allocator and the threads."""
    peaks: dict[str, list[int]] = {}
    for row in document.get("memory", []):
        if row["model"] == model:
            peaks.setdefault(row["contender"], []).append(row["peak_bytes"])
    if not peaks:
        return []
    told = ", ".join(
        f"{kind} {_mb(own[len(own) // 2])} ({_mb(own[0])} – {_mb(own[-1])})"
        for kind, own in ((kind, sorted(own)) for kind, own in peaks.items())
    )
    return [f"  peak memory of a process, median (range) of {len(next(iter(peaks.values())))} runs: {told}"]


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
