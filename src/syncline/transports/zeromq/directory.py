"""Who is in the world: entries in the launcher's store, which anyone who has the key may add to.

A log that only grows: `version` counts its entries, `log/1`, `log/2`, … hold them. With a key every entry is signed,
so that a stranger who reaches the store can still not enrol itself, nor strike out another. It can waste numbers, and
so keep others from joining. What the launcher says of the dead is not signed: with a key it is only a hint, which the
node weighs against what it hears.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from syncline.environment.base import check_versions
from syncline.environment.heartbeats import DEAD
from syncline.errors import WorldError
from syncline.runtime import Runtime
from syncline.transports.limited_log import LimitedLog
from syncline.transports.store import KeyValueStore, StoreSilentError

__all__ = ["Directory", "Entry"]

logger = logging.getLogger("syncline")

LATE = 5.0
"""Seconds after which a missing entry is given up: its writer was lost between counting and writing."""
TRIES = 3
MOST_A_LOOK = 10_000
MOST_GAPS = 1000
"""Missing entries that are waited for at once: who counts up and writes nothing takes neither memory nor time."""


@dataclass(frozen=True)
class Entry:
    """One line of the log."""

    kind: Literal["joined", "left", "lost"]
    rank: int
    endpoint: str = ""
    incarnation: str = ""
    reason: str = ""
    version: str = field(default="", kw_only=True)
    """The version of Syncline of a member that joined."""


class Directory:
    """One node's view of the log."""

    def __init__(
        self,
        store: KeyValueStore,
        launcher: KeyValueStore,
        key: str | None,
        runtime: Runtime,
        name_of: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self.name_of = name_of
        """The name of a member as its launcher knows it: "rank 3" or "server 0"."""
        self._store = store
        self._launcher = launcher
        self._refusals = LimitedLog(logger, runtime.now)
        self._key = None if key is None else key.encode()
        self._runtime = runtime
        self._lock = runtime.lock()
        self._read = 0
        self._last = 0
        self._gaps: dict[int, float] = {}
        """Entries that were counted and not there yet, each with the time at which that was first seen."""
        self._deaths = (0, 0)
        self._news: list[Entry] = []
        self.members: dict[int, Entry] = {}
        self.gone: dict[int, str] = {}
        self._found: set[int] = set()
        """Lost members that this node has found itself and has not read in the log yet."""
        self.left: set[int] = set()
        """Those of the gone who said farewell: what they sent before may still be on its way."""
        self.hints: dict[int, tuple[float, str]] = {}
        """With a key: who the launcher is said to have seen end, when this was read, and the reason."""
        self.refused = 0
        self.reachable = True
        """Whether the store's connection is open. Once broken it stays False."""
        self.answers = True
        """Whether the store answered the last call. It may be cut off, or its process stopped."""

    @property
    def behind(self) -> bool:
        """Whether there are entries that may still be read: who is not known may be in one of them."""
        return self.reachable and (bool(self._gaps) or self._read < self._last)

    def may_learn_of(self, rank: int) -> bool:
        """Whether a rank that is not known may still turn up in the log."""
        with self._lock:
            return rank not in self.members and self.behind

    def may_know(self, rank: int, incarnation: str) -> bool:
        """Whether a rank is this one, or may turn out to be."""
        with self._lock:  # a line is read and its rank known in one step
            entry = self.members.get(rank)
            return self.behind if entry is None else entry.incarnation == incarnation

    def open(self, size: int) -> None:
        """Reserve the ranks that were launched, 0 to size − 1; those who join come after."""
        self._store.add("ranks", size)
        self._store.set("open", "1")

    def next_rank(self) -> int:
        """A rank that nobody has had, once the launched ones are reserved."""
        self._store.get("open")
        return int(self._store.add("ranks", 1)) - 1

    def post(self, entry: Entry) -> None:
        """Add an entry to the log."""
        text = json.dumps(entry.__dict__)
        line = json.dumps({"entry": text, "mac": self._mac(text)})
        for _ in range(TRIES):
            began = self._runtime.now()
            number = self._store.add("version", 1)
            self._store.set(f"log/{number}", line)
            if self._runtime.now() - began < LATE / 2:
                return
            # This process was held up in between: the others may have given the number up.

    def close(self) -> None:
        """Make no more calls to the store."""
        self.reachable = False
        self._launcher.close()

    def news(self) -> list[Entry]:
        """What has been added since this was last asked, oldest first, whoever has read it meanwhile."""
        self.refresh()
        with self._lock:
            news, self._news = self._news, []
        return news

    def refresh(self) -> None:
        """Read what has been added."""
        with self._lock:
            if not self.reachable:
                return
            try:
                self._take_in(self._read_log())
                self._take_in(self._read_deaths())
                self.answers = True
            except StoreSilentError as error:
                if self.answers:
                    logger.warning("the launcher's store does not answer: nobody can join meanwhile (%s)", error)
                self.answers = False
            except RuntimeError as error:
                self.reachable = False
                logger.warning("the launcher's store does not answer: nobody can join any more (%s)", _brief(error))

    def _take_in(self, found: list[Entry]) -> None:
        for entry in found:
            if entry.kind == "joined":
                self.members[entry.rank] = entry
            elif entry.rank in self._found:  # this node has found it too; the first entry in the log counts
                self.gone[entry.rank] = entry.reason
                self._found.discard(entry.rank)
                continue
            elif entry.rank in self.gone:
                continue  # several have noticed
            else:
                self.left |= {entry.rank} if entry.kind == "left" else set()
                self.gone[entry.rank] = entry.reason
            self._news.append(entry)

    def _read_log(self) -> list[Entry]:
        found: list[Entry] = []
        now = self._runtime.now()
        self._last = int(self._store.add("version", 0))
        for number, since in list(self._gaps.items()):
            if self._read_line(number, found) or now - since > LATE:
                del self._gaps[number]
        last = min(self._last, self._read + MOST_A_LOOK)
        while self._read < last and len(self._gaps) < MOST_GAPS:
            self._read += 1
            if not self._read_line(self._read, found):
                self._gaps[self._read] = now
        return found

    def _read_line(self, number: int, found: list[Entry]) -> bool:
        """Read one line of the log; False when it is not there."""
        if not self._store.check([f"log/{number}"]):
            return False
        entry = self._decode(self._store.get(f"log/{number}"))
        if entry is not None:
            found.append(entry)
        return True

    def _read_deaths(self) -> list[Entry]:
        """What the launcher has seen end badly. Anyone who reaches the store may have written it."""
        found = []
        count = int(self._launcher.add(DEAD, 0))
        known = (count, len(self.members))  # of one who has just come it may have been said before
        if count and known != self._deaths:
            for rank, reason in self.deaths_of(rank for rank in list(self.members) if rank not in self.gone).items():
                if self._key is None:
                    found.append(Entry("lost", rank, reason=reason))
                else:
                    self.hints.setdefault(rank, (self._runtime.now(), reason))
            self._deaths = known
        return found

    def deaths_of(self, ranks: Iterable[int]) -> dict[int, str]:
        """Which of these members have ended according to the launcher, and how. They need not have joined."""
        found = {}
        for rank in ranks if self._launcher.add(DEAD, 0) else ():
            key = f"{DEAD}/{self.name_of(rank).removeprefix('rank ')}"
            if self._launcher.check([key]):
                found[rank] = _cause(self._launcher.get(key))
        return found

    def lose(self, rank: int, reason: str) -> None:
        """Record a loss that this node has found itself, before the others learn of it."""
        with self._lock:
            if rank not in self.gone:
                self.gone[rank] = reason
                self._found.add(rank)

    def check_versions(self, launched: int = 0) -> None:
        """Refuse members that run different versions of Syncline: those present, and all of the first `launched`.

        One of these may have refused the others already, and left: all are to say why.
        """
        ranks = sorted({*range(launched), *self.present()})
        check_versions({self.name_of(rank): self.members[rank].version for rank in ranks})

    def _decode(self, line: bytes) -> Entry | None:
        try:
            signed: dict[str, Any] = json.loads(line)
            text = str(signed["entry"])
            if self._key is not None and not hmac.compare_digest(str(signed["mac"]), self._mac(text)):
                raise ValueError("it is not signed with this world's key")
            fields = json.loads(text)
            if fields["kind"] not in ("joined", "left", "lost") or not isinstance(fields["rank"], int):
                raise ValueError("it says nothing that is known")
            names = ("endpoint", "incarnation", "reason")
            texts = (str(fields[name]) for name in names)
            return Entry(fields["kind"], fields["rank"], *texts, version=str(fields.get("version", "")))
        except (ValueError, KeyError, TypeError) as error:
            self.refused += 1
            self._refusals.warn(f"an entry of the directory was refused: {error}")
            return None

    def _mac(self, text: str) -> str:
        return "" if self._key is None else hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    def find(self, rank: int) -> Entry:
        """The entry of a rank that is here, or was."""
        if rank not in self.members:
            self.refresh()
        if rank not in self.members:
            raise WorldError(f"rank {rank} is not in this world: it has ranks {sorted(self.members)}")
        return self.members[rank]

    def present(self) -> tuple[int, ...]:
        """The ranks that are here, as far as is known now."""
        return tuple(sorted(rank for rank in self.members if rank not in self.gone))


def _cause(line: bytes) -> str:
    """Why a rank is dead, as the launcher put it."""
    try:
        return str(json.loads(line)["reason"])
    except (ValueError, KeyError, TypeError):
        return "the launcher has seen it end"


def _brief(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
