"""The cluster of a network that was measured, or that the simulator has, for the times of a measured profile."""

from __future__ import annotations

from syncline.planner.cluster import Cluster, NetworkLevel
from syncline.planner.devices import Device
from syncline.transports import Network

__all__ = ["UNLIMITED", "describe_network", "measured_device"]

UNLIMITED = 1e30
"""No limit, of bytes or of bytes per second: computing takes no time on the simulator."""


def describe_network(network: Network, ranks: int, hosts: int, device: Device, *, step_noise: float) -> Cluster:
    """The cluster of a measured or simulated network.

    Latency counts the work of a message; bandwidth counts the combination of what is received, as in a ring:
    2β' = 2β + γ.

    >>> network = Network(latency=1e-5, bandwidth=1e9)
    >>> round(describe_network(network, 4, 1, measured_device(1e10), step_noise=0.0).group(4, stride=1).bandwidth)
    1000000000
    """

    def level(name: str, members: int, latency: float, bandwidth: float, ranks_of_member: int) -> NetworkLevel:
        rate = 1 / (1 / bandwidth + network.combine / 2)
        return NetworkLevel(
            name=name, members=members, bandwidth=rate * ranks_of_member, latency_s=latency + network.per_message
        )

    inside, each = network.inside, network.ranks_per_host or 1
    levels: tuple[NetworkLevel, ...]
    if inside is not None and 1 < each < ranks and ranks % each == 0:
        levels = (
            level("host", each, inside.latency, inside.bandwidth, 1),
            level("network", ranks // each, network.latency, network.bandwidth, each),
        )
    elif hosts == 1:
        levels = (level("host", ranks, network.latency, network.bandwidth, 1),)
    else:
        alone = level("host", 1, network.latency, network.bandwidth, 1)
        levels = (alone, level("network", ranks, network.latency, network.bandwidth, 1))
    return Cluster(device=device, levels=levels, step_noise=step_noise, source="measured")


def measured_device(memory_bytes_per_s: float, memory_bytes: float = UNLIMITED) -> Device:
    """The device of a measured profile. Of its rates only the memory's counts, for the optimizer's step."""
    return Device(
        name="cpu",
        half_flops_per_s=1.0,
        single_flops_per_s=1.0,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        memory_efficiency=1.0,
        source="measured",
    )
