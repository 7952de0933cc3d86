"""Regions of a model on strips of images: training, modes, copies, bytes and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import syncline as sl
from syncline.errors import IncompatibleError, SpecError
from syncline.parallel.spatial_layers import SpatialDivision, spatial_divisions
from syncline.testing import Pool
from syncline.testing.hunting import hunt_cases
from syncline.world import World
from tests.hunting import seeds
from tests.parallel.divided_images import Result, check_equal, compare, compute, divide, images, seeded
from tests.strategies.cases import on_gloo


class Block(nn.Module):
    """A block of a residual network; its shortcut has the stride of the block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        output: Tensor = self.relu(y)
        return output


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 7, 2, 3), nn.MaxPool2d(3, 2, 1), Block(4, 4, 1), Block(4, 8, 2), nn.Conv2d(8, 8, 3, 1, 1)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(functional.relu(self.features(x), inplace=True).mean((2, 3)))
        return output


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 5, padding=2)
        ),
        nn.AdaptiveAvgPool2d((2, 2)),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


@pytest.mark.parametrize(
    ("workers", "regions", "axis"),
    [
        (2, ["features"], "height"),
        (3, [""], "width"),
        (4, ["features"], "width"),
        (3, ["features.2", "features.3"], "height"),
    ],
)
def test_a_residual_network(workers: int, regions: list[str], axis: str) -> None:
    check_equal(seeded(ResNet), images(2, 3, 33, 41), workers, regions, axis, steps=2)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_ten_steps_of_a_small_network(workers: int) -> None:
    check_equal(seeded(cnn), images(3, 2, 13, 9), workers, ["0"], steps=10)
    check_equal(seeded(cnn).float(), images(3, 2, 13, 9).float(), workers, ["0"], steps=10, tolerance=1e-5)


class Repeated(nn.Module):
    """A layer that is called several times, on images of different sizes; a frozen one; a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.frozen, self.shared = (
            nn.Conv2d(2, 2, 3, padding=1),
            nn.MaxPool2d(2),
            nn.Conv2d(2, 2, 3).requires_grad_(False),
            nn.Conv2d(2, 2, 3),
        )
        self.shared.weight = self.conv.weight

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        large = self.conv(self.conv(x))
        small = self.conv(self.pool(large))
        output: Tensor = self.shared(self.frozen(functional.interpolate(small, size=large.shape[2:]) + large))
        return output if scale is None else output * scale


def test_layers_that_are_called_several_times() -> None:
    model = nn.Sequential(Repeated(), nn.Conv2d(2, 1, 1)).double()
    check_equal(model, images(2, 2, 14, 12), 3, ["0"], steps=2)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(Block(3, 4, 2), nn.AvgPool2d(3, 1, 1, count_include_pad=False))
        self.last, self.reentrant = nn.Conv2d(4, 2, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(checkpoint(self.block, x, use_reentrant=self.reentrant))
        return output


def test_activations_that_are_computed_again() -> None:
    model = seeded(lambda: Checkpointed(False))
    for name in list(model.state_dict()):  # computing again updates running statistics, with and without strips
        assert "running" not in name or model.get_buffer(name) is not None
    check_equal(model, images(2, 3, 15, 11), 3)
    with pytest.raises(IncompatibleError, match="use_reentrant=False"):
        check_equal(seeded(lambda: Checkpointed(True)), images(2, 3, 15, 11), 3)


def test_evaluation_copies_and_switches() -> None:
    model, x = seeded(ResNet), images(2, 3, 33, 41)
    model(x)
    model.eval()
    expected = model(x)

    def work(world: World) -> list[Tensor]:
        divided, team = divide(model, world, ["features"])
        with torch.no_grad():
            found = [divided(x), copy.deepcopy(divided)(x)]
        with torch.inference_mode():
            found.append(divided(x).clone())
        swaps = team.calls["swap"]
        team.divided = False
        found.append(divided(x))
        assert team.calls["swap"] == swaps > 0
        return [each.detach() for each in found]

    for results in sl.simulate(work, 3).results:
        for found in results:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_detach_makes_the_module_that_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU())
    before = set(vars(model[0]))

    def work(world: World) -> Any:
        division = spatial_divisions(model, ["0"], size=world.size)[0]
        assert division.share(0, 2).slices == {}
        division.attach(sl.parallel.team.LayerTeam(world.group()))
        assert type(model[0]) is not nn.Conv2d
        assert isinstance(model[0], nn.Conv2d)
        division.detach()

    sl.simulate(work, 1)
    assert type(model[0]) is nn.Conv2d
    assert set(vars(model[0])) == before


def test_a_part_of_a_region_is_not_divided() -> None:
    def work(world: World) -> Tensor:
        divided, _ = divide(seeded(cnn), world, ["0"])
        part = divided.get_submodule("0")
        assert isinstance(part, nn.Sequential)
        found: Tensor = part[:2](images(3, 2, 13, 9))
        return found

    expected = seeded(cnn).get_submodule("0")[:2](images(3, 2, 13, 9))  # type: ignore[index]
    for found in sl.simulate(work, 2).results:
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_channels_last_and_compiled_models() -> None:
    model, x = seeded(ResNet), images(2, 3, 33, 41).to(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check_equal(model, x, 2, ["features"])
    expected = compute(copy.deepcopy(model), x)

    def work(world: World) -> tuple[Result, bool]:
        divided, _ = divide(model, world, ["features"])
        order = divided.get_submodule("features")(x).is_contiguous(memory_format=torch.channels_last)
        divided, _ = divide(model, world, ["features"])
        compiled: Any = torch.compile(divided, backend="eager")
        found = compute(compiled, x)
        return {name.replace("_orig_mod.", ""): value for name, value in found.items()}, order

    for found, order in sl.simulate(work, 2).results:
        assert order
        compare(found, expected)


def test_dropout_has_a_stream_of_its_own() -> None:
    """Masks differ between strips, whole channels are dropped alike, and torch's global stream remains the same."""
    rows = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Dropout(0.5)).double()
    channels = nn.Sequential(nn.Conv2d(1, 64, 1), nn.Dropout2d(0.5, inplace=True)).double()
    x = torch.ones(2, 1, 12, 30, dtype=torch.float64)

    def work(world: World) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(3)
        first = divide(rows, world)[0](x)
        second = divide(channels, world)[0](x)
        return (first == 0), (second == 0), torch.rand(3)

    results = sl.simulate(work, 3).results
    for first, second, after in results:
        assert torch.equal(first, results[0][0])
        assert torch.equal(after, results[0][2])
        assert 0.4 < first.double().mean() < 0.6
        assert not torch.equal(first[:, :, :4], first[:, :, 4:8])
        assert 0.3 < second.double().mean() < 0.7
        assert torch.equal(second, second[:, :, :1, :1].expand_as(second))
    check_equal(copy.deepcopy(rows).eval(), x, 3)


