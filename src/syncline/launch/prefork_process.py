"""The prefork process: it has imported torch and syncline, and forks ranks as the launcher asks (`prefork.py`).

    python prefork_process.py CONTROL MODULES ROOM

`CONTROL` is the number of the socket to the launcher, `MODULES` are the modules to import, and `ROOM` is a long
argument in whose place a rank writes its own command line. The process starts no thread and never touches a GPU.
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

__all__ = ["main", "serve"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a job."""
KEPT = (type, types.FunctionType, types.ModuleType)
"""What is not deleted at the end of a rank."""


def main() -> NoReturn:
    """Import what ranks need, and fork them as the launcher asks."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file, which Python puts there
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may ignore it, and then the ranks' exit codes are lost
    handlers = _ignore_signals()
    for name in filter(None, sys.argv[2].split(",")):
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # whoever needs it says that it is missing
        except Exception as error:
            _tell(control, fault=f"import {name} fails: {type(error).__name__}")
            sys.exit(0)
    _serve(control, handlers)


def serve(control: socket.socket) -> NoReturn:
    """Fork ranks of this process as the launcher at the other end asks, until it ends."""
    _serve(control, _ignore_signals())


def _ignore_signals() -> dict[int, Any]:
    """Ignore the signals that end a job, which batch systems send to every process. Returns the handlers of ranks."""
    return {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}


def _serve(control: socket.socket, handlers: Mapping[int, Any]) -> NoReturn:
    _free_threads()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        _tell(control, fault=f"its imports have started {threads - 1} threads, which a fork would lose")
        sys.exit(0)
    gc.collect()
    gc.freeze()  # else the collector of every rank would write to all pages, which are shared until then
    _tell(control)
    _run_rank(_Server(control, handlers).run())


class _Server:
    """The loop of the prefork process."""

    def __init__(self, control: socket.socket, handlers: Mapping[int, Any]) -> None:
        self._control = control
        self._handlers = handlers
        """The signal handlers of a rank."""
        self._ranks: dict[int, int] = {}
        """Descriptors of the ranks' processes that have not been released, by process number."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def run(self) -> dict[str, Any]:
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
                told = json.loads(data)
                if told["do"] == "release":
                    self._release(int(told["pid"]))
                    continue
                request = self._start(fds)
                if request is not None:
                    return request

    def _start(self, fds: list[int]) -> dict[str, Any] | None:
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
        """Fork a rank and tell the launcher; whether this is the rank."""
        begun, begins = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(begun)
            os.close(begins)
            raise
        if pid == 0:
            os.close(begun)
            self._become_rank(streams)
            os.close(begins)
            return True
        os.close(begins)
        os.read(begun, 1)  # ends when the rank can receive signals: it has its own group and handlers
        os.close(begun)
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
        """In the new process: its session, signal handlers and streams, and no descriptor of the prefork process."""
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
        # The process stays a zombie until it is released: until then its number, and its group's, is nobody else's.
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
        """The launcher has ended: end the ranks that still run, with all processes that they have started."""
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(0)


def _run_rank(request: Mapping[str, Any]) -> NoReturn:
    """Run the worker in this process, as if it had been started by `python worker.py` with the request's variables."""
    from syncline.launch import worker  # not before: the prefork process itself does not need it

    os.environ.clear()
    os.environ.update(request["variables"])
    os.environ["SYNCLINE_SUPERVISOR"] = str(request["parent"])  # getppid() is another one if it has ended already
    os.umask(int(request["umask"]))
    for path in request["namespaces"]:
        _enter(path)
    os.chdir(request["folder"])
    time.tzset()
    tempfile.tempdir = None  # the folder is looked up again
    importlib.invalidate_caches()
    _seed()
    sys.argv[:] = [str(worker.__file__), *request["target"]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, "")  # the worker replaces it by the script's folder
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    _set_title(sys.orig_argv)
    if _shadowed("" if request["target"][0] == "-m" else os.path.dirname(os.path.realpath(request["target"][0]))):
        os.execv(sys.executable, sys.orig_argv)  # as a new process, where the script's own modules come first
    before = set(sys.modules)
    code: object = 0
    try:
        worker.main()
    except SystemExit as end:
        code = end.code
    _exit(code, before)


def _seed() -> None:
    """Give this process random numbers of its own, as each new process has. Python does it for its own at each fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _exit(code: object, before: Collection[str]) -> NoReturn:
    """End this process as Python does, but leave the modules alone that were imported before the fork.

    To free them would copy most of the memory that is shared with the prefork process.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    for finish in (threading._shutdown, atexit._run_exitfuncs, lambda: _end_objects(before)):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            finish()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # too late for KeyboardInterrupt
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if isinstance(code, int):
        os._exit(code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF)
    os._exit(int(code is not None))


def _end_objects(before: Collection[str]) -> None:
    """Delete the objects of the script and its modules, so that open files are written and `__del__` runs.

    Functions, classes and modules stay: `__del__` methods and daemon threads use them.
    """
    threading.excepthook = lambda _: None  # of daemon threads, which Python would stop here
    sys.last_value = sys.last_traceback = None
    names = ["__main__", *(name for name in reversed(sys.modules) if name not in before and name != "__main__")]
    for module in [sys.modules.get(name) for name in names]:
        if type(module) is types.ModuleType:  # a script may put something else there
            values = vars(module)
            for name in reversed([*values]):
                if not name.startswith("__") and not isinstance(values[name], KEPT):
                    del values[name]
    gc.collect()


def _shadowed(folder: str) -> bool:
    """Whether a folder has a module of the same name as one that was imported before the script."""
    folder = folder or os.getcwd()
    names = {entry.partition(".")[0] for entry in os.listdir(folder) if not entry.startswith("_")}
    found = [sys.modules[name] for name in names if name in sys.modules]
    files = [getattr(module, "__file__", None) for module in found]
    return any(file is None or not file.startswith(os.path.join(folder, "")) for file in files)


def _enter(path: str) -> None:
    """Enter a namespace of the kernel."""
    fd = os.open(path, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(fd)


def _free_threads() -> None:
    """Let libraries end threads that they end at every fork and start again when needed, as OpenBLAS does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of a fork beside threads, and this is to end them
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _set_title(command: Sequence[str]) -> None:
    """Write over the command line of this process, which `ps` and `pgrep -f` show."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, by proc(5)
    if 0 < start < end:
        title = b"\0".join(word.encode(errors="surrogateescape") for word in command)[: end - start - 1]
        ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def _tell(control: socket.socket, **message: object) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended, which the next read shows
        control.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
