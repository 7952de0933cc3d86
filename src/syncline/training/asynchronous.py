"""The loop's policy for asynchronous strategies: no collective from the first step to the last.

```text
worker 0   step step step step ······················ finished ─┐ over, by the leader
worker 1   step    step    step    step    step finished ───────┤   └─► checkpoint ─► the evaluator's last post
worker 2   step step ✝                                          │
           └─ channel.stop_requested()? after each step         └─ all workers that are not lost have finished
```

Workers wait for each other in three places only: before the first step, at a checkpoint that was asked for, and at the
end. The evaluator evaluates meanwhile. The leader, the lowest worker that is not lost, makes the decisions for all; it
reads the evaluator's posts at intervals and writes them into the log.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import cast

from syncline.control import poll
from syncline.errors import DivergedError, PeerLostError
from syncline.runtime import Task
from syncline.strategies import AsynchronousRun
from syncline.training.control_state import REASONS, ControlState, EvaluationPost, RoundCounter, post_staleness
from syncline.training.evaluator import Evaluator
from syncline.training.loop import SyncPolicy, Trainer
from syncline.training.run_state import AGREEING, EVALUATION, Outcome, StopReason
from syncline.transports.key_value_store import watch_program

__all__ = ["AsynchronousPolicy"]

logger = logging.getLogger("syncline")

EVALUATORS = "SYNCLINE_EVALUATORS"
"""The environment variable with the number of evaluators that the launcher has started."""
EVALUATOR = "evaluator"
"""The launcher's name for the process that evaluates."""
CHECK_EVERY_S = 0.2
"""Interval between two checks of a working worker: the loss, the evaluator's posts, the evaluator itself."""


