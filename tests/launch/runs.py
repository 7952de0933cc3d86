"""Runs of the real command, in a folder of their own, and waiting for what they do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.launch.forked import Forked

PATIENCE = 90.0
SLOW = ("they take turns", "before they hold any model", "then a signal ends them")
T = TypeVar("T")
COMMAND = Path(__file__).with_name("command.py")

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
        launchers = ("SLURM_", "PMI_", "OMPI_", "SYNCLINE_", "TORCHELASTIC_", "MASTER_", "OMP_", "KMP_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
        own = {"HERE": str(self.folder), "TMPDIR": str(self.temporary), "TEST_MARK": self.mark, "OMP_NUM_THREADS": "1"}
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
        wait_for(lambda: path.exists() or self._all_ended(), f"{name} is posted, but {self._describe()}")
        assert path.exists(), f"all runs have ended without {name}: {self._describe()}"
        return path.read_text()

    def _all_ended(self) -> bool:
        return all(run.process.exitcode is not None for run in self.started)

    def _describe(self) -> str:
        return "\n".join(run.describe() for run in self.started)

    def post(self, name: str) -> None:
        """Tell the workers something."""
        (self.folder / name).touch()

    def processes(self) -> list[int]:
        """Every process that comes of these runs: in their folder, or with their mark."""
        mark = f"TEST_MARK={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes() or (entry / "cwd").samefile(self.folder):
                        found.append(int(entry.name))
        return found

    def assert_nothing_left(self) -> None:
        """No process, and no temporary folder."""
        wait_for(lambda: not self.processes(), f"no process is left, but {self.processes()}")
        left = [path.name for path in self.temporary.iterdir()]
        assert not [name for name in left if not name.startswith("torchinductor_")], left

    def close(self) -> None:
        for run in self.started:
            run.process.kill()
            run.process.join(PATIENCE)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Run:
    """One run. Its launcher and its ranks are forked from processes that have imported torch already."""

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
        if "@" in where or "--lab" in arguments:
            environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in the lab: the ranks can be forked from us then
        asked = {"arguments": list(arguments), "folder": str(runs.folder), "job": job, "where": where}
        with open(self._out, "ab") as out, open(self._err, "ab") as err, open(os.devnull) as nothing:
            streams = [nothing.fileno(), out.fileno(), err.fileno()]
            self.process = Forked((str(COMMAND), json.dumps(asked)), environ, streams)

    @property
    def out(self) -> str:
        return self._out.read_bytes().decode()

    @property
    def err(self) -> str:
        """Standard error without what is said on busy machines: few cores, little memory, for whom we wait."""
        return "".join(line for line in self.all_err.splitlines(True) if not any(words in line for words in SLOW))

    @property
    def all_err(self) -> str:
        return self._err.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def code(self) -> int:
        assert self.process.exitcode is not None, f"still running\n{self.out}\n{self.err}"
        return self.process.exitcode

    def programs(self) -> list[int]:
        """The processes of the servers, ranks and evaluator that it has started, in this order."""
        return sorted(rank for prefork in _children(self.pid) for rank in _children(prefork))

    def finish(self) -> Run:
        self.process.join(PATIENCE)
        return self

    def describe(self) -> str:
        return f"exit code {self.process.exitcode}\n{self.out}\n{self.err}"


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
