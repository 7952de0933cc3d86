"""The baselines of a race: PyTorch's DistributedDataParallel with its hooks, post-local SGD, torchft, hivemind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.bench.baselines import DDP, DEFAULT_BASELINES, PostLocalSGD, availability, build_baseline
from syncline.errors import IncompatibleError, SpecError, UnsupportedError
from syncline.strategies import Strategy
from syncline.training.distribute import distribute
from syncline.world import World
from tests.bench.baseline_script import HOOKS, SLOW, STEPS
from tests.launching import finish, start, torch_variables

DENSE = 4 * (64 * 64 + 64 + 64 * 10 + 10)
"""Bytes of the gradients of the digits' model."""
OTHERS = [spec for spec in ("torchft", "hivemind(period=4)") if availability(spec) is None]


def ran(*arguments: str) -> list[dict[str, Any]]:
    """What both ranks of the script have found."""
    command = ["-m", "tests.bench.baseline_script", *arguments]
    ended = finish([start(command, each) for each in torch_variables(2)])
    for each in ended:
        assert each.code == 0, each.err
    return [json.loads(each.out.splitlines()[-1]) for each in ended]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return ran()


pytestmark = pytest.mark.xdist_group("baselines")


def test_it_is_ddp_to_the_last_bit_and_ours_to_rounding(found: list[dict[str, Any]]) -> None:
    for own in found:
        assert own["hooks"]["ddp"]["as_hand"]
        assert own["hooks"]["ddp(hook='allreduce')"]["as_hand"]
        assert own["hooks"]["allreduce"]["far"] < 1e-5


@pytest.mark.parametrize("spec", HOOKS)
def test_every_hook_keeps_the_ranks_together(spec: str, found: list[dict[str, Any]]) -> None:
    for own in found:
        row = own["hooks"][spec]
        assert row["same"]
        assert row["steps"] == STEPS
        assert row["sl_comm_bytes_logical"] == STEPS * DENSE
        assert row["sl_comm_exposed_seconds"] > 0
        assert row["far"] < 0.2, "what travels has lost something, but it trains the same model"
        assert row["config"]["strategy"] == spec
        assert row["config"]["torch"] == str(torch.__version__)
        assert row["config"]["check_finite"] is False


def test_bytes_on_the_wire(found: list[dict[str, Any]]) -> None:
    plain, _, half, low = (found[0]["hooks"][spec]["sl_comm_bytes_wire"] for spec in HOOKS)
    assert plain == STEPS * DENSE
    assert half == plain / 2
    assert found[0]["hooks"][HOOKS[2]]["far"] > 0, "half precision rounds: torch's hook was at work"
    thin = 4 * (2 * (64 + 64) + 64 + 2 * (64 + 10) + 10)  # two columns of each matrix's sides, biases as they are
    assert low == 3 * DENSE + (STEPS - 3) * thin
    assert found[0]["hooks"][HOOKS[3]]["sl_codec_seconds"] > 0


def test_powersgd_has_one_bucket_however_large_the_model(found: list[dict[str, Any]]) -> None:
    for own in found:
        assert own["large"]["same"]
        assert own["large"]["sl_comm_bytes_logical"] > 6 * 4 * 2**20, "more than torch would put into one"
        assert own["large"]["sl_comm_bytes_wire"] < own["large"]["sl_comm_bytes_logical"] / 2


def test_waiting_for_a_slow_rank_is_exposed(found: list[dict[str, Any]]) -> None:
    # Rank 1 was asleep from the moment rank 0 had its last gradient; half is for the moment between that and the wait.
    assert found[0]["slow"]["exposed"] > SLOW / 2


def test_accumulated_gradients_travel_once(found: list[dict[str, Any]]) -> None:
    assert found[0]["accumulate"] == {"parted": 0, "wire": DENSE, "same": True}


