"""ZeroMQ as a transport: any to any, on one set of sockets, with members that come and go."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import torch
from torch import Tensor

from syncline.errors import IncompatibleError, PeerLostError, WorldError
from syncline.transports.base import BytesHandle, Handle, RequestListener, Transport, format_bytes
from syncline.transports.liveness import Liveness, LivenessMonitor, Verdict
from syncline.transports.mailbox import Mailbox, Posted
from syncline.transports.memory import Completed, tag_name
from syncline.transports.zeromq.crank import Waited
from syncline.transports.zeromq.listening import Ears, ZmqListening
from syncline.transports.zeromq.node import Node
from syncline.transports.zeromq.protocol import CrowdedError, Link, Outgoing

__all__ = ["ZmqTransport"]

GIVEN_UP = "the channel was given up"
LATE = "it has not come within the timeout"
_NOTHING = torch.empty(0, dtype=torch.uint8)
SHOWN = 8
"""Ranks that a message names."""


class ZmqTransport(Transport):
    """One rank's channel. The first one reaches every rank that is in the world, those that joined later too."""

    name = "zeromq"

    def __init__(self, node: Node, members: tuple[int, ...], timeout: float, channel: str = "0") -> None:
        super().__init__(members.index(node.rank), len(members), node.runtime, timeout, members)
        self.node = node
        self._channel = channel
        self._number = 0 if channel == "0" else zlib.crc32(channel.encode()) or 1
        self._mailbox: Mailbox = node.channels.mailbox(self._number)
        self._splits = count(1)
        self._root = channel == "0"
        self._closed = False
        self._aborted = False
        self.monitor = _ConnectionMonitor(self, node.liveness, channel)

    def present(self) -> tuple[int, ...]:
        """The ranks that are in the world now; those that came after the launch have the highest numbers."""
        self.node.directory.refresh()
        return self.node.directory.present()

    def _send(self, data: Tensor, to: int, tag: int, exact: bool, lossy: bool) -> Handle:
        rank = to if self._root else self.members[to]
        if rank == self.node.rank:
            self._mailbox.deliver(data.cpu().clone(), rank, tag)
            self.node.nudge()
            return Completed(data.numel())
        if data.is_cuda:
            data = data.cpu()
        try:
            outgoing = self._hand_to(self.node.link(rank), tag, data, to)
        except PeerLostError:
            raise
        except ConnectionError as error:
            raise self.failure(to, self.to_take(to, data.numel()), 0.0, error) from error
        return Completed(data.numel()) if outgoing is None else _Sending(self, outgoing, to)

    def _hand_to(self, link: Link, tag: int, data: Tensor, to: int) -> Outgoing | None:
        while True:
            if self._aborted:
                raise self.given_up(self.to_take(to, data.numel()))
            try:
                outgoing = link.send(self._number, tag, data)
                if self._aborted:  # between the two: nobody else gives this one up
                    self.node.abandon(self._number, GIVEN_UP)
                return outgoing
            except CrowdedError as crowd:
                if self.node.crank.drives:
                    raise ConnectionError("it takes nothing of what was sent to it") from None
                pending = partial(self.to_take, to, data.numel())
                if not self.wait(crowd.oldest, self.timeout, pending, to):
                    raise self.failure(to, pending(), self.timeout, None) from None

    def send_bytes(self, parts: Sequence[bytes | memoryview], to: int, tag: int = 0, *, lossy: bool = False) -> None:
        self._check(to, "to", tag)
        rank = to if self._root else self.members[to]
        if rank != self.node.rank and not self._aborted:
            nbytes = sum(map(len, parts))
            try:
                if self.node.link(rank).post(self._number, tag, parts, nbytes):
                    return
            except PeerLostError:
                raise
            except ConnectionError as error:
                raise self.failure(to, self.to_take(to, nbytes), 0.0, error) from error
        super().send_bytes(parts, to, tag, lossy=lossy)

    def recv_bytes(self, max_bytes: int, source: int, tag: int = 0) -> BytesHandle:
        self._check(source, "source", tag)
        posted = Posted(_NOTHING, source if self._root else self.members[source], tag, False, most=max_bytes)
        return _TakingIn(self, self._mailbox, self._mailbox.add(posted), _NOTHING, source)

    def to_take(self, to: int, nbytes: int) -> str:
        """What a sender waits for, in the world's ranks."""
        return f"{self.node.name(self._rank_of(to))} to take {format_bytes(nbytes)}"

    def _recv(self, data: Tensor, source: int | None, tag: int, exact: bool) -> Handle:
        rank = source if source is None or self._root else self.members[source]
        landing = torch.empty_like(data, device="cpu") if data.is_cuda else data
        posted = self._mailbox.post(landing, rank, tag, exact)
        return _Receiving(self, self._mailbox, posted, data, source)

    def listen(
        self,
        tag: int,
        max_bytes: int,
        on_request: Callable[[int, memoryview], None],
        on_peer_lost: Callable[[int], None],
    ) -> RequestListener:
        ears = Ears(self.place, self._rank_of, on_request, on_peer_lost)
        return ZmqListening(self.node, self._mailbox, tag, max_bytes, ears)

    def _check(self, peer: int, what: str, tag: int) -> None:
        if self._root and isinstance(peer, int) and peer >= self.size:
            self.node.directory.find(peer)  # one that has joined; a stranger is refused here
            peer = 0
        super()._check(peer, what, tag)

    def _rank_of(self, place: int) -> int:
        return place if self._root else self.members[place]

    def place(self, rank: int) -> int:
        """A rank of the world as this channel counts."""
        return rank if self._root else self.members.index(rank)

    def _split(self, members: tuple[int, ...]) -> Transport | None:
        number = next(self._splits)
        if self.rank not in members:
            return None
        chosen = tuple(self.members[rank] for rank in members)
        name = f"{self._channel}.{number}.{zlib.crc32(repr(chosen).encode()):08x}"
        return ZmqTransport(self.node, chosen, self.timeout, name)

    def lost(self) -> dict[int, str]:
        directory = self.node.directory
        return {rank: reason for rank, reason in list(directory.gone.items()) if rank not in directory.left}

    def connect_to(self, ranks: Sequence[int]) -> None:
        """Open the connections to these ranks, so that their end is noticed."""
        for rank in ranks:
            if rank != self.rank:
                self.node.link(rank if self._root else self.members[rank])

    def gone_reason(self, rank: int) -> str:
        return self.node.gone(self._rank_of(rank))

    def wait(self, thing: Waited, timeout: float, pending: Callable[[], str], peer: int | None) -> bool:
        """Wait as the node does, and write into this rank's record which rank it waits for, unless the wait is idle."""
        if thing.settled:
            return True
        if timeout == math.inf:
            return self.node.wait(thing, timeout, pending)
        rank = None if peer is None else self._rank_of(peer)
        over = self.node.liveness.waiting(pending, self._channel, self.members, rank, self.abort)
        try:
            return self.node.wait(thing, timeout, pending)
        finally:
            over()

    def failure(self, peer: int | None, pending: str, seconds: float, cause: BaseException | None) -> Exception:
        rank = None if peer is None else self._rank_of(peer)
        if self.node.given_up:
            return self.node.lost(self.node.rank, self.node.given_up, pending, seconds)
        verdict = self._verdict(rank, seconds, cause)
        if verdict.mismatch:
            return IncompatibleError(f"rank {self.node.rank} waited for {pending}: {verdict.reason}")
        if verdict.rank == self.node.rank:
            verdict = Verdict(verdict.rank, "the others have declared this rank lost")
        return self.node.lost(verdict.rank, verdict.reason, pending, seconds)

    def _verdict(self, rank: int | None, seconds: float, cause: BaseException | None) -> Verdict:
        """The rank that caused a wait for `rank` to fail: that rank, or one that it waits for itself."""
        if rank is None:
            return Verdict(None, self._who_is_there())
        gone, asks = self.node.gone(rank), not self.node.crank.drives
        differ = self.node.liveness.mismatch(self._channel) if asks and (gone or seconds >= self.timeout) else ""
        if differ:
            return Verdict(None, differ, mismatch=True)
        if gone:
            return self.node.liveness.cause_of(rank, gone) if asks else Verdict(rank, gone)
        if cause is not None:
            return Verdict(rank, str(cause))
        if asks and seconds >= self.timeout:
            return self.node.liveness.blame(self._channel, self.members, rank, broken=False)
        return Verdict(rank, f"{LATE}; {self.node.name(rank)} is still there")

    def refined(self, error: Exception, peer: int | None, pending: str) -> Exception:
        """The error of a broken receive. The node, which broke it, knows that the peer ended, but not why."""
        if isinstance(error, WorldError) and (text := self.node.liveness.mismatch_found(self._channel)):
            return IncompatibleError(f"rank {self.node.rank} waited for {pending}: {text}")
        if not isinstance(error, PeerLostError) or peer is None or not self.node.gone(self._rank_of(peer)):
            return error
        return self.failure(peer, pending, 0.0, None)

    def _who_is_there(self) -> str:
        """What is known of those from whom a message could have come."""
        ranks = sorted(self.node.directory.members) if self._root else self.members
        others = [rank for rank in ranks if rank != self.node.rank]
        gone = {rank: reason for rank in others if (reason := self.node.gone(rank))}
        if not gone:
            return f"{LATE}; everyone it could come from is still there"
        ends = [f"{self.node.name(rank)} ({reason})" for rank, reason in gone.items()]
        named = ", ".join(ends[:SHOWN]) + (f" and {len(ends) - SHOWN} more" if len(ends) > SHOWN else "")
        if len(gone) == len(others):
            return f"everyone it could come from is gone: {named}"
        return f"{LATE}; of {len(others)} it could come from {len(gone)} are gone: {named}"

    def given_up(self, pending: str) -> WorldError:
        """The error for what was under way when the channel was given up."""
        return WorldError(f"{GIVEN_UP} while rank {self.node.rank} waited for {pending}")

    def abort(self) -> None:
        """Break every receive and every send that waits on this channel; it carries nothing more."""
        self._aborted = True
        self._mailbox.close(lambda posted: WorldError(f"{GIVEN_UP} while tag {posted.tag} was awaited"))
        self.node.abandon(self._number, GIVEN_UP)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.node.liveness.pending.pop(self._channel, None)
        if self._root:
            self.node.close(min(self.timeout, 60.0))
        else:
            self.node.forget(self._number)


