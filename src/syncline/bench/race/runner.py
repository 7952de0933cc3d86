"""Runs a race: first the tuning, then for each seed all entries. Every run has its own folder and registry lines."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from syncline.bench.race.entries import build_race_strategy
from syncline.bench.race.plan import PlannedRun, RacePlan
from syncline.bench.race.predictions import RacePredictions
from syncline.bench.race.registry import RunRegistry, digest_files, lock_registry, sha256, write_splits
from syncline.bench.race.worker import run_worker
from syncline.bench.runlog import PLAN, PREDICTIONS, REGISTRY, SYSTEM, read_race
from syncline.errors import DivergedError, IncompatibleError, ProtocolError, SpecError, SynclineError
from syncline.launch.lab import Lab
from syncline.launch.link_rate import parse_rate
from syncline.launch.machine import cores
from syncline.launch.process_events import serve_store
from syncline.launch.start import LOOPBACK, Job, JobExit, hosts_in_lab, local_host, run_logged
from syncline.specs import Registry
from syncline.training.evaluator import wants_evaluator
from syncline.training.run_folder import RunFolder
from syncline.training.signals import INTERRUPTED_EXIT_CODE
from syncline.training.system import describe_machine, describe_versions
from syncline.training.worker import TrainPlan
from syncline.transports import Network
from syncline.workloads import build
from syncline.workloads.base import Workload, batches
from syncline.world import simulate

__all__ = [
    "ProcessRunner",
    "RaceRunner",
    "RunResult",
    "SimulatedRunner",
    "TrainingRunner",
    "expected_seconds",
    "parse_network",
    "seconds_a_sample",
    "start_race",
]

DEFAULT_LATENCY_S = 50e-6
"""Latency of a simulated network that is described by its rate alone."""
TIMED_STEPS, WARMUP_STEPS = 12, 2
"""Training steps that `seconds_a_sample` runs, and how many of them it does not count."""
START_S, START_CPU_S = 1.5, 2.5
"""Overhead of a run on real processes: seconds for the run, and CPU seconds for each worker."""
SIMULATED_S, SIMULATED_STEP_S = 0.2, 0.0015
"""Overhead of a simulated run: seconds for the run, and seconds for each step of a worker."""
MAX_ATTEMPTS = 1000
"""Folders of repeated attempts of one run."""

RunStatus = Literal["finished", "failed", "diverged", "hung", "interrupted"]

Tick = Callable[[], str | None]
"""Called repeatedly during a run. A returned text is a reason to end the run."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    status: RunStatus
    reason: str | None = None


class TrainingRunner(Protocol):
    """Executes one run of a race at a time: `ProcessRunner` or `SimulatedRunner`."""

    def run(self, plan: TrainPlan, workers: int, tick: Tick, mpi: bool = False) -> RunResult:
        """Run to the end. The output of the processes goes to `output.txt` in the run's folder.

        With `mpi`, mpiexec starts the processes.
        """


class ProcessRunner:
    """Starts new processes for every run, on this machine or on the hosts of a lab."""

    def __init__(self, lab: Lab | None = None) -> None:
        self._lab = lab

    def run(self, plan: TrainPlan, workers: int, tick: Tick, mpi: bool = False) -> RunResult:
        target = ("-m", "syncline.bench.race.worker", plan.as_json())
        evaluators = int(wants_evaluator(build_race_strategy(plan.settings.strategy)))
        job = Job(target=target, plain_rank=None, evaluators=evaluators, mpi=mpi)
        if self._lab is None:
            places, address = [local_host(workers)], LOOPBACK
            store = serve_store(address, workers)
        else:
            places, store, address = hosts_in_lab(self._lab, workers, mpi=mpi)
        with open(Path(plan.folder, "output.txt"), "wb") as log:
            return _result(run_logged(job, places, store, address, log, tick))


def _result(ending: JobExit) -> RunResult:
    if ending.code == 0:
        return RunResult("finished")
    if ending.early is not None:
        return RunResult("hung", ending.early)
    if ending.failure is None or ending.code == INTERRUPTED_EXIT_CODE:
        return RunResult("interrupted", "the race was stopped")
    report = ending.failure.report
    reason = report.summary if report is not None else ending.failure.reason(ending.failure.name)
    diverged = reason.partition(":")[0].endswith(DivergedError.__name__)
    return RunResult("diverged" if diverged else "failed", reason)


