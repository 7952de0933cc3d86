"""States that come from elsewhere: another strategy's checkpoint, or a state dict loaded after `distribute`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from tests.hunting import HUNTING
from tests.strategies.every import EVERY, SYNCHRONOUS, play, whole

FRESH = [spec for spec in EVERY if spec != "ensemble"]
RATE, MOMENTUM = 0.5, 0.5


def begin(spec: str, start: float = 0.0) -> Any:
    """One weight, and a gradient of 1 in each step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start)
    momentum = 0.0 if "momentum" in spec else MOMENTUM  # easgd's own takes the optimizer's place
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    return sl.distribute(model, optimizer, strategy=spec)


def step(run: Any) -> None:
    run.optimizer.zero_grad()
    run.model(torch.ones(1, 1)).sum().backward()
    run.optimizer.step()


def shown(run: Any) -> float:
    with run.agreed():
        return float(run.model.weight.detach())


def save(folder: Path, spec: str) -> tuple[float, float]:
    """Take four steps and save; the agreed weight, and the velocity of rank 0's optimizer."""

    def work(world: sl.World) -> tuple[float, float]:
        run = begin(spec)
        for _ in range(4):
            step(run)
        world.barrier()
        found = shown(run)
        sl.save(folder, step=4, run=run)
        velocity = run.optimizer.state[run.model.weight].get("momentum_buffer", torch.zeros(()))
        run.close()
        return found, float(velocity)

    found: tuple[float, float] = play(work)[0]
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float, float]]:
    """A checkpoint of every strategy."""
    found = {}
    for number, spec in enumerate(EVERY):
        folder = tmp_path_factory.mktemp(f"of{number}")
        found[spec] = (folder, *save(folder, spec))
    return found


@pytest.mark.parametrize("into", FRESH)
def test_every_strategy_takes_over_the_checkpoint_of_every_other(
    into: str, saved: dict[str, tuple[Path, float, float]]
) -> None:
    number = FRESH.index(into)
    for other, (spec, (folder, agreed, velocity)) in enumerate(saved.items()):
        if not HUNTING and (number + other) % 4:
            continue  # every strategy with a quarter of the others, each with different ones
        if ("momentum" in spec) != ("momentum" in into) or spec == into == "allreduce(delay=1)":
            continue  # the optimizers differ; gradients on their way are tested elsewhere

        def work(world: sl.World, folder: Path = folder) -> tuple[float, float, int]:
            run = begin(into, start=100.0)
            assert sl.load(folder, run=run) is not None
            first, steps = shown(run), run.stats.steps
            for _ in range(2):
                step(run)
            world.barrier()
            run.close()
            return first, float(run.model.weight.detach()), steps

        found = play(work)
        assert [each[0] for each in found] == pytest.approx([agreed] * 2, abs=1e-6), spec
        assert [each[2] for each in found] == [4, 4], spec
        if into in SYNCHRONOUS and "diloco" not in into and "easgd" not in into and "master(m" not in spec:
            first = velocity * MOMENTUM + 1.0
            expected = agreed - RATE * (first + first * MOMENTUM + 1.0)
            assert found[0][1] == found[1][1] == pytest.approx(expected, abs=1e-5), (spec, into)


@pytest.mark.parametrize("spec", FRESH)
def test_a_state_dict_loaded_after_distribute_counts(spec: str) -> None:
    def work(world: sl.World) -> tuple[float, float]:
        run = begin(spec)
        for _ in range(3):
            step(run)
        world.barrier()
        run.model.load_state_dict({"weight": torch.full((1, 1), 7.0)})
        first = shown(run)
        step(run)
        world.barrier()
        run.close()
        return first, float(run.model.weight.detach())

    found = play(work)
    assert [each[0] for each in found] == [7.0, 7.0]
    assert all(5.0 < each[1] <= 7.0 for each in found)  # one step of at most 0.5 · 1.875, a little less for centres
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("spec", ["bsp", "downpour", "diloco(period=2)", "easgd(period=2)", "gossip(pairwise=True)"])
def test_a_part_loaded_after_distribute_counts(spec: str) -> None:
    """As a pretrained backbone."""

    def work(world: sl.World) -> tuple[float, float]:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
        run: Any = sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0), strategy=spec)
        step(run)
        world.barrier()
        run.model[0].load_state_dict({"weight": torch.full((1, 1), 7.0)})
        with run.agreed():
            first = float(run.model[0].weight.detach())
        for _ in range(2):
            step(run)
        run.close()
        return first, float(run.model[0].weight.detach())

    assert play(work) == ((7.0, 7.0),) * 2


@pytest.mark.parametrize("spec", ["bsp", "diloco(period=2)", "easgd(period=2)", "gossip(pairwise=True)"])
def test_weights_swapped_and_restored_change_nothing(spec: str) -> None:
    """As for an evaluation of averaged weights on rank 0 alone."""

    def work(world: sl.World, swap: bool) -> Tensor:
        run = begin(spec)
        for _ in range(3):
            step(run)
        world.barrier()
        if swap and world.rank == 0:
            own = {name: each.clone() for name, each in run.model.state_dict().items()}
            run.model.load_state_dict({"weight": torch.full((1, 1), 9.0)})
            run.model.load_state_dict(own)
        for _ in range(3):
            step(run)
        world.barrier()
        run.close()
        return whole(run.model)

    with_swap, without = (play(partial(work, swap=swap))[0] for swap in (True, False))
    assert torch.equal(with_swap, without)


