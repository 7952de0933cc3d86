"""Which ranks of an elastic job are started again, when and where. Time is virtual, and no process is started."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from syncline.errors import WorldError
from syncline.launch.elastic import ElasticOptions, bounded, draw_member, open_control_log
from syncline.launch.process_events import ProcessEvents, serve_store
from syncline.launch.processes import ProcessExit, ProcessState
from syncline.launch.programs import LaunchHost, Program, rank_programs
from syncline.launch.restarts import ElasticRanks
from syncline.launch.supervisor import Supervisor


class Started:
    """Processes that only record what is started. Each of their programs ends when a test says so."""

    def __init__(self, programs: list[Program]) -> None:
        self.programs = {program.name: program for program in programs}
        self.ends: list[ProcessExit] = []
        self.signals: list[tuple[int, bool]] = []
        self.fault: str | None = None

    def start(self, give_up: Callable[[], bool]) -> None:
        return

    def add(self, program: Program, give_up: Callable[[], bool]) -> bool:
        if self.fault is not None:
            raise WorldError(self.fault)
        self.programs[program.name] = program
        return True

    def poll(self) -> list[ProcessExit]:
        ends, self.ends = self.ends, []
        for one in ends:
            del self.programs[one.name]
        return ends

    def raised(self) -> list[ProcessExit]:
        return []

    def running(self) -> list[str]:
        return list(self.programs)

    def pids(self) -> dict[str, int]:
        return {name: 1000 + int(name.removeprefix("rank ")) for name in self.programs}

    def states(self) -> dict[str, ProcessState]:
        return {}

    def signal(self, number: int, ranks_only: bool = False) -> None:
        self.signals.append((number, ranks_only))
        self.ends = [ended(int(name.removeprefix("rank ")), 130 if ranks_only else -number) for name in self.programs]

    def kill(self, name: str) -> None:
        self.ends.append(ended(int(name.removeprefix("rank "))))

    def close(self) -> None:
        return


def ended(member: int, code: int = -9) -> ProcessExit:
    return ProcessExit(name=f"rank {member}", rank=member, code=code)


class Job:
    """An elastic job on hosts `a`, `b`, … with these numbers of ranks."""

    def __init__(self, limits: ElasticOptions, *slots: int) -> None:
        hosts = [LaunchHost(name="abc"[number], slots=count) for number, count in enumerate(slots)]
        programs = [one for each in rank_programs(hosts, ["x.py"], {}, elastic=True) for one in each]
        self.now = 0.0
        self.said: list[str] = []
        self.events = ProcessEvents(serve_store("127.0.0.1"))
        self.store = bounded(self.events.store, 10.0)
        self.log = open_control_log(self.store)
        self.processes = Started(programs)
        self.ranks = ElasticRanks(limits, programs, self.events, self.said.append, lambda: self.now)
        self.ranks.record_start(self.processes)

    def lose(self, member: int) -> str:
        del self.processes.programs[f"rank {member}"]
        return self.ranks.record_failure(ended(member))

    def at(self, seconds: float) -> list[str]:
        """The ranks that run at this time."""
        self.now = seconds
        self.ranks.start_due(self.processes, lambda: False)
        return self.processes.running()

    def join(self) -> None:
        """Another process starts a rank."""
        member = draw_member(self.store)
        self.log.append("started", member=member, host="elsewhere", pid=7)

    def logged(self, kind: str) -> list[dict[str, Any]]:
        return [entry.fields for entry in self.log.read() if entry.kind == kind]


def test_restarts_wait_longer_each_time_and_are_limited() -> None:
    job = Job(ElasticOptions(1, 2, restarts=3), 2)
    assert job.lose(1) == "it is started again in 1 s (restart 1 of 3)"
    assert job.at(0.9) == ["rank 0"]
    assert job.at(1.0) == ["rank 0", "rank 2"]
    assert job.lose(2).startswith("it is started again in 2 s")
    assert job.at(3.0) == ["rank 0", "rank 3"]
    assert job.lose(3).startswith("it is started again in 4 s")
    assert job.at(7.0) == ["rank 0", "rank 4"]
    assert job.lose(4) == "it was started again 3 times already, and the others go on"
    assert job.at(1000.0) == ["rank 0"]
    assert job.ranks.summary() == "the job ended well; 4 ranks were lost, 3 were started again"
    assert [(one["member"], one["replaces"], one["after_s"], one["attempt"]) for one in job.logged("restart")] == [
        (2, 1, 1.0, 1),
        (3, 2, 2.0, 2),
        (4, 3, 4.0, 3),
    ]


def test_delay_has_a_limit() -> None:
    job, now = Job(ElasticOptions(1, 1, restarts=9), 1), 0.0
    for member, delay in enumerate((1, 2, 4, 8, 16, 32, 60, 60, 60)):
        job.lose(member)
        assert job.at(now + delay - 0.1) == []
        now += delay
        assert job.at(now) == [f"rank {member + 1}"]
    assert [one["after_s"] for one in job.logged("restart")] == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_delay_is_short_again_after_a_healthy_time() -> None:
    job = Job(ElasticOptions(1, 1, restarts=9), 1)
    for member, end, start in ((0, 0.0, 1.0), (1, 1.0, 3.0), (2, 3.0, 7.0), (3, 37.0, 38.0), (4, 38.0, 40.0)):
        job.now = end
        job.lose(member)
        assert job.at(start) == [f"rank {member + 1}"]
    assert [one["after_s"] for one in job.logged("restart")] == [1, 2, 4, 1, 2]


def test_log_has_starts_and_ends_in_order() -> None:
    job = Job(ElasticOptions(1, 3, restarts=1), 1, 1)
    job.lose(1)
    job.at(1.0)
    job.ranks.record_exit(ended(0, 0))
    assert [(entry.kind, entry.fields) for entry in job.log.read()] == [
        ("job", {"ranks": 2, "minimum": 1, "maximum": 3, "target": 2}),
        ("started", {"member": 0, "host": "a", "pid": 1000}),
        ("started", {"member": 1, "host": "b", "pid": 1001}),
        ("ended", {"member": 1, "code": -9, "reason": "it was killed by signal 9 (SIGKILL)"}),
        ("restart", {"member": 2, "replaces": 1, "after_s": 1.0, "attempt": 1}),
        ("started", {"member": 2, "host": "b", "pid": 1002}),
        ("ended", {"member": 0, "code": 0, "reason": "it ended well"}),
    ]


def test_newcomer_has_a_world_of_its_own_and_its_place() -> None:
    job = Job(ElasticOptions(1, 3, restarts=1), 1, 2)
    job.lose(2)
    job.at(1.0)
    program = job.processes.programs["rank 3"]
    assert (program.rank, program.host, program.prefix) == (3, "b", "[3] ")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SYNCLINE_LOCAL_RANK", "GROUP_RANK")
    assert [program.variables[name] for name in names] == ["0", "1", "0", "1", "1", "1"]
    assert [program.variables[f"SYNCLINE_{name}"] for name in ("MEMBER", "JOIN", "PROGRAM")] == ["3", "1", "rank 3"]


def test_failing_host_is_used_if_no_other_has_a_place() -> None:
    job = Job(ElasticOptions(1, 2, restarts=5), 1, 1)
    for member in range(1, 6):
        job.lose(member)
        job.at(100.0 * member)
    assert [program.host for program in job.processes.programs.values()] == ["a", "b"]
    assert job.logged("excluded") == []


def test_rank_moves_from_a_failing_host_to_a_free_place() -> None:
    job = Job(ElasticOptions(1, 3, restarts=2), 2, 1)
    now = 0.0
    for member in (2, 3, 4):  # the place on host b is free for good, with failures that are long past
        job.lose(member)
        now += 2.0
        job.at(now)
    now += 700.0
    job.at(now)
    for member in (0, 5):
        job.lose(member)
        now += 2.0
        job.at(now)
    assert {program.host for program in job.processes.programs.values()} == {"a"}
    job.lose(1)
    job.at(now + 1.0)
    assert job.processes.programs["rank 7"].host == "b"
    assert job.logged("excluded") == [{"host": "a", "reason": "3 ranks failed there within 10 minutes"}]
    assert job.said == ["host a is left out: 3 ranks failed there within 10 minutes"]


def test_failed_start_counts_as_a_restart() -> None:
    job = Job(ElasticOptions(1, 2, restarts=1), 2)
    job.lose(1)
    job.processes.fault = "cannot start rank 2: no memory"
    assert job.at(1.0) == ["rank 0"]
    [said] = job.said
    assert said.startswith("cannot start rank 2: no memory; it was started again once already")
    job.processes.fault = None
    assert job.at(100.0) == ["rank 0"]


def test_no_restart_after_a_rank_has_ended_well() -> None:
    job = Job(ElasticOptions(2, 3, restarts=3), 3)
    job.lose(1)
    job.ranks.record_exit(ended(0, 0))
    assert job.lose(2) == ""
    assert job.at(10.0) == ["rank 0"]
    assert not job.ranks.expects_more()
    assert job.ranks.shortage() is None, "one has ended well, and one waited for its restart"


def test_rank_that_waits_for_a_team_is_ended_with_the_others() -> None:
    """Nobody is left who could take it in."""
    job = Job(ElasticOptions(1, 3, restarts=1), 3)
    job.lose(2)
    job.log.append("team", team=[0, 1], generation=2)
    assert job.at(1.0) == ["rank 0", "rank 1", "rank 3"]
    job.ranks.record_exit(ended(0, 0))
    assert job.ranks.drop_unneeded() == [], "rank 1 is still at work"
    job.ranks.record_exit(ended(1, 0))
    assert job.ranks.drop_unneeded() == ["rank 3"]
    assert job.ranks.drop_unneeded() == []
    assert job.said == ["rank 3 is not needed any more: the others have ended well"]


def test_rank_that_came_too_late_does_not_end_the_restarts() -> None:
    """It ends without an error while the others still train, because it asked for an epoch that never came."""
    job = Job(ElasticOptions(1, 3, restarts=2), 3)
    job.log.append("team", team=[0, 1, 2], generation=1)
    job.lose(2)
    assert job.at(1.0) == ["rank 0", "rank 1", "rank 3"]
    job.ranks.record_exit(ended(3, 0))
    assert job.log.read()[-1].fields["reason"] == "it could not join before the end"
    assert "started again" in job.lose(1)


def test_rank_that_has_left_may_end_after_the_others() -> None:
    job = Job(ElasticOptions(1, 2), 2)
    job.log.append("left", member=1, reason="it received SIGTERM")
    job.log.append("team", team=[0], generation=2)
    job.ranks.record_exit(ended(0, 0))
    assert job.ranks.drop_unneeded() == []
    assert job.said == []


def test_rank_in_the_team_may_finish_after_the_others() -> None:
    job = Job(ElasticOptions(1, 2), 2)
    job.log.append("team", team=[1, 0], generation=2)
    job.ranks.record_exit(ended(0, 0))
    assert job.ranks.drop_unneeded() == []


def test_rank_that_trains_in_no_team_may_finish_after_the_others() -> None:
    """The first workers of an asynchronous run form a team of their own when they close the world."""
    job = Job(ElasticOptions(1, 2, restarts=1), 2)
    job.lose(1)
    assert job.at(1.0) == ["rank 0", "rank 2"]
    job.log.append("team", team=[0, 2], generation=1, alone=2)
    job.log.append("team", team=[0], generation=2)
    job.ranks.record_exit(ended(0, 0))
    assert job.ranks.drop_unneeded() == []


def test_joined_ranks_count() -> None:
    """They count for the minimum and the maximum, and a joined rank that is silent is recorded as lost."""
    job = Job(ElasticOptions(2, 2, restarts=1), 2)
    job.lose(0)
    job.join()
    assert job.at(1.0) == ["rank 1"], "the job is full"
    assert job.ranks.joined() == ["rank 2"]
    assert job.ranks.record_failure(ended(2)) == ""
    assert job.at(2.0) == ["rank 1", "rank 3"]
    job.join()
    job.ranks.record_exit(ended(1, 0))
    job.ranks.record_exit(ended(3, 0))
    assert job.ranks.expects_more(), "its store is needed"
    job.log.append("ended", member=4, code=0, reason="it ended well")
    assert not job.ranks.expects_more()
    assert job.said[0] == "rank 2 joins from host elsewhere"
    assert job.said[-1] == "rank 4, which had joined, has ended: it ended well"


def test_joined_rank_that_does_not_end_is_not_waited_for_forever() -> None:
    job = Job(ElasticOptions(1, 2), 1)
    job.join()
    job.ranks.record_exit(ended(0, 0))
    assert job.ranks.expects_more()
    job.now = 21.0
    assert not job.ranks.expects_more()


@pytest.mark.parametrize(("saves", "sent"), [(False, (signal.SIGTERM, True)), (True, (signal.SIGINT, True))])
def test_job_ends_with_fewer_ranks_than_its_minimum(saves: bool, sent: tuple[int, bool]) -> None:
    """The others are asked to save and to end. Servers are ended after them."""
    job = Job(ElasticOptions(2, 3), 3)
    job.processes.ends = [ended(0, 3), ended(2)]
    code = Supervisor(
        job.processes, job.events, 3, policy="continue", say=job.said.append, saves=saves, elastic=job.ranks
    ).run()
    assert code == 137
    assert job.said == [
        "rank 0 failed (exit code 3); the others go on",
        "rank 2 was killed by signal 9 (SIGKILL); the others go on",
        "1 rank is left of 3, and the job needs at least 2: it ends",
    ]
    assert job.processes.signals[0] == sent


@pytest.mark.parametrize(
    ("received", "sent"), [(signal.SIGUSR1, (signal.SIGTERM, True)), (signal.SIGINT, (signal.SIGINT, False))]
)
def test_signal_to_the_launcher_lets_the_ranks_save_first(received: signal.Signals, sent: tuple[int, bool]) -> None:
    """Ctrl-C ends all at once. After another signal the ranks read in the log why they are asked, and save."""

    class Interrupted(Started):
        def start(self, give_up: Callable[[], bool]) -> None:
            os.kill(os.getpid(), received)

        def signal(self, number: int, ranks_only: bool = False) -> None:
            super().signal(number, ranks_only)
            if ranks_only:
                job.log.append("saved", step=7, folder="f", load="sl.load('f', run=run)")

    job = Job(ElasticOptions(1, 2), 2)
    job.processes = Interrupted(list(job.processes.programs.values()))
    supervisor = Supervisor(
        job.processes, job.events, 2, policy="continue", say=job.said.append, elastic=job.ranks, lost_after=60.0
    )
    assert supervisor.run() == 128 + received
    assert job.processes.signals[0] == sent
    asked = received != signal.SIGINT
    assert [each["reason"] for each in job.logged("ending")] == ["the launcher received SIGUSR1"] * asked
    text = "step 7 is saved in f: to continue from there, call sl.load('f', run=run) after sl.distribute"
    assert job.said == [text] * asked


def test_unneeded_rank_does_not_make_the_job_fail() -> None:
    job = Job(ElasticOptions(1, 2), 2)
    job.log.append("team", team=[0], generation=2)
    job.processes.ends = [ended(0, 0)]
    code = Supervisor(job.processes, job.events, 2, policy="continue", say=job.said.append, elastic=job.ranks).run()
    assert (code, job.said) == (0, ["rank 1 is not needed any more: the others have ended well"])


def test_all_ranks_lost_at_once_end_the_job() -> None:
    job = Job(ElasticOptions(1, 2), 2)
    job.processes.ends = [ended(0, 3), ended(1, 3)]
    code = Supervisor(job.processes, job.events, 2, policy="continue", say=job.said.append, elastic=job.ranks).run()
    assert code == 3
    assert job.said[-1] == "0 ranks are left of 2, and the job needs at least 1: it ends"


def test_ranks_that_stop_on_a_signal_have_not_failed() -> None:
    job = Job(ElasticOptions(2, 2), 2)
    job.processes.ends = [ended(0, 130), ended(1, 130)]
    code = Supervisor(
        job.processes, job.events, 2, policy="continue", say=job.said.append, saves=True, elastic=job.ranks
    ).run()
    assert (code, job.said) == (130, [])
