"""Starts the real `syncline` command in a temporary folder, and waits for its effects."""

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

WAIT_TIMEOUT_S = 90.0
"""Timeout in seconds of every wait."""
SLOW = ("they take turns", "before they hold any model", "then a signal ends them")
"""Parts of messages that appear only on busy machines."""
T = TypeVar("T")
COMMAND = Path(__file__).with_name("command.py")

PRELUDE = """
import os, pathlib, sys, time
rank, here = int(os.environ.get("RANK", "0")), pathlib.Path(os.environ["HERE"])
def post(name, text=""):
    (here / f".{name}").write_text(str(text))
    (here / f".{name}").rename(here / name)
def say(*words, to=1):
    os.write(to, (" ".join(map(str, words)) + "\\n").encode())  # one call; print makes two
def until(name):
    while not (here / name).exists():
        time.sleep(0.01)
"""


def wait_for(what: Callable[[], T], why: str) -> T:
    """Call `what` until its result is true, and return the result; fail with `why` after `WAIT_TIMEOUT_S` seconds."""
    until = time.monotonic() + WAIT_TIMEOUT_S
    while time.monotonic() < until:
        found = what()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {WAIT_TIMEOUT_S:.0f} s: {why}")


class Runs:
    """Starts runs in a folder. No process and no temporary folder of a run may be left at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.mark = uuid.uuid4().hex
        self.started: list[Run] = []

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script that begins with `PRELUDE`; return its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PRELUDE + text)
        return str(path)

    def environ(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment variables without those of launchers. A variable marks every process of these runs."""
        launchers = ("SLURM_", "PMI_", "OMPI_", "SYNCLINE_", "TORCHELASTIC_", "MASTER_", "OMP_", "KMP_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
        own = {
            "HERE": str(self.folder),
            "TMPDIR": str(self.temporary),
            "TEST_MARK": self.mark,
            # One process that has imported torch forks all runs only if these variables are the same in all of them.
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # as the lab sets it for ranks
        }
        return clean | own | dict(variables or {})

    def start(
        self,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        servers: str = "",
        job: Mapping[str, Any] | None = None,
        where: str = "",
    ) -> Run:
        """Start `syncline` with these arguments.

        With `servers`, start two workers and two servers, which run that script. With `job`, start a `Job` with these
        fields: two workers on this machine, or on the lab or the hosts that `where` names.
        """
        job = {"servers": 2, "server": (servers,)} if servers else job
        run = Run(self, arguments, self.environ(variables), job, where)
        self.started.append(run)
        return run

    def run(self, *arguments: str, **options: Any) -> Run:
        """Start a run and wait for its end."""
        return self.start(*arguments, **options).finish()

    def read(self, name: str) -> str:
        """Wait until a worker has posted the file `name`; return its text."""
        path = self.folder / name
        wait_for(lambda: path.exists() or self._all_ended(), f"{name} is posted, but {self._describe()}")
        assert path.exists(), f"all runs have ended without {name}: {self._describe()}"
        return path.read_text()

    def _all_ended(self) -> bool:
        return all(run.process.exitcode is not None for run in self.started)

    def _describe(self) -> str:
        return "\n".join(run.describe() for run in self.started)

    def post(self, name: str) -> None:
        """Create the file `name`, for which workers wait with `until(name)`."""
        (self.folder / name).touch()

    def processes(self) -> list[int]:
        """The process ids of these runs: processes in their folder or with their mark in the environment."""
        mark = f"TEST_MARK={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes() or (entry / "cwd").samefile(self.folder):
                        found.append(int(entry.name))
        return found

    def assert_nothing_left(self) -> None:
        """Check that no process and no temporary folder is left."""
        wait_for(lambda: not self.processes(), f"no process is left, but {self.processes()}")
        left = [path.name for path in self.temporary.iterdir()]
        assert not [name for name in left if not name.startswith("torchinductor_")], left

    def close(self) -> None:
        for run in self.started:
            run.process.kill()
            run.process.join(WAIT_TIMEOUT_S)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Run:
    """One run. Its launcher and its ranks are forked from processes that have imported torch."""

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
        request = {"arguments": list(arguments), "folder": str(runs.folder), "job": job, "where": where}
        with open(self._out, "ab") as out, open(self._err, "ab") as err, open(os.devnull) as nothing:
            streams = [nothing.fileno(), out.fileno(), err.fileno()]
            self.process = Forked((str(COMMAND), json.dumps(request)), environ, streams)

    @property
    def out(self) -> str:
        return self._out.read_bytes().decode()

    @property
    def err(self) -> str:
        """Standard error without the messages that appear only on busy machines (`SLOW`)."""
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
        """The process ids of its servers, ranks and evaluator, in this order."""
        return sorted(rank for prefork in _children(self.pid) for rank in _children(prefork))

    def finish(self) -> Run:
        self.process.join(WAIT_TIMEOUT_S)
        return self

    def describe(self) -> str:
        return f"exit code {self.process.exitcode}\n{self.out}\n{self.err}"


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
