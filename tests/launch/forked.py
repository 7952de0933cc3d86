"""Python programs that are forked from a process which has imported torch already: they start at once."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Mapping, Sequence

from syncline.launch.prefork import Prefork

_prefork: list[Prefork] = []


class Forked:
    """A Python program in a process of its own: `target` as `launch/worker.py` takes it, and its standard streams."""

    def __init__(self, target: Sequence[str], variables: Mapping[str, str], streams: Sequence[int]) -> None:
        if not _prefork:
            _prefork.append(Prefork.launch({**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}))
            atexit.register(_prefork[0].close)
        assert _prefork[0].wait_until_ready(), _prefork[0].fault
        pid = _prefork[0].start(target, variables, (), streams)
        assert pid is not None, _prefork[0].fault
        self.pid = pid
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        if self._code is None:
            self._code = _prefork[0].code(self.pid)
            if self._code is not None:
                _prefork[0].release(self.pid)
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
