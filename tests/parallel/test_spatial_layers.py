"""Each layer on strips of images equals the layer on whole images: outputs, gradients and running statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import syncline as sl
from syncline.errors import IncompatibleError
from syncline.parallel.spatial_layers.halos import received_rows
from syncline.parallel.spatial_layers.windows import RowWindow
from syncline.world import World
from tests.pairwise import parametrize_pairwise
from tests.parallel.divided_images import check_equal, divide, images, seeded

AXES = ("height", "width")
WORKERS = (1, 2, 3, 4)


@parametrize_pairwise(
    workers=WORKERS,
    kernel=(1, 3, 5, 7),
    stride=(1, 2, 3),
    dilation=(1, 2),
    padding=("none", "half", "more"),
    axis=AXES,
    shape=((23, 25), (24, 29)),
)
def test_convolution(
    workers: int, kernel: int, stride: int, dilation: int, padding: str, axis: str, shape: tuple[int, int]
) -> None:
    half = dilation * (kernel - 1) // 2
    pad = {"none": 0, "half": half, "more": half + 2}[padding]
    layer = seeded(lambda: nn.Conv2d(2, 4, kernel, stride, pad, dilation, groups=1 + kernel % 4 // 3))
    check_equal(layer, images(2, 2, *shape), workers, axis=axis, steps=10)


@parametrize_pairwise(
    workers=(2, 3, 4),
    kernel=(1, 2, 3, 5),
    stride=(1, 2, 3),
    dilation=(1, 2),
    extra=(0, 1),
    padding=(0, 1),
    axis=AXES,
)
def test_transposed_convolution(
    workers: int, kernel: int, stride: int, dilation: int, extra: int, padding: int, axis: str
) -> None:
    if extra >= max(stride, dilation):
        extra = 0
    layer = seeded(lambda: nn.ConvTranspose2d(2, 3, kernel, stride, padding, extra, dilation=dilation))
    check_equal(layer, images(1, 2, 7, 9), workers, axis=axis)


@parametrize_pairwise(
    workers=WORKERS,
    kind=("max", "average", "average of the image", "divisor"),
    kernel=(2, 3, 4),
    stride=(1, 2, 3),
    padding=(0, 1),
    ceil=(False, True),
    axis=AXES,
    length=(13, 16),
)
def test_pooling(
    workers: int, kind: str, kernel: int, stride: int, padding: int, ceil: bool, axis: str, length: int
) -> None:
    kinds: dict[str, Callable[[], nn.Module]] = {
        "max": lambda: nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil),
        "average": lambda: nn.AvgPool2d(kernel, stride, padding, ceil),
        "average of the image": lambda: nn.AvgPool2d(kernel, stride, padding, ceil, count_include_pad=False),
        "divisor": lambda: nn.AvgPool2d(kernel, stride, padding, ceil, divisor_override=5),
    }
    check_equal(kinds[kind](), images(2, 2, length, length + 2) - 3, workers, axis=axis)  # below zero: padding is not


def test_the_output_rows_are_those_of_torch() -> None:
    for length in range(5, 14):
        for kernel, stride, padding, ceil in [
            (k, s, q, c) for k in (2, 3) for s in (1, 2, 3) for q in (0, 1) for c in (0, 1)
        ]:
            window = RowWindow(kernel, stride, padding, padding, ceil=bool(ceil))
            found = functional.max_pool1d(torch.zeros(1, 1, length), kernel, stride, padding, ceil_mode=bool(ceil))
            assert window.length(length) == found.shape[-1]


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "batch norm, average of all steps": lambda: nn.BatchNorm2d(4, momentum=None),
    "batch norm without a weight": lambda: nn.BatchNorm2d(4, affine=False),
    "batch norm without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "local response norm": lambda: nn.LocalResponseNorm(3),
}


@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm: str) -> None:
    """The running statistics are among the tensors that are compared after three steps."""
    layer = seeded(NORMS[norm])
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1.0)
    for workers, axis in ((2, "height"), (4, "width")):
        check_equal(layer, 3 + images(3, 4, 9, 7), workers, axis=axis, steps=3)


def test_batch_norm_of_values_far_from_zero() -> None:
    """The mean of the squares minus the square of the mean would lose all digits."""
    layer, x = nn.BatchNorm2d(2, momentum=1.0), 1e4 + images(3, 2, 9, 7).float()
    expected = copy.deepcopy(layer)(x)

    def work(world: World) -> tuple[Tensor, Tensor]:
        divided, _ = divide(layer, world)
        return divided(x), divided.get_buffer("running_var")

    for found, variance in sl.simulate(work, 3).results:
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-3)
        torch.testing.assert_close(variance, x.double().var((0, 2, 3)).float(), rtol=1e-4, atol=0)


SINGLE: dict[str, nn.Module] = {
    "conv1d": nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.MaxPool1d(2)),
    "same, even kernel": nn.Conv2d(4, 4, (4, 2), padding="same"),
    "valid": nn.Conv2d(4, 4, (3, 2), padding="valid", bias=False),
    "prelu": nn.PReLU(4),
    "pixel shuffle": nn.Sequential(nn.PixelShuffle(2), nn.Conv2d(1, 4, 3), nn.Tanh()),
    "pixel unshuffle": nn.Sequential(nn.ZeroPad2d((1, 0, 1, 0)), nn.PixelUnshuffle(2)),
    "pad and crop": nn.Sequential(nn.ZeroPad2d((3, 0, -2, 5)), nn.ConstantPad2d((-1, 2, 1, 1), 0.5)),
    "nearest": nn.Upsample(scale_factor=2),
    "nearest to a size": nn.Upsample(size=(33, 26)),
    "bilinear": nn.Upsample(scale_factor=(3, 3), mode="bilinear"),
    "global average": nn.AdaptiveAvgPool2d(1),
    "average of rows": nn.AdaptiveAvgPool2d((1, None)),
    "average to a size": nn.AdaptiveAvgPool2d((3, 2)),
    "global maximum": nn.AdaptiveMaxPool2d(1),
    "pool of the whole image": nn.AvgPool2d((11, 13)),
    "flatten and linear": nn.Sequential(nn.Conv2d(4, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(198, 3)),
    "softmax over channels": nn.Softmax2d(),
    "circular in the other dimension": nn.Conv2d(4, 4, (1, 3), padding=(0, 1), padding_mode="circular"),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", SINGLE)
def test_other_layers(case: str) -> None:
    layer = copy.deepcopy(SINGLE[case]).double()
    axes = ("width",) if case == "conv1d" else ("height",) if "other" in case else AXES
    for axis, workers in zip(axes, (3, 2), strict=False):
        check_equal(layer, images(2, 4, 11, 13), workers, axis=axis)


def test_conv1d_has_no_height() -> None:
    def work(world: World) -> None:
        divide(nn.Conv1d(4, 4, 3), world)[0](torch.zeros(2, 4, 11))

    with pytest.raises(IncompatibleError, match="conv1d has no height"):
        sl.simulate(work, 2)


def test_conv3d() -> None:
    layer = seeded(lambda: nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.MaxPool3d(2), nn.AdaptiveAvgPool3d(1)))
    check_equal(layer, images(1, 2, 4, 9, 8), 3)


class Functions(nn.Module):
    """Code between layers: sizes, views, slices, and tensors that every worker has."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.place = nn.Parameter(torch.randn(1, 8, height, width))
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)
        self.factor = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.first(x) + self.place
        gate = self.excite(functional.relu(self.squeeze(x.mean((2, 3), keepdim=True)), inplace=True))
        x = 1 + x * torch.sigmoid(gate) * self.factor
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, -1, h, w)  # a shuffle of channels
        x = self.mix(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        one, two = x.chunk(2, 1)
        x = torch.cat([one * 2, torch.where(two > 0, two, -two), x[:, 1:3]], dim=1)
        x += x.sum(1, keepdim=True)
        return x[..., 1:9, 2:-1], {"mean": x.flatten(2).mean(-1), "sum": x.sum()}


class WithFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.region = Functions(11, 13)

    def forward(self, x: Tensor) -> Tensor:
        cropped, others = self.region(x)
        output: Tensor = cropped.mean((2, 3)) + others["mean"] + others["sum"] / 100
        return output


@pytest.mark.parametrize("axis", AXES)
def test_functions_between_layers(axis: str) -> None:
    check_equal(seeded(WithFunctions), images(2, 3, 11, 13), 3, ["region"], axis)


def test_halos_are_received_from_all_owners() -> None:
    """A kernel that is larger than the strips of several workers."""
    edges = [0, 2, 4, 6, 8]
    needs = [RowWindow(7, before=3, after=3).rows(*rows) for rows in pairwise(edges)]
    assert list(received_rows(edges, needs, 1)) == [(0, 0, 2), (2, 4, 6), (3, 6, 7)]
    check_equal(seeded(lambda: nn.Conv2d(2, 2, 7, padding=3)), images(1, 2, 8, 9), 4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, 1e-6)])
