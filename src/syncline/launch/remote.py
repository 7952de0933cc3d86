"""Programs on other hosts: an agent on each starts them, and reports through the store."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from syncline.launch.failures import Ended, Report
from syncline.launch.heartbeats import State
from syncline.launch.hosts import Host
from syncline.launch.output import Output
from syncline.launch.programs import Program
from syncline.launch.ssh import Link
from syncline.launch.store import Board

__all__ = ["RemoteCrew", "Share"]


@dataclass(eq=False)
class Share:
    """What one host runs."""

    number: int
    host: Host
    programs: Sequence[Program]
    left: dict[str, Program] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)


class RemoteCrew:
    """Programs on other hosts."""

    def __init__(self, shares: Sequence[Share], address: str, port: int, board: Board, output: Output) -> None:
        self._links = [(share, Link(share.host)) for share in shares]
        self._address = address
        self._port = port
        self._board = board
        self._output = output
        self._raised: dict[str, Ended] = {}

    def start(self, give_up: Callable[[], bool]) -> None:
        for share, link in self._links:
            share.left = {program.name: program for program in share.programs}
            link.start(
                {
                    "host": share.number,
                    "address": self._address,
                    "port": self._port,
                    "programs": [program.to_json() for program in share.programs],
                }
            )

    def poll(self) -> list[Ended]:
        # ssh first, the store after it: what an agent has to say it says before it ends.
        codes = [link.code() for _, link in self._links]
        found = [ended for ended in self._board.read_ended() if self._strike_off(ended)]
        for (share, link), code in zip(self._links, codes, strict=True):
            if not link.ready and self._board.is_ready(share.number):
                link.agent_is_ready(self._output)
            if not link.ready:
                link.check_start(code, f"{self._address}:{self._port}")
            elif code is not None and share.left:
                summary = f"host {share.host.name} is lost: ssh ended with exit code {code}{link.last_words()}"
                found += [
                    Ended(name=one.name, rank=one.rank, code=code or 1, report=Report(summary=summary))
                    for one in share.left.values()
                ]
                share.left.clear()
        return found

    def _strike_off(self, ended: Ended) -> bool:
        return any(share.left.pop(ended.name, None) is not None for share, _ in self._links)

    def raised(self) -> list[Ended]:
        self._raised |= {one.name: one for one in self._board.read_raised()}
        return [self._raised[name] for name in self.running() if name in self._raised]

    def running(self) -> list[str]:
        return [name for share, _ in self._links for name in share.left]

    def signal(self, number: int, ranks_only: bool = False) -> None:
        for share, link in self._links:
            if share.left and number not in share.sent:  # a line more each time would fill a pipe that nobody reads
                share.sent.add(number)
                link.tell({"signal": int(number), **({"ranks_only": True} if ranks_only else {})})

    def states(self) -> dict[str, State]:
        return {}

    def kill(self, name: str) -> None:
        for share, link in self._links:
            if name in share.left:
                link.tell({"signal": int(signal.SIGKILL), "name": name})

    def close(self) -> None:
        for _, link in self._links:
            link.hang_up()  # all of them first, so that they end together
        for _, link in self._links:
            link.close()
