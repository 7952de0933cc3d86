"""What a run writes about itself: log.jsonl and traces (`RunLogWriter`), config.json and summary.json.

The log has MLPerf's keys where MLPerf has one, and others under `sl_`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from syncline.checkpoint.files import list_checkpoints
from syncline.events import ChromeTrace, Recorder, RunEvent, RunLog, TensorBoardSink
from syncline.parallel.expert_layers import ExpertStatistics
from syncline.reduction import Stats
from syncline.strategies import StrategyRun
from syncline.training.pipeline_run import PipelineRun
from syncline.training.progress import ProgressReport
from syncline.training.run_folder import RunFolder
from syncline.training.run_state import Outcome
from syncline.training.settings import Settings
from syncline.training.system import code_digest, code_version
from syncline.workloads.base import Workload
from syncline.world import World, broadcast, recv, send

__all__ = ["RunLogWriter", "common_clock_zero", "describe_run", "json_number", "summarize"]

CODEC_KEYS = ("sl_codec_error", "sl_codec_xi", "sl_codec_density")
"""Events of a codec that the log copies."""
CLOCK_ROUND_TRIPS = 5
"""Round trips to rank 0's clock. The shortest is used."""


class RunLogWriter(Recorder):
    """Writes rank 0's log and scalars, and every rank's trace.

    Other ranks write only a trace. Without a folder, nothing is written. The spans of single steps go to the trace
    only, because the log would become too large.
    """

    def __init__(
        self, world: World, folder: RunFolder | None, *, trace: bool = False, tensorboard: bool = False, step: int = 0
    ) -> None:
        super().__init__(world.runtime.now)
        self._world = world
        self._trace: ChromeTrace | None = None
        if folder is None:
            return
        if world.rank == 0:
            self.add(RunLog(folder.path))
            if tensorboard:
                self.add(TensorBoardSink(folder.tensorboard))
        if trace:
            zero, error = common_clock_zero(world)
            folder.path.mkdir(parents=True, exist_ok=True)
            self._trace = ChromeTrace(folder.trace(world.rank, step), world.rank, zero=zero, error=error)
            world.events.add(self._trace)

    def log_start(
        self,
        workload: Workload,
        settings: Settings,
        config: dict[str, Any],
        steps_before: int,
        asynchronous: bool = False,
    ) -> None:
        """Log the settings and the start of the run. `steps_before`: the number of steps before this attempt."""
        if settings.diagnose and self.sinks:
            self._world.events.add(self)  # see `write`
        samples = workload.splits().sizes()
        points = {
            "sl_code_version": code_version(),
            "sl_workload": workload.spec,
            "sl_workers": self._world.size,
            "sl_strategy": config.get("strategy", settings.strategy),
            "sl_codec": config.get("codec", settings.codec),
            "sl_collective": config.get("collective", settings.collective),
            "seed": settings.seed,
            "global_batch_size": settings.samples_per_step(self._world.size),
            "train_samples": samples["train"],
            "eval_samples": samples["validation"],
            "opt_name": workload.defaults.optimizer,
            "opt_base_learning_rate": settings.rate(self._world.size),
            "opt_learning_rate_warmup_epochs": settings.warmup,
            "sl_learning_rate_of_one": settings.learning_rate,
            "sl_scaling": settings.scaling,
            "sl_target": settings.target,
            "sl_metric": workload.metric,
            "sl_evaluate_every": settings.evaluate_every,
            "sl_evaluations_after": settings.evaluations_after,
        }
        if "pipeline" in config:
            points["sl_pipeline"] = {
                key: config["pipeline"][key] for key in ("schedule", "micro_batches", "replicas", "cuts")
            }
        if asynchronous:
            points["sl_loose"] = True  # the key's old name for asynchronous
        if steps_before:
            points["sl_resumed"] = steps_before
        for key, value in points.items():
            self.point(key, value)
        self.begin("run_start")

    def log_progress(self, report: ProgressReport, rate: float) -> None:
        """Log the speeds, the learning rate and the loss of rank 0's latest batch."""
        at = {"epoch_num": report.epoch, "step": report.step}
        self.point("train_loss", json_number(report.loss), **at)
        self.point("sl_learning_rate", rate, **at)
        self.point("sl_samples_per_second", report.speeds.samples, **at)
        self.point("sl_bytes_per_second", report.speeds.bytes, **at)
        self.point("sl_exposed_share", report.speeds.exposed, **at)

    def log_experts(self, layers: Mapping[str, ExpertStatistics], epoch: int, step: int) -> None:
        """Log how many tokens each expert has computed and dropped since the last time, by layer."""
        trained = {name: each for name, each in layers.items() if each.forwards}
        if trained:
            value = {name: {"tokens": each.tokens, "dropped": each.dropped} for name, each in trained.items()}
            self.point("sl_experts", value, epoch_num=epoch, step=step)

    def log_evaluation(self, measures: dict[str, float], epoch: int, step: int, costs: dict[str, Any]) -> None:
        """Log the numbers of a validation (`eval_accuracy`, `eval_loss`, …) and what the run has cost until then."""
        for key, value in measures.items():
            self.point(f"eval_{key}", json_number(value), epoch_num=epoch, step=step)
        evaluation = {**costs, "metric": json_number(costs["metric"])}
        self.point("sl_evaluation", evaluation, epoch_num=epoch, step=step)
        self.end("eval_stop", epoch_num=epoch, step=step)

    def log_staleness(self, histogram: dict[str, int], step: int, workers: int) -> None:
        """Log the staleness histogram: rank 0's during the run, that of `workers` workers at the end."""
        if histogram:
            self.point("sl_staleness_histogram", histogram, step=step, workers=workers)

    def write(self, event: RunEvent) -> None:
        """With `diagnose`: copy a codec event from the world's recorder to the log."""
        if event.key in CODEC_KEYS:
            self.point(event.key, json_number(event.value), **event.metadata)

    def log_result(
        self, outcome: Outcome, totals: dict[str, float], phases: dict[str, float], tested: int | None = None
    ) -> None:
        """Log the result and rank 0's totals. `tested` is the step of the tested weights, if it is not the last."""
        self.point("sl_phases", {**phases, "elapsed": outcome.elapsed})
        for key, value in totals.items():
            self.point(key, value)
        if outcome.time_to_target is not None:
            self.point("sl_time_to_target_seconds", outcome.time_to_target)
        self.point("sl_training_seconds", outcome.seconds)
        if outcome.test is not None:
            step = outcome.steps if tested is None else tested
            self.point(f"sl_test_{outcome.metric}", json_number(outcome.test), step=step)
        status = "aborted" if outcome.stopped_by == "signal" else "success"
        self.end("run_stop", status=status, stopped_by=outcome.stopped_by, step=outcome.steps)

    def close(self) -> None:
        """Close log, scalars and trace. A second call does nothing."""
        self._world.events.remove(self)
        super().close()
        if self._trace is not None:
            self._world.events.remove(self._trace)
            self._trace.close()
            self._trace = None


