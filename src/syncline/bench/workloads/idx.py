"""IDX, the file format of MNIST and its successors. Files are checked before anything in them becomes a tensor.

bytes  0 1      2          3            4 … 4+4n          then
       0 0      type       n            n sizes           the values, row by row
                8: byte    dimensions   big-endian u32    one byte each
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from syncline.errors import ProtocolError, UnsupportedError

__all__ = ["read_idx", "unpacked"]

UNSIGNED_BYTE = 8
MOST_DIMENSIONS = 4
MOST_BYTES = 1 << 30
"""A header that claims more is wrong: it is refused before memory is taken for it."""


def read_idx(path: Path) -> Tensor:
    """The values of a file of bytes, gzipped or plain, in the shape that its header says."""
    try:
        with unpacked(path) as file:
            return _read(file, path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ProtocolError(
            f"{path}: the gzip stream is cut short or damaged ({error}); fetch the file again"
        ) from None
    except OSError as error:
        raise UnsupportedError(f"{path} cannot be read: {error}") from None


def unpacked(path: Path) -> IO[bytes]:
    """The file's content, whether it is gzipped or not: its first bytes say so, not its name."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb")


def _read(file: IO[bytes], path: Path) -> Tensor:
    head = _exactly(file, 4, path, "of the magic number")
    zeros, kind, dimensions = struct.unpack(">HBB", head)
    if zeros != 0:
        raise ProtocolError(f"{path} is no IDX file: it begins with {head.hex(' ')}, not with 00 00")
    if kind != UNSIGNED_BYTE or not 1 <= dimensions <= MOST_DIMENSIONS:
        raise ProtocolError(
            f"{path}: IDX type 0x{kind:02x} in {dimensions} dimensions; bytes (0x08) in 1 to {MOST_DIMENSIONS} are read"
        )
    shape = struct.unpack(f">{dimensions}I", _exactly(file, 4 * dimensions, path, "of sizes"))
    count = math.prod(shape)
    if not 0 < count <= MOST_BYTES:
        raise ProtocolError(f"{path}: the header says {'×'.join(map(str, shape))} values; 1 to {MOST_BYTES:,} are read")
    values = bytearray(_exactly(file, count, path, f"for {'×'.join(map(str, shape))}"))
    if file.read(1):
        raise ProtocolError(f"{path}: bytes follow the {count:,} values of the header; fetch the file again")
    return torch.frombuffer(values, dtype=torch.uint8).view(shape)


def _exactly(file: IO[bytes], count: int, path: Path, what: str) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise ProtocolError(f"{path}: truncated, {len(data):,} bytes where {count:,} {what} were due")
    return data
