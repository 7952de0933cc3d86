"""The contract of a transport: it moves bytes between ranks and knows nothing else."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, UnsupportedError, WorldError
from syncline.runtime import Runtime
from syncline.transports.network import Network
from syncline.transports.shared import share_memory

__all__ = [
    "Handle",
    "Listening",
    "NativeCollectives",
    "Op",
    "Taking",
    "Transport",
    "Window",
    "as_bytes",
    "bounded",
    "hint_of_mismatch",
    "human",
    "told_by_rank",
]

Op = Literal["sum", "min", "max", "product"]

TAGS = 1 << 28
"""Tags are whole numbers below this."""
LANE_TAGS = 1 << 27
"""From here on they belong to the executor's lanes; those below are the user's."""

COMPARISON_TAGS = LANE_TAGS + 4096
"""The first tag of messages in which ranks compare their next collective. Lanes use smaller tags."""

ASK_FOR_CHECK = "sl.init(check=True) compares every call before anything is sent"

DEFAULT_TIMEOUT = 300.0
"""Seconds after which a wait for a peer is given up."""


class Handle(Protocol):
    """An operation under way."""

    source: int
    """Of a receive: the sender, once waited for."""
    nbytes: int
    """How many bytes were moved, once waited for."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is done: the buffer may be used again. Raises `PeerLostError` at the timeout.

        `math.inf` is an idle wait: nobody is late, so nothing is said of it, and it ends only when a message comes,
        the peer is lost, or this rank aborts or closes the channel (then with a `SynclineError`).
        """
        ...


class Taking(Protocol):
    """A short message that is to come; `data` is what came, once waited for."""

    data: memoryview

    def done(self) -> bool:
        """Whether a wait would return at once, as far as the engine can tell."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """As a handle's."""
        ...


class Listening(Protocol):
    """A tag whose messages are heard at once, by whoever turns the engine's crank: no task is woken for them."""

    def fetch(self, buffer: Tensor, source: int, tag: int, then: Callable[[Exception | None], None]) -> None:
        """Receive into `buffer`, exactly; `then` is called when it is filled, or with what went wrong."""
        ...

    def close(self) -> None:
        """Hear no more."""
        ...


class Window(Protocol):
    """Memory of every rank that the others reach without its help. Offsets count elements."""

    local: Tensor

    def put(self, values: Tensor, to: int, offset: int = 0) -> None:
        """Write into the window of `to`."""
        ...

    def get(self, into: Tensor, source: int, offset: int = 0) -> Handle:
        """Read from the window of `source`."""
        ...

    def accumulate(self, values: Tensor, to: int, offset: int = 0) -> None:
        """Add to the window of `to`, atomically for each element."""
        ...

    def flush(self, to: int | None = None) -> None:
        """Return when what this rank has put and accumulated (into `to`, or anywhere) is in place."""
        ...

    def close(self) -> None: ...


