"""What a rank tells about an operation it asks for, and the bytes that say so.

```text
request   kind u8 │ op u8 │ device u8 │ parts u16 │ root i32 │ before f64 │ after f64 │ name │ refusal │ parts │ splits
name      u16 length, utf-8; so is the refusal
part      dtype u8 │ dimensions u8 │ i64 each
splits    u32 count, i64 each
```

An answer is a plan: the request of one rank that all have agreed to, and how many rows each rank brings.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.errors import ProtocolError

__all__ = [
    "DEVICES",
    "DTYPES",
    "KINDS",
    "OPS",
    "CoordinatorAnswer",
    "Departure",
    "MessageReader",
    "MessageWriter",
    "OperationFailure",
    "OperationPlan",
    "OperationRequest",
    "TensorInfo",
    "as_tensor",
    "disagreement",
    "pack_answer",
    "pack_departure",
    "pack_requests",
    "read_answer",
    "read_departure",
    "read_requests",
]

KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "add", "remove", "team")
OPS = ("none", "average", "sum", "adasum", "min", "max", "product")
DEVICES = ("cpu", "cuda")
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
)
_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}
_HEAD = struct.Struct("<BBBHidd")
MOST_DIMENSIONS = 64
MOST_PARTS = 1 << 16
MOST_NAME = 4096


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of an operation."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class OperationRequest:
    """An operation as one rank asks for it. A group has several parts."""

    kind: str
    name: str
    parts: tuple[TensorInfo, ...] = ()
    op: str = "none"
    root: int = -1
    before: float = 1.0
    after: float = 1.0
    device: str = "cpu"
    splits: tuple[int, ...] = ()
    """Of an all-to-all, the rows for each rank; of a process set that is added, its ranks."""
    refusal: str = ""
    """Why this rank has refused the call; the other ranks need not wait for it."""

    def pack(self, into: MessageWriter) -> None:
        into.put(
            _HEAD,
            KINDS.index(self.kind),
            OPS.index(self.op),
            DEVICES.index(self.device),
            len(self.parts),
            self.root,
            self.before,
            self.after,
        )
        into.text(self.name)
        into.text(self.refusal)
        for part in self.parts:
            into.put(_TWO, _NUMBER[part.dtype], len(part.shape))
            into.numbers(part.shape)
        into.put(_LONG, len(self.splits))
        into.numbers(self.splits)

    @classmethod
    def read(cls, source: MessageReader) -> OperationRequest:
        kind, op, device, count, root, before, after = source.take(_HEAD)
        name, refusal = source.text(), source.text()
        parts = []
        for _ in range(count):
            dtype, dimensions = source.take(_TWO)
            if dtype >= len(DTYPES) or dimensions > MOST_DIMENSIONS:
                raise source.wrong(f"a tensor of dtype number {dtype} with {dimensions} dimensions")
            parts.append(TensorInfo(DTYPES[dtype], source.numbers(dimensions)))
        (length,) = source.take(_LONG)
        splits = source.numbers(length)
        if kind >= len(KINDS) or op >= len(OPS) or device >= len(DEVICES):
            raise source.wrong(f"a request of kind {kind}, op {op}, device {device}")
        return cls(KINDS[kind], name, tuple(parts), OPS[op], root, before, after, DEVICES[device], splits, refusal)

    @property
    def label(self) -> str:
        """The name as the user gave it."""
        return self.name.split(".", 1)[-1]


@dataclass(frozen=True)
class OperationPlan:
    """What all ranks carry out."""

    request: OperationRequest
    number: int = -1
    """Under which it is known from now on; -1: it is not kept."""
    rows: tuple[tuple[int, ...], ...] = ()
    """Of each rank: the first dimension of each part, or the rows it sends to each rank."""

    def pack(self, into: MessageWriter) -> None:
        into.put(_NUMBERED, self.number, len(self.rows))
        self.request.pack(into)
        for row in self.rows:
            into.put(_LONG, len(row))
            into.numbers(row)

    @classmethod
    def read(cls, source: MessageReader) -> OperationPlan:
        number, ranks = source.take(_NUMBERED)
        request = OperationRequest.read(source)
        return cls(request, number, tuple(source.numbers(source.take(_LONG)[0]) for _ in range(ranks)))


@dataclass(frozen=True)
class OperationFailure:
    """An operation that cannot be carried out, and why."""

    name: str
    why: str
    late: tuple[int, ...] = ()
    """Ranks that have not asked for it yet: they are told when they do."""
    only: tuple[int, ...] = ()
    """The ranks that it concerns; empty for all."""

    def pack(self, into: MessageWriter) -> None:
        into.text(self.name)
        into.text(self.why)
        for ranks in (self.late, self.only):
            into.put(_LONG, len(ranks))
            into.numbers(ranks)

    @classmethod
    def read(cls, source: MessageReader) -> OperationFailure:
        name, why = source.text(), source.text()
        late, only = (source.numbers(source.take(_LONG)[0]) for _ in range(2))
        return cls(name, why, late, only)


@dataclass(frozen=True)
class Departure:
    """A rank that has left, and how many operations it completed: the others need not wait for later ones."""

    rank: int
    why: str
    known: bool = False
    """Whether the numbers below are known; they are not for a lost rank."""
    carried: int = -1
    """Operations that it has carried out; -1 for all that it was assigned."""
    rounds: tuple[tuple[int, int], ...] = ()
    """Channels of optimizers, and the reductions of gradients that it has completed on each."""

    def pack(self, into: MessageWriter) -> None:
        into.put(_LEAVING, self.rank, self.known, self.carried)
        into.text(self.why)
        into.put(_LONG, len(self.rounds))
        into.numbers([number for pair in self.rounds for number in pair])

    @classmethod
    def read(cls, source: MessageReader) -> Departure:
        rank, known, carried = source.take(_LEAVING)
        why = source.text()
        numbers = source.numbers(2 * source.take(_LONG)[0])
        return cls(rank, why, bool(known), carried, tuple(zip(numbers[::2], numbers[1::2], strict=True)))


@dataclass
class CoordinatorAnswer:
    """What the ranks are told to do: known operations, then new ones; and what fails."""

    mask: int = 0
    plans: list[OperationPlan] = field(default_factory=list)
    failures: list[OperationFailure] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.mask or self.plans or self.failures)


_TWO = struct.Struct("<BB")
_LONG = struct.Struct("<I")
_SHORT = struct.Struct("<H")
_NUMBERED = struct.Struct("<iI")
_LEAVING = struct.Struct("<I?q")


class MessageWriter:
    """Bytes that grow.

    >>> writer = MessageWriter()
    >>> OperationRequest("allreduce", "allreduce.w", (TensorInfo(torch.float32, (2, 3)),), op="sum").pack(writer)
    >>> OperationRequest.read(MessageReader(writer.data, peer=0)).parts[0].shape
    (2, 3)
    """

    def __init__(self) -> None:
        self.data = bytearray()

    def put(self, layout: struct.Struct, *values: float) -> None:
        self.data += layout.pack(*values)

    def text(self, text: str) -> None:
        encoded = text.encode()[:MOST_NAME]
        self.data += _SHORT.pack(len(encoded)) + encoded

    def numbers(self, numbers: Sequence[int]) -> None:
        self.data += struct.pack(f"<{len(numbers)}q", *numbers)


class MessageReader:
    """Takes bytes apart; what is short or strange is a `ProtocolError` that names the peer."""

    def __init__(self, data: bytes | bytearray | memoryview, peer: int) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._peer = peer

    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self._cut(layout.size))

    def text(self) -> str:
        (length,) = self.take(_SHORT)
        return bytes(self._cut(length)).decode(errors="replace")

    def numbers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}q", self._cut(8 * count))

    def wrong(self, what: str) -> ProtocolError:
        return ProtocolError(f"rank {self._peer} sent what cannot be read: {what}", peer=self._peer)

    def _cut(self, nbytes: int) -> memoryview:
        if nbytes > self.left():
            raise self.wrong(f"{nbytes} bytes are missing at {self._at} of {len(self._data)}")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]


def disagreement(requests: dict[int, OperationRequest], ranks: Sequence[int] | None = None) -> str:
    """The first thing in which ranks differ that they must agree on; empty where they agree. `ranks`: a set's members.

    >>> one = OperationRequest("allreduce", "allreduce.w", (TensorInfo(torch.float32, (2,)),), op="sum")
    >>> disagreement({0: one, 1: OperationRequest("allreduce", "allreduce.w", one.parts, op="min")})
    'op: sum on rank 0, min on rank 1'
    """
    named = range(max(requests) + 1) if ranks is None else ranks
    looks = {named[rank]: _essentials(request, named) for rank, request in requests.items()}
    first = next(iter(looks))
    for what in looks[first]:
        groups: dict[str, list[int]] = {}
        for rank, look in looks.items():
            groups.setdefault(look[what], []).append(rank)
        if len(groups) > 1:
            told = (
                f"{text} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for text, ranks in groups.items()
            )
            return f"{what}: {', '.join(told)}"
    return ""


def _essentials(request: OperationRequest, ranks: Sequence[int]) -> dict[str, str]:
    """What must be the same everywhere, as people say it."""
    free = request.kind in ("allgather", "alltoall")
    shapes = [list(part.shape[1:]) if free else list(part.shape) for part in request.parts]
    told = {
        "kind": request.kind,
        "number of tensors": str(len(request.parts)),
        "dtype": ", ".join(str(part.dtype).removeprefix("torch.") for part in request.parts),
        "dimensions": ", ".join(str(len(part.shape)) for part in request.parts),
        "shape beyond the first dimension" if free else "shape": ", ".join(map(str, shapes)),
        "op": request.op,
        "root rank": str(ranks[request.root] if 0 <= request.root < len(ranks) else request.root),
        "prescale_factor": repr(request.before),
        "postscale_factor": repr(request.after),
        "device": request.device,
    }
    if request.kind in ("add", "remove"):
        told["ranks"] = str(list(request.splits))
    return told


_COUNTS = struct.Struct("<II")


def as_tensor(data: bytes | bytearray) -> Tensor:
    """Bytes, as transports take them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def pack_requests(requests: Sequence[OperationRequest]) -> bytearray:
    """Requests one after the other."""
    writer = MessageWriter()
    for request in requests:
        request.pack(writer)
    return writer.data


