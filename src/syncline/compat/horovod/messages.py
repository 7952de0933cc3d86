"""The messages between ranks and their coordinator: requests, plans, failures and departures, as bytes.

```text
request   kind u8 │ op u8 │ device u8 │ parts u16 │ root i32 │ before f64 │ after f64 │ name │ refusal │ parts │ splits
name      u16 length, utf-8; so is the refusal
part      dtype u8 │ dimensions u8 │ i64 each
splits    u32 count, i64 each
```

A plan is the request of one rank that all ranks have agreed to, and the number of rows of each rank.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.errors import ProtocolError

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
MAX_DIMENSIONS = 64
MAX_TEXT_BYTES = 4096


@dataclass(frozen=True)
class TensorInfo:
    """Dtype and shape of one tensor of an operation."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class OperationRequest:
    """An operation as one rank requests it. A grouped operation has several tensors."""

    kind: str
    name: str
    parts: tuple[TensorInfo, ...] = ()
    op: str = "none"
    root: int = -1
    before: float = 1.0
    after: float = 1.0
    device: str = "cpu"
    splits: tuple[int, ...] = ()
    """The rows for each rank of an all-to-all; the ranks of a process set that is added or removed."""
    refusal: str = ""
    """The error with which this rank has refused the call, so that the other ranks do not wait for it."""

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
        into.counted(self.splits)

    @classmethod
    def read(cls, source: MessageReader) -> OperationRequest:
        kind, op, device, count, root, before, after = source.take(_HEAD)
        name, refusal = source.text(), source.text()
        parts = []
        for _ in range(count):
            dtype, dimensions = source.take(_TWO)
            if dtype >= len(DTYPES) or dimensions > MAX_DIMENSIONS:
                raise source.wrong(f"a tensor of dtype number {dtype} with {dimensions} dimensions")
            parts.append(TensorInfo(DTYPES[dtype], source.numbers(dimensions)))
        splits = source.counted()
        if kind >= len(KINDS) or op >= len(OPS) or device >= len(DEVICES):
            raise source.wrong(f"a request of kind {kind}, op {op}, device {device}")
        return cls(KINDS[kind], name, tuple(parts), OPS[op], root, before, after, DEVICES[device], splits, refusal)

    @property
    def label(self) -> str:
        """The name as the user wrote it."""
        return self.name.split(".", 1)[-1]


@dataclass(frozen=True)
class OperationPlan:
    """An operation that all ranks execute."""

    request: OperationRequest
    number: int = -1
    """The number of the operation from now on; -1 if it is not cached."""
    rows: tuple[tuple[int, ...], ...] = ()
    """For each rank: the first dimension of each tensor, or the rows that it sends to each rank."""

    def pack(self, into: MessageWriter) -> None:
        into.put(_NUMBERED, self.number, len(self.rows))
        self.request.pack(into)
        for row in self.rows:
            into.counted(row)

    @classmethod
    def read(cls, source: MessageReader) -> OperationPlan:
        number, ranks = source.take(_NUMBERED)
        request = OperationRequest.read(source)
        return cls(request, number, tuple(source.counted() for _ in range(ranks)))


@dataclass(frozen=True)
class OperationFailure:
    """An operation that cannot be executed, and the reason."""

    name: str
    why: str
    late: tuple[int, ...] = ()
    """Ranks that have not requested it yet; their request will fail."""
    only: tuple[int, ...] = ()
    """The ranks on which it fails; empty for all."""

    def pack(self, into: MessageWriter) -> None:
        into.text(self.name)
        into.text(self.why)
        into.counted(self.late)
        into.counted(self.only)

    @classmethod
    def read(cls, source: MessageReader) -> OperationFailure:
        return cls(source.text(), source.text(), source.counted(), source.counted())


@dataclass(frozen=True)
class Departure:
    """A rank that has left, and the number of operations that it completed: the others do not wait for later ones."""

    rank: int
    why: str
    known: bool = False
    """Whether the numbers below are known. They are unknown for a lost rank."""
    executed: int = -1
    """Operations that it has executed; -1 for all that it was assigned."""
    rounds: tuple[tuple[int, int], ...] = ()
    """Numbers of optimizer channels, each with the number of gradient reductions completed there."""

    def pack(self, into: MessageWriter) -> None:
        into.put(_GOODBYE, self.rank, self.known, self.executed)
        into.text(self.why)
        into.put(_LONG, len(self.rounds))
        into.numbers([number for pair in self.rounds for number in pair])

    @classmethod
    def read(cls, source: MessageReader) -> Departure:
        rank, known, executed = source.take(_GOODBYE)
        why = source.text()
        numbers = source.numbers(2 * source.take(_LONG)[0])
        return cls(rank, why, bool(known), executed, tuple(zip(numbers[::2], numbers[1::2], strict=True)))