def describe_run(
    workload: Workload, settings: Settings, run: StrategyRun | PipelineRun, predicted: Mapping[str, float] | None
) -> dict[str, Any]:
    """The content of config.json: the settings, and what `auto` has chosen."""
    workers = run.world.size
    return {
        **workload.describe(),
        **asdict(settings),
        "workers": workers,
        "loose": run.asynchronous,  # the key's old name for asynchronous
        "samples_a_step": settings.samples_per_step(workers),
        "scaled_learning_rate": settings.rate(workers),
        "code_version": code_version(),
        "code_digest": code_digest(),
        "input": _describe_input(workload, run.model),
        "optimizer": _describe_optimizer(run.optimizer),
        "predicted": predicted,
        "run": run.config,
    }


def _describe_input(workload: Workload, model: nn.Module) -> dict[str, Any]:
    """Shape and dtype of one sample, and the dtypes of the parameters."""
    first = torch.as_tensor(workload.splits().train[0][0])
    dtypes = sorted({_dtype_name(parameter.dtype) for parameter in model.parameters()})
    return {"shape": list(first.shape), "dtype": _dtype_name(first.dtype), "parameters": dtypes}


def _describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """The class, and the options of the first parameter group."""
    group = optimizer.param_groups[0]
    plain = {key: value for key, value in group.items() if value is None or isinstance(value, (bool, int, float, str))}
    return {"class": type(optimizer).__name__, **plain}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def summarize(
    outcome: Outcome,
    folder: RunFolder,
    config: Mapping[str, Any],
    stats: Stats,
    lost: Mapping[int, str],
    error: BaseException | None = None,
) -> dict[str, Any]:
    """The content of summary.json: the result for scripts. With `error`, `outcome` is the state at the error."""
    target = config["target"]
    aborted = error is not None or outcome.stopped_by == "signal"
    return {
        "status": "aborted" if aborted else "success",
        "stopped_by": None if error is not None else outcome.stopped_by,
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "lost": {str(rank): reason for rank, reason in lost.items()},
        "workload": config["workload"],
        "workers": config["workers"],
        "seed": config["seed"],
        **{key: config["run"].get(key) for key in ("strategy", "codec", "collective")},
        "metric": outcome.metric,
        "test": json_number(outcome.test),
        "validation": json_number(outcome.validation),
        "target": target,
        "target_reached": None if target is None else outcome.time_to_target is not None,
        "time_to_target_seconds": outcome.time_to_target,
        "epochs": outcome.epochs,
        "steps": outcome.steps,
        "samples": outcome.samples,
        "training_seconds": outcome.seconds,
        "elapsed_seconds": outcome.elapsed,
        "bytes_logical": stats.bytes_logical,
        "bytes_wire": stats.bytes_wire,
        "folder": str(folder.path.absolute()),
        "log": str(folder.log.absolute()),
        "checkpoint": _newest_checkpoint(folder.checkpoints),
        "code_version": config["code_version"],
    }


