"""mpiexec on the hosts of the lab: bytes cross the links, puts land while their target computes, nothing is left."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from syncline.cli import placement, run, train
from syncline.errors import IncompatibleError, UnsupportedError, WorldError
from syncline.launch import mpi
from syncline.launch.lab import Lab, NamespaceShell
from syncline.launch.mpi import mpiexec_programs
from syncline.launch.processes import ProcessExit, read_error_report
from syncline.launch.programs import LaunchHost
from syncline.launch.start import SERVER, Job
from syncline.launch.worker import report
from tests.launch.runs import Runs

HYDRA = "HYDRA build details:"
OPEN = "mpiexec (Open MPI) 5.0.6"
needs_mpich = pytest.mark.skipif(mpi.why_no_mpi(lab=True) is not None, reason=f"no MPICH here: {mpi.why_no_mpi(True)}")


@pytest.fixture
def lab() -> None:
    try:
        Lab(1, "open", check=False).close()
    except WorldError as error:
        pytest.skip(str(error))


PLACES = [
    LaunchHost(
        name=f"lab{number}",
        slots=2,
        enter=("nsenter", f"--net={number}"),
        variables={"OMP_NUM_THREADS": "1"},
        address=f"10.77.0.{number + 1}",
        interface="e0",
        remote_shell="/proc/7/fd/9",
    )
    for number in range(2)
]


def use_mpiexec(monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    monkeypatch.setattr(mpi, "find_mpiexec", lambda: "/opt/mpiexec")
    monkeypatch.setattr(mpi, "mpiexec_version", lambda path: says)
    monkeypatch.setattr(mpi, "installed_mpis", list)
    monkeypatch.setattr(mpi, "is_installed", lambda name: True)


# The command.


def test_mpiexec_runs_on_the_first_host_of_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    use_mpiexec(monkeypatch, HYDRA)
    monkeypatch.setenv("MPIR_CVAR_ASYNC_PROGRESS", "0")
    (program,), nobody = mpiexec_programs(PLACES, ["train.py"], {"SYNCLINE_WORKERS": "4"}, 1, SERVER, plain=False)
    assert nobody == []
    assert program.enter == ("nsenter", "--net=0")
    assert program.prefix == ""
    words = " ".join(program.target)
    assert words.startswith(
        "--exec /opt/mpiexec -prepend-rank -launcher ssh -launcher-exec /proc/7/fd/9 -iface e0 "
        "-hosts 10.77.0.1:2,10.77.0.2:2 -n 4 "
    )
    assert words.endswith("train.py : " + " ".join(program.target[-6:-2]) + " -m syncline.server")
    told = program.variables
    assert (told["SYNCLINE_TRANSPORT"], told["FI_PROVIDER"], told["FI_TCP_IFACE"]) == ("mpi", "tcp", "e0")
    assert told["MPIR_CVAR_ASYNC_PROGRESS"] == "0", "the user's own word"
    assert told["MPIR_CVAR_CH4_PROGRESS_THROTTLE"] == "1"
    assert "RANK" not in told, "that is mpiexec's to say"


def test_mpiexec_here_uses_any_network(monkeypatch: pytest.MonkeyPatch) -> None:
    use_mpiexec(monkeypatch, HYDRA)
    ((program,),) = mpiexec_programs([LaunchHost(name="localhost", slots=2)], ["train.py"], {})
    assert program.target[:4] == ("--exec", "/opt/mpiexec", "-n", "2")
    assert program.prefix is None
    assert "FI_PROVIDER" not in program.variables


def test_in_the_lab_it_must_be_mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    use_mpiexec(monkeypatch, OPEN)
    assert mpi.why_no_mpi() is None
    with pytest.raises(
        UnsupportedError, match="started by MPICH's mpiexec, and /opt/mpiexec is another's; pip install"
    ):
        mpiexec_programs(PLACES, ["train.py"], {})


def test_first_failed_mpi_rank_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SYNCLINE_TRANSPORT", "mpi")
    path = str(tmp_path / "error.json")
    for rank, words in ((1, "boom"), (0, "left alone")):
        monkeypatch.setenv("PMI_RANK", str(rank))
        report(ValueError(words), path)
    found = read_error_report(path)
    assert found is not None
    assert (found.rank, found.summary) == (1, "ValueError: boom")
    assert [each.name for each in tmp_path.iterdir()] == ["error.json"]
    ended = ProcessExit(name="rank 1", rank=0, code=1, report=found)
    assert ProcessExit.from_json(ended.to_json()) == ended


# The remote shell of the lab.


def test_remote_shell_runs_a_command_on_the_host() -> None:
    shell = NamespaceShell({"10.0.0.2": ("env", "HOST=two words")})
    try:
        run = subprocess.run(
            [shell.path, "-x", "10.0.0.2", '"echo"', "$HOST"], capture_output=True, text=True, check=True
        )
        assert run.stdout == "two words\n"
        lost = subprocess.run([shell.path, "-x", "10.0.0.3", "echo"], capture_output=True, text=True, check=False)
        assert (lost.returncode, lost.stderr) == (255, "syncline: the lab has no host 10.0.0.3\n")
    finally:
        shell.close()
    with pytest.raises(FileNotFoundError):
        subprocess.run([shell.path], check=False)


# The commands.


def test_run_takes_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[Job] = []

    def run_in_lab(job: Job, hosts: int, rate: str, ranks: int | None) -> int:
        found.append(job)
        return hosts

    monkeypatch.setattr(placement, "run_in_lab", run_in_lab)
    script = tmp_path / "train.py"
    script.touch()
    parser = argparse.ArgumentParser()
    run.configure(parser)
    assert run.run(parser.parse_args(["--mpi", "--lab", "4@100mbit", str(script)])) == 4
    assert run.run(parser.parse_args(["--lab", "4@100mbit", str(script)])) == 4
    assert [job.mpi for job in found] == [True, False]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("digits --mpi --hosts a:2", "--mpi trains here or in a --lab"),
        ("digits --mpi -n 2 --strategy ssp --servers 1 --on-failure continue", "mpiexec ends all workers"),
    ],
)
def test_train_refuses(line: str, words: str) -> None:
    parser = argparse.ArgumentParser()
    train.configure(parser)
    with pytest.raises(IncompatibleError, match=words):
        train.run(parser.parse_args(line.split()))


# In the lab itself.

CROSSING = """
import json, torch, syncline as sl

