"""Damaged checkpoints, and those of something else: named, and nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import syncline as sl
from syncline.checkpoint import load, save
from syncline.state_trees import encode
from tests.checkpoint.checkpointing import Holder, Solo, bits, net, same, train

# Damage.


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


FILES = [
    "manifest.json",
    "shared/state.json",
    "shared/model-00001-of-00001.safetensors",
    "model-model/model-00001-of-00001.safetensors",
    "rank-00000/state.json",
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [_cut, _flip, Path.unlink])
def test_a_damaged_checkpoint(
    tmp_path: Path, file: str, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    good = bits(model)
    train(model, optimizer, 1)
    harm(save(tmp_path, step=2, model=model, optimizer=optimizer) / file)
    if file == "manifest.json" and harm is Path.unlink:
        (tmp_path / "step-00000002" / "manifest.json").touch()  # as a folder without one is
    message = (
        f"step-00000002/{file} (has [0-9]+ bytes where|has other bytes|is missing|is not JSON|is not the manifest)"
    )
    before = bits(model)
    with pytest.raises(sl.errors.ProtocolError, match=message):
        load(tmp_path, step=2, model=model, optimizer=optimizer)
    assert same(bits(model), before)
    assert load(tmp_path, model=model, optimizer=optimizer) == {"step": 1}
    assert "step-00000002" in caplog.text
    assert "the checkpoint of step 1" in caplog.text
    assert same(bits(model), good)


def test_a_foreign_file_a_renamed_folder_and_a_later_format(tmp_path: Path) -> None:
    path = save(tmp_path, step=1, model=net())
    (path / "shared" / "more.safetensors").touch()
    with pytest.raises(sl.errors.ProtocolError, match=r"more\.safetensors is not in the manifest"):
        load(tmp_path)
    (path / "shared" / "more.safetensors").unlink()
    renamed = path.rename(tmp_path / "step-00000008")
    with pytest.raises(sl.errors.ProtocolError, match="step-00000008 has step 1"):
        load(tmp_path)
    told = json.loads((renamed / "manifest.json").read_text())
    (renamed / "manifest.json").write_text(json.dumps({**told, "version": 2}))
    with pytest.raises(sl.errors.ProtocolError, match="format version 2; this Syncline reads 1"):
        load(tmp_path)


def test_sizes_are_compared_even_without_checksums(tmp_path: Path) -> None:
    path = save(tmp_path, step=1, words="abcdef")
    _flip(path / "rank-00000" / "state.json")
    with pytest.raises(sl.errors.ProtocolError, match="SHA-256 differs"):
        load(tmp_path)
    _cut(path / "rank-00000" / "state.json")
    with pytest.raises(sl.errors.ProtocolError, match="bytes where"):
        load(tmp_path, verify=False)


# What does not fit.


def other_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2, bias=False), nn.PReLU())


def test_another_model_is_refused_unchanged(tmp_path: Path) -> None:
    save(tmp_path, step=1, model=net(), value=Holder({"a": 1}))
    model, holder = other_model(), Holder({"a": 0})
    before = bits(model)
    with pytest.raises(
        sl.errors.IncompatibleError,
        match=r"it lacks 4\.weight; it has, and the model has not, 3\.bias; other shapes or dtypes: "
        r"0\.weight \(float32\[4, 3\] there, float32\[5, 3\] here\), .* and 2 more",
    ):
        load(tmp_path, value=holder, model=model)
    assert same(bits(model), before)
    assert holder.state == {"a": 0}


def test_other_mismatches_are_refused(tmp_path: Path) -> None:
    model = net()
    named = dict(model.named_parameters())
    groups = [{"params": [named["0.weight"]]}, {"params": [named["0.bias"]]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    save(tmp_path, step=1, model=model, optimizer=optimizer, holder=Holder({}), value=3)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"nothing": model}, "has nothing called 'nothing'; it has: model, optimizer, holder, value"),
        ({"value": 4}, "saved as a value, given as a value: load takes objects"),
        ({"holder": model}, "was saved as a stateful, and is given as a module"),
        ({"holder": lr_scheduler.ConstantLR(optimizer)}, "is the state of a Holder, not of a ConstantLR"),
        ({"optimizer": torch.optim.Adam(groups)}, "is of the optimizer SGD, not Adam"),
        ({"optimizer": torch.optim.SGD(model.parameters())}, "has 2 parameter groups, the optimizer 1"),
        ({"optimizer": torch.optim.SGD([groups[0], {"params": [named["1.bias"], named["1.weight"]]}])}, "group 1 of"),
    ]
    for objects, message in cases:
        with pytest.raises(sl.errors.IncompatibleError, match=message):
            load(tmp_path, **objects)


def test_a_refusal_midway_undoes_everything(tmp_path: Path) -> None:
    with sl.init() as world:
        model = net()
        run = Solo(model, torch.optim.Adam(model.parameters()), world)
        train(model, run.optimizer, 2)
        holder = Holder({"a": 1})
        save(tmp_path, step=2, run=run, holder=holder)
        holder.state = {"a": 2}
        train(model, run.optimizer, 2)
        run.remembered = 9
        before, moments = bits(model), encode(run.optimizer.state_dict(), "")[1]
        drawn = torch.get_rng_state()
        original, run.load_state_dict = run.load_state_dict, _refusing_once(run)  # type: ignore[method-assign, assignment]
        with pytest.raises(sl.errors.IncompatibleError, match="another strategy"):
            load(tmp_path, holder=holder, run=run)
        assert same(bits(model), before)
        assert same(encode(run.optimizer.state_dict(), "")[1], moments)
        assert (holder.state, run.remembered) == ({"a": 2}, 9)
        assert torch.equal(torch.get_rng_state(), drawn)
        run.load_state_dict = original  # type: ignore[method-assign]
        load(tmp_path, holder=holder, run=run)
        assert (holder.state, run.remembered) == ({"a": 1}, 0)


def _refusing_once(run: Solo) -> Callable[[Any], None]:
    original, calls = run.load_state_dict, [0]

    def refuse(state: Any) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise sl.errors.IncompatibleError("it was saved with another strategy")
        original(state)

    return refuse
