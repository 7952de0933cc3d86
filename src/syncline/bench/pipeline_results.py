"""The results of `syncline bench pipeline` as a table and as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from syncline.bench.measuring import Summary, describe_place
from syncline.bench.pipeline_contenders import DATA_PARALLEL, ONE_PROCESS, TORCH
from syncline.bench.step import describe_link
from syncline.parallel.gantt import draw
from syncline.parallel.schedules import Action

__all__ = ["gantt", "pipeline_table"]

MAX_DIFFERENCE = 1e-3
"""The largest accepted difference of weights, relative to how far training moved them. Rounding: about 1e-6 a step."""


def pipeline_table(document: dict[str, Any]) -> str:
    """A table of step times, bubbles, activations and bytes, predicted and measured."""
    plan, network = document["plan"], document["network"]
    where = f"simulated, {document['simulated']}" if document["simulated"] else describe_place(document)
    lines = [
        f"pipelines of {document['ranks']} workers, {where}: {document['about']}",
        f"{plan['repeats']} repeats of {plan['turns']} turns, paired; medians with 95 % intervals",
        f"network: latency {1e6 * network['latency']:.0f} µs, {network['bandwidth'] / 1e6:.4g} MB/s, "
        f"{1e6 * network['per_message']:.1f} µs per message",
        *([describe_link(document["link"])] if document["link"] else []),
        *dict.fromkeys(_describe_stages(document, row) for row in document["results"] if row["pipeline"]),
        "",
        *_table(document),
        "",
        *_remarks(document),
    ]
    return "\n".join(lines)


def _describe_stages(document: dict[str, Any], row: dict[str, Any]) -> str:
    """The stages of a row: cuts, replicas, micro-batches and the profiled times."""
    own = row["pipeline"]
    where = f"cut before {', '.join(own['cuts'])}" if own["cuts"] else "not cut"
    times = " | ".join(
        f"{1e3 * each['forward_s']:.3g} + {1e3 * (each['input_s'] + each['weight_s']):.3g}"
        for each in own["predicted"]["stages"]
    )
    workers = "-".join(map(str, own["replicas"]))
    return (
        f"{len(own['cuts']) + 1} stages on {workers} workers, {where}; {own['micro_batches']} micro-batches, profiled "
        f"forward + backward of one, ms: {times}"
    )


def _table(document: dict[str, Any]) -> Iterator[str]:
    torch_too = any(row["to_torch"] for row in document["results"])
    width = max(len(row["contender"]) for row in document["results"])
    yield (
        f"{'':{width}} {'step ms':>24} {'predicted':>9} {'÷ it':>5} {'bubble':>16} {'predicted':>9} "
        f"{'peak activations':>17} {'sent MB':>8} {ONE_PROCESS + ' ÷ it':>21}"
        + (f" {'÷ ' + TORCH:>21}" if torch_too else "")
    )
    for row in document["results"]:
        own, step = row["pipeline"], Summary(**row["time"]).scaled(1e3)
        cells = f"{row['contender']:{width}} {step.text('.4g'):>24}"
        predicted_s = row["predicted_s"]
        cells += f" {1e3 * predicted_s:9.4g} {step.median / 1e3 / predicted_s:5.2f}" if predicted_s else f" {'':15}"
        if own:
            predicted, bubble = own["predicted"], Summary(**own["bubble"]).scaled(100)
            cells += f" {_percent(bubble):>16} {100 * predicted['bubble']:7.1f} % {_peaks(own):>17}"
        else:
            cells += f" {'':>16} {'':9} {'':17}"
        sent = f"{max(row['sent_bytes']) / 1e6:8.3f}" if row["sent_bytes"] is not None else f"{'':8}"
        cells += f" {sent} {Summary(**row['speedup']).text('.3f'):>21}"
        yield (cells + (f" {Summary(**row['to_torch']).text('.3f'):>21}" if torch_too else "")).rstrip()


def _percent(bubble: Summary) -> str:
    """A median in percent with its interval.

    >>> _percent(Summary(11.12, 10.0, 12.52, 9)), _percent(Summary(11.12, None, None, 3))
    ('11.1 % [10, 13]', '11.1 %')
    """
    interval = "" if bubble.low is None else f" [{bubble.low:.0f}, {bubble.high:.0f}]"
    return f"{bubble.median:.1f} %{interval}"


def _peaks(own: dict[str, Any]) -> str:
    """The most live activations of each worker: once if they are as predicted.

    >>> _peaks({"peak_activations": [2, 1], "predicted": {"peak_activations": [2, 1]}})
    '2-1'
    """
    measured, predicted = ("-".join(map(str, each["peak_activations"])) for each in (own, own["predicted"]))
    return measured if measured == predicted else f"{measured} NOT {predicted}"


def _peaks_agree(own: dict[str, Any]) -> bool:
    return bool(own["peak_activations"] == own["predicted"]["peak_activations"])


def _remarks(document: dict[str, Any]) -> Iterator[str]:
    rows = document["results"]
    wrong = [row["contender"] for row in rows if row["pipeline"] and not _peaks_agree(row["pipeline"])]
    yield from _against_data_parallelism(rows)
    yield f"peak activations: {f'NOT as predicted for {wrong}' if wrong else 'as predicted, for each worker'}"
    compared = {row["contender"]: row["difference"] for row in rows if row["difference"] is not None}
    far = {name: share for name, share in compared.items() if share > MAX_DIFFERENCE}
    if far:
        texts = ", ".join(f"{name} by {share:.2g}" for name, share in far.items())
        yield f"weights afterwards: they DIFFER from those of one process, as a share of their way: {texts}"
    else:
        yield f"weights afterwards: those of one process, within {max(compared.values()):.1g} of their way"


def _against_data_parallelism(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How much faster the fastest schedule is, measured and predicted."""
    other = next(row for row in rows if row["contender"] == DATA_PARALLEL)
    best = min((row for row in rows if row["pipeline"]), key=lambda row: float(row["time"]["median"]))
    measured = other["time"]["median"] / best["time"]["median"]
    predicted = other["predicted_s"] / best["predicted_s"]
    yield (
        f"{DATA_PARALLEL} ÷ {best['contender']}: {measured:.3g} measured, {predicted:.3g} predicted "
        f"({100 * (measured / predicted - 1):+.0f} %)"
    )


def gantt(document: dict[str, Any]) -> str:
    """An SVG with a predicted and a measured panel for each schedule. The measured step is that of the median time."""
    panels: dict[str, list[tuple[int, Action, float, float]]] = {}
    for row in document["results"]:
        own = row["pipeline"]
        if own is None:
            continue
        predicted, median = own["predicted"], Summary(**row["time"]).median
        for what, actions, seconds, bubble in (
            ("predicted", predicted["actions"], predicted["step_s"], predicted["bubble"]),
            ("measured", own["actions"], median, own["bubble"]["median"]),
        ):
            title = f"{row['contender']}, {what}: {1e3 * seconds:.4g} ms, bubble {100 * bubble:.1f} %"
            panels[title] = [(rank, _read_action(text), start, end) for rank, text, start, end in actions]
    return draw(panels)


def _read_action(text: str) -> Action:
    """An action from its text.

    >>> _read_action("2F7"), _read_action("1R")
    (Action(kind='F', stage=2, micro_batch=7), Action(kind='R', stage=1, micro_batch=-1))
    """
    match = re.fullmatch(r"(\d+)([FBIWRU])(\d*)", text)
    if match is None:
        raise ValueError(f"{text!r} is not an action")
    kind: Any = match[2]
    return Action(kind, int(match[1]), int(match[3])) if match[3] else Action(kind, int(match[1]))