def test_other_types_of_numbers(dtype: torch.dtype, tolerance: float) -> None:
    layer = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).to(
        dtype
    )
    x = images(2, 2, 9, 8).to(dtype)
    expected = copy.deepcopy(layer)(x)

    def work(world: World) -> Tensor:
        found: Tensor = divide(layer, world)[0](x)
        return found

    def autocast(world: World) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = divide(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), world)[0](x.float())
        torch.autograd.backward(found.float().sum())
        return found

    assert {found.dtype for found in sl.simulate(autocast, 2).results} == {torch.bfloat16}
    for found in sl.simulate(work, 3).results:
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@parametrize_pairwise(kernel=(1, 3, 5), stride=(1, 2), axis=AXES)
def test_bytes_of_halos(kernel: int, stride: int, axis: str) -> None:
    """k − s rows cross each edge if the strips of the output fit to those of the input. Their gradients go back."""
    x = images(2, 3, 12, 12)
    layer = seeded(lambda: nn.Conv2d(3, 4, kernel, stride, kernel // 2, bias=False))
    teams = check_equal(layer, x, 3, axis=axis)
    row = 2 * 3 * 12 * 8
    output = 12 // stride
    rows = 2 * max(kernel - stride, 0)
    beginning = math.prod(x.shape) * 8  # the gradient of the images is gathered
    end = 2 * 4 * output * output * 8
    weight = layer.get_parameter("weight").numel() * 8
    assert sum(team.sent_bytes for team in teams) == 2 * rows * row + beginning + end + 3 * weight
    for team in teams:
        swaps = {"swap": 2} if kernel > stride else {}
        assert team.calls == {"allgather": 2, "allreduce": 1, **swaps}
