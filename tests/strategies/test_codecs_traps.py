"""What went wrong once with codecs: delays, threads, NaN where nobody looked, ways that change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.strategies import strategy_run
from syncline.testing import Pool
from tests.strategies.cases import backward, flat, mlp, on_gloo, train
from tests.strategies.test_codecs import left_of


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("codec", ["randomk(0.1)", "topk(0.05, warmup=30)", "powersgd(1)"])
def test_late_encoding_uses_the_random_bits_of_its_step(gloo: Pool, codec: str) -> None:
    results = gloo.run(on_gloo, 2, _delayed, codec)
    assert torch.equal(results[0], results[1])


def _delayed(world: sl.World, codec: str) -> Tensor:
    world.lanes = 2
    return train(world, "sgd", 40, codec=codec, algorithm="auto", strategy="allreduce(delay=1)")


@pytest.mark.parametrize("codec", ["powersgd(1)", "topk(0.5)", "randomk(0.5)", "cast('fp16', feedback=True)", "onebit"])
@pytest.mark.parametrize("shape", [(6,), (6, 5)])
def test_with_a_delay_every_gradient_counts_once(codec: str, shape: tuple[int, ...]) -> None:
    steps = 12

    def case(world: sl.World) -> tuple[Tensor, Tensor]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape))])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = sl.distribute(model, optimizer, "allreduce(delay=1)", codec=codec)
        applied = torch.zeros(shape)
        for _ in range(steps):
            optimizer.zero_grad()
            backward(model[0].sum())
            applied += 0 if model[0].grad is None else model[0].grad
        strategy_run(run).state_dict()  # waits for what is under way
        return applied, left_of(run).view(shape)

    applied, left = sl.simulate(case, ranks=2).results[0]
    late = steps - applied - left  # the step that is still on its way
    assert float(late.mean()) == pytest.approx(1.0, abs=0.51)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("codec", ["onebit", "topk(0.1)"])
def test_nan_is_told_where_the_last_bucket_has_no_codec(gloo: Pool, codec: str) -> None:
    words = gloo.run(on_gloo, 2, _nan_in_a_coded_bucket, codec)
    assert all(word.startswith("NaN or Inf in the gradients of rank 1: 2.weight") for word in words), words


def _nan_in_a_coded_bucket(world: sl.World, codec: str) -> str:
    world.lanes = 2
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sl.distribute(model, optimizer, codec=f"by_size(64, None, '{codec}')", check_finite=True)
    weight = model[2].weight
    if world.rank == 1:
        weight.register_hook(lambda gradient: gradient * float("nan"))  # type: ignore[operator]
    try:
        backward(model(torch.ones(2, 6)).sum())
    except sl.errors.DivergedError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("codec", ["topk(0.2)|quantize(4)", "onebit", "cast('fp16')", "powersgd(2)"])
def test_idle_ranks_and_unused_layers_of_a_channels_last_model(codec: str) -> None:
    def case(world: sl.World) -> Tensor:
        torch.manual_seed(0)
        used, unused = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3)
        model = nn.ModuleList([used, unused]).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, codec=codec)
        for (x,) in run.shard(DataLoader(TensorDataset(torch.randn(7, 2, 5, 5)), batch_size=2)):
            optimizer.zero_grad()
            backward(used(x).square().mean())
            optimizer.step()
        return flat(model)

    results = sl.simulate(case, ranks=3).results
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize(
    ("codec", "way"),
    [
        ("onebit", "gather"),
        ("onebit", "split"),
        ("cast('fp16', feedback=True)", "auto"),
        ("powersgd(1)", "auto"),
        ("randomk(0.5)", "auto"),
        ("topk(0.1, momentum=0.9)", "sparse_doubling"),
        ("topk(0.1, momentum=0.9, masking=True)|quantize(4)", "gather"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_a_residual_that_overflows_is_told_to_all(codec: str, way: str, check: bool) -> None:
    def case(world: sl.World) -> list[str]:
        model = nn.Linear(40, 60, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = sl.distribute(model, optimizer, codec=codec, algorithm=way, check_finite=check)
        said = []
        for number in range(4):
            optimizer.zero_grad()
            factor = 3e38 if world.rank == 1 and number < 2 else 1.0
            values = torch.where(torch.randn(60, 40, generator=torch.Generator().manual_seed(0)) > 0, 1.0, 0.01)
            try:
                backward((model.weight * values * factor).sum())
                assert model.weight.grad is not None
                said.append("finite" if bool(torch.isfinite(model.weight.grad).all()) else "not finite")
            except sl.errors.DivergedError as error:
                said.append(type(error).__name__)
            state = strategy_run(run).state_dict()["local"]["strategy"]
            kept = [left_of(run), *(row for memory in state["memories"].values() for row in memory.values())]
            assert all(bool(torch.isfinite(row).all()) for row in kept)
        return said

    words = sl.simulate(case, ranks=2).results
    assert words[0] == words[1]


def test_what_owners_had_left_is_applied_when_the_way_changes(tmp_path: Path) -> None:
    def case(world: sl.World, way: str, steps: int, resume: bool) -> float:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, codec="onebit", algorithm=way)
        if resume:
            sl.load(tmp_path, run=run)
        for _ in range(steps):
            optimizer.zero_grad()
            backward(model(torch.ones(2, 6) * (world.rank + 1)).square().sum())
            optimizer.step()
        if not resume:
            sl.save(tmp_path, step=steps, run=run)
        owned = strategy_run(run).state_dict()["local"]["strategy"]["owned"]
        return float(sum(piece["left"].abs().sum() for piece in owned))

    before = sl.simulate(lambda world: case(world, "split", 3, resume=False), ranks=4).results
    assert sum(before) > 0
    after = sl.simulate(lambda world: case(world, "gather", 1, resume=True), ranks=2).results
    assert after == (0.0, 0.0)


def test_warm_start_is_equal_on_all_ranks_after_nan() -> None:
    def case(world: sl.World) -> dict[str, Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, codec="powersgd(1)")
        for number in range(3):
            optimizer.zero_grad()
            bad = float("nan") if world.rank == 1 and number == 1 else 1.0
            backward((model(torch.ones(2, 6) + world.rank) * bad).sum())
        warm: dict[str, Tensor] = strategy_run(run).state_dict()["shared"]["state"]["coding"]["warm"]
        return warm

    first, second = sl.simulate(case, ranks=2).results
    assert first
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.xdist_group("gloo")
def test_communication_is_not_counted_longer_than_it_took(gloo: Pool) -> None:
    for wall, told in gloo.run(on_gloo, 2, _timed):
        assert 0 < told <= wall


def _timed(world: sl.World) -> tuple[float, float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sl.distribute(model, optimizer, codec="topk(0.1)")
    start = world.runtime.now()
    for _ in range(200):
        optimizer.zero_grad()
        backward(model(torch.ones(2, 6)).sum())
    wall, told = world.runtime.now() - start, run.stats.comm_seconds
    run.close()
    return wall, told


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.xdist_group("gloo")
def test_diagnosis_with_nan_and_delay(gloo: Pool, beside: bool) -> None:
    results = gloo.run(on_gloo, 2, _diagnosed, beside)
    assert all(torch.equal(results[0], other) for other in results)


def _diagnosed(world: sl.World, beside: bool) -> Any:
    world.lanes = 2 if beside else 1
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sl.distribute(model, optimizer, "allreduce(delay=1)", codec="topk(0.1)", diagnose=1)
    draw = torch.Generator().manual_seed(world.rank)
    for number in range(10):
        optimizer.zero_grad()
        bad = float("inf") if world.rank == 1 and number == 4 else 1.0
        backward((model(torch.randn(2, 6, generator=draw)) * bad).sum())
        finite = all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        if finite:
            optimizer.step()
    run.close()
    return flat(model)


def test_momentum_without_a_residual_is_refused_in_a_chain_too() -> None:
    with pytest.raises(sl.errors.SpecError, match="lives in the residual"):
        sl.codecs.TopK(0.01, momentum=0.9) | sl.codecs.Quantize(4, feedback=False)


LARGE = [
    "topk(0.01)",
    "topk(0.01)|quantize(4)",
    "topk(0.01, momentum=0.9)|quantize(4)",
    "topk(0.01, momentum=0.9, masking=True)",
    "topk(0.01, clip=1.0)",
    "topk(16, bucket=512)",
    "threshold(0.01)",
    "randomk(0.1)|cast('fp16')",
    "onebit",
    "ternary(clip=2.5)",
    "quantize(4)",
    "cast('fp16', feedback=True)",
    "powersgd(2)",
    "powersgd(2)|cast('bf16')",
    "lossless",
]


@pytest.mark.parametrize("codec", LARGE)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_one_nan_reaches_all_ranks_and_no_residual(codec: str, bad: float) -> None:
    """Of more than 8,192 elements: that is where the fused top-k begins to take samples."""

    def case(world: sl.World) -> list[bool]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(90, 100))])
        run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0), codec=codec)
        draw, finite = torch.Generator().manual_seed(world.rank), []
        for number in range(4):
            model.zero_grad()
            values, before = torch.randn(90, 100, generator=draw), _state_bits(run)
            if number == 2 and world.rank == 1:
                values[77, 77] = bad
            backward((model[0] * values).sum())
            assert model[0].grad is not None
            finite.append(bool(torch.isfinite(model[0].grad).all()))
            assert finite[-1] or bool(torch.isnan(model[0].grad).all())
            assert finite[-1] or world.rank == 0 or _state_bits(run) == before
            assert bool(torch.isfinite(left_of(run)).all())
        return finite

    assert sl.simulate(case, ranks=2).results == ([True, True, False, True],) * 2


def _state_bits(run: sl.Run) -> list[tuple[str, list[float]]]:
    """What this rank alone remembers of its gradients."""
    state = strategy_run(run).state_dict()["local"]["strategy"]
    rows = {**state["residuals"], **{f"{name}'s": memory["velocity"] for name, memory in state["memories"].items()}}
    return [(name, row.tolist()) for name, row in sorted(rows.items())]


@pytest.mark.parametrize(
    ("codec", "way"),
    [
        ("topk(0.01)", "gather"),
        ("topk(0.01, momentum=0.9)|quantize(4)", "gather"),
        ("topk(0.01, momentum=0.9)|quantize(4)", "sparse_doubling"),
        ("topk(0.01)", "sparse_split"),
        ("topk(0.01)", "sparse_split_dense(bits=4)"),
        ("onebit", "split"),
        ("powersgd(2)", "auto"),
    ],
)
def test_check_finite_names_one_nan_among_many(codec: str, way: str) -> None:
    def case(world: sl.World) -> str:
        model = nn.ParameterList([nn.Parameter(torch.zeros(90, 100))])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sl.distribute(model, optimizer, codec=codec, algorithm=way, check_finite=True)
        values = torch.randn(90, 100, generator=torch.Generator().manual_seed(world.rank))
        values[77, 77] = float("nan") if world.rank == 1 else 1.0
        with pytest.raises(sl.errors.DivergedError) as caught:
            backward((model[0] * values).sum())
        return str(caught.value)

    words = sl.simulate(case, ranks=2).results
    assert words[0] == words[1]
    assert words[0].startswith("NaN or Inf in the gradients of rank 1: 0 after 0 steps")


@pytest.mark.parametrize(
    "codec", ["topk(0.5, momentum=0.9)", "by_size(2, None, 'topk(0.5, momentum=0.9)|quantize(4)')"]
)
@pytest.mark.parametrize(("strategy", "passes"), [("allreduce", 2), ("allreduce(delay=1)", 3)])
def test_a_second_backward_of_a_step_is_refused_with_momentum(codec: str, strategy: str, passes: int) -> None:
    def case(world: sl.World) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, strategy, codec=codec)
        for _ in range(passes):
            backward(model(torch.ones(2, 6)).sum())  # all but the last belong under no_sync()
        run.close()

    with pytest.raises(sl.errors.IncompatibleError, match=r"second backward pass .* run\.no_sync\(\)"):
        sl.simulate(case, ranks=2)


@pytest.mark.parametrize("none", [True, False])
def test_momentum_counts_the_backward_passes_of_a_step_once(none: bool) -> None:
    """With all elements sent, the codec's momentum is the optimizer's: also where passes add up and steps are skipped.

    A gradient that is set to zero in place is not taken for one that adds up.
    """

    def case(world: sl.World, codec: str | None) -> Tensor:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if codec else 0.9)
        run = sl.distribute(model, optimizer, codec=codec)
        for number in range(6):
            optimizer.zero_grad(set_to_none=none)
            with run.no_sync():
                backward(model(torch.ones(2, 6) + world.rank).square().sum() / 50)
            backward(model(torch.ones(2, 6) * number).square().sum() / 50)
            optimizer.step()
        optimizer.zero_grad(set_to_none=none)
        backward(model(torch.ones(2, 6)).sum())  # of a step that is skipped, as a GradScaler does
        optimizer.zero_grad(set_to_none=none)
        backward(model(torch.ones(2, 6)).sum())
        return flat(model)

    plain = sl.simulate(lambda world: case(world, None), ranks=2).results[0]
    coded = sl.simulate(lambda world: case(world, "topk(1.0, momentum=0.9)"), ranks=2).results[0]
    torch.testing.assert_close(coded, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad_ranks", [(1,), (0, 1)])
@pytest.mark.parametrize("codec", ["powersgd(2)", "powersgd(2)|cast('bf16')"])
def test_powersgd_recovers_after_nan(bad_ranks: tuple[int, ...], codec: str) -> None:
    """After it the ranks agree to the bit, and a gradient of low rank arrives as if nothing had been."""

    def case(world: sl.World) -> tuple[Tensor, dict[str, Tensor]]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(12, 10))])
        run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0), codec=codec)
        left, right = torch.arange(1.0, 13.0), torch.linspace(-1, 1, 10)
        for number in range(4):
            model.zero_grad()
            bad = float("nan") if number == 1 and world.rank in bad_ranks else 1.0
            backward((model[0] * torch.outer(left, right) * (1 + world.rank) * bad).sum())
        assert model[0].grad is not None
        warm: dict[str, Tensor] = strategy_run(run).state_dict()["shared"]["state"]["coding"]["warm"]
        return model[0].grad.clone(), warm

    (first, warm), (second, warm_too) = sl.simulate(case, ranks=2).results
    assert torch.equal(first, second)
    assert torch.equal(warm["0"], warm_too["0"])
    assert bool(torch.isfinite(warm["0"]).all())
    whole = 1.5 * torch.outer(torch.arange(1.0, 13.0), torch.linspace(-1, 1, 10))
    torch.testing.assert_close(first, whole, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("strategy", ["bsp", "ssp(slack=1)", "master(sync=False)"])
@pytest.mark.parametrize("codec", ["quantize(4)", "topk(0.1)"])
def test_workers_see_weights_that_overflow_at_the_servers(strategy: str, codec: str) -> None:
    def case(world: sl.World) -> list[bool]:
        model = nn.ParameterList([nn.Parameter(torch.ones(50))])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
        run = sl.distribute(model, optimizer, strategy, codec=codec)
        finite = []
        for rate in (1.0, 1e20, 1.0):
            model[0].grad = torch.full((50,), rate)
            optimizer.step()
            finite.append(bool(torch.isfinite(model[0]).all()))
        run.close()
        return finite

    for finite in sl.simulate(case, ranks=2).results:
        assert not finite[-1]


@pytest.mark.parametrize("codec", ["topk(0.2)", "onebit", "powersgd(1)", "randomk(0.3)|cast('bf16')"])
def test_two_backward_passes_of_a_step_lose_nothing(codec: str) -> None:
    def case(world: sl.World) -> tuple[Tensor, Tensor, Tensor]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(6, 5))])
        run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0), codec=codec)
        draw = torch.Generator().manual_seed(world.rank)
        made, applied = torch.zeros(6, 5), torch.zeros(6, 5)
        for _ in range(5):
            model.zero_grad()
            for _ in range(2):
                values = torch.randn(6, 5, generator=draw)
                made += values
                backward((model[0] * values).sum())
            assert model[0].grad is not None
            applied += model[0].grad
        return made, applied, left_of(run).view(6, 5)

    made, applied, left = (
        torch.stack(each).mean(dim=0) for each in zip(*sl.simulate(case, ranks=2).results, strict=True)
    )
    torch.testing.assert_close(applied + left, made, rtol=0, atol=0.05)
