"""Training with codecs: all ranks hold the same bits, nothing is lost for good, and a resumed run goes the same way."""

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
from tests.strategies.cases import backward, data, flat, mlp, on_gloo, train

CODECS = [
    "cast('fp16')",
    "cast('bf16')",
    "cast('bf16', stochastic=True)",
    "cast('fp16', feedback=True)",
    "quantize(4)",
    "quantize(2, bucket=32, norm='l2')",
    "quantize(8, stochastic=False)",
    "onebit",
    "ternary",
    "ternary(clip=2.5)",
    "topk(0.1)",
    "topk(4, bucket=32)",
    "topk(0.05, warmup=20, clip=1.0)",
    "randomk(0.2)",
    "threshold(0.01)",
    "powersgd(2)",
    "lossless",
    "topk(0.1)|quantize(4)",
    "topk(0.1)|ternary",
    "topk(0.1)|onebit",
    "topk(0.1)|cast('fp16')",
    "topk(0.1)|lossless",
    "topk(0.1)|quantize(4)|lossless",
    "threshold(0.01)|quantize(4)",
    "randomk(0.2)|cast('bf16')",
    "randomk(0.2)|quantize(4)",
    "quantize(4)|lossless",
    "powersgd(2)|cast('fp16')",
    "per_layer({'*.bias': None, '0.*': 'topk(0.1)|quantize(4)', '*': 'onebit'})",
    "by_size(32, 'cast(\\'fp16\\')', 'topk(0.1)')",
]
WAYS = {
    "quantize(4)": ["gather", "split"],
    "onebit": ["gather", "split"],
    "lossless": ["gather", "split"],
    "topk(0.1)|quantize(4)": ["gather", "sparse_doubling", "sparse_split", "sparse_split_dense"],
    "topk(0.5)": ["gather", "sparse_doubling", "sparse_split", "sparse_split_dense", "sparse_split_dense(bits=4)"],
    "threshold(0.01)": ["gather", "sparse_doubling", "sparse_split", "sparse_split_dense"],
}
PAIRS = [(codec, way) for codec, ways in WAYS.items() for way in ways]


@pytest.mark.parametrize("codec", CODECS)
def test_all_ranks_hold_the_same_bits_after_some_steps(codec: str) -> None:
    case = sl.simulate(
        lambda world: train(world, "sgd", 30 if "warmup" in codec else 12, codec=codec, algorithm="auto"), ranks=2
    )
    assert all(torch.equal(case.results[0], other) for other in case.results)
    assert bool(torch.isfinite(case.results[0]).all())
    assert not torch.equal(case.results[0], flat(mlp()))


@pytest.mark.parametrize(("codec", "way"), PAIRS)
def test_all_ranks_hold_the_same_bits_by_every_way(codec: str, way: str) -> None:
    def case(world: sl.World) -> Tensor:
        return train(world, "sgd", 10, batch=2 * world.size, codec=codec, algorithm=way)

    results = sl.simulate(case, ranks=3).results
    assert all(torch.equal(results[0], other) for other in results)


def test_an_exact_codec_is_as_good_as_none() -> None:
    plain = sl.simulate(lambda world: train(world, steps=20, algorithm="sharded"), ranks=2).results[0]
    exact = sl.simulate(lambda world: train(world, steps=20, codec="lossless", algorithm="auto"), ranks=2).results[0]
    assert torch.allclose(plain, exact, atol=1e-6)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    "codec", ["topk(0.1)|quantize(4)", "quantize(4)", "powersgd(2)", "cast('fp16')", "threshold(0.01)"]
)
def test_on_gloo(gloo: Pool, codec: str, beside: bool) -> None:
    results = gloo.run(on_gloo, 3, _train_with, codec, beside, 12)
    assert all(torch.equal(results[0], other) for other in results)
    simulated = sl.simulate(lambda world: train(world, "sgd", 12, codec=codec, algorithm="auto"), ranks=3).results[0]
    assert torch.allclose(results[0], simulated, atol=2e-2)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("codec", "way"), [("onebit", "split"), ("topk(0.1)", "sparse_doubling"), ("topk(0.1)", "sparse_split")]
)
def test_ways_on_gloo(gloo: Pool, codec: str, way: str) -> None:
    results = gloo.run(on_gloo, 3, _train_with, codec, False, 10, way)
    simulated = sl.simulate(lambda world: train(world, "sgd", 10, codec=codec, algorithm=way), ranks=3).results
    assert all(torch.equal(simulated[0], other) for other in results)


