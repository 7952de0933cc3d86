"""The random-number states of a rank, and fresh ones for ranks that a checkpoint does not know."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from syncline.errors import ProtocolError

__all__ = ["check", "material", "restore", "seed_anew", "take"]


def take() -> dict[str, Any]:
    """The states of torch, NumPy and `random`, and of the current GPU if one is in use.

    >>> before = take()
    >>> drawn = torch.rand(1)
    >>> restore(before)
    >>> bool(torch.rand(1) == drawn)
    True
    """
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
        "cuda": torch.cuda.get_rng_state() if in_use else None,
    }


def restore(states: dict[str, Any]) -> None:
    """Go on drawing where `take` was called. A GPU's state is left out where there is no GPU."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def check(states: Any, source: str) -> None:
    """Refuse what `restore` could not use, before anything is changed."""
    try:
        torch.Generator().set_state(states["torch"])
        mine = np.random.get_state(legacy=False)["bit_generator"]
        if states["numpy"]["bit_generator"] != mine:
            raise ValueError(f"NumPy draws by {mine} here, by {states['numpy']['bit_generator']} there")
        generator: Any = getattr(np.random, str(mine))
        np.random.RandomState(generator()).set_state(states["numpy"])
        random.Random().setstate(states["python"])
        assert states["cuda"] is None or states["cuda"].dtype == torch.uint8
    except Exception as error:  # each library has its own way to complain
        raise ProtocolError(f"{source} has random-number states that cannot be used: {error}") from error


def material(states: dict[str, Any]) -> int:
    """A number that stands for the states: what ranks that join later are seeded from."""
    return int.from_bytes(hashlib.sha256(states["torch"].numpy().tobytes()).digest()[:8], "big")


def seed_anew(seed: int, rank: int, step: int) -> None:
    """States for a rank that has none: the same whenever this checkpoint is loaded, others for every rank."""
    for_torch, for_numpy, for_python = np.random.SeedSequence([seed, rank, step]).generate_state(3)
    torch.manual_seed(int(for_torch))
    np.random.seed(int(for_numpy))
    random.seed(int(for_python))
