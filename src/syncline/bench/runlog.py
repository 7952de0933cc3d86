"""Reads the folders of runs and races. The race, the report, the lint and the live page all use this reader.

```text
runs/race-digits-20261115-101500/
  race.json          the plan, fixed before the first run
  predictions.json   the step of each entry, predicted before the first run
  registry.jsonl     the start and end of every run, in a chain of hashes
  system.json        the machine
  splits/            a digest of every sample, by split
  runs/<entry>/4w-seed1/      log.jsonl · config.json · system.json · output.txt
  tuning/<entry>/rate-times-3/
  report.html · report.json · runs.csv · curves.csv · plots/
```

A damaged run raises no error. Its defects are listed in `problems`, which the report and the lint show.
"""

from __future__ import annotations

import json
import math
import os
import types
import typing
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from syncline.bench.race.plan import PlannedRun, RaceEntry, RacePlan
from syncline.bench.race.predictions import RacePredictions
from syncline.bench.race.registry import RUN_FILES, read_registry, sha256
from syncline.errors import ProtocolError, SpecError, SynclineError

__all__ = [
    "CONFIG",
    "LOG",
    "PLAN",
    "PREDICTIONS",
    "REGISTRY",
    "SYSTEM",
    "LogTail",
    "LoggedEvaluation",
    "RaceRecord",
    "RunKey",
    "RunRecord",
    "apply_registry_line",
    "finite",
    "read_document",
    "read_race",
    "read_run",
    "runs_with_other_code",
]

PLAN, REGISTRY, SYSTEM, LOG, CONFIG = "race.json", "registry.jsonl", "system.json", "log.jsonl", "config.json"
PREDICTIONS = "predictions.json"

CHUNK_BYTES = 1 << 20
"""The live page reads a long log in chunks of this size, so that each request is answered soon."""
MAX_LINE_BYTES = 1 << 18
"""Longer lines of a growing file are skipped: a file without line ends must not fill the memory."""
HEAD_BYTES = 256
"""The first bytes of a file identify it. Inode numbers do not: the system reuses them at once."""

RunKey = tuple[str, str, int, int, float | None]
"""Kind, entry, workers, seed and factor of the learning rate. Repeated attempts of a run have the same key."""


class LogTail:
    """Reads the JSON objects that were appended to a file since the last call.

    An incomplete last line is left for the next call. If the file is shorter than before, or a different one, reading
    starts again at its beginning. With `chunk_bytes=None` one call reads the whole file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> tail = LogTail(path)
    >>> _ = path.write_text('{"a": 1}\\n{"b"')
    >>> tail.read()
    [{'a': 1}]
    >>> _ = path.write_text('{"a": 1}\\n{"b": 2}\\n')
    >>> tail.read()
    [{'b': 2}]
    """

    def __init__(self, path: Path, chunk_bytes: int | None = CHUNK_BYTES) -> None:
        self._path = path
        self._chunk_bytes = chunk_bytes
        self._offset = 0
        self._head = b""
        self._seen: tuple[int, int] | None = None
        self._skipping = False
        self.restarted = False
        """True if the last call started at the beginning of another file: earlier results are no longer valid."""
        self.more = False
        """True if there is more to read at once."""
        self.bad_lines = 0
        """Lines that are not JSON objects."""
        self.error: OSError | None = None
        """Why the last call could not read the file."""

    @property
    def gone(self) -> bool:
        """True if the file existed once and cannot be read now."""
        return self.error is not None and self._seen is not None

    def read(self) -> list[dict[str, Any]]:
        """Return the new objects; none if the file does not exist."""
        self.restarted = False
        try:
            stat = os.stat(self._path)
            now = (stat.st_size, stat.st_mtime_ns)
            if now == self._seen and not self.more and self.error is None:
                return []
            with open(self._path, "rb") as file:
                head = file.read(HEAD_BYTES)
                if stat.st_size < self._offset or not head.startswith(self._head):
                    self._offset, self._skipping, self.bad_lines, self.restarted = 0, False, 0, True
                file.seek(self._offset)
                data = file.read(-1 if self._chunk_bytes is None else self._chunk_bytes)
        except OSError as error:
            self.error, self.more = error, False
            return []
        self._seen, self.error = now, None
        end = data.rfind(b"\n") + 1
        self.more = len(data) == self._chunk_bytes
        if not end and len(data) > MAX_LINE_BYTES and self._chunk_bytes is not None:
            end, data, self._skipping = len(data), b"", True
        self._offset += end
        self._head = head[: self._offset]
        return self._objects(data[:end].split(b"\n")[:-1])

    def _objects(self, lines: list[bytes]) -> list[dict[str, Any]]:
        if self._skipping and lines:
            lines, self._skipping = lines[1:], False
            self.bad_lines += 1
        objects = []
        for line in lines:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                objects.append(value)
            else:
                self.bad_lines += bool(line.strip())
        return objects


