"""The page `report.html`: one file without external resources. All text in it is escaped."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from syncline.bench.lint.base import Finding
from syncline.bench.race.plan import RacePlace
from syncline.bench.report.analysis import Analysis, EntryFacts, Spread
from syncline.bench.report.facts import staleness_rows
from syncline.bench.report.phrases import bytes_phrase, interval_phrase, number_phrase, time_unit
from syncline.bench.report.plots import PHASE_COLOURS, PHASE_LABELS, ReportPlot, colour_variables
from syncline.bench.report.verdict import RaceVerdict
from syncline.bench.runlog import RaceRecord

__all__ = ["inline_svg", "page", "render_page"]

PLACES = {
    "local": "processes on one machine",
    "lab": "emulated hosts (network namespaces, shaped links)",
    "simulated": "a simulation under a virtual clock",
}


def page(
    race: RaceRecord,
    analysis: Analysis,
    verdict: RaceVerdict,
    findings: Sequence[Finding] | None,
    plots: Sequence[ReportPlot],
    missing: str = "",
) -> str:
    """The content of `report.html`; `missing` says why there are no plots."""
    factor, unit = time_unit([entry.time.median for entry in analysis.entries if entry.time is not None])
    staleness = {entry.name: entry.staleness_counts for entry in _ordered(analysis)}
    step, step_unit = time_unit([sum(entry.phases.values()) for entry in analysis.entries])
    return render_page(
        "report.html.j2",
        plots,
        missing,
        race=race,
        plan=race.plan,
        place=_place(race.plan.place),
        system={key: section for key, section in race.system.items() if isinstance(section, dict)},
        analysis=analysis,
        entries=_ordered(analysis),
        phases=[
            name for name in PHASE_COLOURS if any(entry.shares.get(name, 0.0) > 0.0005 for entry in analysis.entries)
        ],
        staleness=staleness_rows(staleness),
        verdict=verdict,
        looked=findings is not None,
        broken=_by_rule(findings or (), "violation"),
        warnings=_by_rule(findings or (), "warning"),
        head=race.registry_head,
        created=_when(race.plan.created_ms),
        time=lambda spread: _interval(spread, factor),
        unit=unit,
        labels=PHASE_LABELS,
        step=lambda seconds: number_phrase(None if seconds is None else step * seconds, 3),
        step_unit=step_unit,
        ratio=lambda spread: _interval(spread, 1.0),
        bare=_range,
        kinds="; ".join(
            dict.fromkeys(entry.time.describe() for entry in analysis.entries if entry.time and entry.time.finite)
        ),
    )


def render_page(template: str, plots: Sequence[ReportPlot], missing: str, **values: Any) -> str:
    """A page from a template, with the plots, style and script of all pages. `missing` says why there are no plots."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number_phrase, "bytes": bytes_phrase, "percent": _percent, "spec": _spec}
    parts = files("syncline.bench.report").joinpath("templates")
    environment.loader = FunctionLoader(lambda name: parts.joinpath(name).read_text("utf-8"))
    return environment.get_template(template).render(
        css=Markup(_colours() + parts.joinpath("report.css").read_text("utf-8")),  # noqa: S704
        script=Markup(parts.joinpath("report.js").read_text("utf-8")),  # noqa: S704
        pictures={plot.name: Markup(inline_svg(plot)) for plot in plots},  # noqa: S704
        drawn=plots,
        missing=missing,
        **values,
    )


def _by_rule(findings: Sequence[Finding], severity: str) -> dict[tuple[str, str], list[Finding]]:
    """The findings of one severity, by rule."""
    by_rule: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.severity == severity:
            by_rule.setdefault((finding.rule, finding.title), []).append(finding)
    return by_rule


def _ordered(analysis: Analysis) -> list[EntryFacts]:
    """By time to the target; entries that missed it by their best metric."""
    sign = -1.0 if analysis.higher_is_better else 1.0

    def key(entry: EntryFacts) -> tuple[float, float]:
        time = entry.time.median if entry.time is not None else float("inf")
        return time, sign * entry.best.median if entry.best is not None else float("inf")

    return sorted(analysis.entries, key=key)


def _interval(spread: Spread | None, factor: float) -> dict[str, str]:
    """The cells of a time: median, interval, description, and the key to sort by."""
    if spread is None:
        return {"median": "–", "edges": "", "about": "no run has ended", "sort": "inf"}
    scaled = spread.scaled(factor)
    median, interval = number_phrase(scaled.median, 3), interval_phrase(scaled)
    return {"median": median, "edges": interval, "about": scaled.describe(), "sort": repr(spread.median)}


def _range(spread: Spread | None, digits: int = 4) -> dict[str, str]:
    if spread is None:
        return {"median": "–", "edges": "", "about": "", "sort": "nan"}
    least, median, most = (number_phrase(value, digits) for value in (spread.least, spread.median, spread.most))
    edges = f"{least}–{most}" if spread.most > spread.least else ""
    return {"median": median, "edges": edges, "about": "range", "sort": repr(spread.median)}


def _spec(text: str) -> Markup:
    """A spec that may be wrapped between its parts."""
    parts = re.split(r"(?<=[|,])|(?<=\w{5})(?=\()", text)
    return Markup("<wbr>").join(escape(part) for part in parts)


def _when(milliseconds: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(milliseconds / 1000))
    except (OSError, OverflowError, ValueError):
        return "at an unknown time"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _place(place: RacePlace) -> str:
    text = PLACES.get(place.kind, place.kind)
    return f"{text}, {place.detail}" if place.detail else text


def inline_svg(plot: ReportPlot) -> str:
    """The SVG of a plot inside the page, with the page's fonts, colours and size."""
    text = plot.svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    box = re.search(r'viewBox="([^"]*)"', text)
    assert box is not None, "matplotlib writes a viewBox"
    head = f'<svg viewBox="{box.group(1)}" role="img" aria-labelledby="about-{plot.name}">'
    text = head + text[text.index(">") + 1 :]
    # Two decimals of a point are enough. Text is not changed.
    text = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r"font: ([\d.]+)px[^;\"]*", r"font-size: \1px", text)
    text = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", text).replace(" font-family: 'DejaVu Sans';", "")
    text = text.replace(" \nL", "L").replace(' \n"', '"')
    for name, (light, _) in colour_variables().items():
        text = text.replace(light, f"var({name})")
    return re.sub(r"\n\s*", "\n", text)


def _colours() -> str:
    """The CSS variables of the plots, for light and for dark."""
    variables = colour_variables()
    light = "".join(f"{name}:{value};" for name, (value, _) in variables.items())
    dark = "".join(f"{name}:{value};" for name, (_, value) in variables.items())
    return (
        f":root{{{light}}}\n"
        f'@media screen and (prefers-color-scheme:dark){{:root:not([data-theme="light"]){{{dark}}}}}\n'
        f'@media screen{{:root[data-theme="dark"]{{{dark}}}}}\n'
    )