@pytest.mark.parametrize("spec", ["easgd(period=2)", "diloco(period=2)", "bsp", "gossip(pairwise=True)"])
def test_a_checkpoint_of_one_worker_resumes_on_more(spec: str, tmp_path: Path) -> None:
    def work(world: sl.World, resume: bool) -> float:
        run = begin(spec, start=100.0 if resume else 0.0)
        if resume:
            sl.load(tmp_path, run=run)
        else:
            for _ in range(3):
                step(run)
            sl.save(tmp_path, step=3, run=run)
        found = shown(run)
        run.close()
        return found

    (saved,) = play(partial(work, resume=False), ranks=1)
    assert saved < -1.0
    assert play(partial(work, resume=True)) == (saved, saved)


@pytest.mark.parametrize("trains", [(0, 1), (1,)])
@pytest.mark.parametrize(
    "spec", ["bsp", "diloco(period=2)", "easgd(period=2, sync=False)", "gossip", "gossip(pairwise=True)", "ensemble"]
)
def test_a_checkpoint_counts_where_other_layers_are_trained(spec: str, trains: tuple[int, ...], tmp_path: Path) -> None:
    """Layers are thawed, or frozen, from one part of a training to the next."""

    def start(world: sl.World, first: float, trained: tuple[int, ...]) -> Any:
        model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3)))
        for number, weight in enumerate(model.parameters()):
            nn.init.constant_(weight, first + number)
            weight.requires_grad_(number in trained)
        return sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), strategy=spec)

    def first(world: sl.World) -> Tensor:
        run = start(world, 1.0, (0, 2))
        for _ in range(3):
            step(run)
        world.barrier()
        sl.save(tmp_path, step=3, run=run)
        with run.agreed():
            shown = whole(run.model)
        run.close()
        return shown

    def second(world: sl.World) -> tuple[Tensor, Tensor]:
        run = start(world, 50.0, trains)
        sl.load(tmp_path, run=run)
        with run.agreed():
            shown = whole(run.model)
        step(run)
        run.close()
        return shown, whole(run.model)

    saved = play(first)[0]
    for shown, after in play(second):
        torch.testing.assert_close(shown, saved, rtol=0, atol=1e-6)
        assert float(after[2]) == float(saved[2])  # frozen now


@pytest.mark.parametrize("spec", ["bsp", "hogwild", "gossip(pairwise=True)", "onesided", "local(period=2)"])
def test_agreed_shows_the_batch_norms_of_a_checkpoint(spec: str, tmp_path: Path) -> None:
    def start() -> Any:
        model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        return sl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0), strategy=spec)

    def work(world: sl.World, resume: bool) -> list[float]:
        run = start()
        if resume:
            sl.load(tmp_path, run=run)
        else:
            for _ in range(3):
                run.model(torch.tensor([[1.0], [3.0]])).sum().backward()
                run.optimizer.step()
            sl.save(tmp_path, step=3, run=run)
        with run.agreed():
            shown = [float(each) for each in run.model[1].buffers()]
        run.close()
        return [*shown, *(float(each) for each in run.model[1].buffers())]

    saved = play(partial(work, resume=False))
    assert play(partial(work, resume=True)) == saved
    assert saved[0][2] == 3.0


@pytest.mark.parametrize("spec", ["bsp", "ssp(slack=0)", "master"])
def test_an_optimizer_state_loaded_after_distribute_counts(spec: str) -> None:
    def work(world: sl.World) -> float:
        run = begin(spec)
        state = run.optimizer.state_dict()
        state["state"] = {0: {"momentum_buffer": torch.full((1, 1), 8.0)}}
        run.optimizer.load_state_dict(state)
        step(run)
        run.close()
        return float(run.model.weight.detach())

    assert play(work) == (-RATE * (8.0 * MOMENTUM + 1.0),) * 2


@pytest.mark.parametrize("spec", ["bsp", "master(masters=2)", "ssp(slack=2)"])
def test_the_optimizer_has_its_state_after_close(spec: str) -> None:
    def work(world: sl.World) -> dict[str, Any]:
        run = begin(spec)
        for _ in range(3):
            step(run)
        run.close()
        return dict(run.optimizer.state_dict()["state"][0])

    for state in play(work):
        assert 0.5 < float(state["momentum_buffer"]) <= 2.0


def test_an_asynchronous_checkpoint_resumes_synchronously(tmp_path: Path) -> None:
    """Each worker of downpour stands somewhere else in its data; workers of allreduce stand in one place."""

    def first(world: sl.World) -> None:
        run = begin("downpour")
        batches = iter(run.shard(torch.utils.data.DataLoader(range(24), batch_size=2)))  # type: ignore[arg-type]
        for _ in range(2 + world.rank):
            next(batches)
            step(run)
        sl.save(tmp_path, step=1, run=run)
        run.close()

    def second(world: sl.World) -> tuple[int, int]:
        run = begin("allreduce")
        sl.load(tmp_path, run=run)
        left = len(list(run.shard(torch.utils.data.DataLoader(range(24), batch_size=2))))  # type: ignore[arg-type]
        run.close()
        return run.stats.steps, left

    play(first)
    one, other = play(second)
    assert one == other


def test_encoded_reads_begin_anew_after_a_load() -> None:
    """With a codec for what is read, servers tell what has changed since a worker last read."""

    def work(world: sl.World) -> Tensor:
        model = nn.Linear(64, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = sl.distribute(model, optimizer, strategy="bsp", codec="topk(0.02)")
        for number in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            if number == 0:
                model.load_state_dict({"weight": torch.full((1, 64), 7.0)})
        found = model.weight.detach().clone()
        run.close()
        return found

    assert all(torch.equal(found, torch.full((1, 64), 7.0)) for found in play(work))
