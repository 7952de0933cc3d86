"""`syncline train kmeans`, and the examples."""

from __future__ import annotations

import argparse
import re

import pytest

import syncline as sl
from syncline.bench.kmeans import Blobs, KMeansPlan, build_blobs, describe, solve
from syncline.cli import train
from syncline.cli.train import is_kmeans, train_kmeans
from tests.forking import forked_python
from tests.launching import finish, start
from tests.mpi import MPICH, collect, job_environ, need

SMALL = "kmeans(k=5, dims=3, points=20000)"


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.configure(parser)
    return parser.parse_args(words)


def through_mpi(*command: str) -> str:
    """Run to the end, which is a good one; what was said."""
    need(MPICH)
    environ = job_environ({})
    ended = collect(forked_python(command, environ), environ)
    assert ended.code == 0, ended
    return ended.out + ended.err


@pytest.mark.parametrize(
    "strategy", ["onesided(batch=50)", "onesided(part=0.25, buffers=2, batch=50)", "aggregate", "allreduce"]
)
def test_it_finds_the_blobs(strategy: str) -> None:
    plan = KMeansPlan(problem=SMALL, strategy=strategy)
    results = sl.simulate(lambda world: solve(plan, world), 3).results
    for found, truth in results:
        assert found.value == pytest.approx(3.0, rel=0.03)
        assert truth == pytest.approx(3.0, rel=0.03)
    found, truth = results[0]
    told = describe(plan, found, truth, "simulated")
    assert told.startswith(f"{SMALL} by {strategy.partition('(')[0]} on 3 workers (simulated): ")
    assert ("accepted" in told) == strategy.startswith("onesided")


CALL = (
    "import argparse, sys; from syncline.cli import train; "
    "parser = argparse.ArgumentParser(); train.configure(parser); sys.exit(train.train_kmeans(parser.parse_args()))"
)


@pytest.mark.xdist_group("mpi")
def test_several_workers_are_handed_over_to_mpiexec() -> None:
    said = through_mpi("-c", CALL, SMALL, "-n", "2", "--strategy", "onesided", "--batch", "100", "--lr", "0.2")
    assert "by onesided on 2 workers (mpi)" in said
    assert "steps of each worker 100, " in said
    assert re.search(r"states: 200 sent, 0 dropped, \d+ accepted, \d+ rejected, \d+ torn", said)


def test_the_points_are_the_same_each_time() -> None:
    first, second = Blobs(k=3, dims=2, points=50, seed=4), build_blobs("kmeans(k=3, dims=2, points=50, seed=4)")
    assert first == second
    assert (first.draw()[0] == second.draw()[0]).all()
    assert (first.draw()[0] != Blobs(k=3, dims=2, points=50, seed=5).draw()[0]).any()


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["kmeans", "-n", "0"], sl.errors.SpecError, "at least one worker"),
        (["kmeans(k=9, points=5)"], sl.errors.SpecError, "k is a whole number from 1 to 5"),
        (
            ["kmeans(points=2, k=1)", "-n", "3", "--strategy", "onesided"],
            sl.errors.IncompatibleError,
            "too few points for 3",
        ),
        (["kmeans", "--codec", "quantize(4)"], sl.errors.IncompatibleError, "--codec: kmeans is no network"),
        (["kmeans", "--lab", "2@100mbit"], sl.errors.IncompatibleError, "--lab: kmeans is no network"),
        (["kmeans", "--strategy", "bsp"], sl.errors.SpecError, r"solved by onesided\(…\) or aggregate\(…\)"),
        (["kmeans", "--strategy", "onesided(bufers=2)"], sl.errors.SpecError, "no 'bufers'; did you mean 'buffers'"),
        (["kmeans", "--strategy", "aggregate", "--batch", "5"], sl.errors.SpecError, "aggregate has no 'batch'"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        train_kmeans(parsed(*words))


@pytest.mark.parametrize(
    ("spec", "ours"), [("kmeans", True), ("kmeans(k=3)", True), ("kmean", False), ("digits", False)]
)
def test_what_is_solved_here(spec: str, ours: bool) -> None:
    assert is_kmeans(spec) == ours


# The examples.


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["kmeans.py"], "one-sided on 1 workers: 4.0"),
        (["onesided_scaling.py", "--points", "20000", "--workers", "1", "4"], "speed-up"),
        (["onesided_scaling.py", "--points", "20000", "--workers", "3", "--slow", "5"], "the true centres"),
    ],
)
def test_an_example(command: list[str], says: str) -> None:
    (ended,) = finish([start([f"examples/{command[0]}", *command[1:]], {})])
    assert ended.code == 0, ended
    assert says in ended.out


@pytest.mark.xdist_group("mpi")
def test_the_example_on_mpi() -> None:
    said = through_mpi("-m", "syncline", "run", "--mpi", "-n", "2", "examples/kmeans.py")
    assert "one-sided on 2 workers: 4.0" in said