def _train_with(world: sl.World, codec: str, beside: bool, steps: int, way: str = "auto") -> Tensor:
    world.lanes = 2 if beside else 1  # as if there were processors to spare, or none
    return train(world, "sgd", steps, codec=codec, algorithm=way)


FED_BACK = [
    ("topk(0.1)", "gather"),
    ("topk(0.1)|quantize(4)", "gather"),
    ("topk(0.1)|quantize(4)", "sparse_doubling"),
    ("topk(0.1)|quantize(4)", "sparse_split"),
    ("topk(0.5)|quantize(4)", "sparse_split_dense(bits=4)"),
    ("onebit", "gather"),
    ("onebit", "split"),
    ("threshold(0.05)", "auto"),
    ("randomk(0.2)", "auto"),
    ("powersgd(1)", "auto"),
    ("quantize(3, stochastic=False)", "split"),
]


@pytest.mark.parametrize(("codec", "way"), FED_BACK)
def test_applied_plus_residual_equals_all_gradients(codec: str, way: str) -> None:
    results = sl.simulate(lambda world: _accounts(world, codec, way), ranks=3).results
    gradients = sum(made for made, _, _ in results) / 3
    left = sum(kept for _, _, kept in results) / 3
    applied = results[0][1]
    assert torch.allclose(gradients, applied + left, atol=2e-5)
    assert float(left.norm()) > 0


def _accounts(world: sl.World, codec: str, way: str, steps: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """The sums over all steps of this rank's gradients and of those that were applied, and what is left here."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = sl.distribute(model, optimizer, codec=codec, algorithm=way)
    draw = torch.Generator().manual_seed(world.rank)
    made, applied = torch.zeros(flat(model).numel()), torch.zeros(flat(model).numel())
    for _ in range(steps):
        x, y = torch.randn(4, 6, generator=draw), torch.randint(0, 3, (4,), generator=draw)
        loss = nn.functional.cross_entropy(model(x), y)
        made += torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(model(x), y))
        applied += torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return made, applied, left_of(run)


def left_of(run: sl.Run) -> Tensor:
    """What a run's state has left unsent on this rank, of all parameters in a row."""
    state = strategy_run(run).state_dict()["local"]["strategy"]
    rows = {name: torch.zeros(parameter.numel()) for name, parameter in run.model.named_parameters()}
    for name, left in state["residuals"].items():
        rows[name] += left
    for piece in state["owned"]:
        rows[piece["name"]][piece["start"] : piece["start"] + piece["left"].numel()] += piece["left"]
    return torch.cat(list(rows.values()))


@pytest.mark.parametrize("codec", ["topk(0.2)", "quantize(4)", "onebit"])
def test_how_gradients_lie_in_buckets_does_not_matter(codec: str) -> None:
    def case(world: sl.World, bucket_bytes: int) -> Tensor:
        return train(world, "sgd", 20, codec=codec, algorithm="gather", bucket_bytes=bucket_bytes)

    few = sl.simulate(lambda world: case(world, 1 << 20), ranks=2).results[0]
    many = sl.simulate(lambda world: case(world, 64), ranks=2).results[0]
    assert torch.equal(few, many)


def test_other_seeds_draw_other_bits() -> None:
    def case(world: sl.World, seed: int) -> Tensor:
        return train(world, steps=5, codec="quantize(2)", algorithm="auto", seed=seed)

    first = sl.simulate(lambda world: case(world, 0), ranks=2).results[0]
    assert torch.equal(first, sl.simulate(lambda world: case(world, 0), ranks=2).results[0])
    assert not torch.equal(first, sl.simulate(lambda world: case(world, 1), ranks=2).results[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_parameters_of_other_kinds(dtype: torch.dtype) -> None:
    def case(world: sl.World) -> Tensor:
        model = mlp().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sl.distribute(model, optimizer, codec="topk(0.2)|quantize(4)")
        for _ in range(5):
            optimizer.zero_grad()
            backward(model(torch.randn(4, 6).to(dtype)).float().square().mean())
            optimizer.step()
        return flat(model)

    results = sl.simulate(case, ranks=2).results
    assert results[0].dtype == dtype
    assert torch.equal(results[0], results[1])


def test_delayed_steps_and_accumulation() -> None:
    def case(world: sl.World) -> Tensor:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, "allreduce(delay=1)", codec="topk(0.2)|quantize(4)")
        for x, y in run.shard(DataLoader(data(), batch_size=4)):
            optimizer.zero_grad()
            with run.no_sync():
                backward(nn.functional.cross_entropy(model(x), y))
            backward(nn.functional.cross_entropy(model(-x), y))
            optimizer.step()
        return flat(model)

    results = sl.simulate(case, ranks=2).results
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], flat(mlp()))


