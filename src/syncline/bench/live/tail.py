"""The new lines of a file that grows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["Tail"]

AT_ONCE = 1 << 20
"""Bytes read in one go: a long log is read in several, so that nobody waits for it."""
LONGEST = 1 << 18
"""Bytes of a line. No writer of ours comes near; a file without line ends is not kept in memory."""
HEAD = 256
"""Bytes at the beginning that tell one file from another: the number of a removed file is soon given to the next."""


class Tail:
    """Reads the JSON objects that were appended since the last call.

    A half line at the end waits for its rest. A file that is shorter than before, or another one, begins anew.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> tail = Tail(path)
    >>> _ = path.write_text('{"a": 1}\\n{"b"')
    >>> tail.read()
    [{'a': 1}]
    >>> _ = path.write_text('{"a": 1}\\n{"b": 2}\\n')
    >>> tail.read()
    [{'b': 2}]
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._head = b""
        self._seen: tuple[int, int] | None = None
        self._skipping = False
        self.anew = False
        """Whether the last call began at the beginning of another file: what was read before is no longer true."""
        self.gone = False
        self.more = False
        """Whether there is more to read already."""
        self.bad = 0
        """Lines that are not JSON objects."""

    def read(self) -> list[dict[str, Any]]:
        """What is new; nothing where there is no such file."""
        self.anew = False
        try:
            found = os.stat(self._path)
            now = (found.st_size, found.st_mtime_ns)
            if now == self._seen and not self.more and not self.gone:
                return []
            with open(self._path, "rb") as file:
                head = file.read(HEAD)
                if found.st_size < self._offset or not head.startswith(self._head):
                    self._offset, self._skipping, self.bad, self.anew = 0, False, 0, True
                file.seek(self._offset)
                data = file.read(AT_ONCE)
        except OSError:  # not there yet, or not any more
            self.gone, self.more = self._seen is not None, False
            return []
        self._seen, self.gone = now, False
        end = data.rfind(b"\n") + 1
        self.more = len(data) == AT_ONCE
        if not end and len(data) > LONGEST:
            end, data, self._skipping = len(data), b"", True
        self._offset += end
        self._head = head[: self._offset]
        return self._objects(data[:end].split(b"\n")[:-1])

    def _objects(self, lines: list[bytes]) -> list[dict[str, Any]]:
        if self._skipping and lines:
            lines, self._skipping = lines[1:], False
            self.bad += 1
        objects = []
        for line in lines:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict):
                objects.append(found)
            else:
                self.bad += bool(line.strip())
        return objects
