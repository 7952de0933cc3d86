"""The folder of an elastic job: `job.json` says where its store is and how its ranks are started.

`syncline status` and `syncline join` read it. Only its owner may, because it has the key of the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.environment.base import KEY_VARIABLE, package_version
from syncline.errors import ProtocolError, SpecError, WorldError
from syncline.launch.elastic import ElasticOptions, bounded
from syncline.launch.process_events import join_store
from syncline.launch.programs import LOCAL_RANK_VARIABLE, LOCALHOST, Program, forwarded_variables, newcomer_program
from syncline.training.run_folder import RunFolder

if TYPE_CHECKING:
    from syncline.transports.key_value_store import BoundedStore

NAME = "job"
ANSWER_TIMEOUT_S = 5.0
"""Timeout of the connection to the store of a job, and of each question."""
ENTERED_VARIABLE = "SYNCLINE_ENTERED"
"""Set in a command that has entered the network of a lab."""
RUN_ID_VARIABLE = "SYNCLINE_RUN_ID"
RUN_ID_KEY = "syncline/elastic/run"
"""The store's key of the job's id: another job may have taken the port of one that has ended."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What `job.json` says about an elastic job."""

    version: str
    host: str
    pid: int
    """The process id of its supervisor."""
    address: str
    port: int
    key: str
    """The key of its network; empty if it has none."""
    ranks: int
    minimum: int
    maximum: int
    command: tuple[str, ...]
    """The arguments of `worker.py`: a script with its arguments, or `-m` and a module."""
    working_directory: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables of its first rank, without the key."""
    enter: tuple[str, ...] = ()
    """The command that runs another command in its network; empty outside of a lab."""
    saves: bool = False
    """Whether its ranks save and end after Ctrl-C or SIGTERM."""
    started: float = 0.0
    ended: Mapping[str, Any] | None = None
    """When it has ended, and its exit code."""

    @classmethod
    def of(cls, programs: Sequence[Program], limits: ElasticOptions, *, saves: bool) -> JobRecord:
        """The record of a job that this process supervises."""
        ranks = [program for program in programs if program.rank is not None]
        first = ranks[0].variables
        environment = {**forwarded_variables(), **first}
        return cls(
            version=package_version(),
            host=socket.gethostname(),
            pid=os.getpid(),
            address=first["MASTER_ADDR"],
            port=int(first["MASTER_PORT"]),
            key=environment.pop(KEY_VARIABLE, os.environ.get(KEY_VARIABLE, "")),
            ranks=len(ranks),
            minimum=limits.minimum,
            maximum=limits.maximum,
            command=ranks[0].target,
            working_directory=os.getcwd(),
            environment=environment,
            enter=ranks[0].enter,
            saves=saves,
            started=time.time(),
        )

    def newcomer(self, member: int, local_rank: int) -> Program:
        """The program of a rank that joins from this machine."""
        key = {KEY_VARIABLE: self.key} if self.key else {}
        variables = {**self.environment, **key, LOCAL_RANK_VARIABLE: str(local_rank)}
        first = Program(name="", target=tuple(self.command), variables=variables, host=LOCALHOST)
        return newcomer_program(first, member)


def write_job(folder: Path, record: JobRecord) -> None:
    """Write `job.json` by a rename, readable by its owner only."""
    aside = folder / f".{NAME}.json"
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(record), file, indent=2)
        file.write("\n")
    os.replace(aside, folder / f"{NAME}.json")


def write_end(folder: Path, record: JobRecord, code: int | None) -> None:
    """Write that the job has ended. The exit code is None if its supervisor has failed."""
    write_job(folder, replace(record, key="", ended={"time": time.time(), "code": code}))


def read_job(folder: Path) -> JobRecord:
    """Read `job.json`."""
    found = RunFolder(folder).read(NAME)
    if found is None:
        raise SpecError(
            f"{folder} has no {NAME}.json: name the folder of a job that was started with --elastic, such as "
            "runs/20261118-101500-3fa2"
        )
    try:
        record = JobRecord(**found)
        return replace(record, command=tuple(record.command), enter=tuple(record.enter))
    except TypeError as error:
        raise ProtocolError(f"{folder / NAME}.json was written by another version of Syncline: {error}") from None


def fresh_job_name() -> str:
    """A name for the folder of a new job: the time and a random part."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def why_not_running(folder: Path, job: JobRecord) -> str | None:
    """A sentence that says why the job is not running any more; None if it may be running."""
    if job.ended is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.ended["time"]))
        code = job.ended["code"]
        return f"the job in {folder} ended at {when}" + (f" with exit code {code}" if code is not None else "")
    if job.host == socket.gethostname() and not os.path.exists(f"/proc/{job.pid}") and os.path.exists("/proc/self"):
        return f"the job in {folder} is not running: its supervisor, process {job.pid}, is gone"
    return None


def enter_network(job: JobRecord, words: Sequence[str]) -> None:
    """If the job runs in a lab, replace this process by the same `syncline` command inside the lab's network."""
    if not job.enter or os.environ.get(ENTERED_VARIABLE):
        return
    sys.stdout.flush()
    command = [*job.enter, sys.executable, "-m", "syncline", *words]
    # The lab has no DNS, and c10d warns about each address that it cannot resolve.
    os.execvpe(command[0], command, {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, ENTERED_VARIABLE: "1"})


def answers(job: JobRecord) -> bool:
    """Whether the store of the job can be reached.

    It is asked before torch is: torch retries for a long time, and writes a C++ trace for each call that fails.
    """
    try:
        socket.create_connection((job.address, job.port), ANSWER_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def open_job_store(folder: Path, job: JobRecord) -> BoundedStore:
    """Connect to the store of the job, within a bounded time."""
    place = f"{job.address}:{job.port}"
    try:
        if not answers(job):
            raise ConnectionRefusedError(place)
        store = bounded(join_store(job.address, job.port, ANSWER_TIMEOUT_S), ANSWER_TIMEOUT_S)
        run_id = store.get(RUN_ID_KEY).decode() if store.check([RUN_ID_KEY]) else ""
    except (OSError, RuntimeError, ValueError) as error:
        elsewhere = job.address.startswith("127.") and job.host != socket.gethostname()
        hint = f"start it with --address, an address of {job.host} that this host can reach" if elsewhere else ""
        raise WorldError(
            f"the job in {folder} does not answer at {place} within {ANSWER_TIMEOUT_S:.0f} s: "
            f"{hint or 'it may have ended, or this host cannot reach it'}"
        ) from error
    if run_id != job.environment.get(RUN_ID_VARIABLE):
        raise WorldError(f"the job in {folder} is not running: another job answers at {place}")
    return store
