"""The example that makes the large-batch table: it trains, keeps what it has trained, and refuses to mix settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from syncline.bench.workloads.fashion import DEBIAN
from tests.launching import Ended, finish, start


def table_of(*arguments: str) -> Ended:
    (ended,) = finish([start(["examples/large_batch.py", *arguments], {})])
    return ended


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs Debian's dataset-fashion-mnist")
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
    assert first.code == 0, first.err
    assert "batch 4096, none, seed 0: " in first.out
    cells = json.loads(path.read_text())["cells"]
    assert list(cells) == ["batch 4096, none, seed 0"]

    second = table_of(*few, "--rules", "none", "lars")
    assert second.code == 0, second.err
    assert "none, seed 0" not in second.out, "trained again"
    assert "| batch | none | LARS, linear |" in second.out
    assert f"| 4,096 | {100 * cells['batch 4096, none, seed 0']['accuracy']:.2f}" in second.out
    cells = json.loads(path.read_text())["cells"]
    assert list(cells) == ["batch 4096, none, seed 0", "batch 4096, lars from 3, seed 0"]
    assert all(0.1 <= cell["accuracy"] <= 1 for cell in cells.values())

    other = table_of(*few, "--rate", "0.5")
    assert other.code != 0
    assert "has cells of other settings" in other.err


def test_help_and_a_batch_that_is_no_multiple() -> None:
    assert "--warmup-epochs" in table_of("--help").out
    refused = table_of("--batches", "100")
    assert refused.code == 2
    assert "multiples of 64" in refused.err
