"""Frames of callers who may belong: the directory that would tell is not read to its end yet."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Heard", "WaitingRoom"]

ROOM = 32 << 20
"""Bytes that are kept for all callers together. A member alone sends little more than 1 MiB before it is answered."""
EACH = 512
"""Bytes that a frame costs beside its content."""


class Heard(NamedTuple):
    """One message as it came: its first frame, its last, and how many came after the first."""

    content: Any
    body: Any
    extra: int


class WaitingRoom:
    """What callers have said, in order, until it is known who they are.

    >>> room = WaitingRoom()
    >>> room.keep(b"caller", Heard(b"hello", None, 0)), room.callers()
    (True, [b'caller'])
    >>> room.leave(b"caller"), room.callers()
    ([Heard(content=b'hello', body=None, extra=0)], [])
    """

    def __init__(self) -> None:
        self._callers: dict[bytes, list[Heard]] = {}
        self._nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._callers)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._callers

    def callers(self) -> list[bytes]:
        """Who waits, the first to come first."""
        return list(self._callers)

    def keep(self, identity: bytes, heard: Heard) -> bool:
        """Keep a message; False when there is no room for it."""
        nbytes = _size(heard)
        if self._nbytes + nbytes > ROOM:
            return False
        self._nbytes += nbytes
        self._callers.setdefault(identity, []).append(heard)
        return True

    def leave(self, identity: bytes) -> list[Heard]:
        """The decision on a caller has fallen: what it has said so far."""
        said = self._callers.pop(identity, [])
        self._nbytes -= sum(map(_size, said))
        return said


def _size(heard: Heard) -> int:
    return EACH + len(heard.content) + (0 if heard.body is None else len(heard.body))
