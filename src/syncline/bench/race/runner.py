"""Runs a race: tuning first, then seed after seed all entries, each in a folder of its own and in the registry."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from syncline.bench.race.arena import Arena, Result
from syncline.bench.race.entrant import Entrant
from syncline.bench.race.plan import Plan, Run
from syncline.bench.race.reading import PLAN, REGISTRY, SYSTEM, Race, read_race
from syncline.bench.race.registry import Registry, digest_files, locked, sha256
from syncline.bench.race.splits import write_splits
from syncline.errors import IncompatibleError, ProtocolError, SpecError, SynclineError
from syncline.training.folder import RunFolder
from syncline.training.system import describe_machine, describe_versions
from syncline.workloads.base import Workload

__all__ = ["Runner", "Watcher", "begin"]


class Watcher(Protocol):
    """Shows a race to whoever looks at it."""

    def begun(self, run: Run, folder: Path, number: int, total: int) -> None: ...

    def tick(self) -> None: ...

    def ended(self, run: Run, result: Result, seconds: float) -> None: ...


def begin(folder: Path, plan: Plan, workload: Workload) -> None:
    """Write the plan before anything is run. One process at a time does so, so that plans do not mix."""
    place = RunFolder(folder)
    with place.lock():
        if (folder / PLAN).exists():
            raise IncompatibleError(
                f"{folder} holds a race already: go on with --resume {folder}, or name another folder"
            )
        splits = write_splits(workload, folder)
        place.write("system", {"versions": describe_versions(), "machine": describe_machine()})
        (folder / PLAN).write_text(plan.as_json())
        sums = {"plan_sha256": sha256(folder / PLAN), "splits": splits, "system_sha256": sha256(folder / SYSTEM)}
        Registry(folder / REGISTRY).append("planned", **sums)


class Runner:
    """Goes on with a race until every planned run has an end, or somebody has had enough."""

    def __init__(self, folder: Path, arena: Arena, watcher: Watcher) -> None:
        self._folder = folder
        self._arena = arena
        self._watcher = watcher
        self._plan = read_race(folder).plan

    def run(self) -> bool:
        """Whether it is complete."""
        with locked(self._folder / REGISTRY):
            self._registry = Registry(self._folder / REGISTRY)
            self._check_begun()
            self._bury()
            return self._tune() and all(self._one(run, done, total) for done, total, run in self._left())

    def _check_begun(self) -> None:
        lines = self.race().lines
        if not lines or lines[0].get("event") != "planned":
            raise ProtocolError(
                f"{self._folder / REGISTRY} does not begin with the plan: the race was never begun, or lines are "
                "missing; begin a new one"
            )

    def _bury(self) -> None:
        """Runs without an end are those of a race whose process was killed: they are repeated."""
        for run in self.race().runs:
            if run.status == "running":
                facts = {"status": "interrupted", "reason": "the race's own process ended", "seconds": None}
                self._registry.append("ended", run=run.folder, **facts, files=digest_files(self._folder / run.folder))

    def _left(self) -> list[tuple[int, int, Run]]:
        left = self.race().left()
        total = len(self._plan.runs())
        return [(total - len(left) + number, total, run) for number, run in enumerate(left)]

    def race(self) -> Race:
        """As it is on the disk now."""
        return read_race(self._folder)

    def _tune(self) -> bool:
        """Try every rate that is left to try; for each entry the one with the best validation metric is taken."""
        runs = self._plan.tuning_runs()
        done = {(run.entry, run.factor) for run in self.race().of_kind("tuning")}
        for number, run in enumerate(runs):
            if (run.entry.name, run.factor) not in done and not self._one(run, number, len(runs)):
                return False
        found = self.race()
        for entry in self._plan.entries if runs else ():
            if entry.name not in found.rates:
                self._registry.append("tuned", entry=entry.name, **found.choose_rate(entry))
        return True

    def _one(self, run: Run, number: int, total: int) -> bool:
        """One run, whatever comes of it; False where the user has had enough."""
        name = self._fresh(run.folder)
        facts = {"kind": run.kind, "entry": run.entry.name, "workers": run.workers, "seed": run.seed}
        folder = self._folder / name
        folder.mkdir(parents=True)
        self._registry.append("begun", run=name, **facts, factor=run.factor)
        entrant = Entrant(
            workload=self._plan.workload,
            settings=self._plan.settings(run),
            folder=str(folder.absolute()),
            seconds_a_sample=self._plan.seconds_a_sample,
            engine=run.entry.engine,
        )
        self._watcher.begun(run, folder, number, total)
        start = time.monotonic()
        result = Result("interrupted", "the race was stopped")
        try:
            result = self._arena.run(entrant, run.workers, self._tick(start))
        except KeyboardInterrupt:
            pass
        except SynclineError as error:
            result = Result("failed", str(error))
        finally:
            seconds = time.monotonic() - start
            facts = {"status": result.status, "reason": result.reason, "seconds": seconds}
            self._registry.append("ended", run=name, **facts, files=digest_files(folder))
        self._watcher.ended(run, result, seconds)
        return result.status != "interrupted"

    def _tick(self, start: float) -> Callable[[], str | None]:
        def tick() -> str | None:
            self._watcher.tick()
            if time.monotonic() - start > self._plan.limit:
                return f"no end after {self._plan.limit:g} s (--limit)"
            return None

        return tick

    def _fresh(self, name: str) -> str:
        """A folder that nothing was written to: an interrupted attempt keeps its own."""
        attempt, found = 1, name
        while (self._folder / found).exists():
            attempt += 1
            found = f"{name}.{attempt}"
            if attempt > 1000:
                raise SpecError(f"{self._folder / name} was begun a thousand times; look there for what is wrong")
        return found