@pytest.mark.parametrize("codec", ["topk(0.2)|quantize(4)", "onebit", "cast('fp16')", "powersgd(2)"])
def test_a_rank_without_data_keeps_its_residual(codec: str) -> None:
    def case(world: sl.World) -> Tensor:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, codec=codec)
        for x, y in run.shard(DataLoader(data(7), batch_size=2)):
            optimizer.zero_grad()
            backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            left = left_of(run).clone()
        if world.rank > 0:  # the seventh sample is rank 0's
            assert torch.equal(left_of(run), left)
        return flat(model)

    results = sl.simulate(case, ranks=3).results
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("codec", ["topk(0.2)|quantize(4)", "quantize(4)", "cast('fp16')", "powersgd(2)"])
@pytest.mark.parametrize("check", [True, False])
def test_nan_on_one_rank_is_told_to_all(codec: str, check: bool) -> None:
    def case(world: sl.World) -> str:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, codec=codec, check_finite=check)
        for number in range(3):
            optimizer.zero_grad()
            bad = float("nan") if world.rank == 1 and number == 1 else 1.0
            try:
                backward((model(torch.ones(2, 6)) * bad).sum())
            except sl.errors.DivergedError as error:
                return str(error)
            found = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            assert bool(torch.isfinite(found).all()) == (number != 1)
            assert bool(torch.isfinite(left_of(run)).all())
        return "passed"

    words = sl.simulate(case, ranks=3).results
    assert all(word == words[0] for word in words)
    assert words[0].startswith("NaN or Inf in the gradients of rank 1: ") if check else words[0] == "passed"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "topk(0.1)", "algorithm": "ring"}, "cannot be added"),
        ({"codec": "quantize(4)", "algorithm": "sparse_split"}, "sends all"),
        ({"codec": "topk(0.1)", "algorithm": "split"}, "sparse_split"),
        ({"codec": None, "algorithm": "gather"}, "there is no codec"),
        ({"codec": "powersgd(2)", "algorithm": "gather"}, "sums on the wire"),
        ({"codec": "topk(0.1, momentum=0.9)"}, "momentum"),
        ({"codec": "quantize(4)|topk(0.1)"}, "comes first"),
        ({"codec": "topk(1.5)"}, "1.5"),
        ({"codec": "quantize(9)"}, "9"),
        ({"codec": "qantize(4)"}, "did you mean 'quantize'"),
        ({"codec": "topk(0.1)", "algorithm": "rong"}, "did you mean 'ring'"),
    ],
)
def test_pairs_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with sl.init(), pytest.raises(sl.SynclineError, match=words.replace("'", ".")):
        sl.distribute(model, optimizer, **options)


@pytest.mark.parametrize("way", ["gather", "sparse_split_dense(bits=4)"])
@pytest.mark.parametrize("codec", ["topk(0.2)|quantize(4)", "topk(0.2, momentum=0.9, warmup=5)"])
def test_a_resumed_run_goes_the_same_way(tmp_path: Path, codec: str, way: str) -> None:
    _compare_lives(tmp_path, codec, way)


