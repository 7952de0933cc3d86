"""The server: imports torch and syncline, then forks a process for each request. It ends at the end of its stdin."""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.testing.processes import PRELOADED
from tests.launch.command import give_prefork

MORE = ("syncline.bench.race.runner", "syncline.workloads", "syncline.cli.bench")
MAX_REQUEST_BYTES = 1 << 20


@dataclass
class Request:
    """A request to start a process."""

    arguments: list[str]
    environ: dict[str, str]
    folder: str
    files: list[int]
    """The descriptor numbers of its open files."""

    def run(self, received: list[int], base: list[str]) -> None:
        """Run the request in the child."""
        high = [os.dup2(file, 1000 + number) for number, file in enumerate(received)]
        for file in received:
            os.close(file)
        for file, number in zip(high, self.files, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.setsid()
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        first, *rest = self.arguments
        paths = [each for each in self.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        sys.path[:] = ["", *paths, *base]
        if self.arguments[:2] == ["-m", "syncline"]:
            give_prefork()
        namespace = sys.modules["__main__"].__dict__
        namespace.clear()
        namespace.update(__name__="__main__", __builtins__=builtins, __doc__=None, __spec__=None)
        if first == "-m":
            sys.path[0] = self.folder
            sys.argv[:] = rest
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
            return
        text, name = (rest[0], "<string>") if first == "-c" else (Path(first).read_text(), first)
        sys.argv[:] = ["-c", *rest[1:]] if first == "-c" else self.arguments
        if first != "-c":
            sys.path[0] = str(Path(first).resolve().parent)
            namespace["__file__"] = first
        exec(compile(text, name, "exec", dont_inherit=True), namespace)  # noqa: S102


class Server:
    """Forks a process for each connection and sends back its exit code. If the connection closes, kills the process."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ)
        self._children: dict[int, tuple[socket.socket, int]] = {}
        """By process id: the connection of its client, and its pidfd, which is readable after its end."""

    def serve(self) -> tuple[Request, list[int]] | None:
        """Serve requests. Returns None at the end of stdin; in a child, its request and its open files."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    self._end()
                    return None
                if key.fileobj in self._selector.get_map():  # an event before this one may have unregistered it
                    child: tuple[Request, list[int]] | None = key.data()
                    if child is not None:
                        return child

    def _accept(self) -> tuple[Request, list[int]] | None:
        connection, _ = self._listener.accept()
        message, files, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 8)
        if not message:
            connection.close()
            return None
        child = os.fork()
        if child == 0:
            self._forget()
            connection.close()
            return Request(**json.loads(message)), files
        for file in files:
            os.close(file)
        ended = os.pidfd_open(child)
        self._children[child] = (connection, ended)
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._tell(child))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._kill(child))
        with contextlib.suppress(OSError):
            connection.send(str(child).encode())
        return None

    def _tell(self, child: int) -> None:
        connection, ended = self._children.pop(child)
        _, status = os.waitpid(child, 0)
        for each in (connection, ended):
            with contextlib.suppress(KeyError):
                self._selector.unregister(each)
        with contextlib.suppress(OSError):
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        connection.close()
        os.close(ended)

    def _kill(self, child: int) -> None:
        connection, _ = self._children[child]
        self._selector.unregister(connection)
        os.kill(child, signal.SIGKILL)

    def _forget(self) -> None:
        """In a child: close all descriptors of the server."""
        self._selector.close()
        self._listener.close()
        for connection, ended in self._children.values():
            connection.close()
            os.close(ended)

    def _end(self) -> None:
        for child in self._children:
            os.kill(child, signal.SIGKILL)


def main() -> None:
    path = sys.argv[1]
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base = [each for each in sys.path if each and each not in own]
    for name in (*PRELOADED, *MORE):
        with contextlib.suppress(ImportError):  # a package that is not installed
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    server = Server(path)
    print("listening", flush=True)
    found: Any = server.serve()
    if found is None:
        shutil.rmtree(Path(path).parent, ignore_errors=True)
        return
    request, files = found
    del server, found
    request.run(files, base)
