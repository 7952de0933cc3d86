"""The checkpoint of an elastic job that ends early: the last workers save it, and a later run loads it.

They save it if too few of them are left, and if the launcher or all of them receive a signal to end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from syncline.checkpoint.files import CheckpointName
from syncline.checkpoint.save import save
from syncline.environment.base import JOB_FOLDER_VARIABLE
from syncline.errors import SynclineError
from syncline.strategies.base import StrategyRun
from syncline.training.run_folder import RunFolder
from syncline.world import World

__all__ = ["objects_to_save", "save_for_later"]

logger = logging.getLogger("syncline")

SAVED, NOT_SAVED = "saved", "not saved"
"""Kinds of entries in the control log: the launcher shows them when the job has ended."""


def save_for_later(world: World, why: str, reports: Callable[[], bool]) -> None:
    """Save the runs of the world and their schedulers in the job's folder. Every worker that is left calls it.

    `reports` returns afterwards whether this worker writes the result into the log. After a failure the job ends or
    continues as it would without a checkpoint.
    """
    elastic, folder = world.elastic, os.environ.get(JOB_FOLDER_VARIABLE, "")
    if elastic is None or not world.runs or not folder:
        return
    objects = objects_to_save(world)
    step = max(each.stats.steps for each in objects.values() if isinstance(each, StrategyRun))
    place, log = RunFolder(folder).checkpoints, elastic.formation.log
    try:
        saved = CheckpointName.parse(save(place, step=step, keep=1, **objects).name)
    except (SynclineError, OSError) as error:
        logger.warning("%s; step %d could not be saved in %s: %s", why, step, place, error)
        if reports():
            log.append(NOT_SAVED, step=step, folder=str(place), reason=str(error))
        return
    if reports():
        step = step if saved is None else saved.step  # the largest of all workers
        logger.warning("%s: step %d is saved in %s", why, step, place)
        log.append(SAVED, step=step, folder=str(place), load=describe_load(place, list(objects)))


def objects_to_save(world: World) -> dict[str, Any]:
    """The runs of the world and their schedulers, by their names in the checkpoint."""
    runs = [run for run in world.runs if isinstance(run, StrategyRun)]
    schedulers = [each for run in runs for each in run.uneven.schedulers.find()]
    return {**_named("run", runs), **_named("scheduler", schedulers)}


def describe_load(folder: Path, names: Sequence[str]) -> str:
    """The call with which a later run continues."""
    return f"sl.load({str(folder)!r}, {', '.join(f'{name}={name}' for name in names)})"


def _named(kind: str, values: Sequence[Any]) -> dict[str, Any]:
    """
    >>> _named("run", ["a"]), _named("run", ["a", "b"])
    ({'run': 'a'}, {'run0': 'a', 'run1': 'b'})
    """
    if len(values) == 1:
        return {kind: values[0]}
    return {f"{kind}{number}": value for number, value in enumerate(values)}
