"""Small whole races on the simulator, for the tests of all that reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from syncline.bench.race.plan import PlannedRun, RaceEntry, RacePlace, RacePlan
from syncline.bench.race.predict import predict_race
from syncline.bench.race.registry import digest_files, link, sha256
from syncline.bench.race.runner import RaceRunner, RunResult, SimulatedRunner, start_race
from syncline.training.system import code_digest, code_version
from syncline.transports import Network
from syncline.workloads import build

WORKLOAD = "logistic(features=8, samples=256)"
ENTRIES = (
    RaceEntry(name="allreduce", learning_rate=0.5, rate_from="given"),
    RaceEntry(name="allreduce(delay=1)", strategy="allreduce(delay=1)", learning_rate=0.25, rate_from="given"),
    RaceEntry(name="quantize(4)", codec="quantize(4)", learning_rate=0.5, rate_from="given"),
)
PLAN = RacePlan(
    workload=WORKLOAD,
    workers=2,
    entries=ENTRIES,
    seeds=(1, 2, 3),
    target=0.02,
    metric="gap",
    higher_is_better=False,
    epochs=12,
    batch=32,
    evaluate_samples=256,
    place=RacePlace(kind="simulated", detail="10mbit"),
    seconds_a_sample=2e-5,
    command="syncline race … --simulate 10mbit",
    code_version=code_version(),
    code_digest=code_digest(),
    created_ms=1_700_000_000_000,
)
NETWORK = Network(latency=1e-4, bandwidth=1.25e6)


class Silent:
    """Shows nothing."""

    def started(self, run: PlannedRun, folder: Path, number: int, total: int) -> None: ...

    def tick(self) -> None: ...

    def ended(self, run: PlannedRun, result: RunResult, seconds: float) -> None: ...


def make_race(folder: Path, **changes: Any) -> Path:
    """Run a race in this folder; `changes` are to the plan."""
    plan = replace(PLAN, **changes)
    workload = build(plan.workload)
    start_race(folder, plan, workload, predict_race(plan, workload, network=NETWORK))
    assert RaceRunner(folder, SimulatedRunner(NETWORK), Silent()).run()
    return folder


def reseal(folder: Path) -> None:
    """Make the registry fit the files in the folder, as a careful cheater would.

    Changed files and a changed plan get their new checksums, and the chain of hashes is valid again.
    """
    path = folder / "registry.jsonl"
    previous, lines = "", []
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line["event"] == "planned":
            line["plan_sha256"] = sha256(folder / "race.json")
        if line["event"] == "ended":
            line["files"] = digest_files(folder / line["run"])
        line = link(line, previous)
        previous = line["hash"]
        lines.append(json.dumps(line) + "\n")
    path.write_text("".join(lines))
