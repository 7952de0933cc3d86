"""Finds the lost rank: every rank writes to the launcher's store what it does and for which rank it waits.

    beat/2    {"beat": 17, "calls": {"0": 12}, "waits": [{"peer": 1, "pending": "a message …"}], "blames": None}

Twice a second a rank writes its record. A rank whose wait breaks or times out reads the records of the others and
follows the chain of waits to its end. The rank there is the cause: its record has stopped, or it does something else.
The reader writes that rank into its own record, so that ranks that waited for the reader name the same one::

    rank 0 ── waits for ──► rank 3 ── waits for ──► rank 2 ── waits for ──► rank 1   no heartbeat
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.environment.lost_after import ALIVE, DEAD, LEFT
from syncline.runtime import Runtime
from syncline.transports.base import CHECK_HINT, Monitor, group_ranks_by_text
from syncline.transports.key_value_store import KeyValueStore, death_reason
from syncline.transports.link_probe import LinkProbe
from syncline.transports.messages import WarningLog

__all__ = ["LEFT_WORLD", "Liveness", "LivenessMonitor", "LossReason"]

logger = logging.getLogger("syncline")

HEARTBEAT_EVERY_S = 0.5
"""Seconds between two records."""
STALE_AFTER_S = 3.0
"""Seconds without a heartbeat after which a rank counts as lost, once a wait has failed."""
WARN_AFTER_S = 10.0
"""Seconds after which a wait is reported, in one line."""
COMPARE_AFTER_S = 2.0
"""Seconds of a wait after which the operations of the ranks that wait are compared."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that closing waits for the heartbeat task to stop, and on the store's host for the others to leave."""
MAX_WAITS = 8
"""Largest number of waits in a record."""

LEFT_WORLD = "it has closed its world and left"


@dataclass(frozen=True)
class LossReason:
    """The rank that caused a wait to fail, and the reason."""

    rank: int | None
    reason: str
    alive: bool = False
    """Whether it sends heartbeats: then it is late, or has closed a channel."""
    mismatch: bool = False
    """Whether all ranks are alive, but in different operations."""


@dataclass(eq=False)
class _Wait:
    pending: str | Callable[[], str]
    channel: str
    members: Sequence[int]
    peer: int | None
    since: float
    break_off: Callable[[], None] | None = None
    warned: bool = False

    def describe(self) -> str:
        return self.pending if isinstance(self.pending, str) else self.pending()


