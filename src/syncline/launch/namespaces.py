"""Anonymous network namespaces: hosts that the kernel removes by itself when nobody holds them any more.

A named namespace (`ip netns add`) is a mount that outlives the process that made it. These here have no name: a thread
leaves for a new namespace, the process keeps a file descriptor of it, and the thread ends. When the last descriptor and
the last process inside are gone, kill -9 included, the kernel takes the namespace and its links away.
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
PATIENCE = 30.0
"""Seconds that one `ip` or `tc` may take on a busy machine."""

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}


def require_tools() -> None:
    """Refuse, with what to install, when a command that the lab runs is missing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({TOOLS[tool] for tool in missing}))
        raise WorldError(f"the lab needs {', '.join(missing)}, not found in PATH: apt install {packages}")


class Namespace:
    """A network and a host name of its own, as long as this object (or a process inside) keeps it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._owner = os.getpid()
        self._net, self._uts = _in_thread(lambda: _leave(name))

    @property
    def net(self) -> str:
        """A path at which another process finds the network, while this one lives."""
        return f"/proc/{self._owner}/fd/{self._net}"

    @property
    def enter(self) -> tuple[str, ...]:
        """What to put before a command to run it inside."""
        return ("nsenter", f"--net={self.net}", f"--uts=/proc/{self._owner}/fd/{self._uts}")

    @property
    def closed(self) -> bool:
        return self._net < 0

    def call(self, fn: Callable[[], T]) -> T:
        """What `fn` returns in a thread that has entered; its sockets stay inside after the thread has ended."""
        # A closed number may meanwhile be somebody else's file, so it is never handed to setns.
        if self.closed:
            raise WorldError(f"the lab of host {self.name} is closed: use its hosts inside the with block")
        net, uts = self._net, self._uts

        def inside() -> T:
            _kernel("setns", net, CLONE_NEWNET)
            _kernel("setns", uts, CLONE_NEWUTS)
            return fn()

        return _in_thread(inside)

    def batch(self, tool: str, lines: Sequence[str]) -> None:
        """Give `ip` or `tc` many lines at once, inside: one process however many lines."""
        if not lines:
            return
        script = "\n".join(lines) + "\n"
        # A child starts in the namespaces of the thread that forks it: no nsenter between.
        try:
            done = self.call(
                lambda: subprocess.run(
                    [tool, "-batch", "-"], input=script, capture_output=True, text=True, timeout=PATIENCE, check=False
                )
            )
        except subprocess.TimeoutExpired:
            raise WorldError(f"{tool} did not set up {self.name} of the lab within {PATIENCE:.0f} s") from None
        if done.returncode:
            said = " ".join(done.stderr.split())
            raise WorldError(
                f"{tool} could not set up {self.name} of the lab (exit {done.returncode}): {said}; "
                "the kernel needs veth, bridge and sch_tbf, and this process CAP_NET_ADMIN"
            )

    def close(self) -> None:
        """Let go; the kernel removes it once nobody is inside."""
        if self.closed:
            return
        for fd in (self._net, self._uts):
            os.close(fd)
        self._net = self._uts = -1


def _leave(name: str) -> tuple[int, int]:
    """In a thread about to end: leave for new namespaces, and keep a descriptor of each."""
    try:
        _kernel("unshare", CLONE_NEWNET | CLONE_NEWUTS)
    except PermissionError:
        raise WorldError(
            f"making the lab's host {name} needs CAP_SYS_ADMIN and CAP_NET_ADMIN (user id here: {os.geteuid()}): run "
            "as root, and a container with --privileged"
        ) from None
    except OSError as error:
        raise WorldError(
            f"the kernel does not make a network namespace for the lab's host {name}: {error.strerror}; it needs "
            "CONFIG_NET_NS and CONFIG_UTS_NS, and room in /proc/sys/user/max_net_namespaces"
        ) from None
    encoded = name.encode()
    _kernel("sethostname", encoded, len(encoded))
    net = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        return net, os.open("/proc/thread-self/ns/uts", os.O_RDONLY)
    except BaseException:
        os.close(net)
        raise


def _kernel(function: str, *arguments: int | bytes) -> None:
    """A call of the C library that Python 3.10 does not offer."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_thread(fn: Callable[[], T]) -> T:
    """Run in a thread of its own: what it has entered ends with it, and never changes the caller's namespaces."""
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
