"""The folder of a run: its lock, and the error for a folder that cannot be written to."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.training.loop import train
from syncline.training.run_folder import RunFolder, make_writable
from syncline.training.settings import Settings
from tests.training.tiny import Tiny


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    with folder.lock():
        with pytest.raises(IncompatibleError, match=rf"a is in use .*process {os.getpid()} on .*name another folder"):
            RunFolder(tmp_path / "a").lock()
        RunFolder(tmp_path / "b").lock().release()
    folder.lock().release()
    assert list(folder.path.iterdir()) == [], "nothing is left of it"


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Also if the process is killed."""
    folder = RunFolder(tmp_path)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover (it ends by a signal)
        folder.lock()
        os.write(write, b".")
        signal.pause()
    assert os.read(read, 1) == b"."
    with pytest.raises(IncompatibleError, match=f"process {child} "):
        folder.lock()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with folder.lock():
        assert (tmp_path / ".lock").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_training_is_refused_in_a_folder_in_use(tmp_path: Path, resume: bool) -> None:
    """Every rank raises the error, so no rank waits for another."""

    def work(world: sl.World) -> str:
        options: dict[str, Any] = {"world": world, "folder": tmp_path, "resume": resume}
        with pytest.raises(IncompatibleError, match="is in use"):
            train(Tiny(), Settings(epochs=1), **options)
        return "refused"

    with RunFolder(tmp_path).lock():
        assert sl.simulate(work, ranks=2).results == ("refused", "refused")
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize("path", ["file/inside", "file", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written_to(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=r"cannot be written to \(.*\): name another folder"):
        make_writable(tmp_path / path)
    with pytest.raises(SpecError, match="cannot be written to"):
        RunFolder(tmp_path / path).lock()