@dataclass(frozen=True)
class LoggedEvaluation:
    """An evaluation, and the cost of training until then."""

    step: int
    metric: float
    elapsed: float
    """Seconds since `run_start`, evaluations included."""
    trained: float
    samples: int
    epochs: float
    bytes_logical: float
    bytes_wire: float
    staleness: float
    phases: dict[str, float]
    split: str
    count: int
    consensus: float | None = None
    communication: float | None = None
    """Seconds in which a reduction was under way, hidden or not. None in logs of earlier versions."""
    update: float | None = None
    """Seconds of the optimizer, without waiting."""


@dataclass
class RunRecord:
    """One run: what the registry says of it, its configuration, its system and the events of its log."""

    folder: str
    kind: str
    entry: str
    workers: int
    seed: int
    factor: float | None = None
    status: str = "running"
    """`finished`, `failed`, `diverged`, `hung` or `interrupted`; `running` if the registry has no end."""
    reason: str | None = None
    seconds: float | None = None
    """Wall-clock seconds of the whole run, with the start of its processes."""
    excluded: str | None = None
    """The reason if a user excluded the run."""
    started_ms: int | None = None
    file_digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the run's files, as the registry has them."""
    config: dict[str, Any] = field(default_factory=dict)
    system: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def key(self) -> RunKey:
        return self.kind, self.entry, self.workers, self.seed, self.factor

    @property
    def ended(self) -> bool:
        """True if the run has a result: an interrupted run is repeated and has none."""
        return self.status not in ("interrupted", "running")

    @property
    def asynchronous(self) -> bool:
        """True if the workers step independently. Then steps are a mean over workers, and a separate task evaluates."""
        return self.config.get("loose") is True

    @property
    def simulated(self) -> bool:
        """True if the seconds of the log are virtual."""
        world = self.system.get("world")
        return isinstance(world, dict) and world.get("engine") == "simulated"

    @cached_property
    def _events_by_key(self) -> dict[str, list[dict[str, Any]]]:
        by_key = defaultdict(list)
        for event in self.events:
            by_key[str(event.get("key"))].append(event)
        return by_key

    def lines(self, key: str) -> list[dict[str, Any]]:
        """All events with this key, in the order of the log."""
        return self._events_by_key.get(key, [])

    def value(self, key: str) -> Any:
        """The last value with this key, or None."""
        lines = self.lines(key)
        return lines[-1].get("value") if lines else None

    @property
    def stop(self) -> dict[str, Any]:
        """The metadata of the last `run_stop`: `status`, `stopped_by` and `error`. Empty if there is none."""
        metadata = self.lines("run_stop")[-1].get("metadata") if self.lines("run_stop") else None
        return metadata if isinstance(metadata, dict) else {}

    def since_start(self, event: dict[str, Any]) -> float | None:
        """Seconds from `run_start` to an event, by the time stamps of the two lines."""
        start = finite(self.lines("run_start")[0].get("seconds")) if self.lines("run_start") else None
        stamp = finite(event.get("seconds"))
        return None if start is None or stamp is None else stamp - start

    @cached_property
    def evaluations(self) -> list[LoggedEvaluation]:
        """In the order of the log."""
        evaluations = []
        for event in self.lines("sl_evaluation"):
            if isinstance(event.get("value"), dict):
                value = dict(event["value"])
                try:
                    value["metric"] = float(value["metric"])  # NaN is written as a string
                    evaluations.append(LoggedEvaluation(step=int(event["metadata"]["step"]), **value))
                except (KeyError, TypeError, ValueError):
                    self.problems.append(f"{self.folder}/{LOG} has an evaluation that cannot be read: {value}")
        return evaluations

    @property
    def test(self) -> float | None:
        """The metric on the test split at the end."""
        value = self.value(f"sl_test_{self.config.get('metric')}")
        return None if value is None else float(value)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of rank 0 by phase, over the whole run."""
        phases = dict(self.value("sl_phases") or (self.evaluations[-1].phases if self.evaluations else {}))
        phases.pop("elapsed", None)
        return phases

    @property
    def elapsed(self) -> float | None:
        """Seconds from `run_start` to `run_stop` on rank 0's clock."""
        phases = self.value("sl_phases")
        if isinstance(phases, dict) and "elapsed" in phases:
            return float(phases["elapsed"])
        return self.evaluations[-1].elapsed if self.evaluations else None

    def hit(self, target: float, higher_is_better: bool) -> LoggedEvaluation | None:
        """The first evaluation that reaches the target."""
        for one in self.evaluations:
            if one.metric >= target if higher_is_better else one.metric <= target:  # False for NaN
                return one
        return None

    def time_to_target(self, target: float, higher_is_better: bool) -> float:
        """Seconds until the target was reached; infinite if it was not, or if the run did not finish."""
        hit = self.hit(target, higher_is_better) if self.status == "finished" else None
        return math.inf if hit is None else hit.elapsed

    def best(self, higher_is_better: bool) -> float | None:
        """The best metric of all evaluations."""
        metrics = [one.metric for one in self.evaluations if not math.isnan(one.metric)]
        return (max(metrics) if higher_is_better else min(metrics)) if metrics else None

    def load(self, path: Path) -> list[str]:
        """Read the three files of the run; return what is wrong with them."""
        problems: list[str] = []
        tail = LogTail(path / LOG, chunk_bytes=None)
        self.events = tail.read()
        self.__dict__.pop("evaluations", None)
        self.__dict__.pop("_events_by_key", None)
        if tail.error is not None:
            problems.append(_why_unreadable(path / LOG, tail.error))
        if tail.bad_lines:
            problems.append(f"{path.name}/{LOG}: {tail.bad_lines} lines are not JSON objects")
        self.config = read_document(path / CONFIG, problems)
        self.system = read_document(path / SYSTEM, problems)
        return problems


