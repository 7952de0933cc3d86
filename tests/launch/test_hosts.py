"""Runs on hosts: over ssh to a server on this machine."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from syncline.errors import SpecError, WorldError
from syncline.launch import discovery as discovery_module
from syncline.launch import ssh as ssh_module
from syncline.launch.discovery import HostDiscovery
from syncline.launch.output import OutputForwarder
from syncline.launch.process_events import ProcessEvents, serve_store
from syncline.launch.programs import Host, Program, parse_hosts
from syncline.launch.ssh import HostPrograms, RemoteProcesses, address_towards, agent_command
from tests.launch.runs import Runs, wait_for
from tests.launch.sshd import SSHD, ssh_server

needs_sshd = pytest.mark.skipif(
    SSHD is None or not os.access("/run", os.W_OK), reason="needs sshd and the right to start it"
)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ssh_server(tmp_path_factory.mktemp("sshd")) as command:
        yield command


@pytest.mark.parametrize(
    ("text", "ranks", "words"),
    [
        ("a:2,,b", None, "'' is not a host"),
        ("a:x", None, "'a:x' is not a host"),
        ("-oProxyCommand=evil:2", None, "is not a host"),
        ("a b:2", None, "is not a host"),
        ("a:0", None, "a would take 0 ranks"),
        ("a:1,a:1", None, "a is named 2 times"),
        ("a,b", 3, "3 ranks cannot be divided evenly among 2 hosts"),
        ("a:2,b:2", 3, "-n 3 but --hosts a:2,b:2 takes 4 ranks"),
    ],
)
def test_bad_host_lists(text: str, ranks: int | None, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_hosts(text, ranks)


def test_hosts_without_counts_take_one_each() -> None:
    assert parse_hosts("a, b") == (Host("a", 1), Host("b", 1))


def remote_script(runs: Runs, text: str) -> str:
    """Other hosts do not have the test's variables."""
    script = Path(runs.script(text))
    script.write_text(script.read_text().replace('os.environ["HERE"]', repr(str(runs.folder))))
    return str(script)


TOLD = """
import json
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "NCCL_DEBUG")
told = [os.environ.get(name) for name in names]
post(f"told{rank}", json.dumps([told, len(os.environ["SYNCLINE_KEY"]), os.environ["SYNCLINE_KEY"]]))
say("hello from", rank, *sys.argv[1:])
say("error of", rank, to=2)
"""


@needs_sshd
def test_ranks_on_two_hosts_and_here(runs: Runs, ssh: str) -> None:
    variables = {"SYNCLINE_SSH": ssh, "NCCL_DEBUG": "WARN"}
    script = remote_script(runs, TOLD)
    run = runs.run("run", "--hosts", "alpha:2,localhost:1,beta:1", script, "it's", "a  b", variables=variables)
    assert run.code == 0, run.describe()
    expected = [f"[{rank}] hello from {rank} it's a  b" for rank in (1, 2, 3)]
    assert sorted(run.out.splitlines()) == [*expected, "hello from 0 it's a  b"]
    assert sorted(run.err.splitlines()) == ["[1] error of 1", "[2] error of 2", "[3] error of 3", "error of 0"]
    found = [json.loads(runs.read(f"told{rank}")) for rank in range(4)]
    assert [told for told, _, _ in found] == [
        ["0", "0", "2", "0", "127.0.0.1", "WARN"],
        ["1", "1", "2", "0", "127.0.0.1", "WARN"],
        ["2", "0", "1", "1", "127.0.0.1", "WARN"],
        ["3", "0", "1", "2", "127.0.0.1", "WARN"],
    ]
    assert {(length, key) for _, length, key in found} == {(40, found[0][2])}


KEY = """
post(f"key{rank}", os.environ["SYNCLINE_KEY"])
"""


@needs_sshd
@pytest.mark.parametrize("hosts", ["alpha,localhost", "alpha"])
def test_key_of_the_user_is_used(runs: Runs, ssh: str, hosts: str) -> None:
    variables = {"SYNCLINE_SSH": ssh, "SYNCLINE_KEY": "none"}
    run = runs.run("run", "--hosts", hosts, remote_script(runs, KEY), variables=variables)
    assert run.code == 0, run.describe()
    assert [runs.read(f"key{rank}") for rank, _ in enumerate(hosts.split(","))] == ["none"] * len(hosts.split(","))


HANGING = """
import threading
if rank == 1:
    threading.Thread(target=until, args=("never",)).start()
    raise ValueError("boom")
until("never")
"""


