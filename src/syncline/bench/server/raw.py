"""The bare echo that the servers are measured against: the engine's own calls, and not a line of ours between.

A client pushes n bytes, cut evenly over the servers, and pulls n back; an end answers whole messages, whoever asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch
import zmq

from syncline.environment import detect
from syncline.errors import UnsupportedError
from syncline.server.network import ServerNetwork, read_roles
from syncline.transports.store import listening_address

__all__ = ["Raw", "open_raw", "shares"]

CUT = 1 << 20
"""Bytes of a bare ZeroMQ message: one of 40 MB would be slower."""
ADDRESS = 801
"""Tag under which ends tell where they listen. Those of the servers are below."""
PUSH, PULL, ORDER, TOLD = 1, 2, 3, 4
PATIENCE = 120.0
GLANCE = 0.002


class Raw(Protocol):
    """A bare echo among the members of a network: one object in each process."""

    def ask(self, servers: Sequence[int], nbytes: int, calls: int, depth: int) -> None:
        """Push and pull so many bytes so many times, `depth` at once."""
        ...

    def answer(self, nbytes: int, messages: int, depth: int) -> None:
        """Send back so many messages, whoever they come from."""
        ...

    def order(self, server: int, numbers: Sequence[int]) -> None:
        """Tell an end what comes."""
        ...

    def next_order(self) -> Sequence[int]:
        """What worker 0 says; waits without end, and without the servers' network: nobody there is to be disturbed."""
        ...

    def tell(self, numbers: Sequence[int]) -> None:
        """Answer worker 0's order."""
        ...

    def told(self, server: int) -> Sequence[int]:
        """What an end has answered."""
        ...

    def close(self) -> None: ...


def open_raw(network: ServerNetwork) -> Raw:
    """A bare echo on the network's engine; made by all members together."""
    name = network.transport.name
    if name == "zeromq":
        return _RawZeromq(network)
    if name == "mpi":
        return _RawMpi(network)
    raise UnsupportedError(f"there is no bare echo on {name}; take --engine zeromq or --engine mpi")


