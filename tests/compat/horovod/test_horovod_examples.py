"""The examples for Horovod's users: they learn, on one worker and on two, and all workers end with the same weights."""

from __future__ import annotations

import re

import pytest

from tests.hunting import only_hunting
from tests.launch.runs import Runs
from tests.launching import ROOT, finish, start, torch_variables

EXAMPLES = ROOT / "examples"
NAMES = """
import horovod
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet
from horovod.torch.compression import Compression
from horovod.torch.elastic import TorchState
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import ObjectState
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import allreduce_async_, rank, size
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm

assert horovod.__version__ == "0.28.1" and horovod.torch is hvd and hvd.elastic.TorchState is TorchState
assert os.environ["HOROVOD_SIZE"] == "2"
"""
"""Other imports of Horovod's scripts."""


def alone(script: str, *arguments: str) -> str:
    """What it prints under plain Python."""
    (ended,) = finish([start([str(EXAMPLES / script), *arguments], {})])
    assert ended.code == 0, ended.err
    return ended.out.strip()


def together(script: str, *arguments: str) -> str:
    """What rank 0 prints of two workers."""
    ended = finish([start([str(EXAMPLES / script), *arguments], each) for each in torch_variables(2)])
    assert [each.code for each in ended] == [0, 0], ended
    return ended[0].out.strip()


def numbers(line: str, pattern: str) -> list[float]:
    found = re.search(pattern, line)
    assert found is not None, line
    return [float(number) for number in found.groups()]


def check_digits(line: str, workers: int) -> None:
    assert re.fullmatch(rf"workers: {workers}; .*; weights [0-9a-f]{{8}}, the same", line), line
    loss, accuracy = numbers(line, r"test loss ([\d.]+), accuracy ([\d.]+);")
    assert loss < 1.0  # ln 10 = 2.3 to begin with
    assert accuracy > 0.8


def test_digits_with_both_give_the_same_bits() -> None:
    theirs, ours = together("horovod_mnist.py"), together("distribute_mnist.py")
    check_digits(theirs, workers=2)
    assert theirs == ours  # the loss, the accuracy and the checksum of all weights


@only_hunting
def test_digits_on_one_worker() -> None:
    theirs, ours = alone("horovod_mnist.py"), alone("distribute_mnist.py")
    check_digits(theirs, workers=1)
    assert theirs == ours


def check_words(line: str) -> list[float]:
    first, last, accuracy, rows = numbers(
        line, r"workers: 2; loss ([\d.]+) to ([\d.]+), accuracy ([\d.]+); rows of the last gradient: (\d+); "
    )
    assert last < 0.6 * first
    assert accuracy > 0.8
    assert 64 * 8 < rows <= 2 * 64 * 8  # more than one worker's words, at most both
    assert line.endswith("weights the same")
    return [first, last, accuracy]


def test_a_sparse_embedding_travels_as_rows() -> None:
    check_words(together("horovod_embedding.py"))


@only_hunting
def test_a_sparse_embedding_travels_as_rows_or_as_a_table() -> None:
    sparse, dense = together("horovod_embedding.py"), together("horovod_embedding.py", "--sparse-as-dense")
    assert check_words(dense) == pytest.approx(check_words(sparse), abs=2e-3)  # sums in another order


@only_hunting
def test_a_sparse_embedding_on_one_worker() -> None:
    line = alone("horovod_embedding.py")
    first, last = numbers(line, r"workers: 1; loss ([\d.]+) to ([\d.]+),")
    assert last < 0.6 * first


def test_a_gan_by_horovodruns_words(runs: Runs) -> None:
    text = (EXAMPLES / "horovod_gan.py").read_text()
    ours, theirs = "import syncline.compat.horovod.torch as hvd", "import horovod.torch as hvd"
    assert ours in text
    script = runs.script(text.replace(ours, f"{theirs}\n{NAMES}"))  # as Horovod's own users have it
    run = runs.run("horovodrun", "--alias", "-np", "2", "-H", "localhost:2", "python", script)
    assert run.code == 0, run.describe()
    first, last = numbers(run.out.strip(), r"workers: 2; distance ([\d.]+) to ([\d.]+); weights the same")
    assert last < 0.3 * first


@only_hunting
def test_a_gan_on_one_worker() -> None:
    first, last = numbers(alone("horovod_gan.py"), r"workers: 1; distance ([\d.]+) to ([\d.]+); weights the same")
    assert last < 0.3 * first
