"""The team of an elastic job: the members that train together now, decided by the survivors and the same for all.

A member is a process with a number that is never given twice. A team is a generation number and its members in the
order of their ranks. When a member is lost, or a newcomer waits, the present members form the next team in the store::

    member 0   arrive/2/0 ──┐ all that are not lost have arrived:
    member 1   (lost)       ├──► compare_set team/2 = [0, 2, 3]    the first proposal counts for all
    member 2   arrive/2/2 ──┘
    member 3   log: waiting ────── a newcomer, admitted between two steps

A member that was left out, because it was frozen or cut off meanwhile, finds a team without it and gives up.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from syncline.control.log import ControlLog
from syncline.errors import JobEndedError, WorldError
from syncline.runtime import Runtime
from syncline.transports.key_value_store import KeyValueStore

__all__ = ["Arrival", "Team", "TeamFormation", "find_cut_off"]

TEAM_KEY = "control/team"
ARRIVE_KEY = "control/arrive"
WAITING, TEAM, LOST, LEFT, LEAVE, ENDING = "waiting", "team", "lost", "left", "leave", "ending"
"""Kinds of log entries: a newcomer waits; a team was formed; a member is lost; a member has left by itself; the
launcher asks a member to leave; the launcher ends the job."""
MIN_POLL_S, MAX_POLL_S = 0.002, 0.05
"""Polling interval of the store in seconds while a team forms: at first, and at most."""
QUICK_TURNS = 16
"""A newcomer that is about to be admitted asks only for the next team, and for the rest once in so many turns."""


@dataclass(frozen=True)
class Arrival:
    """What a member says when it arrives to form a team."""

    operations: int
    """The collective operations that it has completed; −1 for a newcomer that has not received the state yet."""
    between_steps: bool
    """Whether it is between two steps, where newcomers can be admitted. False: a loss has interrupted an operation."""
    prepared: int = 0
    """The number of the channels to a future team that it has connected in advance; 0 for none."""
    unreachable: tuple[int, ...] = ()
    """Members that it cannot reach. They may be alive, and reach others."""
    leaves: bool = False
    """Whether it leaves the job here: it is in the next team only if all save there."""
    ends: bool = False
    """Whether it knows that the launcher ends the job."""


@dataclass(frozen=True)
class Team:
    """The members that train together, in the order of their ranks."""

    generation: int
    members: tuple[int, ...]
    arrivals: Mapping[int, Arrival] = field(default_factory=dict)
    """What each member said that was in the team before."""
    cut_off: Mapping[int, str] = field(default_factory=dict)
    """Members that are left out because another member cannot reach them, each with the reason."""

    @property
    def operations(self) -> int:
        """The most operations that a member has completed."""
        return max((arrival.operations for arrival in self.arrivals.values()), default=0)

    @property
    def prepared(self) -> int:
        """The number of the channels that all members with the state have connected in advance; 0 if there are none."""
        found = {arrival.prepared for arrival in self.arrivals.values() if arrival.operations >= 0}
        return found.pop() if len(found) == 1 else 0

    @property
    def ends(self) -> bool:
        """Whether all its members save a checkpoint and leave: the launcher ends the job, or all members leave."""
        found = [arrival for arrival in self.arrivals.values() if arrival.operations >= 0]
        return any(arrival.ends for arrival in found) or (bool(found) and all(arrival.leaves for arrival in found))

    def without_leaving(self) -> Team:
        """The team without the members that leave; the whole team if it ends.

        >>> arrivals = {0: Arrival(5, True), 1: Arrival(5, True, leaves=True)}
        >>> Team(2, (0, 1), arrivals).without_leaving().members
        (0,)
        >>> Team(2, (0, 1), {**arrivals, 0: Arrival(5, True, ends=True)}).without_leaving().members
        (0, 1)
        """
        if self.ends:
            return self
        staying = {member: each for member, each in self.arrivals.items() if not each.leaves}
        return replace(self, members=tuple(each for each in self.members if each in staying), arrivals=staying)

    def completed(self, member: int) -> int:
        """The operations that a member had completed; −1 for a newcomer."""
        arrival = self.arrivals.get(member)
        return -1 if arrival is None else arrival.operations


class TeamFormation:
    """One member's part in forming teams.

    `lost` returns the members that are known to be lost, each with the reason. It knows newcomers once `follow` was
    called with them. `unreachable` returns the members that this one cannot reach. `timeout_s` bounds the wait for a
    member that is neither lost nor arrives; after it, that member counts as lost.
    """

    def __init__(
        self,
        store: KeyValueStore,
        member: int,
        runtime: Runtime,
        lost: Callable[[], Mapping[int, str]],
        *,
        minimum: int = 1,
        maximum: int = 1 << 20,
        timeout_s: float,
        unreachable: Callable[[], Iterable[int]] = tuple,
        follow: Callable[[Iterable[int]], None] = lambda members: None,
    ) -> None:
        self.member = member
        self.log = ControlLog(store)
        self._store = store
        self._runtime = runtime
        self._lost = lost
        self._unreachable = unreachable
        self._follow = follow
        self._minimum, self._maximum = minimum, maximum
        self._timeout_s = timeout_s
        self._latest: Team | None = None
        self._waiting: dict[int, tuple[str, int]] = {}
        """Newcomers in the order of their requests, with the place in the data at which each waits."""
        self._gone: dict[int, str] = {}
        """Members that have left, or that others have declared lost, with the reason."""
        self.stopped: Callable[[], str] = lambda: ""
        """Why this member no longer waits for newcomers when the team has fewer members than the minimum; empty if it
        waits."""
        self.ending = ""
        """Why the launcher ends the job, as far as the log was read; empty if it does not."""
        self._must_leave: dict[int, str] = {}
        """Members that the launcher has asked to leave, with the reason."""

    # Newcomers.

    def ask_to_join(self, place: tuple[str, int]) -> None:
        """Announce that this process waits to be admitted where the others reach `place`: a reader and its epoch."""
        self.log.append(WAITING, member=self.member, place=place)

    def await_admission(
        self,
        after: int = 0,
        gave_up: Callable[[], bool] = lambda: False,
        soon: Callable[[], bool] = lambda: False,
        timeout_s: float | None = None,
    ) -> Team | None:
        """Wait until a team after the generation `after` contains this newcomer.

        `gave_up` is called repeatedly. It returns True when the others have passed the place; then None is returned.
        `soon` says whether the admission is expected within a few steps: the store is then asked more often.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        known = self._latest
        for turn, expected in enumerate(self._poll(soon, timeout_s)):
            if expected and turn % QUICK_TURNS and self.latest() is known:
                continue  # the team waits for the answer: ask for nothing else
            known = self._latest
            passed = gave_up()
            team = self.latest()  # after the question: the team may have been formed at that place
            if team is not None and team.generation > after and self.member in team.members:
                return team
            if passed:
                return None
            self._read_log()
            if self.member in self._gone:
                raise self._declared_lost("is not admitted", self._gone[self.member])
            if team is not None and all(member in self._gone for member in team.members):
                raise JobEndedError(
                    f"the job has ended before member {self.member} could join: members {list(team.members)} of its "
                    "last team have left"
                )
        raise WorldError(
            f"member {self.member} was not admitted within {timeout_s:.3g} s: the team may be complete "
            f"(at most {self._maximum} workers), or the job does not read its data by run.shard() or run.steps()"
        )

    def wait_again(
        self, failed: Team, gave_up: Callable[[], bool], soon: Callable[[], bool] = lambda: False
    ) -> Team | None:
        """In a newcomer whose team could not be connected: wait for the next admission."""
        self._arrive(failed.generation + 1, Arrival(-1, between_steps=True))
        return self.await_admission(failed.generation, gave_up, soon)

    @property
    def known(self) -> Team | None:
        """The latest team that was decided, as far as this process has asked for it."""
        return self._latest

    def latest(self) -> Team | None:
        """The latest team that was decided; None before the first."""
        generation = 0 if self._latest is None else self._latest.generation
        while (team := self._read_team(generation + 1)) is not None:
            self._latest, generation = team, team.generation
        return self._latest

    def waiting(self, team: Team, place: tuple[str, int] | None) -> tuple[int, ...]:
        """The newcomers that a next team would admit at this place in the data. It asks the store."""
        self._read_log()
        return tuple(self._newcomers(team, self._absent(), place)[: max(0, self._maximum - len(team.members))])

    # Members.

    def must_leave(self, team: Team) -> dict[int, str]:
        """The members of the team that the launcher has asked to leave, with the reason. It asks the store."""
        self._read_log()
        return {member: why for member, why in self._must_leave.items() if member in team.members}

    def read_ending(self) -> bool:
        """Whether the launcher ends the job. It asks the store."""
        self._read_log()
        return bool(self.ending)

    @property
    def leave_request(self) -> str:
        """Why the launcher has asked this member to leave, as far as the log was read; empty if it has not."""
        return self._must_leave.get(self.member, "")

    def announce(self, members: list[int]) -> None:
        """Write the present members into the log, for the launcher: newcomers to asynchronous runs are in no team.

        Such a newcomer is `alone` in the entry: it trains although later teams do not contain it.
        """
        generation = 0 if self._latest is None else self._latest.generation
        self.log.append(TEAM, generation=generation, team=members, alone=self.member)

    def leave(self, reason: str) -> None:
        """Announce that this member leaves by itself: the others do not wait for it."""
        self.log.append(LEFT, member=self.member, reason=reason)

    def leave_unless_last(self, team: Team, reason: str) -> bool:
        """Announce that this member leaves, if another member of the team is left. Returns whether none is.

        Of members that leave at the same time, exactly one is the last: an entry counts only if its writer has read all
        others.
        """
        while True:
            self._read_log()
            absent = self._absent()
            if all(member in absent for member in team.members if member != self.member):
                return True
            if self.log.append_next(LEFT, member=self.member, reason=reason):
                return False

    def refuse_second_world(self) -> None:
        """Raise if this member has left before: the others continue without it."""
        self._read_log()
        if self.member in self._gone:
            raise WorldError(
                f"member {self.member} has left this job ({self._gone[self.member]}): an elastic job has one world; "
                "call sl.init() once, and world.close() at the end"
            )

    def form(
        self,
        before: Team,
        arrival: Arrival,
        place: tuple[str, int] | None = None,
        only: Collection[int] | None = None,
        shrinks: bool = False,
    ) -> Team:
        """Wait for the other members of the team before, and return the next team.

        Newcomers that wait at `place` are admitted, and the minimum is demanded, only if the most advanced members are
        between two steps. `only` are the newcomers to which this member has connected in advance; other newcomers wait
        longer. With `shrinks` a team may have fewer members than the minimum, and then has no newcomers. `shrinks` is
        the same on all members. A member that leaves gets the team of the others. A team that ends has no newcomers,
        and all members that are left, also those that leave.
        """
        generation = before.generation + 1
        self._arrive(generation, arrival)
        arrived: dict[int, Arrival] = {}
        missing: list[int] = []
        for _ in self._poll():
            decided = self._read_team(generation)
            if decided is not None:
                return self._take_part(decided, arrival.leaves)
            self._read_log()
            absent = self._absent()
            missing = [member for member in before.members if member not in arrived and member not in absent]
            if missing and not self._store.check([_arrive_key(generation, member) for member in missing]):
                continue
            for member in missing:
                arrived[member] = _read_arrival(json.loads(self._store.get(_arrive_key(generation, member))))
            if self.member in absent:
                raise self._declared_lost(f"is not in team {generation}", absent[self.member])
            present = {member: arrived[member] for member in before.members if member not in absent}
            cut_off = find_cut_off(present)
            connected = tuple(member for member in present if member not in cut_off)
            team = Team(generation, connected, {member: present[member] for member in connected}, cut_off)
            proposal = self._with_newcomers(team.without_leaving(), absent, place, only, shrinks)
            if proposal is not None:
                return self._take_part(self._propose(proposal), arrival.leaves)
            if self.ending:
                raise WorldError(f"the launcher ends the job: {self.ending}")
            if reason := self.stopped():
                raise WorldError(f"{self._describe_shortage(before)}; {reason}")
        missing = [each for each in missing if not self._store.check([_arrive_key(generation, each)])]
        return self._give_up(before, arrival, place, only, shrinks, missing)

    def _arrive(self, generation: int, arrival: Arrival) -> None:
        arrival = replace(arrival, unreachable=tuple(self._unreachable()))
        self._store.set(_arrive_key(generation, self.member), json.dumps(asdict(arrival)))

    def _with_newcomers(
        self,
        team: Team,
        absent: Mapping[int, str],
        place: tuple[str, int] | None,
        only: Collection[int] | None,
        shrinks: bool,
    ) -> Team | None:
        """The team, with newcomers where they can be admitted; None while it has fewer members than the minimum."""
        ahead = [member for member in team.members if team.completed(member) == team.operations]
        with_state = tuple(member for member in team.members if team.completed(member) >= 0)
        if team.ends or not all(team.arrivals[member].between_steps for member in ahead):
            return replace(team, members=with_state)  # a newcomer without the state waits for the next step
        newcomers = self._newcomers(team, absent, place)[: max(0, self._maximum - len(team.members))]
        if only is not None and team.prepared:
            newcomers = [member for member in newcomers if member in only]
        members = (*team.members, *newcomers)
        if len(members) >= self._minimum:
            return replace(team, members=members)
        return replace(team, members=with_state) if shrinks and with_state else None

    def _propose(self, team: Team) -> Team:
        """Propose a team. Returns the one that is decided: the first proposal."""
        arrivals = {str(member): asdict(team.arrivals[member]) for member in team.members if member in team.arrivals}
        cut_off = {str(member): reason for member, reason in team.cut_off.items()}
        text = json.dumps({"members": team.members, "arrivals": arrivals, "cut_off": cut_off})
        decided = self._store.compare_set(f"{TEAM_KEY}/{team.generation}", "", text)
        return _parse_team(team.generation, decided)

    def _read_team(self, generation: int) -> Team | None:
        """The team of a generation if it is decided."""
        key = f"{TEAM_KEY}/{generation}"
        return _parse_team(generation, self._store.get(key)) if self._store.check([key]) else None

    def _take_part(self, team: Team, leaves: bool) -> Team:
        """Continue in a decided team, unless this member leaves. The first of its members writes it into the log."""
        if self.member not in team.members:
            if leaves:
                return team
            raise self._declared_lost(
                f"the others continue as team {team.generation} with members {list(team.members)}",
                team.cut_off.get(self.member, ""),
            )
        if team.members[0] == self.member:
            for member, reason in team.cut_off.items():
                self.log.append(LOST, member=member, reason=reason)
            self.log.append(TEAM, generation=team.generation, team=list(team.members))
        return team

    def _give_up(
        self,
        before: Team,
        arrival: Arrival,
        place: tuple[str, int] | None,
        only: Collection[int] | None,
        shrinks: bool,
        missing: list[int],
    ) -> Team:
        """The timeout has passed: declare the missing members lost, or end if too few are left."""
        if not missing:
            timeout = f"no other worker has joined within {self._timeout_s:.3g} s"
            raise WorldError(f"{self._describe_shortage(before)}: {timeout}")
        for member in missing:
            reason = f"it has not reached the others within {self._timeout_s:.3g} s"
            self._gone[member] = reason
            self.log.append(LOST, member=member, reason=reason)
        return self.form(before, arrival, place, only, shrinks)

    def _describe_shortage(self, before: Team) -> str:
        absent = self._absent()
        left = [member for member in before.members if member not in absent]
        return (
            f"{len(left)} worker{'s are' if len(left) != 1 else ' is'} left (members {left}), and the job needs at "
            f"least {self._minimum}"
        )

    def _declared_lost(self, consequence: str, reason: str = "") -> WorldError:
        reason = reason or "it was stopped, cut off, or slower than the timeout"
        return WorldError(f"member {self.member} was declared lost, and {consequence}: {reason}")

    # What is known.

    def _absent(self) -> dict[int, str]:
        """The members that are lost or have left."""
        return {**self._lost(), **self._gone}

    def _newcomers(self, team: Team, absent: Mapping[int, str], place: tuple[str, int] | None) -> list[int]:
        """Newcomers that wait at a place, and are neither in the team nor lost, in the order of their requests."""
        cut_off = {*self._unreachable(), *(other for each in team.arrivals.values() for other in each.unreachable)}
        here = [member for member, waits_at in self._waiting.items() if waits_at == place and member not in cut_off]
        return [member for member in here if member not in team.members and member not in absent]

    def _read_log(self) -> None:
        for entry in self.log.read():
            member = int(entry.fields.get("member", -1))
            if entry.kind == WAITING:
                name, epoch = entry.fields["place"]
                if member not in self._waiting:
                    self._follow([member])  # it may be lost before it is in a team
                self._waiting[member] = (str(name), int(epoch))
            elif entry.kind == LEAVE:
                self._must_leave[member] = str(entry.fields.get("reason", ""))
            elif entry.kind == ENDING:
                self.ending = str(entry.fields.get("reason", ""))
            elif entry.kind in (LOST, LEFT):
                self._gone[member] = str(entry.fields.get("reason", ""))

    def _poll(self, soon: Callable[[], bool] = lambda: False, timeout_s: float | None = None) -> Iterator[bool]:
        """Yields again and again, with growing pauses, until the pauses add up to the timeout; short ones while `soon`.

        It yields what `soon` has returned. The clock is not asked: this process may have been suspended, and the others
        were not slow.
        """
        paused, pause, expected = 0.0, MIN_POLL_S, False
        while paused < (self._timeout_s if timeout_s is None else timeout_s):
            yield expected
            expected = soon()
            pause = MIN_POLL_S if expected else pause
            self._runtime.sleep(pause)
            paused, pause = paused + pause, min(2 * pause, MAX_POLL_S)


