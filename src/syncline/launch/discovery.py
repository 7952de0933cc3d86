"""Asks a script repeatedly which hosts an elastic job may use, as `horovodrun --host-discovery-script` does.

The script prints a line for each host: `name:slots`, or `name` alone. Hosts that appear get workers, and workers of
hosts that disappear are asked to leave.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable

from syncline.errors import SpecError, WorldError
from syncline.launch.programs import Host

__all__ = ["HostDiscovery", "parse_discovered"]

ASK_EVERY_S = 1.0
"""Seconds between the end of one call of the script and the next call."""
SCRIPT_TIMEOUT_S = 60.0
"""Seconds after which a call of the script is ended. It counts as failed."""
POLL_EVERY_S = 0.05
MAX_SHOWN_CHARS = 200


def parse_discovered(text: str, default_slots: int, local_names: Callable[[str], str] = str) -> tuple[Host, ...]:
    """Parse the lines of a script. `local_names` gives the name of a host that is this machine.

    >>> parse_discovered("a:2\\nb\\n", default_slots=4)
    (Host(name='a', slots=2), Host(name='b', slots=4))
    """
    slots: dict[str, int] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        # A name must not begin with a dash: ssh would read it as an option.
        found = re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.@-]*)(?::(\d+))?", line.strip())
        if found is None:
            raise SpecError(f"{line.strip()[:MAX_SHOWN_CHARS]!r} is not a host; print lines like a:2")
        name = local_names(found[1])
        slots[name] = slots.get(name, 0) + (default_slots if found[2] is None else int(found[2]))
    return tuple(Host(name, count) for name, count in slots.items() if count)


class HostDiscovery:
    """Calls the script in the background. A call that fails changes nothing."""

    def __init__(self, script: str, default_slots: int = 1, local_names: Callable[[str], str] = str) -> None:
        path = os.path.abspath(script)
        if not os.access(path, os.X_OK) or os.path.isdir(path):
            raise SpecError(f"--host-discovery-script {script}: there is no such file, or it cannot be executed")
        self._path = path
        self._default_slots = default_slots
        self._local_names = local_names
        self._call: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile(prefix="syncline-hosts-")  # noqa: SIM115 - closed in close()
        self._since = -math.inf
        self._hosts: tuple[Host, ...] | None = None
        self.problem = ""
        """Why the latest call has failed; empty if it has not."""

    def poll(self) -> tuple[Host, ...] | None:
        """The hosts of the latest call that has succeeded; None before it. Does not wait."""
        now = time.monotonic()
        if self._call is None:
            if now - self._since >= ASK_EVERY_S:
                self._start(now)
        elif self._call.poll() is not None:
            self._read(self._call.returncode)
            self._call, self._since = None, now
        elif now - self._since > SCRIPT_TIMEOUT_S:
            self._end()
            self.problem = f"it has not ended within {SCRIPT_TIMEOUT_S:.0f} s"
            self._since = now
        return self._hosts

    def wait(self, slots: int, timeout_s: float) -> tuple[Host, ...]:
        """Wait until the hosts have this number of slots together."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            hosts = self.poll()
            if hosts is not None and sum(host.slots for host in hosts) >= slots:
                return hosts
            time.sleep(POLL_EVERY_S)
        found = "none" if not self._hosts else ", ".join(f"{host.name}:{host.slots}" for host in self._hosts)
        raise WorldError(
            f"{self._path} has not named {slots} slot{'s' * (slots > 1)} within {timeout_s:.0f} s (hosts: {found})"
            + (f"; its last call failed: {self.problem}" if self.problem else "")
        )

    def close(self) -> None:
        """End a call in progress."""
        if self._call is not None:
            self._end()
        self._output.close()

    def _start(self, now: float) -> None:
        self._since = now
        self._output.seek(0)
        self._output.truncate()
        try:
            self._call = subprocess.Popen(
                [self._path], stdin=subprocess.DEVNULL, stdout=self._output, start_new_session=True
            )
        except OSError as error:
            self.problem = f"it cannot be run: {error.strerror}"

    def _read(self, code: int) -> None:
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        try:
            if code:
                raise SpecError(f"it ended with exit code {code}")
            self._hosts = parse_discovered(text, self._default_slots, self._local_names)
            self.problem = ""
        except SpecError as error:
            self.problem = str(error)

    def _end(self) -> None:
        assert self._call is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._call.pid, signal.SIGKILL)
        self._call.wait()
        self._call = None
