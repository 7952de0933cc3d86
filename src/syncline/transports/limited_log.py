"""Warnings that unknown senders can cause: the first few are logged, then only their number."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["LimitedLog"]

MAX_SINGLE_WARNINGS = 5
"""Warnings that are logged one by one."""
SUMMARY_EVERY_S = 60.0
"""Seconds between two lines after that."""


class LimitedLog:
    """Logs the first few warnings, then at most one line a minute, with the number of those in between.

    >>> lines = LimitedLog(logging.getLogger("syncline.example"), now=lambda: 0.0)
    >>> [lines.warn("an unknown sender") for _ in range(6)]
    [True, True, True, True, True, False]
    """

    def __init__(self, logger: logging.Logger, now: Callable[[], float]) -> None:
        self._logger = logger
        self._now = now
        self._logged = 0
        self._kept_back = 0
        self._next = 0.0

    def warn(self, text: str) -> bool:
        """Log a warning, or only count it. Returns whether it was logged."""
        now = self._now()
        if self._logged >= MAX_SINGLE_WARNINGS and now < self._next:
            self._kept_back += 1
            return False
        more = f" (and {self._kept_back} more like it)" if self._kept_back else ""
        self._logger.warning("%s%s", text, more)
        self._logged += 1
        self._kept_back = 0
        self._next = now + SUMMARY_EVERY_S
        return True