def json_number(value: Any) -> Any:
    """A value that JSON can hold: NaN and infinity become strings.

    >>> json_number(math.nan), json_number(0.5)
    ('nan', 0.5)
    """
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _newest_checkpoint(folder: Path) -> str | None:
    names = list_checkpoints(folder)
    return str((folder / names[-1].name).absolute()) if names else None


def common_clock_zero(world: World) -> tuple[float, float]:
    """The common start of all traces on this rank's clock, and its maximum error, in seconds. Every rank calls it.

    Each rank in turn asks rank 0 for the time. Rank 0 reads its clock between the
    question and the answer, so the error is at most half of the round trip.

    >>> import syncline as sl
    >>> zeros = sl.simulate(lambda world: common_clock_zero(world)[0], ranks=3).results
    >>> max(zeros) - min(zeros) < 1e-3
    True
    """
    offset, error = 0.0, 0.0
    for rank in range(1, world.size):
        if world.rank == 0:
            _answer_time(world, rank)
        elif world.rank == rank:
            offset, error = _ask_time(world)
    zero = broadcast(torch.tensor([world.runtime.now()], dtype=torch.float64), group=world.everyone)
    return float(zero[0]) - offset, error


def _ask_time(world: World) -> tuple[float, float]:
    shortest, offset = float("inf"), 0.0
    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(CLOCK_ROUND_TRIPS):
        asked = world.runtime.now()
        send(message, to=0, group=world.everyone)
        recv(message, source=0, group=world.everyone)
        answered = world.runtime.now()
        if answered - asked < shortest:
            shortest, offset = answered - asked, float(message[0]) - (asked + answered) / 2
    return offset, shortest / 2


def _answer_time(world: World, rank: int) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(CLOCK_ROUND_TRIPS):
        recv(message, source=rank, group=world.everyone)
        message[0] = world.runtime.now()
        send(message, to=rank, group=world.everyone)
