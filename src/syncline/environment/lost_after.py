"""The time after which a process counts as lost, and the keys of the store for heartbeats.

`transports/liveness.py` sends the heartbeats of the ranks.
"""

from __future__ import annotations

import math
import os

from syncline.errors import SpecError

__all__ = ["ALIVE", "DEAD", "LEFT", "LOST_AFTER_VARIABLE", "lost_after", "read_lost_after"]

DEAD = "syncline/dead"
"""Key of the number of programs that have failed, written by the launcher.

DEAD/RANK has the reason of a failed rank, DEAD/NAME that of another program.
"""
ALIVE = "syncline/alive"
"""Under ALIVE/PROGRAM every program that has a world writes its heartbeat, a growing number; `LEFT` at its end."""
LEFT = "left"
LOST_AFTER_VARIABLE = "SYNCLINE_LOST_AFTER"
LOST_AFTER_S = 30.0
"""Seconds without a heartbeat after which a process counts as lost, unless the variable says otherwise."""
MIN_LOST_AFTER_S = 2.0
"""Smallest value of the variable in seconds: heartbeats are sent twice a second, later on a busy machine."""


def lost_after() -> float:
    """Seconds without a heartbeat after which a process counts as lost; infinite where the variable is 0."""
    text = os.environ.get(LOST_AFTER_VARIABLE, "") or str(LOST_AFTER_S)
    return read_lost_after(text, f"{LOST_AFTER_VARIABLE}={text}")


def read_lost_after(text: str, given: str) -> float:
    """Parse a number of seconds; infinite for 0. `given` names the option or variable in messages.

    >>> read_lost_after("12", "--lost-after 12"), read_lost_after("0", "--lost-after 0")
    (12.0, inf)
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (seconds == 0 or MIN_LOST_AFTER_S <= seconds < math.inf):
        raise SpecError(f"{given}: give a number of seconds, at least {MIN_LOST_AFTER_S:g}, or 0 for no limit")
    return seconds or math.inf
