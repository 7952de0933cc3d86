"""The control log: an append-only list of entries in a key-value store, the same for every process of a job.

An entry is appended by a compare-and-set of the next free key, so that there are no gaps and no two entries share a
number. A process that is killed while it appends leaves either the whole entry or nothing::

    control/log/0   {"kind": "joined", "time": …, "member": 0}
    control/log/1   {"kind": "lost", "time": …, "member": 2, "reason": "killed by signal 9"}
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

    def __init__(self, store: KeyValueStore, clock: Callable[[], float] = time.time, key: str = LOG_KEY) -> None:
        self._store = store
        self._key = key
        """The prefix of the keys of the entries. Logs with different prefixes are separate."""
        self._clock = clock
        self._read = 0
        """The number of the next entry to read."""

    def append(self, kind: str, **fields: Any) -> int:
        """Append an entry of plain values. Returns its number."""
        # The id tells this entry from an equal one that another process writes at the same time.
        unique = {"kind": kind[:MAX_KIND_CHARS], "time": self._clock(), "id": secrets.token_hex(8)}
        text = json.dumps({**unique, **fields})
        if len(text) > MAX_ENTRY_BYTES:
            raise ProtocolError(f"an entry of {len(text)} B for the control log; at most {MAX_ENTRY_BYTES} B")
        number = self._read
        while True:
            # Only an absent key is set; another writer's entry is returned instead of ours.
            found = self._store.compare_set(f"{self._key}/{number}", "", text)
            if found == text.encode():
                return number
            number += 1

    def read(self) -> list[LogEntry]:
        """The entries since the last call of this object, oldest first."""
        entries = []
        while self._store.check([f"{self._key}/{self._read}"]):
            entries.append(_parse(self._read, self._store.get(f"{self._key}/{self._read}")))
            self._read += 1
        return entries


def _parse(number: int, text: bytes) -> LogEntry:
    try:
        found = json.loads(text)
        found.pop("id", None)
        return LogEntry(number, str(found.pop("kind")), float(found.pop("time")), found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"entry {number} of the control log cannot be read: {text[:80]!r}") from error