def test_other_inputs_of_a_region() -> None:
    """Tensors of other shapes are whole on every worker. Their gradients are summed."""
    model = seeded(Repeated)
    x, scale = images(2, 2, 14, 12), images(2, 1, 1).requires_grad_()
    expected = torch.autograd.grad(model(x, scale=scale).square().sum(), scale)[0]

    def work(world: World) -> Tensor:
        own = scale.detach().clone().requires_grad_()
        return torch.autograd.grad(divide(model, world)[0](x, scale=own).square().sum(), own)[0]

    for found in sl.simulate(work, 3).results:
        torch.testing.assert_close(found, expected)


@pytest.mark.hunt
def test_no_order_of_messages_deadlocks() -> None:
    """Sends wait until their receives are posted."""
    model, x = seeded(lambda: nn.Sequential(Block(2, 2, 2), nn.Conv2d(2, 2, 5, padding=2))), images(1, 2, 9, 8)
    expected = compute(copy.deepcopy(model), x)
    network = sl.Network(latency=0.0005, bandwidth=1e9, eager=0)

    def check(seed: int) -> None:
        def work(world: World) -> Result:
            return compute(divide(model, world)[0], x)

        for found in sl.simulate(work, 2 + seed % 3, network, seed=seed, chaos=True).results:
            compare(found, expected)

    hunt_cases(check, seeds(12, every=300), "test_no_order_of_messages_deadlocks, seed {seed}")


