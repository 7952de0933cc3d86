"""How many numbers somebody has to find before a way of agreeing works: what its speed costs in patience."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from syncline.bench.answer_cache import cache_answers
from syncline.bench.race.plan import Entry
from syncline.errors import SynclineError
from syncline.specs import Spec, parse

__all__ = ["Knobs", "count_knobs"]

TRAINING = ("learning rate", "batch", "momentum")
"""What every entry has."""
SCHEDULE = {"scaling": "none", "warmup": 0.0, "decay": "none"}
"""Count only where they are used."""


@dataclass(frozen=True)
class Knobs:
    """Hyper-parameters of an entry. None where its package is not installed here and nobody can be asked."""

    strategy: int | None
    codec: int | None
    training: int
    chosen: int
    """Arguments that its specs write down, and those of `TRAINING` and `SCHEDULE` that are not the workload's own."""

    @property
    def total(self) -> int | None:
        """All that a user may set."""
        if self.strategy is None or self.codec is None:
            return None
        return self.strategy + self.codec + self.training


def count_knobs(entry: Entry) -> Knobs:
    """Arguments of the strategy's and the codecs' constructors, and the training's own.

    >>> found = count_knobs(Entry(name="a", codec="topk(0.01)|quantize(4)", learning_rate=0.1))
    >>> found.total == found.strategy + found.codec + 3, found.chosen
    (True, 3)
    """
    used = [name for name, default in SCHEDULE.items() if getattr(entry, name) != default]
    chosen = len(used) + (entry.rate_from != "workload" or entry.learning_rate is not None)
    chosen += entry.momentum is not None
    links: list[Spec] = []
    with suppress(SynclineError):
        links = [*parse(entry.strategy), *(parse(entry.codec) if entry.codec else ())]
    return Knobs(
        strategy=_strategy(entry.strategy),
        codec=_codec(entry.codec),
        training=len(TRAINING) + len(used),
        chosen=chosen + sum(len(link.args) + len(link.kwargs) for link in links),
    )


def _strategy(spec: str) -> int | None:
    try:
        return _strategy_arguments(spec)
    except (SynclineError, ImportError):  # a report may be read where the baseline's package is not installed
        return None


def _codec(spec: str | None) -> int | None:
    try:
        links = parse(spec) if spec else ()
        return sum(_codec_arguments(str(link)) for link in links)
    except SynclineError:
        return None


@cache_answers
def _strategy_arguments(spec: str) -> int:
    from syncline.bench.race.field import build_entrant

    return _arguments(build_entrant(spec))


@cache_answers
def _codec_arguments(spec: str) -> int:
    from syncline.codecs import build_codec

    codec = build_codec(spec)
    return 0 if codec is None else _arguments(codec)


def _arguments(thing: Any) -> int:
    return len(inspect.signature(type(thing)).parameters)
