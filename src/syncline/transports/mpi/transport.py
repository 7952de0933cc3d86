"""Point-to-point messages, splits and the rest of the contract, on a communicator of each channel's own."""

from __future__ import annotations

import hashlib
import logging
import sys
from itertools import count
from typing import Any

import torch
from torch import Tensor

from syncline.errors import PeerLostError, UnsupportedError, WorldError
from syncline.transports.base import Handle, RemoteMemory, Transport, Window, format_bytes
from syncline.transports.memory import Completed, tag_name
from syncline.transports.mpi.engine import PATIENCE, Engine, byte_spec, mpi_tag
from syncline.transports.mpi.handles import ExpectedHandle, RequestHandle
from syncline.transports.mpi.inbox import Inbox
from syncline.transports.mpi.native import NativeMpi
from syncline.transports.mpi.windows import MpiWindow

__all__ = ["MpiTransport"]

logger = logging.getLogger("syncline")


class MpiTransport(Transport):
    """One rank on one communicator."""

    name = "mpi"

    def __init__(self, engine: Engine, comm: Any, members: tuple[int, ...], channel: str = "0") -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), engine.runtime, engine.timeout, members)
        self.engine = engine
        self.comm = comm
        self.channel = channel
        self.inbox = Inbox(self)
        self.native = NativeMpi(self)
        self._splits = count(1)
        self._windows: list[MpiWindow] = []
        self._closed = False
        self._aborted = False
        comm.Set_errhandler(engine.mpi.ERRORS_RETURN)

    # Messages.

    def _send(self, data: Tensor, to: int, tag: int, exact: bool, lossy: bool) -> Handle:
        number = self._tag(tag)
        self.engine.tidy()
        # A message to oneself is copied: it may be waited for before anybody receives it.
        data = data.cpu().clone() if to == self.rank else data.cpu()
        pending = f"rank {self.members[to]} to take {format_bytes(data.numel())}"
        try:
            request = self.comm.Isend(byte_spec(self.engine, data, data.numel()), to, number)
        except self.engine.mpi.Exception as error:
            raise self.failure(to, pending, 0.0, error) from error
        handle = RequestHandle(self, request, (data,), to, pending, outgoing=True)
        return Completed(data.numel()) if to == self.rank else handle  # dropped, it lives on in the engine

    def _recv(self, data: Tensor, source: int | None, tag: int, exact: bool) -> Handle:
        self._tag(tag)
        landing = torch.empty_like(data, device="cpu") if data.is_cuda else data
        return ExpectedHandle(self, data, self.inbox.post(landing, source, tag, exact))

    def _tag(self, tag: int) -> int:
        if self._closed:
            raise WorldError(f"channel {self.channel} of ranks {list(self.members)} is closed")
        number = mpi_tag(tag)
        if number > self.engine.most_tag:
            raise UnsupportedError(
                f"{tag_name(tag)} is too large for this MPI, whose own tags end at {self.engine.most_tag}: "
                f"use tags up to {self.engine.most_tag // 2}"
            )
        return number

    def check_count(self, count: int, what: str) -> None:
        """Refuse what this MPI cannot count; messages alone go in blocks."""
        if count > self.engine.most_count:
            raise UnsupportedError(
                f"{what} of {count} elements: this MPI (version {'.'.join(map(str, self.engine.mpi.Get_version()))}) "
                f"counts to {self.engine.most_count}; take it in parts, or name a schedule"
            )

    # Channels.

    def _split(self, members: tuple[int, ...]) -> Transport | None:
        number = next(self._splits)
        self.engine.free_retired()
        if self.rank not in members:
            return None
        chosen = tuple(self.members[rank] for rank in members)
        # The ranks are part of the name: two halves that each split themselves off at once must not meet.
        name = f"{self.channel}.{number}.{hashlib.blake2b(repr(chosen).encode(), digest_size=6).hexdigest()}"
        tag = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % (self.engine.most_tag + 1)
        self._meet(chosen, tag)
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

    def _meet(self, chosen: tuple[int, ...], tag: int) -> None:
        """Wait until all members are here: making a communicator waits too, but knows no time limit."""
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
        """It has been closed."""
        if window in self._windows:
            self._windows.remove(window)

    # When something is wrong, and the end.

    def has_ended(self) -> bool:
        """Whether waits on this channel must end."""
        return self._aborted or self._closed

    def give_up(self, for_good: bool) -> None:
        """A wait has failed: for good at the transport's own timeout, not where the caller gave a time to try for."""
        self.engine.lost = self.engine.lost or (for_good and not self.has_ended())

    def failure(self, peer: int | None, pending: str, seconds: float, cause: BaseException | None) -> Exception:
        who = "a peer" if peer is None else f"rank {self.members[peer]}"
        if cause is not None:
            reason = f"MPI says {cause}"
        elif self.has_ended():
            reason = "this rank has closed or aborted the channel"
        else:
            reason = "it has not come; MPI does not tell who is alive, so look at that rank's own output"
        after = f" after {seconds:.3g} s" if seconds else ""
        return PeerLostError(
            f"rank {self.members[self.rank]} lost {who}{after} while waiting for {pending}: {reason}",
            peer=None if peer is None else self.members[peer],
            pending=pending,
            seconds=seconds,
        )

    def abort(self) -> None:
        """Break every wait of this rank on this channel; the peers' waits end at their timeout."""
        self._aborted = True

    def close(self) -> None:
        """Free the windows that were forgotten, see off what is still being sent, and let the communicator go."""
        if self._closed:
            return
        engine = self.engine
        engine.leaving(sys.exc_info()[1])
        if not engine.unclean:
            for window in list(self._windows):
                try:
                    window.close()
                except PeerLostError as error:
                    logger.warning("a window that nobody closed is left to the end of the process: %s", error)
            if not engine.wait(engine.let_go, PATIENCE, lambda: "peers to receive all that was sent"):
                logger.warning("rank %d closes while peers have not received all it sent", self.members[self.rank])
        self._closed = True
        self.inbox.close()
        if not engine.unclean:
            engine.retire(self.comm)


class _MpiMemory(RemoteMemory):
    def __init__(self, transport: MpiTransport, windows: list[MpiWindow]) -> None:
        super().__init__(transport)
        self._mpi, self._windows = transport, windows

    def window(self, numel: int, dtype: torch.dtype) -> Window:
        window = MpiWindow(self._mpi, numel, dtype)
        self._windows.append(window)
        return window
