"""Programs on other hosts: over ssh, an agent on each host starts them and reports through the store."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from syncline.errors import WorldError
from syncline.launch.output import OutputForwarder
from syncline.launch.processes import ErrorReport, ProcessExit, ProcessState
from syncline.launch.programs import LOCALHOST, Host, Program
from syncline.launch.store import ProcessEvents

__all__ = [
    "CONNECT_TIMEOUT",
    "NO_STORE",
    "AgentConnection",
    "HostPrograms",
    "RemoteProcesses",
    "address_towards",
    "ssh_command",
]

CONNECT_TIMEOUT = 10
"""Seconds to reach a host, and from there the launcher."""
ALIVE = ("ServerAliveInterval=10", "ServerAliveCountMax=3")
"""A host that is cut off says nothing: without asking, ssh waits for it for good."""
START_TIMEOUT = 90.0
"""Seconds from ssh to an agent at work: reaching the host, importing torch, reaching the store."""
NO_STORE, NO_FOLDER, NO_PYTHON, NO_SYNCLINE = 96, 97, 98, 99
SSH_FAILED = 255
PATIENCE = 10.0
LAST_WORDS = 1 << 16
HANG_UP = 0.5
"""Seconds to wait for an agent that has not begun: without us it finds no store and ends."""


def ssh_command() -> list[str]:
    """How to call ssh: SYNCLINE_SSH where it is set (as in `ssh -F config -l ada`)."""
    return shlex.split(os.environ.get("SYNCLINE_SSH", "")) or ["ssh"]


class AgentConnection:
    """ssh to a host. The agent there ends when our end of its standard input does."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.ready = False
        self._ssh: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile(prefix="syncline-ssh-")  # noqa: SIM115 - closed in close()
        self._since = 0.0
        self._until = 0.0

    def start(self, job: Mapping[str, object]) -> None:
        """Call the host and hand its agent the job."""
        options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_TIMEOUT}", *ALIVE]
        command = [*ssh_command(), *(part for option in options for part in ("-o", option)), self.host.name]
        self._since = time.monotonic()
        try:
            # A session of its own: the terminal's Ctrl-C is ours to pass on.
            self._ssh = subprocess.Popen(
                [*command, _remote_command()], stdin=subprocess.PIPE, stderr=self._errors, start_new_session=True
            )
        except OSError as error:
            raise WorldError(f"cannot run {command[0]!r}: {error.strerror}; install ssh or set SYNCLINE_SSH") from error
        self.tell(job)

    def tell(self, what: Mapping[str, object]) -> None:
        """Send the agent a line."""
        if self._ssh is not None and self._ssh.stdin is not None:
            with contextlib.suppress(OSError):  # ssh has ended, which code() tells
                self._ssh.stdin.write(json.dumps(what).encode() + b"\n")
                self._ssh.stdin.flush()

    def code(self) -> int | None:
        """The exit code of ssh, or None while it runs."""
        return None if self._ssh is None else self._ssh.poll()

    def agent_is_ready(self, output: OutputForwarder) -> None:
        """From now on what comes over ssh's standard error is the workers'."""
        self.ready = True
        output.follow(f"/proc/self/fd/{self._errors.fileno()}", output.err, None)

    def check_start(self, code: int | None, place: str) -> None:
        """Raise if the agent will not come."""
        if code is not None:
            raise WorldError(self._why(code, place))
        if time.monotonic() - self._since > START_TIMEOUT:
            raise WorldError(
                f"host {self.host.name} did not start its agent within {START_TIMEOUT:.0f} s"
                f"{self.last_words()}; try: {self._trial()}"
            )

    def last_words(self) -> str:
        """The last line that ssh wrote to standard error, in brackets."""
        size = os.fstat(self._errors.fileno()).st_size
        # pread: ssh writes at the same file offset
        data = os.pread(self._errors.fileno(), LAST_WORDS, max(0, size - LAST_WORDS))
        lines = data.decode(errors="replace").strip().splitlines()
        return f" ({lines[-1].strip()})" if lines else ""

    def hang_up(self) -> None:
        """Tell the agent that it is over. Does not wait."""
        if self._ssh is not None and self._ssh.stdin is not None and not self._ssh.stdin.closed:
            self.tell({"signal": int(signal.SIGKILL)})
            with contextlib.suppress(OSError):
                self._ssh.stdin.close()
            self._until = time.monotonic() + (PATIENCE if self.ready else HANG_UP)

    def close(self) -> None:
        """Hang up, and see the agent's processes gone."""
        self.hang_up()
        if self._ssh is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ssh.wait(max(0.0, self._until - time.monotonic()))
            self._ssh.kill()
            self._ssh.wait()
        self._errors.close()

    def _trial(self) -> str:
        return shlex.join([*ssh_command(), "-o", "BatchMode=yes", self.host.name, "true"])

    def _why(self, code: int, place: str) -> str:
        name, python = self.host.name, sys.executable
        if code == SSH_FAILED:
            return f"host {name} cannot be reached by ssh{self.last_words()}; this must work: {self._trial()}"
        if code == NO_FOLDER:
            return f"host {name} has no folder {os.getcwd()}: every host needs the working folder at the same path"
        if code == NO_PYTHON:
            return f"host {name} has no Python at {python}: every host needs the same environment at the same path"
        if code == NO_SYNCLINE:
            return f"host {name}: {python} has no syncline there; install the same environment on every host"
        if code == NO_STORE:
            return (
                f"host {name} cannot reach the store at {place} of this machine: open the port, or name an address "
                f"that {name} can reach with --address"
            )
        return f"host {name}: the agent ended with exit code {code}{self.last_words()}"