class AsynchronousPolicy(SyncPolicy):
    """Workers inform each other by posts on the control channel. A round is a step of all workers."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.state, self.settings = trainer, trainer.state, trainer.settings
        self.world, self.workload = trainer.world, trainer.workload
        assert isinstance(trainer.attached, AsynchronousRun), "an asynchronous strategy has such a run"
        self.run = trainer.attached
        self.channel = self.run.control_channel()
        self.control = ControlState(self.channel)
        self.counter = RoundCounter(trainer.length, trainer.batch, self.world.size)
        self.evaluator: Task | None = None
        """This worker's evaluator, if it evaluates."""
        self.evaluator_silent = False
        self.evaluator_failure = (
            watch_program(EVALUATOR, self.world.transport.timeout) if self.has_evaluator_process else None
        )
        """Returns how the evaluator process has failed, from the launcher; None while it has not."""
        self.checked_at = trainer.now()
        self.logged_evaluations = 0
        self.saved_together = -1
        """This worker's steps at the last checkpoint that all saved together."""

    # Start.

    @property
    def has_evaluator_process(self) -> bool:
        """Whether the launcher has started a process that evaluates. Simulated ranks have no launcher."""
        return os.environ.get(EVALUATORS, "0") != "0" and not self.world.transport.timing.virtual

    def after_load(self) -> None:
        own = self.run.loop_state
        if own:  # this worker's own place; the rest is rank 0's
            for key in ("epoch", "step", "samples", "position"):
                setattr(self.state, key, own[key])
            self.trainer.first_step = self.trainer.saved_step = self.state.step

    def prepare(self) -> None:
        """Wait for the evaluator process: otherwise it would not know how long the run has trained."""
        if self.has_evaluator_process:
            self._wait(
                "the evaluator process to be ready",
                lambda: self.control.ready or self._evaluator_loss() is not None,
            )
            self.world.barrier()

    def begin(self) -> None:
        self.channel.post("begins", [self.world.rank, self.trainer.attached.stats.steps])
        if self.world.rank == 0:
            start = self._start_values()
            self.channel.post("start", start)
            if not self.has_evaluator_process:
                self._start_evaluator(start)

    def _start_values(self) -> list[float]:
        state, pacer = self.state, self.trainer.pacer
        reached = math.nan if state.time_to_target is None else state.time_to_target
        seconds_per_sample = math.nan if pacer is None else pacer.seconds_a_sample
        return [self.trainer.clock.elapsed, state.evaluated, reached, state.since_target, seconds_per_sample]

    # The evaluator.

    def _start_evaluator(self, start: Sequence[float]) -> None:
        """Run the evaluator as a task of this worker."""
        evaluator = Evaluator(
            self.channel,
            self.workload,
            self.settings,
            self.workload.model(self.settings.seed).to(self.world.device),
            workers=self.world.size,
            runtime=self.world.runtime,
            timeout=self.world.transport.timeout,
            clock=lambda: self.trainer.clock.elapsed,
            start=start,
        )
        self.evaluator = self.world.runtime.spawn(evaluator.run, name="evaluator")

    def _evaluator_loss(self) -> str | None:
        """How the evaluator was lost; None if no loss is known."""
        rank = self.control.evaluator
        if rank is None and self.evaluator_failure is not None:
            silent = f"it has posted nothing for {self.world.transport.timeout:g} s" if self.evaluator_silent else None
            return self.evaluator_failure() or silent
        return self.world.lost.get(0 if rank is None else rank)

    def _replace_evaluator(self) -> None:
        """If the evaluator is lost, the leader replaces it."""
        if self.evaluator is not None or self.world.rank != self.writer:
            return
        loss = self._evaluator_loss()
        if loss is None:
            return
        self._read_posts()
        logger.warning("the evaluator is lost (%s): rank %d evaluates from now on", loss, self.world.rank)
        self.channel.post("evaluator", [self.world.rank])
        self._start_evaluator(self._start_values())

    # Steps.

    def stop_reason(self) -> StopReason | None:
        if self.state.epoch >= cast(int, self.settings.epochs):
            return "epochs"
        if self.state.step >= self.trainer.total:
            return "steps"
        return "signal" if self._stop_requested() else None

    def between_steps(self, samples: int) -> StopReason | None:
        if self.trainer.now() - self.checked_at >= CHECK_EVERY_S:
            self._check()
        if self.state.step >= self.trainer.total:
            return "steps"
        if self._stop_requested():
            return "signal"
        self._checkpoint()
        return None

    def after_epoch(self, reason: StopReason | None) -> StopReason | None:
        if reason is not None:
            return reason
        self._checkpoint()
        return self.stop_reason()

    def on_divergence(self) -> None:
        self.channel.request_stop()  # the weights are broken, so no worker need continue

    def _stop_requested(self) -> bool:
        """Whether any worker or the evaluator wants the run to stop. A worker that is asked informs the others."""
        if self.channel.stop_requested():
            return True
        if self.trainer.stop is None or not self.trainer.stop():
            return False
        self.channel.post("signal", [self.world.rank])
        self.channel.request_stop()
        return True

    def _check(self) -> None:
        """Check that the loss is finite; on the leader, read the posts and check the evaluator."""
        loss = 0.0 if self.trainer.loss is None else float(self.trainer.loss)
        if self.settings.check_finite and not math.isfinite(loss):
            rank = self.world.rank
            raise DivergedError(f"the loss of rank {rank} is {loss}", rank=rank, step=self.state.step)
        if self.world.rank == self.writer:
            self._read_posts()
            self._replace_evaluator()
            if self.evaluator is not None and self.evaluator.done():
                self.evaluator.join()  # raises its error
        self.checked_at = self.trainer.now()

    def _read_posts(self) -> None:
        self.control.read()
        for post in self.control.evaluations[self.logged_evaluations :]:
            self.logged_evaluations += 1
            self._log_evaluation(post)

    def _log_evaluation(self, post: EvaluationPost) -> None:
        trainer, stats = self.trainer, self.trainer.attached.stats
        step = post.rounds // self.world.size
        epoch = max(1, -(-step // self.counter.epoch))
        measures = {"loss": post.loss, self.workload.metric: post.metric}
        trainer.log.begin("eval_start", epoch_num=epoch, step=step)
        trainer.record_evaluation(
            measures, post.metric, epoch, step, elapsed=post.elapsed, samples=post.samples,
            staleness=stats.staleness_mean,
        )  # fmt: skip
        trainer.log.log_staleness(stats.staleness_histogram, step, workers=1)
        self.state.evaluated = post.rounds

    # Waiting for the other workers.

    @property
    def living(self) -> list[int]:
        """The workers that are not lost."""
        lost = self.world.lost
        return [rank for rank in range(self.world.size) if rank not in lost or rank == self.world.rank]

    @property
    def writer(self) -> int:
        """The leader: the lowest worker that is not lost."""
        return self.living[0]

    def _wait(self, what: str, done: Callable[[], bool]) -> None:
        """Read the channel until `done`. A step or post of any worker restarts the timeout."""
        now, timeout = self.trainer.now, self.world.transport.timeout
        since, before = now(), (self.control.since, self.channel.steps())
        for _ in poll(self.world.runtime):
            self._read_posts()
            if done():
                return
            if self.trainer.total:  # the run has started
                self._replace_evaluator()
            progress = (self.control.since, self.channel.steps())
            if progress != before:
                since, before = now(), progress
            if now() - since > timeout:
                finished, lost = sorted(self.control.finished), sorted(self.world.lost)
                raise PeerLostError(
                    f"rank {self.world.rank} has waited {timeout:g} s for {what}, and no worker took a step or posted "
                    f"meanwhile (steps: {progress[1]}, finished: {finished}, lost: {lost})",
                    pending=what,
                    seconds=now() - since,
                )

    def _checkpoint(self) -> None:
        """If a checkpoint is due, wait until every worker that is not lost has taken as many steps, and save.

        No worker waits inside a step for one that waits here: a strategy waits only for earlier steps. So steps are
        counted, not rounds, because a worker without data has no step in the last round. A worker that was asked to
        stop does not take part, and then there is no checkpoint.
        """
        trainer, every = self.trainer, self.settings.checkpoint_every
        steps = trainer.attached.stats.steps
        if not every or steps % every or steps == self.saved_together or trainer.folder is None:
            return
        if steps >= trainer.total:
            return
        self.saved_together = steps
        with trainer.clock_paused():
            with trainer.events.span(AGREEING, lane="compute", what="waits for a checkpoint"):
                self.channel.post("arrived", [self.world.rank, steps])
                self._wait(f"the others to save after step {steps}", lambda: self._checkpoint_decided(steps))
            if self.control.decided.get(steps, False):
                self._save(steps)

    def _checkpoint_decided(self, steps: int) -> bool:
        """Whether the leader has decided if all save here. Workers that have finished do not take part."""
        self._read_posts()
        living = self.living
        if steps in self.control.decided or any(self.control.begins.get(rank, -1) >= steps for rank in living):
            return True  # a resumed run: some workers are beyond this step already
        if self.world.rank != living[0]:
            return living[0] in self.control.finished
        complete = self.control.arrived.get(steps, set()).issuperset(living)
        if complete or self.channel.stop_requested() or not self.control.finished.keys().isdisjoint(living):
            self.channel.post("decided", [steps, float(complete)])
            self._read_posts()
        return steps in self.control.decided

    def _save(self, step: int) -> None:
        """Save together with all workers that are not lost. If that fails, a warning says so and the run continues."""
        assert self.trainer.folder is not None, "a checkpoint is due only with a folder"
        self.run.loop_state = asdict(self.state)
        try:
            self.trainer.save_as(self.trainer.folder, step)
        except PeerLostError as error:
            logger.warning("no checkpoint after %d steps: %s", self.state.step, error)

    # The end.

    def conclude(self, reason: StopReason) -> Outcome:
        trainer, control = self.trainer, self.control
        trainer.clock.pause()
        post_staleness(self.channel, self.world.rank, trainer.attached.stats.staleness_counts)
        self.channel.post("finished", [self.world.rank, self.state.step])
        self.channel.finish()
        with trainer.events.span(AGREEING, lane="compute", what="waits for the others to finish"):
            self._wait("the others to finish", lambda: self._run_over(reason))
        assert control.over is not None, "the wait above ends with it"
        ended, step = control.over
        if step is not None:
            self._save(step)
        with trainer.events.span(EVALUATION, lane="compute", what="waits for the last evaluation"):
            self._await_test()
        if self.evaluator is not None and not self.evaluator.join(self.world.transport.timeout):
            logger.warning("the evaluator has posted its last result and does not end")
        if ended != "signal" and self.state.target_confirmed(self.settings.evaluations_after):
            ended = "target"
        assert control.test is not None, "the wait above ends with it"
        return self._result(ended, control.test[0])

    def _run_over(self, reason: StopReason) -> bool:
        """Whether the run is over; the leader posts it when all workers that are not lost have finished."""
        self._read_posts()
        living, control = self.living, self.control
        if control.over is None and self.world.rank == living[0] and control.finished.keys() >= set(living):
            stopped: StopReason = "target" if control.target and not control.signal else "signal"
            ended = stopped if reason == "signal" or control.signal else reason
            save = self.trainer.folder is not None and self.settings.checkpoint_every != 0
            self.channel.post("over", [REASONS.index(ended), float(save), self.state.step])
            self._read_posts()
        return control.over is not None

    def _await_test(self) -> None:
        """Wait for the evaluator's last post. An evaluator process without posts for the whole timeout is lost."""
        what = "the evaluator to test the final weights"
        try:
            self._wait(what, self._tested)
        except PeerLostError:
            if self.evaluator is not None or self.evaluator_failure is None:
                raise
            self.evaluator_silent = True
            self._wait(what, self._tested)

    def _tested(self) -> bool:
        if self.control.test is None and self.evaluator is not None and self.evaluator.done():
            self.evaluator.join()  # raises its error
        return self.control.test is not None

    def _result(self, reason: StopReason, test: float) -> Outcome:
        trainer, steps = self.trainer, self.channel.steps()
        outcome = replace(trainer.outcome(reason, test), samples=self.counter.samples(steps))
        trainer.log.point("sl_steps", steps)
        if self.world.lost:
            trainer.log.point("sl_lost", {str(rank): reason for rank, reason in self.world.lost.items()})
        counts: Counter[int] = Counter()
        for of_worker in self.control.staleness.values():
            counts.update(of_worker)
        histogram = {str(staleness): counts[staleness] for staleness in sorted(counts)}
        trainer.log.log_staleness(histogram, self.state.step, workers=len(self.control.staleness))
        evaluated = self.state.evaluated
        tested = self.state.step if evaluated < 0 else evaluated // self.world.size
        trainer.write_result(outcome, self, tested)
        return outcome
