"""Finds out what a folder holds, and opens it for the live view."""

from __future__ import annotations

from pathlib import Path

from syncline.bench.live.base import Feed
from syncline.bench.live.race import RaceFeed
from syncline.bench.live.training import TrainingFeed
from syncline.bench.race.reading import PLAN
from syncline.errors import ProtocolError, SpecError

__all__ = ["Feed", "newest_run", "open_feed"]

LOG, CONFIG = "log.jsonl", "config.json"
HOW = "syncline train digits -n 2 or syncline race digits -n 4 makes one"


def open_feed(folder: Path) -> Feed:
    """A race or a training; a sentence where it is neither."""
    if not folder.exists():
        raise SpecError(f"{folder} is not there; {_instead(folder.parent)}")
    if not folder.is_dir():
        raise SpecError(f"{folder} is a file; name the folder that it lies in: syncline watch {folder.parent}")
    if (folder / PLAN).exists():
        try:
            return RaceFeed(folder)
        except (OSError, UnicodeDecodeError) as error:
            raise ProtocolError(f"{folder / PLAN} cannot be read: {error}") from None
    if (folder / LOG).exists() or (folder / CONFIG).exists():
        return TrainingFeed(folder)
    raise SpecError(f"{folder} holds no run: it has neither {PLAN} nor {LOG}; {_instead(folder)}")


def newest_run(runs: Path) -> Path:
    """The race or training under `runs` that was written to last: one that runs, if any does."""
    found = _newest(runs)
    if found is None:
        raise SpecError(f"there is no run in {runs.absolute()}; {HOW}, or name its folder: syncline watch FOLDER")
    return found


def _instead(folder: Path) -> str:
    found = _newest(folder)
    return HOW if found is None else f"the newest run near it: syncline watch {found}"


def _newest(folder: Path) -> Path | None:
    found: list[tuple[int, Path]] = []
    for path in {file.parent for name in (PLAN, LOG) for file in folder.glob(f"*/{name}")}:
        for file in (path / PLAN, path / LOG, *path.glob(f"*/*/*/{LOG}")):
            try:
                found.append((file.stat().st_mtime_ns, path))
            except OSError:  # not of this kind, or removed since
                continue
    return max(found)[1] if found else None
