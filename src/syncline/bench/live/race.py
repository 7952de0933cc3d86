"""A race in the live view: its plan, its registry, and every run's log."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from syncline.bench.live.base import Feed, seconds_since
from syncline.bench.live.run import RunFeed
from syncline.bench.live.series import number
from syncline.bench.live.tail import Tail
from syncline.bench.race.plan import Plan
from syncline.bench.race.reading import PLAN, REGISTRY

__all__ = ["RaceFeed"]

Key = tuple[str, str, int, int, float | None]
"""Kind, entry, workers, seed and factor of the learning rate: what a run is, whichever attempt it is."""


@dataclass
class _Ran:
    """What the registry tells of a run."""

    name: str
    key: Key
    begun_ms: int | None
    status: str = "running"
    reason: str | None = None
    seconds: float | None = None
    excluded: bool = False

    @property
    def done(self) -> bool:
        return self.status not in ("running", "interrupted")


class RaceFeed(Feed):
    """The folder of a race. The plan is fixed, so it is read once; the registry and the logs grow."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.plan = Plan.from_json((folder / PLAN).read_text(encoding="utf-8"), str(folder / PLAN))
        runs = [*self.plan.tuning_runs(), *self.plan.runs()]
        self._planned: list[Key] = [(run.kind, run.entry.name, run.workers, run.seed, run.factor) for run in runs]
        self._registry = Tail(folder / REGISTRY)
        self._next = 0
        self._begin()

    def _begin(self) -> None:
        self.runs.clear()
        self._ran: dict[int, _Ran] = {}
        self._latest_ms: int | None = None
        self._stopped = False
        self._strange = 0

    def state(self) -> dict[str, Any]:
        self._refresh()
        plan = self.plan
        latest = {ran.key: (id_, ran) for id_, ran in self._ran.items()}  # the last attempt counts
        done = sum(key in latest and latest[key][1].done for key in self._planned)
        status = self._status(done)
        return {
            "kind": "race",
            "folder": str(self.folder),
            "workload": plan.workload,
            "metric": plan.metric,
            "higher": plan.higher_is_better,
            "target": number(plan.target),
            "workers": plan.workers,
            "place": f"{plan.place.kind} {plan.place.detail}".strip(),
            "status": status,
            "reason": f"go on with: syncline race --resume {self.folder}" if status == "stopped" else None,
            "done": done,
            "total": len(self._planned),
            "unit": "runs",
            "entries": [entry.name for entry in plan.entries],
            "left": self._left(latest) if status == "running" else None,
            "quiet": self._quiet(self._activity()) if status == "running" else None,
            "reading": self.reading,
            "runs": [self._told(key, latest.get(key)) for key in self._planned],
            "skipped": {str(name): str(why) for name, why in plan.skipped.items()},
            "problems": self._problems(),
        }

    def _refresh(self) -> None:
        lines = self._registry.read()
        if self._registry.anew:
            self._begin()
        for line in lines:
            self._take(line)
        # Who runs now comes first: a long race is read while its page is already up.
        order = sorted(self.runs, key=lambda id_: (self._ran[id_].done, not self.runs[id_].behind))
        self._read([self.runs[id_] for id_ in order])

    def _take(self, line: Mapping[str, Any]) -> None:
        event, name = line.get("event"), str(line.get("run"))
        if isinstance(line.get("time_ms"), int):
            self._latest_ms = line["time_ms"]
        if event == "begun":
            self._stopped = False
            self._begun(line, name)
        for ran in self._ran.values():
            if ran.name == name and event == "ended":
                ran.status, ran.seconds = str(line.get("status")), number(line.get("seconds"))
                ran.reason = None if line.get("reason") is None else str(line["reason"])[:500]
                self._stopped = ran.status == "interrupted"
            elif ran.name == name and event == "excluded":
                ran.excluded, ran.reason = True, f"excluded: {line.get('reason')}"[:500]

    def _begun(self, line: Mapping[str, Any], name: str) -> None:
        path = PurePosixPath(name)
        try:
            key = (str(line["kind"]), str(line["entry"]), int(line["workers"]), int(line["seed"]), line.get("factor"))
            if path.is_absolute() or ".." in path.parts:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            self._strange += 1
            return
        self._ran[self._next] = _Ran(name, key, self._latest_ms)
        self.runs[self._next] = RunFeed(self.folder / path)
        self._next += 1

    def _told(self, key: Key, found: tuple[int, _Ran] | None) -> dict[str, Any]:
        kind, entry, workers, seed, factor = key
        facts = {"kind": kind, "entry": entry, "workers": workers, "seed": seed, "factor": factor}
        if found is None:
            return {"id": None, "status": "waiting", **facts}
        id_, ran = found
        told = {"reason": ran.reason, "seconds": ran.seconds, "excluded": ran.excluded}
        return self._row(id_, ran.status, **facts, **told)

    def _status(self, done: int) -> str:
        if done == len(self._planned):
            return "finished"
        if self._stopped:
            return "stopped"
        return "running" if self._ran else "waiting"

    def _left(self, latest: Mapping[Key, tuple[int, _Ran]]) -> float | None:
        """Seconds that the rest will take if runs like those that ended take as long."""
        known = {key: ran.seconds for key, (_, ran) in latest.items() if ran.done and ran.seconds is not None}
        if not known:
            return None
        left = 0.0
        for key in self._planned:
            ran = latest[key][1] if key in latest else None
            if ran is None or not ran.done:
                alike = [seconds for other, seconds in known.items() if other[:3] == key[:3]]
                usual = statistics.fmean(alike or known.values())
                spent = seconds_since(ran.begun_ms) if ran is not None and ran.status == "running" else None
                left += max(0.0, usual - (spent or 0.0))
        return number(left, 3)

    def _activity(self) -> int | None:
        """When anything was written last, as far as is known."""
        found = [self._latest_ms, *(run.latest_ms for run in self.runs.values())]
        return max((ms for ms in found if ms is not None), default=None)

    def _problems(self) -> list[str]:
        found = [f"{self._ran[id_].name}: {problem}" for id_, run in self.runs.items() for problem in run.problems]
        if self._registry.gone:
            found.insert(0, f"{REGISTRY} is gone; what was read of it is shown")
        bad = self._registry.bad + self._strange
        if bad:
            found.insert(0, f"{REGISTRY}: {bad} line{'s' * (bad > 1)} cannot be read and are left out")
        return found[:20]
