"""Tensors from GPU to GPU by NCCL: a communicator of two ranks for each pair and direction.

```text
rank 0  ──── (0, 1) activations ───►  rank 1  ──── (1, 2) activations ───►  rank 2
        ◄─── (1, 0) gradients ──────          ◄─── (2, 1) gradients ──────
```

NCCL has no tags. What is sent on a communicator arrives in that order, and an operation waits on the GPU for those
before it. With a communicator for each direction, a send never waits for a receive of the same rank.

The CPU waits for nothing: the streams of the GPU wait for each other. Therefore a task watches the operations that the
GPU has not completed. If one takes longer than the timeout, or its peer is lost, the task finds out who is lost and
aborts all communicators. That ends the kernels that wait. The next call raises the error::

    CPU    receive ─ launch ─ launch ──── loss.item() … returns ── next call: PeerLostError
    GPU    [recv: waits for rank 1 ……………………… aborted]
    task                      timeout ── find the lost rank ── abort
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from syncline.errors import SynclineError, WorldError
from syncline.transports.base import TensorChannel, TensorChannels, format_bytes
from syncline.transports.key_value_store import first_line

if TYPE_CHECKING:
    from syncline.transports.torch_dist.transport import TorchTransport

__all__ = ["GpuPlace", "NcclChannels", "open_nccl_channels", "why_not_nccl"]

logger = logging.getLogger("syncline")

CHECK_EVERY_S = 0.25
"""Interval in seconds at which operations that the GPU has not completed are checked."""
REPORT_AFTER_S = 1.0
"""Seconds after which an operation is in this rank's record, so that others know for which rank it waits."""
CLOSE_TIMEOUT_S = 10.0
"""Seconds that closing waits for operations, and for the other ranks to close."""
POLL_S = 0.001
HOST_VARIABLE = "NCCL_HOSTID"
"""NCCL takes ranks with different values for ranks on different hosts."""


class GpuPlace(NamedTuple):
    """Where the tensors of a rank are, and its NCCL."""

    gpu: str
    """The identifier of the GPU; empty: they are on the CPU."""
    nccl: str
    """The version; empty: this PyTorch has none."""
    host: str = ""
    """The name that the user has given to the host for NCCL."""


def why_not_nccl(places: Sequence[GpuPlace], ranks: Sequence[int]) -> str:
    """Why NCCL cannot carry tensors among these ranks; empty if it can.

    >>> why_not_nccl([GpuPlace("GPU-1", "2.28.9"), GpuPlace("GPU-1", "2.28.9")], [0, 1])
    'ranks 0 and 1 use the same GPU, and NCCL needs one for each rank'
    >>> why_not_nccl([GpuPlace("GPU-1", "2.28.9"), GpuPlace("GPU-2", "2.28.9")], [0, 1])
    ''
    """
    owners: dict[tuple[str, str], int] = {}
    for rank, place in zip(ranks, places, strict=True):
        if not place.gpu:
            return f"the tensors of rank {rank} are on the CPU"
        if not place.nccl:
            return f"the PyTorch of rank {rank} has no NCCL"
        if place.nccl != places[0].nccl:
            return f"rank {ranks[0]} has NCCL {places[0].nccl} and rank {rank} {place.nccl}"
        other = owners.setdefault((place.host, place.gpu), rank)
        if other != rank:
            return f"ranks {other} and {rank} use the same GPU, and NCCL needs one for each rank"
    return ""


def open_nccl_channels(
    transport: TorchTransport, name: str, pairs: Sequence[tuple[int, int]], device: torch.device
) -> NcclChannels | None:
    """Open the channels of all pairs; None if NCCL cannot carry their tensors. All ranks call it."""
    if not pairs:
        return None
    channels: NcclChannels | None = None
    try:
        texts = _exchange(transport, f"{name}/places", json.dumps(_find_place(device)))
        places = [GpuPlace(*json.loads(text)) for text in texts]
        if not any(place.gpu for place in places):
            return None  # the usual case on the CPU
        reason = why_not_nccl(places, transport.members)
        if not reason:
            channels = NcclChannels(transport, device)
            error = channels.connect(name, pairs)
            made = [json.loads(text) for text in _exchange(transport, f"{name}/made", json.dumps(error))]
            failed = [(rank, text) for rank, text in zip(transport.members, made, strict=True) if text]
            reason = f"rank {failed[0][0]} cannot connect to the others: {failed[0][1]}" if failed else ""
    except RuntimeError as error:
        if channels is not None:
            channels.abort_and_close()
        raise transport.failure(None, "the other ranks to connect their GPUs", 0.0, error) from error
    if not reason:
        return channels
    if channels is not None:
        channels.abort_and_close()
    if transport.rank == 0:
        logger.warning("tensors between GPUs travel through the memory of the CPU, not by NCCL: %s", reason)
    return None


