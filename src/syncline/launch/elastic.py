"""Elastic jobs: how many ranks they need, and the log and the member numbers that they keep in the launcher's store."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.environment.base import JOB_FOLDER_VARIABLE
from syncline.errors import SpecError
from syncline.launch.programs import ELASTIC_VARIABLE, ELASTIC_VARIABLES

if TYPE_CHECKING:
    from syncline.control import ControlLog, LogEntry
    from syncline.transports.key_value_store import BoundedStore

MEMBERS_KEY = "syncline/elastic/members"
"""The number of members that have been numbered so far. It is also the next member number."""
STORE_PREFIX = "syncline"
"""The part of the store in which the launcher and the ranks keep the control log."""
LOST_AFTER_S = "10"
"""Seconds without a heartbeat after which a rank of an elastic job counts as lost, unless the user says otherwise."""
DEFAULT_RESTARTS = 3
"""The restarts of each rank with `--on-failure restart`."""


@dataclass(frozen=True)
class ElasticOptions:
    """How many ranks a job needs and takes, and how many times the launcher starts each of them again."""

    minimum: int
    maximum: int
    restarts: int = 0

    @classmethod
    def parse(cls, text: str, ranks: int, restarts: int = 0) -> ElasticOptions:
        """Parse MIN:MAX for a job that starts with `ranks` ranks.

        >>> ElasticOptions.parse("2:8", ranks=4, restarts=3)
        ElasticOptions(minimum=2, maximum=8, restarts=3)
        """
        found = re.fullmatch(r"(\d+):(\d+)", text)
        if found is None:
            raise SpecError(f"--elastic {text}: write MIN:MAX, as in --elastic 2:8")
        limits = cls(int(found[1]), int(found[2]), restarts)
        if not 1 <= limits.minimum <= ranks <= limits.maximum:
            raise SpecError(
                f"--elastic {text} with {ranks} worker{'s' * (ranks > 1)}: the minimum is at least 1 and at most "
                f"{ranks}, the maximum at least {ranks}"
            )
        if restarts < 0:
            raise SpecError(f"--restart {restarts}: a number of restarts cannot be negative")
        return limits

    def __str__(self) -> str:
        return f"{self.minimum}:{self.maximum}"


def elastic_variables(
    limits: ElasticOptions | None, environ: Mapping[str, str], folder: Path | None = None
) -> dict[str, str]:
    """The variables of all programs of a job. Those of an outer job, inside which it is started, are emptied.

    >>> elastic_variables(ElasticOptions(2, 8), {"SYNCLINE_JOIN": "1"})
    {'SYNCLINE_JOIN': '', 'SYNCLINE_ELASTIC': '2:8'}
    """
    inherited = {name: "" for name in ELASTIC_VARIABLES if name in environ}
    if limits is None:
        return inherited
    place = {} if folder is None else {JOB_FOLDER_VARIABLE: str(folder.absolute())}
    return inherited | {ELASTIC_VARIABLE: str(limits)} | place


def open_control_log(store: BoundedStore) -> ControlLog:
    """The control log of the job whose store this is."""
    from syncline.control import ControlLog

    return ControlLog(store.prefixed(STORE_PREFIX))


def bounded(store: Any, timeout_s: float) -> BoundedStore:
    """The store with a timeout for every call."""
    from syncline.runtime import RealRuntime
    from syncline.transports.key_value_store import BoundedStore

    return BoundedStore(store, RealRuntime(), timeout_s)


def draw_member(store: BoundedStore) -> int:
    """A member number that no other rank of the job has."""
    return store.add(MEMBERS_KEY, 1) - 1


def started_members(entries: Iterable[LogEntry]) -> dict[int, LogEntry]:
    """The members that have been started and have not ended, each with its entry, in the order of the log."""
    found: dict[int, LogEntry] = {}
    for entry in entries:
        if entry.kind == "started":
            found[int(entry.fields["member"])] = entry
        elif entry.kind == "ended":
            found.pop(int(entry.fields["member"]), None)
    return found
