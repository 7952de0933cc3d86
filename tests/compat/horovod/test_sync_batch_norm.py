"""Batch norm over all ranks: what one process with the whole batch computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.compat.horovod.context import ProcessSet, init, shutdown
from syncline.compat.horovod.sync_batch_norm import SyncBatchNorm
from syncline.errors import IncompatibleError
from syncline.testing import Pool
from tests.strategies.cases import backward, on_gloo

FEATURES = 3


def whole(dims: int, rows: int, step: int = 0) -> Tensor:
    shape = [rows, FEATURES, 4, 5][:dims] if dims != 3 else [rows, FEATURES, 4]
    draw = torch.Generator().manual_seed(step)
    return 10 + 3 * torch.randn(shape, generator=draw)  # far from zero: where squares of sums would lose digits


def parts(rows: list[int], x: Tensor, rank: int) -> Tensor:
    return x[sum(rows[:rank]) : sum(rows[: rank + 1])]


def run(norm: nn.Module, x: Tensor, share: Any) -> dict[str, Tensor]:
    """Two steps, with a loss that gives every element another gradient."""
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.arange(1.0, FEATURES + 1))
    for step in range(2):
        mine = share(x + step).clone().requires_grad_()
        y = norm(mine)
        backward((y * share(torch.cos(3 * x + step))).sum())
        assert mine.grad is not None
        found |= {f"y{step}": y.detach(), f"x{step}": mine.grad}
    found |= {name: parameter.grad for name, parameter in norm.named_parameters() if parameter.grad is not None}
    return found | {name: buffer.clone() for name, buffer in norm.named_buffers()}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fixed": {"affine": False},
    "cumulative": {"momentum": None},
    "untracked": {"track_running_stats": False},
    "eps": {"eps": 0.1, "momentum": 0.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("dims", "rows"), [(4, [2, 2]), (4, [1, 4, 2]), (2, [3, 2, 1, 2]), (3, [2, 5]), (5, [2, 0, 3])]
)
def test_equal_to_the_whole_batch(dims: int, rows: list[int], options: dict[str, Any]) -> None:
    dims = 4 if dims == 5 else dims  # a rank without a single sample
    x = whole(dims, sum(rows))
    own = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[dims](FEATURES, **options)
    wanted = run(own, x, lambda tensor: tensor)

    def case(world: sl.World) -> dict[str, Tensor]:
        init()
        return run(SyncBatchNorm(FEATURES, **options), x, lambda tensor: parts(rows, tensor, world.rank))

    results = sl.simulate(case, ranks=len(rows)).results
    for name, value in wanted.items():
        if name[0] in "xy":
            found = torch.cat([result[name] for result in results])
        elif name in ("weight", "bias"):
            found = sum((result[name] for result in results), torch.zeros(FEATURES))
        else:
            found = results[0][name]
            assert all(torch.equal(result[name], found) for result in results)
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6 * float(value.abs().max().clamp(min=1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = whole(4, 6).to(dtype)
    own = nn.BatchNorm2d(FEATURES, dtype=dtype if dtype == torch.float64 else torch.float32)
    wanted = run(own, x, lambda tensor: tensor)

    def case(world: sl.World) -> dict[str, Tensor]:
        init()
        norm = SyncBatchNorm(FEATURES)
        if dtype == torch.float64:
            norm.double()
        return run(norm, x, lambda tensor: parts([2, 4], tensor, world.rank))

    results = sl.simulate(case, ranks=2).results
    close = 1e-9 if dtype == torch.float64 else 4e-2
    for name in ("y0", "x0", "y1"):
        found = torch.cat([result[name] for result in results])
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted[name], rtol=close, atol=close)


def test_evaluation_is_torchs_own() -> None:
    def case(world: sl.World) -> bool:
        init()
        norm = SyncBatchNorm(FEATURES)
        norm(whole(4, 4, step=world.rank))
        norm.eval()
        plain = nn.BatchNorm2d(FEATURES)
        plain.load_state_dict(norm.state_dict())
        plain.eval()
        x = whole(4, 1 + world.rank)  # others need not take part
        return world.rank == 1 or torch.equal(norm(x), plain(x))

    assert sl.simulate(case, ranks=2).results == (True, True)


def test_many_layers_and_a_frozen_input() -> None:
    def net(kind: Any) -> nn.Sequential:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(kind(FEATURES), nn.Conv2d(FEATURES, 5, 1), kind(5), nn.ReLU(), kind(5))

    def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
        for _ in range(2):
            model.zero_grad()
            backward(model(x).square().sum())
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    x = whole(4, 6)
    wanted = gradients(net(nn.BatchNorm2d), x)

    def case(world: sl.World) -> list[Tensor]:
        init()
        return gradients(net(SyncBatchNorm), parts([1, 3, 2], x, world.rank))

    for number, value in enumerate(wanted):
        found = sum((result[number] for result in sl.simulate(case, ranks=3).results), torch.zeros_like(value))
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-4)


def test_a_process_set_norms_its_own_batch() -> None:
    def case(world: sl.World) -> Tensor:
        pair = ProcessSet([0, 2])
        init(process_sets=[pair])
        norm = SyncBatchNorm(FEATURES, process_set=pair)
        if not pair.included():
            return torch.zeros(FEATURES)
        norm(parts([2, 0, 3], whole(4, 5), world.rank))
        assert norm.running_mean is not None
        return norm.running_mean

    own = nn.BatchNorm2d(FEATURES)
    own(whole(4, 5))
    results = sl.simulate(case, ranks=3).results
    for found in (results[0], results[2]):
        torch.testing.assert_close(found, own.running_mean)


def test_what_is_refused() -> None:
    def case(world: sl.World, shape: tuple[int, ...]) -> None:
        init()
        SyncBatchNorm(FEATURES)(torch.ones(shape))

    for shape, said in (((4,), "batch, 3"), ((2, 4, 5), "batch, 3"), ((0, 3, 2), "empty")):
        for found in sl.simulate(partial(case, shape=shape), 2, return_exceptions=True).results:
            assert isinstance(found, IncompatibleError)
            assert said in str(found)


@pytest.mark.xdist_group("gloo")
def test_on_gloo(gloo: Pool) -> None:
    x = whole(4, 6)
    wanted = run(nn.BatchNorm2d(FEATURES), x, lambda tensor: tensor)
    results = gloo.run(on_gloo, 2, _on_gloo, x)
    torch.testing.assert_close(torch.cat([found["x1"] for found in results]), wanted["x1"], rtol=1e-5, atol=1e-5)


def _on_gloo(world: sl.World, x: Tensor) -> dict[str, Tensor]:
    init()
    found = run(SyncBatchNorm(FEATURES), x, lambda tensor: parts([2, 4], tensor, world.rank))
    shutdown()
    return found
