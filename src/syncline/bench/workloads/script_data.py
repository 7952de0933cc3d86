"""What a script's `data()` gives, as three splits: refused where there are not three, or where they are not apart."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from syncline.bench.workloads.datasets import Pairs, digest
from syncline.errors import SpecError
from syncline.training.workload import Batch, Splits

__all__ = ["as_splits", "digest_of"]

NAMES = ("train", "validation", "test")
RETURN = "return train, validation, test"


def as_splits(shown: str, found: Any) -> Splits:
    """The splits of what `data()` has returned.

    >>> pairs = [(torch.rand(n, 2), torch.zeros(n)) for n in (6, 2, 2)]
    >>> as_splits("workload.py", pairs).sizes()
    {'train': 6, 'validation': 2, 'test': 2}
    """
    if not isinstance(found, (tuple, list)) or len(found) != len(NAMES):
        count = f"{len(found)} of them" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
        raise SpecError(f"{shown}: data() gives three splits, not {count}; end it with {RETURN}")
    named = dict(zip(NAMES, found, strict=True))
    for first, second in combinations(NAMES, 2):
        if named[first] is named[second]:
            raise SpecError(_not_apart(shown, first, second, "are one object"))
    splits = {name: _as_dataset(shown, name, given) for name, given in named.items()}
    for first, second in combinations(NAMES, 2):
        why = _overlap(splits[first], splits[second])
        if why:
            raise SpecError(_not_apart(shown, first, second, why))
    return Splits(**splits)


def digest_of(splits: Splits) -> str | None:
    """The SHA-256 of all samples where the splits are tensors; None where they are not."""
    tensors: list[Tensor] = []
    for split in vars(splits).values():
        held = _tensors(split)
        if not held:
            return None
        tensors += held
    # As bytes, because NumPy does not know every type that torch has.
    return digest(*(tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in tensors))


def _as_dataset(shown: str, name: str, given: Any) -> Dataset[Batch]:
    split: Any = given
    if isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(a, (Tensor, np.ndarray)) for a in given):
        inputs, targets = (torch.as_tensor(part) for part in given)
        lengths = [len(part) if part.ndim else 0 for part in (inputs, targets)]
        if lengths[0] != lengths[1]:
            raise SpecError(
                f"{shown}: the {name} split of data() has {lengths[0]} inputs and {lengths[1]} targets; "
                "give as many of one as of the other"
            )
        split = Pairs(inputs, targets)
    if hasattr(given, "batch_sampler"):
        raise SpecError(f"{shown}: the {name} split of data() is a loader; give its dataset, batches are made of it")
    try:
        size = len(split) if hasattr(split, "__getitem__") else None
    except TypeError:  # an iterable dataset has the methods and no length
        size = None
    if size is None or isinstance(split, (Mapping, str, bytes, Tensor, np.ndarray)):
        raise SpecError(
            f"{shown}: the {name} split of data() is a {type(given).__name__}; give a dataset with len() and [index], "
            "or a pair of tensors (inputs, targets)"
        )
    if not size:
        raise SpecError(f"{shown}: the {name} split of data() is empty; give it at least one sample")
    return cast(Dataset[Batch], split)


def _not_apart(shown: str, first: str, second: str, why: str) -> str:
    return (
        f"{shown}: the splits {first} and {second} of data() {why}; keep them apart, or the result says nothing "
        "about samples that were not seen"
    )


def _overlap(first: Any, second: Any) -> str:
    """How two splits hold the same samples, as far as that is seen without reading them; empty if they do not."""
    if isinstance(first, Subset) and isinstance(second, Subset) and first.dataset is second.dataset:
        common = len(set(first.indices) & set(second.indices))
        return f"have {common} samples in common" if common else ""
    ours, theirs = _tensors(first)[:1], _tensors(second)[:1]
    for a, b in zip(ours, theirs, strict=False):
        if a.shape == b.shape and torch.equal(a, b):
            return f"have the same {len(a)} inputs"
        if a.device == b.device and a.is_contiguous() and b.is_contiguous():
            begin, end = max(a.data_ptr(), b.data_ptr()), min(a.data_ptr() + a.nbytes, b.data_ptr() + b.nbytes)
            if begin < end:
                return f"have {max(1, (end - begin) * len(a) // a.nbytes)} inputs in common"
    return ""


def _tensors(split: Any) -> list[Tensor]:
    if isinstance(split, Pairs):
        return [split.inputs, split.targets]
    return list(split.tensors) if isinstance(split, TensorDataset) else []
