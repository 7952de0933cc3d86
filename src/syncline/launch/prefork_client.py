"""The launcher's side of the prefork process, which imports torch and syncline once and forks every rank.

    launcher ──start: variables, arguments, streams──► prefork process ──fork──► rank: worker.main()
             ◄──pid, later its exit code──────────────                           (the ranks are its children)

Torch and Python read some environment variables when they are imported (`READ_EARLY`). Ranks with the same values of
these variables share one prefork process. It ends with the launcher, and its ranks end with it. `SYNCLINE_PREFORK=0`
switches it off. `find_prefork` returns the reason when a rank must be started as a new process instead. The prefork
process itself runs `prefork_process.py`.
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

PREFORK_VARIABLE = "SYNCLINE_PREFORK"
GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of the NVIDIA and AMD drivers. Where one exists, ranks are not forked."""
PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "numba", "zmq"),  # every optimizer imports _dynamo
    *("syncline", "syncline.training", "syncline.strategies", "syncline.transports.torch_dist"),
)
READ_EARLY = re.compile(
    "(OMP|GOMP|KMP|MKL|MKLDNN|DNNL|ONEDNN|OPENBLAS|BLIS|ATEN|NUMBA|NPY|NUMPY|CUDA|PYTORCH|KINETO|INDUCTOR|PT2|SYMPY|PYZMQ"
    "|LD|MALLOC|GLIBC|LC)_.*|LANG|LOGLEVEL|CXX|AOT.*|PYTHON.*|TORCH(?!ELASTIC).*"
)
"""Environment variables that Python, torch and its libraries read when they are loaded."""
READY_TIMEOUT_S = 60.0
"""Timeout of the imports of the prefork process. It is shorter than the 90 s that an agent has to start."""
POLL_S = 0.1
"""Seconds between two calls of `give_up` during these imports."""
ANSWER_TIMEOUT_S = 30.0
"""Timeout of the answer to one request, for example to fork a rank."""
PROCESS = Path(__file__).with_name("prefork_process.py")
MAX_TITLE_BYTES = 4096
"""Maximum length of a rank's command line in `ps`; a longer one is cut."""
logger = logging.getLogger("syncline")


