"""The sockets of one process: a ROUTER that receives from all peers, and a DEALER to each peer.

At any time one thread, the driver, reads the ROUTER. A thread that waits for a message becomes the driver, so that the
message wakes no other thread on the way. If no thread waits, a background task drives: offers are accepted and bytes
flow while the program computes. The task yields at once when a thread comes to wait, and drives again a few
milliseconds after the last one has left. The driver also runs deferred callbacks.
"""

from __future__ import annotations

import logging
import math
import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import zmq

from syncline.environment.base import package_version
from syncline.errors import PeerLostError, ProtocolError, WorldError
from syncline.runtime import Event, Runtime, caller
from syncline.transports.base import format_bytes
from syncline.transports.key_value_store import KeyValueStore
from syncline.transports.liveness import Liveness
from syncline.transports.messages import (
    HEADER_BYTES,
    Mailbox,
    MessageHeader,
    PostedReceive,
    WarningLog,
    peer_lost_error,
)
from syncline.transports.zeromq.connection import ABORT, FRAME_KINDS, GOODBYE, PART, PART_BYTES, PING, PeerConnection
from syncline.transports.zeromq.membership import CurveSecurity, MemberEntry, MembershipLog

__all__ = ["Frame", "IOLoop", "Node", "UnverifiedFrames", "Waitable"]

logger = logging.getLogger("syncline")

VERIFY_EVERY_S = 0.05
"""Interval in seconds between attempts to identify unverified peers."""
CHECK_PEERS_EVERY_S = 0.25
"""Interval in seconds between checks which peers have joined, left or stopped sending."""
PING_EVERY_S = 1.0
MAX_LOOP_GAP_S = 2.0
"""After a longer gap in its loop this process was suspended itself; that time does not count as a peer's silence."""
BROKEN_AFTER_S = 0.5
"""Seconds of silence between a broken connection and the loss: messages and a goodbye may still be on the way."""
ELASTIC_BROKEN_AFTER_S = 0.05
"""The same in an elastic job, whose members leave only when the others have received what they sent."""
ELASTIC_CHECK_EVERY_S = 0.05
"""Interval in seconds between checks for broken connections in an elastic job."""
ABORTED = "the channel was given up"
HINT_LOST_AFTER_S = 2.0
"""Seconds of silence after which a peer is lost if an unsigned record says that it has ended."""
UNHEARD_HEARTBEATS = 6
"""Heartbeats of a silent peer in the store after which only the connection to this rank counts as broken."""
LINGER_S = 5.0
CUT_OFF = "this rank is cut off: it has heard neither the launcher's store nor any other rank"
MAX_UNREAD_FRAMES = 32
"""Unread frames of one connection in libzmq. Beyond that TCP makes the sender wait."""
MAX_BANNED_PEERS = 10_000
YIELD_S = 0.002
"""Seconds for which the background task leaves the sockets to waiting threads."""
WARN_AFTER_S = 10.0
MAX_SLEEP_S = 3600.0
"""The longest single sleep of an idle wait."""
MAX_UNVERIFIED_BYTES = 32 << 20
"""Bytes buffered for all unverified peers. A member sends little more than 1 MiB before it needs an answer."""
FRAME_OVERHEAD_BYTES = 512
MAX_CLOSED_CHANNELS = 10_000
"""Closed channels that are remembered. Late messages for an older one stay unreceived."""
IDENTITY = struct.Struct("<cI8s")
"""The routing id of a member: b"r", its rank, its incarnation."""


class Waitable(Protocol):
    """An operation that a thread waits for."""

    done: bool
    event: Event | None


