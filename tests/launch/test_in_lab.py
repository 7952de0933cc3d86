"""Runs in the lab."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from syncline.errors import WorldError
from syncline.launch.lab import Lab
from tests.launch.runs import Runs


@pytest.fixture(scope="module", autouse=True)
def lab() -> None:
    try:
        Lab(1, "open", check=False).close()
    except WorldError as error:
        pytest.skip(str(error))


TOLD = """
import json
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
interfaces = [name for _, name in __import__("socket").if_nameindex()]
post(f"told{rank}", json.dumps([*(os.environ[name] for name in names), os.environ["GLOO_SOCKET_IFNAME"] in interfaces]))
if rank == 0:
    import torch.distributed as dist
    dist.init_process_group("gloo", rank=0, world_size=1)   # the store of host 0 is reached from inside
say("done", os.uname().nodename)
"""


def test_ranks_on_the_hosts_of_a_lab(runs: Runs) -> None:
    run = runs.run("run", "-n", "4", "--lab", "2@100mbit", runs.script(TOLD))
    assert run.code == 0, run.describe()
    found = [json.loads(runs.read(f"told{rank}")) for rank in range(4)]
    assert [one[:3] for one in found] == [["0", "2", "0"], ["1", "2", "0"], ["0", "2", "1"], ["1", "2", "1"]]
    assert [one[5:] for one in found] == [["1", True]] * 4
    assert len({one[3] for one in found}) == 1
    assert sorted(run.out.splitlines()) == ["[1] done lab0", "[2] done lab1", "[3] done lab1", "done lab0"]
    assert run.err.count("\n") == 1
    assert run.err.startswith("syncline: a lab of 2 hosts at 100mbit, measured ")
    assert "no latency of its own" in run.err
    runs.assert_nothing_left()


MEMBER = """
post(f"member{os.environ['SYNCLINE_MEMBER']}", f"{os.getpid()} {os.uname().nodename}")
until("go")
"""


def test_lost_rank_is_started_again_on_its_host(runs: Runs) -> None:
    options = ("--lab", "2@open", "--elastic", "1:2", "--restart", "1", "--folder", "job")
    run = runs.start("run", *options, runs.script(MEMBER))
    os.kill(int(runs.read("member1").split()[0]), signal.SIGKILL)
    assert runs.read("member2").split()[1] == "lab1"
    runs.read("member0")
    runs.post("go")
    assert run.finish().code == 0, run.describe()
    runs.assert_nothing_left()


CUT_LINK = """
import torch, syncline as sl
member = int(os.environ["SYNCLINE_MEMBER"])
world = sl.init()
post(f"member{member}", os.getpid())
while world.size == 3:
    sl.allreduce(torch.ones(100_000), op="sum")
world.close()
"""


def test_cut_link_is_found_and_the_higher_rank_is_left_out(runs: Runs) -> None:
    """Hosts 1 and 2 cannot reach each other, and both reach host 0 and the launcher."""
    options = ("--lab", "3@open", "--elastic", "1:3", "--lost-after", "6", "--folder", "job")
    run = runs.start("run", *options, runs.script(CUT_LINK))
    pids = [runs.read(f"member{member}") for member in range(3)]
    for host, other in ((1, 2), (2, 1)):
        # A neighbour with a wrong address: packets to it are lost, and nobody is told.
        address = ("10.77.0.1", "10.77.0.2", "10.77.0.3")[other]
        entry = (address, "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "e0")
        subprocess.run(["nsenter", "-t", pids[host], "-n", "ip", "neigh", "replace", *entry], check=True)
    assert run.finish().code == 0, run.describe()
    assert "team 2 continues with 2 workers (members [0, 1])" in run.err
    runs.assert_nothing_left()


def test_any_command_on_each_host(runs: Runs, tmp_path: Path) -> None:
    # Rank 1 fails only when rank 0 has had its say: its failure ends the others.
    said = tmp_path / "said"
    wait = f"until [ $RANK = 0 ] || [ -e {said} ]; do :; done"
    script = f"{wait}; echo $RANK of $WORLD_SIZE; touch {said}; exit $RANK"
    run = runs.run("lab", "2", "100mbit", "--", "sh", "-c", script)
    assert run.code == 1, run.describe()
    assert "[0] 0 of 2\n" in run.out
    assert "[1] 1 of 2\n" in run.out
    assert run.err.splitlines()[1:] == ["syncline: rank 1 failed (exit code 1)"]
    runs.assert_nothing_left()


def test_a_command_that_does_not_exist(runs: Runs) -> None:
    run = runs.run("lab", "1", "100mbit", "--", "no-such-command")
    assert run.code == 127, run.describe()
    assert "[0] syncline: cannot run 'no-such-command': No such file or directory\n" in run.err
