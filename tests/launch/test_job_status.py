"""The state of an elastic job, read from its store. Time is virtual."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import pytest

from syncline.control import LogEntry
from syncline.environment.lost_after import ALIVE
from syncline.launch.elastic import ElasticOptions, bounded, open_control_log
from syncline.launch.job_folder import JobRecord, enter_network
from syncline.launch.job_status import JobReader
from syncline.launch.process_events import serve_store
from syncline.launch.programs import LaunchHost, rank_programs

PLACE = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "4711"}


def test_members_with_team_rate_and_heartbeat() -> None:
    store = bounded(serve_store("127.0.0.1"), 10.0)
    log, now = open_control_log(store), 0.0
    for member in range(3):
        log.append("started", member=member, host="a", pid=100 + member)
    log.append("ended", member=1, code=1, reason="it failed")
    log.append("team", team=[2, 0], generation=4)

    def write(member: int, beat: str, step: int, time: float) -> None:
        store.set(f"{ALIVE}/rank {member}", beat)
        progress = {"step": step, "time": time, "rank": 0, "size": 2}
        store.set(f"syncline/control/progress/{member}", json.dumps(progress))

    reader = JobReader(store, lambda: now)
    write(2, "5", 100, 1000.0)
    first = reader.read()
    assert (first.generation, first.team, len(first.events)) == (4, (2, 0), 5)
    assert [(one.member, one.rank, one.step, one.steps_per_s) for one in first.members] == [
        (0, 1, None, None),
        (2, 0, 100, None),
    ]
    assert first.members[0].heartbeat_s is None
    now = 3.0
    write(0, "1", 0, 1003.0)
    write(2, "6", 130, 1003.0)
    assert [(one.steps_per_s, one.heartbeat_s) for one in reader.read().members] == [(None, 0.0), (10.0, 0.0)]
    now = 5.0
    write(2, "6", 130, 1003.0)
    write(0, "left", 0, 1003.0)
    later = reader.read()
    assert [(one.steps_per_s, one.heartbeat_s) for one in later.members] == [(None, None), (10.0, 2.0)]
    found = json.loads(json.dumps(later.to_json(max_events=1)))
    assert [event["kind"] for event in found["events"]] == ["team"]
    assert found["members"][1]["pid"] == 102


def test_status_of_a_lab_is_read_inside_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command starts itself again there, once."""
    [[program]] = rank_programs([LaunchHost(name="lab0", slots=1, enter=("nsenter", "--net=x"))], ["train.py"], PLACE)
    job = JobRecord.of([program], ElasticOptions(1, 2), saves=False)
    calls: list[list[str]] = []

    def execvpe(file: str, command: list[str], environ: dict[str, str]) -> None:
        calls.append(command)
        monkeypatch.setenv("SYNCLINE_ENTERED", environ["SYNCLINE_ENTERED"])

    monkeypatch.setattr(os, "execvpe", execvpe)
    for _ in range(2):
        enter_network(job, ["status", "/runs/a"])
    assert calls == [["nsenter", "--net=x", sys.executable, "-m", "syncline", "status", "/runs/a"]]
    enter_network(replace(job, enter=()), ["status", "/runs/a"])
    assert len(calls) == 1


def test_entries_are_kept_in_the_order_of_the_log() -> None:
    store = bounded(serve_store("127.0.0.1"), 10.0)
    reader, log = JobReader(store), open_control_log(store)
    for number in range(3):
        log.append("note", number=number)
        assert [entry.number for entry in reader.read().events] == list(range(number + 1))
    assert isinstance(reader.read().events[0], LogEntry)
