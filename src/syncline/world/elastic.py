"""The changing team of an elastic world: operations that a loss interrupts are repeated with the survivors.

Every collective operation of the world has a number, the same on all members, because all call them in the same order.
A loss may interrupt an operation on some members after others have completed it. The next team finds out, and the
members that are behind take the result from one that is ahead::

    operation      7     8                                8     9
    member 0     done  done │ 9 is interrupted  ── result of 8 ─┐  repeated
    member 1     done  interrupted                              └► repeated
    member 2     done  lost                                        with the survivors

Newcomers are admitted between two steps, when all members know that one waits. They receive the state of a member.
Members leave there too. If the launcher ends the job, or all leave, they form one more team, which saves a checkpoint::

    member 0    step 7   step 8 │ team without member 1   step 9   step 10 │ last team: save, leave
    member 1    step 7   step 8 │ leaves                                   │
    member 2    step 7   step 8 │ team without member 1   step 9   step 10 │ last team: save, leave
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from syncline.control import Arrival, Team, TeamFormation
from syncline.environment.base import KEY_VARIABLE, LEFT_CODE, package_version
from syncline.errors import (
    IncompatibleError,
    PeerLostError,
    ProtocolError,
    SpecError,
    SynclineError,
    UnsupportedError,
    WorldError,
)
from syncline.state_trees import pack
from syncline.transports import SingleTransport, TeamConnector, Transport
from syncline.transports.key_value_store import KeyValueStore
from syncline.world.team_channels import (
    Introducer,
    Introduction,
    Preparation,
    TeamChannels,
    open_channels,
    recv_state,
    send_state,
)

if TYPE_CHECKING:
    from syncline.world.group import Group
    from syncline.world.world import World

__all__ = [
    "ELASTIC_ENGINES",
    "DataPlace",
    "ElasticLimits",
    "ElasticMember",
    "RepeatableOperation",
    "RepeatedCall",
    "SingleCall",
    "TeamChange",
    "TeamListener",
    "check_elastic_engine",
    "compare_with_job",
    "describe_job",
    "read_elastic",
]

logger = logging.getLogger("syncline")

T = TypeVar("T")

ELASTIC_VARIABLE = "SYNCLINE_ELASTIC"
"""The minimum and the maximum number of workers of an elastic job, as in "2:8". Set by the launcher."""
MEMBER_VARIABLE = "SYNCLINE_MEMBER"
"""The number of this process in an elastic job."""
JOIN_VARIABLE = "SYNCLINE_JOIN"
"""Set if this process joins a job that trains already."""
PROGRESS_KEY = "control/progress"
JOB_KEY = "control/job"
"""The store's key for the version of Syncline, the transport and the key of the job. The first worker writes it."""
CHOICE_KEY = "control/choice"
"""The prefix of the store's keys for what `auto` has chosen for each run."""
RUN_KEY = "control/run"
"""The prefix of the store's keys for the description of each run: model, optimizers, strategy and codec."""
ELASTIC_ENGINES = {"torch_dist": "TorchConnector", "zeromq": "ZmqConnector"}
"""Transports whose members can change, each with its connector."""
CHECK_EVERY_S = 0.25
"""Seconds between two checks for newcomers. A check asks the store."""
REPORT_EVERY_S = 1.0
"""Seconds between two reports of a member's step."""
MAX_ATTEMPTS = 100
"""The number of teams that are formed for one change before the world raises an error: each attempt loses a member."""
LEAVE_REPORT = 4096
"""The report of a member that leaves after a step: larger than all reports of newcomers, and exact in float16."""
SHORT_WAIT_S = 5.0
"""A newcomer that has waited for less than this may be unnoticed by the others: it then asks for a later epoch."""
MAX_PREPARATIONS = 16
"""The number of background connections to newcomers that a team begins. After that it waits for the connection."""
MAX_UNCHANGED_TEAMS = 3
"""The number of repetitions of an operation with the same members before the world raises an error."""


@dataclass(frozen=True, kw_only=True)
class ElasticLimits:
    """The launcher's settings of an elastic job."""

    minimum: int
    maximum: int
    member: int
    joins: bool = False
    """Whether this process joins a job that trains already."""


def read_elastic(environ: Mapping[str, str]) -> ElasticLimits | None:
    """Read the launcher's variables; None if the job is not elastic.

    >>> read_elastic({"SYNCLINE_ELASTIC": "2:8", "SYNCLINE_MEMBER": "3"})
    ElasticLimits(minimum=2, maximum=8, member=3, joins=False)
    """
    text = environ.get(ELASTIC_VARIABLE, "")
    if not text:
        return None
    least, _, most = text.partition(":")
    member = environ.get(MEMBER_VARIABLE, "")
    if not (least.isdigit() and most.isdigit() and member.isdigit() and 1 <= int(least) <= int(most)):
        raise SpecError(
            f"{ELASTIC_VARIABLE}={text!r} with {MEMBER_VARIABLE}={member!r}: expected MIN:MAX and a number; leave both "
            "to `syncline run --elastic MIN:MAX`"
        )
    joins = environ.get(JOIN_VARIABLE, "") == "1"
    return ElasticLimits(minimum=int(least), maximum=int(most), member=int(member), joins=joins)


