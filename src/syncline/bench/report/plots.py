"""The plots of a report: curves, times to the target, phases of a step, predictions, scaling.

They are narrow, so that their text is readable on a phone. The same race gives the same bytes. Entries differ in
colour, dash and marker. Plots are drawn in the colours for paper. In the page, each colour becomes a CSS variable with
values for light and for dark.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncline.bench.report.analysis import Analysis
from syncline.bench.report.facts import RunFacts
from syncline.bench.report.phrases import number_phrase, time_unit
from syncline.bench.runlog import LoggedEvaluation
from syncline.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "GRID",
    "INK",
    "MUTED",
    "PHASE_COLOURS",
    "PHASE_LABELS",
    "SERIES_COLOURS",
    "ReportPlot",
    "colour_variables",
    "draw_plots",
    "label_rows",
    "new_figure",
    "plot_settings",
    "plot_styles",
    "render_figure",
]

TEXT_COLOURS = {"ink": ("#1c2126", "#e8ebee"), "muted": ("#586069", "#a3acb5"), "grid": ("#dfe3e8", "#343b43")}
"""Text, secondary text and grid, each for light and for dark."""

SERIES_COLOURS = (
    ("#0068a8", "#5ab0f2"),  # blue
    ("#c24a05", "#ff9a56"),  # vermilion
    ("#007a56", "#35c896"),  # green
    ("#a1337f", "#ee8fcf"),  # purple
    ("#866300", "#e0b93c"),  # ochre
    ("#117a94", "#62cbe4"),  # cyan
    ("#b3263a", "#ff8a95"),  # red
)
BASELINE_COLOURS = ("#40474f", "#c6cdd4")
PHASE_COLOURS = {
    "compute": ("#0069a9", "#5ab0f3"),
    "exposed": ("#c24b06", "#ff9a57"),
    "codec": ("#a13380", "#ee8fd0"),
    "data": ("#866401", "#e0b93d"),
    "evaluation": ("#007a57", "#35c897"),
    "checkpoint": ("#117a95", "#62cbe5"),
    "agreeing": ("#b3263b", "#ff8a96"),
    "rest": ("#8b949d", "#6d7680"),
}
"""Slightly different from the colours of the series, because each colour identifies one CSS variable."""

PHASE_LABELS = {"exposed": "exposed communication", "agreeing": "control messages"}
"""Labels of phases whose key in the log is not clear to readers."""

DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")

Dash = str | tuple[int, tuple[float, ...]]
WIDTH_INCHES = 4.6
"""About the width of a phone."""
INK, MUTED, GRID = (light for light, _ in TEXT_COLOURS.values())
LOG_SCALE_RATIO = 6
"""If the longest time is this many times the shortest, the axis is logarithmic."""
MAX_LINE_POINTS = 80
MAX_NAME_CHARS = 26


@dataclass(frozen=True)
class PlotStyle:
    """The colour, dash and marker of an entry in all plots."""

    colour: str
    dash: Dash
    marker: str


def plot_styles(names: list[str], baseline: str | None) -> dict[str, PlotStyle]:
    """A style for every entry; the baseline is grey.

    >>> styles = plot_styles(["ddp", "a", "b"], "ddp")
    >>> styles["ddp"].colour == BASELINE_COLOURS[0], styles["a"] != styles["b"]
    (True, True)
    """
    styles: dict[str, PlotStyle] = {}
    number = 0
    for name in names:
        if name == baseline:
            styles[name] = PlotStyle(BASELINE_COLOURS[0], "-", "o")
            continue
        colour = SERIES_COLOURS[number % len(SERIES_COLOURS)][0]
        # The numbers of colours, dashes and markers have no common divisor: 280 styles differ.
        styles[name] = PlotStyle(colour, DASHES[number % len(DASHES)], MARKERS[(number + 1) % len(MARKERS)])
        number += 1
    return styles


def colour_variables() -> dict[str, tuple[str, str]]:
    """The values of each CSS variable, for light and for dark. A plot has the value for light."""
    variables = {f"--{role}": colours for role, colours in TEXT_COLOURS.items()}
    variables |= {f"--series-{number}": colours for number, colours in enumerate(SERIES_COLOURS)}
    variables |= {f"--phase-{name}": colours for name, colours in PHASE_COLOURS.items()}
    return {**variables, "--baseline": BASELINE_COLOURS}


@dataclass(frozen=True)
class ReportPlot:
    """A plot: the name of its file, its title, and a description for readers who cannot see it."""

    name: str
    title: str
    about: str
    svg: bytes
    """With a transparent background."""
    png: bytes
    """With a white background."""


def new_figure(height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure of this height in inches, with one panel per row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    return figure, [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]


def render_figure(name: str, title: str, about: str, figure: Figure) -> ReportPlot:
    """Render a figure to SVG and PNG. The same figure gives the same bytes."""
    metadata = {"svg": {"Date": None, "Creator": None, "Format": None, "Type": None}, "png": {"Software": None}}
    files = {}
    with plot_settings(salt=name):
        for kind, background in (("svg", "none"), ("png", "white")):
            written = io.BytesIO()
            figure.savefig(written, format=kind, dpi=200, metadata=metadata[kind], facecolor=background)
            files[kind] = written.getvalue()
            figure.set_layout_engine("none")  # keep the positions for the second format
    return ReportPlot(name, title, about, **files)


@contextmanager
def plot_settings(salt: str = "syncline") -> Iterator[None]:
    """The matplotlib settings of all plots; `salt` makes the identifiers inside an SVG unique."""
    try:
        import matplotlib
    except ImportError:
        raise UnsupportedError("plots need matplotlib: pip install 'syncline[plot]'") from None
    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.labelsize": 9,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.fontsize": 8.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "svg.fonttype": "none",
        "text.parse_math": False,
        "hatch.linewidth": 0.6,
        "svg.hashsalt": salt,
    }
    with matplotlib.rc_context(settings):
        yield


def draw_plots(race: Analysis) -> list[ReportPlot]:
    """All plots that have data."""
    with plot_settings():
        styles = plot_styles([entry.name for entry in race.entries], race.baseline)
        plots = [
            _curves(race, styles, "time", "seconds", lambda one: one.elapsed),
            _curves(race, styles, "epochs", "epochs", lambda one: one.epochs),
            _curves(race, styles, "bytes", "megabytes sent by a worker", lambda one: one.bytes_wire / 1e6),
            _times(race, styles),
            _steps(race),
            _predictions(race, styles),
            _scaling(race, styles),
        ]
    return [plot for plot in plots if plot is not None]


def _curves(
    race: Analysis, styles: dict[str, PlotStyle], name: str, label: str, across: Callable[[LoggedEvaluation], float]
) -> ReportPlot | None:
    """The metric against time, epochs or bytes: a thin line for each seed, a thick line for their median."""
    shown = {entry.name: [run for run in race.of(entry.name) if run.evaluations] for entry in race.entries}
    shown = {entry: runs for entry, runs in shown.items() if runs}
    if not shown:
        return None
    figure, (axes,) = new_figure(3.0 + 0.17 * math.ceil((len(shown) + 1) / 2))
    for entry, runs in shown.items():
        style = styles[entry]
        for run in runs:
            points = _thinned([(across(one), one.metric) for one in run.evaluations])
            axes.plot(*zip(*points, strict=True), color=style.colour, linewidth=0.7, alpha=0.4)
        middle = _thinned(_median_curve(runs, across))
        axes.plot(
            *zip(*middle, strict=True),
            color=style.colour,
            linestyle=style.dash,
            marker=style.marker,
            markersize=3.2,
            markevery=max(1, len(middle) // 6),
            linewidth=1.7,
            label=shorten_name(entry),
        )
    axes.axhline(
        race.target, color=INK, linewidth=1, linestyle=(0, (2, 2)), label=f"target {number_phrase(race.target)}"
    )
    axes.set(xlabel=label, ylabel=f"validation {race.metric}")
    curves = [run.evaluations for runs in shown.values() for run in runs]
    _zoom(axes, race, curves)
    starts, ends = [across(curve[0]) for curve in curves], [across(curve[-1]) for curve in curves]
    if min(starts) > 0 and max(ends) > LOG_SCALE_RATIO * min(ends):
        axes.set_xscale("log")
        _log_ticks(axes)
        axes.set_xlabel(f"{label} (log)")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, handlelength=3)
    about = f"Validation {race.metric} against {label}: {len(shown)} entries, median over seeds and every seed."
    return render_figure(f"curves-{name}", f"{race.metric.capitalize()} against {name}", about, figure)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_LINE_POINTS` points, always with the last one."""
    every = -(-len(points) // MAX_LINE_POINTS)
    return [*points[:-1:every], points[-1]] if points else points


def _zoom(axes: Axes, race: Analysis, curves: Sequence[Sequence[LoggedEvaluation]]) -> None:
    """Use a logarithmic axis if an entry diverged, so that the others stay visible."""
    metrics = [one.metric for curve in curves for one in curve if math.isfinite(one.metric)]
    if race.higher_is_better or not metrics:
        return
    worst = max(metrics)
    if race.target > 0 and min(metrics) > 0 and worst > 20 * race.target:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        known = [curve[0].metric for curve in curves if math.isfinite(curve[0].metric)]
        axes.set_ylim(top=min(worst * 1.5, 20 * statistics.median(known)) if known else None)


def _median_curve(runs: Sequence[RunFacts], across: Callable[[LoggedEvaluation], float]) -> list[tuple[float, float]]:
    """The median over the seeds at each evaluation that all seeds have; they are at the same steps."""
    return [
        (statistics.median(map(across, evaluations)), statistics.median(one.metric for one in evaluations))
        for evaluations in zip(*(run.evaluations for run in runs), strict=False)
    ]


def label_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of a panel, from the top."""
    axes.set_yticks(range(len(names)), [shorten_name(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(False, axis="y")


def _times(race: Analysis, styles: dict[str, PlotStyle]) -> ReportPlot | None:
    """A dot for each seed, the median and its interval; entries that missed the target are at the edge."""
    entries = sorted((entry for entry in race.entries if entry.time), key=lambda e: e.time.median if e.time else 0)
    finite = [run.time_to_target for entry in entries for run in race.of(entry.name) if run.reached]
    if not finite:
        return None
    figure, (axes,) = new_figure(0.9 + 0.27 * len(entries))
    factor, unit = time_unit(entry.time.median for entry in entries if entry.time)
    edge = factor * max(finite) * 2.2
    for row, entry in enumerate(entries):
        style, time = styles[entry.name], entry.time
        assert time is not None
        seeds = [factor * run.time_to_target for run in race.of(entry.name) if run.reached]
        if time.finite:
            high = min(factor * time.high, edge / 1.9)  # the label "1 never" is at the edge
            axes.plot([factor * time.low, high], [row, row], color=style.colour, linewidth=3, alpha=0.35)
            axes.plot([factor * time.median], [row], color=style.colour, marker="|", markersize=13, markeredgewidth=2)
        axes.plot(seeds, [row] * len(seeds), color=style.colour, marker=style.marker, linestyle="", markersize=4.5)
        missed = sum(not run.reached for run in race.of(entry.name))
        if missed:
            axes.text(edge, row, f"{missed} never", ha="right", va="center", color=MUTED, fontsize=8.5)
    label_rows(axes, [entry.name for entry in entries])
    axes.set_xscale("log")
    _log_ticks(axes)
    axes.set_xlim(right=edge * 1.05)
    axes.set_xlabel(f"time to {race.metric} {number_phrase(race.target)}, {unit} (log)")
    about = "Time to the target of every entry: each seed, the median and its interval."
    return render_figure("time-to-target", "Time to target", about, figure)


def _log_ticks(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axes.get_xlim()
    decades = math.log10(high / low) if low > 0 else 1
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.2 else (1,)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _steps(race: Analysis) -> ReportPlot | None:
    """The phases of a step."""
    entries = [entry for entry in race.entries if entry.phases]
    if not entries:
        return None
    entries.sort(key=lambda entry: sum(entry.phases.values()))
    factor, unit = time_unit([sum(entry.phases.values()) for entry in entries])
    if unit == "s":
        factor, unit = 1e3, "ms"
    names = [name for name in PHASE_COLOURS if any(entry.shares.get(name, 0.0) > 0.002 for entry in entries)]
    figure, (axes,) = new_figure(1.0 + 0.27 * len(entries) + 0.17 * math.ceil(len(names) / 3))
    left = [0.0] * len(entries)
    hatches = {"exposed": "///", "codec": "xx"}
    for name in PHASE_COLOURS:
        if name in names:
            widths = [factor * entry.phases.get(name, 0.0) for entry in entries]
            label, colour = PHASE_LABELS.get(name, name), PHASE_COLOURS[name][0]
            axes.barh(
                range(len(entries)), widths, 0.68, left, label=label, color=colour, hatch=hatches.get(name),
                edgecolor=GRID, linewidth=0,
            )  # fmt: skip
            left = [start + width for start, width in zip(left, widths, strict=True)]
    label_rows(axes, [entry.name for entry in entries])
    axes.set_xlabel(f"{unit} a step, evaluations spread over the steps")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    about = "Seconds of a step by phase, for every entry: " + ", ".join(names) + "."
    return render_figure("phases", "Time of a step", about, figure)


def _predictions(race: Analysis, styles: dict[str, PlotStyle]) -> ReportPlot | None:
    """Predicted (hollow) and measured (filled) times: of a step, and of its communication."""
    steps = _predicted_steps(race)
    communication = {
        entry.name: (entry.prediction.communication,) * 2 + (entry.prediction.measured_communication,)
        for entry in race.entries
        if entry.prediction is not None
    }
    panels = {"a whole step, ms": steps, "communication of a step, ms": communication}
    panels = {label: rows for label, rows in panels.items() if rows}
    if not panels:
        return None
    figure, drawn = new_figure(0.7 + sum(0.4 + 0.21 * len(rows) for rows in panels.values()), rows=len(panels))
    for axes, (label, rows) in zip(drawn, panels.items(), strict=True):
        for row, (name, (low, high, seen)) in enumerate(rows.items()):
            colour = styles[name].colour
            axes.plot(
                [1e3 * low, 1e3 * high], [row, row], color=colour, linewidth=1, marker="D", fillstyle="none",
                markersize=6.5,
            )  # fmt: skip
            if seen is not None:
                axes.plot([1e3 * seen], [row], color=colour, marker="o", markersize=4, linestyle="")
        label_rows(axes, list(rows))
        axes.set_xlim(left=0)
        axes.set_xlabel(label)
    drawn[0].set_title("◇ predicted   ● measured", loc="right")
    about = "Predicted and measured milliseconds of a step, and of its communication, for every entry that has them."
    return render_figure("predictions", "Predicted and measured", about, figure)


def _predicted_steps(race: Analysis) -> dict[str, tuple[float, float, float | None]]:
    """The interval of each entry's predicted step and the measured one. In races without them: bounds by `costs`."""
    found = {
        entry.name: (*each.predicted.interval_s, each.measured)
        for entry in race.entries
        for each in entry.comparisons
        if each.workers == race.workers and each.predicted.interval_s is not None
    }
    if found or any(entry.comparisons for entry in race.entries):
        return found
    return {
        entry.name: (entry.prediction.step_low, entry.prediction.step_high, entry.prediction.measured_step)
        for entry in race.entries
        if entry.prediction is not None
    }


def _scaling(race: Analysis, styles: dict[str, PlotStyle]) -> ReportPlot | None:
    entries = [entry for entry in race.entries if len(entry.scaling) > 1]
    if not entries:
        return None
    figure, (upper, lower) = new_figure(4.6 + 0.17 * math.ceil(len(entries) / 2), rows=2)
    sizes = sorted({point.workers for entry in entries for point in entry.scaling})
    times = [point.time.median for entry in entries for point in entry.scaling if point.time.finite]
    factor, unit = time_unit(times)
    for entry in entries:
        style = styles[entry.name]
        shown: dict[str, Any] = {
            "color": style.colour, "linestyle": style.dash, "marker": style.marker, "markersize": 4, "linewidth": 1.5,
        }  # fmt: skip
        known = [point for point in entry.scaling if point.efficiency is not None]
        speeds = [(point.efficiency or 0.0) * point.workers for point in known]
        upper.plot([point.workers for point in known], speeds, label=shorten_name(entry.name), **shown)
        reached = [point for point in entry.scaling if point.time.finite]
        lower.plot([point.workers for point in reached], [factor * point.time.median for point in reached], **shown)
    upper.plot(sizes, sizes, color=INK, linewidth=1, linestyle=(0, (2, 2)), label="ideal")
    upper.set(ylabel="throughput ÷ one worker's", xlabel="workers")
    lower.set(ylabel=f"time to target, {unit}", xlabel="workers")
    for axes in (upper, lower):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
    lower.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, handlelength=3)
    about = "Throughput and time to the target against the number of workers, for every entry."
    return render_figure("scaling", "Scaling", about, figure)


def shorten_name(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 1]}…"
