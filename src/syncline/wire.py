"""Fixed binary headers: magic bytes, a version, fields of fixed width, and a CRC-32 where the header has one.

::

    ┌───────┬─────────┬──────────┬───────────────┐
    │ magic │ version │ fields … │ crc (CRC-32)  │     all little-endian
    └───────┴─────────┴──────────┴───────────────┘
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

from syncline.errors import ProtocolError

__all__ = ["WireHeader"]

Refuse = Callable[[str], ProtocolError]


class WireHeader:
    """The layout of one kind of header. `fields` are struct codes; `padding` bytes follow the checksum.

    >>> header = WireHeader(b"DEMO", version=1, fields="BI")
    >>> header.read(header.pack(7, 300), ProtocolError)
    (7, 300)
    >>> header.read(b"DEMO", ProtocolError)
    Traceback (most recent call last):
    syncline.errors.ProtocolError: its 4 B are shorter than its header of 14 B
    """

    def __init__(self, magic: bytes, version: int, fields: str, padding: int = 0) -> None:
        self._magic, self._version, self._padding = magic, version, padding
        self._fields = struct.Struct(f"<{len(magic)}sB{fields}")
        self._crc = struct.Struct(f"<I{padding}x")
        self._whole = struct.Struct(f"<{len(magic)}sB{fields}I{padding}x")
        self._checked_bytes = self._fields.size
        self.nbytes = self._whole.size

    def pack(self, *values: float) -> bytes:
        """The header on the wire."""
        data = self._fields.pack(self._magic, self._version, *values)
        return data + self._crc.pack(zlib.crc32(data))

    def read(self, data: bytes | memoryview, refuse: Refuse) -> tuple[Any, ...]:
        """The values of the header at the start of `data`. A bad header raises what `refuse` makes of the reason."""
        if len(data) < self.nbytes:
            raise refuse(f"its {len(data)} B are shorter than its header of {self.nbytes} B")
        values = self._whole.unpack_from(data)
        if values[0] != self._magic:
            raise refuse(f"it starts with {values[0]!r}, not {self._magic!r}: not a Syncline message")
        if values[1] != self._version:
            raise refuse(
                f"it has version {values[1]}, this is version {self._version}: install the same release everywhere"
            )
        if values[-1] != zlib.crc32(data[: self._checked_bytes]):
            raise refuse("its checksum does not match")
        if self._padding and any(data[self.nbytes - self._padding : self.nbytes]):
            raise refuse("its padding is not zero")
        return values[2:-1]
