"""Handwritten digits: 1,797 real images of 8×8 pixels, small enough for tests."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from syncline.errors import UnsupportedError
from syncline.workloads.base import Defaults, Pairs, Splits, check_choice, seeded
from syncline.workloads.classification import Classification, image_cnn, mlp

__all__ = ["Digits"]

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]


class Digits(Classification):
    """scikit-learn's digits, three fifths for training, one each for validation and test.

    >>> Digits(model="cnn")
    digits(model='cnn')
    """

    name = "digits"

    def __init__(self, model: str = "mlp") -> None:
        self.architecture = check_choice(self.name, "model", model, ["mlp", "cnn"])
        super().__init__(model=model)

    @property
    def defaults(self) -> Defaults:
        """SGD with momentum; it takes seconds on one core."""
        if self.architecture == "cnn":
            return Defaults(batch=32, epochs=10, learning_rate=0.05, momentum=0.9, target=0.96)
        return Defaults(batch=32, epochs=20, learning_rate=0.1, momentum=0.9, target=0.95)

    def model(self, seed: int = 0) -> nn.Module:
        """64-64-10, or two convolutions. Without batch norm k workers × batch b equals one worker × batch k·b."""
        with seeded(seed):
            return mlp(64, 64, 10) if self.architecture == "mlp" else image_cnn(8, (16, 32), 10, norm=False)

    def make_splits(self) -> Splits:
        """From the files of scikit-learn."""
        images, labels = read_images()
        pixels = torch.from_numpy(images).to(torch.float32).view(-1, 1, 8, 8) / 16
        return stratified(pixels, torch.from_numpy(labels).long(), seed=1797)


def read_images() -> Arrays:
    """Images and labels from scikit-learn's file. Importing scikit-learn would take longer than the training."""
    spec = importlib.util.find_spec("sklearn")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            with gzip.open(path, "rt") as file:
                table = np.loadtxt(file, delimiter=",")
            return np.ascontiguousarray(table[:, :-1]), table[:, -1].astype(np.int64)
    raise UnsupportedError(
        "the workload 'digits' reads digits.csv.gz of scikit-learn, and finds no such file: "
        "pip install 'syncline[workloads]'"
    )


def stratified(inputs: Tensor, targets: Tensor, seed: int) -> Splits:
    """Split every class into three fifths, one fifth and one fifth, and shuffle each split.

    >>> sizes = stratified(torch.rand(20, 3), torch.arange(20) % 2, seed=0).sizes()
    >>> sizes["train"], sizes["validation"], sizes["test"]
    (12, 4, 4)
    """
    generator = torch.Generator().manual_seed(seed)
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for label in sorted(set(targets.tolist())):
        members = (targets == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        fifth = round(len(members) / 5)
        for part, chosen in zip(parts, members.split([len(members) - 2 * fifth, fifth, fifth]), strict=True):
            part.append(chosen)
    made = []
    for part in parts:
        rows = torch.cat(part)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        made.append(Pairs(inputs[rows], targets[rows]))
    return Splits(*made)
