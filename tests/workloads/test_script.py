"""Workloads from a user's file: errors with the line, and training of the template."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from syncline.cli import placement
from syncline.cli.main import main
from syncline.errors import IncompatibleError, SpecError
from syncline.testing.workloads import WorkloadContract, assert_rng_unchanged
from syncline.training.loop import train
from syncline.training.run_folder import fresh_name
from syncline.training.settings import Settings
from syncline.workloads import ScriptWorkload, build
from syncline.workloads.base import Workload
from syncline.world import simulate
from tests.launch.runs import Runs

TEMPLATE = str(files("syncline.workloads") / "template.py")

GOOD = """
import torch
from torch import nn

def model():
    return nn.Linear(2, 1)

def data():
    return pair(8), pair(4), pair(4)

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def pair(count):
    return torch.randn(count, 2), torch.randn(count, 1)

"""
LAST = GOOD.count("\n")


@pytest.fixture(autouse=True)
def kept_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the modules and paths that a script adds to the interpreter."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("syncline_script_", "beside_")):
            del sys.modules[name]


def script(folder: Path, more: str = "", name: str = "mine.py") -> str:
    """Write a valid script with `more` at its end, which may define names again."""
    path = folder / name
    path.write_text(GOOD + more)
    return str(path)


class TestTemplate(WorkloadContract):
    @classmethod
    def make(cls) -> Workload:
        return build(TEMPLATE)


def refusal(path: str) -> str:
    """The error of building and checking a script."""
    with pytest.raises(SpecError) as caught:
        ScriptWorkload(path).check()
    told = str(caught.value)
    assert "\n" not in told
    assert Path(path).name in told
    return told


def test_the_loss_of_an_output_must_be_the_loss(tmp_path: Path) -> None:
    """A pipeline needs it."""
    right = "def output_loss(outputs, targets):\n    return (outputs - targets).square().mean()\n"
    workload = ScriptWorkload(script(tmp_path, right))
    workload.check()
    assert float(workload.output_loss(torch.ones(2, 1), torch.zeros(2, 1))) == 1.0
    assert "they must be the same function" in refusal(script(tmp_path, right.replace("square", "abs")))
    with pytest.raises(IncompatibleError, match="define it, or train without a pipeline"):
        ScriptWorkload(script(tmp_path)).output_loss(torch.ones(2, 1), torch.zeros(2, 1))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("def broken(:\n", f"line {LAST + 1}: not Python"),
        ("\0", "not Python (source code string cannot contain null bytes)"),
        ("x = 1\ny = x / 0\n", f"line {LAST + 2}: importing it raised ZeroDivisionError: division by zero; python"),
        ("import sys\nsys.exit(3)\n", "importing it raised SystemExit: 3; put what the script runs under if __name__"),
        (
            "import no_such_module_at_all\n",
            f"line {LAST + 1}: importing it raised ModuleNotFoundError: No module named",
        ),
        (
            "def dta(): ...\ndel data\n",
            "has no data(): a workload's script defines model(), data(), loss(model, batch)",
        ),
        ("def dta(): ...\ndel data\n", "for data: did you mean 'dta'? available: 'dta', 'pair'"),
        ("del data, loss\n", "has no data() and no loss(model, batch)"),
        ("model = 3\n", "model is 3, not a function; write def model():"),
        (
            "def loss(model): ...\n",
            "loss(model) cannot be called as loss(model, batch) (too many positional arguments)",
        ),
        ("def loss(model, batch, more): ...\n", "(missing a required argument: 'more'); write def loss(model, batch):"),
        ("def model(seed): ...\n", "model(seed) cannot be called as model() (missing a required argument: 'seed')"),
        ("def model():\n    return 3\n", "model() returns int, not an nn.Module"),
        ("def model():\n    return nn.ReLU()\n", "model() returns a ReLU without trainable parameters"),
        ("def model():\n    return nn.Linear(2, 1).requires_grad_(False)\n", "a Linear without trainable parameters"),
        ("def model():\n    return nn.LazyLinear(1)\n", "model() has lazy layers"),
        ("def model():\n    raise OSError('no\\nweights')\n", f"line {LAST + 2}: model() raised OSError: no weights"),
        (
            "import itertools\ncount = itertools.count()\n"
            "def model():\n    made = nn.Linear(2, 1)\n    made.bias.data.fill_(next(count))\n    return made\n",
            "model() returns another bias each time",
        ),
        (
            "def data():\n    return pair(8), pair(4)\n",
            "data() returns three splits, not 2 of them; end it with return",
        ),
        ("def data():\n    return {}\n", "data() returns three splits, not a dict"),
        ("def data():\n    open('/nowhere/at/all')\n", f"line {LAST + 2}: data() raised FileNotFoundError"),
        ("def data():\n    return pair(8), pair(0), pair(4)\n", "the validation split of data() is empty"),
        ("def data():\n    return pair(8), 3, pair(4)\n", "the validation split of data() is a int; give a dataset"),
        ("def data():\n    return pair(8), torch.ones(3), pair(4)\n", "is a Tensor; give a dataset with len()"),
        (
            "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self): ...\n"
            "def data():\n    return Stream(), pair(4), pair(4)\n",
            "the train split of data() is a Stream; give a dataset with len() and [index]",
        ),
        (
            "def data():\n    return torch.utils.data.DataLoader([1]), pair(4), pair(4)\n",
            "the train split of data() is a loader; give its dataset",
        ),
        (
            "def data():\n    return (torch.ones(3, 2), torch.ones(2)), pair(4), pair(4)\n",
            "the train split of data() has 3 inputs and 2 targets",
        ),
        ("def data():\n    all = pair(8)\n    return all, pair(4), all\n", "train and test of data() are one object"),
        (
            "def data():\n    x, y = pair(8)\n    return (x, y), (x, y), pair(4)\n",
            "train and validation of data() have the same 8 inputs",
        ),
        (
            "def data():\n    x, y = pair(9)\n    return (x[:8], y[:8]), pair(4), (x[5:], y[5:])\n",
            "train and test of data() have 3 inputs in common",
        ),
        (
            "def data():\n    whole = torch.utils.data.TensorDataset(*pair(9))\n    part = torch.utils.data.Subset\n"
            "    return part(whole, range(6)), part(whole, range(4, 8)), part(whole, [8])\n",
            "train and validation of data() have 2 samples in common",
        ),
        ("def data():\n    return [1, 2], pair(4), pair(4)\n", "a sample of the train split is a int; give pairs"),
        (
            "def data():\n    return [('a', 1)], pair(4), pair(4)\n",
            "has a tuple for its input; give tensors or numbers",
        ),
        (
            "def data():\n    return [(torch.ones(2), 1), (torch.ones(3), 1)], pair(4), pair(4)\n",
            "putting samples of the train split into a batch raised RuntimeError",
        ),
        ("def loss(model, batch):\n    return 1.0\n", "loss(model, batch) returns a float, not one number"),
        ("def loss(model, batch): ...\n", "loss(model, batch) returns None, not one number"),
        ("def loss(model, batch):\n    return model(batch[0])\n", "returns a tensor of shape (2, 1), not one number"),
        (
            "def loss(model, batch):\n    return model(batch[1])\n",
            f"line {LAST + 2}: loss(model, batch) raised Runtime",
        ),
        (
            "@torch.no_grad()\ndef loss(model, batch):\n    return model(batch[0]).mean()\n",
            "loss(model, batch) is not differentiable",
        ),
        ("def loss(model, batch):\n    return model(batch[0]).mean() / 0\n", "on the first samples; look at the data"),
        (
            "def loss(model, batch):\n    return (0 * model(batch[0])).sqrt().mean()\n",
            "gives weight a gradient with NaN or Inf",
        ),
        (
            "def loss(model, batch):\n    return torch.ones((), requires_grad=True) * 2\n",
            "gives no parameter of the model a gradient",
        ),
        ("def loss(model, batch):\n    return (model(batch[0]) - 1).square().sum()\n", "is the sum over the batch"),
        ("def metric(model, batch):\n    return 'good'\n", "returns 'good' for 'metric', not a number"),
        (
            "def metric(model, batch):\n    return torch.ones(2)\n",
            "returns tensor([1., 1.]) for 'metric', not a number",
        ),
        (
            "def metric(model, batch):\n    return {'f1': 1}\n",
            "returns ['f1'] and not 'metric'",
        ),
        (
            "METRIC = 'accuracy'\ndef metric(model, batch):\n    return 50\n",
            "is 50 on the first samples, not from 0 to 1",
        ),
        ("def metric(model, batch):\n    return float('nan')\n", "metric by metric(model, batch) is nan on the first"),
        ("def metric(model, batch):\n    return 1 / 0\n", f"line {LAST + 2}: metric(model, batch) raised ZeroDivision"),
        ("METRIC = 'accuracy'\n", "METRIC is 'accuracy' and there is no metric(model, batch) that returns it"),
        ("METRIC = 3\n", "METRIC is a name such as 'accuracy' (METRIC: 3)"),
        ("HIGHER_IS_BETTER = True\n", "HIGHER_IS_BETTER is True and the metric is the loss"),
        ("HIGHER_IS_BETTER = 1\n", "HIGHER_IS_BETTER is True or False (HIGHER_IS_BETTER: 1)"),
        ("METRIC_RANGE = (1, 0)\n", "METRIC_RANGE is a pair (least, most)"),
        ("METRIC_RANGE = 3\n", "METRIC_RANGE is a pair (least, most)"),
        ("METRIC_RANGE = (0, 1)\nTARGET = -1\n", "target -1 cannot be"),
        ("METRIC = 'accuracy'\ndef metric(model, batch): ...\nTARGET = 97\n", "at most 1; did you mean 0.97?"),
        ("TARGET = 'high'\n", "target 'high' is not a finite number"),
        ("BATCH = 0\n", "BATCH is a whole number from 1"),
        ("EPOCHS = 1.5\n", "EPOCHS is a whole number from 1"),
        ("LEARNING_RATE = 0\n", "LEARNING_RATE is a number above 0 (LEARNING_RATE: 0)"),
        ("def optimizer(model, learning_rate): ...\n", "returns NoneType, not an optimizer; return one of torch.optim"),
        (
            "def optimizer(model, learning_rate):\n    return torch.optim.SGD(model.parameters(), lr=0.1)\n",
            "has the rates [0.1] whatever learning_rate is; pass it on",
        ),
        (
            "def optimizer(net, rate):\n    return torch.optim.SGD(model().parameters(), lr=rate)\n",
            "trains no parameter of the model that it is given",
        ),
    ],
)
def test_errors_name_the_mistake(tmp_path: Path, more: str, words: str) -> None:
    with assert_rng_unchanged():
        assert words in refusal(script(tmp_path, more))


def test_missing_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal("mine.py") == "there is no file mine.py; syncline new mine.py writes one to begin with"
    script(tmp_path)
    assert refusal("./mime.py") == "there is no file ./mime.py; did you mean ./mine.py?"
    assert refusal("./mine").endswith("a script's name ends in .py: write ./mine.py")
    assert "is no workload: a script's name ends in .py" in refusal("nowhere/mine")
    (tmp_path / "folder.py").mkdir()
    assert refusal("folder.py").startswith("folder.py cannot be read (Is a directory)")
    with pytest.raises(SpecError, match=r"unknown workload 'mine'.* write mine\.py"):
        build("mine")
    with pytest.raises(SpecError, match=r"available: 'digits', .*'vgg'$"):
        build("yours")
    assert build("fashion(folder='/data/mine.py')").name == "fashion"


def test_a_small_script_gets_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, name="my rings.py")
    workload = build("my rings.py")
    assert isinstance(workload, ScriptWorkload)
    workload.check()
    assert workload.spec == repr(workload) == str(tmp_path / "my rings.py")
    assert (workload.name, workload.metric, workload.higher_is_better) == ("my rings", "loss", False)
    usual = workload.defaults
    assert (usual.batch, usual.epochs, usual.learning_rate, usual.momentum, usual.target) == (32, 10, 0.01, 0.9, None)
    assert list(workload.evaluate(workload.model(), workload.splits().test)) == ["loss"]
    assert workload.describe()["script_sha256"] == hashlib.sha256(Path("my rings.py").read_bytes()).hexdigest()
    assert fresh_name(workload.spec).startswith("my_rings-")
    assert not (tmp_path / "__pycache__").exists()
    assert (ScriptWorkload.name, ScriptWorkload.metric) == ("script", "loss")


def test_an_edited_script_is_another_one(tmp_path: Path) -> None:
    """Also right after the first import and with the same length: no bytecode of the first one is used."""
    path = script(tmp_path, "EPOCHS = 3\n")
    before = build(path)
    after = build(script(tmp_path, "EPOCHS = 4\n"))
    assert (before.defaults.epochs, after.defaults.epochs) == (3, 4)
    assert before.describe()["script_sha256"] != after.describe()["script_sha256"]
    assert before.describe()["sha256"] == after.describe()["sha256"]


def test_all_that_a_script_may_have(tmp_path: Path) -> None:
    """Modules in its folder, dataclasses, its own datasets, NumPy arrays and numbers, several measures."""
    (tmp_path / "beside_mine.py").write_text("SIZE = 6\n")
    more = """
