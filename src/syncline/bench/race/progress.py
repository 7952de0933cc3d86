"""Shows the progress of a race on standard error.

On a terminal it is a table that is updated in place. Otherwise each run prints a line at its end, and a long run one
every half minute.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from syncline.bench.race.plan import PlannedRun
from syncline.bench.race.runner import RunResult
from syncline.bench.runlog import RaceRecord, RunRecord, read_run
from syncline.training.progress import duration

__all__ = ["RaceProgress"]

READ_EVERY_S = 1.0
"""Interval between two readings of the current run's log."""
LINE_EVERY_S = 30.0
"""Interval between two lines of progress if standard error is not a terminal."""


class RaceProgress:
    """A `RaceObserver` that prints. As a context manager it restores the terminal at the end."""

    def __init__(
        self, race: RaceRecord, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._plan = race.plan
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._done: dict[tuple[str, int, int], RunRecord] = {}
        self._spent: list[float] = []
        for run in race.runs:
            if run.kind != "tuning" and run.ended:
                self._done[run.entry, run.workers, run.seed] = run
                self._spent.append(run.seconds or 0.0)
        self._current: tuple[PlannedRun, Path, int, int] | None = None
        self._last_read_s = self._started_s = clock()
        self._log: RunRecord | None = None
        self._live: Live | None = None

    def __enter__(self) -> RaceProgress:
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def started(self, run: PlannedRun, folder: Path, number: int, total: int) -> None:
        self._current, self._log = (run, folder, number, total), None
        self._started_s = self._last_read_s = self._clock()
        self._draw()

    def tick(self) -> None:
        if self._clock() - self._last_read_s < (READ_EVERY_S if self._live is not None else LINE_EVERY_S):
            return
        self._last_read_s = self._clock()
        if self._current is not None:
            self._log = read_run(self._current[1])
        if self._live is not None:
            self._draw()
        else:
            self._print(self._status())

    def ended(self, run: PlannedRun, result: RunResult, seconds: float) -> None:
        assert self._current is not None, "a run starts before it ends"
        _, folder, number, total = self._current
        record = read_run(folder, status=result.status, reason=result.reason, seconds=seconds)
        self._current = self._log = None
        if result.status != "interrupted":
            self._spent.append(seconds)
            if run.kind != "tuning":
                self._done[run.entry.name, run.workers, run.seed] = record
        if self._live is None:
            what = f"{run.kind} {number + 1}/{total}: {run.entry.name}, seed {run.seed}"
            workers = "" if run.workers == self._plan.workers else f" on {run.workers} workers"
            took = f"{duration(seconds)} with start-up; {self._remaining(total, number + 1)}"
            self._print(f"{what}{workers}: {self._outcome(record)}, {took}")
        else:
            self._draw()

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(self._render(), refresh=True)

    def _render(self) -> Group:
        plan = self._plan
        sense = "at least" if plan.higher_is_better else "at most"
        title = f"{plan.workload} on {plan.workers} workers: {plan.metric} of {sense} {plan.target:g}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("entry", no_wrap=True, overflow="ellipsis", max_width=48)
        for seed in plan.seeds:
            table.add_column(f"seed {seed}", justify="right")
        table.add_column("median", justify="right")
        best = min((self._median(entry.name) for entry in plan.entries), default=math.inf)
        for entry in plan.entries:
            median = self._median(entry.name)
            cells = [self._cell(entry.name, seed) for seed in plan.seeds]
            first = median == best and math.isfinite(best)
            shown = Text("" if math.isinf(median) else duration(median), style="bold green" if first else "")
            table.add_row(Text(entry.name, style="bold" if first else ""), *cells, shown)
        return Group(table, Text(self._status(), style="dim"))

    def _cell(self, entry: str, seed: int) -> Text:
        run = self._done.get((entry, self._plan.workers, seed))
        if run is None:
            current = None if self._current is None else self._current[0]
            running = current is not None and (current.kind, current.entry.name, current.seed) == ("race", entry, seed)
            return Text("▶" if running else "·", style="yellow" if running else "dim")
        if run.status != "finished":
            return Text(run.status, style="red")
        seconds = run.time_to_target(self._plan.target, self._plan.higher_is_better)
        if math.isfinite(seconds):
            return Text(duration(seconds))
        best = run.best(self._plan.higher_is_better)
        return Text("no" if best is None else f"no ({best:.4g})", style="red")

    def _median(self, entry: str) -> float:
        runs = [self._done.get((entry, self._plan.workers, seed)) for seed in self._plan.seeds]
        if not all(runs):
            return math.inf
        return statistics.median(
            run.time_to_target(self._plan.target, self._plan.higher_is_better) for run in runs if run is not None
        )

    def _status(self) -> str:
        if self._current is None:
            return ""
        run, _, number, total = self._current
        now = f"{run.kind} {number + 1}/{total}: {run.entry.name}, seed {run.seed}"
        if run.workers != self._plan.workers:
            now += f", {run.workers} workers"
        if self._log is not None and self._log.evaluations:
            latest = self._log.evaluations[-1]
            now += f", {self._plan.metric} {latest.metric:.4g} after {latest.epochs:.1f} epochs"
        return f"{now}, {duration(self._clock() - self._started_s)}; {self._remaining(total, number)}"

    def _outcome(self, run: RunRecord) -> str:
        if run.status != "finished":
            return f"{run.status} ({(run.reason or 'no reason known').splitlines()[0]})"
        seconds = run.time_to_target(self._plan.target, self._plan.higher_is_better)
        if math.isfinite(seconds):
            return f"target reached after {duration(seconds)}"
        best = run.best(self._plan.higher_is_better)
        return "target not reached" + ("" if best is None else f", best {self._plan.metric} {best:.4g}")

    def _remaining(self, total: int, done: int) -> str:
        if not self._spent:
            return "time left not known yet"
        left = statistics.mean(self._spent) * (total - done)
        return f"about {duration(left)} left" if left else "none left"
