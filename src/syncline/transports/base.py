"""The contract of a transport: it moves bytes between ranks and knows nothing about their content.

An author writes `_send`, `_recv`, `_split` and `failure`, and overrides `lost`, `abort` and `close` where the engine
needs it. Everything else is optional. Each ability below is a small class with a default that does nothing::

    transport.native     NativeCollectives   the engine's own collectives      default: none are available
    transport.timing     Timing              virtual time and message costs    default: the wall clock
    transport.monitor    Monitor             who waits for whom                default: nothing is recorded
    transport.memory     RemoteMemory        one-sided windows, shared memory  default: shared memory on one host
    transport.listen()   RequestListener     a callback for each message       default: not available
    transport.tensor_channels()  TensorChannels  tensors from GPU to GPU       default: there are none
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Literal, Protocol

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, SynclineError, UnsupportedError, WorldError
from syncline.runtime import Runtime
from syncline.transports.key_value_store import KeyValueStore
from syncline.transports.memory_store import MemoryStore
from syncline.transports.network import Network
from syncline.transports.shared_memory import share_memory

__all__ = [
    "BufferedBytes",
    "BytesHandle",
    "Handle",
    "Monitor",
    "NativeCollectives",
    "Op",
    "PendingTensor",
    "RemoteMemory",
    "RequestListener",
    "TeamConnector",
    "TensorChannel",
    "TensorChannels",
    "Timing",
    "Transport",
    "Window",
    "as_bytes",
    "check_ranks",
    "check_span",
    "event_timeout",
    "format_bytes",
    "group_ranks_by_text",
    "mismatch_hint",
]

Op = Literal["sum", "min", "max", "product"]

MAX_TAG = 1 << 28
"""Tags are integers below this."""
LANE_TAGS = 1 << 27
"""The first tag of the collectives' lanes. Smaller tags belong to the user."""
COMPARISON_TAGS = LANE_TAGS + 4096
"""The first tag of messages in which ranks compare their next collective. Lanes use smaller tags."""
DEFAULT_TIMEOUT_S = 300.0
"""Seconds after which a wait for a peer fails."""
NO_NATIVE = "this transport has no collectives of its own: run a schedule"
CHECK_HINT = "sl.init(check=True) compares every call before anything is sent"


class Handle(Protocol):
    """An operation in progress."""

    source: int
    """The rank of the sender of a received message. Valid after `wait`."""
    nbytes: int
    """The number of bytes that were moved. Valid after `wait`."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the buffer may be used again. Raises `PeerLostError` at the timeout.

        `math.inf` is an idle wait: it logs no warning and has no deadline. It ends when a message arrives, or with a
        `SynclineError` when the peer is lost or this rank aborts or closes the channel.
        """
        ...


class BytesHandle(Protocol):
    """A receive of a short message; `data` holds the message after `wait`."""

    data: memoryview

    def done(self) -> bool:
        """Whether `wait` would return at once, as far as the engine can tell."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the message, like `Handle.wait`."""
        ...

    def cancel(self) -> None:
        """End the receive, unless its message has arrived. A task that waits for it gets a `PeerLostError`."""
        ...


class RequestListener(Protocol):
    """Calls a function for each message with one tag, on the thread that reads it: no task is woken."""

    def fetch(self, buffer: Tensor, source: int, tag: int, done: Callable[[Exception | None], None]) -> None:
        """Receive exactly `buffer` from `source`, then call `done` with None or the error."""
        ...

    def close(self) -> None:
        """Stop calling the function."""
        ...


class Window(Protocol):
    """Memory on every rank that the other ranks access without its help. Offsets count elements."""

    local: Tensor

    def put(self, values: Tensor, to: int, offset: int = 0) -> None:
        """Write into the window of `to`."""
        ...

    def get(self, into: Tensor, source: int, offset: int = 0) -> Handle:
        """Read from the window of `source`."""
        ...

    def accumulate(self, values: Tensor, to: int, offset: int = 0) -> None:
        """Add to the window of `to`. The addition is atomic for each element."""
        ...

    def flush(self, to: int | None = None) -> None:
        """Wait until all puts and accumulates of this rank (into `to`, or into any window) have taken effect."""
        ...

    def close(self) -> None: ...


