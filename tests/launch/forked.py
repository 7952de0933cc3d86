"""Python programs that start at once, as forks of the prefork process, which has imported torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

from syncline.launch.prefork_client import PREFORK_VARIABLE, find_prefork


class Forked:
    """A Python program in its own process. `target` holds the arguments of `launch/worker.py`."""

    def __init__(self, target: Sequence[str], variables: Mapping[str, str], streams: Sequence[int]) -> None:
        # The program is a launcher. It is forked even if its ranks must be new processes.
        prefork, why = find_prefork(target, {**variables, PREFORK_VARIABLE: "1"})
        assert prefork is not None, why
        pid = prefork.start(target, variables, (), streams)
        assert pid is not None, prefork.fault
        self._prefork = prefork
        self.pid = pid
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        if self._code is None:
            self._code = self._prefork.code(self.pid)
            if self._code is not None:
                self._prefork.release(self.pid)
        return self._code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while self.exitcode is None and time.monotonic() < until:
            time.sleep(0.005)
