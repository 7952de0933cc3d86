"""The lab: what its links carry, who reaches whom, and that nothing of it is left behind.

Whether the kernel has removed a host is seen by a witness: one end of a cable whose other end is in that host. A
network that goes takes its end along, and the witness with it.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from syncline.errors import SpecError, WorldError
from syncline.launch import lab as lab_module
from syncline.launch.lab import Lab, LabHost, Namespace, parse_lab, require_tools, throughput
from syncline.launch.link_rate import FRAME_BYTES, FRAME_PAYLOAD_BYTES, LinkShape
from tests.launching import ROOT

pytestmark = pytest.mark.xdist_group("lab")

WAIT_TIMEOUT_S = 60.0


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_TIMEOUT_S:.0f} s"
        time.sleep(0.01)


class Witness:
    """Cables from a network of our own into others: one for each path given."""

    def __init__(self) -> None:
        self.here = Namespace("witness")
        self.laid = 0

    def watch(self, *networks: str) -> None:
        lines = []
        for network in networks:
            lines.append(f"link add w{self.laid} type veth peer name w{self.laid} netns {network}")
            self.laid += 1
        self.here.batch("ip", lines)

    def alive(self) -> int:
        """Networks that still exist."""
        return sum(name.startswith("w") for _, name in self.here.call(socket.if_nameindex))

    def watch_lab(self, lab: Lab) -> int:
        networks = [namespace.net for namespace in lab.namespaces]
        self.watch(*networks)
        assert self.alive() >= len(networks)
        return len(networks)


@pytest.fixture
def witness() -> Iterator[Witness]:
    """Skips the test where no lab can be made."""
    try:
        require_tools()
        made = Witness()
    except WorldError as error:
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.here.close()


needs_lab = pytest.mark.usefixtures("witness")


def serve(host: LabHost) -> socket.socket:
    listener = host.call(lambda: socket.create_server((host.address, 0)))
    listener.settimeout(WAIT_TIMEOUT_S)
    return listener


def connect(host: LabHost, address: tuple[str, int]) -> socket.socket:
    return host.call(lambda: socket.create_connection(address, timeout=WAIT_TIMEOUT_S))


def run_inside(host: LabHost, *command: str) -> str:
    done = subprocess.run(
        [*host.enter, *command], capture_output=True, text=True, timeout=WAIT_TIMEOUT_S, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# What the links carry.


@needs_lab
def test_links_carry_the_rate_each_way() -> None:
    with Lab(3, "100mbit") as lab:
        assert lab.measured is not None
        assert lab.measured == pytest.approx(100e6, rel=0.1)
        # The echo went between the first two; a bucket lets no host have more than the rate.
        for source, target in ((2, 0), (1, 2)):
            seen = throughput(lab.hosts[source], lab.hosts[target], 500_000, 4 * LinkShape(100e6).burst)
            assert seen <= 105e6


@needs_lab
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_links_off_the_rate_are_refused(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    honest = LinkShape.buckets
    monkeypatch.setattr(LinkShape, "buckets", lambda self, device: honest(LinkShape(self.rate * factor), device))
    monkeypatch.setattr("syncline.launch.lab.MAX_SAMPLES", 1)
    with pytest.raises(WorldError, match=r"should carry 20 Mbit/s.* measured [\d.]+ Mbit/s .*at most 10%") as refused:
        Lab(2, "20mbit")
    found = re.search(r"measured ([\d.]+) Mbit/s", str(refused.value))
    assert found is not None
    assert float(found[1]) < 18 if factor < 1 else float(found[1]) > 22


@needs_lab
def test_lab_retries_after_a_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = iter([50e6, 100e6, 99e6, 101e6])
    monkeypatch.setattr("syncline.launch.lab.throughput", lambda *_: next(samples))
    with Lab(2, "100mbit") as lab:
        assert lab.measured in (99e6, 101e6)


@needs_lab
def test_three_senders_into_one_port_lose_nothing() -> None:
    nbytes = 400_000
    with Lab(4, "100mbit", check=False) as lab, serve(lab.hosts[0]) as listener:
        senders = [connect(host, listener.getsockname()) for host in lab.hosts[1:]]
        receivers = [listener.accept()[0] for _ in senders]
        threads = [threading.Thread(target=sender.sendall, args=(bytes(nbytes),)) for sender in senders]
        for thread in threads:
            thread.start()
        for receiver in receivers:
            receiver.settimeout(WAIT_TIMEOUT_S)
            left = nbytes
            while left:
                got = len(receiver.recv(1 << 16))
                assert got, f"{left} of {nbytes} bytes are missing"
                left -= got
        for thread in threads:
            thread.join(WAIT_TIMEOUT_S)
        for end in (*senders, *receivers):
            end.close()
        port = (
            lab.namespaces[0]
            .call(
                lambda: subprocess.run(
                    ["tc", "-s", "qdisc", "show", "dev", "p0"], capture_output=True, text=True, check=True
                )
            )
            .stdout
        )
    found = re.search(r"tbf .*Sent (\d+) bytes .*dropped (\d+),", port, re.DOTALL)
    assert found is not None, port
    assert int(found[1]) > 3 * nbytes
    assert int(found[2]) == 0


@needs_lab
def test_open_links_have_no_bucket() -> None:
    with Lab(2, "open") as lab:
        assert lab.measured is not None
        assert "tbf" not in run_inside(lab.hosts[0], "tc", "qdisc")


def test_bucket_size() -> None:
    for rate in (50e6, 100e6, 1e9, 10e9):
        shape = LinkShape(rate)
        assert 0.5e-3 <= shape.burst * 8 / rate <= 1.3e-3
        assert shape.segment < shape.burst
    assert LinkShape(256e3).burst == 2 * FRAME_BYTES
    assert FRAME_PAYLOAD_BYTES == FRAME_BYTES - 14 - 20 - 20 - 12


# Who is who, and who reaches whom.


@needs_lab
def test_hosts_have_names_and_addresses_of_their_own() -> None:
    outside = socket.gethostname()
    with Lab(2, "open", check=False) as lab:
        assert lab.measured is None
        assert [(host.number, host.name, host.address, host.interface) for host in lab.hosts] == [
            (0, "lab0", "10.77.0.1", "e0"),
            (1, "lab1", "10.77.0.2", "e0"),
        ]
        for host in lab.hosts:
            assert host.call(socket.gethostname) == host.name
            assert run_inside(host, "uname", "-n").strip() == host.name
        assert socket.gethostname() == outside


@needs_lab
def test_hosts_reach_only_each_other() -> None:
    with Lab(2, "100mbit", check=False) as lab, socket.create_server(("127.0.0.1", 0)) as outside:
        first, second = lab.hosts
        with serve(second) as listener, connect(first, listener.getsockname()) as out:
            into, peer = listener.accept()
            with into:
                assert peer[0] == first.address
                out.sendall(b"hello")
                into.settimeout(WAIT_TIMEOUT_S)
                assert into.recv(5) == b"hello"
        with pytest.raises(OSError, match="unreachable") as unreachable:
            connect(first, ("192.0.2.1", 80))
        assert unreachable.value.errno == errno.ENETUNREACH
        with pytest.raises(ConnectionRefusedError):
            connect(first, outside.getsockname())
        assert "default" not in run_inside(first, "ip", "route")


@needs_lab
def test_two_labs_are_isolated() -> None:
    with Lab(2, "100mbit", check=False) as one, Lab(2, "10mbit", check=False) as other:
        with serve(one.hosts[0]) as listener:
            connect(one.hosts[1], listener.getsockname()).close()
            with pytest.raises(ConnectionRefusedError):
                connect(other.hosts[1], listener.getsockname())
        assert "rate 100Mbit" in run_inside(one.hosts[0], "tc", "qdisc")
        assert "rate 10Mbit" in run_inside(other.hosts[0], "tc", "qdisc")


@needs_lab
def test_call_returns_values_and_raises_errors() -> None:
    def network() -> int:
        return os.stat("/proc/thread-self/ns/net").st_ino

    def broken() -> None:
        raise KeyError("inside")

    before = network()
    with Lab(1, "open") as lab:
        assert lab.measured is None  # one host has nobody to echo
        assert lab.hosts[0].call(network) != before
        with pytest.raises(KeyError, match="inside"):
            lab.hosts[0].call(broken)
    assert network() == before
    with pytest.raises(WorldError, match="lab0 is closed"):
        lab.hosts[0].call(network)


# Nothing is left.


def test_close_leaves_nothing(witness: Witness) -> None:
    lab = Lab(3, "100mbit", check=False)
    assert witness.watch_lab(lab) == 4
    lab.close()
    lab.close()
    eventually(lambda: witness.alive() == 0, "the networks of a closed lab are gone")


def test_an_error_inside_leaves_nothing(witness: Witness) -> None:
    def fail() -> None:
        with Lab(2, "open", check=False) as lab:
            assert witness.watch_lab(lab) == 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    eventually(lambda: witness.alive() == 0, "the networks of a lab left by an error are gone")


def test_a_lab_that_cannot_be_finished_leaves_nothing(witness: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(first: LabHost, second: LabHost, shape: LinkShape | None) -> float:
        witness.watch(first.namespace.net, second.namespace.net)
        assert witness.alive() == 2
        raise WorldError("no echo")

    monkeypatch.setattr(lab_module, "measure_link", fail)
    with pytest.raises(WorldError, match="no echo"):
        Lab(2, "100mbit")
    eventually(lambda: witness.alive() == 0, "the networks of a lab that was refused are gone")


def test_a_half_made_lab_leaves_nothing(witness: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Namespace.batch

    def fail_late(self: Namespace, tool: str, lines: list[str]) -> None:
        if self.name == "lab1":
            witness.watch(self.net)
            lines = ["nonsense"]
        honest(self, tool, lines)

    monkeypatch.setattr(Namespace, "batch", fail_late)
    with pytest.raises(WorldError, match=r"ip could not set up lab1 of the lab \(exit \d+\): .*nonsense"):
        Lab(2, "100mbit")
    assert witness.laid == 1
    eventually(lambda: witness.alive() == 0, "the networks of a half-made lab are gone")


def test_a_process_inside_keeps_its_host_until_it_ends(witness: Witness) -> None:
    with Lab(2, "open", check=False) as lab:
        witness.watch(lab.hosts[0].namespace.net, lab.hosts[1].namespace.net)
        inside = subprocess.Popen(
            [*lab.hosts[0].enter, "sh", "-c", "echo in; read line"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert inside.stdout is not None
        assert inside.stdout.readline() == "in\n"
    try:
        eventually(lambda: witness.alive() == 1, "the empty host is gone")
        assert inside.poll() is None
    finally:
        inside.communicate("out\n", timeout=WAIT_TIMEOUT_S)
    eventually(lambda: witness.alive() == 0, "the other host is gone with its process")


def test_kill_9_leaves_nothing(witness: Witness) -> None:
    script = (
        "from syncline.launch.lab import Lab\n"
        "lab = Lab(2, '100mbit', check=False)\n"
        "print(*(namespace.net for namespace in lab.namespaces), flush=True)\n"
        "input()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert holder.stdout is not None
        networks = holder.stdout.readline().split()
        assert len(networks) == 3
        witness.watch(*networks)
        assert witness.alive() == 3
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=WAIT_TIMEOUT_S)
    eventually(lambda: witness.alive() == 0, "the networks of a killed process are gone")


# What is refused.


@pytest.mark.parametrize(
    "rate",
    ["fast", "100", "mbit", "0mbit", "-1mbit", "1e9mbit", "100mbps", "100 mbit", "1.mbit", "", "999gbit", "1kbit"],
)
def test_invalid_rates_are_refused(rate: str) -> None:
    with pytest.raises(SpecError, match=r"100mbit|256kbit"):
        Lab(2, rate)
    with pytest.raises(SpecError, match=r"100mbit|256kbit"):
        parse_lab(f"2@{rate}")


@pytest.mark.parametrize("hosts", [0, -1, 65, True, 2.0, "2"])
def test_invalid_numbers_of_hosts_are_refused(hosts: int) -> None:
    with pytest.raises(SpecError, match="1 to 64 hosts"):
        Lab(hosts, "100mbit")


def test_labs_as_the_command_line_writes_them() -> None:
    assert parse_lab("4@100mbit") == (4, "100mbit")
    assert parse_lab("64@2.5gbit") == (64, "2.5gbit")
    assert parse_lab("1@open") == (1, "open")
    for text in ("4", "@100mbit", "4@", "four@100mbit", "-1@open", "4x100mbit", ""):
        with pytest.raises(SpecError, match="hosts@rate"):
            parse_lab(text)
    for text in ("0@open", "65@open"):
        with pytest.raises(SpecError, match=f"1 to 64 hosts.*{text}"):
            parse_lab(text)


def test_missing_commands_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(WorldError, match=r"needs ip, tc, nsenter.*apt install iproute2 util-linux"):
        Lab(2, "100mbit")


def test_missing_privileges_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("syncline.launch.lab.call_libc", refuse)
    monkeypatch.setattr(lab_module, "require_tools", lambda: None)
    with pytest.raises(WorldError, match=r"CAP_SYS_ADMIN and CAP_NET_ADMIN .*run as root"):
        Lab(2, "100mbit")