def read_requests(body: bytes, source: int) -> list[OperationRequest]:
    """What a rank asks for in full."""
    reader, found = MessageReader(body, source), []
    while reader.left():
        found.append(OperationRequest.read(reader))
    return found


def pack_answer(answer: CoordinatorAnswer) -> bytearray:
    """What is not said by bits; nothing where bits say it all."""
    writer = MessageWriter()
    if answer.plans or answer.failures:
        writer.put(_COUNTS, len(answer.plans), len(answer.failures))
        for plan in answer.plans:
            plan.pack(writer)
        for failure in answer.failures:
            failure.pack(writer)
    return writer.data


def read_answer(mask: int, body: bytes) -> CoordinatorAnswer:
    """What the coordinator has told."""
    answer = CoordinatorAnswer(mask)
    if body:
        reader = MessageReader(body, 0)
        plans, failures = reader.take(_COUNTS)
        answer.plans = [OperationPlan.read(reader) for _ in range(plans)]
        answer.failures = [OperationFailure.read(reader) for _ in range(failures)]
    return answer


def pack_departure(departure: Departure) -> bytearray:
    """Encode a rank's goodbye message."""
    writer = MessageWriter()
    departure.pack(writer)
    return writer.data


def read_departure(body: bytes, source: int) -> Departure:
    """Decode a rank's goodbye message."""
    return Departure.read(MessageReader(body, source))
