"""`syncline env`."""

from __future__ import annotations

import argparse
import json

import pytest

import syncline
from syncline.cli import env

SECRET = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"  # noqa: S105 - an example of ZeroMQ's documentation


def test_it_is_json_and_tells_no_secret(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_KEY", SECRET)
    monkeypatch.setenv("SYNCLINE_API_TOKEN", SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert env.run(argparse.Namespace(json=True)) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert SECRET not in out
    assert found["environment variables"]["SYNCLINE_KEY"] == "set"
    assert found["environment variables"].get("SYNCLINE_API_TOKEN") == "set"
    assert found["environment variables"]["NCCL_DEBUG"] == "INFO"
    assert "HOME" not in found["environment variables"]
    assert found["versions"]["syncline"] == syncline.__version__
    assert found["machine"]["cores usable"] >= 1
    assert "lo" in found["machine"]["network interfaces"]
    assert found["engines"]["gloo"] is True


def test_it_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert env.run(argparse.Namespace(json=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "versions" in lines
    assert f"  syncline: {syncline.__version__}" in lines
    assert any(line.startswith("  open files: soft ") for line in lines)


def test_half_set_variables_are_told() -> None:
    found = env.collect({"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert "rank 5 of 2" in str(found["launcher"]["problem"])
    found = env.collect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert found["launcher"]["rank"] == "1 of 2"
    assert found["launcher"]["meeting point"] == "a:1"