@needs_sshd
def test_remote_worker_that_raises_and_does_not_end(runs: Runs, ssh: str) -> None:
    run = runs.run("run", "--hosts", "localhost,alpha", remote_script(runs, HANGING), variables={"SYNCLINE_SSH": ssh})
    assert run.code == 1, run.describe()
    assert run.err.startswith("syncline: rank 1 has raised ValueError: boom but does not end")
    assert run.err.count("Traceback") == 1
    runs.assert_nothing_left()


def address(family: int, place: tuple[object, ...]) -> tuple[int, int, int, str, tuple[object, ...]]:
    return family, socket.SOCK_DGRAM, 0, "", place


def test_store_address_is_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [address(socket.AF_INET6, ("2001:db8::7", 9, 0, 0)), address(socket.AF_INET, ("127.0.0.2", 9))]
    monkeypatch.setattr(ssh_module, "resolve_alias", lambda name: name)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **more: found)
    assert address_towards([Host("localhost", 1), Host("a", 1)]) == "127.0.0.1"
    del found[1]
    with pytest.raises(WorldError, match=r"host a has only IPv6 addresses \(2001:db8::7\).*with --address$"):
        address_towards([Host("a", 1)])


class Recorded:
    """A connection that records the messages to its agent."""

    made: ClassVar[list[Recorded]] = []

    def __init__(self, host: Host) -> None:
        self.sent: list[object] = []
        self.made.append(self)

    def start(self, job: Mapping[str, object]) -> None:
        return

    def send(self, what: Mapping[str, object]) -> None:
        self.sent.append(what)


def test_each_signal_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_module, "AgentConnection", Recorded)
    programs = [Program(name=f"rank {rank}", target=("x.py",), variables={}, rank=rank) for rank in range(2)]
    share = HostPrograms(0, Host("a", 2), programs)
    with OutputForwarder(io.BytesIO(), io.BytesIO()) as output:
        crew = RemoteProcesses([share], "127.0.0.1", 9, ProcessEvents(serve_store("127.0.0.1")), output)
        crew.start(lambda: False)
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
            crew.signal(number)
    assert Recorded.made[-1].sent == [{"signal": 15}, {"signal": 9}]


def test_rank_starts_again_on_a_host_whose_ssh_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ssh, started = tmp_path / "ssh", tmp_path / "started"
    ssh.write_text(f"#!/bin/sh\necho $$ >> {started}\nexec sleep 600\n")
    ssh.chmod(0o755)
    started.touch()
    monkeypatch.setenv("SYNCLINE_SSH", str(ssh))
    monkeypatch.setattr(ssh_module, "START_TIMEOUT_S", 0.0)
    programs = [Program(name=f"rank {n}", target=("x.py",), variables={}, rank=n, host="a") for n in range(2)]
    events = ProcessEvents(serve_store("127.0.0.1"))

    def pids() -> list[int]:
        return list(map(int, started.read_text().split()))

    with OutputForwarder(io.BytesIO(), io.BytesIO()) as output:
        share = HostPrograms(0, Host("a", 1), programs[:1])
        remote = RemoteProcesses([share], "127.0.0.1", 9, events, output, elastic=True)
        remote.start(lambda: False)
        wait_for(lambda: len(pids()) == 1, "ssh has started")
        assert [(ended.name, ended.code) for ended in remote.poll()] == [("rank 0", 1)]
        assert remote.add(programs[1], lambda: False), "by another connection"
        wait_for(lambda: len(pids()) == 2, "ssh has started again")
        assert [ended.name for ended in remote.poll()] == ["rank 1"]
        wait_for(lambda: not remote.poll() and not any(map(alive, pids())), "each ssh that hangs is ended")
        remote.close()


def test_discovery_script_that_fails_is_not_called_again_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(discovery_module, "ASK_EVERY_S", 3600.0)
    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\nexit 3\n")
    script.chmod(0o755)
    with contextlib.closing(HostDiscovery(str(script))) as hosts:
        wait_for(lambda: hosts.poll() is None and hosts.problem != "", "the first call has failed")
        for _ in range(100):
            assert hosts.poll() is None
    assert (tmp_path / "calls").read_text().split() == ["called"]
    assert hosts.problem == "it ended with exit code 3"


def test_ssh_uses_keepalive(runs: Runs) -> None:
    ssh = runs.folder / "ssh"
    ssh.write_text(f'#!/bin/sh\n[ $1 = -G ] && exec echo hostname 127.0.0.1\necho "$@" > {runs.folder}/words\nexit 3\n')
    ssh.chmod(0o755)
    runs.run("run", "--hosts", "a", runs.script(""), variables={"SYNCLINE_SSH": str(ssh)})
    assert "-o ServerAliveInterval=10 -o ServerAliveCountMax=3 a " in runs.read("words")


