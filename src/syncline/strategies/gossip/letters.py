"""What two workers say to each other when they average: a fixed header, then a row of numbers.

magic 4s │ version u8 │ kind u8 │ 2 spare │ number u64 │ bytes of the row u64 │ CRC-32 u32 │ 4 spare │ row …
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from syncline.errors import ProtocolError

__all__ = [
    "ANSWERS",
    "ASKING",
    "AVERAGE",
    "DONE",
    "FINAL",
    "HEADER_BYTES",
    "OK",
    "READ",
    "REFUSED",
    "Letter",
    "room_for",
]

MAGIC = b"SLGP"
VERSION = 1
_FIELDS = struct.Struct("<4sBB2xQQ")
_CRC = struct.Struct("<I4x")  # the row after it is aligned
HEADER_BYTES = _FIELDS.size + _CRC.size

AVERAGE, READ, DONE, FINAL, OK, REFUSED = range(1, 7)

ASKING = 1
"""The tag of all that is asked or told."""
ANSWERS = {AVERAGE: 2, READ: 3}
"""The tags of answers: two tasks may ask one worker different things at once."""


@dataclass(frozen=True)
class Letter:
    """A message as it was read. The row lies in the buffer that it came in.

    >>> Letter.read(Letter.write(AVERAGE, 7, torch.ones(2)), peer=1).row(torch.float32)
    tensor([1., 1.])
    """

    kind: int
    number: int
    body: Tensor
    peer: int

    @staticmethod
    def write(kind: int, number: int, row: Tensor | None = None) -> Tensor:
        """The bytes of one."""
        whole = room_for(row)
        length = whole.numel() - HEADER_BYTES
        fields = _FIELDS.pack(MAGIC, VERSION, kind, number, length)
        head = fields + _CRC.pack(zlib.crc32(fields))
        whole[:HEADER_BYTES] = torch.from_numpy(np.frombuffer(head, np.uint8).copy())
        if row is not None:
            whole[HEADER_BYTES:].view(row.dtype).copy_(row)
        return whole

    @staticmethod
    def read(data: Tensor, peer: int) -> Letter:
        """What came from `peer`; what is no letter is refused."""
        if data.numel() < HEADER_BYTES:
            raise ProtocolError(f"rank {peer} sent {data.numel()} B, and a header alone has {HEADER_BYTES}", peer=peer)
        head = data[:HEADER_BYTES].numpy().tobytes()
        magic, version, kind, number, length = _FIELDS.unpack_from(head)
        if (
            magic != MAGIC
            or version != VERSION
            or _CRC.unpack_from(head, _FIELDS.size)[0] != zlib.crc32(head[: _FIELDS.size])
        ):
            raise ProtocolError(f"rank {peer} sent what is no letter of version {VERSION} ({head[:6]!r} …)", peer=peer)
        if not AVERAGE <= kind <= REFUSED or length != data.numel() - HEADER_BYTES:
            raise ProtocolError(
                f"rank {peer} sent a letter of kind {kind} that announces {length} B and has "
                f"{data.numel() - HEADER_BYTES}",
                peer=peer,
            )
        return Letter(kind, number, data[HEADER_BYTES:], peer)

    def row(self, dtype: torch.dtype, numel: int | None = None) -> Tensor:
        """Its numbers; another number of them than `numel` is refused."""
        due = self.body.numel() if numel is None else numel * dtype.itemsize
        if self.body.numel() != due or self.body.numel() % dtype.itemsize:
            raise ProtocolError(
                f"rank {self.peer} sent a row of {self.body.numel()} B where {due} were due: it trains another model",
                peer=self.peer,
            )
        return self.body.view(dtype)


def room_for(row: Tensor | None) -> Tensor:
    """A buffer for a letter with such a row."""
    return torch.empty(HEADER_BYTES + (0 if row is None else row.nbytes), dtype=torch.uint8)
