"""Show a running elastic job: its workers and their steps, the team, and what happened when.

examples:
  syncline status runs/20261118-101500-3fa2               once
  syncline status runs/20261118-101500-3fa2 --watch       every 2 seconds, until Ctrl-C
  syncline status runs/20261118-101500-3fa2 --json        the same as JSON

FOLDER is the folder of a job of `syncline run --elastic MIN:MAX`. The exit code is 1 if the job has ended or does not
answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from syncline.errors import WorldError
from syncline.launch.job_folder import JobRecord, enter_network, open_job_store, read_job, why_not_running
from syncline.launch.job_status import JobStatus, read_status
from syncline.launch.processes import format_names

if TYPE_CHECKING:
    from syncline.control import LogEntry

__all__ = ["configure", "format_event", "run"]

MAX_EVENTS = 20
"""The number of events that are shown."""
NOT_RUNNING = 1
"""The exit code for a job that has ended or does not answer."""
CLEAR_SCREEN = "\x1b[2J\x1b[H"
SENTENCES = {
    "job": "{ranks} ranks, {minimum} to {maximum} allowed",
    "started": "member {member} on {host}, process {pid}",
    "ended": "member {member}: {reason}",
    "restart": "member {member} replaces member {replaces} after {after_s:.0f} s, restart {attempt}",
    "excluded": "host {host}: {reason}",
    "ending": "{reason}",
    "saved": "step {step} in {folder}",
    "not saved": "step {step} in {folder}: {reason}",
    **dict.fromkeys(("lost", "left"), "member {member}: {reason}"),
}
"""What is shown of an entry of the control log, by its kind."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the job")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--watch", action="store_true", help="print it again every 2 seconds, until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    """Print the status and return the exit code."""
    folder, options = arguments.folder, [name for name in ("json", "watch") if getattr(arguments, name)]
    job = read_job(folder)
    why = why_not_running(folder, job)
    if why is None:
        enter_network(job, ["status", str(folder.absolute()), *(f"--{name}" for name in options)])
        try:
            for status in read_status(job, open_job_store(folder, job)):
                _print(folder, job, status, arguments)
                if not arguments.watch:
                    return 0
        except WorldError as error:
            why = str(error)
        except RuntimeError:  # its store has gone meanwhile
            pass
        except KeyboardInterrupt:
            return 0
        ended = why_not_running(folder, read_job(folder))
        why = ended or why or f"the job in {folder} does not answer any more"
    print(json.dumps({"running": False, "reason": why}) if arguments.json else why)
    return NOT_RUNNING


def _print(folder: Path, job: JobRecord, status: JobStatus, arguments: argparse.Namespace) -> None:
    if arguments.json:
        about = {"running": True, "folder": str(folder), "host": job.host, "supervisor": job.pid}
        limits = {"ranks": job.ranks, "minimum": job.minimum, "maximum": job.maximum, "started": job.started}
        print(json.dumps({**about, **limits, **status.to_json(MAX_EVENTS)}), flush=True)
        return
    clear = CLEAR_SCREEN if arguments.watch and sys.stdout.isatty() else ""
    print(clear + "\n".join(_lines(folder, job, status)), flush=True)


def _lines(folder: Path, job: JobRecord, status: JobStatus) -> list[str]:
    count, seconds = len(status.members), status.time - job.started
    lines = [
        f"{folder}: {count} member{'s' * (count != 1)} ({job.minimum} to {job.maximum}), running for {seconds:.0f} s, "
        f"supervised by process {job.pid} on {job.host}",
        f"team {status.generation}: {_members(status.team)}" if status.team else "no team has formed yet",
        "",
    ]
    table = [["member", "host", "process", "rank", "step", "steps/s", "heartbeat"]]
    for one in status.members:
        rate = None if one.steps_per_s is None else f"{one.steps_per_s:.3g}"
        beat = None if one.heartbeat_s is None else f"{one.heartbeat_s:.0f} s ago"
        cells = (one.member, one.host, one.pid, one.rank, one.step, rate, beat)
        table.append(["-" if cell is None else str(cell) for cell in cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return [*lines, "", *(format_event(entry) for entry in status.events[-MAX_EVENTS:])]


def _members(members: tuple[int, ...] | list[int]) -> str:
    return format_names([f"rank {member}" for member in members]).replace("rank", "member")


def format_event(entry: LogEntry) -> str:
    """One line about an entry of the control log.

    >>> from syncline.control import LogEntry
    >>> format_event(LogEntry(4, "ended", 0.0, {"member": 3, "code": 1, "reason": "it failed"})).split(maxsplit=1)[1]
    'ended     member 3: it failed'
    """
    return f"{time.strftime('%H:%M:%S', time.localtime(entry.time))}  {entry.kind:<8}  {_describe(entry)}"


def _describe(entry: LogEntry) -> str:
    try:
        if entry.kind == "team":
            return f"team {entry.fields['generation']}: {_members(entry.fields['team'])}"
        return SENTENCES[entry.kind].format(**entry.fields)
    except (KeyError, ValueError, TypeError):  # of a kind that this version does not know
        return ", ".join(f"{name} {value}" for name, value in entry.fields.items())
