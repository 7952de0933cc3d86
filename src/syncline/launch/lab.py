"""An emulated cluster on one machine: hosts with a network and a name of their own, on links with a rate."""

from __future__ import annotations

import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from syncline.errors import SpecError, WorldError
from syncline.launch.link_rate import FRAME, PAYLOAD, SYSCTLS, WINDOW, LinkShape, parse_rate
from syncline.launch.namespaces import Namespace, require_tools

__all__ = ["Lab", "LabHost", "NamespaceShell", "measure_link", "parse_lab", "throughput"]

T = TypeVar("T")

MOST = 64
"""Hosts: with more, a machine measures itself and not the network."""

INTERFACE = "e0"


@dataclass(frozen=True)
class LabHost:
    """One host of a lab: commands run inside by `enter`, functions of this process by `call`."""

    number: int
    name: str
    address: str
    interface: str
    enter: tuple[str, ...]
    namespace: Namespace = field(repr=False, compare=False)

    def call(self, fn: Callable[[], T]) -> T:
        """What `fn` returns in a thread that is inside this host; a socket made there stays there."""
        return self.namespace.call(fn)


class Lab:
    """`hosts` emulated hosts on one switch; each link carries `rate` each way, checked by an echo before use.

    ```python
    with Lab(4, "100mbit") as lab:
        for host in lab.hosts:
            subprocess.Popen([*host.enter, sys.executable, "train.py"], env=...)
    ```

    The hosts reach each other and nothing else. Links have a rate and no latency of their own, and all hosts share this
    machine's processors. Commands enter by descriptors of this process, so they are started while the lab is open. When
    it is closed, or its process ends in whatever way, and nobody is inside any more, the kernel removes everything.
    """

    hosts: tuple[LabHost, ...]
    measured: float | None
    """Bits a second that the echo saw on a link, headers included; None when it was not asked for, or has no peer."""

    def __init__(self, hosts: int, rate: str, *, check: bool = True) -> None:
        _require_count(hosts, repr(hosts))
        self.rate = rate
        self.hosts = ()
        self.measured = None
        shape = parse_rate(rate)
        require_tools()
        self._namespaces: list[Namespace] = []
        self._door: NamespaceShell | None = None
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
            # No IPv6 address on links: its announcements would share them with what is measured.
            lines.append(f"link set {port} addrgenmode none master br0 up")
        switch.batch("ip", lines)
        switch.batch("tc", [line for port in ports for line in shape.buckets(port)] if shape else [])
        return tuple(_host(number, member, shape) for number, member in enumerate(members))

    def _namespace(self, name: str) -> Namespace:
        made = Namespace(name)
        self._namespaces.append(made)
        return made

    @property
    def door(self) -> str:
        """The path of a program that is called as ssh is and runs a command in the host of that address."""
        if self._door is None:
            self._door = NamespaceShell({host.address: host.enter for host in self.hosts})
        return self._door.path

    def close(self) -> None:
        """Let go of all hosts; processes that still run inside keep theirs until they end."""
        if self._door is not None:
            self._door.close()
            self._door = None
        for namespace in self._namespaces:
            namespace.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Lab({len(self.hosts)}, {self.rate!r})"


def parse_lab(text: str) -> tuple[int, str]:
    """Read "hosts@rate", the notation of the command line.

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
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= MOST:
        raise SpecError(f"a lab has 1 to {MOST} hosts, written as a whole number, not {shown}")


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
            f"route change {subnet} initcwnd {WINDOW} initrwnd {WINDOW}",
        ],
    )
    namespace.batch("tc", shape.buckets(INTERFACE) if shape else [])
    return LabHost(number, namespace.name, address, INTERFACE, namespace.enter, namespace)


def _configure(namespace: Namespace, settings: Mapping[str, str]) -> None:
    """Write settings under /proc/sys/net, which shows each thread its own network's."""

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


TOLERANCE = 0.10
"""HostPrograms of the rate by which the echo may be off."""

SECONDS = 0.3
"""Seconds that the first sample of each way takes; the second takes twice as long, the others four times."""

ATTEMPTS = 7
"""Samples before the lab is refused: another process may hold the cores during one of them."""

FEWEST = 64 * PAYLOAD
"""Bytes in a sample of a slow link: with fewer, one packet more or less would show."""

OPEN_BYTES = 64 << 20
"""Bytes in a sample of a link without a limit."""

CHUNK = 1 << 18


