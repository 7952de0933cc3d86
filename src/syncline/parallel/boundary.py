"""Values and gradients between pipeline ranks: each is one message of a length that both sides know in advance.

```text
┌──────────────────── 128 bytes ─────────────────────┬───────────────┐
│ magic, version, kind, dtype, flags, step, shape, … │ body …        │   first frame
└────────────────────────────────────────────────────┴───────────────┘
                                       ┌───────────────────────────┐
                                       │ the rest of a longer body │   only if it is longer than last time
                                       └───────────────────────────┘
```

A receive can be posted before the sender has computed, because both sides know the length of the first frame: it is
that of the latest message of the same place (value, peer and micro-batch). So the shape may change at any time. If the
body is shorter than last time, the frame is padded; if it is longer, its rest follows in a second frame.

Between two GPUs that a channel connects, the body does not pass the CPU. A channel has no tags, so the headers travel
in the order of the bodies, under one tag, and the receiver takes both in that order. It keeps what it needs later::

    headers   F0   F1   loss   F2       by the transport, 128 bytes each, before the GPU has computed the body
    bodies    F0   F1          F2       by the channel; a body on the CPU follows by the transport, under its own tag
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, PeerLostError, ProtocolError
from syncline.transports import Handle, Transport
from syncline.transports.base import LANE_TAGS, PendingTensor, TensorChannel, TensorChannels, as_bytes
from syncline.wire import WireHeader

__all__ = ["HEADER_BYTES", "Boundary", "Place"]

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""The dtype of each code on the wire. New ones are added at the end."""
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
MAX_DIMENSIONS = 8
HEADER = WireHeader(b"SLPV", version=2, fields=f"BBBB4Q{MAX_DIMENSIONS}Q", padding=19)
HEADER_BYTES = HEADER.nbytes
"""A multiple of 64, so that the body behind it is aligned."""
MAX_BODY_BYTES = 1 << 36
MAX_FREE_BYTES = 1 << 28
"""Bytes of frames that are kept for later messages."""
MAX_CACHED_HEADERS = 4096
MAX_TAGGED_MICRO_BATCHES = 1 << 10
"""Micro-batches whose messages have different tags. Messages of one tag arrive in order."""
NOTHING = torch.Size((0,))
"""The shape of a body without elements."""
NEEDS_GRADIENT, EMPTY, CHANNELS_LAST, ON_CHANNEL = 1, 2, 4, 8
"""Flags: the sender waits for the value's gradient; there is no tensor (a gradient that is None); the memory format;
the body travels on a channel."""
HEADERS_TAG = LANE_TAGS - 1
"""The tag of the headers between two workers that a channel connects."""


@dataclass(frozen=True)
class Place:
    """What a message carries: the number of a value or of a gradient, and its micro-batch."""

    number: int
    micro_batch: int
    text: str
    """For messages to users, such as "the output layer1 of stage 0 for micro-batch 3"."""

    @cached_property
    def tag(self) -> int:
        """The tag of its messages."""
        return self.number * MAX_TAGGED_MICRO_BATCHES + self.micro_batch % MAX_TAGGED_MICRO_BATCHES


class _Header(NamedTuple):
    """A header without its step."""

    dtype: torch.dtype
    flags: int
    shape: torch.Size
    stride: tuple[int, ...]
    micro_batch: int
    nbytes: int
    tag: int


@dataclass
class _Receive:
    frame: Tensor
    handle: Handle


@dataclass
class _HostBody:
    """A body that the transport receives."""

    data: Tensor
    handle: Handle

    def wait(self) -> Tensor:
        self.handle.wait()
        return self.data


@dataclass
class _Incoming:
    """The messages from a worker that a channel connects with this one."""

    channel: TensorChannel
    headers: deque[_Receive] = field(default_factory=deque)
    """Posted receives of the next headers: one for each tag that is expected."""
    expected: set[int] = field(default_factory=set)
    arrived: dict[int, deque[tuple[_Header, int, PendingTensor | None]]] = field(default_factory=dict)
    """By tag: messages that came before others that were needed first."""


