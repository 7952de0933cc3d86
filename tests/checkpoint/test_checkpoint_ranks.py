"""Several ranks save and load together: exact resumption, other numbers of workers, one that fails."""

from __future__ import annotations

import errno
import importlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl
from syncline.checkpoint import latest, load, save
from syncline.training.distribute import distribute
from syncline.world import current_world
from tests.checkpoint.checkpointing import Holder, bits, net, same
from tests.launching import launch, torch_variables

TOTAL = 11
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(48, 3, generator=draw), torch.randint(0, 2, (48,), generator=draw))


def training(
    world: sl.World, folder: Path | None, stop: int, optimizer: str, strategy: str
) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Train to step `stop`, from the checkpoint in `folder` where there is one, and save there at the end."""
    torch.manual_seed(world.rank)  # dropout differs between the ranks
    model = net(seed=3)
    descent = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(descent, 0.95)
    run = distribute(model, descent, strategy, algorithm="ring", schedulers=[schedule])
    loader = DataLoader(dataset(), batch_size=4, shuffle=True)  # four steps an epoch on three ranks
    torch.manual_seed(100 + world.rank)
    told = None if folder is None else load(folder, run=run, schedule=schedule)
    step, losses = (0, []) if told is None else (told["step"], told["losses"])
    while step < stop:
        for x, y in run.shard(loader, seed=9):
            descent.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            descent.step()
            schedule.step()
            step += 1
            losses.append(float(sl.allreduce(loss.detach().reshape(1), op="mean")))
            if step == stop:
                break
    own = bits(model)
    if folder is not None:
        save(folder, step=step, run=run, schedule=schedule, losses=losses)
    with run.agreed():
        return own, bits(model), losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["allreduce", "allreduce(delay=1, warmup=2)"])
@pytest.mark.parametrize("seed", range(3))
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, optimizer: str, strategy: str, seed: int) -> None:
    def lives(stop: int, folder: Path | None) -> Any:
        return sl.simulate(lambda world: training(world, folder, stop, optimizer, strategy), ranks=3, seed=stop).results

    wanted = lives(TOTAL, None)
    first, second = sorted(random.Random(seed).sample(range(1, TOTAL), 2))
    for stop in (first, second, TOTAL):
        found = lives(stop, tmp_path)
    assert latest(tmp_path) == TOTAL
    for (own, agreed, losses), (own_wanted, agreed_wanted, losses_wanted) in zip(found, wanted, strict=True):
        assert losses == losses_wanted
        assert same(own, own_wanted)
        assert same(agreed, agreed_wanted)
    assert not same(wanted[0][0], wanted[1][0])  # each rank has its own batch norm


def test_batch_norm_is_shared_in_the_model_and_own_in_each_rank(tmp_path: Path) -> None:
    run = sl.simulate(lambda world: training(world, tmp_path, 2, "adam", "allreduce"), ranks=3)
    kept = load_file(tmp_path / "step-00000002" / "model-run" / "model-00001-of-00001.safetensors")
    for own, agreed, _ in run.results:
        assert torch.equal(kept["1.running_mean"], agreed["1.running_mean"])
        assert not torch.equal(kept["1.running_mean"], own["1.running_mean"])
    for rank, (own, _, _) in enumerate(run.results):
        local = load_file(tmp_path / "step-00000002" / f"rank-{rank:05d}" / "model-00001-of-00001.safetensors")
        [mean] = [value for name, value in local.items() if name.endswith("running_mean")]
        assert torch.equal(mean, own["1.running_mean"])


def test_saving_inside_agreed_keeps_each_ranks_own_statistics(tmp_path: Path) -> None:
    def script(world: sl.World) -> bool:
        model = net()
        run = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm="ring")
        model(torch.randn(4, 3) + world.rank)
        own = bits(model)
        with run.agreed():
            save(tmp_path, step=1, run=run)
        model(torch.randn(4, 3))
        load(tmp_path, run=run)
        return same(bits(model), own)

    assert sl.simulate(script, ranks=3).results == (True, True, True)


def test_on_another_number_of_workers(tmp_path: Path) -> None:
    saved = sl.simulate(lambda world: training(world, tmp_path, 2, "adam", "allreduce"), ranks=3).results

    def resume(world: sl.World) -> tuple[dict[str, Any], float, int]:
        model = net(seed=4)
        run = distribute(model, torch.optim.Adam(model.parameters(), lr=0.01), algorithm="ring")
        told = load(tmp_path, run=run)
        assert told is not None
        return bits(model), float(torch.rand(1)), int(told["step"])

    fewer, more = (sl.simulate(resume, ranks=ranks).results for ranks in (2, 5))
    for found in (fewer, more):
        for rank, (state, _, step) in enumerate(found):
            own, agreed, _ = saved[min(rank, 2)]
            assert step == 2
            assert same(state, own if rank < 3 else agreed)
    assert [drawn for _, drawn, _ in fewer] == [drawn for _, drawn, _ in more[:2]]
    assert len({drawn for _, drawn, _ in more}) == 5
    assert [drawn for _, drawn, _ in more] == [drawn for _, drawn, _ in sl.simulate(resume, ranks=5, seed=1).results]


def failing(monkeypatch: pytest.MonkeyPatch, part: str, act: Any) -> None:
    """Do `act` where `part` is about to be written."""
    module = importlib.import_module(save.__module__)
    original = module.write_part

    def write(folder: Path, tree: Any, name: str) -> None:
        if folder.name == part:
            act(folder)
        original(folder, tree, name)

    monkeypatch.setattr(module, "write_part", write)


@pytest.mark.parametrize("part", ["rank-00000", "rank-00001", "model-model", "shared"])
def test_a_write_error_of_one_rank_is_raised_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def full(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    def script(world: sl.World) -> None:
        save(tmp_path, step=2, model=net(), value=2)

    sl.simulate(lambda world: save(tmp_path, step=1, model=net(), value=1), ranks=3)
    failing(monkeypatch, part, full)
    results = sl.simulate(script, ranks=3, return_exceptions=True).results
    rank = 1 if part == "rank-00001" else 0
    for result in results:
        assert isinstance(result, sl.SynclineError)
        assert f"rank {rank} could not write " in str(result)
        assert "OSError: [Errno 28] No space left on device" in str(result)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load(tmp_path) == {"step": 1, "value": 1}


def test_a_part_that_rank_0_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on hosts without a common file system."""
    failing(monkeypatch, "model-model", lambda folder: (folder.parent / "rank-00001" / "state.json").unlink())
    results = sl.simulate(lambda world: save(tmp_path, step=1, model=net()), 2, return_exceptions=True).results
    assert all(isinstance(result, sl.errors.ProtocolError) for result in results)
    assert "a file system that all ranks share" in str(results[1])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_slower_than_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("rank-00001", "shared"):
        failing(monkeypatch, part, lambda folder: current_world().runtime.sleep(100))
    run = sl.simulate(lambda world: save(tmp_path, step=1, value=1), ranks=3, timeout=4)
    assert run.time > 200
    assert load(tmp_path) == {"step": 1, "value": 1}


