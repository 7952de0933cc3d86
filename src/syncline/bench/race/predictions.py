"""The content of `predictions.json`: the step of each entry of a race, predicted before its first run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from syncline.errors import ProtocolError

__all__ = ["EntryPrediction", "RacePredictions"]

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class EntryPrediction:
    """The predicted step of an entry on a number of workers, or why there is none."""

    entry: str
    workers: int
    step_s: float | None = None
    interval_s: tuple[float, float] | None = None
    """Seconds between which 80 % of such steps lie."""
    parts_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by kind, as in `syncline.planner.prediction.PARTS`. Empty for steps of the simulator."""
    made_by: str = "planner"
    why: str = ""
    """Why it cannot be predicted."""


@dataclass(frozen=True, kw_only=True)
class RacePredictions:
    """The predictions of all entries, and from what they were made."""

    entries: tuple[EntryPrediction, ...]
    inputs: Mapping[str, Any]
    batch_fixed_share: float | None = None
    """The share of the computation that does not depend on the batch, by the profile. None: there was no profile."""

    def find(self, entry: str, workers: int) -> EntryPrediction | None:
        """The prediction of an entry on this number of workers."""
        return next((each for each in self.entries if (each.entry, each.workers) == (entry, workers)), None)

    def as_json(self) -> str:
        """The content of `predictions.json`."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, where: str = "predictions.json") -> RacePredictions:
        """Read what `as_json` wrote; errors name `where`."""
        try:
            values = json.loads(text)
            if values["format"] != FORMAT:
                raise ProtocolError(
                    f"{where} has format {values['format']!r}, and this version of syncline reads {FORMAT}"
                )
            share = values["batch_fixed_share"]
            return RacePredictions(
                entries=tuple(map(_read_entry, values["entries"])),
                inputs=dict(values["inputs"]),
                batch_fixed_share=None if share is None else float(share),
            )
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"{where} is not the predictions of a race: {error!r}") from None


def _read_entry(values: Mapping[str, Any]) -> EntryPrediction:
    interval = values["interval_s"]
    seconds = values["step_s"]
    return EntryPrediction(
        entry=str(values["entry"]),
        workers=int(values["workers"]),
        step_s=None if seconds is None else float(seconds),
        interval_s=None if interval is None else (float(interval[0]), float(interval[1])),
        parts_s={str(name): float(part) for name, part in values["parts_s"].items()},
        made_by=str(values["made_by"]),
        why=str(values["why"]),
    )