class NativeCollectives(Protocol):
    """The engine's own collectives. Asynchronous and in place, on contiguous tensors of equal shape everywhere."""

    def reduces(self, dtype: torch.dtype, op: Op) -> bool:
        """Whether the engine can reduce this dtype with this operation."""
        ...

    def allreduce(self, tensor: Tensor, op: Op) -> Handle: ...

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Op) -> Handle: ...

    def broadcast(self, tensor: Tensor, root: int) -> Handle: ...

    def allgather(self, output: Tensor, tensor: Tensor) -> Handle: ...

    def alltoall(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle: ...

    def barrier(self) -> Handle: ...


class Transport(ABC):
    """Two-sided, non-blocking messages among `size` ranks; one split per concurrent user.

    Messages between two ranks with one tag arrive in the order they were sent. A message may be shorter than
    the buffer that receives it (`handle.nbytes` tells); a longer one is a `ProtocolError`. With `exact=True` on
    both sides the two promise that the lengths are equal, and engines that need a header for the lengths leave
    it out.
    """

    name: str = "transport"
    native: NativeCollectives | None = None
    network: Network | None = None
    """What messages cost, where that is known without measuring."""
    exact_times: bool = False
    """Whether every message takes the time that `network` predicts: there is no jitter and no fault."""
    wide: Transport | None = None
    """Where the engine has members beside the ranks of the world: a channel of them all, the ranks first."""
    beside: tuple[str, ...] = ()
    """What those members are, in their order: "server" or "evaluator"."""

    def __init__(
        self,
        rank: int,
        size: int,
        runtime: Runtime,
        timeout: float = DEFAULT_TIMEOUT,
        members: tuple[int, ...] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.runtime = runtime
        self.timeout = timeout
        self.members = tuple(range(size)) if members is None else members
        """The world's rank of each rank of this channel: what messages to people name."""

    def send(self, buffer: Tensor, to: int, tag: int = 0, *, exact: bool = False, lossy: bool = False) -> Handle:
        """Send the bytes of `buffer`, which stays untouched until the handle was waited for (or, if it never is,
        for good: a message whose handle is dropped is still delivered).

        A `lossy` message may be dropped or doubled by a network that does so; the sender does not mind.
        """
        self._check(to, "to", tag)
        return self._send(as_bytes(buffer), to, tag, exact, lossy)

    def recv(self, buffer: Tensor, source: int | None = None, tag: int = 0, *, exact: bool = False) -> Handle:
        """Receive into `buffer` from `source`, or from anyone (then with no length agreed: not `exact`)."""
        if source is None and exact:
            raise WorldError("a receive from anyone cannot be exact: who sends is not known, so nor is the length")
        self._check(0 if source is None else source, "source", tag)
        return self._recv(as_bytes(buffer), source, tag, exact)

    def tell(self, parts: Sequence[bytes | memoryview], to: int, tag: int = 0, *, lossy: bool = False) -> None:
        """Send a short message that lies in several places. It is copied: there is nothing to wait for."""
        whole = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        self.send(whole, to, tag, lossy=lossy)

    def take(self, most: int, source: int, tag: int = 0) -> Taking:
        """Receive a short message of up to `most` bytes, into memory that comes with it."""
        return _Taking(self, most, source, tag)

    def listen(
        self, tag: int, most: int, hear: Callable[[int, memoryview], None], lost: Callable[[int], None]
    ) -> Listening | None:
        """Have `hear(source, data)` called for each message under a tag, in their order, and `lost(rank)` for each rank
        that is gone, after all it has sent. None where the engine cannot: then who listens takes a task a source.

        The two are called one at a time, and must not wait. `data` is theirs during the call; of a message that is
        longer than `most` bytes it is empty.
        """
        return None

    def split(self, ranks: Sequence[int]) -> Transport | None:
        """An independent channel among `ranks`, in that order; None for a rank that is not among them.

        Made in the same order on all ranks of this transport, members or not.
        """
        members = check_ranks(ranks, self.size)
        return self._split(members)

    def window(self, numel: int, dtype: torch.dtype) -> Window:
        """One-sided memory of `numel` elements on every rank, zeroed; made by all ranks together."""
        raise UnsupportedError(
            f'one-sided windows are not available on {self.name}; they work on MPI (transport="mpi"), on the simulator '
            "(sl.simulate) and in a world of one"
        )

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        """One memory of `numel` elements that all ranks see, zeroed; made by all ranks together, on one host."""
        return share_memory(self, numel, dtype)

    @property
    def retry(self) -> float | None:
        """Seconds after which who has sent a lossy message asks again; None: nothing is lost here."""
        return None

    def combined(self, nbytes: int) -> None:  # noqa: B027 (most transports have nothing to add)
        """Told after `nbytes` were reduced: where time is virtual, this is where it passes."""

    def no_user_code(self) -> AbstractContextManager[None]:
        """Context for code that draws no random numbers and changes no mode of torch: the simulator saves neither."""
        return nullcontext()

    def entering(self, what: str) -> None:  # noqa: B027 (most transports need not know)
        """Told before each collective: who has not entered it is who the others wait for."""

    def compare_call(self, number: int, call: str) -> bool:
        """Compare this rank's `number`-th collective with the others', if that costs nothing. Returns whether it did.

        Raises an `IncompatibleError` where they differ.
        """
        return False

    def owing(  # noqa: B027 (most transports need not know)
        self, tell: Callable[[], str], awaited: Callable[[], int | None] | None = None
    ) -> None:
        """Register a function that describes what this rank has not delivered yet, for messages on waiting ranks.

        `awaited` returns the rank of the world that this rank itself waits for; None where there is none.
        """

    @abstractmethod
    def failure(self, peer: int | None, pending: str, seconds: float, cause: BaseException | None) -> Exception:
        """The error for a wait that broke or timed out: a `PeerLostError` that names who is gone."""

    def lost(self) -> dict[int, str]:
        """The world's ranks that are known to be gone, each with what is known of its end."""
        return {}

    def gone(self, rank: int) -> str:
        """Why a rank of this channel will send nothing more: it is lost, or has left. Empty while it is there."""
        return self.lost().get(self.members[rank], "")

    def watch(self, ranks: Sequence[int]) -> None:  # noqa: B027 (most transports watch everyone, or nobody)
        """Told whom `lost` is to name soon after their end, though nothing was sent to them yet."""

    def abort(self) -> None:  # noqa: B027 (where waits end by themselves there is nothing to break)
        """Break every wait on this channel: the next thing is to close it."""

    def close(self) -> None:  # noqa: B027 (most transports have nothing to close)
        """Let go of what the engine holds. Every rank closes; a second call does nothing."""

    @abstractmethod
    def _send(self, data: Tensor, to: int, tag: int, exact: bool, lossy: bool) -> Handle: ...

    @abstractmethod
    def _recv(self, data: Tensor, source: int | None, tag: int, exact: bool) -> Handle: ...

    @abstractmethod
    def _split(self, members: tuple[int, ...]) -> Transport | None: ...

    def _check(self, peer: int, what: str, tag: int) -> None:
        if not isinstance(peer, int) or not 0 <= peer < self.size:
            raise WorldError(f"{what}={peer} is not a rank: this channel has ranks 0 to {self.size - 1}")
        if not 0 <= tag < TAGS:
            raise WorldError(f"tag={tag} is not between 0 and {TAGS - 1}")


class _Taking:
    """A receive with a buffer of its own."""

    def __init__(self, transport: Transport, most: int, source: int, tag: int) -> None:
        self._buffer = torch.empty(most, dtype=torch.uint8)
        self._handle = transport.recv(self._buffer, source, tag)
        self.data = memoryview(b"")

    def done(self) -> bool:
        tells = getattr(self._handle, "done", None)
        return tells is not None and bool(tells())

    def wait(self, timeout: float | None = None) -> None:
        self._handle.wait(timeout)
        self.data = self._buffer.numpy().data[: self._handle.nbytes]


def check_ranks(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """The ranks of a split, each once and each one that exists."""
    try:
        members = tuple(operator.index(rank) for rank in ranks)
    except TypeError:
        raise WorldError(f"ranks={list(ranks)}: a rank is a whole number") from None
    strangers = sorted({rank for rank in members if not 0 <= rank < size})
    doubles = sorted({rank for rank in members if members.count(rank) > 1})
    if not members or strangers or doubles:
        wrong = [
            *(["it is empty"] if not members else []),
            *([f"not in the world of {size}: {strangers}"] if strangers else []),
            *([f"named more than once: {doubles}"] if doubles else []),
        ]
        raise WorldError(f"ranks={list(members)}: {'; '.join(wrong)}")
    return members


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat uint8 view of a contiguous tensor's memory."""
    if not tensor.is_contiguous():
        raise IncompatibleError(
            f"a buffer must be contiguous (shape: {tuple(tensor.shape)}, stride: {tensor.stride()})"
        )
    if tensor.dtype == torch.uint8 and tensor.dim() == 1:
        return tensor
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= 1:  # torch calls one element contiguous whatever its stride, and then refuses to view it
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def bounded(patience: float) -> float | None:
    """A time to wait as events take it: None where the wait has no end.

    >>> bounded(3.0), bounded(math.inf)
    (3.0, None)
    """
    return None if patience == math.inf else patience


def told_by_rank(told: Mapping[int, str]) -> str:
    """What each rank does, for a message; ranks that do the same are grouped.

    >>> told_by_rank({0: "barrier()", 1: "send()", 2: "barrier()"})
    'ranks 0, 2: barrier(); rank 1: send()'
    """
    groups: dict[str, list[int]] = {}
    for rank in sorted(told):
        groups.setdefault(told[rank], []).append(rank)
    return "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {what}" for what, who in groups.items())


def hint_of_mismatch(tag: int) -> str:
    """What to do about a message of the wrong length: one of a collective comes from ranks that call different ones.

    >>> hint_of_mismatch(6), hint_of_mismatch(LANE_TAGS)[:42]
    ('', '; do all ranks call the same collective? s')
    """
    return f"; do all ranks call the same collective? {ASK_FOR_CHECK}" if LANE_TAGS <= tag < COMPARISON_TAGS else ""


def human(nbytes: int) -> str:
    """Bytes for people.

    >>> human(17), human(4_200_000)
    ('17 B', '4.2 MB')
    """
    amount = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} GB"
