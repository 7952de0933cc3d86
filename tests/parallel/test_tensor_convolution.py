"""Convolutions divided by channels and by groups equal whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.errors import IncompatibleError
from syncline.parallel.tensor_layers.plan import plan_divisions
from syncline.world import World
from tests.pairwise import parametrize_pairwise
from tests.parallel.divided import assert_close, check_training, divide, numbers, seeded

CONVOLUTIONS: tuple[tuple[type[nn.Module], ...], ...] = (
    (nn.Conv1d, nn.BatchNorm1d),
    (nn.Conv2d, nn.BatchNorm2d),
    (nn.Conv3d, nn.BatchNorm3d),
)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.square().mean()


def stack(dims: int, kernel: int, stride: int, **options: Any) -> nn.Module:
    convolution, norm = CONVOLUTIONS[dims - 1]
    options |= {"kernel_size": kernel, "stride": stride, "padding": kernel // 2}
    return nn.Sequential(
        convolution(3, 7, **options),
        norm(7),
        nn.ReLU(inplace=True),
        convolution(7, 5, bias=False, **options),
        nn.ReLU(inplace=True),
        convolution(5, 4, **options),
    )


@parametrize_pairwise(
    kernel=[1, 3, 5, 7], stride=[1, 2], workers=[1, 2, 3, 4], dims=[1, 2, 3], padding_mode=["zeros", "circular"]
)
def test_divided_convolutions_train_as_whole_ones(
    kernel: int, stride: int, workers: int, dims: int, padding_mode: str
) -> None:
    size = {1: 14, 2: 9, 3: 8}[dims] if padding_mode == "zeros" else 16 if dims < 3 else 12
    steps = 10 if dims < 3 else 2
    plan = {"0": "channels_out", "1": "channels", "3": "channels_in", "5": "channels_out+gather"}
    check_training(
        seeded(lambda: stack(dims, kernel, stride, padding_mode=padding_mode)),
        plan,
        squares,
        numbers(steps, 2, 3, *[size] * dims),
        workers,
    )


def alexnet() -> nn.Module:
    """The convolutions of AlexNet, with few channels."""
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 6, 5, padding=2, groups=2), nn.ReLU(inplace=True)),
        *(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 4, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
    )


ALEXNET = {
    "0": "channels_out",
    "1": "channels",
    "3": "groups+gather",
    "5": "channels_out",
    "7": "groups",
    "8": "channels",
    "10": "groups+gather",
    "14": "columns",
    "16": "rows",
}


def test_alexnet_on_two_workers() -> None:
    check_training(seeded(alexnet), ALEXNET, squares, numbers(10, 2, 3, 8, 8), 2)


def test_alexnet_communicates_where_channels_are_exchanged() -> None:
    def work(world: World) -> tuple[dict[str, int], int]:
        divided = divide(world, alexnet(), ALEXNET)
        with torch.no_grad():
            divided.model(torch.ones(2, 3, 8, 8))
        return dict(divided.team.calls), divided.team.sent_bytes

    # 6 and 4 channels of 4 x 4, of which each worker has half; 3 outputs
    sent = 4 * 2 * (3 * 16 + 2 * 16 + 3)
    assert sl.simulate(work, 2).results == (({"allgather": 2, "allreduce": 1}, sent),) * 2


def test_groups_of_a_whole_input() -> None:
    make = seeded(lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.Conv1d(4, 12, 3, groups=4), nn.Conv1d(12, 12, 3)))
    plan = {"1": "slice+groups+gather", "2": "slice+channels_in"}
    for workers in (2, 4):
        check_training(make, plan, squares, numbers(3, 2, 4, 9), workers)


def test_convolutions_without_a_batch_and_restored() -> None:
    make = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3, groups=2)))

    def work(world: World) -> tuple[Tensor, int, int, bool]:
        divided = divide(world, make(), {"0": "channels_out", "1": "groups+gather"})
        layer: Any = divided.model.get_submodule("1")
        output = divided.model(numbers(1, 3, 8, 8)[0]).detach()
        groups = layer.groups
        divided.detach()
        return output, groups, layer.groups, type(layer) is nn.Conv2d

    whole = make()(numbers(1, 3, 8, 8)[0]).detach()
    for output, groups, restored, plain in sl.simulate(work, 2).results:
        assert_close(output, whole)
        assert (groups, restored, plain) == (1, 2, True)


REFUSED: dict[str, tuple[nn.Module, str, int, str]] = {
    "groups": (nn.Conv2d(6, 6, 1, groups=3), "groups", 2, r"0 has groups=3.*over 2 workers"),
    "outputs of groups": (nn.Conv2d(4, 4, 1, groups=2), "channels_out", 2, "0 has 2 groups.*'groups', not"),
    "inputs of groups": (nn.Conv2d(4, 4, 1, groups=2), "channels_in", 2, "0 has 2 groups.*'groups', not"),
    "few channels": (nn.Conv2d(2, 4, 1), "channels_in", 3, "0 has 2 input channels.*over 3"),
    "few outputs": (nn.Conv2d(2, 2, 1), "channels_out", 3, "0 has 2 output channels.*over 3"),
    "groups of a norm": (nn.GroupNorm(3, 6), "channels", 2, "num_groups=3.*over 2"),
    "transposed": (nn.ConvTranspose2d(2, 2, 1), "channels_out", 2, "ConvTranspose2d, and the role"),
    "a linear layer": (nn.Linear(2, 2), "channels_in", 2, "Linear, and the role"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_convolutions_that_cannot_be_divided_are_refused(case: str) -> None:
    module, role, size, message = REFUSED[case]
    with pytest.raises(IncompatibleError, match=message):
        plan_divisions(nn.Sequential(module), {"0": role}, size)


def test_a_whole_input_of_divided_channels_is_refused() -> None:
    def work(world: World) -> None:
        divide(world, nn.Sequential(nn.Conv1d(6, 2, 1)), {"0": "channels_in"}).model(torch.ones(1, 6, 4))

    with pytest.raises(IncompatibleError, match=r"worker . of 2 has 3 of 6 and got 6.*slice"):
        sl.simulate(work, 2)
