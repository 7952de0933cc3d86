"""Ranks that are forked from the prefork process behave as ranks that are started as new processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syncline.launch import prefork_client
from syncline.launch.prefork_client import Prefork, find_prefork
from tests.hunting import HUNTING, only_hunting
from tests.launch.forked import Forked
from tests.launch.runs import WAIT_TIMEOUT_S, Runs, wait_for

SERVER = ("-m", "syncline.server")
WAYS = {"forked": {}, "new": {"SYNCLINE_PREFORK": "0"}}
PROPERTIES = """
import json, random, signal, stat, threading, time, multiprocessing
def handler(number):
    found = signal.getsignal(number)
    return found if isinstance(found, int) else found.__name__
fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
found = {
    "argv": sys.argv, "path": sys.path, "flags": list(sys.flags), "executable": sys.executable,
    "folder": os.getcwd(), "umask": os.umask(0o077), "session": os.getsid(0) == os.getpgrp() == os.getpid(),
    "signals": [handler(number) for number in (1, 2, 13, 15, 17)], "nice": os.nice(0),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "environ": {name: value for name, value in os.environ.items() if name not in
                ("MASTER_PORT", "SYNCLINE_RUN_ID", "TORCHELASTIC_ERROR_FILE", "SYNCLINE_PREFORK")},
    "fds": fds[:3] + [fd for fd in fds[3:] if os.path.exists(f"/proc/self/fd/{fd}")],
    "title": open("/proc/self/cmdline", "rb").read().rstrip(b"\\0").decode().split("\\0"),
    "comm": open("/proc/self/comm").read(), "threads": len(os.listdir("/proc/self/task")),
    "streams": [[each.encoding, each.write_through, each.line_buffering, each.isatty()] for each in
                (sys.stdout, sys.stderr)], "hook": sys.excepthook is sys.__excepthook__,
    "main": [threading.current_thread().name, multiprocessing.current_process().name, __name__, __file__],
}
import numpy, torch
found |= {"numbers": torch.get_num_threads(), "dtype": str(torch.get_default_dtype())}
post(f"found{rank}", json.dumps(found))
post(f"random{rank}", json.dumps([random.random(), numpy.random.rand(), torch.initial_seed()]))
assert sys.stdin.read() == ""
kept = open(here / f"kept{rank}", "w")
kept.write("written")  # the file is never closed
import atexit, tempfile
atexit.register(lambda: say("exit", rank))
say(tempfile.gettempdir())
threading.Thread(target=lambda: (threading.main_thread().join(), say("thread", rank))).start()
while rank and not ((here / "kept0").exists() and (here / "kept0").read_text()):
    time.sleep(0.01)  # the failure of this rank ends rank 0
sys.exit("enough" if rank else 0)
"""


@pytest.fixture
def no_preforks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test without existing prefork processes, and end those that it starts."""
    started: dict[Any, Prefork] = {}
    monkeypatch.setattr(prefork_client, "running_preforks", started)
    monkeypatch.setattr(prefork_client, "PRELOADED", ())
    yield
    for each in started.values():
        each.close()


def test_forked_rank_equals_a_new_process(tmp_path: Path) -> None:
    told: dict[str, list[Any]] = {}
    for way, variables in WAYS.items():
        (tmp_path / way / "here").mkdir(parents=True)
        runs = Runs(tmp_path / way / "here")
        run = runs.run("run", "-n", "2", runs.script(PROPERTIES), "a", "--b", variables=variables)
        assert run.code == 1, run.describe()
        found = [runs.read(f"found{rank}") for rank in range(2)]
        draws = [json.loads(runs.read(f"random{rank}")) for rank in range(2)]
        assert not set(draws[0]) & set(draws[1])
        assert [(runs.folder / f"kept{rank}").read_text() for rank in range(2)] == ["written", "written"]
        said = [*found, json.dumps([sorted(run.out.splitlines()), run.err])]
        told[way] = [json.loads(text.replace(str(runs.folder), "HERE").replace(runs.mark, "MARK")) for text in said]
        runs.assert_nothing_left()
    for forked, new in zip(told["forked"][:2], told["new"][:2], strict=True):
        assert {name: value for name, value in forked.items() if value != new[name]} == {}
    assert told["forked"] == told["new"]
    assert "[1] enough" in told["new"][-1][1]


def _code(found: Prefork, rank: int) -> int | None:
    """Wait for the end of a rank; return its exit code."""
    wait_for(lambda: found.code(rank) is not None, "the rank ends")
    return found.code(rank)


def _ready(runs: Runs) -> list[int]:
    """Wait until both ranks run; return the process ids of the prefork process and of the two ranks."""
    return [int(runs.read("parent0")), *(int(runs.read(f"ready{rank}")) for rank in range(2))]


@pytest.mark.parametrize("attempt", range(100 if HUNTING else 1))
@pytest.mark.parametrize("victim", ["prefork process", "rank", "supervisor"])
def test_nothing_is_left_after_kill(runs: Runs, victim: str, attempt: int) -> None:
    script = runs.script(
        """
import torch
if rank == 0:
    post("parent0", os.getppid())
    if os.fork() == 0:
        until("never")  # a process that a rank has started must end, too
post(f"ready{rank}", os.getpid())
until("never")
"""
    )
    run = runs.start("run", "-n", "2", script)
    parent, first, _ = _ready(runs)
    os.kill({"prefork process": parent, "rank": first, "supervisor": run.pid}[victim], signal.SIGKILL)
    run.finish()
    assert run.code == (-9 if victim == "supervisor" else 137), run.describe()
    if victim == "prefork process":
        assert "the prefork process failed: it has ended; the ranks that it has started end with it" in run.err
    runs.assert_nothing_left()


