"""Descriptions of clusters: what they mean, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.errors import SpecError
from syncline.planner.cluster import HOSTS, read_cluster
from syncline.planner.devices import DEVICES


def test_a_ring_over_all_ranks_of_a_host_uses_all_its_cards() -> None:
    cluster = read_cluster("4 hosts x 8 a100, 8 x 100gbit")
    level = cluster.levels[1]
    whole = level.bandwidth * level.efficiency
    assert whole == 100e9 * level.efficiency
    assert cluster.group(16, stride=1).bandwidth == whole
    assert cluster.group(4, stride=8).bandwidth == whole / 8
    crossing = cluster.group(8, stride=4).bandwidth  # two ranks on each host
    assert crossing == pytest.approx(whole / 4 * level.crossing_efficiency)
    assert cluster.group(8, stride=1).slowest == "host"
    assert cluster.neighbour(8, 4).bandwidth == whole / 8  # all devices send to the next stage
    assert cluster.neighbour(2, 4).slowest == "host"
    assert cluster.neighbour(2, 8).bandwidth == whole / 2


def test_named_hosts_bring_their_devices_and_cards() -> None:
    cluster = read_cluster("4 dgx-2h, storage 1GB/s")
    assert (cluster.size, cluster.device.name, cluster.levels[1].bandwidth) == (64, "v100-32g", 100e9)
    assert read_cluster("2 racks x 4 dgx-1, racks 100gbit").size == 64
    assert all(read_cluster(f"2 {name}").size == 2 * host.devices for name, host in HOSTS.items())
    with pytest.raises(SpecError, match="given twice"):
        read_cluster("4 dgx-1, 100gbit")


def test_racks_limit_groups_that_cross_them() -> None:
    cluster = read_cluster("2 racks x 4 hosts x 8 a100, 200gbit, racks 200gbit")
    assert cluster.size == 64
    assert cluster.group(32, stride=1).slowest == "network"
    assert cluster.group(64, stride=1).slowest == "network"  # a ring crosses each rack's port once, as a host's
    assert read_cluster("2 racks x 4 hosts x 8 a100, 200gbit, racks 100gbit").group(64, stride=1).slowest == "racks"


def test_small_matrix_products_are_slow() -> None:
    device = DEVICES["a100"]
    shares = [device.efficiency(work) for work in (1e7, 1e9, 1e11, 1e13)]
    assert shares == sorted(shares)
    assert shares[0] < 0.01 * shares[-1]
    assert shares[-1] == pytest.approx(device.matrix_efficiency, rel=0.001)
    # One row only reads the weights: the time does not depend on the rows.
    one, two = (device.matrix_s(2e8 * rows, products=0, weight_bytes=2e8, precision="half") for rows in (1, 2))
    assert one == two == 2e8 / device.memory_bytes_per_s


def test_a_file_describes_devices_levels_and_slow_ranks(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        """
        hosts = 4
        devices = 2
        network = "25gbit"
        latency = "50us"
        storage = "500MB/s"
        step_noise = 0.02
        source = "our machines"
        [device]
        name = "mine"
        half = "20 TFLOP/s"
        single = "10 TFLOP/s"
        memory = "16GiB"
        memory_rate = "700GB/s"
        link = "12GB/s"
        price_per_hour = 0.5
        [slow]
        3 = 1.5
        """
    )
    cluster = read_cluster(str(path))
    assert (cluster.size, cluster.device.memory_bytes, cluster.device.price_per_hour) == (8, 16 * 2**30, 0.5)
    assert cluster.levels[1].bandwidth == 3.125e9
    assert cluster.levels[1].latency_s == pytest.approx(50e-6)
    assert (cluster.slow, cluster.storage_bytes_per_s, cluster.source) == ({3: 1.5}, 500e6, "our machines")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the cluster is empty"),
        ("16 a100", "does not say how many hosts"),
        ("2 hosts x 8 b200", "unknown device 'b200'"),
        ("2 hosts x 8 a100", "no bandwidth between them"),
        ("2 racks x 2 hosts x 8 a100, 100gbit", "2 racks, but no bandwidth"),
        ("0 hosts x 8 a100", "not between 1 and"),
        ("2 hosts x 8 a100, 100gb", "100gbit counts bits"),
        ("2 hosts x 8 a100, 100", "without a unit"),
        ("2 hosts x 8 a100, -5gbit", "must be above 0"),
        ("2 hosts x 8 a100, nangbit", "not a number with a unit"),
        ("2 hosts x 8 a100, 100gbit, 10gbit", "given twice"),
        ("2 hosts x 8 a100, 100gbit, latency 5", "without a unit"),
        ("2 hosts x 8 a100, 100gbit, $x an hour", "not a price"),
        ("2 hosts x 8 a100, 100furlong", "no unit of a rate"),
        ("3 apples x 8 a100, 100gbit", "not a number of hosts"),
        ("nowhere.toml", "cannot be read"),
    ],
)
def test_nonsense_is_refused_with_a_sentence(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_cluster(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('hosts = 2\ndevice = "a100"', "no bandwidth between them"),
        ('hosts = 2\nnetwork = "10gbit"', "'device' is missing"),
        ('hosts = "two"\ndevice = "a100"', "must be a whole number"),
        ('device = "a100"\nbandwith = "1gbit"', "unknown key 'bandwith'"),
        ('device = "a100"\n[slow]\n5 = 2.0', "slow names rank 5"),
        ('device = "a100"\nstep_noise = 3.0', "step_noise must be"),
        ('[device]\nname = "x"', "'half' is missing"),
        ('[device]\nname = "x"\nhalf = "3"\nmemory = "1GB"\nmemory_rate = "1GB/s"', "FLOPs per second with a unit"),
        ("hosts = [", "is not TOML"),
    ],
)
def test_nonsense_in_a_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        read_cluster(path)
