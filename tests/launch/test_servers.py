"""Servers and the evaluator as processes of their own, beside the ranks: here, on hosts, in the lab.

The server is an echo (`tests/server/echo_server.py`): what a real one does is tested elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syncline.errors import WorldError
from syncline.launch.lab import Lab
from tests.hunting import only_hunting
from tests.launch.runs import Runs
from tests.launch.sshd import SSHD, ssh_server
from tests.launching import ROOT

IMPORT_TESTS = f"""
sys.path.insert(0, {str(ROOT)!r})
"""
ECHO = (
    IMPORT_TESTS
    + """
from syncline.server import server
from syncline.server.__main__ import main
from tests.server.network_cases import serve
server.__dict__["serve"] = serve
sys.exit(main())
"""
)


def echo_servers(runs: Runs) -> dict[str, Any]:
    """Two servers from a file that can be forked, as the workers are; `tests/server/echo_server.py` as a script."""
    return {"servers": 2, "server": (runs.script(ECHO, "echo.py"),)}


USE = """
import syncline as sl
from syncline.server.network import server_network
from tests.server.network_cases import use
with sl.init() as world:
    answers = use(world)
    network = server_network(world)
    say(world.size, network.servers, network.dedicated, *map(int, answers))
"""


@only_hunting
def test_servers_that_nobody_uses_end_quietly(runs: Runs) -> None:
    """The real ones: they wait for workers that never come."""
    script = runs.script("import syncline as sl\nwith sl.init() as world: say(world.size)")
    run = runs.run("run", "-n", "2", "--servers", "2", script)
    assert run.code == 0, run.describe()
    assert sorted(run.out.splitlines()) == ["2", "[1] 2"]
    assert run.err == ""
    runs.assert_nothing_left()


STORE = """
import torch
import syncline as sl
with sl.init() as world, sl.server.store(1000) as space:
    space.push(None, torch.full((1000,), 1.0 + world.rank)).wait()
    world.barrier()
    found = space.pull().wait()
    say(float(found.min()), float(found.max()))
    world.barrier()
"""


@only_hunting
def test_the_real_servers_keep_what_workers_push(runs: Runs) -> None:
    run = runs.run("run", "-n", "2", "--servers", "2", runs.script(STORE))
    assert run.code == 0, run.describe()
    assert sorted(run.out.splitlines()) == ["3.0 3.0", "[1] 3.0 3.0"]
    assert run.err == ""
    runs.assert_nothing_left()


LOSING = """
import signal
import syncline as sl
from syncline.server.network import server_network
from tests.server.network_cases import ask, say_goodbye
world = sl.init(transport="zeromq")
network = server_network(world)
ask(network, network.servers[0], 0.0)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while 1 not in network.transport.lost():
    time.sleep(0.01)
say("lost", *network.transport.lost(), "and go on:", int(ask(network, network.servers[1], 5.0)))
say_goodbye(network)
os._exit(0)  # its world is broken: nothing to close
"""


def test_servers_outlive_a_killed_worker(runs: Runs) -> None:
    run = runs.run(runs.script(IMPORT_TESTS + LOSING), job={**echo_servers(runs), "policy": "continue"})
    assert run.code == 137, run.describe()
    assert run.out == "lost 1 and go on: 3005\n"
    ours = [line for line in run.err.splitlines() if line.startswith("syncline: ")]
    assert ours == [
        "syncline: rank 1 was killed by signal 9 (SIGKILL); the others go on",
        "syncline: rank 1 failed; the others ended by themselves",
    ]
    runs.assert_nothing_left()


DYING = """
import signal
import syncline as sl
from syncline.server.network import server_network
world = sl.init()
network = server_network(world)
post(f"joined{rank}")
while 2 not in network.transport.lost():
    time.sleep(0.01)
say("server", *network.transport.lost(), "is lost")
os._exit(0)
"""
KILLED = """
import signal
from syncline.server.network import join_network
from syncline.server.network import read_roles
roles = read_roles()
network = join_network(roles)
until("joined0"); until("joined1")
if roles.number == 0:
    os.kill(os.getpid(), signal.SIGKILL)