def _exchange(transport: TorchTransport, name: str, text: str) -> list[str]:
    members = transport.members
    return transport.factory.exchange_texts(name, members, members[transport.rank], text)


def _find_place(device: torch.device) -> GpuPlace:
    if device.type != "cuda":
        return GpuPlace("", "")
    version: Any = torch.cuda.nccl.version() if dist.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return GpuPlace(gpu, ".".join(map(str, version)), os.environ.get(HOST_VARIABLE, ""))


class _Operation(NamedTuple):
    """A send or a receive that the GPU may not have completed."""

    pending: str
    start: float
    completed: Any
    """An event of the GPU."""
    data: Tensor
    """Must exist until then."""


class _NcclChannel:
    """One direction between two ranks, as one of them sees it."""

    def __init__(self, channels: NcclChannels, group: Any, peer: int, device: torch.device) -> None:
        self.group, self.peer = group, peer
        self._channels, self._device = channels, device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """Receives begin without waiting for what the GPU computes at present."""
        self._name = f"rank {channels.transport.members[peer]}"
        self._under_way: deque[_Operation] = deque()
        self._lock = channels.transport.runtime.lock()

    def carries(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def send(self, data: Tensor, pending: str) -> None:
        self._channels.check()
        pending = f"{self._name} to take {pending} ({format_bytes(data.numel())})"
        try:
            work = self.group.send([data], 1, 0)
            self._note(work, data, pending)
        except RuntimeError as error:
            raise self._channels.explain(self.peer, pending, error) from error

    def receive(self, nbytes: int, pending: str) -> _ReceivedTensor:
        self._channels.check()
        pending = f"a message from {self._name} ({pending}, {format_bytes(nbytes)})"
        try:
            with torch.cuda.stream(self._stream):
                data = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                work = self.group.recv([data], 0, 0)
            return _ReceivedTensor(data, self._note(work, data, pending))
        except RuntimeError as error:
            raise self._channels.explain(self.peer, pending, error) from error

    def _note(self, work: Any, data: Tensor, pending: str) -> Any:
        """Record the end of an operation on the GPU, and keep its memory until then."""
        completed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            work.wait()  # the stream waits, not the CPU
            completed.record(self._stream)
        with self._lock:
            self._under_way.append(_Operation(pending, self._channels.transport.runtime.now(), completed, data))
        self.find_oldest()
        return completed

    def find_oldest(self) -> _Operation | None:
        """The first operation that the GPU has not completed. The memory of those before it is released."""
        with self._lock:
            while self._under_way and self._under_way[0].completed.query():
                self._under_way.popleft()
            return self._under_way[0] if self._under_way else None


class _ReceivedTensor:
    """A receive that was launched."""

    def __init__(self, data: Tensor, completed: Any) -> None:
        self._data, self._completed = data, completed

    def wait(self) -> Tensor:
        current = torch.cuda.current_stream(self._data.device)
        current.wait_event(self._completed)
        self._data.record_stream(current)  # it was allocated for another stream
        return self._data


class NcclChannels(TensorChannels):
    """The channels of one rank, and the task that watches them."""

    def __init__(self, transport: TorchTransport, device: torch.device) -> None:
        self.transport = transport
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._channels: dict[tuple[int, int], _NcclChannel] = {}
        self._waits: dict[_NcclChannel, tuple[_Operation, Callable[[], object]]] = {}
        """Operations that are in this rank's record, each with the function that removes it."""
        runtime = transport.runtime
        self._closed = runtime.event()
        self._aborted = False
        self._failing = runtime.event()
        """Set when an operation has failed. The cause is being sought."""
        self._failed = runtime.event()
        self._error: Exception | None = None
        """The cause, when `_failed` is set."""
        self._watcher = runtime.spawn(self._watch, name="watch NCCL")

    @property
    def closed(self) -> bool:
        """Whether the channels can be used no more."""
        return self._closed.is_set()

    def connect(self, name: str, pairs: Sequence[tuple[int, int]]) -> str:
        """Make the communicators, on all ranks in the same order. Returns the first error of NCCL, or nothing.

        Each sends one byte. Otherwise NCCL would connect the GPUs with the first send of a training step, which then
        would wait for the CPU of the other rank. Raises a RuntimeError if the other rank of a pair is lost.
        """
        transport, factory = self.transport, self.transport.factory
        members, failure = transport.members, ""
        for source, destination in pairs:
            if transport.rank not in (source, destination):
                continue
            key, own = f"{name}/{source}-{destination}", int(transport.rank == destination)
            factory.exchange_texts(key, [members[source], members[destination]], members[transport.rank], "ready")
            store = PrefixStore(f"nccl/{key}", factory.store)
            store.set_timeout(timedelta(seconds=transport.timeout))
            data = torch.zeros(1, dtype=torch.uint8, device=self._device)
            try:
                group = factory.make_nccl_pair(store, own, self._device)
                peer = source if own else destination
                self._channels[source, destination] = _NcclChannel(self, group, peer, self._device)
                work = group.recv([data], 0, 0) if own else group.send([data], 1, 0)
                work.wait(timedelta(seconds=transport.timeout))
            except RuntimeError as error:
                failure = failure or first_line(error)
        return failure

    def find(self, source: int, destination: int) -> TensorChannel | None:
        return self._channels.get((source, destination))

    def check(self) -> None:
        if self._failing.is_set():
            self._failed.wait()
            assert self._error is not None, "it is set before the event"
            raise self._error
        if self._aborted:  # torch would make another communicator, and wait for the other rank
            raise WorldError("this rank has closed or aborted the channels between GPUs")

    def explain(self, peer: int, pending: str, cause: RuntimeError) -> Exception:
        """The error for an operation that could not be launched."""
        try:
            self.check()  # its communicator may have been aborted meanwhile
        except SynclineError as error:
            return error
        return self.transport.failure(peer, pending, 0.0, cause)

    # The task that watches.

    def _watch(self) -> None:
        while not self._closed.wait(CHECK_EVERY_S):
            for channel in list(self._channels.values()):
                if self._has_failed(channel):
                    return

    def _has_failed(self, channel: _NcclChannel) -> bool:
        """Whether the oldest operation of a channel has failed. Then all communicators are aborted."""
        transport = self.transport
        operation = channel.find_oldest()
        self._report(channel, operation)
        if operation is None:
            return False
        seconds = transport.runtime.now() - operation.start
        gone = transport.gone_reason(channel.peer) if seconds > REPORT_AFTER_S else ""
        if not gone and seconds < transport.timeout:
            return False
        cause = ConnectionError(gone) if gone else TimeoutError("timed out")
        self._failing.set()
        try:
            self._error = transport.failure(channel.peer, operation.pending, seconds, cause)
        except Exception as error:  # others wait for the event
            self._error = error
        self._end_reports()
        self.abort()
        self._failed.set()
        return True

    def _report(self, channel: _NcclChannel, operation: _Operation | None) -> None:
        """Let this rank's record say for what it waits."""
        known = self._waits.get(channel)
        if known is not None and known[0] is not operation:
            self._waits.pop(channel)[1]()
            known = None
        transport = self.transport
        if operation is None or known or transport.runtime.now() - operation.start < REPORT_AFTER_S:
            return
        peer = transport.members[channel.peer]
        end = transport.liveness.waiting(operation.pending, transport.channel, transport.members, peer)
        self._waits[channel] = operation, end

    def _end_reports(self) -> None:
        for _, end in self._waits.values():
            end()
        self._waits.clear()

    # The end.

    def abort(self) -> None:
        """End all operations, also those with which the GPU waits for a lost rank."""
        if not self._aborted:
            self._aborted = True
            self.transport.runtime.spawn(self._abort_groups, name="abort NCCL").join(CLOSE_TIMEOUT_S)

    def _abort_groups(self) -> None:
        for channel in self._channels.values():
            with suppress(RuntimeError):
                channel.group.abort()

    def abort_and_close(self) -> None:
        """End all operations, and the task."""
        self.abort()
        self.close()

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._watcher.join(CLOSE_TIMEOUT_S)
        self._end_reports()
        if self._aborted:
            return
        runtime = self.transport.runtime
        until = runtime.now() + CLOSE_TIMEOUT_S
        while any(channel.find_oldest() for channel in self._channels.values()):
            if runtime.now() > until or not self.transport.lost().keys().isdisjoint(self.transport.members):
                self.abort()
                return
            runtime.sleep(POLL_S)
        # It may wait for the other rank, which may be lost.
        if not runtime.spawn(self._shut_down, name="close NCCL").join(max(POLL_S, until - runtime.now())):
            self.abort()

    def _shut_down(self) -> None:
        for channel in self._channels.values():
            with suppress(RuntimeError):
                channel.group.shutdown()
