"""Point-to-point messages, splits and the rest of the contract, on one communicator per channel.

Receives are matched in the order in which they were posted, and the length of a message is known before its bytes
are received. MPI's plain receive at best truncates a long message; Open MPI 5.0 writes all of it, far past the buffer,
and then reports an error. A *matched probe* takes a message out of MPI's queue, so that no other receive gets it, and
returns its length::

    recv ────► expected ─┐ the first that matches
                         ├──► receive into its buffer, or refuse
    Improbe ─► message ──┘ called only while a receive waits for the tag

A cancelled receive was never passed to MPI, so that a message that arrives later goes to the next receive.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from syncline.errors import PeerLostError, ProtocolError, UnsupportedError, WorldError
from syncline.transports.base import Handle, RemoteMemory, Transport, Window, format_bytes, mismatch_hint
from syncline.transports.key_value_store import KeyValueStore
from syncline.transports.messages import MAX_UNRECEIVED_BYTES, CompletedHandle, describe_recv, peer_lost_error, tag_name
from syncline.transports.mpi.engine import (
    JOIN_TIMEOUT_S,
    MAX_DROPPED_OPERATIONS,
    MpiProcess,
    RequestHandle,
    byte_spec,
    mpi_tag,
)
from syncline.transports.mpi.native import MpiWindow, NativeMpi

__all__ = ["MatchedReceive", "MpiTransport", "ProbeQueue", "ProbedReceive"]

logger = logging.getLogger("syncline")


@dataclass(eq=False, slots=True)
class ProbedReceive:
    """A receive that waits for its message, then for its bytes."""

    data: Tensor
    wanted: int | None
    tag: int
    exact: bool
    source: int = -1
    nbytes: int = 0
    request: Any = None
    matched: bool = False
    error: Exception | None = None
    outgoing: bool = False

    def over(self) -> bool:
        """Whether the bytes are there, or never come."""
        return self.matched and (self.request is None or bool(self.request.Test()))


class ProbeQueue:
    """One channel's receives of unknown length."""

    def __init__(self, transport: MpiTransport) -> None:
        self._transport = transport
        self._mpi = transport.engine.mpi
        self._lock = transport.runtime.lock()
        self._expected: dict[int, list[ProbedReceive]] = {}
        self._status = self._mpi.Status()
        self._attended = False

    def post(self, data: Tensor, wanted: int | None, tag: int, exact: bool) -> ProbedReceive:
        """Post a receive for the earliest matching message, now or later."""
        expected = ProbedReceive(data, wanted, tag, exact)
        with self._lock:
            self._expected.setdefault(tag, []).append(expected)
            self._poll_tag(tag)
            first, self._attended = not self._attended, True
        if first:
            self._transport.engine.add_poll(self.poll)
        return expected

    def withdraw(self, expected: ProbedReceive) -> bool:
        """Cancel a receive; False if its message has arrived meanwhile."""
        with self._lock:
            if expected.matched:
                return False
            self._expected[expected.tag].remove(expected)
            return True

    def poll(self) -> None:
        """Match the messages that have arrived."""
        if self._expected:
            with self._lock:
                for tag in tuple(self._expected):
                    self._poll_tag(tag)

    def close(self) -> None:
        """End all receives with an error."""
        self._transport.engine.remove_poll(self.poll)
        with self._lock:
            for expected in self._expected.values():
                self._fail(expected, None)
            self._expected.clear()

    def _poll_tag(self, tag: int) -> None:
        expected = self._expected[tag]
        try:
            while expected and self._probe(tag, expected):
                pass
        except self._mpi.Exception as error:
            self._fail(expected, error)
            expected.clear()
        if not expected:
            del self._expected[tag]

    def _fail(self, expected: list[ProbedReceive], cause: BaseException | None) -> None:
        for each in expected:
            pending = describe_recv(self._transport, each.wanted, each.tag, each.data.numel())
            each.error, each.matched = self._transport.failure(each.wanted, pending, 0.0, cause), True

    def _probe(self, tag: int, expected: list[ProbedReceive]) -> bool:
        """Match the arrived messages with a tag; False if there was none."""
        # If a receive takes messages from any rank, only a probe for any rank keeps the order of the receives.
        sources = {each.wanted for each in expected}
        any_found = False
        for source in (None,) if None in sources else sources:
            peer = self._mpi.ANY_SOURCE if source is None else source
            message = self._transport.comm.Improbe(peer, mpi_tag(tag), self._status)
            if message is not None:
                any_found = True
                sender = self._status.source
                first = next(each for each in expected if each.wanted in (None, sender))
                expected.remove(first)
                self._start(first, message, sender, self._status.Get_elements(self._mpi.BYTE))
        return any_found

    def _start(self, expected: ProbedReceive, message: Any, source: int, length: int) -> None:
        """Receive the bytes of a message that the probe has taken out of MPI's queue."""
        room = expected.data.numel()
        expected.source, expected.nbytes = source, length
        if length > room or (expected.exact and length < room):
            expected.error = ProtocolError(
                f"rank {source} sent {format_bytes(length)} ({tag_name(expected.tag)}) where "
                f"{'exactly' if expected.exact else 'at most'} {format_bytes(room)} were expected"
                f"{mismatch_hint(expected.tag)}",
                peer=source,
            )
        # A message that is too long is received too, so that its sender does not hang, up to MAX_UNRECEIVED_BYTES.
        if length <= max(room, MAX_UNRECEIVED_BYTES):
            buffer = expected.data[:length] if length <= room else torch.empty(length, dtype=torch.uint8)
            expected.request = message.Irecv(byte_spec(self._transport.engine, buffer, length))
        expected.matched = True