class NativeCollectives:
    """The engine's own collectives: asynchronous, in place, on contiguous tensors of the same shape on every rank.

    This class is the default: no collective is available. An engine overrides all of it.
    """

    available: bool = False

    def reduces(self, dtype: torch.dtype, op: Op) -> bool:
        """Whether the engine can reduce this dtype with this operation."""
        return False

    def allreduce(self, tensor: Tensor, op: Op) -> Handle:
        raise UnsupportedError(NO_NATIVE)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Op) -> Handle:
        raise UnsupportedError(NO_NATIVE)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        raise UnsupportedError(NO_NATIVE)

    def allgather(self, output: Tensor, tensor: Tensor) -> Handle:
        raise UnsupportedError(NO_NATIVE)

    def alltoall(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        raise UnsupportedError(NO_NATIVE)

    def barrier(self) -> Handle:
        raise UnsupportedError(NO_NATIVE)


class PendingTensor(Protocol):
    """A tensor that a channel receives."""

    def wait(self) -> Tensor:
        """The bytes that were sent. On a GPU they are there for what the current stream does next."""
        ...


class TensorChannel(Protocol):
    """Carries tensors from one rank to another, in the order in which they are sent.

    The n-th `receive` gets the n-th tensor that was sent, and its length must be the same.
    """

    def carries(self, tensor: Tensor) -> bool:
        """Whether the channel takes this tensor: it depends on the device alone."""
        ...

    def send(self, data: Tensor, pending: str) -> None:
        """Send a flat uint8 tensor, which must not change afterwards. `pending` describes it in messages."""
        ...

    def receive(self, nbytes: int, pending: str) -> PendingTensor:
        """Begin to receive the next tensor."""
        ...


class TensorChannels:
    """The channels of one rank for tensors on GPUs. This class is the default: there are none."""

    def find(self, source: int, destination: int) -> TensorChannel | None:
        """The channel from one rank to another, of which this rank is one."""
        return None

    def check(self) -> None:
        """Raise the error of a channel that has failed."""

    def close(self) -> None:
        """Close all channels. Both ranks of each close it, after what they have sent was received."""


class Timing:
    """How time passes on a transport, and what messages cost. This class is the default: the wall clock."""

    virtual: bool = False
    """Whether time is simulated."""
    network: Network | None = None
    """The cost of messages, if it is known without measuring."""
    exact: bool = False
    """Whether every message takes exactly the time that `network` predicts: there is no jitter and no fault."""

    def slowdown(self) -> float:
        """The factor by which this rank computes slower than the others now."""
        return 1.0

    def reduced(self, nbytes: int) -> None:
        """Called after `nbytes` were reduced. Virtual time passes here."""

    def no_user_code(self) -> AbstractContextManager[None]:
        """A context for code that draws no random numbers and changes no mode of torch.

        The simulator saves neither when it switches tasks inside.
        """
        return _NULL_CONTEXT


_NULL_CONTEXT: AbstractContextManager[None] = nullcontext()


class Monitor:
    """Records which rank waits for which, so that errors name the cause. This class is the default: no records."""

    def enter(self, collective: str) -> None:
        """Called before each collective, with its description."""

    def compare_call(self, number: int, call: str) -> bool:
        """Compare this rank's `number`-th collective with the others', if that costs nothing.

        Returns whether it was compared. Raises an `IncompatibleError` if the calls differ.
        """
        return False

    def set_undelivered(self, describe: Callable[[], str], awaited: Callable[[], int | None] | None = None) -> None:
        """Register a function that describes what this rank has not delivered yet, for errors on waiting ranks.

        `awaited` returns the world rank for which this rank itself waits, or None.
        """

    def watch(self, ranks: Sequence[int]) -> None:
        """Detect the end of these ranks soon, even if no message was sent to them yet."""


class RemoteMemory:
    """Memory that several ranks access. This class is the default: no windows, shared memory on one host."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def window(self, numel: int, dtype: torch.dtype) -> Window:
        """Open a zeroed window of `numel` elements on every rank. All ranks call it together."""
        raise UnsupportedError(
            f"one-sided windows are not available on {self._transport.name}; they work on MPI "
            '(transport="mpi"), on the simulator (sl.simulate) and in a world of one'
        )

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate `numel` zeroed elements that all ranks see. All ranks call it together, on one host."""
        return share_memory(self._transport, numel, dtype)


class Transport(ABC):
    """Two-sided, non-blocking messages among `size` ranks; one split per concurrent user.

    Messages between two ranks with one tag arrive in the order they were sent. A message may be shorter than
    the buffer that receives it (see `handle.nbytes`); a longer one is a `ProtocolError`. With `exact=True` on
    both sides both promise that the lengths are equal, and engines that need a header for the length omit it.
    """

    name: str = "transport"
    native: NativeCollectives = NativeCollectives()
    timing: Timing = Timing()
    monitor: Monitor = Monitor()
    extra_roles: tuple[str, ...] = ()
    """The roles of the processes of this job that are not ranks of the world, in order: "server" or "evaluator"."""
    retry_after_s: float | None = None
    """Seconds after which the sender of a lossy message sends it again; None if this transport loses no message."""

    def __init__(
        self,
        rank: int,
        size: int,
        runtime: Runtime,
        timeout: float = DEFAULT_TIMEOUT_S,
        members: tuple[int, ...] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.runtime = runtime
        self.timeout = timeout
        self.members = tuple(range(size)) if members is None else members
        """The world rank of each rank of this channel. Messages to users name these."""
        self.name_message: Callable[[int], str] | None = None
        """What the messages of a tag carry, for warnings and errors; None: the tag says enough."""
        self._job_channel: Transport | None = None
        self._own_store: MemoryStore | None = None

    # What an author writes.

    @abstractmethod
    def _send(self, data: Tensor, to: int, tag: int, exact: bool, lossy: bool) -> Handle:
        """Send a flat uint8 tensor."""

    @abstractmethod
    def _recv(self, data: Tensor, source: int | None, tag: int, exact: bool) -> Handle:
        """Receive into a flat uint8 tensor."""

    @abstractmethod
    def _split(self, members: tuple[int, ...]) -> Transport | None:
        """Make the channel of `split`, whose arguments are checked."""

    @abstractmethod
    def failure(self, peer: int | None, pending: str, seconds: float, cause: BaseException | None) -> Exception:
        """The error for a wait that broke or timed out: a `PeerLostError` that names the lost rank."""

    def lost(self) -> dict[int, str]:
        """The world ranks that are known to be lost, each with the reason."""
        return {}

    def abort(self) -> None:  # noqa: B027 (engines whose waits end by themselves need nothing)
        """Break every wait on this channel. It can only be closed afterwards."""

    def close(self) -> None:  # noqa: B027 (most engines hold nothing)
        """Release the engine's resources. Every rank calls it; a second call does nothing."""

    # What users call.

    def send(self, buffer: Tensor, to: int, tag: int = 0, *, exact: bool = False, lossy: bool = False) -> Handle:
        """Send the bytes of `buffer`. The buffer must not change until `wait` of the handle has returned.

        A message whose handle is dropped is still delivered; its buffer must then never change. A `lossy` message may
        be dropped or duplicated by a network that does so.
        """
        self._check(to, "to", tag)
        return self._send(as_bytes(buffer), to, tag, exact, lossy)

    def recv(self, buffer: Tensor, source: int | None = None, tag: int = 0, *, exact: bool = False) -> Handle:
        """Receive into `buffer` from `source`, or from any rank; `exact` needs a source."""
        if source is None and exact:
            raise WorldError("a receive from any rank cannot be exact: the sender is unknown, and so is the length")
        self._check(0 if source is None else source, "source", tag)
        return self._recv(as_bytes(buffer), source, tag, exact)

    def send_bytes(self, parts: Sequence[bytes | memoryview], to: int, tag: int = 0, *, lossy: bool = False) -> None:
        """Send a short message that consists of several parts. It is copied, so there is no handle."""
        whole = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        self.send(whole, to, tag, lossy=lossy)

    def recv_bytes(self, max_bytes: int, source: int, tag: int = 0, *, via: int | None = None) -> BytesHandle:
        """Receive a short message of up to `max_bytes` bytes into memory of its own.

        With `via`, the message is the reply to one that this rank has sent to `via`, which passes it on to `source`.
        The receive also fails if `via` is lost.
        """
        if via is not None:
            raise UnsupportedError(f"a receive on {self.name} cannot depend on the loss of a second rank")
        buffer = torch.empty(max_bytes, dtype=torch.uint8)
        handle = self.recv(buffer, source, tag)
        return BufferedBytes(buffer, handle, lambda: handle.wait(0.0))

    def listen(
        self,
        tag: int,
        max_bytes: int,
        on_request: Callable[[int, memoryview], None],
        on_peer_lost: Callable[[int], None],
    ) -> RequestListener | None:
        """Call `on_request(source, data)` for each message with a tag, in order.

        `on_peer_lost(rank)` is called for each lost rank, after all its messages. Both are called one at a time and
        must not wait. `data` is valid during the call; it is empty for a message longer than `max_bytes`.
        Returns None if the engine cannot do this: the caller then starts one receiving task per source.
        """
        return None

    def tensor_channels(self, pairs: Iterable[tuple[int, int]], device: torch.device) -> TensorChannels:
        """Channels for tensors of `device` that do not pass the CPU, from the first rank of each pair to the second.

        All ranks of this transport call it together with the same pairs, each with its own device. If there can be no
        such channels, the result has none.
        """
        return TensorChannels()

    def split(self, ranks: Sequence[int]) -> Transport | None:
        """An independent channel among `ranks`, in that order; None on a rank that is not among them.

        All ranks of this transport call it in the same order, members or not.
        """
        return self._split(check_ranks(ranks, self.size))

    def split_by_key(self, key: str) -> Transport:
        """An independent channel that also reaches the ranks that join later.

        All ranks that call it with the same key share it. It is called once with a key.
        """
        raise UnsupportedError(f"ranks cannot join a world on {self.name} later: take zeromq, or the simulator")

    @property
    def memory(self) -> RemoteMemory:
        """One-sided windows and shared memory."""
        return RemoteMemory(self)

    @property
    def job_channel(self) -> Transport:
        """The channel of all processes of the job: the ranks first, then those of `extra_roles`."""
        return self if self._job_channel is None else self._job_channel

    def add_roles(self, job_channel: Transport, roles: tuple[str, ...]) -> None:
        """Make the processes beside the ranks known: their channel, which includes the ranks, and their roles."""
        self._job_channel, self.extra_roles = job_channel, roles

    def control_store(self) -> KeyValueStore:
        """The key-value store of all processes of the job, for control channels. A world of one has it in memory."""
        if self.size > 1:
            raise UnsupportedError(
                f"{self.name} has no key-value store for its {self.size} ranks, and the workers of an asynchronous "
                "strategy inform each other there: override control_store() in the transport, or take a synchronous "
                "strategy such as allreduce"
            )
        if self._own_store is None:
            self._own_store = MemoryStore()
        return self._own_store

    def gone_reason(self, rank: int) -> str:
        """Why a rank of this channel sends nothing more: it is lost or has left. Empty while it is present."""
        return self.lost().get(self.members[rank], "")

    def _check(self, peer: int, what: str, tag: int) -> None:
        if not isinstance(peer, int) or not 0 <= peer < self.size:
            raise WorldError(f"{what}={peer} is not a rank: this channel has ranks 0 to {self.size - 1}")
        if not 0 <= tag < MAX_TAG:
            raise WorldError(f"tag={tag} is not between 0 and {MAX_TAG - 1}")


class TeamConnector(Protocol):
    """Connects the processes of an elastic job: it makes a channel for each team. Numbers are those of the members."""

    runtime: Runtime
    store: KeyValueStore
    """The store in which the members form teams. It must survive the loss of any member."""

    def lost(self) -> Mapping[int, str]:
        """The members that are known to be lost, each with the reason. It may ask the store."""
        ...

    def unreachable(self) -> Mapping[int, str]:
        """The members that this process cannot reach although they may be alive, each with the reason."""
        ...

    def connect(self, members: tuple[int, ...], number: int) -> Transport:
        """The channel of a team. All its members call it with the same number, which no other team has.

        Raises a `PeerLostError` if a member is lost meanwhile. Several channels may be connected at the same time.
        `abort` of a team's channel, or of a split of it, ends the waits of all members on it.
        """
        ...

    def follow(self, members: Iterable[int]) -> None:
        """Report the losses of these members from now on, also if they are in no team."""
        ...

    def add_roles(self, transport: Transport) -> Transport:
        """The same channel. On the simulator it then knows the channel of all processes, servers and newcomers too."""
        ...

    def close(self) -> None:
        """Leave the job."""
        ...


class BufferedBytes:
    """A receive with its own buffer."""

    def __init__(self, buffer: Tensor, handle: Handle, cancel: Callable[[], None]) -> None:
        self._buffer = buffer
        self._handle = handle
        self._cancel = cancel
        self.data = memoryview(b"")

    def done(self) -> bool:
        done = getattr(self._handle, "done", None)
        return done is not None and bool(done())

    def wait(self, timeout: float | None = None) -> None:
        self._handle.wait(timeout)
        self.data = self._buffer.numpy().data[: self._handle.nbytes]

    def cancel(self) -> None:
        with suppress(SynclineError):
            self._cancel()


def check_ranks(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """The ranks of a split. Each must exist and appear once."""
    try:
        members = tuple(operator.index(rank) for rank in ranks)
    except TypeError:
        raise WorldError(f"ranks={list(ranks)}: a rank is an integer") from None
    unknown = sorted({rank for rank in members if not 0 <= rank < size})
    repeated = sorted({rank for rank in members if members.count(rank) > 1})
    if not members or unknown or repeated:
        problems = [
            *(["it is empty"] if not members else []),
            *([f"not in the world of {size}: {unknown}"] if unknown else []),
            *([f"named more than once: {repeated}"] if repeated else []),
        ]
        raise WorldError(f"ranks={list(members)}: {'; '.join(problems)}")
    return members


def check_span(window: Tensor, values: Tensor, offset: int) -> None:
    """Raise if `values` at `offset` do not fit into a window."""
    if values.dtype != window.dtype:
        raise WorldError(f"the window holds {window.dtype}, not {values.dtype}")
    if not 0 <= offset <= offset + values.numel() <= window.numel():
        raise WorldError(f"elements {offset} to {offset + values.numel()} do not lie in a window of {window.numel()}")


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


def event_timeout(timeout: float) -> float | None:
    """A timeout in seconds as events take it: None for a wait without a deadline.

    >>> event_timeout(3.0), event_timeout(math.inf)
    (3.0, None)
    """
    return None if timeout == math.inf else timeout


def group_ranks_by_text(texts: Mapping[int, str]) -> str:
    """One text per rank for an error message; ranks with the same text are grouped.

    >>> group_ranks_by_text({0: "barrier()", 1: "send()", 2: "barrier()"})
    'ranks 0, 2: barrier(); rank 1: send()'
    """
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        groups.setdefault(texts[rank], []).append(rank)
    return "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {text}" for text, who in groups.items())


def mismatch_hint(tag: int) -> str:
    """A hint for a message of the wrong length. In a collective the likely cause is that ranks call different ones.

    >>> mismatch_hint(6), mismatch_hint(LANE_TAGS)[:42]
    ('', '; do all ranks call the same collective? s')
    """
    return f"; do all ranks call the same collective? {CHECK_HINT}" if LANE_TAGS <= tag < COMPARISON_TAGS else ""


def format_bytes(nbytes: int) -> str:
    """A number of bytes with a unit.

    >>> format_bytes(17), format_bytes(4_200_000)
    ('17 B', '4.2 MB')
    """
    amount = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} GB"
