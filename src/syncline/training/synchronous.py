"""The loop's policy for synchronous strategies: every worker takes the same steps, and all act together."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import replace
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from syncline.errors import DivergedError
from syncline.reduction import Stats
from syncline.training.loop import SyncPolicy, Trainer
from syncline.training.run_state import AGREEING, EVALUATION, Outcome, StopReason, phases
from syncline.world import World, allgather, broadcast

__all__ = ["RankTable", "SynchronousPolicy"]

ASK_STOP_EVERY_S = 1.0
"""Approximate interval between two questions whether any rank wants the run to stop."""
MAX_STEPS_BETWEEN_ASKS = 1000
CHECKPOINT_AGE_S = 30.0
"""Age at which a checkpoint is replaced between epochs, if `checkpoint_every` is None."""
RANK_COLUMNS = ("compute", "exposed", "codec", "data")
"""Phases that the table of ranks has."""


class SynchronousPolicy(SyncPolicy):
    """Rank 0 evaluates while the others wait; stopping and saving are collectives at the same step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.state, self.settings = trainer, trainer.state, trainer.settings
        self.world, self.workload = trainer.world, trainer.workload
        self.ranks = RankTable(self.world, trainer.attached.stats)
        self.ask_at_step = 0
        """Before this step no rank asks whether to stop."""
        self.last_ask = (0, 0.0)
        """Steps and training seconds at the latest question."""

    def begin(self) -> None:
        self.last_ask = (self.state.step, self.trainer.clock.trained)

    def stop_reason(self) -> StopReason | None:
        state, target, after = self.state, self.settings.target, self.settings.evaluations_after
        if state.target_confirmed(after):
            return "target"
        validation = state.validation
        if target is not None and validation is not None and not after and self.workload.reached(validation, target):
            return "target"
        if state.epoch >= cast(int, self.settings.epochs):
            return "epochs"
        return "steps" if state.step >= self.trainer.total else None

    def between_steps(self, samples: int) -> StopReason | None:
        # In a short last step a rank may have no data and not call this. Then all act together after the epoch.
        trainer = self.trainer
        if samples < trainer.readers:
            return None
        if self.state.step >= trainer.total:
            return "steps"
        if self.settings.evaluate_every is not None and self._evaluation_due():
            with trainer.clock_paused():
                self._validate()
                trainer.attached.model.train()
            if self.stop_reason() == "target":
                return "target"
        if self.state.step >= self.ask_at_step and self._stop_requested():
            return "signal"
        if trainer.checkpoint_due():
            trainer.save()
        return None

    def after_epoch(self, reason: StopReason | None) -> StopReason | None:
        if reason == "signal":
            return reason
        reason = reason or self.stop_reason()
        old = self._validate() if reason or self._evaluation_due() else False
        reason = self.stop_reason() or reason
        if reason is None and self._stop_requested():
            reason = "signal"
        if reason is None and (old or self.trainer.checkpoint_due()):
            self.trainer.save()
        return reason

    def conclude(self, reason: StopReason) -> Outcome:
        trainer = self.trainer
        if self.settings.checkpoint_every != 0:
            trainer.save()
        measures = {} if reason == "signal" else self._evaluate(self.workload.splits().test)
        clock = trainer.clock
        with trainer.events.span(EVALUATION, lane="compute", what="waits for the result"):
            own = [measures.get(self.workload.metric, 0.0), clock.trained, clock.elapsed]
            test, seconds, elapsed = self._from_rank_0(own)
        outcome = replace(trainer.outcome(reason, test), seconds=seconds, elapsed=elapsed)
        trainer.write_result(outcome, self)
        return outcome

    def _evaluation_due(self) -> bool:
        every = self.settings.evaluate_every
        return every is None or self.state.step % every == 0

    def _stop_requested(self) -> bool:
        """Whether any rank is asked to stop. All ask again after the largest gap that a rank wants."""
        trainer = self.trainer
        if trainer.stop is None:
            return False
        steps, seconds = self.last_ask
        self.last_ask = (self.state.step, trainer.clock.trained)
        steps_per_second = (self.state.step - steps) / max(trainer.clock.trained - seconds, 1e-9)
        gap = min(MAX_STEPS_BETWEEN_ASKS, max(1, int(ASK_STOP_EVERY_S * steps_per_second)))
        with trainer.events.span(AGREEING, lane="compute", what="asks whether to stop"):
            stop, gap_of_all = self.ranks.exchange(self.state.step, [float(trainer.stop()), float(gap)])
        if self.ranks.latest:
            trainer.log.point("sl_ranks", self.ranks.latest, step=self.state.step)
        self.ask_at_step = self.state.step + int(gap_of_all)
        return bool(stop)

    def _validate(self) -> bool:
        """Evaluate on the validation split. Returns whether the last checkpoint is old, by rank 0's clock."""
        trainer, state = self.trainer, self.state
        if state.evaluated == state.step:
            return False
        epoch = state.epoch + (state.position > 0)  # after a complete epoch, that epoch
        trainer.log.begin("eval_start", epoch_num=epoch, step=state.step)
        measures = self._evaluate(self.workload.splits().validation)
        old = self.settings.checkpoint_every is None and trainer.now() - trainer.saved_at >= CHECKPOINT_AGE_S
        loss = 0.0 if trainer.loss is None else float(trainer.loss)
        with trainer.events.span(EVALUATION, lane="compute", what="waits for the result"):
            own = [measures.get(self.workload.metric, 0.0), trainer.clock.elapsed, float(old), loss]
            validation, elapsed, due, loss = self._from_rank_0(own)
        if self.settings.check_finite and not math.isfinite(loss):
            raise DivergedError(f"the loss of rank 0 is {loss}", rank=0, step=state.step)
        state.evaluated = state.step
        staleness = trainer.attached.stats.staleness
        trainer.record_evaluation(
            measures, validation, epoch, state.step, elapsed=elapsed, samples=state.samples, staleness=staleness
        )
        return bool(due)

    def _evaluate(self, dataset: Dataset[Any]) -> dict[str, float]:
        """Rank 0's measures of the weights that all agree on; empty on the other ranks."""
        trainer = self.trainer
        with trainer.events.span(EVALUATION, lane="compute", what="evaluation"), trainer.attached.agreed():
            if self.world.rank != 0:
                return {}
            if trainer.pacer is not None:
                trainer.pacer.forward(trainer.attached.members * len(cast(Sized, dataset)))
            return self.workload.evaluate(trainer.attached.model, dataset)

    def _from_rank_0(self, numbers: list[float]) -> list[float]:
        received = broadcast(torch.tensor(numbers, dtype=torch.float64), group=self.world.everyone)
        return [float(number) for number in received]


