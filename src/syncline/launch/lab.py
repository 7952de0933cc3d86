"""The lab: a cluster emulated on one machine. Its hosts are network namespaces, joined by links of a set rate."""

from __future__ import annotations

import contextvars
import ctypes
import os
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from syncline.errors import SpecError, WorldError
from syncline.launch.link_rate import (
    FRAME_BYTES,
    FRAME_PAYLOAD_BYTES,
    INITIAL_WINDOW_PACKETS,
    SYSCTLS,
    LinkShape,
    parse_rate,
)

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
    """A network namespace with its own host name. It exists while this object is open or a process runs inside.

    It has no name in the file system, unlike one of `ip netns add`, which outlives its creator. A thread enters a new
    namespace, the process keeps a file descriptor of it, and the thread ends. When the last descriptor is closed and
    the last process inside has ended, kill -9 included, the kernel removes the namespace and its links.
    """

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
    """Run `fn` in a new thread, so that the namespaces of the calling thread do not change. Ctrl-C ends the wait."""
    result: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result.set_result(context.run(fn))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="syncline-lab", daemon=True).start()
    return result.result()


MAX_HOSTS = 64
"""With more hosts, the processors are the limit and not the network."""

INTERFACE = "e0"


@dataclass(frozen=True)
class LabHost:
    """One host of a lab. Put `enter` before a command to run it there; `call` runs a function of this process there."""

    number: int
    name: str
    address: str
    interface: str
    enter: tuple[str, ...]
    namespace: Namespace = field(repr=False, compare=False)

    def call(self, fn: Callable[[], T]) -> T:
        """Call `fn` in a thread inside this host, and return its result. A socket that it creates stays in the host."""
        return self.namespace.call(fn)


class Lab:
    """`hosts` emulated hosts on one switch. Each link carries `rate` in each direction, which is measured before use.

    ```python
    with Lab(4, "100mbit") as lab:
        for host in lab.hosts:
            subprocess.Popen([*host.enter, sys.executable, "train.py"], env=...)
    ```

    The hosts reach only each other. Links have a rate and no additional latency, and all hosts share the processors of
    this machine. Commands enter through file descriptors of this process, so start them while the lab is open. The
    kernel removes everything when the lab is closed, or its process ends, and no process is inside any more.
    """

    hosts: tuple[LabHost, ...]
    measured: float | None
    """Measured bits per second of a link, headers included; None without `check`, and with one host."""

    def __init__(self, hosts: int, rate: str, *, check: bool = True) -> None:
        _require_count(hosts, repr(hosts))
        self.rate = rate
        self.hosts = ()
        self.measured = None
        shape = parse_rate(rate)
        require_tools()
        self.namespaces: list[Namespace] = []
        """The namespaces of the switch and of the hosts."""
        self._shell: NamespaceShell | None = None
        try:
            self.hosts = self._build(hosts, shape)
            if check and hosts > 1:
                self.measured = measure_link(self.hosts[0], self.hosts[1], shape)
        except BaseException:
            self.close()
            raise

    def _build(self, count: int, shape: LinkShape | None) -> tuple[LabHost, ...]:
        switch = self._namespace("switch")
        members = [self._namespace(f"lab{number}") for number in range(count)]
        ports = [f"p{number}" for number in range(count)]
        lines = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
        for port, member in zip(ports, members, strict=True):
            lines.append(f"link add {port} type veth peer name {INTERFACE} netns {member.net}")
            lines += shape.links(port) if shape else []
            # Links have no IPv6 address, because its announcements would use the measured link.
            lines.append(f"link set {port} addrgenmode none master br0 up")
        switch.batch("ip", lines)
        switch.batch("tc", [line for port in ports for line in shape.buckets(port)] if shape else [])
        return tuple(_host(number, member, shape) for number, member in enumerate(members))

    def _namespace(self, name: str) -> Namespace:
        made = Namespace(name)
        self.namespaces.append(made)
        return made

    @property
    def remote_shell(self) -> str:
        """The path of a program that is called like ssh and runs a command on the host of that address."""
        if self._shell is None:
            self._shell = NamespaceShell({host.address: host.enter for host in self.hosts})
        return self._shell.path

    def close(self) -> None:
        """Remove all hosts. A process that still runs inside keeps its host until it ends."""
        if self._shell is not None:
            self._shell.close()
            self._shell = None
        for namespace in self.namespaces:
            namespace.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Lab({len(self.hosts)}, {self.rate!r})"


