"""How long a device computes: a roofline with an efficiency that falls for small matrix products.

A layer with matrix products of F FLOPs in k products, whose weights and other tensors are S bytes, in n kernels:

    e(w)    = matrix_efficiency · w / (w + half_flops)         w = F / k, the work of one product
    matrix  = max{ F / (peak · e(w)),  weights / memory bandwidth }
    seconds = max{ matrix + S / (memory bandwidth · memory_efficiency),  n · launch_s }

A small batch makes w small, so the product is far below the peak; a batch of one only reads the weights. With few
samples a layer takes as long as the host needs to start its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from syncline.errors import SpecError
from syncline.planner.quantities import read_duration, read_rate, read_size
from syncline.specs import nearest

__all__ = ["DEVICES", "ITEM_BYTES", "Device", "Precision"]

Precision = Literal["half", "single"]
NETWORK_SHARES = ("network_efficiency", "crossing_efficiency")
ITEM_BYTES: dict[str, int] = {"half": 2, "single": 4}


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device. `half_flops_per_s` and `single_flops_per_s` are the peaks of matrix products in the datasheet.

    >>> a100 = DEVICES["a100"]
    >>> large = a100.matrix_s(1e12, products=1, weight_bytes=2e7, precision="half")
    >>> small = a100.matrix_s(1e9, products=1, weight_bytes=2e7, precision="half")
    >>> small > large / 1000
    True
    """

    name: str
    half_flops_per_s: float
    single_flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float | None = None
    """Bytes per second and direction between devices of one host."""
    matrix_efficiency: float = 0.72
    half_flops: float = 2e9
    memory_efficiency: float = 0.8
    launch_s: float = 3e-5
    """Seconds in which the host starts one kernel."""
    link_efficiency: float = 0.8
    network_efficiency: float = 0.8
    crossing_efficiency: float = 0.7
    """See `NetworkLevel.crossing_efficiency`."""
    price_per_hour: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("a device needs a name")
        above_0 = ("half_flops_per_s", "single_flops_per_s", "memory_bytes", "memory_bytes_per_s")
        for key in above_0:
            if not 0 < getattr(self, key) < math.inf:
                raise SpecError(f"device {self.name!r}: {key} is {getattr(self, key)}; it must be above 0 and finite")
        for key in ("matrix_efficiency", "memory_efficiency", "link_efficiency", *NETWORK_SHARES):
            if not 0 < getattr(self, key) <= 1:
                raise SpecError(f"device {self.name!r}: {key} is {getattr(self, key)}; it is a share: above 0, up to 1")
        if not (self.half_flops >= 0 and self.launch_s >= 0):
            raise SpecError(f"device {self.name!r}: half_flops and launch_s must be at least 0")

    def peak(self, precision: Precision) -> float:
        """FLOPs per second of matrix products, in the datasheet."""
        return self.half_flops_per_s if precision == "half" else self.single_flops_per_s

    def efficiency(self, work: float) -> float:
        """The share of the peak that a matrix product of `work` FLOPs reaches."""
        return self.matrix_efficiency * work / (work + self.half_flops) if work else self.matrix_efficiency

    def matrix_s(self, flops: float, *, products: float, weight_bytes: float, precision: Precision) -> float:
        """Seconds of matrix products of `flops` FLOPs together."""
        if not flops:
            return 0.0
        # F / (peak · e(F / k)) = (F + k · half) / (peak · matrix_efficiency)
        compute = (flops + products * self.half_flops) / (self.peak(precision) * self.matrix_efficiency)
        return max(compute, weight_bytes / self.memory_bytes_per_s)

    def stream_s(self, nbytes: float) -> float:
        """Seconds in which kernels without matrix products read and write `nbytes`."""
        return nbytes / (self.memory_bytes_per_s * self.memory_efficiency)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Device:
        """A device from a table of a TOML file.

        >>> texts = dict(half="312 TFLOP/s", single="19.5 TFLOP/s", memory="40GB", memory_rate="1.5TB/s")
        >>> Device.from_table({"name": "mine", **texts}).half_flops_per_s
        312000000000000.0
        """
        known = ("name", "half", "single", "memory", "memory_rate", "link", "launch", "price_per_hour", "source")
        shares = ("matrix_efficiency", "memory_efficiency", "link_efficiency", *NETWORK_SHARES, "half_flops")
        unknown = next((key for key in table if key not in (*known, *shares)), None)
        if unknown is not None:
            raise SpecError(f"device: unknown key {unknown!r}; {nearest(unknown, [*known, *shares])}")
        missing = [key for key in ("name", "half", "memory", "memory_rate") if key not in table]
        if missing:
            raise SpecError(f"device: the key {missing[0]!r} is missing; it needs name, half, memory and memory_rate")
        numbers = {key: _number(table, key) for key in (*shares, "price_per_hour") if key in table}
        half = _flops(table["half"], "half")
        allowed = {each.name for each in fields(cls)}
        assert allowed >= set(numbers)
        return cls(
            name=str(table["name"]),
            half_flops_per_s=half,
            single_flops_per_s=_flops(table["single"], "single") if "single" in table else half,
            memory_bytes=read_size(table["memory"], "device: memory"),
            memory_bytes_per_s=read_rate(table["memory_rate"], "device: memory_rate"),
            link_bytes_per_s=read_rate(table["link"], "device: link") if "link" in table else None,
            **({"launch_s": read_duration(table["launch"], "device: launch")} if "launch" in table else {}),
            source=str(table.get("source", "")),
            **numbers,
        )


