"""The live view in Chromium: what is appended appears, stragglers show, nothing is asked of anybody else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from syncline.bench.live import LiveServer
from tests.bench.live_logs import GrowingRun, end_race, growing_race, serving

pytestmark = pytest.mark.xdist_group("browser")  # they share a fixture that takes long

pytest.importorskip("plotly", reason="the live view draws with plotly: pip install 'syncline[view]'")
playwright = pytest.importorskip("playwright.sync_api", reason="the browser is driven by playwright")
PATIENCE = 30_000
"""Milliseconds: a busy machine is slow, and only a failure takes as long."""
MARKUP = "<img src=/x onerror=alert(1)>"
"""The name of an entry that must be shown as it is."""


@dataclass
class Tab:
    """A page, and all that it asked for and complained of."""

    page: Any
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def shows(self, selector: str, text: str) -> None:
        """Wait until it does."""
        playwright.expect(self.page.locator(selector)).to_contain_text(text, timeout=PATIENCE)

    def look(self) -> None:
        """As if somebody came back to the tab: it asks at once."""
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    def has(self, selector: str, count: int) -> None:
        playwright.expect(self.page.locator(selector)).to_have_count(count, timeout=PATIENCE)

    def fits(self, width: int) -> None:
        """Wait until nothing is wider than the window: pictures follow it a moment later."""
        until = time.monotonic() + PATIENCE / 1000
        while (found := self.page.evaluate("document.documentElement.scrollWidth")) > width:
            assert time.monotonic() < until, f"{found} px wide in a window of {width}"
            self.page.wait_for_timeout(20)

    def click(self, selector: str) -> None:
        self.page.locator(selector).click(timeout=PATIENCE)


@contextmanager
def opened(browser: Any) -> Iterator[Tab]:
    """A page. Whatever a test does with it: no errors, and nothing from elsewhere."""
    context = browser.new_context(color_scheme="light", viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    made = Tab(context.new_page())
    made.page.on("request", lambda request: made.asked.append(request.url))
    made.page.on("pageerror", lambda error: made.complaints.append(str(error)))
    made.page.on("dialog", lambda dialog: made.complaints.append(f"dialog: {dialog.message}"))
    made.page.on("console", lambda message: made.complaints.append(message.text))
    yield made
    context.close()
    assert made.complaints == []
    hosts = {urlsplit(url).hostname for url in made.asked if not url.startswith("data:")}
    assert hosts == {"127.0.0.1"}


@pytest.fixture(scope="module")
def race(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Tab]]:
    """A page with a finished race of six runs, and six on one worker; its tests share it: to draw it takes seconds."""
    folder = tmp_path_factory.mktemp("live") / "race"
    runs = growing_race(folder)
    for number, run in enumerate(runs.values()):
        for step in range(10, 100, 10):
            run.evaluation(step, 1 / (step + number))
            run.speeds(step)
            run.ranks(step, [0.1, 0.1])
        run.stop(stopped_by="target", step=90)
    end_race(folder, runs)
    for file in (folder / "race.json", folder / "registry.jsonl"):
        file.write_text(file.read_text().replace('"quantize(4)"', f'"{MARKUP}"'))
    with serving(folder) as server, opened(browser) as tab:
        tab.page.goto(server.url)
        yield server, tab


@pytest.fixture
def run(tmp_path: Path) -> GrowingRun:
    made = GrowingRun(tmp_path / "run")
    made.start()
    return made


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    with opened(browser) as made:
        yield made


def test_a_finished_race_light_dark_and_narrow(race: tuple[LiveServer, Tab]) -> None:
    server, tab = race
    tab.shows("#status", "finished")
    tab.shows("#title", "Race: logistic")
    tab.shows("#progress", "12 of 12 runs")
    tab.has("#table .cell", 6)
    tab.has("#curves .scatterlayer .trace", 7)  # and one for the target
    tab.has("#heat .heatmaplayer image", 1)
    tab.has("#speeds .scatterlayer .trace", 4)
    assert server.token not in tab.page.url
    inks = {"light": "rgb(26, 32, 39)", "dark": "rgb(231, 235, 240)"}
    for scheme, paper in {"light": "rgb(246, 247, 249)", "dark": "rgb(18, 22, 27)"}.items():
        tab.page.emulate_media(color_scheme=scheme)
        for width in (1280, 375):
            tab.page.set_viewport_size({"width": width, "height": 900})
            playwright.expect(tab.page.locator("body")).to_have_css("background-color", paper)
            tab.fits(width)
        ink = playwright.expect(tab.page.locator("#curves .xtick text").first)
        ink.to_have_css("fill", inks[scheme], timeout=PATIENCE)
    # The cookie opens the page again without the token.
    tab.page.reload()
    tab.shows("#status", "finished")
    tab.has("#curves .scatterlayer .trace", 7)


def test_a_run_is_chosen_and_the_axis_switched(race: tuple[LiveServer, Tab]) -> None:
    _, tab = race
    tab.has("#table .cell", 6)
    tab.click("#table tbody tr:nth-child(2) td:nth-child(3) .cell")
    tab.shows("#detail-title", "allreduce(delay=1), seed 2")
    tab.has("#table .cell[aria-pressed=true]", 1)
    tab.shows("#curves .xtitle", "seconds")
    tab.click("#axis button[data-key=bytes]")
    tab.shows("#curves .xtitle", "bytes handed over")
    tab.click("#axis button[data-key=epochs]")
    tab.shows("#curves .xtitle", "epochs")
    tab.click("#groups button[data-key='1 worker']")
    tab.has("#table .cell[aria-pressed=true]", 0)
    tab.has("#curves .scatterlayer .trace", 7)
    tab.click("#table tbody tr:nth-child(1) td:nth-child(2) .cell")
    tab.shows("#detail-about", "1 worker ")


def check_straggler(tab: Tab) -> None:
    """The heat map shows the second of four ranks to be slow."""
    tab.shows("#straggler", "Rank 1 computes 4 × as long as the median rank")
    tab.has("#heat .heatmaplayer image", 1)
    tab.shows("#heat .cbtitle", "compute")
    # The pixels themselves: of four rows the second is the darkest.
    lightness = tab.page.evaluate(
        """async () => {
            const image = new Image();
            image.src = document.querySelector("#heat .heatmaplayer image").getAttribute("href");
            await image.decode();
            const canvas = document.createElement("canvas");
            canvas.width = image.width; canvas.height = image.height;
            const pen = canvas.getContext("2d", { willReadFrequently: true });
            pen.drawImage(image, 0, 0);
            return [1, 3, 5, 7].map((eighth) => {
                const [r, g, b] = pen.getImageData(image.width / 2, (image.height * eighth) / 8, 1, 1).data;
                return r + g + b;
            });
        }"""
    )
    assert lightness[1] < min(lightness[0], lightness[2], lightness[3])
    tab.click("#kind button[data-key=exposed]")
    tab.shows("#heat .cbtitle", "exposed")


def test_what_is_appended_appears_and_so_does_a_straggler(run: GrowingRun, tab: Tab) -> None:
    with serving(run.folder) as server:
        tab.page.goto(server.url)
        tab.shows("#status", "running")
        tab.shows("#no-curves", "No evaluation yet")
        run.evaluation(100, 0.5)
        tab.has("#curves .points path", 2)  # and the target's
        tab.shows("#progress", "100 of at most 1,000 steps")
        run.evaluation(200, 0.95)
        run.speeds(200)
        tab.look()
        tab.has("#curves .points path", 3)
        tab.shows("#detail-about", "target reached in 20.0 s")
        tab.has("#exposed .points path", 1)
        plot = tab.page.locator("#curves .main-svg").first.element_handle()
        run.evaluation(300, 0.96)
        tab.look()
        tab.has("#curves .points path", 4)
        assert plot.evaluate("element => element.isConnected")  # changed in place: nothing flickers
        for step in range(10, 200, 10):
            run.ranks(step, [0.1, 0.4, 0.1, 0.1])
        tab.look()
        check_straggler(tab)
        run.stop(stopped_by="target", step=300)
        tab.look()
        tab.shows("#status", "finished")


def test_a_hidden_tab_asks_nothing_and_a_lost_server_is_told(run: GrowingRun, tab: Tab) -> None:
    hide = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    tab.page.clock.install()
    with serving(run.folder) as server:
        tab.page.goto(server.url)
        tab.shows("#status", "running")
        tab.page.evaluate(hide, True)
        tab.has("body[data-asking=no]", 1)  # what was under way has its answer
        before = len(tab.asked)
        tab.page.clock.run_for(600_000)
        assert len(tab.asked) == before
        run.evaluation(100, 0.5)
        tab.page.evaluate(hide, False)
        tab.shows("#progress", "100 of at most")
    tab.page.clock.run_for(10_000)
    tab.shows("#gone", "The server does not answer")
    tab.shows("#status", "no answer")
    tab.page.goto("about:blank")  # it asks no more
    assert all("ERR_CONNECTION_REFUSED" in complaint for complaint in tab.complaints)
    tab.complaints.clear()


def test_names_are_text_and_never_markup(race: tuple[LiveServer, Tab]) -> None:
    _, tab = race
    tab.shows("#table tbody tr:nth-child(3) th", MARKUP)
    tab.click("#table tbody tr:nth-child(3) td:nth-child(2) .cell")
    tab.shows("#detail-title", MARKUP)
    tab.has("img", 0)
    assert not any(url.endswith("/x") for url in tab.asked)