class Prefork:
    """The launcher's side of one prefork process."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._control = control
        self.process = process
        self._ready = False
        self._codes: dict[int, int] = {}
        self.fault: str | None = None
        """The reason why it cannot be used; None if it can."""

    @classmethod
    def launch(cls, variables: Mapping[str, str]) -> Prefork:
        """Start a prefork process with these environment variables, without waiting until it is ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(PROCESS), str(theirs.fileno()), ",".join(PRELOADED), " " * MAX_TITLE_BYTES]
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
        """Wait for its imports; return whether it can fork ranks. Stops waiting when `give_up()` is true."""
        until = time.monotonic() + READY_TIMEOUT_S
        while not self._ready and self.fault is None and not give_up():
            message = self._receive(POLL_S, "" if time.monotonic() < until else "its imports")
            self.fault = self.fault or (message.get("fault") if message else None)
            self._ready = self.fault is None and message is not None
        return self._ready and self.fault is None

    @property
    def died(self) -> bool:
        """Whether it failed after it was ready. Only then a new one is worth a try: failed imports would fail again."""
        return self._ready and self.fault is not None

    def start(
        self, target: Sequence[str], variables: Mapping[str, str], enter: Sequence[str], streams: Sequence[int]
    ) -> int | None:
        """Fork a rank; return its process id, or None if the prefork process has failed.

        `target` holds the arguments of `worker.py`. `enter` is the `nsenter` command of the rank's network namespace,
        or empty. `streams` are the descriptors of its standard input, output and error.
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
            message = self._receive(ANSWER_TIMEOUT_S, "a fork")
            if message is not None and "started" in message:
                return int(message["started"])
            if message is not None and "error" in message:
                raise OSError(int(message["error"]), os.strerror(int(message["error"])))
        return None

    def code(self, pid: int) -> int | None:
        """The exit code of a rank that has ended, negative for a signal; None while it runs."""
        while self.fault is None and self._receive(0.0, "") is not None:
            pass
        return self._codes.get(pid, None if self.fault is None else -signal.SIGKILL)

    def release(self, pid: int) -> None:
        """Reap a rank that has ended, so that the system can reuse its process id."""
        self._codes.pop(pid, None)
        self._control.settimeout(ANSWER_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"do": "release", "pid": pid}).encode())

    def close(self) -> None:
        """End the prefork process and all ranks that still run."""
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
        """The next message, or None after `timeout_s`. With a `purpose`, a timeout is a fault and names the purpose."""
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
        message: dict[str, Any] = json.loads(data)
        if "ended" in message:
            self._codes[int(message["ended"])] = int(message["code"])
        return message

    def _fail(self, why: str) -> None:
        self.fault = f"the prefork process failed: {why}"
        if self._ready:
            logger.warning("%s; the ranks that it has started end with it", self.fault)
        if self.process is not None:
            self.process.kill()


running_preforks: dict[tuple[tuple[str, str], ...], Prefork] = {}
"""The prefork processes of this launcher, by the values of the variables in `READ_EARLY`."""


def start_prefork(target: Sequence[str], variables: Mapping[str, str]) -> str | None:
    """Start a prefork process for this target and these variables, without waiting for it.

    Returns None, or the reason why such a rank cannot be forked. An existing prefork process is used again.
    """
    why = _unusable(variables) or _unusable_for(target)
    if why is not None:
        return why
    key = _read_early(variables)
    if key in running_preforks and running_preforks[key].died:
        running_preforks.pop(key).close()
    if key not in running_preforks:
        for other in running_preforks:
            changed = sorted({name for name, _ in set(key) ^ set(other)})
            logger.info("starting another prefork process: %s differs", ", ".join(changed))
        rest = {name: value for name, value in os.environ.items() if not READ_EARLY.fullmatch(name)}
        try:
            running_preforks[key] = Prefork.launch({**rest, **dict(key)})
        except OSError as error:
            return f"the prefork process cannot be started: {error}"
        atexit.register(running_preforks[key].close)
    return None


def adopt(prefork: Prefork, variables: Mapping[str, str]) -> None:
    """Use a prefork process that the caller has started with these variables."""
    running_preforks[_read_early(variables)] = prefork


def find_prefork(
    target: Sequence[str], variables: Mapping[str, str], give_up: Callable[[], bool] = lambda: False
) -> tuple[Prefork | None, str]:
    """The prefork process for a rank with this target and these variables, or None and the reason.

    Waits until it has imported torch, or until `give_up()` is true.
    """
    why = start_prefork(target, variables)
    if why is not None:
        return None, why
    found = running_preforks[_read_early(variables)]
    if not found.wait_until_ready(give_up):
        return None, found.fault or "the launcher stopped waiting for the prefork process"
    return found, ""


def _read_early(variables: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that all ranks of one prefork process have in common.

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
    if variables.get(PREFORK_VARIABLE) == "0":
        return f"{PREFORK_VARIABLE}=0"
    gpu = next((path for path in GPUS if os.path.exists(path)), None)
    return None if gpu is None else f"there is a GPU ({gpu}), and CUDA cannot be used after a fork"


def _unusable_for(target: Sequence[str]) -> str | None:
    """The reason why this target cannot be forked: no Python, no torch, or it names a variable of `READ_EARLY`."""
    if target[0] == "--exec":
        return "it is not a Python program"
    path = _find_file(target)
    if path is None:
        named = " ".join(target[:2]) if target[0] == "-m" else target[0]
        return None if named.startswith("-m syncline.") else f"{named} is not a file"
    text = path.read_text(encoding="utf-8", errors="replace")
    if "torch" not in text and "syncline" not in text:
        return f"{path} does not name torch"
    for name in re.findall(r"\b[A-Z][A-Z0-9_]+\b", text):
        if READ_EARLY.fullmatch(name):
            return f"{path} names {name}, which is read when torch is imported"
    return None


def _find_file(target: Sequence[str]) -> Path | None:
    """The file of a script, or of a module in the current folder; None if there is no such file."""
    if target[0] != "-m":
        return Path(target[0]) if os.path.isfile(target[0]) else None
    place = Path(*target[1].split("."))
    found = (place.with_suffix(".py"), place / "__main__.py")
    return next((path for path in found if path.is_file()), None)