def describe_job(transport: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What must be the same in all processes of a job. The key is a fingerprint only.

    >>> sorted(describe_job("zeromq", {"SYNCLINE_KEY": "none"}).items())[0]
    ('the key (SYNCLINE_KEY)', 'none')
    """
    key = environ.get(KEY_VARIABLE) or "none"
    fingerprint = key if key == "none" else f"the one with SHA-256 {hashlib.sha256(key.encode()).hexdigest()[:8]}…"
    return {
        "the version of Syncline": package_version(),
        "the transport": transport,
        f"the key ({KEY_VARIABLE})": fingerprint,
    }


def compare_with_job(store: KeyValueStore, description: Mapping[str, str], key: str = JOB_KEY) -> None:
    """Refuse a process whose description differs from that of the first one that has called it."""
    text = json.dumps(description)
    _refuse_difference(json.loads(store.compare_set(key, "", text)), description)


def _refuse_difference(others: Mapping[str, str], own: Mapping[str, str]) -> None:
    names = [name for name in {**others, **own} if others.get(name) != own.get(name)]
    if names:
        mine, theirs = (each.get(names[0], "missing") for each in (own, others))
        raise IncompatibleError(
            f"this worker cannot join: {names[0]} is {mine} here and {theirs} at the others"
            + (f" ({len(names) - 1} more differ)" if len(names) > 1 else "")
            + "; a worker joins with the same script, Syncline, transport and key"
        )


class DataPlace(NamedTuple):
    """The position of a worker in its data: the name of the reader, and the epoch."""

    reader: str
    epoch: int


@dataclass(frozen=True)
class TeamChange:
    """A change of the team, for code that depends on the number of workers. Ranks are those in the teams."""

    rank: int
    size: int
    lost: tuple[int, ...]
    """The ranks in the old team of the workers that are not in the new one."""
    trained: bool
    """Whether all have a result of the interrupted operation that contains the part of the lost workers."""


class RepeatableOperation(Protocol, Generic[T]):
    """A collective operation that can be repeated with another team."""

    trains: bool
    """Whether it adds a batch of each worker to the training: a batch of a lost worker is then distributed again."""

    def attempt(self) -> T:
        """Carry it out. A `PeerLostError` means that a member is lost."""
        ...

    def prepare_again(self) -> None:
        """Restore its inputs, after an attempt has failed and the team has changed."""
        ...

    def result(self, value: T) -> Any:
        """A copy of its result for members that could not complete it: tensors and plain values."""
        ...

    def adopt(self, result: Any) -> T:
        """Continue with the result of another member."""
        ...


class TeamGroup(Protocol):
    """The communicator of a run, with a group of all ranks of the team."""

    group: Group

    def rebind(self, transport: Transport) -> None:
        """Continue with the present team, on this channel."""
        ...


class TeamListener(Protocol):
    """The part of a run of `sl.distribute` that the team calls."""

    @property
    def elastic_refusal(self) -> str:
        """Why the run cannot continue with another team; empty if it can."""
        ...

    def team_changed(self, change: TeamChange) -> None:
        """The world has another team: continue with it. Every member calls it, newcomers too."""
        ...

    def apply_change_of_data(self, change: TeamChange) -> None:
        """Read the data with another number of workers from the next batch on."""
        ...

    def newcomer_state(self) -> Any:
        """The state that a newcomer needs: tensors and plain values."""
        ...

    def load_newcomer_state(self, state: Any) -> None:
        """Take the state of a member, in a newcomer."""
        ...


class ElasticMember:
    """One member's part in the changing team of its world."""

    def __init__(self, connector: TeamConnector, limits: ElasticLimits, first: int, timeout_s: float) -> None:
        """`first` is the number of workers that the launcher has started. `timeout_s` bounds the forming of a team."""
        self.connector = connector
        self.limits = limits
        self._timeout_s = timeout_s
        self.launched = first
        """The number of workers that the launcher has started."""
        self.formation = TeamFormation(
            connector.store,
            limits.member,
            connector.runtime,
            connector.lost,
            minimum=limits.minimum,
            maximum=limits.maximum,
            timeout_s=timeout_s,
            unreachable=connector.unreachable,
            follow=connector.follow,
        )
        self.team = Team(0, tuple(range(first)))
        self.joining = limits.joins
        """Whether this process is a newcomer that is not in the team yet."""
        self.operations = -1 if limits.joins else 0
        """The number of operations that this member has completed; −1 in a newcomer."""
        self.introduce: Introducer
        """Exchanges introductions on the channel of a team. Set by the world."""
        self.newcomers_known = False
        """Whether all members know that a newcomer waits. The same on all members, between two steps."""
        self._admission_due = False
        """Whether all members are connected to the newcomers. The same on all members, between two steps."""
        self._departure_known = False
        """Whether all members know that one leaves after this step. The same on all members, between two steps."""
        self._preparation: Preparation | None = None
        """The connection to newcomers in the background. In members: the same on all, between two steps."""
        self._preparations = 0
        """The number of preparations that the present team has begun."""
        self._state_channel: Transport | None = None
        """The channel on which a newcomer of the present team receives the state."""
        self.idle_after_loss = False
        """Whether workers without data took part in the first step after a change of the data: they may continue the
        epoch with data of a lost worker, and need the weights and the steps of the others. The same on all members,
        between two steps."""
        self.data_changed = False
        """Whether a loss has interrupted an operation since the latest one that trains: batches may then have been
        distributed again. The same on all members: an operation that does not train may notice the loss."""
        self.manual = False
        """Whether the script forms each next team itself by `form_next`, as Horovod's API does. Operations are not
        repeated, and newcomers receive no state."""
        self.leave_reason = ""
        """Why this member leaves after the present step; empty if it does not. A signal handler may set it."""
        self.formation.stopped = lambda: self.leave_reason
        self.save_for_later: Callable[[str, Callable[[], bool]], None] = lambda why, reports: None
        """Saves a checkpoint for the given reason, with all members of a team that has fewer than the minimum or is the
        last one. The second argument returns afterwards whether this member reports it."""
        self.communicators: list[TeamGroup] = []
        """The communicators of this world, in the order in which all members make them."""
        self._batch_team = self.team
        """The team over which the current batch was distributed."""
        self._reader_team = self.team
        """The team over which the next batch is distributed."""
        self._postponed = False
        """Whether the data changes to the present team in the next operation, because the others are a batch ahead."""
        self._behind = False
        """Whether the data changes to the present team after this step, because the others are between two steps."""
        self._others_save = False
        """Whether the team was to save after the operation whose result was taken from another member."""
        self._others_change_team = False
        """Whether the team of that other member was about to change after that operation."""
        self._inside = False
        self._last: Any = None
        """The result of the latest operation and what is known after it, for members that are behind."""
        self._late_requests = 0
        """In a newcomer: how often it was too late after a short wait."""
        self._place_found: DataPlace | None = None
        """In a newcomer: where the team read its data when this was last asked."""
        self._place: DataPlace | None = None
        """Where this member reads its data; None before the first batch."""
        self._checked = -CHECK_EVERY_S
        self._reported = -REPORT_EVERY_S
        self._newcomer_seen = False
        self._descriptions: list[Mapping[str, str]] = []
        """The descriptions of the runs that this process has made."""

    # The first team.

    def start(self) -> tuple[Transport, Introduction]:
        """Form the first team with the other launched members, and connect it."""
        while True:
            self.team = self.formation.form(self.team, Arrival(0, between_steps=False))
            try:
                transport = self.connector.connect(self.team.members, self.team.generation)
                found = self.introduce(transport, self.team.members)
            except (PeerLostError, ProtocolError) as error:
                logger.info("member %d: %s; the team is formed again", self.limits.member, error)
                continue
            self._batch_team = self._reader_team = self.team
            return transport, found

    # Operations.

    def run(self, world: World, operation: RepeatableOperation[T]) -> T:
        """Carry out an operation; if a member is lost meanwhile, repeat it with the survivors.

        An operation inside another one is not repeated by itself: the outer one is.
        """
        if self._inside or self.joining or self.manual:
            return operation.attempt()
        if self._postponed:
            self._postponed, self.data_changed = False, True
            self._change_data(world, self._describe_change(self.team, trained=not operation.trains))
        self._inside = True
        try:
            return self._repeat(world, operation)
        finally:
            self._inside = False

    def _repeat(self, world: World, operation: RepeatableOperation[T]) -> T:
        unchanged = 0
        while True:
            before = self.team.members
            try:
                value = operation.attempt()
                break
            except (PeerLostError, ProtocolError) as error:
                logger.info("member %d: %s; the survivors form a team", self.limits.member, error)
                self._refuse(world, error)
                found = self._change_team(world, operation, error)
                unchanged = unchanged + 1 if self.team.members == before else 0
                # A message of another operation may arrive after a loss; without a loss it is a mistake.
                if unchanged and (isinstance(error, ProtocolError) or unchanged == MAX_UNCHANGED_TEAMS):
                    raise WorldError(
                        f"an operation of all workers has failed {unchanged} times although none was lost ({error}): "
                        "do all workers call the same collectives, as often as the others? After a loss a worker may "
                        "have a batch less than others in an epoch"
                    ) from error
                if found is not None:
                    value = operation.adopt(found[0])
                    break
                operation.prepare_again()
        self.operations += 1
        if operation.trains:
            self.data_changed = False
        known = (self.newcomers_known, self.idle_after_loss, self._saves, self.completes_in_flight)
        self._last = (operation.result(value), *known)
        return value

    def _refuse(self, world: World, error: SynclineError) -> None:
        """Raise the error if a run of this world cannot continue without the lost member."""
        for run in world.runs:
            if run.elastic_refusal:
                raise WorldError(f"{error}; {run.elastic_refusal}") from error

    @property
    def place_in_reader_team(self) -> tuple[int, int]:
        """This member's rank in the team over which the next batch is distributed, and the size of that team.

        It is an earlier team than the present one while the others are an operation ahead.
        """
        members = self._reader_team.members
        return members.index(self.limits.member), len(members)

    @property
    def data_changes_later(self) -> bool:
        """Whether the data changes to the present team in the next operation, because the others are one ahead."""
        return self._postponed

    # Teams that the script forms itself.

    def form_manually(self, place: DataPlace) -> None:
        """From now on the script forms each next team by `form_next`. Newcomers wait at `place`."""
        self.manual, self._place = True, place

    def form_next(self, world: World, timeout_s: float) -> None:
        """Form the next team, with the newcomers that wait, and connect it. Every member calls it.

        A newcomer waits at most `timeout_s` seconds for the others. The launcher may have asked this member to leave:
        then it leaves, and a `SystemExit` is raised.
        """
        if self.joining:
            self.formation.ask_to_join(self._place or DataPlace("", 0))
            team = self.formation.await_admission(timeout_s=timeout_s)
            assert team is not None, "it does not give up"
            self.team, self.operations, self.joining = team, 0, False
            if self._connect_team(world):
                return
        for _ in range(MAX_ATTEMPTS):
            self._abort(world)
            self._leave_if_asked(world)
            self.team = self.formation.form(self.team, Arrival(0, between_steps=True), self._place)
            if self._connect_team(world):
                return
        raise WorldError(f"member {self.limits.member}: no team could be connected in {MAX_ATTEMPTS} attempts")

    def _connect_team(self, world: World) -> bool:
        try:
            transport = self.connector.connect(self.team.members, self.team.generation)
            world.rebind(transport, self.introduce(transport, self.team.members))
        except (PeerLostError, ProtocolError) as error:
            logger.info("member %d: %s; the team is formed again", self.limits.member, error)
            return False
        self._newcomer_seen = False
        self._log_team(world)
        return True

    def read_leave_request(self) -> None:
        """Find out whether the launcher has asked this member to leave, or ends the job. It asks the store."""
        self.formation.must_leave(self.team)
        self.leave_reason = self.leave_reason or self.formation.leave_request or self.formation.ending

    def has_pending_change(self) -> tuple[bool, bool]:
        """Whether a newcomer waits, and whether a member of the team was asked to leave. It asks the store."""
        newcomers = self.formation.waiting(self.team, self._place)
        return bool(newcomers), bool(self.formation.must_leave(self.team))

    def _leave_if_asked(self, world: World) -> None:
        why = self.formation.must_leave(self.team).get(self.limits.member)
        if why is not None:
            self.leave(world, why)

    def leave(self, world: World, why: str) -> None:
        """Leave the job: end this process with a `SystemExit`. The others continue."""
        logger.warning("member %d leaves the job: %s", self.limits.member, why)
        world.leave(why)
        raise SystemExit(LEFT_CODE)

    # Newcomers and changes between two steps.

    def compare_run(self, world: World, description: Mapping[str, str]) -> None:
        """Refuse a newcomer whose run differs from the others', before it asks to join. Called for each new run.

        The first member writes the description of each run into the store.
        """
        self._descriptions.append(description)
        if self.joining:
            self.compare_runs()
        else:
            key = f"{RUN_KEY}/{len(self._descriptions) - 1}"
            self.connector.store.compare_set(key, "", json.dumps(description))

    def share_choice(self, choice: str) -> str:
        """The choice that the first team has made for the next run: a newcomer takes it, and ignores its own `choice`.

        Called before `compare_run`.
        """
        store, key = self.connector.store, f"{CHOICE_KEY}/{len(self._descriptions)}"
        return (store.get(key) if self.joining else store.compare_set(key, "", choice)).decode()

    def compare_runs(self) -> None:
        """In a newcomer: compare its runs with those that the others have made so far."""
        store = self.connector.store
        for number, description in enumerate(self._descriptions):
            if store.check([f"{RUN_KEY}/{number}"]):
                _refuse_difference(json.loads(store.get(f"{RUN_KEY}/{number}")), description)

    def report_newcomers(self) -> int:
        """What this member reports about newcomers in its next reduction, which sums it over the team.

        1 if it knows of a newcomer that waits at this place in the data, and during a preparation is connected to it.
        It asks the store now and then. A number that makes the sum negative if it cannot be connected, and
        `LEAVE_REPORT` if this member leaves after the step.
        """
        if self.leave_reason:
            return LEAVE_REPORT
        preparation = self._preparation
        if preparation is not None and not (preparation.ready or preparation.failed):
            return 0
        now = self.connector.runtime.now()
        if not self._newcomer_seen and now - self._checked >= CHECK_EVERY_S:
            self._checked = now
            newcomers = self.formation.waiting(self.team, self._place)
            self.leave_reason = self.leave_reason or self.formation.leave_request
            self._newcomer_seen = bool(newcomers) if preparation is None else preparation.serves(newcomers)
        if preparation is not None and (preparation.failed or preparation.communicators != len(self.communicators)):
            return -len(self.team.members)
        return int(self._newcomer_seen)

    def note_newcomers(self, reports: int) -> None:
        """The sum of the reports of all members, in the same reduction on all of them."""
        if reports > LEAVE_REPORT // 2:
            self._departure_known = True
        elif self._preparation is None:
            self.newcomers_known |= reports > 0
        elif reports < 0:
            self._forget_newcomers()
        else:
            self._admission_due = reports == len(self.team.members)

    def _forget_newcomers(self) -> None:
        """Forget the known newcomers: the next step looks for them again."""
        self.newcomers_known = self._newcomer_seen = self._admission_due = False
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.abandon()

    def _prepare(self) -> None:
        """Begin to connect the newcomers in the background."""
        self._preparations += 1
        self._newcomer_seen, self._checked = False, -CHECK_EVERY_S
        number = self.team.generation * MAX_PREPARATIONS + self._preparations
        self._preparation = preparation = Preparation(self.connector, self.limits.member, number)
        if self.limits.member == self.team.members[0]:
            preparation.propose((*self.team.members, *self.formation.waiting(self.team, self._place)))
        preparation.start(len(self.team.members), len(self.communicators), self.introduce)

    def batch_read(self, world: World, place: DataPlace, step: int) -> None:
        """A batch of this place is read, by the team to which the readers belong, before the given step."""
        self._batch_team = self._reader_team
        if place != self._place:  # newcomers may wait for this epoch
            self._place, self._reported, self._checked = place, -REPORT_EVERY_S, -CHECK_EVERY_S
            self._newcomer_seen = False
        self._report_progress(world, step)

    def note_idle_step(self) -> None:
        """This member has no more data, and takes part in a step for which the others have read a batch."""
        self._batch_team = self._reader_team

    @property
    def changes_team(self) -> bool:
        """Whether the next call of `between_steps` admits newcomers, or a member leaves there."""
        connected = self._admission_due or self._preparations >= MAX_PREPARATIONS
        return self._saves or self._departure_known or (self.newcomers_known and connected)

    @property
    def completes_in_flight(self) -> bool:
        """Whether reductions in flight are completed before the next call of `between_steps`.

        They are before the team changes. A member that is behind does it where those that are ahead have done it.
        """
        return self.changes_team or self._others_change_team

    def note_own_departure(self) -> None:
        """A step has ended. A member without others may leave after it, without an announcement."""
        self._departure_known |= len(self.team.members) == 1 and bool(self.leave_reason)

    @property
    def reason_to_save(self) -> str:
        """Why the members of the present team save a checkpoint; empty if they do not."""
        size = len(self.team.members)
        if size < self.limits.minimum:
            left = f"{size} worker{'s are' if size > 1 else ' is'} left"
            return f"{left}, and the job needs at least {self.limits.minimum}"
        return (self.formation.ending or "all workers leave") if self.team.ends else ""

    @property
    def _saves(self) -> bool:
        return self._too_few or self.team.ends

    @property
    def _too_few(self) -> bool:
        return len(self.team.members) < self.limits.minimum

    def between_steps(self, world: World, share_steps: Callable[[], None] = lambda: None) -> bool:
        """Admit newcomers that all members know of. A member that leaves does so here: its last step is complete.

        If too few members are left, they save a checkpoint and wait for newcomers. If the job ends, they save one and
        leave. Before that `share_steps` brings members that have missed steps up to date. Returns whether it was
        called.
        """
        others_save, self._others_save, self._others_change_team = self._others_save, False, False
        if self._inside or self.joining:
            return False
        if self._postponed and not others_save:  # the others are a batch ahead
            return False
        behind, saved = self._behind, False
        while True:
            self._catch_up_with_data(world)
            if self._saves:
                saved = True
                share_steps()
                self.save_for_later(self.reason_to_save, lambda: world.rank == 0)
                self._catch_up_with_data(world)
                if self.team.ends:
                    self.leave(world, self.formation.ending or self.leave_reason)
            elif behind:  # the others have changed the team here already
                return False
            if self.leave_reason and self._too_few:
                self.leave(world, self.leave_reason)
            if not self.changes_team:
                break
            self._change_between_steps(world)
        if self.newcomers_known and self._preparation is None:
            self._prepare()
        return saved

    def _catch_up_with_data(self, world: World) -> None:
        if self._behind:
            self._behind = False
            self._change_data(world, self._describe_change(self.team, trained=True))

    def _change_between_steps(self, world: World) -> None:
        """Form the next team. The first one with too few members does not wait for newcomers: it saves before."""
        waits, self._inside = self._too_few, True
        try:
            self._change_team(world, None, None)
        except WorldError as error:
            if waits and (self.leave_reason or self.formation.ending):
                self.leave(world, str(error))
            raise
        finally:
            self._inside = False

    def enter(self, world: World, place: DataPlace) -> bool:
        """In a newcomer: wait for a team that admits this process at its place in the data, and receive the state.

        Returns False if the others have passed that place, or will have before all of them know of the newcomer: their
        epochs may take milliseconds. So it asks for epochs that are further and further ahead::

            team      │ 40 │ 41 │ 42 │ 43 │ 44 │ 45 │ 46 │ 47 │ 48 │ 49
            newcomer    asks for 40 ─► 41: too late
                             asks for 41 ─► 42: too late again, from now on it asks ahead
                                  asks for 43 (1 ahead) ─► 44: too late
                                            asks for 46 (2 ahead) ──► admitted
        """
        if self.will_pass(place):
            return False
        asked = self.connector.runtime.now()
        self.formation.ask_to_join(place)
        self._inside = True
        try:
            team = self.formation.await_admission(0, lambda: self._has_passed(place), self._prepare_newcomer)
            while team is not None:
                if self._preparation is None or not self._preparation.ready:  # it has compared them
                    self.compare_runs()
                self.team = team
                try:
                    self._install(world)
                    # The others wait for the first step of this member: it asks the store after the step.
                    now = self.connector.runtime.now()
                    self._place, self._checked, self._reported = place, now, now
                    return True
                except (PeerLostError, ProtocolError) as error:
                    logger.info("member %d: %s; the team is formed again", self.limits.member, error)
                    self._abort(world)
                    self._reset_to_single(world)
                    team = self.formation.wait_again(team, lambda: self._has_passed(place), self._prepare_newcomer)
        finally:
            self._inside = False
        found, waited_s = self._place_found, self.connector.runtime.now() - asked
        if found is not None and found.reader != place.reader:
            self._late_requests = 0  # they read several data in turn: a wait for a later epoch ends as early
        elif waited_s < SHORT_WAIT_S:
            self._late_requests += 1
        return False

    def _prepare_newcomer(self) -> bool:
        """In a newcomer that waits: connect to the members in the background when they begin to connect to it.

        Returns whether it is connected.
        """
        preparation = self._preparation
        connected = preparation is not None and preparation.ready
        team = self.formation.known if connected else self.formation.latest()  # `await_admission` asks, too
        if team is None or self.limits.member in team.members:  # it is admitted already, perhaps with this preparation
            return team is not None
        first = team.generation * MAX_PREPARATIONS + 1
        if preparation is not None and (preparation.failed or preparation.number < first):
            preparation.abandon()
            self._preparation, first = None, max(first, preparation.number + 1)
        if self._preparation is None:
            candidate = Preparation(self.connector, self.limits.member, max(first, self._preparations))
            while candidate.find() and self.limits.member not in candidate.members:
                candidate = Preparation(self.connector, self.limits.member, candidate.number + 1)
            self._preparations = candidate.number
            if candidate.members:
                self.compare_runs()  # by now the others have made theirs
                self._preparation = candidate
                candidate.start(0, len(self.communicators), self.introduce)
        return self._preparation is not None and self._preparation.ready

    def join_without_team(self, workers: list[int]) -> None:
        """In a newcomer to an asynchronous run: take part in training, but in no team. `workers` are those present."""
        self.joining = False
        self.formation.announce(workers)

    def _reset_to_single(self, world: World) -> None:
        """In a newcomer whose team could not be connected: its collectives are its own again until it enters."""
        size, runtime, timeout = world.size, self.connector.runtime, world.transport.timeout
        world.rebind(SingleTransport(runtime, timeout), Introduction((world.host,), 1))
        for communicator in self.communicators:
            communicator.rebind(SingleTransport(runtime, timeout))
        for run in world.runs:
            run.team_changed(TeamChange(0, 1, (), True))
        world.rank, world.size = size - 1, size

    def place_of_team(self) -> DataPlace | None:
        """Where the team reads its data, as its first members have reported; None while that is unknown."""
        team = self.formation.latest()
        for member in () if team is None else team.members:
            key = f"{PROGRESS_KEY}/{member}"
            if self.connector.store.check([key]):
                found = json.loads(self.connector.store.get(key)).get("place")
                return None if found is None else DataPlace(*found)
        return None

    def _has_passed(self, place: DataPlace) -> bool:
        """Whether the team reads other data, or a later epoch. False while that is unknown. It asks the store."""
        self._place_found = found = self.place_of_team()
        return found is not None and (found.reader != place.reader or found.epoch > place.epoch)

    def will_pass(self, place: DataPlace) -> bool:
        """In a newcomer: whether a request to join at this place would come too late, as far as it knows.

        It asks the store only about data that the team did not read when it last asked: a newcomer must pass over
        epochs faster than the team trains them, and an answer may take longer than an epoch.
        """
        found = self._place_found
        if found is None or found.reader != place.reader:
            return self._has_passed(place)
        # 0, 0, 1, 2, 4, …: the first request may come at the end of a long epoch, the second one at the next start.
        lead_epochs = (1 << self._late_requests) >> 2
        return found.epoch + lead_epochs > place.epoch

    def _report_progress(self, world: World, step: int) -> None:
        """Write this member's step and place into the store now and then, for newcomers and `syncline status`."""
        now = self.connector.runtime.now()
        if now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            found = {"step": step, "time": time.time(), "rank": world.rank, "size": world.size, "place": self._place}
            self.connector.store.set(f"{PROGRESS_KEY}/{self.limits.member}", json.dumps(found))

    # Forming and installing a team.

    def _change_team(
        self, world: World, operation: RepeatableOperation[Any] | None, error: SynclineError | None
    ) -> tuple[Any] | None:
        """Form the next team and continue with it. Returns the result of the interrupted operation if a member has it.

        A member that is lost meanwhile leads to one more team.
        """
        for attempt in range(MAX_ATTEMPTS):
            if operation is not None or attempt:  # between two steps the others still complete theirs
                self._abort(world)
            ready = self._preparation is not None and self._preparation.ready
            prepared = self._preparation.number if self._preparation is not None and ready else 0
            leaves = operation is None and bool(self.leave_reason) and not self._too_few
            ends = self.team.ends or (leaves and self.formation.read_ending())
            arrival = Arrival(self.operations, operation is None, prepared, leaves=leaves, ends=ends)
            only = self._preparation.members if self._preparation is not None and prepared else None
            self.team = self.formation.form(self.team, arrival, self._place, only, not self._too_few)
            if self.limits.member not in self.team.members:
                self.leave(world, self.leave_reason)
            try:
                return self._install(world, operation)
            except (PeerLostError, ProtocolError) as again:
                logger.info("member %d: %s; the team is formed again", self.limits.member, again)
        raise WorldError(
            f"member {self.limits.member}: no team could be connected in {MAX_ATTEMPTS} attempts"
        ) from error

    def _abort(self, world: World) -> None:
        """End the waits on the old channels, here and at the other members."""
        for communicator in self.communicators:
            communicator.group.abort()
        world.everyone.abort()

    def _install(self, world: World, operation: RepeatableOperation[Any] | None = None) -> tuple[Any] | None:
        """Connect the team, bring all members to the same operation, and tell the runs."""
        team = self.team
        channels = self._open_channels(team)
        world.rebind(channels.transport, channels.introduction)
        for communicator, transport in zip(self.communicators, channels.splits, strict=True):
            communicator.rebind(transport)
        self._refuse_newcomer_without_run(world)
        if team.operations < 0:
            raise WorldError(f"no member of {list(team.members)} has the state of the job: all that had it are lost")
        newcomer = self.operations < 0
        found = self._share_last_result(world, operation)
        change = self._describe_change(team, trained=found is not None or operation is None or not operation.trains)
        ahead = [member for member in team.members if team.completed(member) == team.operations]
        between_steps = all(team.arrivals[member].between_steps for member in ahead)
        for run in world.runs:
            run.team_changed(change)
        if between_steps:
            self.newcomers_known = self._newcomer_seen = False
        if newcomer:
            self._send_state_to_newcomers(world, team.members.index(ahead[0]))
            self._batch_team, self.operations, self.joining = team, team.operations, False
            self._change_data(world, TeamChange(world.rank, world.size, (), True))
        else:
            self._postponed = (found is not None or operation is None) and not between_steps
            self._behind = found is not None and between_steps
            if not (self._postponed or self._behind):  # before a newcomer gets the position in the data
                self.data_changed |= not between_steps
                self._change_data(world, change)
            self._send_state_to_newcomers(world, team.members.index(ahead[0]))
        self._log_team(world)
        return found

    def _log_team(self, world: World) -> None:
        if self.team.ends:
            logger.info("team %d saves and leaves (members %s)", self.team.generation, list(self.team.members))
            return
        logger.log(
            logging.WARNING if world.rank == 0 else logging.INFO,
            "team %d continues with %d workers (members %s)",
            *(self.team.generation, world.size, list(self.team.members)),
        )

    def _open_channels(self, team: Team) -> TeamChannels:
        """The channels of a team: those that all its members have prepared, or else new ones."""
        preparation, self._preparation = self._preparation, None
        self._preparations, self._admission_due, self._departure_known = 0, False, False
        self._checked = -CHECK_EVERY_S  # a newcomer without the state may wait again
        if self._state_channel is not None:
            self._state_channel.close()  # every newcomer has the state: it would not have arrived without
        newcomers = any(team.completed(member) < 0 for member in team.members)
        wanted = (team.prepared, team.members, len(self.communicators))
        if preparation is not None and (preparation.number, preparation.members, preparation.communicators) == wanted:
            channels = preparation.take(self._timeout_s)
        else:
            if preparation is not None:
                preparation.abandon()
            channels = open_channels(
                self.connector, team.members, team.generation, len(self.communicators), self.introduce, newcomers
            )
        self._state_channel = channels.state
        return channels

    def _refuse_newcomer_without_run(self, world: World) -> None:
        if self.joining and not world.runs:
            raise WorldError("a worker joins by sl.distribute() and run.shard(), and this one has no run")

    def _describe_change(self, team: Team, trained: bool) -> TeamChange:
        """The change from the team over which the current batch was distributed."""
        old = self._batch_team.members
        lost = tuple(rank for rank, member in enumerate(old) if member not in team.members)
        return TeamChange(team.members.index(self.limits.member), len(team.members), lost, trained)

    def _change_data(self, world: World, change: TeamChange) -> None:
        self._reader_team = self.team
        for run in world.runs:
            run.apply_change_of_data(change)

    def _share_last_result(self, world: World, operation: RepeatableOperation[Any] | None) -> tuple[Any] | None:
        """Give the result of the latest operation to members that could not complete it."""
        team = self.team
        counts = [team.completed(member) for member in team.members]
        old = [count for count in counts if count >= 0]
        if min(old) == max(old):
            return None
        if min(old) < max(old) - 1:
            raise WorldError(
                f"the members {list(team.members)} have completed {counts} operations, which differ by more than one: "
                "do all workers call the same collectives?"
            )
        from syncline.world.functional import broadcast_object

        root = counts.index(max(old))
        result = broadcast_object(self._last if root == world.rank else None, root, group=world.everyone)
        behind = team.completed(self.limits.member) == min(old)
        if not behind:
            return None
        if operation is None:
            raise WorldError(f"member {self.limits.member} is behind the others between two steps")
        found, self.newcomers_known, self.idle_after_loss, self._others_save, self._others_change_team = result
        return (found,)

    def _send_state_to_newcomers(self, world: World, root: int) -> None:
        """Give newcomers the state of the runs of a member that is ahead. The members do not wait for it."""
        newcomers = [rank for rank, member in enumerate(self.team.members) if self.team.completed(member) < 0]
        channel = self._state_channel
        if channel is None or not newcomers:
            return
        if world.rank == root:
            packed = [pack(run.newcomer_state(), "state") for run in world.runs]  # a copy: training continues
            self.connector.runtime.spawn(send_state, channel, newcomers, packed, name="state")
        elif world.rank in newcomers:
            for run in world.runs:
                run.load_newcomer_state(recv_state(channel, root, world.device))

    def close(self, reason: str) -> None:
        """Leave the job."""
        if self._preparation is not None:
            self._preparation.abandon()
        if self._state_channel is not None:
            self._state_channel.close()
        try:
            self.formation.leave(reason)
        except RuntimeError:  # the store is gone, and so is the job
            logger.debug("member %d leaves a job whose store is gone", self.limits.member)
        self.connector.close()


class RepeatedCall(Generic[T]):
    """A collective function whose inputs do not change, and whose result is the same on all ranks."""

    trains = False

    def __init__(self, attempt: Callable[[], T]) -> None:
        self.attempt = attempt

    def prepare_again(self) -> None:
        """Nothing has changed."""

    def result(self, value: T) -> Any:
        return copy.deepcopy(value)  # the caller may change its own in place

    def adopt(self, result: Any) -> T:
        return result  # type: ignore[no-any-return]


class SingleCall(RepeatedCall[T]):
    """A collective function whose result depends on the rank: it cannot be repeated with another team."""

    def __init__(self, attempt: Callable[[], T], describe: str) -> None:
        super().__init__(attempt)
        self._describe = describe

    def prepare_again(self) -> None:
        raise WorldError(
            f"a worker was lost during {self._describe}, which cannot be repeated with another number of workers"
        )

    def result(self, value: T) -> Any:
        return None

    def adopt(self, result: Any) -> T:
        self.prepare_again()
        return result  # type: ignore[no-any-return]


def check_elastic_engine(name: str) -> None:
    """Refuse a transport whose members cannot change."""
    if name == "mpi":
        raise UnsupportedError(
            'transport="mpi" cannot lose workers: mpiexec ends all ranks when one of them is lost; an elastic job runs '
            'on "torch_dist" or "zeromq"'
        )
    if name not in ELASTIC_ENGINES:
        raise UnsupportedError(
            f'transport={name!r} cannot lose workers: an elastic job runs on "torch_dist" or "zeromq"; leave --elastic '
            "out"
        )
