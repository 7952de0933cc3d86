"""Horovod's environment variables HOROVOD_*: those with an effect, and those without."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

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
SWITCH = "0 or 1"


def _parse_whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def _parse_number(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


def _parse_switch(text: str) -> bool:
    if text not in ("0", "1"):  # Horovod reads "true" as 0; an error is better than that
        raise ValueError(text)
    return text == "1"


def _parse_level(text: str) -> str:
    if text.lower() not in LEVELS:
        raise ValueError(text)
    return text.lower()


def _variable(name: str, default: object, parse: Callable[[str], object], takes: str) -> Any:
    """A setting: the name of its variable without HOROVOD_, its parser, and what the variable takes."""
    return field(default=default, metadata={"name": PREFIX + name, "parse": parse, "takes": takes})


@dataclass(frozen=True, kw_only=True)
class HorovodSettings:
    """The settings of the variables; the defaults are Horovod's.

    >>> HorovodSettings().fusion_bytes
    134217728
    """

    fusion_bytes: int = _variable(
        "FUSION_THRESHOLD", 128 << 20, _parse_whole, "a whole number of bytes, 0 or more; as 67108864"
    )
    """Maximum bytes of a fused reduction; 0: each tensor alone."""
    cycle_seconds: float = _variable(
        "CYCLE_TIME", 0.001, lambda text: 1e-3 * _parse_number(text), "a number of milliseconds, 0 or more; as 2.5"
    )
    """How long requests are collected before they are sent."""
    cache_capacity: int = _variable(
        "CACHE_CAPACITY", 1024, _parse_whole, "a whole number of requests, 0 or more; as 1024"
    )
    """Number of requests that are cached and sent by number; 0: none."""
    stall_warning: float = _variable(
        "STALL_CHECK_TIME_SECONDS", 60.0, _parse_number, "a number of seconds, 0 or more; as 60"
    )
    """After this time, a missing request of some rank is reported."""
    stall_shutdown: float = _variable(
        "STALL_SHUTDOWN_TIME_SECONDS", 0.0, _parse_number, "a number of seconds, 0 or more; as 120"
    )
    """After this time it fails; 0: after the world's timeout."""
    stall_check: bool = _variable("STALL_CHECK_DISABLE", True, lambda text: not _parse_switch(text), SWITCH)
    timeline: str | None = _variable("TIMELINE", None, lambda text: None if text == "DYNAMIC" else text, "a file")
    """The file of the timeline; None for `DYNAMIC`, because hvd.start_timeline names the file."""
    mark_cycles: bool = _variable("TIMELINE_MARK_CYCLES", False, _parse_switch, SWITCH)
    """Cycles are marked in the timeline."""
    dynamic_process_sets: bool = _variable("DYNAMIC_PROCESS_SETS", True, _parse_switch, SWITCH)
    """Sets can be added after init()."""
    hierarchical_allreduce: bool = _variable("HIERARCHICAL_ALLREDUCE", False, _parse_switch, SWITCH)
    """Sum within each host first."""
    elastic_timeout: float = _variable(
        "ELASTIC_TIMEOUT", 600.0, _parse_number, "a number of seconds, 0 or more; as 600"
    )
    """Seconds that a new worker of an elastic job waits until the others admit it at a commit."""
    log_level: str = _variable("LOG_LEVEL", "warning", _parse_level, f"one of {', '.join(LEVELS)}")


SUPPORTED = frozenset(each.metadata["name"] for each in fields(HorovodSettings))
SET_BY_LAUNCHER = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"),
        *("START_TIMEOUT", "ELASTIC"),  # horovodrun's own
    )
)
"""Variables that horovodrun sets for workers. They request nothing."""


def read(environ: Mapping[str, str]) -> HorovodSettings:
    """Read the settings from environment variables. An empty variable counts as unset.

    >>> read({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_STALL_CHECK_DISABLE": "1"}).cycle_seconds
    0.005
    >>> read({"HOROVOD_FUSION_THRESHOLD": "64MB"})
    Traceback (most recent call last):
    syncline.errors.SpecError: HOROVOD_FUSION_THRESHOLD='64MB': it takes a whole number of bytes, 0 or more; as 67108864
    """
    values = {}
    for setting in fields(HorovodSettings):
        name = setting.metadata["name"]
        text = environ.get(name, "").strip()
        try:
            if text:
                values[setting.name] = setting.metadata["parse"](text)
        except ValueError:
            raise SpecError(f"{name}={text!r}: it takes {setting.metadata['takes']}") from None
    return HorovodSettings(**values)


def without_effect(environ: Mapping[str, str]) -> list[str]:
    """The names of Horovod's variables that are set and have no effect.

    >>> without_effect({"HOROVOD_AUTOTUNE": "1", "HOROVOD_CYCLE_TIME": "5", "HOROVOD_RANK": "0", "HOME": "/root"})
    ['HOROVOD_AUTOTUNE']
    >>> without_effect({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})  # sets can be added by default; "0" forbids it
    ['HOROVOD_DYNAMIC_PROCESS_SETS']
    """
    found = {name for name, value in environ.items() if name.startswith(PREFIX) and value}
    idle = found - SUPPORTED - SET_BY_LAUNCHER
    if PREFIX + "DYNAMIC_PROCESS_SETS" in found and read(environ).dynamic_process_sets:
        idle.add(PREFIX + "DYNAMIC_PROCESS_SETS")
    return sorted(idle)
