"""The prefork process: imports torch and syncline, then forks a rank for each request of `prefork_client.py`.

    python prefork_process.py CONTROL MODULES PADDING

`CONTROL` is the file descriptor of the socket to the launcher. `MODULES` are the modules to import, separated by
commas. `PADDING` is a long argument: it reserves memory that a rank overwrites with its own command line. The process
starts no thread and never uses a GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a job."""
NOT_DELETED = (type, types.FunctionType, types.ModuleType)
"""Types of objects that are not deleted at the end of a rank."""


def main() -> NoReturn:
    """Import the modules that ranks need, then fork ranks until the launcher ends. Returns only by exit."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # Python puts the folder of this file there
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the parent ignores it, the exit codes of ranks are lost
    handlers = _ignore_signals()
    for name in filter(None, sys.argv[2].split(",")):
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # The code that needs the module reports the ImportError.
        except Exception as error:
            _tell(control, fault=f"import {name} fails: {type(error).__name__}")
            sys.exit(0)
    _serve(control, handlers)


def serve(control: socket.socket) -> NoReturn:
    """Fork ranks from this process, as requested through `control`, until the launcher ends."""
    _serve(control, _ignore_signals())


def _ignore_signals() -> dict[int, Any]:
    """Ignore the signals that end a job: batch systems send them to every process, and the launcher handles them.

    Returns the previous handlers, which every rank sets again.
    """
    return {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}


def _serve(control: socket.socket, handlers: Mapping[int, Any]) -> NoReturn:
    _free_threads()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        _tell(control, fault=f"its imports have started {threads - 1} threads, which a fork would lose")
        sys.exit(0)
    gc.collect()
    gc.freeze()  # without it the garbage collector of each rank would write to, and so copy, all shared pages
    _tell(control)
    _run_rank(_Server(control, handlers).run())


class _Server:
    """The event loop of the prefork process."""

    def __init__(self, control: socket.socket, handlers: Mapping[int, Any]) -> None:
        self._control = control
        self._handlers = handlers
        """The signal handlers of a rank."""
        self._ranks: dict[int, int] = {}
        """The pidfd of every rank that the launcher has not released yet, by process id."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def run(self) -> dict[str, Any]:
        """Serve requests. Returns only in a new rank, with the request that describes it."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._tell_end(key.data)
                    continue
                try:
                    data, fds, _, _ = socket.recv_fds(self._control, 4096, 4)
                except OSError:
                    data, fds = b"", []
                if not data:
                    self._end()
                message = json.loads(data)
                if message["do"] == "release":
                    self._release(int(message["pid"]))
                    continue
                request = self._start(fds)
                if request is not None:
                    return request

    def _start(self, fds: list[int]) -> dict[str, Any] | None:
        """Fork a rank. Returns the request in the rank, None in the prefork process."""
        with open(fds[0], "rb") as file:
            file.seek(0)
            request: dict[str, Any] = {**json.load(file), "parent": os.getpid()}
        try:
            if self._fork(fds[1:]):
                return request
        except OSError as error:
            _tell(self._control, error=error.errno)
        for fd in fds[1:]:
            os.close(fd)
        return None

    def _fork(self, streams: Sequence[int]) -> bool:
        """Fork a rank and report it to the launcher. Returns True in the rank, False in the prefork process."""
        ready_read, ready_write = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(ready_read)
            os.close(ready_write)
            raise
        if pid == 0:
            os.close(ready_read)
            self._become_rank(streams)
            os.close(ready_write)
            return True
        os.close(ready_write)
        os.read(ready_read, 1)  # returns when the rank can receive signals: it has its own process group and handlers
        os.close(ready_read)
        try:
            self._ranks[pid] = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._selector.register(self._ranks[pid], selectors.EVENT_READ, pid)
        _tell(self._control, started=pid)
        return False

    def _become_rank(self, streams: Sequence[int]) -> None:
        """In the new process: set session, signal handlers and streams; close the prefork process's descriptors."""
        os.setsid()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._selector.close()
        self._control.close()
        for fd in self._ranks.values():
            os.close(fd)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        for fd in set(streams) - {0, 1, 2}:
            os.close(fd)

    def _tell_end(self, pid: int) -> None:
        # The process stays a zombie until it is released, so the system does not reuse its process id and group id.
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        killed = found.si_code != os.CLD_EXITED
        self._selector.unregister(self._ranks[pid])
        _tell(self._control, ended=pid, code=-found.si_status if killed else found.si_status)

    def _release(self, pid: int) -> None:
        fd = self._ranks.pop(pid, None)
        if fd is not None:
            os.close(fd)
            os.waitpid(pid, 0)

    def _end(self) -> NoReturn:
        """After the end of the launcher: kill the ranks that still run, and the processes that they have started."""
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(0)