@pytest.mark.parametrize(("codec", "way"), [("onebit", "split"), ("powersgd(2)", "auto"), ("quantize(4)", "auto")])
def test_a_resumed_run_goes_the_same_way_too(tmp_path: Path, codec: str, way: str) -> None:
    _compare_lives(tmp_path, codec, way)


def _compare_lives(folder: Path, codec: str, way: str) -> None:
    wanted = sl.simulate(lambda world: _life(world, None, 9, codec, way), ranks=3).results
    sl.simulate(lambda world: _life(world, folder, 4, codec, way), ranks=3)
    found = sl.simulate(lambda world: _life(world, folder, 9, codec, way), ranks=3).results
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def _life(world: sl.World, folder: Path | None, stop: int, codec: str, way: str) -> Tensor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sl.distribute(model, optimizer, codec=codec, algorithm=way)
    told = None if folder is None else sl.load(folder, run=run)
    step = 0 if told is None else told["step"]
    shard = run.shard(DataLoader(data(), batch_size=4, shuffle=True))
    while step < stop:
        for x, y in shard:
            optimizer.zero_grad()
            backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            step += 1
            if step == stop:
                break
    if folder is not None:
        sl.save(folder, step=step, run=run)
    return torch.cat([flat(model), left_of(run)])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("codec", "way"), [("topk(0.2)", "gather"), ("onebit", "split"), ("powersgd(1)", "auto")])
def test_residuals_survive_another_number_of_workers(tmp_path: Path, codec: str, way: str, ranks: int) -> None:
    before = sl.simulate(lambda world: _life(world, tmp_path, 4, codec, way), ranks=3).results
    numel = flat(mlp()).numel()
    left = sum(result[numel:] for result in before) / 3
    after = sl.simulate(lambda world: _life(world, tmp_path, 4, codec, way), ranks=ranks).results
    assert torch.allclose(sum(result[numel:] for result in after) / ranks, left, atol=1e-6)


def test_what_is_sent_and_what_it_costs_is_counted() -> None:
    def case(world: sl.World) -> dict[str, float]:
        model = nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, codec="topk(0.01)|quantize(4)")
        backward(model(torch.ones(1, 100)).sum())
        optimizer.step()
        return run.stats.as_dict()

    told = sl.simulate(case, ranks=2).results[0]
    assert told["sl_comm_bytes_logical"] == 4 * 10100
    assert 100 < told["sl_comm_bytes_wire"] < 0.02 * 4 * 10100 + 200
    assert "sl_codec_seconds" in told


class _Ear:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def write(self, event: Any) -> None:
        self.heard.append(event)

    def close(self) -> None:
        return


@pytest.mark.parametrize("codec", ["topk(0.2)", "topk(0.2, momentum=0.9)|quantize(4)", "randomk(0.2)"])
def test_diagnosis_of_each_layer(codec: str) -> None:
    def case(world: sl.World) -> list[Any]:
        ear = _Ear()
        world.events.add(ear)
        train(world, "sgd", 4, codec=codec, algorithm="auto", diagnose=2)
        return [event for event in ear.heard if event.key.startswith("sl_codec_") and event.key != "sl_codec_seconds"]

    heard = sl.simulate(case, ranks=2).results[0]
    assert {event.key for event in heard} == {"sl_codec_error", "sl_codec_xi", "sl_codec_density"}
    assert len(heard) == 2 * 3 * 6  # two of four steps, three numbers, six parameters
    for event in heard:
        assert event.value >= 0
        assert event.key == "sl_codec_xi" or event.value <= 1


def test_a_dataset_of_one_batch_needs_no_codec_on_one_worker() -> None:
    with sl.init():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sl.distribute(model, optimizer, codec="topk(0.1)")
        for x, y in run.shard(DataLoader(TensorDataset(*data(4).tensors), batch_size=4)):
            backward(nn.functional.cross_entropy(model(x), y))
        kept = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        assert 0 < int(torch.count_nonzero(kept)) < kept.numel()
