"""The page of `syncline plan --html`: ranked plans, the scaling curve, the parts of a step, memory, limits, notes.

It has the style, the plots and the rules of the report of a race: one file without external resources, and the same
answer gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from syncline.bench.report.html import render_page
from syncline.bench.report.phrases import number_phrase, time_unit
from syncline.bench.report.plots import (
    GRID,
    INK,
    MUTED,
    PHASE_COLOURS,
    SERIES_COLOURS,
    ReportPlot,
    label_rows,
    new_figure,
    plot_settings,
    render_figure,
)
from syncline.errors import UnsupportedError
from syncline.parallel.partition.json_files import write_json_text
from syncline.planner.answer import PlanAnswer
from syncline.planner.prediction import PARTS, PredictedStep
from syncline.planner.quantities import format_duration, format_size
from syncline.planner.scaling import ScalingCurve, scaling_curve
from syncline.planner.search import INDISTINCT, USABLE_MEMORY
from syncline.training.run_folder import make_writable

__all__ = ["plan_page", "write_plan_page"]

STEP_GROUPS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "compute": (("compute",), "compute"),
    "communication, exposed": (("tensor", "transfer", "reduction"), "exposed"),
    "codec": (("codec",), "codec"),
    "bubble": (("bubble",), "agreeing"),
    "waiting for slower ranks": (("waiting",), "rest"),
    "optimizer": (("optimizer",), "evaluation"),
    "input": (("input",), "data"),
}
"""What the plot of a step shows: the parts of a prediction, and the phase of the report that has the colour."""
HIDDEN = "communication, hidden"
MEMORY_KINDS = ("weights", "gradients", "optimizer", "activations", "buckets", "residuals", "versions")
MAX_DRAWN_PLANS = 8


def write_plan_page(path: str | Path, answer: PlanAnswer, top: int, command: str = "") -> None:
    """Write the page. `top` plans are in its tables."""
    make_writable(Path(path).parent, "--html")
    write_json_text(path, plan_page(answer, top, command))


def plan_page(answer: PlanAnswer, top: int, command: str = "") -> str:
    """The content of the page."""
    strong = answer.request.batch is not None
    curve = scaling_curve(answer.predictor, answer.settings, strong=strong)
    shown = answer.ranked.plans[:top]
    plots, missing = [], ""
    try:
        plots = _draw(answer, shown[:MAX_DRAWN_PLANS], curve)
    except UnsupportedError as error:
        missing = str(error)
    return render_page(
        "plan.html.j2",
        plots,
        missing,
        answer=answer,
        plans=list(enumerate(shown, 1)),
        indistinct=INDISTINCT,
        curve=curve,
        cluster=answer.predictor.cluster,
        parts=[name for name in PARTS if any(each.parts[name] > 0 for each in shown)],
        kinds=[name for name in MEMORY_KINDS if any(getattr(each.memory, name) > 0 for each in shown)],
        target=lambda each: _target_cells(answer, each),
        duration=format_duration,
        size=format_size,
        command=command,
    )


def _target_cells(answer: PlanAnswer, prediction: PredictedStep) -> dict[str, Any] | None:
    """Time and cost to the target, as texts and numbers."""
    reached = answer.to_target(prediction)
    if reached is None:
        return None
    seconds, price = reached
    cost = "–" if price is None else f"${price:,.0f}"
    return {"seconds": seconds, "time": format_duration(seconds), "price": price, "cost": cost}


def _draw(answer: PlanAnswer, shown: Sequence[PredictedStep], curve: ScalingCurve) -> list[ReportPlot]:
    with plot_settings():
        plots = [_scaling(curve), _steps(shown), _memory(shown, answer.predictor.cluster.device.memory_bytes)]
    return [plot for plot in plots if plot is not None]


def _scaling(curve: ScalingCurve) -> ReportPlot | None:
    """Throughput and efficiency against the number of workers, each with its interval."""
    if len(curve.sizes) < 2:
        return None
    figure, (upper, lower) = new_figure(4.6, rows=2)
    ranks = [size.ranks for size in curve.sizes]
    colour = SERIES_COLOURS[0][0]
    first = curve.sizes[0]
    for axes, middle, edges in (
        (upper, [s.best.throughput for s in curve.sizes], [s.throughput_interval for s in curve.sizes]),
        (lower, [100 * s.efficiency for s in curve.sizes], [_percents(s.efficiency_interval) for s in curve.sizes]),
    ):
        lows, highs = zip(*edges, strict=True)
        axes.fill_between(ranks, lows, highs, color=colour, alpha=0.2, linewidth=0, label="80 % interval")
        axes.plot(ranks, middle, color=colour, marker="o", markersize=4, linewidth=1.5, label="best plan")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(size) for size in ranks])
        axes.minorticks_off()
        axes.set_xlabel("workers")
    ideal = [first.best.throughput * size / first.ranks for size in ranks]
    upper.plot(ranks, ideal, color=INK, linewidth=1, linestyle=(0, (2, 2)), label="linear")
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter(lambda value, _: number_phrase(value, 3))
    upper.set_ylabel("samples per second (log)")
    lower.set(ylabel="efficiency, %")
    lower.set_ylim(bottom=0)
    handles, labels = upper.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    about = "Predicted throughput and efficiency of the best plan against the number of workers, with 80 % intervals."
    return render_figure("scaling", "Scaling", about, figure)


def _percents(edges: tuple[float, float]) -> tuple[float, float]:
    return 100 * edges[0], 100 * edges[1]


def _steps(shown: Sequence[PredictedStep]) -> ReportPlot | None:
    """The parts of a step, its interval, and the communication that is hidden behind the backward."""
    factor, unit = time_unit(each.seconds for each in shown)
    groups = {
        label: [factor * sum(each.parts[name] for name in names) for each in shown]
        for label, (names, _) in STEP_GROUPS.items()
    }
    groups = {label: widths for label, widths in groups.items() if any(width > 0 for width in widths)}
    figure, (axes,) = new_figure(1.3 + 0.3 * len(shown) + 0.17 * ((len(groups) + 3) // 2))
    left = [0.0] * len(shown)
    for label, widths in groups.items():
        colour = PHASE_COLOURS[STEP_GROUPS[label][1]][0]
        axes.barh(range(len(shown)), widths, 0.5, left, label=label, color=colour, linewidth=0)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    hidden = [factor * each.hidden_s for each in shown]
    if any(hidden):
        colour = PHASE_COLOURS["exposed"][0]
        rows = [row + 0.36 for row in range(len(shown))]
        axes.barh(rows, hidden, 0.14, color="none", edgecolor=colour, linewidth=1, label=HIDDEN)
    edges = [[factor * bound for bound in each.interval] for each in shown]
    below = [end - low for end, (low, _) in zip(left, edges, strict=True)]
    above = [high - end for end, (_, high) in zip(left, edges, strict=True)]
    axes.errorbar(
        left, range(len(shown)), xerr=[below, above], fmt="none", color=INK, ecolor=INK, elinewidth=1, capsize=3,
        label="80 % interval",
    )  # fmt: skip
    label_rows(axes, [f"plan {number}" for number in range(1, len(shown) + 1)])
    axes.set_xlabel(f"{unit} a step")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    about = f"Predicted parts of a step of {len(shown)} plans: {', '.join(groups)}."
    return render_figure("steps", "Parts of a step", about, figure)


def _memory(shown: Sequence[PredictedStep], device_bytes: float) -> ReportPlot | None:
    """The memory of a rank by kind, and what a plan may use of the device."""
    kinds = [name for name in MEMORY_KINDS if any(getattr(each.memory, name) > 0 for each in shown)]
    figure, (axes,) = new_figure(1.3 + 0.27 * len(shown) + 0.17 * ((len(kinds) + 2) // 2))
    left = [0.0] * len(shown)
    for name in kinds:
        widths = [getattr(each.memory, name) / 1e9 for each in shown]
        colour = SERIES_COLOURS[MEMORY_KINDS.index(name)][0]
        axes.barh(range(len(shown)), widths, 0.68, left, label=name, color=colour, edgecolor=GRID, linewidth=0)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    usable = USABLE_MEMORY * device_bytes / 1e9
    axes.axvline(usable, color=MUTED, linewidth=1.2, linestyle=(0, (2, 2)), label="what a plan may use")
    label_rows(axes, [f"plan {number}" for number in range(1, len(shown) + 1)])
    axes.set_xlim(right=max(1.05 * usable, *left))
    axes.set_xlabel("GB of a rank")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    about = f"Predicted memory of the fullest rank of {len(shown)} plans by kind: {', '.join(kinds)}."
    return render_figure("memory", "Memory of a rank", about, figure)
