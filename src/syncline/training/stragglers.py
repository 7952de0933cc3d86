"""Workers that are slow on purpose: who, how much, from when to when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from syncline.errors import SpecError
from syncline.specs import nearest
from syncline.transports.faults import Slow

__all__ = ["Slow", "check_slow", "parse_slow"]

EXAMPLE = "rank=2,factor=4,start=1,stop=3"


def parse_slow(text: str) -> Slow:
    """What `--slow` says: rank and factor, and the seconds since the first step between which it holds.

    >>> parse_slow("rank=2,factor=4,start=1,stop=3")
    Slow(rank=2, factor=4.0, start=1.0, stop=3.0)
    >>> parse_slow("rank=0,factor=2").stop
    inf
    """
    known = [field.name for field in fields(Slow)]
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise SpecError(f"{part.strip()!r} in {text!r} is not key=value; write for example {EXAMPLE}")
        if name not in known:
            raise SpecError(f"{part.strip()!r} in {text!r}: {nearest(name, known)}; write for example {EXAMPLE}")
        if name in found:
            raise SpecError(f"{name} is there twice in {text!r}; write for example {EXAMPLE}")
        try:
            found[name] = float(value)
        except ValueError:
            raise SpecError(f"{name}={value!r} in {text!r} is no number; write for example {EXAMPLE}") from None
    missing = [name for name in ("rank", "factor") if name not in found]
    if missing:
        raise SpecError(f"{text!r} does not say {' and '.join(missing)}; write for example {EXAMPLE}")
    if not found["rank"].is_integer():
        raise SpecError(f"rank={found['rank']:g} in {text!r} is no whole number")
    return Slow(
        rank=int(found["rank"]),
        factor=found["factor"],
        start=found.get("start", 0.0),
        stop=found.get("stop", math.inf),
    )


def check_slow(slow: Sequence[Slow], workers: int, seconds_a_sample: float | None) -> None:
    """Refuse slowness that would slow nobody down."""
    if seconds_a_sample is not None and not 0 <= seconds_a_sample < math.inf:
        raise SpecError(f"{seconds_a_sample} seconds a sample: a number from 0 on")
    if slow and not seconds_a_sample:
        raise SpecError(
            f"{slow[0]} multiplies the seconds that a sample takes, and those are not given: add --pace, in Python "
            "seconds_a_sample=, for example 0.001"
        )
    for one in slow:
        if not 0 <= one.rank < workers:
            raise SpecError(f"{one} names no worker: there are {workers}, from 0 to {workers - 1}")
        if not one.start < one.stop:
            raise SpecError(f"stop must be after start, and stop={one.stop:g} is not after start={one.start:g}")
