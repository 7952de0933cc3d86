"""A process that has imported torch and syncline once and forks each rank, so that ranks start at once.

    launcher ──start: variables, arguments, streams──► prefork process ──fork──► rank: worker.main()
             ◄──pid, later its exit code──────────────                           (the ranks are its children)

The launcher starts one for each set of the variables that torch and Python read when they are imported (`READ_EARLY`).
The prefork process starts no thread and never touches a GPU. It ends with the launcher, and the kernel ends the ranks
with it. `SYNCLINE_PREFORK=0` switches it off; `find_prefork` says when ranks are started as new processes instead.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Prefork", "adopt", "begin_prefork", "find_prefork", "serve"]

SWITCH = "SYNCLINE_PREFORK"
GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of the drivers of NVIDIA and AMD: a process that has used one cannot be forked."""
PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "numba", "zmq"),  # every optimizer imports _dynamo
    *("syncline", "syncline.training", "syncline.strategies.catalog", "syncline.transports.torch_dist"),
)
READ_EARLY = re.compile(
    "(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|ATEN|DNNL|ONEDNN|NUMBA|NPY|CUDA|PYTORCH|LD|MALLOC|LC)_.*"
    "|LANG|PYTHON.*|TORCH(?!ELASTIC).*"
)
"""Variables that the interpreter, torch and its libraries read when they are loaded."""
READY_TIMEOUT_S = 120.0
"""Seconds that the prefork process may take for its imports on a busy machine."""
ANSWER_TIMEOUT_S = 30.0
"""Seconds that it may take to fork a rank."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TITLE_ROOM = 4096
"""Bytes of a rank's command line, as `ps` shows it; a longer one is cut."""
logger = logging.getLogger("syncline")


