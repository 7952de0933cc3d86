"""The control log: an append-only list of entries in a key-value store, the same for every process of a job.

An entry is appended by a compare-and-set of the next free key, so that there are no gaps and no two entries share a
number. A process that is killed while it appends leaves either the whole entry or nothing::

    control/log/0   {"kind": "joined", "time": …, "entry": 0, "member": 0}
    control/log/1   {"kind": "lost", "time": …, "entry": 1, "member": 2, "reason": "killed by signal 9"}
    control/log/2   …
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from syncline.errors import ProtocolError
from syncline.transports.key_value_store import KeyValueStore

__all__ = ["ControlLog", "LogEntry"]

LOG_KEY = "control/log"
MAX_KIND_CHARS = 32
MAX_ENTRY_BYTES = 1 << 16
"""The longest entry. A longer one is refused by its writer."""


@dataclass(frozen=True)
class LogEntry:
    """One entry: its number from 0 on, its kind, the wall-clock time in seconds, and the fields of the kind."""

    number: int
    kind: str
    time: float
    fields: dict[str, Any] = field(default_factory=dict)


class ControlLog:
    """One process's view of the control log. Every call asks the store; a store that is gone raises a `RuntimeError`.

    >>> from syncline.control import MemoryStore
    >>> store = MemoryStore()
    >>> ControlLog(store).append("joined", member=3)
    0
    >>> [(entry.kind, entry.fields) for entry in ControlLog(store).read()]
    [('joined', {'member': 3})]
    """

    def __init__(
        self,
        store: KeyValueStore,
        clock: Callable[[], float] = time.time,
        key: str = LOG_KEY,
        max_entries: int | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._key = key
        """The prefix of the keys of the entries. Logs with different prefixes are separate."""
        self._max_entries = max_entries
        """So many keys are used in turn, and a reader that is further behind misses entries; None: all are kept."""
        self._read = 0
        """The number of the next entry to read."""

    def append(self, kind: str, **fields: Any) -> int:
        """Append an entry of plain values. Returns its number."""
        # The id tells this entry from an equal one that another process writes at the same time.
        unique = {"kind": kind[:MAX_KIND_CHARS], "time": self._clock(), "id": secrets.token_hex(8)}
        number, expected = self._read, ""
        while True:
            text = json.dumps({**unique, **fields, "entry": number})
            if len(text) > MAX_ENTRY_BYTES:
                raise ProtocolError(f"an entry of {len(text)} B for the control log; at most {MAX_ENTRY_BYTES} B")
            # Only an absent key, or one of the previous turn, is set; else another writer's entry is returned.
            found = self._store.compare_set(self._key_of(number), expected, text)
            if found == text.encode():
                return number
            present = _parse(number, found).number
            if present < number:
                expected = found.decode()
            else:
                number, expected = present + 1, ""

    def append_next(self, kind: str, **fields: Any) -> bool:
        """Append an entry only if this object has read all others. Returns whether it did."""
        text = json.dumps(
            {
                "kind": kind[:MAX_KIND_CHARS],
                "time": self._clock(),
                "id": secrets.token_hex(8),
                **fields,
                "entry": self._read,
            }
        )
        return self._store.compare_set(self._key_of(self._read), "", text) == text.encode()

    def read(self) -> list[LogEntry]:
        """The entries since the last call of this object, oldest first."""
        entries = []
        while self._store.check([self._key_of(self._read)]):
            entry = _parse(self._read, self._store.get(self._key_of(self._read)))
            if entry.number < self._read:  # of the previous turn
                break
            if entry.number > self._read:  # overwritten before it was read: continue with the oldest one
                self._read = entry.number - (self._max_entries or 0) + 1
                continue
            entries.append(entry)
            self._read += 1
        return entries

    def _key_of(self, number: int) -> str:
        return f"{self._key}/{number if self._max_entries is None else number % self._max_entries}"


def _parse(number: int, text: bytes) -> LogEntry:
    try:
        found = json.loads(text)
        found.pop("id", None)
        number = int(found.pop("entry", number))
        return LogEntry(number, str(found.pop("kind")), float(found.pop("time")), found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"entry {number} of the control log cannot be read: {text[:80]!r}") from error