class MatchedReceive:
    """The handle of a receive that the inbox matches."""

    def __init__(self, transport: MpiTransport, data: Tensor, expected: ProbedReceive) -> None:
        self._transport = transport
        self._data = data
        self._expected = expected
        self._done = False
        self.source = -1
        self.nbytes = 0

    def __del__(self) -> None:
        if not self._done:
            self._transport.engine.hold(self._expected)

    def wait(self, timeout: float | None = None) -> None:
        transport, expected, engine = self._transport, self._expected, self._transport.engine
        if not self._done:
            timeout_s, start = transport.timeout if timeout is None else timeout, transport.runtime.now()
            cause: Exception | None = None
            try:
                finished = engine.wait(expected.over, timeout_s, self._pending, transport.has_ended)
            except engine.mpi.Exception as error:
                finished, cause = False, error
            if not finished:
                self._done = transport.inbox.withdraw(expected)
            if not finished and (self._done or cause is not None or not expected.over()):
                transport.give_up(for_good=timeout is None or cause is not None)
                seconds = transport.runtime.now() - start
                raise transport.failure(expected.wanted, self._pending(), seconds, cause) from cause
            self._done = True
            if expected.error is None and expected.data is not self._data:
                self._data[: expected.nbytes].copy_(expected.data[: expected.nbytes])
        if expected.error is not None:
            raise expected.error
        self.source, self.nbytes = expected.source, expected.nbytes

    def _pending(self) -> str:
        expected = self._expected
        return describe_recv(self._transport, expected.wanted, expected.tag, expected.data.numel())