def measure_link(here: LabHost, there: LabHost, shape: LinkShape | None) -> float:
    """Bits a second on the link, the worse of the two ways; refuse when that is not the rate of the shape."""
    if shape is None:
        return min(throughput(here, there, OPEN_BYTES, 0), throughput(there, here, OPEN_BYTES, 0))
    seen: list[float] = []
    for attempt in range(ATTEMPTS):
        nbytes = max(FEWEST, int(shape.rate / 8 * SECONDS * 2 ** min(attempt, 2)))
        # The bucket is full at first, at both ends of both links: what it gives away at once is not the rate.
        ways = [throughput(a, b, nbytes, 4 * shape.burst) for a, b in ((here, there), (there, here))]
        seen.append(max(ways, key=lambda bits: abs(bits - shape.rate)))
        if abs(seen[-1] / shape.rate - 1) <= TOLERANCE:
            return seen[-1]
    best = min(seen, key=lambda bits: abs(bits - shape.rate))
    raise WorldError(
        f"the lab's links should carry {_spoken(shape.rate)}, and an echo between {here.name} and {there.name} saw "
        f"{_spoken(best)} at best in {ATTEMPTS} samples (at most {TOLERANCE:.0%} off is allowed): ask for a rate that "
        "this machine can carry ('open' has no limit), or try again when it has less to do"
    )


def throughput(sender: LabHost, receiver: LabHost, nbytes: int, skip: int) -> float:
    """Bits a second that the link carries while `nbytes` pass from one host to the other, after the first `skip`.

    TCP's payload is compared with what a bucket counts: of each frame of 1514 bytes, 1448 are payload.
    """
    patience = 10.0 + 100 * SECONDS
    listener = receiver.call(lambda: socket.create_server((receiver.address, 0), backlog=1))
    with listener:
        listener.settimeout(patience)
        port = int(listener.getsockname()[1])
        try:
            out = sender.call(lambda: socket.create_connection((receiver.address, port), timeout=patience))
            with out, listener.accept()[0] as into:
                into.settimeout(patience)
                feeder = threading.Thread(target=_feed, args=(out, skip + nbytes), name="syncline-echo", daemon=True)
                feeder.start()
                seconds, counted = _drain(into, skip, nbytes)
                feeder.join(patience)
        except OSError as error:
            raise WorldError(
                f"the lab's echo of {nbytes} bytes from {sender.name} to {receiver.name} failed within "
                f"{patience:.0f} s ({error}): its links carry nothing; look whether this machine filters "
                "bridged traffic (net.bridge.bridge-nf-call-iptables)"
            ) from None
    return counted * 8 / seconds * FRAME / PAYLOAD


def _feed(out: socket.socket, left: int) -> None:
    block = bytes(CHUNK)
    try:
        while left:
            left -= out.send(memoryview(block)[:left])
    except OSError:
        out.close()  # the receiver sees the end and says so


def _drain(into: socket.socket, skip: int, nbytes: int) -> tuple[float, int]:
    """Seconds from the first bytes past `skip` to the last, and how many came between."""
    block = memoryview(bytearray(CHUNK))
    got, began, since = 0, 0.0, 0
    while got < skip + nbytes:
        count = into.recv_into(block)
        if not count:
            raise ConnectionError(f"the sender ended after {got} of {skip + nbytes} bytes")
        got += count
        if not began and got >= skip:
            began, since = time.perf_counter(), got
    return max(time.perf_counter() - began, 1e-9), got - since


def _spoken(bits: float) -> str:
    """
    >>> _spoken(97.26e6), _spoken(2.5e9)
    ('97.3 Mbit/s', '2.5 Gbit/s')
    """
    for size, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= size:
            return f"{bits / size:.3g} {name}"
    return f"{bits / 1e3:.3g} kbit/s"


class NamespaceShell:
    """A script that is called as ssh is, `PATH -x HOST COMMAND…`, and runs the command inside that host.

    It lies in memory, and its path leads to a descriptor of this process: like the hosts, nothing of it outlives us.
    """

    def __init__(self, ways: Mapping[str, Sequence[str]]) -> None:
        self._owner = os.getpid()
        self._fd = _keep(_script(ways))

    @property
    def path(self) -> str:
        """Where other processes find it, while this one lives."""
        return f"/proc/{self._owner}/fd/{self._fd}"

    def close(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _script(ways: Mapping[str, Sequence[str]]) -> str:
    """As ssh does, it joins the words and lets a shell take them apart again.

    The command ends with whoever called: when all of a host's processes are killed at once, the kernel may take its
    network away before the others hear of it.

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
    cases = [f"{shlex.quote(host)}) exec {shlex.join(way)} {inside};;" for host, way in ways.items()]
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


def _keep(text: str) -> int:
    """A descriptor of an executable file in memory that holds this text, and that nobody can write any more."""
    writing = -1
    try:
        writing = os.memfd_create("syncline-door")
        os.write(writing, text.encode())
        os.fchmod(writing, 0o700)
        # The kernel runs no file that somebody may still write to.
        return os.open(f"/proc/self/fd/{writing}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WorldError(
            f"cannot make a way into the lab's hosts for mpiexec: {error}; /proc/sys/vm/memfd_noexec must be 0"
        ) from None
    finally:
        if writing >= 0:
            os.close(writing)