def test_ranks_that_save_different_things(tmp_path: Path) -> None:
    def script(world: sl.World) -> None:
        save(tmp_path, step=1 + world.rank // 2, value=1)

    results = sl.simulate(script, ranks=3, return_exceptions=True).results
    message = "the ranks save different things: rank 0 step 1 with value (value), rank 2 step 2 with value (value)"
    assert [str(result) for result in results] == [message] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_object_is_named_on_every_rank(tmp_path: Path) -> None:
    def script(world: sl.World) -> None:
        save(tmp_path, step=1, holder=Holder({"f": print}))

    results = sl.simulate(script, ranks=2, return_exceptions=True).results
    assert all(isinstance(result, sl.errors.IncompatibleError) for result in results)
    assert str(results[0]).startswith("holder.f is a builtin_function_or_method")
    assert str(results[1]).startswith("rank 0 could not write the shared part of the checkpoint: holder.f is a builtin")


def test_a_rank_that_cannot_load_makes_all_ranks_fail(tmp_path: Path) -> None:
    class Picky(Holder):
        def load_state_dict(self, state: Any) -> None:
            if state["who"] == 0 and current_world().rank == 1 and self.state["who"] == 7:
                self.state = None
                raise ValueError("no")
            super().load_state_dict(state)

    def script(world: sl.World) -> tuple[str, Any, bool, bool]:
        model, picky = net(world.rank), Picky({"who": world.rank})
        save(tmp_path, step=1, model=model, picky=picky)
        picky.state, fresh = {"who": 7}, net(9)
        before, drawn = bits(fresh), torch.get_rng_state()
        with pytest.raises(sl.SynclineError, match="rank 1 could not take over the checkpoint: ValueError: no") as told:
            load(tmp_path, model=fresh, picky=picky)
        return str(told.value), picky.state, same(bits(fresh), before), torch.equal(torch.get_rng_state(), drawn)

    results = sl.simulate(script, ranks=3).results
    assert [result[1:] for result in results] == [({"who": 7}, True, True)] * 3


def test_all_ranks_load_the_checkpoint_that_rank_0_chooses(tmp_path: Path) -> None:
    def script(world: sl.World) -> Any:
        for step in (1, 2):
            save(tmp_path, step=step, value=step)
        if world.rank == 0:
            (tmp_path / "step-00000002" / "rank-00002" / "state.json").write_text("{}")
        return load(tmp_path)

    assert sl.simulate(script, ranks=3).results == ({"step": 1, "value": 1},) * 3


GLOO = """
import pathlib, torch, syncline as sl
from tests.checkpoint.test_checkpoint_ranks import training
torch.set_num_threads(1)
with sl.init(timeout=60) as world:
    for folder, stop in LIVES:
        own, agreed, losses = training(world, pathlib.Path(folder) if folder else None, stop, "adam", "allreduce")
        print([value.double().sum().item().hex() for state in (own, agreed) for value in state.values()], losses)
"""


@pytest.mark.xdist_group("gloo")
def test_resuming_in_other_processes(tmp_path: Path) -> None:
    def live(*lives: tuple[str, int]) -> list[list[str]]:
        ended = launch(GLOO.replace("LIVES", repr(lives)), torch_variables(2))
        assert [end.code for end in ended] == [0, 0], [end.err for end in ended]
        return [end.out.splitlines() for end in ended]

    before = live(("", TOTAL), (str(tmp_path), 8))  # all of it, and one that ends in mid-epoch
    after = live((str(tmp_path), TOTAL))
    assert [found for [found] in after] == [wanted for wanted, _ in before]


LIMITED = """
import resource, signal, sys, torch, syncline as sl
from syncline.checkpoint import load, save
folder = FOLDER
save(folder, step=1, small=torch.zeros(10))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save(folder, step=2, small=torch.zeros(100_000))
except sl.SynclineError as error:
    print(error)
print(load(folder)["step"])
"""


def test_a_real_file_that_cannot_grow(tmp_path: Path) -> None:
    [ended] = launch(LIMITED.replace("FOLDER", repr(str(tmp_path))), [{}])
    assert ended.code == 0, ended.err
    told, step = ended.out.splitlines()
    assert told.startswith("this process could not write the shared part of the checkpoint: OSError: [Errno 27]")
    assert step == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