class Calls(nn.Module):
    """Calls a function of its input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "unknown function": (lambda x: torch.cummax(x, 1), "inner.0 .Calls.: cummax is not supported on images .* height"),
    "matrix product": (lambda x: x @ x, "__matmul__ is not supported|matmul is not supported"),
    "too few rows": (
        lambda x: functional.max_pool2d(x, 3),
        "output of max_pool2d has 2 in its height, fewer than the 3",
    ),
    "few rows": (lambda x: x[:, :, :2], "part of an image has 2"),
    "indices": (lambda x: functional.max_pool2d(x, 2, return_indices=True), "return_indices=True"),
    "reflect": (lambda x: functional.pad(x, (0, 0, 1, 1), "reflect"), "mode 'reflect' .* along the height"),
    "fraction": (lambda x: functional.interpolate(x, scale_factor=1.5), "from 8 to 12"),
    "aligned": (
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
        "align_corners",
    ),
    "softmax": (lambda x: x.softmax(2), "along dimension 2 .* height"),
    "other length": (lambda x: x + x[:, :, :5], "split differently: their lengths in the height are 8, 5"),
    "other tensor": (lambda x: x + torch.zeros(1, 2, 3, 8), r"gets a tensor \(1, 2, 3, 8\) and an image of 8"),
    "layer norm": (lambda x: functional.layer_norm(x, (8, 8)), r"over \(8, 8\) includes the height"),
    "instance norm": (
        lambda x: nn.InstanceNorm2d(2, track_running_stats=True)(x),
        "track_running_stats=True",
    ),
    "every second row": (lambda x: x[:, :, ::2], "slice"),
    "index": (lambda x: x[torch.tensor([0])], "index that is a tensor"),
    "numbers for values": (lambda x: functional.rrelu(x, training=True), "draws a number for each value"),
    "into a tensor": (lambda x: torch.zeros(1, 2, 8, 8).add_(x), "cannot write a strip"),
    "script": (lambda x: torch.ops.aten.relu(x), "relu"),
    "padding": (lambda x: functional.max_pool2d(x, 2, padding=2), "padding 2, which must be at most half"),
    "weight": (lambda x: functional.conv2d(torch.zeros(1, 2, 8, 8), x), "not as its first argument"),
    "unshuffle": (lambda x: functional.pixel_unshuffle(x[:, :, 1:], 2), "divisible by 2, not 7"),
    "same": (
        lambda x: functional.conv2d(x, torch.zeros(2, 2, 3, 3), stride=2, padding="same"),
        "padding='same' and stride .2, 2. does not exist",
    ),
    "output padding": (
        lambda x: functional.conv_transpose2d(x, torch.zeros(2, 2, 3, 3), output_padding=1),
        "output_padding 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_functions(case: str) -> None:
    function, message = REFUSED[case]
    model = nn.Sequential()
    model.add_module("inner", nn.Sequential(Calls(function)))

    def work(world: World) -> None:
        divide(model, world, ["inner"])[0](torch.ones(1, 2, 8, 8))

    with pytest.raises(IncompatibleError, match=message):
        sl.simulate(work, 3)


def test_refused_images() -> None:
    def call(*inputs: Any) -> None:
        sl.simulate(lambda world: divide(nn.Identity(), world)[0](*inputs), 4)

    with pytest.raises(IncompatibleError, match=r"an image \(1, 2, 3, 9\) has 3 in its height, fewer than the 4"):
        call(torch.zeros(1, 2, 3, 9))
    with pytest.raises(IncompatibleError, match="gets no image"):
        call(torch.zeros(2, 2))


def test_refused_regions() -> None:
    model = nn.Sequential()
    model.add_module("features", nn.Sequential(nn.Conv2d(2, 2, 3), nn.SyncBatchNorm(2)))
    model.add_module("blocks", nn.ModuleList([nn.Linear(2, 2)]))
    model.add_module("rnn", nn.LSTM(2, 2))
    model.add_module("lazy", nn.Sequential(nn.LazyConv2d(2, 3)))
    model.add_module("attention", nn.MultiheadAttention(2, 1))
    for regions, kind, message in [
        (["feature"], SpecError, "no module 'feature': did you mean 'features'"),
        ("features", SpecError, "give a list of names"),
        ([], SpecError, "give a list of names"),
        (["features", "features.0"], SpecError, "overlap"),
        (["features.0", ""], SpecError, "overlap"),
        (["blocks"], SpecError, "ModuleList, which is never called"),
        (["features"], IncompatibleError, r"features.1 \(SyncBatchNorm\) cannot work on strips"),
        (["rnn"], IncompatibleError, r"rnn \(LSTM\)"),
        (["lazy"], IncompatibleError, "no shape yet"),
        (["attention"], IncompatibleError, "every position needs all others"),
    ]:
        with pytest.raises(kind, match=message):
            spatial_divisions(model, regions, size=2)
    with pytest.raises(SpecError, match="not split along 'heigth': did you mean 'height'"):
        spatial_divisions(model, ["features"], "heigth")
    spatial_divisions(model, ["features"], size=1)  # one worker has whole images


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_refused_programs() -> None:
    with pytest.raises(IncompatibleError, match="TorchScript"):
        SpatialDivision("", nn.Sequential(torch.jit.script(nn.ReLU()))).check(2)
    compiled: Any = torch.compile(nn.ReLU())
    with pytest.raises(IncompatibleError, match="0 is compiled"):
        SpatialDivision("", nn.Sequential(compiled)).check(2)


def train_resnet(world: World) -> Result:
    return compute(divide(seeded(ResNet), world, ["features"])[0], images(2, 3, 33, 41), 2)


@pytest.mark.xdist_group("gloo")
def test_gloo_processes(gloo: Pool) -> None:
    expected = compute(seeded(ResNet), images(2, 3, 33, 41), 2)
    for found in gloo.run(on_gloo, 3, train_resnet):
        compare(found, expected)
