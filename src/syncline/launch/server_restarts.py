"""The servers of a run whose shards have replicas: a server that fails is no failure of the run, and is started again.

```text
running ──fails──┬──after 1 s, 2 s, 4 s …, as a new server in its place──► running
                 └──was started again too often──► lost: its replicas continue alone
```
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from syncline.errors import WorldError
from syncline.launch.processes import Processes, ProcessExit
from syncline.launch.programs import JOIN_VARIABLE, Program
from syncline.launch.restarts import FIRST_DELAY_S, HEALTHY_AFTER_S, MAX_DELAY_S

CONTINUES = "its replicas continue"


@dataclass(eq=False)
class _Place:
    """The place of one of the first servers, and the program that is there now."""

    program: Program
    restarts: int = 0
    delay_s: float = 0.0
    """The delay before the latest restart."""
    due: float | None = None
    """When it is started again; None if it runs, or is lost."""
    started: float = 0.0


class ServerRestarts:
    """Starts failed servers again, each at most `restarts` times. Without programs, it knows no server."""

    def __init__(
        self,
        programs: Sequence[Program] = (),
        restarts: int = 0,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._restarts = restarts
        self._say = say
        self._clock = clock
        self._places = [_Place(program) for program in programs]
        self._numbered = len(self._places)
        """The number of servers that have been numbered so far. A new server has a number that no other has."""

    def __contains__(self, name: str) -> bool:
        """Whether a program is one of these servers."""
        return any(place.program.name == name for place in self._places)

    def record_failure(self, ended: ProcessExit) -> str:
        """A server has failed. Returns what happens next, for a message."""
        place, now = next(each for each in self._places if each.program.name == ended.name), self._clock()
        if place.restarts >= self._restarts:
            times = "once" if place.restarts == 1 else f"{place.restarts} times"
            return f"{CONTINUES}, and it was started again {times} already" if place.restarts else CONTINUES
        healthy = place.restarts == 0 or now - place.started >= HEALTHY_AFTER_S
        place.delay_s = FIRST_DELAY_S if healthy else min(2 * place.delay_s, MAX_DELAY_S)
        place.restarts += 1
        place.due = now + place.delay_s
        what = f"it is started again in {place.delay_s:.0f} s (restart {place.restarts} of {self._restarts})"
        return f"{CONTINUES}, and {what}"

    def start_due(self, processes: Processes, give_up: Callable[[], bool]) -> None:
        """Start the servers whose time has come again."""
        now = self._clock()
        for place in [each for each in self._places if each.due is not None and now >= each.due]:
            program = new_server_program(place.program, self._numbered)
            self._numbered += 1
            place.program, place.due, place.started = program, None, now
            try:
                if not processes.add(program, give_up):
                    place.due = now
            except WorldError as error:
                self._say(f"{error}; {self.record_failure(ProcessExit(name=program.name, rank=None, code=1))}")


def new_server_program(program: Program, number: int) -> Program:
    """The program of a new server in the place of a failed one. It asks the others for the state of its shards.

    >>> failed = Program(name="server 0", target=(), variables={"SYNCLINE_SERVER": "0"}, prefix="[server 0] ")
    >>> found = new_server_program(failed, 3)
    >>> found.name, found.variables["SYNCLINE_SERVER"], found.variables["SYNCLINE_JOIN"]
    ('server 3', '0', '1')
    """
    name = f"server {number}"
    variables = {**program.variables, JOIN_VARIABLE: "1", "SYNCLINE_PROGRAM": name}
    return replace(program, name=name, prefix=f"[{name}] ", variables=variables)
