"""The page: one file, no request to anywhere, and every word of it escaped unless it was drawn here."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from syncline.bench.race.plan import Place
from syncline.bench.race.reading import Race
from syncline.bench.report.analysis import Analysis, EntryFacts
from syncline.bench.report.canvas import Picture
from syncline.bench.report.spread import Spread
from syncline.bench.report.staleness import staleness_rows
from syncline.bench.report.style import PHASES, variables
from syncline.bench.report.tables import finding_facts, registry_head
from syncline.bench.report.verdict import Verdict
from syncline.bench.report.words import bytes_told, edges, number, time_unit

__all__ = ["inline", "page"]

PLACES = {
    "local": "processes on one machine",
    "lab": "emulated hosts (network namespaces, shaped links)",
    "simulated": "a simulation under a virtual clock",
}


def page(
    race: Race,
    found: Analysis,
    verdict: Verdict,
    findings: Sequence[Any] | None,
    pictures: Sequence[Picture],
    missing: str = "",
) -> str:
    """The whole of `report.html`; `missing` says why there are no pictures."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "bytes": bytes_told, "percent": _percent, "spec": _spec}
    parts = files("syncline.bench.report").joinpath("templates")
    factor, unit = time_unit([entry.time.median for entry in found.entries if entry.time is not None])
    staleness = {entry.name: entry.staleness_counts for entry in _ordered(found)}
    step, step_unit = time_unit([sum(entry.phases.values()) for entry in found.entries])
    return environment.from_string(parts.joinpath("report.html.j2").read_text("utf-8")).render(
        css=Markup(_colours() + parts.joinpath("report.css").read_text("utf-8")),  # noqa: S704
        script=Markup(parts.joinpath("report.js").read_text("utf-8")),  # noqa: S704
        pictures={one.name: Markup(inline(one)) for one in pictures},  # noqa: S704
        drawn=pictures,
        missing=missing,
        race=race,
        plan=race.plan,
        place=_place(race.plan.place),
        system={key: told for key, told in race.system.items() if isinstance(told, dict)},
        found=found,
        entries=_ordered(found),
        phases=[name for name in PHASES if any(entry.shares.get(name, 0.0) > 0.0005 for entry in found.entries)],
        staleness=staleness_rows(staleness),
        verdict=verdict,
        looked=findings is not None,
        broken=_by_rule(findings or (), warnings=False),
        warnings=_by_rule(findings or (), warnings=True),
        head=registry_head(race),
        created=_when(race.plan.created_ms),
        time=lambda spread: _interval(spread, factor),
        unit=unit,
        step=lambda seconds: number(None if seconds is None else step * seconds, 3),
        step_unit=step_unit,
        ratio=lambda spread: _interval(spread, 1.0),
        bare=_range,
        kinds="; ".join(
            dict.fromkeys(entry.time.told() for entry in found.entries if entry.time and entry.time.finite)
        ),
    )


def _by_rule(findings: Sequence[Any], warnings: bool) -> dict[tuple[str, str], list[dict[str, str]]]:
    """What the lint has found, by rule; either what breaks one, or what it only warns of."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for one in map(finding_facts, findings):
        if (one["severity"] == "warning") == warnings:
            found.setdefault((one["rule"], one["title"]), []).append(one)
    return found


def _ordered(found: Analysis) -> list[EntryFacts]:
    """The soonest first; who never came, by the best metric."""
    sign = -1.0 if found.higher_is_better else 1.0

    def key(entry: EntryFacts) -> tuple[float, float]:
        time = entry.time.median if entry.time is not None else float("inf")
        return time, sign * entry.best.median if entry.best is not None else float("inf")

    return sorted(found.entries, key=key)


def _interval(spread: Spread | None, factor: float) -> dict[str, str]:
    """The median, the interval beside it, what kind that is, and what to sort by."""
    if spread is None:
        return {"median": "–", "edges": "", "about": "no run has ended", "sort": "inf"}
    told = spread.scaled(factor)
    return {"median": number(told.median, 3), "edges": edges(told), "about": told.told(), "sort": repr(spread.median)}


def _range(spread: Spread | None, digits: int = 4) -> dict[str, str]:
    if spread is None:
        return {"median": "–", "edges": "", "about": "", "sort": "nan"}
    edges = f"{number(spread.least, digits)}–{number(spread.most, digits)}" if spread.most > spread.least else ""
    return {"median": number(spread.median, digits), "edges": edges, "about": "range", "sort": repr(spread.median)}


def _spec(text: str) -> Markup:
    """A name that may be broken where its parts meet."""
    parts = re.split(r"(?<=[|,])|(?<=\w{5})(?=\()", text)
    return Markup("<wbr>").join(escape(part) for part in parts)


def _when(milliseconds: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(milliseconds / 1000))
    except (OSError, OverflowError, ValueError):
        return "at a time that is none"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _place(place: Place) -> str:
    told = PLACES.get(place.kind, place.kind)
    return f"{told}, {place.detail}" if place.detail else told


def inline(picture: Picture) -> str:
    """A picture as part of a page: its letters are letters, its colours the page's own, its size that of its place."""
    text = picture.svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    box = re.search(r'viewBox="([^"]*)"', text)
    assert box is not None, "matplotlib writes a viewBox"
    head = f'<svg viewBox="{box.group(1)}" role="img" aria-labelledby="about-{picture.name}">'
    text = head + text[text.index(">") + 1 :]
    # A hundredth of a point is less than anybody sees. Letters are left alone: they may be numbers that matter.
    text = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r"font: ([\d.]+)px[^;\"]*", r"font-size: \1px", text)
    text = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", text).replace(" font-family: 'DejaVu Sans';", "")
    text = text.replace(" \nL", "L").replace(' \n"', '"')
    for colour, (name, _, _) in variables().items():
        text = text.replace(colour, f"var({name})")
    return re.sub(r"\n\s*", "\n", text)


def _colours() -> str:
    """The variables of the pictures, for light and for dark."""
    told = {name: (light, dark) for name, light, dark in variables().values()}
    light = "".join(f"{name}:{value};" for name, (value, _) in told.items())
    dark = "".join(f"{name}:{value};" for name, (_, value) in told.items())
    return (
        f":root{{{light}}}\n"
        f'@media screen and (prefers-color-scheme:dark){{:root:not([data-theme="light"]){{{dark}}}}}\n'
        f'@media screen{{:root[data-theme="dark"]{{{dark}}}}}\n'
    )
