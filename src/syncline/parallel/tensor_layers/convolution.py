"""Convolutions divided by their output channels, by their input channels, or by their groups.

AlexNet on two workers:

```text
            conv1          conv2     conv3             conv4     conv5
worker 0    channels_out   groups ─┐ channels_out ──── groups    groups
worker 1    channels_out   groups ─┴ channels_out ──── groups    groups
                                   gather
```

Krizhevsky et al. 2012, "ImageNet Classification with Deep Convolutional Neural Networks".
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from syncline.errors import IncompatibleError
from syncline.model_parts import DimensionSlice
from syncline.parallel.division import LayerDivision, Share, divide_class, restore_class
from syncline.parallel.team import LayerTeam, copy_to_team, gather, sum_over_team, take_own_part
from syncline.parallel.tensor_layers.linear import check_length, check_plain, own_range

__all__ = [
    "ChannelNorm",
    "ChannelNormDivision",
    "GroupConvolution",
    "GroupsDivision",
    "InputChannelConvolution",
    "InputChannelsDivision",
    "OutputChannelConvolution",
    "OutputChannelsDivision",
]


class OutputChannelConvolution:
    """A convolution of which each worker computes some output channels."""

    tensor_team: LayerTeam
    tensor_division: OutputChannelsDivision

    def forward(self, x: Tensor) -> Tensor:
        team, division = self.tensor_team, self.tensor_division
        if not team.active:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        output: Tensor = super().forward(copy_to_team(x, team))  # type: ignore[misc]
        if not division.gathers:
            return output
        return gather(output, team, division.channel_dim(output), team.lengths(division.layer.out_channels))


class InputChannelConvolution:
    """A convolution of which each worker uses some input channels; the workers sum their outputs."""

    tensor_team: LayerTeam
    tensor_division: InputChannelsDivision

    def forward(self, x: Tensor) -> Tensor:
        team, division = self.tensor_team, self.tensor_division
        if not team.active:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        layer: Any = self
        own = division.own_input(x, team, layer.weight.shape[1])
        output: Tensor = sum_over_team(layer._conv_forward(own, layer.weight, None), team)
        bias: Tensor | None = layer.bias
        ones = [1] * (layer.weight.dim() - 2)
        return output if bias is None else output + bias.to(output.dtype).view(-1, *ones)


class GroupConvolution:
    """A convolution of which each worker computes some groups of channels."""

    tensor_team: LayerTeam
    tensor_division: GroupsDivision

    @property
    def groups(self) -> int:
        """The number of groups of this worker."""
        whole: int = vars(self)["groups"]
        return whole // self.tensor_team.size if self.tensor_team.active else whole

    @groups.setter
    def groups(self, value: int) -> None:
        vars(self)["groups"] = value

    def forward(self, x: Tensor) -> Tensor:
        team, division = self.tensor_team, self.tensor_division
        if not team.active:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        own = division.own_input(x, team, division.layer.in_channels // team.size)
        output: Tensor = super().forward(own)  # type: ignore[misc]
        return gather(output, team, division.channel_dim(output)) if division.gathers else output


class ChannelNorm:
    """A normalisation of channels, of which each worker has some."""

    tensor_team: LayerTeam

    @property
    def num_groups(self) -> int:
        """The number of groups of this worker, for group normalisation."""
        whole: int = vars(self)["num_groups"]
        return whole // self.tensor_team.size if self.tensor_team.active else whole


class ConvolutionDivision(LayerDivision):
    """The base of the divisions of convolutions."""

    def __init__(self, name: str, module: nn.Module, *, gathers: bool = False, slices_input: bool = False) -> None:
        super().__init__(name, module)
        self.gathers, self.slices_input = gathers, slices_input

    @property
    def layer(self) -> Any:
        """The convolution."""
        return self.module

    def channel_dim(self, x: Tensor) -> int:
        """The dimension of the channels, with and without a batch."""
        weight: Tensor = self.layer.weight
        return x.dim() - weight.dim() + 1

    def own_input(self, x: Tensor, team: LayerTeam, channels: int) -> Tensor:
        """The channels of the input that this worker uses."""
        dim = self.channel_dim(x)
        if self.slices_input:
            x = take_own_part(x, team, dim)
        if x.shape[dim] != channels:
            raise IncompatibleError(
                f"{self.name} is divided by its input channels: worker {team.rank} of {team.size} has {channels} of "
                f"{vars(self.layer)['in_channels']} and got {x.shape[dim]}. Divide the convolution before it by "
                "'channels_out' or 'groups', or write 'slice+' before the role if the input is whole"
            )
        return x

    def detach(self) -> None:
        restore_class(self.module, "tensor_team", "tensor_division")

    def _slices(self, rank: int, size: int) -> dict[str, DimensionSlice]:
        """Slices of the tensors that have a row for each output channel."""
        cut = DimensionSlice(0, (own_range(self.layer.out_channels, rank, size),), self.layer.out_channels)
        return dict.fromkeys(["weight"] if self.layer.bias is None else ["weight", "bias"], cut)

    def _check_no_groups(self, role: str) -> None:
        if self.layer.groups > 1:
            raise IncompatibleError(
                f"{self.name} has {self.layer.groups} groups of channels: divide it by 'groups', not by {role!r}"
            )


class OutputChannelsDivision(ConvolutionDivision):
    """A convolution divided by its output channels."""

    def check(self, size: int) -> None:
        check_plain(self.name, self.module, "weight")
        self._check_no_groups("channels_out")
        check_length(self.name, self.layer.out_channels, size, "output channels")

    def share(self, rank: int, size: int) -> Share:
        return Share(self._slices(rank, size))

    def attach(self, team: LayerTeam) -> None:
        divide_class(self.module, OutputChannelConvolution, tensor_team=team, tensor_division=self)


class InputChannelsDivision(ConvolutionDivision):
    """A convolution divided by its input channels."""

    def check(self, size: int) -> None:
        check_plain(self.name, self.module, "weight")
        self._check_no_groups("channels_in")
        check_length(self.name, self.layer.in_channels, size, "input channels")

    def share(self, rank: int, size: int) -> Share:
        inputs = self.layer.in_channels
        return Share({"weight": DimensionSlice(1, (own_range(inputs, rank, size),), inputs)})

    def attach(self, team: LayerTeam) -> None:
        divide_class(self.module, InputChannelConvolution, tensor_team=team, tensor_division=self)


class GroupsDivision(ConvolutionDivision):
    """A convolution divided by its groups: each worker has the input and output channels of its groups."""

    def check(self, size: int) -> None:
        check_plain(self.name, self.module, "weight")
        if self.layer.groups % size:
            raise IncompatibleError(
                f"{self.name} has groups={self.layer.groups}, which cannot be divided over {size} workers"
            )

    def share(self, rank: int, size: int) -> Share:
        return Share(self._slices(rank, size))

    def attach(self, team: LayerTeam) -> None:
        divide_class(self.module, GroupConvolution, tensor_team=team, tensor_division=self)


class ChannelNormDivision(LayerDivision):
    """Batch normalisation and group normalisation of divided channels. They are exact: each channel, or each group of
    channels, is normalised by itself."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.channels = int(getattr(module, "num_features", 0) or getattr(module, "num_channels", 0))

    def check(self, size: int) -> None:
        check_length(self.name, self.channels, size, "channels")
        groups = getattr(self.module, "num_groups", None)
        if isinstance(groups, int) and groups % size:
            raise IncompatibleError(f"{self.name} has num_groups={groups}, which cannot be divided over {size} workers")

    def share(self, rank: int, size: int) -> Share:
        cut = DimensionSlice(0, (own_range(self.channels, rank, size),), self.channels)
        names = ("weight", "bias", "running_mean", "running_var")
        return Share({name: cut for name in names if getattr(self.module, name, None) is not None})

    def attach(self, team: LayerTeam) -> None:
        mixin = ChannelNorm if isinstance(self.module, nn.GroupNorm) else _NoChange
        divide_class(self.module, mixin, tensor_team=team)

    def detach(self) -> None:
        restore_class(self.module, "tensor_team")


class _NoChange:
    """A layer whose own forward is right for some channels."""
