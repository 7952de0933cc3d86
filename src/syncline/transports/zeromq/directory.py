"""Who is in the world: entries in the launcher's store, which anyone who has the key may add to.

A log that only grows: `version` counts its entries, `log/1`, `log/2`, … hold them. With a key every entry is signed,
so that a stranger who reaches the store can still not enrol itself, nor strike out another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from dataclasses import dataclass
from typing import Any, Literal

from torch._C._distributed_c10d import PrefixStore, Store

from syncline.errors import WorldError
from syncline.runtime import Runtime

__all__ = ["Directory", "Entry"]

logger = logging.getLogger("syncline")

LATE = 5.0
"""Seconds after which a missing entry is skipped: its writer was lost between counting and writing."""


@dataclass(frozen=True)
class Entry:
    """One line of the log."""

    kind: Literal["joined", "left", "lost"]
    rank: int
    endpoint: str = ""
    incarnation: str = ""
    reason: str = ""


class Directory:
    """One node's view of the log."""

    def __init__(self, store: Store, launcher: Store, key: str | None, runtime: Runtime) -> None:
        self._store = store
        self._launcher = launcher
        self._key = None if key is None else key.encode()
        self._runtime = runtime
        self._lock = runtime.lock()
        self._read = 0
        self._missing_since: float | None = None
        self._deaths = 0
        self._news: list[Entry] = []
        self.members: dict[int, Entry] = {}
        self.gone: dict[int, str] = {}
        self.left: set[int] = set()
        """Those of the gone who said farewell: what they sent before may still be on its way."""
        self.refused = 0
        self.reachable = True

    @staticmethod
    def prefix(store: Store, world: str) -> Store:
        """The part of a store that belongs to one world's directory."""
        return PrefixStore(f"{world}/zeromq", store)

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
        number = self._store.add("version", 1)
        self._store.set(f"log/{number}", line)

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
                found = self._read_log() + self._read_deaths()
            except RuntimeError as error:
                self.reachable = False
                logger.warning("the launcher's store does not answer: nobody can join any more (%s)", _brief(error))
                return
            for entry in found:
                if entry.kind == "joined":
                    self.members[entry.rank] = entry
                elif entry.rank not in self.gone:
                    self.gone[entry.rank] = entry.reason
                    self.left |= {entry.rank} if entry.kind == "left" else set()
            self._news += found

    def _read_log(self) -> list[Entry]:
        found = []
        last = int(self._store.add("version", 0))
        while self._read < last:
            key = f"log/{self._read + 1}"
            if not self._store.check([key]):
                now = self._runtime.now()
                self._missing_since = self._missing_since or now
                if now - self._missing_since < LATE:
                    break
                self._read += 1
                self._missing_since = None
                continue
            self._missing_since = None
            self._read += 1
            entry = self._decode(self._store.get(key))
            if entry is not None:
                found.append(entry)
        return found

    def _read_deaths(self) -> list[Entry]:
        """What the launcher has seen end badly."""
        found = []
        count = int(self._launcher.add("syncline/dead", 0))
        if count != self._deaths:
            for rank in list(self.members):
                if rank not in self.gone and self._launcher.check([f"syncline/dead/{rank}"]):
                    found.append(Entry("lost", rank, reason=_cause(self._launcher.get(f"syncline/dead/{rank}"))))
            self._deaths = count
        return found

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
            return Entry(fields["kind"], fields["rank"], *(str(fields[name]) for name in names))
        except (ValueError, KeyError, TypeError) as error:
            self.refused += 1
            logger.warning("an entry of the directory was refused: %s", error)
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
