"""`syncline run` with real processes: what scripts find, what is shown, what comes back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.launch.runs import WAIT_TIMEOUT_S, Runs, wait_for


def test_rank_0_is_plain_and_the_others_have_their_rank(runs: Runs) -> None:
    script = runs.script(
        """
say(f"out of {rank}")
say(f"err of {rank}", to=2)
say("10%\\r99%\\rdone")
if rank > 0:
    print("no end", end="")
"""
    )
    run = runs.run("run", "-n", "3", script)
    assert run.code == 0, run.describe()
    lines = run.out.splitlines()
    for rank in (1, 2):
        assert [line for line in lines if line.startswith(f"[{rank}] ")] == [
            f"[{rank}] out of {rank}",
            f"[{rank}] done",
            f"[{rank}] no end",
        ]
    assert "out of 0" in lines
    assert "10%\r99%\rdone\n" in run.out
    assert sorted(run.err.splitlines()) == ["[1] err of 1", "[2] err of 2", "err of 0"]
    runs.assert_nothing_left()


def test_lines_come_while_the_worker_runs(runs: Runs) -> None:
    run = runs.start("run", "-n", "2", runs.script('print(f"line of {rank}")\nuntil("go")'))
    wait_for(lambda: "[1] line of 1\n" in run.out, "the line is passed on")
    runs.post("go")
    assert run.finish().code == 0


def test_variables_of_a_worker(runs: Runs) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS"]
    names += ["TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "PYTHONUNBUFFERED", "SYNCLINE_SERVERS"]
    hidden = ["SYNCLINE_KEY", "SYNCLINE_SUPERVISOR", "TORCHELASTIC_RUN_ID", "SYNCLINE_HANDLERS"]
    script = runs.script(
        f"""
import json
found = {{name: os.environ.get(name) for name in {names + hidden!r}}}
found["run"] = os.environ["SYNCLINE_RUN_ID"]
post(f"told{{rank}}", json.dumps(found))
"""
    )
    outer = {"OMP_NUM_THREADS": "7", "SYNCLINE_SERVERS": "3"}  # of a run around this one
    run = runs.run("run", "-n", "2", script, variables=outer)
    assert run.code == 0, run.describe()
    first, second = json.loads(runs.read("told0")), json.loads(runs.read("told1"))
    assert [first[name] for name in names] == ["0", "2", "0", "2", "0", "127.0.0.1", "7", "True", "0", "1", "0"]
    assert [second[name] for name in names] == ["1", "2", "1", "2", "0", "127.0.0.1", "7", "True", "0", "1", "0"]
    assert [first[name] for name in hidden] == [None] * 4
    assert first["run"] == second["run"] != ""


LOOK = """
import atexit, json, threading
def look():
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv, "path": sys.path, "name": __name__, "package": __package__,
        "spec": None if __spec__ is None else __spec__.name, "main": main.__dict__ is globals(),
        "pickled": __import__("pickle").dumps(look).count(b"__main__"),
    }
print("BEGIN", __file__, __cached__, json.dumps(look()))
atexit.register(lambda: print("EXIT", json.dumps(look())))
def later():
    threading.main_thread().join()
    print("LATER", json.dumps(look()))
threading.Thread(target=later).start()
"""


@pytest.mark.parametrize(
    "what",
    [["look.py", "a", "--b"], ["sub/look.py"], ["-m", "sub.look", "-n", "3"], ["-m", "package", "x"], ["folder", "y"]],
)
def test_script_runs_as_under_plain_python(runs: Runs, what: list[str]) -> None:
    for name in ("look.py", "sub/look.py", "package/__main__.py", "folder/__main__.py"):
        runs.script(LOOK, name)
    (runs.folder / "package" / "__init__.py").touch()
    environ = runs.environ()
    plain = subprocess.run(
        [sys.executable, *what], cwd=runs.folder, env=environ, capture_output=True, text=True, timeout=WAIT_TIMEOUT_S
    )
    run = runs.run("run", "-n", "1", *what)
    assert plain.returncode == run.code == 0, (plain.stderr, run.describe())
    assert "LATER" in plain.stdout
    assert run.out == plain.stdout


def test_a_traceback_is_shown_once_with_its_rank(runs: Runs) -> None:
    script = runs.script(
        """
import threading
def deeper():
    raise ValueError("no such shape")
if rank == 1:
    threading.Thread(target=lambda: print("thread ended")).start()
    deeper()
