"""The bare echo with which the parameter servers are compared, and the server process of the benchmarks.

The echo uses only calls of ZeroMQ or MPI. A client sends n bytes, split evenly over the servers, and receives n back. A
server process (`python -m syncline.bench.server.echo`, or a task of each worker if servers are co-located) serves the
parameters, answers the echo, and reports its memory and CPU time. It takes commands from worker 0.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from types import FrameType
from typing import Any

import numpy as np
import torch
import zmq

from syncline.environment import detect
from syncline.errors import SynclineError, UnsupportedError
from syncline.server.network import ServerNetwork, join_network, network_of, read_roles, server_network
from syncline.server.server import Server
from syncline.transports.base import DEFAULT_TIMEOUT_S
from syncline.transports.key_value_store import listening_address
from syncline.world import World

__all__ = ["SERVER_PROGRAM", "BareEcho", "ServerCommands", "echo_processes", "keep_in_flight", "resident_bytes"]

ZEROMQ_MESSAGE_BYTES = 1 << 20
"""A bare ZeroMQ message of 40 MB would be slower."""
ADDRESS_TAG = 801
"""The tag of the message with a server's address. Tags of the parameter servers are smaller."""
REQUEST_TAG, ANSWER_TAG, COMMAND_TAG, REPLY_TAG = 1, 2, 3, 4
RECEIVE_TIMEOUT_S = 120.0
COMMAND_POLL_S = 0.002


