"""Peers whose messages must be refused: unknown processes, and members that break the protocol."""

from __future__ import annotations

import os
from typing import Any

import zmq

from syncline.testing.processes import TEST_TIMEOUT_S
from syncline.transports.messages import MessageHeader
from syncline.transports.zeromq.connection import EAGER
from syncline.transports.zeromq.membership import MemberEntry
from syncline.transports.zeromq.node import IDENTITY
from tests.transports.zeromq_worlds import Here

CUT_OFF = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Caller:
    """A DEALER socket that sends any frames."""

    def __init__(self, endpoint: str, identity: bytes, key: str | None = None, lock: str | None = None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.identity = identity
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm = 8
        self.socket.sndtimeo = 100
        self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if key is not None:
            self.socket.curve_serverkey = zmq.curve_public((lock or key).encode())
            self.socket.curve_publickey = zmq.curve_public(key.encode())
            self.socket.curve_secretkey = key.encode()
        self.monitor = self.socket.get_monitor_socket(CUT_OFF)
        self.socket.connect(endpoint)

    def say(self, *frames: bytes) -> bool:
        """Send; False if the socket is full or not connected."""
        try:
            self.socket.send_multipart(frames)
        except zmq.Again:
            return False
        return True

    def await_the_cut(self) -> None:
        """Wait until the other side has ended the connection."""
        assert self.monitor.poll(int(1000 * TEST_TIMEOUT_S)), "the connection still stands"

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)
        self._context.term()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *how: object) -> None:
        self.close()


class Rogue(Caller):
    """A member that has the key and an entry in the membership log, but breaks the protocol."""

    def __init__(self, world: Here) -> None:
        victim = world.ranks[0].node
        incarnation = os.urandom(8)
        self.rank = victim.membership.next_rank()
        super().__init__(victim.endpoint, IDENTITY.pack(b"r", self.rank, incarnation), world.key)
        self._ear = self._context.socket(zmq.ROUTER)  # where the victim calls back
        self._ear.linger = 0
        if world.key is not None:  # before it binds: later it counts for nothing
            self._ear.curve_server, self._ear.curve_secretkey = True, world.key.encode()
        port = self._ear.bind_to_random_port("tcp://127.0.0.1")
        victim.membership.post(MemberEntry("joined", self.rank, f"tcp://127.0.0.1:{port}", incarnation.hex()))

    def __enter__(self) -> Rogue:
        return self

    def header(self, kind: int = EAGER, number: int = 0, length: int = 0, sender: int | None = None) -> bytes:
        return MessageHeader(self.rank if sender is None else sender, 0, length, number, kind).pack()

    def eager(self, number: int, text: bytes) -> bytes:
        """A message that goes with its header."""
        return self.header(number=number, length=len(text)) + text

    def close(self) -> None:
        self._ear.close(0)
        super().close()
