"""What a worker tells of its error where no supervisor reads it: under mpiexec and srun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from syncline.launch import worker


def test_mpi_ranks_show_one_error_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 fails while rank 0 waits for mpiexec to pass its output on; rank 2 fails in another way."""
    later: dict[str, Exception] = {"2": KeyError("x"), "1": ValueError("boom")}

    def abort(code: int) -> None:
        while later:
            rank, error = later.popitem()
            monkeypatch.setenv("PMI_RANK", rank)
            worker.report(error, "")

    fake = SimpleNamespace(
        Is_initialized=lambda: True, Is_finalized=lambda: False, COMM_WORLD=SimpleNamespace(Abort=abort)
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)
    monkeypatch.setattr(worker, "MPIEXEC_OUTPUT_S", 0.0)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("PMI_RANK", "0")
    for _ in range(2):  # the second time nobody tells it any more
        worker.report(ValueError("boom"), "")
        monkeypatch.setenv("PMI_RANK", "0")
    assert capsys.readouterr().err.splitlines() == [
        "rank 0 failed:",
        "ValueError: boom",
        "rank 1 failed with the same error: ValueError: boom",
        "rank 2 failed:",
        "KeyError: 'x'",
        "rank 0 failed:",
        "ValueError: boom",
    ]


@pytest.mark.parametrize(
    ("end", "known"),
    [("pass", "None"), ("sys.exit(0)", "None"), ("sys.exit(3)", "SystemExit(3)"), ("1 / 0", "ZeroDivisionError")],
)
def test_exit_handlers_know_whether_an_error_ends_the_worker(end: str, known: str, tmp_path: Path) -> None:
    """A run's exit handler waits for the other ranks, unless this one fails."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import atexit, sys\natexit.register(lambda: print(repr(getattr(sys, 'last_value', None))))\n{end}\n"
    )
    found = subprocess.run([sys.executable, worker.__file__, str(script)], capture_output=True, text=True, check=False)
    assert found.stdout.startswith(known)


def test_a_worker_that_joins_after_the_end_does_not_fail(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from syncline.errors import JobEndedError\nraise JobEndedError('the job has ended')\n")
    found = subprocess.run([sys.executable, worker.__file__, str(script)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "syncline: the job has ended\n")