def split_bytes(nbytes: int, parts: int) -> list[int]:
    """Split float32 values evenly, as shards are.

    >>> split_bytes(40, 3)
    [16, 12, 12]
    """
    base, more = divmod(nbytes // 4, parts)
    return [4 * (base + (part < more)) for part in range(parts)]


def keep_in_flight(calls: int, depth: int, send: Callable[[int], object], receive: Callable[[int], object]) -> None:
    """Send and receive `calls` requests, by their numbers, with `depth` of them in flight."""
    for call in range(calls + depth):
        if depth <= call:
            receive(call - depth)
        if call < calls:
            send(call)


def _split_messages(buffer: Any) -> list[Any]:
    return [buffer[first : first + ZEROMQ_MESSAGE_BYTES] for first in range(0, len(buffer), ZEROMQ_MESSAGE_BYTES)]


class _ZeromqEcho:
    """A ROUTER socket on each server and a DEALER to each: every message is split, copied, and sent back."""

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
            text = torch.frombuffer(bytearray(f"tcp://{address}:{port}".encode()), dtype=torch.uint8)
            for worker in network.workers:
                transport.send(text, worker, ADDRESS_TAG).wait()
        for server in network.servers if network.me in network.workers else ():
            received = torch.empty(256, dtype=torch.uint8)
            handle = transport.recv(received, server, ADDRESS_TAG)
            handle.wait()
            dealer = self._dealers[server] = self._socket(zmq.DEALER)
            dealer.connect(bytes(received.numpy()[: handle.nbytes]).decode())

    def _socket(self, kind: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0
        socket.linger = 0
        socket.rcvtimeo = int(1000 * RECEIVE_TIMEOUT_S)
        return socket

    def _rows(self, key: Any, nbytes: int, depth: int) -> list[list[Any]]:
        """`depth` split messages: buffers that are sent without a copy must not be changed too early."""
        rows = self._buffers.get(key)
        if rows is None:
            rows = self._buffers[key] = [_split_messages(np.zeros(nbytes, np.uint8)) for _ in range(depth)]
        return rows

    def ask(self, servers: Sequence[int], nbytes: int, calls: int, depth: int) -> None:
        """On a client: send and receive `nbytes`, `calls` times, with `depth` requests at once."""
        lines = [
            (self._dealers[server], self._rows((server, nbytes, depth), nbytes, depth))
            for server, nbytes in zip(servers, split_bytes(nbytes, len(servers)), strict=True)
            if nbytes
        ]

        def send(call: int) -> None:
            for socket, rows in lines:
                for part in rows[call % depth]:
                    socket.send(part, copy=len(part) < ZEROMQ_MESSAGE_BYTES)

        def receive(call: int) -> None:
            for socket, rows in lines:
                for part in rows[call % depth]:
                    part[:] = np.frombuffer(socket.recv(copy=False).buffer, np.uint8)

        keep_in_flight(calls, depth, send, receive)

    def answer(self, nbytes: int, messages: int, depth: int) -> None:
        """On a server: send back this number of messages from any client."""
        socket = self._router
        assert socket is not None, "a server has a ROUTER"
        buffers: dict[bytes, Any] = {}
        while messages:
            name = socket.recv()
            turns = buffers.get(name)
            if turns is None:
                rows = self._rows((name, nbytes, depth), nbytes, depth)
                turns = buffers[name] = cycle([(part, row[-1] is part, row) for row in rows for part in row])
            part, last, row = next(turns)
            part[:] = np.frombuffer(socket.recv(copy=False).buffer, np.uint8)
            if last:
                messages -= 1
                for part in row:
                    socket.send_multipart([name, part], copy=len(part) < ZEROMQ_MESSAGE_BYTES)

    def command(self, server: int, numbers: Sequence[int]) -> None:
        """On worker 0: send a command to a server."""
        self._dealers[server].send(np.array(numbers, np.int64).tobytes())

    def next_command(self) -> Sequence[int]:
        """On a server: wait for the next command, without a timeout and without the servers' own network."""
        assert self._router is not None, "a server has a ROUTER"
        while not self._router.poll(int(1000 * RECEIVE_TIMEOUT_S)):
            continue  # this process ends with worker 0
        self._master, numbers = self._router.recv_multipart()
        return [int(each) for each in np.frombuffer(numbers, np.int64)]

    def reply(self, numbers: Sequence[int]) -> None:
        """On a server: answer the command."""
        assert self._router is not None, "a server has a ROUTER"
        self._router.send_multipart([self._master, np.array(numbers, np.int64).tobytes()])

    def read_reply(self, server: int) -> Sequence[int]:
        """On worker 0: the answer of a server."""
        return [int(each) for each in np.frombuffer(self._dealers[server].recv(), np.int64)]

    def close(self) -> None:
        self._context.destroy(linger=0)


class _MpiEcho:
    """The same by calls of MPI, on a separate communicator."""

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
            for server, nbytes in zip(servers, split_bytes(nbytes, len(servers)), strict=True)
            if nbytes
        ]
        sent: deque[list[Any]] = deque()

        def send(call: int) -> None:
            sent.append([comm.Isend(row, server, REQUEST_TAG) for server, row, _ in lines])

        def receive(call: int) -> None:
            for server, _, into in lines:
                comm.Recv(into, server, ANSWER_TAG)
            for request in sent.popleft():
                request.Wait()

        keep_in_flight(calls, depth, send, receive)

    def answer(self, nbytes: int, messages: int, depth: int) -> None:
        row, status = self._row(("end", nbytes), nbytes), self._mpi.Status()
        for _ in range(messages):
            self._comm.Recv(row, self._mpi.ANY_SOURCE, REQUEST_TAG, status)
            self._comm.Send(row, status.Get_source(), ANSWER_TAG)

    def command(self, server: int, numbers: Sequence[int]) -> None:
        self._comm.Send(np.array(numbers, np.int64), server, COMMAND_TAG)

    def next_command(self) -> Sequence[int]:
        while not self._comm.Iprobe(0, COMMAND_TAG):  # MPI's own wait would occupy a core
            self._runtime.sleep(COMMAND_POLL_S)
        return self._receive(0, COMMAND_TAG)

    def reply(self, numbers: Sequence[int]) -> None:
        self._comm.Send(np.array(numbers, np.int64), 0, REPLY_TAG)

    def read_reply(self, server: int) -> Sequence[int]:
        return self._receive(server, REPLY_TAG)

    def _receive(self, source: int, tag: int) -> Sequence[int]:
        numbers, status = np.zeros(4, np.int64), self._mpi.Status()
        self._comm.Recv(numbers, source, tag, status)
        return [int(each) for each in numbers[: status.Get_count(self._mpi.INT64_T)]]

    def close(self) -> None:
        self._comm.Free()


BareEcho = _ZeromqEcho | _MpiEcho
"""A bare echo among the members of a network, with one object in each process."""


def open_echo(network: ServerNetwork) -> BareEcho:
    """Open a bare echo on the network's engine. A collective call of all members."""
    name = network.transport.name
    if name == "zeromq":
        return _ZeromqEcho(network)
    if name == "mpi":
        return _MpiEcho(network)
    raise UnsupportedError(f"there is no bare echo on {name}; take --engine zeromq or --engine mpi")


@contextmanager
def echo_processes(world: World) -> Iterator[tuple[ServerNetwork, BareEcho, ServerCommands]]:
    """The network of a benchmark, its echo, and the commands to its servers, which end with the block."""
    network = server_network(world)
    echo = open_echo(network)
    server = None if network.dedicated else world.runtime.spawn(serve_commands, echo, name="echo")
    commands = ServerCommands(echo, network.servers)
    yield network, echo, commands
    world.barrier()
    if world.rank == 0:
        commands.end()
    if server is not None:
        server.join(world.transport.timeout)
    world.barrier()
    echo.close()


def _own_address(network: ServerNetwork) -> str:
    """The address at which other processes reach this one."""
    if network.me in network.workers:
        found = detect()
        place, one_host = found.rendezvous, found.local_known and found.local_size == found.size
    else:
        roles = read_roles()
        place, one_host = roles.rendezvous, roles.one_host
    return listening_address(place.address if place else "127.0.0.1", one_host)


SERVER_PROGRAM = ("-m", "syncline.bench.server.echo")
ECHO, USAGE, END = range(1, 4)
"""Commands of worker 0."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


class ServerCommands:
    """Sends the commands of worker 0 to the server processes."""

    def __init__(self, echo: BareEcho, servers: Sequence[int]) -> None:
        self._echo = echo
        self._servers = servers

    def echo(self, servers: Sequence[int], nbytes: int, messages: int, depth: int) -> None:
        """Let the servers answer this number of messages, which are split evenly over them."""
        for server, share in zip(servers, split_bytes(nbytes, len(servers)), strict=True):
            if share:
                self._echo.command(server, (ECHO, share, messages, depth))
                self._echo.read_reply(server)  # before the first message arrives

    def usage(self) -> list[tuple[int, float]]:
        """Resident bytes and CPU seconds of every server process."""
        found = []
        for server in self._servers:
            self._echo.command(server, (USAGE, 0, 0, 0))
            memory, processor = self._echo.read_reply(server)
            found.append((memory, 1e-9 * processor))
        return found

    def end(self) -> None:
        """End the server processes."""
        for server in self._servers:
            self._echo.command(server, (END, 0, 0, 0))


def serve_commands(echo: BareEcho) -> None:
    """Execute the commands of worker 0 until it ends."""
    while True:
        kind, nbytes, messages, depth = echo.next_command()
        if kind == ECHO:
            echo.reply(())
            echo.answer(nbytes, messages, depth)
        elif kind == USAGE:
            echo.reply((resident_bytes(), time.process_time_ns()))
        else:
            return


def main() -> int:
    """Serve the parameters, and execute commands; return the exit code."""
    signal.signal(signal.SIGTERM, _end)
    network = _join()
    try:
        server = Server(network).start()
        echo = open_echo(network)
        serve_commands(echo)
        echo.close()
        server.close()
        network.transport.abort()  # on MPI its tasks would wait for workers that have left
    except SynclineError as error:  # the workers have failed, and report why
        print(f"server {network.me}: {error}", file=sys.stderr)
        return 1
    finally:
        network.close()
    return 0


def _join() -> ServerNetwork:
    roles = read_roles()
    if os.environ.get("SYNCLINE_TRANSPORT") == "mpi":
        mpi = importlib.import_module("syncline.transports.mpi")  # only here: importing it starts MPI
        return network_of(mpi.connect(detect(), DEFAULT_TIMEOUT_S), roles.workers, roles.servers)
    return join_network(roles, DEFAULT_TIMEOUT_S)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
