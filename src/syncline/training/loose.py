"""The loop where every worker goes at its own pace: no collective from the first step to the last.

```text
worker 0   step step step step ······················ finished ─┐ over, by the lowest worker that lives
worker 1   step    step    step    step    step finished ───────┤   └─► checkpoint ─► the evaluator's last word
worker 2   step step ✝                                          │
           └─ board.stop_requested()? after each step                 └─ all that live have finished
```

Workers meet in three places alone: before the first step, at a checkpoint that was asked for, and at the end. What is
evaluated meanwhile is the evaluator's; rank 0 reads its posts now and then and writes them into the log.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from syncline.errors import DivergedError, PeerLostError
from syncline.runtime import Task
from syncline.strategies import AsynchronousRun, StrategyRun
from syncline.strategies.control import ControlChannel
from syncline.training.basis import Basis, Schedule
from syncline.training.evaluator import Evaluator
from syncline.training.folder import RunFolder
from syncline.training.notes import REASONS, Evaluation, Notes, Tally, post_staleness
from syncline.training.outcome import At, Outcome, Reason
from syncline.training.phases import AGREEING, DATA, EVALUATION, phases
from syncline.training.progress import duration
from syncline.training.settings import Settings
from syncline.transports.store import watch_program
from syncline.workloads.base import Workload

__all__ = ["LooseLoop"]

logger = logging.getLogger("syncline")

EVALUATORS = "SYNCLINE_EVALUATORS"
"""How many evaluators the launcher has started."""
EVALUATOR = "evaluator"
"""What the launcher calls the process that evaluates."""
LOOK = 0.2
"""Seconds between two looks at the posts, at least."""
NOTE = 5.0
"""Seconds between two notes of speeds in the log."""
SHORTEST = 1e-3
"""Seconds between two looks of somebody who has nothing else to do; they grow up to `LOOK`."""


class LooseLoop(Basis):
    """One worker of a loose run. A round is a step of all; this worker counts its own."""

    def __init__(
        self,
        workload: Workload,
        settings: Settings,
        run: StrategyRun,
        scheduler: Schedule | None,
        place: RunFolder | None,
    ) -> None:
        super().__init__(workload, settings, run, scheduler, place)
        assert isinstance(run, AsynchronousRun), "an asynchronous strategy has such a run"
        self.asynchronous_run = run
        self.board: ControlChannel = run.control_channel()
        self.notes = Notes(self.board)
        self.tally = Tally(self.length, self.batch, self.world.size)
        self.evaluator: Task | None = None
        """This worker's evaluator, if it evaluates."""
        self.evaluator_silent = False
        self.ended_badly = watch_program(EVALUATOR, self.world.transport.timeout) if self.apart else None
        """Returns how the evaluator's process has failed, from the launcher; None while it has not."""
        self.looked = self.now()
        self.told = 0
        """Evaluations that are in the log."""
        self.met = -1
        """This worker's steps at the last checkpoint that all saved together."""

    def run(self, stop: Callable[[], bool] | None) -> Outcome:
        """Train until this worker's epochs are over or somebody stops the run; then wait for the others."""
        self.total = self.steps_in_all()
        self.attached.expect(self.total)
        self.moment()  # speeds are taken from here on
        self.board.post("begins", [self.world.rank, self.attached.stats.steps])
        if self.world.rank == 0:
            self._begin()
        try:
            reason = self._train(stop)
        except DivergedError:
            self.board.request_stop()  # nobody need go on with what is broken
            raise
        self.watch.pause()
        post_staleness(self.board, self.world.rank, self.attached.stats.staleness_counts)
        self.board.post("finished", [self.world.rank, self.at.step])
        self.board.finish()
        return self._end(reason)

    # Before.

    @property
    def apart(self) -> bool:
        """Whether the launcher has started a process to evaluate. Of simulated ranks no launcher knows."""
        return os.environ.get(EVALUATORS, "0") != "0" and not self.world.transport.timing.virtual

    def prepare(self) -> None:
        """Nobody begins before the evaluator's process is there: it could not tell how long the run has gone on."""
        if not self.apart:
            return
        self._wait("the evaluator's process to be ready", lambda: self.notes.ready or self._evaluator_end() is not None)
        self.world.barrier()

    def _begin(self) -> None:
        """Tell the evaluator that the clock runs; be it, where the launcher has started none."""
        start = self._start_values()
        self.board.post("start", start)
        if not self.apart:
            self._evaluate_here(start)

    def _start_values(self) -> list[float]:
        at = self.at
        reached = math.nan if at.time_to_target is None else at.time_to_target
        a_sample = math.nan if self.pace is None else self.pace.seconds_a_sample
        return [self.watch.elapsed, at.evaluated, reached, at.since_target, a_sample]

    # Which worker evaluates.

    def _evaluate_here(self, start: Sequence[float]) -> None:
        """Run the evaluator as a task of this worker."""
        evaluator = Evaluator(
            self.board,
            self.workload,
            self.settings,
            self.workload.model(self.settings.seed).to(self.world.device),
            workers=self.world.size,
            runtime=self.world.runtime,
            timeout=self.world.transport.timeout,
            clock=lambda: self.watch.elapsed,
            start=start,
        )
        self.evaluator = self.world.runtime.spawn(evaluator.run, name="evaluator")

    def _evaluator_end(self) -> str | None:
        """How the evaluator was lost; None as long as no loss is known."""
        rank = self.notes.evaluator
        if rank is None and self.ended_badly is not None:
            silent = f"it has said nothing for {self.world.transport.timeout:g} s" if self.evaluator_silent else None
            return self.ended_badly() or silent
        return self.world.lost.get(0 if rank is None else rank)

    def _replace_evaluator(self) -> None:
        """If the evaluator is lost, the lowest worker that is left replaces it."""
        if self.evaluator is not None or self.world.rank != self.living[0]:
            return
        end = self._evaluator_end()
        if end is None:
            return
        self._read()
        logger.warning("the evaluator is lost (%s): rank %d evaluates from now on", end, self.world.rank)
        self.board.post("evaluator", [self.world.rank])
        self._evaluate_here(self._start_values())

    # Steps.

    def _train(self, stop: Callable[[], bool] | None) -> Reason | None:
        """Why this worker takes no more steps; None where somebody has stopped all."""
        while self.at.epoch < cast(int, self.settings.epochs):
            if self.at.step >= self.total:
                return "steps"
            if self._asked(stop) or self._epoch(stop):
                return None if self.at.step < self.total else "steps"
            self.at.epoch, self.at.position = self.at.epoch + 1, 0
        return "epochs"

    def _epoch(self, stop: Callable[[], bool] | None) -> bool:
        """The rest of an epoch; whether it was broken off."""
        self.journal.epoch_started(self.at.epoch + 1, self.at.step)
        self.attached.model.train()
        self.watch.start()
        broken = False
        for batch in self._batches():
            self.step(batch)
            self.count()
            if self.at.position < self.length and self._between_steps(stop):
                broken = True
                break
        if not broken and self.at.position < self.length:
            self.count()  # a round that had nothing for this worker
        self.note()
        self.watch.pause()
        self.journal.epoch_stopped(self.at.epoch + 1, self.at.step)
        if not broken:
            self._checkpoint()
        return broken

    def _batches(self) -> Iterator[Any]:
        batches = iter(self.reader)
        while True:
            with self.events.span(DATA, lane="data", what="next batch"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _between_steps(self, stop: Callable[[], bool] | None) -> bool:
        """Look around; whether to stop here."""
        if self.progress.due():
            self.progress.show(self.moment())
        if self.now() - self.noted >= NOTE:
            self.note()
        if self.now() - self.looked >= LOOK:
            self._look()
        if self.at.step >= self.total or self._asked(stop):
            return True
        self._checkpoint()
        return False

    def _asked(self, stop: Callable[[], bool] | None) -> bool:
        """Whether anybody wants the run to stop. Who is asked himself tells the others."""
        if self.board.stop_requested():
            return True
        if stop is None or not stop():
            return False
        self.board.post("signal", [self.world.rank])
        self.board.request_stop()
        return True

    def _look(self) -> None:
        """Now and then: is the loss a number, and what has the evaluator found?"""
        loss = 0.0 if self.loss is None else float(self.loss)
        if self.settings.check_finite and not math.isfinite(loss):
            rank = self.world.rank
            raise DivergedError(f"the loss of rank {rank} is {loss}", rank=rank, step=self.at.step)
        if self.world.rank == self.living[0]:
            self._read()
            self._replace_evaluator()
            if self.evaluator is not None and self.evaluator.done():
                self.evaluator.join()  # raises what it raised
        self.looked = self.now()

    def _read(self) -> None:
        self.notes.read()
        for one in self.notes.evaluations[self.told :]:
            self.told += 1
            self._evaluated(one)

    def _evaluated(self, one: Evaluation) -> None:
        """Write down what the evaluator has found."""
        at, metric, stats = self.at, self.workload.metric, self.attached.stats
        step = one.rounds // self.world.size
        epoch = max(1, -(-step // self.tally.epoch))
        found = {"loss": one.loss, metric: one.metric}
        self.journal.evaluating(epoch, step)
        self.journal.evaluated(
            found, epoch, step, self.standing(one.metric, one.elapsed, one.samples, stats.staleness_mean)
        )
        self.journal.staleness(stats.staleness_histogram, step, workers=1)
        target = self.settings.target
        at.judge(one.metric, one.elapsed, target is not None and self.workload.reached(one.metric, target))
        at.evaluated = one.rounds
        rest = "" if metric == "loss" else f", loss {one.loss:.4g}"
        self.progress.say(
            f"epoch {epoch}/{self.settings.epochs}: validation {metric} {one.metric:.4g}{rest}, "
            f"after {duration(one.elapsed)}"
        )

    # Meeting.

    @property
    def living(self) -> list[int]:
        """The workers that are not known to be lost. The lowest is the leader: it makes the decisions for all."""
        gone = self.world.lost
        return [rank for rank in range(self.world.size) if rank not in gone or rank == self.world.rank]

    @property
    def writer(self) -> int:
        return self.living[0]

    def _wait(self, what: str, done: Callable[[], bool]) -> None:
        """Look at the board until `done`; whoever takes steps or says something proves that it lives."""
        gap, since, before = SHORTEST, self.now(), (self.notes.since, self.board.steps())
        while not done():
            self.world.runtime.sleep(gap)
            gap = min(1.5 * gap, LOOK)
            self._read()
            if self.total:  # the run has begun
                self._replace_evaluator()
            known = (self.notes.since, self.board.steps())
            if known != before:
                since, before = self.now(), known
            patience = self.world.transport.timeout
            if self.now() - since > patience:
                finished, lost = sorted(self.notes.finished), sorted(self.world.lost)
                raise PeerLostError(
                    f"rank {self.world.rank} has waited {patience:g} s for {what}, in which nobody took a step or said "
                    f"a word (steps: {known[1]}, finished: {finished}, lost: {lost})",
                    pending=what,
                    seconds=self.now() - since,
                )

    def _checkpoint(self) -> None:
        """If a checkpoint is due, wait until every worker that is not lost has taken as many steps, and save.

        No worker waits inside a step for one that waits here: a strategy waits only for earlier steps. So steps are
        counted, not rounds, because a worker without data takes part in a last round without a step. A worker that
        was told to stop does not take part, and then there is no checkpoint.
        """
        every, taken = self.settings.checkpoint_every, self.attached.stats.steps
        if not every or taken % every or taken == self.met or self.place is None or taken >= self.total:
            return
        self.met = taken
        running = self.watch.running
        self.watch.pause()
        with self.events.span(AGREEING, lane="compute", what="waits for a checkpoint"):
            self.board.post("arrived", [self.world.rank, taken])
            self._wait(f"the others to save after step {taken}", lambda: self._settled(taken))
        if self.notes.decided.get(taken, False):
            self._save(taken)
        if running:
            self.watch.start()

    def _settled(self, taken: int) -> bool:
        """Whether the leader has decided if all save here. Workers that have finished do not take part."""
        self._read()
        living = self.living
        if taken in self.notes.decided or any(self.notes.begins.get(rank, -1) >= taken for rank in living):
            return True  # a resumed run: some workers were beyond this step already
        if self.world.rank != living[0]:
            return living[0] in self.notes.finished
        here = self.notes.arrived.get(taken, set()).issuperset(living)
        if here or self.board.stop_requested() or not self.notes.finished.keys().isdisjoint(living):
            self.board.post("decided", [taken, float(here)])
            self._read()
        return taken in self.notes.decided

    def _save(self, step: int) -> None:
        """All workers that are not lost are here. If they cannot save, a warning says so and the run continues."""
        assert self.place is not None, "nobody saves nowhere"
        self.asynchronous_run.loop_state = asdict(self.at)
        try:
            self.save_as(self.place, step)
        except PeerLostError as error:
            logger.warning("no checkpoint after %d steps: %s", self.at.step, error)

    def load(self, source: Path, needed: bool) -> None:
        super().load(source, needed)
        if self.asynchronous_run.loop_state:  # this worker's own place; the rest is what rank 0 knew
            own = self.asynchronous_run.loop_state
            self.at = At(**{**asdict(self.at), **{key: own[key] for key in ("epoch", "step", "samples", "position")}})
            self.first = self.saved = self.at.step

    # The end.

    def _end(self, reason: Reason | None) -> Outcome:
        with self.events.span(AGREEING, lane="compute", what="waits for the others to finish"):
            self._wait("the others to finish", lambda: self._finished(reason))
        assert self.notes.over is not None, "it was waited for"
        ended, step = self.notes.over
        if step is not None:
            self._save(step)
        with self.events.span(EVALUATION, lane="compute", what="waits for the last evaluation"):
            self._await_test()
        if self.evaluator is not None and not self.evaluator.join(self.world.transport.timeout):
            logger.warning("the evaluator has said its last word and does not end")
        if ended != "signal" and self.at.satisfied(self.settings.evaluations_after):
            ended = "target"
        assert self.notes.test is not None, "the wait above ends with it"
        return self._conclude(ended, self.notes.test[0])

    def _finished(self, reason: Reason | None) -> bool:
        """Whether the run is over; the leader says so when all that live have finished."""
        self._read()
        living = self.living
        if self.notes.over is None and self.world.rank == living[0] and self.notes.finished.keys() >= set(living):
            stopped: Reason = "target" if self.notes.target and not self.notes.signal else "signal"
            ended = stopped if reason is None or self.notes.signal else reason
            keep = self.place is not None and self.settings.checkpoint_every != 0
            self.board.post("over", [REASONS.index(ended), float(keep), self.at.step])
            self._read()
        return self.notes.over is not None

    def _await_test(self) -> None:
        """Wait for the evaluator's last result. An evaluator without messages for the whole timeout counts as lost."""
        what = "the evaluator to test the final weights"
        try:
            self._wait(what, self._tested)
        except PeerLostError:
            if self.evaluator is not None or self.ended_badly is None:
                raise
            self.evaluator_silent = True
            self._wait(what, self._tested)

    def _tested(self) -> bool:
        if self.notes.test is None and self.evaluator is not None and self.evaluator.done():
            self.evaluator.join()  # raises what it raised
        return self.notes.test is not None

    def _conclude(self, reason: Reason, test: float) -> Outcome:
        at, steps = self.at, self.board.steps()
        outcome = replace(self.outcome(reason, test), samples=self.tally.samples(steps))
        self.write_config()
        stats = self.attached.stats
        totals = {**stats.as_dict(), DATA: self.events.totals.get(DATA, 0.0)}
        for key in ("steps", "sl_staleness_histogram"):
            totals.pop(key, None)
        self.journal.steps_of_each(steps, self.world.lost)
        whole: dict[int, int] = {}
        for counts in self.notes.staleness.values():
            for staleness, count in counts.items():
                whole[staleness] = whole.get(staleness, 0) + count
        told = {str(staleness): whole[staleness] for staleness in sorted(whole)}
        self.journal.staleness(told, at.step, workers=len(self.notes.staleness))
        tested = at.step if at.evaluated < 0 else at.evaluated // self.world.size
        self.journal.concluded(asdict(outcome), totals, phases(self.events.totals, stats), tested)
        self.write_summary(outcome)
        return outcome
