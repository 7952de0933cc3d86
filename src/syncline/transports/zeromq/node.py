"""One process's sockets: a ROUTER that hears everyone, a DEALER to each peer.

Who reads the ROUTER is the crank's affair.
"""

from __future__ import annotations

import logging
import math
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

from syncline.environment.base import package_version
from syncline.errors import PeerLostError, ProtocolError, WorldError
from syncline.runtime import Runtime
from syncline.transports.base import format_bytes
from syncline.transports.frames import HEADER_BYTES, Header
from syncline.transports.limited_log import LimitedLog
from syncline.transports.liveness import Liveness
from syncline.transports.mailbox import Posted
from syncline.transports.zeromq.channels import Channels
from syncline.transports.zeromq.crank import Crank, Waited
from syncline.transports.zeromq.directory import Directory, Entry
from syncline.transports.zeromq.protocol import BYE, KINDS, PART, PART_BYTES, PING, Link
from syncline.transports.zeromq.security import Guard
from syncline.transports.zeromq.waiting_room import Heard, WaitingRoom

__all__ = ["Node"]

logger = logging.getLogger("syncline")

REVIEW = 0.05
"""Seconds between looks who those are that cannot be told yet."""
CHORES = 0.25
"""Seconds between looks at who has come, gone, or fallen silent."""
PING_AFTER = 1.0
MAX_LOOP_GAP_S = 2.0
"""After a longer gap in its loop this process was suspended itself; that time does not count as a peer's silence."""
GRACE = 0.5
"""Seconds of silence between a broken connection and the verdict: messages and a farewell may still be on the way."""
HINTED = 2.0
"""Seconds of silence after which a peer is lost that somebody says to be dead."""
BEATS_UNHEARD = 6
"""Records that a silent peer has written into the store before it is known that only this rank does not hear it."""
LINGER = 5.0
CUT_OFF = "this rank is cut off: it has heard neither the launcher's store nor any other rank"
HELD = 32
"""Frames of one connection that libzmq keeps unread: then TCP makes the sender wait."""
MOST_BANNED = 10_000
_IDENTITY = struct.Struct("<cI8s")


class _Peer:
    """A connection to a peer and what is known of it."""

    def __init__(self, link: Link, socket: zmq.Socket[Any], monitor: zmq.Socket[Any], now: float) -> None:
        self.link = link
        self.socket = socket
        self.monitor = monitor
        self.heard = now
        self.broken_at: float | None = None
        self.beat: tuple[float, int] | None = None
        """When the peer was last heard, and the number of its record at the first look after that."""