def _number(table: Mapping[str, Any], key: str) -> float:
    value = table[key]
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise SpecError(f"device: {key} is {value!r}; it must be a number, at least 0")
    return float(value)


FLOP_UNITS = {"gflop/s": 1e9, "gflops": 1e9, "tflop/s": 1e12, "tflops": 1e12, "pflop/s": 1e15, "pflops": 1e15}


def _flops(text: Any, key: str) -> float:
    number, _, unit = text.strip().partition(" ") if isinstance(text, str) else ("", "", "")
    try:
        amount = float(number)
    except ValueError:
        amount = 0.0
    if not 0 < amount < math.inf or unit.strip().lower() not in FLOP_UNITS:
        raise SpecError(f"device: {key} is {text!r}; write FLOPs per second with a unit: '312 TFLOP/s'")
    return amount * FLOP_UNITS[unit.strip().lower()]


_LIST = (
    # name, TFLOP/s half and single, GB of memory, GB/s of memory, GB/s of links inside a host (one direction)
    ("a100", 312, 19.5, 80, 2039, 300, "NVIDIA A100 80GB SXM: datasheet, quoted by glennklockwood.com/garden"),
    ("a100-40g", 312, 19.5, 40, 1555, 300, "NVIDIA A100 40GB SXM: datasheet, quoted by glennklockwood.com/garden"),
    (
        "h100",
        989,
        67,
        80,
        3350,
        450,
        "NVIDIA H100 SXM, without sparsity: whitepaper, quoted by glennklockwood.com/garden",
    ),
    ("h200", 989, 67, 141, 4800, 450, "NVIDIA H200 SXM, without sparsity: quoted by hmc-tech.com and saulelectric.com"),
    ("v100", 125, 15.7, 16, 900, 150, "NVIDIA V100 SXM2 16GB: whitepaper, quoted by maosong.website and pcper.com"),
    ("v100-32g", 125, 15.7, 32, 900, 150, "NVIDIA V100 32GB: as with 16GB, by gamersnexus.net; DGX-2H's is faster"),
    (
        "p100",
        21.2,
        10.6,
        16,
        732,
        80,
        "NVIDIA P100 SXM2: datasheet, quoted by tech4gamers.com; links: Dell, Ready Solutions for AI 1.0",
    ),
    (
        "k80",
        4.37,
        4.37,
        12,
        240,
        10,
        "one of two devices of an NVIDIA K80 at 875 MHz: anandtech.com; links assumed (PCIe)",
    ),
)
DEVICES: dict[str, Device] = {
    name: Device(
        name=name,
        half_flops_per_s=half * 1e12,
        single_flops_per_s=single * 1e12,
        memory_bytes=memory * 1e9,
        memory_bytes_per_s=rate * 1e9,
        link_bytes_per_s=link * 1e9,
        source=source,
    )
    for name, half, single, memory, rate, link, source in _LIST
}
"""Devices by name. Their efficiencies are those of the calibration in calibration.py, if it has them."""
