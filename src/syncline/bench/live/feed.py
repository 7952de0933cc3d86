"""What the live page can ask about a race or a training run, as small JSON documents."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from syncline.bench.live.run import HEAT_KINDS, RunFeed, rounded
from syncline.bench.race.plan import RacePlan
from syncline.bench.runlog import CONFIG, LOG, PLAN, REGISTRY, LogTail, RunKey, RunRecord, apply_registry_line
from syncline.errors import ProtocolError, SpecError

__all__ = ["Feed", "RaceFeed", "TrainingFeed", "newest_run", "open_feed"]

MAX_READING_S = 0.25
"""A request reads for at most this time. The page asks again at once for the rest."""
MAX_POINTS = 20_000
"""Points in one answer, all curves together."""
QUIET_AFTER_S = 30.0
"""The page says so if no line was written for this time."""
MAX_REASON_CHARS = 500
MAX_PROBLEMS = 20
HOW_TO_START = "syncline train digits -n 2 or syncline race digits -n 4 makes one"


class Feed(ABC):
    """A folder that the page follows: `RaceFeed` or `TrainingFeed`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[int, RunFeed] = {}
        """By a number that is never reused. The page names runs by it, never by a path."""
        self.reading = False

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The settings, the progress, and a row for each run with its version."""

    def curves(self, numbers: Iterable[int]) -> dict[str, Any]:
        """The evaluations of these runs; unknown numbers are left out."""
        known = [number for number in dict.fromkeys(numbers) if number in self.runs]
        most = max(50, MAX_POINTS // max(1, len(known)))
        runs = {str(one): {"version": self.runs[one].version, **self.runs[one].curve.columns(most)} for one in known}
        return {"runs": runs}

    def detail(self, number: int, kind: str) -> dict[str, Any] | None:
        """The speeds of a run and its heat map; None if there is no such run or kind."""
        run = self.runs.get(number)
        if run is None or kind not in HEAT_KINDS:
            return None
        return {
            "id": number,
            "version": run.version,
            "speeds": run.speeds.columns(),
            "heat": run.heat.document(kind),
            "straggler": run.heat.straggler(),
            "limits": run.limits(),
            "experts": run.experts,
        }

    def _read(self, runs: Sequence[RunFeed]) -> None:
        """Read what is new in these runs, as long as the page may wait."""
        until = time.monotonic() + MAX_READING_S
        for run in runs:
            run.refresh()
            while run.behind and time.monotonic() < until:
                run.refresh()
            if time.monotonic() > until:
                break
        self.reading = any(run.behind for run in runs)

    def _row(self, number: int, status: str, **facts: Any) -> dict[str, Any]:
        """A run in the table of the page."""
        run = self.runs[number]
        last = run.curve.last
        return {
            "id": number,
            "version": run.version,
            "unread": run.behind,
            "status": status,
            "step": run.step,
            "steps": run.total_steps,
            "epochs": last[2] if last else None,
            "last": last[4] if last else None,
            "best": run.best,
            "hit": run.hit and run.hit["elapsed"],
            "test": run.test,
            **facts,
        }


def _seconds_since(ms: int | None) -> float | None:
    """Seconds of the wall clock since a `time_ms` of a log."""
    return None if ms is None else max(0.0, time.time() - ms / 1000)


def _quiet_seconds(latest_ms: int | None) -> float | None:
    """Seconds since the last line was written, if that is long ago."""
    seconds = _seconds_since(latest_ms)
    return rounded(seconds, 3) if seconds is not None and seconds > QUIET_AFTER_S else None


class TrainingFeed(Feed):
    """The folder of a run of `syncline train`, or of one run of a race."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._run = RunFeed(folder)
        self.runs[0] = self._run

    def state(self) -> dict[str, Any]:
        run = self._run
        self._read([run])
        status, reason = self._status()
        settings, config = run.settings, run.config
        workers = settings.get("sl_workers", config.get("workers"))
        specs = [settings.get("sl_strategy", config.get("strategy")), settings.get("sl_codec", config.get("codec"))]
        row = self._row(
            0,
            status,
            kind="training",
            entry=" with ".join(str(spec) for spec in specs if spec),
            workers=workers,
            seed=settings.get("seed", config.get("seed")),
            reason=reason,
        )
        return {
            "kind": "training",
            "folder": str(self.folder),
            "workload": settings.get("sl_workload", config.get("workload")),
            "metric": run.metric,
            "higher": run.higher_is_better,
            "target": run.target,
            "workers": workers,
            "place": None,
            "status": status,
            "reason": reason,
            "done": run.step,
            "total": run.total_steps,
            "unit": "steps",
            "left": self._remaining_seconds() if status == "running" else None,
            "quiet": _quiet_seconds(run.latest_ms) if status == "running" else None,
            "reading": self.reading,
            "runs": [row],
            "skipped": {},
            "problems": run.problems,
        }

    def _remaining_seconds(self) -> float | None:
        """Estimated from the speed so far."""
        run, total = self._run, self._run.total_steps
        steps = run.step - run.first_step
        if total is None or run.started_ms is None or run.latest_ms is None or steps < 1:
            return None
        return rounded((run.latest_ms - run.started_ms) / 1000 / steps * max(0, total - run.step), 3)

    def _status(self) -> tuple[str, str | None]:
        """The status, and the reason if the run failed."""
        run = self._run
        if run.stop is None:
            return ("waiting" if run.started_ms is None else "running"), None
        if run.stop.get("status") == "success":
            return "finished", None
        if run.stop.get("stopped_by") == "signal":
            return "stopped", "stopped by the user"
        return "failed", str(run.stop.get("error") or "the log gives no reason")[:MAX_REASON_CHARS]