def shares(nbytes: int, parts: int) -> list[int]:
    """A row of float32, cut as evenly as shards are.

    >>> shares(40, 3)
    [16, 12, 12]
    """
    base, more = divmod(nbytes // 4, parts)
    return [4 * (base + (part < more)) for part in range(parts)]


def _cuts(buffer: Any) -> list[Any]:
    return [buffer[first : first + CUT] for first in range(0, len(buffer), CUT)]


class _RawZeromq:
    """A ROUTER at each end, a DEALER to each: every message cut, copied out, sent back."""

    def __init__(self, network: ServerNetwork) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._socket(zmq.ROUTER) if network.serves else None
        self._dealers: dict[int, zmq.Socket[Any]] = {}
        self._buffers: dict[Any, list[list[Any]]] = {}
        self._master = b""
        transport = network.transport
        if self._router is not None:
            address = _own_address(network)
            port = self._router.bind_to_random_port(f"tcp://{address}")
            told = torch.frombuffer(bytearray(f"tcp://{address}:{port}".encode()), dtype=torch.uint8)
            for worker in network.workers:
                transport.send(told, worker, ADDRESS).wait()
        for server in network.servers if network.me in network.workers else ():
            heard = torch.empty(256, dtype=torch.uint8)
            handle = transport.recv(heard, server, ADDRESS)
            handle.wait()
            dealer = self._dealers[server] = self._socket(zmq.DEALER)
            dealer.connect(bytes(heard.numpy()[: handle.nbytes]).decode())

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0
        socket.linger = 0
        socket.rcvtimeo = int(1000 * PATIENCE)
        return socket

    def _rows(self, key: Any, nbytes: int, depth: int) -> list[list[Any]]:
        """`depth` messages, cut: who sends without copying must not write into what is still under way."""
        rows = self._buffers.get(key)
        if rows is None:
            rows = self._buffers[key] = [_cuts(np.zeros(nbytes, np.uint8)) for _ in range(depth)]
        return rows

    def ask(self, servers: Sequence[int], nbytes: int, calls: int, depth: int) -> None:
        lines = [
            (self._dealers[server], self._rows((server, nbytes, depth), nbytes, depth))
            for server, nbytes in zip(servers, shares(nbytes, len(servers)), strict=True)
            if nbytes
        ]
        under_way: deque[int] = deque()
        for call in range(calls + depth):
            if len(under_way) == depth or call >= calls:
                if not under_way:
                    break
                done = under_way.popleft()
                for socket, rows in lines:
                    for part in rows[done % depth]:
                        part[:] = np.frombuffer(socket.recv(copy=False).buffer, np.uint8)
            if call < calls:
                for socket, rows in lines:
                    for part in rows[call % depth]:
                        socket.send(part, copy=len(part) < CUT)
                under_way.append(call)

    def answer(self, nbytes: int, messages: int, depth: int) -> None:
        socket = self._router
        assert socket is not None, "an end listens"
        came: dict[bytes, Any] = {}
        while messages:
            name = socket.recv()
            turns = came.get(name)
            if turns is None:
                rows = self._rows((name, nbytes, depth), nbytes, depth)
                turns = came[name] = cycle([(part, row[-1] is part, row) for row in rows for part in row])
            part, last, row = next(turns)
            part[:] = np.frombuffer(socket.recv(copy=False).buffer, np.uint8)
            if last:
                messages -= 1
                for part in row:
                    socket.send_multipart([name, part], copy=len(part) < CUT)

    def order(self, server: int, numbers: Sequence[int]) -> None:
        self._dealers[server].send(np.array(numbers, np.int64).tobytes())

    def next_order(self) -> Sequence[int]:
        assert self._router is not None, "an end listens"
        while not self._router.poll(int(1000 * PATIENCE)):
            continue  # worker 0 may have other things to do; when it ends, so does this process
        self._master, numbers = self._router.recv_multipart()
        return [int(each) for each in np.frombuffer(numbers, np.int64)]

    def tell(self, numbers: Sequence[int]) -> None:
        assert self._router is not None, "an end listens"
        self._router.send_multipart([self._master, np.array(numbers, np.int64).tobytes()])

    def told(self, server: int) -> Sequence[int]:
        return [int(each) for each in np.frombuffer(self._dealers[server].recv(), np.int64)]

    def close(self) -> None:
        self._context.destroy(linger=0)


class _RawMpi:
    """MPI's own calls on a communicator of their own."""

    def __init__(self, network: ServerNetwork) -> None:
        transport: Any = network.transport
        self._comm = transport.comm.Dup()
        self._mpi = transport.engine.mpi
        self._runtime = transport.runtime
        self._buffers: dict[Any, Any] = {}

    def _row(self, key: Any, nbytes: int) -> Any:
        row = self._buffers.get(key)
        if row is None:
            row = self._buffers[key] = np.zeros(nbytes, np.uint8)
        return row

    def ask(self, servers: Sequence[int], nbytes: int, calls: int, depth: int) -> None:
        comm = self._comm
        lines = [
            (server, self._row(("out", server, nbytes), nbytes), self._row(("in", server, nbytes), nbytes))
            for server, nbytes in zip(servers, shares(nbytes, len(servers)), strict=True)
            if nbytes
        ]
        under_way: deque[list[Any]] = deque()
        for call in range(calls + depth):
            if len(under_way) == depth or call >= calls:
                if not under_way:
                    break
                sent = under_way.popleft()
                for server, _, into in lines:
                    comm.Recv(into, server, PULL)
                for request in sent:
                    request.Wait()
            if call < calls:
                under_way.append([comm.Isend(row, server, PUSH) for server, row, _ in lines])

    def answer(self, nbytes: int, messages: int, depth: int) -> None:
        row, status = self._row(("end", nbytes), nbytes), self._mpi.Status()
        for _ in range(messages):
            self._comm.Recv(row, self._mpi.ANY_SOURCE, PUSH, status)
            self._comm.Send(row, status.Get_source(), PULL)

    def order(self, server: int, numbers: Sequence[int]) -> None:
        self._comm.Send(np.array(numbers, np.int64), server, ORDER)

    def next_order(self) -> Sequence[int]:
        while not self._comm.Iprobe(0, ORDER):  # MPI's own wait would keep a core busy
            self._runtime.sleep(GLANCE)
        return self._receive(0, ORDER)

    def tell(self, numbers: Sequence[int]) -> None:
        self._comm.Send(np.array(numbers, np.int64), 0, TOLD)

    def told(self, server: int) -> Sequence[int]:
        return self._receive(server, TOLD)

    def _receive(self, source: int, tag: int) -> Sequence[int]:
        numbers, status = np.zeros(4, np.int64), self._mpi.Status()
        self._comm.Recv(numbers, source, tag, status)
        return [int(each) for each in numbers[: status.Get_count(self._mpi.INT64_T)]]

    def close(self) -> None:
        self._comm.Free()


def _own_address(network: ServerNetwork) -> str:
    """Where others reach this process: on one host nobody else does."""
    if network.me in network.workers:
        found = detect()
        place, one_host = found.rendezvous, found.local_known and found.local_size == found.size
    else:
        roles = read_roles()
        place, one_host = roles.rendezvous, roles.one_host
    return listening_address(place.address if place else "127.0.0.1", one_host)