@dataclass
class CoordinatorAnswer:
    """The coordinator's answer: known operations to execute, by bits, then new ones, and failures."""

    mask: int = 0
    plans: list[OperationPlan] = field(default_factory=list)
    failures: list[OperationFailure] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.mask or self.plans or self.failures)


_TWO = struct.Struct("<BB")
_LONG = struct.Struct("<I")
_SHORT = struct.Struct("<H")
_NUMBERED = struct.Struct("<iI")
_GOODBYE = struct.Struct("<I?q")


class MessageWriter:
    """Writes a message.

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
        encoded = text.encode()[:MAX_TEXT_BYTES]
        self.data += _SHORT.pack(len(encoded)) + encoded

    def numbers(self, numbers: Sequence[int]) -> None:
        self.data += struct.pack(f"<{len(numbers)}q", *numbers)

    def counted(self, numbers: Sequence[int]) -> None:
        """Write numbers after their count."""
        self.put(_LONG, len(numbers))
        self.numbers(numbers)


class MessageReader:
    """Reads a message. Raises a `ProtocolError` with the peer if the bytes are incomplete or invalid."""

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

    def counted(self) -> tuple[int, ...]:
        return self.numbers(self.take(_LONG)[0])

    def wrong(self, what: str) -> ProtocolError:
        return ProtocolError(f"rank {self._peer} sent an invalid message: {what}", peer=self._peer)

    def _cut(self, nbytes: int) -> memoryview:
        if nbytes > self.left():
            raise self.wrong(f"{nbytes} bytes are missing at {self._at} of {len(self._data)}")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]


def disagreement(requests: dict[int, OperationRequest], ranks: Sequence[int] | None = None) -> str:
    """The first field in which the requests of ranks differ, as text; empty if they agree. `ranks`: a set's members.

    >>> one = OperationRequest("allreduce", "allreduce.w", (TensorInfo(torch.float32, (2,)),), op="sum")
    >>> disagreement({0: one, 1: OperationRequest("allreduce", "allreduce.w", one.parts, op="min")})
    'op: sum on rank 0, min on rank 1'
    """
    named = range(max(requests) + 1) if ranks is None else ranks
    fields_by_rank = {named[rank]: _common_fields(request, named) for rank, request in requests.items()}
    first = next(iter(fields_by_rank))
    for what in fields_by_rank[first]:
        groups: dict[str, list[int]] = {}
        for rank, fields in fields_by_rank.items():
            groups.setdefault(fields[what], []).append(rank)
        if len(groups) > 1:
            return f"{what}: {', '.join(f'{text} on {name_ranks(ranks)}' for text, ranks in groups.items())}"
    return ""


def name_ranks(ranks: Sequence[int]) -> str:
    """
    >>> name_ranks([1, 3])
    'ranks 1, 3'
    """
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _common_fields(request: OperationRequest, ranks: Sequence[int]) -> dict[str, str]:
    """The fields that must be equal on all ranks, as text."""
    free = request.kind in ("allgather", "alltoall")
    shapes = [list(part.shape[1:]) if free else list(part.shape) for part in request.parts]
    fields = {
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
        fields["ranks"] = str(list(request.splits))
    return fields


_COUNTS = struct.Struct("<II")


def as_tensor(data: bytes | bytearray) -> Tensor:
    """Bytes as a tensor, for transports."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def pack(messages: Sequence[OperationRequest | Departure]) -> bytearray:
    """Encode requests, or the goodbye message of a rank."""
    writer = MessageWriter()
    for message in messages:
        message.pack(writer)
    return writer.data


def read_requests(body: bytes, source: int) -> list[OperationRequest]:
    """Decode the requests of a rank."""
    reader, found = MessageReader(body, source), []
    while reader.left():
        found.append(OperationRequest.read(reader))
    return found


def pack_answer(answer: CoordinatorAnswer) -> bytearray:
    """Encode the new plans and the failures of an answer; empty if there are none."""
    writer = MessageWriter()
    if answer.plans or answer.failures:
        writer.put(_COUNTS, len(answer.plans), len(answer.failures))
        for plan in answer.plans:
            plan.pack(writer)
        for failure in answer.failures:
            failure.pack(writer)
    return writer.data


def read_answer(mask: int, body: bytes) -> CoordinatorAnswer:
    """Decode an answer of the coordinator."""
    answer = CoordinatorAnswer(mask)
    if body:
        reader = MessageReader(body, 0)
        plans, failures = reader.take(_COUNTS)
        answer.plans = [OperationPlan.read(reader) for _ in range(plans)]
        answer.failures = [OperationFailure.read(reader) for _ in range(failures)]
    return answer