def _arrive_key(generation: int, member: int) -> str:
    return f"{ARRIVE_KEY}/{generation}/{member}"


def _parse_team(generation: int, text: bytes) -> Team:
    found = json.loads(text)
    arrivals = {int(member): _read_arrival(each) for member, each in found["arrivals"].items()}
    cut_off = {int(member): str(reason) for member, reason in found.get("cut_off", {}).items()}
    return Team(generation, tuple(found["members"]), arrivals, cut_off)


def _read_arrival(found: Mapping[str, Any]) -> Arrival:
    return Arrival(**{**found, "unreachable": tuple(found.get("unreachable", ()))})


def find_cut_off(arrivals: Mapping[int, Arrival]) -> dict[int, str]:
    """The members to leave out so that all others reach each other, each with the reason.

    Of two members that cannot reach each other, one is left out: first newcomers without the state, then the member
    with the most such pairs, and of equal ones that with the highest rank. `arrivals` is in the order of the ranks.

    >>> arrivals = {member: Arrival(5, False) for member in (0, 2, 3)}
    >>> find_cut_off({**arrivals, 2: Arrival(5, False, unreachable=(3,))})
    {3: 'it and member 2 cannot reach each other'}
    """
    pairs = {frozenset((member, other)) for member in arrivals for other in arrivals[member].unreachable}
    pairs = {pair for pair in pairs if len(pair) == 2 and pair <= arrivals.keys()}
    ranks = {member: rank for rank, member in enumerate(arrivals)}
    cut_off: dict[int, str] = {}
    while pairs:
        degrees = Counter(member for pair in pairs for member in pair)
        worst = max(degrees, key=lambda member: (arrivals[member].operations < 0, degrees[member], ranks[member]))
        others = sorted(member for pair in pairs if worst in pair for member in pair - {worst})
        names = ", ".join(map(str, others))
        cut_off[worst] = f"it and member{'s' * (len(others) > 1)} {names} cannot reach each other"
        pairs = {pair for pair in pairs if worst not in pair}
    return cut_off
