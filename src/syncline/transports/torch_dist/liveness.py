"""Who is alive, who is late, who is lost: each rank beats in the launcher's store, and asks it when a wait breaks.

gloo tells a broken connection by an address, to the neighbours alone. So every rank keeps a counter and what it
is doing in the store; a rank that meets an error looks whose counter has stopped, posts that rank's number, and
every rank names the posted one: the first to notice decides for all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store  # what torch.distributed re-exports untyped

from syncline.runtime import Runtime
from syncline.transports.store import DEAD

__all__ = ["Liveness", "Verdict"]

logger = logging.getLogger("syncline")

BEAT = 0.5
STALE = 3.0
"""Seconds without a beat after which a rank counts as gone, once an error has made somebody ask."""
WARN_AFTER = 10.0
"""Seconds after which a wait is reported, in one line."""


PATIENCE = 5.0
"""Seconds that closing waits at most: for the beat to stop, and on the store's host for the others to leave."""


@dataclass(frozen=True)
class Verdict:
    """Who is to blame for a wait, and why we think so."""

    rank: int | None
    reason: str
    alive: bool = False
    """Whether it beats: then it is late, or has closed a channel."""


@dataclass(eq=False)
class _Wait:
    pending: str
    channel: str
    members: Sequence[int]
    since: float
    told: bool = False


@dataclass
class _Progress:
    """What this rank tells the others: how many collectives it has entered on each channel."""

    calls: dict[str, int] = field(default_factory=dict)
    doing: str = ""