@dataclass
class RaceRecord:
    """A whole race. `problems` lists missing and edited files, and runs of a different version of the code."""

    path: Path
    plan: RacePlan
    lines: list[dict[str, Any]]
    """The registry."""
    runs: list[RunRecord]
    system: dict[str, Any]
    problems: list[str]
    predictions: RacePredictions | None = None
    """Made before the first run; None in races of earlier versions."""

    def of(self, entry: str, kind: str = "race") -> list[RunRecord]:
        """The runs of an entry that count, in the order in which they started."""
        return [run for run in self.of_kind(kind) if run.entry == entry and run.excluded is None]

    def of_kind(self, kind: str) -> list[RunRecord]:
        """All runs of a kind that have a result."""
        return [run for run in self.runs if run.kind == kind and run.ended]

    def choose_rate(self, entry: RaceEntry) -> dict[str, Any]:
        """The learning rate with the best final validation metric, its factor, and the metrics of all factors."""
        finished = [run for run in self.of(entry.name, "tuning") if run.status == "finished" and run.evaluations]
        last = {run.factor: run.evaluations[-1].metric for run in finished}
        known = {factor: metric for factor, metric in last.items() if factor is not None and not math.isnan(metric)}
        better = max if self.plan.higher_is_better else min
        best = better(known, key=lambda factor: known[factor]) if known else 1.0  # no result: the rate stays
        rate = (entry.learning_rate or 0.0) * best
        return {"learning_rate": rate, "factor": best, "tried": {f"{key:g}": value for key, value in known.items()}}

    @property
    def registry_head(self) -> str:
        """The hash of the registry's last line, which depends on all lines."""
        return str(self.lines[-1].get("hash", "")) if self.lines else ""

    @property
    def rates(self) -> dict[str, float]:
        """The tuned learning rate of each entry."""
        return {str(line["entry"]): float(line["learning_rate"]) for line in self.lines if line.get("event") == "tuned"}

    @property
    def entries(self) -> tuple[RaceEntry, ...]:
        """The entries with their tuned learning rates."""
        return self.plan.tuned(self.rates)

    def remaining(self) -> list[PlannedRun]:
        """Planned runs that have no result yet."""
        ended = {run.key for run in self.runs if run.ended}
        return [run for run in self.plan.runs(self.rates) if run.key not in ended]


