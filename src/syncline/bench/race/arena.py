"""Where the runs of a race take place: on simulated ranks, or in fresh processes here, in the lab, on hosts."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from syncline.bench.race.entrant import Entrant, run
from syncline.bench.race.field import build_entrant
from syncline.errors import DivergedError, SynclineError
from syncline.launch.lab import Lab
from syncline.launch.start import LOOPBACK, Job, JobExit, local_place, places_in_lab, run_logged
from syncline.launch.store import serve_store
from syncline.training.evaluator import wants_evaluator
from syncline.training.signals import INTERRUPTED_EXIT_CODE
from syncline.transports import Network
from syncline.workloads import build
from syncline.world import simulate

__all__ = ["Arena", "ProcessArena", "Result", "SimulatedArena", "Status"]

Status = Literal["finished", "failed", "diverged", "hung", "interrupted"]

Tick = Callable[[], str | None]
"""Asked again and again while a run goes on; a reason to end it, or None."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    status: Status
    reason: str | None = None


class Arena(Protocol):
    """A place for one run at a time."""

    def run(self, entrant: Entrant, workers: int, tick: Tick) -> Result:
        """See one run through. What its processes print goes to `output.txt` in its folder."""


class ProcessArena:
    """Fresh processes for every run: on this machine, or on the hosts of a lab that stays up for the whole race."""

    def __init__(self, lab: Lab | None = None) -> None:
        self._lab = lab

    def run(self, entrant: Entrant, workers: int, tick: Tick) -> Result:
        target = ("-m", "syncline.bench.race.entrant", entrant.as_json())
        evaluators = int(wants_evaluator(build_entrant(entrant.settings.strategy)))
        job = Job(target=target, plain_rank=None, evaluators=evaluators, mpi=entrant.engine == "mpi")
        if self._lab is None:
            places, address = [local_place(workers)], LOOPBACK
            store = serve_store(address, workers)
        else:
            places, store, address = places_in_lab(self._lab, workers, mpi=job.mpi)
        with open(Path(entrant.folder, "output.txt"), "wb") as log:
            ending = run_logged(job, places, store, address, log, tick)
        return _result(ending)


def _result(ending: JobExit) -> Result:
    if ending.code == 0:
        return Result("finished")
    if ending.early is not None:
        return Result("hung", ending.early)
    if ending.failure is None or ending.code == INTERRUPTED_EXIT_CODE:
        return Result("interrupted", "the race was stopped")
    report = ending.failure.report
    told = report.summary if report is not None else ending.failure.reason(ending.failure.name)
    diverged = told.partition(":")[0].endswith(DivergedError.__name__)
    return Result("diverged" if diverged else "failed", told)


class SimulatedArena:
    """Virtual ranks under a virtual clock, in this process: the same seed gives the same times."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def run(self, entrant: Entrant, workers: int, tick: Tick) -> Result:
        workload = build(entrant.workload)

        def progress(now: float) -> None:
            reason = tick()
            if reason is not None:
                raise _HungError(reason)

        try:
            simulate(
                lambda world: run(entrant, workload, world),
                ranks=workers,
                network=self._network,
                seed=entrant.settings.seed,
                progress=progress,
            )
        except _HungError as error:
            return Result("hung", str(error))
        except DivergedError as error:
            return Result("diverged", str(error))
        except SynclineError as error:
            return Result("failed", f"{type(error).__name__}: {error}")
        except Exception as error:
            with suppress(OSError):
                Path(entrant.folder, "output.txt").write_text(traceback.format_exc())
            return Result("failed", f"{type(error).__name__}: {error}")
        return Result("finished")


class _HungError(Exception):
    """A simulation has taken longer than the time limit of a run."""
