"""The header that goes before a body whose length the receiver does not know.

::

    0      4   5    6       8        12    16        24       28     32
    ┌──────┬───┬────┬───────┬────────┬─────┬─────────┬────────┬──────┐
    │ SYNC │ v │kind│   0   │ sender │ tag │ length  │ number │ crc  │
    └──────┴───┴────┴───────┴────────┴─────┴─────────┴────────┴──────┘

All little-endian. `number` counts the sender's messages and pairs a header with its body; `crc` is CRC-32 of the rest.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from syncline.errors import ProtocolError

__all__ = ["HEADER_BYTES", "Header"]

MAGIC = b"SYNC"
VERSION = 1
MESSAGE = 1
LONGEST = 1 << 40

_FIELDS = struct.Struct("<4sBBHIIQI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size


@dataclass(frozen=True)
class Header:
    """What is to come: from whom, under which tag, how long.

    >>> Header.read(Header(sender=3, tag=7, length=4096, number=1).pack(), peer=3).length
    4096
    """

    sender: int
    tag: int
    length: int
    number: int
    kind: int = MESSAGE

    def pack(self) -> bytes:
        """The 32 bytes on the wire."""
        fields = _FIELDS.pack(MAGIC, VERSION, self.kind, 0, self.sender, self.tag, self.length, self.number)
        return fields + _CRC.pack(zlib.crc32(fields))

    @staticmethod
    def read(data: bytes, peer: int) -> Header:
        """A header that came from `peer`, or a `ProtocolError` that says what is wrong with it."""

        def refuse(reason: str) -> ProtocolError:
            return ProtocolError(f"header from rank {peer} refused: {reason}", peer=peer)

        if len(data) != HEADER_BYTES:
            raise refuse(f"{len(data)} bytes where {HEADER_BYTES} were due")
        magic, version, kind, reserved, sender, tag, length, number = _FIELDS.unpack_from(data)
        if magic != MAGIC:
            raise refuse(f"it starts with {magic!r}, not {MAGIC!r}: not a Syncline message")
        if version != VERSION:
            raise refuse(f"it speaks version {version}, this is version {VERSION}: install the same release everywhere")
        if _CRC.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(data[: _FIELDS.size]):
            raise refuse("its checksum does not match")
        if kind != MESSAGE or reserved:
            raise refuse(f"unknown kind {kind} (reserved: {reserved})")
        if sender != peer:
            raise refuse(f"it claims to come from rank {sender}")
        if length > LONGEST:
            raise refuse(f"a length of {length} bytes")
        return Header(sender, tag, length, number, kind)
