"""What happens before the first step: where a run goes on from, and its random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from syncline.errors import IncompatibleError, SpecError
from syncline.training.checkpoint.meeting import Meeting
from syncline.training.folder import RunFolder
from syncline.training.lock import FileLock
from syncline.world import World

__all__ = ["checkpoints_in", "find_checkpoints", "folder_held", "seed_everything"]


@contextmanager
def folder_held(world: World, place: RunFolder | None, begins: bool, lock: bool) -> Iterator[None]:
    """Inside, rank 0 holds the lock of the run's folder. Refuses a folder in use, or with a run if a new one `begins`.

    Every rank calls it, and all raise the same error: another rank may already see what rank 0 writes. Without `lock`
    the launcher holds the lock.
    """
    if place is None:
        yield
        return
    held: list[FileLock] = []

    def look() -> None:
        if world.rank != 0:
            return
        if lock:
            held.append(place.lock())
        if begins and place.used():
            raise IncompatibleError(place.refusal())

    try:
        Meeting(world).at_once("take the run's folder", look)
        yield
    finally:
        for each in held:
            each.release()


def find_checkpoints(place: RunFolder | None, resume: bool | str | Path) -> Path | None:
    """The folder to load from, or None for a run that begins."""
    if resume is True and place is None:
        raise SpecError("resume=True goes on from the newest checkpoint in the run's folder: give folder=")
    if resume is False:
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