class Liveness:
    """The watch of one rank over the others."""

    def __init__(
        self, store: Store, launcher: Store, rank: int, size: int, runtime: Runtime, host_rank: int | None
    ) -> None:
        self.rank = rank
        self.size = size
        self.runtime = runtime
        self.warn_after = WARN_AFTER
        self.dead: dict[int, str] = {}
        """Ranks that the launcher has seen end, and how."""
        self.owing: dict[str, Callable[[], str]] = {}
        """By channel: what this rank has yet to deliver, for the others' warnings."""
        self._store = store
        self._launcher = launcher
        self._deaths = 0
        self._host_rank = host_rank
        self._progress = _Progress()
        self._waits: dict[int, _Wait] = {}
        self._lost: Verdict | None = None
        self._closed = runtime.event()
        self._task = runtime.spawn(self._beat, name="liveness")

    # What the transports tell.

    def entering(self, channel: str, what: str) -> None:
        """This rank enters its next collective on a channel."""
        progress = self._progress
        progress.calls[channel] = progress.calls.get(channel, 0) + 1
        progress.doing = what

    def waiting(self, pending: str, channel: str, members: Sequence[int]) -> Callable[[], object]:
        """This rank begins to wait; call what is returned when the wait is over."""
        wait = _Wait(pending, channel, members, self.runtime.now())
        key = id(wait)
        self._waits[key] = wait
        return lambda: self._waits.pop(key, None)

    def close(self) -> None:
        """Stop beating, and say that this rank leaves of its own will."""
        if not self._closed.is_set():
            self._closed.set()
            # A thread that comes back from C++ while the interpreter shuts down takes the process down with it.
            self._task.join(PATIENCE)
            if self._lost is None:
                self._ask(lambda: self._store.set(f"left/{self.rank}", "1"))  # the last this rank asks of the store
                self._see_the_others_off()

    def _see_the_others_off(self) -> None:
        """Where this process serves the store, let the others say that they leave: it may end with this call."""
        others = [f"left/{rank}" for rank in range(self.size) if rank != self.rank]
        until = self.runtime.now() + PATIENCE
        while self._host_rank == self.rank and others and self.runtime.now() < until:
            if self._ask(lambda: self._store.check(others)) is not False:
                return
            self.runtime.sleep(0.01)

    # The beat.

    def _beat(self) -> None:
        number = 0
        while not self._closed.is_set():
            number += 1
            calls = dict(self._progress.calls)
            owes = {channel: tell() for channel, tell in list(self.owing.items())}
            text = json.dumps({"beat": number, "calls": calls, "doing": self._progress.doing, "owes": owes})
            if self._ask(lambda text=text: self._store.set(f"beat/{self.rank}", text)) is _UNREACHABLE:  # type: ignore[misc]
                return
            self._read_lost()
            self._ask(self._read_deaths)
            self._warn()
            self._closed.wait(BEAT)

    def _warn(self) -> None:
        now = self.runtime.now()
        for wait in list(self._waits.values()):
            if not wait.told and now - wait.since > self.warn_after:
                wait.told = True
                late = self._late(wait.channel, wait.members)
                who = f"; not there yet: {_ranks(late)}{self._owed(wait.channel, late[0])}" if late else ""
                logger.warning("rank %d has waited %.0f s for %s%s", self.rank, now - wait.since, wait.pending, who)

    def _owed(self, channel: str, rank: int) -> str:
        beat = self._ask(lambda: self._read_beat(rank))
        owed = beat.get("owes", {}).get(channel) if isinstance(beat, dict) else ""
        return f"; rank {rank} has not delivered {owed}" if owed else ""

    def _late(self, channel: str, members: Sequence[int]) -> list[int]:
        mine = self._progress.calls.get(channel, 0)
        late = []
        for rank in members:
            if rank != self.rank:
                beat = self._ask(lambda rank=rank: self._read_beat(rank))  # type: ignore[misc]
                if isinstance(beat, dict) and int(beat["calls"].get(channel, 0)) < mine:
                    late.append(rank)
        return late

    # The verdict.

    def lost(self) -> dict[int, str]:
        """The ranks that the launcher, or any rank, has found to be gone."""
        found = self._lost
        own = {} if found is None or found.rank is None else {found.rank: found.reason}
        return {**own, **self.dead}

    def blame(
        self, channel: str, members: Sequence[int], peer: int | None, broken: bool, idle: bool = False
    ) -> Verdict:
        """Who is lost. The first rank to find out posts it; all others repeat it.

        `broken` says that a connection broke, so that somebody must be gone; otherwise a timeout passed. Who ends an
        `idle` wait and is alive has only closed that channel: nobody was late, and nobody is lost.
        """
        verdict = self._read_lost() or self._look(channel, members, peer, broken)
        if idle and verdict.alive:
            return verdict
        if verdict.rank is not None:
            verdict = self._post(verdict)
        if self._host_rank == self.rank:
            self.runtime.sleep(3 * BEAT)  # the store ends with this process: let the others read it first
        return verdict

    def _read_deaths(self) -> None:
        """What `syncline run --on-failure continue` tells of ranks that have ended badly."""
        deaths = int(self._launcher.add(DEAD, 0))
        if deaths == self._deaths:
            return
        for rank in range(self.size):
            if rank not in self.dead and self._launcher.check([f"{DEAD}/{rank}"]):
                self._note_death(rank, self._launcher.get(f"{DEAD}/{rank}"))
        self._deaths = deaths  # last: where the store fails midway, the next beat reads again

    def _note_death(self, rank: int, text: bytes) -> None:
        try:
            self.dead[rank] = str(json.loads(text)["reason"])
        except (ValueError, KeyError, TypeError):
            logger.warning("rank %d cannot read how rank %d ended, and ignores it: %.80r", self.rank, rank, text)
            return
        logger.warning("rank %d is told: rank %d is lost: %s", self.rank, rank, self.dead[rank])

    def _look(self, channel: str, members: Sequence[int], peer: int | None, broken: bool) -> Verdict:
        runtime = self.runtime
        others = [rank for rank in members if rank != self.rank]
        first: dict[int, Any] = {}
        start = runtime.now()
        while runtime.now() - start < STALE:
            for rank in others:
                beat = self._ask(lambda rank=rank: self._read_beat(rank))  # type: ignore[misc]
                if beat is _UNREACHABLE:
                    return self._store_is_gone()
                first.setdefault(rank, beat)
                if beat != first[rank]:
                    others = [other for other in others if other != rank]  # it beats
            found = self._read_lost()
            if found is not None:
                return found
            self._ask(self._read_deaths)
            known = [rank for rank in members if rank in self.dead]
            if known:
                return Verdict(known[0], self.dead[known[0]])
            runtime.sleep(BEAT / 2)
        left = [rank for rank in others if self._ask(lambda rank=rank: self._store.check([f"left/{rank}"])) is True]  # type: ignore[misc]
        silent = [rank for rank in others if rank not in left]
        if silent:
            return Verdict(silent[0], f"it has given no sign of life for {STALE:.0f} s")
        if left:
            return Verdict(left[0], "it has closed its world and left")
        late = self._late(channel, members)
        if late and not broken:
            return Verdict(late[0], f"it is alive but has not entered this operation{self._busy(late[0])}", alive=True)
        if peer is not None:
            return Verdict(peer, "it is alive but did not answer", alive=True)
        return Verdict(None, "all ranks are alive and in the operation")

    def _store_is_gone(self) -> Verdict:
        if self._lost is not None:
            return self._lost
        if self._host_rank is not None:
            return Verdict(self._host_rank, "the store it serves does not answer")
        return Verdict(None, "the launcher's store does not answer")

    def _busy(self, rank: int) -> str:
        beat = self._ask(lambda: self._read_beat(rank))
        return f" (its last one: {beat['doing']})" if isinstance(beat, dict) and beat["doing"] else ""

    def _post(self, verdict: Verdict) -> Verdict:
        text = json.dumps({"rank": verdict.rank, "reason": verdict.reason})
        self._ask(lambda: self._store.compare_set("lost", "", text))
        return self._read_lost() or verdict

    def _read_lost(self) -> Verdict | None:
        if self._lost is None and self._ask(lambda: self._store.check(["lost"])) is True:
            text = self._ask(lambda: self._store.get("lost"))
            if text is not _UNREACHABLE:
                found = json.loads(text)
                self._lost = Verdict(int(found["rank"]), str(found["reason"]))
        return self._lost

    def _read_beat(self, rank: int) -> dict[str, Any] | None:
        if not self._store.check([f"beat/{rank}"]):
            return None
        beat = json.loads(self._store.get(f"beat/{rank}"))
        assert isinstance(beat, dict)
        return beat

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError:  # DistNetworkError and its kin
            return _UNREACHABLE


_UNREACHABLE = object()


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}{', …' if len(ranks) > 8 else ''}"
