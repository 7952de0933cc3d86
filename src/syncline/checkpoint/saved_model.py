"""A model in a checkpoint: saved as a whole by one worker, or in parts by several.

```text
model-run/          every tensor by its name
                                                   or
model-run-00000/    tensors of part 0, the optimizer's state of these parameters, the run's state of this part
model-run-00001/    …
```

Whoever loads reads the names that it needs, from whichever parts have them. So a model may be loaded with other parts
than it was saved with, or as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from syncline.checkpoint.files import list_model_parts, model_part_name, read_structure, read_tree
from syncline.checkpoint.objects import VERSIONS, model_tree, optimizer_tree
from syncline.errors import ProtocolError
from syncline.model_parts import DimensionSlice, ModelPart

__all__ = ["SavedModel", "part_tree"]


def part_tree(part: ModelPart, model: nn.Module, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Any:
    """What a worker writes of its part. `names` are those of the parameters by `id`."""
    tensors = model_tree(model)
    tree = optimizer_tree(optimizer, names)
    known = set(names.values())

    def is_saved(label: str) -> bool:
        return label in part.saves or (label not in known and part.number == 0)

    return {
        "model": {name: value for name, value in tensors.items() if name in part.saves or name == VERSIONS},
        "slices": {
            name: [each.dimension, [list(one) for one in each.ranges], each.size]
            for name, each in part.slices.items()
            if name in part.saves
        },
        "optimizer": {
            "class": tree["class"],
            "groups": [{**group, "params": list(filter(is_saved, group["params"]))} for group in tree["groups"]],
            "state": {label: entry for label, entry in tree["state"].items() if is_saved(label)},
        },
    }


class SavedModel:
    """A model in a checkpoint, and its optimizer if it was saved in parts. Tensors are read when they are asked for."""

    def __init__(self, checkpoint: Path, name: str, optimizer: dict[str, Any] | None = None) -> None:
        """`optimizer`: its tree, if it was saved as a whole."""
        self._whole_optimizer = optimizer
        self._checkpoint, self._name = checkpoint, name
        self.parts = list_model_parts(checkpoint, name)
        if self.parts:
            self._structures = [read_structure(folder) for folder in self.parts]
        else:
            whole = checkpoint / model_part_name(name)
            self.parts, self._structures = [whole], [{"model": read_structure(whole), "slices": {}}]
        self._slices = [
            {
                key: DimensionSlice(dimension, tuple((start, stop) for start, stop in ranges), size)
                for key, (dimension, ranges, size) in structure["slices"].items()
            }
            for structure in self._structures
        ]

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return {name for structure in self._structures for name in structure["model"] if name != VERSIONS}

    @property
    def in_parts(self) -> bool:
        """Whether it was saved in parts."""
        return "optimizer" in self._structures[0]

    def model(self, names: Collection[str], slices: Mapping[str, DimensionSlice]) -> dict[str, Any]:
        """The tree of `model_tree` with these names, and slices of some."""
        found: dict[str, list[tuple[DimensionSlice | None, Any]]] = {}
        tree: dict[str, Any] = {}
        for folder, structure, cut in zip(self.parts, self._structures, self._slices, strict=True):
            wanted = {key: value for key, value in structure["model"].items() if key in names or key == VERSIONS}
            values = read_tree(folder, wanted)
            tree.setdefault(VERSIONS, values.pop(VERSIONS))
            for name, value in values.items():
                found.setdefault(name, []).append((cut.get(name), value))
        for name, parts in found.items():
            whole = _join(parts, name)
            tree[name] = slices[name].take(whole) if name in slices else whole
        return tree

    def optimizer(self, names: Collection[str] | None, slices: Mapping[str, DimensionSlice]) -> dict[str, Any]:
        """The tree of `optimizer_tree`: all groups, and the states of these parameters (None: of all)."""
        trees = [self._whole_optimizer] if self._whole_optimizer is not None else self._read_optimizers(names)
        if len({len(tree["groups"]) for tree in trees}) > 1:
            raise ProtocolError(
                f"{self.parts[0].parent} is damaged: its parts have different numbers of parameter groups"
            )
        groups = [
            {**same[0], "params": list(dict.fromkeys(label for group in same for label in group["params"]))}
            for same in zip(*(tree["groups"] for tree in trees), strict=True)
        ]
        entries: dict[str, list[tuple[DimensionSlice | None, dict[str, Any]]]] = {}
        for tree, cut in zip(trees, self._slices, strict=True):
            for label, entry in tree["state"].items():
                if names is not None and label not in names:
                    continue
                entries.setdefault(label, []).append((cut.get(label), entry))
        state = {label: _join_entries(parts, label, slices.get(label)) for label, parts in entries.items()}
        return {"class": trees[0]["class"], "groups": groups, "state": state}

    def _read_optimizers(self, names: Collection[str] | None) -> list[dict[str, Any]]:
        trees = []
        for folder, structure in zip(self.parts, self._structures, strict=True):
            state = structure["optimizer"]["state"]
            if names is not None:
                state = {label: entry for label, entry in state.items() if label in names}
            trees.append(read_tree(folder, {**structure["optimizer"], "state": state}))
        return trees

    def state(self, number: int) -> Any:
        """The run's state of a part; None if the model was not saved in such parts."""
        folder = self._checkpoint / model_part_name(self._name, number)
        if not self.in_parts or folder not in self.parts:
            return None
        return read_tree(folder, self._structures[self.parts.index(folder)]["state"])


def _join(parts: list[tuple[DimensionSlice | None, Any]], name: str) -> Any:
    """A tensor from its slices; or the value, if it was saved as a whole."""
    cut, first = parts[0]
    if cut is None:
        return first
    shape = list(first.shape)
    shape[cut.dimension] = cut.size
    whole = torch.empty(shape, dtype=first.dtype)
    if sum(each.length for each, _ in parts if each is not None) != cut.size:
        raise ProtocolError(f"{name} is in the checkpoint with {len(parts)} slices that do not cover it: it is damaged")
    for each, values in parts:
        assert each is not None, "a tensor is saved as a whole, or in slices"
        each.put(values, whole)
    return whole


def _join_entries(
    parts: list[tuple[DimensionSlice | None, dict[str, Any]]], label: str, wanted: DimensionSlice | None
) -> dict[str, Any]:
    """An optimizer's state of one parameter. Tensors with the parameter's dimensions are joined and sliced as it is."""
    entry: dict[str, Any] = {}
    for key, value in parts[0][1].items():
        values = [(cut, each[key]) for cut, each in parts]
        whole = _join(values, label) if _is_sliced(value, parts[0][0]) else value
        sliced = wanted is not None and isinstance(whole, Tensor) and _has_size(whole, wanted, wanted.size)
        entry[key] = wanted.take(whole) if wanted is not None and sliced else whole
    return entry


def _is_sliced(value: Any, cut: DimensionSlice | None) -> bool:
    return cut is not None and isinstance(value, Tensor) and _has_size(value, cut, cut.length)


def _has_size(tensor: Tensor, cut: DimensionSlice, size: int) -> bool:
    return tensor.dim() > cut.dimension and tensor.shape[cut.dimension] == size
