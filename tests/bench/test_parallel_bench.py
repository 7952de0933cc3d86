"""`syncline bench parallel`: what it measures and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from syncline.cli.main import main
from tests.bench.test_bench import bench

SMALL = ("--width", "64", "--layers", "1", "--batch", "4", "--rounds", "1", "--turns", "2")


def test_contenders_train_alike_and_send_what_was_predicted(tmp_path: Path) -> None:
    plans = "weird_trick('a');weird_trick('b');weird_trick('c')"
    options = ("-n", "2", "--model", "vgg(side=8, dense=64)", "--plan", plans)
    printed = bench(tmp_path, "parallel", *SMALL, *options)
    rows = {row["contender"]: row for row in json.loads((tmp_path / "out" / "parallel.json").read_text())["results"]}
    assert [*rows] == ["weird_trick('a')", "weird_trick('b')", "weird_trick('c')", "data parallel", "one process"]
    assert max(row["difference"] for row in rows.values()) < 1e-4
    for name, row in rows.items():
        if name.startswith("weird"):
            assert row["mesh"] == "mesh of 2 ranks: shared 2"
            assert row["sent_bytes"][0] == pytest.approx(row["predicted"]["sent_bytes"], rel=0.02)
            assert max(row["parameter_bytes"]) < rows["data parallel"]["parameter_bytes"][0]
            assert f"data parallel ÷ {name}: " in printed
    assert "those of one process" in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--plan", "tensor(3)"), "multiple of 3 workers, and there are 2"),
        (("--plan", "pipeline(2)"), "see bench pipeline"),
        (("--plan", "tenser(2)"), "did you mean 'tensor'"),
        (("--width", "65"), "multiple of 64"),
        (("--batch", "3"), "multiple of 2"),
        (("--against", "megatron"), "the only baseline is dtensor"),
        (
            ("--model", "mlp", "--plan", "tensor({'layer0.linear': 'columns+gather'}, size=2)", "--against", "dtensor"),
            "blocks",
        ),
        (("--turns", "0"), "at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "parallel", *SMALL, *options, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