def _run_rank(request: Mapping[str, Any]) -> NoReturn:
    """Run the worker in this process as `python worker.py` would, with the environment variables of the request."""
    from syncline.launch import worker  # here, because only ranks need it

    os.environ.clear()
    os.environ.update(request["variables"])
    os.environ["SYNCLINE_SUPERVISOR"] = str(request["parent"])  # not getppid(): the prefork process may have ended
    os.umask(int(request["umask"]))
    for path in request["namespaces"]:
        _enter(path)
    os.chdir(request["folder"])
    time.tzset()
    tempfile.tempdir = None  # Python then reads TMPDIR again
    importlib.invalidate_caches()
    _seed()
    sys.argv[:] = [str(worker.__file__), *request["target"]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, "")  # the worker replaces it with the script's folder
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    _set_title(sys.orig_argv)
    if _shadowed("" if request["target"][0] == "-m" else os.path.dirname(os.path.realpath(request["target"][0]))):
        os.execv(sys.executable, sys.orig_argv)  # in a new process the script's own modules come first
    before = set(sys.modules)
    code: object = 0
    try:
        worker.main()
    except SystemExit as end:
        code = end.code
    _exit(code, before)


def _seed() -> None:
    """Seed NumPy and torch again, as in a new process. Python itself seeds `random` after each fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _exit(code: object, before: Collection[str]) -> NoReturn:
    """End this process as Python does, but do not free the modules that were imported before the fork (`before`).

    Freeing them would copy most of the memory that the rank shares with the prefork process.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    for finish in (threading._shutdown, atexit._run_exitfuncs, lambda: _end_objects(before)):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            finish()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # no KeyboardInterrupt from here on
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if isinstance(code, int):
        os._exit(code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF)
    os._exit(int(code is not None))


def _end_objects(before: Collection[str]) -> None:
    """Delete the objects of the script and its modules, so that open files are flushed and `__del__` runs.

    Functions, classes and modules stay, because `__del__` methods and daemon threads use them.
    """
    threading.excepthook = lambda _: None  # daemon threads still run, and may fail from here on
    sys.last_value = sys.last_traceback = None
    names = ["__main__", *(name for name in reversed(sys.modules) if name not in before and name != "__main__")]
    for module in [sys.modules.get(name) for name in names]:
        if type(module) is types.ModuleType:  # a script may put other objects into sys.modules
            values = vars(module)
            for name in reversed([*values]):
                if not name.startswith("__") and not isinstance(values[name], NOT_DELETED):
                    del values[name]
    gc.collect()


def _shadowed(folder: str) -> bool:
    """Whether a module in this folder has the name of a module that was imported before the fork from elsewhere."""
    folder = folder or os.getcwd()
    names = {entry.partition(".")[0] for entry in os.listdir(folder) if not entry.startswith("_")}
    found = [sys.modules[name] for name in names if name in sys.modules]
    files = [getattr(module, "__file__", None) for module in found]
    return any(file is None or not file.startswith(os.path.join(folder, "")) for file in files)


def _enter(path: str) -> None:
    """Enter a Linux namespace, given as a path such as /proc/PID/ns/net."""
    fd = os.open(path, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(fd)


def _free_threads() -> None:
    """Fork once, so that libraries such as OpenBLAS end their threads. They start them again when needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about a fork with several threads
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _set_title(command: Sequence[str]) -> None:
    """Overwrite the command line of this process, which `ps` and `pgrep -f` show."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    if 0 < start < end:
        title = b"\0".join(word.encode(errors="surrogateescape") for word in command)[: end - start - 1]
        ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def _tell(control: socket.socket, **message: object) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended; the next read detects it
        control.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