def read_race(path: str | Path) -> RaceRecord:
    """Read the folder of a race. A plan or registry with impossible values is a `ProtocolError`."""
    path = Path(path)
    if not (path / PLAN).exists():
        raise SpecError(f"{path} is not a race's folder: it has no {PLAN}; a race makes one: syncline race digits -n 4")
    try:
        race = _read_race(path)
        _check_types(race)
    except SynclineError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"{path} cannot be read as a race ({type(error).__name__}: {error}): {PLAN} or {REGISTRY} was edited, or "
            "written by another version"
        ) from None
    return race


def _read_race(path: Path) -> RaceRecord:
    plan = RacePlan.from_json((path / PLAN).read_text(), str(path / PLAN))
    problems: list[str] = []
    lines: list[dict[str, Any]] = []
    if (path / REGISTRY).exists():
        lines, problems = read_registry(path / REGISTRY)
    else:
        problems.append(f"{REGISTRY} is missing, so the runs of the race are not known")
    planned = next((line for line in lines if line.get("event") == "planned"), None)
    if planned is not None and planned.get("plan_sha256") != sha256(path / PLAN):
        problems.append(f"{PLAN} was changed after the race began")
    predictions = _read_predictions(path, planned or {}, problems)
    runs: dict[str, RunRecord] = {}
    for line in lines:
        apply_registry_line(runs, line)
    for run in runs.values():
        run.problems += _edited_files(path, run)
        defects = run.load(path / run.folder)
        if run.status == "finished":  # other runs may have stopped before they wrote anything
            run.problems += [problem for problem in defects if problem not in run.problems]
        problems += run.problems
    logs = sorted([*path.glob(f"runs/*/*/{LOG}"), *path.glob(f"tuning/*/*/{LOG}")])
    names = [log.parent.relative_to(path).as_posix() for log in logs]
    problems += [f"{name} is not in the registry" for name in names if name not in runs]
    system = read_document(path / SYSTEM, problems)
    problems += runs_with_other_code(plan, list(runs.values()))
    return RaceRecord(path, plan, lines, list(runs.values()), system, problems, predictions)


def _read_predictions(path: Path, planned: Mapping[str, Any], problems: list[str]) -> RacePredictions | None:
    """The predictions that were made before the race began. Others are not shown."""
    digest, file = planned.get("predictions_sha256"), path / PREDICTIONS
    if digest is None:
        if file.exists():
            problems.append(f"{PREDICTIONS} was not there when the race began, so it is not shown")
        return None
    if not file.exists():
        problems.append(f"{PREDICTIONS} is missing")
        return None
    if digest != sha256(file):
        problems.append(f"{PREDICTIONS} was changed after the race began, so it is not shown")
        return None
    return RacePredictions.from_json(file.read_text(encoding="utf-8"), str(file))


def read_run(path: Path, **facts: Any) -> RunRecord:
    """Read the folder of one run. `facts` set fields of the record; the others come from its configuration."""
    run = RunRecord(folder=path.name, kind="race", entry="", workers=1, seed=0)
    run.problems = run.load(path)
    run.entry = str(run.config.get("strategy"))
    run.workers = int(run.config.get("workers") or 1)
    run.seed = int(run.config.get("seed") or 0)
    if run.lines("run_stop"):
        run.status = "finished" if run.stop.get("status") == "success" else "failed"
    for name, value in facts.items():
        setattr(run, name, value)
    return run


