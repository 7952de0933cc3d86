"""The pictures of a race: curves, times to the target, phases of a step, predictions, scaling.

Narrow, so that their letters stay readable on a phone; the same bytes for the same race.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from syncline.bench.report.analysis import Analysis, EntryFacts
from syncline.bench.report.canvas import GRID, INK, MUTED, Picture, canvas, finished, styled
from syncline.bench.report.facts import RunFacts
from syncline.bench.report.style import PHASES, Look, looks
from syncline.bench.report.words import number, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

FAR = 6
"""So many times longer than another: both are seen only on a logarithmic axis."""
POINTS = 80
"""Of a line."""
LONGEST = 26
"""Letters of a name in a picture."""


def draw(race: Analysis) -> list[Picture]:
    """Every picture for which there is something to show."""
    with styled():
        style = looks([entry.name for entry in race.entries], race.baseline)
        made = [
            _curves(race, style, "time", "seconds", lambda one: one.elapsed),
            _curves(race, style, "epochs", "epochs", lambda one: one.epochs),
            _curves(race, style, "bytes", "megabytes handed over by a worker", lambda one: one.bytes_wire / 1e6),
            _times(race, style),
            _steps(race),
            _predictions(race, style),
            _scaling(race, style),
        ]
    return [picture for picture in made if picture is not None]


def _curves(
    race: Analysis, style: dict[str, Look], name: str, label: str, across: Callable[[Any], float]
) -> Picture | None:
    """The metric against something: a thin line for each seed, a thick one for their median while all of them run."""
    shown = [entry for entry in race.entries if any(run.evaluations for run in race.of(entry.name))]
    if not shown:
        return None
    figure, (axes,) = canvas(3.0 + 0.17 * math.ceil((len(shown) + 1) / 2))
    for entry in shown:
        runs = [run for run in race.of(entry.name) if run.evaluations]
        look = style[entry.name]
        for run in runs:
            points = _thinned([(across(one), one.metric) for one in run.evaluations])
            axes.plot(*zip(*points, strict=True), color=look.colour, linewidth=0.7, alpha=0.4)
        middle = _thinned(_middle(runs, across))
        axes.plot(
            *zip(*middle, strict=True),
            color=look.colour,
            linestyle=look.dash,
            marker=look.marker,
            markersize=3.2,
            markevery=max(1, len(middle) // 6),
            linewidth=1.7,
            label=_short(entry.name),
        )
    axes.axhline(race.target, color=INK, linewidth=1, linestyle=(0, (2, 2)), label=f"target {number(race.target)}")
    axes.set(xlabel=label, ylabel=f"validation {race.metric}")
    _zoom(axes, race, shown)
    ends = [across(run.evaluations[-1]) for entry in shown for run in race.of(entry.name) if run.evaluations]
    starts = [across(run.evaluations[0]) for entry in shown for run in race.of(entry.name) if run.evaluations]
    if min(starts) > 0 and max(ends) > FAR * min(ends):
        axes.set_xscale("log")
        _log_ticks(axes)
        axes.set_xlabel(f"{label} (log)")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, handlelength=3)
    about = f"Validation {race.metric} against {label}: {len(shown)} entries, median over seeds and every seed."
    return finished(f"curves-{name}", f"{race.metric.capitalize()} against {name}", about, figure)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """No more points than can be told apart; the last one is always there."""
    every = -(-len(points) // POINTS)
    return [*points[:-1:every], points[-1]] if points else points


def _zoom(axes: Axes, race: Analysis, shown: Sequence[EntryFacts]) -> None:
    """An entry that diverged must not press all others into a line."""
    metrics = [
        one.metric
        for entry in shown
        for run in race.of(entry.name)
        for one in run.evaluations
        if math.isfinite(one.metric)
    ]
    if race.higher_is_better or not metrics:
        return
    worst = max(metrics)
    if race.target > 0 and min(metrics) > 0 and worst > 20 * race.target:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        firsts = [run.evaluations[0].metric for entry in shown for run in race.of(entry.name) if run.evaluations]
        known = [first for first in firsts if math.isfinite(first)]
        axes.set_ylim(top=min(worst * 1.5, 20 * statistics.median(known)) if known else None)


def _middle(runs: Sequence[RunFacts], across: Callable[[Any], float]) -> list[tuple[float, float]]:
    """The median over the seeds at each evaluation that all of them have: they come at the same steps."""
    shortest = min(len(run.evaluations) for run in runs)
    found = []
    for turn in range(shortest):
        evaluations = [run.evaluations[turn] for run in runs]
        metric = statistics.median(one.metric for one in evaluations)
        found.append((statistics.median(map(across, evaluations)), metric))
    return found


def _rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(False, axis="y")


def _times(race: Analysis, style: dict[str, Look]) -> Picture | None:
    """A dot for each seed, the median and its interval; whoever never came stands at the edge."""
    entries = sorted((entry for entry in race.entries if entry.time), key=lambda e: e.time.median if e.time else 0)
    finite = [run.time_to_target for entry in entries for run in race.of(entry.name) if run.reached]
    if not finite:
        return None
    figure, (axes,) = canvas(0.9 + 0.27 * len(entries))
    factor, unit = time_unit(entry.time.median for entry in entries if entry.time)
    edge = factor * max(finite) * 2.2
    for row, entry in enumerate(entries):
        look, time = style[entry.name], entry.time
        assert time is not None
        seeds = [factor * run.time_to_target for run in race.of(entry.name) if run.reached]
        if time.finite:
            high = min(factor * time.high, edge / 1.9)  # the words "1 never" stand at the edge
            axes.plot([factor * time.low, high], [row, row], color=look.colour, linewidth=3, alpha=0.35)
            axes.plot([factor * time.median], [row], color=look.colour, marker="|", markersize=13, markeredgewidth=2)
        axes.plot(seeds, [row] * len(seeds), color=look.colour, marker=look.marker, linestyle="", markersize=4.5)
        missed = sum(not run.reached for run in race.of(entry.name))
        if missed:
            axes.text(edge, row, f"{missed} never", ha="right", va="center", color=MUTED, fontsize=8.5)
    _rows(axes, [entry.name for entry in entries])
    axes.set_xscale("log")
    _log_ticks(axes)
    axes.set_xlim(right=edge * 1.05)
    axes.set_xlabel(f"time to {race.metric} {number(race.target)}, {unit} (log)")
    about = "Time to the target of every entry: each seed, the median and its interval."
    return finished("time-to-target", "Time to target", about, figure)


def _log_ticks(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axes.get_xlim()
    decades = math.log10(high / low) if low > 0 else 1
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.2 else (1,)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _steps(race: Analysis) -> Picture | None:
    """Where each step went."""
    entries = [entry for entry in race.entries if entry.phases]
    if not entries:
        return None
    entries.sort(key=lambda entry: sum(entry.phases.values()))
    factor, unit = time_unit([sum(entry.phases.values()) for entry in entries])
    if unit == "s":
        factor, unit = 1e3, "ms"
    names = [name for name in PHASES if any(entry.shares.get(name, 0.0) > 0.002 for entry in entries)]
    figure, (axes,) = canvas(1.0 + 0.27 * len(entries) + 0.17 * math.ceil(len(names) / 3))
    left = [0.0] * len(entries)
    hatches = {"exposed": "///", "codec": "xx"}
    for name in PHASES:
        if name in names:
            widths = [factor * entry.phases.get(name, 0.0) for entry in entries]
            told = "exposed communication" if name == "exposed" else name
            axes.barh(
                range(len(entries)), widths, 0.68, left, label=told, color=PHASES[name][0], hatch=hatches.get(name),
                edgecolor=GRID, linewidth=0,
            )  # fmt: skip
            left = [start + width for start, width in zip(left, widths, strict=True)]
    _rows(axes, [entry.name for entry in entries])
    axes.set_xlabel(f"{unit} a step, evaluations spread over the steps")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    about = "Seconds of a step by phase, for every entry: " + ", ".join(names) + "."
    return finished("phases", "Where each step went", about, figure)


def _predictions(race: Analysis, style: dict[str, Look]) -> Picture | None:
    """Hollow: predicted; filled: measured."""
    entries = [entry for entry in race.entries if entry.prediction is not None]
    if not entries:
        return None
    figure, panels = canvas(1.5 + 0.42 * len(entries), rows=2)
    for axes, what in zip(panels, ("step", "communication"), strict=True):
        for row, entry in enumerate(entries):
            told = entry.prediction
            assert told is not None
            colour = style[entry.name].colour
            low, high = (told.step_low, told.step_high) if what == "step" else (told.communication, told.communication)
            seen = told.measured_step if what == "step" else told.measured_communication
            axes.plot([1e3 * low, 1e3 * high], [row, row], color=colour, linewidth=1)
            axes.plot(
                [1e3 * low, 1e3 * high], [row, row], color=colour, linestyle="", marker="D", fillstyle="none",
                markersize=6.5,
            )  # fmt: skip
            if seen is not None:
                axes.plot([1e3 * seen], [row], color=colour, marker="o", markersize=4, linestyle="")
        _rows(axes, [entry.name for entry in entries])
        axes.set_xlim(left=0)
        axes.set_xlabel("a whole step, ms" if what == "step" else "communication of a step, ms")
    panels[0].set_title("◇ predicted   ● measured", loc="right")
    about = "Predicted and measured milliseconds of a step, and of its communication, for every entry."
    return finished("predictions", "Predicted and measured", about, figure)


def _scaling(race: Analysis, style: dict[str, Look]) -> Picture | None:
    entries = [entry for entry in race.entries if len(entry.scaling) > 1]
    if not entries:
        return None
    figure, (upper, lower) = canvas(4.6 + 0.17 * math.ceil(len(entries) / 2), rows=2)
    sizes = sorted({point.workers for entry in entries for point in entry.scaling})
    times = [point.time.median for entry in entries for point in entry.scaling if point.time.finite]
    factor, unit = time_unit(times)
    for entry in entries:
        look = style[entry.name]
        shown: dict[str, Any] = {
            "color": look.colour, "linestyle": look.dash, "marker": look.marker, "markersize": 4, "linewidth": 1.5,
        }  # fmt: skip
        known = [point for point in entry.scaling if point.efficiency is not None]
        speeds = [(point.efficiency or 0.0) * point.workers for point in known]
        upper.plot([point.workers for point in known], speeds, label=_short(entry.name), **shown)
        came = [point for point in entry.scaling if point.time.finite]
        lower.plot([point.workers for point in came], [factor * point.time.median for point in came], **shown)
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
    return finished("scaling", "Scaling", about, figure)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
