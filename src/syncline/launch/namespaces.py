"""Anonymous network namespaces, which the kernel removes when no process uses them any more.

A named namespace (`ip netns add`) is a mount that outlives the process that created it. These have no name: a thread
enters a new namespace, the process keeps a file descriptor of it, and the thread ends. When the last descriptor is
closed and the last process inside has ended, kill -9 included, the kernel removes the namespace and its links.
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from syncline.errors import WorldError

__all__ = ["Namespace", "require_tools"]

T = TypeVar("T")

CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
COMMAND_TIMEOUT_S = 30.0
"""Timeout of one `ip` or `tc` command on a busy machine."""

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}


def require_tools() -> None:
    """Raise, with the packages to install, if a command that the lab needs is missing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({TOOLS[tool] for tool in missing}))
        raise WorldError(f"the lab needs {', '.join(missing)}, not found in PATH: apt install {packages}")


class Namespace:
    """A network namespace with its own host name. It exists while this object is open or a process runs inside."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._owner = os.getpid()
        self._net, self._uts = _in_thread(lambda: _create(name))

    @property
    def net(self) -> str:
        """The path of the network namespace for other processes, valid while this process lives."""
        return f"/proc/{self._owner}/fd/{self._net}"

    @property
    def enter(self) -> tuple[str, ...]:
        """The command that runs another command inside."""
        return ("nsenter", f"--net={self.net}", f"--uts=/proc/{self._owner}/fd/{self._uts}")

    @property
    def closed(self) -> bool:
        return self._net < 0

    def call(self, fn: Callable[[], T]) -> T:
        """Call `fn` in a thread inside, and return its result. Its sockets stay inside after the end of the thread."""
        # The system may reuse the number of a closed descriptor, so it is never passed to setns.
        if self.closed:
            raise WorldError(f"the lab of host {self.name} is closed: use its hosts inside the with block")
        net, uts = self._net, self._uts

        def inside() -> T:
            call_libc("setns", net, CLONE_NEWNET)
            call_libc("setns", uts, CLONE_NEWUTS)
            return fn()

        return _in_thread(inside)

    def batch(self, tool: str, lines: Sequence[str]) -> None:
        """Run `ip` or `tc` once, inside, with all lines as input."""
        if not lines:
            return
        script = "\n".join(lines) + "\n"
        # A child starts in the namespaces of the thread that forks it, so nsenter is not needed.
        try:
            done = self.call(
                lambda: subprocess.run(
                    [tool, "-batch", "-"],
                    input=script,
                    capture_output=True,
                    text=True,
                    timeout=COMMAND_TIMEOUT_S,
                    check=False,
                )
            )
        except subprocess.TimeoutExpired:
            raise WorldError(f"{tool} did not set up {self.name} of the lab within {COMMAND_TIMEOUT_S:.0f} s") from None
        if done.returncode:
            said = " ".join(done.stderr.split())
            raise WorldError(
                f"{tool} could not set up {self.name} of the lab (exit {done.returncode}): {said}; "
                "the kernel needs veth, bridge and sch_tbf, and this process CAP_NET_ADMIN"
            )

    def close(self) -> None:
        """Close it. The kernel removes it when no process is inside."""
        if self.closed:
            return
        for fd in (self._net, self._uts):
            os.close(fd)
        self._net = self._uts = -1


def _create(name: str) -> tuple[int, int]:
    """Move the calling thread to new namespaces, and return a descriptor of each."""
    try:
        call_libc("unshare", CLONE_NEWNET | CLONE_NEWUTS)
    except PermissionError:
        raise WorldError(
            f"making the lab's host {name} needs CAP_SYS_ADMIN and CAP_NET_ADMIN (user id here: {os.geteuid()}): run "
            "as root, and a container with --privileged"
        ) from None
    except OSError as error:
        raise WorldError(
            f"the kernel does not make a network namespace for the lab's host {name}: {error.strerror}; it needs "
            "CONFIG_NET_NS and CONFIG_UTS_NS, and a large enough /proc/sys/user/max_net_namespaces"
        ) from None
    encoded = name.encode()
    call_libc("sethostname", encoded, len(encoded))
    net = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        return net, os.open("/proc/thread-self/ns/uts", os.O_RDONLY)
    except BaseException:
        os.close(net)
        raise


def call_libc(function: str, *arguments: int | bytes) -> None:
    """Call a function of the C library that Python 3.10 does not have."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_thread(fn: Callable[[], T]) -> T:
    """Run `fn` in a new thread, so that the namespaces of the calling thread do not change."""
    results: list[T] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def body() -> None:
        try:
            results.append(context.run(fn))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="syncline-lab", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
