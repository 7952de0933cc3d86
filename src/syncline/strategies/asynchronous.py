"""Runs in which each worker trains at its own pace, and the calls in which their workers wait for each other.

Between the first step and the last, neither the run nor the loop around it calls a collective of the world, because a
killed worker would break it. Workers wait for each other by posts on the control channel (`wait_for_all`).

In an elastic job workers may join (`admits_newcomers`). The workers are then known by their numbers in the job, and
claim the batches of an epoch one by one (`data/claims.py`). A newcomer is alone until its first loop that has data::

    newcomer   sl.distribute()     for batch in shard: ── enter() ── JOINED in the log ── weights ── trains
               loads are its own                          at the epoch that the others read

It does not enter the team of the world: its collectives are its own.

If the launcher ends the job, all workers save one checkpoint and leave. The first one to know stops the epoch, which
then no worker passes::

    worker 0   step 7 │ stops the epoch, waits ───────────────┐ save, leave
    worker 1   step 9 │ finds it stopped, waits ──────────────┤ save, leave
    worker 2   waits at the end of the epoch, finds it stopped ┘ save, leave
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from syncline.control import ControlBarrier, ControlChannel, WorkerMembership, poll
from syncline.data import Epochs, MicroBatches, Sharded
from syncline.errors import IncompatibleError, JobEndedError, PeerLostError, UnsupportedError
from syncline.state_trees import decode, encode
from syncline.strategies.base import StrategyRun, all_tensors
from syncline.transports import Transport
from syncline.world import DataPlace, Group, TeamChange, barrier

__all__ = ["AsynchronousRun"]

logger = logging.getLogger("syncline")

PUBLISH_EVERY_S = 1.0
"""Seconds between two publications of the learning rates, for newcomers."""
CHECK_REQUESTS_EVERY_S = 1.0
"""Seconds between two checks whether the launcher asks this worker to leave, while it waits at the end of an epoch."""
SCHEDULE_KEY = "schedule"
NOT_PUBLISHED = ("params",)


class AsynchronousRun(StrategyRun):
    """A subclass calls `open_channel` in `setup`, with a function that reads the weights that all workers share."""

    loop_state: Mapping[str, Any] = {}
    """Plain values of the training loop on this worker, for checkpoints."""
    saving_team: Group | None = None
    """While a checkpoint is written: the workers that write it; else None."""

    admits_newcomers = False
    """Whether workers can join a job with this strategy."""
    membership: WorkerMembership | None = None
    """In an elastic job that admits newcomers: the workers that are present."""

    _leaves = False
    """Whether this worker leaves an elastic job alone: it waits for no other at its end, and no other for it."""
    _saved_at_end = False
    """Whether this worker has saved the last checkpoint of the job."""
    _channel: ControlChannel
    _published = -PUBLISH_EVERY_S
    _requests_checked = -CHECK_REQUESTS_EVERY_S

    def setup(self) -> None:
        super().setup()
        if self.joining and self.elastic_refusal:
            raise IncompatibleError(self.elastic_refusal)

    # Contract: workers that join.

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Inside, this worker waits for others: no other worker waits for its next step."""
        yield

    @property
    def delays_others(self) -> bool:
        """Whether other workers may wait for a step of this one."""
        return False

    def flush_steps(self) -> None:
        """Make all steps of this worker part of what survives its loss."""

    def note_last_steps(self) -> None:
        """Before the last checkpoint of the job: report what is in it of this worker's steps."""
        self.flush_steps()
        self.note_trained()

    @property
    def saves_at_end(self) -> bool:
        """Whether the workers can save a checkpoint together at any step."""
        return self.membership is not None

    def leave_checkpoint(self) -> None:
        """This worker leaves without waiting for the others: save what it can save alone. By default nothing."""
        self.warn_of_no_checkpoint()

    def prepare_to_join(self) -> None:
        """In a newcomer: called before the others count it among them."""

    def enter_training(self) -> None:
        """In a newcomer: take the weights of the others, and take part."""

    @property
    def _other_runs(self) -> list[AsynchronousRun]:
        """In an elastic job: the other runs that train in this process, such as the second one of a GAN."""
        runs = [run for run in self.world.runs if isinstance(run, AsynchronousRun)]
        return [run for run in runs if run is not self and run.membership is not None]

    @property
    def _delaying_runs(self) -> list[AsynchronousRun]:
        """The runs of this process in which other workers may wait for a step of this one."""
        others = [run for run in self.world.runs if isinstance(run, AsynchronousRun) and run is not self]
        return [run for run in (*others, self) if run.membership is not None or run.delays_others]

    @contextmanager
    def _idle_in(self, runs: Sequence[AsynchronousRun]) -> Iterator[None]:
        """Inside, no other worker waits for the next step of this one in these runs."""
        with ExitStack() as stack:
            for run in runs:
                stack.enter_context(run.idle())
            yield

    def pause_steps_for(self, what: str) -> None:
        """Before a call that waits for all workers, such as a collective: wait until no worker steps any more."""
        if self.membership is None and not self.joining and self._delaying_runs:
            self.wait_for_all(what)

    def idle_in_all_runs(self) -> AbstractContextManager[None]:
        """Inside, no other worker waits for the next step of this one, in any run.

        Unless workers may join, all wait for each other once more before one of them steps: a worker that is not back
        yet would be left out of that step.
        """
        return self._idle_in(self._delaying_runs)

    def _flush_all_runs(self) -> None:
        for run in (self, *self._other_runs):
            run.flush_steps()

    # The channel.

    def open_channel(
        self,
        load_weights: Callable[[nn.Module], None],
        transport: Transport | None = None,
        on_stop: Callable[[], None] = lambda: None,
        on_finish: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the control channel. Every worker calls it. `transport` has the store, by default the world's."""
        world = self.world
        store = world.control_store() if transport is None else transport.control_store()
        self._channel = ControlChannel(
            store,
            world.runtime,
            self.strategy.name,
            world.size if world.elastic is None else world.elastic.launched,
            world.rank if world.elastic is None else world.elastic.limits.member,
            load_weights=load_weights,
            on_stop=on_stop,
            on_finish=on_finish,
        )
        elastic = world.elastic
        if elastic is not None and self.admits_newcomers:
            member, timeout_s = elastic.limits.member, world.transport.timeout
            self.membership = WorkerMembership(self._channel, elastic.connector, member, elastic.launched, timeout_s)
            self._channel.on_refresh = self._refresh_claims if self.on_resize is None else self.refresh_membership

    def control_channel(self) -> ControlChannel:
        return self._channel

    @cached_property
    def _barrier(self) -> ControlBarrier:
        return ControlBarrier(self.world, self.control_channel())

    def wait_for_all(self, what: str, steps_before: bool = True) -> None:
        """Wait for the other workers. `what` names what all of them do, for messages.

        Workers take steps until they call this, and wait in none of them for a worker that has called it.
        `steps_before=False`: no worker has taken a step since all have waited for each other. It saves messages.

        While a checkpoint is written these are the workers that write it. If one is lost then, all others raise a
        `PeerLostError` and begin again without it.
        """
        if self.joining:
            return  # alone until the first loop over data
        if self.membership is not None:
            with self.idle_in_all_runs():
                self.membership.wait(what)
        elif self.saving_team is None:
            delaying = self._delaying_runs if steps_before else []
            with self._idle_in(delaying):
                self._barrier.wait(what)
            if delaying:  # no worker steps before all count again
                self._barrier.wait(what)
        elif self.saving_team.size > 1:
            barrier(self.saving_team)

    def exchange(self, what: str, text: str) -> dict[int, str]:
        """In an elastic job: wait for the other workers. Returns the texts of all of them, by worker.

        They are the same on all workers. `what` names what all of them do, for messages.
        """
        assert self.membership is not None
        if self.joining:
            return {self.membership.member: text}
        with self.idle_in_all_runs():
            return self.membership.exchange(what, text)

    def raise_if_declared_lost(self) -> None:
        """Raise if this worker was declared lost. It may have been frozen, and the others continue without it."""
        if (why := self.world.lost.get(self.communicator.rank)) is not None:
            raise PeerLostError(
                f"worker {self.communicator.rank} was declared lost ({why}): the others continue without it",
                peer=self.communicator.rank,
            )

    def shown_tensors(self) -> dict[str, Tensor]:
        return all_tensors(self.model)

    def show_agreed(self) -> None:
        self.wait_for_all("enter agreed()")  # no worker steps from now on
        self.control_channel().load_weights(self.model)
        self.wait_for_all("read the weights", steps_before=False)

    def finish(self) -> None:
        if self._leaves:
            self._release_claims()
            if self.membership is not None:
                self.membership.leave()
                self._save_as_last_worker()
            self.control_channel().finish()
            return
        self._refresh_claims()
        self.control_channel().finish()
        others = [run for run in self._delaying_runs if run is not self]
        with self._idle_in(others):
            if self.membership is None:
                self._barrier.close()
            else:
                self.membership.close()
        if self.membership is None and others:
            self._barrier.wait("continue with their other runs")
        self.read_final()

    def read_final(self) -> None:
        """Write the final weights into the model. Called when no worker takes steps any more."""
        self.control_channel().load_weights(self.model)

    def detach(self) -> None:
        super().detach()
        self.control_channel().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaves = self.world.elastic is not None and isinstance(error, SystemExit) and not self.joining
        super().__exit__(kind, error, trace)

    def close_at_exit(self) -> None:
        self._leaves = self.world.elastic is not None and not self.joining
        self.close()  # other workers may wait for this process

    def wait_for_reload(self) -> None:
        self.wait_for_all("load a state into the model after sl.distribute")

    # No worker waits for another at the end of its data.

    def check_uneven(self) -> None:
        self.uneven.schedulers.begin_epoch()

    def settle_uneven(self) -> None:
        pass

    # Workers are at different steps, so each saves its own position. If they claim batches, they have one together.

    def state_dict(self) -> dict[str, Any]:
        if not self._claims:
            state = super().state_dict()
            position = {"cursors": self.readers.state_dict(), "steps": self.stats.steps, "kept": dict(self.loop_state)}
            state["local"]["place"] = position
            return state
        self.note_trained()
        self._report_claims()
        steps = max(map(int, self.exchange("report their batches", str(self.stats.steps)).values()))
        self._report_claims()
        state = super().state_dict()
        state["shared"]["steps"] = steps
        return state

    def saved_position(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> Mapping[str, Any]:
        position: Mapping[str, Any] = shared if local is None else local.get("place", shared)
        self.loop_state = dict(position.get("kept", {}))
        return position

    # Elastic jobs.

    @property
    def joining(self) -> bool:
        """Whether this worker joins an elastic job, and has not entered it yet."""
        return self.world.elastic is not None and self.world.elastic.joining

    @property
    def initial_workers(self) -> int:
        """The number of workers; in an elastic job the number at its start, the same for newcomers."""
        return self.world.size if self.world.elastic is None else self.world.elastic.launched

    @property
    def elastic_refusal(self) -> str:
        if self.admits_newcomers:
            return ""
        return f"{self.strategy!r} survives the loss of a worker, but no worker can join: leave --restart out"

    @cached_property
    def _claims(self) -> dict[str, Epochs]:
        """By the name of a reader."""
        return {}

    def start_in_team(self) -> None:
        elastic = self.world.elastic
        if elastic is None or self.membership is None:
            super().start_in_team()
            return
        self.readers.open_claims = self._open_claims
        if elastic.joining:
            self.readers.regroup(0, elastic.launched)
            self.readers.enter_at = self._enter
            self.readers.place_of_team = self._place_of_team

    def _open_claims(self, name: str, reader: Sharded | MicroBatches) -> None:
        elastic, membership = self.world.elastic, self.membership
        assert elastic is not None
        assert membership is not None
        if not isinstance(reader, Sharded) or not reader.claimable:
            if self.joining:
                raise UnsupportedError(
                    f"a worker cannot join {self.strategy!r} with this data: workers claim batches of a dataset with "
                    "indices, by run.shard(DataLoader(…)); with other data leave --restart out"
                )
            return  # each worker reads its share, as in a job that is not elastic
        self._claims[name] = reader.claims = Epochs(
            self._channel,
            self.world.runtime,
            name,
            elastic.limits.member,
            membership.lost,
            self.world.transport.timeout,
            before_epoch=self._publish_schedule,
            steps=lambda: self.stats.steps,
            flush=self._flush_all_runs,
            idle=self.idle_in_all_runs,
            barriers=lambda: membership.number,
            stopped=self._channel.stop_requested,
            waiting=self._check_requests,
        )

    def refresh_membership(self) -> None:
        """In the background: learn which workers are present, and report and claim batches."""
        if self.membership is not None:
            self.membership.refresh()
        self._refresh_claims()

    def _refresh_claims(self) -> None:
        for epochs in list(self._claims.values()):
            epochs.refresh()

    def _report_claims(self) -> None:
        for epochs in self._claims.values():
            if epochs.current is not None:
                epochs.current.report()

    def _release_claims(self) -> None:
        """Report what was trained. All other batches of this worker are free for the others."""
        self.flush_steps()
        self.note_trained()
        for epochs in self._claims.values():
            if epochs.current is not None:
                epochs.current.leave()
        self._refresh_claims()

    def note_trained(self) -> None:
        for epochs in self._claims.values():
            if epochs.current is not None:
                epochs.current.trained(self.counted_steps)

    def between_steps(self, missed: int = 0) -> bool:
        elastic = self.world.elastic
        self.note_trained()
        if self._end_with_job():
            return False
        if elastic is not None and elastic.leave_reason and not elastic.joining:
            self.leave_checkpoint()
            self._leaves = True
            self.close()
            elastic.leave(self.world, elastic.leave_reason)
        return self.membership is None and super().between_steps(missed)

    def _check_requests(self) -> None:
        """While this worker waits at the end of an epoch."""
        now, elastic = self.world.runtime.now(), self.world.elastic
        if elastic is not None and now - self._requests_checked >= CHECK_REQUESTS_EVERY_S:
            self._requests_checked = now
            elastic.read_leave_request()
        self._end_with_job()

    def _end_with_job(self) -> bool:
        """If the launcher ends the job: save a checkpoint together with the other workers, and leave.

        Returns True if it ends the job, and all have trained this epoch: they save it in a later one, if there is one.
        """
        elastic = self.world.elastic
        if elastic is None or elastic.joining or not self.saves_at_end:
            return False
        currents = [epochs.current for epochs in self._claims.values() if epochs.current is not None]
        claims = [each for each in currents if each.is_open]
        if not (elastic.leave_reason or any(each.is_stopped for each in claims)):
            return False
        if not elastic.formation.read_ending():
            return False
        stopped = [each.stop() for each in claims]
        if any(stopped) or not claims:
            self._save_and_leave(elastic.formation.ending)
        return True

    def _save_and_leave(self, reason: str) -> None:
        """Save the last checkpoint together with the other workers, and end this process with a `SystemExit`."""
        elastic = self.world.elastic
        assert elastic is not None
        for run in (self, *self._other_runs):
            run.note_last_steps()
            assert run.membership is not None, "newcomers are admitted"
            run.membership.end()
        self._save_last_checkpoint(reason)
        self._leaves = True
        self.close()
        elastic.leave(self.world, reason)

    def _save_as_last_worker(self) -> None:
        """If all workers were asked to leave: the last of them saves a checkpoint."""
        elastic, membership = self.world.elastic, self.membership
        if elastic is None or membership is None or self._saved_at_end or not self.saves_at_end:
            return
        if elastic.leave_reason and membership.left_last():
            self._save_last_checkpoint("all workers leave")

    def _save_last_checkpoint(self, reason: str) -> None:
        elastic, membership = self.world.elastic, self.membership
        assert elastic is not None
        assert membership is not None
        self._saved_at_end = True
        elastic.save_for_later(reason, lambda: membership.participants[:1] == [membership.member])

    def apply_change_of_data(self, change: TeamChange) -> None:
        if self.membership is None:
            super().apply_change_of_data(change)

    def team_changed(self, change: TeamChange) -> None:
        """If workers may join, `batch_read` tells the script how many are present, also those in no team."""
        if self.membership is None:
            super().team_changed(change)
        else:
            self.use_team()
            self.uneven.forget_rates()

    def batch_read(self, reader: Sharded | MicroBatches) -> None:
        super().batch_read(reader)
        self._tell_number_of_workers()
        now = self.world.runtime.now()
        elastic = self.world.elastic
        if self.membership is not None and elastic is not None and now - self._published >= PUBLISH_EVERY_S:
            self._published = now
            self._publish_schedule()
            elastic.read_leave_request()

    def _tell_number_of_workers(self) -> None:
        """Tell the script if the number of workers has changed."""
        if self.membership is None or self.on_resize is None or self.membership.workers == self._team_size:
            return
        old, self._team_size = self._team_size, self.membership.workers
        self.on_resize(old, self._team_size)
        self._publish_schedule()

    def _publish_schedule(self) -> None:
        """Publish the optimizer's settings and the schedulers' state, for newcomers."""
        settings = [
            {key: value for key, value in group.items() if key not in NOT_PUBLISHED}
            for group in self.optimizer.param_groups
        ]
        schedulers = [each.state_dict() for each in self.uneven.schedulers.find()]
        state = {"groups": settings, "schedulers": schedulers, "workers": self._team_size}
        try:
            tree, tensors = encode(state, "schedule")
        except IncompatibleError as error:
            logger.debug("newcomers do not get the state of the schedulers: %s", error)
            return
        values = {name: [str(each.dtype).removeprefix("torch."), each.tolist()] for name, each in tensors.items()}
        self._channel.set_value(SCHEDULE_KEY, json.dumps([tree, values]))

    def _load_schedule(self) -> None:
        """In a newcomer: continue with the optimizer's settings and the schedulers' state of another worker.

        They are those for the number of workers that this one knew. A script's own are for that of the start.
        """
        self._team_size = self.initial_workers
        text = self._channel.value(SCHEDULE_KEY)
        if text is None:
            return
        tree, values = json.loads(text)
        tensors = {name: torch.tensor(each, dtype=getattr(torch, kind)) for name, (kind, each) in values.items()}
        state = decode(tree, tensors, "the schedule of the other workers")
        schedulers = self.uneven.schedulers.find()
        if len(schedulers) != len(state["schedulers"]) or len(self.optimizer.param_groups) != len(state["groups"]):
            raise IncompatibleError(
                f"this worker has {len(schedulers)} learning-rate schedulers and {len(self.optimizer.param_groups)} "
                f"groups of parameters, and the others have {len(state['schedulers'])} and {len(state['groups'])}: a "
                "worker joins with the same script"
            )
        self._team_size = int(state["workers"])
        for group, settings in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(settings)
        for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)

    # Newcomers.

    def _place_of_team(self) -> DataPlace | None:
        text = self._channel.value("data/place")
        return None if text is None else DataPlace(*json.loads(text))

    def raise_if_job_has_ended(self) -> None:
        """In a newcomer: raise if all workers have closed their runs, or are lost."""
        if self.joining and self.membership is not None:
            self.membership.refresh()
            if self.membership.ended or not self.membership.present():
                raise JobEndedError(
                    "the job has ended before this worker could join: the others have closed their runs, or are lost"
                )

    def _refuse_to_join_one_of_several_runs(self) -> None:
        if self._other_runs:
            raise UnsupportedError(
                f"a worker cannot join {self.strategy!r} while {1 + len(self._other_runs)} runs train: it would take "
                "part in one only; leave --restart out, or close a run that is no longer needed (run.close())"
            )

    def _enter(self, place: DataPlace) -> bool:
        """In a newcomer: take part from the epoch of the others on. Returns False if they have finished this epoch."""
        membership, elastic = self.membership, self.world.elastic
        assert membership is not None
        assert elastic is not None
        self._refuse_to_join_one_of_several_runs()
        visit = next(reader.cursor.loads for reader in self.readers.all() if self.readers.place_of(reader) == place)
        since, runtime, timeout_s = self.world.runtime.now(), self.world.runtime, self.world.transport.timeout
        for _ in poll(runtime):
            state = self._claims[place.reader].find(place.epoch, visit)
            self.raise_if_job_has_ended()
            if state is not None and not state.complete:
                self.prepare_to_join()
            if state is not None and (state.complete or not membership.join(state.barriers)):
                return False
            if state is not None:
                break
            team = self._place_of_team()
            if team is not None and (team.reader != place.reader or team.epoch > place.epoch):
                return False
            if runtime.now() - since > timeout_s:
                raise PeerLostError(
                    f"worker {membership.member} has waited {timeout_s:g} s for workers {membership.present()} to "
                    f"begin epoch {place.epoch} of {place.reader!r}",
                    pending=f"epoch {place.epoch}",
                    seconds=timeout_s,
                )
        elastic.compare_runs()
        self._load_schedule()
        self.enter_training()
        elastic.join_without_team(membership.present())
        logger.warning(
            "worker %d joins at epoch %d, with workers %s", membership.member, place.epoch, membership.present()
        )
        return True
