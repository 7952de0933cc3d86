"""The output of workers: whole lines, each with its rank, as soon as they are written."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO

__all__ = ["OutputForwarder", "punch"]

PERIOD = 0.05
CHUNK = 1 << 20
"""Bytes of one stream's turn, and of the longest line: a longer one is cut."""
PIECE = 1 << 16
CUT = 16 << 20
"""Bytes of a file that have been read before their space is given back."""
UNREAD = 30.0
"""Seconds at the end without a byte taken, until we no longer believe in a reader."""


@dataclass(eq=False)
class _Stream:
    file: BinaryIO
    prefix: bytes | None
    sink: BinaryIO
    rest: bytes = b""
    """The beginning of a line whose end has not been written yet."""
    position: int = 0
    end: int = 0
    """How far to read before the others and the launcher's own words have their turn."""
    freed: int = 0
    ended: bool = False
    broken: bool = False


class OutputForwarder:
    """Follows files that workers write and passes them on, with the launcher's own words, in one thread.

    A slow terminal holds up this thread alone, not the supervisor.
    """

    def __init__(self, out: BinaryIO, err: BinaryIO) -> None:
        # Unbuffered: Python at its end waits for the lock of a buffer in which our thread is held up.
        self.out: BinaryIO = getattr(out, "raw", out)
        self.err: BinaryIO = getattr(err, "raw", err)
        self._streams: list[_Stream] = []
        self._said: deque[bytes] = deque()
        self._taken = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, path: str, sink: BinaryIO, prefix: str | None) -> None:
        """Pass on what is written to a file: by whole lines after `prefix`, or as it comes where that is None."""
        # Open for writing too: only so can its space be given back.
        file = open(path, "r+b", buffering=0)  # noqa: SIM115 - closed in _close()
        self._streams.append(_Stream(file, None if prefix is None else prefix.encode(), sink))
        self._begin()

    def say(self, line: str) -> None:
        """Write a line to standard error after all that has been written so far. Does not wait for the terminal."""
        self._said.append(f"{line}\n".encode())
        self._begin()

    def finish(self, prefix: str) -> None:
        """Its writer has ended: an unfinished line of it is passed on too. Does not wait for the terminal."""
        for stream in list(self._streams):
            if stream.prefix == prefix.encode():
                stream.ended = True

    def drain(self) -> None:
        """Pass on all that has been written and said so far."""
        with self._lock:
            said = len(self._said)  # asked first: what was written before it was said goes before it
            streams = [(stream, stream.ended) for stream in list(self._streams)]
            for stream, _ in streams:
                stream.end = os.fstat(stream.file.fileno()).st_size
            # In turns, and no further than to here: one that writes without end holds up nobody else.
            waiting = [stream for stream, _ in streams]
            while waiting:
                waiting = [stream for stream in waiting if self._pass_on(stream)]
            for stream, ended in streams:
                if ended:
                    self._close(stream)
            for _ in range(said):
                self._put(self.err, self._said[0])
                self._said.popleft()

    def close(self) -> None:
        """Pass on all that is left, as long as somebody takes it."""
        self._closed.set()
        taken, since = self._taken, time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(PERIOD)
            if self._taken != taken:
                taken, since = self._taken, time.monotonic()
            elif time.monotonic() - since > UNREAD:
                return self._give_up()
        return None

    def _give_up(self) -> None:
        """Say what is left to say: it may be standard output alone that nobody reads."""
        told = f"syncline: nobody has read the output for {UNREAD:.0f} s: the rest is dropped; keep it with > file\n"
        words = b"".join([*self._said, told.encode()])
        last = threading.Thread(target=self._put, args=(self.err, words), name="last words", daemon=True)
        last.start()
        last.join(1.0)

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="output", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(PERIOD):
            self.drain()
        self.drain()
        for stream in list(self._streams):
            self._close(stream)

    def _pass_on(self, stream: _Stream) -> bool:
        """One turn of a stream; whether it has more."""
        data = stream.file.read(min(CHUNK, stream.end - stream.position))
        stream.position += len(data)
        if stream.prefix is None:
            self._send(stream, data)
        else:
            *lines, rest = (stream.rest + data).split(b"\n")
            stream.rest = _last_state(rest)
            if len(stream.rest) > CHUNK:
                lines, stream.rest = [*lines, stream.rest], b""
            self._write(stream, lines)
        if stream.position - stream.freed > CUT:
            # The last of it stays: it may be asked for once more, as ssh's last words are.
            punch(stream.file.fileno(), stream.freed, stream.position - CHUNK)
            stream.freed = stream.position - CHUNK
        return bool(data) and stream.position < stream.end

    def _close(self, stream: _Stream) -> None:
        if stream.rest:
            self._write(stream, [stream.rest])
        stream.file.close()
        self._streams.remove(stream)

    def _write(self, stream: _Stream, lines: list[bytes]) -> None:
        prefix = stream.prefix or b""
        self._send(stream, b"".join(prefix + _last_state(line).rstrip(b"\r") + b"\n" for line in lines))

    def _send(self, stream: _Stream, data: bytes) -> None:
        # Broken: nobody reads any more (| head); the workers go on.
        stream.broken = stream.broken or not self._put(stream.sink, data)

    def _put(self, sink: BinaryIO, data: bytes) -> bool:
        """Write it all, in pieces, so that a slow reader is told from none; False where there is none."""
        left = memoryview(data)
        while left:
            try:
                count: int | None = sink.write(left[:PIECE])
                sink.flush()
            except (OSError, ValueError):
                return False
            if count is None:  # a terminal that does not block, and is full
                time.sleep(PERIOD)
            left = left[count or 0 :]
            self._taken += count or 0
        return True

    def __enter__(self) -> OutputForwarder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _last_state(line: bytes) -> bytes:
    """Of a line that is written over and over, as progress bars do, what a terminal would show.

    >>> _last_state(b"10%\\r20%"), _last_state(b"10%\\r20%\\r")
    (b'20%', b'20%\\r')
    """
    ends = line.rstrip(b"\r")
    return ends.rpartition(b"\r")[2] + (b"\r" if len(ends) < len(line) else b"")


KEEP_SIZE, PUNCH_HOLE = 1, 2


def punch(fd: int, start: int, end: int) -> bool:
    """Free the space of bytes `start` to `end`; the file keeps its length. False where the file system cannot."""
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is None:
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(fd, KEEP_SIZE | PUNCH_HOLE, start, end - start) == 0)
