"""How runs end that do not end well: killed ranks, killed supervisors, Ctrl-C. Nothing is ever left."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from tests.hunting import HUNTING
from tests.launch.runs import Runs, wait_for

REPETITIONS = 100 if HUNTING else 2

WAITING = """
post(f"ready{rank}", os.getpid())
until("go")
"""


@pytest.mark.hunt
@pytest.mark.parametrize("repetition", range(REPETITIONS))
def test_a_killed_rank_ends_all(runs: Runs, repetition: int) -> None:
    run = runs.start("run", "-n", "4", runs.script(WAITING))
    pids = [int(runs.read(f"ready{rank}")) for rank in range(4)]
    os.kill(pids[repetition % 4], signal.SIGKILL)
    run.finish()
    assert run.code == 137, run.describe()
    assert run.err == f"syncline: rank {repetition % 4} was killed by signal 9 (SIGKILL)\n"
    runs.assert_nothing_left()


SURVIVING = """
post(f"ready{rank}", os.getpid())
if rank == 0:
    import json
    from datetime import timedelta
    from torch._C._distributed_c10d import TCPStore
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
    post("watching")
    while store.add("syncline/dead", 0) == 0:
        time.sleep(0.01)
    say(json.loads(store.get("syncline/dead/2")))
    post("go")
until("go")
post(f"done{rank}")
"""


@pytest.mark.hunt
@pytest.mark.parametrize("repetition", range(REPETITIONS))
def test_other_workers_continue_and_are_informed(runs: Runs, repetition: int) -> None:
    run = runs.start("run", "-n", "4", "--on-failure", "continue", runs.script(SURVIVING))
    pid = int(runs.read("ready2"))
    if repetition % 2:  # now and then it dies before anybody looks
        runs.read("watching")
    os.kill(pid, signal.SIGKILL)
    run.finish()
    assert run.code == 137, run.describe()
    assert run.out == "{'rank': 2, 'reason': 'it was killed by signal 9 (SIGKILL)'}\n"
    assert run.err.splitlines() == [
        "syncline: rank 2 was killed by signal 9 (SIGKILL); the others go on",
        "syncline: rank 2 failed; the others ended by themselves",
    ]
    assert [(runs.folder / f"done{rank}").exists() for rank in range(4)] == [True, True, False, True]
    runs.assert_nothing_left()


WITH_A_CHILD = """
import subprocess
subprocess.Popen(["sleep", "1000"])
post(f"ready{rank}", os.getpid())
until("go")
"""


@pytest.mark.hunt
@pytest.mark.parametrize("repetition", range(REPETITIONS))
def test_ranks_end_with_a_killed_supervisor(runs: Runs, repetition: int) -> None:
    run = runs.start("run", "-n", "4", runs.script(WITH_A_CHILD))
    for rank in range(repetition % 5):  # at any stage of the start
        runs.read(f"ready{rank}")
    os.kill(run.pid, signal.SIGKILL)
    run.finish()
    assert run.code == -signal.SIGKILL
    runs.assert_nothing_left()


def test_on_failure_continue(runs: Runs) -> None:
    script = runs.script(
        """
if rank == 1:
    raise ValueError("boom")
until("go")
say("done", rank)
"""
    )
    run = runs.start("run", "-n", "3", "--on-failure", "continue", script)
    wait_for(lambda: "ValueError: boom" in run.err, "the failure is told while the others run")
    runs.post("go")
    run.finish()
    assert run.code == 1
    assert sorted(run.out.splitlines()) == ["[2] done 2", "done 0"]
    assert run.err.count("Traceback") == 1
    assert run.err.startswith("syncline: rank 1 failed (exit code 1); the others go on\nTraceback")
    assert run.err.endswith("syncline: rank 1 failed; the others ended by themselves\n")


POLITE = """
import signal
def leave(number, frame):
    say("leaving by", signal.Signals(number).name)
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, leave)
post(f"ready{rank}")
until("never")
"""


@pytest.mark.parametrize(
    ("sent", "passed_on", "code"),
    [
        (signal.SIGINT, "SIGINT", 130),
        (signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGHUP, "SIGTERM", 129),
    ],
)
def test_signals_are_forwarded(runs: Runs, sent: signal.Signals, passed_on: str, code: int) -> None:
    run = runs.start("run", "-n", "2", runs.script(POLITE))
    for rank in range(2):
        runs.read(f"ready{rank}")
    os.kill(run.pid, sent)
    run.finish()
    assert run.code == code, run.describe()
    assert sorted(run.out.splitlines()) == [f"[1] leaving by {passed_on}", f"leaving by {passed_on}"]
    assert run.err == ""
    runs.assert_nothing_left()


def test_ctrl_c_is_quiet(runs: Runs) -> None:
    run = runs.start("run", "-n", "2", runs.script(WAITING))
    for rank in range(2):
        runs.read(f"ready{rank}")
    os.kill(run.pid, signal.SIGINT)
    run.finish()
    assert (run.code, run.out, run.err) == (130, "", "")
    runs.assert_nothing_left()


STUBBORN = """
import signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: post(f"asked{rank}"))
post(f"ready{rank}")
until("never")
"""


def test_ctrl_c_again_kills_at_once(runs: Runs) -> None:
    """Long before the grace is over: the supervisor is kept from counting by being asked again and again."""
    run = runs.start("run", "-n", "2", runs.script(STUBBORN))
    for rank in range(2):
        runs.read(f"ready{rank}")
    os.kill(run.pid, signal.SIGINT)
    for rank in range(2):
        runs.read(f"asked{rank}")

    def ask_again() -> bool:
        with suppress(ProcessLookupError):  # it may have ended since we last looked
            os.kill(run.pid, signal.SIGINT)
        time.sleep(0.05)
        return not run.process.is_alive()

    wait_for(ask_again, "the run ends")
    assert run.code == 130, run.describe()
    runs.assert_nothing_left()


def test_workers_that_ignore_signals_are_killed(runs: Runs) -> None:
    run = runs.start("run", "-n", "2", runs.script("if rank == 1:\n    until('asked0'); sys.exit(4)\n" + STUBBORN))
    runs.read("ready0")
    (runs.folder / "asked0").touch()
    run.finish()
    assert run.code == 4, run.describe()
    assert run.err == "syncline: rank 1 failed (exit code 4)\n"
    assert (
        "syncline: rank 0 may take 4 s more to end, then a signal ends them; press Ctrl-C to end them at once\n"
        in run.all_err
    )
    runs.assert_nothing_left()
