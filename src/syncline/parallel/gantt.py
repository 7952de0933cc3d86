"""Draws when each rank of a pipeline computes what, as an SVG: predicted, measured, or one above the other.

```text
predicted      rank 0  ▐F0▌▐F1▌▨▨▨▨▨▨▐B0▌▨▨▨▐B1▌       a box: an action, with the number of its micro-batch
               rank 1  ▨▨▨▨▐F0▌▐B0▌▐F1▌▐B1▌▨▨▨▨       ▨: the rank is idle
                       0      20     40     60 ms
```

This command prints the picture of a schedule on p ranks::

    python -m syncline.parallel.gantt "1f1b(microbatches=8)" --ranks 4 > 1f1b.svg
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from syncline.parallel.player import StageCost, TimedAction, play
from syncline.parallel.schedules import Action, PipelineSetting, build_schedule

__all__ = ["draw", "draw_schedule"]

KIND_LABELS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
    "R": "reduction",
    "U": "update",
}
KIND_COLOURS = {
    "F": ("#0068a8", "#a9d3ee"),
    "B": ("#b84300", "#ffc39a"),
    "I": ("#866300", "#ecd071"),
    "W": ("#007a56", "#8fdcbd"),
    "R": ("#a1337f", "#a1337f"),
    "U": ("#a1337f", "#a1337f"),
}
"""The colours of the first and of the last stage of a rank."""
STYLE = """\
.gantt { font-family: system-ui, sans-serif; font-size: 12px; }
.gantt .page { fill: #ffffff; stroke: #dfe3e8; }
.gantt .text { fill: #1c2126; }
.gantt .muted { fill: #586069; }
.gantt .title { font-size: 13px; font-weight: 600; }
.gantt .grid { stroke: #c4cad1; }
.gantt .idle { fill: #f3f4f6; }
.gantt .hatch { stroke: #a3acb5; }
.gantt .box { stroke: #ffffff; }
.gantt .number { text-anchor: middle; }
@media (prefers-color-scheme: dark) {
  .gantt .page { fill: #1c2126; stroke: #343b43; }
  .gantt .text { fill: #e8ebee; }
  .gantt .muted { fill: #a3acb5; }
  .gantt .grid { stroke: #4a535d; }
  .gantt .idle { fill: #262c33; }
  .gantt .hatch { stroke: #5b656f; }
  .gantt .box { stroke: #1c2126; }
}"""

MARGIN_PX = 14
ROW_PX = 26
ROW_GAP_PX = 4
TITLE_PX = 26
AXIS_PX = 34
LEGEND_PX = 24
CHARACTER_PX = 6.6
"""The mean width of a character of a label."""
MIN_MARK_PX = 2.5
"""The minimum width of R and U, which may take no time."""
MAX_TICKS = 10
TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def draw(
    panels: Mapping[str, Iterable[tuple[int, Action, float, float]]],
    *,
    labels: Sequence[str] = (),
    width_px: int = 960,
) -> str:
    """An SVG with one panel for each title, all with the same scale of time.

    A panel is a list of rank, action, start and end in seconds, in any order; `PipelineTimeline.actions` is one. The
    time begins with the first action of the panel. `labels` are the names of the rows; by default these are "rank 0",
    "rank 1", ….

    >>> picture = draw({"measured": [(0, Action("F", 0, 0), 0.0, 0.5), (1, Action("F", 1, 0), 0.5, 1.0)]})
    >>> picture[:4], picture.count('class="box"')
    ('<svg', 2)
    """
    rows = {title: _from_zero([TimedAction(*each) for each in actions]) for title, actions in panels.items()}
    every = [each for panel in rows.values() for each in panel]
    names = list(labels) or [f"rank {rank}" for rank in range(max((each.rank for each in every), default=-1) + 1)]
    left = MARGIN_PX + CHARACTER_PX * max(map(len, names), default=0) + 10
    span = max((each.end_s for each in every), default=0.0) or 1.0
    scale = _Scale(left, (width_px - MARGIN_PX - left) / span, span)
    body: list[str] = []
    top = float(MARGIN_PX)
    for title, actions in rows.items():
        body += _panel(title, actions, names, top, scale)
        top += TITLE_PX + len(names) * (ROW_PX + ROW_GAP_PX) + AXIS_PX
    body += _legend(every, top, left)
    height = math.ceil(top + LEGEND_PX)
    title = escape("Pipeline: " + "; ".join(panels))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="gantt" role="img" aria-label="{title}" '
            f'viewBox="0 0 {width_px} {height}" width="{width_px}" height="{height}">',
            f"<style>\n{STYLE}\n</style>",
            '<defs><pattern id="gantt-idle" width="7" height="7" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect class="idle" width="7" height="7"/>'
            '<line class="hatch" y2="7" stroke-width="2"/></pattern></defs>',
            f'<rect class="page" x="0.5" y="0.5" width="{width_px - 1}" height="{height - 1}" rx="6"/>',
            *body,
            "</svg>\n",
        ]
    )


class _Scale(NamedTuple):
    """Maps seconds to horizontal positions."""

    left: float
    px_per_second: float
    span_s: float

    def x(self, seconds: float) -> float:
        return self.left + seconds * self.px_per_second

    def ticks(self) -> tuple[str, list[tuple[float, str]]]:
        """The unit of the axis, and seconds and text of each tick: at 1, 2 or 5 times a power of ten."""
        unit, seconds = next((each for each in TIME_UNITS if self.span_s >= each[1]), TIME_UNITS[-1])
        span = self.span_s / seconds
        step = 10.0 ** math.floor(math.log10(span / MAX_TICKS))
        step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= MAX_TICKS)
        values = [round(number * step, 9) for number in range(math.floor(span / step + 1e-9) + 1)]
        return unit, [(value * seconds, f"{value:g}") for value in values]


def _from_zero(actions: list[TimedAction]) -> list[TimedAction]:
    """The actions with the start of the first one as zero."""
    zero = min((each.start_s for each in actions), default=0.0)
    return [TimedAction(rank, action, start - zero, end - zero) for rank, action, start, end in actions]


def _panel(
    title: str, actions: Sequence[TimedAction], names: Sequence[str], top: float, scale: _Scale
) -> Iterator[str]:
    """A title, a row for each rank with its idle time hatched, and the axis below."""
    yield _text(MARGIN_PX, top + 14, title, "text title")
    first = top + TITLE_PX
    bottom = first + len(names) * (ROW_PX + ROW_GAP_PX)
    unit, ticks = scale.ticks()
    for seconds, text in ticks:
        x = scale.x(seconds)
        yield f'<line class="grid" x1="{x:.1f}" y1="{first}" x2="{x:.1f}" y2="{bottom + 4}"/>'
        yield _text(x, bottom + 17, f"{text} {unit}" if seconds == 0 else text, "muted number")
    end = max((each.end_s for each in actions), default=0.0)
    for rank, name in enumerate(names):
        y = first + rank * (ROW_PX + ROW_GAP_PX)
        yield _text(MARGIN_PX, y + ROW_PX / 2 + 4, name, "text")
        yield (
            f'<rect fill="url(#gantt-idle)" x="{scale.x(0):.1f}" y="{y}" width="{end * scale.px_per_second:.1f}" '
            f'height="{ROW_PX}"/>'
        )
        row = sorted((each for each in actions if each.rank == rank), key=lambda each: each.start_s)
        stages = sorted({each.action.stage for each in row})
        # Marks of actions without duration come last, so that no box covers them.
        for each in sorted(row, key=lambda each: each.end_s == each.start_s):
            yield from _box(each, stages.index(each.action.stage) / max(1, len(stages) - 1), y, scale)


def _box(timed: TimedAction, shade: float, top: float, scale: _Scale) -> Iterator[str]:
    """The box of an action, with its number if that fits. `shade`: 0 for the first stage of a rank, 1 for the last."""
    kind, stage, number = timed.action
    width = (timed.end_s - timed.start_s) * scale.px_per_second
    left = scale.x(timed.start_s)
    drawn = max(width, MIN_MARK_PX) if kind in "RU" else width
    fill, ink = _colours(kind, shade)
    what = f"{timed.action}: {KIND_LABELS[kind]} of stage {stage}" + (f", micro-batch {number}" if number >= 0 else "")
    when = f"{timed.start_s:.6g} s to {timed.end_s:.6g} s"
    narrow = ' stroke-width="0" shape-rendering="crispEdges"' if width < 2 * MIN_MARK_PX else ""
    yield (
        f'<rect class="box" fill="{fill}"{narrow} x="{left - (drawn - width) / 2:.2f}" y="{top}" '
        f'width="{drawn:.2f}" height="{ROW_PX}"><title>{what}, {when}</title></rect>'
    )
    text = str(number)
    size = min(12.0, 1.5 * (width - 2) / len(text))
    if number >= 0 and size >= 7:
        yield (
            f'<text class="number" fill="{ink}" font-size="{size:.1f}" x="{left + width / 2:.1f}" '
            f'y="{top + ROW_PX / 2 + size * 0.36:.1f}">{text}</text>'
        )


def _colours(kind: str, shade: float) -> tuple[str, str]:
    """The fill of a box, between the two colours of its kind, and the colour of its number."""
    dark, light = ([int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in KIND_COLOURS[kind])
    mixed = [round(a + (b - a) * shade) for a, b in zip(dark, light, strict=True)]
    luminance = sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), mixed, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed), "#ffffff" if luminance < 140 else "#1c2126"


def _legend(actions: Sequence[TimedAction], top: float, left: float) -> Iterator[str]:
    """The kinds that occur, and idle time; both shades if a rank has several stages."""
    stages = {(each.rank, each.action.stage) for each in actions}
    several = len(stages) > len({rank for rank, _ in stages})
    x = left
    swatches = [([_colours(kind, 0)[0], _colours(kind, 1)[0]], label) for kind, label in KIND_LABELS.items()]
    used = {each.action.kind for each in actions}
    shown = [each for each, kind in zip(swatches, KIND_LABELS, strict=True) if kind in used]
    for fills, label in [*shown, (["url(#gantt-idle)"], "idle")]:
        for fill in dict.fromkeys(fills if several else fills[:1]):
            yield f'<rect fill="{fill}" x="{x:.1f}" y="{top + 2}" width="14" height="12"/>'
            x += 15
        yield _text(x + 4, top + 12, label, "muted")
        x += 4 + CHARACTER_PX * len(label) + 16
    if several:
        yield _text(x, top + 12, "lighter: a later stage of the rank", "muted")


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def draw_schedule(
    spec: str,
    ranks: int = 4,
    micro_batches: int = 8,
    rank_cost: StageCost = StageCost(0.010, 0.010, 0.010),  # noqa: B008 (immutable)
    transfer_s: float = 0.0,
) -> str:
    """The predicted run of a schedule. `rank_cost` is that of all stages of a rank together.

    >>> "interleaved: 4 ranks, 8 micro-batches, 285 ms, bubble 15.8 %" in draw_schedule("interleaved")
    True
    """
    schedule = build_schedule(spec)
    setting = PipelineSetting(ranks, schedule.microbatches or micro_batches)
    share = 1 / schedule.stages_per_rank
    cost = StageCost(rank_cost.forward_s * share, rank_cost.input_s * share, rank_cost.weight_s * share)
    timeline = play(schedule, setting, cost, transfer_s)
    title = (
        f"{schedule}: {ranks} ranks, {setting.micro_batches} micro-batches, {timeline.makespan_s * 1e3:.4g} ms, "
        f"bubble {100 * timeline.bubble_rate:.1f} %"
    )
    return draw({title: timeline.actions})


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the picture of a schedule."""
    parser = argparse.ArgumentParser(prog="python -m syncline.parallel.gantt", description=main.__doc__)
    parser.add_argument("schedule", help="a spec, such as '1f1b' or 'interleaved(chunks=4)'")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    for name, what in (("forward", "forward"), ("input", "backward of the inputs"), ("weight", "that of the weights")):
        text = f"milliseconds of a rank and micro-batch: {what} (default: 10)"
        parser.add_argument(f"--{name}-ms", type=float, default=10.0, metavar="MS", help=text)
    parser.add_argument("--transfer-ms", type=float, default=0.0, metavar="MS", help="milliseconds of a transfer")
    chosen = parser.parse_args(arguments)
    cost = StageCost(chosen.forward_ms / 1e3, chosen.input_ms / 1e3, chosen.weight_ms / 1e3)
    picture = draw_schedule(chosen.schedule, chosen.ranks, chosen.microbatches, cost, chosen.transfer_ms / 1e3)
    print(picture, end="")


if __name__ == "__main__":
    main()
