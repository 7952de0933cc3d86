"""Runs commands in one process and ends with an error after the first one that has imported torch.

python without_torch.py FOLDER_OF_A_RACE FOLDER_OF_A_RUN
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from pathlib import Path

from syncline.bench.live import open_feed
from syncline.cli.bench import BENCHES
from syncline.cli.main import COMMANDS, main

HEAVY = {"torch", "numpy", "numba", "scipy", "sklearn", "zmq"}


class Terminal(io.StringIO):
    """Presses Ctrl-C as soon as `watch` has told its address."""

    def write(self, text: str) -> int:
        if text.startswith("from another machine"):
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def check(*words: str, code: int = 0) -> None:
    terminal = Terminal()
    try:
        with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
            found = main(words)
    except SystemExit as end:
        found = int(end.code or 0)
    loaded = sorted(HEAVY & set(sys.modules))
    if loaded or found != code:
        sys.exit(f"syncline {' '.join(words)}: exit code {found}, imported {loaded}\n{terminal.getvalue()}")


def check_all(race: str, run: str) -> None:
    """Every help, and the commands that only read."""
    sys.modules["matplotlib"] = None  # type: ignore[assignment] # it imports numpy; the report goes without pictures
    for command in COMMANDS:
        check(command, "--help")
    for bench in BENCHES:
        check("bench", bench, "--help")
    check("lint", "--rules")
    check("lint", run, code=1)
    check("lint", race, code=1)
    check("report", race)
    check("watch", race)
    open_feed(Path(race)).state()
    check("env")
    check("env", "--json")
    check("horovodrun", "--check-build")
    check("lab", "2", "100mbitx", "--", "true", code=2)
    check("new", str(Path(race) / "workload.py"))


if __name__ == "__main__":
    check_all(*sys.argv[1:])
