"""Python programs that are forked from a process which has imported torch already: they start at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

from syncline.launch.prefork import SWITCH, find_prefork


class Forked:
    """A Python program in a process of its own: `target` as `launch/worker.py` takes it, and its standard streams."""

    def __init__(self, target: Sequence[str], variables: Mapping[str, str], streams: Sequence[int]) -> None:
        # The launcher is forked even where its ranks are not to be.
        prefork, why = find_prefork(target, {**variables, SWITCH: "1"})
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
