"""Sends float32 exactly in fewer bytes: bytes of equal significance are grouped and compressed by Zstandard.

Signs and exponents of neighbouring gradients are similar and compress well. The lower bytes are noise.

    how u8 │ bytes        how: 0 stored, because they would not shrink; 1 a Zstandard frame with a checksum
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from syncline.codecs.base import CodecTraits, PayloadCodec, RngKey, TensorSlice, is_whole_number
from syncline.errors import ProtocolError, SpecError

__all__ = ["Lossless"]

STORED, COMPRESSED = 0, 1
FLOAT_BYTES = 4


@dataclass(frozen=True, repr=False)
class Lossless(PayloadCodec):
    """Send float32 exactly, compressed. A higher `level` compresses a little more, and takes longer.

    >>> import torch
    >>> codec = Lossless()
    >>> payload = codec.encode(torch.ones(1000))
    >>> payload.numel() < 100 and bool((codec.decode(payload, torch.empty(1000)) == 1).all())
    True
    """

    level: int = 1
    feedback: bool | None = None

    name: ClassVar[str] = "lossless"
    codec_id: ClassVar[int] = 9

    def __post_init__(self) -> None:
        if not is_whole_number(self.level, 1, 19):
            raise SpecError(f"lossless has levels from 1 (fast) to 19, not {self.level!r}")
        self.check_feedback()

    @cached_property
    def traits(self) -> CodecTraits:
        return CodecTraits(biased=False, exact=True, fixed_length=False)

    def body_bytes(self, numel: int, step: int = 0) -> int:
        return self.max_body_bytes(FLOAT_BYTES * numel)

    def write(self, part: TensorSlice, body: Tensor, rng: RngKey) -> int:
        values = part.flat
        if part.residual is not None:
            values = part.residual + values
            part.residual.zero_()
        return self.compress(values.view(torch.uint8), body, FLOAT_BYTES, self.level)

    def read(self, body: Tensor, out: Tensor, accumulate: bool) -> None:
        values = self.decompress(body, FLOAT_BYTES * out.numel(), FLOAT_BYTES).view(torch.float32)
        self.store(values, out, accumulate)

    @staticmethod
    def max_body_bytes(nbytes: int) -> int:
        """Maximum size in bytes of a compressed body of `nbytes` bytes."""
        return 1 + nbytes

    @staticmethod
    def compress(raw: Tensor, body: Tensor, width: int, level: int = 1) -> int:
        """Write bytes of numbers of `width` bytes into a body of `max_body_bytes`. Returns the bytes used."""
        assert raw.numel() % width == 0, f"{raw.numel()} B are not numbers of {width} B"
        columns = raw if width == 1 else _shuffled(raw, width)
        import zstandard  # here: it is needed only for compression

        frame = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(columns.cpu().numpy().data)
        if len(frame) >= raw.numel():
            body[0] = STORED
            body[1 : 1 + raw.numel()].copy_(raw)
            return 1 + raw.numel()
        body[0] = COMPRESSED
        body[1 : 1 + len(frame)].copy_(_tensor(frame))
        return 1 + len(frame)

    @staticmethod
    def decompress(body: Tensor, numel_bytes: int, width: int) -> Tensor:
        """The bytes of a body. A `ProtocolError` before anything is allocated if they are not exactly `numel_bytes`."""
        data = body.cpu().numpy()
        if not len(data) or data[0] not in (STORED, COMPRESSED):
            raise ProtocolError(f"a compressed body begins with 0 or 1, not {data[0] if len(data) else 'nothing'}")
        if data[0] == STORED:
            if len(data) != 1 + numel_bytes:
                raise ProtocolError(f"a stored body holds {len(data) - 1} B where {numel_bytes} B are expected")
            return body[1:].clone()
        columns = _tensor(_unzip(data[1:], numel_bytes)).to(body.device)
        return columns if width == 1 else _unshuffled(columns, width)


def _shuffled(raw: Tensor, width: int) -> Tensor:
    """The first bytes of all numbers, then the second ones, and so on. Four times faster than torch's transpose."""
    columns = torch.empty_like(raw)
    for k, column in enumerate(columns.view(width, -1)):
        column.copy_(raw[k::width])
    return columns


def _unshuffled(columns: Tensor, width: int) -> Tensor:
    raw = torch.empty_like(columns)
    for k, column in enumerate(columns.view(width, -1)):
        raw[k::width].copy_(column)
    return raw


def _unzip(frame: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], nbytes: int) -> bytes:
    import zstandard

    try:
        frame_info = zstandard.get_frame_parameters(frame.data)
        if frame_info.content_size != nbytes or frame_info.dict_id:
            raise ProtocolError(f"a frame announces {frame_info.content_size} B where {nbytes} B are expected")
        data = zstandard.ZstdDecompressor().decompress(frame.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"a compressed body of {len(frame)} B cannot be decompressed: {error}") from None
    if len(data) != nbytes:
        raise ProtocolError(f"a frame holds {len(data)} B where {nbytes} B are expected")
    return data


def _tensor(data: bytes) -> Tensor:
    found = torch.empty(len(data), dtype=torch.uint8)
    found.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return found
