"""Horovod's environment variables HOROVOD_*: those with an effect, and those without."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from syncline.errors import SpecError

PREFIX = "HOROVOD_"
LEVELS: Mapping[str, int] = {
    "trace": logging.DEBUG,  # Python has nothing finer
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
"""Horovod's log levels, and Python's for each."""
OBEYED = frozenset(
    PREFIX + name
    for name in (
        "FUSION_THRESHOLD",
        "CYCLE_TIME",
        "CACHE_CAPACITY",
        "STALL_CHECK_TIME_SECONDS",
        "STALL_SHUTDOWN_TIME_SECONDS",
        "STALL_CHECK_DISABLE",
        "TIMELINE",
        "TIMELINE_MARK_CYCLES",
        "DYNAMIC_PROCESS_SETS",
        "HIERARCHICAL_ALLREDUCE",
        "LOG_LEVEL",
    )
)
TOLD = frozenset(
    PREFIX + name
    for name in (
        "RANK",
        "SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "HOSTNAME",
        "START_TIMEOUT",  # horovodrun's own
    )
)
"""Variables that horovodrun sets for workers. They request nothing."""
DYNAMIC = "DYNAMIC"
"""Value of HOROVOD_TIMELINE without a file: `start_timeline` names it later."""


@dataclass(frozen=True, kw_only=True)
class HorovodSettings:
    """The settings of the variables; the defaults are Horovod's.

    >>> HorovodSettings().fusion_bytes
    134217728
    """

    fusion_bytes: int = 128 << 20
    """HOROVOD_FUSION_THRESHOLD: maximum bytes of a fused reduction; 0: each tensor alone."""
    cycle_seconds: float = 0.001
    """HOROVOD_CYCLE_TIME (in milliseconds): how long requests are collected before they are sent."""
    cache_capacity: int = 1024
    """HOROVOD_CACHE_CAPACITY: number of requests that are cached and sent by number; 0: none."""
    stall_warning: float = 60.0
    """HOROVOD_STALL_CHECK_TIME_SECONDS: after this time, a missing request of some rank is reported."""
    stall_shutdown: float = 0.0
    """HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: after this time it fails; 0: after the world's timeout."""
    stall_check: bool = True
    """The negation of HOROVOD_STALL_CHECK_DISABLE."""
    timeline: str | None = None
    """HOROVOD_TIMELINE: the file of the timeline; None for `DYNAMIC`, because hvd.start_timeline names the file."""
    mark_cycles: bool = False
    """HOROVOD_TIMELINE_MARK_CYCLES: cycles are marked in the timeline."""
    dynamic_process_sets: bool = True
    """HOROVOD_DYNAMIC_PROCESS_SETS: sets can be added after init(), unless it is 0."""
    hierarchical_allreduce: bool = False
    """HOROVOD_HIERARCHICAL_ALLREDUCE: sum within each host first."""
    log_level: str = "warning"
    """HOROVOD_LOG_LEVEL, one of `LEVELS`."""


def read(environ: Mapping[str, str]) -> HorovodSettings:
    """Read the settings from environment variables. An empty variable counts as unset.

    >>> read({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_STALL_CHECK_DISABLE": "1"}).cycle_seconds
    0.005
    >>> read({"HOROVOD_FUSION_THRESHOLD": "64MB"})
    Traceback (most recent call last):
    syncline.errors.SpecError: HOROVOD_FUSION_THRESHOLD='64MB': it takes a whole number of bytes, 0 or more; as 67108864
    """
    default = HorovodSettings()
    timeline = environ.get(PREFIX + "TIMELINE", "")
    return HorovodSettings(
        fusion_bytes=_whole(environ, "FUSION_THRESHOLD", default.fusion_bytes, "bytes", "67108864"),
        cycle_seconds=1e-3 * _number(environ, "CYCLE_TIME", 1e3 * default.cycle_seconds, "milliseconds", "2.5"),
        cache_capacity=_whole(environ, "CACHE_CAPACITY", default.cache_capacity, "requests", "1024"),
        stall_warning=_number(environ, "STALL_CHECK_TIME_SECONDS", default.stall_warning, "seconds", "60"),
        stall_shutdown=_number(environ, "STALL_SHUTDOWN_TIME_SECONDS", default.stall_shutdown, "seconds", "120"),
        stall_check=not _switch(environ, "STALL_CHECK_DISABLE", not default.stall_check),
        timeline=None if timeline in ("", DYNAMIC) else timeline,
        mark_cycles=_switch(environ, "TIMELINE_MARK_CYCLES", default.mark_cycles),
        dynamic_process_sets=_switch(environ, "DYNAMIC_PROCESS_SETS", default.dynamic_process_sets),
        hierarchical_allreduce=_switch(environ, "HIERARCHICAL_ALLREDUCE", default.hierarchical_allreduce),
        log_level=_level(environ, default.log_level),
    )


def without_effect(environ: Mapping[str, str]) -> list[str]:
    """The names of Horovod's variables that are set and have no effect.

    >>> without_effect({"HOROVOD_AUTOTUNE": "1", "HOROVOD_CYCLE_TIME": "5", "HOROVOD_RANK": "0", "HOME": "/root"})
    ['HOROVOD_AUTOTUNE']
    >>> without_effect({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})  # sets can be added by default; "0" forbids it
    ['HOROVOD_DYNAMIC_PROCESS_SETS']
    """
    found = {name for name, value in environ.items() if name.startswith(PREFIX) and value}
    idle = found - OBEYED - TOLD
    if PREFIX + "DYNAMIC_PROCESS_SETS" in found and read(environ).dynamic_process_sets:
        idle.add(PREFIX + "DYNAMIC_PROCESS_SETS")
    return sorted(idle)


def _whole(environ: Mapping[str, str], name: str, default: int, unit: str, example: str) -> int:
    text = environ.get(PREFIX + name, "").strip()
    if text and not (text.isascii() and text.isdigit()):
        raise SpecError(f"{PREFIX}{name}={text!r}: it takes a whole number of {unit}, 0 or more; as {example}")
    return int(text) if text else default


def _number(environ: Mapping[str, str], name: str, default: float, unit: str, example: str) -> float:
    text = environ.get(PREFIX + name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise SpecError(f"{PREFIX}{name}={text!r}: it takes a number of {unit}, 0 or more; as {example}")
    return value


def _switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    text = environ.get(PREFIX + name, "").strip()
    if text not in ("", "0", "1"):
        # Horovod reads "true" as 0. An error is better than that.
        raise SpecError(f"{PREFIX}{name}={text!r}: it takes 0 or 1")
    return default if not text else text == "1"


def _level(environ: Mapping[str, str], default: str) -> str:
    text = environ.get(PREFIX + "LOG_LEVEL", "").strip()
    if text and text.lower() not in LEVELS:
        raise SpecError(f"{PREFIX}LOG_LEVEL={text!r}: it takes one of {', '.join(LEVELS)}")
    return text.lower() or default
