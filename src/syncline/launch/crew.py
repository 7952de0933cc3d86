"""The contract of those who start programs somewhere and watch them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from syncline.launch.failures import Ended
from syncline.launch.heartbeats import State

__all__ = ["Crew", "Several"]


class Crew(Protocol):
    """Programs on this machine or elsewhere, watched without a policy: that is the supervisor's."""

    def start(self, give_up: Callable[[], bool]) -> None:
        """Start them all, but no more as soon as `give_up` says so."""

    def poll(self) -> list[Ended]:
        """Those that have ended since the last call. Does not wait."""

    def raised(self) -> list[Ended]:
        """Those that have left a report of an exception but have not ended yet."""

    def running(self) -> list[str]:
        """The names of those that have not ended."""

    def states(self) -> dict[str, State]:
        """The states, by name, of programs that a signal has stopped or that compute, as far as they are known here."""

    def signal(self, number: int, ranks_only: bool = False) -> None:
        """Send a signal to the running programs, or only to the ranks, and to all processes that they have started."""

    def kill(self, name: str) -> None:
        """Kill one program and all processes that it has started. Does not wait."""

    def close(self) -> None:
        """End what is left, at once; nothing remains."""


class Several:
    """Crews on several machines as one."""

    def __init__(self, crews: Sequence[Crew]) -> None:
        self.crews = crews

    def start(self, give_up: Callable[[], bool]) -> None:
        for crew in self.crews:
            crew.start(give_up)

    def poll(self) -> list[Ended]:
        return [ended for crew in self.crews for ended in crew.poll()]

    def raised(self) -> list[Ended]:
        return [ended for crew in self.crews for ended in crew.raised()]

    def running(self) -> list[str]:
        return [name for crew in self.crews for name in crew.running()]

    def states(self) -> dict[str, State]:
        return {name: state for crew in self.crews for name, state in crew.states().items()}

    def signal(self, number: int, ranks_only: bool = False) -> None:
        for crew in self.crews:
            crew.signal(number, ranks_only)

    def kill(self, name: str) -> None:
        for crew in self.crews:
            crew.kill(name)

    def close(self) -> None:
        for crew in self.crews:
            crew.close()
