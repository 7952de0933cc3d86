"""What happens before the first step: where a run goes on from, and its random numbers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from syncline.errors import IncompatibleError, SpecError
from syncline.training.folder import RunFolder
from syncline.world import World, broadcast

__all__ = ["checkpoints_in", "find_checkpoints", "seed_everything"]


def find_checkpoints(world: World, place: RunFolder | None, resume: bool | str | Path) -> Path | None:
    """The folder to load from, or None for a run that begins. Refused on every rank alike."""
    if resume is True and place is None:
        raise SpecError("resume=True goes on from the newest checkpoint in the run's folder: give folder=")
    if resume is False:
        if place is not None:
            # Rank 0 looks, for all: another one may already see what rank 0 writes.
            used = broadcast(torch.tensor([float(place.used())]), group=world.everyone)
            if bool(used[0]):
                raise IncompatibleError(place.refusal())
        return None
    return place.checkpoints if resume is True and place is not None else checkpoints_in(str(resume))


def checkpoints_in(path: str | Path) -> Path:
    """Where the checkpoints are, given a run's folder, its `checkpoints`, or one checkpoint."""
    inside = RunFolder(path).checkpoints
    return inside if inside.is_dir() else Path(path)


def seed_everything(seed: int, rank: int) -> None:
    """Seed torch, NumPy and `random`, each rank in its own way: its dropout is not its neighbour's."""
    mixed = (1_000_003 * seed + rank) % 2**63
    torch.manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)