class SimulatedRunner:
    """Runs simulated ranks on a virtual clock in this process. The same seed gives the same times."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def run(self, plan: TrainPlan, workers: int, tick: Tick, mpi: bool = False) -> RunResult:
        workload = build(plan.workload)

        def progress(now: float) -> None:
            reason = tick()
            if reason is not None:
                raise _HungError(reason)

        try:
            simulate(
                lambda world: run_worker(plan, workload, world),
                ranks=workers,
                network=self._network,
                seed=plan.settings.seed,
                progress=progress,
            )
        except _HungError as error:
            return RunResult("hung", str(error))
        except DivergedError as error:
            return RunResult("diverged", str(error))
        except Exception as error:
            if not isinstance(error, SynclineError):
                with suppress(OSError):
                    Path(plan.folder, "output.txt").write_text(traceback.format_exc())
            return RunResult("failed", f"{type(error).__name__}: {error}")
        return RunResult("finished")


class _HungError(Exception):
    """A simulation has taken longer than the time limit of a run."""


class RaceObserver(Protocol):
    """Is called at each event of a race; `RaceProgress` prints them."""

    def started(self, run: PlannedRun, folder: Path, number: int, total: int) -> None: ...

    def tick(self) -> None: ...

    def ended(self, run: PlannedRun, result: RunResult, seconds: float) -> None: ...


def start_race(folder: Path, plan: RacePlan, workload: Workload, predictions: RacePredictions | None = None) -> None:
    """Write the plan, the predictions and the digests of the samples, before anything runs.

    A lock keeps other processes out.
    """
    place = RunFolder(folder)
    with place.lock():
        if (folder / PLAN).exists():
            raise IncompatibleError(
                f"{folder} holds a race already: continue it with --resume {folder}, or name another folder"
            )
        splits = write_splits(workload, folder)
        place.write("system", {"versions": describe_versions(), "machine": describe_machine()})
        (folder / PLAN).write_text(plan.as_json())
        sums = {"plan_sha256": sha256(folder / PLAN), "splits": splits, "system_sha256": sha256(folder / SYSTEM)}
        if predictions is not None:
            (folder / PREDICTIONS).write_text(predictions.as_json(), encoding="utf-8")
            sums["predictions_sha256"] = sha256(folder / PREDICTIONS)
        RunRegistry(folder / REGISTRY).append("planned", **sums)


class RaceRunner:
    """Executes the planned runs that have no result yet."""

    def __init__(self, folder: Path, runner: TrainingRunner, observer: RaceObserver) -> None:
        self._folder = folder
        self._runner = runner
        self._observer = observer
        self._plan = read_race(folder).plan

    def run(self) -> bool:
        """Return True if the race is complete, False if the user interrupted it."""
        with lock_registry(self._folder / REGISTRY):
            self._registry = RunRegistry(self._folder / REGISTRY)
            self._check_planned()
            self._end_killed_runs()
            if not self._tune():
                return False
            remaining = read_race(self._folder).remaining()
            total = len(self._plan.runs())
            first = total - len(remaining)
            return all(self._run_one(run, first + number, total) for number, run in enumerate(remaining))

    def _check_planned(self) -> None:
        lines = read_race(self._folder).lines
        if not lines or lines[0].get("event") != "planned":
            raise ProtocolError(
                f"{self._folder / REGISTRY} does not begin with the plan: the race was never begun, or lines are "
                "missing; begin a new one"
            )

    def _end_killed_runs(self) -> None:
        """Mark runs without an end as interrupted: the process of the race was killed. They are repeated."""
        for run in read_race(self._folder).runs:
            if run.status == "running":
                self._record_end(run.folder, RunResult("interrupted", "the race's own process ended"), None)

    def _record_end(self, name: str, result: RunResult, seconds: float | None) -> None:
        facts = {"status": result.status, "reason": result.reason, "seconds": seconds}
        self._registry.append("ended", run=name, **facts, files=digest_files(self._folder / name))

    def _tune(self) -> bool:
        """Try the remaining rates; then choose for each entry the rate with the best validation metric."""
        runs = self._plan.tuning_runs()
        done = {(run.entry, run.factor) for run in read_race(self._folder).of_kind("tuning")}
        for number, run in enumerate(runs):
            if (run.entry.name, run.factor) not in done and not self._run_one(run, number, len(runs)):
                return False
        race = read_race(self._folder)
        for entry in self._plan.entries if runs else ():
            if entry.name not in race.rates:
                self._registry.append("tuned", entry=entry.name, **race.choose_rate(entry))
        return True

    def _run_one(self, run: PlannedRun, number: int, total: int) -> bool:
        """Execute one run, and record any result. Return False if the user interrupted it."""
        name = self._new_folder(run.folder)
        folder = self._folder / name
        folder.mkdir(parents=True)
        facts = {"kind": run.kind, "entry": run.entry.name, "workers": run.workers, "seed": run.seed}
        self._registry.append("begun", run=name, **facts, factor=run.factor)
        plan = TrainPlan(
            workload=self._plan.workload,
            settings=self._plan.settings(run),
            folder=str(folder.absolute()),
            seconds_a_sample=self._plan.seconds_a_sample,
        )
        self._observer.started(run, folder, number, total)
        start = time.monotonic()
        result = RunResult("interrupted", "the race was stopped")
        try:
            result = self._runner.run(plan, run.workers, self._tick(start), mpi=run.entry.engine == "mpi")
        except KeyboardInterrupt:
            pass
        except SynclineError as error:
            result = RunResult("failed", str(error))
        finally:
            seconds = time.monotonic() - start
            self._record_end(name, result, seconds)
        self._observer.ended(run, result, seconds)
        return result.status != "interrupted"

    def _tick(self, start: float) -> Tick:
        def tick() -> str | None:
            self._observer.tick()
            if time.monotonic() - start > self._plan.limit:
                return f"no end after {self._plan.limit:g} s (--limit)"
            return None

        return tick

    def _new_folder(self, name: str) -> str:
        """The name of a folder that does not exist: an interrupted attempt keeps its own."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            folder = name if attempt == 1 else f"{name}.{attempt}"
            if not (self._folder / folder).exists():
                return folder
        raise SpecError(f"{self._folder / name} was attempted {MAX_ATTEMPTS} times; look there for the cause")