@dataclass
class _View:
    """The state of the other ranks, as read from the store."""

    beats: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The latest record of each."""
    silent: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    gone: Mapping[int, str] = field(default_factory=dict)

    def end_of(self, rank: int) -> str:
        """Why a rank will send nothing more; empty while it is alive."""
        if rank in self.gone:
            return self.gone[rank]
        if rank in self.left:
            return LEFT_WORLD
        return f"it has sent no heartbeat for {STALE_AFTER_S:.0f} s" if rank in self.silent else ""

    def blamed(self, rank: int) -> LossReason:
        """The rank that another one named as the cause of its own end; else that other rank itself."""
        blames = self.beats.get(rank, {}).get("blames")
        if blames is not None and blames[0] is not None:
            return LossReason(int(blames[0]), str(blames[1]))
        return LossReason(rank, self.end_of(rank))

    def calls(self, rank: int, channel: str) -> int:
        """How many collectives a rank has entered on a channel."""
        return int(self.beats.get(rank, {}).get("calls", {}).get(channel, 0))

    def waits_for(self, rank: int) -> int | None:
        """The rank that another one waits for; None if it waits for no single rank."""
        waits = self.beats.get(rank, {}).get("waits", ())
        return next((int(wait["peer"]) for wait in waits if wait["peer"] is not None), None)

    def chain(self, start: int, me: int) -> list[int]:
        """The chain of ranks that wait for each other, beginning with `start`. Each rank is listed once."""
        chain = [start]
        while not (self.end_of(chain[-1]) and chain[-1] not in self.silent):
            waits = self.waits_for(chain[-1])
            if waits is None or waits == me or waits in chain:
                break
            chain.append(waits)
        return chain


class Liveness:
    """Writes one rank's record, and finds the rank that caused a failed wait.

    `gone` returns the ranks that the transport knows to be gone. Without it the launcher's messages count, and the
    first lost rank is posted for all: a channel with fixed members cannot continue without one of them.
    """

    def __init__(
        self,
        store: KeyValueStore,
        launcher: KeyValueStore,
        rank: int,
        size: int,
        runtime: Runtime,
        host_rank: int | None = None,
        *,
        program: str = "",
        gone: Callable[[], Mapping[int, str]] | None = None,
        elastic: bool = False,
        links: LinkProbe | None = None,
    ) -> None:
        self.rank = rank
        self.links = links
        """Finds cut links in an elastic job; None on one host."""
        self.elastic = elastic
        """Whether the members of the job change. The survivors of a loss then form a team, and nobody is blamed."""
        self.members: set[int] = set(range(size))
        """The ranks whose end is read from the launcher."""
        self.size = size
        self.runtime = runtime
        self.warn_after_s = WARN_AFTER_S
        self.dead: dict[int, str] = {}
        """Ranks that the launcher has seen end, and how."""
        self.undelivered: dict[str, tuple[Callable[[], str], Callable[[], int | None] | None]] = {}
        """By channel: functions that return what this rank has not delivered yet, and the rank that it waits for."""
        self._store = store
        self._launcher = launcher
        self._program = program
        self._gone = gone
        self._deaths = 0
        self._host_rank = host_rank
        self._entered: dict[str, tuple[int, str]] = {}
        """By channel: how many collectives this rank has entered, and the latest of them."""
        self._latest = ""
        self._waits: dict[int, _Wait] = {}
        self._blames: LossReason | None = None
        self._mismatches: dict[str, str] = {}
        self._posted: dict[int, str] = {}
        """Ranks that any rank has found to be lost, in that order."""
        self._read = 0
        self._number = 0
        self._signs = 0
        self._problems = WarningLog(logger, runtime.now)
        self._writing = runtime.lock()
        self._reading = runtime.lock()
        self._left = False
        self.closed = runtime.event()
        self._task = runtime.spawn(self._beat, name="liveness")

    # Called by the transports.

    def enter(self, channel: str, what: str) -> None:
        """This rank enters its next collective on a channel."""
        self._entered[channel] = (self._call(channel)[0] + 1, what)  # at once: another task reads it
        self._latest = what

    def _call(self, channel: str) -> tuple[int, str]:
        """The number and the description of this rank's latest collective on a channel."""
        return self._entered.get(channel, (0, ""))

    def waiting(
        self,
        pending: str | Callable[[], str],
        channel: str,
        members: Sequence[int],
        peer: int | None = None,
        break_off: Callable[[], None] | None = None,
    ) -> Callable[[], object]:
        """This rank begins to wait for `peer`, or for any of the members. Call the returned function at its end.

        `break_off` breaks the waits of the channel. Another task calls it if the ranks are in different operations.
        """
        wait = _Wait(pending, channel, members, peer, self.runtime.now(), break_off)
        key = id(wait)
        self._waits[key] = wait

        def over() -> None:
            self._waits.pop(key, None)
            self._blames = None  # this rank has continued since

        return over

    def forget(self, channel: str) -> None:
        """A channel is closed: leave it out of this rank's record."""
        self.undelivered.pop(channel, None)
        self._entered.pop(channel, None)

    def give_up(self, channel: str) -> None:
        """In an elastic job: write that this rank has broken the connections of a channel on purpose.

        Breaking them ends the waits of the others, except for a message of which a part has arrived.
        """
        if self.elastic:
            self._ask(self._store.set, f"given up/{channel}", str(self.rank))

    def leave(self) -> None:
        """Write that this rank leaves by itself. A second call does nothing."""
        if not self._left:
            self._left = True
            self._ask(self._store.set, f"left/{self.rank}", "1")

    def stop(self) -> bool:
        """Stop the heartbeats without a goodbye. Returns whether the task ended within `CLOSE_TIMEOUT_S`."""
        self.closed.set()
        # A thread that comes back from C++ while the interpreter shuts down takes the process down with it.
        return self._task.join(CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Stop the heartbeats, and write that this rank leaves by itself."""
        if not self.closed.is_set():
            stopped = self.stop()
            if self.links is not None:
                self.links.close()
            self.leave()
            if stopped and self._program:
                self._ask(self._launcher.set, f"{ALIVE}/{self._program}", LEFT)
            if not self._posted:
                self._wait_until_others_left()

    def _wait_until_others_left(self) -> None:
        """If this process serves the store, wait until the others have left: the store ends with the process."""
        others = [f"left/{rank}" for rank in range(self.size) if rank != self.rank]
        until = self.runtime.now() + CLOSE_TIMEOUT_S
        while self._host_rank == self.rank and others and self.runtime.now() < until:
            if self._ask(self._store.check, others) is not False:
                return
            self.runtime.sleep(0.01)

    # Heartbeats.

    def _beat(self) -> None:
        while not self.closed.is_set():
            self._signs += 1
            if self._program:  # first, even if the rest fails: without it this process is killed
                self._ask(self._launcher.set, f"{ALIVE}/{self._program}", str(self._signs))
            try:
                self.write()  # if the store does not answer, the next attempt may succeed
                if self._gone is None:
                    self._ask(self._read_posted)
                    self._ask(self._read_deaths)
                self._probe_links()
                if self.elastic:
                    self._break_waits_for_lost()
                self._warn()
                self._compare()
            except Exception as error:  # `undelivered` calls code of the strategies
                self._problems.warn(f"rank {self.rank} cannot write its record for the other ranks: {error!r}")
            self.closed.wait(HEARTBEAT_EVERY_S)

    def write(self) -> None:
        """Write this rank's record."""
        with self._writing:
            self._number += 1
            blames = self._blames
            record = {
                "beat": self._number,
                "calls": {channel: count for channel, (count, _) in list(self._entered.items())},
                "doing": self._latest,
                "owes": {channel: describe() for channel, (describe, _) in list(self.undelivered.items())},
                "waits": self._describe_waits(),
                "blames": None if blames is None else [blames.rank, blames.reason],
            }
            self._ask(self._store.set, f"beat/{self.rank}", json.dumps(record))

    def _describe_waits(self) -> list[dict[str, Any]]:
        waits = [self._describe(wait) for wait in list(self._waits.values())[:MAX_WAITS]]
        for channel, (describe, awaited) in list(self.undelivered.items()):
            peer = None if awaited is None else awaited()
            if peer is not None and peer != self.rank:
                waits.append({"peer": peer, "pending": describe(), "channel": channel})
        return waits

    def _describe(self, wait: _Wait) -> dict[str, Any]:
        call, doing = self._call(wait.channel)
        record = {"peer": wait.peer, "pending": wait.describe(), "channel": wait.channel}
        return {**record, "call": call, "doing": doing} if wait.break_off is not None else record

    def _warn(self) -> None:
        now = self.runtime.now()
        for wait in list(self._waits.values()):
            if not wait.warned and now - wait.since > self.warn_after_s:
                wait.warned = True
                late = self._late(wait.channel, wait.members)
                who = f"; not there yet: {_ranks(late)}{self._owed(wait.channel, late[0])}" if late else ""
                logger.warning("rank %d has waited %.0f s for %s%s", self.rank, now - wait.since, wait.describe(), who)

    def _owed(self, channel: str, rank: int, beat: Mapping[str, Any] | None = None) -> str:
        found = self._read_beat(rank) if beat is None else beat
        owed = (found or {}).get("owes", {}).get(channel)
        return f"; rank {rank} has not delivered {owed}" if owed else ""

    def _late(self, channel: str, members: Iterable[int]) -> list[int]:
        mine = self._call(channel)[0]
        beats = {rank: self._read_beat(rank) for rank in members if rank != self.rank}
        return [rank for rank, beat in beats.items() if beat and int(beat["calls"].get(channel, 0)) < mine]

    # Ranks in different operations.

    def _compare(self) -> None:
        """Break a wait if the other rank waits in another operation: neither wait would ever end."""
        now = self.runtime.now()
        for wait in list(self._waits.values()):
            if wait.break_off is None or now - wait.since < COMPARE_AFTER_S or self.rank not in wait.members:
                continue
            others = [rank for rank in wait.members if rank != self.rank]
            place = wait.members.index(self.rank)
            neighbours = {wait.members[(place + 1) % len(wait.members)], others[0]} if others else set()
            for rank in sorted(neighbours - {self.rank}):
                text = self._differ(wait.channel, {rank: self._read_beat(rank) or {}})
                if text and self._waits.get(id(wait)) is wait:
                    break_off, wait.break_off = wait.break_off, None
                    self._ask(self._store.set, f"mismatch/{wait.channel}", text)
                    self._mismatches[wait.channel] = text
                    break_off()
                    return

    def _differ(self, channel: str, beats: Mapping[int, Mapping[str, Any]]) -> str:
        """A description if ranks in this rank's call of a channel are in different operations; else empty."""
        call, doing = self._call(channel)
        doing_by_rank = {self.rank: doing}
        for rank, beat in beats.items():
            for wait in beat.get("waits", ()):
                if wait["channel"] == channel and wait.get("call") == call:
                    doing_by_rank[rank] = str(wait["doing"])
        return group_ranks_by_text(doing_by_rank) if len(set(doing_by_rank.values())) > 1 else ""

    def mismatch(self, channel: str) -> str:
        """What the ranks of a channel do, if they were found to be in different operations; else empty."""
        text = None if channel in self._mismatches else self._ask(self._read_key, self._store, f"mismatch/{channel}")
        if text:
            self._mismatches[channel] = text.decode(errors="replace")
        return self.mismatch_found(channel)

    def mismatch_found(self, channel: str) -> str:
        """The same from what this rank has read before, without a call to the store."""
        found = self._mismatches.get(channel, "")
        return f"the ranks are in different operations: {found}; {CHECK_HINT}" if found else ""

    # Which rank is the cause.

    def lost(self) -> dict[int, str]:
        """The ranks that the launcher, or any rank, has found to be gone."""
        return {**self._posted, **self.dead}

    def blame(
        self, channel: str, members: Sequence[int], peer: int | None, broken: bool, no_deadline: bool = False
    ) -> LossReason:
        """Find the rank that caused a wait for `peer`, or for all members, to fail.

        `broken`: a connection broke, so that a rank must be gone; otherwise a timeout passed. `no_deadline`: the wait
        had none; if a living rank ends it, that rank has only closed the channel and is not lost.
        """
        text = self.mismatch(channel)
        if text:
            return LossReason(None, text, alive=True, mismatch=True)
        over = self.waiting("it", channel, members, peer)  # ranks that wait for this one may read its record meanwhile
        loss = self._first_posted(members) or self._search(channel, members, peer, broken)
        over()
        if (no_deadline and loss.alive) or loss.mismatch:
            return loss
        if loss.rank is not None and self._gone is None:
            loss = self._post(loss, members)
        self._blames = loss
        self.write()  # at once: the caller's error may end this process
        if self._host_rank == self.rank:
            self.runtime.sleep(3 * HEARTBEAT_EVERY_S)  # the store ends with this process: let the others read it first
        return loss

    def cause_of(self, rank: int, reason: str) -> LossReason:
        """The rank that a lost rank has named as the cause of its own end; else the lost rank itself."""
        blames = (self._read_beat(rank) or {}).get("blames")
        loss = LossReason(rank, reason)
        if blames is not None and blames[0] not in (None, self.rank):
            loss = LossReason(int(blames[0]), str(blames[1]))
        self._blames = loss
        self.write()
        return loss

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said that it leaves."""
        return self._ask(self._store.check, [f"left/{rank}"]) is True

    def heartbeat_of(self, rank: int) -> int | None:
        """The number of a rank's latest record: 0 if it has written none, None if the store does not answer."""
        beat = self._read_beat(rank)
        return None if beat is None else int(beat.get("beat", 0))

    def read_lost(self) -> dict[int, str]:
        """The ranks that are gone, with what the launcher has reported by now."""
        self._ask(self._read_deaths)
        return self.lost()

    def follow(self, members: Iterable[int]) -> None:
        """Read the end of these ranks from now on. Records of new ones may be older than this call."""
        if not self.members.issuperset(members):
            self.members |= set(members)
            self._deaths = -1

    def _read_deaths(self) -> None:
        """Read from the store which ranks `syncline run` has seen fail."""
        with self._reading:
            deaths = int(self._launcher.add(DEAD, 0))
            if deaths == self._deaths:
                return
            for rank in sorted(self.members):
                if rank in self.dead or not (record := self._read_key(self._launcher, f"{DEAD}/{rank}")):
                    continue
                reason = death_reason(record)
                if reason is None:
                    logger.warning(
                        "rank %d cannot read how rank %d ended, and ignores it: %.80r", self.rank, rank, record
                    )
                    continue
                self.dead[rank] = reason
                level = logging.INFO if self.elastic else logging.WARNING  # the launcher has said so too
                logger.log(level, "rank %d: the launcher reports that rank %d is lost: %s", self.rank, rank, reason)
                if self.elastic:
                    self._break_waits_for_lost()
            self._deaths = deaths  # last: if the store fails midway, the next heartbeat reads again

    def _break_waits_for_lost(self) -> None:
        """End waits on channels of ranks that are lost or unreachable: no connection breaks by itself if a link is cut.

        Every heartbeat calls it, because a wait may begin after the loss is known.
        """
        gone = self.dead.keys() | (self.links.unreachable.keys() if self.links is not None else set())
        for wait in list(self._waits.values()):
            if wait.break_off is not None and (not gone.isdisjoint(wait.members) or self._is_given_up(wait)):
                break_off, wait.break_off = wait.break_off, None
                break_off()

    def _is_given_up(self, wait: _Wait) -> bool:
        """Whether another rank has given up the channel of a long wait."""
        long = self.runtime.now() - wait.since >= COMPARE_AFTER_S
        return long and self._ask(self._store.check, [f"given up/{wait.channel}"]) is True

    def _probe_links(self) -> None:
        """Find hosts of members that cannot be reached: a wait for them would last until its timeout."""
        links, now = self.links, self.runtime.now()
        if links is None:
            return
        for wait in list(self._waits.values()):
            if wait.break_off is not None and now - wait.since >= links.timeout_s:
                links.start(rank for rank in wait.members if rank not in self.dead)
        for rank in links.poll():
            logger.warning("rank %d cannot reach rank %d: %s", self.rank, rank, links.unreachable[rank])

    def _search(self, channel: str, members: Sequence[int], peer: int | None, broken: bool) -> LossReason:
        """Read the other ranks' records until it is clear which are alive, and find the cause."""
        runtime, view, first = self.runtime, _View(), dict[int, Any]()
        start = runtime.now()
        watched = list(members) if self._gone is None or peer is None else [peer]
        while True:
            for rank in (each for each in watched if each != self.rank):
                record = self._read_beat(rank)
                if record is None:
                    return self._store_is_gone()
                view.beats[rank] = record
                number = record.get("beat")
                if rank not in first:
                    first[rank] = number
                    view.silent.add(rank)
                elif first[rank] != number:
                    view.silent.discard(rank)
            self._find_ended(view)
            posted = self._first_posted(members)
            if posted is not None:
                return posted
            chain = [] if peer is None else view.chain(peer, self.rank)
            new = [rank for rank in chain if rank not in watched]
            ended = any(rank in view.gone or rank in view.left for rank in (watched if self._gone is None else chain))
            over = runtime.now() - start >= STALE_AFTER_S
            if over or (not new and (ended or not (broken or view.silent))):
                view.silent = view.silent if over else set()  # too early to call a rank silent
                return self._find_cause(channel, members, peer, broken, view)
            watched += new
            runtime.sleep(HEARTBEAT_EVERY_S / 2)

    def _find_ended(self, view: _View) -> None:
        """Add the ranks that are gone according to the launcher, the transport or themselves."""
        if self._gone is None:
            self._ask(self._read_deaths)
        view.gone = self.dead if self._gone is None else dict(self._gone())
        for rank in view.beats:
            if rank not in view.left and self.has_left(rank):
                view.left.add(rank)

    def _find_cause(
        self, channel: str, members: Sequence[int], peer: int | None, broken: bool, view: _View
    ) -> LossReason:
        """Find the cause from the records. A rank that is gone comes before one that is late."""
        mine = self._call(channel)[0]
        late = [rank for rank in members if rank in view.beats and view.calls(rank, channel) < mine]
        starts = [peer] if peer is not None else [] if broken else late
        found = [self._follow(channel, start, view) for start in starts]
        if self._gone is None:  # a lost rank ends the whole channel
            found += [view.blamed(rank) for rank in members if view.end_of(rank) and rank not in view.left]
            found += [view.blamed(rank) for rank in members if rank in view.left]
        for loss in found:
            if not loss.alive:
                return loss
        beats = {rank: view.beats[rank] for rank in members if rank in view.beats}
        differ = self._differ(channel, beats) if peer is None else ""
        if differ:
            return LossReason(None, f"the ranks are in different operations: {differ}; {CHECK_HINT}", True, True)
        if found:
            return found[0]
        state = "one of them has closed or given up this channel" if broken else "in the operation"
        return LossReason(None, f"all ranks are alive{';' if broken else ' and'} {state}", alive=True)

    def _follow(self, channel: str, start: int, view: _View) -> LossReason:
        """The end of the chain of ranks that wait for each other."""
        chain = view.chain(start, self.rank)
        for rank in chain:
            if view.end_of(rank) or view.beats.get(rank, {}).get("blames"):
                return view.blamed(rank)
        last, record = chain[-1], view.beats.get(chain[-1], {})
        waits = view.waits_for(last)
        if waits is not None and (waits == self.rank or waits in chain):
            circle = sorted({self.rank, *chain} if waits == self.rank else set(chain[chain.index(waits) :]))
            return LossReason(circle[0], f"{_ranks(circle)} wait for each other in a circle", alive=True)
        late = view.calls(last, channel) < self._call(channel)[0]
        did = "has not entered this operation" if late else "did not answer"
        busy = f" (its last one: {record['doing']})" if late and record.get("doing") else ""
        pending = [wait["pending"] for wait in record.get("waits", ())]
        waiting = f"; it waits for {pending[0]}" if pending else ""
        return LossReason(last, f"it is alive but {did}{busy}{waiting}{self._owed(channel, last, record)}", alive=True)

    def _store_is_gone(self) -> LossReason:
        if self._posted:
            rank, reason = next(iter(self._posted.items()))
            return LossReason(rank, reason)
        if self._host_rank is not None:
            return LossReason(self._host_rank, "the store it serves does not answer")
        return LossReason(None, "the launcher's store does not answer")

    # Posts that all ranks read.

    def _post(self, loss: LossReason, members: Sequence[int]) -> LossReason:
        """Post the cause for all ranks, unless one of this channel was posted before. Returns what all name."""
        text = json.dumps({"rank": loss.rank, "reason": loss.reason})
        while True:
            found = self._first_posted(members)
            if found is not None:
                return found
            if self._ask(self._store.compare_set, f"lost/{self._read}", "", text) is None:
                return loss

    def _first_posted(self, members: Sequence[int]) -> LossReason | None:
        """The first rank of a channel that any rank has posted."""
        if self._gone is None:
            self._ask(self._read_posted)
        return next((LossReason(rank, why) for rank, why in self._posted.items() if rank in members), None)

    def _read_posted(self) -> None:
        with self._reading:
            while record := self._read_key(self._store, f"lost/{self._read}"):
                found = json.loads(record)
                self._posted.setdefault(int(found["rank"]), str(found["reason"]))
                self._read += 1

    def _read_beat(self, rank: int) -> dict[str, Any] | None:
        """The latest record of a rank: empty if it has written none, None if the store does not answer."""
        text = self._ask(self._read_key, self._store, f"beat/{rank}")
        return None if text is None else json.loads(text or b"{}")

    @staticmethod
    def _read_key(store: KeyValueStore, key: str) -> bytes:
        return store.get(key) if store.check([key]) else b""

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        """Make a call to the store. Returns None if the store does not answer."""
        try:
            return question(*args)
        except RuntimeError:  # such as DistNetworkError
            return None


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}{', …' if len(ranks) > 8 else ''}"


class LivenessMonitor(Monitor):
    """The monitor of one channel: it writes into this process's records."""

    def __init__(self, liveness: Liveness, channel: str) -> None:
        self._liveness, self._channel = liveness, channel

    def enter(self, collective: str) -> None:
        self._liveness.enter(self._channel, collective)

    def set_undelivered(self, describe: Callable[[], str], awaited: Callable[[], int | None] | None = None) -> None:
        self._liveness.undelivered[self._channel] = (describe, awaited)
