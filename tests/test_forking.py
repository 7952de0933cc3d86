"""Forked processes behave like new Python processes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.forking import forked_python
from tests.launching import Ended, finish, start

SCRIPT = """
import atexit, os, sys, threading
atexit.register(print, "exit handlers run")
print(__name__, sys.argv[1:], os.environ["ONE"], threading.active_count(), "torch" in sys.modules)
print(sorted(int(file) for file in os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")))
"""


def run(*command: str) -> Ended:
    (ended,) = finish([start(command, {"ONE": "1"})])
    return ended


def test_forked_process_has_its_own_arguments_variables_and_files(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    for command in (["-c", SCRIPT], [str(path)]):
        ended = run(*command, "a", "b")
        assert ended == Ended(0, "__main__ ['a', 'b'] 1 1 True\n[0, 1, 2] 4\nexit handlers run\n", "")
    assert run("-m", "json.tool", "--help").out.startswith("usage: python -m json.tool")


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
    ],
)
def test_exit_code_and_stderr_are_forwarded(text: str, code: int, says: str) -> None:
    ended = run("-c", text)
    assert ended.code == code
    assert ended.err.endswith(says)


WAIT = "import signal; print('waits', flush=True); signal.pause()"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_forked_process_ends_with_its_client(number: signal.Signals) -> None:
    process = start(["-c", WAIT], {})
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(number)
    assert process.communicate(timeout=60) == ("", ""), "the forked process has closed its output"
    assert process.returncode == -number


@pytest.mark.parametrize(
    ("command", "environ"),
    [
        (["-W", "error", "-c", ""], {"OMP_NUM_THREADS": "1"}),
        (["-c", ""], {"OMP_NUM_THREADS": "2"}),
        (["-c", ""], {"OMP_NUM_THREADS": "1", "TORCH_LOGS": "all"}),
    ],
)
def test_options_read_at_startup_need_a_new_process(command: list[str], environ: dict[str, str]) -> None:
    assert forked_python(command, environ) == [sys.executable, *command]
