"""`syncline new`: writes the template, and over nothing that is there."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from syncline.cli.main import main

TEMPLATE = files("syncline.workloads").joinpath("template.py").read_bytes()


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_writes_the_template_and_says_what_comes_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "my workload.py"]) == 0
    assert Path("my workload.py").read_bytes() == TEMPLATE
    told = capsys.readouterr().out
    assert "syncline train 'my workload.py' -n 2" in told
    assert "syncline race 'my workload.py' -n 2" in told


def test_it_writes_over_a_file_only_when_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    Path("workload.py").write_text("mine")
    assert main(["new", "workload.py"]) == 2
    assert "workload.py exists" in capsys.readouterr().err
    assert Path("workload.py").read_text() == "mine"
    assert main(["new", "workload.py", "--force"]) == 0
    assert Path("workload.py").read_bytes() == TEMPLATE


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("workload", "its name ends in .py: syncline new workload.py"),
        ("nowhere/workload.py", "there is no folder nowhere"),
        ("folder.py", "folder.py cannot be written (Is a directory)"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], path: str, words: str) -> None:
    Path("folder.py").mkdir()
    assert main(["new", path, "--force"]) == 2
    assert words in capsys.readouterr().err


def test_the_template_needs_nothing_of_ours() -> None:
    lines = TEMPLATE.decode().splitlines()
    assert [line for line in lines if line.startswith(("import", "from"))] == [
        "import torch",
        "from torch import Tensor, nn",
    ]


def test_the_page_shows_the_template() -> None:
    page = Path(__file__).parents[2] / "docs" / "workloads.md"
    assert f"```python\n{TEMPLATE.decode()}```\n" in page.read_text()


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["new", "--help"])
    told = capsys.readouterr().out
    assert "syncline new workload.py --force" in told