def parse_lab(text: str) -> tuple[int, str]:
    """Parse "hosts@rate", the notation of the command line.

    >>> parse_lab("4@100mbit")
    (4, '100mbit')
    """
    found = re.fullmatch(r"([0-9]{1,9})@(.+)", text) if isinstance(text, str) else None
    if found is None:
        raise SpecError(f"a lab is written hosts@rate, such as '4@100mbit' or '2@open', not {text!r}")
    hosts, rate = int(found[1]), found[2]
    _require_count(hosts, repr(text))
    parse_rate(rate)
    return hosts, rate


def _require_count(hosts: int, shown: str) -> None:
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= MAX_HOSTS:
        raise SpecError(f"a lab has 1 to {MAX_HOSTS} hosts, written as a whole number, not {shown}")


def _host(number: int, namespace: Namespace, shape: LinkShape | None) -> LabHost:
    address = f"10.77.0.{number + 1}"
    _configure(namespace, {**SYSCTLS, **(shape.sysctls() if shape else {})})
    subnet = f"10.77.0.0/24 dev {INTERFACE} proto kernel scope link src {address}"
    namespace.batch(
        "ip",
        [
            "link set lo up",
            *(shape.links(INTERFACE) if shape else []),
            f"link set {INTERFACE} addrgenmode none up",
            f"addr add {address}/24 dev {INTERFACE}",
            f"route change {subnet} initcwnd {INITIAL_WINDOW_PACKETS} initrwnd {INITIAL_WINDOW_PACKETS}",
        ],
    )
    namespace.batch("tc", shape.buckets(INTERFACE) if shape else [])
    return LabHost(number, namespace.name, address, INTERFACE, namespace.enter, namespace)


def _configure(namespace: Namespace, settings: Mapping[str, str]) -> None:
    """Write settings under /proc/sys/net, which belong to the network namespace of the calling thread."""

    def write() -> None:
        for name, value in settings.items():
            Path("/proc/sys", name).write_text(value)

    try:
        namespace.call(write)
    except OSError as error:
        raise WorldError(
            f"cannot set TCP up in {namespace.name} of the lab: {error}; /proc/sys must be writable (in a container: "
            "--privileged)"
        ) from None


RATE_TOLERANCE = 0.10
"""Maximum relative difference between the measured and the requested rate."""

SAMPLE_S = 0.3
"""Seconds of the first sample of each direction; the second takes twice as long, the others four times."""

MAX_SAMPLES = 7
"""Samples before the lab is refused: another process may use the cores during one of them."""

MIN_SAMPLE_BYTES = 64 * FRAME_PAYLOAD_BYTES
"""Minimum bytes of a sample: with fewer, a single packet would change the result."""

OPEN_SAMPLE_BYTES = 64 << 20
"""Bytes of a sample of a link without a limit."""

READ_BYTES = 1 << 18


def measure_link(here: LabHost, there: LabHost, shape: LinkShape | None) -> float:
    """Measure the bits per second of a link, the worse of both directions; raise if that is not the requested rate."""
    if shape is None:
        return min(throughput(here, there, OPEN_SAMPLE_BYTES, 0), throughput(there, here, OPEN_SAMPLE_BYTES, 0))
    samples: list[float] = []
    for attempt in range(MAX_SAMPLES):
        nbytes = max(MIN_SAMPLE_BYTES, int(shape.rate / 8 * SAMPLE_S * 2 ** min(attempt, 2)))
        # The token buckets at both ends of both links are full at first, so the first bytes pass faster than the rate.
        directions = [throughput(a, b, nbytes, 4 * shape.burst) for a, b in ((here, there), (there, here))]
        samples.append(max(directions, key=lambda bits: abs(bits - shape.rate)))
        if abs(samples[-1] / shape.rate - 1) <= RATE_TOLERANCE:
            return samples[-1]
    best = min(samples, key=lambda bits: abs(bits - shape.rate))
    raise WorldError(
        f"the lab's links should carry {format_rate(shape.rate)}, but {here.name} to {there.name} measured "
        f"{format_rate(best)} at best in {MAX_SAMPLES} samples (at most {RATE_TOLERANCE:.0%} off is allowed): choose "
        "a rate that this machine can carry ('open' has no limit), or try again when it is less busy"
    )