class _ConnectionMonitor(LivenessMonitor):
    """Records in the store, and connections to the ranks that are watched."""

    def __init__(self, transport: ZmqTransport, liveness: Liveness, channel: str) -> None:
        super().__init__(liveness, channel)
        self._transport = transport

    def watch(self, ranks: Sequence[int]) -> None:
        self._transport.connect_to(ranks)


class _Sending:
    """A message whose bytes are still here."""

    def __init__(self, transport: ZmqTransport, outgoing: Outgoing, to: int) -> None:
        self._transport = transport
        self._outgoing = outgoing
        self._to = to
        self.source = -1
        self.nbytes = outgoing.nbytes

    def wait(self, timeout: float | None = None) -> None:
        transport, outgoing = self._transport, self._outgoing
        patience = transport.timeout if timeout is None else timeout
        if not transport.wait(outgoing, patience, self._pending, self._to):
            raise transport.failure(self._to, self._pending(), patience, None)
        if outgoing.error == GIVEN_UP:
            raise transport.refined(transport.given_up(self._pending()), self._to, self._pending())
        if outgoing.error:
            raise transport.failure(self._to, self._pending(), 0.0, ConnectionError(outgoing.error))

    def _pending(self) -> str:
        return self._transport.to_take(self._to, self.nbytes)


