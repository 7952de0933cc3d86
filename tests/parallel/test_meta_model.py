"""Models on the meta device: no worker ever has the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.world import World
from tests.parallel.models import MODELS, loss_of


class Tied(nn.Module):
    """The embedding is also the output layer; batch norm and dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 6))
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)))  # type: ignore[no-any-return]


def on_meta(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = make()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(
    world: World, make: Callable[[], nn.Module], cuts: list[str], data: Any, folder: Path, steps: range, save: str = ""
) -> set[str]:
    """Train some steps, from the checkpoint if there is one. Returns the names that this worker had."""
    model, optimizer = on_meta(make)
    run = sl.pipeline(model, optimizer, loss_of, stages=cuts, microbatches=2, clip_norm=1.0, seed=3)
    if (folder / "start").exists():
        sl.load(folder / "start", run=run)
    had = {name for name, each in model.named_parameters() if not each.is_meta}
    for step in steps:
        run.step(*data(step))
    if save:
        sl.save(folder / save, step=steps.stop, run=run)
    run.close()
    assert had == {name for name, each in model.named_parameters() if not each.is_meta}
    assert {id(each) for each in optimizer.state} <= {id(each) for each in model.parameters() if not each.is_meta}
    return had


def weights(folder: Path, make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    model = make()
    sl.load(folder, run=model)
    return model.state_dict()


def float_batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = MODELS["mlp"].batch(8, step)
    return x.float(), y


def token_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(11, (8,), generator=generator), torch.randint(11, (8,), generator=generator)


def test_stages_are_made_saved_and_loaded_one_by_one(tmp_path: Path) -> None:
    """Training on 1, 2 and 4 workers begins with the same weights. It continues on others with the same bits."""
    make, cuts = MODELS["mlp"].make, {1: [], 2: ["4"], 4: list(MODELS["mlp"].cuts)}

    def run(ranks: int, folder: Path, steps: range, save: str) -> dict[str, Tensor]:
        def work(world: World) -> set[str]:
            return train(world, make, cuts[ranks], float_batch, folder, steps, save)

        results = sl.simulate(work, ranks).results
        assert sum(len(names) for names in results) == len(set().union(*results)) == 16
        return weights(folder / save, make)

    expected = run(2, tmp_path / "two", range(6), "end")
    run(2, tmp_path, range(3), "start")
    for ranks in (1, 4):
        for found in (
            run(ranks, tmp_path / str(ranks), range(6), "end"),
            run(ranks, tmp_path, range(3, 6), f"end-{ranks}"),
        ):
            assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_tied_parameters_begin_with_the_value_of_their_first_user(tmp_path: Path) -> None:
    def run(ranks: int, cuts: list[str], steps: int) -> dict[str, Tensor]:
        folder = tmp_path / f"{ranks}-{steps}"
        sl.simulate(lambda world: train(world, Tied, cuts, token_batch, folder, range(steps), "end"), ranks)
        return weights(folder / "end", Tied)

    one, several = run(1, [], 0), run(3, ["body.0", "head"], 0)
    assert all(torch.equal(value, several[name]) for name, value in one.items())
    assert torch.equal(one["head.weight"], one["embed.weight"])


def same_weights() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


def test_copies_of_tied_parameters_begin_with_the_same_value() -> None:
    """The second worker has no bias of the first layer, so it cannot set the layer itself."""

    def work(world: World) -> Tensor:
        model, optimizer = on_meta(same_weights)
        with sl.pipeline(model, optimizer, loss_of, stages=["2"], microbatches=2):
            return model.get_parameter("0.weight").detach().clone()

    first, last = sl.simulate(work, 2).results
    assert torch.equal(first, last)


def test_teams_train_tied_parameters(tmp_path: Path) -> None:
    def run(steps: int) -> dict[str, Tensor]:
        folder = tmp_path / str(steps)
        cuts = ["body.0", "head"]
        sl.simulate(lambda world: train(world, Tied, cuts, token_batch, folder, range(steps), "end"), 6)
        return weights(folder / "end", Tied)

    one, trained = run(0), run(2)
    assert not torch.equal(trained["embed.weight"], one["embed.weight"])


def test_the_model_stays_divided(tmp_path: Path) -> None:
    def work(world: World) -> bool:
        model, optimizer = on_meta(MODELS["mlp"].make)
        run = sl.pipeline(model, optimizer, loss_of, stages=["4"], microbatches=2)
        run.step(*float_batch(0))
        with pytest.raises(IncompatibleError, match=r"meta device.*run\.predict"), run.agreed():
            pass
        more: tuple[dict[str, Any], ...] = ({"run": run, "model": model}, {"optimizer": optimizer})
        for objects in more:
            with pytest.raises(IncompatibleError, match=r"save the run"):
                sl.save(tmp_path, step=1, **objects)
        model.eval()
        assert run.predict(float_batch(0)[0]).shape == (8, 3)
        run.close()
        with pytest.raises(IncompatibleError, match=r"load a checkpoint into a whole model"):
            model(float_batch(0)[0])
        return True

    assert all(sl.simulate(work, 2).results)


class Masked(nn.Module):
    """A module with a buffer that is not saved, and no `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("mask")


def masked() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Masked(), nn.Linear(6, 3))


def set_values(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.ones_(tensor)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"1 \(Masked\) has no reset_parameters"),
        ({"initialize": 3}, r"initialize=3"),
        ({"initialize": lambda module: None}, r"could not make the values.*has no values"),
        ({"initialize": set_values, "stages": "auto", "example": torch.ones(2, 6)}, r"measures the layers"),
    ],
)
def test_models_without_values_are_refused(options: dict[str, Any], message: str) -> None:
    def work(world: World) -> bool:
        model, optimizer = on_meta(masked)
        with pytest.raises((SpecError, IncompatibleError), match=message):
            sl.pipeline(model, optimizer, loss_of, **{"stages": ["1"], "microbatches": 2, **options})
        return True

    assert all(sl.simulate(work, 2).results)


def test_a_function_sets_what_modules_do_not() -> None:
    def work(world: World) -> float:
        model, optimizer = on_meta(masked)
        run = sl.pipeline(model, optimizer, loss_of, stages=["1"], microbatches=2, initialize=set_values)
        loss = float(run.step(torch.ones(4, 6), torch.zeros(4, dtype=torch.long)))
        run.close()
        return loss

    expected = loss_of(torch.full((4, 3), 43.0), torch.zeros(4, dtype=torch.long))
    assert sl.simulate(work, 2).results == (pytest.approx(float(expected)),) * 2
