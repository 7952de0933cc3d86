"""The coordinator's table of requests: which rank has requested what, and what all ranks have requested.

It sends nothing itself. An operation that was executed once has a number. A rank that repeats it sends only one bit:

```text
            number   0 1 2 3
rank 0 requests      1 1 0 1
rank 1 requests      1 0 1 1
all have requested   1 0 0 1      executed in the order of the numbers
```

New operations, and those that differ from the last time on some rank, are requested in full and compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from syncline.compat.horovod.messages import (
    CoordinatorAnswer,
    OperationFailure,
    OperationPlan,
    OperationRequest,
    disagreement,
    name_ranks,
)

UNNAMED = "noname."
"""Prefix of the labels of operations without a name. Each such label is used once."""


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, the lowest first.

    >>> list(bits(0b1001))
    [0, 3]
    """
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(frozen=True)
class StalledOperation:
    """An operation that some ranks have not requested for a long time."""

    name: str
    seconds: float
    missing: tuple[int, ...]


@dataclass
class _KnownOperation:
    """An operation that has a number: how each rank requested it."""

    requests: dict[int, OperationRequest]
    plan: OperationPlan


class NegotiationTable:
    """The requests of `size` ranks. Up to `capacity` operations get a number.

    >>> from syncline.compat.horovod.messages import OperationRequest
    >>> table = NegotiationTable(size=2, capacity=8)
    >>> table.request(0, 0, [OperationRequest("barrier", "barrier.b")], now=0.0)
    >>> bool(table.settle())
    False
    >>> table.request(1, 0, [OperationRequest("barrier", "barrier.b")], now=0.1)
    >>> table.settle().plans[0].number
    0
    >>> for rank in range(2):
    ...     table.request(rank, 0b1, [], now=0.2)
    >>> table.settle().mask
    1
    """

    def __init__(self, size: int, capacity: int, ranks: Sequence[int] | None = None) -> None:
        self.size = size
        self._ranks = range(size) if ranks is None else ranks
        """The world ranks of the members of a process set."""
        self._capacity = capacity
        self._masks = [0] * size
        self._entries: list[_KnownOperation] = []
        self._numbers: dict[str, int] = {}
        self._requested: dict[str, dict[int, OperationRequest]] = {}
        """Requests in full, by name and rank."""
        self._postponed: dict[str, list[tuple[int, OperationRequest, float]]] = {}
        """Requests of ranks that are ahead: an earlier operation with the same name is still incomplete."""
        self._since: dict[str, float] = {}
        self._batches: list[tuple[float, int]] = []
        """Masks of requested bits, each with the time of the first request."""
        self._touched: dict[str, None] = {}
        self._joined: dict[int, OperationRequest] = {}
        self.gone: dict[int, str] = {}
        """The ranks that have left, with the reason."""

    def request(self, rank: int, mask: int, requests: Sequence[OperationRequest], now: float) -> None:
        """Add the requests of a rank: known operations by their bits, others in full."""
        if mask:
            for number in bits(mask if self.gone else mask & self._in_full()) if self.gone or self._requested else ():
                mask ^= 1 << number
                self._request_in_full(rank, self._entries[number].requests[rank], now)
            fresh = mask
            for other in self._masks:
                fresh &= ~other
            if fresh:
                self._batches.append((now, fresh))
            self._masks[rank] |= mask
        for request in requests:
            self._request_in_full(rank, request, now)

    def leave(self, rank: int, why: str) -> None:
        """A rank has left. Operations that need it fail: at once on waiting ranks, on others when they request them."""
        self.gone[rank] = why
        waiting = [(number, since) for since, mask in self._batches for number in bits(mask)]
        for number, since in waiting:  # from now on each is decided separately
            for other in [other for other, mask in enumerate(self._masks) if mask >> number & 1]:
                self._request_in_full(other, self._entries[number].requests[other], since)

    def known(self, mask: int) -> bool:
        """Whether all bits of a mask belong to known operations."""
        return mask >> len(self._entries) == 0

    def settle(self) -> CoordinatorAnswer:
        """Remove and return the operations that can be executed now, and those that have failed."""
        answer = CoordinatorAnswer()
        self._settle_masks(answer)
        if self.gone or self._joined:
            self._touched.update(dict.fromkeys(self._requested))
        while self._touched:
            name = next(iter(self._touched))
            del self._touched[name]
            self._settle_one(name, answer)
        gone = [why for rank, why in self.gone.items() if rank not in self._joined]
        if gone and self._joined:
            answer.failures += [
                OperationFailure(each.name, "; ".join(gone), only=(r,)) for r, each in self._joined.items()
            ]
            self._joined = {}
        if len(self._joined) == self.size:
            last = next(reversed(self._joined))
            answer.plans.append(OperationPlan(self._joined[last], rows=((last,),)))
            self._joined = {}
        return answer

    @property
    def waiting(self) -> bool:
        """Whether some operation was not requested by all ranks yet."""
        return bool(self._requested or self._batches or self._joined)

    def stalled(self, now: float, limit: float) -> list[StalledOperation]:
        """The operations that have waited for at least `limit` seconds, and the ranks that have not requested them."""
        found = []
        for name, requested in self._requested.items():
            idle = name not in self._postponed and any(request.refusal for request in requested.values())
            if now - self._since[name] >= limit and not idle:  # no rank waits for a refused operation
                found.append(StalledOperation(name, now - self._since[name], self._without(requested)))
        for since, mask in self._batches:
            if now - since >= limit:
                for number in bits(mask):
                    requested_by = [rank for rank, other in enumerate(self._masks) if other >> number & 1]
                    name = self._entries[number].plan.request.name
                    found.append(StalledOperation(name, now - since, self._without(requested_by)))
        return found

    def give_up(self, stalled: StalledOperation) -> OperationFailure:
        """Remove a stalled operation, and later requests with the same name."""
        self._postponed.pop(stalled.name, None)
        self._forget(stalled.name)
        missing = [self._ranks[rank] for rank in stalled.missing]
        why = f"stalled for {stalled.seconds:.3g} s: not submitted by {name_ranks(missing)}"
        return OperationFailure(stalled.name, why, stalled.missing)

    def _in_full(self) -> int:
        """The bits of known operations that some rank has requested in full."""
        mask = 0
        for name in self._requested:
            if name in self._numbers:
                mask |= 1 << self._numbers[name]
        return mask

    def _request_in_full(self, rank: int, request: OperationRequest, now: float) -> None:
        if request.kind == "join":
            self._joined[rank] = request
            return
        if request.refusal:
            request = replace(request, refusal=f"rank {self._ranks[rank]} refused it: {request.refusal}")
        name = request.name
        requested = self._requested.setdefault(name, {})
        number = self._numbers.get(name)
        if number is not None:  # a set bit repeats the request of the last time
            for other, mask in enumerate(self._masks):
                if mask >> number & 1:
                    requested[other] = self._entries[number].requests[other]
            self._clear(1 << number)
        if rank in requested:
            self._postponed.setdefault(name, []).append((rank, request, now))
        else:
            requested[rank] = request
        self._since.setdefault(name, now)
        self._touched[name] = None

    def _settle_masks(self, answer: CoordinatorAnswer) -> None:
        if not self._batches:
            return
        ready = self._masks[0]
        for mask in self._masks:
            ready &= mask
        if self._joined:
            ready |= self._settle_without(answer, ready)
        if ready:
            answer.mask = ready
            self._clear(ready)

    def _settle_without(self, answer: CoordinatorAnswer, ready: int) -> int:
        """Known operations that joined ranks will not request: sums are computed without these ranks, others fail."""
        union = 0
        for mask in self._masks:
            union |= mask
        here = union & ~ready
        for rank, mask in enumerate(self._masks):
            if rank not in self._joined:
                here &= mask
        sums = 0
        for number in bits(here):
            request = self._entries[number].plan.request
            why = self._why_not_joined(request)
            if why:
                answer.failures.append(OperationFailure(request.name, why))
                self._clear(1 << number)
            else:
                sums |= 1 << number
        return sums

    def _settle_one(self, name: str, answer: CoordinatorAnswer) -> None:
        requested = self._requested.get(name)
        if requested is None:
            return
        refused = next((rank for rank, request in requested.items() if request.refusal), None)
        if refused is not None:
            self._settle_refused(name, refused, answer)
            return
        absent = [rank for rank in range(self.size) if rank not in requested]
        gone = [self.gone[rank] for rank in absent if rank in self.gone]
        if gone:
            self._forget(name)
            answer.failures.append(OperationFailure(name, "; ".join(gone), only=tuple(requested)))
            return
        if any(rank not in self._joined for rank in absent):
            return
        first = requested[min(requested)]
        self._forget(name)
        why = disagreement(dict(sorted(requested.items())), self._ranks)
        if not why and absent:
            why = self._why_not_joined(first)
        if why:
            answer.failures.append(OperationFailure(name, why if absent else f"the ranks differ in {why}"))
            return
        answer.plans.append(self._remember(requested, first))

    def _settle_refused(self, name: str, refused: int, answer: CoordinatorAnswer) -> None:
        """Fail an operation that one rank has refused: now on waiting ranks, on others when they request it."""
        requested = self._requested[name]
        waiting = tuple(rank for rank, request in requested.items() if not request.refusal)
        if waiting:
            answer.failures.append(OperationFailure(name, requested[refused].refusal, only=waiting))
            requested.update(dict.fromkeys(waiting, requested[refused]))  # their failure was reported
        if all(rank in requested or rank in self._joined or rank in self.gone for rank in range(self.size)):
            self._forget(name)

    def _why_not_joined(self, request: OperationRequest) -> str:
        """The reason why an operation cannot run without the joined ranks; empty if it can."""
        if request.kind != "allreduce" or request.op not in ("sum", "average", "adasum"):
            what = request.kind if request.kind != "allreduce" else f"{request.kind} with op {request.op}"
            return f"{what} is not possible after ranks {sorted(self._joined)} have joined: they have no data"
        return ""

    def _remember(self, requested: dict[int, OperationRequest], first: OperationRequest) -> OperationPlan:
        name = first.name
        number = self._numbers.get(name, -1)
        complete = len(requested) == self.size
        named = not first.label.startswith(UNNAMED)
        if number < 0 and complete and named and len(self._entries) < self._capacity:
            number = self._numbers[name] = len(self._entries)
            self._entries.append(_KnownOperation({}, OperationPlan(first)))
        if not complete:
            number = -1  # the requests of the joined ranks are unknown
        plan = OperationPlan(first, number, _rows(requested, self.size))
        if number >= 0:
            self._entries[number] = _KnownOperation(dict(requested), plan)
        return plan

    def _clear(self, mask: int) -> None:
        self._masks = [other & ~mask for other in self._masks]
        self._batches = [(since, rest) for since, old in self._batches if (rest := old & ~mask)]

    def _forget(self, name: str) -> None:
        self._requested.pop(name, None)
        self._since.pop(name, None)
        number = self._numbers.get(name)
        if number is not None:
            self._clear(1 << number)
        for postponed in self._postponed.pop(name, ()):
            self._request_in_full(*postponed)

    def _without(self, requested: object) -> tuple[int, ...]:
        return tuple(r for r in range(self.size) if r not in requested and r not in self._joined)  # type: ignore[operator]


def _rows(requested: dict[int, OperationRequest], size: int) -> tuple[tuple[int, ...], ...]:
    """The rows of each rank, for operations in which they may differ."""
    first = requested[min(requested)]
    if first.kind == "allgather":
        return tuple(
            tuple(part.shape[0] if part.shape else 1 for part in requested[rank].parts) for rank in range(size)
        )
    if first.kind == "alltoall":
        return tuple(requested[rank].splits for rank in range(size))
    return ()
