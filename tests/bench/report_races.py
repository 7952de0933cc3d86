"""Races written by hand, with numbers that are known beforehand, for the tests of the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from syncline.bench.race.plan import RaceEntry, RacePlace, RacePlan
from syncline.bench.race.predictions import RacePredictions
from syncline.bench.race.registry import RunRegistry, digest_files, sha256
from syncline.bench.report import Analysis, analyse
from syncline.bench.runlog import read_race

PLAN = RacePlan(
    workload="digits",
    workers=4,
    entries=(),
    seeds=(1, 2, 3),
    target=0.9,
    metric="accuracy",
    higher_is_better=True,
    epochs=20,
    batch=32,
    evaluate_samples=1000,
    place=RacePlace(kind="local"),
    command="syncline race digits -n 4",
    code_version="1.2.3",
    code_digest="feed",
    created_ms=1_700_000_000_000,
)


@dataclass(frozen=True)
class Hand:
    """One run: an evaluation every `every` seconds and `steps` steps, with these metrics."""

    entry: str
    seed: int
    metrics: Sequence[float | str] = (0.5, 0.8, 0.91, 0.92, 0.93)
    every: float = 2.0
    steps: int = 10
    workers: int = 4
    kind: str = "race"
    status: str = "finished"
    reason: str | None = None
    excluded: str | None = None
    bytes_each: float = 1000.0
    shares: Mapping[str, float] = field(default_factory=lambda: {"compute": 0.5, "exposed": 0.4, "evaluation": 0.1})
    predicted: Mapping[str, float] | None = None
    staleness: float = 0
    consensus: float | None = None
    test: float | None = 0.88
    seconds: float = 30.0
    factor: float | None = None

    @property
    def folder(self) -> str:
        slug = RaceEntry(name=self.entry).slug
        return (
            f"tuning/{slug}/rate-times-{self.factor:g}"
            if self.factor is not None
            else f"runs/{slug}/{self.workers}w-seed{self.seed}"
        )

    def phases(self, elapsed: float) -> dict[str, float]:
        names = ("compute", "exposed", "codec", "data", "evaluation", "checkpoint", "agreeing")
        return {name: elapsed * self.shares.get(name, 0.0) for name in names}

    def events(self) -> list[dict[str, Any]]:
        found: list[tuple[str, Any, dict[str, Any]]] = [("run_start", None, {})]
        for number, metric in enumerate(self.metrics, 1):
            elapsed, samples = self.every * number, 1000 * number
            value = {
                "metric": metric,
                "split": "validation",
                "count": 359,
                "elapsed": elapsed,
                "trained": 0.9 * elapsed,
                "samples": samples,
                "epochs": samples / 1000,
                "bytes_logical": 4 * self.bytes_each * number,
                "bytes_wire": self.bytes_each * number,
                "staleness": self.staleness,
                "phases": self.phases(elapsed),
                **({} if self.consensus is None else {"consensus": self.consensus}),
            }
            found.append(("sl_evaluation", value, {"step": self.steps * number}))
        whole = self.every * len(self.metrics)
        if self.status == "finished":
            found.append(("sl_phases", {**self.phases(whole), "elapsed": whole}, {}))
            found.append(("sl_comm_seconds", 0.6 * whole, {}))
            found.append(("sl_codec_seconds", 0.0, {}))
            if self.test is not None:
                found.append(("sl_test_accuracy", self.test, {}))
        return [
            {"time_ms": 0, "seconds": 0.0, "event_type": "POINT_IN_TIME", "key": key, "value": value, "metadata": more}
            for key, value, more in found
        ]


def seeds(entry: str, everies: Sequence[float] = (2.0, 2.0, 2.0), **changes: Any) -> list[Hand]:
    """A run for each seed; they differ in how long they take."""
    return [Hand(entry, seed, every=every, **changes) for seed, every in enumerate(everies, 1)]


def write_race(
    folder: Path,
    runs: Sequence[Hand],
    entries: Sequence[RaceEntry] = (),
    predictions: RacePredictions | None = None,
    **changes: Any,
) -> Path:
    """Write a whole race; entries that are not given are made from the runs' names."""
    known = {entry.name for entry in entries}
    made = [*entries, *(RaceEntry(name=name) for name in dict.fromkeys(run.entry for run in runs) if name not in known)]
    plan = replace(PLAN, entries=tuple(made), **changes)
    folder.mkdir(parents=True)
    (folder / "race.json").write_text(plan.as_json())
    (folder / "system.json").write_text(json.dumps({"versions": {"torch": "2.13"}, "machine": {"cores": 2}}))
    registry = RunRegistry(folder / "registry.jsonl")
    sums = {"plan_sha256": sha256(folder / "race.json")}
    if predictions is not None:
        (folder / "predictions.json").write_text(predictions.as_json())
        sums["predictions_sha256"] = sha256(folder / "predictions.json")
    registry.append("planned", **sums)
    for run in runs:
        place = folder / run.folder
        place.mkdir(parents=True)
        facts = {"kind": run.kind, "entry": run.entry, "workers": run.workers, "seed": run.seed, "factor": run.factor}
        registry.append("begun", run=run.folder, **facts)
        config = {"metric": plan.metric, "code_digest": "feed", "code_version": "1.2.3", "predicted": run.predicted}
        (place / "config.json").write_text(json.dumps(config))
        (place / "system.json").write_text("{}")
        (place / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in run.events()))
        ended = {"status": run.status, "reason": run.reason, "seconds": run.seconds}
        registry.append("ended", run=run.folder, **ended, files=digest_files(place))
        if run.excluded is not None:
            registry.append("excluded", run=run.folder, reason=run.excluded)
    return folder


def analysed(folder: Path, runs: Sequence[Hand], entries: Sequence[RaceEntry] = (), **changes: Any) -> Analysis:
    """The numbers of a race that is written into this folder."""
    return analyse(read_race(write_race(folder / "race", runs, entries, **changes)))