def sent():
    line = next(line for line in open("/proc/self/net/dev") if "e0:" in line)
    return int(line.split()[9])

with sl.init() as world:
    window = world.transport.memory.window(300_000, torch.float32)
    world.barrier()
    before = sent()
    if world.rank == 0:
        world.transport.send(torch.ones(500_000), to=1).wait()
        window.put(torch.ones(300_000), to=1)
        window.flush()
        post("told", json.dumps([world.size, os.uname().nodename, sent() - before]))
    else:
        world.transport.recv(torch.empty(500_000), source=0).wait()
        deadline = time.monotonic() + 60
        while not window.local[-1] and time.monotonic() < deadline:
            pass  # computes, and never calls MPI
        post("seen", json.dumps([os.uname().nodename, window.local[-1].item()]))
    window.close()
"""


@needs_mpich
@pytest.mark.usefixtures("lab")
@pytest.mark.xdist_group("lab")
def test_mpi_uses_the_links_and_puts_complete(runs: Runs) -> None:
    run = runs.run("run", "--mpi", "--lab", "2@100mbit", runs.script(CROSSING))
    assert run.code == 0, run.describe()
    size, first, crossed = json.loads(runs.read("told"))
    assert (size, first) == (2, "lab0")
    assert json.loads(runs.read("seen")) == ["lab1", 1.0]
    assert crossed > 3_200_000, "a send of 2 MB and a put of 1.2 MB"
    assert run.err.startswith("syncline: a lab of 2 hosts at 100mbit, measured ")
    runs.assert_nothing_left()


@needs_mpich
@pytest.mark.usefixtures("lab")
@pytest.mark.xdist_group("lab")
def test_failed_mpi_rank_is_named_in_the_lab(runs: Runs) -> None:
    failing = """
import syncline as sl
with sl.init() as world:
    world.barrier()
    if sys.argv[1:] and world.rank == 1:
        raise ValueError("boom")
    post(f"up{world.rank}")
    until("never")
"""
    script = runs.script(failing)
    run = runs.run("run", "--mpi", "--lab", "2@open", script, "fail")
    assert run.code == 1, run.describe()
    assert "syncline: rank 1 failed (exit code 1)\nTraceback" in run.err
    assert run.err.count("ValueError: boom") == 1
    (runs.folder / "up0").unlink(missing_ok=True)
    left = runs.start("run", "--mpi", "--lab", "2@open", script)
    for rank in range(2):
        runs.read(f"up{rank}")
    os.kill(left.pid, signal.SIGKILL)
    runs.assert_nothing_left()
