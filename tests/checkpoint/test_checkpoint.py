"""Saving and loading in one process: what goes in comes out, and what does not fit is refused before a change."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

import syncline as sl
from syncline.checkpoint import latest, load, save
from syncline.checkpoint.files import PendingCheckpoint, remove_leftovers
from syncline.state_trees import decode, encode
from tests.checkpoint.checkpointing import Holder, Solo, bits, net, same, train

VALUES: list[Any] = [
    None,
    True,
    -3,
    2**100,
    0.1,
    float("inf"),
    "text",
    [1, [2, None]],
    (0.9, (1, "a")),
    {"a": {"b": 1}, "": 2},
    {3: "three", "$odd": 4},
    torch.Size([2, 3]),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_round_trip(value: Any) -> None:
    told, tensors = encode(value, "value")
    assert not tensors
    assert decode(json.loads(json.dumps(told, allow_nan=False)), {}, "a test") == value


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_any_dtype_and_shape(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    save(tmp_path, step=1, kept=[tensor])
    told = load(tmp_path)
    assert told is not None
    [back] = told["kept"]
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_views_overlap_and_layouts(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.ones(3), (4,), check_invariants=True)
    conj = torch.tensor([1 + 2j, 3 - 1j]).conj()
    save(tmp_path, step=1, t=[base[:8], base[4:], base.view(3, 4).t(), torch.ones(1).expand(5), conj], sparse=sparse)
    told = load(tmp_path)
    assert told is not None
    wanted = [base[:8], base[4:], base.view(3, 4).t(), torch.ones(5), conj]
    assert all(torch.equal(back, tensor) for back, tensor in zip(told["t"], wanted, strict=True))
    assert not told["sparse"].is_coalesced()
    assert torch.equal(told["sparse"].to_dense(), torch.tensor([2.0, 0, 1, 0]))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3, line_search_fn="strong_wolfe"),
    "lbfgs, no search": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("as_run", [True, False], ids=["run", "apart"])
def test_resuming_gives_the_same_bits(tmp_path: Path, make: Callable[[Any], Any], as_run: bool) -> None:
    def begin(seed: int) -> tuple[nn.Module, Any, Any, dict[str, Any]]:
        model = net(seed)
        optimizer = make(model.parameters())
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10)
        apart = {"model": model, "optimizer": optimizer}
        return model, optimizer, scheduler, {"run": Solo(model, optimizer, world)} if as_run else apart

    with sl.init() as world:
        model, optimizer, scheduler, objects = begin(0)
        train(model, optimizer, 3)
        scheduler.step()
        save(tmp_path, step=3, scheduler=scheduler, **objects)
        train(model, optimizer, 3)
        scheduler.step()
        wanted = bits(model)

        model, optimizer, scheduler, objects = begin(1)
        assert load(tmp_path, scheduler=scheduler, **objects) == {"step": 3}
        train(model, optimizer, 3)
        scheduler.step()
        assert same(bits(model), wanted)


def test_state_goes_by_parameter_name(tmp_path: Path) -> None:
    """Groups made in another order of parameters still get their own state."""
    with sl.init() as world:
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, 2)
        save(tmp_path, step=2, run=Solo(model, optimizer, world))
        fresh = net(1)
        backwards = torch.optim.Adam(list(reversed(list(fresh.parameters()))))
        load(tmp_path, run=Solo(fresh, backwards, world))
    for name, parameter in fresh.named_parameters():
        mine = optimizer.state[model.get_parameter(name)]
        assert torch.equal(backwards.state[parameter]["exp_avg"], mine["exp_avg"])
        assert torch.equal(backwards.state[parameter]["step"], mine["step"])


def test_random_states(tmp_path: Path) -> None:
    save(tmp_path, step=0)
    drawn = torch.rand(2), np.random.rand(2), random.random()
    load(tmp_path)
    assert torch.equal(torch.rand(2), drawn[0])
    assert (np.random.rand(2) == drawn[1]).all()
    assert random.random() == drawn[2]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "chain": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "plateau": lambda o: _Plateau(o),
}


class _Plateau(lr_scheduler.ReduceLROnPlateau):
    def step(self, *args: Any) -> None:
        super().step(1.0)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    def begin() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return optimizer, make(optimizer)

    def rates(optimizer: Any, scheduler: Any) -> list[float]:
        seen = []
        for _ in range(3):
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    optimizer, scheduler = begin()
    rates(optimizer, scheduler)
    save(tmp_path, step=1, scheduler=scheduler, optimizer=optimizer)
    wanted = rates(optimizer, scheduler)
    optimizer, scheduler = begin()
    load(tmp_path, scheduler=scheduler, optimizer=optimizer)
    assert rates(optimizer, scheduler) == wanted


def test_scaler_tied_weights_extra_state_and_old_hooks(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.outside.weight = self.inside.weight
            self.normed = nn.utils.spectral_norm(nn.Linear(2, 2))
            self.seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    model, fresh = Tied(), Tied()
    model.seen = 7
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    path = save(tmp_path, step=1, model=model, scaler=scaler)
    kept = load_file(path / "model-model" / "model-00001-of-00001.safetensors")
    assert len([name for name in kept if name in ("inside.weight", "outside.weight")]) == 1
    other = torch.amp.GradScaler("cpu")
    load(tmp_path, model=fresh, scaler=other)
    assert fresh.seen == 7
    assert fresh.outside.weight is fresh.inside.weight
    assert torch.equal(fresh.inside.weight, model.inside.weight)
    assert same(bits(fresh.normed), bits(model.normed))
    assert other.get_scale() == 128.0


def test_a_compiled_model_and_a_plain_one_exchange_state(tmp_path: Path) -> None:
    model, fresh = net(), net(1)
    save(tmp_path, step=1, model=torch.compile(model, backend="eager"))
    load(tmp_path, model=fresh)
    assert same(bits(fresh), bits(model))
    load(tmp_path, model=torch.compile(net(2), backend="eager"))


def test_a_module_loads_the_model_of_a_run(tmp_path: Path) -> None:
    with sl.init() as world:
        model = net()
        save(tmp_path, step=1, run=Solo(model, torch.optim.SGD(model.parameters()), world))
    fresh = net(1)
    assert load(tmp_path, run=fresh) == {"step": 1}
    assert same(bits(fresh), bits(model))


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickle was used")

    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    assert load(tmp_path, model=model, optimizer=optimizer) == {"step": 1}


def _knot() -> Any:
    knot: list[Any] = []
    knot.append(knot)
    return knot


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"lr_lambdas": [lambda: 1]}, r"scheduler\.lr_lambdas\[0\] is a function; a checkpoint holds"),
        ({"a": {"b": {1, 2}}}, r"scheduler\.a\.b is a set"),
        ({"a": (0, object())}, r"scheduler\.a\[1\] is an object"),
        ({(1, 2): 3}, r"scheduler has the key \(1, 2\), tuple"),
        ({"m": torch.empty(2, device="meta")}, r"scheduler\.m is a tensor of the kind meta"),
        ({"n": np.array(["a"])}, r"scheduler\.n is a NumPy array of <U1"),
        ({"knot": _knot()}, r"scheduler\.knot\[0\].* nested more than 100 deep"),
    ],
)
def test_values_that_a_checkpoint_refuses(tmp_path: Path, state: Any, message: str) -> None:
    with pytest.raises(sl.errors.IncompatibleError, match=message):
        save(tmp_path, step=1, scheduler=Holder(state))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "message"), [
    ({"step": -1}, "step=-1 is not a number of steps"),
    ({"step": 1.0}, "step=1.0 is not a number of steps"),
    ({"step": 1, "keep": 0}, "keep=0 is not a number of checkpoints"),
    ({"step": 1, "../x": 3}, "'../x' is no name"),
])  # fmt: skip
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(sl.errors.SpecError, match=message):
        save(tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_without_a_world_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(sl.errors.WorldError, match=r"one of 4 workers and has no world.*call sl\.init\(\) first"):
        save(tmp_path, step=1)


# Which checkpoint.


def test_keep_removes_older_checkpoints(tmp_path: Path) -> None:
    assert (latest(tmp_path), load(tmp_path), load(tmp_path / "nowhere")) == (None, None, None)
    for step in (5, 10, 15, 20):
        save(tmp_path, step=step, value=step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000015", "step-00000020"]
    assert latest(tmp_path) == 20
    assert load(tmp_path) == {"step": 20, "value": 20}
    assert load(tmp_path, step=15) == {"step": 15, "value": 15}
    assert load(tmp_path / "step-00000010") == {"step": 10, "value": 10}
    with pytest.raises(sl.errors.SpecError, match="no checkpoint of step 5; there are: 10, 15, 20"):
        load(tmp_path, step=5)
    with pytest.raises(sl.errors.SpecError, match="is the checkpoint of step 10, not 15"):
        load(tmp_path / "step-00000010", step=15)


def test_a_rollback_is_not_shadowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Later steps than the one saved belong to training that was given up: they are set aside and named."""
    for step in (100, 110, 120):
        save(tmp_path, step=step, value=step)
    load(tmp_path, step=100)
    for step in (101, 102):
        save(tmp_path, step=step, value=-step)
    assert load(tmp_path) == {"step": 102, "value": -102}
    assert load(tmp_path, step=101) == {"step": 101, "value": -101}
    assert load(tmp_path / "abandoned-step-00000120") == {"step": 120, "value": 120}
    assert "abandoned-step-00000110, abandoned-step-00000120" in caplog.text
    with pytest.raises(sl.errors.SpecError, match=r"no checkpoint of step 120; .*abandoned-step-00000120"):
        load(tmp_path, step=120)
    for step in (110, 120, 105):
        save(tmp_path, step=step, value=0)
    names = sorted(path.name for path in tmp_path.iterdir())
    again = ["abandoned-step-00000110", "abandoned-step-00000110-2", "abandoned-step-00000120"]
    assert names == [*again, "abandoned-step-00000120-2", "step-00000102", "step-00000105"]
    assert load(tmp_path / "abandoned-step-00000120") == {"step": 120, "value": 120}, "the first one is untouched"