def parse_network(text: str) -> Network:
    """The network of a rate such as "100mbit", or of a whole spec: "network(latency=1e-4, bandwidth=12.5e6)".

    >>> parse_network("100mbit").bandwidth
    12500000.0
    """
    if "(" in text:
        registry = Registry[Network]("network")
        registry.add("network", Network)
        return registry.build(text)
    try:
        shape = parse_rate(text)
    except SpecError as error:
        raise SpecError(f"{error}; or give the whole network: network(latency=1e-4, bandwidth=12.5e6)") from None
    if shape is None:
        raise SpecError(f"a simulated network needs a rate, such as 100mbit, not {text!r}")
    return Network(latency=DEFAULT_LATENCY_S, bandwidth=shape.rate / 8)


def seconds_a_sample(workload: Workload, batch: int) -> float:
    """Measured seconds of forward, backward and update for one sample of a batch, on one thread (a median)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = workload.model(0)
        optimizer = workload.optimizer(model)
        first = next(batches(workload.splits().train, batch))
        seconds = []
        for _ in range(TIMED_STEPS):
            start = time.perf_counter()
            optimizer.zero_grad()
            workload.loss(model, first).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(seconds[WARMUP_STEPS:]) / len(first[0])


def expected_seconds(plan: RacePlan, workload: Workload) -> float:
    """Estimated seconds of a race on this machine: from a measured step, and overheads measured on two cores."""
    samples = workload.splits().sizes()["train"]
    a_sample = plan.seconds_a_sample or seconds_a_sample(workload, plan.batch)
    usable = cores()
    total = 0.0
    for run in (*plan.tuning_runs(), *plan.runs()):
        epochs = plan.settings(run).epochs or plan.epochs
        computing = epochs * samples * a_sample
        if plan.place.kind == "simulated":
            total += SIMULATED_S + computing + SIMULATED_STEP_S * epochs * samples / plan.batch
        else:
            total += START_S + (computing + START_CPU_S * run.workers) / min(run.workers, usable)
    return total