class Node:
    """This process among the others."""

    def __init__(
        self,
        runtime: Runtime,
        directory: Directory,
        key: str | None,
        address: str,
        watch: Callable[[int], Liveness],
        lost_after: float = math.inf,
        launched: bool = False,
    ) -> None:
        self.runtime = runtime
        self.directory = directory
        self.lost_after = lost_after
        """Seconds without a message or a ping after which a peer counts as lost though its connection is open."""
        self.launched = launched
        """Whether `syncline run` watches the processes, and tells which of them are lost."""
        self._watch = watch
        self._liveness: Liveness | None = None
        self._strangers = LimitedLog(logger, runtime.now)
        self._looked = runtime.now()
        self.rank = -1
        self.given_up = ""
        self._context: zmq.Context[Any] = zmq.Context()
        self._guard = Guard(self._context, key)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.rcvhwm = HELD
        self._router.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + HEADER_BYTES)
        self._router.linger = 0
        self._router.rcvtimeo = int(1000 * CHORES)
        self._guard.listen(self._router)
        self.endpoint = f"tcp://{address}:{self._router.bind_to_random_port(f'tcp://{address}')}"
        self._incarnation = os.urandom(8)
        self.channels = Channels(runtime)
        self._peers: dict[int, _Peer] = {}
        self._known: dict[bytes, _Peer | None] = {}
        self._undecided = WaitingRoom()
        self._next_review = 0.0
        self._lock = runtime.lock()
        self.crank = Crank(runtime, self._take_in, self.nudge)
        self._mourners: list[Callable[[int], None]] = []
        self._bell_rope = runtime.lock()
        self._bell = self._context.socket(zmq.DEALER)
        self._bell.linger = 0
        self._bell_name = b"bell" + os.urandom(8)  # a stranger who knew it could call the driver as well
        self._bell.setsockopt(zmq.ROUTING_ID, self._bell_name)
        self._router.bind("inproc://bell")
        self._bell.connect("inproc://bell")
        self._next_chores = 0.0
        self._next_ping = 0.0
        self._task: Any = None

    def join(self, rank: int) -> None:
        """Enrol under a rank and begin to serve."""
        self.rank = rank
        self.crank.name = self.name()
        entry = Entry("joined", rank, self.endpoint, self._incarnation.hex(), version=package_version())
        self.directory.post(entry)
        self._liveness = self._watch(rank)
        self._task = self.runtime.spawn(self._serve, name="zeromq")

    @property
    def liveness(self) -> Liveness:
        """The records of which rank waits for which."""
        assert self._liveness is not None, "it has joined"
        return self._liveness

    @property
    def closed(self) -> bool:
        """Whether nothing is read or sent here any more."""
        return self.crank.stopped

    # Peers.

    def mourn(self, told: Callable[[int], None]) -> None:
        """Have a function told of each rank that is gone from now on, under locks: it only notes that."""
        self._mourners.append(told)

    def unmourn(self, told: Callable[[int], None]) -> None:
        """Tell it no more."""
        with suppress(ValueError):
            self._mourners.remove(told)

    def lost_links(self) -> list[int]:
        """Ranks that were connected, and from whom nothing comes any more."""
        return [rank for rank, peer in list(self._peers.items()) if peer.link.gone]

    def forget(self, channel: int) -> None:
        """A channel is closed."""
        self.channels.close(channel)
        self.nudge()

    def abandon(self, channel: int, reason: str) -> None:
        """Give up what was sent on a channel and is not taken."""
        for peer in list(self._peers.values()):
            peer.link.abandon(channel, reason)
        self.nudge()

    def name(self, rank: int | None = None) -> str:
        """The name of a member for messages, such as "rank 3" or "server 0"; by default that of this one."""
        return self.directory.name_of(self.rank if rank is None else rank)

    def gone(self, rank: int) -> str:
        """Why a rank is not there any more, or nothing."""
        peer = self._peers.get(rank)
        return self.directory.gone.get(rank) or (peer.link.gone if peer is not None else "")

    def link(self, rank: int) -> Link:
        """The link to a peer, connected on first use."""
        peer = self._peers.get(rank)
        return (peer or self._connect(rank)).link

    def _connect(self, rank: int) -> _Peer:
        entry = self.directory.find(rank)
        with self._lock:
            if rank in self._peers:
                return self._peers[rank]
            if self.closed:
                raise WorldError("this transport is closed")
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, _IDENTITY.pack(b"r", self.rank, self._incarnation))
            socket.setsockopt(zmq.SNDHWM, 0)  # the protocol bounds what is under way
            socket.setsockopt(zmq.RECONNECT_IVL, -1)  # what was under way is lost: better lose the peer than a message
            self._guard.call(socket)
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
            socket.connect(entry.endpoint)
            link = Link(self.runtime, self.rank, rank, self._emitter(socket), self.channels.mailbox)
            peer = self._peers[rank] = _Peer(link, socket, monitor, self.runtime.now())
            self._next_ping = 0.0  # it shall hear of us at once, and we of it
        if self.given_up:
            self._lose(rank, self.given_up)
        elif rank in self.directory.left:  # what it sent before may lie unread
            peer.link.deaf = self.directory.gone[rank]
            peer.broken_at = peer.heard
        elif rank in self.directory.gone:
            self._lose(rank, self.directory.gone[rank])
        return peer

    @staticmethod
    def _emitter(socket: zmq.Socket[Any]) -> Callable[[Sequence[Any]], None]:
        send, now = socket.send, zmq.NOBLOCK

        def emit(frames: Sequence[Any]) -> None:
            try:
                if len(frames) == 1:
                    send(frames[0], now)
                else:
                    send(frames[0], now | zmq.SNDMORE)
                    send(frames[1], now, copy=False)
            except zmq.ZMQError as error:
                raise ConnectionError(f"its connection is gone ({error})") from error

        return emit

    def _admit(self, identity: bytes, heard: Heard) -> _Peer | None:
        """Who speaks under this identity; None for a stranger, whose every word is dropped.

        None too for one whose entry may stand in a part of the directory that cannot be read yet: its words are kept.
        """
        reason = "nobody knows yet who it is, and there is no room for all it says"
        try:
            if identity not in self._undecided:
                self._known[identity] = peer = self._recognise(identity)
                return peer
        except (struct.error, WorldError) as error:
            reason = str(error)
        if self._may_belong(identity) and self._undecided.keep(identity, heard):
            return None
        self._undecided.leave(identity)
        self._strangers.warn(f"rank {self.rank} ignores an unknown sender: {reason}")
        if len(self._known) > MOST_BANNED:
            self._known = {name: peer for name, peer in self._known.items() if peer is not None}
        self._known[identity] = None
        return None

    def _recognise(self, identity: bytes) -> _Peer:
        mark, rank, incarnation = _IDENTITY.unpack(identity)
        entry = self.directory.find(rank)
        if mark != b"r" or entry.incarnation != incarnation.hex():
            raise WorldError(f"it claims to be rank {rank}, which is somebody else")
        return self._peers.get(rank) or self._connect(rank)

    def _may_belong(self, identity: bytes) -> bool:
        if identity in self._undecided:
            return True
        if len(identity) != _IDENTITY.size:
            return False
        mark, rank, incarnation = _IDENTITY.unpack(identity)
        return mark == b"r" and self.directory.may_know(rank, incarnation.hex())

    def _review(self) -> None:
        """Look again who the undecided are, and listen to what those have said who belong."""
        if (now := self.runtime.now()) < self._next_review:
            return
        self._next_review = now + REVIEW
        self.directory.refresh()
        for identity in self._undecided.callers():
            if self.directory.may_learn_of(_IDENTITY.unpack(identity)[1]):
                continue
            for heard in self._undecided.leave(identity):
                peer = self._known[identity] if identity in self._known else self._admit(identity, heard)
                if peer is not None:
                    self._hear(identity, peer, *heard)

    # Turning the crank.

    def wait(self, thing: Waited, timeout: float, pending: Callable[[], str]) -> bool:
        """Work until `thing` is settled; False when the timeout came first. A wait without end warns of nothing."""
        return thing.settled or self.crank.wait(thing, timeout, pending)

    def _serve(self) -> None:
        try:
            self.crank.turn_where_nobody_waits(self._chores_when_due)
        except Exception as error:
            logger.exception("rank %d can serve no more", self.rank)
            self._give_up(f"its own task has ended: {error!r}")

    def nudge(self) -> None:
        """Ring: something was settled without the driver, who may be waiting for it."""
        with self._bell_rope, suppress(zmq.ZMQError):  # it rings already, or the node is closed
            self._bell.send(b"", zmq.NOBLOCK)

    def _take_in(self) -> bool:
        """Wait for the next message, at most for `CHORES` seconds, and take it in; True when it was the bell."""
        router = self._router
        if self._undecided:
            self._review()
        try:
            identity = router.recv()
        except zmq.Again:
            return False
        frame: Any = router.recv(copy=False)
        content, body, extra = frame.buffer, None, 0
        while frame.more:
            frame = router.recv(copy=False)
            body = frame.buffer
            extra += 1
        if identity == self._bell_name:
            self.crank.do_deeds()
            return True
        known = identity in self._known
        peer = self._known[identity] if known else self._admit(identity, Heard(content, body, extra))
        if peer is not None:
            self._hear(identity, peer, content, body, extra)
            self.crank.do_deeds()
        return False

    def _hear(self, identity: bytes, peer: _Peer, content: Any, body: Any, extra: int) -> None:
        if peer.link.gone:  # it counts as lost, and the others continue without it: its late messages are dropped
            return
        peer.heard = self.runtime.now()
        try:
            header = Header.read(content[:HEADER_BYTES], peer.link.peer, KINDS)
            if extra != (header.kind == PART):
                raise ProtocolError(f"rank {peer.link.peer} sent {extra} frames too many", peer=peer.link.peer)
            if header.kind == BYE:
                self._lose(peer.link.peer, "it has left")
            else:
                peer.link.receive(header, content[HEADER_BYTES:] if body is None else body)
        except ProtocolError as error:
            self._ban(identity, peer, error)

    def _ban(self, identity: bytes, peer: _Peer, error: ProtocolError) -> None:
        logger.warning("rank %d will not listen to rank %d any more: %s", self.rank, peer.link.peer, error)
        self._known[identity] = None
        self._lose(peer.link.peer, str(error), error)

    # Who is there.

    def _chores_when_due(self, now: float) -> None:
        if now >= self._next_chores:
            self._next_chores = now + CHORES
            self._chores(now)

    def _chores(self, now: float) -> None:
        if now - self._looked > MAX_LOOP_GAP_S:
            for peer in list(self._peers.values()):
                peer.heard += now - self._looked
        self._looked = now
        for entry in self.directory.news():
            if entry.kind != "joined" and entry.rank == self.rank:
                self._give_up(f"the others have declared this rank lost: {entry.reason}")
            elif entry.kind == "lost":
                logger.warning("%s is told: %s is lost: %s", self.name(), self.name(entry.rank), entry.reason)
                if entry.rank in self._peers:
                    self._lose(entry.rank, entry.reason)
        for rank in list(self.directory.hints):
            if rank not in self._peers and rank != self.rank and rank not in self.directory.gone:
                with suppress(WorldError):  # closed meanwhile
                    self._connect(rank)  # to hear whether it is there
        ping = now >= self._next_ping
        if ping:
            self._next_ping = now + min(PING_AFTER, self.lost_after / 4)
        if self._is_cut_off(now):
            self._give_up(f"{CUT_OFF} for {self.lost_after:.3g} s")
        for rank, peer in list(self._peers.items()):
            if not peer.link.gone:
                self._look_after(rank, peer, now, ping)

    def _is_cut_off(self, now: float) -> bool:
        """Whether this rank itself is cut off: it hears neither the store nor any peer."""
        silences = [now - peer.heard for peer in self._peers.values() if not peer.link.gone]
        silent = bool(silences) and max(silences) > self.lost_after and min(silences) > self.lost_after / 2
        return silent and not self.directory.answers

    def _give_up(self, reason: str) -> None:
        """This rank can go on no more: break all that waits."""
        self.given_up = self.given_up or reason
        for rank in list(self._peers):
            self._lose(rank, self.given_up)

    def _look_after(self, rank: int, peer: _Peer, now: float, ping: bool) -> None:
        if peer.broken_at is None and peer.monitor.poll(0):
            peer.broken_at = now
        told_at, told = self.directory.hints.get(rank, (now, ""))
        if peer.broken_at is not None and now - max(peer.broken_at, peer.heard) > GRACE:
            self._announce(rank, self.directory.gone.get(rank) or told or "its connection broke")
        elif told and now - max(told_at, peer.heard) > HINTED:
            self._announce(rank, told)
        elif now - peer.heard > self.lost_after and self._is_for_us_to_tell(rank, peer):
            self._announce(rank, f"it has sent no heartbeat for {self.lost_after:.3g} s")
        elif ping:
            peer.link.tell(PING)
        if told and peer.broken_at is None and peer.heard - told_at > HINTED:
            self.directory.hints.pop(rank, None)  # it lives, whatever was said

    def _is_for_us_to_tell(self, rank: int, peer: _Peer) -> bool:
        """Whether this node decides that a silent peer is lost.

        A launcher sees whether a process computes, and ends one that is silent everywhere. So where the store answers,
        this node decides only about a peer whose records the store still gets: the way from it to here is cut.
        """
        if not (self.launched and self.directory.reachable and self.directory.answers):
            return True
        number = self.liveness.beat_of(rank)
        if number is None:
            return True
        if peer.beat is None or peer.beat[0] != peer.heard:
            peer.beat = (peer.heard, number)
        return number - peer.beat[1] >= BEATS_UNHEARD

    def _announce(self, rank: int, reason: str) -> None:
        """Lose a peer, and let all name the same one."""
        if rank in self.directory.gone:
            self._lose(rank, reason)
            return
        self.directory.lose(rank, reason)  # first: callers that get the error ask which ranks are gone
        self._lose(rank, reason)
        try:
            self.directory.post(Entry("lost", rank, reason=reason))
            logger.warning("%s has lost %s: %s", self.name(), self.name(rank), reason)
        except RuntimeError as error:
            logger.warning("%s has lost %s: %s (%s)", self.name(), self.name(rank), reason, error)

    def _lose(self, rank: int, reason: str, error: ProtocolError | None = None) -> None:
        peer = self._peers[rank]

        def broken(posted: Posted) -> Exception:
            return error or self.lost(rank, reason, f"a message (tag {posted.tag})", 0.0)

        if not peer.link.gone:
            peer.link.lose(reason, broken)
            self.channels.fail(lambda posted: broken(posted) if posted.wanted == rank else None)
            for told in list(self._mourners):
                told(rank)
            self.nudge()

    def lost(self, rank: int | None, reason: str, pending: str, seconds: float) -> PeerLostError:
        """The error that names who is lost."""
        who = "a peer" if rank is None else self.name(rank)
        after = f" after {seconds:.3g} s" if seconds else ""
        return PeerLostError(
            f"{self.name()} lost {who}{after} while waiting for {pending}: {reason}",
            peer=rank,
            pending=pending,
            seconds=seconds,
        )

    # The end.

    def close(self, timeout: float) -> None:
        """Deliver what is still to be taken, say farewell, and let go of the sockets."""
        if self.closed:
            return
        until = self.runtime.now() + timeout
        for peer in list(self._peers.values()):
            while not peer.link.gone and (outgoing := peer.link.oldest()) is not None:
                pending = f"{self.name(peer.link.peer)} to take {format_bytes(outgoing.nbytes)}"
                if not self.wait(outgoing, until - self.runtime.now(), pending.format):
                    logger.warning("%s leaves, and waits no longer for %s", self.name(), pending)
                    break
        self.crank.stop(LINGER)
        if self._task is not None:
            self._task.join(LINGER)
        for peer in self._peers.values():
            if not peer.link.gone:
                peer.link.tell(BYE)
                self._lose(peer.link.peer, "this transport is closed")
        if self.rank >= 0 and not self.given_up and self.directory.reachable:
            try:
                self.directory.post(Entry("left", self.rank, reason="it has left"))
            except RuntimeError as error:
                logger.debug("the store does not answer: %s", error)
        if self._liveness is not None:
            self._liveness.close()
        self.directory.close()
        for peer in self._peers.values():
            peer.socket.disable_monitor()
            peer.monitor.close(0)
            peer.socket.close(int(1000 * LINGER))
        with self._bell_rope:
            self._bell.close(0)
        self._router.close(0)
        self._guard.close()
        self._context.term()