def test_a_rollback_keeps_steps_that_are_saved_again(tmp_path: Path) -> None:
    """A run that went on from step 100 saves 110 once more: the first one is of the training that was given up."""
    with sl.init() as world:
        model = net()
        run = Solo(model, torch.optim.SGD(model.parameters()), world)
        for step in (100, 110, 120):
            save(tmp_path, step=step, run=run, value=step)
        load(tmp_path, step=110, run=model)  # a look at the model alone is no rollback
        save(tmp_path, step=130, keep=None, run=run, value=130)
        load(tmp_path / ".." / tmp_path.name / "step-00000100", run=run)  # the same folder by another path
        save(tmp_path, step=110, run=run, value=-110)
        assert load(tmp_path, run=run) == {"step": 110, "value": -110}
        save(tmp_path, step=110, run=run, value=-111)
    aside = [f"abandoned-step-00000{step}" for step in (110, 120, 130)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*aside, "step-00000100", "step-00000110-2"]
    assert load(tmp_path / aside[0]) == {"step": 110, "value": 110}


@pytest.mark.parametrize("how", ["cut", "flipped", "no manifest", "dangling link"])
def test_damaged_checkpoints_do_not_count_in_keep(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step=step, value=torch.full((8,), float(step)))
    damage(tmp_path / "step-00000030", how)
    save(tmp_path, step=40, keep=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["damaged-step-00000030", "step-00000010", "step-00000020", "step-00000040"]
    assert "damaged-step-00000030" in caplog.text
    save(tmp_path, step=50, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [names[0], *names[2:], "step-00000050"]


def damage(path: Path, how: str) -> None:
    """Spoil one file of a checkpoint."""
    if how == "no manifest":
        (path / "manifest.json").unlink()
        return
    file = next((path / "shared").glob("*.safetensors"))
    if how == "dangling link":
        file.unlink()
        file.symlink_to("nowhere")
        return
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data if how == "flipped" else data[:-1])


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        save(tmp_path, step=7, value=value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007-3"]
    assert (latest(tmp_path), load(tmp_path)) == (7, {"step": 7, "value": 3})


def test_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
    mine = PendingCheckpoint(tmp_path, 3)
    (mine.path / "half").write_text("written")
    dead = tmp_path / ".step-00000002.0dead0"
    dead.mkdir()
    dead.with_name(dead.name + ".lock").touch()  # its holder is gone
    (tmp_path / ".step-00000009.0half0").mkdir()  # removed in part
    (tmp_path / ".stepson").mkdir()  # not ours
    remove_leftovers(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted([mine.path.name, mine.path.name + ".lock", ".stepson"])
    mine.discard()
    assert [path.name for path in tmp_path.iterdir()] == [".stepson"]
