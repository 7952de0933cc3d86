"""The user's cache folder of Syncline."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """`SYNCLINE_CACHE`, or syncline/ in the user's cache folder."""
    folder = os.environ.get("SYNCLINE_CACHE")
    if folder is None:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "syncline")
    return Path(folder)