def _remote_command() -> str:
    python = shlex.quote(sys.executable)
    return (
        f"cd {shlex.quote(os.getcwd())} || exit {NO_FOLDER}; test -x {python} || exit {NO_PYTHON}; "
        f"{python} -c 'import importlib.util as u, sys; sys.exit(u.find_spec(\"syncline\") is None)' || "
        f"exit {NO_SYNCLINE}; exec {python} -m syncline.launch.agent"
    )


def address_towards(hosts: Sequence[Host]) -> str:
    """This machine's address on the way to the first of the hosts that is elsewhere."""
    others = [host.name for host in hosts if host.name != LOCALHOST]
    if not others:
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(_real_name(others[0]), 9, type=socket.SOCK_DGRAM)
        # Workers listen on IPv4 alone, and many clusters give their hosts both.
        places = [place for family, _, _, _, place in found if family == socket.AF_INET]
        if not places:
            raise WorldError(
                f"host {others[0]} has only IPv6 addresses ({found[0][4][0]}), and workers listen on IPv4 alone; "
                "use a name with an IPv4 address, or name an IPv4 address of this machine with --address"
            )
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(places[0])  # UDP: nothing is sent, the kernel only chooses the way
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WorldError(
            f"cannot tell which address of this machine host {others[0]} can reach ({error}); name it with --address"
        ) from error


def _real_name(name: str) -> str:
    """What ssh's configuration makes of a name: people use aliases."""
    try:
        told = subprocess.run(
            [*ssh_command(), "-G", name], capture_output=True, text=True, timeout=PATIENCE, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    names = [line.split(None, 1)[1] for line in told.splitlines() if line.startswith("hostname ")]
    return names[0] if names else name.rpartition("@")[2]


@dataclass(eq=False)
class HostPrograms:
    """What one host runs."""

    number: int
    host: Host
    programs: Sequence[Program]
    left: dict[str, Program] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)


class RemoteProcesses:
    """Programs on other hosts."""

    def __init__(
        self, shares: Sequence[HostPrograms], address: str, port: int, board: ProcessEvents, output: OutputForwarder
    ) -> None:
        self._links = [(share, AgentConnection(share.host)) for share in shares]
        self._address = address
        self._port = port
        self._board = board
        self._output = output
        self._raised: dict[str, ProcessExit] = {}

    def start(self, give_up: Callable[[], bool]) -> None:
        for share, link in self._links:
            share.left = {program.name: program for program in share.programs}
            link.start(
                {
                    "host": share.number,
                    "address": self._address,
                    "port": self._port,
                    "programs": [program.to_json() for program in share.programs],
                }
            )

    def poll(self) -> list[ProcessExit]:
        # ssh first, the store after it: what an agent has to say it says before it ends.
        codes = [link.code() for _, link in self._links]
        found = [ended for ended in self._board.read_ended() if self._strike_off(ended)]
        for (share, link), code in zip(self._links, codes, strict=True):
            if not link.ready and self._board.is_ready(share.number):
                link.agent_is_ready(self._output)
            if not link.ready:
                link.check_start(code, f"{self._address}:{self._port}")
            elif code is not None and share.left:
                summary = f"host {share.host.name} is lost: ssh ended with exit code {code}{link.last_words()}"
                found += [
                    ProcessExit(name=one.name, rank=one.rank, code=code or 1, report=ErrorReport(summary=summary))
                    for one in share.left.values()
                ]
                share.left.clear()
        return found

    def _strike_off(self, ended: ProcessExit) -> bool:
        return any(share.left.pop(ended.name, None) is not None for share, _ in self._links)

    def raised(self) -> list[ProcessExit]:
        self._raised |= {one.name: one for one in self._board.read_raised()}
        return [self._raised[name] for name in self.running() if name in self._raised]

    def running(self) -> list[str]:
        return [name for share, _ in self._links for name in share.left]

    def signal(self, number: int, ranks_only: bool = False) -> None:
        for share, link in self._links:
            if share.left and number not in share.sent:  # a line more each time would fill a pipe that nobody reads
                share.sent.add(number)
                link.tell({"signal": int(number), **({"ranks_only": True} if ranks_only else {})})

    def states(self) -> dict[str, ProcessState]:
        return {}

    def kill(self, name: str) -> None:
        for share, link in self._links:
            if name in share.left:
                link.tell({"signal": int(signal.SIGKILL), "name": name})

    def close(self) -> None:
        for _, link in self._links:
            link.hang_up()  # all of them first, so that they end together
        for _, link in self._links:
            link.close()
