"""The report in Chromium: light, dark, on a phone and on paper."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from syncline.bench.lint import Finding
from syncline.bench.race.plan import RaceEntry
from syncline.bench.report import write_report
from syncline.bench.report.plan_page import write_plan_page
from syncline.planner.answer import PlanRequest, answer_request
from tests.bench.report_races import Hand, seeds, write_race

pytestmark = pytest.mark.xdist_group("browser")  # they share a fixture that takes long

NAMES = ("ddp", "allreduce", "topk(0.01)|quantize(4)", "quantize(8)", *(f"local({number})" for number in range(8)))

TEXTS = """() => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = numbers(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || (found.length === 4 && found[3] > 0)) return found;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const seen = node.getClientRects().length && !["SCRIPT", "STYLE"].includes(node.tagName);
    if (!seen || !walker.currentNode.textContent.trim()) continue;
    const style = getComputedStyle(node);
    const colour = node.closest("svg") ? style.fill : style.color;
    found.push([walker.currentNode.textContent.trim(), numbers(colour), behind(node)]);
  }
  return found;
}"""


LETTERS = """() => [...document.querySelectorAll("figure svg")].flatMap((svg) => {
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const size = (text) => parseFloat(getComputedStyle(text).fontSize) * scale;
  return [...svg.querySelectorAll("text")].map(size);
})"""
"""The sizes of the letters in pictures."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve entries with three seeds each; one fails, one never arrives, a rule is broken."""
    runs = []
    for place, name in enumerate(NAMES):
        metrics = [0.92 * (1 - math.exp(-(turn + 1) / 4)) for turn in range(30)]
        predicted = {"communication": 0.01 * (place + 1), "codec": 0.001, "buckets": 1}
        runs += seeds(
            name,
            [(1 + place / 3) * (1 + seed / 50) for seed in range(3)],
            metrics=metrics[:5] if place == 3 else metrics,
            predicted=predicted,
            bytes_each=1e6 / (place + 1),
        )
        runs += [Hand(name, seed, metrics, every=4.0, workers=1, kind="scaling") for seed in (1, 2, 3)]
    runs[-4] = Hand(NAMES[-1], 3, (0.1,), status="failed", reason="PeerLostError: rank 2 of 4 is gone, since step 12")
    entries = [RaceEntry(name=NAMES[0], strategy="ddp", baseline=True), *(RaceEntry(name=name) for name in NAMES[1:])]
    folder = tmp_path_factory.mktemp("report") / "race"
    write_race(folder, runs, entries, scaling="weak", scaling_workers=(1,), skipped={"hivemind": "not installed"})
    finding = Finding("6", "Time is left out", f"{'runs/a-very-long-name/' * 8}: 71 %", "no")
    return write_report(folder, [finding, replace(finding, rule="7", severity="warning")])


@contextmanager
def open_page(browser: Any, file: Path, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """The page in a window of this width and scheme; it must complain of nothing and ask for nothing."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: complaints.append(asked.url) if not asked.url.startswith("file:") else None)
    page.goto(file.as_uri())
    yield page
    context.close()
    assert complaints == []


@pytest.fixture
def opened(report: Path, browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The report, in a window of the width and scheme of the parameter."""
    with open_page(browser, report, *getattr(request, "param", ())) as page:
        yield page


@pytest.mark.parametrize("opened", [(1280, "light"), (1280, "dark"), (375, "light"), (375, "dark")], indirect=True)
def test_every_word_stands_out_and_nothing_hangs_over(opened: Any) -> None:
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    found = opened.evaluate(TEXTS)
    assert len(found) > 300
    assert faint_texts(found) == []


def faint_texts(found: list[Any]) -> list[Any]:
    """The texts of `TEXTS` that have too little contrast."""
    return [each for each in found if _contrast(each[1], each[2]) < 4.5]


def test_the_page_of_a_plan_on_a_phone(tmp_path: Path, browser: Any) -> None:
    cluster = "2 hosts x 4 a100, 25gbit"
    answer = answer_request(PlanRequest(cluster=cluster, model="gpt(8, 1024)", codecs=("topk(0.01)",)))
    write_plan_page(tmp_path / "plan.html", answer, top=10)
    with open_page(browser, tmp_path / "plan.html", 375, "dark") as page:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        found = page.evaluate(TEXTS)
        assert len(found) > 200
        assert faint_texts(found) == []
        assert min(page.evaluate(LETTERS)) >= 8.5


@pytest.mark.parametrize("opened", [(375, "light")], indirect=True)
def test_on_a_phone_letters_of_pictures_are_large_enough_and_tables_keep_their_names(opened: Any) -> None:
    sizes = opened.evaluate(LETTERS)
    assert len(sizes) > 50
    assert min(sizes) >= 8.5
    table = opened.locator("#entries .scroll")
    assert table.evaluate("box => box.scrollWidth > box.clientWidth")
    table.evaluate("box => { box.scrollLeft = 500; }")
    first = opened.locator("#entries tbody th").first.bounding_box()
    assert first["x"] == pytest.approx(table.bounding_box()["x"], abs=2)


def test_a_click_or_a_key_sorts(opened: Any) -> None:
    names = (
        "() => [...document.querySelectorAll('#entries tbody th')].map((cell) => cell.firstChild.textContent.trim())"
    )
    assert opened.evaluate(names)[0] == "ddp"
    head = opened.get_by_role("button", name="time to target").first
    head.click()
    assert opened.evaluate(names)[0] == "ddp"
    head.press("Enter")
    assert opened.evaluate(names)[0] == "quantize"  # it never came: infinite, and last before
    assert opened.locator("#entries th[aria-sort='descending']").count() == 1
    opened.get_by_role("button", name="entry").first.click()
    assert opened.evaluate(names)[0] == "allreduce"


def test_the_other_theme_is_a_click_away(opened: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    assert opened.evaluate(paper) == "rgb(255, 255, 255)"
    opened.get_by_role("button", name="switch to dark colours").click()
    assert opened.evaluate(paper) == "rgb(20, 24, 28)"
    assert opened.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ink')") == "#e8ebee"
    opened.get_by_role("button", name="switch to light colours").click()
    assert opened.evaluate(paper) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("opened", [(680, "dark")], indirect=True)
def test_paper_is_light_and_clips_no_table(opened: Any) -> None:
    opened.emulate_media(media="print", color_scheme="dark")
    assert opened.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ink')") == "#1c2126"
    wide = opened.evaluate(
        """() => [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth + 1)
             .map((box) => box.getAttribute("aria-label"))"""
    )
    assert wide == []


def test_a_picture_has_words_for_who_cannot_see_it(opened: Any) -> None:
    about = opened.evaluate(
        """() => [...document.querySelectorAll("figure svg")].map(
             (svg) => document.getElementById(svg.getAttribute("aria-labelledby"))?.textContent ?? "")"""
    )
    assert len(about) == 7
    assert all(about)
    levels = opened.evaluate("() => [...document.querySelectorAll('h1,h2,h3')].map((head) => Number(head.tagName[1]))")
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))


def test_the_page_is_small_and_without_scripts_still_whole(report: Path, browser: Any) -> None:
    assert report.stat().st_size < 400_000
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("#entries tbody tr").count() == len(NAMES)
    assert page.locator("#theme").is_hidden()
    assert page.get_by_text("PeerLostError: rank 2 of 4 is gone").is_visible()
    context.close()


def _contrast(colour: list[float], paper: list[float]) -> float:
    lights = sorted(map(_light, (colour, paper)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _light(colour: list[float]) -> float:
    parts = [part / 255 for part in colour[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