class IOLoop:
    """Decides which thread drives. `read_next` processes one message, True for a wake-up; `wake` sends a wake-up."""

    def __init__(
        self, runtime: Runtime, read_next: Callable[[], bool], wake: Callable[[], None], check_every_s: float
    ) -> None:
        self.name = "rank -1"
        """The name of this process in messages. A server or an evaluator is no rank."""
        self.stopped = False
        self._runtime = runtime
        self._read_next = read_next
        self._wake = wake
        self._check_every_s = check_every_s
        self._lock = runtime.lock()
        self.driver = ""
        self._thread = 0
        self._free = runtime.event()
        self.waiting: dict[int, Waitable] = {}
        self._last_driven = 0.0
        self._callbacks: deque[Callable[[], None]] = deque()

    def defer(self, callback: Callable[[], None]) -> None:
        """Let the driver call a function, in order, while it holds no lock. Another thread must then wake it."""
        self._callbacks.append(callback)

    def run_callbacks(self) -> None:
        """Call the deferred functions. An exception is logged and stops no other."""
        callbacks = self._callbacks
        while callbacks:
            try:
                callbacks.popleft()()
            except Exception:
                logger.exception("%s failed to process a message", self.name)

    @property
    def is_driver(self) -> bool:
        """Whether the calling thread is the driver. It must not wait for what only the driver can read."""
        return bool(self.driver) and self._thread == caller()

    def wait(self, operation: Waitable, timeout: float, pending: Callable[[], str]) -> bool:
        """Drive until `operation` is done; False at the timeout. An infinite wait logs no warning."""
        now = self._runtime.now()
        deadline, warn = now + timeout, now + (WARN_AFTER_S if timeout < math.inf else math.inf)
        while not operation.done:
            if self.stopped:
                raise WorldError(f"{self.name} has closed its transport while it waited for {pending()}")
            now = self._runtime.now()
            if now >= deadline:
                return False
            if now >= warn:
                warn = deadline
                logger.warning("%s has waited %.0f s for %s", self.name, WARN_AFTER_S, pending())
            until = min(deadline, warn)
            if self.acquire("thread"):
                try:
                    while not (operation.done or self.stopped) and self._runtime.now() < until:
                        self._read_next()
                finally:
                    self.release()
            else:
                self._wait_for_driver(operation, until, pending)
        return True

    def acquire(self, driver: str) -> bool:
        """Become the driver; False if there is one."""
        with self._lock:
            if self.driver:
                return False
            self.driver = driver
            self._thread = caller()
            return True

    def release(self) -> None:
        self._last_driven = self._runtime.now()
        with self._lock:
            self.driver = ""
            if not self._free.is_set():  # setting it again would take longer
                self._free.set()
            for other in self.waiting.values():  # the next driver; if it has left, the background task takes over
                if other.event is not None and not other.done:
                    other.event.set()
                    break

    def _wait_for_driver(self, operation: Waitable, until: float, pending: Callable[[], str]) -> None:
        """Wait until the driver has completed the operation or has released the sockets."""
        if self.is_driver:
            raise WorldError(f"{self.name} would wait for {pending()} while it handles a message")
        with self._lock:
            background = self.driver == "background"
            if background:
                self._free.clear()
                self._wake()
            elif self.driver:
                operation.event = operation.event or self._runtime.event()
                operation.event.clear()
                self.waiting[id(operation)] = operation
            else:
                return
        event = self._free if background else operation.event
        assert event is not None
        try:
            if not operation.done:
                event.wait(min(max(0.0, until - self._runtime.now()), MAX_SLEEP_S))
        finally:
            with self._lock:
                self.waiting.pop(id(operation), None)

    def run_in_background(self, check_peers: Callable[[float], None]) -> None:
        """Drive while no thread waits, until the loop stops; `check_peers` is called repeatedly."""
        while not self.stopped:
            now = self._runtime.now()
            check_peers(now)
            if now - self._last_driven < YIELD_S or not self.acquire("background"):
                self._runtime.sleep(YIELD_S)
                continue
            try:
                while not self.stopped and self._runtime.now() < now + self._check_every_s:
                    if self._read_next():
                        self._last_driven = self._runtime.now()  # a thread wants to drive
                        break
            finally:
                with self._lock:
                    self.driver = ""
                    self._free.set()

    def stop(self, linger_s: float) -> None:
        """Stop reading. Waiting threads are woken, and this thread is the last driver."""
        self.stopped = True
        until = self._runtime.now() + linger_s
        while not self.acquire("closing") and self._runtime.now() < until:
            self._wake()
            self._runtime.sleep(YIELD_S)
        with self._lock:
            self._free.set()
            for other in self.waiting.values():
                if other.event is not None:
                    other.event.set()


