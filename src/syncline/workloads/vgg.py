"""A network in the form of VGG (Simonyan and Zisserman, 2015) for small images: its dense layers have most weights.

```text
image   conv conv pool   conv conv pool   conv conv pool   flatten   dense   dense   dense
        └── width ───┘   └─ 2·width ──┘   └─ 4·width ──┘             └──── dense ───┘ └ 10 classes
```

The convolutions compute most, and the dense layers hold most weights. So data parallelism sends much for little work:
the case for which PipeDream gives the convolutions to many workers and the dense layers to one.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from syncline.workloads.base import Defaults, Pairs, Splits, Workload, check_choice, check_whole, seeded
from syncline.workloads.classification import Classification
from syncline.workloads.digits import Digits
from syncline.workloads.fashion import Fashion

__all__ = ["VGG", "resized"]

BLOCKS = 3
"""Blocks of two convolutions and a pooling, each with twice the channels of the one before."""
CLASSES = 10
DEFAULT_SIDES = {"digits": 16, "fashion": 28}
MAX_RESIZED_IMAGES = 4096


class VGG(Classification):
    """Digits or clothes, scaled to `side` pixels.

    >>> VGG(dense=256)
    vgg(dense=256)
    """

    name = "vgg"

    def __init__(self, data: str = "digits", side: int | None = None, width: int = 16, dense: int = 1024) -> None:
        self.data = check_choice(self.name, "data", data, DEFAULT_SIDES)
        self.side = DEFAULT_SIDES[data] if side is None else check_whole(self.name, "side", side, 2**BLOCKS, 256)
        self.width = check_whole(self.name, "width", width, 1, 512)
        self.dense = check_whole(self.name, "dense", dense, 1, 16_384)
        super().__init__(data=data, side=side, width=width, dense=dense)

    @property
    def defaults(self) -> Defaults:
        """SGD with momentum at a constant rate."""
        if self.data == "digits":
            return Defaults(batch=32, epochs=10, learning_rate=0.01, momentum=0.9, target=0.96)
        return Defaults(batch=64, epochs=2, learning_rate=0.01, momentum=0.9)

    def model(self, seed: int = 0) -> nn.Module:
        """Weights as He et al. (2015) draw them. It has no dropout and no batch norm, so that each division of a batch
        gives the same gradients."""
        with seeded(seed):
            return _vgg(self.side, self.width, self.dense)

    def make_splits(self) -> Splits:
        """Those of `digits` or `fashion`."""
        source: Workload = Digits() if self.data == "digits" else Fashion()
        return Splits(*(resized(split, self.side) for split in vars(source.splits()).values()))


def _vgg(side: int, width: int, dense: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    before, after = 1, width
    for _ in range(BLOCKS):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(after, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        before, after = after, 2 * after
    flat = before * (side // 2**BLOCKS) ** 2
    classifier = [nn.Linear(flat, dense), nn.ReLU(), nn.Linear(dense, dense), nn.ReLU(), nn.Linear(dense, CLASSES)]
    model = nn.Sequential(
        OrderedDict(features=nn.Sequential(*layers), flatten=nn.Flatten(), classifier=nn.Sequential(*classifier))
    )
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return model


def resized(pairs: Pairs, side: int) -> Pairs:
    """The same images with another number of pixels; bytes stay bytes."""
    if pairs.inputs.shape[-1] == side:
        return pairs

    def resize(images: Tensor) -> Tensor:
        scaled = F.interpolate(images.float(), size=(side, side), mode="bilinear")
        return scaled if images.is_floating_point() else scaled.round().to(images.dtype)

    parts = torch.split(pairs.inputs, MAX_RESIZED_IMAGES)
    return Pairs(torch.cat([resize(part) for part in parts]), pairs.targets, pairs.scale)