until("never")
"""
    )
    run = runs.run("run", "-n", "3", script)
    assert run.code == 1
    assert run.err.count("Traceback") == run.err.count("ValueError: no such shape") == 1, run.err
    assert run.err.startswith("syncline: rank 1 failed (exit code 1)\nTraceback (most recent call last):\n")
    assert "worker.py" not in run.err
    assert "in deeper" in run.err
    assert run.out == "[1] thread ended\n"
    runs.assert_nothing_left()


def test_a_script_that_cannot_be_compiled(runs: Runs) -> None:
    run = runs.run("run", "-n", "2", runs.script("def f(:\n"))
    assert run.code == 1
    assert run.err.count("Traceback") == 0
    assert "SyntaxError: invalid syntax" in run.err


def test_a_hook_of_the_scripts_own_shows_the_error(runs: Runs) -> None:
    script = runs.script(
        "sys.excepthook = lambda kind, error, trace: print('hook saw', error)\nraise ValueError('boom')"
    )
    run = runs.run("run", "-n", "1", script)
    assert (run.code, run.out) == (1, "hook saw boom\n")
    assert run.err == "syncline: rank 0 failed (exit code 1): ValueError: boom\n"


@pytest.mark.parametrize(
    ("how", "code", "err"),
    [
        ("sys.exit(3)", 3, "syncline: rank 1 failed (exit code 3)\n"),
        ("sys.exit('enough')", 1, "[1] enough\nsyncline: rank 1 failed (exit code 1)\n"),
        ("sys.exit()", 0, ""),
        ("raise KeyboardInterrupt", 130, "syncline: rank 1 failed (exit code 130)\n"),
        ("os.abort()", 134, "syncline: rank 1 was killed by signal 6 (SIGABRT)\n"),
    ],
)
def test_exit_codes(runs: Runs, how: str, code: int, err: str) -> None:
    run = runs.run("run", "-n", "2", runs.script(f"if rank == 1:\n    {how}\n"))
    assert (run.code, run.err) == (code, err)


def test_processes_that_a_rank_leaves_behind_end_with_it(runs: Runs) -> None:
    script = runs.script(
        """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time\\nwhile True: time.sleep(1)"])
post(f"child{rank}", child.pid)
if rank == 0:
    until("go")
"""
    )
    run = runs.start("run", "-n", "2", script)
    child, kept = int(runs.read("child1")), int(runs.read("child0"))
    wait_for(lambda: child not in runs.processes(), "the child of rank 1 is ended while rank 0 runs")
    assert kept in runs.processes()
    runs.post("go")
    assert run.finish().code == 0, run.describe()
    runs.assert_nothing_left()


def test_plain_torch_distributed(runs: Runs) -> None:
    script = runs.script(
        """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
say("sum", int(total))
dist.destroy_process_group()
"""
    )
    run = runs.run("run", "-n", "2", script)
    assert run.code == 0, run.describe()
    assert sorted(run.out.splitlines()) == ["[1] sum 3", "sum 3"]


def test_syncline_itself(runs: Runs) -> None:
    script = runs.script(
        """
import torch, syncline as sl
with sl.init() as world:
    say(world.rank, "of", world.size, "sum", int(sl.allreduce(torch.ones(1), op="sum")))
"""
    )
    run = runs.run("run", "-n", "2", script)
    assert run.code == 0, run.describe()
    assert sorted(run.out.splitlines()) == ["0 of 2 sum 2", "[1] 1 of 2 sum 2"]


def test_servers_end_when_the_workers_have_ended(runs: Runs) -> None:
    server = runs.script(
        """
keys = ("SYNCLINE_ROLE", "SYNCLINE_SERVER", "SYNCLINE_SERVERS", "MASTER_ADDR")
say(*(os.environ[key] for key in keys), "RANK" in os.environ)
post("serving" + os.environ["SYNCLINE_SERVER"])
until("never")
""",
        "server.py",
    )
    worker = runs.script("until('serving0'); until('serving1'); say(os.environ['SYNCLINE_SERVERS'])")
    run = runs.run(worker, servers=server)
    assert run.code == 0, run.describe()
    expected = ["2", "[1] 2", "[server 0] server 0 2 127.0.0.1 False", "[server 1] server 1 2 127.0.0.1 False"]
    assert sorted(run.out.splitlines()) == sorted(expected)
    assert run.err == ""
    runs.assert_nothing_left()


def test_failed_server_fails_the_run(runs: Runs) -> None:
    server = runs.script(
        "if os.environ['SYNCLINE_SERVER'] == '1': raise ValueError('full')\nuntil('never')", "server.py"
    )
    run = runs.run(runs.script("until('never')"), servers=server)
    assert run.code == 1
    assert run.err.startswith("syncline: server 1 failed (exit code 1)\nTraceback")
    runs.assert_nothing_left()
