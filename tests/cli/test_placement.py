"""The placement options of commands: how they are read, and where a job then runs."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from syncline.cli import placement
from syncline.cli.placement import OPTIONS, Placement, add_placement_options
from syncline.errors import IncompatibleError, SpecError
from syncline.launch.programs import Host
from syncline.launch.start import Job


def read(line: str, default_ranks: int | None = None) -> Placement:
    parser = argparse.ArgumentParser()
    add_placement_options(parser, *OPTIONS)
    return Placement.read(parser.parse_args(line.split()), default_ranks)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("-n 3", Placement(3)),
        ("", Placement(2)),
        ("--mpi", Placement(2, mpi=True)),
        ("--hosts a:1,b:2", Placement(3, (Host("a", 1), Host("b", 2)))),
        ("--hosts a,b -n 4", Placement(4, (Host("a", 2), Host("b", 2)))),
        ("--lab 4@100mbit", Placement(4, lab=(4, "100mbit"))),
        ("--lab 2@open -n 4", Placement(4, lab=(2, "open"))),
    ],
)
def test_options_are_read(line: str, wanted: Placement) -> None:
    assert read(line, default_ranks=2) == wanted


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("", SpecError, "how many workers"),
        ("-n 0", SpecError, "at least one worker"),
        ("-n 2 --servers -1", SpecError, "cannot be negative"),
        ("-n 2 --replicas 2", IncompatibleError, "add --servers 2"),
        ("-n 2 --replicas 0", SpecError, "--replicas 0"),
        ("-n 2 --servers 2 --replicas 3", SpecError, "--replicas 3 with --servers 2"),
        ("-n 2 --servers 2 --replicas 2 --mpi", IncompatibleError, "MPI ends all processes"),
        ("-n 2 --lost-after soon", SpecError, "--lost-after soon"),
        ("--lab 2@1gbit --hosts a", IncompatibleError, "leave one out"),
        ("--lab 4", SpecError, "hosts@rate"),
    ],
)
def test_invalid_options_are_refused(line: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        read(line)


def test_help_of_an_option_can_be_replaced() -> None:
    parser = argparse.ArgumentParser()
    add_placement_options(parser, "-n", "--lab", help={"-n": "number of ranks; default 7"})
    text = " ".join(parser.format_help().split())
    assert "default 7" in text
    assert OPTIONS["--lab"]["help"] in text
    assert "--servers" not in text


@pytest.mark.parametrize(
    ("where", "mpiexec", "started"),
    [
        (Placement(2), "exec", "run_here"),
        (Placement(2, (Host("a", 2),)), "exec", "run_on_hosts"),
        (Placement(2, lab=(2, "open"), mpi=True), "exec", "run_in_lab"),
        (Placement(2, mpi=True), "exec", "run_by_mpiexec"),
        (Placement(2, mpi=True), "call", "run_by_mpiexec"),
        (Placement(2, mpi=True), "supervise", "run_here"),
    ],
)
def test_job_runs_at_its_place(where: Placement, mpiexec: Any, started: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def recorder(name: str) -> Any:
        def record(*arguments: Any, **options: Any) -> int:
            calls.append((name, options))
            return 7

        return record

    for name in ("run_here", "run_on_hosts", "run_in_lab", "run_by_mpiexec"):
        monkeypatch.setattr(placement, name, recorder(name))
    assert where.run(Job(target=("train.py",)), mpiexec=mpiexec) == 7
    [(name, options)] = calls
    assert name == started
    assert options.get("wait", False) == (mpiexec == "call")
