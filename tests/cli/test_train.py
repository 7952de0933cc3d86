"""`syncline train`: what it refuses before anything is started, and runs of the real thing."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from syncline.checkpoint import latest, save
from syncline.cli import placement, train
from syncline.cli.main import main
from syncline.errors import IncompatibleError, SpecError, SynclineError, UnsupportedError
from syncline.events import read_log
from syncline.launch import start
from tests.launch.runs import Run, Runs, wait_for

CONVEX = "regression(features=4, samples=256)"


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.configure(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("digit", SpecError, "unknown workload 'digit'; did you mean 'digits'"),
        ("digits(model='mpl')", SpecError, "mlp"),
        ("digits -n 0", SpecError, "-n 0: a run takes at least one worker"),
        ("digits --target 1.5", SpecError, "target 1.5 cannot be: digits is judged by accuracy"),
        ("digits --target 96", SpecError, "did you mean 0.96"),
        ("digits --strategy alreduce", SpecError, "did you mean 'allreduce'"),
        ("digits --strategy allreduce(delay=-1)", SpecError, "a whole number, at least 0"),
        ("digits --collective rign", SpecError, "did you mean 'ring'"),
        ("digits --codec topk(1.5)", SpecError, "a fraction in"),
        ("digits --batch 0", SpecError, "batch 0: at least 1"),
        ("digits --epochs -1", SpecError, "epochs -1"),
        ("digits --scaling liner", SpecError, "did you mean 'linear'"),
        ("digits --decay cosin", SpecError, "did you mean 'cosine'"),
        ("digits --lr -1", SpecError, "lr -1.0: a finite number above 0"),
        ("digits --diagnose 5", IncompatibleError, "--diagnose 5"),
        ("mnist", SpecError, "did you mean 'digits' or 'fashion'"),
        ("data.txt", SpecError, "a script's name ends in .py"),
        ("digits -n 2 --pace 0.001 --slow 1", SpecError, "'1' is not key=value"),
        ("ten.py", SpecError, "syncline run -n 2 ten.py runs it on 2 workers"),
        ("digits --resume auto", SpecError, "name it with --out"),
        ("digits --resume nowhere", SpecError, "--resume nowhere: there is no checkpoint"),
        ("digits --out used", IncompatibleError, "used holds a run already"),
        ("digits --resume other --out used", IncompatibleError, "used holds a run already"),
        ("digits --resume other/checkpoints", SpecError, "give --out"),
        ("digits --resume other", IncompatibleError, "a run of stdlib, not of digits"),
        ("digits --lab 2@1gbit --hosts a,b", IncompatibleError, "leave one out"),
        ("digits --lab 2", SpecError, "4@100mbit"),
        ("digits -n 3 --hosts a:2,b:2", SpecError, "takes 4 ranks"),
        ("digits -n 2 --slow rank=1,factor=4", SpecError, "add --pace"),
        ("digits -n 2 --pace 0.001 --slow rank=2,factor=4", SpecError, "names no worker: there are 2"),
        ("digits -n 2 --pace 0.001 --slow rank=1,faktor=4", SpecError, "did you mean 'factor'"),
        ("digits --pace -1", SpecError, "-1.0 seconds a sample"),
        ("digits -n 2 --strategy onesided", IncompatibleError, "which needs MPI: add --mpi"),
        ("digits --lab 2@1gbit --strategy hogwild", IncompatibleError, "needs the memory of one host"),
        ("digits --servers -1 --strategy ssp", SpecError, "--servers -1: a number of servers cannot be negative"),
        ("digits --servers 1", IncompatibleError, "--servers 1: allreduce uses no servers"),
        ("digits --servers 1 --strategy hogwild", IncompatibleError, "hogwild uses no servers"),
        ("digits --on-failure continue", IncompatibleError, "every step of allreduce needs all workers"),
        ("digits --on-failure continue --strategy ssp", IncompatibleError, "lost with it; add --servers 1"),
        ("digits --on-failure restart", IncompatibleError, "syncline run --elastic MIN:MAX"),
        ("digits -n 2 --stages 2", SpecError, "there is no pipeline to divide; add --pipeline 1f1b"),
        ("digits -n 2 --pipeline gpip", SpecError, "did you mean 'gpipe'"),
        ("digits -n 2 --pipeline 1f1b --stages 3", SpecError, "must be a multiple of 3, and there are 2"),
        ("digits -n 2 --pipeline 1f1b --stages 9,", SpecError, "no module '9' to cut at"),
        ("digits -n 2 --pipeline 1f1b --stages none.json", SpecError, "none.json cannot be read"),
        ("digits -n 8 --pipeline 1f1b", IncompatibleError, "8 stages are more than the model can be split into"),
        ("digits -n 2 --pipeline 1f1b --strategy ssp", IncompatibleError, "at its own pace"),
        ("digits -n 2 --pipeline 1f1b --global-batch 64", IncompatibleError, "write batch instead"),
        ("digits -n 2 --pipeline 1f1b --pace 0.1", IncompatibleError, "each worker of a pipeline computes a part"),
        ("regression -n 1 --pipeline 1f1b", IncompatibleError, "train without a pipeline"),
        ("digits -n 2000", IncompatibleError, "1079 samples to train on, too few for 2000 workers"),
    ],
)
def test_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, kind: type[SynclineError], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "log.jsonl").touch()
    (tmp_path / "ten.py").write_text("import torch, syncline as sl\nworld = sl.init()\nmodel = 1\nraise SystemExit(3)")
    save(tmp_path / "other" / "checkpoints", step=1, epoch=0)
    (tmp_path / "other" / "config.json").write_text(json.dumps({"workload": "stdlib"}))
    monkeypatch.setattr(placement, "run_here", lambda *_: pytest.fail("it was started"))
    with pytest.raises(kind) as caught:
        train.run(parsed(*line.split()))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_without_tensorboard_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'syncline\[tensorboard\]'"):
        train.run(parsed(CONVEX, "--tensorboard"))


def test_other_settings_than_before_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[start.Job] = []

    def note(job: start.Job, ranks: int) -> int:
        started.append(job)
        return 0

    monkeypatch.setattr(placement, "run_here", note)
    Path("a").mkdir()
    (Path("a") / "config.json").write_text(json.dumps({"workload": CONVEX, "seed": 0, "batch": 7, "scaling": "none"}))
    assert train.run(parsed(CONVEX, "--out", "a", "--resume", "auto", "--seed", "3", "--batch", "7")) == 0
    assert "other settings than it started with: seed 3 (it was 0)" in caplog.text
    (job,) = started
    plan = json.loads(job.target[-1])
    assert (plan["resume"], plan["folder"], plan["terminal"]) == (True, str(tmp_path / "a"), False)
    assert plan["settings"]["seed"] == 3


def test_job_that_slurm_has_started_again_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[start.Job] = []

    def note(job: start.Job, ranks: int) -> int:
        started.append(job)
        return 0

    monkeypatch.setattr(placement, "run_here", note)
    (Path("a") / "checkpoints").mkdir(parents=True)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    with pytest.raises(IncompatibleError, match="a holds a run already"):
        train.run(parsed(CONVEX, "--out", "a"))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train.run(parsed(CONVEX, "--out", "a")) == 0
    assert json.loads(started[0].target[-1])["resume"] is True
    assert "it continues a, as with --resume auto" in caplog.text


@pytest.mark.parametrize("resume", [(), ("--resume", "auto")])
def test_a_folder_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: tuple[str, ...]) -> None:
    """Before a worker is started; and the job itself holds its folder while it runs."""
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def note(job: start.Job, ranks: int) -> int:
        with pytest.raises(IncompatibleError, match=f"a is in use by another job .process {os.getpid()} on "):
            train.run(parsed(CONVEX, "--out", "a", *resume))
        seen.append("started")
        return 0

    monkeypatch.setattr(placement, "run_here", note)
    assert train.run(parsed(CONVEX, "--out", "a", *resume)) == 0
    assert seen == ["started"], "the second one was not"
    assert train.run(parsed(CONVEX, "--out", "a", *resume)) == 0, "when the first is over"


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(placement, "run_here", lambda *_: pytest.fail("it was started"))
    with pytest.raises(SpecError, match=r"file/a cannot be written to \(Not a directory\): name another folder"):
        train.run(parsed(CONVEX, "--out", "file/a"))


def test_servers_and_what_a_loss_means_reach_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[start.Job] = []

    def note(job: start.Job, ranks: int) -> int:
        started.append(job)
        return 0

    monkeypatch.setattr(placement, "run_here", note)
    assert train.run(parsed(CONVEX, "-n", "2", "--strategy", "ssp", "--servers", "2", "--on-failure", "continue")) == 0
    assert train.run(parsed(CONVEX, "-n", "2", "--strategy", "hogwild", "--on-failure", "continue")) == 0
    assert train.run(parsed(CONVEX, "-n", "2")) == 0
    assert [(job.servers, job.policy, job.evaluators) for job in started] == [
        (2, "continue", 1),
        (0, "continue", 0),
        (0, "stop", 0),
    ]


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    told = capsys.readouterr().out
    for words in ("syncline train digits -n 4", "--resume", "--target", "--lab"):
        assert words in told


def weights(folder: Path) -> dict[str, bytes]:
    """The bytes of each tensor of the model in the newest checkpoint; the order of the files' headers is a matter of
    chance.
    """
    newest = max((folder / "checkpoints").glob("step-*"))
    tensors = {
        name: one for path in (newest / "model-run").glob("*.safetensors") for name, one in load_file(path).items()
    }
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def ended(run: Run, code: int) -> Run:
    assert run.code == code, run.describe()
    return run


@pytest.mark.xdist_group("launch")
def test_a_pipeline_of_two_workers_continues_on_one(runs: Runs) -> None:
    plan = ("--pipeline", "1f1b(microbatches=4)", "--epochs", "1", "--out", "a")
    run = ended(runs.run("train", "vgg(width=2, dense=16)", "-n", "2", *plan), 0)
    assert "epoch 1/1: validation accuracy 0." in run.out
    config = json.loads((runs.folder / "a" / "config.json").read_text())
    assert config["run"]["pipeline"]["replicas"] == [1, 1]
    assert 0 < config["run"]["pipeline"]["parameters"][0] < config["parameters"]
    run = ended(runs.run("train", "vgg(width=2, dense=16)", "--epochs", "2", "--out", "a", "--resume", "auto"), 0)
    assert "continues with other settings than it started with: pipeline None" in run.err
    assert "epoch 2/2: validation accuracy 0." in run.out


@pytest.mark.xdist_group("launch")
def test_digits_on_two_workers(runs: Runs) -> None:
    run = ended(runs.run("train", "digits", "-n", "2", "--epochs", "3", "--target", "0.5", "--trace"), 0)
    lines = run.out.splitlines()
    assert run.err.startswith("syncline: starting 2 workers\n")
    assert any(line.startswith("epoch 1/3: validation accuracy 0.") for line in lines)
    (folder,) = (runs.folder / "runs").iterdir()
    assert folder.name.startswith("digits-")
    assert lines[-1].startswith("test accuracy 0.")
    assert lines[-1].endswith(f"; runs/{folder.name}")
    assert "target 0.5 reached after" in lines[-1]
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "log.jsonl",
        "config.json",
        "system.json",
        "summary.json",
        "checkpoints",
        "trace-rank0.json",
        "trace-rank1.json",
    }
    assert read_log(folder)[-1]["metadata"]["stopped_by"] == "target"
    for rank in range(2):
        assert isinstance(json.loads((folder / f"trace-rank{rank}.json").read_text()), list)
    assert json.loads((folder / "system.json").read_text())["world"]["launcher"] == "syncline run"
    wait_for(lambda: not runs.processes(), f"no process is left, but {runs.processes()}")


@pytest.mark.xdist_group("launch")
def test_workers_at_their_own_pace_and_one_of_them_slow(runs: Runs) -> None:
    options = ["--strategy", "hogwild", "--epochs", "2", "--pace", "0.0005", "--slow", "rank=1,factor=4", "--out", "a"]
    run = ended(runs.run("train", "digits", "-n", "2", *options), 0)
    assert run.out.splitlines()[-1].startswith("test accuracy 0.")
    found = {line["key"]: line for line in read_log(runs.folder / "a")}
    assert found["sl_steps"]["value"] == [34, 34]
    assert found["sl_staleness_histogram"]["metadata"]["workers"] == 2
    assert sum(found["sl_staleness_histogram"]["value"].values()) == 68
    assert found["sl_evaluation"]["value"]["epochs"] == 2
    slept = 2 * 540 * 0.0005
    assert found["sl_phases"]["value"]["compute"] >= slept, "rank 0's own share, at its own pace"
    assert found["sl_phases"]["value"]["elapsed"] >= 4 * 2 * 539 * 0.0005, "all wait at the end for the slow one"


def evaluations(folder: Path) -> list[float]:
    """The validation accuracies in the log so far."""
    if not (folder / "log.jsonl").exists():
        return []
    return [line["value"] for line in read_log(folder) if line["key"] == "eval_accuracy"]


@pytest.mark.xdist_group("launch")
def test_a_killed_worker_does_not_end_the_run(runs: Runs) -> None:
    """Its clock holds nobody back, the others reach the target and save, and log and exit code tell of it.

    The evaluator is killed too: a worker evaluates in its place.
    """
    options = ["--strategy", "ssp(slack=3)", "--servers", "1", "--on-failure", "continue", "--out", "a"]
    run = runs.start("train", "digits", "-n", "3", *options, "--pace", "0.003", "--target", "0.9", "--epochs", "60")
    folder = runs.folder / "a"
    wait_for(lambda: evaluations(folder) or run.process.exitcode is not None, run.describe())
    _, _, _, third, evaluator = run.programs()
    os.kill(third, signal.SIGKILL)
    os.kill(evaluator, signal.SIGKILL)
    ended(run.finish(), 128 + signal.SIGKILL)
    assert "target 0.9 reached after" in run.out.splitlines()[-1]
    assert "syncline: rank 2 was killed by signal 9 (SIGKILL); the others go on" in run.err
    assert "the evaluator is lost (it was killed by signal 9 (SIGKILL)): rank 0 evaluates" in run.err
    found = {line["key"]: line for line in read_log(folder)}
    assert found["sl_lost"]["value"] == {"2": "it was killed by signal 9 (SIGKILL)"}
    steps = found["sl_steps"]["value"]
    assert steps[2] + 3 < min(steps[0], steps[1]), "the others went on beyond its slack"
    assert evaluations(folder)[-1] >= 0.9
    assert found["run_stop"]["metadata"]["status"] == "success"
    assert found["run_stop"]["metadata"]["stopped_by"] == "target"
    assert latest(folder / "checkpoints") == found["run_stop"]["metadata"]["step"]
    wait_for(lambda: not runs.processes(), f"no process is left, but {runs.processes()}")
    left = [path.name for path in runs.temporary.iterdir() if not path.name.startswith("torchinductor")]
    assert left == [], "torch makes itself a folder for what it compiles"


@pytest.mark.xdist_group("launch")
def test_divergence_is_a_sentence(runs: Runs) -> None:
    run = ended(runs.run("train", CONVEX, "-n", "2", "--lr", "1e30", "--epochs", "9", "--out", "a"), 1)
    assert "DivergedError: NaN or Inf in the gradients of rank" in run.err
    assert "Traceback" not in run.err
    last = read_log(runs.folder / "a")[-1]
    assert last["key"] == "run_stop"
    assert last["metadata"]["status"] == "aborted"
    assert "DivergedError" in last["metadata"]["error"]


@pytest.mark.xdist_group("launch")
def test_sigterm_and_go_on(runs: Runs) -> None:
    """SIGTERM to every process, as batch systems send it, ends the run as Ctrl-C does: with a checkpoint and a line.

    Resumed, it ends with the bits of a run that nobody interrupted.
    """
    common = ("train", CONVEX, "-n", "2", "--batch", "16", "--collective", "ring", "--out")
    run = runs.start(*common, "a", "--epochs", "1000000")
    wait_for(lambda: "epoch 3/" in run.out or run.process.exitcode is not None, run.describe())
    for process in (*runs.processes(), run.pid):
        os.kill(process, signal.SIGTERM)
    ended(run.finish(), 128 + signal.SIGTERM)
    folder = runs.folder / "a"
    last = run.out.splitlines()[-1]
    assert last.startswith("stopped: ")
    assert last.endswith(f"--resume {folder.name}")
    step = latest(folder / "checkpoints")
    assert step is not None
    assert read_log(folder)[-1]["metadata"] == {"status": "aborted", "stopped_by": "signal", "step": step}
    epochs = str(step // 8 + 2)
    resumed = runs.start(*common, "a", "--epochs", epochs, "--resume", "auto")
    ended(runs.run(*common, "b", "--epochs", epochs), 0)
    ended(resumed.finish(), 0)
    assert [line["value"] for line in read_log(folder) if line["key"] == "sl_resumed"] == [step]
    assert latest(folder / "checkpoints") == latest(runs.folder / "b" / "checkpoints") == 8 * int(epochs)
    assert weights(folder) == weights(runs.folder / "b") != {}
    wait_for(lambda: not runs.processes(), f"no process is left, but {runs.processes()}")