class Prefork:
    """The launcher's side of one prefork process."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._control = control
        self.process = process
        self._ready = False
        self._codes: dict[int, int] = {}
        self.fault: str | None = None
        """Why it cannot be used, or no longer."""

    @classmethod
    def launch(cls, variables: Mapping[str, str]) -> Prefork:
        """Start a prefork process with these variables. Does not wait until it is ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(Path(__file__)), str(theirs.fileno()), ",".join(PRELOADED), " " * TITLE_ROOM]
        with theirs:
            process = subprocess.Popen(
                command,
                env=dict(variables),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        return cls(ours, process)

    def wait_until_ready(self) -> bool:
        """Whether it can fork ranks, once it has imported what they need."""
        if not self._ready and self.fault is None:
            told = self._receive(READY_TIMEOUT_S, "its imports")
            self.fault = self.fault or (told.get("fault") if told else None)
            self._ready = self.fault is None
        return self._ready and self.fault is None

    @property
    def died(self) -> bool:
        """Whether it could be used once and cannot any more. One that never could would fail again."""
        return self._ready and self.fault is not None

    def start(
        self, target: Sequence[str], variables: Mapping[str, str], enter: Sequence[str], streams: Sequence[int]
    ) -> int | None:
        """The process number of a new rank, or None where the prefork process has failed.

        `target` is what the worker is given, `enter` the `nsenter` command of its network or nothing, `streams` its
        standard input, output and error.
        """
        umask = os.umask(0)
        os.umask(umask)
        request = {
            "target": list(target),
            "variables": dict(variables),
            "namespaces": [option.partition("=")[2] for option in enter if option.startswith("--")],
            "folder": os.getcwd(),
            "umask": umask,
        }
        with open(os.memfd_create("request"), "w+b") as file:
            file.write(json.dumps(request).encode())
            file.flush()
            try:
                socket.send_fds(self._control, [b'{"do": "start"}'], [file.fileno(), *streams])
            except OSError as error:
                self._fail(error.strerror or str(error))
        while self.fault is None:
            told = self._receive(ANSWER_TIMEOUT_S, "a fork")
            if told is not None and "started" in told:
                return int(told["started"])
            if told is not None and "error" in told:
                raise OSError(int(told["error"]), os.strerror(int(told["error"])))
        return None

    def code(self, pid: int) -> int | None:
        """The exit code of a rank that has ended, negative for a signal; None while it runs."""
        while self.fault is None and self._receive(0.0, "") is not None:
            pass
        return self._codes.get(pid, None if self.fault is None else -signal.SIGKILL)

    def release(self, pid: int) -> None:
        """Let the system use the process number of a rank that has ended again."""
        self._codes.pop(pid, None)
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"do": "release", "pid": pid}).encode())

    def close(self) -> None:
        """End it, with all ranks that still run."""
        self._control.close()
        if self.process is None:
            return
        if not self._ready:
            self.process.kill()
        try:
            self.process.wait(ANSWER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _receive(self, timeout_s: float, purpose: str) -> dict[str, Any] | None:
        """The next message; None after `timeout_s`, which is a fault where something was waited for (`purpose`)."""
        self._control.settimeout(timeout_s)
        try:
            data = self._control.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            if purpose:
                self._fail(f"it did not finish {purpose} within {timeout_s:.0f} s")
            return None
        except OSError as error:
            self._fail(error.strerror or str(error))
            return None
        if not data:
            self._fail("it has ended")
            return None
        told: dict[str, Any] = json.loads(data)
        if "ended" in told:
            self._codes[int(told["ended"])] = int(told["code"])
        return told

    def _fail(self, why: str) -> None:
        self.fault = f"the prefork process failed: {why}"
        if self._ready:
            logger.warning("%s; the ranks that it has started end with it", self.fault)
        if self.process is not None:
            self.process.kill()


_made: dict[tuple[tuple[str, str], ...], Prefork] = {}
"""The prefork processes of this launcher, by the variables that are read early."""


def begin_prefork(target: Sequence[str], variables: Mapping[str, str]) -> str | None:
    """Start a prefork process for this target and these variables, or say why it cannot be. Does not wait for it."""
    why = _unusable(variables) or _unusable_for(target)
    if why is not None:
        return why
    key = _read_early(variables)
    if key in _made and _made[key].died:
        _made.pop(key).close()
    if key not in _made:
        for other in _made:
            changed = sorted({name for name, _ in set(key) ^ set(other)})
            logger.info("another prefork process is started: %s differs", ", ".join(changed))
        rest = {name: value for name, value in os.environ.items() if not READ_EARLY.fullmatch(name)}
        _made[key] = Prefork.launch({**rest, **dict(key)})
        atexit.register(_made[key].close)
    return None


def adopt(prefork: Prefork, variables: Mapping[str, str]) -> None:
    """Use a prefork process that somebody else has started, with these variables."""
    _made[_read_early(variables)] = prefork


def find_prefork(target: Sequence[str], variables: Mapping[str, str]) -> tuple[Prefork | None, str]:
    """The prefork process for a rank with this target and these variables, or None and why there is none."""
    why = begin_prefork(target, variables)
    if why is not None:
        return None, why
    found = _made[_read_early(variables)]
    if not found.wait_until_ready():
        return None, found.fault or ""
    return found, ""


def _read_early(variables: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that decide whether a prefork process can be shared.

    >>> _read_early({"OMP_NUM_THREADS": "1", "RANK": "0"})
    (('OMP_NUM_THREADS', '1'), ('PYTHONUNBUFFERED', '1'))
    """
    found = {name: value for name, value in variables.items() if READ_EARLY.fullmatch(name)}
    return tuple(sorted((found | {"PYTHONUNBUFFERED": "1"}).items()))


def _unusable(variables: Mapping[str, str]) -> str | None:
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return f"{sys.platform} has no safe fork"
    if variables.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    gpu = next((path for path in GPUS if os.path.exists(path)), None)
    return None if gpu is None else f"there is a GPU ({gpu}), and CUDA does not survive a fork"


def _unusable_for(target: Sequence[str]) -> str | None:
    """Why this target needs a process of its own: another command, or a script that sets what is read early."""
    if target[0] == "--exec":
        return "it is no Python program"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for name in re.findall(r"""["']([A-Z][A-Z0-9_]+)["']""", Path(target[0]).read_text()):
            if READ_EARLY.fullmatch(name):
                return f"{target[0]} names {name}, which is read when torch is imported"
    return None


def main() -> NoReturn:
    """Import what ranks need, and fork them as the launcher asks."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file, which Python puts there
    control = socket.socket(fileno=int(sys.argv[1]))
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
    request = _Server(control).run()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _run_rank(request)


class _Server:
    """The loop of the prefork process."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
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
            request: dict[str, Any] = json.load(file)
        begun, begins = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            _tell(self._control, error=error.errno)
            pid = -1
        if pid == 0:
            os.close(begun)
            self._become_rank(fds[1:])
            os.close(begins)
            return request
        for fd in (*fds[1:], begins):
            os.close(fd)
        os.read(begun, 1)  # ends when the rank has its own process group, so that the launcher can send it signals
        os.close(begun)
        if pid > 0:
            self._ranks[pid] = os.pidfd_open(pid)
            self._selector.register(self._ranks[pid], selectors.EVENT_READ, pid)
            _tell(self._control, started=pid)
        return None

    def _become_rank(self, streams: Sequence[int]) -> None:
        """In the new process: its session, its streams, and no descriptor of the prefork process."""
        os.setsid()
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
    os.environ["SYNCLINE_SUPERVISOR"] = str(os.getppid())
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
    _set_title([sys.executable, *sys.argv])
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
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            finish()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # too late for KeyboardInterrupt
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading.excepthook = lambda _: None  # of daemon threads, which Python would stop here
    sys.last_value = sys.last_traceback = None
    for name in [name for name in sys.modules if name == "__main__" or name not in before]:
        vars(sys.modules[name]).clear()  # ends objects of the script: its open files are written
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


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
