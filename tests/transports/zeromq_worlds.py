"""Processes that come into a ZeroMQ world and leave it, each on a pipe to the test; and worlds within one process."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from syncline.environment import Environment, Rendezvous
from syncline.runtime import RealRuntime
from syncline.testing.processes import TEST_TIMEOUT_S, fork_context
from syncline.transports import zeromq
from syncline.transports.zeromq import ZmqTransport, node
from syncline.transports.zeromq.connection import PART_BYTES

TIMEOUT = 100.0
"""Timeout of a transport in seconds. It is shorter than the timeout of the test, so that its error is seen."""


def serve_a_store(port: int = 0) -> TCPStore:
    """A store on the loopback interface, as a launcher serves it; by default on any free port."""
    listener = socket.create_server(("127.0.0.1", port))
    port = int(listener.getsockname()[1])
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def enter(port: int, rank: int, size: int, key: str | None = None, timeout: float = TIMEOUT) -> ZmqTransport:
    """Join with the launch."""
    place = Rendezvous("127.0.0.1", port, hosted=True)
    environment = Environment(source="a test", rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=place)
    return zeromq.connect(environment, timeout, key)


def come_later(port: int, key: str | None = None, timeout: float = TIMEOUT) -> ZmqTransport:
    """Join a running world."""
    return zeromq.join(Rendezvous("127.0.0.1", port), timeout, key)


class Here:
    """A world whose ranks all run in this process, each with its own sockets."""

    def __init__(self, size: int, key: str | None = None, port: int = 0) -> None:
        self.store = serve_a_store(port)
        self.port = self.store.port
        self.key = key
        self.ranks = [enter(self.port, 0, 1, key)]
        self.ranks += [come_later(self.port, key) for _ in range(1, size)]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *how: object) -> None:
        self.close()


class Member:
    """One process and the pipe to it."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe

    def say(self, word: Any) -> None:
        self.pipe.send(word)

    def hear(self) -> Any:
        """The next value that it sends. An error in the process is raised here."""
        assert self.pipe.poll(TEST_TIMEOUT_S), f"process {self.process.pid} said nothing for {TEST_TIMEOUT_S:.0f} s"
        kind, word = self.pipe.recv()
        assert kind == "said", word
        return word

    def kill(self) -> None:
        self.process.kill()
        self.process.join(TEST_TIMEOUT_S)


class Crew:
    """Processes that end with the test, whatever happens."""

    def __init__(self) -> None:
        self.store = serve_a_store()
        self.port = self.store.port
        self.members: list[Member] = []
        self._context = fork_context()

    def start(self, fn: Callable[..., Any], *args: Any) -> Member:
        """Run `fn(pipe, *args)` in a process, which sends the result last."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_play, args=(theirs, fn, args), daemon=True)
        process.start()
        theirs.close()
        self.members.append(Member(process, ours))
        return self.members[-1]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: object, *how: object) -> None:
        for member in self.members:
            if kind is None:
                member.process.join(TEST_TIMEOUT_S)
            member.process.kill()
            member.process.join()
            member.pipe.close()


class Pipe:
    """The process's own end."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, word: Any) -> None:
        self._pipe.send(("said", word))

    def hear(self) -> Any:
        assert self._pipe.poll(TEST_TIMEOUT_S), f"the test said nothing for {TEST_TIMEOUT_S:.0f} s"
        return self._pipe.recv()


def _play(pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(("said", fn(Pipe(pipe), *args)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


def peak() -> int:
    """Peak memory of this process in bytes."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def forget_the_peak() -> int:
    """Reset the peak. Returns the bytes in use now."""
    with open("/proc/self/clear_refs", "w") as knob:
        knob.write("5")
    return peak()


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition; every test's only way to wait."""
    runtime = RealRuntime()
    deadline = runtime.now() + TEST_TIMEOUT_S
    while not condition():
        assert runtime.now() < deadline, f"it never came about: {what}"
        runtime.sleep(0.005)


def talk(one: ZmqTransport, other: ZmqTransport) -> None:
    """A small and a large message each way."""
    for sender, receiver in ((one, other), (other, one)):
        for length in (10, 2 * PART_BYTES + 1):
            sent = torch.randint(0, 256, (length,), dtype=torch.uint8)
            got = torch.zeros(length, dtype=torch.uint8)
            receipt = receiver.recv(got, sender.rank, 7)
            sender.send(sent, receiver.rank, 7).wait()
            receipt.wait()
            assert torch.equal(sent, got)


def seize(rank: ZmqTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Become the driver of a rank's sockets and read nothing until `_leave()`."""
    monkeypatch.setattr(node, "YIELD_S", 0.1)

    def seized() -> bool:
        rank.node.wake()
        return rank.node.loop.acquire("test")

    until(seized, "the rank's own task steps aside")
