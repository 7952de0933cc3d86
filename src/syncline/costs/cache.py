"""Calibrations that were made before, in the user's cache: one for each cluster and engine."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path

from syncline.costs.calibration import Calibration
from syncline.environment.base import cache_folder

__all__ = ["cache_file", "recall", "remember"]

logger = logging.getLogger("syncline")


def cache_file() -> Path:
    """Where calibrations are kept."""
    return cache_folder() / "networks.json"


def recall(where: str) -> Calibration | None:
    """The calibration that was made here, if there is one."""
    try:
        found = _read().get(where)
        return None if found is None else Calibration.of([float(number) for number in found])
    except (TypeError, ValueError) as error:
        logger.warning("%s: the entry for %s cannot be read and is measured anew (%s)", cache_file(), where, error)
        return None


def remember(where: str, calibration: Calibration) -> None:
    """Keep a calibration. A folder that cannot be written costs a warning and the next run a second."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {**_read(), where: calibration.numbers()}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(entries, file, indent=1)
        os.replace(file.name, path)  # whole or not at all
    except OSError as error:
        logger.warning("the calibration could not be kept in %s: %s", path, error)


def _read() -> dict[str, list[float]]:
    try:
        entries = json.loads(cache_file().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read and is made anew: %s", cache_file(), error)
        return {}
    return entries if isinstance(entries, dict) else {}