@pytest.mark.usefixtures("no_preforks")
def test_a_prefork_process_that_has_ended_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import torch; open({str(tmp_path / 'ran')!r}, 'a').write('ran ')")
    target = (str(tmp_path / "script.py"),)
    pids = set()
    for times in range(1, 3):
        found, why = find_prefork(target, os.environ)
        assert found is not None, why
        rank = found.start(target, os.environ, (), [0, 1, 2])
        assert rank is not None
        assert _code(found, rank) == 0
        assert (tmp_path / "ran").read_text() == "ran " * times
        found.release(rank)
        assert found.process is not None
        pids.add(found.process.pid)
        found.process.kill()
        found.process.wait()
        assert found.code(-1) == -signal.SIGKILL
        assert found.start(target, os.environ, (), [0, 1, 2]) is None
    assert len(pids) == 2


@pytest.mark.usefixtures("no_preforks")
def test_other_variables_use_another_prefork_process() -> None:
    first, _ = find_prefork(SERVER, {**os.environ, "RANK": "0"})
    assert find_prefork(SERVER, {**os.environ, "RANK": "1", "MASTER_PORT": "7"})[0] is first
    for name in ("OMP_NUM_THREADS", "PYTHONPATH", "TORCH_LOGS", "LC_ALL"):
        assert find_prefork(SERVER, {**os.environ, name: "C"})[0] not in (None, first), name


@pytest.mark.usefixtures("no_preforks")
def test_unforkable_targets_are_new_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sets.py").write_text("import os\nos.environ.update(OMP_NUM_THREADS='3')\nimport torch")
    Path("plain.py").write_text("print('hello')")

    def why(*target: str, **variables: str) -> str:
        found, reason = find_prefork(target, {**os.environ, **variables})
        assert found is None
        return reason

    for target in (("sets.py",), ("-m", "sets")):
        assert why(*target) == "sets.py names OMP_NUM_THREADS, which is read when torch is imported"
    assert why("plain.py") == "plain.py does not name torch"
    assert why("/dev/stdin") == "/dev/stdin is not a file"
    assert why("-m", "http.server") == "-m http.server is not a file"
    assert why("--exec", "ls") == "it is not a Python program"
    assert why(*SERVER, SYNCLINE_PREFORK="0") == "SYNCLINE_PREFORK=0"
    monkeypatch.setattr(prefork_client, "GPUS", (str(tmp_path),))
    assert "there is a GPU" in why(*SERVER)
    monkeypatch.delattr(os, "pidfd_open")
    assert why(*SERVER) == "the kernel does not offer pidfd_open"


@pytest.mark.usefixtures("no_preforks")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "1 thread"),
        ("import os; os._exit(3)", "it has ended"),
    ],
)
def test_imports_that_forbid_a_fork(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)
    found, why = find_prefork(SERVER, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert found is None
    assert expected in why
    assert find_prefork(SERVER, {**os.environ, "PYTHONPATH": str(tmp_path)}) == (None, why)


@pytest.mark.usefixtures("no_preforks")
def test_imports_are_not_waited_for_after_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text("import signal; signal.pause()")
    monkeypatch.setattr(prefork_client, "PRELOADED", ("endless",))
    pressed = iter([False, False, True])
    found, why = find_prefork(SERVER, {**os.environ, "PYTHONPATH": str(tmp_path)}, lambda: next(pressed))
    assert (found, why) == (None, "the launcher stopped waiting for the prefork process")


def test_the_end_of_a_rank_is_that_of_a_new_process(tmp_path: Path) -> None:
    script = """
import atexit, os, sys, threading, time, torch
sys.modules["missing"] = None
class Temporary:
    def __init__(self, path):
        self.path = path
        open(path, "w").close()
    def __del__(self):
        os.unlink(self.path)
def forever():
    try:
        while True:
            time.perf_counter()
    except Exception:
        os._exit(7)
kept = Temporary(os.environ["KEPT"])
threading.Thread(target=forever, daemon=True).start()
atexit.register(lambda: print("handler", file=sys.stderr))
sys.exit("enough")
"""
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "profile.py").write_text("def mine(): return 42")
    (tmp_path / "here" / "script.py").write_text("import torch, profile, sys; sys.exit(profile.mine())")
    variables = {**os.environ, "KEPT": str(tmp_path / "kept")}
    for path, code, said in (("script.py", 1, "enough\nhandler\n"), ("here/script.py", 42, "")):
        with open(tmp_path / "err", "wb") as err:
            rank = Forked((str(tmp_path / path),), variables, [0, 1, err.fileno()])
        rank.join(WAIT_TIMEOUT_S)
        assert (rank.exitcode, (tmp_path / "err").read_text()) == (code, said), path
    assert not (tmp_path / "kept").exists()


def test_verbose_says_why_a_rank_is_a_new_process(runs: Runs) -> None:
    run = runs.run(
        "run", "-n", "1", "--verbose", runs.script("import torch; say('ran')"), variables={"SYNCLINE_PREFORK": "0"}
    )
    assert (run.code, run.out) == (0, "ran\n"), run.describe()
    assert "rank 0 is started as a new process: SYNCLINE_PREFORK=0" in run.err


@only_hunting
def test_forks_keep_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch")
    target = (str(tmp_path / "script.py"),)
    found, why = find_prefork(target, os.environ)
    assert found is not None, why
    counts = []
    for _ in range(50):
        rank = found.start(target, os.environ, (), [0, 1, 2])
        assert rank is not None
        assert _code(found, rank) == 0
        found.release(rank)
        with contextlib.suppress(OSError):
            assert found.process is not None
            counts.append(len(os.listdir(f"/proc/{found.process.pid}/fd")))
    assert max(counts[10:]) <= min(counts[10:]) + 1
