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
from syncline.launch.process_events import ENDED, RAISED, ProcessEvents
from syncline.launch.processes import ErrorReport, ProcessExit, ProcessState
from syncline.launch.programs import LOCALHOST, Host, Program

CONNECT_TIMEOUT_S = 10
"""Timeout of the connection to a host, and from there to the launcher."""
KEEPALIVE_OPTIONS = ("ServerAliveInterval=10", "ServerAliveCountMax=3")
"""Without these, ssh waits forever for a host that is cut off."""
START_TIMEOUT_S = 90.0
"""Timeout of the start of an agent: the connection, the import of torch, and the connection to the store."""
NO_STORE, NO_FOLDER, NO_PYTHON, NO_SYNCLINE = 96, 97, 98, 99
SSH_FAILED = 255
EXIT_TIMEOUT_S = 10.0
"""Timeout of the end of an agent, and of `ssh -G`."""
EARLY_EXIT_TIMEOUT_S = 0.5
"""The same for an agent that has not started its programs: it ends when it does not find the store."""
LAST_ERROR_BYTES = 1 << 16


def ssh_command() -> list[str]:
    """The command that calls ssh: the variable SYNCLINE_SSH (such as `ssh -F config -l ada`), or `ssh`."""
    return shlex.split(os.environ.get("SYNCLINE_SSH", "")) or ["ssh"]