from dataclasses import dataclass
import numpy as np
from beside_mine import SIZE

METRIC, HIGHER_IS_BETTER, METRIC_RANGE, TARGET = "points", True, (0, 10), 4
BATCH, EPOCHS, LEARNING_RATE = 2, 3, 0.5

@dataclass
class Numbers:
    count: int
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return np.ones(2, dtype=np.float32) * index, 1.0

def data():
    return Numbers(SIZE), [(torch.ones(2), 0)], (np.ones((3, 2), np.float32), np.ones(3))

def metric(model, batch):
    return {"points": np.float32(4.5), "loss": 7, "size": torch.tensor([len(batch[0])])}

def optimizer(model, learning_rate):
    return torch.optim.Adam(model.parameters(), lr=learning_rate)
"""
    workload = build(script(tmp_path, more))
    assert isinstance(workload, ScriptWorkload)
    workload.check()
    assert workload.splits().sizes() == {"train": 6, "validation": 1, "test": 3}
    found = workload.evaluate(workload.model(), workload.splits().test, batch=2)
    assert found == pytest.approx({"points": 4.5, "loss": 7, "size": 5 / 3})
    assert (workload.metric, workload.metric_range, workload.defaults.target) == ("points", (0.0, 10.0), 4.0)
    assert (workload.defaults.batch, workload.defaults.epochs, workload.defaults.learning_rate) == (2, 3, 0.5)
    assert isinstance(workload.optimizer(workload.model(), 0.25), torch.optim.Adam)
    assert workload.defaults.optimizer == "script"
    assert "sha256" not in workload.describe()


def test_data_of_every_type_has_a_digest(tmp_path: Path) -> None:
    more = (
        "def data():\n    return [torch.utils.data.TensorDataset(x.bfloat16(), y) for x, y in map(pair, (8, 4, 4))]\n"
    )
    workload = build(script(tmp_path, more))
    assert isinstance(workload.splits().train, TensorDataset)
    assert len(workload.describe()["sha256"]) == 64


def test_similar_names_give_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = "LR = 1\nTARGETS = 2\nEPOCH = 3\nCLASSES = 4\ndef metrics(model, batch): ...\n"
    workload = build(script(tmp_path, more))
    assert isinstance(workload, ScriptWorkload)
    workload.check()
    told = sorted(record.getMessage().rpartition("mine.py: ")[2] for record in caplog.records)
    assert [words.split()[0] for words in told] == ["EPOCH", "LR", "TARGETS", "metrics"]
    assert told[1] == "LR is not used; did you mean LEARNING_RATE?"


def test_the_template_reaches_its_target_and_two_ranks_agree() -> None:
    """On the simulator, with a script that was not imported before."""

    def rank(_: object) -> tuple[float | None, float | None, str]:
        workload = build(TEMPLATE)
        outcome = train(workload, Settings(target=workload.defaults.target, collective="ring", batch=64))
        return outcome.validation, outcome.test, outcome.stopped_by

    first, second = simulate(rank, 2).results
    assert first == second
    assert first[2] == "target"
    assert first[1] > 0.95


def test_train_refuses_before_a_worker_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement, "run_here", lambda *_: pytest.fail("it was started"))
    script(tmp_path, "def loss(model, batch):\n    return 1.0\n")
    assert main(["train", "mine.py", "-n", "2"]) == 2
    assert "syncline train: mine.py: loss(model, batch) returns a float" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_resuming_with_another_script_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement, "run_here", lambda *_: 0)
    (tmp_path / "a").mkdir()
    workload = build(script(tmp_path, "EPOCHS = 3\n"))
    (tmp_path / "a" / "config.json").write_text(json.dumps(workload.describe()))
    line = ["train", "mine.py", "--out", "a", "--resume", "auto"]
    assert main(line) == 0
    assert "other settings" not in caplog.text
    script(tmp_path, "EPOCHS = 4\n")
    assert main(line) == 0
    assert "other settings than it started with: a script of SHA-256" in caplog.text


@pytest.mark.xdist_group("launch")
def test_two_real_workers(runs: Runs) -> None:
    """Like a user: write the template, and train it by a relative path."""
    own = runs.folder / "own.py"
    assert main(["new", str(own)]) == 0
    run = runs.run("train", "own.py", "-n", "2", "--steps", "3", "--out", "a")
    assert run.code == 0, run.describe()
    assert run.out.splitlines()[-1].startswith("test accuracy 0.")
    config = json.loads((runs.folder / "a" / "config.json").read_text())
    assert (config["workload"], config["workers"]) == (str(own), 2)
    assert config["script_sha256"] == hashlib.sha256(own.read_bytes()).hexdigest()
