"""An emulated cluster on one machine: hosts with a network and a name of their own, on links with a rate."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from syncline.errors import SpecError, WorldError
from syncline.launch.lab.door import Door
from syncline.launch.lab.echo import check as echo
from syncline.launch.lab.namespaces import Namespace, require_tools
from syncline.launch.lab.shaping import SYSCTLS, WINDOW, Shape, parse_rate

__all__ = ["Lab", "LabHost", "parse_lab"]

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
        self._door: Door | None = None
        try:
            self.hosts = self._build(hosts, shape)
            if check and hosts > 1:
                self.measured = echo(self.hosts[0], self.hosts[1], shape)
        except BaseException:
            self.close()
            raise

    def _build(self, count: int, shape: Shape | None) -> tuple[LabHost, ...]:
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
            self._door = Door({host.address: host.enter for host in self.hosts})
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


def _host(number: int, namespace: Namespace, shape: Shape | None) -> LabHost:
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
