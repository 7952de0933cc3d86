"""What the loop writes into the run log: MLPerf's keys where it has them, ours under `sl_`."""

from __future__ import annotations

from typing import Any

from syncline.events import ChromeTrace, Recorder, RunEvent, RunLog, TensorBoardSink
from syncline.training.clocks import shared_zero
from syncline.training.folder import RunFolder
from syncline.training.progress import Moment
from syncline.training.settings import Settings
from syncline.training.summary import json_number
from syncline.training.system import code_version
from syncline.workloads.base import Workload
from syncline.world import World

__all__ = ["Journal"]

DIAGNOSES = ("sl_codec_error", "sl_codec_xi", "sl_codec_density")


class Journal:
    """Rank 0's log and scalars, and every rank's trace. On the other ranks, or without a folder, it goes nowhere.

    Spans of single steps go to the trace alone: a log of them would outgrow everything else.
    """

    def __init__(
        self, world: World, folder: RunFolder | None, *, trace: bool = False, tensorboard: bool = False, step: int = 0
    ) -> None:
        self._world = world
        self._trace: ChromeTrace | None = None
        self._diagnoses: _Diagnoses | None = None
        self._recorder = Recorder(world.runtime.now)
        if folder is None:
            return
        if world.rank == 0:
            self._recorder.add(RunLog(folder.path))
            if tensorboard:
                self._recorder.add(TensorBoardSink(folder.tensorboard))
        if trace:
            zero, error = shared_zero(world)
            folder.path.mkdir(parents=True, exist_ok=True)
            self._trace = ChromeTrace(folder.trace(world.rank, step), world.rank, zero=zero, error=error)
            world.events.add(self._trace)

    def started(
        self, workload: Workload, settings: Settings, config: dict[str, Any], resumed: int, loose: bool = False
    ) -> None:
        """The run begins, or goes on after so many steps."""
        if settings.diagnose and self._recorder.sinks:
            self._diagnoses = _Diagnoses(self._recorder)
            self._world.events.add(self._diagnoses)
        samples = workload.splits().sizes()
        optimizer = workload.defaults.optimizer
        points = {
            "sl_code_version": code_version(),
            "sl_workload": workload.spec,
            "sl_workers": self._world.size,
            "sl_strategy": config.get("strategy", settings.strategy),
            "sl_codec": config.get("codec", settings.codec),
            "sl_collective": config.get("collective", settings.collective),
            "seed": settings.seed,
            "global_batch_size": settings.a_step(self._world.size),
            "train_samples": samples["train"],
            "eval_samples": samples["validation"],
            "opt_name": optimizer,
            "opt_base_learning_rate": settings.rate(self._world.size),
            "opt_learning_rate_warmup_epochs": settings.warmup,
            "sl_learning_rate_of_one": settings.learning_rate,
            "sl_scaling": settings.scaling,
            "sl_target": settings.target,
            "sl_metric": workload.metric,
            "sl_evaluate_every": settings.evaluate_every,
            "sl_evaluations_after": settings.evaluations_after,
        }
        for key, value in points.items():
            self._recorder.point(key, value)
        if loose:
            self._recorder.point("sl_loose", True)
        if resumed:
            self._recorder.point("sl_resumed", resumed)
        self._recorder.begin("run_start")

    def epoch_started(self, epoch: int, step: int) -> None:
        self._recorder.begin("epoch_start", epoch_num=epoch, step=step)

    def epoch_stopped(self, epoch: int, step: int) -> None:
        self._recorder.end("epoch_stop", epoch_num=epoch, step=step)

    def moment(self, moment: Moment, rate: float) -> None:
        """Speeds and the loss of rank 0's latest batch."""
        at = {"epoch_num": moment.epoch, "step": moment.step}
        self._recorder.point("train_loss", json_number(moment.loss), **at)
        self._recorder.point("sl_learning_rate", rate, **at)
        self._recorder.point("sl_samples_per_second", moment.speeds.samples, **at)
        self._recorder.point("sl_bytes_per_second", moment.speeds.bytes, **at)
        self._recorder.point("sl_exposed_share", moment.speeds.exposed, **at)

    def evaluating(self, epoch: int, step: int) -> None:
        self._recorder.begin("eval_start", epoch_num=epoch, step=step)

    def evaluated(self, found: dict[str, float], epoch: int, step: int, standing: dict[str, Any]) -> None:
        """The validation's numbers: `eval_accuracy`, `eval_loss` and so on; and all that it took to get there."""
        for key, value in found.items():
            self._recorder.point(f"eval_{key}", json_number(value), epoch_num=epoch, step=step)
        told = {**standing, "metric": json_number(standing["metric"])}
        self._recorder.point("sl_evaluation", told, epoch_num=epoch, step=step)
        self._recorder.end("eval_stop", epoch_num=epoch, step=step)

    def staleness(self, histogram: dict[str, int], step: int, workers: int) -> None:
        """How often which staleness was met so far: by rank 0 alone, or at the end by so many workers."""
        if histogram:
            self._recorder.point("sl_staleness_histogram", histogram, step=step, workers=workers)

    def steps_of_each(self, steps: list[int], lost: dict[int, str]) -> None:
        """What every worker of a loose run has done, and who is gone."""
        self._recorder.point("sl_steps", steps)
        if lost:
            self._recorder.point("sl_lost", {str(rank): reason for rank, reason in lost.items()})

    def ranks(self, table: dict[str, Any]) -> None:
        """What each rank did in the latest steps."""
        if table:
            self._recorder.point("sl_ranks", table, step=table["step"])

    def saved(self, path: str, step: int, seconds: float) -> None:
        self._recorder.point("sl_checkpoint", path, step=step, seconds=seconds)

    def concluded(
        self, outcome: dict[str, Any], totals: dict[str, float], phases: dict[str, float], tested: int | None = None
    ) -> None:
        """What came of it, and what it took on rank 0. `tested`: the step whose weights were, if not the last."""
        self._recorder.point("sl_phases", {**phases, "elapsed": outcome["elapsed"]})
        for key, value in totals.items():
            self._recorder.point(key, value)
        if outcome["time_to_target"] is not None:
            self._recorder.point("sl_time_to_target_seconds", outcome["time_to_target"])
        self._recorder.point("sl_training_seconds", outcome["seconds"])
        if outcome["test"] is not None:
            step = outcome["steps"] if tested is None else tested
            self._recorder.point(f"sl_test_{outcome['metric']}", json_number(outcome["test"]), step=step)
        status = "aborted" if outcome["stopped_by"] == "signal" else "success"
        self.stopped(status, stopped_by=outcome["stopped_by"], step=outcome["steps"])

    def stopped(self, status: str, **metadata: Any) -> None:
        """The run has ended: "success", or "aborted"."""
        self._recorder.end("run_stop", status=status, **metadata)

    def close(self) -> None:
        """Close log, scalars and trace. A second call does nothing."""
        if self._diagnoses is not None:
            self._world.events.remove(self._diagnoses)
            self._diagnoses = None
        self._recorder.close()
        if self._trace is not None:
            self._world.events.remove(self._trace)
            self._trace.close()
            self._trace = None


class _Diagnoses:
    """Hands on what the run's own events tell of its codec; the rest of a step is the trace's alone."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def write(self, event: RunEvent) -> None:
        if event.key in DIAGNOSES:
            self._recorder.point(event.key, json_number(event.value), **event.metadata)

    def close(self) -> None:
        return
