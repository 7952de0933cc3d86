"""Counters of a run: bytes sent, seconds of communication and encoding, staleness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

from syncline.events import Recorder
from syncline.runtime import Lock
from syncline.transports.base import format_bytes

__all__ = ["CodecPhase", "Stats", "as_table"]

CodecPhase = Literal["beside", "before", "within"]

WATCH_FIRST_ROUNDS = 10
WATCH_EVERY_ROUNDS = 10


@dataclass(repr=False)
class Stats:
    """Counts of one run on this rank; `run.stats`.

    Communication counts while at least one reduction is under way. Exposed communication is the time the rank waited
    for it. The end of an engine's own reduction is observed in the first ten steps and every tenth step after that,
    because observing costs as much as a small reduction. The total extrapolates from the observed steps. With a sink
    such as a trace, every step is observed.
    """

    events: Recorder
    lock: Lock
    alone: bool = False
    """True in a world of one rank: nothing is sent."""
    steps: int = 0
    bytes_logical: int = 0
    bytes_wire: int = 0
    exposed_seconds: float = 0.0
    codec_seconds: float = 0.0
    """Seconds of encoding and decoding, hidden or not."""
    codec_before_seconds: float = 0.0
    """Seconds of encoding that delayed backward, because there was no spare processor."""
    codec_within_seconds: float = 0.0
    """Seconds of decoding that are part of `exposed_seconds`."""
    staleness: int = 0
    """Steps between a gradient and its use, in the latest step."""
    staleness_counts: dict[int, int] = field(default_factory=dict)
    """How often each staleness occurred, where reads differ."""
    consensus: float | None = None
    """The distance of the workers' weights from their last mean: √(Σ‖wᵢ − w̄‖² / p). None: equal."""
    watching: bool = True
    """True if the ends of this step's reductions are observed."""
    _rounds: int = 0
    _watched: int = 0
    _seconds: float = 0.0
    _until: float = float("-inf")

    def next_round(self) -> None:
        """Called before the first reduction of a step."""
        self.watching = (
            self._rounds < WATCH_FIRST_ROUNDS or self._rounds % WATCH_EVERY_ROUNDS == 0 or bool(self.events.sinks)
        )
        self._rounds += 1
        self._watched += self.watching

    @property
    def comm_seconds(self) -> float:
        """Seconds during which a reduction was under way."""
        return self._seconds * self._rounds / self._watched if self._watched else self._seconds

    def sent(self, logical: int, wire: int) -> None:
        """Count the bytes of a reduction. Several tasks may call this at the same time."""
        wire = 0 if self.alone else wire
        with self.lock:
            self.bytes_logical += logical
            self.bytes_wire += wire
        self.events.count("sl_comm_bytes_logical", logical)
        self.events.count("sl_comm_bytes_wire", wire)

    def reduced(self, start: float, stop: float, what: str) -> None:
        """Count a reduction that has ended. An engine's thread may call this."""
        with self.lock:
            begin = max(start, self._until)
            self._until = max(self._until, stop)
            self._seconds += max(0.0, stop - begin)
        self.events.interval("sl_comm_seconds", start, stop, lane="communication", what=what)

    def coded(self, start: float, stop: float, what: str, phase: CodecPhase = "beside") -> None:
        """Count the work of a codec: beside backward, before backward continues, or within a wait."""
        with self.lock:
            self.codec_seconds += stop - start
            if phase == "before":
                self.codec_before_seconds += stop - start
            elif phase == "within":
                self.codec_within_seconds += stop - start
        self.events.interval("sl_codec_seconds", start, stop, lane="codec", what=what)

    def waited(self, start: float, stop: float, what: str = "waits for gradients") -> None:
        """Count the time that this rank waited for reductions, or for other stages of a pipeline."""
        self.exposed_seconds += stop - start
        self.events.interval("sl_comm_exposed_seconds", start, stop, lane="compute", what=what)

    def forwarded(self, count: int, wire: int | None = None) -> None:
        """Count the bytes of activations and their gradients that this rank has sent to others, such as the stages of
        a pipeline. `wire`: if a codec has encoded them."""
        wire = count if wire is None else wire
        with self.lock:
            self.bytes_logical += count
            self.bytes_wire += wire
        self.events.count("sl_comm_bytes_logical", count)
        self.events.count("sl_comm_bytes_wire", wire)

    def read_at(self, staleness: int) -> None:
        """Count a read of weights that lack `staleness` steps of the other workers.

        >>> from contextlib import nullcontext
        >>> stats = Stats(Recorder(lambda: 0.0), nullcontext())
        >>> for staleness in (0, 2, 2):
        ...     stats.read_at(staleness)
        >>> stats.staleness_counts, stats.staleness_mean
        ({0: 1, 2: 2}, 1.3333333333333333)
        """
        with self.lock:
            self.staleness = staleness
            self.staleness_counts[staleness] = self.staleness_counts.get(staleness, 0) + 1

    @property
    def staleness_mean(self) -> float:
        """The mean over all reads; the latest step's where reads are not counted."""
        reads = sum(self.staleness_counts.values())
        return sum(key * count for key, count in self.staleness_counts.items()) / reads if reads else self.staleness

    @property
    def staleness_histogram(self) -> dict[str, int]:
        """The counts with JSON keys, from the freshest reads to the stalest."""
        with self.lock:
            return {str(key): self.staleness_counts[key] for key in sorted(self.staleness_counts)}

    def as_dict(self) -> dict[str, Any]:
        """The numbers by their keys in the run log, with the histogram of staleness if there is one."""
        histogram = self.staleness_histogram
        return {
            **({"sl_staleness_histogram": histogram} if histogram else {}),
            "steps": self.steps,
            "sl_comm_bytes_logical": self.bytes_logical,
            "sl_comm_bytes_wire": self.bytes_wire,
            "sl_comm_seconds": self.comm_seconds,
            "sl_comm_exposed_seconds": self.exposed_seconds,
            "sl_codec_seconds": self.codec_seconds,
            "sl_staleness": self.staleness,
        }

    def describe(self) -> dict[str, str]:
        """The numbers as text. Those that are zero in most runs are left out if they are zero."""
        texts = {
            "steps": f"{self.steps} step{'s' * (self.steps != 1)}",
            "bytes": f"{format_bytes(self.bytes_wire)} of {format_bytes(self.bytes_logical)} sent",
            "communication": f"{self.comm_seconds:.3g} s of communication, {self.exposed_seconds:.3g} s exposed",
        }
        if self.codec_seconds:
            texts["codec"] = f"{self.codec_seconds:.3g} s of encoding and decoding"
        if self.staleness or self.staleness_counts:
            texts["staleness"] = f"staleness {self.staleness_mean:.3g} on average"
        if self.consensus is not None:
            texts["consensus"] = f"workers {self.consensus:.3g} from their mean"
        return texts

    def __repr__(self) -> str:
        return f"Stats({', '.join(self.describe().values())})"

    def _repr_html_(self) -> str:
        return as_table(self.describe())


def as_table(rows: Mapping[str, str]) -> str:
    """An HTML table of names and values, for notebooks.

    >>> as_table({"codec": "topk(0.01)"})
    '<table><tr><th>codec</th><td>topk(0.01)</td></tr></table>'
    """
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{''.join(cells)}</table>"
