"""Options of codecs that not every strategy can obey: they are refused where they would be dropped or mean else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.strategies import strategy_names

ELSEWHERE = [
    "bsp",
    "ssp(slack=2)",
    "downpour",
    "master",
    "master(sync=False)",
    "easgd",
    "easgd(sync=False)",
    "easgd(centres=2)",
    "local",
    "local(after=5)",
    "adacomm",
    "diloco",
    "diloco(overlap=True)",
    "gossip",
]
NO_CODEC = {"hogwild", "onesided", "ensemble", "average"}
GRADIENT_OPTIONS = {
    "topk(0.1, momentum=0.9)": r"momentum=0\.9",
    "topk(0.1, momentum=0.9, masking=True)|quantize(4)": r"momentum=0\.9",
    "topk(0.1, clip=1.0)": r"clip=1\.0",
    "by_size(10, None, 'per_layer({\\'*\\': \\'topk(0.1, clip=1.0)|cast\\'})')": r"clip=1\.0",
}


def attach(strategy: str, codec: str | None, dtype: torch.dtype = torch.float32) -> None:
    def case(world: sl.World) -> None:
        model = nn.Linear(6, 5, dtype=dtype)
        sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, codec=codec).close()

    sl.simulate(case, ranks=2)


@pytest.mark.parametrize("strategy", ELSEWHERE)
@pytest.mark.parametrize("codec", GRADIENT_OPTIONS)
def test_options_for_gradients_are_refused_outside_allreduce(strategy: str, codec: str) -> None:
    with pytest.raises(sl.errors.IncompatibleError, match=f"{GRADIENT_OPTIONS[codec]} is for strategy allreduce alone"):
        attach(strategy, codec)


@pytest.mark.parametrize("codec", GRADIENT_OPTIONS)
def test_options_for_gradients_work_with_allreduce(codec: str) -> None:
    attach("allreduce", codec)
    attach("allreduce(delay=1)", codec)


def test_the_list_of_strategies_is_whole() -> None:
    by_allreduce = {"allreduce", "auto"}
    assert {spec.split("(")[0] for spec in ELSEWHERE} | NO_CODEC | by_allreduce == set(strategy_names())


@pytest.mark.parametrize("strategy", ["bsp", "ssp(slack=2)", "downpour", "master", "easgd(sync=False)"])
@pytest.mark.parametrize(
    "codec",
    [
        "topk(0.1, whole=8)|quantize(4)",
        "by_size(10, None, 'onebit')",
        "per_layer({'*': 'onebit'})",
        "powersgd(1)|cast",
    ],
)
def test_servers_refuse_what_needs_whole_parameters(strategy: str, codec: str) -> None:
    with pytest.raises(sl.errors.IncompatibleError, match="servers hold one row of keys"):
        attach(strategy, codec)


@pytest.mark.parametrize("codec", ["powersgd(1)", "powersgd(1)|cast", "by_size(10, None, 'powersgd(1)|cast')"])
def test_gossip_refuses_sums_over_all_workers(codec: str) -> None:
    with pytest.raises(sl.errors.IncompatibleError, match="sums among all workers"):
        attach("gossip", codec)


@pytest.mark.parametrize("codec", ["powersgd(1)", "by_size(10, None, 'powersgd(1)')"])
def test_a_tree_refuses_a_shared_warm_start(codec: str) -> None:
    with pytest.raises(sl.errors.IncompatibleError, match="warm start"):
        attach("easgd(centres=2)", codec)


@pytest.mark.parametrize(
    ("strategy", "codec", "words"),
    [
        ("allreduce", "lossless", "rounded to float32"),
        ("local", "topk(0.5)", "rounded to float32"),
        ("diloco", "by_size(10, None, 'quantize(4)')", "rounded to float32"),
        ("easgd", "onebit", "rounded to float32"),
        ("allreduce", None, ""),
        ("gossip", "lossless", ""),  # keeps all digits
    ],
)
def test_rounding_of_double_precision_is_told_once(
    strategy: str, codec: str | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    attach(strategy, codec)
    assert caplog.text == ""
    attach(strategy, codec, dtype=torch.float64)
    assert [words in record.message for record in caplog.records] == ([True] if words else [])


def test_a_store_refuses_options_for_gradients() -> None:
    with (
        sl.init() as world,
        pytest.raises(sl.errors.IncompatibleError, match=r"momentum=0\.9 is for strategy allreduce"),
    ):
        sl.server.store(3, codec="topk(0.5, momentum=0.9)", world=world)