until("never")
"""


def test_workers_learn_of_a_killed_server(runs: Runs) -> None:
    killed = runs.script(KILLED, "server.py")
    job = {"servers": 2, "server": (killed,), "policy": "continue"}
    run = runs.run(runs.script(DYING), job=job)
    assert run.code == 137, run.describe()
    assert sorted(run.out.splitlines()) == ["[1] server 2 is lost", "server 2 is lost"]
    assert "syncline: server 0 was killed by signal 9 (SIGKILL); the others go on" in run.err
    runs.assert_nothing_left()


def test_servers_import_a_module_of_handlers(runs: Runs) -> None:
    (runs.folder / "my_handlers.py").write_text("print('imported by', __import__('os').environ['SYNCLINE_ROLE'])")
    run = runs.run(runs.script(IMPORT_TESTS + USE), job={**echo_servers(runs), "handlers": "my_handlers"})
    assert run.code == 0, run.describe()
    assert sorted(run.out.splitlines()) == [
        "2 (2, 3) True 2000 3000",
        "[1] 2 (2, 3) True 2001 3001",
        "[server 0] imported by server",
        "[server 1] imported by server",
    ]
    assert run.err == ""
    runs.assert_nothing_left()


def test_handlers_that_are_not_there_are_named(runs: Runs) -> None:
    run = runs.run("run", "-n", "1", "--servers", "1", "--handlers", "no_such_module", runs.script("until('never')"))
    assert run.code == 1, run.describe()
    assert "SYNCLINE_HANDLERS=no_such_module: there is no module 'no_such_module'" in run.err
    runs.assert_nothing_left()


EVALUATE = """
if os.environ["SYNCLINE_ROLE"] == "evaluator":
    say(*(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")), os.environ["SYNCLINE_WORKERS"])
    until("ended0"); until("ended1")
    post("evaluating")
    until("go")
    say("evaluated")
else:
    post(f"ended{rank}")
"""


def test_an_evaluator_finishes_its_work(runs: Runs) -> None:
    run = runs.start(runs.script(EVALUATE), job={"evaluators": 1})
    runs.read("evaluating")
    runs.post("go")
    run.finish()
    assert run.code == 0, run.describe()
    assert run.out.splitlines() == ["[evaluator] False False False 2", "[evaluator] evaluated"]
    runs.assert_nothing_left()


def test_failed_evaluator_fails_the_run(runs: Runs) -> None:
    script = runs.script("if os.environ['SYNCLINE_ROLE'] == 'evaluator': raise ValueError('odd')\nuntil('never')")
    run = runs.run(script, job={"evaluators": 1})
    assert run.code == 1
    assert run.err.startswith("syncline: evaluator failed (exit code 1)\nTraceback")
    runs.assert_nothing_left()


WATCH = """
import syncline as sl
from syncline.server.network import server_network
from tests.server.network_cases import ask, say_goodbye, serve
with sl.init() as world:
    network = server_network(world)
    if os.environ["SYNCLINE_ROLE"] == "evaluator":
        answers = [int(ask(network, server, 7.0)) for server in network.servers]
        say(world.size, network.me, network.workers, network.servers, network.evaluators, *answers)
        post("evaluated")
    else:
        task = None if network.dedicated else world.runtime.spawn(serve, network)
        until("evaluated")
        world.barrier()
        say_goodbye(network)
        assert task is None or task.join(60)
        world.barrier()
"""


@pytest.mark.parametrize("dedicated", [False, True])
def test_an_evaluator_asks_the_servers(runs: Runs, dedicated: bool) -> None:
    job = {**(echo_servers(runs) if dedicated else {}), "evaluators": 1}
    run = runs.run(runs.script(IMPORT_TESTS + WATCH), job=job)
    assert run.code == 0, run.describe()
    whom = "4 (0, 1) (2, 3) (4,) 2007 3007" if dedicated else "2 (0, 1) (0, 1) (2,) 7 1007"
    assert run.out == f"[evaluator] 1 {whom}\n"
    runs.assert_nothing_left()


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ssh_server(tmp_path_factory.mktemp("sshd")) as command:
        yield command


@pytest.mark.skipif(SSHD is None or not os.access("/run", os.W_OK), reason="needs sshd and the right to start it")
@pytest.mark.hunt
@pytest.mark.skipif(not os.environ.get("SYNCLINE_HUNT"), reason="half a minute of processes: SYNCLINE_HUNT=1 runs it")
def test_servers_on_hosts(runs: Runs, ssh: str) -> None:
    script = Path(runs.script(IMPORT_TESTS + USE))
    script.write_text(script.read_text().replace('os.environ["HERE"]', repr(str(runs.folder))))
    variables = {"SYNCLINE_SSH": ssh, "PYTHONPATH": str(ROOT)}
    job = {"servers": 2, "server": ("-m", "tests.server.echo_server")}  # a script has no HERE there
    run = runs.run(str(script), job=job, where="alpha:1,localhost:1", variables=variables)
    assert run.code == 0, run.describe()
    assert sorted(run.out.splitlines()) == ["2 (2, 3) True 2000 3000", "[1] 2 (2, 3) True 2001 3001"]
    runs.assert_nothing_left()


def test_servers_in_the_lab(runs: Runs) -> None:
    try:
        Lab(1, "open", check=False).close()
    except WorldError as error:
        pytest.skip(str(error))
    run = runs.run(runs.script(IMPORT_TESTS + USE), job=echo_servers(runs), where="2@100mbit")
    assert run.code == 0, run.describe()
    assert sorted(run.out.splitlines()) == ["2 (2, 3) True 2000 3000", "[1] 2 (2, 3) True 2001 3001"]
    runs.assert_nothing_left()
