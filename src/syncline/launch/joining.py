"""One more rank for a running elastic job, started on this machine by `syncline join`."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.environment.base import LEFT_CODE, check_versions, package_version
from syncline.errors import IncompatibleError, WorldError
from syncline.launch.elastic import draw_member, open_control_log, started_members
from syncline.launch.job_folder import (
    JobRecord,
    answers,
    enter_network,
    open_job_store,
    read_job,
    why_not_running,
)
from syncline.launch.local import LocalProcesses
from syncline.launch.output import OutputForwarder
from syncline.launch.prefork_client import start_prefork
from syncline.launch.process_events import ProcessEvents
from syncline.launch.processes import Processes, ProcessExit
from syncline.launch.programs import Program
from syncline.launch.restarts import FixedRanks
from syncline.launch.supervisor import CHECK_EVERY_S, STOPPED, Supervisor

if TYPE_CHECKING:
    from syncline.transports.key_value_store import BoundedStore

JOB_GONE_S = 10.0
"""Seconds without an answer of the job's store after which the rank is ended: the job has ended, or is cut off."""


def join_job(folder: Path) -> int:
    """Start one more rank of the job, and watch it until its end; return its exit code."""
    job = read_job(folder)
    why = why_not_running(folder, job)
    if why is not None:
        raise WorldError(f"{why}; start a new job")
    check_versions({f"the job in {folder}": job.version, "this command": package_version()})
    enter_network(job, ["join", str(folder.absolute())])
    try:
        os.chdir(job.working_directory)
    except OSError as error:
        raise WorldError(
            f"this host has no folder {job.working_directory} ({error.strerror}): it needs the job's working folder "
            "and Python environment at the same paths"
        ) from None
    start_prefork(job.command, {**os.environ, **job.newcomer(0, 0).variables})
    store = open_job_store(folder, job)
    members = started_members(open_control_log(store).read())
    if len(members) >= job.maximum:
        raise IncompatibleError(_full(len(members), job))
    here = sum(entry.fields.get("host") == socket.gethostname() for entry in members.values())
    return _run(job, store, job.newcomer(draw_member(store), here))


def _full(members: int, job: JobRecord) -> str:
    return (
        f"the job has {members} ranks, and its maximum is {job.maximum} (--elastic {job.minimum}:{job.maximum}): wait "
        "until one has ended"
    )


def _run(job: JobRecord, store: BoundedStore, program: Program) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    events = _LosableEvents(job, store)
    with OutputForwarder(sys.stdout.buffer, sys.stderr.buffer) as output:

        def say(text: str) -> None:
            output.say(f"syncline: {text}")

        say(f"joining as rank {program.rank}; Ctrl-C ends it, and the job goes on")
        rank = JoiningRank(job, store, program)
        supervisor = Supervisor(
            LocalProcesses([program], output),
            events,
            ranks=1,
            policy="stop",
            say=say,
            tick=rank.reason_to_end,
            saves=job.saves,
            elastic=rank,
        )
        code = supervisor.run()
        if supervisor.ended_early is not None:
            say(supervisor.ended_early)
        elif code and not answers(job):
            say("the job has ended meanwhile")
        rank.record_end(events, supervisor.failure)
    return code


class _LosableEvents(ProcessEvents):
    """Events of a rank that may outlive its job and the job's store."""

    def __init__(self, job: JobRecord, store: BoundedStore) -> None:
        super().__init__(store)
        self._job = job

    def post_dead(self, ended: ProcessExit, reason: str = "") -> None:
        if answers(self._job):
            with suppress(RuntimeError):  # the job ends at this moment
                super().post_dead(ended, reason)


class JoiningRank(FixedRanks):
    """A rank that has joined from outside: writes its start and its end into the job's log."""

    def __init__(self, job: JobRecord, store: BoundedStore, program: Program) -> None:
        self._job = job
        self._program = program
        self._log = open_control_log(store)
        self._full: str | None = None
        self._ended: ProcessExit | None = None
        self._asked = self._answered = time.monotonic()

    def record_start(self, processes: Processes) -> None:
        pid = processes.pids().get(self._program.name)
        if pid is None:  # Ctrl-C came first
            return
        with suppress(RuntimeError):  # the job ends at this moment
            self._log.append("started", member=self._program.rank, host=socket.gethostname(), pid=pid)
            # Several may join at once: those that the log has first are in.
            members = list(started_members(self._log.read()))
            if self._program.rank in members[self._job.maximum :]:
                self._full = _full(self._job.maximum, self._job)

    def record_exit(self, ended: ProcessExit) -> None:
        self._ended = ended

    def has_left(self, ended: ProcessExit) -> bool:
        return ended.code == LEFT_CODE

    def record_end(self, events: ProcessEvents, failure: ProcessExit | None) -> None:
        """Write how the rank has ended, for the supervisor and for the other ranks."""
        ended = failure or self._ended
        if ended is None or not answers(self._job):
            return
        left = ended.code == LEFT_CODE or (self._job.saves and ended.code == STOPPED)
        if ended.failed and failure is None and not left:  # ended by a signal to this command
            events.post_dead(ended)
        reason = "it has left" if left else ended.reason() if ended.failed else "it ended well"
        with suppress(RuntimeError):  # the job ends at this moment
            self._log.append("ended", member=ended.rank, code=ended.code, reason=reason)

    def reason_to_end(self) -> str | None:
        """A reason to end the rank: the job is full, or its store does not answer."""
        now = time.monotonic()
        if self._full is None and now - self._asked > CHECK_EVERY_S:
            self._asked = now
            if answers(self._job):
                self._answered = now
            elif now - self._answered > JOB_GONE_S:
                return f"the job has not answered for {JOB_GONE_S:.0f} s: it has ended, or this host is cut off"
        return self._full