REMOTE = """
post(f"ready{rank}", os.getpid())
until("go" if rank else "never")
raise ValueError("boom")
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@needs_sshd
def test_remote_failure_ends_all(runs: Runs, ssh: str) -> None:
    run = runs.start("run", "--hosts", "localhost,alpha", remote_script(runs, REMOTE), variables={"SYNCLINE_SSH": ssh})
    pids = [int(runs.read(f"ready{rank}")) for rank in range(2)]
    runs.post("go")
    run.finish()
    assert run.code == 1, run.describe()
    assert run.err.startswith("syncline: rank 1 failed (exit code 1)\nTraceback")
    assert run.err.count("ValueError: boom") == 1
    wait_for(lambda: not any(map(alive, pids)), "the ranks are gone")
    runs.assert_nothing_left()


@needs_sshd
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_the_agents_end_with_the_launcher(runs: Runs, ssh: str, sent: signal.Signals) -> None:
    run = runs.start("run", "--hosts", "alpha,localhost", remote_script(runs, REMOTE), variables={"SYNCLINE_SSH": ssh})
    pids = [int(runs.read(f"ready{rank}")) for rank in range(2)]
    os.kill(run.pid, sent)
    run.finish()
    assert run.code == (130 if sent == signal.SIGINT else -signal.SIGKILL), run.describe()
    wait_for(lambda: not any(map(alive, pids)), "the ranks are gone")


MEMBER = """
post(f"member{os.environ['SYNCLINE_MEMBER']}", os.getpid())
say("member", os.environ["SYNCLINE_MEMBER"])
until("go")
"""


@needs_sshd
def test_agent_starts_a_lost_rank_again(runs: Runs, ssh: str) -> None:
    """The agent of the host stays although its only rank has ended."""
    words = ("--hosts", "localhost,alpha", "--elastic", "1:2", "--restart", "1", "--folder", "job")
    run = runs.start("run", *words, remote_script(runs, MEMBER), variables={"SYNCLINE_SSH": ssh})
    os.kill(int(runs.read("member1")), signal.SIGKILL)
    runs.read("member2")
    runs.read("member0")
    runs.post("go")
    run.finish()
    assert run.code == 0, run.describe()
    assert "[2] member 2\n" in run.out
    assert run.err.endswith("syncline: the job ended well; 1 rank was lost, 1 was started again\n")
    runs.assert_nothing_left()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (255, "host a cannot be reached by ssh (no route to a); this must work: "),
        (96, "host a cannot reach the store at 127.0.0.1:"),
        (97, "host a has no folder /"),
        (98, f"host a has no Python at {sys.executable}: every host needs the same environment at the same path"),
        (99, "has no syncline there; install the same environment on every host"),
        (3, "host a: the agent ended with exit code 3 (no route to a)"),
    ],
)
def test_agent_that_does_not_start_is_reported(runs: Runs, code: int, words: str) -> None:
    ssh = runs.folder / "ssh"
    ssh.write_text(f"#!/bin/sh\n[ $1 = -G ] && exec echo hostname 127.0.0.1\necho no route to a >&2\nexit {code}\n")
    ssh.chmod(0o755)
    run = runs.run("run", "--hosts", "a:2", runs.script(""), variables={"SYNCLINE_SSH": str(ssh)})
    assert run.code == 2
    assert words in run.err
    assert run.err.count("\n") == 1
    runs.assert_nothing_left()


def test_agent_command_checks_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def code() -> int:
        return subprocess.run(["sh", "-c", agent_command()], capture_output=True, check=False, timeout=60).returncode

    bare = tmp_path / "python with a space"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    assert code() == 99
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    assert code() == 98
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "it's nowhere"))
    assert code() == 97


@needs_sshd
def test_hosts_that_cannot_be_used(runs: Runs, ssh: str) -> None:
    script = remote_script(runs, "until('never')")
    variables = {"SYNCLINE_SSH": ssh}
    run = runs.run("run", "--hosts", "alpha,gone", script, variables=variables)
    assert run.code == 2
    assert run.err.startswith("syncline run: host gone cannot be reached by ssh (")
    assert run.err.count("\n") == 1
    run = runs.run("run", "--hosts", "alpha,beta", "--address", "203.0.113.7", script, variables=variables)
    assert run.code == 2
    assert "cannot listen at 203.0.113.7" in run.err
    runs.assert_nothing_left()