FrameKey = tuple[int, torch.dtype, torch.Size, int]


@dataclass
class _Frame:
    """A first frame, with views of its header and of a body of one shape."""

    key: FrameKey
    buffer: Tensor
    header: memoryview
    body: Tensor


@dataclass
class _Send:
    place: Place
    handles: list[Handle]
    frame: _Frame


class Boundary:
    """Sends and receives the values of one pipeline rank."""

    def __init__(self, transport: Transport, device: torch.device, channels: TensorChannels | None = None) -> None:
        """`channels` connect the GPUs of some of the workers."""
        self._transport = transport
        self._device = device
        self._channels = TensorChannels() if channels is None else channels
        others = [worker for worker in range(transport.size) if worker != transport.rank]
        to = {worker: self._channels.find(transport.rank, worker) for worker in others}
        self._outgoing = {worker: channel for worker, channel in to.items() if channel is not None}
        came = {worker: self._channels.find(worker, transport.rank) for worker in others}
        self._incoming = {worker: _Incoming(channel) for worker, channel in came.items() if channel is not None}
        self.uses_channels = False
        """Whether bodies may travel on channels."""
        self._frame_bytes: dict[tuple[bool, int, int], int] = {}
        """By direction, peer and tag: the bytes of the latest message with its header."""
        self._headers: dict[tuple[int, ...], _Header] = {}
        """By their fields without the step: headers that were checked. Those of the next step are equal."""
        self._posted: dict[tuple[int, int], _Receive] = {}
        self._sending: dict[tuple[int, int], _Send] = {}
        self._texts: dict[int, str] = {}
        """By tag: the latest message that was awaited."""
        transport.name_message = lambda tag: self._texts.get(tag, f"tag {tag}")
        self._frames: dict[FrameKey, list[_Frame]] = {}
        """Frames that are free."""
        self._free_bytes = 0
        self.sent_bytes = 0
        self.on_wait: Callable[[float, float], None] = lambda start, stop: None
        """Called after a message was received, with the seconds of the runtime's clock before and after."""

    def send(self, tensor: Tensor | None, to: int, place: Place, step: int) -> None:
        """Send a value or a gradient; None is a gradient that does not exist. The tensor may change afterwards."""
        try:
            self._send(tensor, to, place, step)
        except PeerLostError as error:
            raise self._with_place(error, to, place) from error

    def _send(self, tensor: Tensor | None, to: int, place: Place, step: int) -> None:
        flags, code, shape = EMPTY, 0, torch.Size()
        if tensor is not None:
            flags, code, shape = _flags(tensor), _code(tensor, place), tensor.shape
        nbytes = 0 if tensor is None else tensor.numel() * tensor.element_size()
        channel = self._outgoing.get(to)
        if channel is not None:
            self._send_in_order(channel, tensor, to, place, (flags, code, shape, step, nbytes))
            return
        key = (True, to, place.tag)
        length = self._frame_bytes.get(key, HEADER_BYTES)
        whole = nbytes <= length - HEADER_BYTES
        frame = self._take_frame(length, DTYPES[code], shape if whole and nbytes else NOTHING, flags)
        frame.header[:] = _pack(code, flags, shape, step, place, nbytes)
        buffers = [frame.buffer]
        if tensor is not None and nbytes:
            body = _as_sent(tensor.detach(), flags)
            if whole:
                frame.body.copy_(body)
            else:
                space = length - HEADER_BYTES
                flat = body.contiguous().view(-1).to("cpu", copy=True).view(torch.uint8)
                frame.buffer[HEADER_BYTES:] = flat[:space]
                buffers.append(flat[space:].clone() if space else flat)
        self._frame_bytes[key] = HEADER_BYTES + nbytes
        handles = [self._transport.send(buffer, to, place.tag, exact=True) for buffer in buffers]
        self._wait_sent(to, place)  # of an earlier step: complete by now
        self._sending[to, place.tag] = _Send(place, handles, frame)
        self.sent_bytes += max(length, HEADER_BYTES + nbytes)

    def _send_in_order(
        self,
        channel: TensorChannel,
        tensor: Tensor | None,
        to: int,
        place: Place,
        description: tuple[int, int, torch.Size, int, int],
    ) -> None:
        """Send a header, then the body: on the channel, or by the transport if it is on the CPU."""
        flags, code, shape, step, nbytes = description
        on_channel = tensor is not None and nbytes > 0 and self.uses_channels and channel.carries(tensor)
        frame = self._take_frame(HEADER_BYTES, DTYPES[0], NOTHING, 0)
        header_flags = flags | ON_CHANNEL if on_channel else flags
        frame.header[:] = _pack(code, header_flags, shape, step, place, nbytes)
        handles = [self._transport.send(frame.buffer, to, HEADERS_TAG, exact=True)]
        if tensor is not None and nbytes:
            body = _as_sent(tensor.detach(), flags)
            if on_channel:
                own = body.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
                channel.send(as_bytes(own), place.text)
            else:
                flat = as_bytes(body.resolve_conj().resolve_neg().contiguous()).to("cpu", copy=True)
                handles.append(self._transport.send(flat, to, place.tag, exact=True))
        self._wait_sent(to, place)  # of an earlier step: complete by now
        self._sending[to, place.tag] = _Send(place, handles, frame)
        self.sent_bytes += HEADER_BYTES + nbytes

    def _take_frame(self, length: int, dtype: torch.dtype, shape: torch.Size, flags: int) -> _Frame:
        """A frame that is not being sent. Frames are reused: a fresh one would take longer than to copy the body."""
        key = (length, dtype, shape, flags & CHANNELS_LAST)
        free = self._frames.get(key)
        if free:
            self._free_bytes -= length
            return free.pop()
        buffer = torch.empty(length, dtype=torch.uint8)
        nbytes = math.prod(shape) * dtype.itemsize
        body = _as_sent_shape(buffer[HEADER_BYTES : HEADER_BYTES + nbytes].view(dtype), shape, flags)
        return _Frame(key, buffer, buffer.numpy().data[:HEADER_BYTES], body)

    def _give_frame(self, frame: _Frame) -> None:
        """Keep a frame that was sent. If too many bytes are kept, they are released first."""
        length = frame.buffer.numel()
        if self._free_bytes + length > MAX_FREE_BYTES:
            self._frames.clear()
            self._free_bytes = 0
        if length <= MAX_FREE_BYTES:
            self._frames.setdefault(frame.key, []).append(frame)
            self._free_bytes += length

    def wait_sent(self, to: int, place: Place) -> None:
        """Wait until the latest message of a place has left, so that its memory is free."""
        try:
            self._wait_sent(to, place)
        except PeerLostError as error:
            raise self._with_place(error, to, place) from error

    def _wait_sent(self, to: int, place: Place) -> None:
        sent = self._sending.pop((to, place.tag), None)
        if sent is not None:
            for handle in sent.handles:
                handle.wait()
            self._give_frame(sent.frame)

    def wait_all_sent(self) -> None:
        """Wait until all messages have left, except for bodies on channels: the GPU waits for these."""
        for (to, _), sent in list(self._sending.items()):
            self.wait_sent(to, sent.place)
        self._channels.check()

    def close(self) -> None:
        """Close the channels."""
        self._channels.close()

    def expect(self, source: int, place: Place) -> None:
        """Post the receive of a message before it is needed. A second call does nothing."""
        try:
            self._expect(source, place)
        except PeerLostError as error:
            raise self._with_place(error, source, place) from error

    def _expect(self, source: int, place: Place) -> None:
        key = (source, place.tag)
        incoming = self._incoming.get(source)
        if incoming is not None:
            self._expect_in_order(incoming, source, place)
        elif key not in self._posted:
            nbytes = self._frame_bytes.get((False, *key), HEADER_BYTES)
            frame = torch.empty(nbytes, dtype=torch.uint8)
            self._texts[place.tag] = place.text
            self._posted[key] = _Receive(frame, self._transport.recv(frame, source, place.tag, exact=True))

    def _expect_in_order(self, incoming: _Incoming, source: int, place: Place) -> None:
        if place.tag not in incoming.expected and not incoming.arrived.get(place.tag):
            incoming.expected.add(place.tag)
            self._texts[place.tag] = place.text
            self._post_header(incoming, source)

    def _post_header(self, incoming: _Incoming, source: int) -> None:
        frame = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        incoming.headers.append(_Receive(frame, self._transport.recv(frame, source, HEADERS_TAG, exact=True)))

    def receive(self, source: int, place: Place, step: int) -> Tensor | None:
        """Wait for a message. A value that needs a gradient comes as a leaf that requires one."""
        start = self._transport.runtime.now()
        try:
            found = self._receive(source, place, step)
        except PeerLostError as error:
            raise self._with_place(error, source, place) from error
        self.on_wait(start, self._transport.runtime.now())
        return found

    def _receive(self, source: int, place: Place, step: int) -> Tensor | None:
        self._expect(source, place)
        incoming = self._incoming.get(source)
        pending: PendingTensor | None = None
        frame: Tensor | None = None
        if incoming is not None:
            header, found_step, pending = self._receive_in_order(incoming, source, place)
        else:
            posted = self._posted.pop((source, place.tag))
            posted.handle.wait()
            frame = posted.frame
            header, found_step = self._read_header(frame, source, place.text)
            self._frame_bytes[False, source, place.tag] = HEADER_BYTES + header.nbytes
        if found_step != step or header.micro_batch != place.micro_batch:
            raise self._refusal(
                source,
                place.text,
                f"it is of step {found_step}, micro-batch {header.micro_batch}, and step {step}, micro-batch "
                f"{place.micro_batch} was expected: do all ranks call the same methods of the run?",
            )
        if header.flags & EMPTY:
            return None
        if frame is not None:
            flat, offset = self._body(frame, header.nbytes, source, place)
        else:
            flat, offset = torch.empty(0, dtype=torch.uint8) if pending is None else pending.wait(), 0
        value = flat.view(header.dtype).as_strided(header.shape, header.stride, offset // header.dtype.itemsize)
        value = value.to(self._device)
        return value.requires_grad_() if header.flags & NEEDS_GRADIENT else value

    def _read_header(self, frame: Tensor, source: int, what: str) -> tuple[_Header, int]:
        """A header, and its step."""
        values = HEADER.read(frame.numpy().data[:HEADER_BYTES], lambda reason: self._refusal(source, what, reason))
        fields = values[:4] + values[5:]
        header = self._headers.get(fields)
        if header is None:
            header = self._check_header(fields, source, what)
            if len(self._headers) >= MAX_CACHED_HEADERS:
                self._headers.clear()
            self._headers[fields] = header
        return header, values[4]

    def _check_header(self, fields: tuple[int, ...], source: int, what: str) -> _Header:
        code, flags, count, _, micro_batch, nbytes, tag, *dimensions = fields
        shape = torch.Size(dimensions[:count]) if count <= MAX_DIMENSIONS else torch.Size()
        if code >= len(DTYPES) or count > MAX_DIMENSIONS or nbytes > MAX_BODY_BYTES or tag >= HEADERS_TAG:
            problem = f"dtype {code}, {count} dimensions, {nbytes} bytes, tag {tag} are not within the limits"
            raise self._refusal(source, what, problem)
        if nbytes != (0 if flags & EMPTY else math.prod(shape) * DTYPES[code].itemsize):
            raise self._refusal(source, what, f"its shape {list(shape)} and its {nbytes} bytes do not agree")
        if flags & CHANNELS_LAST and count != 4:
            raise self._refusal(source, what, f"its memory format needs 4 dimensions, and its shape is {list(shape)}")
        stride = _stride(shape, flags)
        return _Header(DTYPES[code], flags, shape, stride, micro_batch, nbytes, tag)

    def _refusal(self, source: int, what: str, reason: str) -> ProtocolError:
        peer = self._transport.members[source]
        return ProtocolError(f"rank {peer} sent {what}, and it cannot be used: {reason}", peer=peer)

    def _receive_in_order(
        self, incoming: _Incoming, source: int, place: Place
    ) -> tuple[_Header, int, PendingTensor | None]:
        """Take messages until that of a place has come, and begin to receive their bodies."""
        while not incoming.arrived.get(place.tag):
            if not incoming.headers:  # their messages came before this one
                self._post_header(incoming, source)
            posted = incoming.headers.popleft()
            self._texts[HEADERS_TAG] = place.text
            posted.handle.wait()
            header, step = self._read_header(posted.frame, source, place.text)
            incoming.expected.discard(header.tag)
            what = self._texts.get(header.tag, place.text)
            body: PendingTensor | None = None
            if header.flags & ON_CHANNEL:
                body = incoming.channel.receive(header.nbytes, what)
            elif header.nbytes:
                data = torch.empty(header.nbytes, dtype=torch.uint8)
                body = _HostBody(data, self._transport.recv(data, source, header.tag, exact=True))
            incoming.arrived.setdefault(header.tag, deque()).append((header, step, body))
        return incoming.arrived[place.tag].popleft()

    def _body(self, frame: Tensor, nbytes: int, source: int, place: Place) -> tuple[Tensor, int]:
        """The bytes in which a body is, and where it begins there."""
        there = frame.numel() - HEADER_BYTES
        if nbytes == there:  # the usual case
            return frame, HEADER_BYTES
        if nbytes < there:
            return frame[: HEADER_BYTES + nbytes], HEADER_BYTES
        body = torch.empty(nbytes, dtype=torch.uint8)
        body[:there] = frame[HEADER_BYTES:]
        self._transport.recv(body[there:], source, place.tag, exact=True).wait()
        return body, 0

    def _with_place(self, error: PeerLostError, peer: int, place: Place) -> PeerLostError:
        """The error about a lost rank, extended by the value that was being sent."""
        return PeerLostError(
            f"{error}; {place.text} was being sent between this rank and rank {self._transport.members[peer]}",
            peer=error.peer,
            pending=place.text,
            seconds=error.seconds,
        )


def _pack(code: int, flags: int, shape: torch.Size, step: int, place: Place, nbytes: int) -> bytes:
    dimensions = [*shape, *[0] * (MAX_DIMENSIONS - len(shape))]
    return HEADER.pack(code, flags, len(shape), 0, step, place.micro_batch, nbytes, place.tag, *dimensions)


def _flags(tensor: Tensor) -> int:
    last = tensor.dim() == 4 and not tensor.is_contiguous()
    last = last and tensor.is_contiguous(memory_format=torch.channels_last)
    return (NEEDS_GRADIENT if tensor.requires_grad else 0) | (CHANNELS_LAST if last else 0)


def _code(tensor: Tensor, place: Place) -> int:
    code = CODES.get(tensor.dtype)
    if code is None or tensor.dim() > MAX_DIMENSIONS or tensor.layout != torch.strided:
        raise IncompatibleError(
            f"{place.text} is a {tensor.layout} tensor of {tensor.dtype} with {tensor.dim()} dimensions, and a tensor "
            f"between stages is dense, of one of {len(DTYPES)} common dtypes, with at most {MAX_DIMENSIONS} "
            "dimensions: convert it at the end of its stage, or cut the model elsewhere"
        )
    return code


def _as_sent(tensor: Tensor, flags: int) -> Tensor:
    return tensor.permute(0, 2, 3, 1) if flags & CHANNELS_LAST else tensor


def _as_sent_shape(flat: Tensor, shape: torch.Size, flags: int) -> Tensor:
    """The memory of a body, in the shape that `_as_sent` gives the tensor."""
    if not flags & CHANNELS_LAST or len(shape) != 4:
        return flat.view(shape)
    samples, channels, height, width = shape
    return flat.view(samples, height, width, channels)


def _stride(shape: torch.Size, flags: int) -> tuple[int, ...]:
    """That of a received tensor."""
    if not flags & CHANNELS_LAST:
        return torch.empty(shape, device="meta").stride()
    samples, channels, height, width = shape
    return torch.empty((samples, height, width, channels), device="meta").permute(0, 3, 1, 2).stride()
