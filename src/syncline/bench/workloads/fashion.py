"""Fashion-MNIST: 70,000 pictures of clothes, 28×28, in ten classes (Xiao, Rasul and Vollgraf, 2017).

Files are looked for in this order, and the first folder that has all four is taken:

1. the folder that the user names (and then nowhere else);
2. `SYNCLINE_DATA`/fashion-mnist, then `SYNCLINE_DATA`;
3. Debian's /usr/share/datasets/fashion-mnist (`apt install dataset-fashion-mnist`);
4. fashion-mnist in the user's cache (`SYNCLINE_CACHE`, else ~/.cache/syncline);
5. with `download=True` they are fetched into that cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from syncline.bench.workloads.checks import check_choice
from syncline.bench.workloads.classification import Classification
from syncline.bench.workloads.datasets import Pairs, draw
from syncline.bench.workloads.download import check_url, fetch
from syncline.bench.workloads.idx import read_idx
from syncline.bench.workloads.models import image_cnn, mlp, seeded
from syncline.environment.cache import cache_folder
from syncline.errors import ProtocolError, SpecError, UnsupportedError
from syncline.training.workload import Defaults, Splits

__all__ = ["Fashion"]

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
MIRROR = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
VALIDATION = 10_000
CLASSES = 10


@dataclass(frozen=True)
class _File:
    """One of the four. The checksum is of the unpacked content: gzip writes a name and a time beside it."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    sha256: str


FILES = (
    _File(
        "train-images-idx3-ubyte",
        (60_000, 28, 28),
        47_040_016,
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    _File(
        "train-labels-idx1-ubyte",
        (60_000,),
        60_008,
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    _File(
        "t10k-images-idx3-ubyte",
        (10_000, 28, 28),
        7_840_016,
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    _File(
        "t10k-labels-idx1-ubyte",
        (10_000,),
        10_008,
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)


class Fashion(Classification):
    """Fashion-MNIST, 50,000 / 10,000 / 10,000; the test split is the one that everybody reports.

    >>> Fashion(model="cnn", download=True)
    fashion(model='cnn', download=True)
    """

    name = "fashion"

    def __init__(
        self, model: str = "mlp", folder: str | None = None, download: bool = False, url: str = MIRROR
    ) -> None:
        self.architecture = check_choice(self.name, "model", model, ["mlp", "cnn"])
        if not isinstance(folder, (str, type(None))) or not isinstance(download, bool):
            raise SpecError(
                f"fashion: folder is a path and download True or False (folder: {folder!r}, download: {download!r})"
            )
        self.folder, self.download, self.url = folder, download, check_url(self.name, url)
        super().__init__(model=model, folder=folder, download=download, url=url)

    @property
    def defaults(self) -> Defaults:
        """Momentum at a constant rate."""
        if self.architecture == "cnn":
            return Defaults(batch=64, epochs=2, learning_rate=0.05, momentum=0.9, target=0.87)
        return Defaults(batch=64, epochs=10, learning_rate=0.02, momentum=0.9, target=0.87)

    def model(self, seed: int = 0) -> nn.Module:
        """784-256-10, or two convolutions with batch norm."""
        with seeded(seed):
            return mlp(784, 256, CLASSES) if self.architecture == "mlp" else image_cnn(28, (16, 32), CLASSES, norm=True)

    def make_splits(self) -> Splits:
        """The last 10,000 training images of one fixed shuffle are for validation."""
        folder = self._find()
        images, labels, test_images, test_labels = (_checked(_in(folder, file), file) for file in FILES)
        order = torch.randperm(len(labels), generator=draw(60_000))
        train, validation = order[:-VALIDATION], order[-VALIDATION:]
        return Splits(
            _pairs(images[train], labels[train]),
            _pairs(images[validation], labels[validation]),
            _pairs(test_images, test_labels),
        )

    def _find(self) -> Path:
        places = [Path(self.folder).expanduser()] if self.folder is not None else _places()
        for place in places:
            if all(_in(place, file).is_file() for file in FILES):
                return place
        if self.folder is None and self.download:
            cache = places[-1]
            for file in FILES:
                if not _in(cache, file).is_file():
                    fetch(f"{self.url}{file.name}.gz", cache / f"{file.name}.gz", file.sha256, file.bytes)
            return cache
        raise UnsupportedError(
            f"{self}: no folder has all of {', '.join(file.name for file in FILES)} (each plain or .gz); looked in "
            f"{', '.join(map(str, places))}. Debian and Ubuntu: apt install dataset-fashion-mnist; elsewhere "
            "fashion(folder='…') or fashion(download=True)"
        )


def _places() -> list[Path]:
    data = os.environ.get("SYNCLINE_DATA")
    named = [Path(data) / "fashion-mnist", Path(data)] if data else []
    return [*named, DEBIAN, cache_folder() / "fashion-mnist"]


def _in(folder: Path, file: _File) -> Path:
    """The packed file where there is one, else the plain one."""
    packed = folder / f"{file.name}.gz"
    return packed if packed.is_file() else folder / file.name


def _checked(path: Path, file: _File) -> Tensor:
    values = read_idx(path)
    if tuple(values.shape) != file.shape:
        raise ProtocolError(
            f"{path} has {tuple(values.shape)} values where {file.shape} were due; is it another data set?"
        )
    if len(file.shape) == 1 and int(values.max()) >= CLASSES:
        raise ProtocolError(
            f"{path}: label {int(values.max())} where classes are 0 to {CLASSES - 1}; fetch the file again"
        )
    return values


def _pairs(images: Tensor, labels: Tensor) -> Pairs:
    return Pairs(images.unsqueeze(1), labels.long(), scale=255)
