"""Describes a cluster: its devices, and the levels of its network from the inside to the outside.

```text
level     members          bandwidth is that of
host      8 devices        one device, to the other devices of its host
network   16 hosts         one host: all its network cards together
racks     4 racks          one rack
```

Ranks are numbered along the devices of a host, then along the hosts. A group of n ranks whose numbers differ by a
stride has g ranks on each host it touches. Its ring crosses a host's cards once in each direction. The host's 8 / g
groups communicate at the same time, so a group has the share g / 8 of **all** cards of its host:

    bandwidth of the group = min( device's inside the host,  host's · g / devices of a host,  … )

A group of 8 ranks on each of two hosts therefore uses all cards of both hosts, not one eighth of them. Groups with
several, but not all ranks of a host cross each other's cards, and reach only `crossing_efficiency` of their share.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from syncline.errors import SpecError
from syncline.planner.devices import DEVICES, Device
from syncline.planner.quantities import format_size, read_duration, read_rate, read_size
from syncline.specs import nearest

__all__ = ["HOSTS", "Cluster", "NetworkLevel", "RankGroup", "read_cluster"]

HOST_LATENCY_S = 15e-6
"""Seconds of a message between devices of a host, if the description does not say."""
NETWORK_LATENCY_S = 20e-6
"""Seconds of a message between hosts, if the description does not say."""
STEP_NOISE = 0.01
"""Standard deviation of a rank's computation, if the description does not say."""
MAX_DEVICES = 1 << 20
LEVEL_NAMES = ("host", "network", "racks", "pools")
FORM = 'write "16 hosts x 8 a100, 100gbit"'


@dataclass(frozen=True, kw_only=True)
class NetworkLevel:
    """One level of the network. `bandwidth` is that of one member, in bytes per second and direction."""

    name: str
    members: int
    bandwidth: float
    latency_s: float
    efficiency: float = 1.0
    """The share of the bandwidth that large messages reach."""
    crossing_efficiency: float = 1.0
    """The share of their bandwidth that the groups of a member reach if each has several, but not all of its ranks."""

    def __post_init__(self) -> None:
        if type(self.members) is not int or self.members < 1:
            raise SpecError(f"{self.name}: members is {self.members!r}; it must be a whole number, at least 1")
        if not (self.bandwidth > 0 and 0 <= self.latency_s < math.inf and 0 < self.efficiency <= 1):
            raise SpecError(
                f"{self.name}: bandwidth must be above 0, latency_s at least 0, and efficiency above 0 and at most 1 "
                f"(bandwidth: {self.bandwidth}, latency_s: {self.latency_s}, efficiency: {self.efficiency})"
            )


