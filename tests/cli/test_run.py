"""What `syncline run` and `syncline lab` refuse: one sentence each, before anything is started."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from syncline.cli import lab, placement, run
from syncline.errors import IncompatibleError, SpecError, SynclineError, UnsupportedError
from syncline.launch import machine, start
from syncline.launch.elastic import ElasticOptions
from syncline.launch.lab import Lab


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run.configure(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("-n 2", SpecError, "no script is named"),
        ("-n 2 -m", SpecError, "no module is named"),
        ("-n 2 nowhere.py", SpecError, "there is no script 'nowhere.py' in /"),
        ("-n 0 train.py", SpecError, "-n 0: a run takes at least one worker"),
        ("-n -3 train.py", SpecError, "-n -3"),
        ("train.py", SpecError, "how many workers"),
        ("-n 2 folder", SpecError, "folder without __main__.py"),
        ("-n 2 python train.py", SpecError, "leave it out: syncline run -n 4 train.py"),
        ("-n 2 digits", SpecError, "syncline train digits -n 4"),
        ("--hosts a:2 b:2 train.py", SpecError, "--hosts a:2,b:2"),
        ("--lab 4 100mbit train.py", SpecError, "hosts@rate"),
        ("--mpi train.py", SpecError, "how many workers"),
        ("--hosts slurm train.py", SpecError, "how many workers"),
        ("--hosts a:2, train.py", SpecError, "'' is not a host"),
        ("-n 3 --hosts a:2,b:2 train.py", SpecError, "takes 4 ranks"),
        ("--hosts a:2 --lab 2@1gbit train.py", IncompatibleError, "--lab makes its own hosts .* with --hosts"),
        ("-n 3 --lab 2@1gbit train.py", SpecError, "-n 3 is not a multiple of the 2 hosts"),
        ("--lab 4 train.py", SpecError, "4@100mbit"),
        ("-n 2 --mpi --on-failure continue train.py", IncompatibleError, "mpiexec ends all workers when one fails"),
        ("--mpi --hosts a:2 --servers 1 train.py", IncompatibleError, "mpiexec cannot place servers on --hosts"),
        ("-n 2 --hosts slurm --servers 1 train.py", IncompatibleError, "srun starts workers alone"),
        ("-n 2 --servers 1 --handlers my-module train.py", SpecError, "'my-module' is not a module's name"),
        ("-n 2 --mpi --hosts slurm train.py", IncompatibleError, "leave one out"),
        ("-n 2 --servers -1 train.py", SpecError, "cannot be negative"),
        ("-n 2 --elastic 2 train.py", SpecError, "--elastic 2: write MIN:MAX"),
        ("-n 2 --elastic 2:x train.py", SpecError, "--elastic 2:x: write MIN:MAX"),
        ("-n 2 --elastic 0:2 train.py", SpecError, "--elastic 0:2 with 2 workers: the minimum is at least 1"),
        ("-n 2 --elastic 3:4 train.py", SpecError, "at most 2, the maximum at least 2"),
        ("-n 4 --elastic 1:3 train.py", SpecError, "the maximum at least 4"),
        ("-n 2 --elastic 1:2 --restart -1 train.py", SpecError, "--restart -1"),
        ("-n 2 --elastic 1:2 --mpi train.py", IncompatibleError, "--elastic 1:2: mpiexec ends all workers"),
        ("-n 2 --elastic 1:2 --hosts slurm train.py", IncompatibleError, "--elastic 1:2: srun ends all workers"),
        ("-n 2 --elastic 1:2 --on-failure stop train.py", IncompatibleError, "--on-failure stop: with --elastic 1:2"),
        ("-n 2 --restart 3 train.py", IncompatibleError, "--restart: .* add --elastic MIN:MAX"),
        ("-n 2 --servers 2 --restart 3 train.py", IncompatibleError, "--restart: .* add --elastic MIN:MAX"),
        ("-n 2 --servers 2 --replicas 2 --restart -1 train.py", SpecError, "--restart -1"),
        ("-n 2 --on-failure restart train.py", IncompatibleError, "--on-failure restart: .* add --elastic"),
        ("-n 2 --folder a train.py", IncompatibleError, "--folder a: only an elastic job has a folder"),
        ("-n 2 --as hvd train.py", SpecError, "no modules for 'hvd'; did you mean 'horovod'"),
        ("-n 2 --address 203.0.113.7 train.py", SynclineError, "cannot listen at 203.0.113.7"),
    ],
)
def test_refused(line: str, kind: type[SynclineError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        run.run(parsed(*line.split()))
    assert "\n" not in str(caught.value)


def test_arguments_after_the_script_belong_to_it() -> None:
    found = parsed("-n", "2", "train.py", "-n", "9", "--mpi", "--", "-m")
    assert (found.ranks, found.mpi, found.module) == (2, False, False)
    assert found.program == ["train.py", "-n", "9", "--mpi", "--", "-m"]
    found = parsed("-n", "2", "-m", "package.train", "--mpi")
    assert (found.module, found.mpi, found.program) == (True, False, ["package.train", "--mpi"])


@pytest.mark.parametrize(
    ("line", "restarts", "folder"),
    [
        ("--elastic 1:4", 0, "runs/"),
        ("--elastic 1:4 --on-failure continue", 0, "runs/"),
        ("--elastic 1:4 --on-failure restart", 3, "runs/"),
        ("--elastic 1:4 --restart 5 --folder a", 5, "a"),
    ],
)
def test_elastic_options(line: str, restarts: int, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[start.Job] = []

    def run_here(job: start.Job, ranks: int) -> int:
        jobs.append(job)
        return 7

    monkeypatch.setattr(placement, "run_here", run_here)
    assert run.run(parsed("-n", "2", *line.split(), "train.py")) == 7
    assert (jobs[0].elastic, jobs[0].policy) == (ElasticOptions(1, 4, restarts), "continue")
    assert str(jobs[0].folder).startswith(folder)
    assert jobs[0].silence_limit == "10"


def test_oversubscription_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 30)
    with caplog.at_level(logging.WARNING, logger="syncline"):
        machine.warn_if_oversubscribed(2)
        assert caplog.messages == []
        machine.warn_if_oversubscribed(64)
    assert caplog.messages == [
        "64 workers share 2 cores: they take turns",
        "64 workers take about 18.8 GiB before they hold any model (300 MiB each), and 1.0 GiB are free",
    ]


@pytest.mark.parametrize(("key", "length"), [("none", 4), ("", 40)])
def test_mpi_on_hosts_gets_a_key(monkeypatch: pytest.MonkeyPatch, key: str, length: int) -> None:
    monkeypatch.setenv("SYNCLINE_KEY", key)
    commands: list[list[str]] = []
    handed: list[Mapping[str, str]] = []
    monkeypatch.setattr(start, "mpi_command", lambda target, ranks, hosts, environ, *servers: ["mpiexec", *environ])

    def become_launcher(command: list[str], variables: Mapping[str, str], mpi: bool) -> int:
        assert mpi, "what MPICH leaves behind is removed"
        commands.append(command)
        handed.append(variables)
        return 0

    monkeypatch.setattr(start, "become_launcher", become_launcher)
    assert run.run(parsed("--mpi", "--hosts", "a:2,b:2", "train.py")) == 0
    assert run.run(parsed("--mpi", "-n", "2", "train.py")) == 0
    assert len(handed[0]["SYNCLINE_KEY"]) == length
    assert "SYNCLINE_KEY" in commands[0]
    assert "SYNCLINE_KEY" not in handed[1]


def test_oversubscription_counts_local_hosts_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(placement, "run_on_hosts", lambda job, hosts: len(hosts))
    with caplog.at_level(logging.WARNING, logger="syncline"):
        assert run.run(parsed("--hosts", "a:64,localhost:2", "train.py")) == 2
        assert caplog.messages == []
        assert run.run(parsed("--hosts", "a:64,localhost:3", "train.py")) == 2
    assert caplog.messages == ["3 workers share 2 cores: they take turns"]


def test_oversubscription_counts_all_lab_hosts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(hosts: int, rate: str) -> Lab:
        raise UnsupportedError("no lab here")

    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(start, "Lab", refused)
    parser = argparse.ArgumentParser()
    lab.configure(parser)
    with caplog.at_level(logging.WARNING, logger="syncline"):
        with pytest.raises(UnsupportedError, match="no lab here"):
            run.run(parsed("-n", "6", "--lab", "3@1gbit", "train.py"))
        with pytest.raises(UnsupportedError, match="no lab here"):
            lab.run(parser.parse_args(["4", "1gbit", "--", "true"]))
    assert caplog.messages == ["6 workers share 2 cores: they take turns", "4 workers share 2 cores: they take turns"]


def test_a_lab_needs_a_command() -> None:
    parser = argparse.ArgumentParser()
    lab.configure(parser)
    with pytest.raises(SpecError, match="no command is named"):
        lab.run(parser.parse_args(["2", "1gbit", "--"]))
    assert parser.parse_args(["2", "1gbit", "--", "echo", "-n"]).words[-2:] == ["echo", "-n"]
    with pytest.raises(SpecError, match=r"syncline run --lab 2@1gbit train\.py --epochs 3"):
        lab.run(parser.parse_args(["2", "1gbit", "train.py", "--epochs", "3"]))