class Frame(NamedTuple):
    """One message as it arrived: its first frame, its last, and the number of frames after the first."""

    content: Any
    body: Any
    extra: int


class UnverifiedFrames:
    """Buffers frames from peers that cannot be verified yet, because the membership log is incomplete.

    >>> frames = UnverifiedFrames()
    >>> frames.add(b"peer", Frame(b"hello", None, 0)), list(frames.frames)
    (True, [b'peer'])
    >>> frames.remove(b"peer"), frames.nbytes
    ([Frame(content=b'hello', body=None, extra=0)], 0)
    """

    def __init__(self) -> None:
        self.frames: dict[bytes, list[Frame]] = {}
        """By the peer's routing id, in order of arrival."""
        self.nbytes = 0

    def add(self, identity: bytes, frame: Frame) -> bool:
        """Buffer a frame; False if there is no room."""
        nbytes = _size(frame)
        if self.nbytes + nbytes > MAX_UNVERIFIED_BYTES:
            return False
        self.nbytes += nbytes
        self.frames.setdefault(identity, []).append(frame)
        return True

    def remove(self, identity: bytes) -> list[Frame]:
        """Take out the frames of a peer."""
        frames = self.frames.pop(identity, [])
        self.nbytes -= sum(map(_size, frames))
        return frames


def _size(frame: Frame) -> int:
    return FRAME_OVERHEAD_BYTES + len(frame.content) + (0 if frame.body is None else len(frame.body))


@dataclass(eq=False)
class _Peer:
    """The connection to a peer and its sockets."""

    connection: PeerConnection
    socket: zmq.Socket[Any]
    monitor: zmq.Socket[Any]
    heard: float
    """When the last frame of the peer arrived."""
    broken_at: float | None = None
    heartbeat: tuple[float, int] | None = None
    """When the peer was last heard, and the number of its heartbeat in the store at the first check after that."""


