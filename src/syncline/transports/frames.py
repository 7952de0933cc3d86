"""The header that goes before a body whose length the receiver does not know.

::

    0      4   5    6       8        12    16        24       28        32     36
    ┌──────┬───┬────┬───────┬────────┬─────┬─────────┬────────┬─────────┬──────┐
    │ SYNC │ v │kind│   0   │ sender │ tag │ length  │ number │ channel │ crc  │
    └──────┴───┴────┴───────┴────────┴─────┴─────────┴────────┴─────────┴──────┘

All little-endian. `number` counts the sender's messages and pairs a header with its body; `channel` is 0 where every
channel has connections of its own; `crc` is CRC-32 of the rest.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Container
from typing import NamedTuple

from syncline.errors import ProtocolError

__all__ = ["HEADER_BYTES", "Header", "pack_header"]

MAGIC = b"SYNC"
VERSION = 1
MESSAGE = 1
LONGEST = 1 << 40

ONLY_MESSAGES = frozenset({MESSAGE})

_FIELDS = struct.Struct("<4sBBHIIQII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size


class Header(NamedTuple):
    """What is to come: from whom, under which tag, how long.

    >>> Header.read(Header(sender=3, tag=7, length=4096, number=1).pack(), peer=3).length
    4096
    """

    sender: int
    tag: int
    length: int
    number: int
    kind: int = MESSAGE
    channel: int = 0

    def pack(self) -> bytes:
        """The 36 bytes on the wire."""
        return pack_header(*self)

    @staticmethod
    def read(data: bytes | memoryview, peer: int, kinds: Container[int] = ONLY_MESSAGES) -> Header:
        """A header that came from `peer`, or a `ProtocolError` that says what is wrong with it."""

        if len(data) != HEADER_BYTES:
            raise _refused(peer, f"{len(data)} bytes where {HEADER_BYTES} were due")
        magic, version, kind, reserved, sender, tag, length, number, channel = _FIELDS.unpack_from(data)
        if magic != MAGIC:
            raise _refused(peer, f"it starts with {magic!r}, not {MAGIC!r}: not a Syncline message")
        if version != VERSION:
            raise _refused(
                peer, f"it speaks version {version}, this is version {VERSION}: install the same release everywhere"
            )
        if _CRC.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(data[: _FIELDS.size]):
            raise _refused(peer, "its checksum does not match")
        if kind not in kinds or reserved:
            raise _refused(peer, f"unknown kind {kind} (reserved: {reserved})")
        if sender != peer:
            raise _refused(peer, f"it claims to come from rank {sender}")
        if length > LONGEST:
            raise _refused(peer, f"a length of {length} bytes")
        return Header(sender, tag, length, number, kind, channel)


def pack_header(sender: int, tag: int, length: int, number: int, kind: int = MESSAGE, channel: int = 0) -> bytes:
    """A header on the wire, without the object."""
    fields = _FIELDS.pack(MAGIC, VERSION, kind, 0, sender, tag, length, number, channel)
    return fields + _CRC.pack(zlib.crc32(fields))


def _refused(peer: int, reason: str) -> ProtocolError:
    return ProtocolError(f"header from rank {peer} refused: {reason}", peer=peer)