class RankTable:
    """Seconds per step of each rank, by phase, since the last exchange: a slow rank computes, the others wait."""

    def __init__(self, world: World, stats: Stats) -> None:
        self._world = world
        self._stats = stats
        self._step = 0
        self._before = [0.0] * (1 + len(RANK_COLUMNS))
        self.latest: dict[str, Any] = {}
        """The content of the log's `sl_ranks`."""

    def exchange(self, step: int, wishes: Sequence[float]) -> list[float]:
        """Exchange the table. Returns the maximum of each wish. Every rank calls it at the same step."""
        spent = phases(self._world.events.totals, self._stats)
        now = [self._world.runtime.now(), *(spent[name] for name in RANK_COLUMNS)]
        steps = step - self._step
        per_step = [max(0.0, late - early) / max(1, steps) for late, early in zip(now, self._before, strict=True)]
        own = torch.tensor([*wishes, *per_step], dtype=torch.float64)
        table = allgather(own, group=self._world.everyone).view(self._world.size, len(own))
        seconds = table[:, len(wishes) :].T.tolist()
        # The first exchange has no start time, so it makes no table.
        self.latest = (
            {"step": step, "steps": steps, "seconds": seconds[0], **dict(zip(RANK_COLUMNS, seconds[1:], strict=True))}
            if self._step and steps
            else {}
        )
        self._step, self._before = step, now
        return [float(wish) for wish in table[:, : len(wishes)].max(dim=0).values]
