"""What cannot work is refused on every rank, and the thing is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.testing import Pool
from syncline.transports import Transport
from tests.strategies.cases import backward, mlp, on_gloo


def every_error(case: Any, ranks: int = 3) -> list[Exception]:
    results = sl.simulate(case, ranks=ranks, return_exceptions=True).results
    assert all(isinstance(result, Exception) for result in results), results
    return list(results)


def attach(model: nn.Module, **options: Any) -> sl.Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=options.pop("rate", 0.1))
    return sl.distribute(model, optimizer, **{"algorithm": "ring", **options})


def different(world: sl.World, how: str) -> Any:
    odd = world.rank == 2
    if how == "shape":
        return attach(nn.Sequential(nn.Linear(3, 4 if odd else 5)))
    if how == "name":
        return attach(nn.ModuleDict({"head" if odd else "tail": nn.Linear(3, 5)}))
    if how == "dtype":
        return attach(nn.Linear(3, 5).to(torch.float64 if odd else torch.float32))
    if how == "more":
        return attach(nn.Sequential(nn.Linear(3, 5), *([nn.Linear(5, 1)] if odd else [])))
    if how == "frozen":
        return attach(nn.Linear(3, 5).requires_grad_(not odd) if odd else nn.Linear(3, 5))
    if how == "rate":
        return attach(nn.Linear(3, 5), rate=0.2 if odd else 0.1)
    return attach(nn.Linear(3, 5), bucket_bytes=100 if odd else 200)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", r"0\.weight is float32\[5, 3\] on rank 0 and float32\[4, 3\] on rank 2"),
        ("name", r"tail\.weight is float32\[5, 3\] on rank 0 and missing on rank 2"),
        ("dtype", r"weight is float32\[5, 3\] on rank 0 and float64\[5, 3\] on rank 2"),
        ("more", r"1\.weight is float32\[1, 5\] on rank 2 and missing on rank 0"),
        ("frozen", r"weight is float32\[5, 3\] on rank 0 and float32\[5, 3\] \(frozen\) on rank 2"),
        ("rate", r"group 0: lr is 0\.1 on rank 0 and 0\.2 on rank 2"),
        ("settings", r"bucket_bytes is 200 on rank 0 and 100 on rank 2"),
    ],
)
def test_models_that_differ(how: str, words: str) -> None:
    for error in every_error(lambda world: different(world, how)):
        assert isinstance(error, sl.errors.IncompatibleError)
        with pytest.raises(sl.errors.IncompatibleError, match=words):
            raise error


MODEL = nn.Linear(1, 1)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((SGD, MODEL), {}, "in the wrong order: write sl.distribute(model, optimizer)"),
        ((MODEL.parameters(), SGD), {}, "the first is a torch.nn.Module, not generator"),
        ((MODEL, MODEL), {}, "torch.optim.Optimizer, or a list of them, not Linear"),
        ((MODEL, torch.optim.SGD), {}, "not the class SGD: call it"),
        ((MODEL, torch.optim.lr_scheduler.StepLR(SGD, 1)), {}, "not StepLR: give schedulers by schedulers=[…]"),
        ((MODEL, SGD, 3), {}, "the strategy is written as text, not as int"),
        ((MODEL, SGD, sl.strategies.SSP), {}, "the strategy is the class SSP; write SSP()"),
        ((MODEL, SGD), {"schedulers": torch.optim.lr_scheduler.StepLR(SGD, 1)}, "schedulers=[…] is a list, not StepLR"),
        ((MODEL, SGD), {"bucket_bytes": "25MB"}, "bucket_bytes='25MB': a number of bytes"),
        ((MODEL, SGD), {"diagnose": None}, "diagnose=None: a number of steps"),
        ((MODEL, SGD), {"seed": "a"}, "seed='a': a whole number"),
        ((MODEL, SGD), {"algorithm": None}, "written as text, not as NoneType"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], options: dict[str, Any], words: str) -> None:
    with sl.init(), pytest.raises(sl.errors.SpecError) as caught:
        sl.distribute(*arguments, **options)
    assert words in str(caught.value)


@pytest.mark.xdist_group("gloo")
def test_models_that_differ_on_gloo(gloo: Pool) -> None:
    for told in gloo.run(on_gloo, 3, _told):
        assert "0.weight is float32[5, 3] on rank 0 and float32[4, 3] on rank 2" in told


def _told(world: sl.World) -> str:
    try:
        different(world, "shape")
    except sl.errors.IncompatibleError as error:
        return str(error)
    return "nothing was raised"


def test_a_parameter_that_only_some_ranks_use() -> None:
    def case(world: sl.World) -> None:
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        attach(model)
        x = model[0](torch.ones(1, 2))
        backward((x if world.rank == 1 else model[1](x)).sum())

    for error in every_error(case):
        assert isinstance(error, sl.errors.IncompatibleError)
        assert "1.weight got a gradient on ranks [0, 2] but not on ranks [1]" in str(error)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_divergence_names_rank_and_parameter(value: float) -> None:
    def case(world: sl.World) -> None:
        model = mlp()
        attach(model, check_finite=True)
        x = torch.ones(2, 6)
        backward(model(x).sum())
        model.zero_grad()
        if world.rank == 1:
            model.get_parameter("4.weight").register_hook(lambda gradient: gradient * value)  # type: ignore[no-untyped-call]
        backward(model(x).sum())

    for error in every_error(case):
        assert isinstance(error, sl.errors.DivergedError)
        assert "rank 1: 4.weight" in str(error)
        assert "rank 0" not in str(error)


def flat_gradient(model: nn.Module) -> Tensor:
    gradient = model.get_parameter("4.weight").grad
    assert gradient is not None
    return gradient


def test_without_the_switch_infinities_pass() -> None:
    def case(world: sl.World) -> bool:
        model = mlp()
        attach(model)
        if world.rank == 1:
            model.get_parameter("4.weight").register_hook(lambda gradient: gradient * float("inf"))  # type: ignore[no-untyped-call]
        backward(model(torch.ones(2, 6)).sum())
        return bool(torch.isinf(flat_gradient(model)).any())

    assert sl.simulate(case, ranks=2).results == (True, True)


def test_large_finite_half_gradients_are_not_taken_for_infinite() -> None:
    def case(world: sl.World) -> bool:
        model = nn.Linear(64, 64, bias=False).half()
        attach(model, check_finite=True, algorithm="naive")
        (model.weight * 3e4).sum().backward()  # type: ignore[no-untyped-call]
        assert model.weight.grad is not None
        return bool((model.weight.grad == 3e4).all())

    assert sl.simulate(case, ranks=1).results == (True,)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: sl.distribute(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1)),
            sl.errors.IncompatibleError,
            "6 of 6",
        ),
        (lambda: attach(mlp(), codec="topk(0.01)"), sl.errors.IncompatibleError, "cannot be added"),
        (lambda: attach(mlp(), strategy="alreduce"), sl.errors.SpecError, "did you mean 'allreduce'"),
        (lambda: attach(mlp(), strategy="allreduce(delya=1)"), sl.errors.SpecError, "delay"),
        (lambda: attach(mlp(), algorithm="rnig"), sl.errors.SpecError, "ring"),
        (lambda: attach(mlp(), bucket_bytes=0), sl.errors.SpecError, "bucket_bytes=0"),
        (
            lambda: sl.distribute(nn.ReLU(), torch.optim.SGD(mlp().parameters(), lr=0.1)),
            sl.errors.IncompatibleError,
            "no param",
        ),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        sl.simulate(lambda world: make(), ranks=1)


def test_without_a_world() -> None:
    with pytest.raises(sl.errors.WorldError, match=r"sl\.init"):
        attach(mlp())


def test_a_loader_shorter_than_the_workers() -> None:
    def case(world: sl.World) -> list[Tensor]:
        run = attach(nn.Linear(1, 1))
        return list(run.shard(DataLoader(TensorDataset(torch.ones(2, 1)), batch_size=1)))

    for error in every_error(case):
        assert isinstance(error, sl.errors.IncompatibleError)
        assert "2" in str(error)
        assert "3" in str(error)


@pytest.mark.xdist_group("gloo")
def test_a_stall_names_the_rank_and_the_parameter(gloo: Pool, tmp_path: Path) -> None:
    first, second = gloo.run(_stall, 2, str(tmp_path))
    assert "not there yet: rank 1" in first
    assert "rank 1 has not delivered 2.weight" in first
    assert second == ""


def _stall(transport: Transport, folder: str) -> str:
    """Rank 1 stays in its backward until rank 0 has complained."""
    from syncline.testing.collectives import world_on

    world = world_on(transport)
    told = Path(folder) / "told"
    model = mlp()
    run = attach(model, algorithm="native", bucket_bytes=1)
    backward(model(torch.ones(2, 6)).sum())

    def hold(gradient: Tensor) -> None:
        while world.rank == 1 and not told.exists():
            world.runtime.sleep(0.01)

    model.get_parameter("2.weight").register_hook(hold)  # type: ignore[no-untyped-call]
    lines: list[str] = []
    handler = _Lines(lines, told)
    logging.getLogger("syncline").addHandler(handler)
    liveness = transport.liveness  # type: ignore[attr-defined]
    before, liveness.warn_after_s = liveness.warn_after_s, 1.0 if world.rank == 0 else 1e9
    try:
        backward(model(torch.ones(2, 6)).sum())
    finally:
        liveness.warn_after_s = before
        logging.getLogger("syncline").removeHandler(handler)
    run.close()
    return "\n".join(lines)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str], told: Path) -> None:
        super().__init__()
        self.lines = lines
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if "has not delivered" in self.lines[-1]:
            self.told.touch()


@pytest.mark.parametrize(("strategy", "codec"), [("gossip(gamma=0.5)", None), ("average", "quantize(4)")])
def test_a_refused_strategy_leaves_no_hooks_behind(strategy: str, codec: str | None) -> None:
    def work(world: sl.World) -> int:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(sl.errors.IncompatibleError, match="codec"):
            sl.distribute(model, optimizer, strategy=strategy, codec=codec)
        with sl.distribute(model, optimizer, algorithm="ring") as run:
            backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
        return run.stats.steps

    assert sl.simulate(work, ranks=2).results == (1, 1)


def test_collective_is_the_old_name_of_algorithm() -> None:
    model = mlp()
    with sl.init():
        with pytest.warns(DeprecationWarning, match="algorithm="):
            run = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), collective="ring")
        assert "ring" in repr(run)