class AgentConnection:
    """The ssh connection to the agent of one host. The agent ends when its stdin is closed."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.ready = False
        self._ssh: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile(prefix="syncline-ssh-")  # noqa: SIM115 - closed in close()
        self._since = 0.0
        self._until = 0.0

    def start(self, job: Mapping[str, object]) -> None:
        """Connect to the host, and send the job to its agent."""
        options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_TIMEOUT_S}", *KEEPALIVE_OPTIONS]
        command = [*ssh_command(), *(part for option in options for part in ("-o", option)), self.host.name]
        self._since = time.monotonic()
        try:
            # In a session of its own, because the launcher forwards Ctrl-C itself.
            self._ssh = subprocess.Popen(
                [*command, agent_command()], stdin=subprocess.PIPE, stderr=self._errors, start_new_session=True
            )
        except OSError as error:
            raise WorldError(f"cannot run {command[0]!r}: {error.strerror}; install ssh or set SYNCLINE_SSH") from error
        self.send(job)

    def send(self, message: Mapping[str, object]) -> None:
        """Send the agent a line."""
        if self._ssh is not None and self._ssh.stdin is not None:
            with contextlib.suppress(OSError):  # ssh has ended, which code() reports
                self._ssh.stdin.write(json.dumps(message).encode() + b"\n")
                self._ssh.stdin.flush()

    def code(self) -> int | None:
        """The exit code of ssh, or None while it runs."""
        return None if self._ssh is None else self._ssh.poll()

    def forward_errors(self, output: OutputForwarder) -> None:
        """Forward the stderr of ssh from now on: it is the output of the workers."""
        self.ready = True
        output.follow(f"/proc/self/fd/{self._errors.fileno()}", output.err, None)

    def check_start(self, code: int | None, place: str) -> None:
        """Raise if the agent has failed to start."""
        if code is not None:
            raise WorldError(self._explain(code, place))
        if time.monotonic() - self._since > START_TIMEOUT_S:
            raise WorldError(
                f"host {self.host.name} did not start its agent within {START_TIMEOUT_S:.0f} s"
                f"{self.last_error()}; try: {self._test_command()}"
            )

    def last_error(self) -> str:
        """The last line that ssh wrote to stderr, in brackets."""
        size = os.fstat(self._errors.fileno()).st_size
        # pread: ssh writes at the same file offset
        data = os.pread(self._errors.fileno(), LAST_ERROR_BYTES, max(0, size - LAST_ERROR_BYTES))
        lines = data.decode(errors="replace").strip().splitlines()
        return f" ({lines[-1].strip()})" if lines else ""

    @property
    def ending(self) -> bool:
        """Whether the agent was asked to end. Nothing can be sent to it any more."""
        return self._until > 0

    def kill_if_overdue(self) -> None:
        """Kill ssh if it has not ended in time after `request_end`: it may wait for a host that does not answer."""
        if self._ssh is not None and self.ending and time.monotonic() > self._until:
            self._ssh.kill()

    def request_end(self) -> None:
        """End the agent. Does not wait."""
        if self._ssh is not None and self._ssh.stdin is not None and not self._ssh.stdin.closed:
            self.send({"signal": int(signal.SIGKILL)})
            with contextlib.suppress(OSError):
                self._ssh.stdin.close()
            self._until = time.monotonic() + (EXIT_TIMEOUT_S if self.ready else EARLY_EXIT_TIMEOUT_S)

    def close(self) -> None:
        """End the agent, and wait for it."""
        self.request_end()
        if self._ssh is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ssh.wait(max(0.0, self._until - time.monotonic()))
            self._ssh.kill()
            self._ssh.wait()
        self._errors.close()

    def _test_command(self) -> str:
        return shlex.join([*ssh_command(), "-o", "BatchMode=yes", self.host.name, "true"])

    def _explain(self, code: int, place: str) -> str:
        name, python = self.host.name, sys.executable
        if code == SSH_FAILED:
            return f"host {name} cannot be reached by ssh{self.last_error()}; this must work: {self._test_command()}"
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
        return f"host {name}: the agent ended with exit code {code}{self.last_error()}"


def agent_command() -> str:
    """The shell command that starts the agent on a host, with an exit code for each missing requirement."""
    python = shlex.quote(sys.executable)
    return (
        f"cd {shlex.quote(os.getcwd())} || exit {NO_FOLDER}; test -x {python} || exit {NO_PYTHON}; "
        f"{python} -c 'import importlib.util as u, sys; sys.exit(u.find_spec(\"syncline\") is None)' || "
        f"exit {NO_SYNCLINE}; exec {python} -m syncline.launch.agent"
    )


def address_towards(hosts: Sequence[Host]) -> str:
    """The address of this machine that the first remote host can reach."""
    others = [host.name for host in hosts if host.name != LOCALHOST]
    if not others:
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(resolve_alias(others[0]), 9, type=socket.SOCK_DGRAM)
        # Workers listen on IPv4 only, and many hosts have both kinds of addresses.
        places = [place for family, _, _, _, place in found if family == socket.AF_INET]
        if not places:
            raise WorldError(
                f"host {others[0]} has only IPv6 addresses ({found[0][4][0]}), but workers listen on IPv4 only; "
                "use a name with an IPv4 address, or name an IPv4 address of this machine with --address"
            )
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(places[0])  # UDP: nothing is sent, the kernel only chooses the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WorldError(
            f"cannot find the address of this machine that host {others[0]} can reach ({error}); give it with --address"
        ) from error


def outward_address(hosts: Sequence[Host]) -> str:
    """The address of this machine for hosts that may appear later; the loopback address if it has no other."""
    if any(host.name != LOCALHOST for host in hosts):
        return address_towards(hosts)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # UDP: nothing is sent, the kernel only chooses the route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def resolve_alias(name: str) -> str:
    """The host name behind an alias of the ssh configuration."""
    try:
        output = subprocess.run(
            [*ssh_command(), "-G", name], capture_output=True, text=True, timeout=EXIT_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        output = ""
    names = [line.split(None, 1)[1] for line in output.splitlines() if line.startswith("hostname ")]
    return names[0] if names else name.rpartition("@")[2]


@dataclass(eq=False)
class HostPrograms:
    """The programs of one remote host."""

    number: int
    host: Host
    programs: Sequence[Program]
    running: dict[str, Program] = field(default_factory=dict)
    signals: set[int] = field(default_factory=set)


class RemoteProcesses:
    """The processes on other hosts."""

    def __init__(
        self,
        shares: Sequence[HostPrograms],
        address: str,
        port: int,
        events: ProcessEvents,
        output: OutputForwarder,
        *,
        elastic: bool = False,
    ) -> None:
        """With `elastic`, the agents stay when their programs have ended: more may be added, on other hosts too.

        A host that cannot be reached is then a failure of its programs, and not of the run.
        """
        self._elastic = elastic
        self._next_number = max((share.number for share in shares), default=-1) + 1
        self._links = [(share, AgentConnection(share.host)) for share in shares]
        self._address = address
        self._port = port
        self._events = events
        self._output = output
        self._raised: dict[str, ProcessExit] = {}

    def start(self, give_up: Callable[[], bool]) -> None:
        for share, link in self._links:
            self._start_agent(share, link)

    def _start_agent(self, share: HostPrograms, link: AgentConnection) -> None:
        share.running = {program.name: program for program in share.programs}
        link.start(
            {
                "host": share.number,
                "address": self._address,
                "port": self._port,
                "programs": [program.to_json() for program in share.programs],
                "elastic": self._elastic,
            }
        )

    def add(self, program: Program, give_up: Callable[[], bool]) -> bool:
        for share, link in self._links:
            if share.host.name == program.host and link.code() is None and not link.ending:
                share.running[program.name] = program
                link.send({"program": program.to_json()})
                return True
        if not self._elastic or program.host == LOCALHOST:
            return False
        # A new host, or one whose agent has ended: it may have been started again.
        share = HostPrograms(self._next_number, Host(program.host, 1), [program])
        self._next_number += 1
        link = AgentConnection(share.host)
        self._links.append((share, link))
        self._start_agent(share, link)
        return True

    def poll(self) -> list[ProcessExit]:
        # The exit codes first, the store after them: an agent posts its events before it ends.
        codes = [link.code() for _, link in self._links]
        found = [ended for ended in self._events.read_new(ENDED) if self._remove(ended)]
        for (share, link), code in zip(self._links, codes, strict=True):
            if not link.ready and self._events.is_ready(share.number):
                link.forward_errors(self._output)
            if not link.ready:
                try:
                    link.check_start(code, f"{self._address}:{self._port}")
                except WorldError as error:
                    if not self._elastic:
                        raise
                    found += self._fail_all(share, code or 1, str(error))
                    link.request_end()
            elif code is not None and share.running:
                why = f"host {share.host.name} is lost: ssh ended with exit code {code}{link.last_error()}"
                found += self._fail_all(share, code or 1, why)
        if self._elastic:
            self._close_ended()
        return found

    @staticmethod
    def _fail_all(share: HostPrograms, code: int, summary: str) -> list[ProcessExit]:
        """All programs of a host count as failed."""
        programs = list(share.running.values())
        share.running.clear()
        report = ErrorReport(summary=summary)
        return [ProcessExit(name=one.name, rank=one.rank, code=code, report=report) for one in programs]

    def _close_ended(self) -> None:
        """Forget the connections that have ended and have no programs."""
        for share, link in list(self._links):
            link.kill_if_overdue()
            if link.code() is not None and not share.running:
                link.close()
                self._links.remove((share, link))

    def _remove(self, ended: ProcessExit) -> bool:
        return any(share.running.pop(ended.name, None) is not None for share, _ in self._links)

    def raised(self) -> list[ProcessExit]:
        self._raised |= {one.name: one for one in self._events.read_new(RAISED)}
        return [self._raised[name] for name in self.running() if name in self._raised]

    def running(self) -> list[str]:
        return [name for share, _ in self._links for name in share.running]

    def pids(self) -> dict[str, int]:
        return {}

    def signal(self, number: int, ranks_only: bool = False) -> None:
        for share, link in self._links:
            if share.running and number not in share.signals:  # repeated lines would fill a pipe that nobody reads
                share.signals.add(number)
                link.send({"signal": int(number), **({"ranks_only": True} if ranks_only else {})})

    def states(self) -> dict[str, ProcessState]:
        return {}

    def kill(self, name: str) -> None:
        for share, link in self._links:
            if name in share.running:
                link.send({"signal": int(signal.SIGKILL), "name": name})

    def close(self) -> None:
        for _, link in self._links:
            link.request_end()  # all connections first, so that the agents end together
        for _, link in self._links:
            link.close()