@dataclass(frozen=True)
class RankGroup:
    """How a group of ranks lies in the cluster: `bandwidth` and `latency_s` of its slowest level."""

    size: int
    bandwidth: float
    latency_s: float
    slowest: str
    """The name of the level that limits it."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices and the network between them.

    >>> cluster = read_cluster("16 hosts x 8 a100, 100gbit")
    >>> cluster.size, cluster.group(16, stride=1).slowest
    (128, 'network')
    """

    device: Device
    levels: tuple[NetworkLevel, ...]
    storage_bytes_per_s: float | None = None
    """Bytes per second that one host reads from storage and decodes. None: not described."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Ranks that take so many times as long for their computation."""
    step_noise: float = STEP_NOISE
    """Standard deviation of a rank's computation, as a share of it. Synchronous steps wait for the slowest rank."""
    background: float = 1.0
    """The factor by which computation slows down while the device communicates."""
    source: str = ""
    text: str = ""

    def __post_init__(self) -> None:
        if not self.levels:
            raise SpecError("a cluster has at least one level")
        if self.size > MAX_DEVICES:
            raise SpecError(f"the cluster has {self.size} devices; at most {MAX_DEVICES} can be planned")
        wrong = next((rank for rank in self.slow if not 0 <= rank < self.size), None)
        if wrong is not None:
            raise SpecError(f"slow names rank {wrong}, but the ranks are 0 to {self.size - 1}")
        if any(not 1 <= factor < math.inf for factor in self.slow.values()):
            raise SpecError(f"slow: {dict(self.slow)}; a rank takes at least 1 time as long")
        if not (0 <= self.step_noise < 1 and self.background >= 1):
            raise SpecError(
                "step_noise must be at least 0 and below 1, and background at least 1 "
                f"(step_noise: {self.step_noise}, background: {self.background})"
            )

    @cached_property
    def size(self) -> int:
        """The number of devices, which is the number of ranks."""
        return math.prod(level.members for level in self.levels)

    @property
    def devices_per_host(self) -> int:
        """The devices of one host."""
        return self.levels[0].members

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.size // self.devices_per_host

    def group(self, size: int, *, stride: int) -> RankGroup:
        """The group of `size` ranks whose numbers differ by `stride`; all such groups communicate at the same time."""
        known = self._groups.get((size, stride))
        if known is None:
            known = self._groups[size, stride] = self._group(size, stride)
        return known

    @cached_property
    def _groups(self) -> dict[tuple[int, int], RankGroup]:
        return {}

    def _group(self, size: int, stride: int) -> RankGroup:
        found: list[tuple[float, float, str]] = []
        below = 1  # devices in one member of this level
        for level in self.levels:
            unit = below * level.members
            inside_member = max(1, min(size, below // stride)) if stride < below else 1
            inside_unit = max(1, min(size, unit // stride)) if stride < unit else 1
            if inside_unit > inside_member:
                share = inside_member / below  # the member's other groups communicate at the same time
                if 1 < inside_member < below:
                    share *= level.crossing_efficiency
                found.append((level.bandwidth * level.efficiency * share, level.latency_s, level.name))
            below = unit
        if not found:
            return RankGroup(size, math.inf, 0.0, self.levels[0].name)
        bandwidth, _, slowest = min(found)
        return RankGroup(size, bandwidth, max(latency for _, latency, _ in found), slowest)

    def neighbour(self, stride: int, count: int) -> RankGroup:
        """The slowest connection between ranks whose numbers differ by `stride`, as between `count` pipeline stages."""
        below = 1
        for level in self.levels:
            unit = below * level.members
            if stride * count <= unit or level is self.levels[-1]:
                share = 1 / max(1, min(stride, below))  # so many ranks of a member send at the same time
                return RankGroup(2, level.bandwidth * level.efficiency * share, level.latency_s, level.name)
            below = unit
        raise AssertionError("a cluster has levels")

    def describe(self) -> str:
        """One line per level."""
        hosts = f"{self.hosts} host{'s' * (self.hosts > 1)} x {self.devices_per_host} {self.device.name}"
        rates = ", ".join(
            f"{level.name} {format_size(level.bandwidth)}/s" for level in self.levels if level.members > 1
        )
        return f"{hosts} ({self.size} devices{'; ' + rates if rates else ''})"


@dataclass(frozen=True)
class DescribedHost:
    """A host that can be bought or rented: its devices, its network, and where that is written."""

    devices: int
    device: str
    network: str
    source: str


HOSTS = {
    "dgx-a100": DescribedHost(8, "a100", "8 x 200gbit", "NVIDIA DGX A100, datasheet: 8 HDR cards for computation"),
    "dgx-h100": DescribedHost(8, "h100", "8 x 400gbit", "NVIDIA DGX H100, datasheet: 8 NDR cards for computation"),
    "dgx-1": DescribedHost(8, "v100", "4 x 100gbit", "NVIDIA DGX-1 with V100, datasheet: 4 EDR cards"),
    "dgx-2h": DescribedHost(16, "v100-32g", "8 x 100gbit", "NVIDIA DGX-2H, datasheet: 8 EDR cards"),
    "p2.8xlarge": DescribedHost(8, "k80", "10gbit", "Amazon EC2, instance types"),
    "p3.16xlarge": DescribedHost(8, "v100", "25gbit", "Amazon EC2, instance types"),
    "p4d.24xlarge": DescribedHost(8, "a100-40g", "400gbit", "Amazon EC2, instance types"),
}
"""Hosts by name."""

COUNT = re.compile(r"(\d+)\s+(rack|host|node|machine)s?$", re.IGNORECASE)
DEVICE_COUNT = re.compile(r"(\d+)\s+(\S+)$")


def read_cluster(text: str | Path) -> Cluster:
    """Read a description such as "16 hosts x 8 a100, 100gbit" or "16 dgx-a100", or a TOML file.

    After the hosts and devices come, in any order: the rate of a host's network (`100gbit`, `8 x 200gbit` for 8 cards),
    `inside 300GB/s` (a device, to the others of its host), `racks 400gbit` (a rack), `latency 20us`, `storage 2GB/s` (a
    host), `memory 40GB` (a device), `$2.5 an hour` (a device).

    >>> read_cluster("4 hosts x 8 a100, 8 x 200gbit, latency 10us").levels[1].bandwidth
    200000000000.0
    >>> read_cluster("4 hosts x 8 a100")
    Traceback (most recent call last):
    ...
    syncline.errors.SpecError: the cluster '4 hosts x 8 a100' has 4 hosts, but no bandwidth between them: add the rate \
of a host's network, as in "4 hosts x 8 a100, 100gbit"

    Raises:
        SpecError: for anything that is missing, unknown or impossible.
    """
    if isinstance(text, Path) or text.strip().endswith(".toml"):
        return _read_file(Path(text))
    return _ClusterText(text).read()


class _ClusterText:
    """Reads the parts of a description one by one."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.rates: dict[str, float] = {}
        self.latency_s = NETWORK_LATENCY_S
        self.storage: float | None = None
        self.changes: dict[str, Any] = {}

    def read(self) -> Cluster:
        head, *rest = (part.strip() for part in self.text.split(","))
        if not head:
            raise SpecError(f"the cluster is empty: {FORM}")
        racks, hosts, devices, device = self._head(head)
        for part in rest:
            self._part(part)
        if self.changes:
            device = replace(device, **self.changes)
        return _assemble(device, (devices, hosts, racks), self.rates, self.latency_s, self.text, storage=self.storage)

    def _head(self, head: str) -> tuple[int, int, int, Device]:
        counts = {"rack": 1, "host": 0}
        *units, last = re.split(r"\s+x\s+", head)
        named = DEVICE_COUNT.fullmatch(last.strip())
        if named is not None and named[2].lower() in HOSTS:
            host = HOSTS[named[2].lower()]
            self._part(host.network)
            units, last = [*units, f"{named[1]} hosts"], f"{host.devices} {host.device}"
        for unit in units:
            match = COUNT.fullmatch(unit.strip())
            if match is None:
                raise SpecError(f"the cluster {self.text!r}: {unit!r} is not a number of hosts or racks; {FORM}")
            counts["rack" if match[2].lower() == "rack" else "host"] = self._count(match[1], unit)
        match = DEVICE_COUNT.fullmatch(last.strip())
        if match is None or not counts["host"]:
            raise SpecError(f"the cluster {self.text!r} does not say how many hosts and devices it has; {FORM}")
        name = match[2].lower()
        if name not in DEVICES:
            raise SpecError(
                f"the cluster {self.text!r}: unknown device {match[2]!r}; {nearest(name, sorted(DEVICES))}; "
                "describe others in a TOML file"
            )
        return counts["rack"], counts["host"], self._count(match[1], last), DEVICES[name]

    def _count(self, text: str, what: str) -> int:
        if not 1 <= int(text) <= MAX_DEVICES:
            raise SpecError(f"the cluster {self.text!r}: {what!r} is not between 1 and {MAX_DEVICES}")
        return int(text)

    def _part(self, part: str) -> None:
        first, _, value = part.partition(" ")
        try:
            if first == "latency":
                self.latency_s = read_duration(value, "latency")
            elif first == "storage":
                self.storage = read_rate(value, "storage")
            elif first == "memory":
                self.changes["memory_bytes"] = read_size(value, "memory")
            elif first in ("inside", "racks"):
                self._rate("host" if first == "inside" else first, read_rate(value, first))
            elif part.startswith("$"):
                self.changes["price_per_hour"] = _price(part)
            else:
                cards = re.fullmatch(r"(\d+)\s+x\s+(.+)", part)
                rate = read_rate(cards[2] if cards else part, "the rate of a host's network")
                self._rate("network", rate * (int(cards[1]) if cards else 1))
        except SpecError as error:
            raise SpecError(f"the cluster {self.text!r}: {error}") from None

    def _rate(self, level: str, rate: float) -> None:
        if not rate > 0:
            raise SpecError(f"the rate of {level} is {rate}; it must be above 0")
        if level in self.rates:
            raise SpecError(f"the rate of {level} is given twice")
        self.rates[level] = rate


def _price(part: str) -> float:
    match = re.fullmatch(r"\$\s*(\d+(?:\.\d+)?)\s*(?:an hour|/h|per hour)", part)
    if match is None:
        raise SpecError(f"{part!r} is not a price of a device: write '$2.5 an hour'")
    return float(match[1])


def _assemble(
    device: Device,
    counts: tuple[int, int, int],
    rates: Mapping[str, float],
    latency_s: float,
    text: str,
    *,
    storage: float | None,
) -> Cluster:
    """The cluster of a number of devices, hosts and racks."""
    devices, hosts, racks = counts
    inside = rates.get("host", device.link_bytes_per_s)
    if devices > 1 and inside is None:
        raise SpecError(
            f"the cluster {text!r} has {devices} devices a host, but no bandwidth between them: add 'inside 12GB/s'"
        )
    if hosts > 1 and "network" not in rates:
        raise SpecError(
            f"the cluster {text!r} has {hosts} hosts, but no bandwidth between them: add the rate of a host's network, "
            f'as in "{text.strip()}, 100gbit"'
        )
    if racks > 1 and "racks" not in rates:
        raise SpecError(
            f"the cluster {text!r} has {racks} racks, but no bandwidth between them: add 'racks 400gbit', of one rack"
        )
    levels = [
        NetworkLevel(
            name="host",
            members=devices,
            bandwidth=inside or math.inf,
            latency_s=HOST_LATENCY_S,
            efficiency=device.link_efficiency,
        )
    ]
    for name, members in (("network", hosts), ("racks", racks)):
        if members > 1 or name in rates:
            levels.append(
                NetworkLevel(
                    name=name,
                    members=members,
                    bandwidth=rates.get(name, math.inf),
                    latency_s=latency_s,
                    efficiency=device.network_efficiency,
                    crossing_efficiency=device.crossing_efficiency,
                )
            )
    return Cluster(device=device, levels=tuple(levels), storage_bytes_per_s=storage, text=text)


def _read_file(path: Path) -> Cluster:
    """A cluster from a TOML file; see docs/commands/plan.md for its keys."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read ({error.strerror}): name a file that describes a cluster") from None
    except ValueError as error:
        raise SpecError(f"{path} is not TOML: {error}") from None
    try:
        return _ClusterTable(document).read()
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


class _ClusterTable:
    """Reads the tables of a file."""

    KEYS = ("device", "devices", "hosts", "racks", "network", "inside", "between_racks", "latency", "storage", "source")
    FACTORS = ("step_noise", "background")

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def read(self) -> Cluster:
        known = (*self.KEYS, *self.FACTORS, "slow")
        unknown = next((key for key in self.document if key not in known), None)
        if unknown is not None:
            raise SpecError(f"unknown key {unknown!r}; {nearest(unknown, known)}")
        counts = (self._count("devices", 1), self._count("hosts", 1), self._count("racks", 1))
        rates = {
            level: read_rate(self.document[key], key)
            for key, level in (("inside", "host"), ("network", "network"), ("between_racks", "racks"))
            if key in self.document
        }
        latency = self.document.get("latency")
        cluster = _assemble(
            self._device(),
            counts,
            rates,
            NETWORK_LATENCY_S if latency is None else read_duration(latency, "latency"),
            str(self.document.get("source", "the file")),
            storage=read_rate(self.document["storage"], "storage") if "storage" in self.document else None,
        )
        factors = {key: self._number(key) for key in self.FACTORS if key in self.document}
        slow = self.document.get("slow", {})
        if not isinstance(slow, dict):
            raise SpecError(f"slow is {slow!r}; write a table of ranks and factors: [slow] 3 = 1.5")
        try:
            ranks = {int(rank): float(factor) for rank, factor in slow.items()}
        except (TypeError, ValueError):
            raise SpecError(f"slow is {slow!r}; write a table of ranks and factors: [slow] 3 = 1.5") from None
        return replace(cluster, slow=ranks, source=str(self.document.get("source", "")), **factors)  # type: ignore[arg-type]

    def _count(self, key: str, default: int) -> int:
        value = self.document.get(key, default)
        if type(value) is not int or not 1 <= value <= MAX_DEVICES:
            raise SpecError(f"{key} is {value!r}; it must be a whole number between 1 and {MAX_DEVICES}")
        return value

    def _number(self, key: str) -> float:
        value = self.document[key]
        if type(value) not in (int, float):
            raise SpecError(f"{key} is {value!r}; it must be a number")
        return float(value)

    def _device(self) -> Device:
        given = self.document.get("device")
        if isinstance(given, str):
            if given not in DEVICES:
                raise SpecError(f"unknown device {given!r}; {nearest(given, sorted(DEVICES))}, or a table [device]")
            return DEVICES[given]
        if not isinstance(given, dict):
            raise SpecError("the key 'device' is missing: write device = \"a100\", or a table [device]")
        return Device.from_table(given)