class RaceFeed(Feed):
    """The folder of a race. The plan is read once; the registry and the logs grow."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.plan = RacePlan.from_json((folder / PLAN).read_text(encoding="utf-8"), str(folder / PLAN))
        self._planned: list[RunKey] = [run.key for run in (*self.plan.tuning_runs(), *self.plan.runs())]
        self._registry = LogTail(folder / REGISTRY)
        self._next_number = 0
        self._reset()

    def _reset(self) -> None:
        self.runs.clear()
        self._records: dict[str, RunRecord] = {}
        self._numbers: dict[str, int] = {}
        self._latest_ms: int | None = None
        self._stopped = False
        self._bad_lines = 0

    def state(self) -> dict[str, Any]:
        self._refresh()
        plan = self.plan
        latest = {record.key: record for record in self._records.values()}  # the last attempt counts
        done = sum(key in latest and latest[key].ended for key in self._planned)
        status = self._status(done)
        return {
            "kind": "race",
            "folder": str(self.folder),
            "workload": plan.workload,
            "metric": plan.metric,
            "higher": plan.higher_is_better,
            "target": rounded(plan.target),
            "workers": plan.workers,
            "place": f"{plan.place.kind} {plan.place.detail}".strip(),
            "status": status,
            "reason": f"continue it with: syncline race --resume {self.folder}" if status == "stopped" else None,
            "done": done,
            "total": len(self._planned),
            "unit": "runs",
            "entries": [entry.name for entry in plan.entries],
            "left": self._remaining_seconds(latest) if status == "running" else None,
            "quiet": _quiet_seconds(self._latest_activity()) if status == "running" else None,
            "reading": self.reading,
            "runs": [self._run_row(key, latest.get(key)) for key in self._planned],
            "skipped": {str(name): str(why) for name, why in plan.skipped.items()},
            "problems": self._problems(),
        }

    def _refresh(self) -> None:
        lines = self._registry.read()
        if self._registry.restarted:
            self._reset()
        for line in lines:
            self._apply(line)
        # The current run first: the page of a long race is shown while older logs are still read.
        order = sorted(self._records, key=lambda name: (self._records[name].ended, not self._feed(name).behind))
        self._read([self._feed(name) for name in order])

    def _feed(self, name: str) -> RunFeed:
        return self.runs[self._numbers[name]]

    def _apply(self, line: Mapping[str, Any]) -> None:
        event, name = line.get("event"), str(line.get("run"))
        if isinstance(line.get("time_ms"), int):
            self._latest_ms = line["time_ms"]
        try:
            apply_registry_line(self._records, line)
        except ProtocolError:
            self._bad_lines += 1
            return
        if event == "begun":
            self._stopped = False
            self._numbers[name] = self._next_number
            self.runs[self._next_number] = RunFeed(self.folder / PurePosixPath(name))
            self._next_number += 1
        elif event == "ended" and name in self._records:
            self._stopped = self._records[name].status == "interrupted"

    def _run_row(self, key: RunKey, record: RunRecord | None) -> dict[str, Any]:
        facts = dict(zip(("kind", "entry", "workers", "seed", "factor"), key, strict=True))
        if record is None:
            return {"id": None, "status": "waiting", **facts}
        excluded = record.excluded is not None
        reason = f"excluded: {record.excluded}" if excluded else record.reason
        result = {"reason": reason and reason[:MAX_REASON_CHARS], "seconds": rounded(record.seconds)}
        return self._row(self._numbers[record.folder], record.status, **facts, **result, excluded=excluded)

    def _status(self, done: int) -> str:
        if done == len(self._planned):
            return "finished"
        if self._stopped:
            return "stopped"
        return "running" if self._records else "waiting"

    def _remaining_seconds(self, latest: Mapping[RunKey, RunRecord]) -> float | None:
        """Estimated from the mean duration of similar runs that have ended."""
        known = {key: run.seconds for key, run in latest.items() if run.ended and run.seconds is not None}
        if not known:
            return None
        remaining = 0.0
        for key in self._planned:
            run = latest.get(key)
            if run is None or not run.ended:
                similar = [seconds for other, seconds in known.items() if other[:3] == key[:3]]
                mean = statistics.fmean(similar or known.values())
                spent = _seconds_since(run.started_ms) if run is not None and run.status == "running" else None
                remaining += max(0.0, mean - (spent or 0.0))
        return rounded(remaining, 3)

    def _latest_activity(self) -> int | None:
        """The time stamp of the last line of any file."""
        stamps = [self._latest_ms, *(run.latest_ms for run in self.runs.values())]
        return max((ms for ms in stamps if ms is not None), default=None)

    def _problems(self) -> list[str]:
        problems = [f"{name}: {problem}" for name in self._records for problem in self._feed(name).problems]
        bad = self._registry.bad_lines + self._bad_lines
        if self._registry.gone:
            problems.insert(0, f"{REGISTRY} was removed; the page shows what was read before")
        if bad:
            problems.insert(0, f"{REGISTRY}: {bad} line{'s' * (bad > 1)} cannot be read and are left out")
        return problems[:MAX_PROBLEMS]


def open_feed(folder: Path) -> Feed:
    """The feed of a race or of a training run."""
    if not folder.exists():
        raise SpecError(f"{folder} does not exist; {_suggestion(folder.parent)}")
    if not folder.is_dir():
        raise SpecError(f"{folder} is a file; name its folder: syncline watch {folder.parent}")
    if (folder / PLAN).exists():
        try:
            return RaceFeed(folder)
        except (OSError, UnicodeDecodeError) as error:
            raise ProtocolError(f"{folder / PLAN} cannot be read: {error}") from None
    if (folder / LOG).exists() or (folder / CONFIG).exists():
        return TrainingFeed(folder)
    raise SpecError(f"{folder} holds no run: it has neither {PLAN} nor {LOG}; {_suggestion(folder)}")


def newest_run(runs: Path) -> Path:
    """The race or training run under `runs` that was written to last."""
    newest = _newest(runs)
    if newest is None:
        raise SpecError(
            f"there is no run in {runs.absolute()}; {HOW_TO_START}, or name its folder: syncline watch FOLDER"
        )
    return newest


def _suggestion(folder: Path) -> str:
    newest = _newest(folder)
    return HOW_TO_START if newest is None else f"the newest run near it: syncline watch {newest}"


def _newest(folder: Path) -> Path | None:
    times: list[tuple[int, Path]] = []
    for path in {file.parent for name in (PLAN, LOG) for file in folder.glob(f"*/{name}")}:
        for file in (path / PLAN, path / LOG, *path.glob(f"*/*/*/{LOG}")):
            try:
                times.append((file.stat().st_mtime_ns, path))
            except OSError:  # the file does not exist, or was just removed
                continue
    return max(times)[1] if times else None
