"""Runs of the real command, in a folder of their own, and waiting for what they do."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from syncline.cli import main
from syncline.launch import in_lab, start
from syncline.launch.hosts import parse_hosts
from syncline.launch.lab import parse_lab

PATIENCE = 90.0
SLOW = ("they take turns", "before they hold any model", "then a signal ends them")
T = TypeVar("T")

PRELUDE = """
import os, pathlib, sys, time
rank, here = int(os.environ.get("RANK", "0")), pathlib.Path(os.environ["HERE"])
def post(name, text=""):
    (here / f".{name}").write_text(str(text))
    (here / f".{name}").rename(here / name)
def say(*words, to=1):
    os.write(to, (" ".join(map(str, words)) + "\\n").encode())  # one call: print makes two, and others write too
def until(name):
    while not (here / name).exists():
        time.sleep(0.01)
"""


def wait_for(what: Callable[[], T], why: str) -> T:
    """What `what` gives as soon as that is something."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found = what()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {PATIENCE:.0f} s: {why}")


class Runs:
    """A folder in which runs are started. Nothing of them may be left at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.mark = uuid.uuid4().hex
        self.started: list[Run] = []

    def script(self, text: str, name: str = "script.py") -> str:
        """A script that begins with the helpers above."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PRELUDE + text)
        return str(path)

    def environ(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """A clean environment that marks all that comes of it."""
        launchers = ("SLURM_", "PMI_", "OMPI_", "SYNCLINE_", "TORCHELASTIC_", "MASTER_", "OMP_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
        own = {"HERE": str(self.folder), "TMPDIR": str(self.temporary), "TEST_MARK": self.mark}
        return clean | own | dict(variables or {})

    def start(
        self,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        servers: str = "",
        job: Mapping[str, Any] | None = None,
        where: str = "",
    ) -> Run:
        """Start `syncline` with these arguments; with `servers`, two workers beside two servers of that script.

        With `job`, whatever a `Job` may be: two workers here, or where `where` says, as a lab or as hosts.
        """
        job = {"servers": 2, "server": (servers,)} if servers else job
        run = Run(self, arguments, self.environ(variables), job, where)
        self.started.append(run)
        return run

    def run(self, *arguments: str, **options: Any) -> Run:
        """Start it and wait for its end."""
        return self.start(*arguments, **options).finish()

    def read(self, name: str) -> str:
        """What a worker has posted, once it has."""
        path = self.folder / name
        wait_for(path.exists, f"{name} is posted; {[run.describe() for run in self.started]}")
        return path.read_text()

    def post(self, name: str) -> None:
        """Tell the workers something."""
        (self.folder / name).touch()

    def processes(self) -> list[int]:
        """Every process that comes of these runs."""
        mark = f"TEST_MARK={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def assert_nothing_left(self) -> None:
        """No process, and no temporary folder."""
        wait_for(lambda: not self.processes(), f"no process is left, but {self.processes()}")
        assert list(self.temporary.iterdir()) == []

    def close(self) -> None:
        for run in self.started:
            run.process.kill()
            run.process.join(PATIENCE)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Run:
    """One run, in a process that is forked from one which has imported torch already."""

    def __init__(
        self,
        runs: Runs,
        arguments: Sequence[str],
        environ: dict[str, str],
        job: Mapping[str, Any] | None,
        where: str,
    ) -> None:
        number = len(runs.started)
        self._out, self._err = runs.folder / f"out{number}", runs.folder / f"err{number}"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "syncline.cli.run", "syncline.launch.in_lab"])
        self.process = context.Process(
            target=_command,
            args=(list(arguments), environ, str(runs.folder), str(self._out), str(self._err), job, where),
        )
        self.process.start()

    @property
    def out(self) -> str:
        return self._out.read_bytes().decode() if self._out.exists() else ""

    @property
    def err(self) -> str:
        """Standard error without what is said on busy machines: few cores, little memory, for whom we wait."""
        return "".join(line for line in self.all_err.splitlines(True) if not any(words in line for words in SLOW))

    @property
    def all_err(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def code(self) -> int:
        assert self.process.exitcode is not None, f"still running\n{self.out}\n{self.err}"
        return self.process.exitcode

    def finish(self) -> Run:
        self.process.join(PATIENCE)
        return self

    def describe(self) -> str:
        return f"exit code {self.process.exitcode}\n{self.out}\n{self.err}"


def _command(
    arguments: list[str],
    environ: dict[str, str],
    folder: str,
    out: str,
    err: str,
    job: Mapping[str, Any] | None,
    where: str,
) -> None:
    for path, fd in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, fd)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    tempfile.tempdir = None  # to be looked up again
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    if job is not None:
        sys.exit(_run(start.Job(target=tuple(arguments), **job), where))
    sys.exit(main.main(arguments))


def _run(job: start.Job, where: str) -> int:
    if "@" in where:
        return in_lab.run_in_lab(job, *parse_lab(where))
    return start.run_on_hosts(job, parse_hosts(where)) if where else start.run_here(job, 2)