def apply_registry_line(runs: dict[str, RunRecord], line: Mapping[str, Any]) -> None:
    """Update `runs` (by folder) with one line of the registry. An impossible run is a `ProtocolError`."""
    name, event = str(line.get("run")), line.get("event")
    if event == "begun":
        folder = PurePosixPath(name)
        if folder.is_absolute() or ".." in folder.parts:
            raise ProtocolError(f"{REGISTRY} names a run outside the folder of the race: {name}")
        facts: dict[str, Any] = {key: line.get(key) for key in ("kind", "entry", "workers", "seed", "factor")}
        run = RunRecord(folder=name, **facts, started_ms=line.get("time_ms"))
        _check_fields(run, f"{REGISTRY}, run {name}")
        runs[name] = run
    elif event == "ended" and name in runs:
        run = runs[name]
        run.status, run.reason, run.seconds = line.get("status", "failed"), line.get("reason"), line.get("seconds")
        run.file_digests = line.get("files", {})
        _check_fields(run, f"{REGISTRY}, run {name}")
    elif event == "excluded" and name in runs:
        runs[name].excluded = str(line.get("reason") or "")


def _edited_files(path: Path, run: RunRecord) -> list[str]:
    problems = []
    for file in RUN_FILES:
        there = path / run.folder / file
        if file in run.file_digests and not there.exists():
            problems.append(f"{run.folder}/{file} is missing")
        elif file in run.file_digests and sha256(there) != run.file_digests[file]:
            problems.append(f"{run.folder}/{file} was edited after the run")
    return problems


def runs_with_other_code(plan: RacePlan, runs: Sequence[RunRecord]) -> list[str]:
    """A sentence for each run whose code differs from the code of the plan."""
    problems = []
    for run in runs:
        digest = run.config.get("code_digest")
        if digest is not None and plan.code_digest and digest != plan.code_digest:
            problems.append(
                f"{run.folder} ran other code ({run.config.get('code_version')}, {digest}) than the race was planned "
                f"with ({plan.code_version}, {plan.code_digest})"
            )
    return problems


def read_document(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read a JSON object; on a defect, append a sentence to `problems` and return an empty one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(_why_unreadable(path, error))
        return {}
    except (ValueError, RecursionError) as error:
        problems.append(f"{path} is not JSON: {error}")
        return {}
    return document if isinstance(document, dict) else {}


def _why_unreadable(path: Path, error: OSError) -> str:
    why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
    return f"{path.parent.name}/{path.name} {why}"


def finite(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


# The types of a plan that was read


def _check_types(race: RaceRecord) -> None:
    """Compare the values of the plan and the registry with the annotations of their classes."""
    _check_fields(race.plan, PLAN)
    if race.plan.workers < 1:
        raise ProtocolError(f"{PLAN} has {race.plan.workers} workers: it was edited, or written by another version")
    for number, line in enumerate(race.lines, 1):
        if not isinstance(line.get("event"), str):
            raise ProtocolError(f"{REGISTRY}, line {number}: event is {line.get('event')!r}, and not text")
    race.remaining()


def _check_fields(record: Any, where: str) -> None:
    hints = typing.get_type_hints(type(record))
    for each in fields(record):
        value = getattr(record, each.name)
        if not _has_type(value, hints[each.name]):
            raise ProtocolError(
                f"{where}: {each.name} is {value!r}, and its type is {each.type}: the file was edited, or written by "
                "another version; restore it"
            )
        for one in value if isinstance(value, tuple) else (value,):
            if is_dataclass(one):
                _check_fields(one, f"{where}, {each.name}")


def _has_type(value: Any, hint: Any) -> bool:
    """
    >>> _has_type((1, 2), tuple[int, ...]), _has_type(True, int), _has_type(None, float | None)
    (True, False, True)
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(value, one) for one in arguments)
    if origin is typing.Literal:
        return isinstance(value, str)
    if origin is tuple:
        return isinstance(value, tuple) and all(_has_type(one, arguments[0]) for one in value)
    if origin is list:
        return isinstance(value, list)
    if origin is not None:  # a mapping
        return isinstance(value, dict) and all(_has_type(one, arguments[1]) for one in value.values())
    if hint is Any:
        return True
    if hint is float:
        return finite(value) is not None
    return type(value) is int if hint is int else isinstance(value, hint)