def throughput(sender: LabHost, receiver: LabHost, nbytes: int, skip: int) -> float:
    """Bits per second of a transfer of `nbytes` from one host to another, measured after the first `skip` bytes.

    Headers are included: of each frame of 1514 bytes, 1448 bytes are payload.
    """
    timeout_s = 10.0 + 100 * SAMPLE_S
    listener = receiver.call(lambda: socket.create_server((receiver.address, 0), backlog=1))
    with listener:
        listener.settimeout(timeout_s)
        port = int(listener.getsockname()[1])
        try:
            out = sender.call(lambda: socket.create_connection((receiver.address, port), timeout=timeout_s))
            with out, listener.accept()[0] as into:
                into.settimeout(timeout_s)
                feeder = threading.Thread(
                    target=_send, args=(out, skip + nbytes), name="syncline-lab-send", daemon=True
                )
                feeder.start()
                seconds, counted = _receive(into, skip, nbytes)
                feeder.join(timeout_s)
        except OSError as error:
            raise WorldError(
                f"the lab's echo of {nbytes} bytes from {sender.name} to {receiver.name} failed within "
                f"{timeout_s:.0f} s ({error}): its links carry nothing; look whether this machine filters "
                "bridged traffic (net.bridge.bridge-nf-call-iptables)"
            ) from None
    return counted * 8 / seconds * FRAME_BYTES / FRAME_PAYLOAD_BYTES


def _send(out: socket.socket, left: int) -> None:
    block = bytes(READ_BYTES)
    try:
        while left:
            left -= out.send(memoryview(block)[:left])
    except OSError:
        out.close()  # the receiver reports the closed connection


def _receive(into: socket.socket, skip: int, nbytes: int) -> tuple[float, int]:
    """Receive all bytes; return the seconds after the first `skip` bytes, and the number of bytes in that time."""
    block = memoryview(bytearray(READ_BYTES))
    got, began, since = 0, 0.0, 0
    while got < skip + nbytes:
        count = into.recv_into(block)
        if not count:
            raise ConnectionError(f"the sender ended after {got} of {skip + nbytes} bytes")
        got += count
        if not began and got >= skip:
            began, since = time.perf_counter(), got
    return max(time.perf_counter() - began, 1e-9), got - since


def format_rate(bits: float) -> str:
    """
    >>> format_rate(97.26e6), format_rate(2.5e9)
    ('97.3 Mbit/s', '2.5 Gbit/s')
    """
    for size, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= size:
            return f"{bits / size:.3g} {name}"
    return f"{bits / 1e3:.3g} kbit/s"


class NamespaceShell:
    """A script that is called like ssh, `PATH -x HOST COMMAND…`, and runs the command on that host of the lab.

    mpiexec uses it to reach the hosts. The file is in memory, behind a descriptor of this process, and ends with it.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self._owner = os.getpid()
        self._fd = _memory_file(_script(commands))

    @property
    def path(self) -> str:
        """The path for other processes, valid while this process lives."""
        return f"/proc/{self._owner}/fd/{self._fd}"

    def close(self) -> None:
        """Remove the script."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _script(commands: Mapping[str, Sequence[str]]) -> str:
    """The text of the script. Like ssh, it joins its arguments and lets a shell split them.

    The command ends with its caller. When all processes of a host are killed at once, the kernel may remove the network
    before the other hosts notice.

    >>> print(_script({"10.0.0.2": ["nsenter", "--net=/proc/7/fd/5"]}))
    #!/bin/sh
    while case $1 in -*) true;; *) false;; esac; do shift; done
    host=$1; shift
    case $host in
    10.0.0.2) exec nsenter --net=/proc/7/fd/5 setpriv --pdeathsig KILL sh -c "exec $*";;
    esac
    echo "syncline: the lab has no host $host" >&2
    exit 255
    <BLANKLINE>
    """
    inside = 'setpriv --pdeathsig KILL sh -c "exec $*"'
    cases = [f"{shlex.quote(host)}) exec {shlex.join(enter)} {inside};;" for host, enter in commands.items()]
    lines = (
        "#!/bin/sh",
        "while case $1 in -*) true;; *) false;; esac; do shift; done",
        "host=$1; shift",
        "case $host in",
        *cases,
        "esac",
        'echo "syncline: the lab has no host $host" >&2',
        "exit 255",
        "",
    )
    return "\n".join(lines)


def _memory_file(text: str) -> int:
    """The descriptor of an executable file in memory with this text, which cannot be written any more."""
    writing = -1
    try:
        writing = os.memfd_create("syncline-shell")
        os.write(writing, text.encode())
        os.fchmod(writing, 0o700)
        # The kernel does not execute a file that is open for writing.
        return os.open(f"/proc/self/fd/{writing}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WorldError(
            f"cannot create the lab's remote shell for mpiexec: {error}; /proc/sys/vm/memfd_noexec must be 0"
        ) from None
    finally:
        if writing >= 0:
            os.close(writing)