class _Receiving:
    """A receive under way."""

    def __init__(
        self, transport: ZmqTransport, mailbox: Mailbox, posted: Posted, data: Tensor, source: int | None
    ) -> None:
        self._transport = transport
        self._mailbox = mailbox
        self._posted = posted
        self._data = data
        self._wanted = source
        self.source = -1
        self.nbytes = 0

    def done(self) -> bool:
        """Whether a wait would return at once. The node's own task moves messages where nobody waits."""
        return self._posted.settled

    def wait(self, timeout: float | None = None) -> None:
        transport, posted = self._transport, self._posted
        if not posted.settled:
            self._wait(transport.timeout if timeout is None else timeout)
        if posted.error is not None:
            raise self._refined(posted.error)
        if self._data is not posted.data:
            self._data.copy_(posted.data)
        self.source, self.nbytes = transport.place(posted.source), posted.nbytes

    def _wait(self, patience: float) -> None:
        transport, posted = self._transport, self._posted
        gone = transport.node.link(posted.wanted).gone if posted.wanted not in (None, transport.node.rank) else ""
        if gone and self._mailbox.withdraw(posted):
            raise transport.failure(self._wanted, self._pending(), 0.0, ConnectionError(gone))
        if not transport.wait(posted, patience, self._pending, self._wanted) and self._mailbox.withdraw(posted):
            raise transport.failure(self._wanted, self._pending(), patience, None)

    def _refined(self, error: Exception) -> Exception:
        return self._transport.refined(error, self._wanted, self._pending())

    def _pending(self) -> str:
        posted = self._posted
        most = posted.data.numel() if posted.most < 0 else posted.most
        name = self._transport.node.name
        whom = "anyone" if posted.wanted is None else name(posted.wanted)  # it may have joined later
        return f"a message from {whom} ({tag_name(posted.tag)}, {format_bytes(most)})"


class _TakingIn(_Receiving):
    """A short message that keeps the memory it came in."""

    data = memoryview(b"")

    def wait(self, timeout: float | None = None) -> None:
        posted = self._posted
        if not posted.settled:
            self._wait(self._transport.timeout if timeout is None else timeout)
        if posted.error is not None:
            raise self._refined(posted.error)
        assert posted.content is not None, "it has come"
        self.data = posted.content
