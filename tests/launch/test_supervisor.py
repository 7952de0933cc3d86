"""Who is blamed, without any process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from syncline.launch import supervisor
from syncline.launch.process_events import ProcessEvents, serve_store
from syncline.launch.processes import (
    ErrorReport,
    ProcessExit,
    ProcessState,
    first_failure,
    format_names,
    read_error_report,
)
from syncline.launch.programs import Program
from syncline.launch.supervisor import FailurePolicy, HeartbeatMonitor, Supervisor

LOST = ErrorReport(
    summary="PeerLostError: rank 1 is gone", traceback="Traceback\nPeerLostError", consequence=True, time=1.0
)
OWN = ErrorReport(summary="ValueError: boom", traceback="Traceback\nValueError: boom", time=2.0)


def ended(rank: int, code: int, report: ErrorReport | None = None, time: float = 5.0) -> ProcessExit:
    return ProcessExit(name=f"rank {rank}", rank=rank, code=code, report=report, time=time)


@pytest.mark.parametrize(
    ("failures", "guilty"),
    [
        ([ended(0, 1, LOST), ended(1, -9, time=9.0)], 1),
        ([ended(0, 1, LOST), ended(1, 1, OWN)], 1),
        ([ended(0, 1, LOST), ended(1, 3, time=9.0)], 1),
        ([ended(0, 1, OWN), ended(1, -11)], 1),
        ([ended(0, -6, time=1.0), ended(1, 1, OWN)], 1),
        ([ended(0, 1, LOST), ended(1, -6)], 1),
        ([ended(0, 1, OWN), ended(1, 1, ErrorReport(summary="KeyError: 'x'", time=1.5))], 1),
        ([ended(0, -9, time=3.0), ended(1, -9, time=2.0)], 1),
    ],
)
def test_first_failure(failures: list[ProcessExit], guilty: int) -> None:
    assert first_failure(failures).rank == guilty
    assert first_failure(failures[::-1]).rank == guilty


def test_process_exit_as_json() -> None:
    for one in (ended(2, 1, OWN), ended(0, -9), ProcessExit(name="server 0", rank=None, code=0)):
        assert ProcessExit.from_json(one.to_json()) == one


class Scripted:
    """A crew whose fate is written down: for each call of `poll` those who end then."""

    def __init__(self, *fate: list[ProcessExit], raised: list[ProcessExit]) -> None:
        self.fate = list(fate)
        self.has_raised = raised
        self.sent: list[int] = []
        self.killed: list[str] = []
        self.closed = False

    def start(self, give_up: Callable[[], bool]) -> None:
        return

    def add(self, program: Program, give_up: Callable[[], bool]) -> bool:
        return False

    def poll(self) -> list[ProcessExit]:
        return self.fate.pop(0) if self.fate[0] or self.sent else []

    def raised(self) -> list[ProcessExit]:
        return self.has_raised

    def running(self) -> list[str]:
        return [one.name for many in self.fate for one in many]

    def pids(self) -> dict[str, int]:
        return {}

    def states(self) -> dict[str, ProcessState]:
        return {}

    def signal(self, number: int, ranks_only: bool = False) -> None:
        self.sent.append(number)

    def kill(self, name: str) -> None:
        self.killed.append(name)

    def close(self) -> None:
        self.closed = True


def supervise(crew: Scripted, policy: FailurePolicy = "stop") -> tuple[int, list[str], ProcessEvents]:
    said: list[str] = []
    board = ProcessEvents(serve_store("127.0.0.1"))
    code = Supervisor(crew, board, 2, policy=policy, say=said.append).run()
    assert crew.closed
    return code, said, board


def test_consequence_is_not_the_first_failure() -> None:
    crew = Scripted([ended(0, 1, LOST)], [], [ended(1, -15)], raised=[ended(1, 1, OWN)])
    code, said, board = supervise(crew)
    assert code == 1
    assert said == ["rank 1 failed (exit code 1)\nTraceback\nValueError: boom"]
    assert crew.sent == [15]
    assert board.store.add("syncline/dead", 0) == 2


def test_only_consequences_are_known() -> None:
    crew = Scripted([ended(0, 1, LOST)], [], [ended(1, -15)], raised=[])
    assert supervise(crew)[:2] == (1, ["rank 0 failed (exit code 1)\nTraceback\nPeerLostError"])


def test_other_failures_take_one_line() -> None:
    later = ErrorReport(summary="KeyError: 'x'", traceback="Traceback\nKeyError: 'x'", time=3.0)
    crew = Scripted([ended(0, 1, later), ended(1, 1, OWN)], raised=[])
    assert supervise(crew)[:2] == (
        1,
        ["rank 0 failed (exit code 1): KeyError: 'x'", "rank 1 failed (exit code 1)\nTraceback\nValueError: boom"],
    )


def test_one_error_on_all_ranks_is_shown_once() -> None:
    crew = Scripted([ended(0, 1, OWN), ended(1, 1, OWN), ended(2, 1, OWN)], raised=[])
    assert supervise(crew)[:2] == (
        1,
        ["ranks 0, 1 and 2 failed with the same error (exit code 1)\nTraceback\nValueError: boom"],
    )


def test_same_error_of_others_takes_one_line() -> None:
    later = ErrorReport(summary="KeyError: 'x'", traceback="Traceback\nKeyError: 'x'", time=3.0)
    crew = Scripted([ended(0, 1, later), ended(1, 1, OWN), ended(2, 1, later)], raised=[])
    assert supervise(crew)[1] == [
        "ranks 0 and 2 failed with the same error (exit code 1): KeyError: 'x'",
        "rank 1 failed (exit code 1)\nTraceback\nValueError: boom",
    ]


def test_same_exit_code_without_report_takes_one_line() -> None:
    crew = Scripted([ended(0, 3), ended(1, 3)], raised=[])
    assert supervise(crew)[:2] == (3, ["ranks 0 and 1 failed (exit code 3)"])


def test_same_error_is_shown_once_with_continue() -> None:
    crew = Scripted([ended(0, 1, OWN), ended(1, 1, OWN)], raised=[])
    assert supervise(crew, "continue")[:2] == (
        1,
        [
            "rank 0 failed (exit code 1); the others go on\nTraceback\nValueError: boom",
            "rank 1 failed (exit code 1) with the same error as rank 0",
            "all 2 workers failed",
        ],
    )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 2, 3, 5], "ranks 0-3 and 5"),
        ([4, 2, 0], "ranks 0, 2 and 4"),
    ],
)
def test_ranks_are_named_in_order(ranks: list[int], text: str) -> None:
    assert format_names([f"rank {rank}" for rank in ranks]) == text


def test_ranks_and_servers_are_named_apart() -> None:
    assert format_names(["server 1", "rank 2", "evaluator", "rank 0"]) == "ranks 0 and 2, server 1 and evaluator"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXIT_TIMEOUT_S", "CHECK_EVERY_S", "KILL_TIMEOUT_S"):
        monkeypatch.setattr(supervisor, name, 0.0)


@pytest.mark.usefixtures("quick")
def test_rank_that_raises_and_does_not_end_has_failed() -> None:
    """Nobody ends before they are asked to."""
    crew = Scripted([], [ended(0, -15), ended(1, -15)], raised=[ended(0, 1, OWN)])
    code, said, board = supervise(crew)
    assert code == 1
    assert said[0] == (
        "rank 0 has raised ValueError: boom but does not end: its threads or exit handlers are still at work; "
        "after 0 s it counts as failed, and all are ended"
    )
    assert said[-1] == "rank 0 failed (exit code 1)\nTraceback\nValueError: boom"
    assert crew.sent[0] == signal.SIGTERM
    assert board.store.add("syncline/dead", 0) == 1


class Lingering(Scripted):
    """Rank 0 has raised and ends when that has been told."""

    def __init__(self, said: list[str]) -> None:
        super().__init__([ended(0, 1, OWN), ended(1, 0)], raised=[ended(0, 1, OWN)])
        self.said = said

    def poll(self) -> list[ProcessExit]:
        return self.fate.pop() if self.said else []


@pytest.mark.usefixtures("quick")
def test_hanging_exit_is_only_reported_with_continue() -> None:
    said: list[str] = []
    crew = Lingering(said)
    assert Supervisor(crew, ProcessEvents(serve_store("127.0.0.1")), 2, policy="continue", say=said.append).run() == 1
    assert said[0].endswith("but does not end: its threads or exit handlers are still at work")
    assert crew.sent == []


class CutOff(Scripted):
    """Rank 0 fails; rank 1 is on a host that does not answer, whatever it is sent."""

    def poll(self) -> list[ProcessExit]:
        return self.fate.pop(0) if len(self.fate) > 1 else []


@pytest.mark.usefixtures("quick")
def test_processes_that_do_not_end_are_given_up() -> None:
    crew = CutOff([ended(0, 3)], [ended(1, 0)], raised=[])
    code, said, _ = supervise(crew)
    assert code == 3
    assert said == [
        "rank 1 did not end within 0 s of being killed; check whether the host can be reached",
        "rank 0 failed (exit code 3)",
    ]
    assert crew.sent[0] == signal.SIGTERM


class Frozen(Scripted):
    """Rank 0 ends well once rank 1 was killed; rank 1 ends after that, or never where its host is cut off."""

    def __init__(self, *, answers: bool) -> None:
        super().__init__([ended(0, 0)], [ended(1, -9)], raised=[])
        self.answers = answers

    def poll(self) -> list[ProcessExit]:
        return self.fate.pop(0) if self.killed and self.fate and (self.answers or len(self.fate) > 1) else []


class Signs(ProcessEvents):
    """Every look finds another sign of rank 0, and the same of rank 1."""

    looks = 0

    def read_heartbeats(self, names: Iterable[str]) -> dict[str, str]:
        self.looks += 1
        return {name: str(self.looks) if name == "rank 0" else "7" for name in names}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("answers", [True, False], ids=["ends", "cut off"])
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_silent_rank_is_killed_and_has_failed(policy: FailurePolicy, answers: bool) -> None:
    """The run ends, whether the killed one is seen to end or not; the others are told why it is gone."""
    crew, said, board = Frozen(answers=answers), list[str](), Signs(serve_store("127.0.0.1"))
    code = Supervisor(crew, board, 2, policy=policy, say=said.append, lost_after=0.05).run()
    assert code == 137
    assert crew.killed == ["rank 1"]
    goes_on = "; the others go on" if policy == "continue" else ""
    told = [line for line in said if line.startswith("rank 1 sent no heartbeat for")]
    assert told
    assert told[0].endswith(f"and was killed{goes_on}")
    assert "no heartbeat" in json.loads(board.store.get("syncline/dead/1"))["reason"]


def test_suspended_launcher_does_not_count_as_silence() -> None:
    """A laptop that sleeps, Ctrl-Z: all beats are old then, and nobody is lost."""
    monitor = HeartbeatMonitor(lost_after=10.0)
    beats = {"rank 0": "7"}
    assert monitor.check(0.0, beats, dict) == {}
    assert monitor.check(1000.0, beats, dict) == {}


def test_busy_process_is_alive_without_heartbeats() -> None:
    """Compiled code may keep all other threads of its process from running."""
    monitor = HeartbeatMonitor(lost_after=3.0)
    found = [monitor.check(float(now), {"rank 0": "7"}, lambda: {"rank 0": "busy"}) for now in range(20)]
    assert found == [{}] * 20


@pytest.mark.parametrize("sign", ["", "left"], ids=["no world yet", "has left"])
def test_process_without_world_is_lost_only_if_stopped(sign: str) -> None:
    monitor = HeartbeatMonitor(lost_after=3.0)
    for now in range(20):
        assert monitor.check(float(now), {"rank 0": sign}, dict) == {}
    found = [monitor.check(float(now), {"rank 0": sign}, lambda: {"rank 0": "stopped"}) for now in range(20, 26)]
    assert found[0] == {}
    assert list(found[-1]) == ["rank 0"]


EVALUATOR = ProcessExit(name="evaluator", rank=None, code=0)


class Evaluating(Scripted):
    """Both ranks have ended; the evaluator ends when it is asked to, or by itself at the last moment."""

    def __init__(self, *ranks: ProcessExit, by_itself_after: int = 10**9) -> None:
        super().__init__(list(ranks), [EVALUATOR], raised=[])
        self.polls_left = by_itself_after

    def poll(self) -> list[ProcessExit]:
        self.polls_left -= 1
        return self.fate.pop(0) if len(self.fate) > 1 or self.sent or self.polls_left < 0 else []


def supervise_evaluator(crew: Evaluating, policy: FailurePolicy = "stop") -> tuple[int, list[str]]:
    said: list[str] = []
    board = ProcessEvents(serve_store("127.0.0.1"))
    code = Supervisor(crew, board, 2, policy=policy, say=said.append, finishing=("evaluator",)).run()
    return code, said


def test_an_evaluator_may_finish_when_the_ranks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CHECK_EVERY_S", 0.0)
    crew = Evaluating(ended(0, 0), ended(1, 0), by_itself_after=5)
    assert supervise_evaluator(crew) == (0, ["evaluator is still at work and has 60 s; Ctrl-C ends it"])
    assert crew.sent == []


def test_evaluator_that_does_not_finish_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "EVALUATOR_TIMEOUT_S", 0.0)
    crew = Evaluating(ended(0, 0), ended(1, 0))
    assert supervise_evaluator(crew)[0] == 0
    assert crew.sent == [signal.SIGTERM]


def test_evaluator_ends_at_once_after_a_failure() -> None:
    crew = Evaluating(ended(0, 0), ended(1, 3))
    assert supervise_evaluator(crew)[0] == 3
    assert crew.sent == [signal.SIGTERM]
    crew = Evaluating(ended(0, 0), ended(1, 3), by_itself_after=5)
    assert supervise_evaluator(crew, "continue")[0] == 3
    assert crew.sent == []


def test_report_of_torch_is_read(tmp_path: Path) -> None:
    path = f"{tmp_path}/error.json"
    assert read_error_report(path) is None
    with open(path, "w") as file:
        file.write('{"message": {"message": "ValueError: boom", "extraInfo": {"timestamp": "3"}}}')
    found = read_error_report(path)
    assert found is not None
    assert found.summary == "ValueError: boom"
    with open(path, "w") as file:
        file.write('{"half')
    assert read_error_report(path) is None


class Signalled(Scripted):
    """Two ranks and a server; the launcher is sent SIGTERM, and a rank ends when it is sent something."""

    def __init__(self) -> None:
        server = ProcessExit(name="server 0", rank=None, code=-9)
        super().__init__([ended(0, 130), ended(1, 130)], [server], raised=[])
        self.of_ranks: list[int] = []

    def poll(self) -> list[ProcessExit]:
        if not self.sent and not self.of_ranks:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.fate.pop(0) if (self.sent if len(self.fate) == 1 else self.of_ranks) else []

    def signal(self, number: int, ranks_only: bool = False) -> None:
        (self.of_ranks if ranks_only else self.sent).append(number)


def test_sigterm_makes_ranks_save() -> None:
    """The server, which they need until they have saved, is ended after them."""
    crew, said = Signalled(), list[str]()
    code = Supervisor(
        crew, ProcessEvents(serve_store("127.0.0.1")), 2, policy="stop", say=said.append, saves=True
    ).run()
    assert (code, said) == (128 + signal.SIGTERM, [])
    assert (crew.of_ranks, crew.sent) == ([signal.SIGINT], [signal.SIGKILL])


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_stopped_ranks_have_not_failed(policy: FailurePolicy) -> None:
    """SIGTERM to a single worker: all save, and say so by their exit code."""
    crew, said = Scripted([ended(1, 130)], [ended(0, 130)], raised=[]), list[str]()
    crew.sent = [0]  # the second one ends by itself
    code = Supervisor(
        crew, ProcessEvents(serve_store("127.0.0.1")), 2, policy=policy, say=said.append, saves=True
    ).run()
    assert (code, said, crew.sent) == (130, [], [0])


def test_lost_evaluator_is_not_a_failure_of_the_ranks() -> None:
    gone = ProcessExit(name="evaluator", rank=None, code=-9)
    crew = Scripted([gone], [ended(0, 0), ended(1, 0)], raised=[])
    crew.sent = [0]
    said, board = list[str](), ProcessEvents(serve_store("127.0.0.1"))
    code = Supervisor(crew, board, 2, policy="continue", say=said.append, finishing=("evaluator",)).run()
    assert code == 0
    assert said == [
        "evaluator was killed by signal 9 (SIGKILL); the others go on",
        "evaluator failed; the others ended by themselves",
    ]
    assert b"SIGKILL" in board.store.get("syncline/dead/evaluator")
