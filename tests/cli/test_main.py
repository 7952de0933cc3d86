"""The command line itself: what it says without a command, and one sentence for each line that makes no sense."""

from __future__ import annotations

import importlib

import pytest

import syncline
from syncline.cli.main import COMMANDS, main


def test_without_arguments_it_shows_an_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr()
    assert told.err == ""
    assert len(told.out.splitlines()) < 12
    for words in (syncline.__version__, "syncline run -n 4 script.py", "syncline --help", *COMMANDS):
        assert words in told.out


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([option])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"syncline {syncline.__version__}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tran digits", "syncline: unknown command 'tran'; did you mean 'train'"),
        ("Train digits", "did you mean 'train'?"),
        ("help", "write syncline --help"),
        ("torchrun x.py", "did you mean 'run'?"),
        ("script.py --epochs 3", "syncline run -n 4 script.py runs a script on 4 workers"),
        ("-n 4 script.py", "-n: options come after the command"),
        ("run -n two x.py", "syncline run: -n: 'two' is not a whole number; for example: syncline run -n 4 train.py"),
        ("run -n", "-n: its value is missing"),
        ("run --nproc-per-node 2 x.py", "unknown option --nproc-per-node; write -n N"),
        ("run -n 2 --strategy ssp x.py", "sl.distribute(model, optimizer, strategy="),
        ("run -n 2 --epochs 3 x.py", "options of the script come after its name"),
        ("run -n 2 --max-restarts 3 x.py", "write --elastic MIN:MAX --restart K"),
        ("status", "missing: FOLDER; for example: syncline status runs/"),
        ("run -n 2 --server 1 x.py", "did you mean --servers?"),
        ("run -n 2 --on-failure Stop x.py", "did you mean 'stop'? available: 'continue', 'restart', 'stop'"),
        ("train", "syncline train: missing: WORKLOAD|script.py; for example: syncline train digits -n 4"),
        ("train digits fashion", "unexpected argument 'fashion'"),
        ("train digits --learning-rate 1", "write --lr"),
        ("train digits --target 96%", "'96%' is not a number; write 0.96"),
        ("race digits --strategy ssp", "--entries FILE.toml"),
        ("lab 4@100mbit -- true", "write hosts and rate apart, 4 100mbit"),
        ("lab -n 4 100mbit", "the number of hosts comes first"),
        ("bench", "missing: WHAT; for example: syncline bench collectives -n 4"),
        ("bench steps", "did you mean 'step'"),
        ("bench step --stratgy x", "syncline bench step: unknown option --stratgy; did you mean --strategy?"),
        ("horovodrun -np x python x.py", "'x' is not a whole number"),
    ],
)
def test_wrong_line_gives_one_sentence(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    told = capsys.readouterr()
    assert words in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bench collectives -n 1", "-n 1: give at least 2 ranks"),
        ("bench collectives --rounds 0", "--rounds 0: at least 1"),
        ("bench collectives --budget -1", "--budget -1.0: seconds, above 0"),
        ("bench step --bucket-bytes 0", "--bucket-bytes 0: at least 1"),
        ("bench step --memory-runs -1", "--memory-runs -1: at least 0"),
        ("bench teams --collective rign", "did you mean 'ring'"),
        ("bench stragglers --entries ;", "at least one entry"),
        ("bench stragglers --workload mnist", "did you mean 'digits'"),
        ("bench stragglers --target 5", "target 5.0 cannot be"),
    ],
)
def test_bench_refuses_before_it_starts_ranks(
    line: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncline.cli.placement.run_here", lambda *_: pytest.fail("it was started"))
    assert main(line.split()) == 2
    assert words in capsys.readouterr().err


def test_ctrl_c_during_the_import_of_a_command_ends_quietly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupt)
    assert main(["race", "digits"]) == 130
    assert capsys.readouterr().err == ""
