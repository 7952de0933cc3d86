"""The profile of a workload: FLOPs, optimizer and file; what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from syncline.errors import SpecError
from syncline.parallel.partition import ModelProfile, pipedream
from syncline.planner.profile import LayerFlops, TrainingProfile, profile_training
from syncline.workloads import build


@pytest.fixture(scope="module")
def profile() -> TrainingProfile:
    return profile_training(build("digits"), batch=8, repeats=1)


def test_flops_are_those_of_the_matrix_products(profile: TrainingProfile) -> None:
    names = dict(zip(profile.layers.names, profile.flops, strict=True))
    counted = [flops for flops in names.values() if flops.total]
    first, last = 2 * 8 * 64 * 64, 2 * 8 * 64 * 10
    # The first layer has no gradient of its input.
    assert counted == [LayerFlops(first, first), LayerFlops(last, 2 * last)]
    assert profile.total_flops == 2 * first + 3 * last


def test_workload_and_machine_are_in_the_profile(profile: TrainingProfile) -> None:
    parameters = 64 * 64 + 64 + 64 * 10 + 10
    assert profile.workload == "digits"
    assert profile.layers.measured_batch_sizes == (4, 8)
    assert (profile.optimizer.name, profile.optimizer.state_bytes) == ("momentum", 4 * parameters)
    assert profile.sample_bytes == 64 * 4 + 8
    assert profile.memory.input_bytes == (4 * profile.sample_bytes, 8 * profile.sample_bytes)
    assert profile.update_s > 0
    assert profile.samples_per_s > 0
    assert profile.step_s > profile.layers.seconds
    assert profile.threads == torch.get_num_threads()
    assert not profile.differences()


def test_file_has_all_and_partitioners_read_its_layers(profile: TrainingProfile, tmp_path: Path) -> None:
    profile.write(tmp_path / "profile.json")
    assert TrainingProfile.read(tmp_path / "profile.json") == profile
    layers = ModelProfile.read(tmp_path / "profile.json")
    assert layers == profile.layers
    assert pipedream(layers, 2, 1e9, overlap=True).prediction is not None


def test_another_version_is_told(profile: TrainingProfile) -> None:
    old = replace(profile, torch_version="1.0", threads=64)
    assert [each.partition(",")[0] for each in old.differences()] == ["torch 1.0", "threads 64"]


def test_a_profile_of_another_model_is_refused(profile: TrainingProfile) -> None:
    profile.check_model(build("digits").model(seed=3))
    wider = nn.Sequential(nn.Linear(64, 100), nn.Linear(100, 10))
    with pytest.raises(SpecError, match=r"of another model: .* has 4096 elements, and this Sequential has 1000"):
        profile.check_model(wider)
    same_names = build("digits").model()
    next(each for each in same_names.modules() if isinstance(each, nn.Linear)).bias = nn.Parameter(torch.zeros(65))
    with pytest.raises(SpecError, match=r"it has 64 elements, and this .* has 65"):
        profile.check_model(same_names)


def test_optimizer_batch_sizes_and_layers_can_be_chosen() -> None:
    found = profile_training(
        build("digits"), batch=2, batch_sizes=(3, 12), optimizer="adam", names=["1", "3"], repeats=1
    )
    assert found.layers.names == ("1", "3")
    assert found.memory.batch_sizes == (3, 12)
    assert found.layers.batch_size == 2
    assert found.optimizer.state_bytes == 2 * 4 * 4810 + 4 * 4


SCRIPT = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.b(self.b(self.a(x)))
def model():
    return Net()
def data():
    return [(torch.randn(n, 2), torch.randn(n, 4)) for n in (12, 4, 4)]
def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()
"""


def test_a_script_without_output_loss_is_measured(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("self.b(self.b(self.a(x)))", "self.b(self.a(x))"))
    found = profile_training(build(str(tmp_path / "train.py")), repeats=1)
    assert found.layers.names == ("a", "b")
    assert found.layers.batch_size == 32  # of 12 samples, repeated


def test_a_model_without_modules_inside_is_one_layer() -> None:
    workload = build("regression(features=4, samples=64)")
    found = profile_training(workload, batch=8, repeats=1)
    assert found.layers.names == ("model",)
    assert found.layers.model == "Linear"
    found.check_model(workload.model())
    assert found.flops[0].forward == 2 * 8 * 4


def test_a_model_whose_layers_are_called_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(SpecError, match=r"train\.py: layer 'b' is called 2 times in forward"):
        profile_training(build(str(tmp_path / "train.py")), repeats=1)


def test_a_step_that_fails_is_named_with_its_batch_sizes(tmp_path: Path) -> None:
    normed = SCRIPT.replace("self.b(self.b(self.a(x)))", "self.norm(self.b(self.a(x)))")
    normed = normed.replace("self.a, self.b =", "self.norm = nn.BatchNorm1d(4)\n        self.a, self.b =")
    (tmp_path / "train.py").write_text(normed)
    with pytest.raises(SpecError, match=r"the batch sizes 1 and 2 fails: Expected more than 1 value"):
        profile_training(build(str(tmp_path / "train.py")), batch=2, batch_sizes=(1, 2), repeats=1)


def without_training(document: dict[str, Any]) -> None:
    del document["training"]


def other_layers(document: dict[str, Any]) -> None:
    document["training"]["layers"][0]["name"] = "x"


def one_batch_size(document: dict[str, Any]) -> None:
    document["measured_batch_sizes"] = [8]


def three_numbers(document: dict[str, Any]) -> None:
    document["training"]["layers"][0]["forward_bytes"].append(1)


def negative(document: dict[str, Any]) -> None:
    document["training"]["update_s"] = -1


def unknown_key(document: dict[str, Any]) -> None:
    document["training"]["flop"] = 1


def other_version(document: dict[str, Any]) -> None:
    document["version"] = 2


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without_training, "neither FLOPs nor memory nor an optimizer: write one by syncline profile"),
        (other_layers, "it was edited; measure again"),
        (one_batch_size, "a profile of a training step has two"),
        (three_numbers, "has 3 numbers; it must have two"),
        (negative, "'update_s' is -1; it must be a number, at least 0"),
        (unknown_key, "unknown key 'flop'"),
        (other_version, "'version' is 2; this release reads version 1"),
    ],
)
def test_wrong_files(profile: TrainingProfile, tmp_path: Path, edit: Any, words: str) -> None:
    path = tmp_path / "profile.json"
    profile.write(path)
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    with pytest.raises(SpecError) as refusal:
        TrainingProfile.read(path)
    assert words in str(refusal.value)
    assert "profile.json" in str(refusal.value)