def test_dtensor_divides_transformer_blocks_and_trains_them(found: list[dict[str, Any]]) -> None:
    for own in found:
        assert own["divided"]["far"] < 1e-4, "the weights that bench parallel compares are those of one process"
        weights, biases = 4 * 128 * 64 + 2 * 128 * 256, 3 * 64 + 256  # those of columns: others are whole
        assert own["divided"]["own"] == weights + biases


def test_a_rank_without_data_adds_zeros(found: list[dict[str, Any]]) -> None:
    for own in found:
        row = own["uneven"]
        assert row["same"]
        assert row["steps"] == 6
        assert row["weight"] == pytest.approx(row["expected"], rel=1e-5)
        assert "ddp_post_local needs data for every rank" in row["refused"]
        assert "9 samples in batches of 2 leave some without; take batch=3" in row["refused"]


def test_post_local(found: list[dict[str, Any]]) -> None:
    for own in found:
        row = own["post_local"]
        #                         gradients   weights            weights
        assert row["together"] == [True, True, True, False, False, True, False]
        assert row["inside"], "the mean of all"
        assert row["restored"]
        assert row["rate"] == pytest.approx(0.1 * 0.5**7), "a scheduler of the inner optimizer"
        assert row["momentum"] == 4
        assert row["steps"] == 7
        assert row["sl_comm_bytes_wire"] == 4 * DENSE, "two gradients, two means of weights"


@pytest.mark.skipif(not OTHERS, reason="neither torchft nor hivemind is installed")
def test_those_of_other_packages() -> None:
    for own in ran(*OTHERS):
        for spec, row in own.items():
            assert row["steps"] == 8
            assert row["apart"] < 1e-6, "hivemind adds the difference to what a rank has: it rounds"
            assert row["same"] or spec != "torchft"
            assert row["config"].get("rounds_missed", 0) == 0
            assert row["sl_comm_bytes_wire"] == (8 if spec == "torchft" else 2) * DENSE
            assert row["config"]["collective"] == f"{spec.partition('(')[0]}'s own"


def test_specs_read_back() -> None:
    for spec in ("ddp", "ddp(hook='powersgd', rank=2)", "ddp_post_local(start=50, period=8, within_host=True)"):
        assert repr(build_baseline(spec)) == spec
    assert [availability(spec) for spec in DEFAULT_BASELINES if spec.startswith("ddp")] == [None] * 4


def test_what_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    for name in ("torchft", "hivemind"):
        assert f"pip install {name}==" in str(availability(name))


@pytest.mark.parametrize("hook", ["bf16", "powersgd_batched", "quantize_tensor", "quantize_channel"])
def test_hooks_that_torch_has_and_that_do_not_work(hook: str) -> None:
    with pytest.raises(UnsupportedError, match="torch"):
        DDP(hook=hook)
    assert hook in str(availability(f"ddp(hook={hook!r})"))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("ddp(hook='fp61')", "did you mean 'fp16'"),
        ("ddp(rank=2)", "are PowerSGD's"),
        ("ddp(hook='powersgd', rank=0)", "at least one"),
        ("ddp(hook='powersgd', start=1)", "after two steps"),
        ("ddp_post_local(start=-1)", "not negative"),
        ("ddp_post_local(period=1)", "use 'ddp'"),
        ("hivemind(period=0)", "at least one"),
        ("dpd", "did you mean 'ddp'"),
    ],
)
def test_bad_specs(spec: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        availability(spec)


@pytest.mark.parametrize("strategy", [DDP(), PostLocalSGD()])
def test_what_is_ours_has_no_part_in_it(strategy: Strategy) -> None:
    def attach(world: World, **options: Any) -> None:
        model = nn.Linear(2, 1)
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, **options)

    with sl.init() as world:
        with pytest.raises(IncompatibleError, match="leave the codec out"):
            attach(world, codec="cast('fp16')")
        with pytest.raises(IncompatibleError, match="leave it out"):
            attach(world, algorithm="ring")
    with pytest.raises(UnsupportedError, match=r"cannot run in sl\.simulate"):
        sl.simulate(attach, ranks=2)