class Node:
    """This process and its connections to all others."""

    def __init__(
        self,
        runtime: Runtime,
        membership: MembershipLog,
        key: str | None,
        address: str,
        make_liveness: Callable[[int], Liveness],
        control_store: KeyValueStore,
        lost_after_s: float = math.inf,
        launched: bool = False,
        elastic: bool = False,
    ) -> None:
        self.runtime = runtime
        self.membership = membership
        self.elastic = elastic
        """Whether the members form teams. Then the teams decide which members are lost, and not the membership log."""
        self.broken_links: dict[int, str] = {}
        """In an elastic job: members whose connection to this one broke, each with the reason."""
        self.control_store = control_store
        """The store of the world's control channels. It lives as long as the membership log."""
        self.lost_after_s = lost_after_s
        """Seconds without a frame after which a peer counts as lost though its connection is open."""
        self.launched = launched
        """Whether `syncline run` watches the processes and reports lost ones."""
        self._make_liveness = make_liveness
        self._liveness: Liveness | None = None
        self._unknown_senders = WarningLog(logger, runtime.now)
        self.last_check = runtime.now()
        self.rank = -1
        self.failed = ""
        """Why this node cannot continue."""
        self.context: zmq.Context[Any] = zmq.Context()
        self._security = CurveSecurity(self.context, key)
        self._router = self.context.socket(zmq.ROUTER)
        self._router.rcvhwm = MAX_UNREAD_FRAMES
        self._router.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + HEADER_BYTES)
        self._router.linger = 0
        check_every_s = ELASTIC_CHECK_EVERY_S if elastic else CHECK_PEERS_EVERY_S
        self._router.rcvtimeo = int(1000 * check_every_s)
        self._security.configure_server(self._router)
        self.endpoint = f"tcp://{address}:{self._router.bind_to_random_port(f'tcp://{address}')}"
        self._incarnation = os.urandom(8)
        self.mailboxes: dict[int, Mailbox] = {}
        self._closed_channels: dict[int, None] = {}
        self._closed_mailbox = Mailbox(runtime)
        self._closed_mailbox.close(_channel_closed)
        self.peers: dict[int, _Peer] = {}
        self._released: set[int] = set()
        """Lost peers whose sockets are closed."""
        self.verified: dict[bytes, _Peer | None] = {}
        """By routing id; None for a peer whose frames are dropped."""
        self.unverified = UnverifiedFrames()
        self._next_verification = 0.0
        self._lock = runtime.lock()
        self.loop = IOLoop(runtime, self._read_next, self.wake, check_every_s)
        self._on_peer_lost: list[Callable[[int], None]] = []
        self._wake_lock = runtime.lock()
        self._wake_socket = self.context.socket(zmq.DEALER)
        self._wake_socket.linger = 0
        self._wake_id = b"bell" + os.urandom(8)  # random: an unknown sender must not be able to wake the driver
        self._wake_socket.setsockopt(zmq.ROUTING_ID, self._wake_id)
        self._router.bind("inproc://wake")
        self._wake_socket.connect("inproc://wake")
        self._next_check = self._next_connection_check = 0.0
        self.next_ping = 0.0
        self.task: Any = None

    def join(self, rank: int, name: str = "") -> None:
        """Enter the membership log under a rank, and perhaps a name, and start to serve."""
        self.rank = rank
        self.loop.name = name or self.name()
        incarnation, version = self._incarnation.hex(), package_version()
        entry = MemberEntry("joined", rank, self.endpoint, incarnation, version=version, name=name)
        self.membership.post(entry)
        self._liveness = self._make_liveness(rank)
        self.task = self.runtime.spawn(self._serve, name="zeromq")

    @property
    def liveness(self) -> Liveness:
        """The records of which rank waits for which."""
        assert self._liveness is not None, "the node has not joined"
        return self._liveness

    @property
    def closed(self) -> bool:
        """Whether nothing is read or sent any more."""
        return self.loop.stopped

    # Channels.

    def mailbox(self, channel: int) -> Mailbox:
        """The mailbox of a channel, which a peer may use before this rank. That of a closed one discards everything."""
        known = self.mailboxes.get(channel)
        if known is not None:
            return known
        with self._lock:
            if channel in self._closed_channels:
                return self._closed_mailbox
            return self.mailboxes.setdefault(channel, Mailbox(self.runtime))

    def close_channel(self, channel: int) -> None:
        """Discard the messages of a channel, later ones too, so that their senders get their credit back."""
        with self._lock:
            mailbox = self.mailboxes.pop(channel, self._closed_mailbox)
            self._closed_channels[channel] = None
            if len(self._closed_channels) > MAX_CLOSED_CHANNELS:
                del self._closed_channels[next(iter(self._closed_channels))]
        mailbox.close(_channel_closed)
        self.wake()

    def abandon(
        self, channel: int, reason: str, receive_error: Callable[[PostedReceive], Exception] | None = None
    ) -> None:
        """Abandon the messages of a channel that were sent and not taken, and the receives that are in progress."""
        for peer in list(self.peers.values()):
            peer.connection.abandon(channel, reason, receive_error)
        self.wake()

    def abort_channel(self, channel: int) -> None:
        """End every wait on a channel of a team, now and later: a member forms another team."""

        def error(posted: PostedReceive) -> Exception:
            return self.peer_lost(None, ABORTED, f"a message (tag {posted.tag})", seconds=0.0)

        self.mailbox(channel).close(error)
        self.abandon(channel, ABORTED, error)

    # Peers.

    def add_lost_callback(self, on_peer_lost: Callable[[int], None]) -> list[int]:
        """Call a function for each peer that is lost from now on, under locks. Returns those lost already."""
        self._on_peer_lost.append(on_peer_lost)
        return sorted(self._released | {rank for rank, peer in list(self.peers.items()) if peer.connection.gone})

    def remove_lost_callback(self, on_peer_lost: Callable[[int], None]) -> None:
        """Stop calling the function."""
        with suppress(ValueError):
            self._on_peer_lost.remove(on_peer_lost)

    def name(self, rank: int | None = None) -> str:
        """The name of a member for messages, such as "rank 3" or "server 0"; by default that of this one."""
        return self.membership.name_of(self.rank if rank is None else rank)

    def gone(self, rank: int) -> str:
        """Why a rank is gone; empty while it is present."""
        peer = self.peers.get(rank)
        return self.membership.gone.get(rank) or (peer.connection.gone if peer is not None else "")

    def connection(self, rank: int) -> PeerConnection:
        """The connection to a peer, opened at the first use."""
        peer = self.peers.get(rank)
        return (peer or self._connect(rank)).connection

    def _connect(self, rank: int) -> _Peer:
        entry = self.membership.find(rank)
        with self._lock:
            if rank in self.peers:
                return self.peers[rank]
            if self.closed:
                raise WorldError("this transport is closed")
            socket = self.context.socket(zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, IDENTITY.pack(b"r", self.rank, self._incarnation))
            socket.setsockopt(zmq.SNDHWM, 0)  # the protocol bounds the bytes in flight
            socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a reconnection would lose messages: lose the peer instead
            self._security.configure_client(socket)
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
            socket.connect(entry.endpoint)
            connection = PeerConnection(self.runtime, self.rank, rank, self._emitter(socket), self.mailbox)
            peer = self.peers[rank] = _Peer(connection, socket, monitor, self.runtime.now())
            self.next_ping = 0.0  # ping at once, so that both sides know of each other
        if self.failed:
            self.lose(rank, self.failed)
        elif rank in self.membership.left:  # messages that it sent earlier may be unread
            peer.connection.left = self.membership.gone[rank]
            peer.broken_at = peer.heard
        elif rank in self.membership.gone:
            self.lose(rank, self.membership.gone[rank])
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

    def _verify(self, identity: bytes, frame: Frame) -> _Peer | None:
        """The peer with this routing id; None for an unknown sender, whose frames are dropped.

        Also None while its entry may be in a part of the membership log that was not read yet: its frames are buffered.
        """
        reason = "it cannot be verified yet, and there is no room for all its frames"
        try:
            if identity not in self.unverified.frames:
                self.verified[identity] = peer = self._identify(identity)
                return peer
        except (struct.error, WorldError) as error:
            reason = str(error)
        if self._may_be_member(identity) and self.unverified.add(identity, frame):
            return None
        self.unverified.remove(identity)
        self._unknown_senders.warn(f"rank {self.rank} ignores an unknown sender: {reason}")
        if len(self.verified) > MAX_BANNED_PEERS:
            self.verified = {name: peer for name, peer in self.verified.items() if peer is not None}
        self.verified[identity] = None
        return None

    def _identify(self, identity: bytes) -> _Peer:
        mark, rank, incarnation = IDENTITY.unpack(identity)
        entry = self.membership.find(rank)
        if mark != b"r" or entry.incarnation != incarnation.hex():
            raise WorldError(f"it claims to be rank {rank}, which is another process")
        return self.peers.get(rank) or self._connect(rank)

    def _may_be_member(self, identity: bytes) -> bool:
        if identity in self.unverified.frames:
            return True
        if len(identity) != IDENTITY.size:
            return False
        mark, rank, incarnation = IDENTITY.unpack(identity)
        return mark == b"r" and self.membership.may_match(rank, incarnation.hex())

    def _verify_again(self) -> None:
        """Read the membership log again, and process the frames of peers that are members."""
        if (now := self.runtime.now()) < self._next_verification:
            return
        self._next_verification = now + VERIFY_EVERY_S
        self.membership.refresh()
        for identity in list(self.unverified.frames):
            if self.membership.may_appear(IDENTITY.unpack(identity)[1]):
                continue
            for frame in self.unverified.remove(identity):
                peer = self.verified[identity] if identity in self.verified else self._verify(identity, frame)
                if peer is not None:
                    self._process(identity, peer, *frame)

    # Reading.

    def wait(self, operation: Waitable, timeout: float, pending: Callable[[], str]) -> bool:
        """Drive until `operation` is done; False at the timeout."""
        return operation.done or self.loop.wait(operation, timeout, pending)

    def _serve(self) -> None:
        try:
            self.loop.run_in_background(self._check_peers_when_due)
        except Exception as error:
            logger.exception("rank %d cannot serve any more", self.rank)
            self._fail(f"its background task has ended: {error!r}")

    def wake(self) -> None:
        """Wake the driver, because something is done that it may wait for."""
        with self._wake_lock, suppress(zmq.ZMQError):  # a wake-up is pending already, or the node is closed
            self._wake_socket.send(b"", zmq.NOBLOCK)

    def _read_next(self) -> bool:
        """Wait for the next message, at most `CHECK_PEERS_EVERY_S` seconds, and process it; True for a wake-up."""
        router = self._router
        if self.unverified.frames:
            self._verify_again()
        try:
            identity = router.recv()
        except zmq.Again:
            return False
        frame: Any = router.recv(0, False)  # without a copy
        content, body, extra = frame.buffer, None, 0
        while frame.more:
            frame = router.recv(0, False)
            body = frame.buffer
            extra += 1
        if identity == self._wake_id:
            self.loop.run_callbacks()
            return True
        known = identity in self.verified
        peer = self.verified[identity] if known else self._verify(identity, Frame(content, body, extra))
        if peer is not None:
            self._process(identity, peer, content, body, extra)
            self.loop.run_callbacks()
        return False

    def _process(self, identity: bytes, peer: _Peer, content: Any, body: Any, extra: int) -> None:
        connection = peer.connection
        if connection.gone:  # the others continue without it: its late messages are dropped
            return
        peer.heard = self.runtime.now()
        try:
            header = MessageHeader.read(content[:HEADER_BYTES], connection.peer, FRAME_KINDS)
            if extra != (header.kind == PART):
                raise ProtocolError(f"rank {connection.peer} sent {extra} frames too many", peer=connection.peer)
            if header.kind == GOODBYE:
                self.lose(connection.peer, "it has left")
            elif header.kind == ABORT:
                self.abort_channel(header.channel)
            elif header.kind != PING:
                connection.receive(header, content[HEADER_BYTES:] if body is None else body)
        except ProtocolError as error:
            logger.warning("rank %d drops all messages of rank %d from now on: %s", self.rank, connection.peer, error)
            self.verified[identity] = None
            self.broken_links[connection.peer] = str(error)
            self.lose(connection.peer, str(error), error)

    # Which peers are present.

    def _check_peers_when_due(self, now: float) -> None:
        if now >= self._next_check:
            self._next_check = now + CHECK_PEERS_EVERY_S
            self.check_peers(now)
        elif self.elastic and now >= self._next_connection_check:
            self._next_connection_check = now + ELASTIC_CHECK_EVERY_S
            self._check_connections(now)

    def _check_connections(self, now: float) -> None:
        """In an elastic job: find broken connections between two checks."""
        for rank, peer in list(self.peers.items()):
            if not peer.connection.gone:
                self._check_peer(rank, peer, now, ping=False)

    def _release_lost_peers(self) -> None:
        """Close the sockets of lost peers: a long job loses many, and each has several descriptors."""
        for rank, peer in list(self.peers.items()):
            if peer.connection.gone and self.membership.gone.get(rank):
                self._released.add(rank)
                del self.peers[rank]
                peer.connection.close(partial(_release, peer))
                for identity in [name for name, known in list(self.verified.items()) if known is peer]:
                    self.verified[identity] = None

    def check_peers(self, now: float) -> None:
        """Read the news of the membership log, send pings, and find the peers that are lost."""
        if now - self.last_check > MAX_LOOP_GAP_S:
            for peer in list(self.peers.values()):
                peer.heard += now - self.last_check
        self.last_check = now
        self._release_lost_peers()
        for entry in self.membership.news():
            if entry.kind != "joined" and entry.rank == self.rank:
                self._fail(f"the others have declared this rank lost: {entry.reason}")
            elif entry.kind == "lost":
                lost = f"{self.name(entry.rank)} is lost: {entry.reason}"
                level = logging.INFO if self.elastic else logging.WARNING  # the launcher has said so too
                logger.log(level, "%s: the membership log reports that %s", self.name(), lost)
                if entry.rank in self.peers:
                    self.lose(entry.rank, entry.reason)
        for rank in list(self.membership.hints):
            if rank not in self.peers and rank != self.rank and rank not in self.membership.gone:
                with suppress(WorldError):  # closed meanwhile
                    self._connect(rank)  # to find out whether it is present
        ping = now >= self.next_ping
        if ping:
            self.next_ping = now + min(PING_EVERY_S, self.lost_after_s / 4)
        if self._is_cut_off(now):
            self._fail(f"{CUT_OFF} for {self.lost_after_s:.3g} s")
        for rank, peer in list(self.peers.items()):
            if not peer.connection.gone:
                self._check_peer(rank, peer, now, ping)

    def _is_cut_off(self, now: float) -> bool:
        """Whether this rank is cut off: it hears neither the store nor any peer."""
        silences = [now - peer.heard for peer in self.peers.values() if not peer.connection.gone]
        silent = bool(silences) and max(silences) > self.lost_after_s and min(silences) > self.lost_after_s / 2
        return silent and not self.membership.answers

    def _fail(self, reason: str) -> None:
        """End everything that waits: this rank cannot continue."""
        self.failed = self.failed or reason
        for rank in list(self.peers):
            self.lose(rank, self.failed)

    def _check_peer(self, rank: int, peer: _Peer, now: float, ping: bool) -> None:
        if peer.broken_at is None and peer.monitor.poll(0):
            peer.broken_at = now
        hinted_at, hint = self.membership.hints.get(rank, (now, ""))
        broken_after_s = ELASTIC_BROKEN_AFTER_S if self.elastic else BROKEN_AFTER_S
        if peer.broken_at is not None and now - max(peer.broken_at, peer.heard) > broken_after_s:
            self.announce_loss(rank, self.membership.gone.get(rank) or hint or "its connection broke")
        elif hint and now - max(hinted_at, peer.heard) > HINT_LOST_AFTER_S:
            self.announce_loss(rank, hint)
        elif now - peer.heard > self.lost_after_s and self._may_declare_lost(rank, peer):
            self.announce_loss(rank, f"it has sent no heartbeat for {self.lost_after_s:.3g} s")
        elif ping:
            peer.connection.send_control(PING)
        if hint and peer.broken_at is None and peer.heard - hinted_at > HINT_LOST_AFTER_S:
            self.membership.hints.pop(rank, None)  # it is alive: the hint was wrong

    def _may_declare_lost(self, rank: int, peer: _Peer) -> bool:
        """Whether this node decides that a silent peer is lost.

        A launcher sees whether a process computes, and ends one that is silent everywhere. So while the store answers,
        this node decides only about a peer whose heartbeats still reach the store: only the connection is broken.
        """
        if not (self.launched and self.membership.reachable and self.membership.answers):
            return True
        number = self.liveness.heartbeat_of(rank)
        if number is None:
            return True
        if peer.heartbeat is None or peer.heartbeat[0] != peer.heard:
            peer.heartbeat = (peer.heard, number)
        return number - peer.heartbeat[1] >= UNHEARD_HEARTBEATS

    def announce_loss(self, rank: int, reason: str) -> None:
        """Lose a peer, and post it so that all ranks name the same one."""
        if self.elastic:  # the next team decides which members continue
            self.broken_links[rank] = reason
        if rank in self.membership.gone or self.elastic:
            self.lose(rank, reason)
            return
        self.membership.lose(rank, reason)  # first: callers that get the error ask which ranks are gone
        self.lose(rank, reason)
        try:
            self.membership.post(MemberEntry("lost", rank, reason=reason))
            logger.warning("%s has lost %s: %s", self.name(), self.name(rank), reason)
        except RuntimeError as error:
            logger.warning("%s has lost %s: %s (%s)", self.name(), self.name(rank), reason, error)

    def lose(self, rank: int, reason: str, error: ProtocolError | None = None) -> None:
        """End everything that waits for a peer."""
        peer = self.peers[rank]

        def loss(posted: PostedReceive) -> Exception:
            return error or self.peer_lost(rank, reason, f"a message (tag {posted.tag})", 0.0)

        if not peer.connection.gone:
            peer.connection.lose(reason, loss)
            for mailbox in list(self.mailboxes.values()):
                mailbox.fail(lambda posted: loss(posted) if posted.needs(rank) else None)
            for on_peer_lost in list(self._on_peer_lost):
                on_peer_lost(rank)
            self.wake()

    def peer_lost(self, rank: int | None, reason: str, pending: str, seconds: float) -> PeerLostError:
        """The error that names a lost rank."""
        name = "a peer" if rank is None else self.name(rank)
        return peer_lost_error(self.name(), rank, name, pending, seconds, reason)

    def close(self, timeout: float) -> None:
        """Deliver the messages that peers still have to take, send goodbye messages, and close the sockets."""
        if self.closed:
            return
        until = self.runtime.now() + timeout
        for peer in list(self.peers.values()):
            while not peer.connection.gone and (outgoing := peer.connection.oldest()) is not None:
                pending = f"{self.name(peer.connection.peer)} to take {format_bytes(outgoing.nbytes)}"
                if not self.wait(outgoing, until - self.runtime.now(), pending.format):
                    logger.warning("%s leaves, and waits no longer for %s", self.name(), pending)
                    break
        self.loop.stop(LINGER_S)
        if self.task is not None:
            self.task.join(LINGER_S)
        for peer in self.peers.values():
            if not peer.connection.gone:
                peer.connection.send_control(GOODBYE)
                self.lose(peer.connection.peer, "this transport is closed")
        if self.rank >= 0 and not self.failed and self.membership.reachable:
            try:
                self.membership.post(MemberEntry("left", self.rank, reason="it has left"))
            except RuntimeError as error:
                logger.debug("the store does not answer: %s", error)
        if self._liveness is not None:
            self._liveness.close()
        self.membership.close()
        for peer in self.peers.values():
            _release(peer, LINGER_S)
        with self._wake_lock:
            self._wake_socket.close(0)
        self._router.close(0)
        self._security.close()
        self.context.term()


def _channel_closed(posted: PostedReceive) -> Exception:
    return WorldError(f"this channel is closed: no message arrives for tag {posted.tag} any more")


def _release(peer: _Peer, linger_s: float = 0.0) -> None:
    """Close the sockets of a peer."""
    peer.socket.disable_monitor()
    peer.monitor.close(0)
    peer.socket.close(int(1000 * linger_s))
