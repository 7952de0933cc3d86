"""Graphs and their weights: doubly stochastic, connected, and refused where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import syncline as sl
from syncline.strategies import build_strategy
from syncline.strategies.gossip import GRAPHS, Gossip, build_graph, metropolis
from tests.strategies.gossip.cases import begin

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("size", SIZES)
def test_named_graphs_are_symmetric_and_doubly_stochastic(name: str, size: int) -> None:
    graph = build_graph(name, size)
    matrix = graph.tensor()
    assert torch.equal(matrix, matrix.T)
    assert bool((matrix >= 0).all())
    torch.testing.assert_close(matrix.sum(dim=0), torch.ones(size, dtype=torch.float64))
    second = sorted(torch.linalg.eigvalsh(matrix).abs().tolist())[:-1]
    assert graph.contraction == pytest.approx(second[-1] if second else 0.0, abs=1e-12)
    assert graph.gap > 0.03


def test_their_weights() -> None:
    assert build_graph("ring", 5).sources(0) == {1: 1 / 3, 4: 1 / 3}
    assert build_graph("ring", 2).sources(1) == {0: 0.5}
    assert sorted(build_graph("torus", 12).sources(0)) == [1, 3, 4, 8]
    assert sorted(build_graph("torus", 6).sources(0)) == [1, 2, 3]
    assert sorted(build_graph("exponential", 16).sources(0)) == [1, 2, 4, 8, 12, 14, 15]
    assert build_graph("complete", 4).matrix == ((0.25,) * 4,) * 4
    assert build_graph("ring", 4).gap == pytest.approx(2 / 3)
    star = metropolis({0: [1, 2, 3], 1: [], 2: [], 3: []})
    assert star[0] == (0.25, 0.25, 0.25, 0.25)
    assert star[1] == (0.25, 0.75, 0.0, 0.0)


def test_a_matrix_may_be_directed() -> None:
    half = ((0.5, 0.5, 0.0), (0.0, 0.5, 0.5), (0.5, 0.0, 0.5))
    graph = build_graph(half, 3)
    assert (graph.sources(0), graph.targets(0)) == ({1: 0.5}, [2])
    assert graph.neighbours(0) == {1: 0.25, 2: 0.25}
    assert graph.gap == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["csv", "txt", "json", "npy"])
def test_a_matrix_out_of_a_file(kind: str, tmp_path: Path) -> None:
    rows = [[0.75, 0.25, 0.0], [0.25, 0.5, 0.25], [0.0, 0.25, 0.75]]
    path = tmp_path / f"weights.{kind}"
    if kind == "npy":
        np.save(path, np.array(rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("# of three\n" + "\n".join((", " if kind == "csv" else " ").join(map(str, r)) for r in rows))
    strategy = Gossip(str(path))
    assert build_graph(strategy.graph, 3).tensor().tolist() == rows


def test_a_spec_holds_a_matrix() -> None:
    spec = "gossip(graph=((0.5, 0.5), (0.5, 0.5)), period=2)"
    assert repr(build_strategy(spec)) == spec
    assert repr(build_strategy("gossip([[0.5, 0.5], [0.5, 0.5]], period=2)")) == spec
    assert repr(Gossip()) == "gossip"


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (((0.5, 0.5), (0.4, 0.6)), r"column 0 sums to 0\.9, not 1"),
        (((0.5, 0.4), (0.5, 0.6)), r"row 0 sums to 0\.9, not 1"),
        (((0.5, 0.5), (0.5, 0.5, 0.0)), r"row 1 is 3 numbers, and the matrix has 2 rows: it must be square"),
        (((1.5, -0.5), (-0.5, 1.5)), r"row 0, column 1 is -0\.5: a weight is a number from 0 to 1"),
        (((float("nan"), 1.0), (1.0, 0.0)), r"row 0, column 0 is nan"),
        ((("a", "b"), (0.5, 0.5)), r"row 0, column 0 is 'a'"),
        ((), r"a matrix of 0 rows"),
        ("rnig", r"did you mean 'ring'\?.*complete.*edges such as '0-1"),
        (3, r"graph=3.*a name \(ring, torus, exponential, complete\)"),
    ],
)
def test_a_graph_that_cannot_be_is_refused_at_once(graph: Any, said: str) -> None:
    with pytest.raises(sl.errors.SpecError, match=said):
        Gossip(graph)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (((0.5, 0.5, 0.0, 0.0), (0.5, 0.5, 0.0, 0.0), (0.0, 0.0, 0.5, 0.5), (0.0, 0.0, 0.5, 0.5)),
         r"no path leads from worker 0 to 2, 3: the graph is not connected"),
        ("0-1, 2-3", r"no path leads from worker 0 to 2, 3.*join them by an edge"),
        (((0.0, 1.0), (1.0, 0.0)), r"is for 2 workers, and this world has 4: give a matrix of 4 rows"),
        (((0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0)), r"no path leads"),
        (((0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0)), r"spectral gap is 0.*some weight on the diagonal"),
        ("0-1, 1-2, 2-4", r"an edge 2-4, and this world has workers 0 to 3"),
        ("nowhere.csv", r"no matrix can be read there"),
    ],
)  # fmt: skip
def test_a_graph_that_does_not_suit_the_world_is_refused(graph: Any, said: str) -> None:
    strategy = Gossip(graph)
    with pytest.raises((sl.errors.SpecError, sl.errors.IncompatibleError), match=said):
        sl.simulate(lambda world: begin(world, strategy, 0.1), ranks=4)


@pytest.mark.parametrize("text", ["[[1, 2], 3]", "{}", "[[0.5, 0.5], [0.5", '[["x"]]'])
def test_a_file_without_a_matrix_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.json"
    path.write_text(text)
    with pytest.raises(sl.errors.SpecError, match=r"weights\.json"):
        build_graph(str(path), 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"period": 0}, r"gossip\(period=0\): it must be a whole number, at least 1"),
        ({"form": "mix"}, r"gossip\(form='mix'\): one of after, beside"),
        ({"gamma": 0.0}, r"gossip\(gamma=0\.0\): above 0 and at most 1"),
        ({"pairwise": 1}, "True or False"),
        ({"pairwise": True, "form": "beside"}, r"pairwise=True, form='beside'\): an average of two has one form"),
        ({"pairwise": True, "gamma": 0.5}, r"gamma=0\.5\)"),
    ],
)
def test_other_arguments_that_cannot_be(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(sl.errors.SpecError, match=said):
        Gossip(**arguments)


def test_what_does_not_go_together() -> None:
    with pytest.raises(sl.errors.IncompatibleError, match=r"quantize\(4\) would lose parts.*leave the codec out"):
        sl.simulate(lambda world: begin(world, Gossip(pairwise=True), 0.1, codec="quantize(4)"), ranks=2)
    with pytest.raises(sl.errors.IncompatibleError, match=r"gamma=0\.5\) without a codec"):
        sl.simulate(lambda world: begin(world, Gossip(gamma=0.5), 0.1), ranks=2)
    with pytest.raises(
        sl.errors.IncompatibleError, match=r"powersgd.*sums among all workers: take a codec such as topk"
    ):
        sl.simulate(lambda world: begin(world, Gossip(), 0.1, codec="powersgd(1)"), ranks=2)
