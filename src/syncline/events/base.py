"""What happened, and who wants to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Kind = Literal["POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"]
"""The event types of MLPerf's mllog."""


@dataclass(frozen=True)
class Event:
    """One thing that happened at `seconds` of the recorder's clock."""

    key: str
    value: Any
    seconds: float
    kind: Kind = "POINT_IN_TIME"
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Sink(Protocol):
    """Takes events: the run log, a TensorBoard writer, a list in a test."""

    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...
