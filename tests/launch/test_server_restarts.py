"""Servers that fail: when they are started again, under which names, and how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from syncline.errors import WorldError
from syncline.launch.processes import Processes, ProcessExit
from syncline.launch.programs import LaunchHost, Program, server_programs
from syncline.launch.server_restarts import ServerRestarts


class FakeProcesses:
    """Records the programs that are added; the first `refused` ones cannot be started."""

    def __init__(self, refused: int = 0) -> None:
        self.added: list[Program] = []
        self.refused = refused

    def add(self, program: Program, give_up: Callable[[], bool]) -> bool:
        if self.refused:
            self.refused -= 1
            raise WorldError("its host does not answer")
        self.added.append(program)
        return True


class Servers:
    """Two servers under a clock that the test moves."""

    def __init__(self, restarts: int, refused: int = 0) -> None:
        self.now, self.said, self.processes = 0.0, cast(list[str], []), FakeProcesses(refused)
        [programs] = server_programs([LaunchHost(name="a", slots=1)], ["-m", "server"], {}, 2)
        self.restarts = ServerRestarts(programs, restarts, self.said.append, lambda: self.now)

    def fail(self, name: str) -> str:
        return self.restarts.record_failure(ProcessExit(name=name, rank=None, code=-9))

    def wait(self, seconds: float) -> list[str]:
        """Let some time pass; return the names of all servers that have been added so far."""
        self.now += seconds
        self.restarts.start_due(cast(Processes, cast(Any, self.processes)), lambda: False)
        return [program.name for program in self.processes.added]


def test_a_failed_server_is_started_again_under_a_new_name() -> None:
    servers = Servers(restarts=2)
    assert servers.fail("server 1") == "its replicas continue, and it is started again in 1 s (restart 1 of 2)"
    assert servers.wait(0.9) == []
    assert servers.wait(0.2) == ["server 2"]
    variables = servers.processes.added[0].variables
    assert (variables["SYNCLINE_SERVER"], variables["SYNCLINE_JOIN"]) == ("1", "1")
    assert variables["SYNCLINE_PROGRAM"] == "server 2"
    assert "server 2" in servers.restarts
    assert "server 1" not in servers.restarts


def test_the_delay_doubles_and_the_number_is_limited() -> None:
    servers = Servers(restarts=2)
    servers.fail("server 0")
    servers.wait(1.0)
    assert "in 2 s (restart 2 of 2)" in servers.fail("server 2")
    assert servers.wait(1.9) == ["server 2"]
    assert servers.wait(0.2) == ["server 2", "server 3"]
    assert servers.fail("server 3") == "its replicas continue, and it was started again 2 times already"
    assert servers.wait(100.0) == ["server 2", "server 3"]
    assert Servers(restarts=0).fail("server 0") == "its replicas continue"


def test_a_server_that_cannot_be_started_has_failed_again() -> None:
    servers = Servers(restarts=2, refused=1)
    servers.fail("server 0")
    assert servers.wait(1.0) == []
    assert "its host does not answer; its replicas continue, and it is started again in 2 s" in servers.said[0]
    assert servers.wait(2.0) == ["server 3"]
