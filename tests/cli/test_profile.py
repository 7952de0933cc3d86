"""`syncline profile`: the table, the file, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.cli.main import main
from syncline.cli.profile import OPTIMIZER_NAMES
from syncline.planner.measured_memory import OPTIMIZERS
from syncline.planner.profile import MAKE_OPTIMIZER, TrainingProfile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_measures_writes_and_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "digits(model='cnn')", "--repeats", "1", "--batches", "2,6", "--optimizer", "adam"]) == 0
    table, progress = capsys.readouterr()
    assert "memory, as it is and with recomputation" in progress
    assert "written to profile.json" in progress
    profile = TrainingProfile.read(folder / "profile.json")
    assert profile.layers.measured_batch_sizes == (2, 6)
    assert all(name in table for name in profile.layers.names)
    assert "update by adam" in table
    assert main(["profile", "profile.json"]) == 0
    assert capsys.readouterr().out == table


def test_rows_are_sorted_and_cut(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["profile", "digits", "--repeats", "1", "--out", "p.json"])
    capsys.readouterr()
    layers = TrainingProfile.read(folder / "p.json").layers
    slowest = max(layers.layers, key=lambda each: each.seconds).name
    for words, first, rest in (
        (["--rows", "1"], slowest, True),
        (["--sort", "order", "--rows", "0"], layers.names[0], False),
    ):
        assert main(["profile", "p.json", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        header = next(number for number, line in enumerate(lines) if line.startswith("layer"))
        assert lines[header + 1].split()[0] == first
        assert lines[-1].endswith("--rows 0 shows all") is rest


def test_copies_take_the_same_steps_meanwhile(folder: Path) -> None:
    assert main(["profile", "digits", "--repeats", "1", "--copies", "2"]) == 0
    assert TrainingProfile.read(folder / "profile.json").copies == 2


def test_optimizers_of_the_option_are_those_that_are_predicted() -> None:
    assert set(OPTIMIZER_NAMES) == set(OPTIMIZERS) == set(MAKE_OPTIMIZER)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["kmeans(k=3)"], "kmeans is no network"),
        (["nothing.py"], "there is no file nothing.py"),
        (["empty.py"], "has no model() and no data() and no loss(model, batch)"),
        (["digits", "--batch", "0"], "batch 0: at least 1"),
        (["digits", "--repeats", "0"], "--repeats 0: at least 1"),
        (["digits", "--copies", "0"], "--copies 0: at least 1"),
        (["digits", "--rows", "-1"], "--rows -1"),
        (["digits", "--layers", "x"], "names has 'x', which is no module of the model"),
        (["digits", "--out", "no/p.json"], "there is no folder no"),
        (["missing.json"], "missing.json cannot be read"),
        (["missing.json", "--batch", "3"], "--batch is for measuring"),
        (["digits", "--optimizer", "adan"], "'adan' is not an allowed value"),
        (["digits", "--batches", "16"], "write two batch sizes, as 16,64"),
        (["digits", "--batches", "16,16"], "two different batch sizes"),
        (["digits", "-n", "2"], "a profile is of one worker"),
    ],
)
def test_refusals(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    (folder / "empty.py").write_text("x = 1\n")
    try:
        code = main(["profile", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    message = capsys.readouterr().err
    assert told in message
    assert not (folder / "profile.json").exists()