class MpiTransport(Transport):
    """One rank on one communicator."""

    name = "mpi"

    def __init__(self, engine: MpiProcess, comm: Any, members: tuple[int, ...], channel: str = "0") -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), engine.runtime, engine.timeout, members)
        self.engine = engine
        self.comm = comm
        self.channel = channel
        self.inbox = ProbeQueue(self)
        self.native = NativeMpi(self)
        self._splits = count(1)
        self._windows: list[MpiWindow] = []
        self._closed = False
        self._aborted = False
        comm.Set_errhandler(engine.mpi.ERRORS_RETURN)

    # Messages.

    def _send(self, data: Tensor, to: int, tag: int, exact: bool, lossy: bool) -> Handle:
        number = self._tag(tag)
        if len(self.engine.dropped) > MAX_DROPPED_OPERATIONS:
            self.engine.release_dropped()
        # A message to this rank itself is copied: its handle may be waited for before the receive is posted.
        data = data.cpu().clone() if to == self.rank else data.cpu()
        pending = f"rank {self.members[to]} to take {format_bytes(data.numel())}"
        try:
            request = self.comm.Isend(byte_spec(self.engine, data, data.numel()), to, number)
        except self.engine.mpi.Exception as error:
            raise self.failure(to, pending, 0.0, error) from error
        handle = RequestHandle(self, request, (data,), to, pending, outgoing=True)
        return CompletedHandle(data.numel()) if to == self.rank else handle  # the engine holds the dropped one

    def _recv(self, data: Tensor, source: int | None, tag: int, exact: bool) -> Handle:
        self._tag(tag)
        buffer = torch.empty_like(data, device="cpu") if data.is_cuda else data
        return MatchedReceive(self, data, self.inbox.post(buffer, source, tag, exact))

    def _tag(self, tag: int) -> int:
        if self._closed:
            raise WorldError(f"channel {self.channel} of ranks {list(self.members)} is closed")
        number = mpi_tag(tag)
        if number > self.engine.max_tag:
            raise UnsupportedError(
                f"{tag_name(tag)} is too large for this MPI, whose own tags end at {self.engine.max_tag}: "
                f"use tags up to {self.engine.max_tag // 2}"
            )
        return number

    def check_count(self, count: int, what: str) -> None:
        """Refuse an operation with more elements than this MPI can count. Messages are sent in blocks instead."""
        if count > self.engine.max_count:
            raise UnsupportedError(
                f"{what} of {count} elements: this MPI (version {'.'.join(map(str, self.engine.mpi.Get_version()))}) "
                f"counts to {self.engine.max_count}; take it in parts, or name a schedule"
            )

    # Channels.

    def _split(self, members: tuple[int, ...]) -> Transport | None:
        number = next(self._splits)
        self.engine.free_unused()
        if self.rank not in members:
            return None
        chosen = tuple(self.members[rank] for rank in members)
        # The ranks are part of the name: two halves that split at the same time must not share a channel.
        name = f"{self.channel}.{number}.{hashlib.blake2b(repr(chosen).encode(), digest_size=6).hexdigest()}"
        tag = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % (self.engine.max_tag + 1)
        self._await_members(chosen, tag)
        mpi, everyone = self.engine.mpi, self.engine.comm
        try:
            group = everyone.Get_group()
            part = group.Incl(list(chosen))
            comm = everyone.Create_group(part, tag)
            part.Free()
            group.Free()
        except mpi.Exception as error:
            raise self.failure(None, f"ranks {list(chosen)} to make a channel", 0.0, error) from error
        return MpiTransport(self.engine, comm, chosen, name)

    def _await_members(self, chosen: tuple[int, ...], tag: int) -> None:
        """Wait until all members call `split`. MPI's `Create_group` waits too, but without a timeout."""
        comm, me, first = self.engine.comm, self.members[self.rank], chosen[0]
        others = [peer for peer in chosen if peer != first] if me == first else [first]
        token = torch.zeros(1, dtype=torch.uint8)

        def start(operation: Any, peer: int) -> Handle:
            request = operation([token.clone().numpy(), 1, self.engine.mpi.BYTE], peer, tag)
            return RequestHandle(self, request, (), None, f"rank {peer} to make a channel of ranks {list(chosen)}")

        for operation in (comm.Irecv, comm.Isend) if me == first else (comm.Isend, comm.Irecv):
            for handle in [start(operation, peer) for peer in others]:
                handle.wait()

    @property
    def memory(self) -> RemoteMemory:
        return _MpiMemory(self, self._windows)

    def forget(self, window: MpiWindow) -> None:
        """Remove a window that was closed."""
        if window in self._windows:
            self._windows.remove(window)

    def control_store(self) -> KeyValueStore:
        return super().control_store() if self.size == 1 else self.engine.control_store()

    # Failures and the end.

    def has_ended(self) -> bool:
        """Whether waits on this channel must end."""
        return self._aborted or self._closed

    def give_up(self, for_good: bool) -> None:
        """Record that a wait has failed: for good at the transport's own timeout, but not at the caller's."""
        self.engine.lost = self.engine.lost or (for_good and not self.has_ended())

    def failure(self, peer: int | None, pending: str, seconds: float, cause: BaseException | None) -> Exception:
        lost = None if peer is None else self.members[peer]
        if cause is not None:
            reason = f"MPI says {cause}"
        elif self.has_ended():
            reason = "this rank has closed or aborted the channel"
        else:
            reason = "it has not arrived; MPI does not report which ranks are alive: read that rank's own output"
        name = "a peer" if lost is None else f"rank {lost}"
        return peer_lost_error(f"rank {self.members[self.rank]}", lost, name, pending, seconds, reason)

    def abort(self) -> None:
        """Break every wait of this rank on this channel; the peers' waits end at their timeout."""
        self._aborted = True

    def close(self) -> None:
        """Free the windows that are still open, wait for the sends in progress, and release the communicator."""
        if self._closed:
            return
        engine = self.engine
        engine.leaving(sys.exc_info()[1])
        if not engine.unclean:
            for window in list(self._windows):
                try:
                    window.close()
                except PeerLostError as error:
                    logger.warning("a window that was not closed stays allocated until the process ends: %s", error)
            if not engine.wait(engine.release_dropped, JOIN_TIMEOUT_S, lambda: "peers to receive all that was sent"):
                logger.warning("rank %d closes while peers have not received all it sent", self.members[self.rank])
        self._closed = True
        self.inbox.close()
        if not engine.unclean:
            engine.free_when_unused(self.comm)


class _MpiMemory(RemoteMemory):
    def __init__(self, transport: MpiTransport, windows: list[MpiWindow]) -> None:
        super().__init__(transport)
        self._mpi, self._windows = transport, windows

    def window(self, numel: int, dtype: torch.dtype) -> Window:
        window = MpiWindow(self._mpi, numel, dtype)
        self._windows.append(window)
        return window
