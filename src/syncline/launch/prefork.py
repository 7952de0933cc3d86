"""A process that has imported torch and syncline once and forks each rank, so that ranks start at once.

    launcher ──start: variables, arguments, streams──► prefork process ──fork──► rank: worker.main()
             ◄──pid, later its exit code──────────────                           (the ranks are its children)

The launcher starts one for each set of the variables that torch and Python read when they are imported (`READ_EARLY`).
It ends with the launcher, and the kernel ends the ranks with it. `SYNCLINE_PREFORK=0` switches it off; `find_prefork`
says when ranks are started as new processes instead. This is the launcher's side; `prefork_process.py` is the other.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Prefork", "adopt", "begin_prefork", "find_prefork"]

SWITCH = "SYNCLINE_PREFORK"
GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of the drivers of NVIDIA and AMD: a process that has used one cannot be forked."""
PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "numba", "zmq"),  # every optimizer imports _dynamo
    *("syncline", "syncline.training", "syncline.strategies.catalog", "syncline.transports.torch_dist"),
)
READ_EARLY = re.compile(
    "(OMP|GOMP|KMP|MKL|MKLDNN|DNNL|ONEDNN|OPENBLAS|BLIS|ATEN|NUMBA|NPY|NUMPY|CUDA|PYTORCH|KINETO|INDUCTOR|PT2|SYMPY|PYZMQ"
    "|LD|MALLOC|GLIBC|LC)_.*|LANG|LOGLEVEL|CXX|AOT.*|PYTHON.*|TORCH(?!ELASTIC).*"
)
"""Variables that the interpreter, torch and its libraries read when they are loaded."""
READY_TIMEOUT_S = 60.0
"""Seconds that the prefork process may take for its imports on a busy machine. Agents have 90 for their start."""
POLL_S = 0.1
ANSWER_TIMEOUT_S = 30.0
"""Seconds that it may take to fork a rank."""
PROCESS = Path(__file__).with_name("prefork_process.py")
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
        command = [sys.executable, str(PROCESS), str(theirs.fileno()), ",".join(PRELOADED), " " * TITLE_ROOM]
        with theirs:
            try:
                process = subprocess.Popen(
                    command,
                    env=dict(variables),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        return cls(ours, process)

    def wait_until_ready(self, give_up: Callable[[], bool]) -> bool:
        """Whether it can fork ranks, once it has imported what they need. Waits no longer where `give_up` says so."""
        until = time.monotonic() + READY_TIMEOUT_S
        while not self._ready and self.fault is None and not give_up():
            told = self._receive(POLL_S, "" if time.monotonic() < until else "its imports")
            self.fault = self.fault or (told.get("fault") if told else None)
            self._ready = self.fault is None and told is not None
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
        self._control.settimeout(ANSWER_TIMEOUT_S)
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
        self._control.settimeout(ANSWER_TIMEOUT_S)
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
                self._fail(f"it did not finish {purpose} in time")
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
        try:
            _made[key] = Prefork.launch({**rest, **dict(key)})
        except OSError as error:
            return f"the prefork process cannot be started: {error}"
        atexit.register(_made[key].close)
    return None


def adopt(prefork: Prefork, variables: Mapping[str, str]) -> None:
    """Use a prefork process that somebody else has started, with these variables."""
    _made[_read_early(variables)] = prefork


def find_prefork(
    target: Sequence[str], variables: Mapping[str, str], give_up: Callable[[], bool] = lambda: False
) -> tuple[Prefork | None, str]:
    """The prefork process for a rank with this target and these variables, or None and why there is none.

    It is waited for while it imports torch, until `give_up` says so.
    """
    why = begin_prefork(target, variables)
    if why is not None:
        return None, why
    found = _made[_read_early(variables)]
    if not found.wait_until_ready(give_up):
        return None, found.fault or "it is not waited for"
    return found, ""


def _read_early(variables: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that decide whether a prefork process can be shared.

    >>> _read_early({"OMP_NUM_THREADS": "1", "RANK": "0"})
    (('OMP_NUM_THREADS', '1'), ('PYTHONUNBUFFERED', '1'))
    """
    found = {name: value for name, value in variables.items() if READ_EARLY.fullmatch(name)}
    return tuple(sorted((found | {"PYTHONUNBUFFERED": "1"}).items()))


def _unusable(variables: Mapping[str, str]) -> str | None:
    if sys.platform != "linux":
        return f"{sys.platform} has no safe fork"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # an old kernel, or a container that forbids it
        return "the kernel does not offer pidfd_open"
    if variables.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    gpu = next((path for path in GPUS if os.path.exists(path)), None)
    return None if gpu is None else f"there is a GPU ({gpu}), and CUDA does not survive a fork"


def _unusable_for(target: Sequence[str]) -> str | None:
    """Why this target needs a new process: no Python, no torch, or a script that sets what is read early."""
    if target[0] == "--exec":
        return "it is no Python program"
    path = _find_file(target)
    if path is None:
        named = " ".join(target[:2]) if target[0] == "-m" else target[0]
        return None if named.startswith("-m syncline.") else f"{named} is no file"
    text = path.read_text(encoding="utf-8", errors="replace")
    if "torch" not in text and "syncline" not in text:
        return f"{path} does not name torch"
    for name in re.findall(r"\b[A-Z][A-Z0-9_]+\b", text):
        if READ_EARLY.fullmatch(name):
            return f"{path} names {name}, which is read when torch is imported"
    return None


def _find_file(target: Sequence[str]) -> Path | None:
    """The file of a script, or of a module in this folder."""
    if target[0] != "-m":
        return Path(target[0]) if os.path.isfile(target[0]) else None
    place = Path(*target[1].split("."))
    found = (place.with_suffix(".py"), place / "__main__.py")
    return next((path for path in found if path.is_file()), None)
