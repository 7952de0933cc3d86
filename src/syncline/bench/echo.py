"""Push and pull against a bare echo: what a transport adds to the sockets under it.

Rank 0 pushes n bytes to rank 1 and pulls n back. The contenders take turns in one run: a plain TCP socket, a bare
ZeroMQ pair of sockets without a line of ours, and the transports. Rank 1 answers whoever asks.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import zmq

from syncline.bench.stats import ratios, summarize
from syncline.environment import detect
from syncline.transports import Transport
from syncline.transports.base import LANE_TAGS
from syncline.transports.store import listening_address
from syncline.transports.zeromq import connect as connect_zeromq
from syncline.world import World, broadcast

__all__ = ["echoes"]

SIZES = (4096, 4 << 20, 40 << 20)
CUT = 1 << 20
"""Bytes of a bare ZeroMQ message: one of 40 MB would be slower."""
PUSH, PULL = LANE_TAGS + 1, LANE_TAGS + 2
TURN = 0.05
LONGEST = 1.0
"""Seconds that one push and pull may take by the network's numbers; larger sizes are left out."""
MOST_ECHOES = 200

Once = Callable[[int], None]
"""One push and pull of so many bytes: on rank 0 it asks, on rank 1 it answers."""


def echoes(world: World, rounds: int, bandwidth: float) -> list[dict[str, Any]]:
    """Times of all contenders at the sizes that do not take too long; rows on rank 0, nothing elsewhere."""
    place = detect().rendezvous
    address = listening_address(place.address if place else "127.0.0.1", one_host=len(set(world.hosts)) == 1)
    zeromq = connect_zeromq(detect(), world.transport.timeout)
    plain, bare = _Tcp(world, address), _BareZeromq(world, address)
    contenders: dict[str, Once] = {"TCP": plain.once, "bare ZeroMQ": bare.once}
    contenders |= {each.name: _transport(each, world.rank) for each in (world.transport, zeromq)}
    rows: list[dict[str, Any]] = []
    for nbytes in [nbytes for nbytes in SIZES if 2 * nbytes / bandwidth < LONGEST]:
        rows += _compare(world, contenders, nbytes, rounds)
    world.barrier()  # the last answer may still be on its way
    plain.close()
    bare.close()
    zeromq.close()
    return rows if world.rank == 0 else []


def _compare(world: World, contenders: dict[str, Once], nbytes: int, rounds: int) -> list[dict[str, Any]]:
    calls, times = {}, {name: [] for name in contenders}  # type: dict[str, int], dict[str, list[float]]
    for name, once in contenders.items():
        for _ in range(3):
            once(nbytes)
        warm = _turn(world, once, nbytes, 1)
        wanted = broadcast(torch.tensor([max(1, min(MOST_ECHOES, int(TURN / warm)))]))
        calls[name] = int(wanted)
    for number in range(rounds):
        order = list(contenders)
        random.Random(number).shuffle(order)
        for name in order:
            times[name].append(_turn(world, contenders[name], nbytes, calls[name]))
    return [
        {
            "contender": name,
            "bytes": nbytes,
            "seconds": own,
            "time": asdict(summarize(own)),
            "of_tcp": asdict(ratios(times["TCP"], own)),
            "of_bare_zeromq": asdict(ratios(times["bare ZeroMQ"], own)),
        }
        for name, own in times.items()
    ]


def _turn(world: World, once: Once, nbytes: int, calls: int) -> float:
    now = world.runtime.now
    world.barrier()
    start = now()
    if world.rank < 2:
        for _ in range(calls):
            once(nbytes)
    return (now() - start) / calls


def _transport(transport: Transport, rank: int) -> Once:
    buffers: dict[int, torch.Tensor] = {}

    def once(nbytes: int) -> None:
        buffer = buffers.setdefault(nbytes, torch.from_numpy(np.zeros(nbytes, np.uint8)))
        if rank == 0:
            answer = transport.recv(buffer, 1, PULL)
            transport.send(buffer.clone() if nbytes < CUT else buffer, 1, PUSH).wait()
            answer.wait()
        elif rank == 1:
            asked = transport.recv(buffer, None if transport.name == "zeromq" else 0, PUSH)
            asked.wait()
            transport.send(buffer, asked.source, PULL).wait()

    return once


class _Tcp:
    """A plain socket."""

    def __init__(self, world: World, address: str) -> None:
        self.rank = world.rank
        self._buffers: dict[int, memoryview] = {}
        with socket.socket() as listener:
            if world.rank == 1:
                listener.bind((address, 0))
                listener.listen(1)
            where = _tell(world, address, listener.getsockname()[1] if world.rank == 1 else 0)
            if world.rank == 0:
                self.socket = socket.create_connection(where, timeout=60)
            elif world.rank == 1:
                listener.settimeout(60)
                self.socket = listener.accept()[0]
        if world.rank < 2:
            # The kernel keeps the time: Python's own timeouts would poll before every read.
            self.socket.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 120, 0))
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def once(self, nbytes: int) -> None:
        if self.rank > 1:
            return
        buffer = self._buffers.setdefault(nbytes, np.zeros(nbytes, np.uint8).data)
        if self.rank == 0:
            self.socket.sendall(buffer)
        self._read(buffer)
        if self.rank == 1:
            self.socket.sendall(buffer)

    def _read(self, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            count = self.socket.recv_into(buffer[filled:])
            if not count:
                raise ConnectionError("the echo's other side has closed")
            filled += count

    def close(self) -> None:
        if self.rank < 2:
            self.socket.close()


class _BareZeromq:
    """ROUTER and DEALER with nothing around them: each message cut, copied out, sent back."""

    def __init__(self, world: World, address: str) -> None:
        self.rank = world.rank
        self._buffers: dict[int, Any] = {}
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if world.rank == 1 else zmq.DEALER)
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.linger = 0
        self._socket.rcvtimeo = 120_000
        port = self._socket.bind_to_random_port(f"tcp://{address}") if world.rank == 1 else 0
        host, port = _tell(world, address, port)
        if world.rank == 0:
            self._socket.connect(f"tcp://{host}:{port}")

    def once(self, nbytes: int) -> None:
        if self.rank > 1:
            return
        buffer = self._buffers.setdefault(nbytes, np.zeros(nbytes, np.uint8))
        parts = [buffer[first : first + CUT] for first in range(0, nbytes, CUT)]
        identity: list[bytes] = []
        if self.rank == 0:
            self._send(parts, identity)
        for part in parts:
            if self.rank == 1:
                identity = [self._socket.recv()]
            part[:] = np.frombuffer(self._socket.recv(copy=False).buffer, np.uint8)
        if self.rank == 1:
            self._send(parts, identity)

    def _send(self, parts: list[Any], identity: list[bytes]) -> None:
        for part in parts:
            self._socket.send_multipart([*identity, part], copy=len(part) < CUT)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _tell(world: World, address: str, port: int) -> tuple[str, int]:
    """Where rank 1 listens, on every rank."""
    numbers = [*socket.inet_aton(address), port]
    *quad, port = broadcast(torch.tensor(numbers), root=1).tolist()
    return socket.inet_ntoa(bytes(quad)), port
