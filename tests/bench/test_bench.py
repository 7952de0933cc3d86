"""The bench commands, small, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from syncline.bench.collectives import plot, table
from syncline.cli.main import main
from tests.hunting import only_hunting
from tests.launching import finish, start

pytestmark = pytest.mark.xdist_group("launch")


def bench(tmp_path: Path, *arguments: str) -> str:
    """Run the command as a user would; what it printed."""
    command = ["-m", "syncline", "bench", *arguments, "--out", str(tmp_path / "out")]
    (ended,) = finish([start(command, {"SYNCLINE_CACHE": str(tmp_path)})])
    assert ended.code == 0, ended.err
    return ended.out


def test_collectives_side_by_side(tmp_path: Path) -> None:
    printed = bench(tmp_path, "collectives", "-n", "2", "--sizes", "4KB,64KB", "--rounds", "6", "--budget", "2")
    document = json.loads((tmp_path / "out" / "collectives.json").read_text())
    contenders = {row["contender"] for row in document["results"]}
    assert contenders >= {"gloo", "auto", "ring", "naive", "double_tree", "halving_doubling"}
    assert {row["bytes"] for row in document["results"]} == {4096, 65536}
    rows = [row for row in document["results"] if row["contender"] == "gloo"]
    assert all(row["ratio"]["median"] == 1 for row in rows)
    assert all(row["predicted"] > 0 for row in document["results"] if row["contender"] != "auto")
    assert len({len(row["seconds"]) for row in document["results"] if row["bytes"] == 4096}) == 1, "not side by side"
    assert len(document["auto"]) == 2
    for name in ("ring", "auto", "÷ gloo", "predicted"):
        assert name in printed
    assert (tmp_path / "out" / "collectives.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "out" / "collectives.svg").read_text()


@only_hunting
def test_a_size_that_takes_too_long_is_left_out_and_said_so(tmp_path: Path) -> None:
    printed = bench(tmp_path, "collectives", "-n", "2", "--sizes", "4KB,64MB", "--rounds", "6", "--budget", "0.05")
    assert "left out: gloo at 64MB" in printed
    document = json.loads((tmp_path / "out" / "collectives.json").read_text())
    assert {row["bytes"] for row in document["results"]} == {4096}


def test_network(tmp_path: Path) -> None:
    printed = bench(tmp_path, "network", "--rounds", "2")
    assert "bandwidth" in printed
    document = json.loads((tmp_path / "out" / "network.json").read_text())
    assert document["network"]["bandwidth"] > 1e6
    echoed = {(row["contender"], row["bytes"]) for row in document["echo"]}
    assert {("TCP", 4096), ("bare ZeroMQ", 4096), ("zeromq", 40 << 20)} <= echoed
    assert (tmp_path / "networks.json").exists(), "the calibration is remembered"


def test_steps_beside_ddp(tmp_path: Path) -> None:
    printed = bench(
        tmp_path,
        *("step", "--models", "mlp", "--rounds", "2", "--turns", "3", "--memory-runs", "1", "--trace"),
        *("--against", "ddp,hvd,ml_comm"),
    )
    document = json.loads((tmp_path / "out" / "step.json").read_text())
    (row,) = document["results"]
    assert len(row["seconds"]["syncline"]) == len(row["seconds"]["ddp"]) == 6
    assert len(row["seconds"]["hvd"]) == len(row["seconds"]["ml_comm"]) == 6
    assert row["same_bits"], "two ranks add two numbers: there is one way"
    assert 0 < row["overlap"]["share"] <= 1
    assert {found["contender"] for found in document["memory"]} == {"syncline", "ddp"}
    assert all(found["peak_bytes"] > 1e8 for found in document["memory"])
    for words in ("ratio", "overlap", "peak memory", "the same bits", "mean of the ratios"):
        assert words in printed
    for rank in range(2):
        events = json.loads((tmp_path / "out" / f"trace-mlp-rank{rank}.json").read_text())
        assert any("bucket" in event["name"] for event in events), events[:5]


@only_hunting
def test_two_models_on_their_teams(tmp_path: Path) -> None:
    printed = bench(tmp_path, "teams", "--rounds", "3", "--megabytes", "0.1,0.05", "--compute", "2,1")
    document = json.loads((tmp_path / "out" / "teams.json").read_text())
    assert {name: len(own) for name, own in document["seconds"].items()} == {"first": 3, "second": 3, "both": 3}
    assert "both ÷ sum of the two" in printed


def test_the_price_of_names(tmp_path: Path) -> None:
    printed = bench(tmp_path, "negotiation", "--rounds", "4", "--tensors", "5", "--numel", "10")
    document = json.loads((tmp_path / "out" / "negotiation.json").read_text())
    assert {len(own) for own in document["seconds"].values()} == {4}
    assert document["negotiation"]["median"] > 0, "what is run was asked for before"
    assert "cost of names" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["negotiation", "--tensors", "0"], "at least one of each"),
        (["negotiation", "--hosts", "a:1,b:1"], "clock of one host"),
        (["step", "--models", "resnte"], "did you mean 'resnet'"),
        (["step", "--turns", "0"], "--turns 0"),
        (["step", "--strategy", "alreduce"], "allreduce"),
        (["step", "--collective", "rign"], "ring"),
        (["teams", "--compute", "3"], "two numbers"),
        (["teams", "--megabytes", "1,-1"], "negative"),
    ],
)
def test_what_step_and_teams_refuse(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("what", ["collectives", "network", "step", "teams", "codecs", "server", "stragglers"])
def test_a_folder_that_cannot_be_written_to(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything is measured: each of these would take minutes."""
    (tmp_path / "file").touch()
    assert main(["bench", what, "--out", str(tmp_path / "file" / "inside")]) == 2
    assert "inside cannot be written to (Not a directory)" in capsys.readouterr().err


ROW = {
    "contender": "gloo",
    "bytes": 4096,
    "seconds": [1.0],
    "time": {"median": 0.001, "low": None, "high": None, "samples": 3},
    "ratio": {"median": 1.0, "low": 0.9, "high": 1.1, "samples": 9},
    "predicted": 0.002,
    "predicted_by": "formula",
}
DOCUMENT = {
    "ranks": 4,
    "hosts": ["a", "b"],
    "lab": "",
    "baseline": "gloo",
    "network": {"latency": 1e-5, "bandwidth": 1e9, "bandwidth_spread": 0.1, "per_message": 0.0, "combine": 0.0},
    "skipped": {"naive at 64MB": "one call would take 80.0 s"},
    "auto": {},
    "results": [ROW, {**ROW, "contender": "ring", "predicted": None}],
}


def test_the_table_tells_what_was_left_out_and_what_is_unsure(tmp_path: Path) -> None:
    text = table(DOCUMENT)
    assert "n=3" in text, "too few samples for an interval"
    assert "left out: naive at 64MB" in text
    assert "0.50" in text, "measured ÷ predicted"
    for path in plot(DOCUMENT, tmp_path / "picture"):
        assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--sizes", "huge"], "'huge' is not a size"),
        (["-n", "1"], "at least 2 ranks"),
        (["--algorithms", "rign"], "ring"),
        (["--lab", "2@100mbit", "--mpi"], "leave one out"),
        (["--hosts", "a:2", "--lab", "2@100mbit"], "leave one out"),
        (["--lab", "2@fast"], "fast"),
    ],
)
def test_bad_input_is_a_sentence(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", *arguments]) == 2
    told = capsys.readouterr().err
    assert reason in told
    assert "Traceback" not in told
