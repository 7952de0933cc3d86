"""A workload as this machine has it: what the rules compare a race's record with."""

from __future__ import annotations

from typing import Any

from syncline.bench.answer_cache import cache_answers
from syncline.bench.race.splits import SPLITS, digest_sample
from syncline.errors import SynclineError

__all__ = ["describe_data", "is_built_in"]

SAMPLED = 256
"""Samples of each split that are looked up among the digests."""


@cache_answers
def is_built_in(name: str) -> bool:
    """Whether a workload of this name comes with Syncline."""
    from syncline.workloads import names

    return name in names()


@cache_answers
def describe_data(spec: str) -> dict[str, Any] | None:
    """Describes a built-in workload and its data on this machine; None if the data is missing.

    `config` is as in `config.json`, `learning_rate` the workload's own, `digests` are of the first samples by split.
    """
    import torch

    from syncline.workloads import build
    from syncline.workloads.base import batches

    try:
        workload = build(spec)
        splits = workload.splits()
    except (SynclineError, OSError):
        return None
    first = torch.as_tensor(splits.train[0][0])
    kinds = sorted({str(one.dtype).removeprefix("torch.") for one in workload.model(0).parameters()})
    shape = {"shape": list(first.shape), "dtype": str(first.dtype).removeprefix("torch."), "parameters": kinds}
    digests = {}
    for name in SPLITS:
        inputs, targets = next(batches(getattr(splits, name), SAMPLED))
        digests[name] = [digest_sample(inputs[row], targets[row]) for row in range(len(inputs))]
    config = {**workload.describe(), "input": shape}
    return {"config": config, "learning_rate": workload.defaults.learning_rate, "digests": digests}
