"""The example that makes the large-batch table: it trains, keeps what it has trained, and refuses to mix settings."""

from __future__ import annotations

import io
import json
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

from syncline.workloads.fashion import DEBIAN_FOLDER
from tests.launching import ROOT


@dataclass
class Ran:
    """What the example has printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def table_of(*arguments: str) -> Ran:
    """Run the example in this process: torch is imported already."""
    out, err, code, threads = io.StringIO(), io.StringIO(), 0, torch.get_num_threads()
    try:
        with mock.patch.object(sys, "argv", ["large_batch.py", *arguments]), redirect_stdout(out), redirect_stderr(err):
            runpy.run_path(str(ROOT / "examples/large_batch.py"), run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        err.write("" if isinstance(ended.code, int) else str(ended.code or ""))
    finally:
        torch.set_num_threads(threads)
    return Ran(code, out.getvalue(), err.getvalue())


@pytest.mark.skipif(not DEBIAN_FOLDER.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_a_small_table_twice(tmp_path: Path) -> None:
    """The second run trains only what the first has not, and shows both."""
    path = tmp_path / "cells.json"
    few = [
        "--json",
        str(path),
        "--lars-rate",
        "3",
        "--epochs",
        "1",
        "--warmup-epochs",
        "1",
        "--seeds",
        "1",
        "--batches",
        "4096",
    ]
    first = table_of(*few, "--rules", "none")
    assert first.returncode == 0, first.stderr
    assert "batch 4096, none, seed 0: " in first.stdout
    cells = json.loads(path.read_text())["cells"]
    assert list(cells) == ["batch 4096, none, seed 0"]

    second = table_of(*few, "--rules", "none", "lars")
    assert second.returncode == 0, second.stderr
    assert "none, seed 0" not in second.stdout, "trained again"
    assert "| batch | none | LARS, linear |" in second.stdout
    assert f"| 4,096 | {100 * cells['batch 4096, none, seed 0']['accuracy']:.2f}" in second.stdout
    cells = json.loads(path.read_text())["cells"]
    assert list(cells) == ["batch 4096, none, seed 0", "batch 4096, lars from 3, seed 0"]
    assert all(0.1 <= cell["accuracy"] <= 1 for cell in cells.values())

    other = table_of(*few, "--rate", "0.5")
    assert other.returncode != 0
    assert "has cells of other settings" in other.stderr


def test_help_and_a_batch_that_is_no_multiple() -> None:
    assert "--warmup-epochs" in table_of("--help").stdout
    refused = table_of("--batches", "100")
    assert refused.returncode == 2
    assert "multiples of 64" in refused.stderr
